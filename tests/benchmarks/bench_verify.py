"""How long the commands for finished runs take with many reads, and how much memory: verify, export and rescore.

    python -m tests.benchmarks.bench_verify                              # verify: 100,000 and 1,000,000 reads
    python -m tests.benchmarks.bench_verify --reads 250000 500000 1000000 --commands verify export rescore
    python -m tests.benchmarks.bench_verify --reads 2000                 # a smoke test

Makes a validation of each size first, in a temporary folder (see tests/large_validation.py). Then each command works on
it in a process of its own: `export` and `rescore` on its run on one device, `rescore` with the same classifier, so that
all embeddings are read and scored. Prints a line for each. The seconds are those of a clock and of processors, with
all child processes. The memory is the largest sum of the anonymous pages of the process and its children. Pages of
mapped files do not count, because the system takes them back when it needs memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.large_validation import make_large_validation

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_S = 0.05
MIB = 1 << 20
COMMANDS = ("verify", "export", "rescore")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command took."""

    seconds: float
    processor_s: float
    peak_bytes: int


def words_of(command: str, validation: Path) -> list[str]:
    """Return the words of a command on a validation, or on its run on one device."""
    run = str(validation / "devices-1")
    out = str(validation.parent / command)
    models = str(validation.parent / "models")
    words = {
        "verify": ["verify", str(validation)],
        "export": ["export", run, "--out", out],
        "rescore": ["rescore", run, "--head", models, "--out", out],
    }
    return words[command]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reads", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=["verify"])
    options = parser.parse_args()
    for n_reads in options.reads:
        with tempfile.TemporaryDirectory(prefix="bench-verify-") as folder:
            out = make_large_validation(Path(folder), n_reads)
            for command in options.commands:
                cost = measure(words_of(command, out))
                print(
                    f"{n_reads:>12,} reads: {command:8}{cost.seconds:6.1f} s, "
                    f"{cost.processor_s:6.1f} core seconds, {cost.peak_bytes / MIB:6,.0f} MiB",
                    flush=True,
                )


def measure(words: Sequence[str]) -> Cost:
    """Run a command in a new process, and return its time and its peak of memory."""
    started_s = time.perf_counter()
    used_before_s = children_processor_s()
    peak = 0
    command = [sys.executable, "-m", "virnuc.flows.cli", *words]
    with subprocess.Popen(command, cwd=ROOT) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error, OSError):  # a process may have ended since it was listed
                family = [parent, *parent.children(recursive=True)]
                peak = max(peak, sum(anonymous_bytes(member.pid) for member in family))
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"virnuc {words[0]} failed with exit code {process.returncode}")
    seconds = time.perf_counter() - started_s
    return Cost(seconds, children_processor_s() - used_before_s, peak)


def children_processor_s() -> float:
    """Return the seconds that ended child processes, and theirs, have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process that belong to no file; 0 if it has just ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return 0


if __name__ == "__main__":
    main()
