"""The inbox: each new file of a folder is predicted once, by one loading of the weights."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from virnuc.flows.parameters import build
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.shared_workers import predict_with, shared_workers
from virnuc.tasks.artifacts import artifact_key, publish_table, table_cell
from virnuc.tasks.events import emit
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.result_links import result_address, with_links
from virnuc.tasks.running_mark import add_tags, announce
from virnuc_core.engine.pool import Pool
from virnuc_core.inbox import Ledger, Row, RowFate
from virnuc_core.markdown import Markdown
from virnuc_core.reads.sources import sample_name
from virnuc_core.runfiles import RunSummary

# The name of the outcome if no file was to be predicted. The UI shows it as the state of the run.
NOTHING_NEW: Final = "Nothing new"
SHOWN_COLUMNS = ("file", "sample", "fate", "reads", "viral", "run", "note")


def predict_inbox(settings: InboxSettings) -> Outcome[Counter[RowFate]]:
    """Predict each new file of a folder once, and write the fate of every file to `inbox.tsv`.

    A file that fails does not stop the others. The workers load the weights once for all files.

    Returns:
        An outcome with the number of files by fate, named `Nothing new` if no file was due.

    Raises:
        VirnucError: The settings or the weights cannot be used.
    """
    preflight(settings)
    announce("inbox", settings.inbox.name)
    # The ledger keeps the fate of each file: predicted, failed, waiting and so on.
    ledger = settings.open_ledger()
    known_failures = _failures(ledger.read_table())

    rows = ledger.scan(settle_s=settings.settle_s)
    ledger.write_table(rows)
    todo = []
    for number, row in enumerate(rows):
        if ledger.is_due(row, retry_failed=settings.retry_failed):
            todo.append(number)
    samples = [rows[number].sample or sample_name([rows[number].file]) for number in todo]
    add_tags(*samples)
    with shared_workers(settings, warm=True) if todo else nullcontext() as pool:
        for number in todo:
            rows[number] = _predict_file(settings, ledger, rows[number], pool)
            ledger.write_table(rows)

    # Look again, because files may have come or gone meanwhile.
    rows = ledger.scan(settle_s=settings.settle_s)
    for row in rows:
        # Each failure is reported once, as an event, which an automation may send to people.
        if row.fate == "failed" and (row.file, row.sha256) not in known_failures:
            payload = {"reason": row.note, "run": row.run}
            emit("inbox.failed", f"inbox.{artifact_key(row.file)}", row.file, payload)
    _publish_rows(settings, rows)
    counts = Counter(row.fate for row in rows)
    message = _describe_counts(counts)
    if not todo:
        return Outcome(counts, f"nothing new: {message}", NOTHING_NEW)
    return completed(counts, message)


def _failures(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Return name and SHA-256 of the files that failed."""
    return {(row.file, row.sha256) for row in rows if row.fate == "failed"}


def _predict_file(settings: InboxSettings, ledger: Ledger, row: Row, pool: Pool | None) -> Row:
    """Predict one file of the inbox, and return its row with the fate that it has now.

    Args:
        settings: The settings of the flow.
        ledger: Decides whether the file is predicted, and keeps its fate.
        row: The row of the file.
        pool: The workers that all files share.
    """
    # The settings that the flow for an inbox and a prediction have in common.
    shared_settings = settings.model_dump(include={*PredictSettings.model_fields}, exclude={"out"})

    def predict_row(row: Row, out: Path) -> RunSummary | Exception:
        """Predict the file of a row into the folder `out`, and return the summary or the error.

        The ledger calls this, with the row as it is now, unless another run has predicted the same
        content.
        """
        try:
            delivery = ledger.delivery_of(row)
            path_of_file = {file: str(settings.inbox / file) for file in delivery.files}
            values = {
                "reads": tuple(path_of_file[file] for file in delivery.singles),
                "mates_1": tuple(path_of_file[first] for first, _ in delivery.pairs),
                "mates_2": tuple(path_of_file[second] for _, second in delivery.pairs),
                "out": out,
                **shared_settings,
            }
            file_settings = build(PredictSettings, values)
            label = row.sample or sample_name(file_settings.all_inputs)
            digests = {
                path_of_file[file]: digest for file, digest in ledger.digests_of(row).items()
            }
            summary, _ = predict_with(pool, file_settings, label, expected_sha256=digests)
        except Exception as error:  # noqa: BLE001 - the ledger decides what the error means
            return error
        return summary

    return ledger.attempt(row, predict_row, retry_failed=settings.retry_failed)


def _publish_rows(settings: InboxSettings, rows: Sequence[Row]) -> None:
    """Show the files of the inbox, with their fates, as a table in the UI."""
    shown_rows = []
    for row in rows:
        cells = {name: getattr(row, name) for name in SHOWN_COLUMNS}
        address = result_address(settings.out / row.run) if row.run else None
        if address is not None:
            cells["run"] = Markdown(f"[{table_cell(row.run)}]({address})")
        shown_rows.append(cells)
    description = with_links(f"Files of {settings.inbox}.", result=settings.out, kind="Results")
    publish_table(f"inbox-{settings.inbox.name}", shown_rows, description)


def _describe_counts(counts: Counter[RowFate]) -> str:
    """Return the number of files by fate: `2 failed, 5 predicted`."""
    if not counts:
        return "the inbox is empty"
    return ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items()))
