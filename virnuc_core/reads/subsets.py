"""Write out some of the reads as they stand in the input: a sample, or those of a verdict.

A sample has the same distribution of lengths as the whole. The reads are read twice for it: once
for their lengths, once to draw. One read is drawn from each of as many equal stretches of the reads
in order of length. About 20 bytes a read are held in memory, however long the reads are.
"""

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch
from virnuc_core.reads.pairs import pair_batches
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import (
    STDIN,
    Inputs,
    can_be_read_twice,
    create_reads_file,
    find_inputs,
)
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import MATE
from virnuc_core.rundir import MATE_SUFFIXES, RunDir, require_absent

_MAX_BINS: Final = 50  # of a histogram
_FORMAT_BY_ENDING: Final[dict[str, Format]] = {
    "fq": "fastq",
    "fastq": "fastq",
    "fa": "fasta",
    "fna": "fasta",
    "fasta": "fasta",
}
_FIRST_MATE: Final = 0  # places in MATE_SUFFIXES
_SECOND_MATE: Final = 1
_ORPHAN: Final = 2


class SampleSummary(NamedTuple):
    """The size of a sample, and how well its lengths represent the whole."""

    reads_before: int
    reads_after: int
    # a row for each bin: `shortest` and `longest` length, reads `before` and `after`
    bins: pd.DataFrame
    # largest difference of the two cumulative length distributions (Kolmogorov–Smirnov), 0 to 1
    distance: float

    def lines(self) -> list[str]:
        """Format both histograms and their distance for people."""
        lines = [f"{'length':>15} {'before':>12} {'share':>8} {'after':>12} {'share':>8}"]
        for shortest, longest, n_before, n_after in self.bins.to_numpy().tolist():
            span = str(shortest) if shortest == longest else f"{shortest}-{longest}"
            share_before = n_before / max(self.reads_before, 1)
            share_after = n_after / max(self.reads_after, 1)
            lines.append(
                f"{span:>15} {n_before:>12,} {share_before:>8.2%} "
                f"{n_after:>12,} {share_after:>8.2%}"
            )
        lines.append(
            f"{self.reads_after:,} of {self.reads_before:,} reads; "
            f"distance of lengths {self.distance:.4f}"
        )
        return lines


def sample(source: str, n: int, out: Path, seed: int = 0, *, force: bool = False) -> SampleSummary:
    """Draw reads with the distribution of lengths of all reads.

    The reads are written as they stand in the input, in their order.

    Args:
        source: A file or folder.
        n: The number of reads to draw. If there are fewer, all are taken.
        out: The file for the sample. It is gzipped if its name ends in `.gz`.
        seed: Equal seeds draw equal reads.
        force: Replace `out` if it exists.

    Raises:
        InputError: The reads cannot be used or cannot be read twice, or FASTA is mixed with FASTQ.
        ConfigError: `n` is below 1, `out` exists, or its name belies the format.
    """
    if n < 1:
        raise ConfigError(f"{n} reads were asked for; ask for 1 or more")
    require_rereadable((source,))
    files = find_inputs((source,)).files
    if any(out.resolve() == Path(name).resolve() for name in files):
        raise ConfigError(f"{out}: is what is drawn from; choose another name")
    require_absent(out, force=force)
    lengths = _read_lengths(files, out)
    reads_by_length = np.argsort(lengths, kind="stable")
    drawn_reads = reads_by_length[choose_reads(len(lengths), n, seed)]
    is_drawn = np.zeros(len(lengths), bool)
    is_drawn[drawn_reads] = True
    _copy_reads(files, is_drawn, out)
    return _summarize_sample(lengths, lengths[drawn_reads])


def _copy_reads(files: tuple[str, ...], is_drawn: NDArray[np.bool_], out: Path) -> None:
    """Write the drawn reads of some files.

    Args:
        files: The files.
        is_drawn: Which reads are drawn: bool [reads].
        out: The file to write.
    """
    n_passed = 0
    with create_reads_file(out) as file:
        for batch in parse(files, ParseLog()):
            is_drawn_in_batch = is_drawn[n_passed : n_passed + len(batch)]
            for index in np.flatnonzero(is_drawn_in_batch).tolist():
                file.write(batch.records[index])
            if batch.part is None or batch.part.is_last:
                n_passed += len(batch)


def _summarize_sample(
    lengths: NDArray[np.uint32], drawn_lengths: NDArray[np.uint32]
) -> SampleSummary:
    """Compare the lengths of all reads with those of a sample."""
    distinct_lengths, n_before = np.unique(lengths, return_counts=True)
    n_after = np.bincount(
        np.searchsorted(distinct_lengths, drawn_lengths), minlength=len(distinct_lengths)
    )
    cumulative_before = n_before.cumsum() / max(1, len(lengths))
    cumulative_after = n_after.cumsum() / max(1, len(drawn_lengths))
    distance = np.abs(cumulative_before - cumulative_after).max(initial=0.0)

    n_shorter = n_before.cumsum() - n_before
    bin_of_length = n_shorter * _MAX_BINS // max(1, len(lengths))  # bins of about equal size
    bin_starts = np.flatnonzero(np.diff(bin_of_length, prepend=-1))
    bins = pd.DataFrame(
        {
            "shortest": distinct_lengths[bin_starts],
            "longest": np.maximum.reduceat(distinct_lengths, bin_starts),
            "before": np.add.reduceat(n_before, bin_starts),
            "after": np.add.reduceat(n_after, bin_starts),
        }
    )
    return SampleSummary(len(lengths), len(drawn_lengths), bins, float(distance))


