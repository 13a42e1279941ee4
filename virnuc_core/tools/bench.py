"""Rates of the engine, the same in every tool: of a job, with commits, sampler or kept models and without, of layers.

The ceiling is what the linear layers sustain on each device, measured just before a run by a process of its own on
each. Messages in: a WorkerSpec. Out: Ready, with the tokens/s of each encoder, or Failed."""

import hashlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.baseline.run import expect
from virnuc_core.config import ClassifySpec, Devices, EngineSpec, OnShare, Switch
from virnuc_core.encoders.checkpoint import load_models
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.layers import Layer
from virnuc_core.encoders.precision import quantise_rows
from virnuc_core.encoders.registry import ENCODERS, encoder_named
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.engine.process import LocalWorkers, Parent, Ready, WorkerSpec, worker_specs
from virnuc_core.engine.shards import make_plan, read_shard, write_plan
from virnuc_core.engine.worker import warm_up
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import model_flops, prepare
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_covered
from virnuc_core.rundir import EXACT_FILES, SHARD_FILES, RunDir, atomic_hdf5, discard, run_lock
from virnuc_core.runfiles import Device, ModelFlops, write
from virnuc_core.telemetry.statistics import (
    BatchMetrics,
    batch_metrics,
    committed_span_s,
    device_usage,
    embedding_span,
)
from virnuc_core.validation import MIN_PAIRS, OVERHEAD, OverheadFile, OverheadPair, read_usable

log = logging.getLogger(__name__)

