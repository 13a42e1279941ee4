"""The files people read: VirNucPro's two result files, and one line for every read that came in.

- `prediction_results.txt`: one line per row (an open frame of a chunk), in input order.
- `prediction_results_highestscore.csv`: one line per chunk that has a scored row, in input order. A chunk is a virus
  when the largest `score2` of its rows is at least the largest `score1`; a tie is a virus.
- `reads.tsv`: one line per read, in input order, with exactly one fate. VirNucPro judges no reads; our rule follows.
- `failed.tsv`: the rows that could not be embedded.
- `viral.fastq.gz`, `viral.fasta.gz`: on request, the viral reads as they came.

The verdict on a read. Each scored chunk gives a margin, its largest `score2` minus its largest `score1`. The read's
`viral_score` is `(1 + mean margin of its chunks) / 2`, and the read is viral when that reaches the threshold (0.5). So
- a read of one chunk gets that chunk's consensus, tie included, and a read of one row gets that row's `score2`, digit
  for digit;
- a long read is not called viral for being long: "any chunk" would multiply the chance of one false call by the number
  of chunks, and "the majority" would let many doubtful chunks outvote a few certain ones;
- chunks without an open frame have no say.
A read with a row that failed has the fate `failed` and no score: half the evidence is not a verdict.

VirNucPro's files name reads as the input does. Reads that share an id stay apart in our own tables, as `r7` and `r7.2`.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.decimals import shortest
from virnuc_core.errors import InputError, ShardError, VirnucError
from virnuc_core.reads.parse import OnError, ParseLog, parse
from virnuc_core.reads.sources import STDIN, can_be_read_twice, find_inputs
from virnuc_core.reads.store import AMBIGUOUS, DUPLICATE_ID, SHORT_FOR_MODEL, OrfStore
from virnuc_core.rundir import RunDir, whole_file

FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
VIRAL, OTHERS, NO_OPEN_FRAME, EMPTY, FAILED = range(len(FATES))
READ_LABELS: Final = ("virus", "others", "", "", "")  # by fate
ROW_LABELS: Final = ("others", "virus")
THRESHOLD: Final = 0.5

PREDICTION_HEADER: Final = "Sequence_ID\tPrediction\tscore1\tscore2\n"
CONSENSUS_HEADER: Final = "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
READS_HEADER: Final = "id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags\n"
FAILED_HEADER: Final = "Sequence_ID\n"

BLOCK_READS: Final = 65_536
BLOCK_ROWS: Final = 131_072
FRAME_SUFFIX: Final = 2  # "F1" … "R3" at the end of a row's id
_REMARKS: Final = tuple(
    ",".join(["short_for_model"] * bool(bits & SHORT_FOR_MODEL) + ["ambiguous"] * bool(bits & AMBIGUOUS))
    for bits in range((SHORT_FOR_MODEL | AMBIGUOUS) + 1)
)
_HALF: Final = np.float32(0.5)
_BELOW_HALF: Final = np.nextafter(_HALF, np.float32(0))


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """What the result files hold. The five fates add up to `reads`."""

    reads: int
    viral: int
    others: int
    no_open_frame: int
    empty: int
    failed: int
    rows: int  # rows of the store, failed ones included
    rows_virus: int
    rows_failed: int
    chunks: int  # chunks with a verdict
    chunks_virus: int
    threshold: float
    predict_s: float  # seconds spent on VirNucPro's two files
    consensus_s: float  # seconds spent on the votes and reads.tsv


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive scored rows, in input order, with all the scored rows of every chunk in it."""

    ids: list[str]  # made of the read ids of the input
    read: NDArray[np.int64]  # [rows]
    chunk: NDArray[np.int32]  # [rows] from 0 within the read
    scores: NDArray[np.float32]  # [rows, 2]: P(others), P(virus)

    def chunk_starts(self) -> NDArray[np.int64]:
        """The first row of each chunk, [chunks]."""
        if not self.ids:
            return np.empty(0, dtype=np.int64)
        new = (np.diff(self.read) != 0) | (np.diff(self.chunk) != 0)
        return np.concatenate(([0], np.flatnonzero(new) + 1)).astype(np.int64)

    def where(self, keep: NDArray[np.bool_]) -> RowBlock:
        """The rows marked in `keep` [rows]."""
        if keep.all():
            return self
        kept = np.flatnonzero(keep)
        return RowBlock([self.ids[i] for i in kept.tolist()], self.read[kept], self.chunk[kept], self.scores[kept])


