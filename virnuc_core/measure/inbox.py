"""The ledger of an inbox folder: which content has met which fate, in plain files.

    OUT/fates/<sha256>.json   written whole when the fate of a content is known; never changed by another run
    OUT/claims/<sha256>.lock  held by the run that works on it; freed by death
    OUT/runs/<sha256:16>/     the run directory of that content
    OUT/inbox.tsv             one row for each file seen, made anew from the above

Files are told apart by content, so that a renamed or copied file is not predicted again, and a name used twice is.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, Literal

import pandas as pd

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.rundir import write_text_whole
from virnuc_core.runfiles import RunFile, RunSummary, now, write
from virnuc_core.validation import read_usable

RowFate = Literal["predicted", "failed", "duplicate", "arriving", "busy", "waiting", "gone"]
UNSETTLED: Final = ("waiting", "busy", "duplicate")  # an overlapping run may find what becomes of these
SAME: Final = "same content as {}"
SKIPPED_SUFFIXES: Final = (".part", ".partial", ".tmp", ".crdownload", ".filepart")


class Fate(RunFile):
    """What became of one content."""

    sha256: str
    fate: Literal["predicted", "failed"]
    file: str  # the file it was predicted from
    run: str  # run directory, relative to OUT
    when: str
    reads: int | None = None
    viral: int | None = None
    error: str | None = None


class Row(RunFile):
    """One file of the inbox, as inbox.tsv shows it."""

    file: str  # relative to the inbox
    sha256: str
    size: int
    mtime_ns: int
    fate: RowFate
    run: str = ""
    reads: str = ""
    viral: str = ""
    note: str = ""

    def but(self, **changes: str) -> Row:
        """The row with some columns changed."""
        return self.model_copy(update=changes)


class Ledger:
    """Reads and writes the fates of one inbox."""

    def __init__(self, inbox: Path, out: Path) -> None:
        if not inbox.is_dir():
            raise InputError("no such folder", file=inbox, hint="create it or name another inbox")
        if out.resolve() == inbox.resolve() or inbox.resolve() in out.resolve().parents:
            raise ConfigError(f"{out}: results would lie inside the inbox {inbox}; choose another directory")
        self.inbox, self.out, self.table = inbox, out, out / "inbox.tsv"

    def scan(self, *, settle_s: float, now_s: float | None = None) -> list[Row]:
        """Every file of the inbox, oldest first, with what is known of its content.

        A file changed less than `settle_s` ago is `arriving` and not read. Content without a fate is `waiting`; of
        several files with one content all but the one it was, or will be, predicted from are `duplicate`.
        """
        settled_before = (time.time() if now_s is None else now_s) - settle_s
        known = {(row.file, row.size, row.mtime_ns): row.sha256 for row in self.read_table() if row.sha256}
        rows = []
        for path in self.inbox.rglob("*"):
            name = path.relative_to(self.inbox)
            hidden = any(part.startswith(".") for part in name.parts)
            if not path.is_file() or hidden or path.suffix in SKIPPED_SUFFIXES:
                continue
            at = path.stat()
            row = Row(file=str(name), sha256="", size=at.st_size, mtime_ns=at.st_mtime_ns, fate="arriving")
            if at.st_mtime <= settled_before:
                sha256 = known.get((row.file, row.size, row.mtime_ns)) or _digest(path)
                row = self._with_fate(row.but(sha256=sha256, fate="waiting"))
            rows.append(row)
        rows.sort(key=lambda row: (row.mtime_ns, row.file))
        # the file a fate was written for comes first, else the oldest
        first = {row.sha256: row.file for row in reversed(rows) if row.sha256 and row.note == ""}
        twins = ((row, first.get(row.sha256, row.file)) for row in rows)
        return [row if twin == row.file else row.but(fate="duplicate", note=SAME.format(twin)) for row, twin in twins]

    def wants_work(self, row: Row, *, retry_failed: bool) -> bool:
        """Whether a file waits for its fate."""
        return row.fate == "waiting" or (row.fate == "failed" and retry_failed)

    def work(self, row: Row, predict: Callable[[Row, Path], RunSummary], *, retry_failed: bool) -> Row:
        """The row with its new fate; `predict` takes the row and its run directory.

        Only what is wrong with the file itself (`InputError`) is its fate; any other failure of `predict` is raised.
        """
        with self.claim(row.sha256) as mine:
            if not mine:
                return row.but(fate="busy", note="another run predicts it")
            known = self.fate(row.sha256)
            if known is None or (known.fate == "failed" and retry_failed):  # else an overlapping run was faster
                run, told = f"runs/{row.sha256[:16]}", {}
                try:
                    found = predict(row, self.out / run)
                    told = {"fate": "predicted", "reads": found.n_reads, "viral": found.fates["viral"]}
                except InputError as error:
                    told = {"fate": "failed", "error": str(error)}
                self.record(Fate(sha256=row.sha256, file=row.file, run=run, when=now(), **told))
            return self._with_fate(row)

    def fate(self, sha256: str) -> Fate | None:
        """The fate of a content; None while unknown. Errors: `ConfigError` names a fate file that cannot be read."""
        path = self.out / "fates" / f"{sha256}.json"
        found, problems = read_usable(path, Fate)
        if problems:
            raise ConfigError(f"{path}: not a fate this version can read; remove it to predict that file anew")
        return found

    def record(self, fate: Fate) -> None:
        """Write a fate down."""
        write(self.out / "fates" / f"{fate.sha256}.json", fate)

    def claim(self, sha256: str) -> AbstractContextManager[bool]:
        """Hold a content while working on it; yields False when another run holds it."""
        return _locked(self.out / "claims" / f"{sha256}.lock", wait=False)

    def read_table(self) -> list[Row]:
        """The rows written last; none when there is no table or another version wrote it."""
        try:
            table = pd.read_csv(self.table, sep="\t", dtype=str, na_filter=False)
        except (FileNotFoundError, pd.errors.EmptyDataError):
            return []
        known = tuple(table) == tuple(Row.model_fields)
        return [Row.model_validate(row) for row in table.to_dict("records")] if known else []

    def write_table(self, rows: Sequence[Row]) -> None:
        """Write the table whole: `rows`, and after them the files that were seen before and are gone."""
        with _locked(self.out / "claims" / "inbox.tsv.lock", wait=True):
            here = {row.file for row in rows}
            gone = [row.but(fate="gone") for row in self.read_table() if row.file not in here]
            rows = [self._with_fate(row) if row.fate in UNSETTLED else row for row in rows]
            table = pd.DataFrame([row.model_dump() for row in [*rows, *gone]], columns=list(Row.model_fields))
            write_text_whole(self.table, table.to_csv(sep="\t", index=False, lineterminator="\n"))

    def _with_fate(self, row: Row) -> Row:
        """The row with the fate its content has by now, an overlapping run's too; as it was while there is none."""
        fate = self.fate(row.sha256)
        if fate is None:
            return row
        reads, viral = ("" if count is None else str(count) for count in (fate.reads, fate.viral))
        if fate.file == row.file:
            return row.but(run=fate.run, reads=reads, viral=viral, fate=fate.fate, note=fate.error or "")
        return row.but(run=fate.run, reads=reads, viral=viral, fate="duplicate", note=SAME.format(fate.file))


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        held = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        yield held
