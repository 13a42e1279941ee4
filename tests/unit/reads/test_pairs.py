"""Pairs: how mates are found and checked, how they are stored, and their joint verdict."""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.columns import documented
from virnuc_core import results
from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError, RunMismatchError
from virnuc_core.reads import pairs
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import write_reads
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunRecord

from .conftest import WriteReads
from .made_up import digest

Headers = Sequence[str]


def bases_of(header: str) -> str:
    return "".join(random.Random(header).choices("ACG", k=60))


def fastq(headers: Headers) -> str:
    return "".join(f"@{header}\n{bases_of(header)}\n+\n{'I' * 60}\n" for header in headers)


def fasta(headers: Headers) -> str:
    return "".join(f">{header}\n{bases_of(header)}\n" for header in headers)


def two(
    write: WriteReads, firsts: Headers, seconds: Headers, form: object = fastq
) -> dict[str, tuple[str, ...]]:
    """What names two files with mates."""
    paths = [
        write(form(headers), name) for headers, name in ((firsts, "a_R1.fq"), (seconds, "a_R2.fq"))
    ]  # type: ignore[operator]
    return {"mates_1": (paths[0],), "mates_2": (paths[1],)}


def staged(out: Path, **spec: object) -> tuple[StageSummary, OrfStore]:
    summary = stage(StageSpec(model_length=60, **spec), out)
    return summary, OrfStore.open(out)


def names(store: OrfStore) -> list[str]:
    return store.read_ids(0, store.n_reads)


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [
        ("r{}", "r{}", fastq),
        ("r{}/1", "r{}/2", fasta),
        ("r{} 1:N:0:ATCACG", "r{} 2:N:0:ATCACG", fastq),
        ("r{} some words", "r{} other/1 words", fasta),
        ("r{}/1 1:Y:18:A", "r{}", fastq),
        ("r{}.1 1 length=60", "r{}.2 1 length=60", fastq),
        ("r{}_1", "r{}_2", fasta),
        ("r{}:1", "r{}:2", fastq),
        # looks like Casava's word, but is none
        ("r{} 2:1:0:77:5", "r{} 1:1:0:77:5", fastq),
        ("r{} 2:N", "r{} 1:Nothing", fastq),
    ],
)
def test_mates_follow_each_other_with_any_style_of_names(
    write: WriteReads, tmp_path: Path, first: str, second: str, form: object
) -> None:
    headers = [[style.format(i) for i in range(5)] for style in (first, second)]
    summary, store = staged(tmp_path / "orfs.h5", strict=True, **two(write, *headers, form))
    assert names(store) == [f"r{i}/{mate}" for i in range(5) for mate in (1, 2)]
    assert [store.read_length[i] for i in range(10)] == [60] * 10
    assert (summary.n_pairs, summary.tally["duplicate_ids"], summary.warnings()) == (5, 0, [])
    assert [(file.reads, file.orphans) for file in summary.by_file] == [(5, 0), (5, 0)]
    interleaved_file = write(
        form([h for mates_of_pair in zip(*headers, strict=True) for h in mates_of_pair]), "mixed.fq"
    )  # type: ignore[operator]
    staged(tmp_path / "again.h5", reads=(interleaved_file,), interleaved=True, stage_workers=2)
    assert digest(tmp_path / "again.h5") == digest(tmp_path / "orfs.h5"), (
        "one file or two are the same pairs"
    )


@pytest.mark.parametrize(
    ("firsts", "seconds", "file", "line", "read", "message"),
    [
        (
            ["a", "b", "c"],
            ["a", "c"],
            1,
            5,
            "b",
            "has no mate in .*a_R2.fq, where 'c' is next, at line 5",
        ),
        (
            ["a", "c"],
            ["a", "b", "c"],
            2,
            5,
            "b",
            "has no mate in .*a_R1.fq, where 'c' is next, at line 5",
        ),
        (["a", "b", "c"], ["a", "b"], 1, 9, "c", "has no mate in .*a_R2.fq, which ends"),
        (["a", "b"], ["a", "b", "c"], 2, 9, "c", "has no mate in .*a_R1.fq, which ends"),
        (
            ["a", "b", "c"],
            ["b", "a", "c"],
            1,
            1,
            "a",
            "do not follow in .*a_R2.fq, where 'b' is next",
        ),
        (
            ["a", "b", "c"],
            ["x", "y", "z"],
            1,
            1,
            "a",
            "do not follow in .*a_R2.fq, where 'x' is next",
        ),
        (
            ["a/2", "b/2"],
            ["a/1", "b/1"],
            1,
            1,
            "a",
            "the header says mate 2, but mate 1 is expected here; are the files swapped",
        ),
        (
            ["a 2:N:0:A"],
            ["a 1:N:0:A"],
            1,
            1,
            "a",
            "the header says mate 2, but mate 1 is expected here; are the files swapped",
        ),
        (["a/1"], ["a/1"], 2, 1, "a", "the header says mate 1, but mate 2 is expected here"),
        (["a"], [], 1, 1, "a", "has no mate in .*a_R2.fq, which ends"),
        (
            ["a_forward", "b_forward"],
            ["a_reverse", "b_reverse"],
            1,
            1,
            "a_forward",
            "its mate has another id, 'a_reverse' in .*a_R2.fq; the ids of mates must be equal",
        ),
        (["a.R1"], ["a.R2"], 1, 1, "a.R1", "its mate has another id, 'a.R2'"),
        # only where all ids of a file end so
        (["a.1", "b.1", "c"], ["a.2", "b.2", "c"], 1, 1, "a.1", "has no mate in .*'a.2' is next"),
        (["r.7"], ["r.8"], 1, 1, "r.7", "do not follow in .*a_R2.fq, where 'r.8' is next"),
    ],
)
def test_missing_or_unordered_mates_are_refused_by_file_line_and_read(
    write: WriteReads,
    tmp_path: Path,
    firsts: Headers,
    seconds: Headers,
    file: int,
    line: int,
    read: str,
    message: str,
) -> None:
    with pytest.raises(InputError, match=message) as error_info:
        staged(tmp_path / "orfs.h5", **two(write, firsts, seconds))
    assert (Path(str(error_info.value.file)).name, error_info.value.line) == (f"a_R{file}.fq", line)
    assert (
        error_info.value.read_id,
        error_info.value.exit_code,
        "\n" in str(error_info.value),
    ) == (read, 2, False)
    assert not (tmp_path / "orfs.h5").exists()


