"""A store is used only as it was staged: whatever bit of it is changed, it is staged again, or refused by its name."""

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
    out = tmp_path / "orfs.h5"
    made, whole = stage(spec, out), out.read_bytes()
    flip(out, len(whole) // 2)
    again = stage(spec, out)
    assert (again.reused, again.fingerprint) == (False, made.fingerprint)
    assert "orfs.h5: not what was staged (checksum); the reads are staged again" in caplog.text
    assert out.read_bytes() == whole
    assert stage(spec, out).reused


def test_whatever_bit_of_a_store_is_changed_it_is_refused(spec: StageSpec, tmp_path: Path) -> None:
    out, rng = tmp_path / "orfs.h5", random.Random(7)
    stage(spec, out)
    size = out.stat().st_size
    for place in (
        *range(0, 6000, 7),
        *rng.sample(range(6000, size), 150),
    ):  # HDF5 crashes on some of the first
        bits = 1 << rng.randrange(8)
        flip(out, place, bits)
        with pytest.raises(InputError, match=r"orfs\.h5: .*; stage the reads again"):
            OrfStore.open(out)
        flip(out, place, bits)
    assert OrfStore.open(out).n_reads == 60


def test_staged_again_when_asked(spec: StageSpec, tmp_path: Path) -> None:
    out = tmp_path / "orfs.h5"
    first = stage(spec, out)
    again = stage(spec, out, anew=True)
    assert (again.reused, again.fingerprint) == (False, first.fingerprint)


def test_a_damaged_store_is_replaced_by_the_reads_of_its_run_only(
    spec: StageSpec, tmp_path: Path, write: WriteReads
) -> None:
    out = tmp_path / "orfs.h5"
    recorded = RunRecord(
        fingerprints={"reads": (made := stage(spec, out)).fingerprint}, inputs=made.by_file
    )
    flip(out, out.stat().st_size // 2)
    damaged = digest(out)
    other = spec.model_copy(update={"reads": (write(fasta(made_up_reads(20)), "other.fa"),)})
    with pytest.raises(
        RunMismatchError, match=r"other reads.*reads\.fa was read then; other\.fa was not"
    ):
        stage(other, out, expected=recorded)
    assert digest(out) == damaged
    assert not stage(spec, out, expected=recorded).reused
    assert stage(spec, out, expected=recorded).reused


@pytest.mark.parametrize("workers", [1, 2])
def test_leaving_out_broken_records_never_leaves_out_a_whole_file(
    write: WriteReads, tmp_path: Path, workers: int
) -> None:
    good, empty = write(">a\nACGT\n", "a.fa"), write("", "b.fa")
    lost = write(">p\nMKVLEEE\n>q\nEEFPQ\n", "c.fa")
    spec = StageSpec(reads=(good, empty, lost), on_error="skip", stage_workers=workers)
    with pytest.raises(
        InputError,
        match=r"c\.fa: none of its records can be read.*2 broken, the first is .*c\.fa:1:",
    ) as caught:
        stage(spec, tmp_path / "run" / "orfs.h5")
    assert caught.value.file == lost
    assert list((tmp_path / "run").iterdir()) == []
    assert (
        stage(
            spec.model_copy(update={"reads": (good, empty)}), tmp_path / "run" / "orfs.h5"
        ).counts.n_reads
        == 1
    )
