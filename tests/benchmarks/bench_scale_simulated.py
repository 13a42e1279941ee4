"""What would limit 8, 64 and 512 GPUs, measured without any: workers sleep instead of computing.

    python -m tests.benchmarks.bench_scale_simulated                     # both parts, about 5 minutes on 2 cores
    python -m tests.benchmarks.bench_scale_simulated --parts clock       # handing out alone, some seconds
    python -m tests.benchmarks.bench_scale_simulated --reads 3000 --devices 1 2 --shards-per-s 40   # smoke

A device sleeps for as long as an H200 would compute a shard (`--tokens-per-s`, 192,000 ESM-2 tokens in int8).

Part `clock`: the real pool hands out the shards of a real plan, and the real journal is written, but time is a number
that jumps from event to event. Devices may differ in speed and in their start. It tells how long devices have no
work at the end of a run, and what handing out costs the submitting side, for any number of devices and reads.

Part `processes`: whole runs of the product, from the plan to the result files, over one staged store. Real are the
submitting process with its pool, journal, sampler and lease, a process for each device with real messages and
heartbeats, the commits (checksums, flush, rename), the telemetry and the result files. Not real: the workers are
forks without torch, nothing is computed, and embeddings are narrow (`--width`). So that a few cores hold them, the
devices are sped up or slowed down until all together finish `--shards-per-s`; eight H200s in int8 finish 6.

Prints tables in Markdown; `--json FILE` keeps all numbers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.benchmarks import sleeping_worker
from tests.forked_workers import Forker, forks_of_this_process, workers_of
from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.checkpoint import shape_of
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.embedding import Embedding, RunMonitor
from virnuc_core.engine.pool import Pool, PooledJob
from virnuc_core.engine.process import Child, Closed, LocalWorkers, Message, Ready, worker_specs
from virnuc_core.engine.shards import (
    Computed,
    ShardPlan,
    ShardResult,
    ShardTask,
    commit,
    plan_run,
    shard_path,
)
from virnuc_core.pipeline import _compute, prepare, stage_reads
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import Device, RunSummary
from virnuc_core.telemetry.journal import journal
from virnuc_core.telemetry.log import read_telemetry

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = "tests.benchmarks.sleeping_worker"
INT8_TOKENS_PER_S = 192_000.0  # of one H200, measured
# Of a million synthetic reads of 150 bases: frames, and residues of a frame.
FRAMES_PER_READ = 0.945
RESIDUES = (49, 50, 50)
FULL_WIDTH = 3_328  # ESM-2 3B and DNABERT-S
RESULT_STAGES = ("Model Prediction", "Consensus Scoring", "Result files")


def device_list(count: int) -> tuple[Device, ...]:
    """Return devices that do not exist. They are bound to no core."""
    return tuple(Device(id=f"asleep-{i:03d}", kind="cpu", name="asleep") for i in range(count))


# --- Part `clock` ---


class ClockChild(Child):
    """A worker without a process: its computations are events of a simulated clock."""

    def __init__(self, spec: Any, workers: ClockWorkers, number: int) -> None:
        """Note the speed of the device. It is ready after its start."""
        self._set_common_attributes(spec, workers._inbox)
        self._workers = workers
        self.slowness = workers.slowness[number]
        self.free_s = workers.starts_s[number]
        self.busy_s = 0.0
        self.began_s: float | None = None
        workers.push(self.free_s, self, Ready(record={"pid": number, "ready_s": 0.0}).line())

    @property
    def is_running(self) -> bool:
        """Return true, since there is no process that could end."""
        return True

    @property
    def is_silent(self) -> bool:
        """Return false: heartbeats are not simulated."""
        return False

    def send(self, message: Message) -> None:
        """Take a task: its answer comes when the device has computed it."""
        line = message.line()  # what the pool's thread spends on writing to a pipe
        self.last_progress_s = time.monotonic()
        with self._workers.own_time():
            task = Message.of(line)
            if isinstance(task, ShardTask):
                self._compute(task)

    def _compute(self, task: ShardTask) -> None:
        """Add the answer to a task to the events."""
        workers = self._workers
        tokens = workers.tokens_of(task)
        took_s = tokens / workers.tokens_per_s * self.slowness
        began_s = max(self.free_s, workers.now_s)
        if self.began_s is None:
            self.began_s = began_s
        self.free_s = began_s + took_s
        self.busy_s += took_s
        done = sleeping_worker.shard_done(
            task,
            self.device,
            tokens,
            started_s=began_s,
            computed_s=took_s,
            finished_s=self.free_s,
            commit_s=0.0,
        )
        workers.push(self.free_s, self, Computed(done=done).line())

    def end(self, grace_s: float = 0.0) -> int:
        """Return the status of a process that ended by itself."""
        return 0


class ClockWorkers(LocalWorkers):
    """Workers whose messages come from a list of events, in the order of their time."""

    def __init__(
        self,
        token_offsets: np.ndarray,
        tokens_per_s: float,
        slowness: Sequence[float],
        starts_s: Sequence[float],
    ) -> None:
        """Prepare devices of these speeds and starts."""
        super().__init__(WORKER)
        self._token_offsets = token_offsets
        self.tokens_per_s = tokens_per_s
        self.slowness = slowness
        self.starts_s = starts_s
        self.now_s = 0.0
        self.children: list[ClockChild] = []
        self.simulation_s = 0.0  # processor time that is not the submitting side's
        self._events: list[tuple[float, int, ClockChild, str]] = []
        self._n_events = 0

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Count the processor time of the `with` block as that of the simulation."""
        began_s = time.thread_time()
        yield
        self.simulation_s += time.thread_time() - began_s

    def tokens_of(self, task: ShardTask) -> int:
        """Return the ESM-2 tokens of a shard."""
        return int(self._token_offsets[task.hi] - self._token_offsets[task.lo])

    def push(self, time_s: float, child: ClockChild, line: str) -> None:
        """Add an event: a line that a worker will write."""
        self._n_events += 1
        heapq.heappush(self._events, (time_s, self._n_events, child, line))

    def _make(self, spec: Any) -> ClockChild:
        """Make the worker of a device."""
        child = ClockChild(spec, self, len(self.children))
        self.children.append(child)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """Move the clock to the next event, and return its message."""
        if not self._events:
            return super().receive(timeout_s)
        self.now_s, _, child, line = heapq.heappop(self._events)
        message = Message.of(line)  # as the thread that reads the pipe does
        if isinstance(message, Closed):
            return None
        return child, message


