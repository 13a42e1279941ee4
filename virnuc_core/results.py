"""The files people read: VirNucPro's two result files, and one line for every input read.

- `prediction_results.txt`: one line per row (an open reading frame of a chunk), in input order.
- `prediction_results_highestscore.csv`: one line per chunk with a scored row, in input order.
- `reads.tsv`: one line per read, in input order, with exactly one fate.
- `failed.tsv`: the rows that could not be embedded.
- `pairs.tsv`, where reads come in pairs: one line per pair, and per read without its mate.

The verdicts follow `consensus`. VirNucPro's two files name reads as the input does. Reads that
share an id are told apart in our own tables, as `r7` and `r7.2`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core import consensus
from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.consensus import (
    EMPTY,
    FAILED,
    FATE_NAMES,
    FATES,
    FATES_BY_SCORE,
    NO_OPEN_FRAME,
    UNCERTAIN,
    IntArray,
    Margins,
    Mask,
    ScoreRange,
    Scores,
    ViralScores,
)
from virnuc_core.errors import ShardError, VirnucError
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, FRAMES, MATE, SHORT_FOR_MODEL
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import RunDir, atomic_file

PREDICTION_HEADER: Final = "Sequence_ID\tPrediction\tscore1\tscore2\n"
CONSENSUS_HEADER: Final = "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
# `_Block.read_lines` writes these columns, in this order; docs/tables.json describes them.
READS_HEADER: Final = "id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags\n"
PAIRS_HEADER: Final = (
    "id\tmate\tfate\tviral_score\tlabel\tfate_1\tviral_score_1\tfate_2\tviral_score_2\n"
)
FAILED_HEADER: Final = "Sequence_ID\n"
UNFAMILIAR: Final = "unfamiliar"  # flag: unlike all that the classifier was trained on
NO_RANGE: Final = (0.0, 0.0)  # of uncertain scores

BLOCK_READS: Final = 16_384
BLOCK_ROWS: Final = 32_768
# One process has written that many blocks by the time others have started.
MIN_BLOCKS_FOR_WORKERS: Final = 16
_FATE_NAMES: Final = np.array(FATE_NAMES, dtype=object)
_LABELS_BY_FATE: Final = np.array(("virus", "others", "", "", "", ""), dtype=object)
_ROW_LABELS: Final = np.array(("others", "virus"), dtype=object)
_FLAG_TEXTS: Final = {
    0: "",
    SHORT_FOR_MODEL: "short_for_model",
    AMBIGUOUS: "ambiguous",
    SHORT_FOR_MODEL | AMBIGUOUS: "short_for_model,ambiguous",
}


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """What the result files contain."""

    fates: dict[str, int]  # reads by fate; they add up to all input reads
    rows_virus: int
    chunks_scored: int  # chunks with a verdict
    chunks_virus: int
    threshold: float
    # Seconds for VirNucPro's two files, and for the votes and the other tables. Where several
    # processes work, they divide the elapsed time in proportion.
    predict_s: float
    consensus_s: float
    pairs: dict[str, int] = field(default_factory=dict)  # pairs by fate; empty for single reads


@dataclass(frozen=True, slots=True)
class _Span:
    """A range of reads and the range of their rows.

    A very long read has too many rows for one block. It then has several spans of one read each,
    with consecutive parts of its rows.
    """

    reads: slice
    rows: slice
    is_complete: bool  # False: the next span has more rows of the same read


@dataclass(frozen=True, slots=True)
class _EarlierRows:
    """Results of the earlier blocks of a read whose rows fill several blocks."""

    margins: Margins  # [chunks]
    n_scored: int  # rows
    has_failed: bool


_NO_EARLIER_ROWS: Final = _EarlierRows(np.empty(0), 0, has_failed=False)


@dataclass(frozen=True, slots=True)
class _RowFates:
    """Which rows of a block have a score, and which could not be embedded.

    A row that is neither was not computed: it belongs to a read outside the chosen subset.
    """

    is_scored: Mask  # [rows]
    is_failed: Mask  # [rows]


class _Block:
    """The reads and rows of a span, with the vote of each chunk over its scored rows."""

    def __init__(
        self,
        store: OrfStore,
        span: _Span,
        scores: Scores,
        rows: "_RowFates",
        earlier: _EarlierRows = _NO_EARLIER_ROWS,
        is_unfamiliar: Mask | None = None,
    ) -> None:
        """Select the scored rows of the span and compute the verdict of each chunk.

        Args:
            store: The staged reads.
            span: Reads and rows of the block.
            scores: Scores of the rows, [rows, 2].
            rows: Which of the rows have a score, and which failed.
            earlier: Results of the earlier blocks, if this block continues a long read.
            is_unfamiliar: Marks reads unlike those of the classifier's training, [n_reads]; None:
                nothing is known of it.
        """
        self.is_unfamiliar = is_unfamiliar
        self.store = store
        self.span = span
        self.earlier = earlier
        self.n_reads = span.reads.stop - span.reads.start
        row_reads = np.asarray(store.row_read[span.rows]) - span.reads.start
        self.scored_rows = np.flatnonzero(rows.is_scored)  # within the block
        self.failed_rows = np.flatnonzero(rows.is_failed)
        self.failed_reads = row_reads[self.failed_rows]
        # The following arrays have one element per scored row.
        self.reads = row_reads[self.scored_rows]
        self.scores = scores[self.scored_rows]
        chunks = np.asarray(store.row_chunk[span.rows])[self.scored_rows]
        # Rows are sorted by read and chunk, so a chunk begins where either number changes.
        is_first = np.ones(len(chunks), bool)
        is_first[1:] = (np.diff(self.reads) != 0) | (np.diff(chunks) != 0)
        self.votes = consensus.vote_chunks(self.scores, is_first)

    def for_next(self) -> _EarlierRows:
        """Return the results so far of a long read, for the block with its next rows.

        They include those of the blocks before this one.
        """
        return _EarlierRows(
            margins=np.append(self.earlier.margins, self.votes.margins),
            n_scored=self.earlier.n_scored + len(self.scored_rows),
            has_failed=self.earlier.has_failed or len(self.failed_rows) > 0,
        )

    def original_lines(self) -> tuple[bytes, bytes]:
        """Return the lines of VirNucPro's two files.

        Returns:
            One line per scored row (`prediction_results.txt`), and one line per chunk
            (`prediction_results_highestscore.csv`).
        """
        row_range = self.span.rows
        all_names = self.store.row_ids(row_range.start, row_range.stop, original=True)
        names = np.array(all_names, dtype=object)[self.scored_rows]
        score1 = np.array(_texts(self.scores[:, 0]), dtype=object)
        score2 = np.array(_texts(self.scores[:, 1]), dtype=object)
        is_viral = consensus.is_viral_frame(self.scores)
        rows = _lines(names, _ROW_LABELS[is_viral.astype(np.int64)], score1, score2)

        # A row is named like its chunk, followed by its frame: "F1" to "R3".
        chunk_names = [name[:-2] for name in names[self.votes.first_frames]]
        verdicts = _texts(self.votes.is_viral.tolist())
        max_score1 = score1[self.votes.top_others_frames]
        max_score2 = score2[self.votes.top_virus_frames]
        return rows, _lines(chunk_names, verdicts, max_score1, max_score2)

    def viral_scores(self, groups: IntArray) -> ViralScores:
        """Return the viral score of each group of reads. A group is one read or one pair.

        Args:
            groups: Number of each read's group, ascending from 0, [n_reads].

        Returns:
            Scores, [groups]; NaN for groups without a scored row.
        """
        n_groups = int(groups[-1]) + 1
        group_of_row = groups[self.reads]
        # A read that fills several blocks is the only read of each of them, so the rows of the
        # earlier blocks belong to group 0.
        earlier_groups = np.zeros(len(self.earlier.margins), np.int64)
        group_of_chunk = np.append(earlier_groups, group_of_row[self.votes.first_frames])
        margins = np.append(self.earlier.margins, self.votes.margins)
        means = consensus.mean_margins(margins, group_of_chunk, n_groups)

        # A group with a single row gets the score of that row, without rounding.
        n_rows_of_group = np.bincount(group_of_row, minlength=n_groups) + self.earlier.n_scored
        single_row_scores = np.full(n_groups, np.nan, np.float32)
        is_single = n_rows_of_group[group_of_row] == 1
        single_row_scores[group_of_row[is_single]] = self.scores[is_single, 1]
        return consensus.viral_scores(means, single_row_scores)

    def read_lines(self, threshold: float, uncertain: ScoreRange) -> tuple[bytes, IntArray]:
        """Return the lines of `reads.tsv`.

        Args:
            threshold: Score from which a read is called viral.
            uncertain: Scores in this range get no verdict.

        Returns:
            The lines, and the fate of each read, [n_reads].
        """
        store = self.store
        reads = self.span.reads
        scores = self.viral_scores(np.arange(self.n_reads))
        fates = consensus.fates_of_scores(scores, threshold, uncertain)
        if uncertain != NO_RANGE and self.is_unfamiliar is not None:
            fates[self.is_unfamiliar] = UNCERTAIN  # no score of such a read can be relied on
        # Later assignments take precedence: a read with a failed row has failed in any case.
        fates[store.read_rows[reads] == 0] = NO_OPEN_FRAME
        fates[store.read_chunks[reads] == 0] = EMPTY
        fates[self.failed_reads] = FAILED
        if self.earlier.has_failed:
            fates[0] = FAILED

        counts = [store.read_length, store.read_chunks, store.read_rows]
        count_columns = [_texts(column[reads].tolist()) for column in counts]
        columns = _fate_columns(scores, fates)
        lines = _lines(
            store.read_ids(reads.start, reads.stop),
            *count_columns,
            columns.fates,
            columns.scores,
            columns.labels,
            self._flag_texts(),
        )
        return lines, fates

    def _flag_texts(self) -> list[str]:
        """Return the column `flags` of `reads.tsv`: the names of each read's flags, [n_reads]."""
        first_read = self.span.reads.start
        flags = np.asarray(self.store.read_flags[self.span.reads])
        shown_flags = (flags & (SHORT_FOR_MODEL | AMBIGUOUS)).tolist()
        texts = [_FLAG_TEXTS[flag] for flag in shown_flags]
        if self.is_unfamiliar is not None:
            for read in np.flatnonzero(self.is_unfamiliar).tolist():
                texts[read] = f"{texts[read]},{UNFAMILIAR}" if texts[read] else UNFAMILIAR
        for read in np.flatnonzero(flags & DUPLICATE_ID).tolist():
            [original_id] = self.store.original_ids(first_read + read, first_read + read + 1)
            # This flag is the last one, because an id may contain commas.
            duplicate = f"duplicate_of={original_id}"
            texts[read] = f"{texts[read]},{duplicate}" if texts[read] else duplicate
        return texts

    def pair_lines(
        self, fates: IntArray, threshold: float, uncertain: ScoreRange
    ) -> tuple[bytes, IntArray]:
        """Return the lines of `pairs.tsv`: one per pair, and one per read without a mate.

        Args:
            fates: Fates of the reads, [n_reads].
            threshold: Score from which a pair is called viral.
            uncertain: Scores in this range get no verdict.

        Returns:
            The lines, and the fate of each pair that has both mates.
        """
        # The second read of a pair has the flag MATE and directly follows the first. `first` and
        # `second` are the positions of the two reads; a read without a mate is both.
        reads = self.span.reads
        is_second = (self.store.read_flags[reads] & MATE) > 0
        ids = np.array(self.store.read_ids(reads.start, reads.stop), dtype=object)
        first = np.flatnonzero(~is_second)  # [pairs]
        has_mate = np.append(is_second[1:], False)[first]
        second = first + has_mate

        pair_of_read = np.cumsum(~is_second) - 1
        joint_scores = self.viral_scores(pair_of_read)
        read_scores = self.viral_scores(np.arange(self.n_reads))
        verdicts = consensus.pair_fates(
            joint_scores, fates[first], fates[second], threshold, uncertain
        )
        verdicts[self._is_unfamiliar_pair(first, second, verdicts, uncertain)] = UNCERTAIN

        pair_columns = _fate_columns(joint_scores, verdicts)
        first_columns = _fate_columns(read_scores[first], fates[first])
        second_columns = _fate_columns(read_scores[second], fates[second])
        mate_ids = ids[second]
        # A read without a mate was taken as its own mate so far. These columns have nothing for it.
        for column in (mate_ids, second_columns.fates, second_columns.scores):
            column[~has_mate] = ""
        lines = _lines(
            ids[first],
            mate_ids,
            pair_columns.fates,
            pair_columns.scores,
            pair_columns.labels,
            first_columns.fates,
            first_columns.scores,
            second_columns.fates,
            second_columns.scores,
        )
        return lines, verdicts[has_mate]

    def _is_unfamiliar_pair(
        self, first: IntArray, second: IntArray, verdicts: IntArray, uncertain: ScoreRange
    ) -> Mask:
        """Return which pairs get no verdict because a mate is unlike the classifier's training.

        Args:
            first: Position of the first mate of each pair, [pairs].
            second: Position of the second mate; for a read without a mate, its own, [pairs].
            verdicts: The fates of the pairs so far, [pairs]. Only those by score may change.
            uncertain: Scores that get no verdict. Without such a range all pairs keep theirs.
        """
        if self.is_unfamiliar is None or uncertain == NO_RANGE:
            return np.zeros(len(first), bool)
        has_far_mate: Mask = self.is_unfamiliar[first] | self.is_unfamiliar[second]
        return has_far_mate & np.isin(verdicts, FATES_BY_SCORE)

    def failed_lines(self) -> bytes:
        """Return the lines of `failed.tsv`: the names of the rows that could not be embedded.

        Empty if the block has no such row.
        """
        if len(self.failed_rows) == 0:
            return b""
        names = self.store.row_ids(self.span.rows.start, self.span.rows.stop)
        return _lines([names[row] for row in self.failed_rows.tolist()])


