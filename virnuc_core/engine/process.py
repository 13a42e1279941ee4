"""Start worker processes, exchange messages with them, watch them, and end them.

In the parent process, `LocalWorkers` starts workers, and a `Child` stands for one of them. In the
worker process, `serve` is the program, `Parent` the connection to the process that started it, and
the function `work(parent, spec)` of a module the computation. Each message is one line of text.

A worker has its own session, so that Ctrl-C in a terminal reaches only the parent, which then ends
its workers in order. If the parent dies before that, the kernel sends its parent-death signal to
the worker, and the worker also ends when its standard input is closed.
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
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

from pydantic import Field

from virnuc_core.command_time import command_start_s
from virnuc_core.config import EngineSpec, Spec, TraceSpec
from virnuc_core.engine.devices import environment, open_context
from virnuc_core.errors import ConfigError, UnreadableError, WorkerError
from virnuc_core.lease import make_folder
from virnuc_core.rundir import lock_device, parent_bound_command
from virnuc_core.runfiles import Device
from virnuc_core.safe_files import open_to_write
from virnuc_core.system_errors import describe_system_error, limit_error, storage_error
from virnuc_core.telemetry.tables import DeviceSample

log = logging.getLogger(__name__)

# Seconds between SIGTERM and SIGKILL, in which a worker may finish its shard.
GRACE_S: Final = 4.5
# Seconds, at least, to read what a worker wrote last before it ended.
READ_S: Final = 1.0
# How often, in seconds, a thread that waits for a lent worker looks for an interrupt.
INTERRUPT_POLL_S: Final = 0.05
# The module whose function `work` an engine worker runs.
WORKER: Final = "virnuc_core.engine.worker"
# What Python runs in a worker process. The argument is the name of such a module.
PROGRAM: Final = "from virnuc_core.engine.process import serve; serve(sys.argv[1])"
INTERRUPTED: Final = "the run was interrupted; what was committed stays, run again to go on"


class Message(Spec):
    """A message between parent and worker.

    It is sent as one line: the name of its class, a space, and its fields as JSON.
    """

    def line(self) -> str:
        """Return the message as a line of text, with the newline at its end."""
        return f"{type(self).__name__} {self.model_dump_json()}\n"

    @staticmethod
    def of(line: str) -> "Message":
        """Return the message that a line holds.

        The line begins with the name of the message's class. The class must have been imported
        before, because it is looked for among the subclasses that Python knows.
        """
        name, body = line.split(" ", 1)
        kinds = [kind for kind in Message.__subclasses__() if kind.__name__ == name]
        return kinds[0].model_validate_json(body)


class WorkerSpec(Message):
    """The first message to a worker: what it needs to know to load the models.

    It names no reads, so that workers can load while the reads are still being staged.
    """

    models: str  # path of the models directory
    device: Device
    engine: EngineSpec
    budget_divisor: int = (
        1  # the token budgets are divided by this, if the device has too little memory
    )
    trace: TraceSpec | None = None
    # On a GPU: compile all kernels anew, because the kept ones may be damaged.
    fresh_kernels: bool = False


class Alive(Message):
    """A worker's heartbeat, which it sends at regular times."""

    last_progress_s: float  # `time.monotonic()` of the last progress


class Ready(Message):
    """A worker says that it has loaded the models and can compute."""

    # Facts about the worker or its device. The record of an engine worker goes to summary.json.
    record: dict[str, Any] = Field(default_factory=dict)


class Failed(Message):
    """A worker's last message: the error that ends it."""

    kind: str  # name of the exception's class
    message: str
    traceback: str


class Closed(Message):
    """No more messages will come.

    The parent sends it to a worker when there are no more tasks. In the parent, it is also put into
    the inbox when the output of a worker has ended, which means that the worker has ended.
    """


class End(Message):
    """A message to whoever started a worker process for this one: end it."""

    grace_s: float  # seconds in which the process may finish its shard


class Ended(Message):
    """The last message of a worker process that somebody else started, in place of `Closed`."""

    status: int
    last_words: str


# Messages of all workers, each with its worker. None only wakes the thread that waits.
Inbox = queue.Queue["tuple[Child, Message] | None"]


