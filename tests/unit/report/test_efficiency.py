"""How well a run used its devices, as every form of the report shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.damage import edit_json
from virnuc_core.encoder_names import EncoderName
from virnuc_core.profiles import load_profile
from virnuc_core.report.benchmark import benchmark_json
from virnuc_core.report.build import build_report
from virnuc_core.report.model import EncoderMetrics, Report
from virnuc_core.report.render import further_text, render
from virnuc_core.report.views.speed import efficiency_facts

from .validate_directory import Recipe, build

pytestmark = pytest.mark.usefixtures("telemetry_once")

GPUS = ("GPU-00000000-aaaa", "GPU-10000000-aaaa")
FLOPS_PER_TOKEN = 5.6e9  # of ESM-2
RTX_4090_FLOPS = 165.2e12  # fp16, by its data sheet


def encoder_metrics(report: Report, name: EncoderName) -> EncoderMetrics:
    assert report.run is not None
    assert report.run.telemetry is not None
    metrics = report.run.telemetry.encoder(name)
    assert metrics is not None
    return metrics


def add_ceilings(out: Path, tokens_per_s: dict[str, float]) -> None:
    """Write the ceiling of ESM-2 on each device into the summary of the judged run."""
    flops = {
        "esm2_per_token": FLOPS_PER_TOKEN,
        "dnabert_s_per_token": 1.7e8,
        "esm2_ceiling_tokens_s": tokens_per_s,
        "dnabert_s_ceiling_tokens_s": {},
    }
    edit_json(out / "devices-2" / "summary.json", lambda body: body.update(flops=flops))


def test_mfu_is_the_share_of_the_measured_ceiling_and_of_the_datasheet(tmp_path: Path) -> None:
    profile = build(tmp_path)
    add_ceilings(tmp_path, {GPUS[0]: 50_000.0, GPUS[1]: 60_000.0})
    esm2 = encoder_metrics(build_report(tmp_path, profile), "esm2")
    assert esm2.device_s is not None
    assert esm2.ceiling_tokens_per_s == pytest.approx(55_000.0), "both devices worked as long"
    assert esm2.mfu_of_ceiling == pytest.approx(esm2.tokens / (esm2.device_s * 55_000.0))
    flops_per_s = esm2.tokens * FLOPS_PER_TOKEN / esm2.device_s
    assert esm2.mfu_of_datasheet == pytest.approx(flops_per_s / RTX_4090_FLOPS)


def test_an_encoder_without_a_ceiling_has_the_mfu_of_the_datasheet_alone(tmp_path: Path) -> None:
    profile = build(tmp_path)
    add_ceilings(tmp_path, dict.fromkeys(GPUS, 50_000.0))
    dnabert_s = encoder_metrics(build_report(tmp_path, profile), "dnabert_s")
    assert dnabert_s.mfu_of_ceiling is None
    assert dnabert_s.mfu_of_datasheet is not None


def test_a_device_without_a_ceiling_leaves_mfu_unknown(tmp_path: Path) -> None:
    profile = build(tmp_path)
    add_ceilings(tmp_path, {GPUS[0]: 50_000.0})
    assert encoder_metrics(build_report(tmp_path, profile), "esm2").mfu_of_ceiling is None


def test_every_form_shows_mfu(tmp_path: Path) -> None:
    profile = build(tmp_path)
    add_ceilings(tmp_path, dict.fromkeys(GPUS, 50_000.0))
    report = build_report(tmp_path, profile)
    esm2 = encoder_metrics(report, "esm2")
    assert esm2.mfu_of_ceiling is not None
    forms = render(report)
    for name in ("report.txt", "report.md", "report.html"):
        assert f"measured ceiling {100 * esm2.mfu_of_ceiling:.1f}%, datasheet" in forms[name], name
        assert "measured ceiling not run, datasheet" in forms[name], name
    mfu = json.loads(benchmark_json(report))["results"]["efficiency"]["mfu"]
    assert mfu["esm2"]["of_ceiling"] == esm2.mfu_of_ceiling
    assert mfu["esm2"]["device_tokens_per_sec"] == esm2.device_tokens_per_s
    assert mfu["dnabert_s"]["of_ceiling"] is None


def test_more_than_the_ceiling_is_a_warning(tmp_path: Path) -> None:
    profile = build(tmp_path)
    add_ceilings(tmp_path, dict.fromkeys(GPUS, 100.0))
    warnings = build_report(tmp_path, profile).warnings
    assert any("the ceiling is too low" in warning for warning in warnings)


def test_a_run_on_cores_is_counted_in_core_hours(tmp_path: Path) -> None:
    profile = build(tmp_path, Recipe(gpu=None))
    assert "Core-hours per million reads" in efficiency_facts(build_report(tmp_path, profile))


def test_a_profile_without_a_price_has_no_cost(tmp_path: Path) -> None:
    profile = build(tmp_path)
    facts = efficiency_facts(build_report(tmp_path, profile))
    assert facts["Price per million reads"] == "not run (the profile gives no price)"
    priced_profile = profile.model_copy(update={"price_per_device_hour": 2.0})
    report = build_report(tmp_path, priced_profile)
    assert report.run is not None
    price = efficiency_facts(report)["Price per million reads"]
    assert price == f"{report.run.price_per_million:.2f}"


def test_what_was_not_measured_is_not_run(tmp_path: Path) -> None:
    text = further_text(build_report(tmp_path, load_profile("phase10-1m")))
    assert text.count("not run") >= 7
    assert "0.0" not in text


PRODUCT = {
    "encoder": "esm2",
    "device": GPUS[0],
    "product": "cuBLAS, int8",
    "role": "library",
    "tokens_per_s": 50_000.0,
    "joules_per_million_tokens": 6_190.0,
    "power_limited": 0.98,
}


def test_the_products_that_were_measured_are_named(tmp_path: Path) -> None:
    profile = build(tmp_path)
    unknown = {name: PRODUCT[name] for name in ("encoder", "device")}
    unknown |= {"product": "fp8", "role": "reference"}
    flops = {"esm2_ceiling_tokens_s": {}, "products": [PRODUCT, unknown]}
    edit_json(tmp_path / "devices-2" / "summary.json", lambda body: body.update(flops=flops))
    report = build_report(tmp_path, profile)
    page = render(report)["report.md"]
    assert "| cuBLAS, int8 | library | 50,000 | 6,190 | 98 |" in page
    assert "| fp8 | reference, another number format | not measured" in page
    products = json.loads(benchmark_json(report))["results"]["efficiency"]["products"]
    assert [product["product"] for product in products] == ["cuBLAS, int8", "fp8"]


def test_power_that_was_not_measured_is_said_to_be_so(tmp_path: Path) -> None:
    report = build_report(tmp_path, build(tmp_path))
    page = render(report)["report.md"]
    assert f"while embedding: {GPUS[0]} not measured, {GPUS[1]} not measured" in page
    # the energy comes from the samples of the power then
    assert efficiency_facts(report)["J per million ESM-2 tokens"] != "not measured"
    no_gpu = build_report(tmp_path / "cpu", build(tmp_path / "cpu", Recipe(gpu=None)))
    assert efficiency_facts(no_gpu)["J per million ESM-2 tokens"] == "not measured"
    assert "power limit" not in render(no_gpu)["report.txt"]


def test_a_run_with_gelu_by_tanh_has_a_precision_of_its_own(tmp_path: Path) -> None:
    profile = build(tmp_path)
    record = tmp_path / "devices-2" / "run.json"
    before = build_report(tmp_path, profile).run
    edit_json(record, lambda body: body["resolved"].update(gelu="tanh"))
    after = build_report(tmp_path, profile).run
    assert before is not None
    assert after is not None
    assert after.precision == f"{before.precision}, tanh GELU"
