"""Fit the head on labelled reads: stage, embed, train.

The embeddings are those of a prediction like any other, in the same directory, so that a training that stopped goes on
and another one over the same reads begins with the fit. The head is written to `OUT/head`; with `install` it takes the
place of the models directory's own, which is kept as `head.before`.
"""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.flow_commands import TrainSettings
from flows.flow_run import named, with_parameters
from flows.predict import staged_run
from tasks.step import done
from tasks.tools import train as fit
from virnuc_core.measure.train import TrainSpec, TrainSummary, install_head


@flow(name="train", flow_run_name=named("reads", "devices"))
@with_parameters(TrainSettings)
def train(settings: TrainSettings) -> State[TrainSummary]:
    """Fits a head on reads whose origin is known; no genome is on both sides of the split.

    Accuracy and area under the curve are of genomes that the head has never met.
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
