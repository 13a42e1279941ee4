"""Fit the head on labelled reads: stage, embed, train."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows.forms import takes
from flows.names import from_parameters
from flows.parameters import TrainSettings
from flows.staged import begin
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.states import done
from tasks.tools import train as fit
from virnuc_core.measure.train import TrainSpec, TrainSummary, install_head


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "devices")


@flow(name="train", flow_run_name=_run_name)
@takes(TrainSettings)
def train(settings: TrainSettings) -> State[TrainSummary]:
    """Fits a head on reads whose origin is known; no genome is on both sides of the split."""
    with no_orphans(), core_logs(), begin(settings) as begun:
        run, label = begun.run, begun.label
        begun.embed()
        summary = fit(
            run,
            truth=settings.truth,
            models=settings.models,
            spec=TrainSpec(max_epochs=settings.epochs),
            seed=settings.seed,
            label=label,
        ).result()
        if settings.install:
            install_head(summary.head, settings.models)
    return done(summary, str(summary))
