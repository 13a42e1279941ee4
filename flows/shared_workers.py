"""Many predictions by one loading of the weights: workers that stay up, and runs with them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import FlowSettings
from virnuc.flows.shared_steps import publish_prediction, stage_reads_of
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.embedding import embed
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import workers_for
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import RunSummary


@contextmanager
def shared_workers(settings: FlowSettings, *, warm: bool) -> Iterator[Pool]:
    """Yield a pool of workers that keeps running for several runs, and reserve its devices.

    Other flow runs of the same Prefect server wait for reserved GPUs. At the end of the block the
    workers are ended, and the devices are released.

    Args:
        settings: Where and how to compute.
        warm: Load the weights immediately. If false, the first run loads them.
    """
    spec = settings.spec()
    slots = device_slots(resolve_here(spec))
    with slots, workers_for(spec, settings.out, keep=True, warm=warm) as pool:
        yield pool


def predict_with(
    pool: Pool | None,
    settings: PredictSettings,
    label: str,
    *,
    n_parallel: int = 1,
    expected_sha256: Mapping[str, str] | None = None,
) -> tuple[RunSummary, StageSummary]:
    """Make one prediction, as the `predict` flow does, with workers that are already there.

    The results are written to the output directory of the settings, which is locked meanwhile.

    Args:
        pool: The workers; None starts some for this run.
        settings: The settings of the prediction.
        label: The name of the sample.
        n_parallel: How many predictions are made at a time. They share the cores for staging.
        expected_sha256: The content that each file of reads must have; None accepts any.

    Returns:
        The summaries of the run and of its staging.

    Raises:
        VirnucError: The file has another content by now.
    """
    settings.check_output_folder()
    with run_lock(settings.out):
        run = RunDir(settings.out)
        if n_parallel > 1 and not settings.stage_workers:
            n_cores = len(os.sched_getaffinity(0))  # cores that this process may use
            n_workers = max(1, n_cores // n_parallel)
            settings = settings.model_copy(update={"stage_workers": n_workers})
        spec = settings.spec(label)
        staging = stage_reads_of(settings, label)
        if expected_sha256:
            _require_content(staging, expected_sha256)
        monitor = RunMonitor(alone=n_parallel == 1)
        summary = embed(run, staging, spec, label=label, pool=pool, monitor=monitor).result()
        publish_prediction(run, label, summary, staging)
    return summary, staging


def _require_content(staging: StageSummary, expected_sha256: Mapping[str, str]) -> None:
    """Raise an error if a staged file has another content than it had in the inbox.

    Args:
        staging: The summary of the staging.
        expected_sha256: The digest that each file had when the inbox was looked through.
    """
    for file in staging.by_file:
        content = file.content  # None if its digest is not known
        expected = expected_sha256.get(file.file, "")
        if content and expected and content.sha256 != expected:
            raise VirnucError(
                f"{file.file}: was replaced before it was read; the next run takes it as it is"
            )