@dataclass(frozen=True, slots=True)
class ClockRun:
    """One simulated run of the part `clock`."""

    shards: int
    makespan_s: float  # from the first start of a device to the end of the last one
    idle_share: float  # of the devices' time, from the start of each device to the end of the last
    cpu_s: float  # of the submitting side
    device_s: float  # that all devices together computed


@dataclass(frozen=True, slots=True)
class ClockRow:
    """Runs of the part `clock` that differ by a percent of the reads, and in the devices' starts."""

    reads: int
    devices: int
    shards: int
    slowest: float  # the slowest device takes this many times as long as the fastest one
    makespan_s: float  # median
    idle_percent_mean: float
    idle_percent_highest: float
    cpu_ms_per_shard: float  # of the submitting side
    devices_per_core: float  # that would keep one core of the submitting side busy


def clock_row(reads: int, devices: int, spread: float, runs: Sequence[ClockRun]) -> ClockRow:
    """Return the figures of some runs."""
    idle_percents = [100 * run.idle_share for run in runs]
    cpu_s_per_shard = statistics.median(run.cpu_s / run.shards for run in runs)
    device_s_per_shard = statistics.median(run.device_s / run.shards for run in runs)
    return ClockRow(
        reads=reads,
        devices=devices,
        shards=runs[0].shards,
        slowest=1.0 + spread,
        makespan_s=statistics.median(run.makespan_s for run in runs),
        idle_percent_mean=statistics.mean(idle_percents),
        idle_percent_highest=max(idle_percents),
        cpu_ms_per_shard=1e3 * cpu_s_per_shard,
        devices_per_core=device_s_per_shard / cpu_s_per_shard,
    )


