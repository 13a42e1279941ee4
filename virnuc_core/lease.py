"""Leases: which process may write in a directory, also across machines that share a file system.

A lease is a file `NAME.N`. A process takes it by creating the file, which every file system grants
to one process only, and writes it anew every few seconds (the heartbeat).

A process that finds a lease file asks the system whether the owner of the lease still lives. If
the owner runs on another machine, the process watches whether the file still changes, and measures
the time with its own clock. To take over, it creates `NAME.N+1`. If any other lease file has
changed in the meantime, it removes its file and starts again. Otherwise it removes the older files.

So two processes never take over together, and the clocks of two machines are never compared. flock
is not used, because on many network file systems it works within one machine only.

An owner that was stopped for a long time checks the lease before it writes, and then sees that
another process has taken over.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core import safe_files
from virnuc_core.errors import ConfigError, UnsafeFileError
from virnuc_core.safe_files import create_file, open_to_update, open_to_write, read_file
from virnuc_core.system_errors import path_exists, read_with_retries

HEARTBEAT_S: Final = 5.0
# A network file system may show an old version of a file for up to 60 s with common mount options.
EXPIRY_S: Final = 90.0
POLL_S: Final = 0.1
WARN_AFTER_S: Final = 1.0  # a process that waits longer logs what it waits for
_leases: dict[Path, "Lease"] = {}  # the leases of this process, by the path that each protects
log = logging.getLogger(__name__)


@contextmanager
def lease(name: Path, covers: Path, *, wait: bool = False) -> Iterator[str]:
    """Hold a lease while the `with` block lasts.

    Args:
        name: Path of the lease files, without the number at the end.
        covers: The directory or file that is written while the lease is held.
        wait: Wait until the lease is free.

    Yields:
        An empty string if this process has the lease, else a description of its owner.

    Raises:
        OSError: The lease files cannot be read or written.
    """
    new_lease = Lease(name)
    owner = new_lease.take(wait=wait)
    if owner:
        yield owner
        return
    covered_path = covers.resolve()
    _leases[covered_path] = new_lease
    heartbeat = threading.Thread(target=new_lease.beat, daemon=True, name=f"lease of {name.name}")
    heartbeat.start()
    try:
        yield ""
    finally:
        new_lease.ended.set()
        # A network file system that does not answer may block the thread, so do not wait longer.
        heartbeat.join(HEARTBEAT_S)
        _leases.pop(covered_path, None)
        new_lease.release()


def require_lease(path: Path, *, reread: bool = True) -> None:
    """Raise an error if this process has lost the lease that covers a path.

    Args:
        path: A file or folder inside the covered directory.
        reread: Read the lease files again. If false, use the state that was last read.

    Raises:
        ConfigError: Another process has taken over, the lease was removed, or the whole directory
            was renamed or removed.
        UnreadableError: The system cannot read the lease files, so that it is not known.
    """
    for covered_root, own_lease in list(_leases.items()):
        # If the working directory was renamed, a relative path leads elsewhere now. It must be
        # compared as it was when the lease was taken.
        path_then = own_lease.working_directory / path
        real_path = path_then.parent.resolve() / path.name
        if not real_path.is_relative_to(covered_root):
            continue
        is_held = own_lease.is_ours
        if reread:
            is_held = read_with_retries(covered_root, own_lease.check_held)
        if is_held:
            continue
        if own_lease.folder_has_gone:
            raise directory_gone_error(own_lease.folder)
        reason = "its lease was removed, or another directory has its name now"
        if own_lease.owner:
            reason = (
                f"{own_lease.owner} is working here now, "
                f"for this run was held up for over {EXPIRY_S:.0f} s"
            )
        raise ConfigError(f"{covered_root}: {reason}; it writes no more here")


def directory_gone_error(root: Path) -> ConfigError:
    """Return the error for a directory that was renamed or removed while a run computed in it.

    Args:
        root: The directory, by its former name.
    """
    return ConfigError(
        f"{root}: this directory has gone, it was renamed or removed during the run. Nothing more "
        "is written. Give the directory this name again, or run again with its new name: what was "
        "committed stays in it"
    )


def require_directory(root: Path) -> None:
    """Raise an error if a directory in which a run computes was renamed or removed.

    Worker processes call this, because only the main process of a run holds the lease.

    Args:
        root: The directory.

    Raises:
        ConfigError: There is no such directory.
        UnreadableError: It is not known, for example because the file server does not answer.
    """
    if not path_exists(root):
        raise directory_gone_error(root)


def _working_directory() -> Path:
    """Return the working directory of this process, or "/" if that was removed."""
    with suppress(FileNotFoundError):
        return Path.cwd()
    return Path("/")


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, if they are not there.

    Inside a directory that this process holds, nothing is made if the lease is lost. So a
    directory that was renamed or removed during the run does not appear again.

    Args:
        folder: The folder.

    Raises:
        ConfigError: The lease that covers the folder is lost.
        UnsafeFileError: The folder, or one that contains it, is a link in our output directory.
        OSError: The folder cannot be made.
    """
    require_lease(folder)
    safe_files.make_folder(folder)


