"""Fit the head on labelled reads: stage, embed, train."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows import preflight
from flows.forms import takes
from flows.names import from_parameters, sample_of
from flows.parameters import TrainSettings
from flows.presence import announce
from flows.running import watch_for_cancellation
from tasks.embed import embed
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.stage import stage
from tasks.states import done
from tasks.train import describe, install_head
from tasks.train import train as fit
from virnuc_core.config import EngineSpec
from virnuc_core.pipeline import model_length
from virnuc_core.reads.stage import StageSpec
from virnuc_core.rundir import RunDir
from virnuc_core.training import TrainSpec, TrainSummary, read_truth


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "devices")


@flow(name="train", flow_run_name=_run_name)
@takes(TrainSettings)
def train(settings: TrainSettings) -> State[TrainSummary]:
    """Fits a head on reads whose origin is known; no genome is on both sides of the split."""
    base = EngineSpec()
    with no_orphans(), core_logs():
        watch_for_cancellation()
        preflight.check(settings, reads=settings.reads, models=settings.models, out=settings.out, base=base)
        read_truth(settings.truth)  # a table that cannot be used is refused before anything is computed
        label, devices = sample_of(settings.reads), settings.parsed_devices()
        announce(label, devices.kind)
        run = RunDir(settings.out)
        spec = StageSpec(
            reads=settings.reads,
            model_length=model_length(settings.models),
            workers=settings.stage_workers,
            on_error=settings.on_error,
            strict=settings.strict,
        )
        staging = stage(spec, run.store, label=label, email=settings.email, force=settings.force).result()
        embed(
            run,
            staging,
            store=run.store,
            models=settings.models,
            devices=devices,
            engine=settings.engine(base),
            label=label,
            force=settings.force,
        ).result()
        summary = fit(
            run,
            store=run.store,
            truth=settings.truth,
            models=settings.models,
            spec=TrainSpec(max_epochs=settings.epochs),
            seed=settings.seed,
            label=label,
        ).result()
        if settings.install:
            install_head(summary.head, settings.models)
    return done(summary, describe(summary))