def write_results(
    run: RunDir,
    store: OrfStore,
    scores: Scores,
    failed: Mask,
    threshold: float = DEFAULT_THRESHOLD,
    uncertain: ScoreRange | None = None,
    workers: int = 1,
    is_unfamiliar: Mask | None = None,
) -> ResultSummary:
    """Write the result tables of a run.

    Reads are processed in blocks, and each process has a few blocks in memory. `pairs.tsv` is
    written for paired reads, and removed if the reads are single.

    Args:
        run: The run directory.
        store: The staged reads.
        scores: Scores of the store's distinct sequences, [n_uniques, 2].
        failed: Marks the distinct sequences that could not be embedded, [n_uniques].
        threshold: Score from which a read is called viral. VirNucPro's two files do not depend
            on it.
        uncertain: Reads with a score in this range get no verdict.
        workers: Number of processes. Few reads are processed by this process alone.
        is_unfamiliar: Marks reads unlike those of the classifier's training, [n_reads]. They get a
            flag, and no verdict if `uncertain` is given. None: nothing is known of the training.

    Returns:
        Counts of reads, pairs, rows and chunks, and the time that was needed.

    Raises:
        ShardError: A sequence has no score and did not fail.
        VirnucError: The store contradicts itself.
        WorkerError: A process died.
    """
    _require_scores(scores, failed)
    started_s = time.perf_counter()
    n_blocks = max(store.n_reads / BLOCK_READS, store.n_rows / BLOCK_ROWS)
    if n_blocks <= MIN_BLOCKS_FOR_WORKERS:
        workers = 1
    totals = _BlockCounts()
    with ExitStack() as resources:
        n_tables = 5 if store.paired else 4  # the fifth is `pairs.tsv`
        files = _open_tables(resources, run, run.tables[:n_tables])
        if not store.paired:
            run.pairs_table.unlink(missing_ok=True)  # an earlier rescoring may have written one
        render = partial(_render_block, threshold, uncertain or NO_RANGE)
        pool = resources.enter_context(Workers(workers))
        for tables in pool.map(render, _blocks(store, scores, failed, is_unfamiliar)):
            # Single reads have no file for the last element, the lines of pairs.
            for file, lines in zip(files, tables.lines, strict=False):
                file.write(lines)
            totals += tables.counts
    # Processes work at the same time, so their seconds add up to more than the elapsed time. The
    # elapsed time is divided in the same proportion. Without reads the sum is 0; dividing by 1
    # then gives 0 seconds.
    elapsed_s = time.perf_counter() - started_s
    work_s = totals.predict_s + totals.consensus_s or 1.0
    return ResultSummary(
        fates=_counts_by_name(totals.read_fates, uncertain),
        rows_virus=totals.rows_virus,
        chunks_scored=totals.chunks_scored,
        chunks_virus=totals.chunks_virus,
        threshold=threshold,
        predict_s=totals.predict_s / work_s * elapsed_s,
        consensus_s=totals.consensus_s / work_s * elapsed_s,
        pairs=_counts_by_name(totals.pair_fates, uncertain) if store.paired else {},
    )


