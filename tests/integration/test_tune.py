"""The sweep on a core with tiny models, and the file of settings it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import State

from virnuc.flows.cli import main
from virnuc.flows.prefect_flows.overhead import overhead
from virnuc.flows.prefect_flows.predict import predict
from virnuc.flows.prefect_flows.tune import tune
from virnuc.flows.settings.shared import ComputeSettings, RunSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.tasks.artifacts import host_key
from virnuc_core.config import EngineSpec, read_settings
from virnuc_core.errors import ConfigError
from virnuc_core.report.verify import verify_report
from virnuc_core.tools.tune import ScoreChange

from ..bare import validate

pytestmark = pytest.mark.usefixtures("forked_workers")
TOLERANCE = 0.01


def test_lists_are_given_as_words_and_an_empty_one_is_not_swept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed_settings: list[RunSettings] = []

    def start(_flow: str, _model: type[RunSettings], settings: RunSettings) -> None:
        parsed_settings.append(settings)
        raise ConfigError("far enough")

    monkeypatch.setattr("virnuc.flows.cli.run_from_terminal.run_from_terminal", start)
    words = [
        "tune",
        "a",
        "-o",
        "x",
        "--models",
        "m",
        "--attentions",
        "reference",
        "fused",
        "--loader-workers",
    ]
    assert main(words) == 2
    settings = parsed_settings[0]
    assert isinstance(settings, TuneSettings)
    assert (settings.loader_workers, settings.attentions) == ((), ("reference", "fused"))
    assert set(settings.swept()) == {"token_budget", "attention", "prefetch_factor"}
    assert main([*words, "--grid", "full"]) == 2
    assert [len(values) for values in parsed_settings[1].swept().values()] == [4, 3, 3]  # type: ignore[attr-defined]
    assert main([*words, "0", "--attentions=fast"]) == 2
    assert 'Invalid value "fast"' in capsys.readouterr().err


def test_a_file_of_settings_stands_between_the_profile_and_what_is_given(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('# by hand\ntoken_budget = 2048\nattention = "reference"\n')
    (profile := tmp_path / "profile.toml").write_text(
        'name = "p"\ntitle = "p"\n[engine]\ntoken_budget = 4096\nnum_workers = 3\n'
    )
    common = {"reads": ("r.fa",), "out": tmp_path, "models": tmp_path}
    parsed_settings = TuneSettings(**common, profile=str(profile), settings=path, attention="auto")
    expected = EngineSpec(token_budget=2048, attention="auto", num_workers=3)
    assert parsed_settings.engine() == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token_bugdet = 3", "token_bugdet is no engine setting"),
        ("token_budget =", "not valid TOML"),
        (None, "cannot be"),
    ],
)
def test_a_file_that_is_no_settings_is_one_line(
    text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_settings(path)


def test_a_value_out_of_range_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("token_budget = 3\n")
    with pytest.raises(
        ConfigError, match="token_budget: input should be greater than or equal to 64"
    ):
        ComputeSettings(settings=path).engine()


def ask(out: Path, few_reads: Path, models: Path, **more: Any) -> State[Any]:
    arguments: dict[str, Any] = {
        "reads": [str(few_reads)],
        "out": out,
        "models": models,
        "devices": "cpu:1",
        "profile": "ci-smoke",
        "token_budgets": [512, 2048],
        "loader_workers": [],
        "prefetch_factors": [],
        "repeats": 1,
    }
    return tune(**{**arguments, **more}, return_state=True)


@pytest.mark.usefixtures("prefect_backend")
def test_a_sweep_measures_says_what_it_found_and_is_not_repeated(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir = tmp_path / "sweep"
    state = ask(out_dir, few_reads, models, token_budgets=[512], precisions=["fp32", "fp16"])
    assert state.is_completed(), state.message
    body = json.loads((out_dir / "tune.json").read_text())
    assert body["schema_version"] == 1
    candidates = {json.dumps(c["changes"], sort_keys=True): c for c in body["candidates"]}
    assert len(candidates) == 3  # the base, and the budget in each precision
    base = candidates["{}"]
    assert (base["verdict"], len(base["tokens_per_s"])) == ("base", 1)
    assert min(base["tokens_per_s"]) > 1000
    small = candidates['{"token_budget": 512}']
    assert small["verdict"] == "usable"
    assert all(trial["score_difference"] <= TOLERANCE for trial in small["trials"])
    half = candidates['{"precision": "fp16", "token_budget": 512}']
    assert half["verdict"] == "cannot run"
    assert "needs a CUDA device" in half["reason"]
    assert (
        read_settings(out_dir / "settings.toml")["token_budget"]
        == body["recommended"]["engine"]["token_budget"]
    )
    table = Artifact.get(host_key("tune-few-cpu-1"))
    assert table is not None
    rows = json.loads(str(table.data))
    assert [row["verdict"] for row in rows].count("**recommended**") == 1
    assert list((out_dir / "trials").rglob("shards/*.h5")) == []

    second_state = ask(out_dir, few_reads, models, token_budgets=[512], precisions=["fp32", "fp16"])
    assert second_state.name == "Reused"
    assert (second_state.message or "").endswith("nothing had to be measured")
    body_after = json.loads((out_dir / "tune.json").read_text())
    assert [c["tokens_per_s"] for c in body_after["candidates"]] == [
        c["tokens_per_s"] for c in body["candidates"]
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_backend")
def test_settings_that_change_results_are_marked_and_not_recommended(
    tmp_path: Path, few_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "virnuc_core.tools.tune.compare_scores", lambda _, scores: ScoreChange(0.25, len(scores))
    )
    small_options = {"token_budgets": [512], "attentions": ["reference"]}
    state = ask(tmp_path / "sweep", few_reads, models, **small_options)
    verdicts = {}
    for candidate in json.loads((tmp_path / "sweep" / "tune.json").read_text())["candidates"]:
        verdicts[candidate["changes"].get("attention", "auto")] = candidate["verdict"]
    assert verdicts == {"auto": "base", "reference": "changes labels"}
    assert (state.message or "").startswith("the base stays")


@pytest.mark.usefixtures("prefect_backend")
def test_a_base_that_cannot_run_ends_the_sweep_at_once(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    state = ask(tmp_path / "sweep", few_reads, models, attention="fused")
    with pytest.raises(ConfigError, match="cannot run here: attention 'fused' needs a CUDA device"):
        state.result()
    assert not (tmp_path / "sweep" / "tune.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_backend")
def test_predict_takes_the_settings_a_sweep_wrote(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("token_budget = 1024\nshard_tokens = 8192\n")
    out_dir = tmp_path / "run"
    predict(reads=[str(few_reads)], out=out_dir, models=models, devices="cpu:1", settings=path)
    resolved_settings = json.loads((out_dir / "run.json").read_text())["resolved"]
    assert (resolved_settings["token_budget"], resolved_settings["shard_tokens"]) == (1024, 8192)


@pytest.mark.slow
def test_overhead_is_timed_in_a_validation_and_can_be_verified(
    tmp_path: Path, few_reads: Path, models: Path, prefect_backend: Path
) -> None:
    out_dir = tmp_path / "out"
    validate(few_reads, models, out_dir, "cpu:1")
    state = overhead(
        out=out_dir, models=models, devices="cpu:1", pairs=1, shards=1, return_state=True
    )
    assert state.is_completed(), state.message
    assert all(
        word in str(state.message)
        for word in ("commits cost", "the sampler costs", "models twice costs")
    )
    assert len(state.result().pairs) == 3
    verification = verify_report(out_dir)
    assert verification.ok, verification.differences
    second_state = overhead(
        out=out_dir, models=models, devices="cpu:1", pairs=1, shards=1, return_state=True
    )
    assert second_state.result() == state.result(), "nothing was measured again"
    refused_state = overhead(out=tmp_path, models=models, devices="cpu:1", return_state=True)
    assert "run virnuc validate first" in str(refused_state.message)
