"""Flows that measure or fit something on reads: the sweep of settings, where the time goes, costs, and a head."""

import os
from collections.abc import Sequence
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from virnuc.flows.flow_run import named, stage_input, with_parameters
from virnuc.flows.predict import StagedRun, staged_run
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.tune import SWEPT, TuneSettings
from virnuc.tasks.artifacts import Markdown, host_key, publish_markdown, publish_table, table_cell
from virnuc.tasks.embedding import embed
from virnuc.tasks.overhead import measure_costs as timed
from virnuc.tasks.run_tables import stage_rows
from virnuc.tasks.server_connection import announce
from virnuc.tasks.split import choose_examples
from virnuc.tasks.staging import stage
from virnuc.tasks.task import completed
from virnuc.tasks.trace import record_traces
from virnuc.tasks.training import fit_head as fit
from virnuc.tasks.trial import run_trial
from virnuc_core.config import TraceOptions, TraceSpec
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.encoders.models_directory import install_head
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.profiles import load_profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSpec
from virnuc_core.report import messages
from virnuc_core.report.build import write_report
from virnuc_core.report.profile_page import profile_markdown
from virnuc_core.report.views.tools import candidate_rows, mark_rows, operation_rows
from virnuc_core.rundir import RunDir, discard, run_lock, write_text_atomically
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.sweep_files import settings_toml, tune_file, tune_json
from virnuc_core.tools.trace import TraceTable
from virnuc_core.tools.tune import Candidate, Recommendation, Sweep, candidates, recommend, rounds
from virnuc_core.training.evaluation import Examples
from virnuc_core.training.training import (
    NO_GENOMES,
    TrainFile,
    remove_results,
    stand_in,
    write_cuts,
)
from virnuc_core.validation import OverheadFile


@flow(name="tune", flow_run_name=named("reads", "profile", "devices"))
@with_parameters(TuneSettings)
def tune(settings: TuneSettings) -> State[Recommendation]:
    """Finds the fastest engine settings for this machine, weights and reads that leave the results as they are.

    Measurements are kept: a sweep that stopped goes on where it was, and one that is complete measures nothing again.
    """
    profile = load_profile(settings.profile)
    devices = preflight(settings)
    base = resolve_engine(settings.engine(), resolve(devices)[0].kind)
    tried = candidates(base, settings.swept())
    label = sample_name(settings.named)
    announce(label, profile.name, devices.kind)
    stage_input(settings, label)
    bench = Bench(RunDir(settings.out).store, settings.models, devices, profile.sample_s)
    sweep = Sweep(settings.out, bench, base, profile, settings.repeats, settings.search)
    if settings.force:
        discard(settings.out, "trials/*.npy", "trials/*-[0-9]*/trial.json")
    chosen = sweep_all(sweep, tried, label)
    old = all(trial.reused for candidate in tried for trial in candidate.trials)
    return completed(chosen, chosen.reason + "; nothing had to be measured" * old, reused=old)


def sweep_all(sweep: Sweep, tried: Sequence[Candidate], label: str) -> Recommendation:
    """The settings to use of those tried, all measured; `tune.json`, `settings.toml` and a table tell of them."""
    for candidate, repeat, name in rounds(tried, sweep.repeats, halving=sweep.search == "halving"):
        candidate.add(run_trial(sweep, candidate, repeat, name=name).result())
    tolerance, devices = sweep.profile.score_tolerance, sweep.bench.devices
    chosen = recommend(tried, tolerance=tolerance)
    rows = candidate_rows(
        sorted(tried, key=lambda one: one.rate, reverse=True),  # what cannot run stands last
        chosen=chosen.candidate,
        recommended=Markdown("**recommended**"),
        tolerance=tolerance,
    )
    told = Markdown(f"**{table_cell(chosen.reason)}** — {table_cell(label)} on {devices}")
    publish_table(host_key(f"tune-{label}-{devices}"), rows, told)
    results = tune_file(
        sweep, tried, chosen, devices=resolve(devices), cores=len(os.sched_getaffinity(0))
    )
    write_text_atomically(sweep.out / "tune.json", tune_json(results))
    settings = settings_toml(chosen, sorted(SWEPT.values()))
    write_text_atomically(sweep.out / "settings.toml", settings)
    return chosen


