"""The files of a run: written and read by one model each; what is wrong is named, and left out where one must go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from virnuc_core.config import Devices, RunSpec
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import (
    RESULTS_VERSION,
    Device,
    RunRecord,
    RunSummary,
    find_mismatches,
    git_commit,
    new_record,
    read,
    read_record,
    resume_or_refuse,
    write,
)
from virnuc_core.validation import BaselineSummary, read_usable

SUMMARY = RunSummary(
    wall_s=2.0,
    total_s=3.0,
    n_reads=4,
    threshold=0.5,
    shards=1,
    stages={"ESM-2": 1.25, "Feature Merging": None},
    devices=(Device(id="cpu-core-0", kind="cpu", name="Some Processor", core=0),),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "summary.json", SUMMARY)
    assert read(path, RunSummary) == SUMMARY
    assert read_usable(path, RunSummary) == SUMMARY


def test_keys_of_other_versions_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**SUMMARY.model_dump(mode="json"), "of_tomorrow": 1}))
    assert read(path, RunSummary) == SUMMARY


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"wall_s": "fast"}, "wall_s"),
        ({"wall_s": -1.0}, "wall_s"),
        ({"wall_s": float("nan")}, "wall_s"),
        ({"n_reads": True}, "n_reads"),
        ({"n_reads": 2.5}, "n_reads"),
        ({"stages": {"ESM-2": 1e300}}, "stages.ESM-2"),
        ({"devices": [{"id": "GPU-1", "kind": "cuda", "name": "a"}, {"id": 7}]}, "devices.1"),
    ],
)
def test_a_wrong_value_is_named_and_the_file_not_used(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY.model_dump(mode="json") | change))
    with pytest.raises(ConfigError, match=rf"summary\.json: {key}"):
        read(path, RunSummary)
    assert read_usable(path, RunSummary) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"stages": {}}'])
def test_a_file_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "summary.json"
    assert read_usable(path, BaselineSummary) is None
    path.write_text(text)
    assert read_usable(path, BaselineSummary) is None
    with pytest.raises(ConfigError, match=r"summary\.json"):
        read(path, RunRecord)


def test_whether_two_jobs_are_the_same() -> None:
    assert find_mismatches({"reads": "a", "head": "b"}, {"reads": "a"}) == {}
    assert find_mismatches({"reads": "a", "head": "b"}, {"reads": "a"}, strict=True) == {
        "head": ("b", "nothing")
    }
    assert find_mismatches({"reads": "a"}, {"reads": "c"}) == {"reads": ("a", "c")}


def test_results_of_two_versions_are_never_mixed_in_one_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    device = Device(id="cpu-core-0", kind="cpu", name="Some Processor", core=0)
    record = new_record(RunRecord, [device], fingerprints={"reads": "a"})
    assert record.results_version == RESULTS_VERSION
    write(run.record, record)
    assert len(resume_or_refuse(run, record).attempts) == 2
    later = record.model_copy(update={"results_version": RESULTS_VERSION + 1})
    with pytest.raises(RunMismatchError, match=r"results version 1 → 2"):
        resume_or_refuse(run, later)


def test_a_record_without_a_results_version_is_of_the_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.record.write_text('{"fingerprints": {"reads": "a"}}')
    assert read_record(run).results_version == 1


def test_a_run_is_asked_for_with_devices_in_words() -> None:
    spec = RunSpec(reads=("a.fa",), out=Path("run"), models=Path("models"), devices="cpu:2")
    assert spec.devices == Devices.parse("cpu:2")
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ConfigError, match="tpu:1"):
        RunSpec(reads=("a.fa",), out=Path("run"), models=Path("models"), devices="tpu:1")


@pytest.mark.parametrize(
    "option",
    [
        ["--email=lab@example.org"],
        ["--email", "lab@example.org"],
        ["--em=lab@example.org"],
        ["--emai", "lab@example.org"],
    ],
)
def test_the_mail_address_is_in_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    command = ["virnuc", "predict", "ncbi:NC_045512.2", *option, "-o", "out"]
    monkeypatch.setattr("sys.argv", command)
    settings = {"email": "lab@example.org", "on_error": "stop"}
    record = new_record(RunRecord, (), spec=settings, fingerprints={"reads": "1"})
    path = write(RunDir(tmp_path).record, record)
    assert "lab@example.org" not in path.read_text()
    assert record.spec == {"on_error": "stop"}
    assert record.attempts[0].command[-2:] == ("-o", "out")

    # An older version wrote the address. Its run is resumed without it.
    older_record = record.model_dump(mode="json")
    older_record["spec"] = settings
    older_record["attempts"][0]["command"] = command
    path.write_text(json.dumps(older_record))
    monkeypatch.setattr("sys.argv", ["virnuc", "predict"])
    new = new_record(RunRecord, (), spec={"on_error": "stop"}, fingerprints={"reads": "1"})
    resumed = resume_or_refuse(RunDir(tmp_path), new)
    assert len(resumed.attempts) == 2
    assert "lab@example.org" not in write(path, resumed).read_text()


def test_a_checkout_whose_commit_git_does_not_tell_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Git refuses, for instance, a checkout of another user. The record then has no commit."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr("virnuc_core.__file__", str(tmp_path / "virnuc_core" / "__init__.py"))
    assert git_commit.__wrapped__() is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in message
    assert "not a git repository" in message


def test_without_a_checkout_there_is_no_commit_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("virnuc_core.__file__", str(tmp_path / "virnuc_core" / "__init__.py"))
    assert git_commit.__wrapped__() is None
    assert caplog.records == []
