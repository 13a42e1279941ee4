"""How much of the bare encoders' speed a whole run keeps: utilisation, packing, waits, scaling, and what commits cost.

    python tests/benchmarks/bench_engine.py --out engine.json                             # ESM-2 3B on the first GPU
    python tests/benchmarks/bench_engine.py --devices cuda:0 cuda:0,cuda:1 --reads 200000
    python tests/benchmarks/bench_engine.py --esm2 tiny --dnabert-s tiny --devices cpu:1 cpu:2 --reads 3000   # smoke

Reads are simulated, weights random. Everything is written to a scratch folder (`--scratch`) and kept if that is given.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from virnuc_core import gpus
from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.convert import init_random
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.tokenize import PackedBatch
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.engine.loader import Batch, Loader
from virnuc_core.pipeline import prepare
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.log import Telemetry, read_telemetry
from virnuc_core.telemetry.statistics import (
    batch_metrics,
    by_encoder,
    device_busy,
    device_time_spread,
    device_usage,
    embedding_span,
)

SCHEMA_VERSION = 1
KINDS = {"esm2": Esm2, "dnabert_s": DnabertS}


@dataclass(frozen=True, slots=True)
class Bare:
    """The encoders alone, on batches of the same store that already lie on the device."""

    esm2_tokens_per_s: float
    dnabert_s_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the engine."""

    devices: str
    commits: bool
    sample_s: float
    wall_s: float
    window_s: float  # first batch launched to last finished
    tokens: int  # ESM-2 and DNABERT-S
    tokens_per_s: float
    of_bare: float | None  # bare seconds for the same tokens ÷ (devices × window)
    lowest_utilisation: float | None  # percent
    packing: float
    packing_esm2: float
    packing_dnabert_s: float
    starved: int
    p95_wait_ms: float | None
    spread: float | None
    first_batch_s: float  # from the worker's start
    commit_s: float


def spin(encoder: Any, batches: list[PackedBatch], seconds: float) -> float:
    """Return sustained real tokens/s: the median of torch's timer, which waits for the device."""
    names = {"embed": encoder.embed, "batches": batches}
    timer = Timer("for batch in batches: embed(batch)", globals=names)
    measurement = timer.blocked_autorange(min_run_time=seconds)
    n_tokens = sum(batch.real_tokens for batch in batches)
    return n_tokens / float(measurement.median)


def batches_of(job: Job, encoder: str, device: torch.device) -> list[PackedBatch]:
    """Return the first shard's batches of one encoder, on the device."""
    loader = Loader(job.spec.models, job.engine, pin=False)
    items = loader.load(*job.tasks([0]))
    return [
        item.packed.to(device)
        for item in items
        if isinstance(item, Batch) and item.encoder == encoder
    ]


