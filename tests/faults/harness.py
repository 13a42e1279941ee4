"""Rounds of the real command, struck at random, side by side; a table of them.

`python -m tests.faults.harness --rounds 300 --seed 1 --jobs 16 --out table.md` plays them and prints a table, which
`--out` keeps up to date. A round's number and the seed say all of it: which kind it is, and its random moments.
With `--no-prefect` only rounds are played for which Prefect need not be installed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from virnuc_core.rundir import die_with_parent

from .play import mark_of, play
from .rounds import Plan, Round, line, plans, table
from .scene import NotRunError, Scene, Work, prepared, server
from .strikes import left_over

CORES: Final = 2  # of a job, at least where there are so many
ENDS_IN_S: Final = 60.0  # what a job has for the processes of a round that is broken off


@dataclass(slots=True)
class Job:
    """A process that plays one round after the other with a server of its own."""

    index: int
    process: BaseProcess
    line: Connection
    number: int = -1


def cores(job: int, jobs: int) -> set[int]:
    """Return the cores of one of so many jobs: apart from the others' while there are enough."""
    available = sorted(os.sched_getaffinity(0))
    n_cores = min(len(available), max(CORES, len(available) // jobs))
    first_core = job * n_cores
    return {available[(first_core + i) % len(available)] for i in range(n_cores)}


def works(kinds: Sequence[Plan]) -> set[Work]:
    """Return the work of which undisturbed runs are needed for these kinds of rounds.

    A few more are made when a round needs them.
    """
    needed_works = set()
    for plan in kinds:
        needed_works.add(replace(plan.work, nodes=0))
        if plan.how == "rewrite" or "threshold" in plan.whom:
            needed_works.add(Work(plan.command, threshold=1))
        if "other reads" in plan.whom:
            needed_works.add(Work(plan.command, "b"))
    return needed_works


def make_truths(scene: Scene, needed: set[Work], jobs: int) -> None:
    """Play the undisturbed runs, some side by side."""

    def play_undisturbed(job: int, work: Work) -> None:
        os.sched_setaffinity(0, cores(job, jobs))  # of this thread and its child
        if scene.url or work.command == "predict":
            scene.truth(work)

    with ThreadPoolExecutor(max(1, min(jobs, len(needed)))) as pool:
        truths = pool.map(play_undisturbed, range(len(needed)), sorted(needed, key=str))
        list(truths)  # raise what one of them raised


def serve(
    job: int,
    jobs: int,
    scene: Scene,
    seed: int,
    kinds: Sequence[Plan],
    line: Connection,
    parent: int,
) -> None:
    """Play the rounds whose numbers come, until there are no more; the program of a job's process."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.sched_setaffinity(0, cores(job, jobs))
    with ExitStack() as servers:
        url = ""
        if scene.url:
            folder = scene.folder / f"server-{job}-{os.getpid()}"
            with suppress(NotRunError):
                url, _ = servers.enter_context(
                    server(folder, scene.folder / "prefect.db", "shared")
                )
        own = replace(scene, url=url)
        while (number := line.recv()) is not None:
            line.send(play(number, own, seed, kinds[number % len(kinds)]))


def rounds(
    numbers: Sequence[int],
    scene: Scene,
    seed: int,
    kinds: Sequence[Plan],
    jobs: int,
    late: Callable[[], bool],
) -> Iterator[Round]:
    """Yield rounds of these kinds in turn, as they end; none begins when it is `late`."""
    numbers_left = iter(numbers)
    context = multiprocessing.get_context("spawn")
    jobs = min(jobs, len(numbers))
    playing: list[Job] = []

    def begin(index: int) -> Job:
        connection, child_connection = context.Pipe()
        arguments = (index, jobs, scene, seed, tuple(kinds), child_connection, os.getpid())
        process = context.Process(target=serve, args=arguments, name=f"job {index}")
        process.start()
        child_connection.close()
        return Job(index, process, connection)

    def give_next_round(job: Job) -> bool:
        number = None if late() else next(numbers_left, None)
        job.number = -1 if number is None else number
        job.line.send(number)
        return number is not None

    def report_dead_job(job: Job) -> Round:
        job.process.join()
        problem = f"the harness failed: its process ended with {job.process.exitcode}"
        left_over(mark_of(job.number, scene), 0.0)  # ends what still runs of it
        return Round(job.number, kinds[job.number % len(kinds)], problems=[problem])

    try:
        playing += [begin(index) for index in range(jobs)]
        busy: dict[object, Job] = {job.line: job for job in playing if give_next_round(job)}
        while busy:
            lines = [job.line for job in busy.values()]
            for connection in wait(lines):
                job = busy.pop(connection)
                try:
                    result = job.line.recv()
                except (EOFError, ConnectionResetError):
                    result = report_dead_job(job)
                    job = begin(job.index)
                    playing[job.index] = job
                yield result
                if give_next_round(job):
                    busy[job.line] = job
    finally:
        for job in playing:
            job.line.close()
            if job.number >= 0:
                job.process.terminate()
        for job in playing:
            job.process.join(ENDS_IN_S)
            job.process.kill()


def main() -> int:
    """Play many rounds; exit code 0 if some rounds were good, and none was bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        default=1,
        help="rounds played side by side, each on cores of its own",
    )
    parser.add_argument(
        "--no-prefect",
        action="store_true",
        help="only rounds for which Prefect need not be installed",
    )
    parser.add_argument("--only", default="", help="rounds in whose name this pattern is found")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no round after so long")
    parser.add_argument("--folder", type=Path, help="where to play; a temporary one else")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    kinds = [
        plan
        for plan in plans()
        if re.search(options.only, plan.name) and not (options.no_prefect and plan.needs_prefect)
    ]
    if not kinds:
        parser.error(f"no kind of round is named like {options.only!r}")
    if options.jobs < 1:
        parser.error("--jobs is 1 or more")
    began_s = time.monotonic()
    results: list[Round] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended

    def write_table() -> str:
        elapsed_s = time.monotonic() - began_s
        circumstances = f"seed {options.seed}, {elapsed_s:.0f} s, {options.jobs} at a time"
        text = f"{table(results)}\n\n{circumstances}\n"
        if options.out:
            options.out.write_text(text)
        return text

    def is_late() -> bool:
        return time.monotonic() - began_s > options.minutes * 60

    numbers = range(options.first, options.first + options.rounds)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="virnuc-faults-", dir=options.folder) as name,
            prepared(Path(name) / "scene", with_server=not options.no_prefect) as scene,
        ):
            Path(name).chmod(0o711)  # rounds of plain users are played below it
            kinds_to_play = [kinds[number % len(kinds)] for number in numbers]
            make_truths(scene, works(kinds_to_play), options.jobs)
            for result in rounds(numbers, scene, options.seed, kinds, options.jobs, is_late):
                results.append(result)
                print(line(result), flush=True)
                write_table()
    finally:  # also of what was played when somebody ends it
        print(write_table())
    has_bad = any(result.problems for result in results)
    has_good = any(result.good for result in results)
    return 0 if has_good and not has_bad else 1


if __name__ == "__main__":
    sys.exit(main())
