"""Counts of a validation against its store: the slow count is the twin of the fast one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from virnuc_core.config import Profile
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.validation.stored import baseline_tokens, count_store, open_beside, staging_tally
from virnuc_core.validation.verify import verify_report

from .validate_directory import edit_json


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> StageSummary:
    folder = tmp_path_factory.mktemp("staged")
    simulate(SimulateSpec(reads=200, read_length=400, duplicate_share=0.2, seed=3), folder / "reads.fasta")
    return stage(StageSpec(reads=(str(folder / "reads.fasta"),), model_length=150), folder / "orfs.h5")


def test_the_store_is_counted_as_staging_counted_it(staged: StageSummary) -> None:
    store = OrfStore.open(staged.store)
    counted, said = count_store(store), staged.counts
    assert (counted.n_reads, counted.n_chunks, counted.n_rows, counted.n_uniques) == (
        said.n_reads,
        said.n_chunks,
        said.n_rows,
        said.n_uniques,
    )
    assert counted.fingerprint == staged.fingerprint
    tally = staging_tally(store)
    assert tally["reads"] == said.n_reads
    assert (tally["empty"], tally["duplicate_ids"]) == (said.n_empty, said.n_duplicate_ids)
    assert (tally["ambiguous"], tally["short_for_model"]) == (said.n_ambiguous, said.n_short)
    proteins = store.protein(0, counted.n_uniques)
    assert counted.protein_tokens == sum(len(protein) + 2 for protein in proteins)
    assert counted.row_tokens == sum(len(proteins[unique]) + 2 for unique in store.row_unique)
    assert counted.row_tokens > counted.protein_tokens, "duplicates are rows of their own"


def test_tokens_of_a_subset_are_those_of_its_reads_rows(staged: StageSummary, tmp_path: Path) -> None:
    store = OrfStore.open(staged.store)
    rows = [row for row in range(len(store.row_read)) if store.row_read[row] % 3 == 0]
    names = store.row_ids(0, len(store.row_read))
    lines = [f"{names[row]}\tvirus\t0.1\t0.9" for row in rows]
    predictions = tmp_path / "prediction_results.txt"
    predictions.write_text("\n".join(["Sequence_ID\tPrediction\tscore1\tscore2", *lines]) + "\n", encoding="utf-8")
    proteins = store.protein(0, len(store.unique_row))
    assert baseline_tokens(store, predictions) == sum(len(proteins[store.row_unique[row]]) + 2 for row in rows)


def test_without_a_store_there_is_nothing_to_open(tmp_path: Path) -> None:
    assert open_beside(tmp_path) is None


def test_runs_of_other_reads_than_the_store_holds_are_caught(
    copied: tuple[Path, Profile], staged: StageSummary
) -> None:
    out, _ = copied
    assert verify_report(out).ok
    shutil.copyfile(staged.store, out / "orfs.h5")
    said = "\n".join(verify_report(out).differences)
    assert "devices-1/summary.json: n_reads: says 300, the raw files give 200" in said
    assert "run.json: fingerprints: fingerprint" in said
    edit_json(out / "devices-1" / "summary.json", lambda body: body.update(n_reads=200))
    assert "devices-1/summary.json: n_rows" in "\n".join(verify_report(out).differences)
    (out / "orfs.h5").write_bytes(b"x")
    assert any("orfs.h5" in line for line in verify_report(out).differences)