def bare(job: Job, seconds: float) -> Bare:
    """Measure both encoders on the first shard's batches."""
    engine = job.engine
    device = torch.device("cuda:0" if job.devices[0].kind == "cuda" else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    rates = {}
    for name, kind in KINDS.items():
        encoder = load_encoder(kind, job.spec.models, device, engine.precision, engine.attention)
        rates[name] = spin(encoder, batches_of(job, name, device), seconds)
        del encoder
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Bare(rates["esm2"], rates["dnabert_s"])


def row_of(
    devices: str,
    job: Job,
    watch: RunMonitor,
    wall_s: float,
    measured: Telemetry,
    alone: Bare | None,
) -> Row:
    """Return the figures of one run."""
    window = embedding_span(measured.batches)
    assert window is not None
    started_s, finished_s = window
    span = finished_s - started_s
    totals = batch_metrics(measured.batches)
    parts = by_encoder(measured.batches)
    tokens = {name: metrics.tokens for name, metrics in parts.items()}
    of_bare = None
    if alone is not None:
        esm2_s = tokens["esm2"] / alone.esm2_tokens_per_s
        dnabert_s = tokens["dnabert_s"] / alone.dnabert_s_tokens_per_s
        of_bare = (esm2_s + dnabert_s) / (span * len(job.devices))
    usage = [device_usage(measured.samples, device.id, window) for device in job.devices]
    utilisation = [device.gpu_util_avg for device in usage if device.gpu_util_avg is not None]
    queue = totals.queue
    return Row(
        devices=devices,
        commits=job.engine.commit,
        sample_s=watch.sample_s,
        wall_s=wall_s,
        window_s=span,
        tokens=sum(tokens.values()),
        tokens_per_s=sum(tokens.values()) / span,
        of_bare=of_bare,
        lowest_utilisation=min(utilisation, default=None),
        packing=totals.packing_efficiency or 0.0,
        packing_esm2=parts["esm2"].packing_efficiency or 0.0,
        packing_dnabert_s=parts["dnabert_s"].packing_efficiency or 0.0,
        starved=0 if queue is None else round(queue.starved * totals.batches),
        p95_wait_ms=totals.p95_wait_ms,
        spread=device_time_spread(device_busy(measured.shards)),
        first_batch_s=started_s - measured.origin_s,
        commit_s=float(measured.shards.commit_s.sum()),
    )


def variants(options: argparse.Namespace) -> Iterator[tuple[str, bool, float]]:
    """Yield the devices, commits and sampling interval of each run."""
    for _ in range(options.repeats):
        for devices in options.devices:
            yield devices, True, 0.5
        if options.overheads:
            yield options.devices[0], False, 0.5
            yield options.devices[0], True, 3600.0


def text(rows: list[Row], alone: Bare | None) -> str:
    """Return a Markdown table."""
    lines = [
        "| devices | commits | sampler s | wall s | window s | tokens/s | of bare | lowest util % | packing | ESM-2 | "
        "DNABERT-S | starved | p95 wait ms | spread | first batch s | commit s |",
        "| --- " * 16 + "|",
    ]
    for r in rows:
        cells = (
            r.devices,
            "on" if r.commits else "off",
            f"{r.sample_s:g}",
            f"{r.wall_s:.1f}",
            f"{r.window_s:.2f}",
            f"{r.tokens_per_s:,.0f}",
            "-" if r.of_bare is None else f"{100 * r.of_bare:.1f} %",
            "-" if r.lowest_utilisation is None else f"{r.lowest_utilisation:.1f}",
            f"{100 * r.packing:.2f} %",
            f"{100 * r.packing_esm2:.2f} %",
            f"{100 * r.packing_dnabert_s:.2f} %",
            str(r.starved),
            "-" if r.p95_wait_ms is None else f"{r.p95_wait_ms:.3f}",
            "-" if r.spread is None else f"{100 * r.spread:.1f} %",
            f"{r.first_batch_s:.1f}",
            f"{r.commit_s:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if alone is not None:
        lines.append("")
        lines.append(
            f"bare: ESM-2 {alone.esm2_tokens_per_s:,.0f}, DNABERT-S {alone.dnabert_s_tokens_per_s:,.0f} tokens/s"
        )
    return "\n".join(lines)


def driver() -> str | None:
    """Return the version of the NVIDIA driver."""
    versions = gpus.NVML.driver()
    if versions is None:
        return None
    return versions.version


def main() -> int:
    """Make everything, run every variant, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--esm2", default="t36_3B")
    parser.add_argument("--dnabert-s", default="base")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"])
    parser.add_argument("--reads", type=int, default=200_000)
    parser.add_argument("--read-length", type=int, default=150)
    parser.add_argument("--engine", default="{}", help="JSON of engine settings")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--overheads", action="store_true", help="also without commits, and without the sampler"
    )
    parser.add_argument(
        "--bare-seconds", type=float, default=8.0, help="0: leave the bare encoders out"
    )
    parser.add_argument("--stage-workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="virnuc-bench-") as folder:
        scratch = options.scratch or Path(folder)
        rows, bare_run, facts = measure(options, scratch)
    print(text(rows, bare_run))
    if options.out:
        body = {
            "schema_version": SCHEMA_VERSION,
            **facts,
            "bare": bare_run and asdict(bare_run),
            "rows": [asdict(r) for r in rows],
        }
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def measure(
    options: argparse.Namespace, scratch: Path
) -> tuple[list[Row], Bare | None, dict[str, Any]]:
    """Play all runs of the benchmark over one store and one set of weights."""
    scratch.mkdir(parents=True, exist_ok=True)
    models, reads, store = scratch / "models", scratch / "reads.fastq", scratch / "orfs.h5"
    started = time.perf_counter()
    if not models.exists():
        storage = "fp32" if options.devices[0].startswith("cpu") else "fp16"
        init_random(
            models,
            options.esm2,
            options.dnabert_s,
            model_length=options.read_length,
            seed=0,
            dtype=storage,
        )
    made_s = time.perf_counter() - started
    if not reads.exists():
        simulate(
            SimulateSpec(reads=options.reads, read_length=options.read_length, duplicate_share=0.0),
            reads,
        )
    staging = stage(
        StageSpec(
            reads=(str(reads),),
            model_length=options.read_length,
            stage_workers=options.stage_workers,
        ),
        store,
    )
    print(
        f"models {made_s:.1f} s, staging {staging.total_s:.1f} s, {staging.counts.n_reads} reads",
        flush=True,
    )
    spec = EngineSpec.model_validate_json(options.engine)
    rows: list[Row] = []
    bare_run: Bare | None = None
    names: list[str] = []
    for number, (devices, commits, sample_s) in enumerate(variants(options)):
        run = RunDir(scratch / f"run-{number}")
        engine = spec.model_copy(update={"commit": commits})
        wanted_devices = Devices.parse(devices)
        job = prepare(
            run,
            store,
            ClassifySpec(models=models, devices=wanted_devices, engine=engine, force=True),
        )
        watch = RunMonitor(sample_s=sample_s)
        if bare_run is None and options.bare_seconds > 0:
            bare_run = bare(job, options.bare_seconds)
            print(f"bare {bare_run}", flush=True)
        started_s = time.monotonic()
        embedding = Embedding(job, watch, started_s)
        pool = embedding.run()
        wall_s = time.monotonic() - started_s
        telemetry = read_telemetry(embedding.write((), wall_s).with_suffix(".h5"))
        rows.append(row_of(devices, job, watch, wall_s, telemetry, bare_run))
        print(json.dumps(asdict(rows[-1])), flush=True)
        print(json.dumps([*pool.ready_records.values()]), flush=True)
        names = sorted({d.name for d in resolve(wanted_devices)})
    facts = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "devices": names,
        "driver": driver(),
        "torch": torch.__version__,
        "commit": _commit(),
        "reads": options.reads,
        "read_length": options.read_length,
        "engine": resolve_engine(spec, resolve(Devices.parse(options.devices[0]))).model_dump(
            mode="json"
        ),
    }
    return rows, bare_run, facts


def _commit() -> str | None:
    repository = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip() if process.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