def worker_specs(
    models: Path, devices: Sequence[Device], engine: EngineSpec, trace: TraceSpec | None = None
) -> tuple[WorkerSpec, ...]:
    """Return the specifications of workers, one for each device.

    A worker that was started early is used by a run if its specification is the one that the run
    wants. Planning the shards can change the setting `shard_tokens`, which workers do not use. So
    the specifications always have its default value, and are equal before and after the planning.

    Args:
        models: Models directory.
        devices: The devices.
        engine: Settings of the engine.
        trace: What workers record with torch's profiler. None records nothing.
    """
    root = str(models.resolve())
    engine = engine.model_copy(update={"shard_tokens": EngineSpec().shard_tokens})
    return tuple(
        WorkerSpec(models=root, device=device, engine=engine, trace=trace) for device in devices
    )


# The running worker processes that this process has started.
_children: set["Child"] = set()
_children_lock = threading.Lock()
# How often `end_all_children` was called.
_n_endings = 0
# Gives workers that another process holds and lends, if the command uses such a process. It
# returns None if it has none for a specification.
Lender = Callable[[WorkerSpec, Inbox], "Child | None"]
_lender: Lender | None = None
# Workers that were started before a run asked for them, and that no run has claimed yet.
_prestarted: list["LocalWorkers"] = []


