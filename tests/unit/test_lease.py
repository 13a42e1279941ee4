"""One holder at a time: among threads, processes and machines, over deaths, rests and a file system that is late."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from virnuc_core import lease as module
from virnuc_core import system_errors
from virnuc_core.errors import ConfigError, UnreadableError
from virnuc_core.lease import Lease, lease, require_lease
from virnuc_core.rundir import atomic_file, discard, run_lock, write_text_atomically

HOLDER = """
import sys
from pathlib import Path
from virnuc_core.rundir import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that expire soon, of holders that write much more often."""
    for name, seconds in (
        ("HEARTBEAT_S", 0.02),
        ("EXPIRY_S", 0.2),
        ("POLL_S", 0.01),
        ("WARN_AFTER_S", 0.02),
    ):
        monkeypatch.setattr(module, name, seconds)


def elsewhere(root: Path, **changes: Any) -> Path:
    """A lease that a process of another machine, or `changes`, has in a directory."""
    lease_record = {
        "token": "t",
        "pid": 7,
        "began": "1",
        "host": "node3",
        "place": "another",
        "beat": 1,
    } | changes
    path = root / ".virnuc.4"
    root.mkdir(exist_ok=True)
    path.write_text(json.dumps(list(lease_record.values())))
    return path


@contextmanager
def renewing(path: Path, wrote: threading.Event) -> Iterator[None]:
    """Somebody who writes a lease anew all the time, as on another machine."""
    is_ended = threading.Event()

    def beat() -> None:
        lease_record = json.loads(path.read_text())
        while not is_ended.wait(0.05):
            lease_record[-1] += 1
            # In one call and in place: nobody reads an empty file between two calls.
            with path.open("r+b", buffering=0) as file:
                file.write(json.dumps(lease_record).encode())
            wrote.set()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_ended.set()
        thread.join()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_killed_holder_of_this_machine_is_followed_at_once_and_a_resting_one_is_not(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    words = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        with (
            pytest.raises(ConfigError, match=f"process {holder.pid} is working here"),
            run_lock(root),
        ):
            pass
        holder.kill()
        while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        with run_lock(root):  # nobody has waited for the dead one yet
            assert names(root) == [".virnuc", ".virnuc.2"]


def test_a_number_that_another_process_has_by_now_proves_nothing(tmp_path: Path) -> None:
    elsewhere(tmp_path, place=module.process_namespace(), pid=os.getppid(), began="1")
    with run_lock(tmp_path):
        assert names(tmp_path) == [".virnuc", ".virnuc.5"]


def test_a_holder_elsewhere_is_told_by_its_signs_of_life(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = elsewhere(tmp_path, beat=10**6)
    monkeypatch.setattr(module, "EXPIRY_S", 60.0)  # however late a busy machine lets it write
    with (
        renewing(path, threading.Event()),
        pytest.raises(ConfigError, match="process 7 on node3 is working here"),
    ):
        run_lock(tmp_path).__enter__()
    monkeypatch.setattr(module, "EXPIRY_S", 0.2)
    with run_lock(tmp_path):
        assert names(tmp_path) == [".virnuc", ".virnuc.5"]
    assert "process 7 on node3 worked here; up to" in caplog.text


@pytest.mark.parametrize("body", [b"", b"[]"])
def test_a_lease_that_says_nothing_is_watched(tmp_path: Path, quick: None, body: bytes) -> None:
    elsewhere(tmp_path).write_bytes(body)
    began_s = time.monotonic()
    with run_lock(tmp_path):
        assert time.monotonic() - began_s >= module.EXPIRY_S


def test_who_was_stopped_for_too_long_writes_no_more(tmp_path: Path) -> None:
    """As another machine would follow, while this process hears nothing."""
    root = tmp_path / "run"
    with ExitStack() as resources:
        resources.enter_context(run_lock(root))
        early, late = (
            resources.enter_context(atomic_file(root / name))
            for name in ("reads.tsv", "summary.json")
        )
        early.write_text("stale")
        following_lease = elsewhere(
            root
        )  # and `late` is gone, as who follows removes temporary files
        for write in (
            lambda: discard(root, "orfs.h5"),
            lambda: write_text_atomically(root / "run.json", "stale"),
            resources.close,
        ):
            with pytest.raises(
                ConfigError,
                match="process 7 on node3 is working here now, for this run was held up",
            ):
                write()
        assert not late.exists()
        require_lease(tmp_path / "elsewhere")
    assert names(root) == [".virnuc", ".virnuc.1", following_lease.name], (
        "nothing written, the other's lease untouched"
    )


def test_a_holder_notices_by_itself_that_it_is_one_no_more(tmp_path: Path, quick: None) -> None:
    def noticed() -> None:
        while True:
            require_lease(tmp_path, reread=False)
            time.sleep(0.01)

    for lose in (
        lambda: elsewhere(tmp_path),
        lambda: [path.unlink() for path in tmp_path.glob(".virnuc.[0-9]")],
    ):
        with lease(tmp_path / ".virnuc", tmp_path):
            require_lease(tmp_path, reread=False)
            lose()
            with pytest.raises(ConfigError, match="writes no more"):
                noticed()


def test_who_judged_and_then_rested_withdraws(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    slow, fast, next_one = (Lease(tmp_path / ".virnuc") for _ in range(3))
    lease_files = slow._lease_files()
    assert fast._create(5, lease_files)
    fast.release()
    assert next_one.take() == ""
    assert not slow._create(5, lease_files), "nobody has number 5, but not all is as it was"
    assert (names(tmp_path), next_one.check_held()) == ([".virnuc.1"], True)
    next_one.release()
    lease_files = Lease._lease_files(slow) if elsewhere(tmp_path) else {}
    elsewhere(tmp_path, beat=2)
    assert not slow._create(5, lease_files), "its holder has woken"


def test_a_lease_is_renewed(tmp_path: Path, quick: None) -> None:
    with lease(tmp_path / "x", tmp_path):
        bytes_before = (tmp_path / "x.1").read_bytes()
        while (tmp_path / "x.1").read_bytes() in (bytes_before, b""):
            time.sleep(0.01)
        require_lease(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_of_many_who_come_go_and_die_one_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Every call that looks at or changes the folder takes its time, so that they meet in every order; and who looks
    (each a machine of its own) is shown for `late_s` what it saw before, until it changes something itself."""
    rng, num_inside, max_inside, num_taken, thread_state = (
        random.Random(3),
        [0],
        [0],
        [0],
        threading.local(),
    )
    monkeypatch.setattr(module, "POLL_S", 0.0005)
    lying = Lease._lease_files

    def cached(mine: Lease) -> dict[int, bytes]:
        now_s = time.monotonic()
        if now_s - getattr(thread_state, "at_s", 0.0) >= late_s:
            thread_state.at_s, thread_state.found = now_s, lying(mine)
        return dict(thread_state.found)

    def slowly(call: Callable[..., Any], changes: bool) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            time.sleep(rng.choice((0, 0, 0.0003, 0.002)))
            try:
                return call(*given, **named)
            finally:
                time.sleep(rng.choice((0, 0, 0.0003, 0.002)))
                if changes:
                    thread_state.at_s = 0.0

        return called

    monkeypatch.setattr(Lease, "_lease_files", cached)
    for name in ("unlink", "read_bytes", "write_bytes"):
        monkeypatch.setattr(Path, name, slowly(getattr(Path, name), name != "read_bytes"))
    monkeypatch.setattr(os, "open", slowly(os.open, True))

    def come(dies: bool) -> None:
        for number in range(9):
            mine = Lease(tmp_path / "x")
            mine.take(wait=True)
            num_inside[0] += 1
            max_inside[0], num_taken[0] = max(max_inside[0], num_inside[0]), num_taken[0] + 1
            time.sleep(0.001)
            num_inside[0] -= 1
            if dies and number % 3 == 0:
                mine._start_ticks = "1"  # no living process began then
                mine._path(mine._number).write_bytes(mine._content())
            else:
                mine.release()

    threads = [threading.Thread(target=come, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max_inside[0], num_taken[0]) == (1, 36)


@pytest.fixture
def unlistable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function after whose call no folder can be listed, with this error."""
    monkeypatch.setattr(system_errors, "RETRY_PAUSES_S", (0.0, 0.0))
    list_folder = os.listdir
    numbers: list[int] = []

    def fail(path: Any = ".") -> list[str]:
        if numbers:
            raise OSError(numbers[0], os.strerror(numbers[0]), str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", fail)
    yield numbers.append
    numbers.clear()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_lease_that_cannot_be_read_is_not_called_lost(
    tmp_path: Path, unlistable: Callable[[int], None], number: int
) -> None:
    with lease(tmp_path / "x", tmp_path):
        unlistable(number)
        with pytest.raises(UnreadableError, match=os.strerror(number)):
            require_lease(tmp_path)
        require_lease(tmp_path, reread=False)  # it was ours when it was last read


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_leases_that_cannot_be_read_are_not_called_absent(
    tmp_path: Path, unlistable: Callable[[int], None], number: int
) -> None:
    unlistable(number)
    with pytest.raises(UnreadableError, match=os.strerror(number)), lease(tmp_path / "x", tmp_path):
        pass
    assert [path.name for path in os.scandir(tmp_path)] == []