def _require_scores(scores: Scores, failed: Mask) -> None:
    """Raise a `ShardError` if a sequence has no finite score although it did not fail."""
    missing = np.flatnonzero(~failed & ~np.isfinite(scores).all(axis=1))
    if len(missing):
        raise ShardError(
            f"{len(missing)} sequences have no score and did not fail; "
            f"the first is number {missing[0]}"
        )


def _counts_by_name(counts: IntArray, uncertain: ScoreRange | None) -> dict[str, int]:
    """Return the counts by the name of the fate.

    The fate `uncertain` is the last one. It is listed only if the user requested such a range.
    """
    names = FATES if uncertain is None else FATE_NAMES
    return dict(zip(names, counts[: len(names)].tolist(), strict=True))


def _blocks(
    store: OrfStore, scores: Scores, failed: Mask, is_unfamiliar: Mask | None
) -> Iterator[_Block]:
    """Yield the blocks of a store in input order.

    Args:
        store: The staged reads.
        scores: Scores of the distinct sequences, [n_uniques, 2].
        failed: Marks the distinct sequences that could not be embedded, [n_uniques].
        is_unfamiliar: Marks reads unlike those of the classifier's training, [n_reads], if known.
    """
    earlier = _NO_EARLIER_ROWS
    for span in _read_spans(store):
        # Rows with the same sequence have the same score.
        uniques = np.asarray(store.row_unique[span.rows])
        is_failed = failed[uniques]
        row_fates = _RowFates(is_scored=~is_failed, is_failed=is_failed)
        is_far = None if is_unfamiliar is None else is_unfamiliar[span.reads]
        block = _Block(store, span, scores[uniques], row_fates, earlier, is_far)
        yield block
        earlier = _NO_EARLIER_ROWS if span.is_complete else block.for_next()