SHARDS_A_DEVICE: Final = (
    16  # a minute or so on a GPU: long beside the first batches, short beside a whole run
)
EXACT_TOKENS: Final = 4_096  # of a batch in fp32, whose activations are large; of a shard at least
STRETCHES: Final = 64  # of neighbouring sequences, so that no part of the reads speaks for all
AHEAD: Final = 4  # passes launched before the oldest is waited for
NEVER_S: Final = 86_400.0  # between samples: none is taken


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same through a series of measurements."""

    store: Path
    models: Path
    devices: Devices
    sample_s: float = 0.5

    def job(self, run: RunDir, engine: EngineSpec) -> Job:
        """A fresh job over the store in `run`; what was there is removed. Errors: those of `prepare`."""
        spec = ClassifySpec(models=self.models, devices=self.devices, engine=engine, force=True)
        return prepare(run, self.store, spec)

    def fingerprint(self, engine: EngineSpec, *more: Any) -> str:
        """Digest of all that a measurement depends on: reads, weights, settings, devices, and `more` (JSON)."""
        found = resolve(self.devices)
        body = {
            "reads": OrfStore.open(self.store).fingerprint,
            "weights": fingerprint(self.models, engine.precision),
            "engine": resolve_engine(engine, found[0].kind).model_dump(mode="json"),
            "devices": [device.model_dump() for device in found],
            "more": more,
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Measurement(BatchMetrics):
    """What one embedding run came to, by the batches of both encoders and the rest."""

    tokens_per_s: float  # 0: nothing was launched
    committed_s: float  # first launch to last commit
    wall_s: float  # with loading of the weights
    utilisation: float | None  # percent, of the device with the lowest
    shards: int  # computed
    restarts: int  # of workers
    reduced: tuple[
        tuple[int, int], ...
    ]  # shard, and what its token budgets were divided by for want of memory


def measure(job: Job, *, shards: int | None = None, sample_s: float = 0.5) -> Measurement:
    """Embed a job's shards, or the first `shards` of them; its telemetry stays in the run directory. Nothing launched
    is a rate of 0. Errors: those of the pool."""
    job, started_s = replace(job, todo=job.todo[:shards]), time.monotonic()
    embedding = Embedding(job, RunMonitor(sample_s=sample_s), started_s)
    pool = embedding.run()
    wall_s = time.monotonic() - started_s
    embedding.write((), wall_s)
    found = embedding.measured
    whole, window = dict(batch_metrics(found.batches)), embedding_span(found.batches)
    stats = [device_usage(found.samples, device.id, window) for device in job.devices]
    return Measurement(
        **whole | {"tokens_per_s": whole["tokens_per_s"] or 0.0},
        committed_s=committed_span_s(found.batches, found.shards),
        wall_s=wall_s,
        utilisation=min(
            (s.gpu_util_avg for s in stats if s.gpu_util_avg is not None), default=None
        ),
        shards=len(job.todo),
        restarts=len(pool.deaths),
        reduced=tuple(pool.reduced_budgets.items()),
    )


def measure_overhead(
    out: Path,
    bench: Bench,
    engine: EngineSpec,
    *,
    switches: Sequence[Switch] = ("commits",),
    pairs: int = MIN_PAIRS,
    shards: int = SHARDS_A_DEVICE,
    force: bool = False,
    on_run: OnShare = lambda _: None,
) -> OverheadFile:
    """`out/checkpoint_overhead.json` of the pairs of runs over `shards` for each device, new or, unless `force`, of
    before over the same reads, weights, settings and devices; their telemetry stays in `out/overhead/`. `on_run` hears
    the share of runs done. Errors: those of `prepare` and of the pool; `VirnucError` when nothing was launched."""
    job, ids = bench.fingerprint(engine), tuple(device.id for device in resolve(bench.devices))
    before = None if force else read_usable(out / OVERHEAD, OverheadFile)
    if before is not None and (before.job, before.devices) == (job, ids):
        made = Counter(pair.of for pair in before.pairs)
        if all(made[switch] >= pairs for switch in switches):
            return before
    found, shards = [], shards * len(ids)
    for number in range(1, pairs + 1):
        found += [_pair(out, bench, engine, switch, number, shards) for switch in switches]
        on_run(number / pairs)
    size, measured_pairs = engine.shard_tokens, tuple(pair for pair, _ in found)
    measured = OverheadFile(
        job=job, devices=ids, shards=found[0][1], shard_tokens=size, pairs=measured_pairs
    )
    write(out / OVERHEAD, measured)
    return measured


def _pair(
    out: Path, bench: Bench, engine: EngineSpec, of: Switch, pair: int, shards: int
) -> tuple[OverheadPair, int]:
    """Two runs over the same shards, with what is switched and without; and how many shards those were."""
    kind = "" if of == "commits" else f"{of}-"
    names = {on: f"overhead/{pair}-{kind}{'on' if on else 'off'}" for on in (True, False)}
    rates, spans, restarts = {}, [], 0
    # every other pair begins without, so that a drift of clocks and caches favours neither side
    for on in (True, False) if pair % 2 else (False, True):
        run = RunDir(out / names[on])
        with run_lock(run.root):
            job = bench.job(run, engine.model_copy(update={"commit": on or of != "commits"}))
            todo = job.todo[:shards]
            parts = (
                (todo,)
                if on or of != "models"
                else (todo[: len(todo) // 2], todo[len(todo) // 2 :])
            )
            sample_s = bench.sample_s if on or of != "sampler" else NEVER_S
            made = [measure(replace(job, todo=part), sample_s=sample_s) for part in parts if part]
            discard(run.root, *SHARD_FILES)  # nobody asks for them
        spans.append(sum(one.wall_s if of == "models" else one.committed_s for one in made))
        tokens = sum(one.tokens_per_s * one.span_s for one in made)
        rates[on], restarts = (
            tokens / spans[-1] if spans[-1] else 0.0,
            restarts + sum(one.restarts for one in made),
        )
    if not all(rates.values()):
        raise VirnucError(f"{out}: no batch was launched, so {of} cannot be timed")
    log.info("%s, pair %d: %.0f tokens/s with, %.0f without", of, pair, rates[True], rates[False])
    return OverheadPair(
        of=of,
        with_run=names[True],
        without_run=names[False],
        with_tokens_per_s=rates[True],
        without_tokens_per_s=rates[False],
        seconds=min(spans),
        restarts=restarts,
    ), len(todo)


def measure_precision(out: Path, bench: Bench, engine: EngineSpec, sequences: int) -> bool:
    """Whether about so many sequences of a validation lie in `out/fp32`, embedded by plain torch on one device, now or
    before: result files of the reads that are covered whole and `embeddings.h5` with its `uniques`. False where the
    runs compute in fp32 themselves. Errors: those of the pool."""
    run, orfs, kind = (
        RunDir(out / EXACT_FILES),
        OrfStore.open(bench.store),
        resolve(bench.devices)[0].kind,
    )
    if resolve_engine(engine, kind).precision == "fp32" or not orfs.n_uniques:
        run.embeddings.unlink(missing_ok=True)  # of another precision
        return False
    alone = replace(bench, devices=bench.devices.model_copy(update={"ids": bench.devices.ids[:1]}))
    budgets = dict.fromkeys(("token_budget", "dna_token_budget", "shard_tokens"), EXACT_TOKENS)
    exact = engine.model_copy(update={"precision": "fp32", "attention": "reference", **budgets})
    identity = alone.fingerprint(exact, sequences)
    with run_lock(run.root):
        if run.embeddings.is_file():
            with h5py.File(run.embeddings, "r") as file:
                if file.attrs["fingerprint"] == identity:
                    return True
        embed_sample(run, alone.job(run, exact), sequences, identity)
    return True


def embed_sample(run: RunDir, job: Job, sequences: int, identity: str) -> None:
    """Compute about so many sequences, in shards that lie evenly over the store, and keep what they gave."""
    orfs = job.store
    tokens = (
        (int(orfs.protein_offsets[-1]) + 2 * orfs.n_uniques)
        * sequences
        // (STRETCHES * orfs.n_uniques)
    )
    plan = make_plan(
        orfs.protein_offsets, max(EXACT_TOKENS, tokens), EXACT_TOKENS, job.plan.fingerprint
    )
    write_plan(run, plan)
    wanted = min(len(plan), max(2, -(-sequences * len(plan) // orfs.n_uniques)))
    chosen = tuple(dict.fromkeys(np.linspace(0, len(plan) - 1, wanted).astype(int).tolist()))
    Embedding(replace(job, plan=plan, todo=chosen), RunMonitor(), time.monotonic()).run()
    results = [read_shard(run, plan, shard) for shard in chosen]
    uniques = np.concatenate([np.arange(*plan.range(shard)) for shard in chosen])
    scores = np.full((orfs.n_uniques, 2), np.nan, dtype=np.float32)
    scores[uniques] = np.concatenate([result.scores for result in results])
    of_rows = scores[np.asarray(orfs.row_unique)]
    scored = np.bincount(orfs.row_read, ~np.isnan(of_rows[:, 0]), orfs.n_reads)
    covered = (scored == orfs.read_rows) & (scored > 0)
    write_covered(run, orfs, covered, of_rows[covered[np.asarray(orfs.row_read)]])
    with atomic_hdf5(run.embeddings) as file:
        file["embeddings"] = np.concatenate([result.embeddings for result in results])
        file["uniques"], file.attrs["fingerprint"] = uniques, identity
    discard(run.root, *SHARD_FILES)


def measure_ceilings(
    models: Path, devices: Sequence[Device], engine: EngineSpec, logs: Path
) -> ModelFlops:
    """`model_flops` with each GPU's ceilings, all measured at once; a CPU has none. Errors: those that a worker would
    raise; `WorkerError` for others, and when a process ends without an answer."""
    found = defaultdict[str, dict[str, float]](dict)
    with LocalWorkers(__name__) as workers:
        gpus = worker_specs(models, [device for device in devices if device.kind == "cuda"], engine)
        measuring = {workers.start(gpu, logs / f"ceiling-{gpu.device.id}.log") for gpu in gpus}
        while measuring:
            worker, event = expect(workers, measuring)
            assert isinstance(event, Ready)
            measuring.discard(worker)
            if not event.record:
                log.warning(
                    "%s: no ceiling was measured, its memory does not hold the token budgets",
                    worker.device,
                )
            for encoder, rate in event.record.items():
                found[encoder_named(encoder).ceiling_field][worker.device] = rate
    return model_flops(models).model_copy(update=found)


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Measure the rate of each encoder's linear layers on this process's GPU and tell the parent.

    Every encoder is run once before, so that the kernels of the first run that follows are compiled,
    too. The process stays until the parent ends it.
    """
    device, engine = torch.device("cuda:0"), spec.engine
    rates: dict[str, float] = {}  # tokens/s by encoder
    try:
        loaded = load_models(Path(spec.models), device, engine)
        longest_row = loaded.head.shape.model_length // 3 + 2
        for encoder in ENCODERS:
            network, budget = loaded.encoders[encoder.name], encoder.token_budget(engine)
            warm_up(network, budget, device, longest_row)
        for encoder in reversed(ENCODERS):
            layers, budget = loaded.encoders[encoder.name].layers, encoder.token_budget(engine)
            step = linear_pass(layers, budget, device)
            passes, elapsed_s = sustained_passes(step, encoder.ceiling_s)
            rates[encoder.name] = budget * passes / elapsed_s
    except torch.OutOfMemoryError:
        rates = {}  # the runs will halve the budgets
    parent.send(Ready(record=rates))
    parent.receive()


def linear_pass(layers: Sequence[Layer], slots: int, device: torch.device) -> Callable[[], None]:
    """A call that runs `slots` tokens through every linear layer; inputs of int8 layers are already rounded."""
    inputs: list[tuple[Tensor, Tensor | None]] = []
    for one in layers[0].products:
        x = torch.randn(slots, one.weight.shape[1], device=device)
        inputs.append((x.to(one.weight.dtype), None) if one.scale is None else quantise_rows(x))

    def step() -> None:
        for layer in layers:
            for one, (x, scale) in zip(layer.products, inputs, strict=True):
                if scale is None:
                    F.linear(x, one.weight, one.bias)
                else:
                    from virnuc_core.encoders.kernels import (
                        int8_product,
                    )  # triton is needed here only

                    int8_product(x, scale, one)

    return step


def sustained_passes(step: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Run `step` on the current CUDA device for at least `seconds`, after a warm-up: passes, and the seconds taken."""
    events: list[torch.cuda.Event] = []
    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        passes, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            step()
            passes += 1
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > AHEAD:
                events.pop(0).synchronize()
        torch.cuda.synchronize()
    return passes, time.perf_counter() - start
