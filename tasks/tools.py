"""Tools that measure on a staged store: traces, ceilings, what commits cost, the sweep of settings; and training."""

from pathlib import Path
from typing import Any, Final

from prefect.client.schemas.objects import State

from tasks.server import device_slots
from tasks.step import done, first_attempt, on_host, progress_artifact, publish_markdown, publish_table, step
from virnuc_core.config import SWITCHES, Devices, EngineSpec, Switch, TraceSpec, TrainSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.measure.bench import Bench, measure_ceilings, measure_overhead, measure_precision, median
from virnuc_core.measure.splits import Examples, choose
from virnuc_core.measure.trace import TraceTable, said
from virnuc_core.measure.trace import trace as record
from virnuc_core.measure.training import TrainFile, train_head
from virnuc_core.measure.tune import Candidate, Sweep, Trial
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.formatting import percent, templates, told_rows
from virnuc_core.rundir import RunDir, run_lock, write_text_whole
from virnuc_core.runfiles import ModelFlops
from virnuc_core.validation import OverheadFile

COSTS: Final[dict[Switch, str]] = {
    "commits": "commits cost",
    "sampler": "the sampler costs",
    "models": "loading the models twice costs",
}


@step("trace", "trace {label} on {bench.devices}")
def trace(
    run: RunDir, bench: Bench, engine: EngineSpec, spec: TraceSpec, *, label: str
) -> State[tuple[TraceTable, ...]]:
    """Traces and their tables in `spec.folder`. Some of the run's shards are computed again for it and thrown away."""
    with device_slots(resolve(bench.devices)), run_lock(run.root):
        found = record(bench, engine, spec)
    return done(found, said(found))


@step("split", "split {label}")
def split(run: RunDir, spec: TrainSpec, *, label: str) -> State[Examples]:
    """The rows to learn from and to be judged by. Errors: `InputError` where truth and reads do not fit each other."""
    found = choose(OrfStore.open(run.store), spec)
    left = "".join(f"; left out: {count:,} {what}" for what, count in found.left_out.items())
    clusters = f"{len(found.genomes)} genomes in {found.genomes['cluster'].nunique()} clusters"
    return done(found, f"{len(found.rows):,} frames of {clusters}{left}")


@step("train", "train {label}")
def train(run: RunDir, examples: Examples, spec: TrainSpec, cuts: RunDir | str, *, label: str) -> State[TrainFile]:
    """The head in `run/head` with its card, and `train.json` and `train.html`: how well it does on unknown genomes."""
    found = train_head(run, OrfStore.open(run.store), examples, spec, cuts)
    page, card, said = map(templates().get_template, ("train.html.j2", "model_card.md.j2", "training.txt.j2"))
    write_text_whole(run.root / "train.html", page.render(found=found))
    write_text_whole(run.root / "head" / "README.md", card.render(found=found, pictures=False))
    text = card.render(found=found, pictures=True)
    message = "".join(said.render(found=found).splitlines())
    publish_markdown(on_host(f"head-{label}"), text, message, run.root / "train.html")
    return done(found, message)


@step("overhead", "overhead of {label} on {bench.devices}")
def overhead(
    out: Path, bench: Bench, engine: EngineSpec, *, label: str, force: bool = False, **asked: Any
) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = progress_artifact(f"progress-{label}-overhead", f"Runs with and without what costs, of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        found = measure_overhead(out, bench, engine, force=force and first_attempt(), on_run=show, **asked)
    rows = told_rows("overhead.view.j2", pairs=found.pairs)
    publish_table(on_host(f"overhead-{label}"), rows, f"What these cost, {label} on {bench.devices}")
    costs = {of: [p.overhead for p in found.pairs if p.of == of and p.overhead is not None] for of in SWITCHES}
    said = [f"{COSTS[of]} {percent(median(shares))}" for of, shares in costs.items() if shares]
    return done(found, f"of the tokens/s, {', '.join(said)}" if said else "nothing could be timed")


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


@step("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(resolve(sweep.bench.devices)):
        found = sweep.trial(candidate, repeat)
    if isinstance(found, str):
        return done(found, f"cannot run: {found}")
    same = "" if not found.score_difference else f", scores differ by up to {found.score_difference:.2g}"
    return done(found, f"{found.tokens_per_s:,.0f} tokens/s in {found.window_s:.1f} s{same}", reused=found.reused)
