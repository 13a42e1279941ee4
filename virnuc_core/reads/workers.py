"""Worker processes for staging: one function over many items, here and in a pool that dies with its parent."""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
import psutil

from virnuc_core.errors import WorkerError
from virnuc_core.rundir import die_with_parent

SILENCE_S: Final = 120.0  # without a moment of work: such a process is stopped, or waits for a disk that is gone
GRACE_S: Final = 5.0  # for a process to end by itself
TRACKER_WAKES: Final = "import ctypes; ctypes.CDLL(None).prctl(1, 18); "  # PR_SET_PDEATHSIG, SIGCONT
_POLL_S: Final = 0.5
_AHEAD: Final = 3  # items of each other process: one under way, one in its pipe, one to come
_WINDOW: Final = 16  # items for each other process whose turn has not come: so long nobody waits for one that is slow
_MOST_HELD_BYTES: Final = 64_000_000  # of items under way, for each other process
# glibc keeps up to twice the largest block that was freed so far, of 32 MiB at most, and gives other memory back to the
# system; to get it again takes a tenth of staging. To free a block as large that nobody touched costs nothing.
_KEPT_BYTES: Final = 30 << 20
I = TypeVar("I")  # noqa: E741  # an item
O = TypeVar("O")  # noqa: E741  # what comes of it


class Workers(AbstractContextManager["Workers"]):
    """`count` workers, for a `with` statement: this process, and a pool of the others, who end when it does, however it
    ends. Until one takes an item up that lies in a file of `folder`, or of the system's for such."""

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self._others, self._folder = count - 1, folder
        self._pool: ProcessPoolExecutor | None = None
        self._members: set[BaseProcess] = set()
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
        waiting: deque[tuple[Future[O], int]] = deque()  # none is ever cancelled: a pool that breaks cannot bear it
        for number, item in enumerate(items):
            busy = sum(not future.done() for future, _ in waiting)
            if busy < _AHEAD * self._others and (self._pool is not None or (may_start and number)):
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
        before = {*multiprocessing.active_children()}
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)
        with _start_of_processes():
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._others, context, die_with_parent, (os.getpid(),))
            try:
                return self._pool.submit(_work_on_file, work, file.name)
            except BrokenProcessPool as error:
                broken = error
            except OSError as error:  # no more processes, or one that was killed as it began
                raise WorkerError(f"a staging worker process could not be started: {error}") from error
            finally:
                self._members |= {*multiprocessing.active_children()} - before
        raise self._death() from broken

    def _result(self, future: Future[O]) -> O:
        used, since_s = -1.0, time.monotonic()
        while not wait((future,), _POLL_S).done:
            before, used = used, self._used_s()
            if used != before:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > SILENCE_S:
                self._leave(0)
                raise WorkerError(f"a staging worker process has not moved for {SILENCE_S:g} s; was it stopped?")
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise self._death() from error
        except OSError:  # of the disk: as if it had happened here
            raise
        except Exception as error:
            problem = f"a staging worker process failed: {type(error).__name__}: {error}"
            raise WorkerError(problem, worker_traceback=str(error.__cause__)) from error

    def _used_s(self) -> float:
        """Seconds of the processor that the members have used."""
        used_s = 0.0
        for member in self._members:
            with suppress(psutil.NoSuchProcess):  # the pool says so
                used_s += sum(psutil.Process(member.pid).cpu_times()[:2])
        return used_s

    def _leave(self, within_s: float) -> None:
        """No member is left; one that has not ended in time is killed: a stopped one hears nothing else."""
        if self._pool is None:
            return
        killer = threading.Timer(within_s, lambda: [*map(BaseProcess.kill, self._members)])
        killer.start()
        self._pool.shutdown(cancel_futures=True)
        killer.cancel()

    def _death(self) -> WorkerError:
        for member in self._members:
            member.terminate()  # the pool does so too, but waits for ever for one that it started meanwhile
        self._leave(GRACE_S)  # all members have ended: then their exit codes are known
        ended = {member.exitcode for member in self._members} - {None, 0, -signal.SIGTERM}  # the pool ends the others
        return WorkerError(f"a staging worker process ended (exit code {', '.join(map(str, ended)) or 'unknown'})")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(GRACE_S if kind is None else 0)  # after an error nobody waits for what they are at


def _work_on_file(work: Callable[[I], O], path: str) -> O:
    """What `work` makes of the item in a file: through a pipe megabytes come bit by bit, and both ends wait."""
    with Path(path).open("rb") as file:
        item = pickle.load(file)
    Path(path).unlink()
    np.empty(_KEPT_BYTES, np.uint8)
    return work(item)


@contextmanager
def _start_of_processes() -> Iterator[None]:
    """Processes started here import neither the caller's script nor files of its folder, and hear no Ctrl-C.
    multiprocessing's own removes what killed ones leave in memory and then ends, also when it was stopped."""
    main, launch = sys.modules["__main__"], util.spawnv_passfds
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: a terminal sends it to all
    sys.modules["__main__"] = ModuleType("__main__")

    def launch_safely(path: Any, words: Sequence[Any], handles: Sequence[int]) -> int:
        first = TRACKER_WAKES if "resource_tracker" in str(words[-1]) else ""
        return launch(path, [words[0], "-P", *words[1:-1], first + words[-1]], handles)

    vars(util)["spawnv_passfds"] = launch_safely
    try:
        yield
    finally:
        vars(util)["spawnv_passfds"] = launch
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
