"""`virnuc inspect` says what a prediction sees: checked against staging, predict and the slow twin."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import virnuc
from virnuc.flows.cli import main
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core import run_costs
from virnuc_core.errors import ConfigError
from virnuc_core.inspection import inspection as inspection_module
from virnuc_core.inspection.inspection import InspectSpec, inspect_reads
from virnuc_core.inspection.records import InspectedFile, Inspection
from virnuc_core.inspection.text import describe, percent
from virnuc_core.reads import read_counts
from virnuc_core.reads.read_counts import DistinctCounter
from virnuc_core.reads.stage import StageSpec, StageSummary, stage

from .made_up import Pairs, fasta, fastq, made_up_reads
from .reads_twin import rows

ROOT = Path(__file__).parents[3]


def plain_reads(n: int, length: int, seed: int = 0) -> Pairs:
    rng = random.Random(seed)
    return [(f"r{i}", "".join(rng.choices("ACGT", k=length))) for i in range(n)]


def mates(reads: Pairs, mate: int) -> str:
    return fastq([(f"{name}/{mate}", bases) for name, bases in reads])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as labs have it: pairs of two lanes, index reads, single reads, FASTA, other files."""
    folder = tmp_path / "run"
    folder.mkdir()
    for lane in (1, 2):
        reads = made_up_reads(40, seed=lane)
        for mate in (1, 2):
            name = f"lung_S1_L00{lane}_R{mate}_001.fastq.gz"
            (folder / name).write_bytes(gzip.compress(mates(reads, mate).encode()))
        (folder / f"lung_S1_L00{lane}_I1_001.fastq.gz").write_bytes(
            gzip.compress(fastq([(name, "ACGTACGT") for name, _ in reads]).encode())
        )
    (folder / "single.fastq").write_text(fastq(made_up_reads(30, seed=3)))
    (folder / "bin_1.fasta").write_text(fasta(plain_reads(3, 700, seed=4)))
    (folder / "bin_2.fasta").write_text(fasta(plain_reads(3, 1800, seed=5)))
    (folder / "patient_1.fq").write_text(fastq(plain_reads(8, 90, seed=6)))
    (folder / "patient_2.fq").write_text(
        fastq([(f"other{name}", bases) for name, bases in plain_reads(8, 90, seed=7)])
    )
    (folder / "notes.txt").write_text("not reads")
    os.mkfifo(folder / "pipe.fastq")
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read little at a time, so that small files have many blocks, and long records parts."""
    monkeypatch.setattr(inspection_module, "BLOCK_BYTES", 300)
    monkeypatch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 100)


def staged(spec: InspectSpec, out: Path, model_length: int) -> StageSummary:
    fields = spec.model_dump(include=set(StageSpec.model_fields))
    return stage(
        StageSpec(**fields | {"model_length": model_length, "stage_workers": 1}),
        out / f"{model_length}.h5",
    )


def files_of(inspection: Inspection) -> dict[str, InspectedFile]:
    return {Path(file.file).name: file for sample in inspection.samples for file in sample.files}


def require_same_as_staging(spec: InspectSpec, out: Path) -> Inspection:
    """The inspection of one run has the files, pairs and counts that staging finds."""
    inspection = inspect_reads(spec)
    (sample,) = inspection.samples
    statistics = inspection.statistics
    for shares, cost in zip(statistics.models, inspection.costs, strict=True):
        summary = staged(spec, out, shares.model_length)
        counts = summary.counts
        assert tuple(file.file for file in sample.files) == summary.files
        assert sample.pairs == summary.pairs
        assert tuple(sample.ignored) == summary.ignored_files
        assert {file.file: file.reads for file in sample.files} == {
            file.file: file.reads for file in summary.by_file
        }
        assert statistics.reads == statistics.reads_read == counts.n_reads
        assert shares.open_share * counts.n_reads == pytest.approx(counts.n_open_reads)
        assert shares.short_share * counts.n_reads == pytest.approx(counts.n_short)
        assert statistics.reads_not_acgt * counts.n_reads == pytest.approx(counts.n_ambiguous)
        assert cost.rows == counts.n_rows
        assert (1 - cost.repeated_share) * cost.rows == pytest.approx(counts.n_uniques)
        assert cost.disk_bytes == run_costs.embedding_bytes(counts.n_uniques, 768 + 2560)
    return inspection


@pytest.mark.parametrize(
    "settings",
    [
        {"all_reads": True},
        {},
        {"all_reads": True, "pairs": False},
        {"all_reads": True, "stage_workers": 2},
        {"sample": 1000},
    ],
    ids=str,
)
def test_files_pairs_and_counts_are_those_of_staging(
    folder: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    spec = InspectSpec(reads=(str(folder),), **({"stage_workers": 1} | settings))
    inspection = require_same_as_staging(spec, tmp_path)
    assert inspection.statistics.is_complete
    if spec.pairs:
        assert len(inspection.samples[0].pairs) == 2
        assert files_of(inspection)["lung_S1_L001_R1_001.fastq.gz"].role == "first mates"
    assert files_of(inspection)["bin_1.fasta"].role == "single reads"
    reasons = {Path(name).name: why for name, why in inspection.samples[0].ignored.items()}
    if spec.pairs:
        assert "index reads" in reasons["lung_S1_L002_I1_001.fastq.gz"]
    assert "named pipe" in reasons["pipe.fastq"]
    assert "neither FASTA nor FASTQ" in reasons["notes.txt"]


@pytest.mark.parametrize(
    "name_inputs",
    [
        lambda folder: {"reads": (str(folder / "single.fastq"),)},
        lambda folder: {"reads": tuple(map(str, sorted(folder.glob("*_L001_R?_001.fastq.gz"))))},
        lambda folder: {
            "mates_1": (str(folder / "lung_S1_L001_R1_001.fastq.gz"),),
            "mates_2": (str(folder / "lung_S1_L001_R2_001.fastq.gz"),),
            "reads": (str(folder / "bin_1.fasta"),),
        },
        lambda folder: {"reads": (str(folder / "woven.fastq"),), "interleaved": True},
    ],
    ids=["one file", "mates named one by one", "-1 and -2", "interleaved"],
)
def test_inputs_are_taken_as_a_run_takes_them(
    folder: Path, tmp_path: Path, name_inputs: object
) -> None:
    reads = made_up_reads(20)
    woven = [(f"{name}/{mate}", bases) for name, bases in reads for mate in (1, 2)]
    (folder / "woven.fastq").write_text(fastq(woven))
    assert callable(name_inputs)
    require_same_as_staging(InspectSpec(**name_inputs(folder), stage_workers=1), tmp_path)


def test_doubtful_pairs_are_noted_as_in_the_log_of_a_run(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = InspectSpec(reads=(str(folder),), stage_workers=1)
    inspection = inspect_reads(spec)
    assert not caplog.records  # the notes are not printed twice
    staged(spec, tmp_path, 500)
    warnings = [line.getMessage() for line in caplog.records if line.name.endswith("mate_files")]
    assert any("patient_1.fq and" in line for line in warnings)
    assert set(inspection.notes) == set(warnings)


def test_samples_are_those_that_predict_would_run(folder: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.csv"
    first, second = (folder / f"lung_S1_L001_R{mate}_001.fastq.gz" for mate in (1, 2))
    sheet.write_text(
        f"sample,fastq_1,fastq_2\nlung,{first},{second}\nalone,{folder}/single.fastq,\n"
    )
    for inputs in ({"reads": (str(folder),), "sample_from": "name"}, {"samples": sheet}):
        runs = PredictSettings(**inputs, out=tmp_path / "out", models=tmp_path).by_sample()
        inspection = inspect_reads(InspectSpec(**inputs, stage_workers=1))
        assert [sample.sample for sample in inspection.samples] == list(runs)
        for sample in inspection.samples:
            run = runs[sample.sample]
            assert {file.file for file in sample.files} == set(run.all_inputs)
            assert sample.pairs == tuple(zip(run.mates_1, run.mates_2, strict=True))
    # Of a single run it is shown what `--sample-from name` would make of the same files.
    runs = PredictSettings(
        reads=(str(folder),), sample_from="name", out=tmp_path / "out", models=tmp_path
    ).by_sample()
    by_name = inspect_reads(InspectSpec(reads=(str(folder),), stage_workers=1)).samples_by_name
    assert by_name == {name: run.all_inputs for name, run in runs.items()}


def test_samples_by_read_group_are_those_of_predict(tmp_path: Path) -> None:
    sam = tmp_path / "two.sam"
    lines = ["@HD\tVN:1.6", "@RG\tID:1\tSM:lung", "@RG\tID:2\tSM:skin"]
    for number, group in enumerate("1212211"):
        bases = plain_reads(1, 120, seed=number)[0][1]
        lines.append(f"r{number}\t4\t*\t0\t0\t*\t*\t0\t0\t{bases}\t{'I' * 120}\tRG:Z:{group}")
    sam.write_text("\n".join(lines) + "\n")
    pytest.importorskip("pysam")
    inspection = inspect_reads(
        InspectSpec(reads=(str(sam),), sample_from="read-group", stage_workers=1)
    )
    found = {sample.sample: sample.files[0].reads for sample in inspection.samples}
    assert found == {"lung": 4, "skin": 3}


# --- Counts ---------------------------------------------------------------------------------------


def test_lengths_letters_and_frames_are_those_of_the_slow_twin(write: object) -> None:
    reads = [*made_up_reads(60), *plain_reads(4, 1001), ("u", "ACGU")]
    assert callable(write)
    inspection = inspect_reads(InspectSpec(reads=(write(fasta(reads)),), stage_workers=1))
    statistics = inspection.statistics
    lengths = sorted(len(bases) for _, bases in reads)
    assert statistics.lengths is not None
    assert statistics.lengths.shortest == lengths[0]
    assert statistics.lengths.longest == 1001
    assert statistics.lengths.median == lengths[(len(lengths) - 1) // 2]
    assert sum(length_bin.share for length_bin in statistics.lengths.histogram) == pytest.approx(1)
    letters = "".join(bases.upper() for _, bases in reads)
    n_others = sum(letter not in "ACGT" for letter in letters)
    assert statistics.letters_not_acgt == pytest.approx(n_others / len(letters))
    n_repeats = len(reads) - len({bases.upper() for _, bases in reads})
    assert inspection.duplicate_share == pytest.approx(n_repeats / len(reads))
    for shares, cost in zip(statistics.models, inspection.costs, strict=True):
        twin_rows = rows(reads, shares.model_length)
        open_reads = {row.id.rpartition("_chunk_")[0] for row in twin_rows}
        assert shares.open_share == pytest.approx(len(open_reads) / len(reads))
        assert cost.rows == len(twin_rows)
        distinct = {(row.dna, row.protein) for row in twin_rows}
        assert (1 - cost.repeated_share) * cost.rows == pytest.approx(len(distinct))


@pytest.mark.parametrize("all_reads", [True, False])
def test_records_that_come_in_parts_are_counted_whole(
    tmp_path: Path, small_blocks: None, all_reads: bool
) -> None:
    long = "ACGTTGCAN" * 900
    path = tmp_path / "long.fasta"
    path.write_text(fasta([*plain_reads(3, 50), ("long", long), ("twin", long), ("x", "ACGT")]))
    spec = InspectSpec(reads=(str(path),), all_reads=all_reads, stage_workers=1)
    inspection = require_same_as_staging(spec, tmp_path)
    assert inspection.duplicate_share == pytest.approx(1 / 6)


def test_a_damaged_long_record_leaves_nothing_behind(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "long.fasta"
    path.write_text(fasta([("good", "ACGT" * 20), ("bad", "ACGT" * 500 + "ZZ" + "ACGT" * 500)]))
    spec = InspectSpec(reads=(str(path),), all_reads=True, on_error="skip", stage_workers=1)
    inspection = require_same_as_staging(spec, tmp_path)
    assert files_of(inspection)["long.fasta"].skipped == 1
    assert not inspection.problems


def test_distinct_values_are_counted_exactly_and_then_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(read_counts, "MAX_KEPT_DIGESTS", 1 << 12)

    def count(n_distinct: int) -> int:
        counter = DistinctCounter()
        values = rng.integers(0, 1 << 64, n_distinct, dtype=np.uint64)
        for _ in range(3):
            for part in np.array_split(rng.permutation(values), 7):
                counter.add(part)
        assert counter.n_values == 3 * n_distinct
        return counter.count()

    assert count(0) == 0
    assert count(4000) == 4000
    assert count(100_000) == pytest.approx(100_000, rel=0.06)  # four standard errors


def test_memory_does_not_grow_with_the_number_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_counts, "MAX_KEPT_DIGESTS", 1 << 10)
    rng = np.random.default_rng(1)
    counter = DistinctCounter()
    for _ in range(300):
        counter.add(rng.integers(0, 1 << 64, 1000, dtype=np.uint64))
        assert len(counter._kept) + counter._n_pending <= 2 << 10


# --- Samples of large files -----------------------------------------------------------------------


def members(text: bytes) -> bytes:
    """Pack a text as bgzip does: in many small gzip members."""
    return b"".join(gzip.compress(text[i : i + 20_000]) for i in range(0, len(text), 20_000))


@pytest.mark.parametrize("pack", [bytes, partial(gzip.compress, compresslevel=1), members])
def test_of_a_large_file_the_first_reads_stand_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(inspection_module, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr("virnuc_core.reads.sources._UNPACKED_BYTES", 10_000)
    reads = plain_reads(3_000, 150)
    path = tmp_path / "large.fastq"
    path.write_bytes(pack(fastq(reads).encode()))
    inspection = inspect_reads(InspectSpec(reads=(str(path),), sample=1_500, stage_workers=1))
    statistics = inspection.statistics
    assert statistics.reads_read == 1_500
    assert not statistics.is_complete
    assert statistics.reads == pytest.approx(3_000, rel=0.1)
    text_of_inspection = "\n".join(describe(inspection))
    assert "estimates from the first 1,500 reads" in text_of_inspection
    assert "--all reads everything" in text_of_inspection
    whole = inspect_reads(InspectSpec(reads=(str(path),), all_reads=True, stage_workers=1))
    assert whole.statistics.reads == whole.statistics.reads_read == 3_000
    assert "estimates" not in "\n".join(describe(whole))
    for part, exact in zip(inspection.costs, whole.costs, strict=True):
        assert part.rows == pytest.approx(exact.rows, rel=0.15)
        assert part.times[0].seconds == pytest.approx(exact.times[0].seconds, rel=0.15)


def test_reads_of_alignments_are_estimated_as_well(tmp_path: Path) -> None:
    pytest.importorskip("pysam")
    lines = ["@HD\tVN:1.6"]
    for name, bases in plain_reads(8000, 150):
        lines.append(f"{name}\t4\t*\t0\t0\t*\t*\t0\t0\t{bases}\t{'I' * 150}")
    path = tmp_path / "reads.sam"
    path.write_text("\n".join(lines) + "\n")
    spec = InspectSpec(reads=(str(path),), sample=3000, stage_workers=1)
    statistics = inspect_reads(spec).statistics
    assert statistics.reads_read == 3000
    assert statistics.reads == pytest.approx(8000, rel=0.15)


def test_exactly_as_many_reads_as_wanted_are_read_of_each_file(tmp_path: Path) -> None:
    for name, n in (("a.fq", 10), ("b.fq", 7), ("c.fq", 3)):
        (tmp_path / name).write_text(fastq(plain_reads(n, 60)))
    for mate in (1, 2):
        (tmp_path / f"p_R{mate}.fq").write_text(mates(plain_reads(20, 60), mate))
    inspection = inspect_reads(InspectSpec(reads=(str(tmp_path),), sample=7, stage_workers=1))
    read = {
        Path(group.files[0]).name: (group.statistics.reads_read, group.statistics.is_complete)
        for group in inspection.samples[0].groups
    }
    assert read == {
        "a.fq": (7, False),
        "b.fq": (7, True),
        "c.fq": (3, True),
        "p_R1.fq": (14, False),
    }


def test_usually_a_bounded_number_of_reads_and_bases_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DEFAULT_READS", "MIN_READS"):
        monkeypatch.setattr(inspection_module, name, 20)
    for name in ("DEFAULT_BASES", "MIN_BASES"):
        monkeypatch.setattr(inspection_module, name, 3000)
    (tmp_path / "short.fq").write_text(fastq(plain_reads(50, 100)))
    (tmp_path / "long.fq").write_text(fastq(plain_reads(50, 1400)))
    inspection = inspect_reads(InspectSpec(reads=(str(tmp_path),), stage_workers=1))
    read = {
        Path(group.files[0]).name: group.statistics.reads_read
        for group in inspection.samples[0].groups
    }
    assert read == {"short.fq": 20, "long.fq": 3}


@pytest.mark.parametrize(
    ("words", "n_reads"), [(["--all"], 50), (["--sample", "10"], None), ([], 50)], ids=str
)
def test_standard_input_is_read_once_and_its_reads_may_be_unknown(
    words: list[str],
    n_reads: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.BytesIO(fastq(plain_reads(50, 100)).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    assert main(["inspect", "-", "--json", "--stage-workers", "1", *words]) == 0
    inspection = Inspection.model_validate_json(capsys.readouterr().out)
    assert inspection.statistics.reads == n_reads
    assert bool(inspection.costs) == (n_reads is not None)
    lines = describe(inspection)
    assert any("unknown" in line for line in lines) == (n_reads is None)


# --- Damaged files, exit codes --------------------------------------------------------------------


def damaged_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Write damaged files, and yield the name of each and what has to be said of it."""
    good = fastq(plain_reads(30, 80))
    (folder / "cut_off.fastq.gz").write_bytes(gzip.compress(good.encode())[:-40])
    yield "cut_off.fastq.gz", "cut off"
    (folder / "letters.fasta").write_text(fasta(plain_reads(3, 40)) + ">protein\nMKVLEEQ\n")
    yield "letters.fasta", "letters.fasta:7: read 'protein'"
    (folder / "qualities.fastq").write_text(good + "@x\nACGT\n+\nII\n")
    yield "qualities.fastq", "qualities.fastq:121"
    (folder / "mixed.fastq").write_text(good + ">x\nACGT\n")
    yield "mixed.fastq", "mixed.fastq:121"
    (folder / "archive.zip").write_bytes(b"PK\3\4 and so on")
    yield "archive.zip", "zip archive"