class Child:
    """A running worker process, as its parent sees it.

    Two threads read its standard output and its standard error. Its messages go to the inbox; the
    last one is `Closed`. Heartbeats do not go there: they only update `last_progress_s`.
    """

    # True if the node on which it ran is gone, so that the worker is not to blame for its end.
    node_lost = False

    def _set_common_attributes(self, spec: WorkerSpec, inbox: Inbox) -> None:
        """Set the attributes that workers on this machine and on other machines both have.

        Args:
            spec: What the worker loads.
            inbox: Gets the messages of the worker.
        """
        now_s = time.monotonic()
        self.spec = spec
        self.device = spec.device.id
        self._inbox = inbox
        self._end_lock = threading.Lock()
        self.log: Path | None = None  # file for its standard error; None if there is none yet
        self.unlogged: list[str] = []  # lines of its standard error that are in no log yet
        self.last_words = "nothing"  # its last line on standard error
        self.failure: Failed | None = None  # the error that it has reported
        # Times of `time.monotonic()`:
        self.started_s = now_s
        self.last_progress_s = now_s  # when it last made progress, or was sent a message
        # When it was started. For a worker that was started ahead of its run, when the user's
        # command began.
        self.requested_s = now_s
        self._last_message_s = now_s  # when its last message or heartbeat came

    def __init__(self, module: str, spec: WorkerSpec, inbox: Inbox) -> None:
        """Start the process, and the threads that read its output.

        Args:
            module: The module whose function `work` the process runs.
            spec: The device, which decides the environment variables of the process.
            inbox: Gets the messages of the process.
        """
        self._set_common_attributes(spec, inbox)
        self.process = subprocess.Popen(
            parent_bound_command(PROGRAM, module),  # it ends when this process ends
            env={
                **os.environ,
                **environment(spec.device, fresh_kernels=spec.fresh_kernels),
            },
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

    @property
    def is_running(self) -> bool:
        """Return true if the process has not ended, and has reported no error."""
        return self.failure is None and self.process.poll() is None

    def send(self, message: Message) -> None:
        """Send one message to the worker.

        If the worker has ended, nothing happens here: its end comes to the inbox as `Closed`.
        """
        # The time that the worker has for its next progress begins now.
        self.last_progress_s = time.monotonic()
        # ValueError: `end` has closed the input of the worker.
        with contextlib.suppress(ValueError, OSError):
            self._stdin.write(message.line())
            self._stdin.flush()

    def _read_messages(self) -> None:
        """Read the worker's messages until its output ends. This is the function of a thread.

        The output ends when the worker ends. Then `Closed` is put into the inbox.
        """
        try:
            # A pipe that cannot be read, or was closed, is treated like the end of the output.
            with contextlib.suppress(ValueError, OSError), self._stdout:
                for line in self._stdout:
                    # A line without a newline is incomplete: the worker was killed while it wrote
                    # the line. Ignore it.
                    if line.endswith("\n"):
                        self.on_message(Message.of(line))
        finally:
            self._inbox.put((self, Closed()))

    @property
    def is_silent(self) -> bool:
        """Return true if no message or heartbeat has come for `silence_s`: it hangs or is dead."""
        return time.monotonic() - self._last_message_s > self.spec.engine.silence_s

    def on_message(self, message: Message) -> None:
        """Handle a message of the worker: update its times, and put it into the inbox.

        A heartbeat only updates the time of the last progress.
        """
        self._last_message_s = time.monotonic()
        if isinstance(message, Alive):
            self.last_progress_s = max(self.last_progress_s, message.last_progress_s)
            return
        if isinstance(message, Failed):
            self.failure = message
        self.last_progress_s = self._last_message_s
        self._inbox.put((self, message))

    def _read_errors(self) -> None:
        """Read the worker's standard error until it ends. This is the function of a thread.

        Each line goes to the log file, or is kept as long as no log file is chosen.
        """
        # A pipe that cannot be read, or was closed, is treated like the end of the output.
        with contextlib.suppress(ValueError, OSError), self._stderr:
            # The log may have been chosen after the last line. The empty text at the end makes
            # `on_stderr` write the lines that were kept until then.
            for line in itertools.chain(self._stderr, [""]):
                self.on_stderr(line)

    def on_stderr(self, text: str) -> None:
        """Handle some text that the worker wrote to standard error: append it to the log file.

        The text is one or more lines. As long as no log file is chosen, it is kept in `unlogged`.

        Args:
            text: The text, with its line ends. An empty text only writes what was kept.
        """
        self.last_words = text.strip() or self.last_words  # a blank line says nothing
        self.unlogged.append(text)
        # If the disk is full or the run directory has gone, the lines are kept. An error here would
        # end the thread that reads, and the worker could never write its next line.
        with contextlib.suppress(OSError, ConfigError, UnreadableError):
            if self.log is not None:
                if not self.log.parent.is_dir():
                    make_folder(self.log.parent)
                with open_to_write(self.log, append=True) as file:
                    file.write("".join(self.unlogged).encode("utf-8", "backslashreplace"))
                self.unlogged.clear()

    def end(self, grace_s: float = GRACE_S) -> int:
        """End the worker, and all processes that it has started. Wait until they have ended.

        SIGTERM lets the worker finish its shard. SIGKILL follows, for its whole session.

        Args:
            grace_s: Seconds to wait between the two signals. A worker that is silent gets no
                time, because it would not react.

        Returns:
            The exit status.
        """
        with self._end_lock:
            if self not in _children:
                # It was ended before. No signal may be sent, because the system may have given its
                # process id to another process.
                return self.process.wait()
            # The worker began a new session, so its process id is also the id of its process
            # group. If the group has gone, or the time is over, go on to SIGKILL.
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.pid, signal.SIGTERM)
                self.process.wait(0 if self.is_silent else grace_s)
            with contextlib.suppress(ProcessLookupError):
                # The worker may have ended at SIGTERM, but not the processes that it started.
                os.killpg(self.pid, signal.SIGKILL)
            status = self.process.wait()
            # Let the threads read what the worker wrote last. A process that it has started outside
            # of its session may keep the pipes open.
            for reader in self._readers:
                reader.join(max(grace_s, READ_S))
            with contextlib.suppress(OSError, ValueError):
                self._stdin.close()
            self._forget()
        return status

    def _forget(self) -> None:
        """Remove this worker from the set that `end_all_children` ends."""
        _children.discard(self)


