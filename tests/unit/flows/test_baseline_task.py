"""What the baseline's task does beside the baseline: starting over, and saying what it was made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tasks.baseline import start_over
from virnuc_core.baseline.record import record
from virnuc_core.config import BaselineSpec
from virnuc_core.encoders.checkpoint import fingerprint, init_random
from virnuc_core.provenance import read_record
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import BaselineSummary, DeviceRecord

SPEC = BaselineSpec(name="vanilla")
MEASURED = BaselineSummary(
    schema_version=1,
    name="vanilla",
    source="measured",
    wall_s=1.0,
    stages={},
    subset=None,
    measured_s=1.0,
    measured_stages={},
    scaled_s=None,
    n_reads=20,
    n_rows=1,
    measured_rows=1,
    file_rows=1,
    devices=(DeviceRecord(id="cpu-core-0", kind="cpu", name="Some Processor", core=0),),
    fingerprint="f",
)


def test_starting_over_removes_everything_or_says_why_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "baseline")
    start_over(run)  # nothing there: nothing to do
    run.root.mkdir()
    (run.root / "prediction_results.txt").write_text("old")
    start_over(run)
    assert not run.root.exists()
    run.root.write_text("a file")
    with pytest.raises(NotADirectoryError):
        start_over(run)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    init_random(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    reads = simulate(SimulateSpec(reads=20, seed=1), tmp_path / "r.fasta").reads_file
    return stage(StageSpec(reads=(str(reads),)), tmp_path / "orfs.h5").store


def test_the_record_says_what_the_baseline_was_made_from(tmp_path: Path, store: Path, models: Path) -> None:
    run = RunDir(tmp_path / "baseline")
    record(run, MEASURED, store=store, models=models, spec=SPEC)
    written = read_record(run)
    prints = fingerprint(models)
    assert written.fingerprints == {"reads": OrfStore.open(store).fingerprint, **dataclasses.asdict(prints)}
    assert written.model_length == 500
    assert (run.root / written.store).resolve() == store.resolve()
    before = run.record.read_bytes()
    record(run, MEASURED, store=store, models=models, spec=SPEC)
    assert run.record.read_bytes() == before
    init_random(tmp_path / "others", seed=9)
    record(run, MEASURED, store=store, models=tmp_path / "others", spec=SPEC)
    assert read_record(run).fingerprints["head"] == fingerprint(tmp_path / "others").head


def test_a_time_out_of_the_profile_has_no_record(tmp_path: Path, store: Path, models: Path) -> None:
    run = RunDir(tmp_path / "baseline")
    record(run, MEASURED, store=store, models=models, spec=SPEC)
    recorded = MEASURED.model_copy(update={"source": "recorded"})
    record(run, recorded, store=store, models=models, spec=SPEC)
    assert not run.record.exists()