def test_mates_may_have_unprintable_ids(write: WriteReads, tmp_path: Path) -> None:
    files = [write(b">\x01\x02\xff\x03/%d\nA\n" % mate, f"{mate}.fa") for mate in (1, 2)]
    _, store = staged(tmp_path / "orfs.h5", mates_1=files[:1], mates_2=files[1:])
    assert names(store) == [rf"\x01\x02\xff\x03/{mate}" for mate in (1, 2)]


def test_a_pair_may_mix_packings_but_not_formats(write: WriteReads, tmp_path: Path) -> None:
    files = [write(fasta("ab"), "r_1.fa"), write(fastq("ab"), "r_2.fq")]
    with pytest.raises(InputError, match=r"is fasta, but .*r_2.fq with its mates fastq"):
        staged(tmp_path / "orfs.h5", mates_1=files[:1], mates_2=files[1:])
    gzip_file = write(gzip.compress(fasta("ab").encode()), "r_2.fa.gz")
    _, store = staged(tmp_path / "orfs.h5", mates_1=files[:1], mates_2=(gzip_file,))
    assert names(store) == ["a/1", "a/2", "b/1", "b/2"]


def test_files_of_mates_without_the_other_file_are_refused(
    write: WriteReads, tmp_path: Path
) -> None:
    first_file, second_file = write(fasta("ab"), "a_R1.fa"), write(fasta("ab"), "a_R2.fa")
    with pytest.raises(ConfigError, match="-1 names 2 files, -2 1; name both"):
        StageSpec(mates_1=(first_file, second_file), mates_2=(second_file,))
    mates = {"mates_1": (first_file,), "mates_2": (second_file,), "reads": (first_file,)}
    with pytest.raises(InputError, match="named twice"):
        staged(tmp_path / "orfs.h5", **mates)


@pytest.mark.parametrize(
    ("named", "beside", "hint"),
    [
        ("a_R1.fq", "a_R2.fq", "-2 takes the second mates (is it {beside}?)"),
        ("a_R2.fq", "a_R1.fq", "-1 takes the first mates (is it {beside}?)"),
        ("a_1.fq", "a_2.fq", "-2 takes the second mates (is it {beside}?)"),
        ("a_fwd.fq", "a_rev.fq", "-2 takes the second mates (is it {beside}?)"),
        ("a_R1.fq", "b_R2.fq", "-2 takes the second mates"),
        ("a.fq", "b.fq", "-2 takes the second mates"),
    ],
)
def test_one_file_as_both_mates_is_refused_with_the_file_that_may_be_meant(
    write: WriteReads, tmp_path: Path, named: str, beside: str, hint: str
) -> None:
    file = write(fastq("ab"), named)
    other_file = write(fastq("ab"), beside)
    with pytest.raises(InputError) as error_info:
        find_reads(ReadsSpec(mates_1=(file,), mates_2=(file,)))
    expected_hint = hint.format(beside=other_file)
    assert str(error_info.value) == f"-1 and -2 name the same file, {file}; {expected_hint}"
    assert error_info.value.exit_code == 2


