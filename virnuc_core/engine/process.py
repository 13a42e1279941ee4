"""Worker processes: started, heard, watched and ended in one way, whatever they compute.

The parent's side: `LocalWorkers` starts pinned workers, `Child` is one of them. The worker's side: `serve` is its
program, `Parent` its line to who started it, `work(parent, spec)` of a module what it does. Messages go one a line.

A worker is started in its own session, so that a terminal's Ctrl-C reaches the parent alone, which then ends the
worker in order. Two nets catch a parent that could not: the kernel's parent-death signal, and the closed input."""

import contextlib
import importlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

from pydantic import Field

from virnuc_core.config import EngineSpec, Spec, TraceSpec
from virnuc_core.engine.devices import environment, open_context
from virnuc_core.errors import WorkerError, storage_error
from virnuc_core.lease import command_start_s
from virnuc_core.rundir import lock_device, parent_bound_command
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

log = logging.getLogger(__name__)

GRACE_S: Final = 4.5  # for a worker to finish what it is at
WORKER: Final = "virnuc_core.engine.worker"
PROGRAM: Final = "from virnuc_core.engine.process import serve; serve(sys.argv[1])"
INTERRUPTED: Final = "the run was interrupted; what was committed stays, run again to go on"


class Message(Spec):
    """What parent and worker tell each other: a line with the name of its class and its fields as JSON."""

    def line(self) -> str:
        """As it is sent."""
        return f"{type(self).__name__} {self.model_dump_json()}\n"

    @staticmethod
    def of(line: str) -> "Message":
        """The message of a line, whose class has been imported by now."""
        name, body = line.split(" ", 1)
        return next(
            kind for kind in Message.__subclasses__() if kind.__name__ == name
        ).model_validate_json(body)


class WorkerSpec(Message):
    """The first message to a worker: all it needs to load, while the reads may still be staged."""

    models: str
    device: Device
    engine: EngineSpec
    divisor: int = 1  # of the token budgets, after the device was found too small for them
    trace: TraceSpec | None = None


class Alive(Message):
    """A worker's heartbeat."""

    progress_s: float  # `time.monotonic()` of the last progress


class Ready(Message):
    """A worker takes tasks, and what it has to say of itself or its device; the engine's stands in summary.json."""

    record: dict[str, Any] = Field(default_factory=dict)


class Failed(Message):
    """A worker's last message: what it ends of."""

    kind: str  # name of the exception's class
    message: str
    traceback: str


class Closed(Message):
    """No more will come: no shards for a worker, or, said for it when its output has ended, no messages of it."""


def worker_specs(
    models: Path, devices: Sequence[Device], engine: EngineSpec, trace: TraceSpec | None = None
) -> tuple[WorkerSpec, ...]:
    """One worker a device; the same for all plans, for shards are told to it one by one."""
    root, engine = (
        str(models.resolve()),
        engine.model_copy(update={"shard_tokens": EngineSpec().shard_tokens}),
    )
    return tuple(
        WorkerSpec(models=root, device=device, engine=engine, trace=trace) for device in devices
    )


_children: set["Child"] = set()
_children_lock = threading.Lock()
_endings = 0  # how often all children have been ended
_ahead: list["LocalWorkers"] = []  # that nobody has asked for yet


