"""The workers of staging: this process, and as many more as are asked for, doing the same jobs.

The others are started when there is work for them. Meanwhile, and whenever they have enough to do, jobs are done here.
Jobs and answers go through a worker's standard input and output, so that it ends when its caller does, however that
ends.
"""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Final, Protocol, TypeVar, cast

from virnuc_core.errors import WorkerError
from virnuc_core.reads.draft import Draft
from virnuc_core.reads.spool import Parts

_AHEAD: Final = 3  # jobs of each other worker: one under way, one in its pipe, one to come
_PIPE_BYTES: Final = 1 << 20  # room for a whole job, where the system grants it
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """Something a worker can do with its draft; it and its answer must be picklable."""

    def run(self, draft: Draft) -> T_co: ...


class Crew:
    """`workers` workers, this process among them, each with a draft in `folder`; use it in a `with` statement."""

    def __init__(self, folder: Path, workers: int) -> None:
        # jobs worth submitting before an answer is awaited; those done here wait for answers of earlier ones
        self.ahead: Final = 0 if workers == 1 else (_AHEAD + 1) * workers
        self._here = Draft(folder, 0)
        self._others = [_Member(folder, worker) for worker in range(1, workers)]
        self._submitted = 0

    def submit(self, job: Job[T]) -> Future[T]:
        """Have a job done by another worker with room for it, or here and now.

        The answer raises what the job raised, or `WorkerError` for a job of another process.
        """
        self._submitted += 1
        # the first is done here, so that what is little work needs no other process
        return self._do(job, self._others if self._submitted > 1 else [])

    def _do(self, job: Job[T], others: list[_Member]) -> Future[T]:
        member = min(others, key=_Member.load, default=None)
        if member is not None and member.has_room:
            return member.submit(job)
        done: Future[T] = Future()
        try:
            done.set_result(job.run(self._here))
        except Exception as error:  # noqa: BLE001  # told in its turn, as those of the others
            done.set_exception(error)
        return done

    def map(self, jobs: Iterable[Job[T]]) -> Iterator[T]:
        """The answers to many small jobs, in order; no worker is started for them."""
        others = [member for member in self._others if member.is_started]
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(self._do(job, others))
            while len(waiting) > self.ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def finish(self, name: str) -> tuple[Parts, ...]:
        """What all workers put into the partition `name`; to be called when no job is under way."""
        asked = [member.submit(_Finish(name)) for member in self._others if member.is_started]
        drafts = [self._here.finish(name), *(future.result() for future in asked)]
        return tuple(parts for parts in drafts if parts is not None)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._others:
            member.kill()  # what they know was told, or nobody waits for it any more
        for member in self._others:
            member.close()
        self._here.close()


class _Finish:
    """Finish a partition of the worker's draft."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, draft: Draft) -> Parts | None:
        return draft.finish(self._name)


class _Member:
    """A process that does jobs one after the other. It ends when its input does: with us, however we end.

    One thread sends jobs and one takes answers, so that the next job is there before the last is done.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder, self._worker = folder, worker
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[tuple[bytes, Future[Any]] | None] = SimpleQueue()
        self._sent: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._submitted = self._answered = 0

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def has_room(self) -> bool:
        """Whether another job keeps it from running dry."""
        return self._submitted - self._answered < _AHEAD

    def load(self) -> tuple[int, bool]:
        """How much it has to do; between the idle, those that are started come first."""
        return self._submitted - self._answered, not self.is_started

    def submit(self, job: Job[T]) -> Future[T]:
        """Have a job done after those submitted before. The answer raises `WorkerError` when the process fails."""
        if self._process is None:
            self._start()
        answer: Future[T] = Future()
        self._submitted += 1
        self._jobs.put((pickle.dumps(job, pickle.HIGHEST_PROTOCOL), answer))
        return answer

    def _start(self) -> None:
        # -P: no module of the folder people stand in; a session of its own: Ctrl-C is its caller's affair
        command = [sys.executable, "-P", "-m", "virnuc_core.reads.crew_member", str(self._folder), str(self._worker)]
        try:
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._attend(process)
        except (OSError, RuntimeError) as error:  # a thread that cannot be started is a RuntimeError
            raise WorkerError(f"a staging worker process could not be started: {error}") from error

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # more than this user may have
                fcntl.fcntl(cast(IO[bytes], process.stdin), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for work in (self._send, self._receive):
            thread = threading.Thread(target=work, args=(process,), name=f"crew {self._worker}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        stdin = cast(IO[bytes], process.stdin)
        while (item := self._jobs.get()) is not None:
            job, answer = item
            self._sent.put(answer)
            with suppress(OSError):  # it has died: whoever waits for the answer is told
                stdin.write(job)
                stdin.flush()
        with suppress(OSError):
            stdin.close()
        self._sent.put(None)

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        while (waiting := self._sent.get()) is not None:
            try:
                waiting.set_result(_answer_of(process))
            except Exception as error:  # noqa: BLE001  # it is raised where the answer is asked for
                waiting.set_exception(error)
            self._answered += 1

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """See it off once it was killed."""
        if self._process is None:
            return
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not written is of no use to anybody
                cast(IO[bytes], pipe).close()


def _answer_of(process: subprocess.Popen[bytes]) -> Any:
    """The next answer. Errors: what the job raised, or that the process has died."""
    try:
        failed, answer = pickle.load(cast(IO[bytes], process.stdout))
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        raise WorkerError(f"a staging worker process ended (exit code {process.poll()})") from error
    if not failed:
        return answer
    problem, trace = answer
    if isinstance(problem, OSError):  # of the disk: as if it had happened here
        raise problem from WorkerError("in a staging worker process", worker_traceback=trace)
    raise WorkerError(f"a staging worker process failed: {problem}", worker_traceback=trace)


def serve(jobs: IO[bytes], answers: IO[bytes], open_draft: Callable[[], Draft]) -> None:
    """A member's loop: jobs in, answers out, until there are no more or nobody listens. The first opens the draft."""
    draft: Draft | None = None
    while True:
        try:
            job: Job[Any] = pickle.load(jobs)
        except (EOFError, pickle.UnpicklingError):  # the caller is gone, perhaps within a word
            return
        try:
            draft = draft or open_draft()
            answer = (False, job.run(draft))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told where it can be understood
            problem = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            answer = (True, (problem, traceback.format_exc()))
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return