@flow(name="profile", flow_run_name=named("reads", "devices"))
@with_parameters(ProfileSettings)
def profile(settings: ProfileSettings) -> State[tuple[TraceTable, ...]]:
    """Records a few shards with torch's profiler, after a run of all reads that tells the seconds of the nine stages.

    The run is a prediction like any other and is not repeated when it is there; the recording is always made anew."""
    with staged_run(settings) as staged:
        run, label, devices = staged.run, staged.label, staged.spec.devices
        summary = staged.embed().result()
        options = settings.model_dump(include={*TraceOptions.model_fields})
        spec = TraceSpec(folder=str((run.telemetry / "traces").resolve()), **options)
        found = record_traces(
            run, Bench(run.store, settings.models, devices), staged.spec.engine, spec, label=label
        ).result()
        marks = mark_rows(found)
        operations = operation_rows(found, limit=settings.operations)
        publish_table(
            host_key(f"operations-{label}-{devices}"),
            operations,
            f"Operations that took most time: {label}",
        )
        publish_table(
            host_key(f"marks-{label}-{devices}"),
            marks,
            f"Recorded stages of {label}: {spec.folder}",
        )
        text = profile_markdown(
            found, stages=stage_rows(summary), marks=marks, operations=operations
        )
        path = Path(spec.folder, "profile.md")
        write_text_atomically(path, text)
        publish_markdown(host_key(f"profile-{label}-{devices}"), text, messages.traced(found), path)
    return completed(found, messages.profiled(found, spec.folder))


@flow(name="train", flow_run_name=named("reads", "devices"))
@with_parameters(TrainSettings)
def train(settings: TrainSettings) -> State[TrainFile]:
    """Fits a head on reads whose origin is known; no genome, nor one of its kin, is on both sides of a split.

    The figures are of genomes that the head has never met, with intervals and baselines: `OUT/train.json` and
    `OUT/train.html`. The head is written to `OUT/head`; with `install` it takes the place of the models directory's
    own, which is kept (`virnuc models heads`)."""
    models = stand_in(
        settings.models, settings.out, check_models(settings.models, settings.model_length)
    )
    with staged_run(settings.model_copy(update={"models": models, "model_length": None})) as staged:
        examples = choose_examples(staged.run, settings, label=staged.label).result()
        staged.embed().result()
        remove_results(staged.run)
        cuts = (
            NO_GENOMES
            if settings.genomes is None
            else _embed_cuts(staged, examples, settings.genomes)
        )
        fitted = fit(staged.run, examples, settings, cuts, label=staged.label)
        found, told = fitted.result(), [str(fitted.message)]
        if settings.install or settings.install_anyway:
            told.append(
                install_head(
                    staged.run.root / "head", settings.models, anyway=settings.install_anyway
                )
            )
    return completed(found, "; ".join(told))


def _embed_cuts(staged: StagedRun, examples: Examples, genomes: Path) -> RunDir | str:
    """The finished run over fragments of the test's genomes, always made anew; or why there is none."""
    run, label = RunDir(staged.run.root / "lengths"), f"{staged.label}-lengths"
    if why := write_cuts(examples, genomes, fragments := run.root / "cuts.fasta"):
        return why
    spec = StageSpec(reads=(str(fragments),), model_length=staged.staging.model_length)
    staging = stage(spec, run.store, label=label, force=True).result()
    embed(run, staging, staged.spec.model_copy(update={"force": True}), label=label).result()
    remove_results(run)
    return run


@flow(name="overhead", flow_run_name=named("out", "devices"))
@with_parameters(OverheadSettings)
def overhead(settings: OverheadSettings) -> State[OverheadFile]:
    """Times what commits, the sampler and loading the models anew cost, over the first shards of a validation.

    Its report is then made again. What was measured before, of the same all, is measured again by `force` only."""
    out, judged_by = settings.out, settings.profile
    devices = preflight(settings)
    announce(out.name, judged_by.name, devices.kind)
    bench = Bench(RunDir(out).store, settings.models, devices, judged_by.sample_s)
    asked = settings.model_dump(include={"force", "switches", "pairs", "shards"})
    with run_lock(out):
        found = timed(out, bench, settings.engine(), label=out.name, **asked)
        write_report(out, judged_by)
    return completed(found.result(), found.message or "")
