"""The files people read: VirNucPro's two result files, and one line for every read that came in.

- `prediction_results.txt`: one line per row (an open frame of a chunk), in input order.
- `prediction_results_highestscore.csv`: one line per chunk that has a scored row, in input order. A chunk is a virus
  when the largest `score2` of its rows is at least the largest `score1`; a tie is a virus.
- `reads.tsv`: one line per read, in input order, with exactly one fate. `failed.tsv`: rows that were not embedded.
- `viral.fastq.gz`, `viral.fasta.gz`: on request, the viral reads as they came.

VirNucPro judges no reads; our rule, and why it is so, is told in docs/results.md. Its files name reads as the input
does. Reads that share an id stay apart in our own tables, as `r7` and `r7.2`.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import InputError, ShardError, VirnucError
from virnuc_core.reads.parse import OnError, ParseLog, parse
from virnuc_core.reads.sources import STDIN, can_be_read_twice, find_inputs
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, SHORT_FOR_MODEL
from virnuc_core.rundir import RunDir, whole_file

FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
VIRAL, OTHERS, NO_OPEN_FRAME, EMPTY, FAILED = range(len(FATES))
THRESHOLD: Final = 0.5

PREDICTION_HEADER: Final = "Sequence_ID\tPrediction\tscore1\tscore2\n"
CONSENSUS_HEADER: Final = "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
READS_HEADER: Final = "id\tlength\tchunks\topen_frames\tfate\tviral_score\tlabel\tflags\n"
FAILED_HEADER: Final = "Sequence_ID\n"

BLOCK_READS: Final = 65_536
BLOCK_ROWS: Final = 131_072
_FATE_NAMES: Final = np.array(FATES, dtype=object)
_READ_LABELS: Final = np.array(("virus", "others", "", "", ""), dtype=object)  # by fate
_ROW_LABELS: Final = np.array(("others", "virus"), dtype=object)
_FRAME_SUFFIX: Final = 2  # "F1" … "R3" at the end of a row's id
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
class _Span:
    """Consecutive reads and all their rows."""

    reads: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class _Votes:
    """The scored rows of a span and the verdict on each of its chunks, by the rows that decide it."""

    row: NDArray[np.int64]  # [rows] place within the span
    read: NDArray[np.int64]  # [rows] place within the span
    scores: NDArray[np.float32]  # [rows, 2]: P(others), P(virus)
    starts: NDArray[np.int64]  # [chunks] first row of each chunk
    top_others: NDArray[np.int64]  # [chunks] a row with the chunk's largest score1
    top_virus: NDArray[np.int64]  # [chunks] a row with the chunk's largest score2
    margin: NDArray[np.float64]  # [chunks] largest score2 minus largest score1

    @classmethod
    def of(cls, store: OrfStore, span: _Span, scores: NDArray[np.float32], scored: NDArray[np.bool_]) -> _Votes:
        """The votes of the rows marked in `scored` [rows of the span]; `scores` [rows of the span, 2].

        Errors: `VirnucError` when the rows are not of the span's reads.
        """
        read = np.asarray(store.row_read[span.rows])
        if len(read) and (read[0] < span.reads.start or read[-1] >= span.reads.stop):
            raise VirnucError(
                f"{store.path}: rows {span.rows.start}…{span.rows.stop} are not of reads "
                f"{span.reads.start}…{span.reads.stop}"
            )
        row = np.flatnonzero(scored)
        read, chunk, scores = read[row] - span.reads.start, np.asarray(store.row_chunk[span.rows])[row], scores[row]
        new = np.ones(len(row), bool)
        new[1:] = (np.diff(read) != 0) | (np.diff(chunk) != 0)
        starts = np.flatnonzero(new)
        others, virus = _top_rows(scores[:, 0], starts), _top_rows(scores[:, 1], starts)
        # exact: the difference of two float32 numbers has the right sign in float64
        margin = scores[virus, 1].astype(np.float64) - scores[others, 0].astype(np.float64)
        return cls(row, read, scores, starts, others, virus, margin)

    @property
    def row_is_virus(self) -> NDArray[np.bool_]:
        """[rows] A tie is `others`."""
        return self.scores[:, 1] > self.scores[:, 0]

    @property
    def chunk_is_virus(self) -> NDArray[np.bool_]:
        """[chunks] A tie is a virus."""
        return self.margin >= 0

    def lines(self, store: OrfStore, span: _Span) -> tuple[bytes, bytes]:
        """Lines of `prediction_results.txt` and of `prediction_results_highestscore.csv`."""
        names = np.array(store.row_ids(span.rows.start, span.rows.stop, original=True), dtype=object)[self.row]
        score1, score2 = (np.array(_texts(column), dtype=object) for column in self.scores.T)
        rows = _lines(names, _ROW_LABELS[self.row_is_virus.astype(np.int64)], score1, score2)
        chunks = [name[:-_FRAME_SUFFIX] for name in names[self.starts]]
        verdicts = [str(verdict) for verdict in self.chunk_is_virus.tolist()]
        return rows, _lines(chunks, verdicts, score1[self.top_others], score2[self.top_virus])

    def read_scores(self, n_reads: int) -> NDArray[np.float32]:
        """`viral_score` of the span's reads, float32 [n_reads], NaN for those without a scored row.

        A read of one scored row has that row's very `score2`, so that both files print the same number: `score1` is one
        minus it only to the last digit. A score is at least 0.5 exactly when the mean margin is at least 0, however
        small the margin: rounding never lifts a read over the line.
        """
        chunk_read = self.read[self.starts]
        total = np.bincount(chunk_read, weights=self.margin, minlength=n_reads)
        chunks = np.bincount(chunk_read, minlength=n_reads)
        mean = np.divide(total, chunks, out=np.full(n_reads, np.nan), where=chunks > 0)
        score: NDArray[np.float32] = (0.5 + mean / 2).astype(np.float32)
        alone = np.bincount(self.read, minlength=n_reads)[self.read] == 1
        score[self.read[alone]] = self.scores[alone, 1]
        score[mean < 0] = np.minimum(score[mean < 0], _BELOW_HALF)
        score[mean >= 0] = np.maximum(score[mean >= 0], _HALF)
        return score


def _top_rows(values: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each chunk a row that holds its largest value."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.int64)
    sizes = np.diff(starts, append=len(values))
    is_top = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, starts), sizes))
    top = np.empty(len(starts), dtype=np.int64)
    top[np.searchsorted(starts, is_top, side="right") - 1] = is_top
    return top


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
    fates = np.zeros(len(FATES), np.int64)
    counts = Counter(rows_virus=0, rows_failed=0, chunks=0, chunks_virus=0)
    predict_s = consensus_s = 0.0
    with ExitStack() as stack:
        originals = [_open_whole(stack, *file) for file in _original_files(run)]
        reads = _open_whole(stack, run.reads_table, READS_HEADER)
        failures = _open_whole(stack, run.failed_rows, FAILED_HEADER)
        for span in _spans(store):
            began = time.perf_counter()
            unique = np.asarray(store.row_unique[span.rows])
            lost = failed[unique]
            votes = _Votes.of(store, span, scores[unique], ~lost)
            judged = time.perf_counter()
            for file, lines in zip(originals, votes.lines(store, span), strict=True):
                file.write(lines)
            if lost.any():
                names = store.row_ids(span.rows.start, span.rows.stop)
                failures.write(_lines([names[i] for i in np.flatnonzero(lost).tolist()]))
            written = time.perf_counter()
            score = votes.read_scores(span.reads.stop - span.reads.start)
            fate = _fates(store, span, score, lost, threshold)
            reads.write(_read_lines(store, span, score, fate))
            fates += np.bincount(fate, minlength=len(FATES))
            counts.update(rows_virus=int(votes.row_is_virus.sum()), rows_failed=int(lost.sum()))
            counts.update(chunks=len(votes.starts), chunks_virus=int(votes.chunk_is_virus.sum()))
            predict_s += written - judged
            consensus_s += time.perf_counter() - written + judged - began
        if int(fates.sum()) != store.n_reads:
            raise VirnucError(f"{run.root}: {store.n_reads} reads came in, {int(fates.sum())} are accounted for")
    return ResultSummary(
        reads=store.n_reads,
        **dict(zip(FATES, fates.tolist(), strict=True)),
        rows=store.n_rows,
        **counts,
        threshold=threshold,
        predict_s=predict_s,
        consensus_s=consensus_s,
    )


def write_covered(run: RunDir, store: OrfStore, covered: NDArray[np.bool_], scores: NDArray[np.float32]) -> int:
    """Write VirNucPro's two files for the reads marked in `covered` [n_reads]; returns how many chunks are a virus.

    `scores` [rows of those reads, 2] are in row order. Errors: `VirnucError` when their number is not that of the rows.
    """
    done = viral = 0
    with ExitStack() as stack:
        originals = [_open_whole(stack, *file) for file in _original_files(run)]
        for span in _spans(store):
            wanted = covered[np.asarray(store.row_read[span.rows])]
            count = int(wanted.sum())
            if done + count > len(scores):
                raise VirnucError(f"{run.root}: {len(scores)} scores for more rows than that")
            here = np.full((len(wanted), 2), np.nan, dtype=np.float32)
            here[wanted] = scores[done : done + count]
            done += count
            votes = _Votes.of(store, span, here, wanted)
            for file, lines in zip(originals, votes.lines(store, span), strict=True):
                file.write(lines)
            viral += int(votes.chunk_is_virus.sum())
        if done != len(scores):
            raise VirnucError(f"{run.root}: {len(scores)} scores for {done} rows")
    return viral


def _spans(store: OrfStore) -> Iterator[_Span]:
    """Cut the store into spans of bounded size; a read is never cut, however many rows it has."""
    read, row = 0, 0
    while read < store.n_reads:
        ends = np.cumsum(store.read_rows[read : read + BLOCK_READS], dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, BLOCK_ROWS, side="right")))
        next_row = row + int(ends[count - 1])
        yield _Span(slice(read, read + count), slice(row, next_row))
        read, row = read + count, next_row
    if row != store.n_rows:
        raise VirnucError(f"{store.path}: its reads claim {row} rows, it holds {store.n_rows}")


def _check_scores(store: OrfStore, scores: NDArray[np.float32], failed: NDArray[np.bool_]) -> None:
    if scores.shape != (store.n_uniques, 2) or failed.shape != (store.n_uniques,):
        raise ShardError(f"scores of shape {scores.shape} for {store.n_uniques} sequences of {store.path}")
    missing = np.flatnonzero(~failed & ~np.isfinite(scores).all(axis=1))
    if len(missing):
        raise ShardError(f"{len(missing)} sequences have no score and did not fail; the first is number {missing[0]}")


def _original_files(run: RunDir) -> tuple[tuple[Path, str], ...]:
    """VirNucPro's two files, of rows and of chunks, and what they begin with."""
    return (run.predictions, PREDICTION_HEADER), (run.consensus, CONSENSUS_HEADER)


