"""Fit the head on labelled reads: stage, embed, train."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.flow_run import named, staged_run, takes
from flows.parameters import TrainSettings
from tasks.step import done
from tasks.tools import train as fit
from virnuc_core.measure.train import TrainSpec, TrainSummary, install_head


@flow(name="train", flow_run_name=named("reads", "devices"))
@takes(TrainSettings)
def train(settings: TrainSettings) -> State[TrainSummary]:
    """Fits a head on reads whose origin is known; no genome is on both sides of the split."""
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
