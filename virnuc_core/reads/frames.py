"""The work of one batch, chunk → translate → digest, done here or in helper processes, batch by batch in order."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Final, cast

import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import WorkerError
from virnuc_core.reads.chunk import chunk
from virnuc_core.reads.digest import digests
from virnuc_core.reads.parse import ReadBatch, offsets_of
from virnuc_core.reads.translate import Orfs, translate

_ODD: Final = bytes(byte not in b"ACGTacgt" for byte in range(256))


@dataclass(frozen=True, slots=True)
class Frames:
    """Chunks and open frames of one batch of reads."""

    read_chunks: NDArray[np.int32]  # [reads]
    read_rows: NDArray[np.int32]  # [reads] open frames
    read_ambiguous: NDArray[np.bool_]  # [reads] holds a letter other than A, C, G, T
    row_chunk: NDArray[np.int32]  # [rows] within the read, from 0
    orfs: Orfs
    digests: NDArray[np.uint64]  # [rows, 2] of DNA and protein
    id_digests: NDArray[np.uint64]  # [reads, 2]
    chunk_s: float
    translate_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """What the body needs of a batch; goes to a helper process as it is."""

    ids: bytes
    id_offsets: NDArray[np.int64]
    bases: bytes
    base_offsets: NDArray[np.int64]
    size: int

    @classmethod
    def of(cls, batch: ReadBatch, size: int) -> Job:
        """Cut and translate this batch."""
        return cls(batch.ids, batch.id_offsets, batch.bases, batch.base_offsets, size)


def frames_of(job: Job) -> Frames:
    """Cut the reads of a batch, translate the chunks in six frames, digest the open ones."""
    started = time.perf_counter()
    offsets = job.base_offsets
    lengths = np.diff(offsets)
    chunks = chunk(lengths, job.size)
    chunked = time.perf_counter()
    begin = offsets[chunks.read]
    orfs = translate(job.bases, begin + chunks.start, begin + chunks.end)
    row_read = chunks.read[orfs.chunk]
    ambiguous = _ambiguous(job.bases, offsets)
    return Frames(
        read_chunks=np.bincount(chunks.read, minlength=len(lengths)).astype(np.int32),
        read_rows=np.bincount(row_read, minlength=len(lengths)).astype(np.int32),
        read_ambiguous=ambiguous,
        row_chunk=chunks.number[orfs.chunk],
        orfs=orfs,
        digests=digest_rows(orfs, ambiguous[row_read]),
        id_digests=digests(np.frombuffer(job.ids, np.uint8), job.id_offsets),
        chunk_s=chunked - started,
        translate_s=time.perf_counter() - chunked,
    )


def _ambiguous(bases: bytes, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    flags = np.zeros(len(offsets) - 1, bool)
    odd = np.flatnonzero(np.frombuffer(bases.translate(_ODD), np.bool_))
    flags[np.searchsorted(offsets, odd, side="right") - 1] = True
    return flags


def digest_rows(orfs: Orfs, ambiguous: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Digest of each row's DNA and protein: uint64 [rows, 2]. Rows with equal digests are taken as equal.

    DNA of A, C, G, T alone says what the protein is; elsewhere the protein goes into the digest too. `ambiguous` [rows]
    may be true for more rows than those.
    """
    dna_at = offsets_of(orfs.dna_lengths.astype(np.int64))
    made = digests(orfs.dna, dna_at)
    unclear = np.flatnonzero(ambiguous)
    if len(unclear):
        protein_at = offsets_of(orfs.protein_lengths.astype(np.int64))
        both = {}
        for i in unclear.tolist():
            sequence = orfs.dna[dna_at[i] : dna_at[i + 1]].tobytes()
            if sequence.translate(None, b"ACGT"):
                both[i] = sequence + b"|" + orfs.proteins[protein_at[i] : protein_at[i + 1]].tobytes()
        made[list(both)] = digest_each(list(both.values()))
    return made


def digest_each(content: list[bytes]) -> NDArray[np.uint64]:
    """Digest of each: uint64 [n, 2]."""
    lengths = np.fromiter(map(len, content), np.int64, len(content))
    return digests(np.frombuffer(b"".join(content), np.uint8), offsets_of(lengths))


def each_with_frames(batches: Iterator[ReadBatch], size: int, workers: int) -> Iterator[tuple[ReadBatch, Frames]]:
    """Each batch with its frames, in order; with more than one worker the same body runs in that many processes.

    Errors: what `batches` raises; `WorkerError` when a helper process dies. No helper outlives this call or its caller.
    """
    if workers == 1:
        for batch in batches:
            yield batch, frames_of(Job.of(batch, size))
        return
    with ExitStack() as stack:
        idle: SimpleQueue[_Helper] = SimpleQueue()
        helpers = [stack.enter_context(_Helper()) for _ in range(workers)]
        for helper in helpers:
            idle.put(helper)
        threads = ThreadPoolExecutor(workers, thread_name_prefix="frames")
        stack.callback(threads.shutdown, cancel_futures=True)
        waiting: deque[tuple[ReadBatch, Future[Frames]]] = deque()

        def through_a_helper(job: Job) -> Frames:
            helper = idle.get()
            try:
                return helper.frames_of(job)
            finally:
                idle.put(helper)

        # the next batch is parsed while the caller stores the last
        parser = ThreadPoolExecutor(1, thread_name_prefix="parse")
        stack.callback(parser.shutdown)
        coming = parser.submit(next, batches, None)
        while (parsed := coming.result()) is not None:
            coming = parser.submit(next, batches, None)
            waiting.append((parsed, threads.submit(through_a_helper, Job.of(parsed, size))))
            if len(waiting) > 2 * workers:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()


class _Helper:
    """A process that runs `frames_of` on what it is sent. It ends when its input does: with us, however we end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "virnuc_core.reads.helper"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise WorkerError(f"a translation helper process could not be started: {error}") from error

    def frames_of(self, job: Job) -> Frames:
        """The frames of one job. Errors: `WorkerError` when the process has died or failed."""
        stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        try:
            pickle.dump(job, stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            answer = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerError(f"a translation helper process ended (exit code {self._process.poll()})") from error
        if isinstance(answer, str):
            raise WorkerError("a translation helper process failed", worker_traceback=answer)
        return cast(Frames, answer)

    def __enter__(self) -> _Helper:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                cast(IO[bytes], pipe).close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The helper's loop: jobs in, frames out, until there are no more or nobody listens."""
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        answer: Frames | str
        try:
            answer = frames_of(job)
        except Exception:  # noqa: BLE001  # whatever it is, it is told where it can be understood
            answer = traceback.format_exc()
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return
