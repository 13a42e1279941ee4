"""Write the input reads with certain verdicts to files. The text of each record is unchanged.

`sampling` writes a random subset. Both choose reads with `choose_reads`.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.checked_files import open_checked
from virnuc_core.errors import InputError
from virnuc_core.input_names import STDIN
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch
from virnuc_core.reads.pairs import pair_batches
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import Inputs, can_be_read_twice, create_reads_file, find_inputs
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import MATE
from virnuc_core.rundir import MATE_SUFFIXES, RunDir
from virnuc_core.runfiles import FileDigest
from virnuc_core.safe_files import path_of_open_file, require_fits_memory
from virnuc_core.system_errors import read_with_retries

_FIRST_MATE: Final = 0  # indices of MATE_SUFFIXES
_SECOND_MATE: Final = 1
_ORPHAN: Final = 2
PIECE_LINES: Final = 65_536  # of a table, some 15 MB
MISSING_SCORES: Final = {"viral_score": [""]}  # the text that stands for no score
# What to do if a table is not as the run left it.
WRITE_AGAIN: Final = "repeat the command of the run, which writes the file again from its shards"


def choose_reads(total: int, wanted: int | None, seed: int) -> NDArray[np.int64]:
    """Choose reads that represent the whole input: one at random from each of equal ranges.

    A fixed step, such as every tenth read, could coincide with a pattern of the input, such as
    alternating mates or the tiles of a flow cell.

    Args:
        total: The number of reads.
        wanted: The number to choose. None, or a number above `total`, chooses all.
        seed: Equal seeds choose equal reads.

    Returns:
        The numbers of the reads, ascending: int64 [wanted].
    """
    if wanted is None or wanted >= total:
        return np.arange(total, dtype=np.int64)
    if wanted == 0:
        return np.zeros(0, np.int64)
    # The ranges between the bounds differ by one read at most. One number is drawn in each.
    bounds = np.arange(wanted + 1, dtype=np.int64) * total // wanted
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def require_rereadable(reads: Sequence[str]) -> None:
    """Refuse inputs that can be read only once: a pipe, or standard input.

    Reads are copied in a second pass over the input.

    Args:
        reads: The inputs as the user named them.

    Raises:
        InputError: Names the input.
    """
    for name in find_inputs(tuple(reads)).files:
        if not can_be_read_twice(name):
            source = "standard input" if name == STDIN else name
            raise InputError(
                f"{source} cannot be read twice",
                hint="put the reads into a file to have some of them written out",
            )


def write_reads(
    run: RunDir,
    store: OrfStore,
    staging: StageSummary,
    verdicts: Sequence[str] = ("viral",),
    digests: Mapping[str, FileDigest] | None = None,
) -> int:
    """Copy the input reads with certain verdicts to files in the run directory.

    For the verdict `viral`, FASTQ reads are written to `viral.fastq.gz` and FASTA reads to
    `viral.fasta.gz`. The file is empty if no read is viral. Of pairs, first mates are written to
    `viral_R1`, second mates to `viral_R2` in the same order, and reads without a mate to
    `viral_orphans`. The same input gives the same bytes. Such files of an earlier run are removed.

    Args:
        run: The run directory. Its `reads.tsv`, or `pairs.tsv`, has the verdicts.
        store: The staged reads.
        staging: The summary of their staging.
        verdicts: `viral`, `nonviral` for all other reads, or both.
        digests: The digests of the tables of the run, by their names, as they were written.

    Returns:
        The number of reads that were written.

    Raises:
        InputError: The input has changed since it was staged, or cannot be read twice.
    """
    require_rereadable(staging.files)
    destinations = _find_destinations(run, store, verdicts, digests or {})
    inputs = Inputs(staging.files, (), staging.pairs)
    log = ParseLog(staging.on_error, read_group=staging.read_group)
    with ExitStack() as stack:
        export = _Export(run, store, destinations, stack)
        for batch in chain(pair_batches(inputs, log), parse(inputs.singles, log)):
            export.add(batch)
        _require_staged_input(export.n_passed, store, staging, log)
        for path in run.reads_of(verdicts):
            if path.name not in export.file_names:
                path.unlink(missing_ok=True)  # written by an earlier run with other reads
    return int((destinations.kind_of_read >= 0).sum())


def _require_staged_input(
    n_reads: int, store: OrfStore, staging: StageSummary, log: ParseLog
) -> None:
    """Raise an `InputError` if the input files have changed since they were staged.

    Args:
        n_reads: The number of reads in the files now.
        store: The staged reads.
        staging: The summary of staging, with the digest of each file.
        log: The log of reading the files now, with their digests.
    """
    if n_reads != store.n_reads:
        raise InputError(
            f"{n_reads} reads are in the input, {store.n_reads} were staged",
            hint="run predict again",
        )
    for file in staging.by_file:
        staged_digest = file.content
        if staged_digest is None:  # it came through a pipe
            continue
        if log.contents[file.file] != staged_digest:
            raise InputError(
                "this file has changed since it was staged",
                file=file.file,
                hint="run predict again",
            )


@dataclass(frozen=True)
class _Destinations:
    """The kinds of files to write, and the kind for each read."""

    kinds: list[str]  # such as `viral`, or `viral_R1`
    kind_of_read: NDArray[np.int64]  # [n_reads] index in `kinds`; -1 if the read is not written


def _find_destinations(
    run: RunDir, store: OrfStore, verdicts: Sequence[str], digests: Mapping[str, FileDigest]
) -> _Destinations:
    """Find out for each read to which kind of file it is written.

    Args:
        run: The run directory with the verdicts.
        store: The staged reads.
        verdicts: `viral`, `nonviral` or both.
        digests: See `write_reads`.

    Raises:
        InputError: The table of verdicts has another number of reads than the store.
    """
    is_viral = _find_viral_reads(run, store, digests)
    if store.paired:
        mate_suffixes: Sequence[str] = MATE_SUFFIXES
        mate_of_read = _find_mates(store)
    else:
        mate_suffixes = ("",)
        mate_of_read = np.zeros(store.n_reads, np.int64)
    kinds: list[str] = []
    kind_of_read = np.full(store.n_reads, -1, np.int64)
    for verdict in verdicts:
        has_verdict = is_viral if verdict == "viral" else ~is_viral
        # The next kinds are those of this verdict, one for each suffix.
        kind_of_read[has_verdict] = len(kinds) + mate_of_read[has_verdict]
        kinds += [f"{verdict}{suffix}" for suffix in mate_suffixes]
    return _Destinations(kinds, kind_of_read)


def _find_viral_reads(
    run: RunDir, store: OrfStore, digests: Mapping[str, FileDigest]
) -> NDArray[np.bool_]:
    """Return which reads have the verdict viral: bool [n_reads].

    Mates have the same verdict, which is in `pairs.tsv`. For single reads it is in `reads.tsv`.

    Args:
        run: The run directory.
        store: The staged reads.
        digests: The digests of the two tables, by their names, as they were written.

    Raises:
        InputError: The table has another number of reads than the store.
    """
    path = run.pairs_table if store.paired else run.reads_table
    follows_mate = find_second_mates(store)
    # In `pairs.tsv` both mates are on one line: a read that follows its mate begins no new line.
    line_of_read = np.cumsum(~follows_mate) - 1
    n_lines = int(np.count_nonzero(~follows_mate))
    table = read_table(path, {"fate": "str"}, recorded=digests.get(path.name))
    fates = table["fate"].to_numpy()
    if len(fates) != n_lines:
        raise InputError(f"{len(fates)} lines for {n_lines} reads", file=path)
    is_viral_line: NDArray[np.bool_] = fates == "viral"
    is_viral: NDArray[np.bool_] = is_viral_line[line_of_read]
    return is_viral


def _find_mates(store: OrfStore) -> NDArray[np.int64]:
    """Return for each read if it is a first mate (0), a second mate (1) or an orphan (2).

    Returns:
        int64 [n_reads] of indices of `MATE_SUFFIXES`.
    """
    is_second = find_second_mates(store)
    is_first = np.append(is_second[1:], False)  # the next read is the mate
    return np.where(is_second, _SECOND_MATE, np.where(is_first, _FIRST_MATE, _ORPHAN))


def find_second_mates(store: OrfStore) -> NDArray[np.bool_]:
    """Return which reads directly follow their mates: bool [n_reads]."""
    follows_mate: NDArray[np.bool_] = (np.asarray(store.read_flags) & MATE) > 0
    return follows_mate


class _Export:
    """Writes reads to the files for their verdicts, and checks that they are the staged reads.

    Attributes:
        n_passed: The number of reads that were added so far, written or not.
    """

    def __init__(
        self, run: RunDir, store: OrfStore, destinations: _Destinations, stack: ExitStack
    ) -> None:
        """Begin with the first read of the input.

        Args:
            run: The run directory, in which the files are created.
            store: The staged reads.
            destinations: The kind of file for each read.
            stack: Closes the files at its end. Only then they appear under their names.
        """
        self._run = run
        self._store = store
        self._kinds = destinations.kinds
        self._kind_of_read = destinations.kind_of_read
        self._stack = stack  # closes the files
        self._files: dict[str, BinaryIO] = {}  # by name
        # The first parts of a long read were written, and more parts of it will follow.
        self._is_within_written_read = False
        self.n_passed = 0

    @property
    def file_names(self) -> set[str]:
        """Return the names of the files that were written."""
        return set(self._files)

    def add(self, batch: ReadBatch) -> None:
        """Write those of the next input reads that have a wanted verdict.

        Args:
            batch: The next reads, or a part of a long read.

        Raises:
            InputError: They are not the reads that were staged.
        """
        part = batch.part
        first = self.n_passed
        end = first + len(batch)
        is_complete = part is None or part.is_last
        if part is not None and part.is_dropped and not self._is_within_written_read:
            # A broken long read, which was not staged either. (If parts of it were written, the
            # input has changed, and the check below refuses it.)
            return
        was_staged = self._was_staged(batch, first, end)
        if is_complete and not was_staged:
            raise InputError(
                f"reads {first + 1} to {end} are not the reads that were staged",
                hint="run predict again",
            )
        files = self._open_files(batch.format)
        # A part of a long read that is not the staged one is not written. If the read turns out to
        # be broken, it was not staged; otherwise its last part raises the error above.
        if was_staged:
            kinds = self._kind_of_read[first:end]
            for index in np.flatnonzero(kinds >= 0).tolist():
                files[kinds[index]].write(batch.records[index])
        self._is_within_written_read = (
            was_staged and not is_complete and bool(self._kind_of_read[first] >= 0)
        )
        if is_complete:
            self.n_passed = end

    def _was_staged(self, batch: ReadBatch, first: int, end: int) -> bool:
        """Return True if the staged reads `first` to `end` (exclusive) have the ids of a batch."""
        if end > self._store.n_reads:
            return False
        ids = [batch.id(index) for index in range(len(batch))]
        return self._store.original_ids(first, end) == ids

    def _open_files(self, format_: Format) -> list[BinaryIO]:
        """Return the open file of each kind, in the order of `_kinds`, for reads of a format.

        Files that are not open yet are created. They appear when the export is complete.
        """
        files: list[BinaryIO] = []
        for kind in self._kinds:
            name = f"{kind}.{format_}.gz"
            if name not in self._files:
                file = self._stack.enter_context(create_reads_file(self._run.root / name))
                self._files[name] = file
            files.append(self._files[name])
        return files


def read_columns(
    path: Path, columns: Mapping[str, str], *, recorded: FileDigest | None, **options: Any
) -> Any:
    """Read columns of a TAB-separated table without changing any text.

    Args:
        path: The table.
        columns: The types of the columns, by name.
        recorded: The digest that was recorded for the table, such as `listed_digest` returns it.
            None: none was recorded, and nothing is compared.
        options: Further arguments of `pandas.read_csv`.

    Returns:
        What `pandas.read_csv` returns for them.

    Raises:
        DamagedFileError: The table is not as the run left it.
        UnsafeFileError: It is no regular file, or is too large for this machine's memory.
        UnreadableError: The system cannot read it.
        FileNotFoundError: There is no such file.
        ValueError: It is not a table with these columns.
    """
    open_table = partial(open_checked, path, recorded, remedy=WRITE_AGAIN)
    with read_with_retries(path, open_table) as file:
        if "chunksize" not in options:
            require_fits_memory(path, file)
        return pd.read_csv(
            path_of_open_file(file),
            sep="\t",
            usecols=list(columns),
            dtype=dict(columns),
            quoting=csv.QUOTE_NONE,
            keep_default_na=False,  # a read may have the id NA, which is not a missing value here
            encoding_errors="surrogateescape",  # keeps bytes that are not UTF-8
            **options,
        )


def read_table(
    path: Path, columns: Mapping[str, str], *, recorded: FileDigest | None
) -> pd.DataFrame:
    """Read columns of `reads.tsv` or `pairs.tsv`; an empty viral score becomes NaN.

    Args:
        path: The table.
        columns: The types of the columns, by name.
        recorded: The digest that was recorded for the table; see `read_columns`.

    Returns:
        The columns, with one row for each line of the table.

    Raises:
        InputError: A column is missing, a value has another type, or the table is not as the run
            left it.
        UnsafeFileError: See `read_columns`.
        UnreadableError: See `read_columns`.
    """
    with _refuse_other_tables(path):
        table: pd.DataFrame = read_columns(
            path, columns, recorded=recorded, na_values=MISSING_SCORES
        )
    return table


def iterate_table(
    path: Path, columns: Mapping[str, str], *, recorded: FileDigest | None
) -> Iterator[pd.DataFrame]:
    """Yield columns of `reads.tsv`, `pairs.tsv` or `failed.tsv` in pieces of `PIECE_LINES` lines.

    Args:
        path: The table.
        columns: The types of the columns, by name.
        recorded: The digest that was recorded for the table; see `read_columns`.

    Raises:
        InputError: See `read_table`.
        UnsafeFileError: See `read_columns`.
        UnreadableError: See `read_columns`.
    """
    with _refuse_other_tables(path):
        table = read_columns(
            path, columns, recorded=recorded, na_values=MISSING_SCORES, chunksize=PIECE_LINES
        )
        with table as pieces:
            yield from pieces


@contextmanager
def _refuse_other_tables(path: Path) -> Iterator[None]:
    """Raise an `InputError` if what is done in the context shows that a file is no such table."""
    try:
        yield
    except ValueError as error:  # the class of pandas' own errors
        problem = str(error).splitlines()[0]
        raise InputError(
            f"not a table of reads ({problem})", file=path, hint="run predict again"
        ) from error
