"""The ledger of an inbox folder: what became of each content, in plain files.

    OUT/fates/<sha256>.json   the fate of a content, or how often it was tried without one
    OUT/claims/<sha256>.N     the lease of the run that works on it
    OUT/runs/<sha256:16>/     the run directory of that content
    OUT/<sample>              a link to the run directory of a sample
    OUT/inbox.tsv             a row for each file, written anew from the above

Files are told apart by content. A renamed or copied file is therefore not predicted again, and a
name that is used again for another content is.

Files that belong together (mates, lanes, the files of a sample sheet) are one delivery, see
`deliveries`. It is treated like one file: its digest is made of those of its files, and its first
file stands for it in the table. The other files are `joined`.

A file that fails does not delay the others. An attempt is counted before it begins, so an attempt
that kills this process is counted, too. After `MAX_ATTEMPTS` attempts a file has failed, with the
reason of the last attempt.
"""

import hashlib
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, Self

import pandas as pd
from pydantic import model_validator

from virnuc_core import errors
from virnuc_core.allowed_paths import require_allowed
from virnuc_core.deliveries import (
    SHEET_SUFFIXES,
    Delivery,
    InboxFiles,
    group_files,
    link_names,
)
from virnuc_core.lease import lease, require_directory
from virnuc_core.reads.file_names import ENDINGS
from virnuc_core.rundir import INBOX_MARK, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary, read_or_set_aside, sha256_of, write
from virnuc_core.safe_files import open_file, open_to_write
from virnuc_core.spreadsheets import escape_formula, restore_formula
from virnuc_core.system_errors import (
    PERMISSION_ERRORS,
    ErrorKind,
    classify,
    describe_system_error,
    error_number,
    is_folder,
    unreadable_error,
)

RowFate = Literal[
    "predicted",
    "failed",
    "duplicate",
    "arriving",
    "busy",
    "waiting",
    "gone",
    "joined",
    "ignored",
]
UNSETTLED: Final = ("waiting", "busy", "duplicate")  # an overlapping run may change these
_PARTS: Final = ("joined", "ignored", "arriving")  # files that are no delivery by themselves
DUPLICATE_NOTE: Final = "same content as {}"
SKIPPED_SUFFIXES: Final = (".part", ".partial", ".tmp", ".crdownload", ".filepart")
# Files at the top of a run folder of a sequencer, from the start of the run or at its end.
RUN_FOLDER_SIGNS: Final = ("RunInfo.xml", "RunParameters.xml", "runParameters.xml")
COMPLETION_FILES: Final = ("RTAComplete.txt", "CopyComplete.txt", "*.done")
# A file named as one mate waits for the other mate so many times as long as it takes to settle.
_MATE_PATIENCE: Final = 10
MAX_ATTEMPTS: Final = 3  # with a content that ends without saying what is wrong with it
KILLED: Final = "ended before it could say why: killed, or out of memory"
RUN_NAME_LENGTH: Final = 16  # characters of the SHA-256
SEAL_BYTES: Final = 8
log = logging.getLogger(__name__)


class Row(RunFile):
    """A file of the inbox, as `inbox.tsv` shows it."""

    file: str  # relative to the inbox
    sha256: str
    size: int
    mtime_ns: int
    fate: RowFate
    run: str = ""
    reads: str = ""
    viral: str = ""
    note: str = ""
    sample: str = ""  # also the name of the link to the run directory, once it is predicted
    delivery: str = ""  # digest of the delivery, if the file is one of several

    @property
    def key(self) -> str:
        """Return the digest under which the fate is recorded: of the delivery, or of the file."""
        return self.delivery or self.sha256

    def changed(self, **columns: Any) -> Self:
        """Return the row with some columns changed."""
        return self.model_copy(update=columns)


