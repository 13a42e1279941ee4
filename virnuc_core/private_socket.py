"""A Unix socket that one user alone can reach: its folder, its two ends, and its messages.

The socket lies in a folder that belongs to the user and is closed to everyone else. Both ends also
ask the kernel who the other end is. Each message is a text with its length before it.
"""

import errno
import fcntl
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from virnuc_core.errors import ConfigError, UnsafeFileError, VirnucError

SOCKET: Final = "serve.sock"
LOCK: Final = "serve.lock"
# A message is the line of a worker. The largest one has the scores of a shard as text.
MAX_MESSAGE_BYTES: Final = 1 << 28
CONNECT_S: Final = 2.0  # a server that does not accept in this time counts as gone
SEND_S: Final = 60.0  # an end that takes nothing for this long counts as gone
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class InUseError(ConfigError):
    """Another process of this user listens at the socket."""


def socket_folders() -> list[Path]:
    """Return the folders in which a user's socket may lie, the best one first.

    The first one is on this machine and is emptied when the user logs out. A process without a
    login, such as one of cron, may know only the second one.
    """
    folders = []
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and _is_own_folder(runtime):
        folders.append(runtime / "virnuc")
    with suppress(RuntimeError):  # the user has no home directory
        # Several machines may share the home directory, and a socket works on one only.
        folders.append(Path("~/.cache/virnuc").expanduser() / f"serve-{os.uname().nodename}")
    return folders


