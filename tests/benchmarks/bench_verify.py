"""How long `virnuc verify` takes for a validation of many reads, and how much memory it needs.

    python -m tests.benchmarks.bench_verify                  # 100,000 and 1,000,000 reads
    python -m tests.benchmarks.bench_verify --reads 2000     # a smoke test

Makes a validation of each size first, in a temporary folder (see tests/large_validation.py), then verifies it in a
process of its own. Prints a line for each size. The memory is the largest sum of the anonymous pages of the process and
its children. Pages of mapped files do not count, because the system takes them back when it needs memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.large_validation import make_large_validation

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_S = 0.05
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reads", type=int, nargs="+", default=[100_000, 1_000_000])
    for n_reads in parser.parse_args().reads:
        with tempfile.TemporaryDirectory(prefix="bench-verify-") as folder:
            out = make_large_validation(Path(folder), n_reads)
            seconds, peak = verify(out)
        print(f"{n_reads:>12,} reads: {seconds:6.1f} s, {peak / MIB:6,.0f} MiB", flush=True)


def verify(out: Path) -> tuple[float, int]:
    """Verify a validation in a new process. Return the seconds, and the most bytes of memory."""
    started_s = time.perf_counter()
    peak = 0
    words = [sys.executable, "-m", "virnuc.flows.cli", "verify", str(out)]
    with subprocess.Popen(words, cwd=ROOT) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error, OSError):  # a process may have ended since it was listed
                family = [parent, *parent.children(recursive=True)]
                peak = max(peak, sum(anonymous_bytes(member.pid) for member in family))
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"the validation in {out} is not as reported")
    return time.perf_counter() - started_s, peak


def anonymous_bytes(pid: int) -> int:
    """Return the bytes of a process that belong to no file; 0 if it has just ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return 0


if __name__ == "__main__":
    main()
