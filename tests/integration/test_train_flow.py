"""Training as a flow, on tiny models: heads on disk, and what people see of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from virnuc.flows.prefect_flows.train import train
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.rundir import RunDir

from .flow_runs import RESULTS

pytestmark = pytest.mark.usefixtures("prefect_backend")


@pytest.mark.slow
def test_train_writes_a_head_and_installs_it_on_request(tmp_path: Path) -> None:
    from virnuc_core.encoders.convert import init_random
    from virnuc_core.encoders.digests import part_digest
    from virnuc_core.tools.rescore import rescore

    folder, out_dir = tmp_path / "models", tmp_path / "run"
    init_random(folder)
    simulation = simulate(SimulateSpec(reads=200, seed=5), tmp_path / "train.fastq")
    bytes_before = (folder / "head" / "model.safetensors").read_bytes()
    arguments = {
        "reads": [str(simulation.reads_file)],
        "truth": simulation.truth_file,
        "models": folder,
        "out": out_dir,
        "epochs": 3,
    }
    arguments |= {"genomes": simulation.genomes_file, "folds": 3, "repeats": 1, "devices": "cpu:1"}
    state = train(**arguments, install_anyway=True, return_state=True)
    assert "installed as 002-" in (state.message or "")
    trained_head = state.result()
    assert {figure.test_set for figure in trained_head.figures} >= {
        "cross-validation",
        "test",
        "150 bases",
    }
    assert not [
        name for name in RESULTS for run in (out_dir, out_dir / "lengths") if (run / name).exists()
    ]
    new = (out_dir / "head" / "model.safetensors").read_bytes()
    assert (folder / "head" / "model.safetensors").read_bytes() == new != bytes_before
    assert [path.read_bytes() for path in folder.glob("heads/001-*/model.safetensors")] == [
        bytes_before
    ]
    new_scores = rescore(RunDir(out_dir), None, RunDir(tmp_path / "scored"))
    assert new_scores.head == part_digest(out_dir / "head"), (
        "not of the stand-in that the reads were embedded beside"
    )
    shutil.rmtree(folder / "head")  # none is needed, and what is embedded stays
    second_state = train(
        **arguments | {"repeats": 0, "model_length": 500, "genomes": None}, return_state=True
    )
    assert (out_dir / "head" / "model.safetensors").read_bytes() == new
    test_figures = [
        [figure for figure in training.figures if figure.test_set == "test"]
        for training in (trained_head, second_state.result())
    ]
    assert test_figures[0] == test_figures[1] != []


@pytest.mark.slow
def test_what_truth_does_not_fit_is_said_before_anything_is_embedded(
    tmp_path: Path, models: Path
) -> None:
    simulation = simulate(SimulateSpec(reads=200, seed=5), tmp_path / "train.fastq")
    lines = simulation.truth_file.read_text().splitlines(keepends=True)
    simulation.truth_file.write_text("".join(lines[:-1]))
    arguments = {
        "reads": [str(simulation.reads_file)],
        "truth": simulation.truth_file,
        "models": models,
        "out": tmp_path / "run",
    }
    state = train(**arguments, devices="cpu:1", return_state=True)
    assert "1 reads have no line in the truth file, among them sim_0000200" in (state.message or "")
    assert state.is_failed()
    assert not RunDir(tmp_path / "run").shards.exists()
