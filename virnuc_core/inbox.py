"""The ledger of an inbox folder: which content has met which fate, in plain files.

    OUT/fates/<sha256>.json   the fate of a content, or how often it was tried without one; written whole
    OUT/claims/<sha256>.N     the lease of the run that works on it
    OUT/runs/<sha256:16>/     the run directory of that content
    OUT/inbox.tsv             one row for each file seen, made anew from the above

Files are told apart by content, so that a renamed or copied file is not predicted again, and a name used twice is.

No file holds up the others. An attempt is counted before it begins, so that one that ends this process counts as well;
a file that had all its attempts is failed, with the reason of the last."""

import hashlib
import logging
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

import pandas as pd
from pydantic import model_validator

from virnuc_core import errors
from virnuc_core.lease import lease
from virnuc_core.rundir import INBOX_MARK, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary, read_or_set_aside, sha256_of, write

RowFate = Literal["predicted", "failed", "duplicate", "arriving", "busy", "waiting", "gone"]
UNSETTLED: Final = (
    "waiting",
    "busy",
    "duplicate",
)  # an overlapping run may find what becomes of these
SAME: Final = "same content as {}"
SKIPPED_SUFFIXES: Final = (".part", ".partial", ".tmp", ".crdownload", ".filepart")
ATTEMPTS: Final = 3  # of a content that ends without saying what is wrong with it
KILLED: Final = "ended before it could say why: killed, or out of memory"
log = logging.getLogger(__name__)


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

    def but(self, **changes: Any) -> Self:
        """The row with some columns changed."""
        return self.model_copy(update=changes)


class Fate(Row):
    """What became of one content, by the file it was predicted from; `waiting` was tried, and will be again."""

    attempts: int = 1
    seal: str = ""  # of what was written

    def sealed(self) -> Self:
        """The fate with its seal."""
        body = self.model_dump_json(exclude={"seal"})
        return self.but(seal=hashlib.blake2b(body.encode(), digest_size=8).hexdigest())

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.seal not in ("", self.sealed().seal):
            raise ValueError("not what was written (seal)")
        return self


