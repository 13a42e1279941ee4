"""Staging as a whole: the store equals that of the slow twin, however it is made."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from hypothesis import given, settings
from hypothesis import strategies as st
from xopen import xopen

from tests.columns import documented
from virnuc_core.config import Spec
from virnuc_core.errors import ConfigError, InputError, StorageError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import DUPLICATE_ID
from virnuc_core.runfiles import digest as content_of

from .conftest import WriteReads, shrink
from .made_up import Pairs, digest, fasta, fastq, made_up_reads
from .reads_twin import rows
from .store_checks import check_equals_twin, rows_of


@pytest.mark.parametrize("text", [fasta, fastq])
def test_equals_the_slow_twin(write: WriteReads, tmp_path: Path, text: type[str]) -> None:
    reads = made_up_reads(300)
    stage(StageSpec(reads=(write(text(reads)),), model_length=100), tmp_path / "orfs.h5")
    check_equals_twin(OrfStore.open(tmp_path / "orfs.h5"), reads)


@pytest.mark.usefixtures("small_sizes")
def test_equals_the_slow_twin_across_segments(write: WriteReads, tmp_path: Path) -> None:
    reads = made_up_reads(300, seed=1)
    stage(StageSpec(reads=(write(fasta(reads)),), model_length=100), tmp_path / "orfs.h5")
    check_equals_twin(OrfStore.open(tmp_path / "orfs.h5"), reads)


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="ACGTNacgt", max_size=70), max_size=15), st.integers(1, 40))
def test_equals_the_slow_twin_on_random_reads(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    reads = [(f"r{i}", bases) for i, bases in enumerate(sequences)]
    (folder / "reads.fa").write_text(fasta(reads))
    stage(StageSpec(reads=(str(folder / "reads.fa"),), model_length=size), folder / "orfs.h5")
    check_equals_twin(OrfStore.open(folder / "orfs.h5"), reads)


@pytest.mark.parametrize("size", [300, 500])
@pytest.mark.parametrize(
    "name",
    [
        "viral/sars_cov_2.NC_045512.2.fasta.gz",
        "viral/influenza_A_PR8_H1N1.8segments.fasta.gz",
        "host/cow_bosTau8_chr25.fasta.gz",
        "nasty/iupac_and_N_lowercase_zika34.fasta.gz",
        "nasty/alignment_with_gaps_lassa.fasta.gz",
        "nasty/rna_letters.fastq",
        "reads/illumina_hiv1_SRR9588828_R1.fastq.gz",
    ],
)
def test_equals_the_slow_twin_on_real_sequences(
    real_data: Path, tmp_path: Path, name: str, size: int
) -> None:
    path = real_data / name
    stage(StageSpec(reads=(str(path),), model_length=size), tmp_path / "orfs.h5")
    with xopen(path, "rt", threads=0) as handle:
        if ".fastq" in name:
            lines = handle.read().splitlines()
            reads = [(lines[i].split()[0][1:], lines[i + 1]) for i in range(0, len(lines), 4)]
        else:
            reads = [(title.split()[0], bases) for title, bases in SimpleFastaParser(handle)]
    check_equals_twin(OrfStore.open(tmp_path / "orfs.h5"), reads)


def test_reads_cut_from_both_strands_of_real_genomes(
    real_data: Path, tmp_path: Path, write: WriteReads
) -> None:
    rng = random.Random(5)
    reads: Pairs = []
    for name in ("viral/monkeypox.MT903345.1.fasta.gz", "host/human_chr13_chr4_hg38.fasta.gz"):
        with xopen(real_data / name, "rt", threads=0) as handle:
            genome = max((bases for _, bases in SimpleFastaParser(handle)), key=len)
        for _ in range(300):
            start = rng.randrange(len(genome) - 160)
            reads.append((f"r{len(reads)}", genome[start : start + rng.choice([75, 150, 151])]))
    stage(StageSpec(reads=(write(fastq(reads)),)), tmp_path / "orfs.h5")
    check_equals_twin(OrfStore.open(tmp_path / "orfs.h5"), reads)


def test_equal_dna_with_different_proteins_is_not_deduplicated(
    write: WriteReads, tmp_path: Path
) -> None:
    reads = [
        ("a", "ATGNNNAAA"),
        ("b", "ATGNNNATG"),
    ]  # F1: both are cut to ATGNNNA, but the proteins are MK and MM
    stage(StageSpec(reads=(write(fasta(reads)),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    firsts = [u for u, frame in zip(store.row_unique, store.row_frame, strict=True) if frame == 0]
    assert [(store.dna(u, u + 1), store.protein(u, u + 1)) for u in firsts] == [
        ([b"ATGNNNA"], [b"MK"]),
        ([b"ATGNNNA"], [b"MM"]),
    ]


def test_an_ambiguous_letter_outside_the_row_does_not_prevent_deduplication(
    write: WriteReads, tmp_path: Path
) -> None:
    reads = [("a", "GCAGCAG"), ("b", "GCAGCAGNN")]
    stage(StageSpec(reads=(write(fasta(reads)),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    firsts = [
        int(u) for u, frame in zip(store.row_unique, store.row_frame, strict=True) if frame == 0
    ]
    assert firsts[0] == firsts[1]


# what does not change the bytes


def test_the_same_reads_give_the_same_bytes(write: WriteReads, tmp_path: Path) -> None:
    reads = made_up_reads(200)
    whole_file, first_file, other_file = (write(text, name) for text, name in [
        (fasta(reads), "all.fa"), (fastq(reads[:50]), "first.fq"), (fasta(reads[50:]), "rest.fa")
    ])  # fmt: skip
    xz_file = tmp_path / "all.fa.xz"
    with xopen(xz_file, "wb", threads=0) as file:
        file.write(fasta(reads).replace("\n", "\r\n").encode())
    digests = set()
    for number, files in enumerate([(whole_file,), (first_file, other_file), (str(xz_file),)]):
        summary = stage(StageSpec(reads=files, model_length=100), tmp_path / f"{number}.h5")
        digests.add((summary.fingerprint, digest(tmp_path / f"{number}.h5")))
    assert len(digests) == 1


def test_other_reads_and_settings_give_another_fingerprint(
    write: WriteReads, tmp_path: Path
) -> None:
    cases = [
        (fasta([("a", "ACGT"), ("b", "GG")]), 100),
        (fasta([("a", "ACGT"), ("b", "GG")]), 101),
        (fasta([("a", "ACG"), ("b", "TGG")]), 100),
        (fasta([("ab", "ACGT"), ("c", "GG")]), 100),
        (fasta([("a", "ACGT"), ("bc", "GG")]), 100),
        (fasta([("b", "GG"), ("a", "ACGT")]), 100),
        (fasta([("a", "ACGTGG")]), 100),
        (fasta([("a", "acgt"), ("b", "GG")]), 100),
    ]
    prints = {
        stage(
            StageSpec(reads=(write(text, f"{i}.fa"),), model_length=size), tmp_path / f"{i}.h5"
        ).fingerprint
        for i, (text, size) in enumerate(cases)
    }
    assert len(prints) == len(cases)


# made once


def test_reused_when_reads_and_settings_are_the_same(write: WriteReads, tmp_path: Path) -> None:
    store_path = tmp_path / "orfs.h5"
    reads = (write(fasta(made_up_reads(50))),)
    first_summary = stage(StageSpec(reads=reads, model_length=100), store_path)
    stat_before = store_path.stat()
    write(fasta(made_up_reads(50)))  # the time of the file says nothing
    second_summary = stage(StageSpec(reads=reads, model_length=100, stage_workers=2), store_path)
    assert second_summary == first_summary.model_copy(update={"reused": True})
    assert (store_path.stat().st_ino, store_path.stat().st_mtime_ns) == (
        stat_before.st_ino,
        stat_before.st_mtime_ns,
    )
    other_summary = stage(
        StageSpec(reads=(write(fastq(made_up_reads(50)), "b.fq"),), model_length=100), store_path
    )
    assert (other_summary.reused, other_summary.fingerprint) == (False, first_summary.fingerprint)


def test_a_store_replaced_by_another_staging_is_not_reused(
    write: WriteReads, tmp_path: Path
) -> None:
    store_path, other_store = tmp_path / "orfs.h5", tmp_path / "other.h5"
    spec = StageSpec(reads=(write(fasta(made_up_reads(50))),), model_length=100)
    stage(spec, store_path)
    stage(StageSpec(reads=(write(">a\nACGT\n", "b.fa"),), model_length=100), other_store)
    other_store.replace(store_path)  # killed before it could say what it is of
    assert not stage(spec, store_path).reused
    assert OrfStore.open(store_path).n_reads == 50


def test_staged_again_when_anything_differs(write: WriteReads, tmp_path: Path) -> None:
    store_path = tmp_path / "orfs.h5"
    path = write(fasta(made_up_reads(50)))
    fingerprints = {stage(StageSpec(reads=(path,), model_length=100), store_path).fingerprint}
    for text, size in (
        (fasta(made_up_reads(50)), 90),
        (fasta(made_up_reads(51)), 90),
        (fasta([]), 90),
    ):
        write(text)
        summary = stage(StageSpec(reads=(path,), model_length=size), store_path)
        assert not summary.reused
        fingerprints.add(summary.fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize("content", [b"", b"no HDF5", None])
def test_a_file_that_is_not_a_store_is_replaced(
    write: WriteReads, tmp_path: Path, content: bytes | None
) -> None:
    store_path = tmp_path / "orfs.h5"
    if content is None:
        with h5py.File(store_path, "w") as file:
            file.attrs["format"] = "something else"
    else:
        store_path.write_bytes(content)
    with pytest.raises(InputError, match="stage the reads"):
        OrfStore.open(store_path)
    assert not stage(StageSpec(reads=(write(">a\nACGT\n"),)), store_path).reused
    assert OrfStore.open(store_path).n_reads == 1


def test_refused_reads_leave_no_new_store_and_keep_the_old_one(
    write: WriteReads, tmp_path: Path
) -> None:
    store_path = tmp_path / "run" / "orfs.h5"
    with pytest.raises(InputError):
        stage(StageSpec(reads=(write(">a\nACGT\n>b\nEEE\n"),)), store_path)
    assert list(store_path.parent.iterdir()) == []
    stage(StageSpec(reads=(write(">a\nACGT\n"),)), store_path)
    digest_before = digest(store_path)
    with pytest.raises(InputError):
        stage(StageSpec(reads=(write(">a\nACGT\n>b\nEEE\n"),)), store_path)
    assert sorted(path.name for path in store_path.parent.iterdir()) == [
        "orfs.h5",
        "orfs.made.json",
    ]
    assert digest(store_path) == digest_before


def test_an_unwritable_output_is_refused(write: WriteReads, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        stage(StageSpec(reads=(write(">a\nACGT\n"),)), tmp_path / "file" / "orfs.h5")


def test_a_full_disk_is_reported_in_one_line(
    write: WriteReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("virnuc_core.reads.store.StoreWriter.add", refuse)
    with pytest.raises(
        StorageError, match=r"orfs\.h5: No space left on device; .* free there; make room"
    ):
        stage(StageSpec(reads=(write(">a\nACGT\n"),)), tmp_path / "run" / "orfs.h5")
    assert list((tmp_path / "run").iterdir()) == []


# ids


def test_reads_with_equal_ids_get_numbers(write: WriteReads, tmp_path: Path) -> None:
    reads = [("a", "ACGTACG"), ("b", "GGGG"), ("a", "GCGCGC"), ("a", "ACGTACG"), ("b", "")]
    summary = stage(StageSpec(reads=(write(fasta(reads)),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert store.read_ids(0, 5) == ["a", "b", "a.2", "a.3", "b.2"]
    assert store.read_ids(2, 4) == ["a.2", "a.3"]
    assert store.original_ids(0, 5) == ["a", "b", "a", "a", "b"]
    assert [bool(flags & DUPLICATE_ID) for flags in store.read_flags] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert summary.counts.n_duplicate_ids == 3
    assert store.row_ids(0, store.n_rows, original=True) == [row.id for row in rows(reads, 500)]
    renamed_reads = [
        ("a", "ACGTACG"),
        ("b", "GGGG"),
        ("a.2", "GCGCGC"),
        ("a.3", "ACGTACG"),
        ("b.2", ""),
    ]
    assert rows_of(store) == rows(renamed_reads, 500)


def test_a_numbered_name_is_never_the_id_of_another_read(write: WriteReads, tmp_path: Path) -> None:
    reads = [(name, "ACGTACG") for name in ("a", "a", "a.2", "b", "a.2", "a..2")]
    stage(StageSpec(reads=(write(fasta(reads)),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert store.read_ids(0, 6) == ["a", "a...2", "a.2", "b", "a.2...2", "a..2"]


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="a.2", min_size=1, max_size=6), max_size=40))
def test_ids_are_always_distinct(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    (folder / "reads.fa").write_text("".join(f">{name}\nA\n" for name in names))
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, block_bytes=30)
        stage(StageSpec(reads=(str(folder / "reads.fa"),)), folder / "orfs.h5")
    store = OrfStore.open(folder / "orfs.h5")
    ids = store.read_ids(0, store.n_reads)
    assert len(set(ids)) == len(names)
    assert store.original_ids(0, store.n_reads) == names
    assert [ids[names.index(name)] for name in names] == names  # the first of a kind keeps its name
    assert store.counts.n_duplicate_ids == len(names) - len(set(names))


def test_strict_mode_refuses_equal_ids_and_names_both_places(
    write: WriteReads, tmp_path: Path
) -> None:
    first_file = write(">x\nAC\n>r7\nACGT\n", "one.fa")
    second = write("@y\nAC\n+\nII\n@r7\nAC\n+\nII\n@x\nA\n+\nI\n", "two.fq")
    spec = StageSpec(reads=(first_file, second), strict=True)
    with pytest.raises(InputError) as error_info:
        stage(spec, tmp_path / "orfs.h5")
    assert (error_info.value.file, error_info.value.line, error_info.value.read_id) == (
        second,
        5,
        "r7",
    )
    assert f"{first_file}:3" in str(error_info.value)
    assert not (tmp_path / "orfs.h5").exists()
    stage(spec.model_copy(update={"strict": False}), tmp_path / "orfs.h5")
    with pytest.raises(InputError):  # a store made before does not let them pass
        stage(spec, tmp_path / "orfs.h5")


# broken records


def test_skipped_records_are_counted_and_listed(write: WriteReads, tmp_path: Path) -> None:
    path = write("@a\nAC\n+\nII\n@b\nACG\n+\nII\n@c\nEEE\n+\nIII\n@d\nGG\n+\nII\n")
    store_path = tmp_path / "orfs.h5"
    for is_reused in (False, True):
        summary = stage(StageSpec(reads=(path,), on_error="skip"), store_path)
        assert (summary.reused, summary.tally["skipped"], summary.counts.n_reads) == (
            is_reused,
            2,
            2,
        )
        assert documented(tmp_path / "skipped.tsv") > 0
        lines = [line.split("\t") for line in (tmp_path / "skipped.tsv").read_text().splitlines()]
        assert lines[0] == ["file", "line", "read", "problem"]
        assert sorted(line[:3] for line in lines[1:]) == [[path, "5", "b"], [path, "9", "c"]]
    with pytest.raises(InputError):  # not a reason to let broken records pass
        stage(StageSpec(reads=(path,)), store_path)
    assert (tmp_path / "skipped.tsv").exists(), "it is of the store that is there still"
    stage(StageSpec(reads=(write("@a\nAC\n+\nII\n"),)), store_path)
    assert not (tmp_path / "skipped.tsv").exists(), "of a store from which nothing was left out"


def test_oddities_are_counted_by_file(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_file = write(
        ">a\nACGTACGTACG\n>b\n\n>a\nACGTACGTACG\n>n\nTAATAATAATAGTAGTAGATGATGATG\n", "in/one.fa"
    )
    two = write("@a\n\n+\n\n@bad\nACG\n+\nI\n@c\nGGNGG\n+\nIIIII\n", "in/two.fq")
    text_file = write("no reads", "in/other.txt")
    summary = stage(StageSpec(reads=(str(tmp_path / "in"),), on_error="skip"), tmp_path / "orfs.h5")
    figures_of_file = [
        (f.file, f.reads, f.empty, f.skipped, f.duplicate_ids, f.content) for f in summary.by_file
    ]
    assert figures_of_file == [
        (first_file, 4, 1, 0, 1, content_of(Path(first_file))),
        (two, 2, 1, 1, 1, content_of(Path(two))),
    ]
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert summary.tally == {
        "reads": 6,
        "empty": 2,
        "skipped": 1,
        "duplicate_ids": 2,
        "duplicates": store.n_rows - store.n_uniques,
        "ambiguous": 1,
        "short_for_model": 4,
        "no_open_frame": int(
            np.count_nonzero((store.read_rows[:] == 0) & (store.read_chunks[:] > 0))
        ),
    }
    assert summary.tally["duplicates"] > 0
    assert summary.warnings() == [
        f"{first_file}: 1 read without bases",
        f"{first_file}: 1 read with the id of an earlier read, told apart by a number added to it",
        f"{two}: 1 broken record left out",
        f"{two}: 1 read without bases",
        f"{two}: 1 read with the id of an earlier read, told apart by a number added to it",
        f"{text_file}: neither FASTA nor FASTQ, not read",
    ]
    assert [record.message for record in caplog.records] == summary.warnings()


def test_a_file_without_reads_is_reported(write: WriteReads, tmp_path: Path) -> None:
    empty = write("", "empty.fa")
    summary = stage(StageSpec(reads=(write(">a\nACGT\n"), empty)), tmp_path / "orfs.h5")
    assert f"{empty}: holds no reads" in summary.warnings()


def test_an_empty_input_makes_an_empty_store(write: WriteReads, tmp_path: Path) -> None:
    stage(StageSpec(reads=(write(""),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert (store.n_reads, store.n_rows, store.n_uniques) == (0, 0, 0)
    assert (store.read_ids(0, 0), store.row_ids(0, 0), store.protein(0, 0), store.dna(0, 0)) == (
        [],
        [],
        [],
        [],
    )
    assert store.protein_offsets.tolist() == [0]
    assert stage(StageSpec(reads=(write(""),)), tmp_path / "orfs.h5").reused


def test_every_nasty_file_is_staged_or_refused_in_one_line(real_data: Path, tmp_path: Path) -> None:
    n_staged = 0
    for path in sorted((real_data / "nasty").iterdir()):
        for on_error in ("stop", "skip"):
            store_path = tmp_path / f"{path.name}.{on_error}" / "orfs.h5"
            message = ""
            try:
                summary = stage(StageSpec(reads=(str(path),), on_error=on_error), store_path)
            except InputError as error:
                message = str(error)
            if message:
                assert str(path) in message
                assert "\n" not in message
                assert not store_path.exists()
                continue
            n_staged += 1
            store = OrfStore.open(store_path)
            assert store.n_reads == summary.counts.n_reads
            assert len(set(store.read_ids(0, store.n_reads))) == store.n_reads
            assert int(store.read_rows.sum()) == store.n_rows
    assert n_staged > 60


# the file


def test_columns_are_contiguous_aligned_and_plain(write: WriteReads, tmp_path: Path) -> None:
    stage(
        StageSpec(reads=(write(fasta(made_up_reads(30))),), model_length=100), tmp_path / "orfs.h5"
    )
    with h5py.File(tmp_path / "orfs.h5") as file:
        for name, dataset in file.items():
            assert dataset.chunks is None, name
            assert dataset.compression is None, name
            assert dataset.size == 0 or dataset.id.get_offset() % 8 == 0, name
    store = OrfStore.open(tmp_path / "orfs.h5")
    assert isinstance(store.row_read, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        store.row_read[0] = 1


def test_stretches_of_the_store_agree_with_the_complete_store(
    write: WriteReads, tmp_path: Path
) -> None:
    stage(
        StageSpec(reads=(write(fasta(made_up_reads(60))),), model_length=100), tmp_path / "orfs.h5"
    )
    store = OrfStore.open(tmp_path / "orfs.h5")
    n = store.n_uniques
    assert store.protein(3, 9) == store.protein(0, n)[3:9]
    assert store.dna(3, 9) == store.dna(0, n)[3:9]
    assert store.row_ids(5, 40) == store.row_ids(0, store.n_rows)[5:40]


def test_settings_are_checked() -> None:
    assert issubclass(StageSpec, Spec)
    for bad in ({"reads": ("a",), "model_length": 0}, {"reads": ("a",), "stage_workers": -1}):
        with pytest.raises(ValueError, match="greater"):
            StageSpec.model_validate(bad)
    with pytest.raises(ConfigError, match="none are named"):
        StageSpec()


def test_a_reused_store_keeps_the_times_of_its_staging(write: WriteReads, tmp_path: Path) -> None:
    store_path, reads = tmp_path / "orfs.h5", write(">a\nACGTACGTACGT\n")
    first_summary = stage(StageSpec(reads=(reads,)), store_path)
    second_summary = stage(StageSpec(reads=(reads,)), store_path)
    assert second_summary.reused
    assert (second_summary.total_s, second_summary.chunk_s, second_summary.translate_s) == (
        first_summary.total_s,
        first_summary.chunk_s,
        first_summary.translate_s,
    )
    (tmp_path / "orfs.made.json").unlink()
    assert not stage(StageSpec(reads=(reads,)), store_path).reused
    summary_path = tmp_path / "orfs.made.json"
    summary_path.write_text(summary_path.read_text()[:-20])
    stage(StageSpec(reads=(reads,)), store_path)
    json.loads(summary_path.read_text())
    assert summary_path.with_name(f"{summary_path.name}.damaged").exists()


def test_an_empty_pipe_is_an_error_and_not_an_empty_result(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no read came in from /dev/null"):
        stage(StageSpec(reads=("/dev/null",), model_length=300), tmp_path / "out" / "orfs.h5")
    assert not (tmp_path / "out" / "orfs.h5").exists()
