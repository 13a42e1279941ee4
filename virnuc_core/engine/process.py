"""Worker processes: started, heard, watched and ended in one way, whatever they compute.

The parent's side: `LocalWorkers` starts pinned workers on this machine, `Child` is one of them. The worker's side:
`serve` is the program of each, `Parent` its line to the process that started it, and `work(parent, spec)` of a module
what it does. Messages are JSON lines on standard input and output.

A worker is started in its own session, so that a terminal's Ctrl-C reaches the parent alone, which then ends the
worker in order. Two nets catch a parent that could not: the kernel's parent-death signal, and the closed input.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NoReturn, Self

from virnuc_core.config import Spec
from virnuc_core.engine.messages import (
    EVENTS,
    REQUESTS,
    Alive,
    Closed,
    Event,
    Failed,
    Request,
    WorkerSpec,
)
from virnuc_core.errors import VirnucError, WorkerError
from virnuc_core.rundir import lock_device
from virnuc_core.runfiles import Device

GRACE_S: Final = 6.0  # for a worker to finish what it is at
STDERR_TAIL_BYTES: Final = 8_192
# a worker's program, bound to its parent before what takes time is imported. Arguments: the module, the parent's number
PROGRAM: Final = """
import sys
from virnuc_core.rundir import die_with_parent
die_with_parent(int(sys.argv[2]))
from virnuc_core.engine.process import serve
serve(sys.argv[1])
"""
INTERRUPTED: Final = "the run was interrupted; what was committed stays, run again to go on"

_children: set[Child] = set()
_children_lock = threading.Lock()
_token = threading.Event()  # set when all children are ended; then another takes its place


class Child:
    """A running worker process: `send` a message to it; its messages arrive in the inbox as `(child, event)`.

    Heartbeats only move `progress_s`. The last event is `Closed`, once its standard output has ended.
    """

    def __init__(
        self, process: subprocess.Popen[str], spec: WorkerSpec, inbox: queue.Queue[tuple[Child, Event]], log: Path
    ) -> None:
        self.process, self.spec, self.device, self.log = process, spec, spec.device.id, log
        self.unread: BinaryIO | None = None  # where it wrote before it wrote to `log`
        self.progress_s = time.monotonic()  # when it last did something, or was last told to
        self._inbox, self._ending = inbox, threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"read {self.device}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: Spec) -> bool:
        """Write one message; False when the child is no longer reading."""
        assert self.process.stdin is not None
        self.progress_s = time.monotonic()
        try:
            self.process.stdin.write(message.model_dump_json() + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError, OSError):
            return False
        return True

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            with contextlib.suppress(ValueError, OSError), self.process.stdout:
                for line in self.process.stdout:
                    if line.endswith("\n"):  # else it was cut off by a kill
                        self._heard(EVENTS.validate_json(line))
        finally:
            self._inbox.put((self, Closed()))

    def _heard(self, event: Event) -> None:
        if isinstance(event, Alive):
            self.progress_s = max(self.progress_s, event.progress_s)
            return
        self.progress_s = time.monotonic()
        self._inbox.put((self, event))

    def end(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM, which lets a worker finish the shard at hand, then SIGKILL to the whole session; the exit status."""
        with self._ending:
            if self not in _children:
                return self.process.wait()  # ended before: its number may be another's by now
            for sig in (signal.SIGTERM, signal.SIGKILL):
                if self.process.poll() is not None:
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, sig)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace_s)
            status = self.process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what the child itself had started
            self._reader.join(grace_s)
            with contextlib.suppress(OSError, ValueError):
                assert self.process.stdin is not None
                self.process.stdin.close()
            with _children_lock:
                _children.discard(self)
        return status

    def last_words(self) -> str:
        """The last line it wrote to standard error."""
        lines = _tail(self.unread) if self.unread is not None else []
        if self.log.is_file():
            with self.log.open("rb") as handle:
                lines += _tail(handle)
        return lines[-1] if lines else "nothing"

    def failure(self, event: Failed | Closed) -> VirnucError:
        """What to raise for a worker that may not fail: its own error where it is one of ours."""
        if isinstance(event, Failed):
            problem = f"worker on {self.device}: {event.kind}: {event.message}; see {self.log}"
            return event.own_error() or WorkerError(problem, worker_traceback=event.traceback)
        status = self.end(0.5)
        return WorkerError(
            f"worker on {self.device} ended (status {status}); last words: {self.last_words()}; see {self.log}"
        )


def environment(device: Device) -> dict[str, str]:
    """What a worker's environment sets so that it sees its device and no other."""
    if device.kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": device.id}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"CUDA_VISIBLE_DEVICES": "", **threads}


