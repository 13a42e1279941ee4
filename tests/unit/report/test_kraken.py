"""Kraken's tables of pairs: one line per fragment, from which both mates are extracted in step.

`extracted_by_krakentools` repeats the rule by which `extract_kraken_reads.py` of KrakenTools finds
reads (github.com/jenniferlu717/KrakenTools, version 1.2.3): the ids of the lines with the taxon are
kept, and a read is taken if its id is one of them, or is one of them without its last two letters
where it has `/1` or `/2` anywhere. It stops at as many reads as ids.
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from virnuc_core.errors import InputError
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import kraken
from virnuc_core.report.kraken import (
    FragmentCounts,
    ResultTables,
    find_id_problem,
    write_kraken_reads,
    write_kraken_report,
)
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import FileDigest, InputFile, RunRecord, digest

CHUNK_BASES = 60
VIRUSES = "10239"  # in NCBI's taxonomy
NUM_PAIRS = 40
READ_COLUMNS = ("classified", "id", "taxon", "length", "hits")
REPORT_COLUMNS = ("percent", "in_clade", "in_taxon", "rank", "taxon", "name")
Row = dict[str, str]


class Run:
    """A run of given reads whose scores are random numbers, and its tables of Kraken."""

    def __init__(self, folder: Path, **reads: object) -> None:
        """Stage reads, write the results with random scores, and write Kraken's tables."""
        self.dir = RunDir(folder / "run")
        self.dir.root.mkdir()
        self.staging: StageSummary = stage(
            StageSpec(model_length=CHUNK_BASES, **reads), self.dir.root / "orfs.h5"
        )
        store = OrfStore.open(self.staging.store)
        virus_scores = np.random.default_rng(4).random(store.n_uniques).astype(np.float32)
        scores = np.stack((1 - virus_scores, virus_scores), axis=1)
        is_failed = virus_scores > 0.99
        self.summary = write_results(self.dir, store, scores, is_failed)
        self.reads_table = folder / "kraken.txt"
        self.report = folder / "report.txt"
        self.counts = self.write()

    @property
    def record(self) -> RunRecord:
        """The part of the record that Kraken's tables need."""
        return RunRecord(
            fingerprints={}, inputs=self.staging.by_file, pairs=self.staging.pairs or None
        )

    def write(self) -> FragmentCounts:
        """Write Kraken's tables."""
        pairs_table = self.dir.pairs_table if self.summary.pairs else None
        tables = ResultTables(self.dir.reads_table, None, pairs_table, None)
        counts = write_kraken_reads(self.reads_table, tables, self.record)
        write_kraken_report(self.report, counts)
        return counts

    def pairs(self) -> list[Row]:
        """Return the lines of pairs.tsv."""
        return read_table(self.dir.pairs_table)

    def fragments(self) -> list[Row]:
        """Return the lines of Kraken's table of reads."""
        return read_table(self.reads_table, READ_COLUMNS)

    def viral_ids(self) -> list[str]:
        """Return the ids of viral fragments."""
        return [row["id"] for row in self.fragments() if row["classified"] == "C"]