def _is_own_folder(path: Path) -> bool:
    """Return true if this is a folder of this user.

    After `su` or `sudo`, XDG_RUNTIME_DIR may still name the folder of the user before. What root
    made there would be in that user's way.
    """
    try:
        status = path.stat()
    except OSError:
        return False  # it is not there, or this user may not look at it
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def open_private_folder(folder: Path) -> int:
    """Open a folder that nobody but this user can enter.

    Returns:
        A handle. It leads to the checked folder even if somebody gives its name to another one.

    Raises:
        UnsafeFileError: It is a link or no folder, belongs to another user, or is open for others.
        OSError: There is no such folder, or it cannot be opened.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafeFileError(f"{folder}: is a link or no folder; remove it") from error
        raise
    status = os.fstat(handle)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"is open for other users; close it with: chmod 700 {folder}"
    if problem:
        os.close(handle)
        raise UnsafeFileError(f"{folder}: {problem}")
    return handle


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, as the kernel knows it."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return who made or accepted a connection."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(answer)
    return Peer(pid, uid)


class PrivateListener:
    """The listening end of a user's socket. Only one process of a user has it at a time.

    Attributes:
        socket: Accepts connections. The caller must check who connects, with `accept_own`.
        path: Where the socket lies.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is missing, and listen in it.

        A socket that a killed server of this user has left is replaced.

        Args:
            folder: The folder of the socket.

        Raises:
            InUseError: Another process of this user listens there.
            UnsafeFileError: The folder is not private, or something else has the socket's name.
            OSError: The system refuses something.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        self.path = folder / SOCKET
        with ExitStack() as handles:
            self._folder = open_private_folder(folder)
            handles.callback(os.close, self._folder)
            # The system drops the lock when the process ends, however it ends. So whoever has it
            # knows that a socket which is still there is not in use.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.open(LOCK, flags, 0o600, dir_fd=self._folder)
            handles.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(f"{self.path}: another server of yours is running") from None
            self._remove_stale_socket()
            self.socket = handles.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self.socket.bind(_short_path(self._folder))
            self.socket.listen(16)
            self._handles = handles.pop_all()

    def _remove_stale_socket(self) -> None:
        """Remove the socket of a server that is gone.

        Raises:
            UnsafeFileError: It is no socket, or not of this user.
        """
        with suppress(FileNotFoundError):
            status = os.stat(SOCKET, dir_fd=self._folder, follow_symlinks=False)
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
                raise UnsafeFileError(f"{self.path}: is not a socket of yours; remove it")
            os.unlink(SOCKET, dir_fd=self._folder)

    def accept_own(self, timeout_s: float) -> tuple["Messages", Peer] | None:
        """Wait for a connection of this user. Connections of other users are closed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            The connection and who made it; None if nobody of this user connects in time.
        """
        readable, _, _ = select.select([self.socket], [], [], timeout_s)
        if not readable:
            return None
        try:
            connection, _ = self.socket.accept()
        except OSError:  # the other end has given up, or there is no handle left
            return None
        peer = peer_of(connection)
        if peer.uid != os.geteuid():
            connection.close()
            return None
        return Messages(connection), peer

    def close(self) -> None:
        """Listen no longer, and remove the socket."""
        with self._handles, suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(folder: Path) -> tuple["Messages", Peer] | None:
    """Connect to the socket in a folder.

    Returns:
        The connection and the process that listens; None if nobody listens there.

    Raises:
        UnsafeFileError: The folder is not private, or a process of another user listens.
        ConfigError: The system refuses something else.
    """
    try:
        handle = open_private_folder(folder)
    except OSError as error:
        if not os.path.lexists(folder):
            return None  # it is not there, or this user may not look at it
        raise _refused(folder, error) from error
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        connection.connect(_short_path(handle))
        peer = peer_of(connection)
        if peer.uid != os.geteuid():
            raise UnsafeFileError(f"{folder / SOCKET}: a process of another user listens there")
    except (FileNotFoundError, ConnectionError, TimeoutError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise _refused(folder / SOCKET, error) from error
    except VirnucError:
        connection.close()
        raise
    finally:
        os.close(handle)
    return Messages(connection), peer


def _refused(path: Path, error: OSError) -> ConfigError:
    """Return the error for a socket or its folder to which the system gives no access."""
    # Every command imports this module first, and few need the words for an error.
    from virnuc_core.system_errors import describe_system_error

    return ConfigError(f"{path}: {describe_system_error(error)}")


def _short_path(folder: int) -> str:
    """Return the path of the socket in an open folder.

    The address of a socket has at most 107 bytes, and the name of the folder may be longer.
    """
    return f"/proc/self/fd/{folder}/{SOCKET}"


def frame(text: str) -> bytes:
    """Return a text as it is sent: its length in bytes, and the text."""
    content = text.encode("utf-8", "backslashreplace")
    return _LENGTH.pack(len(content)) + content


class Messages:
    """A connection over which texts are sent and received."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connection.

        Args:
            connection: The connection.
        """
        connection.setblocking(True)
        # A time limit for sending only. Reading waits for as long as the other end lives.
        limit = struct.pack("ll", int(SEND_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = connection
        self._send_lock = threading.Lock()

    def send(self, text: str) -> None:
        """Send one text. Any thread may call this.

        Raises:
            OSError: The connection is closed, or the other end takes nothing any more.
        """
        content = frame(text)
        with self._send_lock:
            try:
                self._connection.sendall(content)
            except OSError:
                # A part may have been sent, after which the other end would misread the next one.
                self.close()
                raise

    def send_handles(self, text: str, handles: Sequence[int]) -> None:
        """Send one text, and with it copies of open handles.

        Args:
            text: The text.
            handles: Numbers of the handles. They stay open here.

        Raises:
            OSError: The connection is closed.
        """
        content = frame(text)
        with self._send_lock:
            # The handles go with the length. The other end receives both with one call.
            socket.send_fds(self._connection, [content[: _LENGTH.size]], handles)
            self._connection.sendall(content[_LENGTH.size :])

    def receive_with_handles(self, n_handles: int) -> tuple[str | None, list[int]]:
        """Wait for the next text, and for the handles that come with it.

        Args:
            n_handles: The greatest number of handles. More are closed by the system.

        Returns:
            The text, or None if the connection has ended; and the new handles, which are not
            inherited by other programs.

        Raises:
            OSError: The connection is closed.
        """
        header, handles, _, _ = socket.recv_fds(
            self._connection, _LENGTH.size, n_handles, socket.MSG_CMSG_CLOEXEC
        )
        return self._receive_content(header), handles

    def receive(self, timeout_s: float | None = None) -> str | None:
        """Wait for the next text.

        Args:
            timeout_s: Seconds to wait for it to begin. None waits without a limit.

        Returns:
            The text; None if the connection has ended, or if no text comes in time.
        """
        if timeout_s is not None:
            with suppress(OSError, ValueError):
                readable, _, _ = select.select([self._connection], [], [], timeout_s)
                if not readable:
                    return None
        return self._receive_content(self._receive_exactly(_LENGTH.size))

    def _receive_content(self, header: bytes | None) -> str | None:
        """Return the text that follows its length; None if the connection has ended.

        Args:
            header: The length, as it was received. None if it was not.
        """
        if header is None or len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:  # it is not one of ours
            self.close()
            return None
        content = self._receive_exactly(length)
        return None if content is None else content.decode("utf-8", "replace")

    def _receive_exactly(self, n_bytes: int) -> bytes | None:
        """Return the next bytes; None if the connection ends before they have come."""
        pieces = []
        while n_bytes:
            try:
                piece = self._connection.recv(min(n_bytes, 1 << 20))
            except OSError:
                return None
            if not piece:
                return None
            pieces.append(piece)
            n_bytes -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """End the connection. A thread that waits in `receive` gets None."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """Return the handle of the connection, to wait for it."""
        return self._connection.fileno()

    def detach(self) -> int:
        """Give the handle of the connection to the caller. Nothing can be sent here afterwards."""
        return self._connection.detach()

    def release(self) -> None:
        """Free the handle of the connection. Only its reader may do so, when it reads no more."""
        self.close()
        self._connection.close()