def _open_whole(stack: ExitStack, path: Path, header: str = "") -> BinaryIO:
    """A file that begins with `header` and appears under its name when `stack` closes without an error."""
    handle = stack.enter_context(stack.enter_context(whole_file(path)).open("wb"))
    handle.write(header.encode("utf-8"))
    return handle


def _fates(
    store: OrfStore, span: _Span, score: NDArray[np.float32], lost: NDArray[np.bool_], threshold: float
) -> NDArray[np.int64]:
    """One index into `FATES` for every read of the span."""
    fate = np.where(score >= threshold, VIRAL, OTHERS)
    fate[np.asarray(store.read_rows[span.reads]) == 0] = NO_OPEN_FRAME
    fate[np.asarray(store.read_chunks[span.reads]) == 0] = EMPTY
    fate[np.asarray(store.row_read[span.rows])[lost] - span.reads.start] = FAILED
    return fate


def _read_lines(store: OrfStore, span: _Span, score: NDArray[np.float32], fate: NDArray[np.int64]) -> bytes:
    low, high = span.reads.start, span.reads.stop
    judged = fate <= OTHERS
    shown = np.full(high - low, "", dtype=object)
    shown[judged] = _texts(score[judged])
    counts = (_texts(column[span.reads].tolist()) for column in (store.read_length, store.read_chunks, store.read_rows))
    remarks = _remarks(store, low, np.asarray(store.read_flags[span.reads]))
    return _lines(store.read_ids(low, high), *counts, _FATE_NAMES[fate], shown, _READ_LABELS[fate], remarks)


