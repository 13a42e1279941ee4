"""The sweep: which engine settings are fastest on this machine with these weights and reads, results unchanged."""

from __future__ import annotations

import shutil

from prefect import flow
from prefect.client.schemas.objects import State

from flows import start
from flows.flow_commands import SWEPT, TuneSettings
from flows.flow_run import announce, named, sample_of, stage_input, with_parameters
from tasks.step import done, publish_table
from tasks.tools import run_trial, trial_rows
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.measure.bench import Bench
from virnuc_core.measure.tune import Recommendation, Sweep, candidates, recommend, rounds
from virnuc_core.profiles import load_profile
from virnuc_core.rundir import RunDir


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
        shutil.rmtree(sweep.trials, ignore_errors=True)
    for candidate, repeat, name in rounds(tried, settings.repeats, halving=settings.search == "halving"):
        candidate.add(run_trial(sweep, candidate, repeat, name=name).result())
    chosen = recommend(tried, tolerance=tolerance, allow_changed=settings.allow_changed_results)
    rows = trial_rows(tried, chosen, tolerance)
    publish_table(f"tune-{label}-{devices}", rows, f"**{chosen.reason}** — {label} on {devices}")
    sweep.write(tried, chosen, profile, settings.search, tuple(SWEPT.values()))
    old = all(trial.reused for candidate in tried for trial in candidate.trials)
    message = chosen.reason + ("; nothing had to be measured" if old else "")
    return done(chosen, message, reused=old)
