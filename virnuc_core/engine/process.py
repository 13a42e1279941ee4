"""Child processes that talk in JSON lines and never outlive their parent.

A child is started in its own session, so that a terminal's Ctrl-C reaches the parent alone, which then ends the child
in order. Two nets catch a parent that could not: the kernel's parent-death signal, and the closed standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import WorkerError

PR_SET_PDEATHSIG: Final = 1
END_OF_OUTPUT: Final = {"event": "closed"}
STDERR_TAIL_BYTES: Final = 8_192

_children: set[Child] = set()
_children_lock = threading.Lock()
_generation = 0  # raised when all children are ended: who started before that may start no more


def generation() -> int:
    """A number to keep when work begins and to give to `spawn`: children of an ended generation are refused."""
    return _generation


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
    born: int,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start `python -m module` and send `spec` as its first line.

    Its standard error goes to the file `log`. The calling thread must live as long as the child: the kernel sends the
    parent-death signal when the thread that started a process ends. Errors: `WorkerError` when `end_all_children` has
    been called since `born = generation()`.
    """
    if born != _generation:
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
    global _generation  # one per process, like the children themselves
    with _children_lock:
        _generation += 1
        living = list(_children)
    end_children(living, grace_s)
    return len(living)


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


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; leave at once if `parent` already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
