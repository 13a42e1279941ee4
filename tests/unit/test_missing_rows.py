"""Rows without a finite result, at every place of a table: no other row ever gets their name or scores."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from virnuc_core.consensus import vote_chunks
from virnuc_core.errors import InputError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import DUPLICATE_ID
from virnuc_core.report.compare import compare
from virnuc_core.report.result_tables import load_results, take_results
from virnuc_core.results import (
    CONSENSUS_HEADER,
    FAILED_HEADER,
    PREDICTION_HEADER,
    READS_HEADER,
    write_covered,
    write_covered_reads,
    write_results,
)
from virnuc_core.rundir import RunDir
from virnuc_core.tools.precision import write_embedded_reads

from .scored_reads import Frame, Made, Read, make

# Rows by chunk: a read of one row, one of two chunks with several rows, and two of one row each
CHUNKS = (("a_chunk_1", 1), ("b_chunk_1", 3), ("b_chunk_2", 2), ("c_chunk_1", 1), ("d_chunk_1", 1))
N_ROWS = sum(count for _, count in CHUNKS)
# Where rows have no result: the first, a middle one, the last, neighbours within a chunk, all rows
# of a chunk, neighbours of two chunks, the last two, alternating, all
PLACES = ((0,), (2,), (7,), (1, 2), (1, 2, 3), (3, 4), (6, 7), (0, 2, 4, 6), tuple(range(N_ROWS)))
ODD_SCORES = (
    (np.nan, np.nan),
    (np.inf, -np.inf),
    (np.nan, 0.4),
    (0.4, np.nan),
    (0.4, np.inf),
)


def row_names() -> list[str]:
    frames = ("F1", "F2", "F3")
    return [f"{chunk}{frame}" for chunk, count in CHUNKS for frame in frames[:count]]


def scores_of_rows(odd_rows: Sequence[int], odd_score: tuple[float, float]) -> np.ndarray:
    """Return scores that differ from row to row, and those of some rows replaced."""
    virus = np.linspace(0.1, 0.9, N_ROWS)[[3, 0, 5, 2, 7, 1, 6, 4]]  # neither rising nor falling
    scores = np.stack((1 - virus, virus), axis=1).astype(np.float32)
    scores[list(odd_rows)] = odd_score
    return scores


def made_reads() -> Made:
    def frames_of(read: str) -> tuple[Frame, ...]:
        counts = [count for chunk, count in CHUNKS if chunk.startswith(f"{read}_")]
        return tuple(
            Frame(c, f, (0.5, 0.5)) for c, count in enumerate(counts) for f in range(count)
        )

    chunks = {"a": 1, "b": 2, "c": 1, "d": 1}
    return make([Read(name, 300 * n, n, frames_of(name)) for name, n in chunks.items()])


def by_id(path: Path, columns: Sequence[str]) -> dict[str, tuple[float, float]]:
    table = pd.read_csv(path, sep="\t")
    names = table.iloc[:, 0].tolist()
    assert len(set(names)) == len(names)
    pairs = zip(table[columns[0]].tolist(), table[columns[1]].tolist(), strict=True)
    return dict(zip(names, pairs, strict=True))


@pytest.mark.parametrize("odd_rows", PLACES)
@pytest.mark.parametrize("odd_score", ODD_SCORES)
def test_a_row_that_is_not_finite_is_set_aside_and_all_others_keep_their_scores(
    tmp_path: Path, odd_rows: tuple[int, ...], odd_score: tuple[float, float]
) -> None:
    scores, run = scores_of_rows(odd_rows, odd_score), RunDir(tmp_path / "run")
    store, covered = made_reads().store, np.ones(4, dtype=bool)
    assert write_covered(run, store, covered, scores) == len(odd_rows)
    write_covered_reads(run, store, covered, scores)

    # The vote, written out: per chunk the largest of each column over the rows that are left
    kept = {name: scores[i] for i, name in enumerate(row_names()) if i not in odd_rows}
    expected_chunks = {}
    for chunk, _ in CHUNKS:
        rows = [kept[name] for name in kept if name[:-2] == chunk]
        if rows:
            expected_chunks[chunk] = (max(r[0] for r in rows), max(r[1] for r in rows))
    rows = by_id(run.predictions, ("score1", "score2"))
    chunks = by_id(run.consensus, ("max_score_0", "max_score_1"))
    assert list(rows) == list(kept)
    assert list(chunks) == list(expected_chunks)
    for found, expected in ((rows, kept), (chunks, expected_chunks)):
        for name, pair in expected.items():
            assert found[name] == pytest.approx(pair, abs=1e-7), name
    failed_names = run.failed_rows.read_text().splitlines()[1:]
    assert failed_names == [row_names()[i] for i in odd_rows]
    table = pd.read_csv(run.reads_table, sep="\t", keep_default_na=False).set_index("id")
    failed_reads = {name[0] for name in failed_names}
    assert set(table.index[table["fate"] == "failed"]) == failed_reads
    assert list(table.index) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("odd_row", [0, 1, 2])
def test_a_vote_over_a_missing_score_is_refused(odd_row: int) -> None:
    """The next chunk's scores were taken, or for the last chunk an IndexError came."""
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], np.float32)
    scores[odd_row] = np.nan
    with pytest.raises(ValueError, match="without a finite score"):
        vote_chunks(scores, np.ones(3, dtype=bool))