def choose_reads(total: int, wanted: int | None, seed: int) -> NDArray[np.int64]:
    """Choose reads that represent all: one at random from each of as many equal stretches.

    A fixed step would follow any pattern of the input, such as mates in turn or tiles of a flow
    cell.

    Args:
        total: The number of reads.
        wanted: The number to choose. None, or a number above `total`, chooses all.
        seed: Equal seeds choose equal reads.

    Returns:
        The numbers of the reads, ascending: int64 [wanted].
    """
    if wanted is None or wanted >= total:
        return np.arange(total, dtype=np.int64)
    bounds = np.arange(wanted + 1, dtype=np.int64) * total // wanted
    return np.random.default_rng(seed).integers(bounds[:-1], bounds[1:])


def _read_lengths(files: tuple[str, ...], out: Path) -> NDArray[np.uint32]:
    """Read the number of bases of each read: uint32 [reads].

    Raises:
        InputError: FASTA is mixed with FASTQ, and as of `parse`.
        ConfigError: The name of `out` belies the format.
    """
    lengths = [np.zeros(0, np.uint32)]
    format_: Format | None = None
    for batch in parse(files, ParseLog()):
        if format_ not in (None, batch.format):
            raise InputError(
                "FASTA and FASTQ are mixed",
                file=files[batch.file_index],
                hint="sample them one by one",
            )
        format_ = batch.format
        if batch.part is None:
            lengths.append(batch.bases.lengths.astype(np.uint32))
        elif batch.part.is_last:
            n_bases = batch.part.n_bases_before + len(batch.bases.data)
            lengths.append(np.array([n_bases], np.uint32))
    ending = out.name.removesuffix(".gz").rpartition(".")[2].lower()
    claimed_format = _FORMAT_BY_ENDING.get(ending)
    if format_ is not None and claimed_format not in (None, format_):
        raise ConfigError(
            f"{out}: the reads are {format_.upper()}; name the file .{format_} or .{format_}.gz"
        )
    return np.concatenate(lengths)


def require_rereadable(reads: Sequence[str]) -> None:
    """Raise an `InputError` if an input cannot be read twice, so that no reads can be picked."""
    for name in find_inputs(tuple(reads)).files:
        if not can_be_read_twice(name):
            source = "standard input" if name == STDIN else name
            raise InputError(
                f"{source} cannot be read twice",
                hint="put the reads into a file to have some of them written out",
            )


def write_reads(
    run: RunDir, store: OrfStore, staging: StageSummary, verdicts: Sequence[str] = ("viral",)
) -> int:
    """Write the reads of some verdicts to files of their own, as they stand in the input.

    FASTQ reads go to `viral.fastq.gz`, FASTA reads to `viral.fasta.gz`; the file is empty if no
    read is viral. Mates go to `viral_R1` and `viral_R2`, in step, and reads without a mate to
    `viral_orphans`. The same input gives the same bytes.

    Args:
        run: The run directory. Its `reads.tsv`, or `pairs.tsv`, tells the verdicts.
        store: The staged reads.
        staging: The summary of their staging.
        verdicts: `viral`, `nonviral` for all other reads, or both.

    Returns:
        The number of reads that were written.

    Raises:
        InputError: The input is not what was staged, or cannot be read twice.
    """
    require_rereadable(staging.files)
    destinations = _find_destinations(run, store, verdicts)
    inputs = Inputs(staging.files, (), staging.pairs)
    log = ParseLog(staging.on_error, read_group=staging.read_group)
    with ExitStack() as stack:
        export = _Export(run, store, destinations, stack)
        for batch in chain(pair_batches(inputs, log), parse(inputs.singles, log)):
            export.add(batch)
        _require_staged_input(export.n_passed, store, staging, log)
        for path in run.reads_of(verdicts):
            if path.name not in export.file_names:
                path.unlink(missing_ok=True)  # of an earlier run with other reads
    return int((destinations.kind_of_read >= 0).sum())


def _require_staged_input(
    n_reads: int, store: OrfStore, staging: StageSummary, log: ParseLog
) -> None:
    """Raise an `InputError` if the files that were read are not what was staged."""
    if n_reads != store.n_reads:
        raise InputError(
            f"{n_reads} reads are in the input, {store.n_reads} were staged",
            hint="run predict again",
        )
    for file in staging.by_file:
        if file.content not in (None, log.contents[file.file]):
            raise InputError("no longer what was staged", file=file.file, hint="run predict again")


@dataclass(frozen=True)
class _Destinations:
    """The kinds of files to write, and the kind for each read."""

    kinds: list[str]  # such as `viral`, or `viral_R1`
    kind_of_read: NDArray[np.int64]  # [n_reads] place in `kinds`, -1 for none