def plan_of(reads: int, shard_tokens: int) -> tuple[ShardPlan, np.ndarray]:
    """Return the plan of so many synthetic reads, and the position of the first token of each."""
    n_frames = int(FRAMES_PER_READ * reads)
    residues = np.resize(np.array(RESIDUES, np.int64), n_frames)
    offsets = np.concatenate([[0], np.cumsum(residues)])
    engine = EngineSpec(precision="int8", shard_tokens=shard_tokens)
    _, plan = plan_run(offsets, engine, {}, "cuda")
    return plan, offsets + sleeping_worker.SPECIAL_TOKENS * np.arange(n_frames + 1)


def run_clock(
    reads: int, slowness: Sequence[float], seed: int, options: argparse.Namespace, folder: Path
) -> ClockRun:
    """Let the real pool hand out the shards of a plan to devices of a simulated clock.

    Args:
        reads: Reads of the run.
        slowness: For each device: how many times as long as the fastest one it takes.
        seed: Decides when each device starts, within half a second.
        options: Speed of the devices, and tokens of a shard.
        folder: A scratch folder.
    """
    plan, token_offsets = plan_of(reads, options.shard_tokens)
    starts_s = np.random.default_rng(seed).uniform(0.0, 0.5, len(slowness)).tolist()
    workers = ClockWorkers(token_offsets, options.tokens_per_s, slowness, starts_s)
    devices = device_list(len(slowness))
    specs = worker_specs(folder, devices, EngineSpec(precision="int8"))
    task_fields = {"run": str(folder / "run"), "store": "none", "reads_fingerprint": "none"}
    tasks = []
    for shard in range(len(plan)):
        lo, hi = plan.range(shard)
        tasks.append(ShardTask(**task_fields, shard=shard, lo=lo, hi=hi))
    ids = [device.id for device in devices]
    with (
        journal(folder / "journal", 0.0, datetime.now(UTC), ids) as note,
        Pool(specs, workers) as pool,
    ):
        began_s = time.process_time()
        pool.compute(tasks, folder / "logs", note)
        cpu_s = time.process_time() - began_s - workers.simulation_s
    end_s = max(child.free_s for child in workers.children)
    device_s = sum(child.busy_s for child in workers.children)
    available_s = sum(end_s - start_s for start_s in starts_s)
    return ClockRun(
        shards=len(plan),
        makespan_s=end_s - min(starts_s),
        idle_share=1.0 - device_s / available_s,
        cpu_s=cpu_s,
        device_s=device_s,
    )