def test_only_the_reads_of_a_subset_have_lines(tmp_path: Path) -> None:
    run, store = RunDir(tmp_path / "run"), made_reads().store
    is_covered = np.array([False, True, False, True])
    row_of_read = np.repeat(np.arange(4), [1, 5, 1, 1])
    scores = scores_of_rows((7,), (np.nan, np.nan))[is_covered[row_of_read]]
    assert write_covered(run, store, is_covered, scores) == 1
    write_covered_reads(run, store, is_covered, scores)
    table = pd.read_csv(run.reads_table, sep="\t", keep_default_na=False)
    assert table["id"].tolist() == ["b", "d"]
    assert table["fate"].tolist()[1] == "failed"
    assert run.failed_rows.read_text().splitlines()[1:] == ["d_chunk_1F1"], (
        "rows of other reads were not embedded, so they have not failed"
    )


@pytest.mark.parametrize("odd_rows", PLACES)
def test_a_sample_in_fp32_names_its_failed_rows_and_keeps_their_reads(
    tmp_path: Path, odd_rows: tuple[int, ...]
) -> None:
    """A read was left out of the comparison when one of its rows had failed."""
    run, store = RunDir(tmp_path / "fp32"), made_reads().store
    run.root.mkdir()
    scores = scores_of_rows(odd_rows, (np.nan, np.nan))
    is_embedded = np.ones(N_ROWS, dtype=bool)
    is_embedded[5] = False  # a row of b: the read does not belong to the sample
    write_embedded_reads(run, store, scores, is_embedded)
    table = pd.read_csv(run.reads_table, sep="\t", keep_default_na=False)
    assert table["id"].tolist() == ["a", "c", "d"]
    names = row_names()
    expected = [names[i] for i in odd_rows if not names[i].startswith("b")]
    assert run.failed_rows.read_text().splitlines()[1:] == expected
    rows = by_id(run.predictions, ("score1", "score2"))
    kept = [i for i in (0, 6, 7) if i not in odd_rows]
    assert list(rows) == [names[i] for i in kept]
    assert [rows[names[i]] for i in kept] == [pytest.approx(tuple(scores[i])) for i in kept]


# --- Reads that share an id -------------------------------------------------------------------------


def same_ids(*virus_scores: float | None) -> Made:
    """Four reads with the id r, with a row each. `None`: the row has failed."""
    reads = []
    for place, virus in enumerate(virus_scores):
        frame = Frame(0, 0, None if virus is None else (1 - virus, virus))
        flags = DUPLICATE_ID if place else 0
        reads.append(Read("r", 300, 1, (frame,), flags, copy=place + 1 if place else 0))
    return make(reads)


def run_with(folder: Path, made: Made) -> Path:
    write_results(RunDir(folder), made.store, made.scores, made.failed)
    return folder


