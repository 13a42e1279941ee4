"""Validations as flows, on tiny models: what they leave on disk, and what people see of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.states import State

from tests.report_figures import disagreements, figures_of
from virnuc.flows.cli.flow_command import exit_code
from virnuc.flows.parameters import build
from virnuc.flows.prefect_flows.predict import predict
from virnuc.flows.prefect_flows.validate import validate
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.artifacts import host_key
from virnuc.tasks.background import background_thread
from virnuc_core.encoders.convert import init_random
from virnuc_core.errors import ConfigError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.report.build import read_report
from virnuc_core.report.verify import verify_report
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import digest, read, read_record
from virnuc_core.tools.tune import Candidate, Recommendation
from virnuc_core.validation import TuningFile

from .flow_runs import RESULTS, run_of, task_runs
from .processes import committed


def artifacts_of(state: State[Any]) -> dict[str, Any]:
    """Return the tables and texts that a flow run shows, by their keys; tables as rows."""
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_of(state)]))
    with get_client(sync_client=True) as client:
        shown = client.read_artifacts(artifact_filter=chosen)
    contents = {}
    for artifact in shown:
        if artifact.key is not None and artifact.type in ("table", "markdown"):
            is_table = artifact.type == "table"
            data = str(artifact.data)
            contents[artifact.key] = json.loads(data) if is_table else data
    return contents


pytestmark = pytest.mark.usefixtures("prefect_backend", "forked_workers")


def test_validate_judges_and_shows(tmp_path: Path, reads: Path, models: Path) -> None:
    out_dir = tmp_path / "validation"
    arguments = {
        "reads": [str(reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:2",
        "profile": "ci-smoke",
    }
    state = validate(**arguments, return_state=True)
    assert state.is_completed(), state.message
    assert (state.message or "").startswith("1 of 1 asked criteria met")
    assert verify_report(out_dir).ok
    names = {
        "stage few",
        "baseline vanilla on cpu:2",
        "embed few on cpu:1",
        "embed few on cpu:2",
        "compare few",
        "report few",
    }
    assert set(task_runs(state, *names)) == names
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_of(state)).name == "few · ci-smoke · cpu:2"
    record = read_record(RunDir(out_dir))
    assert [
        (input_file.file, input_file.reads, input_file.content) for input_file in record.inputs
    ] == [(str(reads), 300, digest(reads))]
    assert (record.spec["sample"], record.spec["profile"]) == ("few", "ci-smoke")
    criteria = Artifact.get(host_key("criteria-ci-smoke"))
    assert criteria is not None
    rows = {row["Criterion"]: row for row in json.loads(str(criteria.data))}
    assert "PASS" in rows["Consensus label agreement"]["Verdict"]
    assert rows["Consensus label agreement"]["Required"] == "≥99%"
    assert "not asked" in rows["Scaling"]["Verdict"]
    for key in (
        "report-ci-smoke",
        "scaling-ci-smoke",
        "comparison-few",
        "charts-ci-smoke",
        "trend-ci-smoke",
    ):
        assert Artifact.get(key if key == "comparison-few" else host_key(key)) is not None, key
    artifacts = artifacts_of(state)
    assert {"report", "criteria", "scaling", "trend", "comparison", "stages", "reads"} <= {
        key.split("-")[0] for key in artifacts
    }
    figures = figures_of(out_dir, artifacts)
    assert disagreements(figures) == [], "figures of one name are one number in every form"
    assert len({figure.place for figure in figures if figure.place.startswith("artifact")}) > 7

    second_state = validate(**arguments, return_state=True)
    computing = {
        name: run.state.name
        for name, run in task_runs(second_state, *names).items()
        if run.state is not None
    }
    assert {name for name, state_name in computing.items() if state_name == "Reused"} == {
        "stage few",
        "baseline vanilla on cpu:2",
        "embed few on cpu:1",
        "embed few on cpu:2",
    }
    assert verify_report(out_dir).ok

    fewer = validate(**arguments | {"devices": "cpu:1"}, return_state=True)
    assert (fewer.message or "").startswith("1 of 1 asked criteria met"), (
        "the other run is of before"
    )
    assert [run.name for run in read_report(out_dir / "report" / "report.json").runs] == [
        "devices-1"
    ]
    assert verify_report(out_dir).ok


@pytest.mark.slow
def test_starting_over_leaves_no_run_of_other_weights(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    out_dir, mine = tmp_path / "validation", tmp_path / "validation" / "devices-2.bak" / "reads.tsv"
    arguments = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:2",
        "profile": "ci-smoke",
    }
    validate(**arguments)
    mine.parent.mkdir()
    mine.write_text("mine")
    init_random(tmp_path / "others", seed=2)
    state = validate(
        **arguments | {"models": tmp_path / "others", "devices": "cpu:1", "force": True},
        return_state=True,
    )
    assert state.is_completed(), state.message
    assert not (out_dir / "devices-2" / "summary.json").exists()
    assert verify_report(out_dir).ok
    assert mine.read_text() == "mine", "a name like ours is not ours"


@pytest.mark.slow
def test_results_and_time_of_an_earlier_baseline_take_the_place_of_a_run(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    first_dir, out_dir = tmp_path / "first", tmp_path / "validation"
    arguments: dict[str, Any] = {"reads": [str(few_reads)], "models": models, "devices": "cpu:1"}
    predict(**arguments, out=first_dir)
    arguments |= {
        "out": out_dir,
        "profile": "ci-smoke",
        "baseline_seconds": 900.0,
        "baseline_device": "2x RTX 4090",
        "baseline_reads": 60,
    }
    state = validate(**arguments, baseline_results=first_dir, return_state=True)
    assert state.is_completed(), state.message
    assert (out_dir / "baseline" / RESULTS[0]).read_bytes() == (first_dir / RESULTS[0]).read_bytes()
    report = read_report(out_dir / "report" / "report.json")
    criteria = {criterion.id: criterion for criterion in report.criteria}
    assert (criteria["consensus"].verdict, criteria["consensus"].value) == ("pass", 100.0)
    assert report.baseline is not None
    assert (report.baseline.seconds, report.baseline.label) == (900.0, "2x RTX 4090")
    assert "for reference only: the recorded time is of 2x RTX 4090" in (
        report.baseline.problem or ""
    )
    assert verify_report(out_dir).ok
    with pytest.raises(
        ConfigError, match=r"prediction_results\.txt is read, and would be overwritten"
    ):
        validate(**arguments, baseline_results=out_dir / "baseline", force=True)
    assert (out_dir / "baseline" / RESULTS[0]).is_file()
    with pytest.raises(ConfigError, match="--baseline-device is missing"):
        validate(**arguments | {"out": tmp_path / "other", "baseline_device": None})


@pytest.mark.slow
def test_a_missed_speed_is_tuned_and_judged_again(
    tmp_path: Path, few_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_other(entries: Sequence[Candidate], **_: object) -> Recommendation:
        return Recommendation(entries[1], 0.5, f"{entries[1].label}: chosen")

    out_dir, engine = tmp_path / "validation", "[engine]\ntoken_budget = 4096\n"
    profile = write_profile(tmp_path / "strict.toml", engine, 0.001)
    arguments: dict[str, Any] = {
        "reads": [str(few_reads)],
        "out": out_dir,
        "models": models,
        "devices": "cpu:1",
    }
    arguments |= {"profile": profile, "fail_on_criteria": False}
    monkeypatch.setattr("virnuc.flows.tuning_rounds.KNOBS", {"packing": {"token_budget": (2048,)}})
    monkeypatch.setattr("virnuc.flows.sweep.recommend", first_other)
    state = validate(**arguments, tune_rounds=1, return_state=True)
    assert state.is_completed(), state.message
    rounds = read(out_dir / "tuning.json", TuningFile).rounds
    assert [
        tuning_round.engine and tuning_round.engine["token_budget"] for tuning_round in rounds
    ] == [2048]
    assert read_record(RunDir(out_dir / "devices-1")).resolved["token_budget"] == 2048
    notes = read_report(out_dir / "report" / "report.json").notes
    assert any(
        "Tuning round 1, Time on one device missed: against packing, token_budget" in tuning_round
        for tuning_round in notes
    )
    assert verify_report(out_dir).ok

    monkeypatch.setattr("virnuc.flows.tuning_rounds.KNOBS", {})
    second_state = validate(**arguments, tune_rounds=2, return_state=True)
    assert "nothing had to be computed" in (second_state.message or "")
    rounds = read(out_dir / "tuning.json", TuningFile).rounds
    assert [tuning_round.engine is None for tuning_round in rounds] == [False, True]
    assert rounds[1].outcome.startswith("no setting mends ")
    assert rounds[1].outcome in " ".join(read_report(out_dir / "report" / "report.json").notes)
    assert verify_report(out_dir).ok


def write_profile(path: Path, settings: str, limit_s: float) -> str:
    """A profile that asks for the time on one device only."""
    path.write_text(
        f'name = "{path.stem}"\ntitle = "Of a test"\ndevice_names = [""]\n{settings}'
        f'[baseline]\nname = "vanilla"\nreads = 50\n[targets]\none_device_seconds = {{ op = "<", value = {limit_s} }}\n'
    )
    return str(path)


@pytest.mark.slow
def test_a_criterion_that_is_missed_is_seen_in_the_run_list(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    arguments = {
        "reads": [str(few_reads)],
        "out": tmp_path / "validation",
        "models": models,
        "devices": "cpu:1",
    }
    arguments |= {"profile": write_profile(tmp_path / "impossible.toml", "", 0.001)}
    for fails, kind in ((True, "FAILED"), (False, "COMPLETED")):
        state = validate(**arguments, fail_on_criteria=fails, return_state=True)
        assert (state.type.value, state.name) == (kind, "Criteria not met")
        assert "not met: Time on one device" in (state.message or "")


@pytest.mark.slow
def test_a_run_over_the_time_limit_is_ended_and_called_a_failure(
    tmp_path: Path, many_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "time_limit_s = 3600\nsample_s = 0.2\n[engine]\nshard_tokens = 4096\n"
    out_dir, enough = tmp_path / "validation", 0
    run = out_dir / "devices-1"

    def after_shards(work: Callable[[Any], None]) -> AbstractContextManager[None]:
        """The limit of an hour is over once there are `enough` shards: the machine may be as slow as it likes."""

        def end(stop: threading.Event) -> None:
            while committed(run) < enough and not stop.wait(0.02):
                pass
            work(stop if stop.is_set() else SimpleNamespace(wait=lambda _: False))

        return background_thread(end if work.__name__ == "end" else work)

    monkeypatch.setattr("virnuc.tasks.time_limit.background_thread", after_shards)
    arguments = {"reads": [str(many_reads)], "out": out_dir, "models": models, "devices": "cpu:1"}
    arguments |= {"profile": write_profile(tmp_path / "hasty.toml", settings, 3600)}
    enough = 2
    state = validate(**arguments, return_state=True)
    assert "not met: Time on one device" in (state.message or "")
    assert json.loads((run / "summary.json").read_text())["stopped_at_limit"] is True
    assert verify_report(out_dir).differences == []
    first_summary = json.loads((run / "summary.json").read_text())
    shards_before = committed(run)
    enough = shards_before + 2
    validate(**arguments, return_state=True)  # goes on where it was
    assert committed(run) >= enough
    # The time of both attempts counts, and the report is not called forged.
    second_summary = json.loads((run / "summary.json").read_text())
    assert len(second_summary["attempts"]) == 2
    assert second_summary["wall_s"] > first_summary["attempts"][0]["worked_s"]
    assert verify_report(out_dir).differences == []


@pytest.mark.slow
def test_a_validation_of_reads_without_an_open_frame_is_not_judged(
    tmp_path: Path, models: Path
) -> None:
    stops = tmp_path / "stops.fasta"
    stops.write_text("".join(f">r{number}\n{'TAACTAGTTAG' * 9}\n" for number in range(3)))
    arguments = {
        "reads": [str(stops)],
        "out": tmp_path / "run",
        "models": models,
        "devices": "cpu:2",
    }
    state = validate(
        **arguments, profile="production-6m", return_state=True
    )  # which asks for the cost of commits, too
    report = state.result()
    assert (report.outcome, report.failed, exit_code(state)) == ("not judged", (), 7)
    assert not (tmp_path / "virnuc-history.jsonl").exists(), "it would be held against the next run"


@pytest.mark.slow
def test_subset_and_simulation_are_steps_of_a_flow(
    tmp_path: Path, some_reads: Path, models: Path
) -> None:
    """Both are task runs, whose reads are validated; a second start finds them."""
    arguments: dict[str, Any] = {"models": models, "devices": "cpu:1", "profile": "ci-smoke"}
    sources = {
        "subset": {"reads": [str(some_reads)], "subset": 100},
        "simulate": {"simulate": "small"},
    }
    for step, source in sources.items():
        out_dir = tmp_path / step
        state = validate(**arguments, **source, out=out_dir, return_state=True)
        assert state.is_completed(), state.message
        (made_file,) = (out_dir / "drawn").glob(f"*{'subset' if step == 'subset' else 'fastq'}.gz")
        record = json.loads((out_dir / "run.json").read_text())
        assert record["spec"]["reads"] == [str(made_file)]
        assert record["spec"][step] == source[step]
        assert sum(file["reads"] for file in record["inputs"]) == 100
        name = "draw 100 reads of some" if step == "subset" else "simulate small reads"
        assert task_runs(state, name)[name].state_name == "Completed"
        assert verify_report(out_dir).ok
    state = validate(**arguments, **sources["subset"], out=tmp_path / "subset", return_state=True)
    name = "draw 100 reads of some"
    assert task_runs(state, name)[name].state_name == "Reused"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "simulate"])
def test_pairs_are_drawn_and_simulated_as_a_whole(tmp_path: Path, models: Path, kind: str) -> None:
    """Both files of a subset are validated as pairs; synthetic pairs are, too."""
    source: dict[str, Any] = {"simulate": "small", "simulate_pairs": True}
    if kind == "folder":
        simulation = simulate(SimulateSpec(reads=300, pairs=True), tmp_path / "lung.fastq.gz")
        (tmp_path / "in").mkdir()
        for name in simulation.reads.all_inputs:
            Path(name).rename(tmp_path / "in" / Path(name).name)
        source = {"reads": [str(tmp_path / "in")], "subset": 101}
    out_dir = tmp_path / "out"
    arguments: dict[str, Any] = {"models": models, "devices": "cpu:1", "profile": "ci-smoke"}
    state = validate(**arguments, **source, out=out_dir, return_state=True)
    assert state.is_completed(), state.message
    record = json.loads((out_dir / "run.json").read_text())
    spec = record["spec"]
    mates = [*spec["mates_1"], *spec["mates_2"]]
    assert [Path(name).parent for name in mates] == [out_dir / "drawn"] * 2
    assert spec["reads"] == []
    assert [file["reads"] for file in record["inputs"]] == [50, 50]
    pairs_table = (out_dir / "devices-1" / "pairs.tsv").read_text()
    assert pairs_table.count("\n") == 1 + 50
    assert verify_report(out_dir).ok


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"reads": ["a.fa"], "simulate_pairs": True}, "goes with --simulate"),
        ({"reads": ["a.fa"], "simulate": "small"}, "synthetic reads take the place"),
        ({"mates_1": ["a.fa"], "subset": 10}, "name both of each pair"),
        ({"simulate": "some"}, "simulate"),
        ({}, "none are named"),
    ],
)
def test_reads_come_from_one_place(
    tmp_path: Path, models: Path, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ValidateSettings, {"out": tmp_path, "models": models, **source})
