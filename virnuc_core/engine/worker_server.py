"""Holds worker processes with loaded models, and lends them to the runs of one user.

This is the work of `virnuc serve`. A run connects, says which worker it needs, and is lent one. Its
messages are passed on in both directions until it returns the worker. The worker then keeps its
models for the next run.

The server also keeps processes that have loaded the program, with Prefect or without. A child of
one of them runs the command of a user, so that the user's own process need not load anything
(`virnuc_core.engine.preloaded`).

A worker that a run has left in the middle of its work is ended, so that it writes no more into the
folder of that run. A worker whose models were replaced on the disk is ended, too. A GPU is given
back when another process asks for it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from virnuc_core.engine.borrowed import (
    END_S,
    OTHER_VERSION,
    Borrow,
    ErrorText,
    Lent,
    Refused,
    identity,
    refusal_of_identity,
)
from virnuc_core.engine.preloaded import PreloadedProcess
from virnuc_core.engine.process import (
    WORKER,
    Child,
    Closed,
    End,
    Ended,
    Failed,
    Inbox,
    LocalWorkers,
    Message,
    Ready,
    WorkerSpec,
)
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.errors import VirnucError
from virnuc_core.private_socket import Messages, Peer, PrivateListener
from virnuc_core.rundir import DeviceRequests
from virnuc_core.system_errors import describe_system_error

log = logging.getLogger(__name__)

PROGRAM_CHANGED: Final = "the program was changed since it was started"
TICK_S: Final = 0.2  # how often the server looks for idle workers and for requests


class RunCommand(Message):
    """A command asks to be run by a child of a preloaded process.

    It is the first message on its connection; see `virnuc_core.command_handover`.
    """

    program: str  # which of the server's programs, by its name
    facts: dict[str, str]  # what a preloaded process must have in common with this process


class HeldChild(Child):
    """A worker process whose every message, and all that it writes, goes to its own inbox."""

    def __init__(self, module: str, spec: WorkerSpec) -> None:
        """Start the process.

        Args:
            module: The module whose function `work` it runs.
            spec: What it loads.
        """
        self.inbox: Inbox = queue.Queue()
        super().__init__(module, spec, self.inbox)

    def on_message(self, message: Message) -> None:
        """Put a message into the inbox, also a heartbeat: the run watches the worker."""
        self._last_message_s = time.monotonic()
        if isinstance(message, Failed):
            self.failure = message
        self.inbox.put((self, message))

    def on_stderr(self, text: str) -> None:
        """Put what the worker wrote to standard error into the inbox. The run has its log."""
        self.last_words = text.strip() or self.last_words
        if text:
            self.inbox.put((self, ErrorText(text=text)))


class _HeldWorkers(LocalWorkers):
    """Starts the worker processes of the server."""

    may_borrow = False

    def _make(self, spec: WorkerSpec) -> Child:
        """Start a process with an inbox of its own."""
        return HeldChild(self.module, spec)

    def forget(self, child: Child) -> None:
        """Drop a worker that has ended, so that the list does not grow."""
        with suppress(ValueError):
            self._started.remove(child)


@dataclass(eq=False)
class HeldWorker:
    """A worker process of the server, and the run that has borrowed it.

    The fields below `lock` change only while it is held. Nothing that takes long is done then.
    """

    child: HeldChild
    digests: dict[str, str]  # of the models that it has loaded
    requests: DeviceRequests | None  # from processes that want its GPU; None for a core
    ended: threading.Event = field(default_factory=threading.Event)  # the process is gone
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_lent: bool = True  # a worker is started for a run
    is_over: bool = False  # its process has ended, or is being ended
    run: Messages | None = None  # the connection of the run that has it
    ready: Ready | None = None  # what it reported when it was ready
    n_unanswered: int = 0  # tasks that it has got and not answered
    returned_s: float = 0.0  # when the last run returned it

    def lend(self) -> bool:
        """Reserve the worker for a run, and return true; false if it is lent or over."""
        with self.lock:
            if self.is_lent or self.is_over:
                return False
            self.is_lent = True
            return True

    def connect(self, run: Messages, *, has_loaded: bool) -> None:
        """Tell a run that it has the worker. The worker's messages go there from now on.

        Args:
            run: The connection of the run.
            has_loaded: The worker was there before.

        Raises:
            OSError: The run is gone.
        """
        run.send(Lent(pid=self.child.pid, has_loaded=has_loaded).line())
        with self.lock:
            self.run = run
            ready = self.ready
        # A worker says only once that it is ready. From now on the run gets it directly.
        if ready is not None:
            run.send(ready.line())

    def pass_on(self, message: Message) -> None:
        """Send a message of the worker to the run that has it, if there is one."""
        with self.lock:
            if isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, Computed):
                self.n_unanswered -= 1
            run = self.run
        if run is not None:
            with suppress(OSError):  # the run is gone; its connection tells that, too
                run.send(message.line())


class WorkerServer:
    """Lends workers, one for each device, until it is told to stop."""

    def __init__(
        self,
        listener: PrivateListener,
        *,
        idle_s: float,
        report: Callable[[str], None] = log.info,
        module: str = WORKER,
        programs: Mapping[str, str] | None = None,
        first_program: str | None = None,
    ) -> None:
        """Prepare the server. It holds no worker before a run has asked for one.

        Args:
            listener: Accepts the connections of runs.
            idle_s: Seconds after which a worker that nobody has borrowed is ended.
            report: Is called with a line about each event.
            module: The module whose function `work` the workers run.
            programs: The programs that are kept loaded, each in a process of its own: the name by
                which a command asks for it, and the module; see `PreloadedProcess`. A process is
                started when a command asks for it first. None keeps no program loaded.
            first_program: The name of the program whose process is started with the server.
        """
        self._listener = listener
        self._idle_s = idle_s
        self._report = report
        self._workers = _HeldWorkers(module)
        # The kernel ends a worker when the thread that started it ends, so this one stays.
        self._starter = ThreadPoolExecutor(1)
        self._held: dict[str, HeldWorker] = {}  # by the id of the device
        self._held_lock = threading.Lock()  # for this table
        self._lending_lock = threading.Lock()  # one run after the other is given its worker
        self._identity = identity()
        self._preloaded: dict[str, PreloadedProcess] = {}
        for name, command_module in (programs or {}).items():
            self._preloaded[name] = PreloadedProcess(command_module, self._start_in_thread)
        self._first_program = first_program

    def _start_in_thread(self, start: Callable[[], None]) -> None:
        """Call a function in the thread that lives as long as the server."""
        self._starter.submit(start).result()

    def serve(self, stopped: threading.Event) -> None:
        """Lend workers until the event is set. Then end all workers.

        Args:
            stopped: Ends the server.
        """
        try:
            self._start_first_program()
            while not stopped.is_set():
                accepted = self._listener.accept_own(TICK_S)
                if accepted is not None:
                    threading.Thread(target=self._serve_run, args=accepted, daemon=True).start()
                self._give_up_unused()
        finally:
            self._listener.close()
            self._end_all()

    def _start_first_program(self) -> None:
        """Start the process of the first program. Without it, commands run by themselves."""
        if self._first_program is not None:
            try:
                self._preloaded[self._first_program].start()
            except OSError as error:
                reason = describe_system_error(error)
                self._report(f"{self._first_program} is not kept loaded: {reason}")

    def _held_workers(self) -> list[HeldWorker]:
        """Return all workers that are held now."""
        with self._held_lock:
            return list(self._held.values())

    def _give_up_unused(self) -> None:
        """End workers that nobody has borrowed for long, or whose GPU another process wants.

        If a run is just given a worker, this is left for the next time. Otherwise that run could
        find a worker reserved that no other run has.
        """
        for name, process in self._preloaded.items():
            if process.end_if_unused(self._idle_s):
                self._report(f"{name} is no longer kept loaded: no command has used it for long")
        if not self._lending_lock.acquire(blocking=False):
            return
        try:
            self._give_up_unused_in_turn()
        finally:
            self._lending_lock.release()

    def _give_up_unused_in_turn(self) -> None:
        """Do what `_give_up_unused` says, while no worker is lent to a run."""
        for held in self._held_workers():
            # Requests are taken first. One that came after a run had returned the worker must not
            # be refused because the worker was lent a moment before.
            clients = [] if held.requests is None else held.requests.take()
            # A reserved worker cannot be lent meanwhile, so a promise to give it back is kept.
            is_reserved = held.lend()
            if held.requests is not None:
                held.requests.answer(clients, is_free=is_reserved)
            if not is_reserved:
                continue
            if clients:
                self._end(held, "another process asks for the device")
            elif time.monotonic() - held.returned_s > self._idle_s:
                self._end(held, "no run has used it for long")
            else:
                with held.lock:
                    held.is_lent = False

    def _serve_run(self, run: Messages, peer: Peer) -> None:
        """Lend a worker to one run, and pass on its tasks. This is the function of a thread."""
        held = None
        try:
            # Without a time limit: a run first computes the digests of its weights, which takes
            # minutes for large ones on a slow disk. It can only be a run of this user.
            line = run.receive()
            if line is None:
                return
            request = _read_request(line)
            if isinstance(request, RunCommand):
                self._hand_over(run, request, peer)
                return
            answer, has_loaded = self._answer(request)
            if isinstance(answer, Refused):
                run.send(answer.line())
                return
            held = answer
            held.connect(run, has_loaded=has_loaded)
            state = "with its models" if has_loaded else "and loads its models"
            self._report(f"{held.child.device} is lent to process {peer.pid}, {state}")
            self._pass_tasks(held, run)
        except (OSError, ValueError, IndexError) as error:
            # The connection has broken, or what came is no message of ours.
            log.debug("process %d: %s", peer.pid, error)
        finally:
            if held is not None:
                self._take_back(held, peer)
            run.release()

    def _hand_over(self, run: Messages, request: RunCommand, peer: Peer) -> None:
        """Give the connection of a command to a preloaded process, or refuse it.

        Args:
            run: The connection.
            request: What the command has sent.
            peer: Its process.
        """
        reason = "no program is kept loaded"
        if self._identity["program"] != identity()["program"]:
            reason = PROGRAM_CHANGED
        elif request.program in self._preloaded:
            reason = self._preloaded[request.program].hand_over(request.facts, run.fileno())
        if reason:
            run.send(Refused(reason=reason).line())
            self._report(f"process {peer.pid} runs its command itself: {reason}")
            return
        # The child has the connection now. `release` would end it there, too.
        os.close(run.detach())
        self._report(f"a child of the loaded program runs the command of process {peer.pid}")

    def _answer(self, request: Borrow | None) -> tuple[HeldWorker | Refused, bool]:
        """Return the worker that a run gets, reserved for it, or why it gets none.

        Args:
            request: What the run has asked for; None if that cannot be read.

        Returns:
            The worker or the reason, and whether the worker was there before.
        """
        if request is None:
            return Refused(reason=OTHER_VERSION), False
        with self._lending_lock:
            answer = self._refusal(request) or self._find(request)
            if answer is None:
                return self._start(request), False
            return answer, True

    def _refusal(self, request: Borrow) -> Refused | None:
        """Return why this server may lend the run no worker at all; None if it may."""
        reason = refusal_of_identity(self._identity, request.identity)
        if not reason and self._identity["program"] != identity()["program"]:
            reason = PROGRAM_CHANGED
        return Refused(reason=reason) if reason else None

    def _find(self, request: Borrow) -> HeldWorker | Refused | None:
        """Return the worker of a device, reserved for the run, if it has what the run needs.

        A free worker with other models or settings is ended.

        Returns:
            The worker; the reason if another run has it; None if the device has no worker now.
        """
        with self._held_lock:
            held = self._held.get(request.spec.device.id)
        if held is None:
            return None
        if not held.lend():
            if held.is_over and held.ended.wait(END_S):
                return None
            return Refused(reason=f"another run of yours uses {held.child.device}")
        if held.child.spec == request.spec and held.digests == request.digests:
            return held
        self._end(held, "a run needs other models or settings")
        return None

    def _start(self, request: Borrow) -> HeldWorker | Refused:
        """Start a worker that a run has asked for, and return it, or why it cannot be started."""
        spec = request.spec
        requests = None
        try:
            if spec.device.kind == "cuda":
                requests = DeviceRequests(spec.device.local)
            child = self._starter.submit(self._workers.start, spec).result()
        except (VirnucError, OSError, RuntimeError) as error:
            if requests is not None:
                requests.close()
            return Refused(reason=f"{spec.device.id}: {error}")
        assert isinstance(child, HeldChild)
        held = HeldWorker(child, request.digests, requests)
        with self._held_lock:
            self._held[spec.device.id] = held
        threading.Thread(target=self._follow, args=(held,), daemon=True).start()
        return held

    def _follow(self, held: HeldWorker) -> None:
        """Pass on what a worker says until it ends. This is the function of a thread."""
        while True:
            received = held.child.inbox.get()
            if received is None:
                continue
            _, message = received
            if isinstance(message, Closed):
                break
            held.pass_on(message)
        self._end(held, "its process has ended")
        # Another thread may be the one that ends it.
        held.ended.wait()
        # What the worker wrote last may have been read after its last message.
        with suppress(queue.Empty):
            while True:
                received = held.child.inbox.get_nowait()
                if received is not None:
                    held.pass_on(received[1])
        status = held.child.end(0.0)
        held.pass_on(Ended(status=status, last_words=held.child.last_words))
        with held.lock:
            run = held.run
        if run is not None:
            run.close()

    def _pass_tasks(self, held: HeldWorker, run: Messages) -> None:
        """Send the tasks of a run to its worker until the run returns it."""
        while (line := run.receive()) is not None:
            message = Message.of(line)
            if isinstance(message, ShardTask):
                with held.lock:
                    held.n_unanswered += 1
                held.child.send(message)
            elif isinstance(message, End):
                self._end(held, "its run has ended it", message.grace_s)

    def _take_back(self, held: HeldWorker, peer: Peer) -> None:
        """Keep a worker that a run has returned, or end it if the run has left it at work."""
        with held.lock:
            held.run = None
            is_at_work = held.n_unanswered > 0
        if is_at_work:
            self._end(held, "its run has gone while it was at work")
        with held.lock:
            if held.is_over:
                return
            held.returned_s = time.monotonic()
            held.is_lent = False
        self._report(f"{held.child.device} is back from process {peer.pid}")

    def _end(self, held: HeldWorker, reason: str, grace_s: float = 0.0) -> None:
        """End a worker and free its device. A second call does nothing.

        Args:
            held: The worker.
            reason: Why, for the report.
            grace_s: Seconds in which it may finish its shard.
        """
        with held.lock:
            if held.is_over:
                return
            held.is_over = True
        held.child.end(grace_s)
        with self._held_lock:
            if self._held.get(held.child.device) is held:
                del self._held[held.child.device]
        self._workers.forget(held.child)
        if held.requests is not None:
            held.requests.close()
        held.ended.set()
        self._report(f"{held.child.device} is given back: {reason}")

    def _end_all(self) -> None:
        """End all workers, lent or not, at the same time."""
        for process in self._preloaded.values():
            process.end()
        held_workers = self._held_workers()
        with ThreadPoolExecutor(1 + len(held_workers)) as threads:
            for held in held_workers:
                threads.submit(self._end, held, "the server ends")
        self._workers.__exit__()
        self._starter.shutdown()


def _read_request(line: str) -> Borrow | RunCommand | None:
    """Return what a run or a command has asked for; None if this version does not know it."""
    try:
        request = Message.of(line)
    except (ValueError, IndexError):
        return None
    return request if isinstance(request, Borrow | RunCommand) else None
