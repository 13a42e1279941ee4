"""Worker processes: started, heard, watched and ended in one way, whatever they compute.

On the parent's side, `LocalWorkers` starts pinned workers, and `Child` is one of them. On the
worker's side, `serve` is its program, `Parent` its line to the process that started it, and
`work(parent, spec)` of a module is what it does. Messages go one per line.

A worker is started in its own session, so that a terminal's Ctrl-C reaches the parent alone, which
then ends the worker in order. Two nets catch a parent that could not do that: the kernel's
parent-death signal, and the closed input.
"""

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
from virnuc_core.errors import WorkerError
from virnuc_core.lease import command_start_s
from virnuc_core.rundir import lock_device, parent_bound_command
from virnuc_core.runfiles import Device
from virnuc_core.system_errors import storage_error
from virnuc_core.telemetry.tables import DeviceSample

log = logging.getLogger(__name__)

GRACE_S: Final = 4.5  # for a worker to finish what it computes
WORKER: Final = "virnuc_core.engine.worker"
PROGRAM: Final = "from virnuc_core.engine.process import serve; serve(sys.argv[1])"
INTERRUPTED: Final = "the run was interrupted; what was committed stays, run again to go on"


class Message(Spec):
    """A message between parent and worker: on a line, the name of its class, then JSON."""

    def line(self) -> str:
        """Return the message as it is sent."""
        return f"{type(self).__name__} {self.model_dump_json()}\n"

    @staticmethod
    def of(line: str) -> "Message":
        """Parse a line. The class of the message must have been imported."""
        name, body = line.split(" ", 1)
        kinds = [kind for kind in Message.__subclasses__() if kind.__name__ == name]
        return kinds[0].model_validate_json(body)


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
    """A worker takes tasks from now on."""

    # What it reports of itself or its device; an engine worker's record goes to summary.json.
    record: dict[str, Any] = Field(default_factory=dict)


class Failed(Message):
    """A worker's last message: the error that ends it."""

    kind: str  # name of the exception's class
    message: str
    traceback: str


class Closed(Message):
    """No more messages will come.

    To a worker: there are no more tasks. The parent's reader also puts it into the inbox when a
    worker's output has ended.
    """


Inbox = queue.Queue["tuple[Child, Message] | None"]  # None wakes whoever waits


def worker_specs(
    models: Path, devices: Sequence[Device], engine: EngineSpec, trace: TraceSpec | None = None
) -> tuple[WorkerSpec, ...]:
    """Return the specification of one worker per device.

    It is the same for all plans, whose shards are sent one by one. So workers that were started
    before the plan was made can be used.
    """
    root = str(models.resolve())
    engine = engine.model_copy(update={"shard_tokens": EngineSpec().shard_tokens})
    return tuple(
        WorkerSpec(models=root, device=device, engine=engine, trace=trace) for device in devices
    )


_children: set["Child"] = set()
_children_lock = threading.Lock()
_n_endings = 0  # how often all children have been ended
_prestarted: list["LocalWorkers"] = []  # not claimed by a run yet