def test_damage_is_named_and_the_other_files_are_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = dict(damaged_files(tmp_path))
    (tmp_path / "good.fastq").write_text(fastq(plain_reads(30, 80)))
    names = [str(tmp_path / name) for name in [*expected, "good.fastq"]]
    inspection = inspect_reads(InspectSpec(reads=tuple(names), stage_workers=1))
    files = files_of(inspection)
    for name, words in expected.items():
        assert words in files[name].problem, name
    assert files["good.fastq"].problem == ""
    assert files["good.fastq"].reads == 30
    assert len(inspection.problems) == len(expected)
    assert main(["inspect", *names]) == 2
    output = capsys.readouterr()
    assert "good.fastq: 30 reads" in output.out
    for words in expected.values():
        assert words in output.out
        assert words in output.err


def test_the_table_of_files_gives_no_numbers_that_are_not_known(tmp_path: Path) -> None:
    """A file with a problem has not 0 reads, and no reads have no shares."""
    reads = plain_reads(4, 80)
    (tmp_path / "good.fq").write_text(fastq(reads))
    (tmp_path / "first_is_bad.fq").write_text("@x\nACGT\n+\nIII\n" + fastq(reads))
    (tmp_path / "last_is_bad.fq").write_text(fastq(reads) + "@x\nACGT\n")
    (tmp_path / "empty.fq").write_text("")
    (tmp_path / "bad_R1.fq").write_text(mates(reads, 1))
    (tmp_path / "bad_R2.fq").write_text(mates(reads[:2], 2))
    names = tuple(str(path) for path in sorted(tmp_path.iterdir()))
    lines = describe(inspect_reads(InspectSpec(reads=names, stage_workers=1)))
    (start,) = (number for number, line in enumerate(lines) if "file or pair" in line)
    cells = {}
    for line in lines[start + 1 :]:
        *values, name = re.split(r"\s{2,}", line.strip())
        cells[name.replace(f"{tmp_path}/", "")] = values
    n_columns = len(re.split(r"\s{2,}", lines[start].strip())) - 1
    assert all(len(values) == n_columns for values in cells.values()), cells
    assert cells["good.fq"][:2] == ["4", "80"]
    assert cells["empty.fq"] == ["0", *["-"] * (n_columns - 1)]
    note = " (PROBLEM, see above)"
    assert cells[f"first_is_bad.fq{note}"] == ["unknown", *["-"] * (n_columns - 1)]
    assert cells[f"last_is_bad.fq{note}"][:2] == ["unknown", "80"]
    assert cells[f"bad_R1.fq + bad_R2.fq{note}"][0] == "unknown"


