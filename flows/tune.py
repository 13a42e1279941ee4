"""The sweep: which engine settings are fastest on this machine with these weights and reads, results unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows import preflight
from flows.crash_detection import announce
from flows.forms import takes
from flows.names import from_parameters, sample_of
from flows.parameters import SWEPT, TuneSettings
from flows.running import watch_for_cancellation
from tasks.artifacts import publish_table
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.stage import stage
from tasks.states import done
from tasks.tune import measure, trial_rows
from virnuc_core.config import EngineSpec, load_profile
from virnuc_core.engine.messages import resolve_engine
from virnuc_core.measure.bench import Bench
from virnuc_core.measure.tune import Sweep, candidates, recommend, rounds, write_settings
from virnuc_core.pipeline import model_length
from virnuc_core.reads.stage import StageSpec
from virnuc_core.rundir import RunDir

SETTINGS = "settings.toml"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a sweep came to."""

    engine: EngineSpec
    gain: float  # over the base; 0 when the base is recommended
    settings: Path  # for --settings
    record: Path  # tune.json


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "profile", "devices")


@flow(name="tune", flow_run_name=_run_name)
@takes(TuneSettings)
def tune(settings: TuneSettings) -> State[Tuned]:
    """Finds the fastest engine settings for this machine, weights and reads that leave the results as they are.

    Measurements are kept: a sweep that stopped goes on where it was, and one that is complete measures nothing again.
    """
    profile = load_profile(settings.profile)
    with no_orphans(), core_logs():
        watch_for_cancellation()
        preflight.check(settings, reads=settings.reads, models=settings.models, out=settings.out, base=profile.engine)
        found = preflight.devices(settings, profile.engine)
        devices, base = preflight.named(found), resolve_engine(settings.engine(profile.engine), found[0].kind)
        tried = candidates(base, settings.swept())
        label, tolerance = sample_of(settings.reads), profile.score_tolerance
        announce(label, profile.name, devices.kind)
        store = _staged(settings, label)
        sweep = Sweep(settings.out, Bench(store, settings.models, devices, profile.sample_s), base)
        if settings.force:
            sweep.forget()
        for candidate, repeat, name in rounds(tried, settings.repeats, halving=settings.search == "halving"):
            candidate.add(measure(sweep, candidate, repeat, name=name).result())
        chosen = recommend(tried, tolerance=tolerance, allow_changed=settings.allow_changed_results)
        rows = trial_rows(tried, chosen, tolerance)
        publish_table(f"tune-{label}-{devices}", rows, f"**{chosen.reason}** — {label} on {devices}")
        record = sweep.write(tried, chosen, profile=profile.name, tolerance=tolerance, search=settings.search)
        engine, file = chosen.candidate.engine, settings.out / SETTINGS
        write_settings(file, engine, sorted(set(SWEPT.values())), f"{chosen.reason}; see {record.name}")
    old = all(trial.reused for candidate in tried for trial in candidate.trials)
    message = chosen.reason + ("; nothing had to be measured" if old else "")
    return done(Tuned(engine, chosen.gain, file, record), message, reused=old)


def _staged(settings: TuneSettings, label: str) -> Path:
    """The store that every candidate is measured on."""
    spec = StageSpec(
        reads=settings.reads,
        model_length=model_length(settings.models),
        workers=settings.staging_processes,
        on_error=settings.on_error,
        strict=settings.strict,
    )
    store = RunDir(settings.out).store
    stage(spec, store, label=label, email=settings.email, force=settings.force)
    return store
