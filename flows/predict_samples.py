"""Predictions for many samples, each with a run directory of its own; called by `predict`."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from virnuc.flows.preflight import preflight
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.shared_workers import predict_with, shared_workers
from virnuc.tasks.artifacts import progress_artifact, publish_table
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.result_links import with_links
from virnuc.tasks.running_mark import add_tags, announce
from virnuc.tasks.server_use import without_server
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import VirnucError, is_machine_error, join_first
from virnuc_core.reads.samples import (
    SampleRow,
    add_summaries,
    check_sheet_files,
    log,
    summarize_sample,
    write_samples,
)
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import SAMPLES
from virnuc_core.runfiles import RunSummary

# one sample is computed while the next are staged and the last is written
N_PARALLEL: Final = 4

Prediction = tuple[RunSummary, StageSummary]


@dataclass
class SampleTable:
    """`samples.tsv`: one row for each sample, filled in as the samples end.

    Attributes:
        path: The file.
        rows: Rows by name of the sample, in the order of the table.
        summaries: The summaries of all finished samples.
        errors: What went wrong, by name of the sample.
    """

    path: Path
    rows: dict[str, SampleRow]
    summaries: list[RunSummary] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)

    def write(self) -> None:
        """Write the file as a whole."""
        write_samples(self.path, self.rows.values())

    def add_result(self, name: str, summary: RunSummary, staging: StageSummary) -> None:
        """Note the result of a sample."""
        self.rows[name] = summarize_sample(name, summary, staging)
        self.summaries.append(summary)

    def add_error(self, name: str, error: Exception) -> None:
        """Note that a sample failed, and log the error. An error without words goes by its type."""
        note = str(error) or type(error).__name__
        self.errors[name] = error
        self.rows[name] = SampleRow(sample=name, fate="failed", note=note)
        log.error("sample %s failed: %s", name, note)


def predict_samples(settings: PredictSettings) -> Outcome[RunSummary]:
    """Predict every sample, several at a time, with workers that load the weights once.

    Args:
        settings: The settings of the `predict` flow, which name the samples.

    Returns:
        An outcome with the counts of all samples together.

    Raises:
        VirnucError: Some samples failed. It is raised after the others are done, with the exit code
            of the first that failed. An error that every other sample would meet, too, is raised at
            once.
    """
    preflight(settings)
    runs = settings.by_sample()
    if settings.samples is not None:
        check_sheet_files(settings.samples)
    _warn_of_merged_names(runs)
    label = _label_of(settings)
    announce("samples", label)
    add_tags(*runs)
    rows = {name: SampleRow(sample=name) for name in runs}
    table = SampleTable(settings.out / SAMPLES, rows)
    table.write()
    progress = progress_artifact(f"progress-{label}-samples", f"Samples of {label}")
    with progress as show_share:
        _predict_all(settings, runs, table, show_share)
    summary = add_summaries(table.summaries)
    answer = summary.answer
    from virnuc_core.report.summary_page import write_samples_page  # it takes a while to import

    write_samples_page(settings.out, label, list(table.rows.values()), summary)
    publish_table(
        f"samples-{label}",
        [row.model_dump() for row in table.rows.values()],
        with_links(
            f"Samples of {label}: {answer.message}. {' '.join(answer.remarks)}",
            result=table.path,
            kind="Table",
        ),
    )
    if table.errors:
        raise _error_of_samples(table)
    noun = "sample" if len(runs) == 1 else "samples"
    message = f"{len(runs)} {noun}: {answer.message}"
    empty_samples = [name for name, row in table.rows.items() if row.reads == 0]
    if empty_samples:
        message += f"; without reads: {join_first(empty_samples)}"
    return completed(summary, message)


def _warn_of_merged_names(samples: Iterable[str]) -> None:
    """Log a warning for samples that MultiQC would show as one, because it shortens names."""
    from virnuc_core.report.multiqc_names import find_merged_samples

    for name, merged_samples in find_merged_samples(samples).items():
        log.warning(
            "samples %s: MultiQC would show all of them as '%s'; other names keep them apart, here "
            "or with virnuc export --sample",
            join_first(merged_samples),
            name,
        )


def _label_of(settings: PredictSettings) -> str:
    """Return the name of the whole set of samples, for names in the UI."""
    if settings.samples:
        return sample_name([str(settings.samples)])
    return sample_name(settings.all_inputs)


def _predict_all(
    settings: PredictSettings,
    runs: Mapping[str, PredictSettings],
    table: SampleTable,
    show_share: Callable[[float], None],
) -> None:
    """Predict all samples and note each result in the table, whose file is written again and again.

    After an error of the machine, samples that have not begun are not started.

    Args:
        settings: The settings of the flow, for the workers.
        runs: The settings of each sample's run by its name.
        table: The table of the samples.
        show_share: Takes the share of samples that are done, 0 to 1.

    Raises:
        Exception: An error of the machine, with which all other samples would fail, too.
    """
    is_complete = {name: run.is_done() for name, run in runs.items()}
    must_compute = not all(is_complete.values())
    with (
        ThreadPoolExecutor(N_PARALLEL, "sample") as threads,
        shared_workers(settings, warm=must_compute) as pool,
    ):
        futures: dict[Future[Prediction], str] = {}
        for name, run in runs.items():
            # Threads do not inherit the context, which holds the flow run. So each gets a copy.
            context = copy_context()
            future = threads.submit(
                context.run, _predict_sample, name, run, pool, is_complete=is_complete[name]
            )
            futures[future] = name
        try:
            for n_done, future in enumerate(as_completed(futures), start=1):
                name = futures[future]
                _note_result(table, name, future, n_done)
                # Hundreds of complete samples end within seconds. The file is not written for each.
                if not is_complete[name] or n_done == len(runs):
                    table.write()
                show_share(n_done / len(runs))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _predict_sample(
    name: str, settings: PredictSettings, pool: Pool, *, is_complete: bool
) -> Prediction:
    """Predict one sample with workers that are already there.

    A complete sample is only read again. That is done without the server, where hundreds of task
    runs that did nothing would hide the others.

    Returns:
        The summary of the sample's run, and of its staging.
    """
    work = partial(predict_with, pool, settings, name, n_parallel=N_PARALLEL)
    if is_complete:
        return without_server(work)
    return work()


def _note_result(table: SampleTable, name: str, future: Future[Prediction], n_done: int) -> None:
    """Add the result or the error of a sample to the table, and log it.

    Args:
        table: The table of the samples.
        name: The name of the sample.
        future: The prediction of the sample, which has ended.
        n_done: Number of samples that have ended, this one included.

    Raises:
        Exception: An error of the machine, such as a full disk. All other samples would fail with
            it.
    """
    try:
        summary, staging = future.result()
    except Exception as error:
        if is_machine_error(error):
            raise
        table.add_error(name, error)
        return
    table.add_result(name, summary, staging)
    row = table.rows[name]
    log.info(
        "sample %s: %s of %s reads are viral (%d of %d samples done)",
        name,
        f"{row.viral:,}",
        f"{row.reads:,}",
        n_done,
        len(table.rows),
    )


def _error_of_samples(table: SampleTable) -> VirnucError:
    """Return the error that says how many samples failed.

    It names the reason of the first failed sample in the order of the table, and has its exit code.
    """
    first_failed = next(name for name in table.rows if name in table.errors)
    error = table.errors[first_failed]
    reason = str(error) or type(error).__name__
    n_failed = len(table.errors)
    n_samples = len(table.rows)
    if n_failed < n_samples:
        what_failed = f"{n_failed} of {n_samples} samples failed, the others are done"
    elif n_samples == 1:
        what_failed = "the only sample failed"
    else:
        what_failed = f"all {n_samples} samples failed"
    problem = VirnucError(f"{what_failed} ({table.path} tells of each); {first_failed}: {reason}")
    problem.exit_code = getattr(error, "exit_code", VirnucError.exit_code)
    return problem