def _remarks(store: OrfStore, low: int, bits: NDArray[np.uint8]) -> NDArray[np.object_]:
    """The remarks on reads from `low` on, joined by commas; the id a `duplicate_of=` names comes last."""
    said = {0: "", SHORT_FOR_MODEL: "short_for_model", AMBIGUOUS: "ambiguous"}
    said[SHORT_FOR_MODEL | AMBIGUOUS] = "short_for_model,ambiguous"
    remarks = np.array([said[flags] for flags in (bits & (SHORT_FOR_MODEL | AMBIGUOUS)).tolist()], dtype=object)
    for i in np.flatnonzero(bits & DUPLICATE_ID).tolist():
        first = store.original_ids(low + i, low + i + 1)[0]
        remarks[i] = ",".join(filter(None, (remarks[i], f"duplicate_of={first}")))
    return remarks


def _texts(values: Any) -> list[str]:
    """Numbers as text; a float32 in the fewest digits that read back as the same float32."""
    return list(map(str, values))


def _lines(*columns: Sequence[str] | NDArray[np.object_]) -> bytes:
    """Columns of equal length as TAB-separated lines."""
    return "".join(f"{line}\n" for line in map("\t".join, zip(*columns, strict=True))).encode("utf-8")


@dataclass(frozen=True, slots=True)
class ViralReads:
    """Where the viral reads were written, and how many they are."""

    files: tuple[Path, ...]  # one for each format of the input
    reads: int


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
                out[batch.form].write(batch.text[i])
            read = last
        if read != store.n_reads:
            raise InputError(f"{read} reads are in the input, {store.n_reads} were staged", hint="run predict again")
        for form in ("fasta", "fastq"):
            if form not in out:
                viral_path(run, form).unlink(missing_ok=True)  # of an earlier run with reads of this form
    return ViralReads(tuple(viral_path(run, form) for form in sorted(out)), int(wanted.sum()))


