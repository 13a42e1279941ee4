"""Training as a flow, on tiny models: heads on disk, and what people see of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from virnuc.flows.train import train
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.rundir import RunDir

from .flow_runs import RESULTS

pytestmark = pytest.mark.usefixtures("prefect_backend")


@pytest.mark.slow
def test_train_writes_a_head_and_installs_it_on_request(tmp_path: Path) -> None:
    from virnuc_core.encoders.convert import init_random
    from virnuc_core.encoders.digests import part_digest
    from virnuc_core.tools.rescore import rescore

    folder, out = tmp_path / "models", tmp_path / "run"
    init_random(folder)
    made = simulate(SimulateSpec(reads=200, seed=5), tmp_path / "train.fastq")
    before = (folder / "head" / "model.safetensors").read_bytes()
    given = {
        "reads": [str(made.reads_file)],
        "truth": made.truth_file,
        "models": folder,
        "out": out,
        "epochs": 3,
    }
    given |= {"genomes": made.genomes_file, "folds": 3, "repeats": 1, "devices": "cpu:1"}
    state = train(**given, install_anyway=True, return_state=True)
    assert "installed as 002-" in (state.message or "")
    found = state.result()
    assert {one.asked for one in found.figures} >= {"cross-validation", "test", "150 bases"}
    assert not [name for name in RESULTS for run in (out, out / "lengths") if (run / name).exists()]
    new = (out / "head" / "model.safetensors").read_bytes()
    assert (folder / "head" / "model.safetensors").read_bytes() == new != before
    assert [path.read_bytes() for path in folder.glob("heads/001-*/model.safetensors")] == [before]
    scored = rescore(RunDir(out), None, RunDir(tmp_path / "scored"))
    assert scored.head == part_digest(out / "head"), (
        "not of the stand-in that the reads were embedded beside"
    )
    shutil.rmtree(folder / "head")  # none is needed, and what is embedded stays
    again = train(**given | {"repeats": 0, "model_length": 500, "genomes": None}, return_state=True)
    assert (out / "head" / "model.safetensors").read_bytes() == new
    tested = [[one for one in of.figures if one.asked == "test"] for of in (found, again.result())]
    assert tested[0] == tested[1] != []


@pytest.mark.slow
def test_what_truth_does_not_fit_is_said_before_anything_is_embedded(
    tmp_path: Path, models: Path
) -> None:
    made = simulate(SimulateSpec(reads=200, seed=5), tmp_path / "train.fastq")
    lines = made.truth_file.read_text().splitlines(keepends=True)
    made.truth_file.write_text("".join(lines[:-1]))
    given = {
        "reads": [str(made.reads_file)],
        "truth": made.truth_file,
        "models": models,
        "out": tmp_path / "run",
    }
    state = train(**given, devices="cpu:1", return_state=True)
    assert "1 reads have no line in the truth file, among them sim_0000200" in (state.message or "")
    assert state.is_failed()
    assert not RunDir(tmp_path / "run").shards.exists()