@dataclass(frozen=True, slots=True)
class Consensus:
    """The verdict on each chunk of a block, by the rows that decide it."""

    starts: NDArray[np.int64]  # [chunks] first row of each chunk within the block
    top_others: NDArray[np.int64]  # [chunks] a row with the chunk's largest score1
    top_virus: NDArray[np.int64]  # [chunks] a row with the chunk's largest score2
    margin: NDArray[np.float64]  # [chunks] largest score2 minus largest score1

    @property
    def is_virus(self) -> NDArray[np.bool_]:
        """A tie is a virus."""
        return self.margin >= 0  # exact: the difference of two float32 numbers has the right sign in float64


def row_labels(scores: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows are labelled virus, [rows]; a tie is `others`."""
    return scores[:, 1] > scores[:, 0]


def consensus(block: RowBlock) -> Consensus:
    """The rows with the largest score of either class in each chunk."""
    starts = block.chunk_starts()
    others, virus = _top_rows(block.scores[:, 0], starts), _top_rows(block.scores[:, 1], starts)
    margin = block.scores[virus, 1].astype(np.float64) - block.scores[others, 0].astype(np.float64)
    return Consensus(starts, others, virus, margin)


def _top_rows(values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each chunk a row that holds its largest value."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.int64)
    sizes = np.diff(starts, append=len(values))
    is_top = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, starts), sizes))
    top = np.empty(len(starts), dtype=np.int64)
    top[np.searchsorted(starts, is_top, side="right") - 1] = is_top
    return top


def read_scores(block: RowBlock, votes: Consensus, lo: int, hi: int) -> NDArray[np.float32]:
    """`viral_score` of the reads `lo` to `hi`, float32 [reads], NaN for reads without a scored row in `block`.

    A read of one scored row has that row's very `score2`, so that both files print the same number: `score1` is one
    minus it only to the last digit. A score is at least 0.5 exactly when the mean margin is at least 0, however small
    the margin: rounding never lifts a read over the line.
    """
    row_read = block.read - lo
    chunk_read = row_read[votes.starts]
    total = np.bincount(chunk_read, weights=votes.margin, minlength=hi - lo)
    chunks = np.bincount(chunk_read, minlength=hi - lo)
    mean = np.divide(total, chunks, out=np.full(hi - lo, np.nan), where=chunks > 0)
    score: NDArray[np.float32] = (0.5 + mean / 2).astype(np.float32)
    alone = np.bincount(row_read, minlength=hi - lo)[row_read] == 1
    score[row_read[alone]] = block.scores[alone, 1]
    score[mean < 0] = np.minimum(score[mean < 0], _BELOW_HALF)
    score[mean >= 0] = np.maximum(score[mean >= 0], _HALF)
    return score


def block_lines(block: RowBlock, votes: Consensus) -> tuple[bytes, bytes]:
    """The block's lines of `prediction_results.txt` and of `prediction_results_highestscore.csv`.

    A score has the shortest form that reads back as the same float32.
    """
    shown = np.array(shortest(block.scores.ravel()), dtype=object).reshape(-1, 2)
    labels = np.array(ROW_LABELS, dtype=object)[row_labels(block.scores).astype(np.int64)]
    predictions = _lines(block.ids, labels.tolist(), shown[:, 0].tolist(), shown[:, 1].tolist())
    chunk_ids = [block.ids[start][:-FRAME_SUFFIX] for start in votes.starts.tolist()]
    verdicts = list(map(str, votes.is_virus.tolist()))
    highest = shown[votes.top_others, 0].tolist(), shown[votes.top_virus, 1].tolist()
    return predictions, _lines(chunk_ids, verdicts, *highest)


def write_results(
    run: RunDir,
    store: OrfStore,
    scores: NDArray[np.float32],
    failed: NDArray[np.bool_],
    *,
    threshold: float = THRESHOLD,
) -> ResultSummary:
    """Write the result files of a run; memory holds one block of reads at a time.

    `scores` [n_uniques, 2] and `failed` [n_uniques] belong to the store's distinct sequences. `threshold` moves the
    verdict on reads only; VirNucPro's files know no threshold. Errors: `ShardError` when a sequence that did not fail
    has no score; `VirnucError` when the counts do not add up to the input.
    """
    _check_scores(store, scores, failed)
    tally = _Tally(threshold)
    with ExitStack() as stack:
        files = _Files.open(stack, run)
        for span in spans(store):
            began = time.perf_counter()
            unique = np.asarray(store.row_unique[span.row_lo : span.row_hi])
            rows = row_block(store, span, scores[unique])
            tally.predict_s += time.perf_counter() - began
            _write_span(files, tally, store, span, rows, failed=failed[unique])
        if int(tally.fates.sum()) != store.n_reads:
            raise VirnucError(f"{run.root}: {store.n_reads} reads came in, {int(tally.fates.sum())} are accounted for")
    return tally.summary(store)


def write_covered(run: RunDir, store: OrfStore, covered: NDArray[np.bool_], scores: NDArray[np.float32]) -> int:
    """Write VirNucPro's two files for the reads marked in `covered` [n_reads]; returns how many chunks are a virus.

    `scores` [rows of those reads, 2] are in row order. Errors: `VirnucError` when their number is not that of the rows.
    """
    done = viral = 0
    with ExitStack() as stack:
        predictions = open_whole(stack, run.predictions, PREDICTION_HEADER)
        chunks = open_whole(stack, run.consensus, CONSENSUS_HEADER)
        for span in spans(store):
            keep = covered[np.asarray(store.row_read[span.row_lo : span.row_hi])]
            count = int(keep.sum())
            here = np.full((len(keep), 2), np.nan, dtype=np.float32)
            if done + count > len(scores):
                raise VirnucError(f"{run.root}: {len(scores)} scores for more rows than that")
            here[keep] = scores[done : done + count]
            done += count
            rows = row_block(store, span, here).where(keep)
            votes = consensus(rows)
            viral += int(votes.is_virus.sum())
            row_lines, chunk_lines = block_lines(rows, votes)
            predictions.write(row_lines)
            chunks.write(chunk_lines)
        if done != len(scores):
            raise VirnucError(f"{run.root}: {len(scores)} scores for {done} rows")
    return viral


@dataclass(frozen=True, slots=True)
class ViralReads:
    """Where the viral reads were written, and how many they are."""

    files: tuple[Path, ...]  # one for each format of the input
    reads: int
    threshold: float


def check_readable_twice(reads: Sequence[str]) -> None:
    """Refuse to pick viral reads from what is gone once it was read. Errors: `InputError`."""
    for name in find_inputs(tuple(reads)).files:
        if not can_be_read_twice(name):
            what = "standard input" if name == STDIN else name
            raise InputError(f"{what} cannot be read twice", hint="put the reads into a file to get the viral ones")


def write_viral(
    run: RunDir, store: OrfStore, reads: Sequence[str], *, threshold: float = THRESHOLD, on_error: OnError = "stop"
) -> ViralReads:
    """Write the reads whose `viral_score` in `reads.tsv` reaches `threshold`, as they stand in the input.

    FASTQ reads go to `viral.fastq.gz`, FASTA reads to `viral.fasta.gz`, which is empty where none is viral; the same
    input gives the same bytes. `reads` and `on_error` are those the store was made from. Errors: `InputError` when
    the input is not what was staged, or came through a pipe.
    """
    check_readable_twice(reads)
    wanted = _viral_scores(run, store) >= threshold
    read = 0
    with ExitStack() as stack:
        out: dict[str, gzip.GzipFile] = {}
        for batch in parse(find_inputs(tuple(reads)).files, ParseLog(on_error)):
            last = read + len(batch)
            if last > store.n_reads or store.original_ids(read, last) != [batch.id(i) for i in range(len(batch))]:
                raise InputError(f"reads {read + 1} to {last} are not those that were staged", hint="run predict again")
            if batch.form not in out:
                out[batch.form] = _open_gzip(stack, viral_path(run, batch.form))
            for i in np.flatnonzero(wanted[read:last]).tolist():
                out[batch.form].write(batch.record(i))
            read = last
        if read != store.n_reads:
            raise InputError(f"{read} reads are in the input, {store.n_reads} were staged", hint="run predict again")
        for form in ("fasta", "fastq"):
            if form not in out:
                viral_path(run, form).unlink(missing_ok=True)  # of an earlier run with reads of this form
    return ViralReads(tuple(viral_path(run, form) for form in sorted(out)), int(wanted.sum()), threshold)


def viral_path(run: RunDir, form: str) -> Path:
    """Where the viral reads of one format go."""
    return run.root / f"viral.{form}.gz"


def _viral_scores(run: RunDir, store: OrfStore) -> NDArray[np.float32]:
    """The `viral_score` of every read, NaN where it has none."""
    columns = {"viral_score": np.float32}
    table = pd.read_csv(run.reads_table, sep="\t", usecols=list(columns), dtype=columns, quoting=csv.QUOTE_NONE)
    if len(table) != store.n_reads:
        raise InputError(f"{len(table)} lines for {store.n_reads} reads", file=run.reads_table)
    return table["viral_score"].to_numpy()


def _open_gzip(stack: ExitStack, path: Path) -> gzip.GzipFile:
    """A gzip file without name or time in it, which appears when `stack` closes without an error."""
    raw = stack.enter_context(stack.enter_context(whole_file(path)).open("wb"))
    return stack.enter_context(gzip.GzipFile(fileobj=raw, filename="", mode="wb", compresslevel=4, mtime=0))


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive reads and all their rows."""

    read_lo: int
    read_hi: int
    row_lo: int
    row_hi: int


def spans(store: OrfStore) -> Iterator[Span]:
    """Cut the store into spans of bounded size; a read is never cut, however many rows it has."""
    read, row = 0, 0
    while read < store.n_reads:
        ends = np.cumsum(store.read_rows[read : read + BLOCK_READS], dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, BLOCK_ROWS, side="right")))
        next_row = row + int(ends[count - 1])
        yield Span(read, read + count, row, next_row)
        read, row = read + count, next_row
    if row != store.n_rows:
        raise VirnucError(f"{store.path}: its reads claim {row} rows, it holds {store.n_rows}")


