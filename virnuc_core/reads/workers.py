"""Worker processes for reads and results: apply one function to many items, here and in children.

Each child process is served by a thread of this one: an item goes out whole, and the thread waits
for the answer. Children die with their parent, however it ends.
"""

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
from typing import IO, Final, Generic, NamedTuple, TypeVar, cast

import numpy as np
import psutil

from virnuc_core.errors import WorkerError
from virnuc_core.rundir import parent_bound_command

# a child that does no work for so long is stopped, or waits for a disk that is gone
SILENCE_S: Final = 120.0
_POLL_S: Final = 0.5
_AHEAD: Final = 3  # items of each child: one under way, two to come
# items for each child whose turn has not come: so long nobody waits for one that is slow
_WINDOW: Final = 16
_MAX_PENDING_BYTES: Final = 64_000_000  # of items under way, for each child
# glibc keeps up to twice the largest block that was freed so far, of 32 MiB at most, and gives
# other memory back to the system. Getting it again takes a tenth of staging. Freeing a block as
# large that nobody touched costs nothing.
_KEPT_BYTES: Final = 30 << 20
Item = TypeVar("Item")
Output = TypeVar("Output")  # the result of the work on an item


class _Pending(NamedTuple, Generic[Output]):
    """The result of an item that was not yielded yet."""

    future: Future[Output]
    n_bytes: int  # of the item


class _Answer(NamedTuple):
    """The answer of a child."""

    value: object
    error: Exception | None


class Workers(AbstractContextManager["Workers"]):
    """Worker processes, for a `with` statement: this process, and children.

    Children start when they are first needed.
    """

    def __init__(self, count: int) -> None:
        """Prepare `count` workers, this process among them."""
        self._n_children = count - 1
        self._children: list[Popen[bytes]] = []
        self._idle_children = SimpleQueue[Popen[bytes]]()
        # as many threads as children, so that a thread always finds an idle child
        self._threads = ThreadPoolExecutor(max(1, self._n_children))
        np.empty(_KEPT_BYTES, np.uint8)

    def map(
        self,
        work: Callable[[Item], Output],
        items: Iterable[Item],
        count_bytes: Callable[[Item], int] = lambda _: 0,
        *,
        may_start: bool = True,
    ) -> Iterator[Output]:
        """Apply a function to each item.

        This process works on the first item, and on each item for which the children have no time.
        The number of items that are under way, and their size, is bounded.

        Args:
            work: The function. It must be picklable if there are children.
            items: The items.
            count_bytes: Returns the size of an item.
            may_start: Start the children, from the second item on, if they do not run yet.

        Yields:
            The results in the order of the items.

        Raises:
            WorkerError: The work failed in a child with anything but an `OSError`, or a child died
                or does not move. Errors of `items` and of the work here pass unchanged, and so do
                those of the class `OSError` in a child.
        """
        pending = deque[_Pending[Output]]()
        for number, item in enumerate(items):
            n_busy = sum(not entry.future.done() for entry in pending)
            has_time = n_busy < _AHEAD * self._n_children
            is_started = bool(self._children) or (may_start and number > 0)
            if has_time and is_started:
                future = self._submit(work, item)
            else:
                future = Future()
                future.set_result(work(item))
            pending.append(_Pending(future, count_bytes(item)))
            while pending and (pending[0].future.done() or self._has_too_much(pending)):
                yield self._wait_for(pending.popleft().future)
        while pending:
            yield self._wait_for(pending.popleft().future)

    def _has_too_much(self, pending: deque[_Pending[Output]]) -> bool:
        """Return True if no more items may be given out before the first result is there."""
        n_bytes = sum(entry.n_bytes for entry in pending)
        return (
            len(pending) > _WINDOW * self._n_children
            or n_bytes > _MAX_PENDING_BYTES * self._n_children
        )

    def _submit(self, work: Callable[[Item], Output], item: Item) -> Future[Output]:
        """Give an item to a child; start one more if there are not all yet."""
        if len(self._children) < self._n_children:
            program = parent_bound_command(f"from {__name__} import serve; serve()")
            try:  # in a session of its own it hears no Ctrl-C
                child = Popen(program, stdin=PIPE, stdout=PIPE, start_new_session=True)
            except OSError as error:  # no more processes
                raise WorkerError(f"a worker process could not be started: {error}") from error
            self._children.append(child)
            self._idle_children.put(child)
        return self._threads.submit(self._ask, work, item)

    def _ask(self, work: Callable[[Item], Output], item: Item) -> Output:
        """Have an idle child do the work, and wait for it; runs in a thread."""
        child = self._idle_children.get()
        questions = cast(IO[bytes], child.stdin)
        answers = cast(IO[bytes], child.stdout)
        try:
            pickle.dump((work, item), questions, pickle.HIGHEST_PROTOCOL)
            questions.flush()
            answer: _Answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            child.kill()
            raise WorkerError(f"a worker process ended (exit code {child.wait()})") from error
        finally:
            self._idle_children.put(child)
        if answer.error is not None:
            raise answer.error
        return cast(Output, answer.value)

    def _wait_for(self, future: Future[Output]) -> Output:
        """Return a result when it is there.

        Raises:
            WorkerError: No child has used any processor time for `SILENCE_S`.
        """
        cpu_s = -1.0
        last_progress_s = time.monotonic()
        while not wait((future,), _POLL_S).done:
            previous_cpu_s = cpu_s
            with suppress(psutil.NoSuchProcess):  # one ended, as its thread will say
                cpu_s = self._cpu_seconds()
            if cpu_s != previous_cpu_s:
                last_progress_s = time.monotonic()
            elif time.monotonic() - last_progress_s > SILENCE_S:
                raise WorkerError(
                    f"a worker process has not moved for {SILENCE_S:g} s; was it stopped?"
                )
        return future.result()

    def _cpu_seconds(self) -> float:
        """Return the processor time of all children so far."""
        total_s = 0.0
        for child in self._children:
            times = psutil.Process(child.pid).cpu_times()
            total_s += times.user + times.system
        return total_s

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()  # it is idle, or at work for nobody
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.communicate()  # closes its pipes


def serve() -> None:
    """Answer on standard output to the items on standard input, until it is closed.

    This is all that a child does.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    np.empty(_KEPT_BYTES, np.uint8)
    with suppress(EOFError):
        while True:
            work, item = pickle.load(sys.stdin.buffer)
            pickle.dump(_answer(work, item), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _answer(work: Callable[[object], object], item: object) -> _Answer:
    """Do the work; an error becomes an answer, too."""
    try:
        return _Answer(work(item), None)
    except OSError as error:  # of the disk: as if it had happened in the parent
        return _Answer(None, error)
    except Exception as error:  # noqa: BLE001 - reported to the parent
        problem = f"a worker process failed: {type(error).__name__}: {error}"
        return _Answer(None, WorkerError(problem, worker_traceback=traceback.format_exc()))