class Fate(Row):
    """The fate of a content, with the file from which it was predicted.

    The fate `waiting` means: an attempt was made, and another one will follow.
    """

    attempts: int = 1
    seal: str = ""  # digest of the other fields

    def with_seal(self) -> Self:
        """Return the fate with its seal, a digest of all other fields."""
        # Fates of older versions have no sample and no delivery, and were sealed without them.
        absent = {name for name in ("sample", "delivery") if not getattr(self, name)}
        body = self.model_dump_json(exclude={"seal", *absent})
        digest = hashlib.blake2b(body.encode(), digest_size=SEAL_BYTES)
        return self.changed(seal=digest.hexdigest())

    @model_validator(mode="after")
    def _require_seal(self) -> Self:
        """Refuse a fate that is not the one that was written. A new one has no seal yet."""
        if self.seal and self.seal != self.with_seal().seal:
            raise ValueError("not what was written (seal)")
        return self


def _is_input(path: Path) -> bool:
    """Return True if a file is called as reads or sample sheets are."""
    match = ENDINGS.search(path.name)
    is_called_reads = match is not None and bool(match[1])
    return is_called_reads or path.name.lower().endswith(SHEET_SUFFIXES)


# How a sub-folder is treated: `plain` files settle one by one, `awaited` ones wait for the
# completion file of the folder, and those of a `complete` folder are taken at once.
_FolderState = Literal["plain", "awaited", "complete"]
Outcome = RunSummary | Exception
Predict = Callable[[Row, Path], Outcome]  # takes the row and its run directory


@dataclass(frozen=True, slots=True)
class _FileState:
    """Name, size and time of a file. If they are equal, the content is taken to be the same."""

    file: str
    size: int
    mtime_ns: int