def _tail(handle: BinaryIO) -> list[str]:
    """The last lines of a log."""
    handle.seek(max(0, handle.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
    return handle.read().decode("utf-8", "replace").strip().splitlines()


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """End several at once, so that the slowest sets the time."""
    threads = [threading.Thread(target=child.end, args=(grace_s,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end_all_children(grace_s: float = GRACE_S) -> int:
    """End every child of this process and let their owners start no more; returns how many there were.

    For a flow's `finally`: signals reach the main thread only, while a pool may be waiting in another.
    """
    global _token  # one per process, like the children themselves
    with _children_lock:
        _token.set()
        _token = threading.Event()
        living = list(_children)
    end_children(living, grace_s)
    return len(living)


class LocalWorkers:
    """Worker processes of this machine, that do what a module's `work` says; they are gone when the `with` block ends.

    Those of `prewarm` are started at once, before there is a job: they import and load the weights meanwhile. Whoever
    asks for a worker with the very same spec gets the one that waits. Until then it writes to a nameless file: the
    run's directory may come to nothing, and is not touched.

    The thread that starts them must live as long as they do: the kernel sends the parent-death signal when the thread
    that started a process ends.
    """

    def __init__(self, module: str, prewarm: Sequence[WorkerSpec] = ()) -> None:
        self._module, self._token = module, _token
        self._inbox: queue.Queue[tuple[Child, Event]] = queue.Queue()
        self._started: list[Child] = []
        self._waiting: list[Child] = []
        try:
            for spec in prewarm:
                unread = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has gone
                self._waiting.append(self._start(spec, unread, Path(os.devnull)))
                self._waiting[-1].unread = unread
        except BaseException:
            self.close()
            raise

    @property
    def cancelled(self) -> bool:
        """Whether `end_all_children` has been called since these were made."""
        return self._token.is_set()

    def start(self, spec: WorkerSpec, log: Path) -> Child:
        """A worker pinned to its device and loading; what it writes to standard error goes to the file `log`.

        One that waits with this very spec and lives writes there from its job on. Errors: `WorkerError` when all
        children were ended meanwhile.
        """
        for child in self._waiting:
            if child.spec == spec and child.process.poll() is None:
                self._waiting.remove(child)
                child.log = log
                return child
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            return self._start(spec, errors, log)

    def _start(self, spec: WorkerSpec, errors: BinaryIO, log: Path) -> Child:
        with _children_lock:
            if self.cancelled:
                raise WorkerError(INTERRUPTED)
            process = subprocess.Popen(
                # -P: no module of the folder people stand in
                [sys.executable, "-P", "-c", PROGRAM, self._module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env={**os.environ, **environment(spec.device)},
            )
            child = Child(process, spec, self._inbox, log)
            _children.add(child)
        self._started.append(child)
        child.send(spec)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Event] | None:
        """The next event of any worker; None when none comes in time."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def expect(self, busy: Iterable[Child], silence_s: float) -> tuple[Child, Event]:
        """The next event of workers none of which may fail.

        Errors: those of input, weights and devices as the worker raised them; `WorkerError` for one that failed
        otherwise, died, or is `busy` and has not moved for `silence_s`, and after `end_all_children`.
        """
        while True:
            for child in busy:
                if time.monotonic() - child.progress_s > silence_s:
                    raise WorkerError(f"worker on {child.device} has not moved for {silence_s:.0f} s; see {child.log}")
            if (received := self.receive(1.0)) is not None:
                child, event = received
                if isinstance(event, Closed) and self.cancelled:
                    raise WorkerError(INTERRUPTED)
                if isinstance(event, Failed | Closed):
                    raise child.failure(event)
                return received

    def close(self) -> None:
        """End every worker. What those that waited wrote before their job is put to the end of their logs."""
        end_children(self._started)
        for child in self._started:
            if child.unread is not None:
                if child.log.is_file():
                    child.unread.seek(0)
                    with child.log.open("ab") as log:
                        shutil.copyfileobj(child.unread, log)
                child.unread.close()
                child.unread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


# --- the worker's side ------------------------------------------------------------------------------------------------


def serve(module: str) -> NoReturn:
    """Do `module.work(parent, spec)` on the worker's device and end; a failure reaches the parent with its traceback.

    The module is imported last, because that may take seconds, in which a closed input must end the process too.
    """
    parent = Parent()
    if not (first := sys.stdin.readline()):
        os._exit(0)
    spec = WorkerSpec.model_validate_json(first)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if spec.device.core is not None:
        os.sched_setaffinity(0, {spec.device.core})  # this process, and every thread it starts
    parent.listen(spec.engine.heartbeat_s)
    try:
        if spec.device.kind == "cuda":
            lock_device(spec.device.id, spec.engine.device_wait_s)  # until this process ends
        importlib.import_module(module).work(parent, spec)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        parent.give_up(error)
    os._exit(0)  # skip interpreter shutdown: everything is written, and threads or CUDA may linger


class Parent:
    """A worker's line to its parent, with a clean standard output for messages to it."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)  # a library's print must not garble the messages
        self._lock = threading.Lock()
        self._requests: queue.Queue[Request] = queue.Queue()
        self.progress: Callable[[], float] = time.monotonic  # when the worker last did something

    def listen(self, heartbeat_s: float) -> None:
        """Read messages and send heartbeats, each in a thread; a closed input ends the process at once."""
        threading.Thread(target=self._listen, name="parent's messages", daemon=True).start()
        threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._requests.put(REQUESTS.validate_json(line))
        os._exit(0)

    def _beat(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            self.send(Alive(progress_s=self.progress()))

    def receive(self, timeout_s: float | None = None) -> Request | None:
        """The next message; None when none comes in time."""
        try:
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, message: Spec) -> None:
        """Tell the parent; a parent that is gone ends this process."""
        try:
            with self._lock:
                self._out.write(message.model_dump_json() + "\n")
                self._out.flush()
        except (BrokenPipeError, OSError):
            os._exit(1)

    def give_up(self, error: Exception) -> NoReturn:
        """Tell the parent what went wrong, in whichever thread it did, and end the process."""
        trace = "".join(traceback.format_exception(error))
        self.send(Failed(kind=type(error).__name__, message=str(error), traceback=trace))
        os._exit(1)
