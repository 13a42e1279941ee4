"""The files of a sweep: every trial and verdict in JSON, and settings that a flow reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from virnuc_core.config import Devices, EngineSpec
from virnuc_core.profiles import load_profile
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.statistics import batch_metrics, record_table
from virnuc_core.telemetry.tables import BatchRecord
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.sweep_files import settings_toml, tune_file, tune_json
from virnuc_core.tools.tune import Candidate, Recommendation, Sweep, Trial

BASE = EngineSpec(token_budget=1024)


def trial(tokens_per_s: float, score_difference: float = 0.0) -> Trial:
    counts = dict(batch_metrics(record_table(BatchRecord, [])))
    return Trial(
        **counts | {"tokens_per_s": tokens_per_s},
        committed_s=1.0,
        wall_s=2.0,
        utilisation=None,
        shards=1,
        restarts=0,
        reduced=(),
        score_difference=score_difference,
        labels_changed=0,
    )


@pytest.fixture
def candidates() -> list[Candidate]:
    """The base, one that is faster, and one that cannot run."""
    faster = BASE.model_copy(update={"token_budget": 4096})
    refused_settings = BASE.model_copy(update={"precision": "int8"})
    return [
        Candidate(0, {}, BASE, [trial(100.0)]),
        Candidate(1, {"token_budget": 4096}, faster, [trial(190.0, 0.001), trial(210.0)]),
        Candidate(2, {"precision": "int8"}, refused_settings, refusal_reason="it needs a GPU"),
    ]


@pytest.fixture
def recommendation(candidates: list[Candidate]) -> Recommendation:
    return Recommendation(candidates[1], 1.0, "token_budget=4096: 100 % faster\nthan the base")


def test_tune_json_has_every_trial_and_verdict(
    candidates: list[Candidate], recommendation: Recommendation
) -> None:
    bench = Bench(Path("orfs.h5"), Path("models"), Devices.parse("cpu:1"))
    sweep = Sweep(Path("out"), bench, BASE, load_profile("ci-smoke"), 2, "halving")
    devices = [Device(id="cpu-core-0", kind="cpu", name="Some Processor", core=0)]
    content = tune_file(sweep, candidates, recommendation, devices=devices, cores=4)
    body = json.loads(tune_json(content))
    base, faster, refused_candidate = body["candidates"]
    assert (base["verdict"], base["median_tokens_per_s"], base["spread"]) == ("base", 100.0, None)
    assert (faster["verdict"], faster["tokens_per_s"]) == ("usable", [190.0, 210.0])
    assert (faster["median_tokens_per_s"], faster["spread"]) == (200.0, pytest.approx(0.1))
    assert [trial["score_difference"] for trial in faster["trials"]] == [0.001, 0.0]
    assert (refused_candidate["verdict"], refused_candidate["reason"]) == (
        "cannot run",
        "it needs a GPU",
    )
    assert (refused_candidate["median_tokens_per_s"], refused_candidate["trials"]) == (None, [])
    assert body["recommended"]["number"] == 1
    assert body["recommended"]["engine"]["token_budget"] == 4096
    assert body["base"]["token_budget"] == 1024
    assert body["devices"][0]["name"] == "Some Processor"


def test_tune_json_has_the_names_of_virnucpros_parameter_sweep(
    candidates: list[Candidate], recommendation: Recommendation
) -> None:
    """Its rows have config, elapsed_sec, throughput_tokens_per_sec and gpu_utilization."""
    bench = Bench(Path("orfs.h5"), Path("models"), Devices.parse("cpu:1"))
    sweep = Sweep(Path("out"), bench, BASE, load_profile("ci-smoke"), 2, "grid")
    content = tune_file(sweep, candidates, recommendation, devices=[], cores=4)
    base, faster, refused_candidate = json.loads(tune_json(content))["candidates"]
    assert base["config"] == {"token_budget": 1024, "precision": "auto"}
    assert faster["config"] == {"token_budget": 4096, "precision": "auto"}
    assert faster["throughput_tokens_per_sec"] == faster["median_tokens_per_s"] == 200.0
    assert faster["elapsed_sec"] == faster["trials"][-1]["span_s"]
    assert faster["gpu_utilization"] is None
    assert refused_candidate["throughput_tokens_per_sec"] is None
    assert refused_candidate["elapsed_sec"] is None
    two_loaders = EngineSpec(num_workers=2, prefetch_factor=4)
    assert Candidate(3, {}, two_loaders).queue_depth == 8


def test_settings_toml_holds_the_recommended_settings_and_why(
    recommendation: Recommendation,
) -> None:
    text = settings_toml(recommendation, ["precision", "token_budget"])
    assert text.startswith("# token_budget=4096: 100 % faster than the base; see tune.json\n")
    assert tomllib.loads(text) == {"precision": "auto", "token_budget": 4096}
