"""Rounds in which many commands start at once where nothing has been made yet."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .accounts import enter_mounts
from .scene import NotRunError, leaves, python_path, said
from .strikes import LIMIT_S, Running, kill, left_over, marked

if TYPE_CHECKING:
    from .play import Play

OLDER_BY: Final = 12  # migrations that an older Prefect did not know
# Makes the database of an older Prefect: the schema as it was some migrations ago.
OLDER_DATABASE: Final = """
import asyncio
import sys
from pathlib import Path
import prefect.server.database
from alembic.script import ScriptDirectory
from prefect.server.database.alembic_commands import alembic_upgrade
from prefect.utilities.asyncutils import run_sync_in_worker_thread

migrations = Path(prefect.server.database.__file__).parent / "_migrations"
versions = ScriptDirectory(str(migrations), version_locations=[str(migrations / "versions" / "sqlite")])
revisions = [entry.revision for entry in versions.walk_revisions()]
asyncio.run(run_sync_in_worker_thread(alembic_upgrade, revisions[int(sys.argv[1])]))
"""


def play_first_starts(play: Play) -> None:
    """Play the round of a plan `race`: N predictions start at once, each into its own directory.

    They share a new Prefect home and a new home of the user, in which caches lie. All must end well
    with the right results, and leave nothing but their results and a sound database.
    """
    count = play.plan.starts
    home, user_home, temporary = (play.folder / name for name in ("home", "user", "temporary"))
    for folder in (home, user_home, temporary):
        folder.mkdir()
    if play.plan.whom == "an older database":
        _make_older_database(home)
    with _private_memory(play.folder) as memory:
        runs = [_start(play, number, memory.enter) for number in range(count)]
        _await_all(play, runs)
        for line in left_over(play.mark):
            play.report_problem(f"process left: {line}")
        for name in memory.files():
            play.report_problem(f"left in /dev/shm: {name}")
    for number, run in enumerate(runs):
        _check_run(play, number, run)
    for path in temporary.iterdir():
        play.report_problem(f"left in the folder for temporary files: {path.name}")
    if play.plan.server == "embedded":
        _check_database(play, home / "prefect.db", count)


def _start(play: Play, number: int, enter: Callable[[], None] | None) -> Running:
    """Start one of the commands."""
    folder = play.folder / f"start-{number}"
    folder.mkdir()
    words = play.scene.words(play.work, folder / "out", "cpu:1")
    more = {
        "PREFECT_HOME": str(play.folder / "home"),
        "HOME": str(play.folder / "user"),
        "TMPDIR": str(play.folder / "temporary"),
    }
    return Running(
        play.scene, words, folder, play.mark, play.plan.server, environment=more, preexec=enter
    )


def _await_all(play: Play, runs: list[Running]) -> None:
    """Wait until all commands have ended. The limit grows with their number."""
    give_up_s = time.monotonic() + LIMIT_S * max(1, len(runs) / 2)
    while any(run.alive for run in runs):
        if time.monotonic() > give_up_s:
            n_alive = sum(run.alive for run in runs)
            play.report_problem(f"{n_alive} of {len(runs)} commands hang")
            kill(marked(play.mark))
            for run in runs:
                run.process.wait()
            return
        time.sleep(0.1)


def _check_run(play: Play, number: int, run: Running) -> None:
    """Report a command that did not end well with the results of an undisturbed one."""
    text = run.complained()
    if play.ends(run, (0,), f"start {number}") != 0:
        return
    if said(run.printed()) != play.truth.said:
        play.report_problem(f"start {number}: told {said(run.printed())!r}")
    if play.plan.server == "embedded" and "without a Prefect server" in text:
        play.report_problem(f"start {number}: went on without a server: {text[-300:]}")
    if leaves(run.folder / "out") != play.truth.files:
        play.report_problem(f"start {number}: its files differ")


def _check_database(play: Play, database: Path, count: int) -> None:
    """Report a database that is damaged, or in which a run is missing."""
    with closing(sqlite3.connect(database)) as records:
        (verdict,) = records.execute("PRAGMA integrity_check").fetchone()
        states = [row[0] for row in records.execute("SELECT state_type FROM flow_run")]
    if verdict != "ok":
        play.report_problem(f"the database: {verdict}")
    if states != ["COMPLETED"] * count:
        play.report_problem(f"the database has flow runs {states}")


def _make_older_database(home: Path) -> None:
    """Make the database that an older version of Prefect would have left in its home.

    Raises:
        NotRunError: This version of Prefect cannot make one.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    outcome = subprocess.run(
        [sys.executable, "-c", OLDER_DATABASE, str(OLDER_BY)],
        env=environment | {"PREFECT_HOME": str(home), "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0 or not (home / "prefect.db").exists():
        raise NotRunError(f"no older database can be made: {outcome.stderr[-200:]}")


class PrivateMemory:
    """A /dev/shm that only the processes of one round see; without root it is everybody's."""

    def __init__(self, holder: int | None) -> None:
        """Remember the process that keeps the memory mounted, if there is one."""
        self._holder = holder
        self.enter = self._enter if holder is not None else None

    def _enter(self) -> None:
        """Let the calling process see this memory; called in a child before it is the command."""
        assert self._holder is not None
        enter_mounts(self._holder)

    def files(self) -> list[str]:
        """Return the names of what is in the memory; nothing if it is everybody's."""
        if self._holder is None:
            return []
        return os.listdir(f"/proc/{self._holder}/root/dev/shm")  # noqa: PTH208 - another root


@contextmanager
def _private_memory(folder: Path) -> Iterator[PrivateMemory]:
    """Mount a /dev/shm for one round, if this machine lets us."""
    program = "mount -t tmpfs virnuc-faults /dev/shm && echo ready && exec sleep 3600"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", program]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        yield PrivateMemory(None)
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True) as holder:
        assert holder.stdout is not None
        try:
            is_ready = holder.stdout.readline() == "ready\n"
            yield PrivateMemory(holder.pid if is_ready else None)
        finally:
            holder.kill()
