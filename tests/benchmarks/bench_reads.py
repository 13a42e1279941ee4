"""How fast reads become open frames: staging on one core beside the slow twin, on more cores, and its memory.

    python tests/benchmarks/bench_reads.py                  # speed: 500,000 simulated reads of 150 bases
    python tests/benchmarks/bench_reads.py --memory         # peak memory of 500,000 and 5,000,000 reads
    python tests/benchmarks/bench_reads.py --reads FILE     # speed on reads of your own

Prints one JSON object. Each staging runs in a process of its own, kept on as many cores as it has workers, and writes
to a fresh folder; the best of `--repeats` counts, since other work on the machine can only slow it down. The twin is
the method written down one base at a time (tests/unit/reads/reads_twin.py), on the first 5,000 reads, same core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "reads"))

from reads_twin import rows

from virnuc_core.reads.parse import parse
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage

TWIN_READS = 5_000


def measure(reads: Path, workers: int, cores: int) -> dict[str, float]:
    """Stage once in a fresh process; seconds, reads per second and peak resident bytes of it and its helpers."""
    command = [sys.executable, __file__, "--one", str(reads), "--workers", str(workers), "--cores", str(cores)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer))


def one(reads: Path, workers: int, cores: int) -> dict[str, float]:
    """The measured process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    with tempfile.TemporaryDirectory(dir=reads.parent) as folder:
        cpu = time.process_time()
        summary = stage(StageSpec(reads=(str(reads),), workers=workers), Path(folder) / "orfs.h5")
        cpu = time.process_time() - cpu
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "reads": summary.counts.n_reads,
        "bases": summary.counts.n_bases,
        "rows": summary.counts.n_rows,
        "uniques": summary.counts.n_uniques,
        "workers": workers,
        "wall_s": summary.total_s,
        "cpu_s": cpu,
        "parse_s": summary.parse_s,
        "chunk_s": summary.chunk_s,
        "translate_s": summary.translate_s,
        "store_s": summary.store_s,
        "reads_per_s": summary.reads_per_s,
        "peak_bytes": peak * 1024,
    }


def twin(reads: Path) -> dict[str, float]:
    """The slow twin's pace on one core: chunk and translate only, it stores nothing."""
    taken = []
    for batch in parse((str(reads),)):
        at = batch.base_offsets
        taken += [(batch.id(i), batch.bases[at[i] : at[i + 1]].decode()) for i in range(len(batch))]
        if len(taken) >= TWIN_READS:
            break
    taken = taken[:TWIN_READS]
    started = time.perf_counter()
    made = rows(taken, 500)
    wall_s = time.perf_counter() - started
    return {"reads": len(taken), "rows": len(made), "wall_s": wall_s, "reads_per_s": len(taken) / wall_s}


def speed(reads: Path, repeats: int) -> dict[str, object]:
    """Staging with 1 worker on 1 core and with 2 workers on 2 cores, beside the twin."""
    tries = {workers: [measure(reads, workers, workers) for _ in range(repeats)] for workers in (1, 2)}
    best = {workers: max(runs, key=lambda run: run["reads_per_s"]) for workers, runs in tries.items()}
    slow = twin(reads)
    return {
        "one_core": best[1],
        "one_core_all_reads_per_s": [round(run["reads_per_s"]) for run in tries[1]],
        "two_cores": best[2],
        "twin": slow,
        "times_the_twin": best[1]["reads_per_s"] / slow["reads_per_s"],
        "two_cores_over_one": best[2]["reads_per_s"] / best[1]["reads_per_s"],
    }


def memory(folder: Path) -> dict[str, object]:
    """Peak memory of staging 500,000 and 5,000,000 reads."""
    peaks = {}
    for n in (500_000, 5_000_000):
        reads = folder / f"{n}.fastq.gz"
        simulate(SimulateSpec(reads=n, genome_length=500_000), reads)
        peaks[n] = measure(reads, 1, 1)
        reads.unlink()
    return {
        "runs": list(peaks.values()),
        "ratio": peaks[5_000_000]["peak_bytes"] / peaks[500_000]["peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=Path, help="file of reads; unset: simulated")
    parser.add_argument("--n", type=int, default=500_000, help="simulated reads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given.one, given.workers, given.cores)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, object] = {"python": platform.python_version(), "machine": platform.processor()}
        if given.memory:
            result["memory"] = memory(folder)
        else:
            reads = given.reads
            if reads is None:
                reads = folder / "reads.fastq"
                simulate(SimulateSpec(reads=given.n, genome_length=500_000), reads)
            result["speed"] = speed(reads, given.repeats)
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
