"""The files people read: VirNucPro's two result files, and one line for every read that came in.

- `prediction_results.txt`: one line per row (an open frame of a chunk), in input order.
- `prediction_results_highestscore.csv`: one line per chunk that has a scored row, in input order. A chunk is a virus
  when the largest `score2` of its rows is at least the largest `score1`; a tie is a virus.
- `reads.tsv`: one line per read, in input order, with exactly one fate. `failed.tsv`: rows that were not embedded.
- `pairs.tsv`: where reads come in pairs, one line for each, and one for each read without its mate.

VirNucPro judges no reads; our rule, and why it is so, is told in docs/results.md. Its files name reads as the input
does. Reads that share an id stay apart in our own tables, as `r7` and `r7.2`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.errors import ShardError, VirnucError
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import (
    AMBIGUOUS,
    DUPLICATE_ID,
    FRAMES,
    MATE,
    SHORT_FOR_MODEL,
    Mask,
    Places,
)
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import RunDir, atomic_file

Scores = NDArray[np.float32]
Band = tuple[float, float]
_Span = tuple[
    slice, slice, bool
]  # reads, rows; whether those are all rows, or more of the one read's are to come

FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
VIRAL, OTHERS, NO_OPEN_FRAME, EMPTY, FAILED, UNCERTAIN = range(
    len(FATES) + 1
)  # the last only where it is asked for

PREDICTION_HEADER: Final = "Sequence_ID\tPrediction\tscore1\tscore2\n"
CONSENSUS_HEADER: Final = "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
READS_HEADER: Final = "id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags\n"
PAIRS_HEADER: Final = (
    "id\tmate\tfate\tviral_score\tlabel\tfate_1\tviral_score_1\tfate_2\tviral_score_2\n"
)
FAILED_HEADER: Final = "Sequence_ID\n"

BLOCK_READS: Final = 16_384
BLOCK_ROWS: Final = 32_768
FEW_BLOCKS: Final = 16  # that one process has written by the time others are there
_FATE_NAMES: Final = np.array((*FATES, "uncertain"), dtype=object)
_READ_LABELS: Final = np.array(("virus", "others", "", "", "", ""), dtype=object)  # by fate
_ROW_LABELS: Final = np.array(("others", "virus"), dtype=object)
_REMARKS: Final = {0: "", SHORT_FOR_MODEL: "short_for_model", AMBIGUOUS: "ambiguous"} | {
    SHORT_FOR_MODEL | AMBIGUOUS: "short_for_model,ambiguous"
}


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """What the result files hold."""

    fates: dict[str, int]  # of reads; they add up to all that came in
    rows_virus: int
    chunks_scored: int  # chunks with a verdict
    chunks_virus: int
    threshold: float
    predict_s: float  # seconds for VirNucPro's two files: their share of the time, where several processes were at work
    consensus_s: float  # seconds for the votes and the other tables
    pairs: dict[str, int] = field(
        default_factory=dict
    )  # by their fates; none where reads are single


class _Block:
    """Consecutive reads with all rows, or one with some of its many, and each chunk's verdict by its scored rows."""

    def __init__(
        self, store: OrfStore, span: _Span, scores: Scores, scored: Mask, before: Self | None = None
    ) -> None:
        """The votes of the rows marked in `scored` [rows], the others being lost; `scores` [rows, 2]: P(others),
        P(virus). `before`: the block with whose read this one goes on."""
        reads, rows, self.whole = span
        read = np.asarray(store.row_read[rows])
        self.store, self.reads, self.rows, self.n_reads = (
            store,
            reads,
            rows,
            reads.stop - reads.start,
        )
        self.scored = np.flatnonzero(
            scored
        )  # places within the block's rows; what follows speaks of these rows only
        self.read, self.scores = read[self.scored] - reads.start, scores[self.scored]
        chunk = np.asarray(store.row_chunk[rows])[self.scored]
        new = np.ones(len(chunk), bool)
        new[1:] = (np.diff(self.read) != 0) | (np.diff(chunk) != 0)
        self.starts = np.flatnonzero(new)  # [chunks] first row of each chunk
        tops = np.maximum.reduceat(self.scores, self.starts) if len(new) else self.scores
        of_top = self.scores == tops[np.cumsum(new) - 1]
        # [chunks] the first row with the chunk's largest score1, and the first with its largest score2
        self.top_others, self.top_virus = (
            at[np.searchsorted(at, self.starts)] for at in map(np.flatnonzero, of_top.T)
        )
        # [chunks] exact: the difference of two float32 numbers has the right sign in float64
        self.margin = tops[:, 1].astype(np.float64) - tops[:, 0].astype(np.float64)
        self.row_is_virus = self.scores[:, 1] > self.scores[:, 0]  # a tie is `others`
        self.chunk_is_virus = self.margin >= 0  # a tie is a virus
        self.lost = np.flatnonzero(~scored)  # the other rows; what follows is of the blocks before
        self.lost_before: bool = before is not None and (before.lost_before or len(before.lost) > 0)
        self.scored_before: int = before.scored_before + len(before.scored) if before else 0
        self.margins_before: NDArray[Any] = (
            np.append(before.margins_before, before.margin) if before else np.empty(0)
        )

    def original_lines(self) -> tuple[bytes, bytes]:
        """Lines of `prediction_results.txt` and of `prediction_results_highestscore.csv`."""
        names = np.array(
            self.store.row_ids(self.rows.start, self.rows.stop, original=True), dtype=object
        )[self.scored]
        score1, score2 = (np.array(_texts(column), dtype=object) for column in self.scores.T)
        rows = _lines(names, _ROW_LABELS[self.row_is_virus.astype(np.int64)], score1, score2)
        chunks = [name[:-2] for name in names[self.starts]]  # without the frame, "F1" … "R3"
        verdicts = _texts(self.chunk_is_virus.tolist())
        return rows, _lines(chunks, verdicts, score1[self.top_others], score2[self.top_virus])

    def read_scores(self, group: Places) -> Scores:
        """`viral_score` of each group of reads, float32 [groups], NaN for those without a scored row. `group`
        [n_reads]: a read is one, or both reads of a pair are. One of one scored row has that row's very `score2`, so
        that both files print the same number: `score1` is one minus it only to the last digit. A score is at least 0.5
        exactly when the mean margin is at least 0, however small: rounding never lifts it over the line."""
        of, groups = group[self.read], int(group[-1]) + 1
        of_chunk = np.append(np.zeros(len(self.margins_before), np.int64), of[self.starts])
        total = np.bincount(
            of_chunk, weights=np.append(self.margins_before, self.margin), minlength=groups
        )
        chunks = np.bincount(of_chunk, minlength=groups)
        mean = np.divide(total, chunks, out=np.full(groups, np.nan), where=chunks > 0)
        score: Scores = (0.5 + mean / 2).astype(np.float32)
        alone = np.bincount(of, minlength=groups)[of] + self.scored_before == 1
        score[of[alone]] = self.scores[alone, 1]
        score[mean < 0] = np.minimum(score[mean < 0], np.nextafter(np.float32(0.5), np.float32(0)))
        score[mean >= 0] = np.maximum(score[mean >= 0], np.float32(0.5))
        return score

    def read_lines(self, threshold: float, uncertain: Band) -> tuple[bytes, Places]:
        """Lines of `reads.tsv`, and one index into `_FATE_NAMES` for each read."""
        store, low, high = self.store, self.reads.start, self.reads.stop
        score = self.read_scores(np.arange(self.n_reads))
        fate = _judged(score, threshold, uncertain)
        fate[store.read_rows[low:high] == 0] = NO_OPEN_FRAME
        fate[store.read_chunks[low:high] == 0] = EMPTY
        fate[np.asarray(store.row_read[self.rows])[self.lost] - low] = FAILED
        fate[: self.lost_before] = FAILED
        columns = store.read_length, store.read_chunks, store.read_rows
        counts = (_texts(column[low:high].tolist()) for column in columns)
        bits = np.asarray(store.read_flags[low:high])
        remarks = [_REMARKS[flags] for flags in (bits & (SHORT_FOR_MODEL | AMBIGUOUS)).tolist()]
        for i in np.flatnonzero(bits & DUPLICATE_ID).tolist():  # the id stands last
            first = store.original_ids(low + i, low + i + 1)[0]
            remarks[i] = ",".join(filter(None, (remarks[i], f"duplicate_of={first}")))
        return _lines(
            store.read_ids(low, high), *counts, *_told(score, fate), _READ_LABELS[fate], remarks
        ), fate

    def pair_lines(self, fate: Places, threshold: float, uncertain: Band) -> tuple[bytes, Places]:
        """Lines of `pairs.tsv`, and one index into `_FATE_NAMES` for each pair; `fate` [n_reads] is that of reads."""
        low, high = self.reads.start, self.reads.stop
        mate = (self.store.read_flags[low:high] & MATE) > 0
        ids = np.array(self.store.read_ids(low, high), dtype=object)
        one = np.flatnonzero(~mate)
        both = np.append(mate[1:], False)[one]
        other = one + both  # itself where there is no mate
        joint, score = (
            self.read_scores(np.cumsum(~mate) - 1),
            self.read_scores(np.arange(self.n_reads)),
        )
        verdict = np.where(
            np.isnan(joint),
            np.minimum(fate[one], fate[other]),
            _judged(joint, threshold, uncertain),
        )
        verdict[(fate[one] == FAILED) | (fate[other] == FAILED)] = FAILED
        seconds = ids[other], *_told(score[other], fate[other])
        for column in seconds:
            column[~both] = ""
        verdicts = *_told(joint, verdict), _READ_LABELS[verdict]
        lines = _lines(ids[one], seconds[0], *verdicts, *_told(score[one], fate[one]), *seconds[1:])
        return lines, verdict[both]