def test_mates_out_of_step_are_a_problem_of_that_pair_alone(tmp_path: Path) -> None:
    reads = plain_reads(40, 80)
    (tmp_path / "bad_R1.fq").write_text(mates(reads, 1))
    (tmp_path / "bad_R2.fq").write_text(mates(reads[:20] + reads[21:], 2))
    for mate in (1, 2):
        (tmp_path / f"good_R{mate}.fq").write_text(mates(reads, mate))
    inspection = inspect_reads(InspectSpec(reads=(str(tmp_path),), stage_workers=1))
    (problem,) = inspection.problems
    assert "bad_R1.fq:81: read 'r20': has no mate" in problem
    lines = describe(inspection)
    (start,) = (number for number, line in enumerate(lines) if "PROBLEM: " in line)
    assert lines[start].startswith("    PROBLEM: ")
    shown = [line.strip().removeprefix("PROBLEM: ") for line in lines[start:]]
    n_parts = problem.count("; ") + 1
    assert problem.endswith("; ".join(shown[:n_parts]))
    assert files_of(inspection)["good_R2.fq"].reads == 40
    spec = InspectSpec(reads=(str(tmp_path),), on_error="skip", stage_workers=1)
    require_same_as_staging(spec, tmp_path / "out")


def test_skipped_records_are_counted_unless_none_is_good(tmp_path: Path) -> None:
    (tmp_path / "some.fasta").write_text(fasta([*plain_reads(3, 40), ("x", "MKLE")]))
    spec = InspectSpec(reads=(str(tmp_path),), on_error="skip", stage_workers=1)
    inspection = inspect_reads(spec)
    assert files_of(inspection)["some.fasta"].skipped == 1
    assert not inspection.problems
    (tmp_path / "none.fasta").write_text(fasta([("x", "MKLE"), ("y", "PPQ")]))
    (problem,) = inspect_reads(spec).problems
    assert "none of its records can be read" in problem


