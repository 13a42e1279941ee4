"""Tools that measure on a staged store: traces, ceilings, what commits cost, the sweep of settings; and training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from tasks.server import connection, device_slots
from tasks.step import (
    MAX_BYTES,
    Markdown,
    Rows,
    cell,
    done,
    first_attempt,
    inside_a_run,
    key,
    on_host,
    progress_artifact,
    publish_table,
    step,
)
from virnuc_core.config import SWITCHES, Devices, EngineSpec, Switch, TraceSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.measure.bench import Bench, measure_ceilings, measure_overhead, measure_precision, median, spread
from virnuc_core.measure.head import TrainSpec, TrainSummary, train_head
from virnuc_core.measure.trace import WAIT, Traces, TraceTable
from virnuc_core.measure.trace import trace as record
from virnuc_core.measure.tune import Candidate, Recommendation, Sweep, Trial
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.formatting import number, percent
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import ModelFlops
from virnuc_core.validation import OverheadFile

COSTS: Final[dict[Switch, str]] = {
    "commits": "commits cost",
    "sampler": "the sampler costs",
    "models": "loading the models twice costs",
}
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


@step("overhead", "overhead of {label} on {bench.devices}")
def overhead(
    out: Path, bench: Bench, engine: EngineSpec, *, label: str, force: bool = False, **asked: Any
) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = progress_artifact(f"progress-{label}-overhead", f"Runs with and without what costs, of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        found = measure_overhead(out, bench, engine, force=force and first_attempt(), on_run=show, **asked)
    publish_table(on_host(f"overhead-{label}"), overhead_rows(found), f"What these cost, {label} on {bench.devices}")
    costs = {of: [p.overhead for p in found.pairs if p.of == of and p.overhead is not None] for of in SWITCHES}
    told = [f"{COSTS[of]} {percent(median(shares))}" for of, shares in costs.items() if shares]
    return done(found, f"of the tokens/s, {', '.join(told)}" if told else "nothing could be timed")


@step("precision", "fp32 sequences of {label}")
def precision(out: Path, bench: Bench, engine: EngineSpec, *, label: str) -> State[bool]:
    """Some hundred sequences in fp32 in `out/fp32`, unless the runs compute in fp32 themselves."""
    with device_slots(resolve(bench.devices)[:1]):
        made = measure_precision(out, bench, engine)
    return done(made, f"a part of {label} was embedded in fp32" if made else "the runs are in fp32 themselves")


@step("ceiling", "ceiling of {devices}")
def ceiling(out: Path, *, models: Path, devices: Devices, engine: EngineSpec) -> State[ModelFlops]:
    """The ceilings of `devices` with these weights. Errors: those of `measure_ceilings`."""
    found = resolve(devices)
    with device_slots(found):
        flops = measure_ceilings(models, found, resolve_engine(engine, found[0].kind), out / "logs")
    rates = ", ".join(f"{rate:,.0f}" for rate in flops.esm2_ceiling_tokens_s.values())
    return done(flops, f"linear layers of ESM-2 alone: {rates} tokens/s" if rates else "no GPU, no ceiling")


def markdown_table(rows: Rows) -> str:
    """Rows as a Markdown table; empty text for no rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut at a line's end below `MAX_BYTES` with a word on where the whole stands."""
    if not inside_a_run():
        return
    if len(text.encode()) > MAX_BYTES:
        note = f"\n\n… cut here; the whole text is `{full_text}`\n"
        head = text.encode()[: MAX_BYTES - len(note.encode())].decode("utf-8", "ignore")
        text = head[: head.rfind("\n")] + note
    with connection.telling(f"text {name}"):
        create_markdown_artifact(text, key=key(name), description=cell(description))


def mark_rows(tables: Sequence[TraceTable]) -> Rows:
    """The stages as the launch loop marks them: the host's time to launch each, and the device's to compute it."""
    return [
        {
            "device": table.device,
            "stage": STAGE_OF.get(mark.name, mark.name),
            "calls": mark.calls,
            "host ms": round(mark.host_ms, 2),
            "device ms": round(mark.device_ms, 2) if cuda else None,
            "share of the recording": percent(
                (mark.device_ms if cuda and mark.name != WAIT else mark.host_ms) / whole_ms
            ),
        }
        for table, cuda, whole_ms in ((one, one.kind == "cuda", one.window_ms) for one in tables)
        for mark in table.marks
    ]


def operation_rows(tables: Sequence[TraceTable], limit: int) -> Rows:
    """The operations that took most time on each device."""
    rows = []
    for table, one in [(part, one) for part in tables for one in part.operations[:limit]]:
        own_ms = one.device_ms if one.on == "device" else one.host_ms
        row = {
            "device": table.device,
            "operation": one.name[:NAME_WIDTH],
            "on": one.on,
            "calls": one.calls,
            "ms": round(own_ms, 2),
            "ms a call": own_ms / one.calls,
            "share of the recording": percent(own_ms / table.window_ms),
        }
        shapes = {"shapes": one.shapes} if any(other.shapes for other in table.operations) else {}
        rows.append(row | shapes)
    return rows


def overhead_rows(found: OverheadFile) -> Rows:
    """Pairs of runs with and without commits."""
    return [
        {
            "pair": place,
            "of": pair.of,
            "tokens/s with": round(pair.with_tokens_per_s),
            "tokens/s without": round(pair.without_tokens_per_s),
            "overhead": percent(pair.overhead),
            "worker restarts": pair.restarts,
        }
        for place, pair in enumerate(found.pairs, start=1)
    ]


@step("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(resolve(sweep.bench.devices)):
        found = sweep.trial(candidate, repeat)
    if isinstance(found, str):
        return done(found, f"cannot run: {found}")
    same = "" if not found.score_difference else f", scores differ by up to {found.score_difference:.2g}"
    return done(found, f"{found.tokens_per_s:,.0f} tokens/s in {found.window_s:.1f} s{same}", reused=found.reused)


def trial_rows(found: Sequence[Candidate], chosen: Recommendation, tolerance: float) -> Rows:
    """The sweep as a table, fastest first; what cannot run stands last."""
    rows = []
    for candidate in sorted(found, key=lambda one: median(one.rates), reverse=True):
        rates, engine = candidate.rates, candidate.engine
        last = candidate.trials[-1].model_dump() if candidate.trials else {}
        row = {
            "settings": candidate.label,
            "tokens/s": round(median(rates)) if rates else None,
            "spread": percent(spread(rates)) if len(rates) > 1 else None,
            "runs": len(rates),
            "elapsed": number(last.get("window_s"), 1, " s"),
            "utilisation": number(last.get("utilisation"), 1, " %"),
            "packing": percent(last.get("packing")),
            "starved": percent(last.get("starved")),
            "queue depth": engine.prefetch_factor * max(1, engine.num_workers),
            "score difference": candidate.difference,
            "labels changed": last.get("labels_changed"),
            "verdict": Markdown("**recommended**") if candidate is chosen.candidate else candidate.verdict(tolerance),
            "why": candidate.refused or ("slower, dropped by halving" if candidate.dropped else ""),
        }
        rows.append(row)
    return rows
