"""Apply a function to many items in parallel, in this process and in child processes.

A thread of this process serves each child: it sends one item through a pipe and waits for the
result. Children end when their parent ends, also if the parent is killed.
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

from virnuc_core.errors import UnreadableError, WorkerError
from virnuc_core.rundir import parent_bound_command
from virnuc_core.system_errors import describe_system_error, limit_error

# A child that used no processor time for this long was stopped (SIGSTOP), or waits for a disk that
# does not answer.
SILENCE_S: Final = 120.0
_POLL_S: Final = 0.5  # interval at which the progress of the children is checked
_AHEAD: Final = 3  # items given to each child: it works on one, and two are waiting
# Results are yielded in order. So one slow item holds back the results of later items. Up to this
# many unfinished or held-back items per child are allowed before the loop waits for the slow one.
_WINDOW: Final = 16
_MAX_PENDING_BYTES: Final = 64_000_000  # size of these items, per child
# glibc keeps freed memory for reuse, up to twice the largest block that was freed so far (at most
# 32 MiB), and returns the remainder to the system. Requesting the memory again takes a tenth of
# the time of staging. Allocating and freeing one large block at the start, without touching its
# pages, costs nothing and raises the limit.
_REUSED_BYTES: Final = 30 << 20
Item = TypeVar("Item")
Output = TypeVar("Output")  # the result of the work on an item


class _Pending(NamedTuple, Generic[Output]):
    """An item whose result was not yielded yet."""

    future: Future[Output]  # the result
    n_bytes: int  # size of the item


class _Answer(NamedTuple):
    """What a child sends back for an item: a value or an error."""

    value: object
    error: Exception | None


class Workers(AbstractContextManager["Workers"]):
    """A group of worker processes: this process and its children.

    Use it in a `with` statement. Children are started when the first items need them, and are
    ended when the `with` statement ends.
    """

    def __init__(self, count: int) -> None:
        """Prepare a group of `count` workers, which includes this process; starts no process."""
        self._n_children = count - 1
        self._children: list[Popen[bytes]] = []
        self._idle_children = SimpleQueue[Popen[bytes]]()
        # There are as many threads as children, so that each thread always finds an idle child.
        self._threads = ThreadPoolExecutor(max(1, self._n_children))
        # Allocate and free a large block, so that the C library keeps freed memory for reuse.
        np.empty(_REUSED_BYTES, np.uint8)

    def map(
        self,
        work: Callable[[Item], Output],
        items: Iterable[Item],
        count_bytes: Callable[[Item], int] = lambda _: 0,
        *,
        may_start: bool = True,
    ) -> Iterator[Output]:
        """Apply a function to each item, in parallel, and yield the results in order.

        This process works on the first item, and on each item that comes while all children are
        busy. The number and the total size of the unfinished items are bounded.

        Args:
            work: The function. It must be picklable if there are children.
            items: The items. They are drawn one by one, as workers become free.
            count_bytes: Returns the size of an item in bytes.
            may_start: Whether children may be started. They are started from the second item on,
                because one item alone needs no help.

        Yields:
            The results in the order of the items.

        Raises:
            WorkerError: The work failed in a child, or a child died or makes no progress. An
                `OSError` in a child is raised unchanged, and so are errors of `items` and of the
                work in this process.
        """
        pending = deque[_Pending[Output]]()
        for number, item in enumerate(items):
            # A child takes the item if children may be used and have not got enough to do yet.
            n_unfinished = sum(not entry.future.done() for entry in pending)
            children_have_room = n_unfinished < _AHEAD * self._n_children
            may_use_children = bool(self._children) or (may_start and number > 0)
            if children_have_room and may_use_children:
                future = self._submit(work, item)
            else:  # this process does the work now
                future = Future()
                future.set_result(work(item))
            pending.append(_Pending(future, count_bytes(item)))
            # Yield what is ready; wait for the first result if too many items are pending.
            while pending and (pending[0].future.done() or self._has_too_much(pending)):
                yield self._wait_for(pending.popleft().future)
        while pending:
            yield self._wait_for(pending.popleft().future)

    def _has_too_much(self, pending: deque[_Pending[Output]]) -> bool:
        """Return True if the next item must wait until the first pending result is there.

        This is so if more items, or more bytes of items, are pending than `_WINDOW` and
        `_MAX_PENDING_BYTES` allow for each child.
        """
        n_bytes = sum(entry.n_bytes for entry in pending)
        return (
            len(pending) > _WINDOW * self._n_children
            or n_bytes > _MAX_PENDING_BYTES * self._n_children
        )

    def _submit(self, work: Callable[[Item], Output], item: Item) -> Future[Output]:
        """Let a child apply the function to an item, and return the future result.

        As a side effect, each call starts one more child, until all children run.

        Raises:
            WorkerError: The system allows no further process.
        """
        if len(self._children) < self._n_children:
            program = parent_bound_command(f"from {__name__} import serve; serve()")
            try:
                # The child gets its own session, so that Ctrl-C in the terminal does not end it.
                child = Popen(program, stdin=PIPE, stdout=PIPE, start_new_session=True)
            except OSError as error:
                reason = describe_system_error(error)
                raise WorkerError(f"a worker process could not be started: {reason}") from error
            self._children.append(child)
            self._idle_children.put(child)
        return self._threads.submit(self._run_in_child, work, item)

    def _run_in_child(self, work: Callable[[Item], Output], item: Item) -> Output:
        """Send an item to an idle child, wait for the result and return it; runs in a thread.

        Raises:
            WorkerError: The child ended, or the work failed. A child that ended is kept in the
                queue: later items that meet it fail in the same way.
        """
        child = self._idle_children.get()
        requests = cast(IO[bytes], child.stdin)
        answers = cast(IO[bytes], child.stdout)
        try:
            pickle.dump((work, item), requests, pickle.HIGHEST_PROTOCOL)
            requests.flush()
            # The pipe has no name, so only the child, which runs our own code, can write to it.
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
        """Wait for a result and return it.

        Raises:
            WorkerError: No child has used any processor time for `SILENCE_S`.
        """
        cpu_s = -1.0  # less than any measured time, so that the first measurement is progress
        last_progress_s = time.monotonic()
        while not wait((future,), _POLL_S).done:
            previous_cpu_s = cpu_s
            # If a child has ended, the thread that serves the child raises the error.
            with suppress(psutil.NoSuchProcess):
                cpu_s = self._cpu_seconds()
            if cpu_s != previous_cpu_s:
                last_progress_s = time.monotonic()
            elif time.monotonic() - last_progress_s > SILENCE_S:
                raise WorkerError(
                    f"a worker process has not moved for {SILENCE_S:g} s; was it stopped?"
                )
        return future.result()

    def _cpu_seconds(self) -> float:
        """Return the seconds of processor time that all children together have used so far.

        Raises:
            psutil.NoSuchProcess: A child has ended.
        """
        total_s = 0.0
        for child in self._children:
            times = psutil.Process(child.pid).cpu_times()
            total_s += times.user + times.system
        return total_s

    def __exit__(self, *exception_details: object) -> None:
        """End all children and threads, also after an error."""
        # A child is idle by now, or works on an item whose result nobody will use.
        for child in self._children:
            child.kill()
        # The threads end, because the pipes of the killed children are closed.
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.communicate()  # collects the exit code and closes the pipes


def serve() -> None:
    """Run a child process: read items from standard input and write results to standard output.

    Both are pickled. The function returns when the parent closes standard input.
    """
    # Keep the pipe to the parent under another descriptor and send descriptor 1 to standard error,
    # so that text that a library prints does not get into the pipe.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Allocate and free a large block, so that the C library keeps freed memory for reuse.
    np.empty(_REUSED_BYTES, np.uint8)
    with suppress(EOFError):  # the parent has closed the pipe
        while True:
            work, item = pickle.load(sys.stdin.buffer)
            pickle.dump(_answer(work, item), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _answer(work: Callable[[object], object], item: object) -> _Answer:
    """Apply a function to an item and return an answer with its value or its error.

    No error is raised. An `OSError` is passed on as it is, because the parent gives advice for
    full or failing disks. Any other error becomes a `WorkerError` with the traceback.
    """
    try:
        return _Answer(work(item), None)
    except (OSError, UnreadableError) as error:
        return _Answer(None, error)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        limit = limit_error(error)
        if limit is not None:
            return _Answer(None, limit)
        problem = f"a worker process failed: {type(error).__name__}: {error}"
        return _Answer(None, WorkerError(problem, worker_traceback=traceback.format_exc()))
