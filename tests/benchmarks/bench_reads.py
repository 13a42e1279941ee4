"""How fast reads become open frames: staging on one core beside the slow twin, on more cores, and its memory.

    python tests/benchmarks/bench_reads.py                        # 1,000,000 simulated reads, 1 and 2 workers
    python tests/benchmarks/bench_reads.py --workers 1 4 16       # on a larger machine
    python tests/benchmarks/bench_reads.py --reads FILE           # reads of your own
    python tests/benchmarks/bench_reads.py --memory               # peak memory of 500,000 and 5,000,000 reads
    python tests/benchmarks/bench_reads.py --n 2000 --repeats 1   # a smoke test

Prints a table; `--json FILE` keeps all of it. Each staging runs in a process of its own, kept on as many cores as it
has workers, and writes to a fresh folder. The kinds of run take turns, `--repeats` times, and medians are compared, so
that other work on the machine touches all alike. Beside the runs with several workers stands what the machine gives
when as many stagings of one worker run apart from each other at the same time: no way to share the work can beat that.
The twin is the method written down one base at a time (tests/unit/reads/reads_twin.py), on the first 5,000 reads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "reads"))

from reads_twin import rows

from virnuc_core.reads.parse import parse
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage

TWIN_READS = 5_000
SAMPLE_S = 0.02
Numbers = dict[str, Any]


def start(reads: Path, workers: int, cores: list[int]) -> subprocess.Popen[str]:
    """Begin one staging in a fresh process, on the given cores."""
    words = ["--one", str(reads), "--workers", str(workers), "--cores", *map(str, cores)]
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> Numbers:
    """What the measured process says at its end."""
    answer, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a measured staging failed with exit code {process.returncode}")
    return dict(json.loads(answer))


def measure(reads: Path, workers: int) -> Numbers:
    """Stage once, with as many cores as workers."""
    return answer_of(start(reads, workers, my_cores(workers)))


def apart(reads: Path, several: int) -> Numbers:
    """Several stagings of one worker at the same time, each on a core of its own: reads per second of all."""
    runs = [
        answer_of(process) for process in [start(reads, 1, [core]) for core in my_cores(several)]
    ]
    paces, seconds = [run["reads_per_s"] for run in runs], [run["cpu_s"] for run in runs]
    return {"reads_per_s": sum(paces), "cpu_s": statistics.mean(seconds)}  # seconds of one of them


def my_cores(wanted: int) -> list[int]:
    """Cores far from each other: neighbours are often the two threads of one."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[i * len(cores) // wanted % len(cores)] for i in range(wanted)]


def one(reads: Path, workers: int, cores: list[int]) -> Numbers:
    """The measured process."""
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory(dir=reads.parent) as folder, peak_of_all() as peak:
        cpu_before_s = cpu_s()
        summary = stage(
            StageSpec(reads=(str(reads),), stage_workers=workers), Path(folder) / "orfs.h5"
        )
        used = cpu_s() - cpu_before_s
    return {
        "reads": summary.counts.n_reads,
        "bases": summary.counts.n_bases,
        "rows": summary.counts.n_rows,
        "uniques": summary.counts.n_uniques,
        "fingerprint": summary.fingerprint,
        "workers": workers,
        "wall_s": summary.total_s,
        "cpu_s": used,
        "chunk_s": summary.chunk_s,
        "translate_s": summary.translate_s,
        "reads_per_s": summary.counts.n_reads / summary.total_s,
        "peak_bytes": peak[0],
    }