SCORES = (0.9, 0.2, 0.8, 0.3)  # neighbours differ in their label
LOST = [set(lost) for n in range(1, 5) for lost in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("lost", LOST)
def test_rows_of_reads_with_one_id_are_compared_with_those_of_the_same_read(
    tmp_path: Path, lost: set[int]
) -> None:
    whole = run_with(tmp_path / "whole", same_ids(*SCORES))
    left = [None if i in lost else score for i, score in enumerate(SCORES)]
    part = run_with(tmp_path / "part", same_ids(*left))
    for comparison in (compare(whole, part), compare(part, whole)):
        for found in (comparison.frames, comparison.consensus):
            assert found is not None
            assert found.in_both == found.agreeing == 4 - len(lost)
            assert found.only_in_a + found.only_in_b == len(lost)
            assert found.score is None or found.score.max == 0.0
    names = {"r_chunk_1F1", "r.2_chunk_1F1", "r.3_chunk_1F1", "r.4_chunk_1F1"}
    named = compare(whole, part).frames
    assert named is not None
    assert {text.split(":")[0] for text in named.examples} <= names


def test_each_side_may_have_lost_another_row(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", same_ids(None, *SCORES[1:]))
    b = run_with(tmp_path / "b", same_ids(*SCORES[:2], None, SCORES[3]))
    found = compare(a, b).frames
    assert found is not None
    assert (found.in_both, found.agreeing, found.only_in_a, found.only_in_b) == (2, 2, 1, 1)


@pytest.mark.parametrize("lost", LOST)
def test_a_subset_of_reads_with_one_id_is_compared_with_the_same_reads(
    tmp_path: Path, lost: set[int]
) -> None:
    whole = run_with(tmp_path / "whole", same_ids(*SCORES))
    made, run = same_ids(*SCORES), RunDir(tmp_path / "subset")
    is_covered = np.array([i in lost for i in range(4)])
    write_covered(run, made.store, is_covered, made.scores[is_covered])
    write_covered_reads(run, made.store, is_covered, made.scores[is_covered])
    comparison = compare(run.root, whole, subset_of_a=True)
    assert comparison.subset_reads == len(lost)
    for found in (comparison.frames, comparison.consensus):
        assert found is not None
        assert found.total == found.in_both == found.agreeing == len(lost)
        assert found.score is not None
        assert found.score.max == 0.0


def test_without_tables_of_reads_an_id_of_which_a_row_is_missing_is_joined_with_none(
    tmp_path: Path,
) -> None:
    a = run_with(tmp_path / "a", same_ids(*SCORES))
    b = run_with(tmp_path / "b", same_ids(None, *SCORES[1:]))
    found = compare(a / "prediction_results.txt", b / "prediction_results.txt").frames
    assert found is not None
    assert (found.in_both, found.agreeing, found.only_in_a, found.only_in_b) == (0, 0, 4, 3)


def test_tables_of_reads_that_contradict_the_rows_are_named(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a", same_ids(*SCORES))
    b = run_with(tmp_path / "b", same_ids(*SCORES))
    (b / "failed.tsv").write_text("Sequence_ID\nr.2_chunk_1F1\n")
    with pytest.raises(InputError, match=r"has 4 rows, reads.tsv and failed.tsv tell of 3"):
        compare(a, b)
    (b / "failed.tsv").write_text("Sequence_ID\nx_chunk_1F1\n")
    with pytest.raises(InputError, match="'x_chunk_1F1' is a row of no read"):
        compare(a, b)


def test_tables_of_reads_are_read_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = run_with(tmp_path / "a", same_ids(*SCORES))
    b = run_with(tmp_path / "b", same_ids(None, *SCORES[1:]))
    whole_comparison = compare(a, b)
    for n_lines in (1, 2, 3):
        monkeypatch.setattr("virnuc_core.reads.subsets.PIECE_LINES", n_lines)
        monkeypatch.setattr("virnuc_core.report.result_tables.BLOCK_LINES", 4 - n_lines)
        assert compare(a, b) == whole_comparison


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("failed.tsv", "\n", "\nr_chunk_1F1\nr_chunk_1F2\n", "names more rows than reads.tsv"),
        (
            "prediction_results.txt",
            "r_chunk_1F1",
            "q_chunk_1F1",
            "has the row 'q_chunk_1F1' where reads.tsv has the read 'r'",
        ),
        ("prediction_results_highestscore.csv", "r_chunk_1", "q_chunk_1", "rows are not those of"),
        ("prediction_results_highestscore.csv", "r_chunk_1\tTrue", "", "lacks rows of reads.tsv"),
    ],
)
def test_each_contradiction_between_the_tables_has_its_message(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    a = run_with(tmp_path / "a", same_ids(*SCORES))
    b = run_with(tmp_path / "b", same_ids(*SCORES))
    text = (b / name).read_text()
    if new:
        changed_text = text.replace(old, new, 1)
    else:  # the last line is lost
        changed_text = "".join(text.splitlines(keepends=True)[:-1])
    (b / name).write_text(changed_text)
    with pytest.raises(InputError, match=message):
        compare(a, b)


def result_files_of(folder: Path, n_reads: int, *, have_one_id: bool) -> Path:
    """Write the result files of reads with a row each, all called `r` or each by another name."""
    folder.mkdir()
    tables = {"reads.tsv": [READS_HEADER], "failed.tsv": [FAILED_HEADER]}
    tables |= {"prediction_results.txt": [PREDICTION_HEADER]}
    tables |= {"prediction_results_highestscore.csv": [CONSENSUS_HEADER]}
    for number in range(n_reads):
        original, unique, flags = f"r{number}", f"r{number}", ""
        if have_one_id:
            original = "r"
            unique = f"r.{number + 1}" if number else "r"
            flags = "duplicate_of=r" if number else ""
        scores = "0.25000000000000000\t0.75000000000000000\n"
        tables["reads.tsv"].append(f"{unique}\t300\t1\t1\tviral\t0.75\tvirus\t{flags}\n")
        tables["prediction_results.txt"].append(f"{original}_chunk_1F1\tvirus\t{scores}")
        tables["prediction_results_highestscore.csv"].append(f"{original}_chunk_1\tTrue\t{scores}")
    for name, lines in tables.items():
        (folder / name).write_text("".join(lines))
    return folder


def peak_bytes_of_comparison(run: Path) -> int:
    """Return the most memory that Python and numpy had while a result was compared with itself."""
    tracemalloc.start()
    try:
        compare(run, run)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("have_one_id", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_memory_of_a_comparison_grows_by_a_few_numbers_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, have_one_id: bool
) -> None:
    """The difference of the scores of each row is kept, because the median needs all of them.

    The smaller files are already larger than the piece that pandas reads of a file at once.
    """
    monkeypatch.setattr("virnuc_core.reads.subsets.PIECE_LINES", 1000)
    monkeypatch.setattr("virnuc_core.report.result_tables.BLOCK_LINES", 1000)
    small = result_files_of(tmp_path / "small", 8_000, have_one_id=have_one_id)
    large = result_files_of(tmp_path / "large", 16_000, have_one_id=have_one_id)
    n_more_bytes = peak_bytes_of_comparison(large) - peak_bytes_of_comparison(small)
    assert n_more_bytes / 8_000 < 5 * 8


# --- Results of other programs ----------------------------------------------------------------------


@pytest.mark.parametrize("odd_rows", PLACES)
@pytest.mark.parametrize("odd_score", ["nan", "inf", ""])
def test_stored_rows_without_a_score_are_left_out_of_the_comparison_and_counted(
    tmp_path: Path, odd_rows: tuple[int, ...], odd_score: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The original programs write the label `others` beside a score that is no number."""
    lines, other_lines = ["Sequence_ID\tPrediction\tscore1\tscore2"], []
    for i, name in enumerate(row_names()):
        other_lines.append(f"{name}\tvirus\t0.1\t0.9")
        score = odd_score if i in odd_rows else "0.9"
        label = "others" if i in odd_rows else "virus"
        lines.append(f"{name}\t{label}\t{score if i in odd_rows else 0.1}\t{score}")
    for name, text in (("v1", lines), ("run", lines[:1] + other_lines)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prediction_results.txt").write_text("\n".join(text) + "\n")
    assert len(load_results(tmp_path / "v1" / "prediction_results.txt")) == N_ROWS - len(odd_rows)
    assert f"{len(odd_rows)} rows without a finite score are left out" in caplog.text
    comparison = compare(tmp_path / "v1", tmp_path / "run")
    assert comparison.frames is not None
    assert comparison.frames.agreeing == comparison.frames.in_both == N_ROWS - len(odd_rows)
    assert comparison.frames.only_in_b == len(odd_rows)
    chunks = {name[:-2] for i, name in enumerate(row_names()) if i not in odd_rows}
    assert comparison.consensus is not None
    assert comparison.consensus.agreeing == comparison.consensus.in_both == len(chunks)


def test_stored_results_replace_the_tables_of_an_earlier_baseline(tmp_path: Path) -> None:
    (tmp_path / "reads.fa").write_text(">r1\n" + "ATGAAACCC" * 12 + "\n")
    spec = StageSpec(reads=(str(tmp_path / "reads.fa"),))
    store = OrfStore.open(stage(spec, tmp_path / "orfs.h5").store)
    run = RunDir(tmp_path / "baseline")
    scores = np.tile(np.array([[0.1, 0.9]], np.float32), (store.n_rows, 1))
    write_covered(run, store, np.ones(1, bool), scores)
    write_covered_reads(run, store, np.ones(1, bool), scores)
    (tmp_path / "v1").mkdir()
    stored = RunDir(tmp_path / "v1")
    stored.predictions.write_bytes(run.predictions.read_bytes())
    take_results(run.root, run, store)  # of itself: all tables stay
    assert run.reads_table.is_file()
    take_results(stored.root, run, store)
    assert sorted(path.name for path in run.root.iterdir()) == ["prediction_results.txt"]