def row_block(store: OrfStore, span: Span, scores: NDArray[np.float32]) -> RowBlock:
    """The span's rows with their scores [rows, 2]; `VirnucError` when the rows are not of the span's reads."""
    read = np.asarray(store.row_read[span.row_lo : span.row_hi])
    if len(read) and (read[0] < span.read_lo or read[-1] >= span.read_hi):
        raise VirnucError(
            f"{store.path}: rows {span.row_lo}…{span.row_hi} are not of reads {span.read_lo}…{span.read_hi}"
        )
    chunk = np.asarray(store.row_chunk[span.row_lo : span.row_hi])
    return RowBlock(store.row_ids(span.row_lo, span.row_hi, original=True), read, chunk, scores)


@dataclass(slots=True)
class _Tally:
    """What has been written so far."""

    threshold: float
    fates: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(FATES), dtype=np.int64))
    rows_virus: int = 0
    rows_failed: int = 0
    chunks: int = 0
    chunks_virus: int = 0
    predict_s: float = 0.0
    consensus_s: float = 0.0

    def summary(self, store: OrfStore) -> ResultSummary:
        viral, others, no_open_frame, empty, failed = self.fates.tolist()
        return ResultSummary(
            reads=store.n_reads,
            viral=viral,
            others=others,
            no_open_frame=no_open_frame,
            empty=empty,
            failed=failed,
            rows=store.n_rows,
            rows_virus=self.rows_virus,
            rows_failed=self.rows_failed,
            chunks=self.chunks,
            chunks_virus=self.chunks_virus,
            threshold=self.threshold,
            predict_s=self.predict_s,
            consensus_s=self.consensus_s,
        )


