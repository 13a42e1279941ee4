"""The daily work: reads in, VirNucPro's two result files out. Other flows that begin with such a run build on it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from prefect import flow
from prefect.client.schemas.objects import State

from virnuc.flows.flow_run import named, publish_prediction, stage_input, with_parameters
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import RunSettings
from virnuc.tasks.embedding import embed
from virnuc.tasks.server_connection import announce, device_slots
from virnuc.tasks.task import completed
from virnuc_core.config import ClassifySpec
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.pool import Pool
from virnuc_core.pipeline import read_summary, workers_for
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary

FREE_NOW_S: Final = 1.0  # a device's slot that takes longer to get is another run's


class StagedRun(NamedTuple):
    """A run whose reads are staged and whose settings are known to work."""

    run: RunDir
    staging: StageSummary
    label: str  # of the sample, for names in the UI
    spec: ClassifySpec
    pool: (
        Pool | None
    )  # has the weights by now; None where devices were busy or nothing is left to do
    workers: ExitStack  # that ends them, if they are this run's own

    def embed(self) -> State[RunSummary]:
        """Result files of the staged reads. Errors: those of the embed task."""
        with self.workers:
            return embed(self.run, self.staging, self.spec, label=self.label, pool=self.pool)


@contextmanager
def staged_run(settings: RunSettings) -> Iterator[StagedRun]:
    """A run that is checked, announced and staged, while workers load the weights on devices that are free; these stay
    its own until the body ends. Errors: those of `check` and of the stage task."""
    preflight(settings)
    label, run = sample_name(settings.named), RunDir(settings.out)
    spec = settings.spec(label)
    announce(label, spec.devices.kind)
    with ExitStack() as held, ExitStack() as workers:
        pool = None
        if read_summary(run) is None:
            with suppress(TimeoutError):  # busy devices are waited for when there is work for them
                held.enter_context(device_slots(resolve_here(spec), wait_s=FREE_NOW_S))
                pool = workers.enter_context(workers_for(spec, run.root, warm=True))
        yield StagedRun(run, stage_input(settings, label), label, spec, pool, workers)


@flow(name="predict", flow_run_name=named("reads", "samples", "devices", "cluster"))
@with_parameters(PredictSettings)
def predict(settings: PredictSettings) -> State[RunSummary]:
    """Says which reads are viral. A run that stopped goes on where it was; a complete one is not computed again."""
    if settings.many:
        from virnuc.flows.predict_many import predict_samples  # few runs need it

        return predict_samples(settings)
    with staged_run(settings) as staged:
        embedded = staged.embed()
        summary = embedded.result()
        publish_prediction(staged.run, staged.label, summary, staged.staging)
    viral = summary.fates.get("viral", 0)
    already = "; nothing had to be computed" if embedded.name == "Reused" else ""
    failed, pairs = summary.fates.get("failed", 0), sum(summary.pairs.values())
    of_pairs = f"; {summary.pairs['viral']:,} of {pairs:,} pairs" if pairs else ""
    lost = f"; {failed:,} reads have rows that had to be set aside (failed.tsv)" if failed else ""
    unsure = (
        f", {summary.fates['uncertain']:,} are uncertain" if "uncertain" in summary.fates else ""
    )
    return completed(
        summary,
        f"{viral:,} of {summary.n_reads:,} reads are viral{unsure}{of_pairs}{lost}{already}",
    )
