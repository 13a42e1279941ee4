"""Watch a folder: each new file, by content, is predicted once; safe when two of these runs overlap."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from flows import preflight
from flows.flow_run import announce, named, takes
from flows.parameters import ComputeSettings, InboxSettings, ReadingSettings, VerdictSettings
from flows.predict import predict
from tasks.artifacts import cell, publish_table
from tasks.step import done
from virnuc_core.config import EngineSpec
from virnuc_core.errors import InputError
from virnuc_core.measure.inbox import Fate, Ledger, Row, RowFate
from virnuc_core.provenance import now
from virnuc_core.runfiles import RunSummary

logger = logging.getLogger(__name__)


@flow(name="predict-inbox", flow_run_name=named("inbox", "devices"))
@takes(InboxSettings)
def predict_inbox(settings: InboxSettings) -> State[Counter[RowFate]]:
    """Predicts each new file of a folder once, and writes one row for each file with its fate to inbox.tsv."""
    preflight.check(settings, EngineSpec())
    announce("inbox", settings.inbox.name)
    ledger = Ledger(settings.inbox, settings.out)
    rows = ledger.scan(settle_s=settings.settle_s)
    ledger.write_table(rows)
    left = settings.max_files
    for position, row in enumerate(rows):
        if left == 0 or not _wants_work(row, settings):
            continue
        rows[position] = _work_on(row, ledger, settings)
        left -= rows[position].fate != "busy"
        ledger.write_table(rows)
    rows = ledger.scan(settle_s=settings.settle_s)
    counts = Counter(row.fate for row in rows)
    publish_table(f"inbox-{settings.inbox.name}", [_shown(row) for row in rows], f"Files of {settings.inbox}")
    message = ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items())) or "the inbox is empty"
    return done(counts, message, reused=left == settings.max_files)


def _wants_work(row: Row, settings: InboxSettings) -> bool:
    return row.fate == "waiting" or (row.fate == "failed" and settings.retry_failed)


def _work_on(row: Row, ledger: Ledger, settings: InboxSettings) -> Row:
    """The row with its new fate. Only what is wrong with the file itself is its fate; any other failure is raised."""
    with ledger.claim(row.sha256) as mine:
        if not mine:
            return replace(row, fate="busy", note="another run predicts it")
        known = ledger.fate(row.sha256)
        if known is not None and not (known.fate == "failed" and settings.retry_failed):
            return _of(row, known)  # an overlapping run was faster
        fate = _predict(row, ledger, settings)
        ledger.record(fate)
        return _of(row, fate)


def _predict(row: Row, ledger: Ledger, settings: InboxSettings) -> Fate:
    out = ledger.run_of(row.sha256)
    shared = {name for part in (ComputeSettings, ReadingSettings, VerdictSettings) for name in part.model_fields}
    state = predict(
        reads=(str(settings.inbox / row.file),),
        out=out,
        models=settings.models,
        **settings.model_dump(include=shared),
        return_state=True,
    )
    found = state.result(raise_on_failure=False)
    place = str(out.relative_to(ledger.out))
    match found:
        case RunSummary():
            return Fate(
                row.sha256, "predicted", row.file, place, now(), reads=found.n_reads, viral=found.fates["viral"]
            )
        case InputError():
            return Fate(row.sha256, "failed", row.file, place, now(), error=str(found))
        case BaseException():
            raise found
        case _:
            raise TypeError(f"predict returned {type(found).__name__}")


def _of(row: Row, fate: Fate) -> Row:
    reads, viral = ("" if count is None else str(count) for count in (fate.reads, fate.viral))
    name: RowFate = fate.fate
    return replace(row, fate=name, run=fate.run, reads=reads, viral=viral, note=fate.error or "")


def _shown(row: Row) -> dict[str, str]:
    return {
        "file": cell(Path(row.file)),
        "fate": cell(row.fate),
        "reads": row.reads,
        "viral": row.viral,
        "run": cell(row.run),
        "note": cell(row.note),
    }