def test_mates_that_lie_beside_a_file_and_are_not_read_are_told_in_one_line(
    write: WriteReads, caplog: pytest.LogCaptureFixture
) -> None:
    files = [write(fastq("ab"), name) for name in ("a_R1.fq", "a_R2.fq", "p_1.fq", "c.fq")]
    write(fastq("xy"), "p_2.fq")  # of another patient: their reads have other ids
    find_reads(ReadsSpec(reads=(files[0],), pairs=False))
    find_reads(ReadsSpec(reads=(files[2],)))
    find_reads(ReadsSpec(reads=(files[3],)))
    find_reads(ReadsSpec(reads=tuple(files[:2])))
    assert not caplog.records
    message = "its mate {} lies beside it and is not read; name both to judge pairs, or use"
    expected = [
        f"{files[0]}: {message.format(files[1])} --no-pairs",
        f"{files[1]}: {message.format(files[0])} --no-pairs",
    ]
    find_reads(ReadsSpec(reads=(files[0],)))
    find_reads(ReadsSpec(reads=(files[1], files[3])))
    assert [record.message for record in caplog.records] == expected


@pytest.mark.parametrize(
    "headers", [["a", "a", "b"], ["a", "b", "b", "c", "c"], ["a/1", "a/2", "b/1"]]
)
def test_an_unpaired_read_of_an_interleaved_file_is_refused(
    write: WriteReads, tmp_path: Path, headers: Headers
) -> None:
    with pytest.raises(
        InputError, match=r"read '[ab]': has no mate in .*i.fq, (which ends|where 'b' is next)"
    ):
        staged(tmp_path / "orfs.h5", reads=(write(fastq(headers), "i.fq"),), interleaved=True)
    with pytest.raises(InputError, match="the header says mate 2, but mate 1 is expected here"):
        staged(
            tmp_path / "orfs.h5", reads=(write(fastq(["a/2", "a/1"]), "i.fq"),), interleaved=True
        )