def end_children(children: Iterable[Child], grace_s: float = GRACE_S) -> None:
    """End several workers at the same time, so that it takes no longer than the slowest one.

    Each is ended in its own thread. Workers for which the system allows no further thread are ended
    one after the other by this thread.

    Args:
        children: The workers.
        grace_s: Seconds that each has to finish its shard before it is killed.

    Raises:
        OSError: One of them could not be ended. The others are ended nevertheless.
    """
    endings: list[Future[int]] = []
    children_without_thread: list[Child] = []
    with ThreadPoolExecutor(1 + len(_children)) as threads:  # 0 threads would be an error
        for child in children:
            try:
                endings.append(threads.submit(child.end, grace_s))
            except RuntimeError:  # no further thread can be started
                children_without_thread.append(child)
    first_error: OSError | None = None
    for child in children_without_thread:
        # `submit` may have queued the worker before it failed, so that a thread that exists ends
        # the worker as well. `end` may be called twice.
        try:
            child.end(grace_s)
        except OSError as error:
            first_error = first_error or error
    for ending in endings:
        ending.result()  # raises the error of this worker
    if first_error is not None:
        raise first_error


def end_all_children(grace_s: float = GRACE_S) -> None:
    """End every worker that this process has started, for an interrupted run.

    The `LocalWorkers` objects that exist now start no more workers: a thread that tries gets a
    `WorkerError`. Objects that are made later do start workers. They know by the number of calls of
    this function, which is counted here, whether it was called after they were made.

    Args:
        grace_s: Seconds that each worker has to finish its shard before it is killed.
    """
    global _n_endings  # one count for the whole process, because it has one set of children
    with _children_lock:
        _n_endings += 1
        children = list(_children)
    end_children(children, grace_s)


