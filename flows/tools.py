"""Flows that measure or fit something on reads: the sweep of settings, where the time goes, and a head.

`profile` and `train` begin with a prediction like any other, in the same directory: one that stopped goes on, and one
that is complete is not computed again.
"""

from __future__ import annotations

from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State

from flows import start
from flows.flow_commands import SWEPT, ProfileSettings, TrainSettings, TuneSettings
from flows.flow_run import named, sample_of, stage_input, with_parameters
from flows.predict import staged_run
from tasks.predict import stage_rows
from tasks.server import announce
from tasks.step import Markdown, Rows, cell, done, markdown_table, on_host, publish_markdown, publish_table
from tasks.tools import mark_rows, operation_rows, run_trial, trace, trial_rows
from tasks.tools import train as fit
from virnuc_core.config import TraceSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.measure.bench import Bench
from virnuc_core.measure.head import TrainSpec, TrainSummary, install_head
from virnuc_core.measure.trace import Traces, counted
from virnuc_core.measure.tune import Recommendation, Sweep, candidates, recommend, rounds
from virnuc_core.profiles import load_profile
from virnuc_core.rundir import RunDir, discard, write_text_whole

MEBIBYTE: Final = 1 << 20


@flow(name="tune", flow_run_name=named("reads", "profile", "devices"))
@with_parameters(TuneSettings)
def tune(settings: TuneSettings) -> State[Recommendation]:
    """Finds the fastest engine settings for this machine, weights and reads that leave the results as they are.

    Measurements are kept: a sweep that stopped goes on where it was, and one that is complete measures nothing again.
    """
    profile = load_profile(settings.profile)
    devices = start.check(settings, profile.engine)
    base = resolve_engine(settings.engine(profile.engine), resolve(devices)[0].kind)
    tried = candidates(base, settings.swept())
    label, tolerance = sample_of(settings.reads), profile.score_tolerance
    announce(label, profile.name, devices.kind)
    stage_input(settings, label)
    sweep = Sweep(settings.out, Bench(RunDir(settings.out).store, settings.models, devices, profile.sample_s), base)
    if settings.force:
        discard(settings.out, "trials/*.npy", "trials/*-[0-9]*/trial.json")
    for candidate, repeat, name in rounds(tried, settings.repeats, halving=settings.search == "halving"):
        candidate.add(run_trial(sweep, candidate, repeat, name=name).result())
    chosen = recommend(tried, tolerance=tolerance, allow_changed=settings.allow_changed_results)
    rows = trial_rows(tried, chosen, tolerance)
    publish_table(
        on_host(f"tune-{label}-{devices}"), rows, Markdown(f"**{cell(chosen.reason)}** — {cell(label)} on {devices}")
    )
    sweep.write(tried, chosen, profile, settings.search, tuple(SWEPT.values()))
    old = all(trial.reused for candidate in tried for trial in candidate.trials)
    message = chosen.reason + ("; nothing had to be measured" if old else "")
    return done(chosen, message, reused=old)


@flow(name="profile", flow_run_name=named("reads", "devices"))
@with_parameters(ProfileSettings)
def profile(settings: ProfileSettings) -> State[Traces]:
    """Records a few shards with torch's profiler, after a run of all reads that tells the seconds of the nine stages.

    The run is a prediction like any other and is not repeated when it is there; the recording is always made anew.
    """
    with staged_run(settings) as staged:
        run, label, devices = staged.run, staged.label, staged.spec.devices
        summary = staged.embed()
        spec = TraceSpec(
            folder=str((run.telemetry / "traces").resolve()),
            shards=settings.traced_shards,
            operations=settings.operations,
            max_bytes=settings.max_trace_mb * MEBIBYTE,
            shapes=settings.shapes,
            memory=settings.memory,
        )
        found = trace(run, Bench(run.store, settings.models, devices), staged.spec.engine, spec, label=label).result()
        marks, operations = mark_rows(found.tables), operation_rows(found.tables, settings.operations)
        publish_table(on_host(f"operations-{label}-{devices}"), operations, f"Operations that took most time: {label}")
        publish_table(on_host(f"marks-{label}-{devices}"), marks, f"Recorded stages of {label}: {found.folder}")
        text = _text(found, (stage_rows(summary), marks, operations))
        path = found.folder / "profile.md"
        write_text_whole(path, text)
        publish_markdown(on_host(f"profile-{label}-{devices}"), text, str(found), path)
    return done(found, f"{found}, {found.trace_bytes / MEBIBYTE:.1f} MiB of traces in {found.folder}")


def _text(found: Traces, tables: tuple[Rows, ...]) -> str:
    stages, marks, operations = map(markdown_table, tables)
    names = "\n".join(
        f"- `{table.trace or 'not kept: too large'}`: {counted(table.shards, 'shard')}, {table.batches} batches, "
        f"{table.tokens:,} tokens in {table.window_ms / 1e3:.2f} s"
        for table in found.tables
    )
    return (
        f"# Where the time goes\n\n## The nine stages of the run, undisturbed\n\n{stages}\n"
        f"## Recorded\n\n{names}\n\nOpen a trace in https://ui.perfetto.dev or chrome://tracing; both work on the "
        f"file where it lies. Recording slows the host's side, so these are shares, not rates.\n\n{marks}\n"
        f"## Operations that took most time\n\n{operations}"
    )


@flow(name="train", flow_run_name=named("reads", "devices"))
@with_parameters(TrainSettings)
def train(settings: TrainSettings) -> State[TrainSummary]:
    """Fits a head on reads whose origin is known; no genome is on both sides of the split.

    Accuracy and area under the curve are of genomes that the head has never met. The head is written to `OUT/head`;
    with `install` it takes the place of the models directory's own, which is kept as `head.before`.
    """
    with staged_run(settings) as staged:
        run = staged.run
        staged.embed()
        summary = fit(
            run,
            truth=settings.truth,
            models=settings.models,
            spec=TrainSpec(max_epochs=settings.epochs),
            seed=settings.seed,
            label=staged.label,
        ).result()
        if settings.install:
            install_head(summary.head, settings.models)
    return done(summary, str(summary))