@dataclass(frozen=True, slots=True)
class _Files:
    """The four result files while they are written; they appear together, when the stack closes without an error."""

    predictions: BinaryIO
    consensus: BinaryIO
    reads: BinaryIO
    failed: BinaryIO

    @classmethod
    def open(cls, stack: ExitStack, run: RunDir) -> _Files:
        return cls(
            open_whole(stack, run.predictions, PREDICTION_HEADER),
            open_whole(stack, run.consensus, CONSENSUS_HEADER),
            open_whole(stack, run.reads_table, READS_HEADER),
            open_whole(stack, run.failed_rows, FAILED_HEADER),
        )


def open_whole(stack: ExitStack, path: Path, header: str) -> BinaryIO:
    """A file that begins with `header` and appears under its name when `stack` closes without an error."""
    handle = stack.enter_context(stack.enter_context(whole_file(path)).open("wb"))
    handle.write(header.encode("utf-8"))
    return handle


def _check_scores(store: OrfStore, scores: NDArray[np.float32], failed: NDArray[np.bool_]) -> None:
    if scores.shape != (store.n_uniques, 2) or failed.shape != (store.n_uniques,):
        raise ShardError(f"scores of shape {scores.shape} for {store.n_uniques} sequences of {store.path}")
    missing = np.flatnonzero(~failed & ~np.isfinite(scores).all(axis=1))
    if len(missing):
        raise ShardError(f"{len(missing)} sequences have no score and did not fail; the first is number {missing[0]}")