def _no_counts() -> IntArray:
    """Return a count of 0 for each fate."""
    return np.zeros(len(FATE_NAMES), np.int64)


@dataclass(frozen=True, slots=True)
class _BlockCounts:
    """Counts and times of one block, or of several."""

    read_fates: IntArray = field(default_factory=_no_counts)  # [fates]
    pair_fates: IntArray = field(default_factory=_no_counts)  # [fates]
    rows_virus: int = 0
    chunks_scored: int = 0
    chunks_virus: int = 0
    predict_s: float = 0.0
    consensus_s: float = 0.0

    def __add__(self, other: "_BlockCounts") -> "_BlockCounts":
        """Return the sums of all counts and times of two blocks."""
        return _BlockCounts(
            read_fates=self.read_fates + other.read_fates,
            pair_fates=self.pair_fates + other.pair_fates,
            rows_virus=self.rows_virus + other.rows_virus,
            chunks_scored=self.chunks_scored + other.chunks_scored,
            chunks_virus=self.chunks_virus + other.chunks_virus,
            predict_s=self.predict_s + other.predict_s,
            consensus_s=self.consensus_s + other.consensus_s,
        )


@dataclass(frozen=True, slots=True)
class _BlockTables:
    """The rendered lines of a block, in the order of `RunDir.tables`, and its counts."""

    lines: tuple[bytes, ...]
    counts: _BlockCounts