def write_results(
    run: RunDir,
    store: OrfStore,
    scores: Scores,
    failed: Mask,
    threshold: float = DEFAULT_THRESHOLD,
    uncertain: Band | None = None,
    workers: int = 1,
) -> ResultSummary:
    """Write the result files of a run, of many reads by `workers` processes; memory holds a few blocks for each.
    `scores` [n_uniques, 2] and `failed` [n_uniques] belong to the store's distinct sequences. `threshold` moves the
    verdict on reads, and reads with a score within `uncertain` get none; VirNucPro's files know neither. Errors:
    `ShardError` for a sequence that neither failed nor has a score; `VirnucError` for a broken store; `WorkerError`."""
    missing = np.flatnonzero(~failed & ~np.isfinite(scores).all(axis=1))
    if len(missing):
        raise ShardError(
            f"{len(missing)} sequences have no score and did not fail; the first is number {missing[0]}"
        )
    fates, counts, spent_s = (
        np.zeros((2, len(_FATE_NAMES)), np.int64),
        np.zeros(3, np.int64),
        np.zeros(2),
    )
    began_s, few = (
        time.perf_counter(),
        max(store.n_reads / BLOCK_READS, store.n_rows / BLOCK_ROWS) <= FEW_BLOCKS,
    )
    with ExitStack() as stack:
        files = _opened(stack, run, 4 + store.paired)
        if not store.paired:
            run.pairs_table.unlink(missing_ok=True)  # of other reads that were scored here before
        work, pool = (
            partial(_made, threshold, uncertain or (0.0, 0.0)),
            Workers(1 if few else workers),
        )
        for made in stack.enter_context(pool).map(work, _blocks(store, scores, failed)):
            for file, lines in zip(files, made.lines, strict=False):
                file.write(lines)
            fates, counts, spent_s = (
                fates + made.fates,
                counts + made.counts,
                spent_s + made.spent_s,
            )
    told, of = (
        dict(zip(_FATE_NAMES.tolist() if uncertain else FATES, some, strict=False))
        for some in fates.tolist()
    )
    predict_s, consensus_s = (
        spent_s / (spent_s.sum() or 1.0) * (time.perf_counter() - began_s)
    ).tolist()
    rows, chunks, virus = counts.tolist()
    return ResultSummary(
        told, rows, chunks, virus, threshold, predict_s, consensus_s, of if store.paired else {}
    )


