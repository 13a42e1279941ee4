"""Baselines whose model overflows for some rows: real workers, weights that are finite, sequences that are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from virnuc_core.baseline.run import run_baseline
from virnuc_core.config import Devices
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.compare import compare
from virnuc_core.rundir import RunDir

pytestmark = pytest.mark.usefixtures("forked_workers")

LARGE = 3e38  # finite, and its square is not
ONE = Devices.parse("cpu:1")


def overflowing_models(folder: Path, models: Path, residues: str) -> Path:
    """Copy the models, with token embeddings of some residues whose squares overflow."""
    shutil.copytree(models, folder)
    path = folder / "esm2" / "model.safetensors"
    tensors = load_file(path)
    tokens, _ = Esm2Tokenizer().encode([residues.encode()])
    for token in tokens.tolist()[1:-1]:  # without the start and the end
        tensors["embed.weight"][token] = LARGE
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize("name", ["vanilla", "v1"])
def test_rows_with_an_overflow_are_set_aside_and_no_other_row_is_changed(
    tmp_path: Path, store: OrfStore, models: Path, name: str
) -> None:
    spec = BaselineSpec(name=name)  # type: ignore[arg-type]
    whole, part = RunDir(tmp_path / "whole"), RunDir(tmp_path / "part")
    run_baseline(whole, store.path, models, ONE, spec)
    spoilt = overflowing_models(tmp_path / "models", models, "W")
    summary = run_baseline(part, store.path, spoilt, ONE, spec)

    proteins = store.protein(0, store.n_uniques)
    row_uniques = store.row_unique[:].tolist()
    is_lost = [b"W" in proteins[unique] for unique in row_uniques]
    assert 0 < sum(is_lost) < len(is_lost)
    unique_names = store.row_ids(0, store.n_rows)
    lost_names = [row for row, lost in zip(unique_names, is_lost, strict=True) if lost]
    assert part.failed_rows.read_text().splitlines()[1:] == lost_names
    assert summary.failed_rows == len(lost_names)

    all_lines = whole.predictions.read_text().splitlines()[1:]
    kept_lines = [row for row, lost in zip(all_lines, is_lost, strict=True) if not lost]
    part_rows = pd.read_csv(part.predictions, sep="\t", na_filter=False)
    kept_rows = pd.DataFrame([line.split("\t") for line in kept_lines], columns=part_rows.columns)
    assert part_rows["Sequence_ID"].tolist() == kept_rows["Sequence_ID"].tolist()
    differences = part_rows["score2"] - kept_rows["score2"].astype(float)
    assert differences.abs().max() < 1e-5, "batches differ in nothing but the rows"

    # Reads that share an id included, each row is held against its own.
    comparison = compare(part.root, whole.root)
    assert comparison.frames is not None
    assert comparison.frames.in_both == len(kept_lines)
    assert (comparison.frames.only_in_a, comparison.frames.only_in_b) == (0, len(lost_names))
    assert comparison.frames.score is not None
    assert comparison.frames.score.max < 1e-5


def test_a_baseline_all_of_whose_rows_overflow_has_none(
    tmp_path: Path, store: OrfStore, models: Path
) -> None:
    spoilt = overflowing_models(tmp_path / "models", models, "LAGVSERTIDPKQNFYMHWC")
    run = RunDir(tmp_path / "run")
    summary = run_baseline(run, store.path, spoilt, ONE, BaselineSpec(name="v1", reads=40))
    assert summary.failed_rows == summary.measured_rows > 0
    assert len(run.predictions.read_text().splitlines()) == 1
    assert len(run.consensus.read_text().splitlines()) == 1
