"""Many runs by one loading of the weights: samples, several under way at a time; or an inbox, file after file."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Final

from prefect import flow
from prefect.client.schemas.objects import State

from virnuc.flows.flow_run import named, publish_prediction, stage_input, with_parameters
from virnuc.flows.parameters import build
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.artifacts import artifact_key, progress_artifact, publish_table
from virnuc.tasks.embedding import embed
from virnuc.tasks.events import emit
from virnuc.tasks.server_connection import announce, device_slots, without_server
from virnuc.tasks.task import completed
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import InputError, VirnucError, is_machine_error
from virnuc_core.inbox import Ledger, Row, RowFate
from virnuc_core.pipeline import workers_for
from virnuc_core.reads.samples import SampleRow, log, row_of, write_samples
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import SAMPLES, RunDir, run_lock
from virnuc_core.runfiles import RunSummary

UNDER_WAY: Final = (
    4  # samples at a time: one is computed while the next are staged and the last is written
)


@contextmanager
def kept_workers(settings: FlowSettings, *, warm: bool) -> Iterator[Pool]:
    """Workers that stay up for all runs in the body, with their devices; they load the weights once, if `warm` now."""
    spec = settings.spec()
    with (
        device_slots(resolve_here(spec)),
        workers_for(spec, settings.out, keep=True, warm=warm) as pool,
    ):
        yield pool


def predict_samples(settings: PredictSettings) -> State[RunSummary]:
    """The counts of all samples together. Errors: `VirnucError` when some have failed, once the others are done, with
    the exit code of the first; at once what no other sample would fare better with."""
    preflight(settings)
    runs, failed, fates = settings.by_sample(), dict[str, Exception](), Counter[str]()
    label = sample_name([str(settings.samples)] if settings.samples else settings.named)
    announce("samples", label)
    rows, table = {name: SampleRow(sample=name) for name in runs}, settings.out / SAMPLES
    write_samples(table, rows.values())
    complete = {
        name: run.is_done() for name, run in runs.items()
    }  # of which nothing but their rows is to be told
    with (
        progress_artifact(f"progress-{label}-samples", f"Samples of {label}") as show,
        ThreadPoolExecutor(UNDER_WAY, "sample") as threads,
        kept_workers(settings, warm=not all(complete.values())) as pool,
    ):

        def predicted(name: str) -> tuple[RunSummary, StageSummary]:
            work = partial(_predicted, name, runs[name], pool, among=UNDER_WAY)
            return without_server(work) if complete[name] else work()

        under_way = {threads.submit(copy_context().run, predicted, name): name for name in runs}
        try:
            for number, future in enumerate(as_completed(under_way), start=1):
                name = under_way[future]
                try:
                    summary, staging = future.result()
                except Exception as error:
                    if is_machine_error(error):
                        raise
                    failed[name], note = error, str(error) or type(error).__name__
                    rows[name] = SampleRow(sample=name, fate="failed", note=note)
                    log.error("sample %s failed: %s", name, note)
                else:
                    rows[name] = row_of(name, summary, staging)
                    fates.update(summary.fates)
                    told = "sample %s: %s of %s reads are viral (%d of %d samples done)"
                    log.info(
                        told,
                        name,
                        f"{rows[name].viral:,}",
                        f"{rows[name].reads:,}",
                        number,
                        len(runs),
                    )
                if not complete[name] or number == len(runs):
                    write_samples(table, rows.values())
                show(number / len(runs))
        finally:  # those that have not begun need not
            threads.shutdown(wait=False, cancel_futures=True)
    publish_table(
        f"samples-{label}",
        [row.model_dump() for row in rows.values()],
        f"Samples of {label}: {table}",
    )
    if failed:
        first = next(name for name in runs if name in failed)
        told = f"{len(failed)} of {len(runs)} samples failed, the others are done ({table} tells of each)"
        problem = VirnucError(f"{told}; {first}: {failed[first] or type(failed[first]).__name__}")
        problem.exit_code = getattr(failed[first], "exit_code", VirnucError.exit_code)
        raise problem
    together = RunSummary(n_reads=fates.total(), fates=dict(fates))
    return completed(
        together, f"{len(runs)} samples: {fates['viral']:,} of {fates.total():,} reads are viral"
    )


@flow(name="predict-inbox", flow_run_name=named("inbox", "devices"))
@with_parameters(InboxSettings)
def predict_inbox(settings: InboxSettings) -> State[Counter[RowFate]]:
    """Predicts each new file of a folder once, and writes one row for each file with its fate to inbox.tsv."""
    preflight(settings)
    announce("inbox", settings.inbox.name)
    common = settings.model_dump(include={*PredictSettings.model_fields}, exclude={"out"})
    ledger = Ledger(settings.inbox, settings.out)
    known = {(row.file, row.sha256) for row in ledger.read_table() if row.fate == "failed"}
    rows = ledger.scan(settle_s=settings.settle_s)
    ledger.write_table(rows)
    todo = [
        number
        for number, row in enumerate(rows)
        if ledger.wants_work(row, retry_failed=settings.retry_failed)
    ]
    with kept_workers(settings, warm=True) if todo else nullcontext() as pool:

        def predicted(row: Row, out: Path) -> RunSummary | Exception:
            try:
                given = build(
                    PredictSettings,
                    {"reads": (str(settings.inbox / row.file),), "out": out, **common},
                )
                return _predicted(sample_name(given.named), given, pool, content=row.sha256)[0]
            except Exception as error:  # noqa: BLE001 - the ledger tells them apart
                return error

        for number in todo:
            rows[number] = ledger.work(rows[number], predicted, retry_failed=settings.retry_failed)
            ledger.write_table(rows)
    rows = ledger.scan(settle_s=settings.settle_s)
    for row in rows:
        if row.fate == "failed" and (row.file, row.sha256) not in known:
            emit(
                "inbox.failed",
                f"inbox.{artifact_key(row.file)}",
                row.file,
                {"reason": row.note, "run": row.run},
            )
    counts = Counter(row.fate for row in rows)
    shown = [
        {name: getattr(row, name) for name in ("file", "fate", "reads", "viral", "run", "note")}
        for row in rows
    ]
    publish_table(f"inbox-{settings.inbox.name}", shown, f"Files of {settings.inbox}")
    message = (
        ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items()))
        or "the inbox is empty"
    )
    return completed(counts, message, reused=not todo)


def _predicted(
    name: str, settings: PredictSettings, pool: Pool | None, among: int = 1, content: str = ""
) -> tuple[RunSummary, StageSummary]:
    """A run as `predict` makes it, one `among` several at a time, of a file of this `content` (SHA-256), if one is
    given. Errors: those of its steps; `VirnucError` for other content."""
    settings.check_place()
    with run_lock(settings.out):
        run = RunDir(settings.out)
        if among > 1 and not settings.stage_workers:
            settings = settings.model_copy(
                update={"stage_workers": max(1, len(os.sched_getaffinity(0)) // among)}
            )
        spec, staging = settings.spec(name), stage_input(settings, name)
        if content and (found := staging.by_file[0].content) and found.sha256 != content:
            raise VirnucError(
                f"{staging.files[0]}: was replaced before it was read; the next run takes it as it is"
            )
        if not staging.counts.n_reads:
            raise InputError(
                "holds no reads", file=staging.files[0], hint="was it written to the end?"
            )
        summary = embed(
            run, staging, spec, label=name, pool=pool, watch=RunMonitor(alone=among == 1)
        ).result()
        publish_prediction(run, name, summary, staging)
    return summary, staging