def viral_path(run: RunDir, form: str) -> Path:
    """Where the viral reads of one format go."""
    return run.root / f"viral.{form}.gz"


def read_reads_table(run: RunDir, columns: Mapping[str, str]) -> pd.DataFrame:
    """Some columns of `reads.tsv`, by name and type. Errors: `InputError`."""
    try:
        return pd.read_csv(
            run.reads_table, sep="\t", usecols=list(columns), dtype=dict(columns), quoting=csv.QUOTE_NONE
        )
    except ValueError as error:  # pandas' own errors, and bytes that are no text, are such
        why = f"not a table of reads ({str(error).splitlines()[0]})"
        raise InputError(why, file=run.reads_table, hint="run predict again") from error


def _viral_scores(run: RunDir, store: OrfStore) -> NDArray[np.float32]:
    """The `viral_score` of every read, NaN where it has none."""
    table = read_reads_table(run, {"viral_score": "float32"})
    if len(table) != store.n_reads:
        raise InputError(f"{len(table)} lines for {store.n_reads} reads", file=run.reads_table)
    return table["viral_score"].to_numpy()


def _open_gzip(stack: ExitStack, path: Path) -> gzip.GzipFile:
    """A gzip file without name or time in it, which appears when `stack` closes without an error."""
    raw = _open_whole(stack, path)
    return stack.enter_context(gzip.GzipFile(fileobj=raw, filename="", mode="wb", compresslevel=4, mtime=0))