class Child:
    """A running worker process: its messages go to the inbox, the last is `Closed`; heartbeats move `progress_s`."""

    lost = False  # whether its whole node is gone, through no fault of its own

    def _begin(self, spec: WorkerSpec, inbox: queue.Queue["tuple[Child, Message] | None"]) -> None:
        self.spec, self.device, self._inbox, self._ending = (
            spec,
            spec.device.id,
            inbox,
            threading.Lock(),
        )
        self.log: Path | None = (
            None  # of its standard error; what it wrote there before is kept for it
        )
        self.last_words = "nothing"  # its last line on standard error
        self.unlogged = list[str]()  # what it wrote there as long as there is no log
        self.failed: Failed | None = None  # what it said of its failure
        self.started_s = self.progress_s = (
            time.monotonic()
        )  # when it last did something, or was told to
        self.asked_s = self.started_s  # when the command began that could do with it
        self._heard_s = self.started_s  # when it last said anything

    def __init__(
        self, module: str, spec: WorkerSpec, inbox: queue.Queue["tuple[Child, Message] | None"]
    ) -> None:
        self._begin(spec, inbox)
        how: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        how |= {"encoding": "utf-8", "errors": "replace", "start_new_session": True}
        self.process = subprocess.Popen(
            parent_bound_command(PROGRAM, module),
            env={**os.environ, **environment(spec.device)},
            **how,
        )
        pipes = self.process.stdin, self.process.stdout, self.process.stderr
        self._stdin, self._stdout, self._stderr = cast(tuple[IO[str], IO[str], IO[str]], pipes)
        self.pid = self.process.pid
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def send(self, message: Message) -> None:
        """Write one message; of a child that no longer reads, its end is heard."""
        self.progress_s = time.monotonic()
        with contextlib.suppress(ValueError, OSError):
            self._stdin.write(message.line())
            self._stdin.flush()

    def _read(self) -> None:
        try:
            with contextlib.suppress(ValueError, OSError), self._stdout:
                for line in self._stdout:
                    if line.endswith("\n"):  # else it was cut off by a kill
                        self.heard(Message.of(line))
        finally:
            self._inbox.put((self, Closed()))

    @property
    def silent(self) -> bool:
        """Whether it has not even said that it lives for longer than its settings allow: it is stopped, or dead."""
        return time.monotonic() - self._heard_s > self.spec.engine.silence_s

    def heard(self, message: Message) -> None:
        """Take note of a message, and pass it on, but for a heartbeat."""
        self._heard_s = time.monotonic()
        if isinstance(message, Alive):
            self.progress_s = max(self.progress_s, message.progress_s)
            return
        if isinstance(message, Failed):
            self.failed = message
        self.progress_s = self._heard_s
        self._inbox.put((self, message))

    def _read_errors(self) -> None:
        with contextlib.suppress(ValueError, OSError), self._stderr:
            for line in itertools.chain(self._stderr, [""]):
                self.wrote(line)

    def wrote(self, text: str) -> None:
        """Take note of what it wrote on standard error."""
        self.last_words = text.strip() or self.last_words
        self.unlogged.append(text)
        with contextlib.suppress(OSError):  # of a full disk: the worker must not wait for it
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a", encoding="utf-8") as file:
                    file.writelines(self.unlogged)
                self.unlogged.clear()

    def end(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM, which lets a worker finish the shard at hand, then SIGKILL to the whole session; the exit status."""
        with self._ending:
            if self not in _children:
                return self.process.wait()  # ended before: its number may be another's by now
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.pid, signal.SIGTERM)
                self.process.wait(0 if self.silent else grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what the child itself had started, too
            status = self.process.wait()
            for reader in self._readers:
                reader.join(grace_s)
            with contextlib.suppress(OSError, ValueError):
                self._stdin.close()
            self._forget()
        return status

    def _forget(self) -> None:
        _children.discard(self)


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """End several at once, so that the slowest sets the time."""
    with ThreadPoolExecutor(1 + len(_children)) as threads:
        list(threads.map(lambda child: child.end(grace_s), children))


def end_all_children(grace_s: float = GRACE_S) -> None:
    """End every child of this process, whichever thread waits for it, and let their owners start no more."""
    global _endings  # one per process, like the children themselves
    with _children_lock:
        _endings += 1
        living = list(_children)
    end_children(living, grace_s)


class LocalWorkers(contextlib.AbstractContextManager["LocalWorkers"]):
    """Worker processes of this machine, that do what a module's `work` says; they are gone when the `with` block ends.

    The thread that starts them must live as long as they do: its end is the parent's death to the kernel. Those started
    `ahead` load while a command finds out what they are for; then `local_workers` has them."""

    reader: Callable[[str, float], DeviceSample] | None = None  # of devices elsewhere

    def __init__(self, module: str, ahead: Sequence[WorkerSpec] = ()) -> None:
        self.module, self._endings = module, _endings
        self._inbox: queue.Queue[tuple[Child, Message] | None] = queue.Queue()
        self._started, self.ahead = list[Child](), list[Child]()
        self.ahead = [self.start(spec) for spec in ahead]
        _ahead.extend([self] if ahead else [])

    @property
    def cancelled(self) -> bool:
        """Whether `end_all_children` has been called since these were made."""
        return self._endings != _endings

    def start(self, spec: WorkerSpec, log: Path | None = None) -> Child:
        """A worker, one started ahead if it lives, with its standard error in `log`; without one it is kept until there
        is. Errors: `WorkerError` after `end_all_children`."""
        for child in [one for one in self.ahead if one.spec == spec]:
            self.ahead.remove(child)
            if child.failed is None and child.process.poll() is None:
                child.log, child.asked_s = log, command_start_s()
                return child
        with _children_lock:
            if self.cancelled:
                raise WorkerError(INTERRUPTED)
            child = self._make(spec)
            _children.add(child)
        self._started.append(child)
        child.send(spec)
        child.log = log
        return child

    def _make(self, spec: WorkerSpec) -> Child:
        return Child(self.module, spec, self._inbox)

    def joined(self, waiting: int) -> Iterable[Device]:
        """Devices that have come since this was last asked, while so many shards waited: none, but of a cluster."""
        return ()

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """The next message of any worker; None when none comes in time, or when woken."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Let whoever waits in `receive` have a look round."""
        self._inbox.put(None)

    def __exit__(self, *_: object) -> None:
        if self in _ahead:
            _ahead.remove(self)
        end_children(self.ahead, 0)  # which nobody has told to do anything
        end_children(self._started)


def local_workers(module: str, specs: Sequence[WorkerSpec]) -> LocalWorkers:
    """Workers of this machine: those started ahead if they are for these specs; if not they are ended, for they hold
    the devices."""
    found = _ahead.pop() if _ahead else LocalWorkers(module)
    if found.ahead and (found.module, [child.spec for child in found.ahead]) != (module, [*specs]):
        log.warning("workers that were started ahead are ended: the run wants others")
        found.__exit__()
        return LocalWorkers(module)
    return found


def serve(module: str) -> NoReturn:
    """Do `module.work(parent, spec)` on its device and end; a failure reaches the parent with its traceback."""
    parent = Parent()
    if not (first := sys.stdin.readline()):
        os._exit(0)
    spec = Message.of(first)
    assert isinstance(spec, WorkerSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if spec.device.core is not None:
        os.sched_setaffinity(0, {spec.device.core})  # this process, and every thread it starts
    parent.listen(spec.engine.heartbeat_s)
    try:
        if spec.device.kind == "cuda":
            lock_device(spec.device.local, spec.engine.device_wait_s)  # until this process ends
            threading.Thread(
                target=open_context, daemon=True
            ).start()  # takes about as long as what is imported now
        importlib.import_module(module).work(
            parent, spec
        )  # last: it takes seconds, in which a closed input ends us
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
        self._lines: queue.Queue[str] = queue.Queue()
        self.progress: Callable[[], float] = time.monotonic  # when the worker last did something

    def listen(self, heartbeat_s: float) -> None:
        """Read messages and send heartbeats, each in a thread; a closed input ends the process at once."""

        def hear() -> None:
            for line in sys.stdin:
                self._lines.put(line)
            os._exit(0)

        def beat() -> None:
            while True:
                time.sleep(heartbeat_s)
                self.send(Alive(progress_s=self.progress()))

        for task in (hear, beat):
            threading.Thread(target=task, daemon=True).start()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when none comes in time."""
        try:
            return Message.of(self._lines.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def next(self) -> Message | None:
        """What `receive` would return at once; it stays to be received."""
        return Message.of(self._lines.queue[0]) if self._lines.queue else None

    def send(self, message: Message) -> None:
        """Tell the parent; a parent that is gone ends this process."""
        try:
            with self._lock:
                self._out.write(message.line())  # flushed line by line
        except OSError:
            os._exit(1)

    def give_up(self, error: Exception) -> NoReturn:
        """Tell the parent what went wrong, in whichever thread it did, and end the process."""
        trace, told = "".join(traceback.format_exception(error)), storage_error(error) or error
        self.send(Failed(kind=type(told).__name__, message=str(told), traceback=trace))
        os._exit(1)