def _blocks(store: OrfStore, scores: Scores, failed: Mask) -> Iterator[_Block]:
    before = None  # of a read with more rows to come
    for span in _spans(store):
        unique = np.asarray(store.row_unique[span[1]])
        yield (block := _Block(store, span, scores[unique], ~failed[unique], before))
        before = None if block.whole else block


class _Made(NamedTuple):
    """What is written of a block."""

    lines: list[bytes]  # of each of the run's tables
    fates: Places  # [2, fates] of reads and of pairs
    counts: Places  # rows_virus, chunks_scored, chunks_virus
    spent_s: NDArray[np.float64]  # predict_s, consensus_s


def _made(threshold: float, uncertain: Band, block: _Block) -> _Made:
    began_s, originals = time.perf_counter(), block.original_lines()
    judged_s, store = time.perf_counter(), block.store
    table, pairs, fate, both = b"", b"", np.empty(0, np.int64), np.empty(0, np.int64)
    if block.whole:
        table, fate = block.read_lines(threshold, uncertain)
    if block.whole and store.paired:
        pairs, both = block.pair_lines(fate, threshold, uncertain)
    names = store.row_ids(block.rows.start, block.rows.stop) if len(block.lost) else []
    lines = [*originals, table, _lines([names[i] for i in block.lost.tolist()]), pairs]
    fates = np.stack([np.bincount(one, minlength=len(_FATE_NAMES)) for one in (fate, both)])
    counts = np.array([block.row_is_virus.sum(), len(block.starts), block.chunk_is_virus.sum()])
    return _Made(
        lines, fates, counts, np.array([judged_s - began_s, time.perf_counter() - judged_s])
    )