def _write_span(
    files: _Files, tally: _Tally, store: OrfStore, span: Span, rows: RowBlock, *, failed: NDArray[np.bool_]
) -> None:
    """Write one span's lines into all files and count them; `failed` [rows] marks the rows without a score."""
    began = time.perf_counter()
    scored = rows.where(~failed)
    votes = consensus(scored)
    judged = time.perf_counter()
    predictions, chunks = block_lines(scored, votes)
    files.predictions.write(predictions)
    files.consensus.write(chunks)
    if failed.any():
        ids = store.row_ids(span.row_lo, span.row_hi)
        files.failed.write(_lines([ids[i] for i in np.flatnonzero(failed).tolist()]))
    written = time.perf_counter()
    score = read_scores(scored, votes, span.read_lo, span.read_hi)
    fate = _fates(store, span, score, rows.read[failed] - span.read_lo, tally.threshold)
    files.reads.write(_read_lines(store, span, score, fate))
    tally.fates += np.bincount(fate, minlength=len(FATES))
    tally.rows_virus += int(row_labels(scored.scores).sum())
    tally.rows_failed += int(failed.sum())
    tally.chunks += len(votes.starts)
    tally.chunks_virus += int(votes.is_virus.sum())
    tally.predict_s += written - judged
    tally.consensus_s += time.perf_counter() - written + judged - began


def _fates(
    store: OrfStore, span: Span, score: NDArray[np.float32], failed_reads: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    """One index into `FATES` for every read of the span."""
    fate = np.where(score >= threshold, VIRAL, OTHERS)
    fate[np.asarray(store.read_rows[span.read_lo : span.read_hi]) == 0] = NO_OPEN_FRAME
    fate[np.asarray(store.read_chunks[span.read_lo : span.read_hi]) == 0] = EMPTY
    fate[failed_reads] = FAILED
    return fate


def _read_lines(store: OrfStore, span: Span, score: NDArray[np.float32], fate: NDArray[np.int64]) -> bytes:
    lo, hi = span.read_lo, span.read_hi
    judged = fate <= OTHERS
    shown = np.full(hi - lo, "", dtype=object)
    shown[judged] = shortest(score[judged])
    return _lines(
        store.read_ids(lo, hi),
        _counts(store.read_length[lo:hi]),
        _counts(store.read_chunks[lo:hi]),
        _counts(store.read_rows[lo:hi]),
        np.array(FATES, dtype=object)[fate].tolist(),
        shown.tolist(),
        np.array(READ_LABELS, dtype=object)[fate].tolist(),
        read_flags(store, lo, hi),
    )


def read_flags(store: OrfStore, lo: int, hi: int) -> list[str]:
    """The remarks on reads `lo` to `hi`, joined by commas; the id a `duplicate_of=` names comes last."""
    bits = np.asarray(store.read_flags[lo:hi])
    flags = np.array(_REMARKS, dtype=object)[bits & (SHORT_FOR_MODEL | AMBIGUOUS)]
    for i in np.flatnonzero(bits & DUPLICATE_ID).tolist():
        first = store.original_ids(lo + i, lo + i + 1)[0]
        flags[i] = ",".join(filter(None, (flags[i], f"duplicate_of={first}")))
    remarks: list[str] = flags.tolist()
    return remarks


def _counts(column: NDArray[np.int32]) -> list[str]:
    """Small whole numbers as text; most of them are alike."""
    values, place = np.unique(column, return_inverse=True)
    texts: list[str] = np.array(list(map(str, values.tolist())), dtype=object)[place].tolist()
    return texts


def _lines(*columns: list[str]) -> bytes:
    """Columns of equal length as TAB-separated lines."""
    if not columns[0]:
        return b""
    return ("\n".join(map("\t".join, zip(*columns, strict=True))) + "\n").encode("utf-8")
