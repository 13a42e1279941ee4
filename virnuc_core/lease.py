"""Who may write in a place: a lease, which holds across machines that share a file system.

It is a file `NAME.N`, taken by creating it, which every file system grants to one alone, and written anew by its holder
every few seconds. Who finds it there asks the system whether the holder lives, on the same machine; else it watches, by
its own clock, whether the file still changes. It takes over by creating `NAME.N+1`, and withdraws unless all else is
still as it was judged; then what is older goes. So no two take over, no machine's clock is held against another's, and
nothing relies on flock, which network file systems keep to one machine. A holder that was stopped for long looks before
it writes, and finds that it is one no more."""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from virnuc_core.errors import ConfigError

HEARTBEAT_S: Final = 5.0
EXPIRY_S: Final = 90.0  # longer than a network file system shows what it knew before: up to 60 s, as commonly mounted
POLL_S, TOLD_S = 0.1, 1.0  # between two looks; after which who waits is told why
_leases: dict[Path, "Lease"] = {}  # that this process holds, by what each covers
log = logging.getLogger(__name__)


@contextmanager
def lease(name: Path, covers: Path, *, wait: bool = False) -> Iterator[str]:
    """Hold the lease of this name while the `with` block lasts, for writing in or at `covers`. Yields "", or who holds
    it, in words, when it is another's. `wait`: until it is free. Errors: `OSError`."""
    mine, place = Lease(name), covers.resolve()
    if other := mine.take(wait=wait):
        yield other
        return
    _leases[place] = mine
    beating = threading.Thread(target=mine.beat, daemon=True, name=f"lease of {name.name}")
    beating.start()
    try:
        yield ""
    finally:
        mine.ended.set()
        beating.join(HEARTBEAT_S)  # for no longer: a file system that is away may hold it
        _leases.pop(place, None)
        mine.release()


def require_lease(path: Path, *, look: bool = True) -> None:
    """`ConfigError` when another has taken over this process's lease that covers `path`; without `look`, if known."""
    for covers, mine in [*_leases.items()]:
        if (path.parent.resolve() / path.name).is_relative_to(covers) and not (
            mine.held() if look else mine.ours
        ):
            late = f"{mine.other} is working here now, for this run was held up for over {EXPIRY_S:.0f} s"
            raise ConfigError(
                f"{covers}: {late if mine.other else 'its lease was removed'}; it writes no more here"
            )


def process_namespace() -> str:
    """Where a process number means something: this boot of this machine, and this namespace of process numbers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{Path('/proc/self/ns/pid').readlink()}"


def process_start_ticks(pid: int) -> str:
    """When a process began, in ticks since this machine started; empty for one that has ended. Errors: `OSError`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def command_start_s() -> float:
    """When this process began, by the clock of `time.monotonic()`."""
    since_boot_s = int(process_start_ticks(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return since_boot_s + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


def is_alive(pid: int, then: str) -> bool | None:
    """Whether the process of this place that began then lives; None where that cannot be seen."""
    try:
        return process_start_ticks(pid) == then
    except OSError:
        with suppress(PermissionError):  # another user's, which /proc may hide
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return None


class Lease:
    """The lease of a name, for one who wants it or has it."""

    def __init__(self, name: Path) -> None:
        self._name, self._number, self._beats, self.ended = name, 0, 0, threading.Event()
        self.ours, self.other = True, ""  # as far as is known; who has it if not
        self._token, self._host = secrets.token_hex(8), socket.gethostname()
        self._place, self._began = process_namespace(), process_start_ticks(os.getpid())

    def _path(self, number: int) -> Path:
        return self._name.with_name(f"{self._name.name}.{number}")

    def _lying(self) -> dict[int, bytes]:
        """The leases that lie there, by number. Opened anew each time: a network file system then asks its server."""
        found = {}
        for path in [*self._name.parent.glob("*.[0-9]*")]:  # none where the folder is gone
            if path.stem == self._name.name and (number := path.suffix[1:]).isdecimal():
                with suppress(FileNotFoundError):
                    found[int(number)] = path.read_bytes()
        return found

    def _who(self, body: bytes) -> tuple[str, bool | None]:
        """Who wrote a lease, in words, and whether it lives; None: its lease will tell."""
        try:
            _, pid, then, host, where, _ = json.loads(body)
            own = where == self._place
            return f"process {pid}" + f" on {host}" * (not own), is_alive(
                int(pid), then
            ) if own else None
        except (ValueError, TypeError):  # half written
            return "another process", None

    def take(self, *, wait: bool = False) -> str:
        """Take the lease; "" when it is ours, else who has it, in words. A holder on another machine is watched until
        a lease changes there, or has not for `EXPIRY_S`; with `wait` any holder until it is gone."""
        seen, since_s, said = dict[int, bytes](), 0.0, False
        while True:
            self._name.parent.mkdir(parents=True, exist_ok=True)
            found, now_s = self._lying(), time.monotonic()
            top = max(found, default=0)
            other, lives = self._who(found[top]) if found else ("", False)
            if lives is None and seen:
                lives = True if found != seen else False if now_s - since_s > EXPIRY_S else None
            if found != seen:
                seen, since_s, said = found, now_s, False
            if lives is None and not said and now_s - since_s > TOLD_S:
                said = True
                log.warning(
                    "%s: %s worked here; up to %.0f s to see if it still does",
                    self._name,
                    other,
                    EXPIRY_S,
                )
            if lives and not wait:
                return other
            if lives is False and self._create(top + 1, found):
                return ""
            time.sleep(POLL_S)

    def _create(self, number: int, judged: dict[int, bytes]) -> bool:
        """Whether we are the one who has created the lease of this number, while nothing else has changed."""
        path = self._path(number)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except (
            FileExistsError,
            FileNotFoundError,
        ):  # another was faster, or has removed the folder
            return False
        alone, self._number = False, number
        try:
            path.write_bytes(self._body())
            alone = {at: body for at, body in self._lying().items() if at != number} == judged
        finally:
            if not alone:
                path.unlink(missing_ok=True)
        for at, body in self._lying().items() if alone else ():
            if judged.get(at) == body:  # not a later one of the same number
                self._path(at).unlink(missing_ok=True)
        return alone

    def _body(self) -> bytes:
        self._beats += 1
        return json.dumps(
            [self._token, os.getpid(), self._began, self._host, self._place, self._beats]
        ).encode()

    def held(self) -> bool:
        """Whether the lease is ours: it lies there, and none of a higher number. Errors: `OSError`."""
        found = self._lying()
        top = max(found, default=0)
        if self.ours and (top != self._number or self._token.encode() not in found.get(top, b"")):
            self.ours, self.other = False, self._who(found[top])[0] if found else ""
        return self.ours

    def beat(self) -> None:
        """Write the lease anew until it is given back or lost."""
        while not self.ended.wait(HEARTBEAT_S) and self.ours:
            with suppress(OSError):  # the file system is away: whoever sees it may take over
                with suppress(FileNotFoundError), self._path(self._number).open("r+b") as file:
                    if self._token.encode() in file.read():
                        file.seek(0)
                        file.write(self._body())
                self.held()  # asked afterwards, as who takes over writes first and then looks whether we wrote

    def release(self) -> None:
        """Give the lease back, if it still is ours."""
        with suppress(OSError):
            if self.held():
                self._path(self._number).unlink()
