"""Workers that a running `virnuc serve` lends: how a run gets them, and what both ends say.

A borrowed worker is the same program as a worker that the run starts itself. It receives the same
tasks and writes the same files. Only its messages go over a socket, and it keeps its models in
memory when the run returns it.
"""

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import virnuc_core
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.engine.process import (
    GRACE_S,
    Child,
    Closed,
    End,
    Ended,
    Inbox,
    Message,
    Ready,
    WorkerSpec,
)
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.errors import ConfigError, WeightsError, join_first
from virnuc_core.private_socket import Messages, Peer, connect, socket_folders
from virnuc_core.process_facts import WORKER_VARIABLES
from virnuc_core.runfiles import find_mismatches, version_of

log = logging.getLogger(__name__)

ServeMode = Literal["auto", "off", "require"]
# Seconds to wait until the server answers. It may have to end another worker before.
ANSWER_S: Final = 10.0
# Seconds beyond its grace in which an ended worker must be reported.
END_S: Final = 5.0
# Packages with which a worker computes. They may be updated while the server runs.
PACKAGES: Final = ("torch", "numpy", "h5py", "tokenizers", "safetensors", "triton")
# Files of the program that decide what a worker computes
PROGRAM_FILES: Final = (".py", ".so")
NOT_RUNNING: Final = "it does not run"
HOW_TO_START: Final = "start it with: virnuc serve"
OTHER_VERSION: Final = "the server and the run are of another version of virnuc; start it again"


class Borrow(Message):
    """A run asks for a worker. It is the first message on its connection."""

    identity: dict[str, str]  # see `identity`
    digests: dict[str, str]  # of the models, which the worker must have loaded
    spec: WorkerSpec


class Lent(Message):
    """The server lends a worker. The worker's own messages follow."""

    pid: int  # process id of the worker
    has_loaded: bool  # it was there before


class Refused(Message):
    """The server lends no worker."""

    reason: str


class ErrorText(Message):
    """What a borrowed worker has written to standard error."""

    text: str


def identity() -> dict[str, str]:
    """Return what must be equal for a worker of another process to give the same files.

    These are the program, Python and its packages, the view of the file system, the rights of new
    files, the cores, and the environment variables of `WORKER_VARIABLES`.
    """
    package = Path(virnuc_core.__file__).resolve().parent
    facts = {
        "version": virnuc_core.__version__,
        # A program that was changed keeps its version, but not the state of its files.
        "program": f"{package} {program_state(package)}",
        # Two environments may share the program, and have different packages.
        "Python": f"{sys.prefix} {sys.version}",
        "view of the files": str(Path("/proc/self/ns/mnt").readlink()),
        "root folder": str(Path("/proc/self/root").readlink()),
        "umask": _umask(),
        "groups": str(sorted({os.getegid(), *os.getgroups()})),
        "cores": str(sorted(os.sched_getaffinity(0))),
    }
    for name in PACKAGES:
        facts[name] = version_of(name)
    for name, value in os.environ.items():
        if name.startswith(WORKER_VARIABLES):
            facts[name] = value
    return facts