def test_a_file_without_reads_is_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.fastq").write_text("")
    assert main(["inspect", str(tmp_path / "empty.fastq")]) == 0
    assert "holds no reads" in capsys.readouterr().out


def test_one_bad_sample_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.fastq").write_text(fastq(plain_reads(5, 80)))
    sheet = tmp_path / "sheet.csv"
    sheet.write_text("sample,fastq_1,fastq_2\ngone,gone.fastq,\nhere,a.fastq,\n")
    assert main(["inspect", "--samples", str(sheet), "--json"]) == 2
    output = capsys.readouterr()
    inspection = Inspection.model_validate(json.loads(output.out))
    assert inspection.statistics.reads == 5
    assert "gone.fastq: no such file" in output.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.fastq"], "no such file"),
        (["https://example.org/a.fastq"], "fetch it first"),
        (["s3://bucket/a.fastq"], "aws s3 cp"),
        (["a.fastq", "--all", "--sample", "5"], "one of the two"),
        (["a.fastq", "--samples", "sheet.csv"], "the sheet names all reads"),
        ([], "none are named"),
        (["a.fastq", "--sample", "0"], "sample"),
    ],
)
def test_bad_inputs_and_settings_end_with_2(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.fastq").write_text(fastq(plain_reads(5, 80)))
    assert main(["inspect", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("virnuc: ")
    assert said in line


def test_a_sheet_can_name_no_file_outside_the_allowed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.fastq").write_text(fastq(plain_reads(5, 80)))
    (inside / "sheet.csv").write_text(f"sample,fastq_1,fastq_2\na,{tmp_path}/secret.fastq,\n")
    monkeypatch.setenv("VIRNUC_ROOTS", str(inside))
    with pytest.raises(ConfigError, match="VIRNUC_ROOTS"):
        inspect_reads(InspectSpec(samples=inside / "sheet.csv", stage_workers=1))


def test_names_of_files_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J.fastq"
    path.write_text(fastq(plain_reads(5, 80)))
    lines = describe(inspect_reads(InspectSpec(reads=(str(path),), stage_workers=1)))
    assert "\x1b" not in "".join(lines)


def test_scripts_inspect_with_the_same_settings(folder: Path) -> None:
    inspection = virnuc.inspect(folder, all_reads=True, stage_workers=1)
    spec = InspectSpec(reads=(str(folder),), all_reads=True, stage_workers=1)
    assert inspection == inspect_reads(spec)
    files = sorted(folder.glob("*_L001_R?_*"))
    assert len(virnuc.inspect(files, stage_workers=1).samples[0].files) == 2
    with pytest.raises(ConfigError, match="bogus"):
        virnuc.inspect(folder, bogus=1)
    with pytest.raises(ConfigError, match="none are named"):
        virnuc.inspect()


# --- Costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", run_costs.MEASURED_SPEEDS, ids=lambda s: f"{s.gpu}-{s.precision}")
def test_speeds_are_those_that_were_measured(speed: run_costs.MeasuredSpeed) -> None:
    page = (ROOT / "docs" / speed.page).read_text(encoding="utf-8")
    assert f"{speed.tokens_per_s:,}" in page
    assert speed.gpu in page


@pytest.mark.parametrize(
    ("gpu", "precision", "n_tokens", "measured_s"),
    [  # docs/results: h200-1m-2026-11-24, measurement-diary.md
        ("H200", "fp16", 48_400_000, 512.5),
        ("H200", "int8", 48_767_722, 303.4),
        ("H200", "fp16", 4_840_000, 59.4),
        ("H100", "fp16", 4_840_000, 52.4),
        ("H100", "int8", 9_786_069, 69.7),
    ],
)
def test_estimated_times_are_near_the_measured_ones(
    gpu: str, precision: str, n_tokens: int, measured_s: float
) -> None:
    (speed,) = (s for s in run_costs.MEASURED_SPEEDS if (s.gpu, s.precision) == (gpu, precision))
    assert run_costs.estimate_seconds(n_tokens, speed) == pytest.approx(measured_s, rel=0.1)


def test_other_gpus_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / "a.fastq").write_text(fastq(plain_reads(50, 80)))
    inspection = inspect_reads(InspectSpec(reads=(str(tmp_path / "a.fastq"),), stage_workers=1))
    lines = describe(inspection)
    (line,) = (line for line in lines if "A100" in line)
    assert line.split()[-2:] == ["not", "measured"]
    measured = {speed.gpu for speed in run_costs.MEASURED_SPEEDS}
    assert measured.isdisjoint(inspection.not_measured)


# --- The table of the README ----------------------------------------------------------------------

TITLES = ["kind of reads", "median length", "verdict at 300", "verdict at 500"]
TITLES += ["too short at 300", "too short at 500"]


def published_rows() -> dict[str, dict[str, str]]:
    """The rows of the README's table of shares, by the kind of reads."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(TITLES)} |") + 2
    found: dict[str, dict[str, str]] = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row = dict(zip(TITLES, cells, strict=True))
        found[row["kind of reads"]] = row
    return found


def published_commands() -> dict[str, list[str]]:
    """The words of the commands that made the table, by the kind of reads."""
    lines = (ROOT / "docs" / "reads.md").read_text(encoding="utf-8").splitlines()
    commands = [line.split("  # ") for line in lines if line.startswith("virnuc inspect --all")]
    return {kind: shlex.split(command)[1:] for command, kind in commands}


def test_each_row_of_the_table_has_its_command() -> None:
    assert list(published_rows()) == list(published_commands())


@pytest.mark.parametrize("kind", published_commands())
def test_the_table_of_shares_is_what_the_commands_say(
    kind: str,
    real_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(real_data)
    assert main([*published_commands()[kind], "--json", "--stage-workers", "1"]) == 0
    statistics = Inspection.model_validate_json(capsys.readouterr().out).statistics
    assert statistics.is_complete
    assert statistics.lengths is not None
    at_300, at_500 = statistics.models
    assert published_rows()[kind] == {
        "kind of reads": kind,
        "median length": f"{statistics.lengths.median:,}",
        "verdict at 300": percent(at_300.open_share),
        "verdict at 500": percent(at_500.open_share),
        "too short at 300": percent(at_300.short_share),
        "too short at 500": percent(at_500.short_share),
    }
