"""Child processes that talk in JSON lines and never outlive their parent.

A child is started in its own session, so that a terminal's Ctrl-C reaches the parent alone, which then ends the child
in order. Two nets catch a parent that could not: the kernel's parent-death signal, and the closed standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from virnuc_core.engine.messages import WorkerSpec
from virnuc_core.errors import WorkerError
from virnuc_core.rundir import die_with_parent

END_OF_OUTPUT: Final = {"event": "closed"}
STDERR_TAIL_BYTES: Final = 8_192
PREFIX: Final = "virnuc-prewarm-"  # of folders with the logs of workers that have no run yet

_children: set[Child] = set()
_children_lock = threading.Lock()
_token = threading.Event()  # set when all children are ended; then another takes its place


def cancel_token() -> threading.Event:
    """What to keep when work begins and to give to `spawn`, which starts nothing once it is set."""
    return _token


class Child:
    """A running child: `send` a message to it; its messages arrive in `inbox` as `(child, message)`.

    The last message of a child is `{"event": "closed"}`, sent once its standard output has ended.
    """

    def __init__(self, process: subprocess.Popen[str], name: str, inbox: queue.Queue[Any], log: Path) -> None:
        self.process, self.name, self.inbox, self.log = process, name, inbox, log
        self.earlier_log: Path | None = None  # where it wrote before it wrote to `log`
        self._reader = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: Mapping[str, Any]) -> bool:
        """Write one message; False when the child is no longer reading."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError, OSError):
            return False
        return True

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError), self.process.stdout:
            for line in self.process.stdout:
                try:
                    message = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line cut off by a killed child
                self.inbox.put((self, message))
        self.inbox.put((self, END_OF_OUTPUT))

    def end(self, grace_s: float = 6.0) -> int:
        """SIGTERM, which lets a worker finish the shard at hand, then SIGKILL to the whole session; the exit status."""
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
        """The end of what it wrote to standard error."""
        said = (_tail(path) for path in (self.earlier_log, self.log) if path is not None and path.is_file())
        return "\n".join(filter(None, said))


def _tail(path: Path) -> str:
    """The last lines of a log, without the space around them."""
    with path.open("rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(0, handle.tell() - STDERR_TAIL_BYTES))
        return handle.read().decode("utf-8", "replace").strip()


def spawn(
    module: str,
    spec: Mapping[str, Any],
    *,
    name: str,
    inbox: queue.Queue[Any],
    log: Path,
    token: threading.Event,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start `python -m module` and send `spec` as its first line.

    Its standard error goes to the file `log`. The calling thread must live as long as the child: the kernel sends the
    parent-death signal when the thread that started a process ends. Errors: `WorkerError` when `end_all_children` has
    been called since `token = cancel_token()`.
    """
    if token.is_set():
        raise WorkerError("the run was interrupted; what was committed stays, run again to go on")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        process = subprocess.Popen(
            # -P: no module of the folder people stand in
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    child = Child(process, name, inbox, log)
    with _children_lock:
        _children.add(child)
    child.send(spec)
    return child


def end_children(children: Iterable[Child], grace_s: float = 6.0) -> None:
    """End several at once, so that the slowest sets the time."""
    threads = [threading.Thread(target=child.end, args=(grace_s,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end_all_children(grace_s: float = 6.0) -> int:
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


def start_worker(spec: WorkerSpec, inbox: queue.Queue[Any], log: Path, token: threading.Event) -> Child:
    """A worker process on its device, loading; what it writes to standard error goes to `log`. Raises as `spawn`."""
    return spawn(
        "virnuc_core.engine.worker",
        spec.to_json(),
        name=spec.device.id,
        inbox=inbox,
        log=log,
        token=token,
        environment=spec.device.environment(),
    )


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


class PrewarmedWorkers:
    """Workers that wait for a job. A pool takes those it can use; `close` ends the others.

    Until then they write to a folder of their own: the run's directory may come to nothing, and is not touched. The
    thread that makes these must live as long as its workers do (see `spawn`).
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self.inbox: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._waiting: list[tuple[WorkerSpec, Child]] = []
        self._taken: list[Child] = []
        token = cancel_token()
        try:
            for place, spec in enumerate(specs):
                self._waiting.append((spec, start_worker(spec, self.inbox, self._folder / f"{place}.log", token)))
        except BaseException:
            self.close()
            raise

    def take(self, spec: WorkerSpec, log: Path) -> Child | None:
        """The living worker that was started with exactly this; None when there is none, or it was taken before.

        From its job on it writes to `log`.
        """
        for place, (started_with, child) in enumerate(self._waiting):
            if started_with == spec and child.process.poll() is None:
                del self._waiting[place]
                self._taken.append(child)
                child.earlier_log, child.log = child.log, log
                return child
        return None

    def close(self) -> None:
        """End the workers that nobody took. What the others wrote before their job is put to the end of their logs."""
        end_children([child for _, child in self._waiting])
        self._waiting.clear()
        for child in self._taken:
            if child.earlier_log is not None and child.log.is_file():
                with child.log.open("ab") as log:
                    log.write(child.earlier_log.read_bytes())
            child.earlier_log = None
        self._taken.clear()
        shutil.rmtree(self._folder, ignore_errors=True)  # of logs only; what remains does no harm


class Parent:
    """The child's side: messages from the parent, and a clean standard output for messages to it."""

    def __init__(self) -> None:
        die_with_parent(int(sys.argv[1]))
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)  # a library's print must not garble the messages
        self._lock = threading.Lock()
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        first = sys.stdin.readline()
        if not first:
            raise SystemExit(0)
        self.spec: dict[str, Any] = json.loads(first)

    def listen(self, on_end: Callable[[], None] | None = None) -> None:
        """Read messages in a thread; a closed input calls `on_end` and then ends the process at once."""
        threading.Thread(target=self._listen, args=(on_end,), name="parent's messages", daemon=True).start()

    def _listen(self, on_end: Callable[[], None] | None) -> None:
        for line in sys.stdin:
            self.messages.put(json.loads(line))
        if on_end is not None:
            on_end()
        os._exit(0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the parent; a parent that is gone ends this process."""
        try:
            with self._lock:
                self._out.write(json.dumps(message) + "\n")
                self._out.flush()
        except (BrokenPipeError, OSError):
            os._exit(1)

    def beat(self, every_s: float, progress: Callable[[], float]) -> None:
        """Say every `every_s` seconds when there was last progress (`time.monotonic()`)."""

        def run() -> None:
            while True:
                time.sleep(every_s)
                self.send({"event": "alive", "progress_s": progress()})

        threading.Thread(target=run, name="heartbeat", daemon=True).start()