class Ledger:
    """Reads and writes the fates of one inbox."""

    def __init__(self, inbox: Path, out: Path) -> None:
        if not inbox.is_dir():
            raise errors.InputError(
                "no such folder", file=inbox, hint="create it or name another inbox"
            )
        if out.resolve() == inbox.resolve() or inbox.resolve() in out.resolve().parents:
            raise errors.ConfigError(
                f"{out}: results would lie inside the inbox {inbox}; choose another directory"
            )
        self.inbox, self.out, self.table = inbox, out, out / "inbox.tsv"

    def scan(self, *, settle_s: float, now_s: float | None = None) -> list[Row]:
        """Every file of the inbox, oldest first, with what is known of its content. A file changed less than `settle_s`
        ago is `arriving` and not read. Content without a fate is `waiting`; of several files with one content all but
        the one it was, or will be, predicted from are `duplicate`. What cannot be opened, or has a name that no table
        can hold, is `failed` until that is mended."""
        settled_before = (time.time() if now_s is None else now_s) - settle_s
        known = {
            (row.file, row.size, row.mtime_ns): row.sha256
            for row in self.read_table()
            if row.sha256
        }
        rows = []
        for path in self.inbox.rglob("*"):
            hidden = any(part.startswith(".") for part in path.relative_to(self.inbox).parts)
            if (
                not hidden
                and path.suffix not in SKIPPED_SUFFIXES
                and (row := self._seen(path, known, settled_before))
            ):
                rows.append(row)
        rows.sort(key=lambda row: (row.mtime_ns, row.file))
        # the file a fate was written for comes first, else the oldest
        foremost = [
            row
            for row in reversed(rows)
            if row.sha256 and (row.fate == "waiting" or row.note == "")
        ]
        first = {row.sha256: row.file for row in foremost}
        twins = ((row, first.get(row.sha256, row.file)) for row in rows)
        return [
            row if twin == row.file else row.but(fate="duplicate", note=SAME.format(twin))
            for row, twin in twins
        ]

    def _seen(
        self, path: Path, known: dict[tuple[str, int, int], str], settled_before: float
    ) -> Row | None:
        """One file as it is now; None for what is no file, or is gone."""
        name = str(path.relative_to(self.inbox))
        plain = (
            name.encode("utf-8", "backslashreplace").decode().replace("\r", "\\r")
        )  # what the table can hold
        row = Row(file=plain, sha256="", size=0, mtime_ns=0, fate="failed")
        try:
            at = path.stat()
            if not stat.S_ISREG(at.st_mode):
                return None
            row = row.but(size=at.st_size, mtime_ns=at.st_mtime_ns)
            if at.st_mtime > settled_before:
                return row.but(fate="arriving")
            if plain != name:
                return row.but(note="its name is not UTF-8, or holds a line break; rename it")
            sha256 = known.get((name, row.size, row.mtime_ns)) or sha256_of(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return row.but(
                note=f"cannot be read: {error.strerror or error}; check its permissions, or remove it"
            )
        return self._with_fate(row.but(sha256=sha256, fate="waiting"))

    def wants_work(self, row: Row, *, retry_failed: bool) -> bool:
        """Whether a file waits for its fate."""
        return row.fate == "waiting" or (row.fate == "failed" and retry_failed and row.sha256 != "")

    def work(
        self,
        row: Row,
        predict: Callable[[Row, Path], RunSummary | Exception],
        *,
        retry_failed: bool,
    ) -> Row:
        """The row with its new fate. `predict` takes the row and its run directory, and returns what it ended with:
        `OWN` is the file's fate at once, any other failure an attempt, the last of which is its fate. Raised, and no
        attempt: `MACHINE`, and what `predict` raises."""
        with suppress(
            OSError
        ):  # which `predict` will meet; what a table said of another time proves nothing
            row = row.but(sha256=sha256_of(self.inbox / row.file))
        with self.claim(row.sha256) as other:
            if other:
                return row.but(fate="busy", note="another run predicts it")
            _sweep(self._fate_file(row.sha256))
            known = self.fate(row.sha256)
            if (
                known is not None
                and known.fate != "waiting"
                and not (known.fate == "failed" and retry_failed)
            ):
                return self._with_fate(row)  # an overlapping run was faster
            attempt = 1 if known is None or known.fate == "failed" else known.attempts + 1
            last, run = attempt >= ATTEMPTS, f"runs/{row.sha256[:16]}"
            told = Fate(**(dict(row) | {"run": run, "attempts": attempt, "note": ""}))
            self.record(told.but(fate="failed" if last else "waiting", note=KILLED))
            try:
                found = predict(row, self.out / run)
                if isinstance(found, Exception) and errors.is_machine_error(found):
                    raise found
            except BaseException:
                self._forget(row.sha256, known)
                raise
            if isinstance(
                found, errors.RunMismatchError
            ):  # of settings, of which the file knows nothing
                self._forget(row.sha256, known)
                row = row.but(note=str(found))
            elif isinstance(found, RunSummary):
                self.record(
                    told.but(
                        fate="predicted", reads=str(found.n_reads), viral=str(found.fates["viral"])
                    )
                )
            else:
                fate = (
                    "failed"
                    if last or isinstance(found, errors.INPUT_SPECIFIC_ERRORS)
                    else "waiting"
                )
                log.warning("%s: attempt %d of %d: %s", row.file, attempt, ATTEMPTS, found)
                why = (
                    str(found)
                    if isinstance(found, errors.VirnucError)
                    else f"{type(found).__name__}: {found}"
                )
                self.record(told.but(fate=fate, note=why))
            return self._with_fate(row)

    def _forget(self, sha256: str, known: Fate | None) -> None:
        """An attempt that does not count."""
        if known is None:
            self._fate_file(sha256).unlink()
        else:
            self.record(known)

    def fate(self, sha256: str) -> Fate | None:
        """What is known of a content; None for nothing, also where the file that tells was damaged: it is set aside."""
        return read_or_set_aside(self._fate_file(sha256), Fate)

    def record(self, fate: Fate) -> None:
        """Write a fate down."""
        write(self._fate_file(fate.sha256), fate.sealed())

    def _fate_file(self, sha256: str) -> Path:
        return self.out / "fates" / f"{sha256}.json"

    def claim(self, sha256: str) -> AbstractContextManager[str]:
        """Hold a content while working on it; yields who else holds it, or "" when nobody does."""
        return lease(self.out / "claims" / sha256, self._fate_file(sha256))

    def read_table(self) -> list[Row]:
        """The rows written last; none when there is no table, or it cannot be read."""
        try:
            table = pd.read_csv(self.table, sep="\t", dtype=str, na_filter=False)
            return [Row.model_validate(row) for row in table.to_dict("records")]
        except FileNotFoundError:
            return []
        except ValueError as error:  # pandas' own and pydantic's are such
            log.warning(
                "%s is made anew, for it cannot be read (%s)", self.table, type(error).__name__
            )
            return []

    def write_table(self, rows: Sequence[Row]) -> None:
        """Write the table whole: `rows`, and after them the files that were seen before and are gone."""
        mark = self.out / INBOX_MARK
        with lease(mark, self.table, wait=True):
            mark.touch()
            _sweep(self.table)
            here = {row.file for row in rows}
            gone = [row.but(fate="gone") for row in self.read_table() if row.file not in here]
            rows = [self._with_fate(row) if row.fate in UNSETTLED else row for row in rows]
            table = pd.DataFrame(
                [row.model_dump() for row in [*rows, *gone]], columns=list(Row.model_fields)
            )
            write_text_atomically(
                self.table, table.to_csv(sep="\t", index=False, lineterminator="\n")
            )

    def _with_fate(self, row: Row) -> Row:
        """The row with the fate its content has by now, an overlapping run's too; as it was while there is none."""
        fate = self.fate(row.sha256)
        if fate is None or (fate.fate == "waiting" and row.fate == "busy"):
            return row
        if fate.fate == "waiting":
            return row.but(
                fate="waiting", note=f"attempt {fate.attempts} of {ATTEMPTS}: {fate.note}"
            )
        twin = (
            {} if fate.file == row.file else {"fate": "duplicate", "note": SAME.format(fate.file)}
        )
        return row.but(**fate.model_dump(include={"fate", "run", "reads", "viral", "note"}) | twin)


def _sweep(path: Path) -> None:
    """Remove what killed writers of a file left beside it; whoever else writes it is kept out by a lock."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)