def _find_destinations(run: RunDir, store: OrfStore, verdicts: Sequence[str]) -> _Destinations:
    """Find out to which kind of file each read goes.

    Raises:
        InputError: The table of verdicts does not fit the store.
    """
    is_viral = _find_viral_reads(run, store)
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
        kind_of_read[has_verdict] = len(kinds) + mate_of_read[has_verdict]
        kinds += [f"{verdict}{suffix}" for suffix in mate_suffixes]
    return _Destinations(kinds, kind_of_read)


def _find_viral_reads(run: RunDir, store: OrfStore) -> NDArray[np.bool_]:
    """Find the reads with the verdict viral: bool [n_reads]. Mates share a verdict.

    Raises:
        InputError: The table does not fit the store.
    """
    path = run.pairs_table if store.paired else run.reads_table
    follows_mate = _follows_mate(store)
    line_of_read = np.cumsum(~follows_mate) - 1  # in `pairs.tsv` mates share a line
    n_lines = int(np.count_nonzero(~follows_mate))
    fates = read_table(path, {"fate": "str"})["fate"].to_numpy()
    if len(fates) != n_lines:
        raise InputError(f"{len(fates)} lines for {n_lines} reads", file=path)
    is_viral_line: NDArray[np.bool_] = fates == "viral"
    is_viral: NDArray[np.bool_] = is_viral_line[line_of_read]
    return is_viral


def _find_mates(store: OrfStore) -> NDArray[np.int64]:
    """Find which mate each read is: int64 [n_reads] of places in `MATE_SUFFIXES`."""
    is_second = _follows_mate(store)
    is_first = np.append(is_second[1:], False)
    return np.where(is_second, _SECOND_MATE, np.where(is_first, _FIRST_MATE, _ORPHAN))


def _follows_mate(store: OrfStore) -> NDArray[np.bool_]:
    """Find the reads whose mate is the previous read: bool [n_reads]."""
    follows_mate: NDArray[np.bool_] = (np.asarray(store.read_flags) & MATE) > 0
    return follows_mate


class _Export:
    """Writes reads to the files of their kinds, and checks that they are those of the store."""

    def __init__(
        self, run: RunDir, store: OrfStore, destinations: _Destinations, stack: ExitStack
    ) -> None:
        self._run = run
        self._store = store
        self._kinds = destinations.kinds
        self._kind_of_read = destinations.kind_of_read
        self._stack = stack  # closes the files
        self._files: dict[str, BinaryIO] = {}  # by name
        self._is_within_written_read = False  # more parts of a read that was begun are to come
        self.n_passed = 0  # reads so far

    @property
    def file_names(self) -> set[str]:
        """Return the names of the files that were written."""
        return set(self._files)

    def add(self, batch: ReadBatch) -> None:
        """Write the next reads of the input.

        Raises:
            InputError: They are not those that were staged.
        """
        part = batch.part
        first = self.n_passed
        end = first + len(batch)
        is_complete = part is None or part.is_last
        if part is not None and part.is_dropped and not self._is_within_written_read:
            return  # nor was it staged
        was_staged = self._was_staged(batch, first, end)
        if is_complete and not was_staged:
            raise InputError(
                f"reads {first + 1} to {end} are not those that were staged",
                hint="run predict again",
            )
        files = self._open_files(batch.format)
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
        """Return True if reads `first` to `end` of the store have the ids of a batch."""
        if end > self._store.n_reads:
            return False
        ids = [batch.id(index) for index in range(len(batch))]
        return self._store.original_ids(first, end) == ids

    def _open_files(self, format_: Format) -> list[BinaryIO]:
        """Return the files of each kind for a format; they are created when they are needed."""
        files: list[BinaryIO] = []
        for kind in self._kinds:
            name = f"{kind}.{format_}.gz"
            if name not in self._files:
                file = self._stack.enter_context(create_reads_file(self._run.root / name))
                self._files[name] = file
            files.append(self._files[name])
        return files


def read_columns(path: Path, columns: Mapping[str, str], **options: Any) -> Any:
    """Read columns of a TAB-separated table, with text as it stands.

    Args:
        path: The table.
        columns: The types of the columns, by name.
        options: Further arguments of `pandas.read_csv`.

    Returns:
        What `pandas.read_csv` returns for them.
    """
    return pd.read_csv(
        path,
        sep="\t",
        usecols=list(columns),
        dtype=dict(columns),
        quoting=csv.QUOTE_NONE,
        keep_default_na=False,  # a read may be called NA
        encoding_errors="surrogateescape",
        **options,
    )


def read_table(path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """Read columns of `reads.tsv` or `pairs.tsv`.

    Args:
        path: The table.
        columns: The types of the columns, by name.

    Raises:
        InputError: This is not such a table.
    """
    try:
        table: pd.DataFrame = read_columns(path, columns, na_values={"viral_score": [""]})
    except ValueError as error:  # the class of pandas' own errors
        problem = str(error).splitlines()[0]
        raise InputError(
            f"not a table of reads ({problem})", file=path, hint="run predict again"
        ) from error
    return table
