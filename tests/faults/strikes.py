"""What is done to a running command, its files and its disk; and which processes are its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from tests.changing_folders import paths_below
from tests.process_lookup import family_of
from virnuc.flows.cli.server_guard import PROCESS_NAME

from .scene import MARK, Scene

LIMIT_S: Final = 240.0  # what has not ended by then hangs
GONE_WITHIN_S: Final = 30.0  # what outlives its run for longer stays; a busy machine takes its time
SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
REST_S: Final = 3.0  # for which the command itself is stopped
DASK: Final = "distributed.cli.dask_"  # in the command lines of its processes
WORKER: Final = "virnuc_core.engine.worker"
DEAD: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Running:
    """A command of a round: its process, what it has printed, and all that bears the round's mark."""

    def __init__(
        self,
        scene: Scene,
        words: list[str],
        folder: Path,
        mark: str,
        server: str,
        *,
        environment: Mapping[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        """Start the command.

        Args:
            scene: The stage of the round.
            words: The command line.
            folder: Where it starts, and where its output and Prefect's home lie.
            mark: The round's mark.
            server: An address, `embedded` or `none`.
            environment: Further environment variables.
            preexec: Called in the child before it becomes the command.
        """
        self.mark, self.folder = mark, folder
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as stdout_file, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout_file,
                stderr=err,
                env={**scene.environment(mark, server, folder / "home"), **(environment or {})},
                cwd=folder,
                start_new_session=True,
                preexec_fn=preexec,  # noqa: PLW1509 - no threads here
            )
        self.began_s = time.monotonic()

    def ends(self, within_s: float = LIMIT_S) -> int | None:
        """Return the exit code; if the command does not end in time, kill all and return None."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            kill(marked(self.mark))
            self.process.wait()
            return None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def printed(self) -> str:
        return self.out.read_text(errors="replace")

    def complained(self) -> str:
        return self.err.read_text(errors="replace")

    def family(self) -> dict[str, list[psutil.Process]]:
        """Return the living processes of the command, by what they do."""
        processes: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.Error):
            itself = psutil.Process(self.process.pid)
            for process in [itself, *itself.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    processes.setdefault(kind_of(process, itself.pid), []).append(process)
        return processes

    def pids(self) -> set[int]:
        return {process.pid for group in self.family().values() for process in group}


def kind_of(process: psutil.Process, main: int) -> str:
    """Return what a process of a run does, told by its command line."""
    if process.pid == main:
        return "main"
    line = " ".join(process.cmdline())
    if "resource_tracker" in line:
        return "tracker"
    if DASK in line:
        return "scheduler" if " scheduler " in line else "nanny"
    parent = process.parent()
    parent_line = "" if parent is None else " ".join(parent.cmdline())
    is_spawned = "spawn_main" in line  # by Python's multiprocessing
    if is_spawned and DASK in parent_line:
        return "dask worker"
    if (is_spawned or WORKER in line) and WORKER in parent_line:
        return "loader"
    if WORKER in line:
        return "worker"
    if is_spawned:
        return "other"
    if "virnuc_core.reads.workers" in line:
        return "staging"
    if "virnuc_core.baseline" in line:
        return "baseline"
    if "prefect.server" in line or "uvicorn" in line or process.name() == PROCESS_NAME:
        return "server"
    return "other"


def marked(mark: str) -> list[psutil.Process]:
    """Return every living process of this machine that bears the mark in its environment."""
    processes = []
    variable = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if variable not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            process = psutil.Process(int(entry.name))
            if process.status() not in DEAD:
                processes.append(process)
    return processes


def left_over(mark: str, within_s: float = GONE_WITHIN_S) -> list[str]:
    """Return what still runs of a round after some time, by command line, and kill it."""
    deadline = time.monotonic() + within_s
    while (leftovers := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    for process in leftovers:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[-80:] + f" ({process.status()})")
    kill(leftovers)
    return lines


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def strike(
    run: Running, how: str, whom: str, spread_s: float, rng: random.Random
) -> tuple[float | None, float]:
    """Hit one process of a kind at a random moment after the first of its kind is there.

    Args:
        run: The command.
        how: kill, stop, terminate or interrupt.
        whom: The kind of process, `all`, or `tree` for a whole node. `main while staging` waits
            until there are staging processes.
        spread_s: Seconds over which the moment is uniform.
        rng: Source of the random choices.

    Returns:
        When it was hit: seconds since the start, or None if there was nobody to hit; and the moment
        by `time.monotonic()`.
    """
    whom, _, meanwhile = whom.partition(" while ")
    kind = meanwhile or {"all": "main", "tree": "nanny"}.get(whom, whom)
    while run.alive and not run.family().get(kind):
        time.sleep(0.01)
    time.sleep(rng.random() * spread_s)
    family = run.family()
    if not run.alive or not family.get(kind):
        return None, time.monotonic()
    at_s = time.monotonic() - run.began_s
    if whom == "all":
        victims = [process for group in family.values() for process in group]
    elif whom == "tree":
        victims = family_of(rng.choice(family["nanny"]).pid)
    else:
        victims = [rng.choice(family[whom])]
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.send_signal(SIGNALS[how])
    struck_s = time.monotonic()
    if how == "stop" and whom == "main":
        time.sleep(REST_S)
        with contextlib.suppress(psutil.Error):
            run.process.send_signal(signal.SIGCONT)
    return at_s, struck_s


# --- files ------------------------------------------------------------------------------------------------------------

FILES: Final = {  # every kind of file that is read again
    "store": ("orfs.h5",),
    "made": ("orfs.made.json",),
    "shard": ("shards/0*.h5",),
    "plan": ("shards/plan.json",),
    "record": ("run.json",),
    "summary": ("summary.json", "devices-*/summary.json", "baseline/summary.json"),
    "results": (
        "prediction_results*",
        "reads.tsv",
        "devices-*/prediction_results*",
        "devices-*/reads.tsv",
    ),
    "viral": ("viral.*",),
    "embeddings": ("embeddings.h5", "devices-*/embeddings.h5"),
    "telemetry": ("telemetry/*", "devices-*/telemetry/*"),
    "mark": (".virnuc", ".lock"),
    "baseline": ("baseline/prediction_results*", "baseline/run.json"),
    "report": ("report/report.json", "comparison.json", "regression.json"),
    "history": ("../history.jsonl",),
    "ledger": ("inbox.tsv", "fates/*.json"),
}


def shards_below(out: Path) -> list[Path]:
    """Return the committed shards of all runs in a folder, in which runs may be at work."""
    paths = paths_below(out)
    return [path for path in paths if path.parent.name == "shards" and path.match("0*.h5")]


def damage(out: Path, how: str, kind: str, rng: random.Random) -> Path | None:
    """Flip one bit of one file of a kind, or cut it, fill it with zeros or remove it.

    Returns:
        The file; None if there is none.
    """
    files = []
    for pattern in FILES[kind]:
        files += [path for path in out.glob(pattern) if path.stat().st_size]
    files.sort()
    if not files:
        return None
    victim = rng.choice(files)
    body = bytearray(victim.read_bytes())
    if how == "flip":
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del body[rng.randrange(len(body)) :]
    elif how == "zero":
        body[:] = bytes(len(body))
    victim.unlink()  # a result may be linked
    if how != "remove":
        victim.write_bytes(body)
    return victim


# --- room -------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[bool]:
    """Mount a disk with so much room at `place`; yield false if this machine lets nobody do so."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "virnuc-faults", str(place)]
    is_mounted = (
        os.geteuid() == 0
        and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    )
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)


def make_room(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=256m", str(place)], check=True)
