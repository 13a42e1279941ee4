"""What Prefect costs a validation: the flow against the very same steps called one after another, in pairs.

    python tests/benchmarks/bench_prefect_overhead.py --out overhead.json
    python tests/benchmarks/bench_prefect_overhead.py --pairs 1 --reads 200                     # smoke

Three ways, each a process of its own, in turn: `bare` calls the steps as functions; `server` is `virnuc validate` with
a server that runs already; `embedded` is `virnuc validate` with none, so that it starts its own and stops it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

ROOT: Final = Path(__file__).resolve().parents[2]
SCHEMA_VERSION: Final = 1
LIMIT_S: Final = 15.0
PROFILE: Final = "ci-smoke"
WAYS: Final = ("bare", "server", "embedded")


def timed(words: list[str], environment: dict[str, str]) -> float:
    """Wall seconds of a process; ends this one with what it printed when it fails."""
    started_s = time.perf_counter()
    process = subprocess.run(
        words, env=environment, cwd=ROOT, check=False, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started_s
    if process.returncode:
        raise SystemExit(
            f"{words}: exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
        )
    return seconds


def clean_environment(home: Path) -> dict[str, str]:
    """No server named, and Prefect's data in `home`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    return {**environment, "PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT)}


@contextmanager
def server(environment: dict[str, str], log: Path) -> Iterator[dict[str, str]]:
    """A running server; yields the environment of commands that use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    words = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    with log.open("wb") as handle:
        quiet = {**environment, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        process = subprocess.Popen(words, env=quiet, stdout=handle, stderr=handle)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            time.sleep(0.2)
        yield {**environment, "PREFECT_API_URL": url}
    finally:
        process.terminate()
        process.wait(30)


def once(
    way: str, given: argparse.Namespace, out: Path, environments: dict[str, dict[str, str]]
) -> float:
    """Seconds of one validation."""
    inputs = [
        str(given.scratch / "reads.fastq.gz"),
        str(given.scratch / "models"),
        str(out),
        given.devices,
    ]
    if way == "bare":
        return timed([sys.executable, "-m", "tests.bare", *inputs], environments["bare"])
    words = [
        "--profile",
        PROFILE,
        "--reads",
        inputs[0],
        "--models",
        inputs[1],
        "-o",
        inputs[2],
        "--devices",
        inputs[3],
    ]
    return timed([sys.executable, "-m", "virnuc.flows.cli", "validate", *words], environments[way])


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way, once per pair, after one unmeasured round that fills caches and makes databases."""
    from virnuc_core.encoders.convert import init_random
    from virnuc_core.reads.simulate import SimulateSpec, simulate

    given.scratch.mkdir(parents=True, exist_ok=True)
    simulate(SimulateSpec(reads=given.reads, seed=5), given.scratch / "reads.fastq.gz")
    init_random(given.scratch / "models", seed=5)
    own = clean_environment(given.scratch / "home-server")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with server(own, given.scratch / "server.log") as server_process:
        embedded_environment = clean_environment(given.scratch / "home-embedded")
        environments = {"bare": own, "server": server_process, "embedded": embedded_environment}
        for number in range(given.pairs + 1):
            for way in WAYS:
                out_dir = given.scratch / "out" / f"{way}-{number}"
                took = once(way, given, out_dir, environments)
                shutil.rmtree(out_dir)
                print(f"{'warm-up' if number == 0 else number}  {way:<9}{took:7.2f} s", flush=True)
                if number:
                    seconds[way].append(took)
    return seconds


def summary_of(given: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the overhead of each way in each pair."""
    differences_s = {
        way: [took - plain for took, plain in zip(seconds[way], seconds["bare"], strict=True)]
        for way in WAYS
        if way != "bare"
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "reads": given.reads,
        "devices": given.devices,
        "profile": PROFILE,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "overhead_s": differences_s,
        "median_overhead_s": {
            way: statistics.median(values) for way, values in differences_s.items()
        },
        "limit_s": LIMIT_S,
    }


def main() -> int:
    """Measure, print, write; 1 when the median overhead is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--reads", type=int, default=1000)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="virnuc-overhead-") as folder:
        options.scratch = Path(folder)
        body = summary_of(options, measure(options))
    for way, overhead in body["median_overhead_s"].items():
        print(
            f"{way}: {overhead:.1f} s over bare (median of {options.pairs} pairs; limit {LIMIT_S:.0f} s)"
        )
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return int(max(body["median_overhead_s"].values()) > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