def process_namespace() -> str:
    """Return an id of the namespace in which process numbers of this process are valid.

    It consists of the id of this boot of the machine and the id of the PID namespace.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    pid_namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot_id}:{pid_namespace}"


def process_start_ticks(pid: int) -> str:
    """Return when a process began, in clock ticks since this machine was booted.

    Args:
        pid: The number of the process.

    Returns:
        The ticks as text; an empty string for a process that has ended.

    Raises:
        OSError: There is no such process, or /proc hides it.
    """
    # The name of the program is in parentheses and may contain spaces. After it, the state is the
    # first field and the start time the 20th (see proc(5)).
    # A program may give itself a name that is not text, so read bytes.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    state = fields[0]
    if state in "ZX":  # zombie or dead
        return ""
    return fields[19]


def is_alive(pid: int, start_ticks: str) -> bool | None:
    """Return whether the process with this number and start time is still running.

    Process numbers are used again, so the start time is compared, too.

    Args:
        pid: The number of the process.
        start_ticks: When it began, as `process_start_ticks` returns it.

    Returns:
        True or false, or None if the system does not say.
    """
    try:
        return process_start_ticks(pid) == start_ticks
    except OSError:
        # /proc may hide the processes of other users. Signal 0 only checks whether there is a
        # process with this number.
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return None  # some process has this number, perhaps another one than before


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that wrote a lease."""

    description: str
    is_alive: bool | None  # None: unknown, so its heartbeat must be watched


NO_OWNER: Final = Owner("", is_alive=False)


class _FileWatch:
    """Observes lease files, to find out whether an owner on another machine is still running.

    An owner that runs changes its lease file every `HEARTBEAT_S`.
    """

    def __init__(self) -> None:
        """Begin without an observation."""
        self._contents: dict[int, bytes] = {}  # of the lease files at the last look, by number
        self._unchanged_since_s = 0.0  # when they were first seen as they are (`time.monotonic`)
        self._is_announced = False  # the user was told that this process is waiting

    def owner_lives(self, contents: dict[int, bytes]) -> bool | None:
        """Compare the lease files with those of the last call, and conclude whether the owner runs.

        Args:
            contents: The contents of the lease files now, by number.

        Returns:
            True if a file has changed, false if none has for `EXPIRY_S`, otherwise None.
        """
        now_s = time.monotonic()
        if contents == self._contents:
            return False if now_s - self._unchanged_since_s > EXPIRY_S else None
        is_first_look = not self._contents
        self._contents = contents
        self._unchanged_since_s = now_s
        self._is_announced = False
        return None if is_first_look else True

    def announce_wait(self, name: Path, owner: Owner) -> None:
        """Log once that this process is waiting, if no file has changed for `WARN_AFTER_S`."""
        unchanged_s = time.monotonic() - self._unchanged_since_s
        if self._is_announced or unchanged_s <= WARN_AFTER_S:
            return
        self._is_announced = True
        log.warning(
            "%s: %s worked here; up to %.0f s to see if it still does",
            name,
            owner.description,
            EXPIRY_S,
        )