def _render_block(threshold: float, uncertain: ScoreRange, block: _Block) -> _BlockTables:
    """Return the lines of all tables for one block, and its counts and times.

    A part of a long read has lines for its rows and chunks. The lines of the read itself come with
    its last part.
    """
    started_s = time.perf_counter()
    row_lines, chunk_lines = block.original_lines()
    predicted_s = time.perf_counter()
    read_lines = pair_lines = b""
    read_fates = pair_fates = np.empty(0, np.int64)
    if block.span.is_complete:
        read_lines, read_fates = block.read_lines(threshold, uncertain)
        if block.store.paired:
            pair_lines, pair_fates = block.pair_lines(read_fates, threshold, uncertain)
    failed_lines = block.failed_lines()
    counts = _BlockCounts(
        read_fates=np.bincount(read_fates, minlength=len(FATE_NAMES)),
        pair_fates=np.bincount(pair_fates, minlength=len(FATE_NAMES)),
        rows_virus=int(consensus.is_viral_frame(block.scores).sum()),
        chunks_scored=len(block.votes.is_viral),
        chunks_virus=int(block.votes.is_viral.sum()),
        predict_s=predicted_s - started_s,
        consensus_s=time.perf_counter() - predicted_s,
    )
    return _BlockTables((row_lines, chunk_lines, read_lines, failed_lines, pair_lines), counts)


