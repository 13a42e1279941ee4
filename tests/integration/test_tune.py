"""The sweep: what it tries, what it may recommend, and the flow on a core with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import State

from flows.options import add_options, command_parser, given
from flows.parameters import ComputeSettings, TuneSettings, read_settings
from flows.predict import predict
from flows.tune import tune
from tasks.sweep import Entry, Trial, candidates, drop_slower_half, in_the_running, recommend
from tasks.tune import compare
from virnuc_core.config import EngineSpec
from virnuc_core.errors import ConfigError

TOLERANCE = 0.01


def entries(*rates: tuple[float, ...], difference: float = 0.0) -> list[Entry]:
    """The base and candidates with these rates; `difference` is that of all but the base."""
    made = candidates(EngineSpec(), {"token_budget": tuple(1024 * (n + 1) for n in range(len(rates) - 1))})
    found = [Entry(candidate) for candidate in made]
    for number, (entry, measured) in enumerate(zip(found, rates, strict=True)):
        entry.trials += [trial(rate, difference if number else 0.0) for rate in measured]
    return found


def trial(rate: float, difference: float | None = 0.0, refused: str = "") -> Trial:
    return Trial(rate, 1.0, 2.0, 0.99, 0.0, None, None, difference, 0, refused=refused)


def test_every_combination_is_tried_once_and_the_base_first() -> None:
    base = EngineSpec(token_budget=1024)
    found = candidates(base, {"token_budget": (1024, 2048), "num_workers": (0, 2)})
    assert [c.label for c in found] == ["base", "num_workers=2", "token_budget=2048", "token_budget=2048 num_workers=2"]
    assert found[0].engine == base
    assert candidates(base, {}) == (found[0],)
    with pytest.raises(ConfigError, match="226 combinations are too many"):
        candidates(base, {"token_budget": range(64, 79), "prefetch_factor": range(1, 16)})


def test_what_is_faster_by_more_than_the_scatter_is_recommended() -> None:
    chosen = recommend(entries((100, 102, 98), (130, 131, 129)), tolerance=TOLERANCE, allow_changed=False)
    assert chosen.entry.candidate.label == "token_budget=1024"
    assert chosen.gain == pytest.approx(0.30)


def test_within_the_scatter_the_base_stays() -> None:
    chosen = recommend(entries((100, 120, 80), (110, 110, 110)), tolerance=TOLERANCE, allow_changed=False)
    assert chosen.entry.candidate.number == 0
    assert "within the scatter" in chosen.reason


@pytest.mark.parametrize("difference", [0.02, None])
def test_what_changes_results_is_recommended_only_on_request(difference: float | None) -> None:
    found = entries((100,), (200,))
    found[1].trials = [trial(200, difference)]
    assert found[1].verdict(TOLERANCE) == "changes results"
    assert recommend(found, tolerance=TOLERANCE, allow_changed=False).entry is found[0]
    chosen = recommend(found, tolerance=TOLERANCE, allow_changed=True)
    assert chosen.entry is found[1]
    assert "CHANGES RESULTS" in chosen.reason


def test_a_candidate_that_was_measured_less_often_is_not_recommended() -> None:
    assert recommend(entries((100, 100), (200,)), tolerance=TOLERANCE, allow_changed=False).entry.candidate.number == 0


def test_halving_drops_the_slower_half_but_neither_the_base_nor_the_last_three() -> None:
    found = entries(*[(rate,) for rate in (1.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0)])
    drop_slower_half(found)
    assert [e.candidate.number for e in in_the_running(found)] == [0, 1, 2, 3, 4]
    drop_slower_half(found)
    drop_slower_half(found)
    assert [e.candidate.number for e in in_the_running(found)] == [0, 1, 2, 3]


def test_what_cannot_run_is_not_tried_again_and_a_base_that_cannot_is_an_error() -> None:
    found = entries((100,), ())
    found[1].trials = [trial(0, None, "needs a CUDA device")]
    assert in_the_running(found) == [found[0]]
    assert found[1].verdict(TOLERANCE) == "cannot run"
    found[0].trials = [trial(0, None, "no")]
    with pytest.raises(ConfigError, match="cannot run here: no"):
        recommend(found, tolerance=TOLERANCE, allow_changed=False)


def test_scores_are_compared_row_by_row_and_a_missing_one_counts_most() -> None:
    a = np.array([[0.9, 0.1], [0.51, 0.49], [np.nan, np.nan]], dtype=np.float32)
    b = np.array([[0.9, 0.1], [0.49, 0.51], [np.nan, np.nan]], dtype=np.float32)
    difference, changed = compare(a, b)
    assert (difference, changed) == (pytest.approx(0.02, abs=1e-6), 1)
    b[2] = 0.5
    assert compare(a, b) == (1.0, 2)
    assert compare(a, a) == (0.0, 0)
    assert compare(a, a[:2])[0] == 1.0


def test_lists_are_given_as_words_and_an_empty_one_is_not_swept() -> None:
    parser = command_parser("tune", "")
    add_options(parser, TuneSettings, positional=("reads",))
    words = ["a", "-o", "x", "--models", "m", "--loader-workers", "--attentions", "varlen", "fused"]
    found = given(parser.parse_args(words), TuneSettings)
    assert (found["loader_workers"], found["attentions"]) == ([], ["varlen", "fused"])
    assert set(TuneSettings.model_validate(found).swept()) == {"token_budget", "attention", "prefetch_factor"}
    with pytest.raises(ConfigError, match="invalid choice: 'fast'"):
        parser.parse_args(["a", "-o", "x", "--models", "m", "--attentions", "fast"])


def test_a_file_of_settings_stands_between_the_profile_and_what_is_given(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('# by hand\ntoken_budget = 2048\nattention = "reference"\n')
    asked = ComputeSettings(settings=path, attention="auto")
    expected = EngineSpec(token_budget=2048, attention="auto", num_workers=3)
    assert asked.engine(EngineSpec(token_budget=4096, num_workers=3)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token_bugdet = 3", "token_bugdet is no engine setting"),
        ("token_budget =", "not valid TOML"),
        (None, "cannot be"),
    ],
)
def test_a_file_that_is_no_settings_is_one_line(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_settings(path)


def test_a_value_out_of_range_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("token_budget = 3\n")
    with pytest.raises(ConfigError, match="token_budget: input should be greater than or equal to 64"):
        ComputeSettings(settings=path).engine(EngineSpec())


def ask(out: Path, reads: Path, models: Path, **more: Any) -> State[Any]:
    given: dict[str, Any] = {
        "reads": [str(reads)],
        "out": out,
        "models": models,
        "devices": "cpu:1",
        "profile": "ci-smoke",
        "token_budgets": [512, 2048],
        "loader_workers": [],
        "prefetch_factors": [],
        "repeats": 2,
    }
    return tune(**{**given, **more}, return_state=True)


@pytest.mark.usefixtures("prefect_backend")
def test_a_sweep_measures_says_what_it_found_and_is_not_repeated(tmp_path: Path, reads: Path, models: Path) -> None:
    out = tmp_path / "sweep"
    state = ask(out, reads, models, precisions=["fp32", "fp16"])
    assert state.is_completed(), state.message
    body = json.loads((out / "tune.json").read_text())
    assert body["schema_version"] == 1
    found = {json.dumps(c["changes"], sort_keys=True): c for c in body["candidates"]}
    assert len(found) == 5  # the base, two budgets in each precision
    base = found["{}"]
    assert (base["verdict"], len(base["tokens_per_s"])) == ("base", 2)
    assert min(base["tokens_per_s"]) > 1000
    small = found['{"token_budget": 512}']
    assert small["verdict"] == "usable"
    assert all(one["score_difference"] <= TOLERANCE for one in small["trials"])
    half = found['{"precision": "fp16", "token_budget": 512}']
    assert half["verdict"] == "cannot run"
    assert "needs a CUDA device" in half["reason"]
    assert read_settings(out / "settings.toml")["token_budget"] == body["recommended"]["engine"]["token_budget"]
    table = Artifact.get("tune-few-cpu-1")
    assert table is not None
    rows = json.loads(str(table.data))
    assert [row["verdict"] for row in rows].count("**recommended**") == 1
    assert list((out / "trials").rglob("shards/*.h5")) == []

    again = ask(out, reads, models, precisions=["fp32", "fp16"])
    assert again.name == "Reused"
    assert (again.message or "").endswith("nothing had to be measured")
    after = json.loads((out / "tune.json").read_text())
    assert [c["tokens_per_s"] for c in after["candidates"]] == [c["tokens_per_s"] for c in body["candidates"]]


@pytest.mark.usefixtures("prefect_backend")
def test_settings_that_change_results_are_marked_and_not_recommended(
    tmp_path: Path, reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.tune.compare", lambda _, scores: (0.25, len(scores)))
    few = {"token_budgets": [512], "attentions": ["reference", "fused"], "repeats": 1}
    state = ask(tmp_path / "sweep", reads, models, **few)
    verdicts = {}
    for candidate in json.loads((tmp_path / "sweep" / "tune.json").read_text())["candidates"]:
        verdicts[candidate["changes"].get("attention", "auto")] = candidate["verdict"]
    assert verdicts == {"auto": "base", "reference": "changes results", "fused": "cannot run"}
    assert (state.message or "").startswith("the base stays")


@pytest.mark.usefixtures("prefect_backend")
def test_a_base_that_cannot_run_ends_the_sweep_at_once(tmp_path: Path, reads: Path, models: Path) -> None:
    state = ask(tmp_path / "sweep", reads, models, attention="fused")
    with pytest.raises(ConfigError, match="cannot run here: attention 'fused' needs a CUDA device"):
        state.result()
    assert not (tmp_path / "sweep" / "tune.json").exists()


@pytest.mark.usefixtures("prefect_backend")
def test_predict_takes_the_settings_a_sweep_wrote(tmp_path: Path, reads: Path, models: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("token_budget = 1024\nshard_tokens = 8192\n")
    out = tmp_path / "run"
    predict(reads=[str(reads)], out=out, models=models, devices="cpu:1", settings=path)
    resolved = json.loads((out / "run.json").read_text())["resolved"]
    assert (resolved["token_budget"], resolved["shard_tokens"]) == (1024, 8192)
