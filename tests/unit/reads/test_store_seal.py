"""A store is used only as it was staged: after any changed bit it is staged again or refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.runfiles import RunRecord

from .conftest import WriteReads
from .made_up import digest, fasta, made_up_reads


def flip(path: Path, place: int, bits: int = 1) -> None:
    with path.open("rb+") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bits]))


@pytest.fixture
def spec(write: WriteReads) -> StageSpec:
    return StageSpec(reads=(write(fasta(made_up_reads(60))),), model_length=100)


def test_a_store_with_a_changed_bit_is_staged_again(
    spec: StageSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_path = tmp_path / "orfs.h5"
    first_summary, content = stage(spec, store_path), store_path.read_bytes()
    flip(store_path, len(content) // 2)
    second_summary = stage(spec, store_path)
    assert (second_summary.reused, second_summary.fingerprint) == (False, first_summary.fingerprint)
    assert "orfs.h5: not what was staged (checksum); the reads are staged again" in caplog.text
    assert store_path.read_bytes() == content
    assert stage(spec, store_path).reused


def test_any_changed_bit_of_a_store_is_refused(spec: StageSpec, tmp_path: Path) -> None:
    store_path, rng = tmp_path / "orfs.h5", random.Random(7)
    stage(spec, store_path)
    size = store_path.stat().st_size
    for place in (
        *range(0, 6000, 7),
        *rng.sample(range(6000, size), 150),
    ):  # HDF5 crashes on some of the first
        bits = 1 << rng.randrange(8)
        flip(store_path, place, bits)
        with pytest.raises(InputError, match=r"orfs\.h5: .*; stage the reads again"):
            OrfStore.open(store_path)
        flip(store_path, place, bits)
    assert OrfStore.open(store_path).n_reads == 60


def test_staged_again_when_asked(spec: StageSpec, tmp_path: Path) -> None:
    store_path = tmp_path / "orfs.h5"
    first_summary = stage(spec, store_path)
    second_summary = stage(spec, store_path, rebuild=True)
    assert (second_summary.reused, second_summary.fingerprint) == (False, first_summary.fingerprint)


def test_a_damaged_store_is_only_replaced_by_the_reads_of_its_run(
    spec: StageSpec, tmp_path: Path, write: WriteReads
) -> None:
    store_path = tmp_path / "orfs.h5"
    record = RunRecord(
        fingerprints={"reads": (summary := stage(spec, store_path)).fingerprint},
        inputs=summary.by_file,
    )
    flip(store_path, store_path.stat().st_size // 2)
    damaged_digest = digest(store_path)
    other_spec = spec.model_copy(update={"reads": (write(fasta(made_up_reads(20)), "other.fa"),)})
    with pytest.raises(
        RunMismatchError, match=r"other reads.*reads\.fa was read then; other\.fa was not"
    ):
        stage(other_spec, store_path, recorded_run=record)
    assert digest(store_path) == damaged_digest
    assert not stage(spec, store_path, recorded_run=record).reused
    assert stage(spec, store_path, recorded_run=record).reused


@pytest.mark.parametrize("workers", [1, 2])
def test_skipping_broken_records_never_skips_a_whole_file(
    write: WriteReads, tmp_path: Path, workers: int
) -> None:
    good, empty = write(">a\nACGT\n", "a.fa"), write("", "b.fa")
    protein_file = write(">p\nMKVLEEE\n>q\nEEFPQ\n", "c.fa")
    spec = StageSpec(reads=(good, empty, protein_file), on_error="skip", stage_workers=workers)
    with pytest.raises(
        InputError,
        match=r"c\.fa: none of its records can be read.*2 broken, the first is .*c\.fa:1:",
    ) as error_info:
        stage(spec, tmp_path / "run" / "orfs.h5")
    assert error_info.value.file == protein_file
    assert list((tmp_path / "run").iterdir()) == []
    assert (
        stage(
            spec.model_copy(update={"reads": (good, empty)}), tmp_path / "run" / "orfs.h5"
        ).counts.n_reads
        == 1
    )
