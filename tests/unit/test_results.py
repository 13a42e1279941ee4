"""The files people read: exact text, tie rules, and every read in exactly one fate."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core import results
from virnuc_core.errors import InputError, ShardError, VirnucError
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import write_reads
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, MATE, SHORT_FOR_MODEL
from virnuc_core.results import write_covered, write_results
from virnuc_core.rundir import RunDir

from .scored_reads import Frame, Read, make


def one(name: str, *scores: tuple[float, float] | None) -> Read:
    """A read of one chunk with these rows."""
    return Read(name, 300, 1, tuple(Frame(0, i, s) for i, s in enumerate(scores)))


def write(run: RunDir, reads: list[Read], **settings: float) -> results.ResultSummary:
    scored_store = make(reads)
    return write_results(
        run, scored_store.store, scored_store.scores, scored_store.failed, **settings
    )


def table_rows(path: Path, *columns: str) -> list[list[str]]:
    """Return these columns of a table, row by row."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [[row[column] for column in columns] for row in rows]


def table_column(path: Path, column: str) -> list[str]:
    """Return one column of a table."""
    return [value for [value] in table_rows(path, column)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_the_files_are_exactly_these(run: RunDir) -> None:
    reads = [
        one("a", (0.12100612, 0.8789939), (0.0011595711, 0.9988405)),
        Read("gone", 90, 1),
        Read("nothing", 0, 0),
        Read("b", 900, 2, (Frame(0, 0, (0.5501341, 0.4498659)), Frame(1, 5, (1.0, 0.0)))),
    ]
    summary = write(run, reads)
    assert run.predictions.read_text() == (
        "Sequence_ID\tPrediction\tscore1\tscore2\n"
        "a_chunk_1F1\tvirus\t0.12100612\t0.8789939\n"
        "a_chunk_1F2\tvirus\t0.0011595711\t0.9988405\n"
        "b_chunk_1F1\tothers\t0.5501341\t0.4498659\n"
        "b_chunk_2R3\tothers\t1.0\t0.0\n"
    )
    assert run.consensus.read_text() == (
        "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
        "a_chunk_1\tTrue\t0.12100612\t0.9988405\n"
        "b_chunk_1\tFalse\t0.5501341\t0.4498659\n"
        "b_chunk_2\tFalse\t1.0\t0.0\n"
    )
    margin = ((0.4498659 - 0.5501341) + (0.0 - 1.0)) / 2
    table = run.reads_table.read_text().splitlines()
    assert table[0] == "id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags"
    assert table[1] == "a\t300\t1\t2\tviral\t0.9389172\tvirus\t"
    assert table[2] == "gone\t90\t1\t0\tno_open_frame\t\t\t"
    assert table[3] == "nothing\t0\t0\t0\tempty\t\t\t"
    assert table[4].split("\t")[:5] == ["b", "900", "2", "2", "others"]
    assert float(table[4].split("\t")[5]) == pytest.approx((1 + margin) / 2, abs=1e-7)  # float32
    assert summary.fates == {"viral": 1, "others": 1, "no_open_frame": 1, "empty": 1, "failed": 0}
    assert (summary.rows_virus, summary.chunks_scored, summary.chunks_virus) == (2, 3, 1)
    assert run.failed_rows.read_text() == results.FAILED_HEADER


def test_a_tie_is_others_for_a_row_and_virus_for_a_chunk_and_a_read(run: RunDir) -> None:
    summary = write(run, [one("tie", (0.5, 0.5)), one("cross", (0.9, 0.1), (0.1, 0.9))])
    assert table_column(run.predictions, "Prediction") == ["others", "others", "virus"]
    assert table_column(run.consensus, "Is_Virus") == ["True", "True"]
    assert summary.fates["viral"] == 2


def test_a_single_row_gives_the_read_its_own_score(run: RunDir) -> None:
    write(run, [one("r", (0.25, 0.75))])
    assert table_column(run.reads_table, "viral_score") == ["0.75"]


def test_a_score_reads_the_same_in_every_file(run: RunDir) -> None:
    margins = np.random.default_rng(5).normal(scale=4, size=(2_000, 1)).astype(np.float32)
    exponentials = np.exp(
        np.concatenate([np.zeros_like(margins), margins], axis=1)
    )  # a softmax in float32, as the head's
    scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    write(run, [one(f"r{i}", (float(a), float(b))) for i, (a, b) in enumerate(scores)])
    rows = table_column(run.predictions, "score2")
    chunks = table_column(run.consensus, "max_score_1")
    reads = table_column(run.reads_table, "viral_score")
    assert rows == chunks
    assert [
        (row, read_row) for row, read_row in zip(rows, reads, strict=True) if row != read_row
    ] == []


def test_the_verdict_on_a_single_row_is_its_consensus_where_rounding_says_otherwise(
    run: RunDir,
) -> None:
    just_below = np.nextafter(np.float32(0.5), np.float32(0))
    lower = np.nextafter(just_below, np.float32(0))
    just_above = np.nextafter(np.float32(0.5), np.float32(1))
    write(
        run, [one("up", (float(lower), float(just_below))), one("down", (float(just_above), 0.5))]
    )
    table = table_rows(run.reads_table, "fate", "viral_score")
    assert table == [["viral", "0.5"], ["others", str(just_below)]]


def test_scores_have_the_shortest_float32_form(run: RunDir) -> None:
    values = [(1e-5, 0.99999), (0.1, 0.9), (1 / 3, 2 / 3), (2.5e-8, 1.0)]
    write(run, [one("r", *values)])
    assert table_rows(run.predictions, "score1", "score2") == [
        ["1e-05", "0.99999"],
        ["0.1", "0.9"],
        ["0.33333334", "0.6666667"],
        ["2.5e-08", "1.0"],
    ]


def test_a_long_read_is_not_viral_for_one_doubtful_chunk(run: RunDir) -> None:
    frames = (Frame(0, 0, (0.45, 0.55)), *(Frame(i, 0, (0.9, 0.1)) for i in range(1, 10)))
    write(run, [Read("long", 5000, 10, frames)])
    assert table_column(run.reads_table, "fate") == ["others"]


def test_a_read_whose_rows_fill_several_blocks_is_judged_by_all_of_them(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The margins of its chunks are 0.8, 0.6 and -0.8; their mean is 0.2."""
    monkeypatch.setattr(results, "BLOCK_ROWS", 1)
    scores = [(0.1, 0.9), (0.2, 0.8), (0.9, 0.1)]
    frames = tuple(Frame(chunk, 0, pair) for chunk, pair in enumerate(scores))
    write(run, [Read("long", 900, 3, frames)])
    [score] = table_column(run.reads_table, "viral_score")
    assert float(score) == pytest.approx(0.5 + 0.2 / 2)


def test_few_certain_chunks_outweigh_many_doubtful_ones(run: RunDir) -> None:
    frames = (Frame(0, 0, (0.01, 0.99)), Frame(1, 0, (0.55, 0.45)), Frame(2, 0, (0.52, 0.48)))
    write(run, [Read("long", 1500, 3, frames)])
    assert table_column(run.reads_table, "fate") == ["viral"]


def test_no_margin_is_too_small_to_tell(run: RunDir) -> None:
    just_below, just_above = np.nextafter(np.float32(0.5), np.float32(0)), np.float32(0.5)
    write(
        run,
        [
            one("just_others", (float(just_above), 0.0), (0.0, float(just_below))),
            one("tiny", (1e-30, 0.0)),
        ],
    )
    assert table_column(run.reads_table, "fate") == ["others", "others"]


def test_a_failed_row_leaves_the_score_files_and_decides_the_read(run: RunDir) -> None:
    summary = write(run, [one("half", (0.1, 0.9), None), one("all", None), one("fine", (0.1, 0.9))])
    assert table_column(run.predictions, "Sequence_ID") == ["half_chunk_1F1", "fine_chunk_1F1"]
    assert table_column(run.consensus, "Modified_ID") == ["half_chunk_1", "fine_chunk_1"]
    assert run.failed_rows.read_text() == "Sequence_ID\nhalf_chunk_1F2\nall_chunk_1F1\n"
    assert table_rows(run.reads_table, "fate", "viral_score", "label") == [
        ["failed", "", ""],
        ["failed", "", ""],
        ["viral", "0.9", "virus"],
    ]
    assert summary.fates["failed"] == 2
    write(run, [one("fine", (0.1, 0.9))])
    assert run.failed_rows.read_text() == results.FAILED_HEADER, (
        "the list of an earlier attempt is gone"
    )


def test_no_reads_and_no_rows_give_headers_only(run: RunDir) -> None:
    write(run, [])
    assert run.predictions.read_text() == results.PREDICTION_HEADER
    assert run.consensus.read_text() == results.CONSENSUS_HEADER
    assert run.reads_table.read_text() == results.READS_HEADER
    write(run, [Read("gone", 90, 1)])
    assert run.predictions.read_text() == results.PREDICTION_HEADER
    assert len(run.reads_table.read_text().splitlines()) == 2


def test_the_threshold_moves_reads_and_nothing_else(run: RunDir) -> None:
    reads = [one("weak", (0.3, 0.7)), one("strong", (0.02, 0.98))]
    assert write(run, reads).fates["viral"] == 2
    bytes_before = run.predictions.read_bytes(), run.consensus.read_bytes()
    assert write(run, reads, threshold=0.9).fates["viral"] == 1
    assert (run.predictions.read_bytes(), run.consensus.read_bytes()) == bytes_before


def test_reads_with_uncertain_scores_get_no_verdict_where_that_is_wanted(run: RunDir) -> None:
    reads = [
        one("below", (0.61, 0.39)),
        one("low", (0.6, 0.4)),
        one("high", (0.41, 0.59)),
        one("above", (0.4, 0.6)),
    ]
    reads += [one("half", (0.5, 0.5), None), Read("gone", 90, 1), Read("nothing", 0, 0)]
    plain = write(run, reads)
    bytes_before = (
        run.predictions.read_bytes(),
        run.consensus.read_bytes(),
        run.reads_table.read_text().splitlines(),
    )
    assert "uncertain" not in plain.fates
    summary = write(run, reads, uncertain=(0.4, 0.6))
    assert (run.predictions.read_bytes(), run.consensus.read_bytes()) == bytes_before[:2]
    assert table_rows(run.reads_table, "fate", "viral_score", "label")[:4] == [
        ["others", "0.39", "others"],
        ["uncertain", "0.4", ""],
        ["uncertain", "0.59", ""],
        ["viral", "0.6", "virus"],
    ]
    assert run.reads_table.read_text().splitlines()[5:] == bytes_before[2][5:]
    assert summary.fates == {
        "viral": 1,
        "others": 1,
        "no_open_frame": 1,
        "empty": 1,
        "failed": 1,
        "uncertain": 2,
    }


def test_an_unfamiliar_mate_makes_a_pair_uncertain_unless_it_has_failed(run: RunDir) -> None:
    scored = (0.1, 0.9)
    pairs = [
        (one("known/1", scored), one("known/2", scored)),
        (one("far/1", scored), one("far/2", scored)),
        (one("failed/1", scored), one("failed/2", scored, None)),
    ]
    reads = []
    for first, second in pairs:
        reads += [first, replace(second, flags=MATE)]
    made = make(reads)
    made.store.paired = True
    write_results(
        run,
        made.store,
        made.scores,
        made.failed,
        uncertain=(0.4, 0.6),
        is_unfamiliar=np.array([False, False, True, False, True, False]),
    )
    assert table_column(run.pairs_table, "fate") == ["viral", "uncertain", "failed"]


def test_uncertain_reads_are_not_among_the_viral_ones(tmp_path: Path) -> None:
    run, store, reads = staged(tmp_path, FASTQ, FASTA, uncertain=(0.8, 0.95))
    assert write_reads(run, store, reads) == 0


def test_flags_are_told_and_twins_are_kept_apart(run: RunDir) -> None:
    reads = [
        Read("r", 90, 1, flags=SHORT_FOR_MODEL),
        Read("r", 90, 1, flags=SHORT_FOR_MODEL | AMBIGUOUS | DUPLICATE_ID, copy=2),
        Read("r", 300, 1, (Frame(0, 0, (0.25, 0.75)),), flags=DUPLICATE_ID, copy=3),
    ]
    write(run, reads)
    assert table_column(run.reads_table, "id") == ["r", "r.2", "r.3"]
    assert run.predictions.read_text().splitlines()[1].startswith("r_chunk_1F1\t"), (
        "ids of the input"
    )
    assert table_column(run.reads_table, "flags") == [
        "short_for_model",
        "short_for_model,ambiguous,duplicate_of=r",
        "duplicate_of=r",
    ]


@pytest.mark.parametrize("scores", [(np.nan, np.nan), (np.nan, 0.5), (0.5, np.inf)])
def test_a_missing_score_is_refused_and_nothing_is_written(
    run: RunDir, scores: tuple[float, float]
) -> None:
    scored_store = make([one("r", scores)])
    with pytest.raises(ShardError, match="no score and did not fail"):
        write_results(run, scored_store.store, scored_store.scores, np.array([False]))
    assert not run.root.exists()


def test_a_store_that_contradicts_itself_leaves_the_old_files(run: RunDir) -> None:
    write(run, [one("r", (0.25, 0.75))])
    bytes_before = run.predictions.read_bytes()
    scored_store = make([one("r", (0.25, 0.75)), one("s", (0.25, 0.75))])
    scored_store.store.read_rows[:] = [1, 0]
    with pytest.raises(VirnucError, match="claim 1 rows, it holds 2"):
        write_results(run, scored_store.store, scored_store.scores, scored_store.failed)
    assert run.predictions.read_bytes() == bytes_before
    assert sorted(p.name for p in run.root.iterdir()) == [
        "failed.tsv",
        "prediction_results.txt",
        "prediction_results_highestscore.csv",
        "reads.tsv",
    ]


# --- the viral reads themselves ---


def staged(
    folder: Path, fastq: str, fasta: str, **settings: object
) -> tuple[RunDir, OrfStore, StageSummary]:
    """A finished run over one FASTQ and one FASTA file; every row scores 0.9 when its read's id begins with v."""
    (folder / "a.fastq").write_text(fastq)
    (folder / "b.fasta").write_text(fasta)
    reads = (str(folder / "a.fastq"), str(folder / "b.fasta"))
    run = RunDir(folder / "run")
    staging = stage(StageSpec(reads=reads), run.store)
    store = OrfStore.open(run.store)
    virus = np.array([name.startswith("v") for name in store.row_ids(0, store.n_rows)])[
        store.unique_row[:]
    ]
    p = np.where(virus, 0.9, 0.1).astype(np.float32)
    write_results(
        run, store, np.stack((1 - p, p), axis=1), np.zeros(len(p), dtype=bool), **settings
    )
    return run, store, staging


V, W, X, Y = (
    "ATGAAACCCGGGATTACACCA" * 6,
    "ATGGGCCAGTTTACCAGCCCA" * 6,
    "GGGAAATCCACCATCAGGACA" * 6,
    "CCCAAAGTTATCACCGGACCA" * 6,
)
FASTQ = f"@v1 first\n{V}\n+\n{'I' * 126}\n@h1\n{W}\n+\n{'#' * 126}\n@v2\n{X}\n+v2\n{'@' * 126}\n"
FASTA = f">v3 some words\n{Y[:60]}\n{Y[60:]}\n>h2\nACGT\n"


def test_viral_reads_come_out_as_they_went_in(tmp_path: Path) -> None:
    run, store, reads = staged(tmp_path, FASTQ, FASTA)
    assert write_reads(run, store, reads) == 3
    files = [path for path in run.reads_of() if path.exists()]
    assert [path.name for path in files] == ["viral.fasta.gz", "viral.fastq.gz"]
    fastq = gzip.decompress((run.root / "viral.fastq.gz").read_bytes()).decode()
    fasta = gzip.decompress((run.root / "viral.fasta.gz").read_bytes()).decode()
    records = FASTQ.split("@h1\n")
    assert fastq == records[0] + "@v2" + FASTQ.split("@v2")[1]
    assert fasta == FASTA.split(">h2", maxsplit=1)[0]
    bytes_before = [path.read_bytes() for path in files]
    assert write_reads(run, store, reads, ("nonviral",)) == 2
    assert write_reads(run, store, reads, ("viral", "nonviral")) == 5
    assert [path.read_bytes() for path in files] == bytes_before
    other_lines = [
        gzip.decompress((run.root / f"nonviral.{form}.gz").read_bytes()).decode()
        for form in ("fastq", "fasta")
    ]
    assert other_lines == ["@h1\n" + records[1].split("@v2")[0], ">h2" + FASTA.split(">h2")[1]]


def test_a_higher_threshold_leaves_no_read_of_before(tmp_path: Path) -> None:
    run, store, reads = staged(tmp_path, FASTQ, FASTA)
    write_reads(run, store, reads)
    run, store, reads = staged(tmp_path, FASTQ, FASTA, threshold=0.95)
    assert write_reads(run, store, reads) == 0
    assert {path.name: gzip.decompress(path.read_bytes()) for path in run.root.glob("viral.*")} == {
        "viral.fasta.gz": b"",
        "viral.fastq.gz": b"",
    }


def test_other_reads_than_those_staged_are_refused(tmp_path: Path) -> None:
    run, store, reads = staged(tmp_path, FASTQ, FASTA)
    with pytest.raises(InputError, match="3 reads are in the input, 5 were staged"):
        write_reads(run, store, reads.model_copy(update={"files": reads.files[:1]}))
    with pytest.raises(InputError, match="not the reads that were staged"):
        write_reads(run, store, reads.model_copy(update={"files": reads.files[::-1]}))
    with pytest.raises(InputError, match="standard input"):
        write_reads(run, store, reads.model_copy(update={"files": ("-",)}))
    (tmp_path / "a.fastq").write_text(FASTQ.replace("IIII", "JJJJ"))
    with pytest.raises(InputError, match=r"a\.fastq: this file has changed since it was staged"):
        write_reads(run, store, reads)
    assert not list(run.root.glob("*viral.*"))


# --- property: the same as the rules said slowly ---

probability = st.floats(0, 1, width=32)
frame_scores = st.one_of(st.none(), st.tuples(probability, probability))


@st.composite
def made_reads(draw: st.DrawFn) -> list[Read]:
    reads = []
    for number in range(draw(st.integers(0, 12))):
        chunks = draw(st.integers(0, 3))
        frames = [
            Frame(chunk, frame, draw(frame_scores))
            for chunk in range(chunks)
            for frame in sorted(draw(st.sets(st.integers(0, 5), max_size=3)))
        ]
        reads.append(Read(f"r{number}", chunks * 100, chunks, tuple(frames)))
    return reads


def slow_fate(read: Read) -> str:
    """The fate of a read, from the rules in words."""
    if read.chunks == 0:
        return "empty"
    if not read.frames:
        return "no_open_frame"
    if any(frame.scores is None for frame in read.frames):
        return "failed"
    margins = []
    for chunk in sorted({frame.chunk for frame in read.frames}):
        rows = [frame.scores for frame in read.frames if frame.chunk == chunk and frame.scores]
        margins.append(
            float(np.float32(max(r[1] for r in rows))) - float(np.float32(max(r[0] for r in rows)))
        )
    return "viral" if sum(margins) / len(margins) >= 0 else "others"


@settings(max_examples=60, deadline=None)
@given(reads=made_reads(), block=st.integers(1, 9))
def test_the_rules_said_slowly(
    tmp_path_factory: pytest.TempPathFactory, reads: list[Read], block: int
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "BLOCK_READS", block)
        patch.setattr(results, "BLOCK_ROWS", block)
        summary = write(run, reads)
    with run.reads_table.open() as handle:
        table = list(csv.DictReader(handle, delimiter="\t"))
    assert [row["fate"] for row in table] == [slow_fate(scored_read) for scored_read in reads]
    assert sum(summary.fates.values()) == len(reads)
    small = {path.name: path.read_bytes() for path in run.root.iterdir() if path.is_file()}
    counts = replace(summary, predict_s=0, consensus_s=0)
    assert (
        replace(write(run, reads), predict_s=0, consensus_s=0) == counts
    )  # in blocks that hold all
    assert {path.name: path.read_bytes() for path in run.root.iterdir() if path.is_file()} == small
    scored_frames = [
        frame for scored_read in reads for frame in scored_read.frames if frame.scores is not None
    ]
    with run.predictions.open() as handle:
        rows = list(csv.DictReader(handle, delimiter="\t"))
    assert [(np.float32(r["score1"]), np.float32(r["score2"])) for r in rows] == [
        (np.float32(f.scores[0]), np.float32(f.scores[1])) for f in scored_frames if f.scores
    ]
    assert [r["Prediction"] for r in rows] == [
        "virus" if f.scores[1] > f.scores[0] else "others" for f in scored_frames if f.scores
    ]
    with run.consensus.open() as handle:
        chunks = {r["Modified_ID"]: r["Is_Virus"] for r in csv.DictReader(handle, delimiter="\t")}
    margins_of: dict[str, list[tuple[float, float]]] = {}
    for scored_read in reads:
        for frame in scored_read.frames:
            if frame.scores:
                margins_of.setdefault(f"{scored_read.name}_chunk_{frame.chunk + 1}", []).append(
                    frame.scores
                )
    assert list(chunks) == list(margins_of)
    assert chunks == {
        k: str(max(s[1] for s in v) >= max(s[0] for s in v)) for k, v in margins_of.items()
    }


@pytest.mark.parametrize("count", [2, 4])
def test_scores_of_covered_reads_must_be_as_many_as_their_rows(run: RunDir, count: int) -> None:
    scored_store = make(
        [one("a", (0.1, 0.9), (0.2, 0.8)), one("b", (0.3, 0.7)), one("c", (0.4, 0.6))]
    )
    is_covered = np.array([True, False, True])
    with pytest.raises(VirnucError, match=f"{count} scores for 3 rows"):
        write_covered(run, scored_store.store, is_covered, scored_store.scores[:count])
    assert not run.root.exists()
    write_covered(run, scored_store.store, is_covered, scored_store.scores[[0, 1, 3]])
    assert run.predictions.read_text().splitlines()[1:] == [
        "a_chunk_1F1\tvirus\t0.1\t0.9",
        "a_chunk_1F2\tvirus\t0.2\t0.8",
        "c_chunk_1F1\tvirus\t0.4\t0.6",
    ]
    assert len(run.consensus.read_text().splitlines()) == 3


def test_ids_that_begin_with_a_quote_survive_the_snippet_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ['"a', "'b", 'c"d', '"e"', "plain"]
    (tmp_path / "run").mkdir()
    lines = [f"{name}\tviral\n" for name in ids]
    (tmp_path / "run" / "reads.tsv").write_text("read\tfate\n" + "".join(lines), encoding="utf-8")
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    [snippet] = [line for line in readme.splitlines() if line.startswith("reads = pd.read_csv")]
    monkeypatch.chdir(tmp_path)
    names = {"pd": pd}
    exec(snippet, names)  # as its readers would
    assert list(names["reads"]["read"]) == ids