class LocalWorkers(contextlib.AbstractContextManager["LocalWorkers"]):
    """Starts worker processes on this machine, and receives their messages.

    Use it in a `with` block: all workers have ended when the block ends. The thread that starts a
    worker must live as long as the worker, because the kernel takes the end of that thread for the
    death of the parent, and ends the worker.

    A command may start workers before it knows all about the run, so that they load the models
    meanwhile (`prestart`). The run then claims them with `local_workers`.
    """

    # Measures a device on another machine. None means that the devices are on this machine.
    reader: Callable[[str, float], DeviceSample] | None = None
    # Whether workers may be borrowed from a process that lends some.
    may_borrow = True

    def __init__(self, module: str, prestart: Sequence[WorkerSpec] = ()) -> None:
        """Start the workers of `prestart`, so that they load the models before a run needs them.

        Args:
            module: The module whose function `work` the workers run.
            prestart: Specifications of workers to start now. If there are any, a later run of this
                process can claim this object with `local_workers`.
        """
        self.module = module
        # How often `end_all_children` was called before this object was made. If the global count
        # is higher later, the run was interrupted meanwhile.
        self._n_endings = _n_endings
        self._is_closing = False  # see `stop_borrowing`
        self._inbox: Inbox = queue.Queue()
        self._started: list[Child] = []
        # `start` takes a worker from this list if there is one. So the list is assigned only after
        # all calls, and each call starts a new worker.
        self.prestarted: list[Child] = []
        self.prestarted = [self.start(spec) for spec in prestart]
        if prestart:
            _prestarted.append(self)

    @property
    def cancelled(self) -> bool:
        """Return true if `end_all_children` has been called since this object was made."""
        return self._n_endings != _n_endings

    def start(self, spec: WorkerSpec, log: Path | None = None) -> Child:
        """Return a worker for a specification.

        This is a prestarted worker that is alive, one that another process lends, or a new one.

        Args:
            spec: What the worker loads. It is sent to a new worker as the first message.
            log: File for its standard error. If None, the text is kept until there is a file.

        Raises:
            WorkerError: `end_all_children` has been called.
        """
        matching_children = [child for child in self.prestarted if child.spec == spec]
        for child in matching_children:
            self.prestarted.remove(child)
            if child.is_running:
                child.log = log
                # The command has waited for this worker from its beginning.
                child.requested_s = command_start_s()
                return child
        borrowed_child = self._borrow(spec)
        with _children_lock:
            was_interrupted = self.cancelled
            if not was_interrupted:
                child = borrowed_child or self._make(spec)
                _children.add(child)  # for `end_all_children`
        if was_interrupted:
            if borrowed_child is not None:
                borrowed_child.end(grace_s=0)
            raise WorkerError(INTERRUPTED)
        self._started.append(child)
        child.send(spec)
        child.log = log
        return child

    def _borrow(self, spec: WorkerSpec) -> Child | None:
        """Return a worker that another process lends, or None if none does.

        The answer may take seconds. Another thread asks, so that an interrupt need not wait for it.
        A worker that is lent after an interrupt is returned at once.

        Args:
            spec: What the worker must have loaded.

        Raises:
            WorkerError: The run was interrupted, or its workers are being ended.
        """
        lender = _lender
        if lender is None or self.module != WORKER or not self.may_borrow:
            return None
        answer: Future[Child | None] = Future()

        def ask() -> None:
            """Ask for a worker, and keep the answer. This is the function of a thread."""
            try:
                answer.set_result(lender(spec, self._inbox))
            except BaseException as error:  # noqa: BLE001 - it is raised in the waiting thread
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, daemon=True).start()
            while not answer.done():
                if self.cancelled or self._is_closing:
                    raise WorkerError(INTERRUPTED)
                wait_for_futures([answer], INTERRUPT_POLL_S)
        except BaseException:
            # It is called now if there is an answer, and otherwise when the answer comes.
            answer.add_done_callback(_return_worker)
            raise
        return answer.result()

    def stop_borrowing(self) -> None:
        """Let the thread that waits in `start` for a lent worker raise an error now.

        It is called when no worker is needed any more.
        """
        self._is_closing = True

    def _make(self, spec: WorkerSpec) -> Child:
        """Start a process on this machine. The subclass for clusters starts it on a node."""
        return Child(self.module, spec, self._inbox)

    def new_devices(self, n_waiting: int) -> Iterable[Device]:
        """Return the devices that became available since the last call: none on one machine.

        Args:
            n_waiting: How many shards wait for a free device. A cluster may start nodes for them.
        """
        return ()

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """Wait for the next message of any worker.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            The worker and its message. None if no message comes in time, or if another thread
            called `wake`.
        """
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Make the thread that waits in `receive` return immediately."""
        self._inbox.put(None)

    def __exit__(self, *_: object) -> None:
        """End all workers that this object has started, and wait until they have ended."""
        if self in _prestarted:
            _prestarted.remove(self)
        end_children(self.prestarted, grace_s=0)  # they have no task to finish
        end_children(self._started)


def _return_worker(answer: Future[Child | None]) -> None:
    """Return a worker that was lent to a run which does not need it any more.

    Args:
        answer: The answer of the lender. It may be that there is no worker, or an error.
    """
    if answer.exception() is not None:
        return
    child = answer.result()
    if child is not None:
        child.end(grace_s=0)


def set_lender(lender: Lender | None) -> None:
    """Let all runs of this process borrow their workers, as long as the lender has some.

    Args:
        lender: Returns a worker for a specification, or None. If it is None itself, all workers
            are started by this process again.
    """
    global _lender  # the whole process has one lender, as it has one set of children
    _lender = lender


def local_workers(module: str, specs: Sequence[WorkerSpec]) -> LocalWorkers:
    """Return the object that starts the workers of a run on this machine.

    A command may have started workers ahead (prestarted them). If they have exactly these
    specifications, the run gets them. Otherwise they are ended, because they occupy the devices.

    Args:
        module: The module whose function `work` the workers run.
        specs: The specifications of all workers of the run.
    """
    if not _prestarted:
        return LocalWorkers(module)
    workers = _prestarted.pop()
    # Empty if an earlier run has taken all of them. The object can be used without them.
    prestarted_specs = [child.spec for child in workers.prestarted]
    is_usable = workers.module == module and prestarted_specs == list(specs)
    if prestarted_specs and not is_usable:
        log.warning("workers that were started ahead are ended: the run wants others")
        workers.__exit__()
        return LocalWorkers(module)
    return workers


def serve(module: str) -> NoReturn:
    """Run a worker process: call `work(parent, spec)` of a module, then end the process.

    The specification comes from the parent as the first line of standard input. Before `work` is
    called, the process is bound to the device that the specification names. An error is sent to the
    parent as a message, with its traceback.

    Args:
        module: Name of the module that has the function `work`.
    """
    parent = Parent()
    first_line = sys.stdin.readline()
    if not first_line:
        # The input was closed: the parent has ended.
        os._exit(0)
    spec = Message.of(first_line)
    assert isinstance(spec, WorkerSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent ends its workers
    if spec.device.core is not None:
        # Bind this process, and every thread that it will start, to one core.
        os.sched_setaffinity(0, {spec.device.core})
    parent.listen(spec.engine.heartbeat_s)
    try:
        if spec.device.kind == "cuda":
            # Wait until no other worker of virnuc uses the GPU, and lock it until this process
            # ends.
            lock_device(spec.device.local, spec.engine.device_wait_s)
            # Opening the device takes about as long as the imports below, so both are done at the
            # same time.
            threading.Thread(target=open_context, daemon=True).start()
        # The import takes seconds. It comes after `listen`, so that a parent that dies meanwhile
        # ends this process.
        importlib.import_module(module).work(parent, spec)
    except Exception as error:  # noqa: BLE001 - the parent must learn of every error
        parent.give_up(error)
    # Everything is written. Skip the shutdown of Python, which may wait for threads or for CUDA.
    os._exit(0)


class Parent:
    """The connection of a worker process to its parent: standard input and standard output."""

    def __init__(self) -> None:
        """Reserve standard output for messages. Other output goes to standard error from now on."""
        self.started_s = time.monotonic()
        # A copy of descriptor 1 (standard output) for messages. Then descriptor 1 is made to point
        # to standard error, so that a library that prints cannot garble the messages.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
        # Messages are UTF-8, whatever the locale or PYTHONIOENCODING says.
        sys.stdin = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
        self._lock = threading.Lock()
        self._lines: queue.Queue[str] = queue.Queue()  # messages that were not received yet
        # Returns when the worker last made progress. The worker replaces it.
        self.progress: Callable[[], float] = time.monotonic

    def listen(self, heartbeat_s: float) -> None:
        """Start two threads: one reads messages, one sends heartbeats.

        Args:
            heartbeat_s: Seconds between two heartbeats.
        """

        def read_messages() -> None:
            """Queue each line of the input. When the parent has closed it, end this process."""
            try:
                for line in sys.stdin:
                    self._lines.put(line)
            finally:
                # Also after an error: without messages the worker would wait for ever.
                os._exit(0)

        def send_heartbeats() -> None:
            """Tell the parent at regular times when the worker last made progress."""
            while True:
                time.sleep(heartbeat_s)
                self.send(Alive(last_progress_s=self.progress()))

        for function in (read_messages, send_heartbeats):
            threading.Thread(target=function, daemon=True).start()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message and return it. Return None if none comes in time.

        Args:
            timeout_s: Seconds to wait. None waits without a limit.
        """
        try:
            return Message.of(self._lines.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def peek(self) -> Message | None:
        """Return the next message without removing it. Return None if no message waits.

        If another thread calls `receive` at the same time, it may receive that message.
        """
        try:
            next_line = self._lines.queue[0]
        except IndexError:
            return None
        return Message.of(next_line)

    def send(self, message: Message) -> None:
        """Send a message to the parent. If the parent is gone, this process ends."""
        try:
            with self._lock:
                self._out.write(message.line())  # line buffering sends it immediately
        except OSError:
            os._exit(1)

    def give_up(self, error: Exception) -> NoReturn:
        """Report an error to the parent, and end this process. Any thread may call this.

        The parent gets the name of the error's class, by which it decides what to do, and the
        message and the traceback.
        """
        trace = "".join(traceback.format_exception(error))
        # An error of the system that means a full disk or a reached limit gets the class and the
        # message that we have for it.
        reported_error: Exception = storage_error(error) or limit_error(error) or error
        kind = type(reported_error).__name__
        message = str(reported_error)
        if isinstance(reported_error, OSError) and reported_error.errno is not None:
            # The system refused something. Python has classes for some of these errors
            # (`TimeoutError`, `BlockingIOError`, ...). Under the one name `OSError`, the parent
            # knows all of them as errors of the system, and does not blame a row of the shard.
            kind = OSError.__name__
            message = describe_system_error(reported_error)
            if reported_error.filename is not None:
                message = f"{os.fsdecode(reported_error.filename)}: {message}"
        self.send(Failed(kind=kind, message=message, traceback=trace))
        os._exit(1)