def read_table(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """Read a TAB-separated table; Kraken's have no header, so that `columns` must name theirs."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, columns, delimiter="\t", quoting=csv.QUOTE_NONE))


def write_fastq(path: Path, headers: Sequence[str]) -> str:
    """Write reads with these headers, whose bases depend on the header alone."""
    records = []
    for header in headers:
        dice = random.Random(header)
        num_bases = dice.choice([0, 40, 60, 90, 150, 200])
        bases = "".join(dice.choices("ACG", k=num_bases))
        records.append(f"@{header}\n{bases}\n+\n{'I' * num_bases}\n")
    path.write_text("".join(records))
    return str(path)


def extracted_by_krakentools(kraken_table: Path, reads: str, taxon: str = VIRUSES) -> list[str]:
    """Return the ids that KrakenTools takes from a FASTQ file, in their order."""
    wanted = set()
    for line in kraken_table.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) >= 5 and int(fields[2]) == int(taxon):
            wanted.add(fields[1])
    extracted: list[str] = []
    for header in Path(reads).read_text().splitlines()[::4]:
        read_id = header[1:].split()[0]
        has_mark = "/1" in read_id or "/2" in read_id
        if read_id in wanted or (has_mark and read_id[:-2] in wanted):
            extracted.append(read_id)
            if len(extracted) == len(wanted):
                break
    return extracted


STYLES = {
    "slash": ("r{}/1", "r{}/2"),
    "slash and comment": ("r{}/1 length=60", "r{}/2 length=60"),
    "Casava": ("M0:7:FC:1:11:{}:9 1:N:0:ACGT", "M0:7:FC:1:11:{}:9 2:N:0:ACGT"),
    "no mark": ("r{}", "r{}"),
    "archive": ("SRR1.{0} {0} length=60", "SRR1.{0} {0} length=60"),
    "mark in the middle": ("lib/1:{}", "lib/1:{}"),
    "mark in the middle and at the end": ("lib/2:{}/1", "lib/2:{}/2"),
    "first with slash only": ("r{}/1", "r{}"),
}


@pytest.mark.parametrize(("first_style", "second_style"), STYLES.values(), ids=STYLES)
def test_both_mates_of_viral_fragments_are_extracted_in_step(
    tmp_path: Path, first_style: str, second_style: str
) -> None:
    numbers = range(100, 100 + NUM_PAIRS)
    first = write_fastq(tmp_path / "a_R1.fq", [first_style.format(i) for i in numbers])
    second = write_fastq(tmp_path / "a_R2.fq", [second_style.format(i) for i in numbers])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    names = [first_style.format(i).split()[0].removesuffix("/1") for i in numbers]
    assert [row["id"] for row in run.fragments()] == names, "one line per fragment, in order"
    viral_names = [
        name for name, pair in zip(names, run.pairs(), strict=True) if pair["fate"] == "viral"
    ]
    assert run.viral_ids() == viral_names
    assert 2 < len(viral_names) < NUM_PAIRS - 2
    for reads, mark in ((first, "/1"), (second, "/2")):
        extracted_ids = extracted_by_krakentools(run.reads_table, reads)
        assert [read_id.removesuffix(mark) for read_id in extracted_ids] == viral_names


@pytest.mark.parametrize("mark", [".", "_", ":"])
def test_other_marks_of_mates_are_cut_off_and_warned_of(tmp_path: Path, mark: str) -> None:
    """KrakenTools knows these marks of no table: it finds no read in either of the files."""
    headers = [[f"r{i}{mark}{mate}" for i in range(NUM_PAIRS)] for mate in (1, 2)]
    first = write_fastq(tmp_path / "a_R1.fq", headers[0])
    second = write_fastq(tmp_path / "a_R2.fq", headers[1])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    assert [row["id"] for row in run.fragments()] == [f"r{i}" for i in range(NUM_PAIRS)]
    for reads in (first, second):
        assert extracted_by_krakentools(run.reads_table, reads) == []
    expected_problem = f"{first}: the ids of mates end in {mark}1 and {mark}2."
    assert find_id_problem(run.record).startswith(expected_problem)
    Path(second).write_text("@another/2\nA\n+\nI\n")
    assert find_id_problem(run.record) == "", "the file is not the one that was read"


def test_ids_that_krakentools_finds_are_not_warned_of(tmp_path: Path) -> None:
    for style, (first_style, second_style) in STYLES.items():
        folder = tmp_path / style
        folder.mkdir()
        first = write_fastq(folder / "a_R1.fq", [first_style.format(i) for i in range(3)])
        second = write_fastq(folder / "a_R2.fq", [second_style.format(i) for i in range(3)])
        pairs = ((first, second),)
        inputs = tuple(InputFile(file=file, content=digest(Path(file))) for file in pairs[0])
        assert find_id_problem(RunRecord(fingerprints={}, inputs=inputs, pairs=pairs)) == ""


def test_a_record_of_somebody_else_lets_no_other_file_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first = write_fastq(tmp_path / "a_R1.fq", ["r.1"])
    second = write_fastq(tmp_path / "a_R2.fq", ["r.2"])

    def problem(*files: str) -> str:
        inputs = []
        for file in files:
            content = digest(Path(file)) if Path(file).is_file() else FileDigest(size=0, sha256="")
            inputs.append(InputFile(file=file, content=content))
        pairs = ((files[0], files[1]),)
        return find_id_problem(RunRecord(fingerprints={}, inputs=tuple(inputs), pairs=pairs))

    assert problem(first, second)
    assert problem(first, str(pipe)) == ""
    assert problem("/proc/version", "/dev/zero") == ""
    assert problem("/nowhere/a", "https://example.org/x_R2.fq") == ""
    monkeypatch.setenv("VIRNUC_ROOTS", str(tmp_path / "allowed"))
    assert problem(first, second) == ""


def test_lines_of_fragments_are_as_kraken_writes_them(tmp_path: Path) -> None:
    first = write_fastq(tmp_path / "a_R1.fq", [f"r{i}/1" for i in range(NUM_PAIRS)])
    second = write_fastq(tmp_path / "a_R2.fq", [f"r{i}/2" for i in range(NUM_PAIRS)])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    reads = {row["id"]: row for row in read_table(run.dir.reads_table)}
    pairs = run.pairs()
    assert any(pair["fate"] == "viral" != pair["fate_1"] for pair in pairs), "mates that differ"
    for line, pair in zip(run.fragments(), pairs, strict=True):
        mate_1, mate_2 = reads[pair["id"]], reads[pair["mate"]]
        is_viral = pair["fate"] == "viral"
        taxon = VIRUSES if is_viral else "0"
        assert line == {
            "classified": "C" if is_viral else "U",
            "id": pair["id"].removesuffix("/1"),
            "taxon": taxon,
            "length": f"{mate_1['length']}|{mate_2['length']}",
            "hits": f"{taxon}:{mate_1['open_frames']} |:| {taxon}:{mate_2['open_frames']}",
        }


def test_the_report_counts_fragments(tmp_path: Path) -> None:
    first = write_fastq(tmp_path / "a_R1.fq", [f"r{i}" for i in range(NUM_PAIRS)])
    second = write_fastq(tmp_path / "a_R2.fq", [f"r{i}" for i in range(NUM_PAIRS)])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    num_viral = sum(pair["fate"] == "viral" for pair in run.pairs())
    num_others = NUM_PAIRS - num_viral
    assert (run.counts.num_fragments, run.counts.num_viral) == (NUM_PAIRS, num_viral)
    rows = read_table(run.report, REPORT_COLUMNS)
    assert [(row["taxon"], row["in_clade"], row["in_taxon"]) for row in rows] == [
        ("0", str(num_others), str(num_others)),
        ("1", str(num_viral), "0"),
        (VIRUSES, str(num_viral), str(num_viral)),
    ]
    assert float(rows[0]["percent"]) == pytest.approx(100 * num_others / NUM_PAIRS, abs=0.01)
    num_scored = sum(pair["viral_score"] != "" for pair in run.pairs())
    assert run.counts.by_score.sum() == num_scored, "scores are of pairs, too"


def test_reads_without_a_mate_do_not_bring_the_files_out_of_step(tmp_path: Path) -> None:
    """Orphans of both files have a line, but are not found; single reads keep their own ids."""
    for style in ("slash", "no mark"):
        folder = tmp_path / style
        folder.mkdir()
        first_style, second_style = STYLES[style]
        first_headers = [first_style.format(i) for i in range(20) if i not in (3, 9)]
        second_headers = [second_style.format(i) for i in range(20) if i not in (5, 6)]
        first = write_fastq(folder / "a_R1.fq", first_headers)
        second = write_fastq(folder / "a_R2.fq", second_headers)
        single = write_fastq(folder / "more.fq", ["s1/1", "s1/2", "s2", "s3/1"])
        run = Run(folder, mates_1=(first,), mates_2=(second,), reads=(single,), on_error="skip")
        lines = run.fragments()
        orphans = ["r3/2", "r5/1", "r6/1", "r9/2"]
        names = [f"r{i}" for i in range(20) if i not in (3, 5, 6, 9)]
        ids = [line["id"] for line in lines]
        assert sorted(ids[:20]) == sorted(names + [f"{orphan}:orphan" for orphan in orphans])
        assert ids[20:] == ["s1/1", "s1/2", "s2", "s3/1"]
        for line in lines:
            is_pair = line["id"] in names
            assert ("|" in line["length"]) == is_pair
            assert (" |:| " in line["hits"]) == is_pair
            assert line["hits"].startswith(f"{line['taxon']}:")
        assert (run.counts.num_fragments, run.counts.num_orphans) == (24, 4)
        viral_names = [name for name in run.viral_ids() if name in names]
        for taxon, expected_names in ((VIRUSES, viral_names), ("0", without(names, viral_names))):
            for reads in (first, second):
                extracted_ids = extracted_by_krakentools(run.reads_table, reads, taxon)
                assert [name.partition("/")[0] for name in extracted_ids] == expected_names


def without(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return the names that were not taken, in their order."""
    return [name for name in names if name not in taken]


def test_interleaved_mates_have_one_line_too(tmp_path: Path) -> None:
    headers = [f"r{i} {mate}:N:0:AC" for i in range(NUM_PAIRS) for mate in (1, 2)]
    reads = write_fastq(tmp_path / "both.fq", headers)
    run = Run(tmp_path, reads=(reads,), interleaved=True)
    assert [row["id"] for row in run.fragments()] == [f"r{i}" for i in range(NUM_PAIRS)]


def test_repeated_ids_of_pairs_are_told_apart_without_marks(tmp_path: Path) -> None:
    first = write_fastq(tmp_path / "a_R1.fq", ["r/1", "q/1", "r/1", "r/1"])
    second = write_fastq(tmp_path / "a_R2.fq", ["r/2", "q/2", "r/2", "r/2"])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    assert [row["id"] for row in run.fragments()] == ["r", "q", "r.2", "r.3"]


def test_reads_that_are_judged_alone_keep_their_ids(tmp_path: Path) -> None:
    first = write_fastq(tmp_path / "a_R1.fq", [f"r{i}/1" for i in range(9)])
    second = write_fastq(tmp_path / "a_R2.fq", [f"r{i}/2" for i in range(9)])
    run = Run(tmp_path, reads=(first, second), pairs=False)
    expected_ids = [f"r{i}/{mate}" for mate in (1, 2) for i in range(9)]
    assert [row["id"] for row in run.fragments()] == expected_ids
    assert all("|" not in row["length"] for row in run.fragments())


def test_the_table_does_not_depend_on_how_much_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_fastq(tmp_path / "a_R1.fq", [f"r{i}" for i in range(20) if i != 4])
    second = write_fastq(tmp_path / "a_R2.fq", [f"r{i}" for i in range(20) if i != 11])
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,), on_error="skip")
    expected_text, expected_counts = run.reads_table.read_bytes(), run.counts
    for num_fragments in (1, 3, 19):
        monkeypatch.setattr(kraken, "PIECE_FRAGMENTS", num_fragments)
        counts = run.write()
        assert run.reads_table.read_bytes() == expected_text
        assert counts.num_viral == expected_counts.num_viral
        assert counts.by_score.tolist() == expected_counts.by_score.tolist()


@pytest.mark.parametrize("damage", ["a pair is missing", "a read is missing", "other ids"])
def test_tables_of_different_reads_are_refused(tmp_path: Path, damage: str) -> None:
    headers = [f"r{i}" for i in range(8)]
    first = write_fastq(tmp_path / "a_R1.fq", headers)
    second = write_fastq(tmp_path / "a_R2.fq", headers)
    run = Run(tmp_path, mates_1=(first,), mates_2=(second,))
    table = run.dir.pairs_table if damage == "a pair is missing" else run.dir.reads_table
    lines = table.read_text().splitlines(keepends=True)
    if damage == "other ids":
        lines[3] = lines[3].replace("r1/1", "x1/1")
    else:
        del lines[5]
    table.write_text("".join(lines))
    before = run.reads_table.read_bytes()
    with pytest.raises(InputError, match=r"pairs\.tsv: its reads are not those of reads\.tsv"):
        run.write()
    assert run.reads_table.read_bytes() == before