class Lease:
    """A lease that this process wants or holds."""

    def __init__(self, name: Path) -> None:
        """Prepare a lease; `take` takes it.

        Args:
            name: Path of the lease files, without the number at the end.
        """
        self.is_ours = True  # false as soon as this process finds that it has lost the lease
        self.owner = ""  # description of the owner, if that is another process
        self.folder_has_gone = False  # the folder of the lease files was renamed or removed
        self.ended = threading.Event()
        self.working_directory = _working_directory()
        self._name = self.working_directory / name
        self._number = 0  # of the lease file that this process has created; 0: none yet
        self._n_beats = 0  # how often this process has written its lease file
        self._token = secrets.token_hex(8)  # by which this process recognises its own lease file
        self._host = socket.gethostname()
        self._namespace = process_namespace()
        self._start_ticks = process_start_ticks(os.getpid())

    @property
    def folder(self) -> Path:
        """The folder of the lease files. For a run, this is the run directory."""
        return self._name.parent

    def _path(self, number: int) -> Path:
        """Return the path of the lease file with this number."""
        return self._name.with_name(f"{self._name.name}.{number}")

    def _lease_files(self) -> dict[int, bytes]:
        """Return the contents of all lease files of this name, by number.

        The files are opened again in each call. Opening makes a network file system ask its server
        for the current content.
        """
        contents = {}
        try:
            paths = list(self._name.parent.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        for path in paths:
            # `path.stem` and `path.suffix` take longer, and each file that a run writes asks this.
            lease_name, _, number = path.name.rpartition(".")
            if lease_name == self._name.name and number.isdecimal():
                with suppress(FileNotFoundError):  # its owner has just removed it
                    contents[int(number)] = read_file(path)
        return contents

    def _describe_owner(self, content: bytes) -> Owner:
        """Return the owner that a lease file names, and whether that process is still running.

        Args:
            content: The content of the file, written by `_content` of the owner. It is empty or
                incomplete while the owner writes it.
        """
        try:
            _token, pid, start_ticks, host, namespace, _n_beats = json.loads(content)
            # Elsewhere, the number of the process means nothing here.
            if namespace == self._namespace:
                return Owner(f"process {pid}", is_alive(int(pid), start_ticks))
        except (ValueError, TypeError):  # the owner has not finished writing the file
            return Owner("another process", is_alive=None)
        return Owner(f"process {pid} on {host}", is_alive=None)

    def take(self, *, wait: bool = False) -> str:
        """Take the lease, or find out who owns it.

        An owner on another machine is watched. If a lease file changes, the owner lives. If none
        changes for `EXPIRY_S`, the owner is dead, and this process takes over.

        Args:
            wait: Wait until the owner has released the lease or is dead.

        Returns:
            An empty string if this process has the lease now, otherwise a description of its
            owner.
        """
        watch = _FileWatch()
        while True:
            make_folder(self._name.parent)
            files = read_with_retries(self._name.parent, self._lease_files)
            newest = max(files, default=0)
            owner = self._describe_owner(files[newest]) if files else NO_OWNER

            # If the system does not say whether the owner is running, changes of its files do.
            lives_by_files = watch.owner_lives(files)
            owner_lives = lives_by_files if owner.is_alive is None else owner.is_alive
            if owner_lives is None:
                watch.announce_wait(self._name, owner)
            elif owner_lives and not wait:
                return owner.description
            elif not owner_lives and self._create(newest + 1, files):
                return ""
            # The owner is running, its life is not known yet, or another process was faster.
            time.sleep(POLL_S)

    def _create(self, number: int, expected_files: dict[int, bytes]) -> bool:
        """Create the lease file with this number, and remove the older lease files.

        Args:
            number: Number of the new file, one more than that of the newest file.
            expected_files: The lease files from which the caller concluded that the owner is dead,
                by number. If they have changed, the new file is removed again.

        Returns:
            True if this process has the lease now.
        """
        path = self._path(number)
        try:
            create_file(path, b"")
        except (FileExistsError, FileNotFoundError):
            return False  # another process was faster, or has removed the folder
        self._number = number
        is_unchanged = False
        try:
            with open_to_write(path) as file:
                file.write(self._content())
            others = self._lease_files()
            others.pop(number, None)
            is_unchanged = others == expected_files
        finally:
            if not is_unchanged:
                path.unlink(missing_ok=True)
        if is_unchanged:
            for old_number, content in self._lease_files().items():
                # A file that another process created in the meantime has another content.
                if expected_files.get(old_number) == content:
                    self._path(old_number).unlink(missing_ok=True)
        return is_unchanged

    def _content(self) -> bytes:
        """Return the next content of the lease file. Each call returns another content."""
        self._n_beats += 1
        fields = [
            self._token,
            os.getpid(),
            self._start_ticks,
            self._host,
            self._namespace,
            self._n_beats,
        ]
        return json.dumps(fields).encode()

    def check_held(self) -> bool:
        """Read the lease files and return whether this process still has the lease.

        It has the lease if its file exists and is the one with the highest number. If not, `owner`
        is set to a description of the process that has taken over, and `folder_has_gone` says if
        the whole folder was renamed or removed.

        Raises:
            OSError: The lease files cannot be read.
        """
        files = self._lease_files()  # contents by number
        newest = max(files, default=0)
        # The content is compared as well: another process may have made a file of this number.
        is_newest = newest == self._number and self._token.encode() in files.get(newest, b"")
        if self.is_ours and not is_newest:
            # `exists` may raise an error. `is_ours` must then still be true, so that the next call
            # gets here again. So it becomes false only after this line.
            self.folder_has_gone = not files and not self.folder.exists()
            self.is_ours = False
            if files:
                self.owner = self._describe_owner(files[newest]).description
        return self.is_ours

    def beat(self) -> None:
        """Write the lease file again every `HEARTBEAT_S` until the lease is released or lost.

        This runs in a thread.
        """
        while not self.ended.wait(HEARTBEAT_S) and self.is_ours:
            # While the file system does not answer, another process may take over. The next check
            # finds that.
            with suppress(OSError, UnsafeFileError):
                self._write_heartbeat()
                # A process that takes over first creates its file, and then checks whether ours
                # has changed. Because we write before we check, one of the two sees the other.
                self.check_held()

    def _write_heartbeat(self) -> None:
        """Change the content of the lease file, if the file is still ours."""
        path = self._path(self._number)
        with suppress(FileNotFoundError), open_to_update(path) as file:
            if self._token.encode() in file.read():
                file.seek(0)
                file.write(self._content())

    def release(self) -> None:
        """Remove the lease file if this process still has the lease."""
        with suppress(OSError):
            if self.check_held():
                self._path(self._number).unlink()