def write_covered(run: RunDir, store: OrfStore, covered: Mask, scores: Scores) -> int:
    """Write VirNucPro's two files for a subset of the reads.

    A row whose scores are not both finite is set aside: it has no line, and its chunk is judged by
    its other rows. A chunk without any scored row has no line either.

    Args:
        run: The run directory.
        store: The staged reads.
        covered: Marks the reads of the subset, [n_reads].
        scores: Scores of the rows of these reads, in row order, [rows of the subset, 2].

    Returns:
        The number of rows that were set aside. `write_covered_reads` writes their names.

    Raises:
        VirnucError: The number of scores is not the number of rows.
    """
    n_set_aside = 0
    blocks = _covered_blocks(run, store, covered, scores)
    with ExitStack() as resources:
        predictions, chunks = _open_tables(resources, run, run.tables[:2])
        for block in blocks:
            row_lines, chunk_lines = block.original_lines()
            predictions.write(row_lines)
            chunks.write(chunk_lines)
            n_set_aside += len(block.failed_rows)
    return n_set_aside


def write_covered_reads(run: RunDir, store: OrfStore, covered: Mask, scores: Scores) -> None:
    """Write `reads.tsv` and `failed.tsv` for a subset of the reads.

    `reads.tsv` has a line for each read of the subset. `failed.tsv` names the rows that were set
    aside, because their scores are not finite. Both have unique ids of reads, while VirNucPro's two
    files, which `write_covered` writes, have the ids of the input. Only with these two tables it is
    known which of several reads with the same id a row belongs to.

    Args:
        run: The run directory.
        store: The staged reads.
        covered: Marks the reads of the subset, [n_reads].
        scores: Scores of the rows of these reads, in row order, [rows of the subset, 2].

    Raises:
        VirnucError: The number of scores is not the number of rows.
    """
    blocks = _covered_blocks(run, store, covered, scores)
    with ExitStack() as resources:
        reads, failed = _open_tables(resources, run, (run.reads_table, run.failed_rows))
        for block in blocks:
            failed.write(block.failed_lines())
            if not block.span.is_complete:  # the line of a long read comes with its last rows
                continue
            lines, _ = block.read_lines(DEFAULT_THRESHOLD, NO_RANGE)
            line_of_read = lines.split(b"\n")[:-1]  # the text ends with a line break
            is_covered = covered[block.span.reads].tolist()
            for line, is_in_subset in zip(line_of_read, is_covered, strict=True):
                if is_in_subset:
                    reads.write(line + b"\n")


def _covered_blocks(
    run: RunDir, store: OrfStore, covered: Mask, scores: Scores
) -> Iterator[_Block]:
    """Return the blocks of a store whose scores are known for some of the reads only.

    A block is a stretch of neighbouring reads with their rows. The blocks come in input order.

    Args:
        run: The run directory, which an error names.
        store: The staged reads.
        covered: Marks the reads of the subset, [n_reads].
        scores: Scores of the rows of these reads, in row order, [rows of the subset, 2].

    Raises:
        VirnucError: The number of scores is not the number of rows.
    """
    is_covered_row = covered[np.asarray(store.row_read)]
    n_rows = int(is_covered_row.sum())
    if n_rows != len(scores):
        raise VirnucError(f"{run.root}: {len(scores)} scores for {n_rows} rows")
    scores_of_rows = np.full((len(is_covered_row), 2), np.nan, dtype=np.float32)
    scores_of_rows[is_covered_row] = scores
    is_finite: Mask = np.logical_and.reduce(np.isfinite(scores_of_rows), axis=1)
    row_fates = _RowFates(is_scored=is_finite, is_failed=is_covered_row & ~is_finite)
    return _blocks_of_rows(store, scores_of_rows, row_fates)


def _blocks_of_rows(store: OrfStore, scores: Scores, rows: _RowFates) -> Iterator[_Block]:
    """Yield the blocks of a store in input order.

    Args:
        store: The staged reads.
        scores: Scores of all rows of the store, [rows, 2].
        rows: Which of these rows have a score, and which failed.
    """
    earlier = _NO_EARLIER_ROWS
    for span in _read_spans(store):
        rows_of_span = _RowFates(rows.is_scored[span.rows], rows.is_failed[span.rows])
        block = _Block(store, span, scores[span.rows], rows_of_span, earlier)
        yield block
        earlier = _NO_EARLIER_ROWS if span.is_complete else block.for_next()


