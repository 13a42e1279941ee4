"""A verdict that was missed is seen wherever somebody looks: state, event, page, history and exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from virnuc.flows.cli import main
from virnuc.flows.prefect_flows.scale import scale
from virnuc.flows.prefect_flows.validate import validate
from virnuc_core.engine import devices
from virnuc_core.report.build import read_report
from virnuc_core.report.regression import read_history
from virnuc_core.report.verify import verify_report
from virnuc_core.runfiles import Device, read
from virnuc_core.validation import OVERHEAD, OverheadFile

pytestmark = pytest.mark.usefixtures("prefect_backend", "forked_workers")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What is sent about verdicts: payload by event."""
    sent_events: dict[str, dict[str, Any]] = {}

    def emit(event: str, _resource: str, _name: str, payload: dict[str, Any]) -> None:
        sent_events[event] = payload

    monkeypatch.setattr("virnuc.tasks.report.emit", emit)
    return sent_events


def write_profile(path: Path, targets: str, *, bands: str = "", names: str = '""') -> str:
    """A profile; its targets are meant for any device, CPU cores too, unless `names` says otherwise."""
    baseline = '[baseline]\nname = "vanilla"\nreads = 10\n'
    parts = f"{baseline}[targets]\n{targets}\n[scaling_bands]\n{bands}\n"
    path.write_text(f'name = "{path.stem}"\ntitle = "Of a test"\ndevice_names = [{names}]\n{parts}')
    return str(path)


def require_silence(out: Path) -> None:
    """Verify an honest validation: nothing differs, and there is nothing to remark."""
    verification = verify_report(out)
    assert verification.differences == []
    assert verification.remarks == []
    assert verification.figures > 500


AGREEMENT = 'consensus_agreement = { op = ">=", value = 99.0 }\n'
QUICK = 'one_device_seconds = { op = "<", value = 9e9 }\n'


