"""Worker processes for reads and results: one function over many items, here and in others that die with their parent.

Each of the others is a child that a thread here talks to: an item goes out whole, and the answer is waited for."""

import os
import pickle
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import IO, Final, TypeVar, cast

import numpy as np
import psutil

from virnuc_core.errors import WorkerError
from virnuc_core.rundir import parent_bound_command

SILENCE_S: Final = (
    120.0  # without a moment of work: such a process is stopped, or waits for a disk that is gone
)
_POLL_S: Final = 0.5
_AHEAD: Final = 3  # items of each other process: one under way, two to come
_WINDOW: Final = 16  # items for each other process whose turn has not come: so long nobody waits for one that is slow
_MOST_HELD_BYTES: Final = 64_000_000  # of items under way, for each other process
# glibc keeps up to twice the largest block that was freed so far, of 32 MiB at most, and gives other memory back to the
# system; to get it again takes a tenth of staging. To free a block as large that nobody touched costs nothing.
_KEPT_BYTES: Final = 30 << 20
I = TypeVar("I")  # noqa: E741  # an item
O = TypeVar("O")  # noqa: E741  # what comes of it


class Workers(AbstractContextManager["Workers"]):
    """`count` workers, for a `with` statement: this process, and others, who end when it does, however it ends."""

    def __init__(self, count: int) -> None:
        self._others = count - 1
        self._members: list[Popen[bytes]] = []
        self._idle = SimpleQueue[Popen[bytes]]()
        self._threads = ThreadPoolExecutor(
            max(1, self._others)
        )  # as many as members, so that one is always idle
        np.empty(_KEPT_BYTES, np.uint8)

    def map(
        self,
        work: Callable[[I], O],
        items: Iterable[I],
        nbytes: Callable[[I], int] = lambda _: 0,
        *,
        may_start: bool = True,
    ) -> Iterator[O]:
        """What `work` makes of each item, in order; a bounded number of items, and of their `nbytes`, is under way. The
        first item is worked on here, as is each for which the others, started by the second if they `may_start`, have
        no time. Errors: what `items` raises, and the work here; from another process `OSError` of the work,
        `WorkerError` for its other errors and for a process that dies or does not move."""
        waiting: deque[tuple[Future[O], int]] = deque()
        for number, item in enumerate(items):
            busy = sum(not future.done() for future, _ in waiting)
            if busy < _AHEAD * self._others and (self._members or (may_start and number)):
                future = self._submit(work, item)
            else:
                future = Future()
                future.set_result(work(item))
            waiting.append((future, nbytes(item)))
            while waiting and (
                waiting[0][0].done()
                or len(waiting) > _WINDOW * self._others
                or sum(size for _, size in waiting) > _MOST_HELD_BYTES * self._others
            ):
                yield self._result(waiting.popleft()[0])
        while waiting:
            yield self._result(waiting.popleft()[0])

    def _submit(self, work: Callable[[I], O], item: I) -> Future[O]:
        if len(self._members) < self._others:
            program = parent_bound_command(f"from {__name__} import serve; serve()")
            try:  # in a session of its own it hears no Ctrl-C
                member = Popen(program, stdin=PIPE, stdout=PIPE, start_new_session=True)
            except OSError as error:  # no more processes
                raise WorkerError(f"a worker process could not be started: {error}") from error
            self._members.append(member)
            self._idle.put(member)
        return self._threads.submit(self._ask, work, item)

    def _ask(self, work: Callable[[I], O], item: I) -> O:
        member = self._idle.get()
        questions, answers = cast(tuple[IO[bytes], IO[bytes]], (member.stdin, member.stdout))
        try:
            pickle.dump((work, item), questions, pickle.HIGHEST_PROTOCOL)
            questions.flush()
            made, failed = cast(tuple[O, Exception | None], pickle.load(answers))
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            member.kill()
            raise WorkerError(f"a worker process ended (exit code {member.wait()})") from error
        finally:
            self._idle.put(member)
        if failed is not None:
            raise failed
        return made

    def _result(self, future: Future[O]) -> O:
        used_s, since_s = -1.0, time.monotonic()
        while not wait((future,), _POLL_S).done:
            before_s = used_s
            with suppress(psutil.NoSuchProcess):  # one ended, as its thread will say
                used_s = sum(
                    sum(psutil.Process(member.pid).cpu_times()[:2]) for member in self._members
                )
            if used_s != before_s:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > SILENCE_S:
                raise WorkerError(
                    f"a worker process has not moved for {SILENCE_S:g} s; was it stopped?"
                )
        return future.result()

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()  # it is idle, or at what nobody waits for
        self._threads.shutdown(cancel_futures=True)
        for member in self._members:
            member.communicate()  # closes its pipes


def serve() -> None:
    """A worker's life: answers on standard output to what is asked on standard input, until that is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
    np.empty(_KEPT_BYTES, np.uint8)
    with suppress(EOFError):
        while True:
            work, item = pickle.load(sys.stdin.buffer)
            answer: tuple[object, Exception | None]
            try:
                answer = work(item), None
            except OSError as error:  # of the disk: as if it had happened there
                answer = None, error
            except Exception as error:  # noqa: BLE001 - told to the parent
                problem = f"a worker process failed: {type(error).__name__}: {error}"
                answer = None, WorkerError(problem, worker_traceback=traceback.format_exc())
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