class Ledger:
    """Reads and writes the fates of an inbox."""

    def __init__(
        self,
        inbox: Path,
        out: Path,
        *,
        join_mates: bool = True,
        completion: Sequence[str] = (),
    ) -> None:
        """Open the ledger of an inbox.

        Args:
            inbox: The folder of new files.
            out: The directory of the results.
            join_mates: Files of mates are pairs.
            completion: Names of files (with `*`) that appear in a sub-folder when it is complete.
                With them, no file of a sub-folder is taken before. Without them, the usual names
                are used, and only run folders of a sequencer are waited for.

        Raises:
            InputError: There is no such folder.
            ConfigError: The results would be written into the inbox.
        """
        if not is_folder(inbox):
            hint = "create it or name another inbox"
            raise errors.InputError("no such folder", file=inbox, hint=hint)
        inbox_root, out_root = inbox.resolve(), out.resolve()
        if out_root == inbox_root or inbox_root in out_root.parents:
            raise errors.ConfigError(
                f"{out}: results would lie inside the inbox {inbox}; choose another directory"
            )
        self.inbox = inbox
        self.out = out
        self.table = out / "inbox.tsv"
        self._join_mates = join_mates
        self._completion = tuple(completion)
        self._deliveries: dict[str, Delivery] = {}  # by the first file; see `scan`
        self._digests: dict[str, dict[str, str]] = {}  # by the first file of a delivery
        self._is_table_written = False  # by this object; then the directory is there

    # --- Files ------------------------------------------------------------------------------------

    def scan(self, *, settle_s: float, now_s: float | None = None) -> list[Row]:
        """Return all files of the inbox with the fates of their contents, the oldest first.

        - `arriving`: changed less than `settle_s` ago. The file is not read.
        - `waiting`: the content has no fate yet, or it could not be read this time.
        - `duplicate`: another file with the same content was predicted, or will be.
        - `failed`: its prediction failed, it cannot be opened, or its name is not UTF-8.

        Other fates are those that were recorded for the content.

        Args:
            settle_s: Seconds without a change after which a file is complete.
            now_s: The time, in seconds since 1970. Default: now.

        Returns:
            One row for each file. Files that the last table lists with the same size and time are
            not read again: their digest is taken from the table.
        """
        if now_s is None:
            now_s = time.time()
        known_digests = {
            _FileState(row.file, row.size, row.mtime_ns): row.sha256
            for row in self.read_table()
            if row.sha256
        }
        rows: list[Row] = []
        states: dict[str, _FolderState] = {}  # by name of the sub-folder
        for path in self._candidate_paths(rows):
            top_folder = path.relative_to(self.inbox).parts[0]
            if top_folder not in states:
                states[top_folder] = self._find_folder_state(self.inbox / top_folder)
            state = states[top_folder]
            if state != "plain" and not _is_input(path):
                continue  # the other files of a run folder are the sequencer's
            settled_before_s = now_s - settle_s
            if state == "complete":
                settled_before_s = math.inf
            elif state == "awaited":
                settled_before_s = -math.inf
            row = self._describe_file(path, known_digests, settled_before_s)
            if row is not None and state == "awaited":
                row = row.changed(note=f"{top_folder} is not complete")
            if row is not None:
                rows.append(row)
        rows.sort(key=lambda row: (row.mtime_ns, row.file))
        rows = self._join_deliveries(rows, young_after_s=now_s - _MATE_PATIENCE * settle_s)
        return _mark_duplicates(rows)

    def _find_folder_state(self, folder: Path) -> _FolderState:
        """Return whether a sub-folder is a delivery of its own, and whether it is complete."""
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError as error:
            # Mostly it is a file. Of a folder that cannot be listed now, nothing is known.
            return "awaited" if classify(error) is ErrorKind.TRANSIENT else "plain"
        patterns = self._completion or COMPLETION_FILES
        if any(fnmatch(name, pattern) for name in names for pattern in patterns):
            return "complete"
        if self._completion or any(name in RUN_FOLDER_SIGNS for name in names):
            return "awaited"
        return "plain"

    def _join_deliveries(self, rows: list[Row], young_after_s: float) -> list[Row]:
        """Join the rows of files that are predicted together, and keep the deliveries.

        Args:
            rows: One row for each file.
            young_after_s: A file that was changed later may have its mate on the way.

        Returns:
            The rows in the same order. The first file of each delivery has the fate of the
            delivery, and the others are `joined`.
        """
        row_of_file = {row.file: row for row in rows}
        files = InboxFiles(
            inbox=self.inbox,
            complete=tuple(row.file for row in rows if row.sha256),
            arriving=frozenset(row.file for row in rows if row.fate == "arriving"),
            young=frozenset(row.file for row in rows if row.mtime_ns > young_after_s * 1e9),
        )
        grouping = group_files(files, join_mates=self._join_mates)
        self._deliveries = {delivery.files[0]: delivery for delivery in grouping.deliveries}
        for file, reason in grouping.failed.items():
            row_of_file[file] = row_of_file[file].changed(fate="failed", note=reason)
        for file, reason in grouping.ignored.items():
            row_of_file[file] = row_of_file[file].changed(fate="ignored", note=reason)
        for file, reason in grouping.held.items():
            row_of_file[file] = row_of_file[file].changed(fate="arriving", note=reason)
        digests = {row.file: row.sha256 for row in rows}
        for first_file, delivery in self._deliveries.items():
            first_row = row_of_file[first_file].changed(sample=delivery.sample)
            if len(delivery.files) > 1:
                key = delivery.key(digests)
                # What is recorded of the content of the first file alone does not count here.
                first_row = first_row.changed(
                    delivery=key, fate="waiting", run="", reads="", viral="", note=""
                )
                first_row = self._with_fate(first_row)
                for file in delivery.files[1:]:
                    row_of_file[file] = row_of_file[file].changed(
                        fate="joined",
                        delivery=key,
                        sample=first_row.sample,
                        run=first_row.run,
                        reads="",
                        viral="",
                        note=f"read together with {first_file}",
                    )
            row_of_file[first_file] = first_row
        return [row_of_file[row.file] for row in rows]

    def delivery_of(self, row: Row) -> Delivery:
        """Return the files that are predicted with the file of a row, as the last scan found."""
        return self._deliveries.get(row.file, Delivery(row.sample, singles=(row.file,)))

    def _candidate_paths(self, rows: list[Row]) -> Iterator[Path]:
        """Yield the files in the inbox and its sub-folders.

        Left out are hidden files and folders, unfinished copies, and the files in folders to which
        links lead. Programs that copy or download give unfinished files one of
        `SKIPPED_SUFFIXES`.

        Args:
            rows: Receives a row for each sub-folder that cannot be listed. Nothing is known about
                its files.

        Raises:
            UnreadableError: The inbox itself cannot be listed.
        """
        pending = [self.inbox]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(folder) as iterator:
                    entries = list(iterator)
            except FileNotFoundError:  # removed in the meantime
                continue
            except OSError as error:
                if folder == self.inbox:
                    raise unreadable_error(error, folder) from error
                rows.append(self._describe_unlisted_folder(folder, error))
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif path.suffix not in SKIPPED_SUFFIXES:
                    yield path

    def digests_of(self, row: Row) -> dict[str, str]:
        """Return the SHA-256 of each file of a delivery at the begin of the current attempt."""
        return self._digests.get(row.file, {row.file: row.sha256})

    def _describe_unlisted_folder(self, folder: Path, error: OSError) -> Row:
        """Return the row of a sub-folder whose files are not known, with the error as a note."""
        name = str(folder.relative_to(self.inbox)).encode("utf-8", "backslashreplace").decode()
        row = Row(file=f"{name}/", sha256="", size=0, mtime_ns=0, fate="failed")
        if _may_pass(error):
            return row.changed(fate="waiting", note=_unreadable_note(error))
        return row.changed(note=f"cannot be listed: {describe_system_error(error)}")

    def _describe_file(
        self, path: Path, known_digests: dict[_FileState, str], settled_before_s: float
    ) -> Row | None:
        """Return the row of a file of the inbox.

        Args:
            path: The file.
            known_digests: SHA-256 of files that were read before. They are not read again.
            settled_before_s: A file that was changed later is still being written.

        Returns:
            The row, or None if the path is not a regular file or no longer exists.
        """
        name = str(path.relative_to(self.inbox))
        # A file name may contain bytes that are not UTF-8, which the table cannot hold.
        printable = name.encode("utf-8", "backslashreplace").decode().replace("\r", "\\r")
        # The fate stays `failed` if an error is found below.
        row = Row(file=printable, sha256="", size=0, mtime_ns=0, fate="failed")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return None
            row = row.changed(size=status.st_size, mtime_ns=status.st_mtime_ns)
            if status.st_mtime > settled_before_s:
                return row.changed(fate="arriving")
            require_allowed(path, "inbox")
            if printable != name:
                return row.changed(note="its name is not UTF-8, or holds a line break; rename it")
            sha256 = known_digests.get(_FileState(name, row.size, row.mtime_ns))
            if sha256 is None:
                sha256 = sha256_of(path)
        except errors.ConfigError as error:  # a link that leads outside of the allowed folders
            return row.changed(note=str(error))
        except FileNotFoundError:
            return None
        except OSError as error:
            if _may_pass(error):
                return row.changed(fate="waiting", note=_unreadable_note(error))
            problem = f"cannot be read: {error.strerror or error}"
            return row.changed(note=f"{problem}; check its permissions, or remove it")
        return self._with_fate(row.changed(sha256=sha256, fate="waiting"))

    # --- Attempts ---------------------------------------------------------------------------------

    def is_due(self, row: Row, *, retry_failed: bool) -> bool:
        """Return whether a file should be predicted now.

        Args:
            row: The file with its fate, as `scan` returns it.
            retry_failed: Predict files again that have failed.
        """
        # Without a digest, the content of the file is not known: it could not be read.
        if row.sha256 == "":
            return False
        if row.fate == "failed":
            return retry_failed
        return row.fate == "waiting"

    def attempt(self, row: Row, predict: Predict, *, retry_failed: bool) -> Row:
        """Predict a file, unless another run has predicted the same content in the meantime.

        An error of the input, such as a damaged file, makes the file `failed` immediately. After
        any other error the file waits for another attempt, until it had `MAX_ATTEMPTS`.

        Args:
            row: The file.
            predict: Function that predicts the file and returns the summary or the error.
            retry_failed: Predict a content again that has failed before.

        Returns:
            The row with its new fate.

        Raises:
            VirnucError: The error that `predict` returned, if it lies with the machine. It does not
                count as an attempt.
            BaseException: Whatever `predict` raised. It does not count as an attempt.
        """
        self._require_directory()
        # The file may have been replaced since its digest was computed. If it is absent, or this
        # user may not read it, `predict` reports that.
        delivery = self.delivery_of(row)
        try:
            digests = {file: sha256_of(self.inbox / file) for file in delivery.files}
            row = row.changed(sha256=digests[row.file])
            if row.delivery and delivery.key(digests) != row.delivery:
                return row.changed(
                    fate="arriving", note="a file was replaced; the next run takes it"
                )
        except OSError as error:
            if _may_pass(error):
                return row.changed(sha256="", fate="waiting", note=_unreadable_note(error))
            digests = {}  # `predict` reports what is wrong
        self._digests[row.file] = digests
        with self.claim(row.key) as owner:
            if owner:
                return row.changed(fate="busy", note="another run predicts it")
            _remove_partial_files(self._fate_file(row.key))
            earlier = self.read_fate(row.key)
            if earlier is None or earlier.fate == "waiting":
                return self._attempt_claimed(row, predict, earlier)
            if earlier.fate == "failed" and retry_failed:
                return self._attempt_claimed(row, predict, earlier)
            return self._with_fate(row)  # another run has decided the fate in the meantime

    def _attempt_claimed(self, row: Row, predict: Predict, earlier: Fate | None) -> Row:
        """Predict a file that this process has claimed, and record its fate.

        Args:
            row: The file.
            predict: Function that predicts the file and returns the summary or the error.
            earlier: The fate before this attempt, if there is one.

        Returns:
            The row with its new fate.
        """
        number = 1
        if earlier is not None and earlier.fate == "waiting":
            number = earlier.attempts + 1
        fate_if_unexplained: RowFate = "waiting"
        if number >= MAX_ATTEMPTS:
            fate_if_unexplained = "failed"
        run = f"runs/{row.key[:RUN_NAME_LENGTH]}"
        columns = dict(row) | {"run": run, "attempts": number, "note": ""}
        begun = Fate(**columns)  # all columns of the fate that are known before the outcome
        # This is the fate that remains if the attempt kills the process.
        self.write_fate(begun.changed(fate=fate_if_unexplained, note=KILLED))
        try:
            outcome = predict(row, self.out / run)
            if isinstance(outcome, Exception) and errors.is_machine_error(outcome):
                raise outcome
        except BaseException:
            self._require_directory()
            self._undo_attempt(row.key, earlier)
            raise
        self._require_directory()

        if isinstance(outcome, RunSummary):
            n_reads, n_viral = str(outcome.n_reads), str(outcome.fates["viral"])
            sample = self._link_sample(row.sample, row.key, run)
            self.write_fate(
                begun.changed(fate="predicted", reads=n_reads, viral=n_viral, sample=sample)
            )
        elif isinstance(outcome, errors.RunMismatchError):
            # The run directory has a run with other settings. That is not a fault of the file.
            self._undo_attempt(row.key, earlier)
            row = row.changed(note=str(outcome))
        else:
            # The input is to blame, or nobody knows what is. Only in the second case is another
            # attempt made.
            log.warning("%s: attempt %d of %d: %s", row.file, number, MAX_ATTEMPTS, outcome)
            fate = fate_if_unexplained
            if isinstance(outcome, errors.INPUT_SPECIFIC_ERRORS):
                fate = "failed"
            self.write_fate(begun.changed(fate=fate, note=_describe_error(outcome)))
        return self._with_fate(row)

    def _link_sample(self, sample: str, key: str, run: str) -> str:
        """Make the link `OUT/<sample>` to a run directory, and return its name.

        A name that another delivery has is left to it: this one gets a part of its digest added.

        Args:
            sample: The name of the sample; empty for a file that was not grouped.
            key: The digest of the delivery.
            run: The run directory, relative to the directory of the results.
        """
        names = list(link_names(sample or key[:RUN_NAME_LENGTH], key))
        for name in names:
            link = self.out / name
            try:
                link.symlink_to(run, target_is_directory=True)
            except FileExistsError:
                if link.is_symlink() and str(link.readlink()) == run:
                    return name
                continue
            except OSError as error:  # a file system without links: the table has the directory
                log.warning("%s: no link can be made (%s)", link, describe_system_error(error))
            return name
        return names[-1]

    def _undo_attempt(self, sha256: str, earlier: Fate | None) -> None:
        """Restore the recorded fate to what it was before an attempt that does not count."""
        if earlier is None:
            self._fate_file(sha256).unlink()
        else:
            self.write_fate(earlier)

    # --- Fates ------------------------------------------------------------------------------------

    def read_fate(self, sha256: str) -> Fate | None:
        """Return the fate of a content, or None if there is none. A damaged file is renamed."""
        return read_or_set_aside(self._fate_file(sha256), Fate)

    def write_fate(self, fate: Fate) -> None:
        """Write the file with the fate of a content, sealed with a digest."""
        write(self._fate_file(fate.key), fate.with_seal())

    def _fate_file(self, sha256: str) -> Path:
        """Return the file with the fate of a content."""
        return self.out / "fates" / f"{sha256}.json"

    def claim(self, sha256: str) -> AbstractContextManager[str]:
        """Reserve a content for this process while the `with` block lasts.

        Args:
            sha256: The digest of the content.

        Returns:
            A context manager. It gives the block an empty string, or a description of the process
            that has reserved the content already.
        """
        return lease(self.out / "claims" / sha256, self._fate_file(sha256))

    def _with_fate(self, row: Row) -> Row:
        """Return the row with the recorded fate of its content, which another run may have set.

        A row without a digest is returned as it is: the content of its file is not known.
        """
        if row.sha256 == "":
            return row
        fate = self.read_fate(row.key)
        if fate is None:
            return row
        if fate.fate == "waiting":
            # Another process is at work on the content now, which says more than its last attempt.
            if row.fate == "busy":
                return row
            note = f"attempt {fate.attempts} of {MAX_ATTEMPTS}: {fate.note}"
            return row.changed(fate="waiting", note=note)
        columns = fate.model_dump(include={"fate", "run", "reads", "viral", "note"})
        row = row.changed(**columns, sample=fate.sample or row.sample)
        if fate.file != row.file:  # the content was predicted from another file
            row = row.changed(fate="duplicate", note=DUPLICATE_NOTE.format(fate.file))
        return row

    # --- Table ------------------------------------------------------------------------------------

    def read_table(self) -> list[Row]:
        """Return the rows of `inbox.tsv`.

        Returns:
            The rows of the last table. Empty if it is missing, or damaged (with a warning): the
            table can be written again from the recorded fates.
        """
        try:
            with open_file(self.table) as file:
                table = pd.read_csv(file, sep="\t", dtype=str, na_filter=False)
            table = table.map(restore_formula)
            return [Row.model_validate(row) for row in table.to_dict("records")]
        except FileNotFoundError:
            return []
        except ValueError as error:  # of pandas and of pydantic
            log.warning(
                "%s cannot be read (%s) and is written again", self.table, type(error).__name__
            )
            return []

    def write_table(self, rows: Sequence[Row]) -> None:
        """Write `inbox.tsv`: the given rows, then files of the last table that no longer exist.

        Overlapping runs may have decided fates since the rows were made, so these are looked up
        again.

        Args:
            rows: All files of the inbox with their fates.

        Raises:
            ConfigError: The directory of the results was renamed or removed.
        """
        self._require_directory()
        mark = self.out / INBOX_MARK
        with lease(mark, self.table, wait=True):
            # An empty file by which virnuc recognises the directory as its own later.
            open_to_write(mark, append=True).close()
            _remove_partial_files(self.table)
            current_rows = []
            for row in rows:
                if row.fate in UNSETTLED:
                    current_rows.append(self._with_fate(row))
                else:
                    current_rows.append(row)
            present_files = {row.file for row in rows}
            gone_rows = [
                row.changed(fate="gone")
                for row in self.read_table()
                if row.file not in present_files
            ]
            lines = [_table_cells(row) for row in [*current_rows, *gone_rows]]
            table = pd.DataFrame(lines, columns=list(Row.model_fields))
            text = table.to_csv(sep="\t", index=False, lineterminator="\n")
            write_text_atomically(self.table, text)
        self._is_table_written = True

    def _require_directory(self) -> None:
        """Raise an error if the directory of the results was renamed or removed meanwhile.

        The directory is made with the first table. After that it is not made again.

        Raises:
            ConfigError: The directory has gone.
        """
        if self._is_table_written:
            require_directory(self.out)


