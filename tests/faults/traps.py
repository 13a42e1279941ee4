"""Rounds in which another user lays traps in the directory of a run: links, pipes, files and folders.

Traps are laid at a drawn moment of the run. Its processes are stopped meanwhile, so it is certain
that the run holds its directory, and what it has done so far.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from tests.changing_folders import paths_below

from .accounts import Intruder
from .strikes import Running, shards_below

if TYPE_CHECKING:
    from .play import Play

TRAP_PAUSE_S: Final = 1.0  # between two traps, at most
CODES: Final = (0, 1, 2, 3, 4)
BEFORE_START: Final = "before the start"
BEFORE_STAGING: Final = "before staging"
BETWEEN_SHARDS: Final = "between shards"
AT_RESULTS: Final = "at the results"
ANY_TIME: Final = "at any time"
MOMENTS: Final = (BEFORE_START, BEFORE_STAGING, BETWEEN_SHARDS, AT_RESULTS, ANY_TIME)
# Names that a run opens, makes, replaces or removes in its directory.
TRAPPED_NAMES: Final = (
    "logs",
    "shards",
    "shards.look",
    "telemetry",
    "report",
    ".virnuc",
    ".virnuc.1",
    ".virnuc.2",
    "run.json",
    "orfs.h5",
    "orfs.made.json",
    "skipped.tsv",
    "summary.json",
    "summary.json.former",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
    "embeddings.h5",
    "viral.fasta.gz",
    ".run.json.1-0a.part",
    ".reads.tsv.1-0a.part",
    "shards/00001.h5",
    "shards/plan.json",
    "shards/.look",
    "logs/worker-0.log",
    "telemetry/attempt.jsonl",
)
# Those that a run makes last.
RESULT_NAMES: Final = (
    "summary.json",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
    "embeddings.h5",
    "viral.fasta.gz",
    "telemetry",
    "logs",
)
TRAPS: Final = ("link", "link", "fifo", "hard link", "file", "folder", "folder of links")
ASIDE: Final = ".aside"  # what an entry is called for which a trap was exchanged


class Victim:
    """Files of somebody else, to which traps lead and which nobody may read, change or remove."""

    def __init__(self, folder: Path, owner: int) -> None:
        """Make the files.

        Args:
            folder: Where.
            owner: Whose they are. The attacked run could change them if it followed a link.
        """
        self.folder = folder
        self.secret = secrets.token_hex(16)
        folder.mkdir()
        for name in ("precious.txt", "00001.h5", "plan.json", "worker-0.log", "attempt.jsonl"):
            path = folder / name
            path.write_text(f"{self.secret}\n")
            path.chmod(0o600)
            os.chown(path, owner, -1)
        os.chown(folder, owner, -1)
        self.state = self._look()

    def _look(self) -> dict[str, tuple[int, int, bytes]]:
        """Return what is in the folder: inode, time of change and content of each file."""
        state = {}
        for path in sorted(self.folder.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            state[path.name] = (status.st_ino, status.st_mtime_ns, content)
        return state

    def problems(self, out: Path) -> list[str]:
        """Return what has happened to the files, and where their secret has come to light."""
        problems = []
        state = self._look()
        for name in sorted(self.state.keys() | state.keys()):
            if self.state.get(name) != state.get(name):
                problems.append(f"a foreign file was changed, made or removed: {name}")
        for path in paths_below(out):
            is_shown = path.is_file() and not path.is_symlink() and path.stat().st_nlink < 2
            if is_shown and self.secret.encode() in path.read_bytes():
                problems.append(f"a foreign file was read into {path.name}")
        return problems


class Trapper:
    """Lays traps in the directory of one round, at drawn moments, and removes them afterwards."""

    def __init__(self, play: Play, intruder: Intruder, victim: Victim, *, owns: bool) -> None:
        """Remember the round.

        Args:
            play: The round.
            intruder: Lays the traps.
            victim: Where they lead.
            owns: The directory is the intruder's, so he can rename what is in it.
        """
        self._play, self._intruder, self._victim, self._owns = play, intruder, victim, owns
        self.n_laid_while_held = 0

    def attack(self, run: Running, moment: str) -> bool:
        """Lay traps while a run goes on, until it ends or, in some rounds, is killed.

        Returns:
            Whether it was killed.
        """
        rng = self._play.rng
        will_kill = rng.random() < 0.2
        kill_at_s = time.monotonic() + rng.random() * self._play.truth.seconds
        n_shards_wanted = rng.randint(1, max(1, self._n_shards_in_all() - 1))
        is_due = moment not in (BEFORE_START, ANY_TIME)
        while run.alive:
            if is_due and self._is_moment(moment, n_shards_wanted):
                self._lay_while_stopped(run, moment)
                is_due = False
            if moment == ANY_TIME and self._is_held():
                self.n_laid_while_held += self.lay(moment)
                time.sleep(rng.random() * TRAP_PAUSE_S)
            if will_kill and time.monotonic() > kill_at_s:
                run.process.kill()
                return True
            time.sleep(0.001)
        return False

    def _n_shards_in_all(self) -> int:
        """Return how many shards an undisturbed run makes."""
        names = [Path(name) for name in self._play.truth.files]
        return sum(name.parent.name == "shards" and name.suffix == ".h5" for name in names)

    def _is_held(self) -> bool:
        """Return whether the command holds the directory, or that of a run in it."""
        return any(path.name == ".virnuc" for path in paths_below(self._play.out))

    def _is_moment(self, moment: str, n_shards_wanted: int) -> bool:
        """Return whether a run has come to a moment, and not beyond it."""
        out = self._play.out
        if not self._is_held() or (out / "summary.json").exists():
            return False
        if moment == BEFORE_STAGING:
            return not any(path.name == "orfs.h5" for path in paths_below(out))
        n_shards = len(shards_below(out))
        if moment == BETWEEN_SHARDS:
            return n_shards >= n_shards_wanted
        return n_shards >= self._n_shards_in_all()

    def _lay_while_stopped(self, run: Running, moment: str) -> None:
        """Stop all processes of a run, lay a few traps, and let them go on."""
        processes = [process for group in run.family().values() for process in group]
        _signal_all(processes, signal.SIGSTOP)
        try:
            for _ in range(self._play.rng.randint(1, 4)):
                self.n_laid_while_held += self.lay(moment)
        finally:
            _signal_all(processes, signal.SIGCONT)

    def lay(self, moment: str) -> bool:
        """Lay one trap at random; return whether it could be laid."""
        play = self._play
        exchanges = self._owns and moment != BEFORE_START and play.rng.random() < 0.5
        if exchanges:
            present_names: list[str] = []
            with suppress(FileNotFoundError):  # the run has ended, and removed its folder
                present_names = os.listdir(play.out)  # noqa: PTH208 - names
            names = sorted(present_names) or [".virnuc"]
        else:
            names = self._unused_names(moment)
        name = play.rng.choice(names)
        target = play.rng.choice(
            (self._victim.folder, self._victim.folder / "precious.txt", self._victim.folder / "new")
        )
        kind = play.rng.choice(TRAPS)
        order = {"kind": kind, "path": str(play.out / name), "target": str(target)}
        reason = self._intruder.do("lay", **order, aside=ASIDE if exchanges else "")
        if not reason:
            verb = "for the" if exchanges else "as"
            play.round.traps.append(f"{kind} {verb} {name} {moment}")
        return not reason

    def _unused_names(self, moment: str) -> list[str]:
        """Return names that a command makes in its directory, and that nothing has yet."""
        made_names = {Path(name).parts[0] for name in self._play.truth.files}
        trapped_names = RESULT_NAMES if moment == AT_RESULTS else TRAPPED_NAMES
        names = sorted({*trapped_names, *made_names})
        out = self._play.out
        return [name for name in names if not os.path.lexists(out / name)] or ["new"]

    def clear(self) -> None:
        """Remove what the intruder has laid, and put back what he has moved aside.

        What others wrote into his folders stays.
        """
        out = self._play.out
        for path in sorted(out.rglob("*"), reverse=True):
            with suppress(OSError):
                if path.lstat().st_uid != self._intruder.uid:
                    continue
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()
        for path in sorted(out.rglob(f"*{ASIDE}")):
            original = path.with_name(path.name.removesuffix(ASIDE))
            if not os.path.lexists(original):
                path.rename(original)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to processes of which some may have ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def play_traps(play: Play) -> None:
    """Lay links, pipes and folders in place of a run's files, before, in and between its attempts.

    The directory is the run's own and open to everybody, or one that the intruder has made.
    """
    is_shared = play.plan.whom == "shared directory"
    owner = os.geteuid() if play.account is None else play.account.uid
    with _shared_folder() as shared, Intruder(avoided=owner) as intruder:
        victim = Victim(play.folder / "victim", owner)
        play.out = shared / "out"
        if is_shared:
            play.out.mkdir()
            os.chown(play.out, owner, -1)
            play.out.chmod(0o1777)
        else:
            intruder.do("lay", kind="folder", path=str(play.out), target="")
        trapper = Trapper(play, intruder, victim, owns=not is_shared)
        for attempt, moment in zip(("first", "second"), play.rng.sample(MOMENTS, 2), strict=True):
            if moment == BEFORE_START:
                trapper.lay(moment)
            run = play.start()
            is_killed = trapper.attack(run, moment)
            code = play.ends(run, (*CODES, -9) if is_killed else CODES, attempt)
            if is_shared:
                for problem in intruder.do("spoil", folder=str(play.out)):
                    play.report_problem(f"{attempt}: the intruder {problem}")
            for problem in victim.problems(play.out):
                play.report_problem(f"{attempt}: {problem}")
            trapper.clear()
            if code == 0:
                play.compare(attempt)
        play.round.hit = trapper.n_laid_while_held > 0
        play.resume()
        for problem in victim.problems(play.out):
            play.report_problem(f"again: {problem}")


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Make a folder that every user can reach and write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="virnuc-shared-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
