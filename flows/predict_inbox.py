"""Watch a folder: each new file, by content, is predicted once; safe when two of these runs overlap."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from flows import start
from flows.flow_commands import InboxSettings
from flows.flow_run import kept_workers, named, untold, with_parameters
from flows.parameters import ComputeSettings
from flows.predict import predict
from tasks.server import ServerLostError, announce
from tasks.step import done, emit, key, publish_table
from virnuc_core.config import EngineSpec, ReadingSpec, VerdictSpec
from virnuc_core.measure.inbox import Ledger, Row, RowFate
from virnuc_core.runfiles import RunSummary


@flow(name="predict-inbox", flow_run_name=named("inbox", "devices"))
@with_parameters(InboxSettings)
def predict_inbox(settings: InboxSettings) -> State[Counter[RowFate]]:
    """Predicts each new file of a folder once, and writes one row for each file with its fate to inbox.tsv."""
    start.check(settings, EngineSpec())
    announce("inbox", settings.inbox.name)
    shared = {name for part in (ComputeSettings, ReadingSpec, VerdictSpec) for name in part.model_fields}
    common = settings.model_dump(include={"models", "interleaved", "pairs", *shared})

    def predicted(row: Row, out: Path) -> RunSummary | Exception:
        given = {"reads": (str(settings.inbox / row.file),), "out": out, **common}
        try:
            state = predict(**given, return_state=True)
        except ServerLostError:  # meanwhile: the flow's function does as well
            try:
                state = untold(predict, given)
            except Exception as error:  # noqa: BLE001 - as Prefect does
                return error
        found: RunSummary | Exception = state.result(raise_on_failure=state.is_cancelled() or state.is_crashed())
        return found

    ledger = Ledger(settings.inbox, settings.out)
    known = {(row.file, row.sha256) for row in ledger.read_table() if row.fate == "failed"}
    rows = ledger.scan(settle_s=settings.settle_s)
    ledger.write_table(rows)
    left, wanted = settings.max_files, [ledger.wants_work(row, retry_failed=settings.retry_failed) for row in rows]
    with kept_workers(settings, warm=True) if any(wanted) else nullcontext():
        for position, row in enumerate(rows):
            if left and wanted[position]:
                rows[position] = ledger.work(row, predicted, retry_failed=settings.retry_failed)
                left -= rows[position].fate != "busy"
                ledger.write_table(rows)
    rows = ledger.scan(settle_s=settings.settle_s)
    for row in rows:
        if row.fate == "failed" and (row.file, row.sha256) not in known:
            emit("inbox.failed", f"inbox.{key(row.file)}", row.file, {"reason": row.note, "run": row.run})
    counts = Counter(row.fate for row in rows)
    shown = [{name: getattr(row, name) for name in ("file", "fate", "reads", "viral", "run", "note")} for row in rows]
    publish_table(f"inbox-{settings.inbox.name}", shown, f"Files of {settings.inbox}")
    message = ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items())) or "the inbox is empty"
    return done(counts, message, reused=left == settings.max_files)
