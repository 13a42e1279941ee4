"""Many samples by one loading of the weights: each an ordinary run in a directory of its name, several under way."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Final

from prefect.client.schemas.objects import State

from flows import start
from flows.flow_run import kept_workers, publish_prediction, stage_input
from flows.parameters import PredictSettings
from tasks.predict import embed
from tasks.server import announce
from tasks.step import done, progress_artifact, publish_table
from virnuc_core.config import Devices, EngineSpec, VerdictSpec
from virnuc_core.engine.embedding import Watch
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import VirnucError, is_of_machine
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.samples import SampleRow, log, row_of, write_samples
from virnuc_core.reads.sources import sample_of
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import SAMPLES, RunDir, run_lock
from virnuc_core.runfiles import RunSummary

UNDER_WAY: Final = 4  # samples at a time: one is computed while the next are staged and the last is written


class SamplesError(VirnucError):
    """Samples failed; all others are done."""


def predict_samples(settings: PredictSettings) -> State[RunSummary]:
    """The counts of all samples together. Errors: `SamplesError` when some have failed, once the others are done, with
    the exit code of the first; at once what no other sample would fare better with."""
    start.check(settings, EngineSpec())
    runs, failed, fates = settings.by_sample(), dict[str, Exception](), Counter[str]()
    label = sample_of([str(settings.samples)] if settings.samples else settings.named)
    announce("samples", label)
    rows, table = {name: SampleRow(sample=name) for name in runs}, settings.out / SAMPLES
    write_samples(table, rows.values())
    left = any(run.force or read_summary(RunDir(run.out)) is None for run in runs.values())
    with (
        progress_artifact(f"progress-{label}-samples", f"Samples of {label}") as show,
        ThreadPoolExecutor(UNDER_WAY, "sample") as threads,
        kept_workers(settings, warm=left) as pool,
    ):
        under_way = {threads.submit(copy_context().run, _predicted, name, runs[name], pool): name for name in runs}
        try:
            for number, future in enumerate(as_completed(under_way), start=1):
                name = under_way[future]
                try:
                    summary, staging = future.result()
                except Exception as error:
                    if is_of_machine(error):
                        raise
                    failed[name], note = error, str(error) or type(error).__name__
                    rows[name] = SampleRow(sample=name, fate="failed", note=note)
                    log.error("sample %s failed: %s", name, note)
                else:
                    rows[name] = row_of(name, summary, staging)
                    fates.update(summary.fates)
                    told = "sample %s: %s of %s reads are viral (%d of %d samples done)"
                    log.info(told, name, f"{rows[name].viral:,}", f"{rows[name].reads:,}", number, len(runs))
                write_samples(table, rows.values())
                show(number / len(runs))
        finally:  # those that have not begun need not
            threads.shutdown(wait=False, cancel_futures=True)
    publish_table(f"samples-{label}", [row.model_dump() for row in rows.values()], f"Samples of {label}: {table}")
    if failed:
        first = next(name for name in runs if name in failed)
        told = f"{len(failed)} of {len(runs)} samples failed, the others are done ({table} tells of each)"
        problem = SamplesError(f"{told}; {first}: {failed[first] or type(failed[first]).__name__}")
        problem.exit_code = getattr(failed[first], "exit_code", SamplesError.exit_code)
        raise problem
    reads = fates.total()
    together = RunSummary(n_reads=reads, fates=dict(fates))
    return done(together, f"{len(runs)} samples: {fates['viral']:,} of {reads:,} reads are viral")


def _predicted(name: str, settings: PredictSettings, pool: Pool) -> tuple[RunSummary, StageSummary]:
    """A sample's run, as `predict` makes it. Errors: those of its steps."""
    workers = settings.stage_workers or max(1, len(os.sched_getaffinity(0)) // UNDER_WAY)
    settings.check_place()
    with run_lock(settings.out):
        run, spec = RunDir(settings.out), settings.spec(Devices.parse(settings.devices), EngineSpec(), name)
        spec = spec.model_copy(update={field: getattr(settings, field) for field in VerdictSpec.model_fields})
        staging = stage_input(settings.model_copy(update={"stage_workers": workers}), name)
        summary = embed(run, staging, spec, label=name, pool=pool, watch=Watch(alone=False)).result()
        publish_prediction(run, name, summary, staging)
    return summary, staging