def write_covered(run: RunDir, store: OrfStore, covered: Mask, scores: Scores) -> None:
    """Write VirNucPro's two files for the reads marked in `covered` [n_reads], by the `scores` [rows of those reads, 2]
    in row order. Errors: `VirnucError` for another number of rows."""
    wanted = covered[np.asarray(store.row_read)]
    if int(wanted.sum()) != len(scores):
        raise VirnucError(f"{run.root}: {len(scores)} scores for {int(wanted.sum())} rows")
    of_rows = np.full((len(wanted), 2), np.nan, dtype=np.float32)
    of_rows[wanted] = scores
    with ExitStack() as stack:
        originals = _opened(stack, run, 2)
        for span in _spans(store):
            block = _Block(store, span, of_rows[span[1]], wanted[span[1]])
            for file, lines in zip(originals, block.original_lines(), strict=True):
                file.write(lines)


def _spans(store: OrfStore) -> Iterator[_Span]:
    """Consecutive reads and their rows, of bounded size, chunks and pairs whole."""
    read, row = 0, 0
    while read < store.n_reads:
        ends = np.cumsum(store.read_rows[read : read + BLOCK_READS + 1], dtype=np.int64)
        count = max(1, min(BLOCK_READS, int(np.searchsorted(ends, BLOCK_ROWS, side="right"))))
        count += any(store.read_flags[read + count : read + count + 1] & MATE)
        next_row = row + int(ends[count - 1])
        while count == 1 and next_row - row > BLOCK_ROWS:
            cut = row + BLOCK_ROWS
            of_chunk = store.row_chunk[cut : cut + len(FRAMES)] == store.row_chunk[cut - 1]
            cut += int(np.argmin(np.append(of_chunk, False)))
            if cut >= next_row:
                break
            yield slice(read, read + 1), slice(row, cut), False
            row = cut
        yield slice(read, read + count), slice(row, next_row), True
        read, row = read + count, next_row
    if row != store.n_rows:
        raise VirnucError(f"{store.path}: its reads claim {row} rows, it holds {store.n_rows}")


def _opened(stack: ExitStack, run: RunDir, count: int) -> Sequence[BinaryIO]:
    """The first of a run's tables, with their headers; they are there once `stack` closes without an error."""
    files = [
        stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
        for path in run.tables[:count]
    ]
    headers = PREDICTION_HEADER, CONSENSUS_HEADER, READS_HEADER, FAILED_HEADER, PAIRS_HEADER
    for file, header in zip(files, headers, strict=False):
        file.write(header.encode())
    return files


def _judged(score: Scores, threshold: float, uncertain: Band) -> Places:
    """The fate of each score."""
    fate = np.where(score >= threshold, VIRAL, OTHERS)
    fate[(score >= uncertain[0]) & (score < uncertain[1])] = UNCERTAIN
    return fate


def _told(score: Scores, fate: Places) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Fates by name, and the scores of those that have one by their fate."""
    shown, judged = np.full(len(score), "", dtype=object), np.isin(fate, (VIRAL, OTHERS, UNCERTAIN))
    shown[judged] = _texts(score[judged])
    return _FATE_NAMES[fate], shown


def _texts(values: Any) -> list[str]:
    """Values as text; a float32 in the fewest digits that read back as the same float32."""
    return list(map(str, values))


def _lines(*columns: Sequence[str] | NDArray[np.object_]) -> bytes:
    """Columns of equal length as TAB-separated lines."""
    text = "\n".join(map("\t".join, zip(*columns, strict=True)))
    return f"{text}\n".encode() if text else b""