def _read_spans(store: OrfStore) -> Iterator[_Span]:
    """Yield consecutive spans of at most `BLOCK_READS` reads and about `BLOCK_ROWS` rows.

    The two reads of a pair are in the same span, and so are all rows of a chunk.

    Raises:
        VirnucError: The numbers of rows of the reads do not add up to the rows of the store.
    """
    read = 0
    row = 0
    while read < store.n_reads:
        # One more read than fits is looked at, because it may be the mate of the last one.
        row_ends = np.cumsum(store.read_rows[read : read + BLOCK_READS + 1], dtype=np.int64)
        n_fitting = int(np.searchsorted(row_ends, BLOCK_ROWS, side="right"))
        n_reads = max(1, min(BLOCK_READS, n_fitting))  # a read that does not fit is taken, too
        next_flags = store.read_flags[read + n_reads : read + n_reads + 1]
        if any(next_flags & MATE):
            n_reads += 1
        next_row = row + int(row_ends[n_reads - 1])
        if n_reads == 1:  # a read with more rows than fit is alone, and is divided
            for cut in _long_read_cuts(store, row, next_row):
                yield _Span(slice(read, read + 1), slice(row, cut), is_complete=False)
                row = cut
        yield _Span(slice(read, read + n_reads), slice(row, next_row), is_complete=True)
        read += n_reads
        row = next_row
    if row != store.n_rows:
        raise VirnucError(f"{store.path}: its reads claim {row} rows, it holds {store.n_rows}")


def _long_read_cuts(store: OrfStore, row: int, end: int) -> Iterator[int]:
    """Yield the rows at which the rows `row` to `end` of a long read are divided into spans.

    Each cut is at the end of a chunk. Short reads have no cuts.
    """
    while end - row > BLOCK_ROWS:
        cut = row + BLOCK_ROWS
        # A chunk has at most one row per frame. The cut moves to the first row that belongs to
        # another chunk than the row before the cut; `argmin` finds the first False.
        next_chunks = store.row_chunk[cut : cut + len(FRAMES)]
        is_same_chunk = np.append(next_chunks == store.row_chunk[cut - 1], False)
        cut += int(np.argmin(is_same_chunk))
        if cut >= end:
            return
        yield cut
        row = cut


def _open_tables(resources: ExitStack, run: RunDir, paths: Sequence[Path]) -> Sequence[BinaryIO]:
    """Open tables of a run for writing, and write their headers.

    The tables are temporary files at first. They get their names when `resources` is closed
    without an error.

    Args:
        resources: Closes the files.
        run: The run directory.
        paths: The tables, some of `run.tables`.
    """
    headers = (PREDICTION_HEADER, CONSENSUS_HEADER, READS_HEADER, FAILED_HEADER, PAIRS_HEADER)
    header_of_table = dict(zip(run.tables, headers, strict=True))
    files = []
    for path in paths:
        temp_path = resources.enter_context(atomic_file(path))
        file = resources.enter_context(temp_path.open("wb"))
        file.write(header_of_table[path].encode())
        files.append(file)
    return files


@dataclass(frozen=True, slots=True)
class _FateColumns:
    """Three columns of a table of reads or pairs, as text."""

    fates: NDArray[np.object_]
    scores: NDArray[np.object_]  # empty where the fate does not come from the score
    labels: NDArray[np.object_]


def _fate_columns(scores: ViralScores, fates: IntArray) -> _FateColumns:
    """Return fate, score and label as text. The score is empty if it did not decide the fate."""
    score_texts = np.full(len(scores), "", dtype=object)
    is_by_score = np.isin(fates, FATES_BY_SCORE)
    score_texts[is_by_score] = _texts(scores[is_by_score])
    return _FateColumns(_FATE_NAMES[fates], score_texts, _LABELS_BY_FATE[fates])


def _texts(values: Any) -> list[str]:
    """Return the values as text.

    NumPy prints a float32 with the fewest digits from which the same number can be parsed.
    """
    return list(map(str, values))


def _lines(*columns: Sequence[str] | NDArray[np.object_]) -> bytes:
    """Return columns of equal length as TAB-separated lines."""
    text = "\n".join(map("\t".join, zip(*columns, strict=True)))
    if not text:
        return b""
    return f"{text}\n".encode()