@pytest.mark.slow
def test_nothing_judged_is_no_success(
    tmp_path: Path,
    few_reads: Path,
    models: Path,
    events: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign = write_profile(tmp_path / "foreign.toml", AGREEMENT + QUICK, names='"RTX 4090"')
    words = [
        "--reads",
        few_reads,
        "--models",
        models,
        "--devices",
        "cpu:1",
        "--out",
        tmp_path / "out",
    ]
    assert main(["validate", "--profile", foreign, *map(str, words)]) == 7
    output = capsys.readouterr().out
    assert "OVERALL: 1 of 2 CRITERIA MET, RANDOM WEIGHTS: no verdict on a read" in output
    assert (
        "\nnot judged here: Time on one device; 1 of 2 asked criteria met; RANDOM WEIGHTS" in output
    )
    assert {event for event in events if event.startswith("validation")} == {
        "validation.not-judged"
    }
    passing_profile = write_profile(tmp_path / "met.toml", AGREEMENT)
    assert (
        main(["validate", "--profile", passing_profile, *map(str, words)]) == 0
    )  # the same runs, judged by another profile
    assert (
        "OVERALL: ALL CRITERIA MET, RANDOM WEIGHTS: no verdict on a read" in capsys.readouterr().out
    )
    assert events["validation.passed"]["asked"] == 1


@pytest.mark.slow
def test_each_forced_run_is_a_line_of_history_and_a_regression_fails(
    tmp_path: Path, few_reads: Path, models: Path, events: dict[str, Any]
) -> None:
    history = tmp_path / "virnuc-history.jsonl"
    arguments = {
        "reads": [str(few_reads)],
        "out": tmp_path / "out",
        "models": models,
        "devices": "cpu:1",
    }
    arguments |= {
        "profile": write_profile(tmp_path / "nightly.toml", AGREEMENT),
        "force": True,
        "fail_on_criteria": False,
    }
    for count in (1, 2):
        validate(**arguments, return_state=True)
        assert len(read_history(history)) == count
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        # as older versions wrote them: what is edited here is no damage
        del line["sha256"], line["previous"]
    assert len({line["created"] for line in lines}) == 2
    lines[-1] |= {"total_s": lines[-1]["total_s"] / 100}  # as if it had been much faster
    history.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    state = validate(**arguments, return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "Criteria not met")
    assert "not met: regression (over 10 % worse in " in (state.message or "")
    assert "total_s)" in (state.message or "")
    assert events["regression.fail"]["verdict"] == "fail"
    assert "regression (over 10 % worse in " in events["validation.failed"]["failed"][0]
    report = read_report(tmp_path / "out" / "report" / "report.json")
    assert report.regression is not None
    assert report.regression.verdict == "fail"
    require_silence(tmp_path / "out")
    assert main(["history", str(history)]) == 5
    assert len(read_history(history)) == 3


@pytest.mark.slow
def test_scale_tells_what_persistent_models_save(
    tmp_path: Path, few_reads: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three pairs of runs: with workers that keep their models, and that load them once more."""
    out = tmp_path / "out"
    words = ["scale", few_reads, "--models", models, "--devices", "cpu:1", "--out", out]
    words += ["--profile", write_profile(tmp_path / "curve.toml", QUICK), "--shard-tokens", 4096]
    # 7: one device has no scaling to be judged
    assert main([*map(str, words), "--persistent-models"]) == 7, capsys.readouterr().err
    pairs = read(out / OVERHEAD, OverheadFile).pairs
    assert [pair.switch for pair in pairs] == ["models"] * 3
    assert f'"{OVERHEAD}"' in (out / "run.json").read_text(), "a file that must not be lost"
    report = read_report(out / "report" / "report.json")
    assert report.overhead is not None
    speedup = report.overhead.persistent_models_speedup
    assert speedup is not None
    assert speedup > 1.0, "loading twice is never faster"
    assert "as fast as loading once more halfway" in (out / "report" / "report.txt").read_text()
    require_silence(out)


@pytest.mark.slow
def test_scale_fails_below_its_band_and_repeats_tell_their_spread(
    tmp_path: Path, few_reads: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "reads": [str(few_reads)],
        "out": tmp_path / "out",
        "models": models,
        "devices": "cpu:2",
    }
    arguments |= {
        "profile": write_profile(tmp_path / "steep.toml", "", bands="2 = [1000, 2000]\n8 = [6, 8]")
    }
    state = scale(**arguments, repeats=2, return_state=True)
    assert (state.type.value, state.name) == ("FAILED", "Criteria not met")
    assert "%), median of 2 runs, " in (state.message or "")
    assert (
        "8 devices: skipped, there were 2 devices; same bytes on all devices: PASS; not met: Scaling"
        in (state.message or "")
    )
    assert not (tmp_path / "out" / "devices-2.2" / "embeddings.h5").exists()
    require_silence(tmp_path / "out")
    words = [
        str(word)
        for name, word in arguments.items()
        if name != "reads"
        for word in (f"--{name}", word)
    ]
    assert main(["scale", "--reads", str(few_reads), *words, "--repeats", "2"]) == 5
    assert "nothing had to be computed" in capsys.readouterr().out
    state = scale(**arguments, force=True, fail_on_criteria=False, return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "Criteria not met")
    assert "%), one run: " in (state.message or ""), (
        "repeats of an earlier scale are not of this one"
    )


@pytest.mark.slow
def test_four_devices_are_run_as_one_two_and_all(
    tmp_path: Path, few_reads: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = devices._cores(1)

    def four(count: int) -> tuple[Device, ...]:
        """As on a machine of four cores, whatever this one has."""
        return tuple(
            cores[0].model_copy(update={"id": f"cpu-core-{number}"}) for number in range(count)
        )

    monkeypatch.setattr(devices, "_cores", four)
    pair = 'two_device_seconds = { op = "<", value = 9e9 }\nscaling = { op = ">", value = 0 }\n'
    arguments = {
        "reads": [str(few_reads)],
        "out": tmp_path / "out",
        "models": models,
        "devices": "cpu:4",
    }
    state = validate(
        **arguments,
        profile=write_profile(tmp_path / "four.toml", pair, bands="4 = [0, 4]"),
        return_state=True,
    )
    assert (state.message or "").startswith("2 of 2 asked criteria met"), state.message
    report = read_report(tmp_path / "out" / "report" / "report.json")
    assert [run.name for run in report.runs] == ["devices-1", "devices-2", "devices-4"]
    criteria = {criterion.id: criterion for criterion in report.criteria}
    assert criteria["two_device_time"].raw == ("devices-2/summary.json",)
    assert [figure.num_gpus for figure in report.scaling] == [1, 2, 4]
    page = (tmp_path / "out" / "report" / "report.txt").read_text(encoding="utf-8")
    assert "Scaling on 4 devices:" in page
    require_silence(tmp_path / "out")


def test_what_cannot_be_judged_or_kept_is_refused_before_anything_is_written(
    tmp_path: Path, few_reads: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir, history = tmp_path / "out", tmp_path / "locked.jsonl"
    given = [
        "--reads",
        str(few_reads),
        "--models",
        str(models),
        "--devices",
        "cpu:1",
        "--out",
        str(out_dir),
    ]
    (tmp_path / "odd.toml").write_text(
        'name = "odd"\ntitle = "Odd"\nmin_reads = "many"\n', encoding="utf-8"
    )
    history.mkdir()
    for command, words in (
        (
            ["validate", "--profile", str(tmp_path / "odd.toml"), *given],
            "min_reads: input should be a valid integer",
        ),
        (
            ["scale", "--history", str(history), *given],
            f"history {history}: no file that can be written",
        ),
        (
            ["validate", "--history", str(history), *given],
            f"history {history}: no file that can be written",
        ),
        (["report", str(tmp_path), "--profile", "ci-smoke"], "holds no runs of a validation"),
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert sorted(path.name for path in tmp_path.iterdir()) == ["locked.jsonl", "odd.toml"]