def test_interleaved_reads_come_through_a_pipe(write: WriteReads, tmp_path: Path) -> None:
    text = fastq([name for i in range(40) for name in (f"r{i} 1:N:0", f"r{i} 2:N:0")])
    program = (
        "import sys; from pathlib import Path\n"
        "from virnuc_core.reads.stage import StageSpec, stage\n"
        "spec = StageSpec(reads=('-',), interleaved=True, model_length=60)\n"
        "print(stage(spec, Path(sys.argv[1])).n_pairs)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "piped.h5")]
    process = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    assert process.stdout == "40\n"
    staged(tmp_path / "orfs.h5", reads=(write(text),), interleaved=True)
    assert digest(tmp_path / "orfs.h5") == digest(tmp_path / "piped.h5")


def test_files_of_a_folder_are_paired_by_name_and_logged(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("b_R1_001", "b_R2_001", "a_R1", "a_R2", "x_1_1", "x_1_2", "alone_R1", "single"):
        write(fastq([f"{name[0]}1", f"{name[0]}2"]), f"in/{name}.fastq")
    folder = str(tmp_path / "in")
    summary, store = staged(tmp_path / "orfs.h5", reads=(folder,))
    assert [Path(name).stem for pair in summary.pairs for name in pair] == [
        *("a_R1", "a_R2", "b_R1_001", "b_R2_001"),
        *("x_1_1", "x_1_2"),
    ]
    assert [Path(name).stem for name in summary.files[6:]] == ["alone_R1", "single"]
    assert names(store)[:4] == ["a1/1", "a1/2", "a2/1", "a2/2"]
    assert names(store)[12:] == ["a1", "a2", "s1", "s2"], (
        "reads of files that are no pair keep their names"
    )
    assert [file.reads for file in summary.by_file] == [2] * 8
    assert (
        "alone_R1.fastq: no file with its mates beside it; each read is judged by itself"
        in caplog.text
    )
    assert sum("by their names; --no-pairs" in record.message for record in caplog.records) == 3
    summary, store = staged(tmp_path / "no.h5", reads=(folder,), pairs=False)
    assert (summary.pairs, store.paired, store.counts.n_duplicate_ids) == ((), False, 8)


@pytest.mark.parametrize("order", [("a_R1.fq", "a_R2.fq"), ("a_R2.fq", "a_R1.fq")])
def test_mates_named_one_by_one_are_a_pair_as_in_a_folder(
    write: WriteReads, tmp_path: Path, order: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mates = two(write, ["a", "b"], ["a", "b"])
    files = tuple(str(tmp_path / name) for name in order)
    summary, store = staged(tmp_path / "orfs.h5", reads=files)
    assert summary.pairs == ((*mates["mates_1"], *mates["mates_2"]),)
    assert names(store) == ["a/1", "a/2", "b/1", "b/2"]
    [line] = [record.getMessage() for record in caplog.records if "pairs:" in record.message]
    assert line.endswith("by their names; --no-pairs judges each read by itself")
    staged(tmp_path / "given.h5", **mates)
    assert digest(tmp_path / "orfs.h5") == digest(tmp_path / "given.h5")
    summary, store = staged(tmp_path / "no.h5", reads=files, pairs=False)
    assert (summary.pairs, store.paired) == ((), False)


def test_files_named_one_by_one_are_no_pair_if_their_ids_or_their_number_say_so(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patients = (write(fastq("a"), "patient_1.fq"), write(fastq("b"), "patient_2.fq"))
    assert not staged(tmp_path / "patients.h5", reads=patients)[0].pairs
    assert "hold other reads" in caplog.text
    genomes = (write(fasta("a"), "bin_1.fa"), write(fasta("b"), "bin_2.fa"))
    assert not staged(tmp_path / "genomes.h5", reads=genomes)[0].pairs
    names = ("in/a_R1.fq", "in/a_R1.fq.old", "in/a_R2.fq")
    three = tuple(write(fastq("a"), name) for name in names)
    for number, reads in enumerate((three, (str(tmp_path / "in"),))):
        summary, _ = staged(tmp_path / f"three{number}.h5", reads=reads)
        assert not summary.pairs, "three files are no pair"


def test_files_named_one_by_one_that_are_out_of_step_are_an_error_with_both_ways_out(
    write: WriteReads, tmp_path: Path
) -> None:
    files = (write(fastq("abc"), "a_R1.fq"), write(fastq("ab"), "a_R2.fq"))
    with pytest.raises(InputError, match="read 'c': has no mate in ") as raised:
        staged(tmp_path / "orfs.h5", reads=files)
    assert "--on-error skip" in str(raised.value)
    assert "--no-pairs" in str(raised.value)
    summary, _ = staged(tmp_path / "no.h5", reads=files, pairs=False)
    assert summary.counts.n_reads == 5


def test_pipes_are_joined_by_certain_names_only(tmp_path: Path) -> None:
    for name in ("a_R1.fq", "a_R2.fq", "patient_1.fq", "patient_2.fq"):
        os.mkfifo(tmp_path / name)
    spec = ReadsSpec(reads=tuple(map(str, sorted(tmp_path.iterdir()))))
    inputs = find_reads(spec)
    assert inputs.pairs == ((str(tmp_path / "a_R1.fq"), str(tmp_path / "a_R2.fq")),)


def staged_folder(
    write: WriteReads, tmp_path: Path, texts: dict[str, str]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Stage a folder with these files; return its pairs and its other files by their names."""
    for name, text in texts.items():
        write(text, f"in/{name}")
    summary, _ = staged(tmp_path / "orfs.h5", reads=(str(tmp_path / "in"),))
    pairs = [tuple(Path(file).name for file in pair) for pair in summary.pairs]
    paired_files = {file for pair in summary.pairs for file in pair}
    singles = [Path(file).name for file in summary.files if file not in paired_files]
    return pairs, singles


def test_the_ids_decide_where_names_may_mean_patients_or_mates(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {
        "patient_1.fq": fastq("ab"),
        "patient_2.fq": fastq("cd"),
        "run_1.fq": fastq("ef"),
        "run_3.fq": fastq("ef"),
        "tag_left.fq": fastq(["m/1"]),
        "tag_right.fq": fastq(["m/2"]),
        "ntc_1.fq": fastq("g"),
        "ntc_2.fq": "\n",
    }
    pairs, singles = staged_folder(write, tmp_path, texts)
    assert pairs == [("run_1.fq", "run_3.fq"), ("tag_left.fq", "tag_right.fq")]
    assert singles == ["ntc_1.fq", "patient_1.fq", "patient_2.fq"]
    [warning] = [line for line in caplog.text.splitlines() if "patient_1.fq" in line]
    assert "patient_2.fq differ only by what looks like a mate mark, but hold other" in warning


def test_files_that_differ_by_what_may_be_a_mate_mark_are_named_in_one_line(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {
        "AR1.fq": fastq("ab"),
        "AR2.fq": fastq("ab"),
        "B+R1.fq": fastq("c"),
        "B+R2.fq": fastq("d"),
        "C_R1(1).fq": fastq(["e/1"]),
        "C_R2(1).fq": fastq(["e/2"]),
        "donor1.fq": fastq("gh"),
        "donor2.fq": fastq("ij"),
        "mate.x1y.fq": fastq(["k/1"]),
        "mate.x2y.fq": fastq(["k/2"]),
        "tube1.fa": fasta("l"),
        "tube2.fa": fasta("m"),
    }
    pairs, _ = staged_folder(write, tmp_path, texts)
    assert pairs == []
    for first, second in (("AR1", "AR2"), ("B+R1", "B+R2"), ("C_R1(1)", "C_R2(1)")):
        [warning] = [line for line in caplog.text.splitlines() if f"{first}.fq" in line]
        assert f"{second}.fq differ only by what looks like a mate mark; the mark is" in warning
    [warning] = [line for line in caplog.text.splitlines() if "mate.x1y.fq" in line]
    assert "mate.x2y.fq differ only by a 1 and a 2 in their names, and their reads have" in warning
    assert "donor" not in caplog.text, "other reads"
    assert "tube" not in caplog.text, "FASTA"


def test_fasta_is_not_paired_by_its_name(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {f"{name}.{ending}": fasta("ab") for name in ("b_1", "b_2") for ending in ("fa", "")}
    pairs, singles = staged_folder(write, tmp_path, texts | {"x_R1.fna": fasta("c")})
    assert (pairs, len(singles)) == ([], 5)
    write(fasta("c"), "in/x_R2.fna")
    assert staged(tmp_path / "more.h5", reads=(str(tmp_path / "in"),))[0].pairs == ()
    assert "x_R2.fna differ only by what looks like a mate mark; FASTA is not" in caplog.text


def test_index_reads_are_left_out_and_named(
    write: WriteReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {f"P_S1_L001_{mark}_001.fastq": fastq("ab") for mark in ("I1", "I2", "R1", "R2")}
    texts |= {f"Q_S2_{mark}_001.fastq": fastq("ab") for mark in ("R1", "R2", "R3")}
    pairs, singles = staged_folder(write, tmp_path, texts)
    assert pairs == [
        ("P_S1_L001_R1_001.fastq", "P_S1_L001_R2_001.fastq"),
        ("Q_S2_R1_001.fastq", "Q_S2_R3_001.fastq"),
    ]
    assert singles == []
    assert "P_S1_L001_I1_001.fastq: index reads by its name, left out" in caplog.text
    assert "Q_S2_R2_001.fastq: molecular tags or index reads by its name" in caplog.text


@pytest.mark.parametrize("files", ["two", "one"])
def test_no_pairs_judges_each_read_by_itself(write: WriteReads, tmp_path: Path, files: str) -> None:
    interleaved_spec: dict[str, object] = {
        "reads": (write(fastq(["a", "a", "b"])),),
        "interleaved": True,
    }
    inputs = interleaved_spec if files == "one" else two(write, ["a", "b"], ["a"])
    with pytest.raises(InputError, match=r"--no-pairs each read$"):
        staged(tmp_path / "orfs.h5", **inputs)
    summary, store = staged(tmp_path / "orfs.h5", **inputs, pairs=False)
    assert (summary.pairs, store.paired, store.n_reads) == ((), False, 3), "no read is lost"


def broken(text: str, *ids: str) -> str:
    """The text with broken records: each loses its qualities."""
    for name in ids:
        head, _, tail = text.partition(f"@{name}\n")
        text = f"{head}@{name}\n{tail.replace('I' * 60, 'I' * 59, 1)}"
    return text


def test_the_mate_of_a_skipped_record_becomes_an_orphan(write: WriteReads, tmp_path: Path) -> None:
    ids = [f"r{i}" for i in range(300)]
    files = (
        write(broken(fastq(ids), "r5", "r6", "r299"), "a.fq"),
        write(broken(fastq(ids), "r0", "r6", "r100"), "b.fq"),
    )
    inputs = {"mates_1": files[:1], "mates_2": files[1:]}
    with pytest.raises(InputError, match=r"a\.fq:21|b\.fq:1"):
        staged(tmp_path / "orfs.h5", **inputs)
    summary, store = staged(tmp_path / "orfs.h5", on_error="skip", **inputs)
    expected_ids = [f"{name}/{mate}" for name in ids for mate in (1, 2)]
    for lost_read in ("r5/1", "r6/1", "r299/1", "r0/2", "r6/2", "r100/2"):
        expected_ids.remove(lost_read)
    assert sorted(names(store)) == sorted(expected_ids)
    assert names(store)[:2] == ["r0/1", "r1/1"]
    assert (summary.n_pairs, summary.tally["skipped"]) == (295, 6)
    assert [(file.reads, file.skipped, file.orphans) for file in summary.by_file] == [
        (297, 3, 2),
        (297, 3, 2),
    ]
    assert any("2 reads without a mate, judged alone" in line for line in summary.warnings())
    interleaved_text = broken(fastq([name for name in ids for _ in range(2)]), "r7")
    summary, store = staged(
        tmp_path / "mixed.h5",
        reads=(write(interleaved_text, "m.fq"),),
        interleaved=True,
        on_error="skip",
    )
    assert (summary.n_pairs, summary.by_file[0].orphans) == (299, 1)
    assert [name for name in names(store) if name.startswith("r7/")] == ["r7/1"]


@pytest.mark.parametrize("mark", "/._:")
@pytest.mark.parametrize("lost", [["r0", 1], ["r0", 2], ["r2", 1], ["r2", 2], ["r4", 1], ["r4", 2]])
def test_an_orphan_of_an_interleaved_file_is_the_mate_that_its_id_says(
    write: WriteReads, tmp_path: Path, mark: str, lost: list[str | int]
) -> None:
    mates = [(f"r{number}", mate) for number in range(5) for mate in (1, 2)]
    mates.remove(tuple(lost))
    text = fastq([f"{name}{mark}{mate}" for name, mate in mates])
    summary, store = staged(
        tmp_path / "orfs.h5", reads=(write(text),), interleaved=True, on_error="skip"
    )
    assert names(store) == [f"{name}/{mate}" for name, mate in mates]
    assert (summary.n_pairs, summary.by_file[0].orphans) == (4, 1)


@pytest.mark.parametrize("mark", "/._:")
def test_exchanged_mates_are_noticed_whatever_ends_their_ids(
    write: WriteReads, tmp_path: Path, mark: str
) -> None:
    in_order = [f"r{number}{mark}{mate}" for number in range(3) for mate in (1, 2)]
    exchanged = [*in_order[:2], in_order[3], in_order[2], *in_order[4:]]
    with pytest.raises(InputError, match="the header says mate 2, but mate 1 is expected here"):
        staged(tmp_path / "orfs.h5", reads=(write(fastq(exchanged)),), interleaved=True)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ("run.1 run.2 run.2", "run.1/1 run.2/1 run.2/2"),
        ("run.1 run.1 run.2 run.2", "run.1/1 run.1/2 run.2/1 run.2/2"),
    ],
)
def test_numbers_that_are_equal_for_mates_are_no_mate_marks(
    write: WriteReads, tmp_path: Path, headers: str, expected: str
) -> None:
    """Archives number their reads: `run.1` is the first fragment, and both mates are called so."""
    text = fastq(headers.split())
    _, store = staged(tmp_path / "orfs.h5", reads=(write(text),), interleaved=True, on_error="skip")
    assert names(store) == expected.split()


@pytest.mark.parametrize("irregular", ["wrapped", "blank lines", "broken record", "returns"])
def test_ids_of_irregular_fastq_decide_where_names_may_mean_patients_or_mates(
    write: WriteReads, tmp_path: Path, irregular: str
) -> None:
    texts = {}
    for mate in (1, 2):
        text = fastq([f"r{number}.{mate}" for number in range(4)])
        if irregular == "wrapped":
            bases = bases_of(f"r0.{mate}")
            text = text.replace(bases, f"{bases[:30]}\n{bases[30:]}", 1)
            text = text.replace("I" * 60, f"{'@' * 30}\n{'I' * 30}", 1)
        elif irregular == "blank lines":
            text = text.replace("\n@", "\n\n@")
        elif irregular == "broken record":
            text = f"@broken{mate}\nACGT\n" + text
        else:
            text = text.replace("\n", "\r")
        texts[f"in/patient_{mate}.fq"] = text
    for name, text in texts.items():
        write(text, name)
    summary, _ = staged(tmp_path / "orfs.h5", reads=(str(tmp_path / "in"),), on_error="skip")
    assert summary.n_pairs == 4


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 40), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 39)), st.integers(1, 9)
)
def test_pairs_are_found_whichever_reads_are_missing(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    lost_1: set[int],
    lost_2: set[int],
    at_once: int,
) -> None:
    folder = tmp_path_factory.mktemp("lost")
    remaining = [
        [i for i in range(count) if i not in lost_reads] for lost_reads in (lost_1, lost_2)
    ]
    complete = [i for i in remaining[0] if i in remaining[1]]
    if not complete:
        return
    files = [folder / "1.fa", folder / "2.fa"]
    for file, reads_of_file in zip(files, remaining, strict=True):
        file.write_text(fasta([f"r{i}" for i in reads_of_file]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "_COMPARED_AT_ONCE", at_once)
        patch.setattr(pairs, "_NEAR", 2)
        patch.setattr(pairs, "BATCH_READS", at_once)
        inputs = {"mates_1": (str(files[0]),), "mates_2": (str(files[1]),), "on_error": "skip"}
        summary, store = staged(folder / "orfs.h5", **inputs)
    ids = names(store)
    assert sorted(ids) == sorted(
        f"r{i}/{mate}" for mate, reads_of_file in enumerate(remaining, 1) for i in reads_of_file
    )
    assert [ids[index - 1 : index + 1] for index in np.flatnonzero(store.read_flags & 16)] == [
        [f"r{i}/1", f"r{i}/2"] for i in complete
    ]
    assert [file.orphans for file in summary.by_file] == [
        len(reads_of_file) - len(complete) for reads_of_file in remaining
    ]


def test_a_run_with_other_pairing_is_not_reused(write: WriteReads, tmp_path: Path) -> None:
    inputs, store_path = two(write, ["a/1", "b/1"], ["a/2", "b/2"]), tmp_path / "orfs.h5"
    summary, _ = staged(store_path, **inputs)
    assert stage(StageSpec(model_length=60, **inputs), store_path).reused
    record = RunRecord(
        fingerprints={"reads": summary.fingerprint},
        inputs=summary.by_file,
        pairs=summary.pairs,
        model_length=60,
        spec={"on_error": "stop"},
    )
    single = StageSpec(model_length=60, reads=summary.files, pairs=False)
    with pytest.raises(RunMismatchError, match=r"\(pairs yes → no\)"):
        stage(single, store_path, recorded_run=record)
    interleaved_file = write(fastq(["a/1", "a/2", "b/1", "b/2"]), "m.fq")
    paired_summary = stage(
        StageSpec(model_length=60, reads=(interleaved_file,), interleaved=True), store_path
    )
    assert paired_summary.fingerprint == summary.fingerprint
    single_summary = stage(StageSpec(model_length=60, reads=(interleaved_file,)), store_path)
    assert (single_summary.reused, single_summary.fingerprint == paired_summary.fingerprint) == (
        False,
        False,
    ), "the same ids and bases, no mates"


# --- verdicts ---


def judge(
    run: RunDir,
    store: OrfStore,
    seed: int,
    *,
    lost: float = 0.0,
    uncertain: tuple[float, float] | None = None,
) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    p = rng.random(store.n_uniques).astype(np.float32)
    is_failed = rng.random(store.n_uniques) < lost
    return write_results(
        run, store, np.stack((1 - p, p), axis=1), is_failed, uncertain=uncertain
    ).pairs


def table(path: Path) -> list[dict[str, str]]:
    header, *lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(header, line, strict=True)) for line in lines]


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([1, 3, 65_536]),
    st.booleans(),
)
def test_the_verdict_of_a_pair_equals_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lost: float, block: int, abstain: bool
) -> None:
    folder, rng = tmp_path_factory.mktemp("judged"), random.Random(seed)
    run = RunDir(folder / "run")
    letters = ["ACG", "ACGT", "TAA", ""]
    for mate in (1, 2):
        reads = (
            "".join(rng.choices(rng.choice(letters) or "A", k=rng.choice([0, 30, 60, 250])))
            for _ in range(30)
        )
        text = "".join(
            f">r{i}\n{bases}\n"
            for i, bases in enumerate(reads)
            if (i, mate) not in ((7, 1), (29, 2))
        )
        (folder / f"{mate}.fa").write_text(text)
    inputs = {
        "mates_1": (str(folder / "1.fa"),),
        "mates_2": (str(folder / "2.fa"),),
        "on_error": "skip",
    }
    _, store = staged(run.store, **inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "BLOCK_READS", block)
        counts = judge(run, store, seed, lost=lost, uncertain=(0.4, 0.6) if abstain else None)
    margins = defaultdict(list)
    for line in table(run.consensus):
        name = line["Modified_ID"].rpartition("_chunk_")[0]
        margins[name].append(
            float(np.float32(line["max_score_1"])) - float(np.float32(line["max_score_0"]))
        )
    reads_of = {line["id"]: line for line in table(run.reads_table)}
    fates = defaultdict(int)
    rows = table(run.root / "pairs.tsv")
    assert documented(run.root / "pairs.tsv") == len(rows)
    assert [name for row in rows for name in (row["id"], row["mate"]) if name] == list(reads_of)
    for row in rows:
        mates = [reads_of[name] for name in (row["id"], row["mate"]) if name]
        for mate, number in zip(mates, (1, 2), strict=False):
            assert (row[f"fate_{number}"], row[f"viral_score_{number}"]) == (
                mate["fate"],
                mate["viral_score"],
            )
        fates_of_mates = [mate["fate"] for mate in mates]
        votes = [margin for mate in mates for margin in margins[mate["id"]]]
        if "failed" in fates_of_mates:
            expected_fate = "failed"
        elif votes:
            score = (1 + sum(votes) / len(votes)) / 2
            if abstain and 0.4 <= score < 0.6:
                expected_fate = "uncertain"
            elif score >= 0.5:
                expected_fate = "viral"
            else:
                expected_fate = "others"
            assert float(row["viral_score"]) == pytest.approx(score, abs=1e-6)
        elif "no_open_frame" in fates_of_mates:
            expected_fate = "no_open_frame"
        else:
            expected_fate = "empty"
        assert (row["fate"], row["label"]) == (
            expected_fate,
            {"viral": "virus", "others": "others"}.get(expected_fate, ""),
        )
        voting = [mate for mate in mates if margins[mate["id"]]]
        if len(voting) == 1 and expected_fate in ("viral", "others", "uncertain"):
            assert row["viral_score"] == voting[0]["viral_score"], (
                "a mate without a vote changes nothing"
            )
        fates[row["fate"]] += bool(row["mate"])
    assert {name: count for name, count in counts.items() if count} == {
        k: v for k, v in fates.items() if v
    }


def test_viral_mates_are_written_in_step_and_orphans_separately(
    write: WriteReads, tmp_path: Path
) -> None:
    run, ids = RunDir(tmp_path / "run"), [f"r{i}" for i in range(60)]
    texts = (
        broken(fastq([f"{name} 1:N:0 x" for name in ids]), "r9 1:N:0 x"),
        fastq([f"{name} 2:N:0 y" for name in ids]),
    )
    files = write(texts[0], "a.fq"), write(texts[1], "b.fq")
    summary, store = staged(run.store, mates_1=files[:1], mates_2=files[1:], on_error="skip")
    judge(run, store, 3)
    n_written = write_reads(run, store, summary)
    viral = [row for row in table(run.root / "pairs.tsv") if row["fate"] == "viral"]
    reads_of_file = {
        kind: gzip.decompress((run.root / f"viral_{kind}.fastq.gz").read_bytes()).decode()
        for kind in ("R1", "R2", "orphans")
    }
    heads = {
        kind: [line[1:] for line in text.splitlines()[::4]] for kind, text in reads_of_file.items()
    }
    expected_names = [row["id"][:-2] for row in viral if row["mate"]]
    assert expected_names
    assert heads["R1"] == [f"{name} 1:N:0 x" for name in expected_names]
    assert heads["R2"] == [f"{name} 2:N:0 y" for name in expected_names]
    assert heads["orphans"] == [f"{row['id'][:-2]} 2:N:0 y" for row in viral if not row["mate"]]
    assert n_written == sum(map(len, heads.values()))
    assert all(record in texts[0] for record in reads_of_file["R1"].split("\n@")), (
        "as they stand in the input"
    )
    assert sorted(path.name for path in run.root.glob("viral*")) == [
        f"viral_{k}.fastq.gz" for k in ("R1", "R2", "orphans")
    ]


def test_pairs_with_equal_ids_get_numbers(write: WriteReads, tmp_path: Path) -> None:
    inputs = two(write, ["a", "a", "b"], ["a", "a", "b"])
    summary, store = staged(tmp_path / "orfs.h5", **inputs)
    assert names(store) == ["a/1", "a/2", "a/1.2", "a/2.2", "b/1", "b/2"]
    assert [file.duplicate_ids for file in summary.by_file] == [1, 1]
    with pytest.raises(
        InputError, match=r"a_R1.fq:5: read 'a/1': this id is also used on .*a_R1.fq:1"
    ):
        staged(tmp_path / "strict.h5", strict=True, **inputs)


def mates(folder: Path, name: str) -> tuple[Path, Path]:
    """A pair of real files."""
    return folder / "reads" / f"{name}_R1.fastq.gz", folder / "reads" / f"{name}_R2.fastq.gz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("illumina_metagenome_SRR6180434", 19613),
        ("illumina_sarscov2_amplicon_vpipe", 19970),
        ("illumina_sarscov2_czid", 23554),
        ("simulated_labelled_norg6", 4849),
    ],
)
def test_real_pairs_are_found(tmp_path: Path, real_data: Path, name: str, count: int) -> None:
    first_file, second_file = map(str, mates(real_data, name))
    summary, store = staged(
        tmp_path / "orfs.h5", mates_1=(first_file,), mates_2=(second_file,), stage_workers=2
    )
    assert (summary.n_pairs, store.n_reads, store.counts.n_duplicate_ids) == (count, 2 * count, 0)
    other_file = str(mates(real_data, "illumina_hiv1_SRR9588828")[0])
    with pytest.raises(InputError, match=r"(is mate 2, mate 1|has no mate|do not follow)"):
        staged(tmp_path / "other.h5", mates_1=(second_file,), mates_2=(other_file,))


def test_real_files_with_missing_mates(tmp_path: Path, real_data: Path) -> None:
    first_file, second_file = mates(real_data, "illumina_hiv1_SRR9588828")
    inputs = {"mates_1": (str(first_file),), "mates_2": (str(second_file),)}
    with pytest.raises(
        InputError, match=r"_R[12].fastq.gz:\d+: read 'SRR9588828.\d+': has no mate in "
    ):
        staged(tmp_path / "orfs.h5", **inputs)
    summary, store = staged(tmp_path / "orfs.h5", on_error="skip", **inputs)
    ids = []
    for file in (first_file, second_file):
        with gzip.open(file, "rt") as text:
            ids.append([line.split()[0][1:] for line in itertools.islice(text, 0, None, 4)])
    complete = set(ids[0]) & set(ids[1])
    assert (summary.n_pairs, store.n_reads) == (len(complete), len(ids[0]) + len(ids[1]))
    assert [file.orphans for file in summary.by_file] == [
        len(ids_of_file) - len(complete) for ids_of_file in ids
    ]


def test_ends_of_ids_are_found_where_a_file_becomes_irregular_after_its_first_reads(
    write: WriteReads, tmp_path: Path
) -> None:
    """The first batch of such a file holds two reads only, and the first of them is an orphan."""
    regular = fastq(["p0:1", "p1:1"])
    bases = "ACGT" * 15
    wrapped = "".join(
        f"@{name}\n{bases[:30]}\n{bases[30:]}\n+\n{'I' * 30}\n{'I' * 30}\n"
        for name in ("p1:2", "p2:1", "p2:2")
    )
    file = write(regular + wrapped, "mixed.fq")
    _, store = staged(tmp_path / "orfs.h5", reads=(file,), interleaved=True, on_error="skip")
    assert names(store) == ["p0/1", "p1/1", "p1/2", "p2/1", "p2/2"]