def program_state(package: Path) -> str:
    """Return a digest that changes if a file of the program is changed, added or removed.

    Args:
        package: The folder of the program. Sizes and times of its files count, not their content.
    """
    lines = []
    for path in package.rglob("*"):
        if path.suffix in PROGRAM_FILES:
            status = path.stat()
            lines.append(f"{path.relative_to(package)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _umask() -> str:
    """Return the rights that new files do not get, in octal, as this process has them set."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("Umask:"):
            return line.partition(":")[2].strip()
    return "unknown"


def refusal_of_identity(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return in what the server and a run differ, in words; an empty text if in nothing."""
    names = find_mismatches(dict(own), dict(other), strict=True)
    return f"it has another {join_first(names)}" if names else ""


class BorrowedChild(Child):
    """A worker that the server lends, as the run sees it.

    If the server or the worker dies, the worker counts as ended, and the pool replaces it.
    """

    def __init__(self, spec: WorkerSpec, inbox: Inbox, connection: Messages, pid: int) -> None:
        """Begin to receive the worker's messages.

        Args:
            spec: What the worker has loaded, or loads now.
            inbox: Gets its messages.
            connection: Leads to the server.
            pid: The number of its process.
        """
        self._set_common_attributes(spec, inbox)
        self.pid = pid
        self._connection = connection
        self._status = -1  # exit status; -1 as long as it is not known
        self._n_unanswered = 0  # tasks that were sent and not answered
        self._is_over = threading.Event()
        self._was_returned = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Return true if the worker has not ended, and has reported no error."""
        return self.failure is None and not self._is_over.is_set()

    def send(self, message: Message) -> None:
        """Send a task to the worker. Other messages are not sent.

        The server has sent the specification already, and `Closed` would end the worker.
        """
        self.last_progress_s = time.monotonic()
        if not isinstance(message, ShardTask):
            return
        self._n_unanswered += 1
        with suppress(OSError):  # the end of the connection comes to the inbox as `Closed`
            self._connection.send(message.line())

    def _read(self) -> None:
        """Receive messages until the connection ends. This is the function of a thread."""
        try:
            while (line := self._connection.receive()) is not None:
                message = Message.of(line)
                if isinstance(message, ErrorText):
                    self.on_stderr(message.text)
                elif isinstance(message, Ended):
                    self._status = message.status
                    self.last_words = message.last_words
                else:
                    self._handle(message)
        finally:
            if self._status == -1 and not self._was_returned:
                self.last_words = "the server that lent it is gone"
            self._connection.release()
            self._is_over.set()
            self._inbox.put((self, Closed()))

    def _handle(self, message: Message) -> None:
        """Pass a message of the worker to the pool."""
        if isinstance(message, Computed):
            self._n_unanswered -= 1
        elif isinstance(message, Ready):
            message = Ready(record=since(message.record, self.started_s))
        self.on_message(message)

    def end(self, grace_s: float = GRACE_S) -> int:
        """Return the worker to the server. If it is at work, or hangs, let the server end it.

        Args:
            grace_s: Seconds in which a worker that is at work may finish its shard.

        Returns:
            The exit status; 0 for a worker that was returned.
        """
        with self._end_lock:
            is_idle = self._n_unanswered == 0 and self.is_running and not self.is_silent
            if is_idle:
                self._was_returned = True
                self._status = 0
            elif not self._is_over.is_set():
                with suppress(OSError):
                    self._connection.send(End(grace_s=grace_s).line())
                self._is_over.wait(grace_s + END_S)
            # If the worker still has tasks, the server kills it now.
            self._connection.close()
            self._reader.join(END_S)
            self._forget()
        return self._status


def since(record: Mapping[str, Any], borrowed_s: float) -> dict[str, Any]:
    """Return what a worker reported about its start, as it was for the run that has borrowed it.

    What came before the run took no time of it.

    Args:
        record: What the worker reported when it was ready; see `Worker.run`.
        borrowed_s: When the run borrowed it, `time.monotonic()`.
    """
    started_s = record["started_s"]
    ready_s = started_s + record["ready_s"] + record["waited_s"]
    loaded_s = started_s + record["load_s"]
    imported_s = started_s + record["import_s"]
    began_s = max(started_s, borrowed_s)
    total_s = max(0.0, ready_s - began_s)
    # It waited at the end, with the models loaded.
    waited_s = min(record["waited_s"], total_s)
    return {
        **record,
        "started_s": began_s,
        "import_s": max(0.0, imported_s - began_s),
        "load_s": max(0.0, loaded_s - began_s),
        "ready_s": total_s - waited_s,
        "waited_s": waited_s,
        "borrowed": True,
    }


class Borrower:
    """Borrows workers for the runs of this process, as long as a server lends some."""

    def __init__(self, mode: ServeMode) -> None:
        """Note whether the user insists on borrowed workers. No server is asked yet.

        Args:
            mode: `auto`: a run starts its own workers if none are lent. `require`: that is an
                error.
        """
        self._mode = mode
        self._has_borrowed = False
        self._has_given_up = False

    def __call__(self, spec: WorkerSpec, inbox: Inbox) -> Child | None:
        """Return a borrowed worker for a specification; None if the run is to start its own.

        If a server runs and lends none, one line of the log says why, and it is not asked again.

        Raises:
            ConfigError: The user wants borrowed workers only, and there are none.
        """
        if self._has_given_up:
            return None
        try:
            server = self._find_server()
            if server is not None:
                connection, _ = server
                answer = ask(connection, spec)
                if isinstance(answer, Lent):
                    self._has_borrowed = True
                    return BorrowedChild(spec, inbox, connection, answer.pid)
                connection.release()
                reason = answer.reason
            elif self._has_borrowed:
                reason = "it has ended"
            else:
                reason = NOT_RUNNING
        except WeightsError:
            return None  # the run's own checks name the fault
        except ConfigError as error:
            reason = str(error)
        if self._mode == "require":
            raise ConfigError(f"virnuc serve lends no worker: {reason}; {HOW_TO_START}")
        if reason != NOT_RUNNING:  # most users have no server, and need not hear of one
            log.warning("virnuc serve lends no worker, and the run starts its own: %s", reason)
        self._has_given_up = True
        return None

    def _find_server(self) -> tuple[Messages, Peer] | None:
        """Return a connection to the user's server; None if none runs."""
        for folder in socket_folders():
            server = connect(folder)
            if server is not None:
                return server
        return None


def ask(connection: Messages, spec: WorkerSpec) -> Lent | Refused:
    """Ask the server for a worker.

    Args:
        connection: A new connection to the server.
        spec: What the worker must have loaded.

    Returns:
        Its answer. A server that gives none, or one that cannot be read, counts as one that
        refuses.
    """
    digests = fingerprint(Path(spec.models), spec.engine.precision)
    request = Borrow(identity=identity(), digests=digests, spec=spec)
    try:
        connection.send(request.line())
        line = connection.receive(ANSWER_S)
    except OSError:
        line = None
    if line is None:
        return Refused(reason="it does not answer")
    with suppress(ValueError, IndexError):  # no message that this version knows
        answer = Message.of(line)
        if isinstance(answer, Lent | Refused):
            return answer
    return Refused(reason=OTHER_VERSION)
