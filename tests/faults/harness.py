"""Rounds of the real command, struck at random, side by side; a table of them.

`python -m tests.faults.harness --rounds 300 --seed 1 --jobs 16 --out table.md` plays them and prints a table, which
`--out` keeps up to date. A round's number and the seed say all of it: which kind it is, and its random moments.
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
from contextlib import ExitStack
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

    process: BaseProcess
    line: Connection
    number: int = -1


def cores(job: int, jobs: int) -> set[int]:
    """The cores of one of so many jobs: apart from the others' while there are enough."""
    mine = sorted(os.sched_getaffinity(0))
    each = min(len(mine), max(CORES, len(mine) // jobs))
    return {mine[(job * each + i) % len(mine)] for i in range(each)}


def works(kinds: Sequence[Plan]) -> set[Work]:
    """What undisturbed runs have to show for these kinds of rounds; a few more are made where they are needed."""
    other = {
        Work(plan.command, threshold=1)
        for plan in kinds
        if plan.how == "rewrite" or "threshold" in plan.whom
    }
    return (
        {replace(plan.work, nodes=0) for plan in kinds}
        | other
        | {Work(p.command, "b") for p in kinds if "other reads" in p.whom}
    )


def make_truths(scene: Scene, wanted: set[Work], jobs: int) -> None:
    """Play the undisturbed runs, some side by side."""

    def one(job: int, work: Work) -> None:
        os.sched_setaffinity(0, cores(job, jobs))  # of this thread and its child
        if scene.url or work.command == "predict":
            scene.truth(work)

    with ThreadPoolExecutor(max(1, min(jobs, len(wanted)))) as pool:
        list(pool.map(one, range(len(wanted)), sorted(wanted, key=str)))


def serve(
    job: int,
    jobs: int,
    scene: Scene,
    seed: int,
    kinds: Sequence[Plan],
    line: Connection,
    parent: int,
) -> None:
    """Of a job's process: play the rounds whose numbers come, until there are no more."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.sched_setaffinity(0, cores(job, jobs))
    with ExitStack() as servers:
        try:
            folder = scene.folder / f"server-{job}-{os.getpid()}"
            url, _ = servers.enter_context(server(folder, scene.folder / "prefect.db", "shared"))
        except NotRunError:
            url = ""
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
    """Rounds of these kinds in turn, as they end; none begins when it is `late`."""
    to_do, context, playing = iter(numbers), multiprocessing.get_context("spawn"), list[Job]()

    def begin(index: int) -> Job:
        mine, its = context.Pipe()
        arguments = (index, jobs, scene, seed, tuple(kinds), its, os.getpid())
        process = context.Process(target=serve, args=arguments, name=f"job {index}")
        process.start()
        its.close()
        return Job(process, mine)

    def give(job: Job) -> bool:
        number = None if late() else next(to_do, None)
        job.number = -1 if number is None else number
        job.line.send(number)
        return number is not None

    try:
        jobs = min(jobs, len(numbers))
        playing = [begin(index) for index in range(jobs)]
        busy = {job.line: (index, job) for index, job in enumerate(playing) if give(job)}
        while busy:
            for connection in wait(list(busy)):
                index, job = busy.pop(connection)  # type: ignore[call-overload]
                try:
                    one = job.line.recv()
                except (EOFError, ConnectionResetError):
                    job.process.join()
                    why = f"the harness failed: its process ended with {job.process.exitcode}"
                    one = Round(job.number, kinds[job.number % len(kinds)], problems=[why])
                    left_over(mark_of(job.number, scene), 0.0)  # ends what still runs of it
                    playing[index] = job = begin(index)
                yield one
                if give(job):
                    busy[job.line] = (index, job)
    finally:
        for job in playing:
            job.line.close()
            if job.number >= 0:
                job.process.terminate()
        for job in playing:
            job.process.join(ENDS_IN_S)
            job.process.kill()


def main() -> int:
    """The long form. Exit code 0: rounds were played, and all of them were good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--jobs", type=int, default=1, help="rounds played side by side, each on cores of its own"
    )
    parser.add_argument("--only", default="", help="rounds in whose name this pattern is found")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no round after so long")
    parser.add_argument("--folder", type=Path, help="where to play; a temporary one else")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    kinds = [plan for plan in plans() if re.search(options.only, plan.name)]
    if not kinds or options.jobs < 1:
        parser.error(
            f"no kind of round is named like {options.only!r}"
            if not kinds
            else "--jobs is 1 or more"
        )
    began_s, played = time.monotonic(), list[Round]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended

    def told() -> str:
        text = f"{table(played)}\n\nseed {options.seed}, {time.monotonic() - began_s:.0f} s, {options.jobs} at a time\n"
        if options.out:
            options.out.write_text(text)
        return text

    numbers = range(options.first, options.first + options.rounds)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="virnuc-faults-", dir=options.folder) as name,
            prepared(Path(name) / "scene") as scene,
        ):
            make_truths(
                scene, works([kinds[number % len(kinds)] for number in numbers]), options.jobs
            )
            late = lambda: time.monotonic() - began_s > options.minutes * 60  # noqa: E731
            for one in rounds(numbers, scene, options.seed, kinds, options.jobs, late):
                played.append(one)
                print(line(one), flush=True)
                told()
    finally:  # also of what was played when somebody ends it
        print(told())
    bad = any(one.problems for one in played)
    return 0 if not bad and any(one.good for one in played) else 1


if __name__ == "__main__":
    sys.exit(main())
