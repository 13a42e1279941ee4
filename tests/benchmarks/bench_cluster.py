"""What the way through Dask costs: the submitting side under many workers, and pairs of runs on this machine.

    python tests/benchmarks/bench_cluster.py sleepers --devices 512 --shards 200000
    python tests/benchmarks/bench_cluster.py pairs --pairs 5 --reads 20000 --models DIR

`sleepers`: nodes of one other process, whose workers sleep and then tell of a shard as real ones do, with its batches.
`pairs`: `--devices cpu:1`, `cpu:2` and `--cluster local:2` in turn, from the first batch to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py

from virnuc_core.config import ClusterSpec, Devices, EngineSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine import node
from virnuc_core.engine.process import Message, Ready, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.journal import journal
from virnuc_core.telemetry.tables import BatchRecord, ShardDone

BATCHES = 32  # of a shard of 262,144 tokens


class Sleeping(node.Node):
    """A node whose workers take a while for each shard, and no processor."""

    devices, sleep_s = 8, 1.0

    def __init__(self, module: str, disk: str | None = None) -> None:
        super().__init__(module, disk)
        self.names: dict[int, str] = {}
        self.messages: asyncio.Queue[node.WorkerLine] = asyncio.Queue()
        self.free_s: dict[int, float] = {}

    def facts(self, devices: str) -> str:
        facts = node.Facts.model_validate_json(super().facts("cpu"))
        gpus = [
            Device(id=f"GPU-{id(self):x}-{i}", kind="cuda", name="asleep")
            for i in range(self.devices)
        ]
        return facts.model_copy(update={"gpus": tuple(gpus)}).model_dump_json()

    async def follow(self, orders: str) -> None:
        loop = asyncio.get_running_loop()
        now_s = time.monotonic()
        for order in node.Orders.model_validate_json(orders).lines:
            child = order.number
            message = Message.of(order.line)
            if isinstance(message, WorkerSpec):
                self.names[child] = message.device.id
                record = {
                    "device": message.device.id,
                    "pid": child,
                    "started_s": now_s,
                    "ready_s": 0.0,
                }
                self._put(child, Ready(record=record))
            elif isinstance(message, ShardTask):
                began_s = max(now_s, self.free_s.get(child, now_s))
                self.free_s[child] = began_s + self.sleep_s
                messages = answer(message, self.names[child], began_s, self.sleep_s)
                loop.call_later(began_s + self.sleep_s - now_s, self._put, child, messages)
            elif isinstance(message, node.End):
                self._put(child, node.Ended(status=0, last_words=""))

    def _put(self, child: int, message: Message) -> None:
        self.messages.put_nowait(node.WorkerLine(number=child, line=message.line()))

    async def report(self) -> str:
        lines = []
        try:
            async with asyncio.timeout(node.REPORT_S):
                lines.append(await self.messages.get())
            await asyncio.sleep(node.GATHER_S)
        except TimeoutError:
            pass
        while not self.messages.empty():
            lines.append(self.messages.get_nowait())
        return node.NodeReport(now_s=time.monotonic(), lines=tuple(lines)).model_dump_json()


def answer(task: ShardTask, device: str, began_s: float, took_s: float) -> Computed:
    """What a worker says of a shard."""
    batch = BatchRecord(
        device, "esm2", task.shard, 0, 300, 16_000, 16_384, 0.1, began_s, began_s, 140.0
    )
    counts: dict[str, Any] = {
        "rows": task.hi - task.lo,
        "protein_tokens": 262_144,
        "dna_tokens": 170_000,
    }
    times = {"started_s": began_s, "finished_s": began_s + took_s, "dna_s": 0.1, "protein_s": 0.8}
    shard_done = ShardDone(
        device,
        task.shard,
        **counts,
        **times,
        head_s=0.01,
        commit_s=0.01,
        batches=(batch,) * BATCHES,
    )
    return Computed(done=shard_done)


async def serve(nodes: int, devices: int, sleep_s: float, folder: Path) -> None:
    """A scheduler and nodes in this process, until it is killed."""
    from distributed import Scheduler, Worker

    node.Node, Sleeping.devices, Sleeping.sleep_s = Sleeping, devices // nodes, sleep_s  # type: ignore[misc]
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(nodes):
            worker = Worker(
                scheduler.address, nthreads=1, host="127.0.0.1", local_directory=str(folder)
            )
            group.create_task(worker.__aenter__())
        (folder / "address").write_text(scheduler.address)
        await asyncio.Event().wait()


def sleepers(options: argparse.Namespace, folder: Path) -> None:
    """Print how many shards a second the submitting side hears of, hands out and notes."""
    from virnuc_core.engine.cluster import Cluster

    words = [
        sys.executable,
        __file__,
        "serve",
        "--nodes",
        options.nodes,
        "--devices",
        options.devices,
    ]
    words += ["--sleep-s", options.sleep_s, "--folder", folder]
    child = subprocess.Popen(
        [*map(str, words)], env={**os.environ, "DASK_LOGGING__DISTRIBUTED": "error"}
    )
    try:
        while not (folder / "address").exists():
            time.sleep(0.1)
        init_random(folder / "models", "tiny", "tiny", seed=1)
        engine, run = EngineSpec(precision="fp16"), folder / "run"
        spec = ClusterSpec(cluster=(folder / "address").read_text(), nodes=str(options.nodes))
        pool = Cluster(spec, folder / "models", Devices.parse("auto"), engine, run).pool()
        shard_message: dict[str, Any] = {
            "run": str(run),
            "store": "none",
            "reads_fingerprint": "none",
        }
        tasks = [ShardTask(**shard_message, shard=i, lo=i, hi=i + 1) for i in range(options.shards)]
        specs, reports, began_s = pool.specs, list[float](), time.process_time()
        with ExitStack() as resources:
            ids = [one.device.id for one in specs]
            keep = resources.enter_context(
                journal(folder / "journal", time.monotonic(), datetime.now(UTC), ids)
            )

            def note(noted: ShardDone | str) -> None:
                keep(noted)
                reports.append(time.monotonic())

            resources.enter_context(pool).compute(tasks, run / "logs", note)
        whole_s = reports[-1] - reports[0]
        rates = sorted(
            1000 / (b - a) for a, b in zip(reports[::1000], reports[1000::1000], strict=False)
        )
        cost_ms = 1e3 * (time.process_time() - began_s) / len(reports)
        print(
            f"{len(reports)} shards by {len(specs)} workers of {options.nodes} nodes: {len(reports) / whole_s:.0f} a second"
        )
        slowest, fastest = (
            (rates or [math.nan])[0],
            (rates or [math.nan])[-1],
        )  # none of fewer than 1,001 shards
        print(
            f"by thousands {slowest:.0f} to {fastest:.0f}; their sleep allows {len(specs) / options.sleep_s:.0f}"
        )
        print(
            f"the submitting side takes {cost_ms:.2f} ms of a core for a shard: {1e3 / cost_ms:.0f} a second at most"
        )
    finally:
        child.kill()


def one(words: Sequence[str], out: Path) -> float:
    """Tokens a second of a run, from its first batch to its last."""
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", "predict", *words, "-o", str(out), "--quiet"],
        check=True,
    )
    with h5py.File(next((out / "telemetry").glob("*.h5"))) as file:
        shards = file["shards"]
        return float(
            shards["protein_tokens"][:].sum()
            / (shards["finished_s"][:].max() - shards["started_s"][:].min())
        )


def pairs(options: argparse.Namespace, folder: Path) -> None:
    """Print the rates of runs in turn, and their ratios."""
    reads = folder / "reads.fastq"
    words = ["simulate", str(reads), "--reads", str(options.reads)]
    subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", *words], check=True, stdout=subprocess.DEVNULL
    )
    common = [
        str(reads),
        "--models",
        options.models,
        "--no-prefect",
        "--shard-tokens",
        str(options.shard_tokens),
    ]
    two = {"local": ["--devices", "cpu:2"], "nodes": ["--devices", "cpu", "--cluster", "local:2"]}
    ways, ratios = (
        {"one": ["--devices", "cpu:1"], **two},
        {"local": list[float](), "one": list[float]()},
    )
    for turn in range(options.pairs):
        order = list(ways) if turn % 2 else list(ways)[::-1]
        rates = {way: one([*common, *ways[way]], folder / way) for way in order}
        for way, measured_ratios in ratios.items():
            measured_ratios.append(rates["nodes"] / rates[way])
        print(", ".join(f"{way} {rate:,.0f} tokens/s" for way, rate in rates.items()), flush=True)
    for way, measured_ratios in ratios.items():
        middle, low, high = (
            statistics.median(measured_ratios),
            min(measured_ratios),
            max(measured_ratios),
        )
        print(
            f"nodes / {way}: median {middle:.4f} ({low:.4f} to {high:.4f}) of {len(measured_ratios)}"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["sleepers", "serve", "pairs"])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--devices", type=int, default=512)
    parser.add_argument("--shards", type=int, default=200_000)
    parser.add_argument("--sleep-s", type=float, default=0.5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--shard-tokens", type=int, default=65_536)
    parser.add_argument("--models")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what == "serve":
        asyncio.run(serve(options.nodes, options.devices, options.sleep_s, options.folder))
    with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as name:
        {"sleepers": sleepers, "pairs": pairs}[options.what](options, Path(name))


if __name__ == "__main__":
    main()