def cpu_s() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    usages = [
        resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def peak_of_all() -> Iterator[list[int]]:
    """The most resident bytes that this process and its children held at one time, summed; sampled."""
    peak, finished = [0], threading.Event()

    def watch() -> None:
        me = psutil.Process()
        is_over = False
        while not is_over:
            is_over = finished.wait(
                SAMPLE_S
            )  # a last look after the end, so that the shortest run has one
            held_bytes = 0
            for process in (me, *me.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    held_bytes += process.memory_info().rss
            peak[0] = max(peak[0], held_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        finished.set()
        thread.join()


def twin(reads: Path) -> Numbers:
    """The slow twin's pace on one core: chunk and translate only, it stores nothing."""
    pieces: list[tuple[str, str]] = []
    for batch in parse((str(reads),)):
        pieces += [(batch.id(i), batch.bases[i].decode()) for i in range(len(batch))]
        if len(pieces) >= TWIN_READS:
            break
    pieces = pieces[:TWIN_READS]
    started_s = time.perf_counter()
    table = rows(pieces, 500)
    wall_s = time.perf_counter() - started_s
    return {
        "reads": len(pieces),
        "rows": len(table),
        "wall_s": wall_s,
        "reads_per_s": len(pieces) / wall_s,
    }


def speed(reads: Path, workers: list[int], repeats: int) -> Numbers:
    """Staging with each number of workers, the same number apart, and the twin; medians over `repeats` rounds."""
    runs: dict[int, list[Numbers]] = {n: [] for n in workers}
    control: dict[int, list[Numbers]] = {n: [] for n in workers if n > 1}
    twins = []
    for _ in range(repeats):
        twins.append(twin(reads))
        for n in workers:
            runs[n].append(measure(reads, n))
        for n, tries in control.items():
            tries.append(apart(reads, n))
    if len({run["fingerprint"] for tries in runs.values() for run in tries}) != 1:
        raise SystemExit("the fingerprints of the stagings differ")
    slow, twin_rate = median(twins, "reads_per_s"), median(runs[1], "reads_per_s")
    lines = [{"kind": "slow twin", "workers": 1, "reads_per_s": slow, "over_one": slow / twin_rate}]
    for n in workers:
        pace = median(runs[n], "reads_per_s")
        medians = {
            key: median(runs[n], key) for key in ("wall_s", "cpu_s", "chunk_s", "peak_bytes")
        }
        lines.append(
            {
                "kind": "staging",
                "workers": n,
                "reads_per_s": pace,
                "over_one": pace / twin_rate,
                **medians,
            }
        )
        if n > 1:
            highest_rate = median(control[n], "reads_per_s")
            cpu = median(control[n], "cpu_s")
            lines.append(
                {
                    "kind": "apart",
                    "workers": n,
                    "reads_per_s": highest_rate,
                    "over_one": highest_rate / twin_rate,
                    "cpu_s": cpu,
                }
            )
            lines[-2]["of_apart"] = pace / highest_rate
    return {
        "times_the_twin": twin_rate / slow,
        "chunk_share": median(runs[1], "chunk_s") / median(runs[1], "wall_s"),
        "lines": lines,
        "all_reads_per_s": {
            n: [round(run["reads_per_s"]) for run in tries] for n, tries in runs.items()
        },
        "all_apart_reads_per_s": {
            n: [round(run["reads_per_s"]) for run in tries] for n, tries in control.items()
        },
    }


def median(runs: list[Numbers], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def table(result: Numbers) -> Iterator[str]:
    """The lines people read."""
    yield f"{'':10} {'workers':>7} {'reads/s':>10} {'over 1':>7} {'of apart':>8} {'cpu s':>7} {'peak MB':>8}"
    for line in result["lines"]:
        tail = "".join(
            f" {line[key] / unit:>{width}.{digits}f}" if key in line else " " * (width + 1)
            for key, width, digits, unit in (
                ("of_apart", 8, 2, 1),
                ("cpu_s", 7, 2, 1),
                ("peak_bytes", 8, 0, 1e6),
            )
        )
        yield f"{line['kind']:10} {line['workers']:>7} {line['reads_per_s']:>10,.0f} {line['over_one']:>7.2f}{tail}"
    yield f"one worker is {result['times_the_twin']:.1f} times as fast as the slow twin"
    yield f"unpacking, reading and chunking are {result['chunk_share']:.1%} of one worker's time"


def memory(folder: Path, sizes: list[int], workers: list[int]) -> Numbers:
    """Peak memory of staging few and many gzipped reads."""
    rows_ = []
    for n in sizes:
        reads = folder / f"{n}.fastq.gz"
        simulate(SimulateSpec(reads=n, genome_length=500_000), reads)
        rows_ += [measure(reads, count) for count in workers]
        reads.unlink()
    ratios = {
        count: rows_[-len(workers) + i]["peak_bytes"] / rows_[i]["peak_bytes"]
        for i, count in enumerate(workers)
    }
    return {"runs": rows_, "largest_over_smallest": ratios}


def memory_table(result: Numbers) -> Iterator[str]:
    for run in result["runs"]:
        yield f"{run['reads']:>10,} reads, {run['workers']:>2} workers: peak {run['peak_bytes'] / 1e6:,.0f} MB"
    for workers, ratio in result["largest_over_smallest"].items():
        yield f"{workers} workers: {ratio:.2f} times the memory for the larger input"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reads", type=Path, help="file of reads; unset: simulated")
    parser.add_argument("--n", type=int, default=1_000_000, help="simulated reads")
    parser.add_argument("--gz", action="store_true", help="gzip the simulated reads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[500_000, 5_000_000], help="reads, for --memory"
    )
    parser.add_argument("--json", type=Path, help="file that keeps the result")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(options.one, options.workers[0], options.cores)))
        return
    result: Numbers = {"python": platform.python_version(), "machine": platform.machine()}
    result["cores"] = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.memory:
            result["memory"] = memory(folder, options.sizes, options.workers)
            lines = memory_table(result["memory"])
        else:
            reads = options.reads
            if reads is None:
                reads = folder / ("reads.fastq.gz" if options.gz else "reads.fastq")
                simulate(SimulateSpec(reads=options.n, genome_length=500_000), reads)
            result["speed"] = speed(reads, sorted({1, *options.workers}), options.repeats)
            lines = table(result["speed"])
        print("\n".join(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
