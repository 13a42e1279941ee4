"""Tools that measure on a staged store: traces, ceilings, what commits cost, the sweep of settings; and training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prefect.client.schemas.objects import State

from tasks.artifacts import Rows, cell, percent, progress_artifact, publish_table
from tasks.step import device_slots, done, first_attempt, step
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.messages import TraceSpec
from virnuc_core.measure.bench import Bench, measure_ceilings, measure_overhead, median, spread
from virnuc_core.measure.trace import WAIT, Operation, Traces, TraceTable
from virnuc_core.measure.trace import trace as record
from virnuc_core.measure.train import TrainSpec, TrainSummary, train_head
from virnuc_core.measure.tune import Candidate, Recommendation, Sweep, Trial
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.formatting import number
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import ModelFlops
from virnuc_core.validation import OverheadFile

NAME_WIDTH: Final = 90  # kernels of templates have names of a thousand letters
STAGE_OF: Final = {"dnabert_s": "DNABERT-S", "esm2": "ESM-2", "head": "Model Prediction", WAIT: "(waiting for a batch)"}


@step("trace", "trace {label} on {bench.devices}")
def trace(run: RunDir, bench: Bench, engine: EngineSpec, spec: TraceSpec, *, label: str) -> State[Traces]:
    """Traces and tables in `spec.folder`. Some of the run's shards are computed again for it and thrown away."""
    with device_slots(resolve(bench.devices)), run_lock(run.root):
        found = record(bench, engine, spec)
    return done(found, str(found))


@step("train", "train {label}")
def train(run: RunDir, *, truth: Path, models: Path, spec: TrainSpec, seed: int, label: str) -> State[TrainSummary]:
    """The head in `run/head`, and how well it does on genomes it has never met."""
    summary = train_head(run, OrfStore.open(run.store), truth, run.root, models=models, seed=seed, spec=spec)
    return done(summary, str(summary))


@step("commits", "commits of {label} on {bench.devices}")
def overhead(out: Path, bench: Bench, engine: EngineSpec, *, label: str, force: bool = False) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = progress_artifact(f"progress-{label}-commits", f"Runs with and without commits of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        found = measure_overhead(out, bench, engine, force=force and first_attempt(), on_run=show)
    publish_table(f"commits-{label}", overhead_rows(found), f"What commits cost, {label} on {bench.devices}")
    return done(found, overhead_sentence(found))


@step("ceiling", "ceiling of {devices}")
def ceiling(out: Path, *, models: Path, devices: Devices, engine: EngineSpec) -> State[ModelFlops]:
    """The ceilings of `devices` with these weights. Errors: those of `measure_ceilings`."""
    found = resolve(devices)
    with device_slots(found):
        flops = measure_ceilings(models, found, resolve_engine(engine, found[0].kind), out / "logs")
    rates = ", ".join(f"{rate:,.0f}" for rate in flops.esm2_ceiling_tokens_s.values())
    return done(flops, f"linear layers of ESM-2 alone: {rates} tokens/s" if rates else "no GPU, no ceiling")


def mark_rows(tables: Sequence[TraceTable]) -> Rows:
    """The stages as the launch loop marks them: the host's time to launch each, and the device's to compute it.

    The share is of the recorded window, by the device's time where it has one of its own.
    """
    return [_mark_row(table, mark) for table in tables for mark in table.marks]


def _mark_row(table: TraceTable, mark: Operation) -> dict[str, str]:
    own = mark.device_ms if table.kind == "cuda" and mark.name != WAIT else mark.host_ms
    return {
        "device": cell(table.device),
        "stage": cell(STAGE_OF.get(mark.name, mark.name)),
        "calls": cell(mark.calls),
        "host ms": cell(round(mark.host_ms, 2)),
        "device ms": cell(round(mark.device_ms, 2)) if table.kind == "cuda" else "–",
        "share of the recording": percent(own / table.window_ms if table.window_ms else None),
    }


def operation_rows(tables: Sequence[TraceTable], limit: int) -> Rows:
    """The operations that took most time on each device."""
    return [_operation_row(table, row) for table in tables for row in table.operations[:limit]]


def _operation_row(table: TraceTable, row: Operation) -> dict[str, str]:
    own = row.device_ms if row.on == "device" else row.host_ms
    shapes = {"shapes": cell(row.shapes)} if any(one.shapes for one in table.operations) else {}
    return {
        "device": cell(table.device),
        "operation": cell(row.name[:NAME_WIDTH]),
        "on": row.on,
        "calls": cell(row.calls),
        "ms": cell(round(own, 2)),
        "ms a call": cell(own / row.calls if row.calls else None),
        "share of the recording": percent(own / table.window_ms if table.window_ms else None),
        **shapes,
    }


def overhead_rows(found: OverheadFile) -> Rows:
    """Pairs of runs with and without commits."""
    return [
        {
            "pair": cell(place),
            "tokens/s with commits": cell(round(pair.with_tokens_per_s)),
            "tokens/s without": cell(round(pair.without_tokens_per_s)),
            "overhead": percent(pair.overhead),
            "worker restarts": cell(pair.restarts),
        }
        for place, pair in enumerate(found.pairs, start=1)
    ]


def overhead_sentence(found: OverheadFile) -> str:
    """What commits cost, in a sentence."""
    shares = [share for pair in found.pairs if (share := pair.overhead) is not None]
    if not shares:
        return "commits were not timed"
    return f"commits cost {percent(median(shares))} of the tokens/s, over {len(shares)} pairs of runs"


@step("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(resolve(sweep.bench.devices)):
        found = sweep.trial(candidate, repeat)
    return done(found, _trial_sentence(found), reused=isinstance(found, Trial) and found.reused)


def _trial_sentence(found: Trial | str) -> str:
    """A trial in a sentence."""
    if isinstance(found, str):
        return f"cannot run: {found}"
    same = "" if not found.score_difference else f", scores differ by up to {found.score_difference:.2g}"
    return f"{found.tokens_per_s:,.0f} tokens/s in {found.window_s:.1f} s{same}"


def trial_rows(found: Sequence[Candidate], chosen: Recommendation, tolerance: float) -> Rows:
    """The sweep as a table, fastest first; what cannot run stands last."""
    ordered = sorted(found, key=lambda candidate: median(candidate.rates), reverse=True)
    return [_candidate_row(candidate, candidate is chosen.candidate, tolerance) for candidate in ordered]


def _candidate_row(candidate: Candidate, recommended: bool, tolerance: float) -> dict[str, str]:
    engine, rates = candidate.engine, candidate.rates
    last = candidate.trials[-1].model_dump() if candidate.trials else {}
    return {
        "settings": cell(candidate.label),
        "tokens/s": cell(round(median(rates))) if rates else "–",
        "spread": percent(spread(rates)) if len(rates) > 1 else "–",
        "runs": cell(len(rates)),
        "elapsed": cell(number(last.get("window_s"), 1, " s")),
        "utilisation": cell(number(last.get("utilisation"), 1, " %")),
        "packing": percent(last.get("packing")),
        "starved": percent(last.get("starved")),
        "queue depth": cell(engine.prefetch_factor * max(1, engine.num_workers)),
        "score difference": cell(candidate.difference),
        "labels changed": cell(last.get("labels_changed")),
        "verdict": "**recommended**" if recommended else cell(candidate.verdict(tolerance)),
        "why": cell(candidate.refused or ("slower, dropped by halving" if candidate.dropped else "")),
    }