class Child:
    """A running worker process.

    Its messages go to the inbox; the last one is `Closed`. Heartbeats are not passed on, they move
    `progress_s`.
    """

    lost = False  # whether its whole node is gone, through no fault of its own

    def _begin(self, spec: WorkerSpec, inbox: Inbox) -> None:
        """Set the state that worker processes here and on other machines have in common."""
        now_s = time.monotonic()
        self.spec = spec
        self.device = spec.device.id
        self._inbox = inbox
        self._end_lock = threading.Lock()
        # For its standard error; what it wrote before there was a log is kept for the log.
        self.log: Path | None = None
        self.unlogged: list[str] = []  # what it wrote to standard error and is in no log yet
        self.last_words = "nothing"  # its last line on standard error
        self.failed: Failed | None = None  # what it reported of its failure
        self.started_s = now_s
        self.progress_s = now_s  # when it last did something, or was told to
        self.asked_s = now_s  # when the command began that makes use of it
        self._last_message_s = now_s

    def __init__(self, module: str, spec: WorkerSpec, inbox: Inbox) -> None:
        self._begin(spec, inbox)
        self.process = subprocess.Popen(
            parent_bound_command(PROGRAM, module),
            env={**os.environ, **environment(spec.device)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._stdin = cast(IO[str], self.process.stdin)
        self._stdout = cast(IO[str], self.process.stdout)
        self._stderr = cast(IO[str], self.process.stderr)
        self._readers = [
            threading.Thread(target=self._read_messages, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def send(self, message: Message) -> None:
        """Write one message. If the worker no longer reads, its end is reported by the inbox."""
        self.progress_s = time.monotonic()
        with contextlib.suppress(ValueError, OSError):
            self._stdin.write(message.line())
            self._stdin.flush()

    def _read_messages(self) -> None:
        """Pass its messages on, in a thread, until its output ends."""
        try:
            with contextlib.suppress(ValueError, OSError), self._stdout:
                for line in self._stdout:
                    if line.endswith("\n"):  # else it was cut off by a kill
                        self.on_message(Message.of(line))
        finally:
            self._inbox.put((self, Closed()))

    @property
    def silent(self) -> bool:
        """Tell whether its heartbeats have stopped for too long: it is stopped, or dead."""
        return time.monotonic() - self._last_message_s > self.spec.engine.silence_s

    def on_message(self, message: Message) -> None:
        """Note a message of the worker, and pass it on unless it is a heartbeat."""
        self._last_message_s = time.monotonic()
        if isinstance(message, Alive):
            self.progress_s = max(self.progress_s, message.progress_s)
            return
        if isinstance(message, Failed):
            self.failed = message
        self.progress_s = self._last_message_s
        self._inbox.put((self, message))

    def _read_errors(self) -> None:
        """Note what it writes to standard error, in a thread, until that ends."""
        with contextlib.suppress(ValueError, OSError), self._stderr:
            # The empty line at the end writes what was kept for a log that came later.
            for line in itertools.chain(self._stderr, [""]):
                self.on_stderr(line)

    def on_stderr(self, text: str) -> None:
        """Note what it wrote to standard error, and log it if there is a log."""
        self.last_words = text.strip() or self.last_words
        self.unlogged.append(text)
        with contextlib.suppress(OSError):  # of a full disk: the worker must not wait for it
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a", encoding="utf-8") as file:
                    file.writelines(self.unlogged)
                self.unlogged.clear()

    def end(self, grace_s: float = GRACE_S) -> int:
        """End the worker, and everything that it has started.

        SIGTERM lets it finish the shard at hand; SIGKILL to its whole session follows.

        Args:
            grace_s: Seconds to wait between the two. A worker that is silent gets none.

        Returns:
            The exit status.
        """
        with self._end_lock:
            if self not in _children:
                return self.process.wait()  # ended before: its number may be another's by now
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.pid, signal.SIGTERM)
                self.process.wait(0 if self.silent else grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # also what the worker itself had started
            status = self.process.wait()
            for reader in self._readers:
                reader.join(grace_s)
            with contextlib.suppress(OSError, ValueError):
                self._stdin.close()
            self._forget()
        return status

    def _forget(self) -> None:
        """Take it off the list of workers that `end_all_children` ends."""
        _children.discard(self)


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """End several workers at once, so that the slowest sets the time."""
    with ThreadPoolExecutor(1 + len(_children)) as threads:
        endings = threads.map(lambda child: child.end(grace_s), children)
        list(endings)  # wait for all, and raise what one of them raised


def end_all_children(grace_s: float = GRACE_S) -> None:
    """End every worker of this process, and let the objects that started them start no more.

    Threads that wait for workers get a `WorkerError` when they start the next one.
    """
    global _n_endings  # one per process, like the children themselves
    with _children_lock:
        _n_endings += 1
        children = list(_children)
    end_children(children, grace_s)


class LocalWorkers(contextlib.AbstractContextManager["LocalWorkers"]):
    """Worker processes of this machine that run a module's `work`.

    They are gone when the `with` block ends. The thread that starts them must live as long as they
    do: to the kernel, its end is the death of their parent. Those that are `prestarted` load while
    a command finds out what they are for; `local_workers` then claims them.
    """

    reader: Callable[[str, float], DeviceSample] | None = None  # of devices on other machines

    def __init__(self, module: str, prestart: Sequence[WorkerSpec] = ()) -> None:
        self.module = module
        self._n_endings = _n_endings
        self._inbox: Inbox = queue.Queue()
        self._started: list[Child] = []
        self.prestarted: list[Child] = []  # `start` hands these out, so it stays empty meanwhile
        self.prestarted = [self.start(spec) for spec in prestart]
        if prestart:
            _prestarted.append(self)

    @property
    def cancelled(self) -> bool:
        """Tell whether `end_all_children` has been called since this object was made."""
        return self._n_endings != _n_endings

    def start(self, spec: WorkerSpec, log: Path | None = None) -> Child:
        """Start a worker, or hand out a prestarted one that is alive.

        Args:
            spec: What the worker loads.
            log: File for its standard error. If None, the text is kept until there is a file.

        Raises:
            WorkerError: `end_all_children` has been called.
        """
        for child in [child for child in self.prestarted if child.spec == spec]:
            self.prestarted.remove(child)
            is_running = child.failed is None and child.process.poll() is None
            if is_running:
                child.log = log
                child.asked_s = command_start_s()
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
        """Start a process. A cluster starts it on a node."""
        return Child(self.module, spec, self._inbox)

    def new_devices(self, n_waiting: int) -> Iterable[Device]:
        """Return the devices that have joined since the last call. Only a cluster has any.

        Args:
            n_waiting: Shards for which there is no device yet.
        """
        return ()

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """Return the next message of any worker; None if none comes in time, or after `wake`."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Make the thread that waits in `receive` return at once."""
        self._inbox.put(None)

    def __exit__(self, *_: object) -> None:
        if self in _prestarted:
            _prestarted.remove(self)
        end_children(self.prestarted, 0)  # nobody has given them anything to do
        end_children(self._started)


def local_workers(module: str, specs: Sequence[WorkerSpec]) -> LocalWorkers:
    """Return workers of this machine: the prestarted ones if they are for these specs.

    Prestarted workers for other specs are ended, because they occupy the devices.
    """
    if not _prestarted:
        return LocalWorkers(module)
    workers = _prestarted.pop()
    prestarted_specs = [child.spec for child in workers.prestarted]
    is_usable = workers.module == module and prestarted_specs == list(specs)
    if prestarted_specs and not is_usable:
        log.warning("workers that were started ahead are ended: the run wants others")
        workers.__exit__()
        return LocalWorkers(module)
    return workers


def serve(module: str) -> NoReturn:
    """Run `module.work(parent, spec)` on its device, then end the process.

    A failure reaches the parent with its traceback.
    """
    parent = Parent()
    first_line = sys.stdin.readline()
    if not first_line:
        os._exit(0)
    spec = Message.of(first_line)
    assert isinstance(spec, WorkerSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if spec.device.core is not None:
        os.sched_setaffinity(0, {spec.device.core})  # this process, and every thread it starts
    parent.listen(spec.engine.heartbeat_s)
    try:
        if spec.device.kind == "cuda":
            lock_device(spec.device.local, spec.engine.device_wait_s)  # until this process ends
            # The driver takes about as long as the imports below.
            threading.Thread(target=open_context, daemon=True).start()
        # Imported last, because it takes seconds, in which a closed input already ends us.
        importlib.import_module(module).work(parent, spec)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        parent.give_up(error)
    os._exit(0)  # skip interpreter shutdown: everything is written, and threads or CUDA may linger


class Parent:
    """A worker's line to its parent. It keeps the process's standard output for messages."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)  # a library's print must not garble the messages
        self._lock = threading.Lock()
        self._lines: queue.Queue[str] = queue.Queue()
        self.progress: Callable[[], float] = time.monotonic  # when the worker last did something

    def listen(self, heartbeat_s: float) -> None:
        """Start to read messages and to send heartbeats, each in a thread.

        A closed input ends the process at once.
        """

        def read_messages() -> None:
            for line in sys.stdin:
                self._lines.put(line)
            os._exit(0)

        def send_heartbeats() -> None:
            while True:
                time.sleep(heartbeat_s)
                self.send(Alive(progress_s=self.progress()))

        for task in (read_messages, send_heartbeats):
            threading.Thread(target=task, daemon=True).start()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None if none comes in time."""
        try:
            return Message.of(self._lines.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def peek(self) -> Message | None:
        """Return the message that `receive` would return at once, and leave it there."""
        if not self._lines.queue:
            return None
        return Message.of(self._lines.queue[0])

    def send(self, message: Message) -> None:
        """Send a message to the parent. If the parent is gone, this process ends."""
        try:
            with self._lock:
                self._out.write(message.line())  # flushed line by line
        except OSError:
            os._exit(1)

    def give_up(self, error: Exception) -> NoReturn:
        """Report an error to the parent, from whichever thread it occurred in, and end."""
        trace = "".join(traceback.format_exception(error))
        reported_error = storage_error(error) or error
        failure = Failed(
            kind=type(reported_error).__name__, message=str(reported_error), traceback=trace
        )
        self.send(failure)
        os._exit(1)