# --- Part `processes` ---


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One run with a process for each device."""

    devices: int
    shards: int
    speed_up: float  # of a device, over an H200 in int8
    embedding_s: float  # from the first launch to the last commit
    cpu_ms_per_shard: float  # of the submitting process while shards are computed
    cores: float  # that the submitting process kept busy meanwhile
    idle_start_share: float  # of the devices' time: until their first shard
    idle_between_share: float  # between two shards
    idle_end_share: float  # after their last shard
    longest_wait_ms: float  # of a device between two shards
    commit_median_ms: float
    commit_highest_ms: float
    result_files_s: float
    whole_s: float  # from the plan to the summary, with the start of the processes


def run_processes(
    folder: Path, models: Path, staging: StageSummary, count: int, options: argparse.Namespace
) -> ProcessRow:
    """Compute a run with sleeping processes, write its results, and measure it."""
    run = RunDir(folder / f"devices-{count}")
    devices = device_list(count)
    engine = EngineSpec(shard_tokens=options.shard_tokens)
    spec = ClassifySpec(models=models, devices=Devices.parse("cpu:1"), engine=engine)
    cpu_s: list[float] = []
    run_embedding = Embedding.run

    def timed_run(embedding: Embedding, pool: Pool | None = None) -> PooledJob:
        """Compute the shards, and note the processor time of this process."""
        began_s = time.process_time()
        job = run_embedding(embedding, pool)
        cpu_s.append(time.process_time() - began_s)
        return job

    with run_lock(run.root):
        started_s = time.monotonic()
        job = prepare(run, staging.store, spec, staging=staging, devices=devices)
        job = replace(job, worker=WORKER)
        shard_s = options.shard_tokens / options.tokens_per_s
        speed_up = options.shards_per_s * shard_s / count
        os.environ[sleeping_worker.RATE] = str(options.tokens_per_s * speed_up)
        os.environ[sleeping_worker.WIDTH] = str(options.width)
        with patch.object(Embedding, "run", timed_run):
            summary = _compute(job, staging, RunMonitor(), started_s, None)
        whole_s = time.monotonic() - started_s
    row = process_row(run, summary, speed_up, cpu_s[0], whole_s)
    shutil.rmtree(run.root)
    return row


def process_row(
    run: RunDir, summary: RunSummary, speed_up: float, cpu_s: float, whole_s: float
) -> ProcessRow:
    """Return the figures of a finished run, from its telemetry."""
    assert summary.telemetry is not None
    shards = read_telemetry((run.telemetry / summary.telemetry).with_suffix(".h5")).shards
    first_s = shards.started_s.min()
    last_s = shards.finished_s.max()
    n_devices = len(summary.devices)
    start_s = between_s = end_s = longest_wait_s = 0.0
    own_tables = [
        table.sort_values("started_s") for _, table in shards.groupby("device", observed=True)
    ]
    for own in own_tables:
        waits = own.started_s.to_numpy()[1:] - own.finished_s.to_numpy()[:-1]
        start_s += own.started_s.min() - first_s
        between_s += waits.sum()
        longest_wait_s = max(longest_wait_s, waits.max(initial=0.0))
        end_s += last_s - own.finished_s.max()
    end_s += (n_devices - len(own_tables)) * (last_s - first_s)  # devices without any shard
    device_s = n_devices * (last_s - first_s)
    embedding_s = float((shards.finished_s + shards.commit_s).max() - first_s)
    return ProcessRow(
        devices=n_devices,
        shards=len(shards),
        speed_up=speed_up,
        embedding_s=embedding_s,
        cpu_ms_per_shard=1e3 * cpu_s / len(shards),
        cores=cpu_s / embedding_s,
        idle_start_share=start_s / device_s,
        idle_between_share=between_s / device_s,
        idle_end_share=end_s / device_s,
        longest_wait_ms=1e3 * longest_wait_s,
        commit_median_ms=1e3 * float(shards.commit_s.median()),
        commit_highest_ms=1e3 * float(shards.commit_s.max()),
        result_files_s=sum(summary.stages[name] for name in RESULT_STAGES),
        whole_s=whole_s,
    )


@dataclass(frozen=True, slots=True)
class CommitRow:
    """What one commit of a shard with embeddings of full width costs here."""

    megabytes: float
    cpu_ms: float
    wall_median_ms: float
    wall_highest_ms: float


def measure_full_commits(folder: Path, plan: ShardPlan, repeats: int) -> CommitRow:
    """Commit shards with embeddings of the width of ESM-2 3B and DNABERT-S, one after the other."""
    run = RunDir(folder / "full-width")
    walls_s, cpus_s = [], []
    with run_lock(run.root):
        for shard in range(min(repeats, len(plan))):
            first, end = plan.range(shard)
            embeddings = np.full((end - first, FULL_WIDTH), 0.5, np.float32)
            result = ShardResult(embeddings, np.full((end - first, 2), 0.5, np.float32))
            began_s, cpu_began_s = time.monotonic(), time.process_time()
            path = commit(run, plan, shard, result)
            walls_s.append(time.monotonic() - began_s)
            cpus_s.append(time.process_time() - cpu_began_s)
        megabytes = shard_path(run, 0).stat().st_size / 1e6
        assert path.exists()
    shutil.rmtree(run.root)
    return CommitRow(
        megabytes=megabytes,
        cpu_ms=1e3 * statistics.median(cpus_s),
        wall_median_ms=1e3 * statistics.median(walls_s),
        wall_highest_ms=1e3 * max(walls_s),
    )


# --- The command ---


def print_table(title: str, rows: Sequence[Any]) -> None:
    """Print records as a table in Markdown, with a column for each field."""
    names = list(asdict(rows[0]))
    print(f"\n{title}\n")
    print("| " + " | ".join(names) + " |")
    print("|" + " ---: |" * len(names))
    for row in rows:
        values = asdict(row).values()
        texts = [f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" for value in values]
        print("| " + " | ".join(texts) + " |")
    sys.stdout.flush()


def measure_clock(options: argparse.Namespace, folder: Path) -> list[ClockRow]:
    """Simulate every number of reads on every number of devices, equal and unequal ones."""
    rows = []
    for reads in options.clock_reads:
        # Some more and some fewer reads, because the end of a run depends on the plan.
        varied_reads = np.linspace(0.99, 1.01, options.repeats) * reads
        for spread in (0.0, 0.03):
            for count in options.devices:
                slowness = np.linspace(1.0, 1.0 + spread, count).tolist()
                runs = [
                    run_clock(int(own_reads), slowness, seed, options, folder)
                    for seed, own_reads in enumerate(varied_reads)
                ]
                rows.append(clock_row(reads, count, spread, runs))
    print_table("Part `clock`", rows)
    return rows


def measure_processes(
    options: argparse.Namespace, folder: Path, forker: Forker
) -> tuple[list[ProcessRow], CommitRow | None]:
    """Stage reads once, and run them on every number of sleeping processes."""
    models = folder / "models"
    init_random(models, seed=1)
    reads = simulate(SimulateSpec(reads=options.reads, seed=11), folder / "reads.fastq").reads_file
    model_length = shape_of(models, HeadShape).model_length
    stage_spec = StageSpec(reads=(str(reads),), model_length=model_length)
    staging = stage_reads(stage_spec, folder / "staged" / "orfs.h5")
    rows = []
    with workers_of(forker):
        for count in options.devices:
            rows.append(run_processes(folder, models, staging, count, options))
            print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    print_table("Part `processes`", rows)
    commits = None
    if options.full_commits:
        plan, _ = plan_of(1_000_000, options.shard_tokens)
        commits = measure_full_commits(folder, plan, options.full_commits)
        print_table("Commits of full width", [commits])
    return rows, commits


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=["clock", "processes"], default=["clock", "processes"]
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 64, 512])
    parser.add_argument("--reads", type=int, default=1_000_000, help="of the part `processes`")
    parser.add_argument("--clock-reads", type=int, nargs="+", default=[1_000_000, 6_000_000])
    parser.add_argument("--repeats", type=int, default=10, help="of the part `clock`")
    parser.add_argument("--tokens-per-s", type=float, default=INT8_TOKENS_PER_S)
    parser.add_argument("--shard-tokens", type=int, default=EngineSpec().shard_tokens)
    parser.add_argument("--shards-per-s", type=float, default=12.0, help="of all processes")
    parser.add_argument("--width", type=int, default=96, help="numbers of an embedding")
    parser.add_argument(
        "--full-commits", type=int, default=10, help="shards of full width; 0: none"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scratch", type=Path, help="where the runs are written")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    with (
        tempfile.TemporaryDirectory(prefix="virnuc-scale-", dir=options.scratch) as name,
        forks_of_this_process([WORKER]) as forker,  # before this process has threads
    ):
        folder = Path(name)
        if "clock" in options.parts:
            results["clock"] = [asdict(row) for row in measure_clock(options, folder)]
        if "processes" in options.parts:
            rows, commits = measure_processes(options, folder, forker)
            results["processes"] = [asdict(row) for row in rows]
            if commits is not None:
                results["full_width_commits"] = asdict(commits)
    results["load_after"] = os.getloadavg()[0]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