def _table_cells(row: Row) -> dict[str, str | int]:
    """Return the cells of one line of `inbox.tsv`, by the name of the column.

    A file name or note that begins like a formula gets a leading apostrophe, which
    `Ledger.read_table` removes.
    """
    cells: dict[str, str | int] = {}
    for column, value in row:
        cells[column] = escape_formula(value) if isinstance(value, str) else value
    return cells


def _mark_duplicates(rows: Sequence[Row]) -> list[Row]:
    """Mark files with the content of another file as duplicates.

    Of several files with the same content, one is the original: the file for which the fate was
    recorded or, if there is no fate yet, the oldest file.

    Args:
        rows: The rows with their fates, the oldest first.

    Returns:
        The rows in the same order.
    """
    original_files: dict[str, str] = {}  # by SHA-256
    for row in rows:
        # A row gets its fate from the table, by the content of its file. If the table has the fate
        # of another file with this content, the row has a note that names it. A row without a note
        # has the fate of this very file. `_PARTS` are no deliveries of their own.
        is_original = row.fate == "waiting" or row.note == ""
        if row.sha256 and is_original and row.fate not in _PARTS:
            original_files.setdefault(row.key, row.file)
    marked = []
    for row in rows:
        original = original_files.get(row.key, row.file)
        if original == row.file or row.fate in _PARTS:
            marked.append(row)
        else:
            note = DUPLICATE_NOTE.format(original)
            marked.append(row.changed(fate="duplicate", note=note))
    return marked


def _may_pass(error: OSError) -> bool:
    """Return true if the same file may be readable later without anybody's help.

    An error of the file server or the disk says nothing about the content of the file.
    """
    is_permission = error_number(error) in PERMISSION_ERRORS
    return classify(error) is ErrorKind.TRANSIENT and not is_permission


def _unreadable_note(error: OSError) -> str:
    """Return the note for a file that could not be read this time."""
    return f"cannot be read now: {describe_system_error(error)}; the next start tries again"


def _describe_error(error: Exception) -> str:
    """Return the message of an error. Errors of other libraries are named with their class."""
    if isinstance(error, errors.VirnucError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _remove_partial_files(path: Path) -> None:
    """Remove the temporary files that killed processes left beside a file.

    The caller holds the lease that protects the file, so no other process is writing it.
    """
    for partial in path.parent.glob(f".{path.name}.*.part"):
        partial.unlink(missing_ok=True)
