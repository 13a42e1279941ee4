"""Other users of this machine: a plain one whose commands are played, and one who attacks.

Each has a user id that nobody else has. A plain user gets a view of this machine in which Python can
be read.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from .scene import ROOT, NotRunError

FIRST_UID: Final = 20_000  # user ids are looked for from here on
LAST_UID: Final = 60_000
PROGRAM: Final = Path(__file__).with_name("intruder.py")
ANSWERS_WITHIN_S: Final = 180.0
CLONE_NEWNS: Final = 0x00020000  # a namespace of mounts


@dataclass(frozen=True, slots=True)
class Account:
    """A user id, and the process whose view of the file system its commands have, if not ours."""

    uid: int
    holder: int | None = None

    def enter(self) -> None:
        """Make the calling process one of this user; called in a child before it is the command."""
        if self.holder is not None:
            enter_mounts(self.holder)
        os.setgroups([])
        os.setgid(self.uid)
        os.setuid(self.uid)

    def own_folder(self, folder: Path) -> dict[str, str]:
        """Give a folder to this user; return the variables that make it the home of a command."""
        home = folder / "home"
        home.mkdir(exist_ok=True)
        for path in (folder, home):
            os.chown(path, self.uid, -1)
        return {"HOME": str(home)}


class Intruder:
    """The process of another user, to whom orders are given."""

    def __init__(self, *extras: str, avoided: int | None = None) -> None:
        """Start it under a user id that nobody has.

        Args:
            extras: Further words of its command line.
            avoided: The user id of the plain user, of whom there may be no process at the moment.

        Raises:
            NotRunError: Only root can start a process of another user.
        """
        if os.geteuid() != 0:
            raise NotRunError("only root can act as a second user")
        self.uid = unused_uid(avoided)
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), str(self.uid), *extras],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == self.uid

    def answer(self) -> Any:
        """Return the answer to an order.

        Raises:
            TimeoutError: There is none within `ANSWERS_WITHIN_S`.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWERS_WITHIN_S)[0]:
            raise TimeoutError("the intruder does not answer")
        return json.loads(self.process.stdout.readline())

    def do(self, order: str, **words: Any) -> Any:
        """Give an order, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"order": order, **words}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def unused_uid(avoided: int | None = None) -> int:
    """Return a user id that no account and no process of this machine has.

    Each process looks from another one on, so rounds that are played side by side do not take the
    same.

    Args:
        avoided: A further user id that is taken.
    """
    first = FIRST_UID + (os.getpid() * 37) % (LAST_UID - FIRST_UID)
    taken = {account.pw_uid for account in pwd.getpwall()} | {avoided}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            taken.add(process.uids().real)
    return next(uid for uid in range(first, LAST_UID + 5_000) if uid not in taken)


@contextmanager
def plain_account(scene_folder: Path) -> Iterator[Account]:
    """Yield an account whose processes can read this Python, this source and the scene.

    Where Python lies in a folder that is closed to others, such as /root, the processes get a view
    of the file system in which this folder is open and holds nothing but Python.

    Raises:
        NotRunError: Only root can start processes of another user, and here even root cannot do so.
    """
    if os.geteuid() != 0:
        raise NotRunError("only root can start a command of another user")
    uid = unused_uid()
    needed = [Path(sys.executable), Path(sys.executable).resolve(), Path(sys.base_prefix), ROOT]
    needed += [Path(entry) for entry in sys.path if entry]
    program = _opening_program(needed)
    if not program:
        _require_reach(Account(uid), scene_folder)
        yield Account(uid)
        return
    if shutil.which("unshare") is None:
        raise NotRunError("other users cannot read this Python")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != "ready\n":
                raise NotRunError("other users cannot read this Python")
            account = Account(uid, holder.pid)
            _require_reach(account, scene_folder)
            yield account
        finally:
            holder.kill()


def enter_mounts(holder: int) -> None:
    """Let the calling process see the file systems that another process sees."""
    handle = os.open(f"/proc/{holder}/ns/mnt", os.O_RDONLY)
    working_folder = Path.cwd()
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)
    os.chdir(working_folder)  # setns leads to the root


def _opening_program(needed: list[Path]) -> str:
    """Return shell commands that open the closed folders above these paths; "" if there are none.

    Each closed folder is covered by an empty one, into which only what is needed is mounted again.
    """
    opened: dict[Path, set[str]] = {}
    for path in needed:
        for folder in reversed(path.parents):
            if folder.is_dir() and not folder.stat().st_mode & 0o001:
                opened.setdefault(folder, set()).add(path.relative_to(folder).parts[0])
                break  # what is closed below it is told by `_require_reach`
    lines = []
    for folder, names in opened.items():
        closed = shlex.quote(str(folder))
        lines += ["aside=$(mktemp -d)", f'mount --bind {closed} "$aside"']
        lines.append(f"mount -t tmpfs -o mode=755 virnuc-faults {closed}")
        for name in sorted(names):
            entry = shlex.quote(name)
            lines += [f"mkdir {closed}/{entry}", f'mount --bind "$aside"/{entry} {closed}/{entry}']
        lines.append('umount -l "$aside"; rmdir "$aside"')
    return "\n".join([*lines, "echo ready", "exec sleep 36000"]) if lines else ""


def _require_reach(account: Account, scene_folder: Path) -> None:
    """Raise unless processes of an account can use Python, and read the scene.

    Raises:
        NotRunError: They cannot.
    """
    program = "import os, sys, h5py, torch; os.listdir(sys.argv[1])"
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(scene_folder / "models")],
        preexec_fn=account.enter,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        raise NotRunError(f"another user cannot read what is needed: {outcome.stderr[-200:]}")
