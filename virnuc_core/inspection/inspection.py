"""Inspect files of reads as a run would read them, without a model.

Files, pairs and samples are found by the functions that a prediction uses, and reads are cut and
translated by those of staging. Of large files only the first reads are read, unless all are asked
for. Numbers are then estimates.
"""

import logging
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, Self

import numpy as np
from pydantic import Field

from virnuc_core.allowed_paths import require_allowed
from virnuc_core.config import INPUT_FIELDS, SamplesSpec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.inspection.records import (
    InspectedFile,
    InspectedGroup,
    InspectedSample,
    Inspection,
    Role,
)
from virnuc_core.inspection.sums import Sums
from virnuc_core.reads.fast_parser import ParseLog, ReadBatch
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.pairs import pair_batches
from virnuc_core.reads.parse import BLOCK_BYTES, map_batches, parse
from virnuc_core.reads.read_counts import (
    BatchCounts,
    LongReads,
    PartCounts,
    ReadTotals,
    Repeats,
    count_batch,
)
from virnuc_core.reads.samples import reads_by_sample, samples_by_file_name
from virnuc_core.reads.sources import Inputs, can_be_read_twice, sample_name
from virnuc_core.reads.stage import require_good_records, require_reads
from virnuc_core.reads.workers import Workers

MODEL_LENGTHS: Final = (300, 500)  # of VirNucPro's two classifiers, ascending
# What is read of all files together unless the user says how much: reads, and bases of long reads.
DEFAULT_READS: Final = 500_000
DEFAULT_BASES: Final = 100_000_000
MIN_READS: Final = 1_000  # of each file
MIN_BASES: Final = 1_000_000
READS_LOG: Final = "virnuc_core.reads"  # the log of the modules that find files and pairs


class InspectSpec(SamplesSpec):
    """Which reads are inspected, and how many of them are read."""

    sample: int | None = Field(
        None,
        ge=1,
        description="reads of each file that are read, from its beginning; default: "
        f"{DEFAULT_READS:,} of all files together",
    )
    all_reads: bool = Field(False, description="read all reads of all files: exact numbers")


def inspect_reads(spec: InspectSpec) -> Inspection:
    """Find out what a run would see in some files: reads, pairs, samples, and the costs.

    Nothing is written but scratch files, and no model is needed. The problems of files and of
    samples are part of the result; the other files are inspected all the same.

    Args:
        spec: The inputs as for a prediction, and how many reads are read.

    Returns:
        The files, pairs and samples, what the reads are like, and what a run would cost.

    Raises:
        InputError: The inputs of a single run, or a sample sheet, cannot be found.
        ConfigError: Settings contradict each other, or samples cannot be told apart.
    """
    if spec.all_reads and spec.sample is not None:
        raise ConfigError("sample: --all reads every read; give one of the two")
    with _collected_notes() as notes:
        specs = _specs_by_sample(spec)
        inputs_by_sample, problems = _find_all_reads(specs, has_samples=spec.has_samples)
    n_files = sum(len(inputs.files) for inputs in inputs_by_sample.values())
    samples: list[InspectedSample] = []
    total = Sums()
    with (
        tempfile.TemporaryDirectory(prefix="virnuc-inspect-") as folder,
        Workers(spec.workers) as workers,
    ):
        reader = _Reader(_Limits.of(spec, n_files), Path(folder), workers)
        for name, inputs in inputs_by_sample.items():
            samples.append(_inspect_sample(name, specs[name], inputs, reader, total))
    samples += [InspectedSample(sample=name, problem=text) for name, text in problems.items()]
    samples_by_name: dict[str, tuple[str, ...]] = {}
    if not spec.has_samples and n_files > 1:
        samples_by_name = _name_samples(spec, notes)
    return Inspection(
        samples=tuple(samples),
        samples_by_name=samples_by_name,
        notes=tuple(dict.fromkeys(notes)),
        statistics=total.statistics(),
        duplicate_share=total.duplicate_share(),
        costs=total.costs(),
    )


# --- Files, pairs and samples ---------------------------------------------------------------------


@contextmanager
def _collected_notes() -> Iterator[list[str]]:
    """Collect the warnings of the functions that find pairs and samples.

    Yields:
        The warnings. They are not written to the log any more.
    """
    notes: list[str] = []

    class Collector(logging.Handler):
        """Appends each warning to the list."""

        def emit(self, record: logging.LogRecord) -> None:
            """Append the message of a warning."""
            notes.append(record.getMessage())

    logger = logging.getLogger(READS_LOG)
    propagates = logger.propagate
    collector = Collector(logging.WARNING)
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates


def _specs_by_sample(spec: InspectSpec) -> dict[str, InspectSpec]:
    """Return the inputs of each sample's own run, by the name of the sample.

    Raises:
        InputError: The sample sheet cannot be used, or a file is on another machine.
        ConfigError: The samples cannot be told apart.
    """
    specs = {sample_name(spec.all_inputs): spec}
    if spec.has_samples:
        specs = {}
        for name, reads in reads_by_sample(spec).items():
            fields = reads.model_dump(include={*INPUT_FIELDS, "read_group"})
            specs[name] = spec.model_copy(update=fields)
    for sample_spec in specs.values():
        for file in sample_spec.all_inputs:
            if is_remote(file):
                raise InputError(
                    f"{file}: only files on this machine are inspected",
                    hint="fetch it first, and name the file",
                )
            if file != STDIN:
                require_allowed(Path(file), "reads")  # a sheet may name any file
    return specs


def _find_all_reads(
    specs: dict[str, InspectSpec], *, has_samples: bool
) -> tuple[dict[str, Inputs], dict[str, str]]:
    """Find the files and pairs of each sample.

    Args:
        specs: The inputs of each sample.
        has_samples: The user asked for several samples. If not, an error is raised, because there
            is no other sample to go on with.

    Returns:
        The files by sample; and the problem of each sample whose files cannot be found.

    Raises:
        InputError: The files of the only sample cannot be found.
    """
    inputs_by_sample: dict[str, Inputs] = {}
    problems: dict[str, str] = {}
    for name, spec in specs.items():
        try:
            inputs_by_sample[name] = find_reads(spec)
        except InputError as error:
            if not has_samples:
                raise
            problems[name] = f"sample {name}: {error}"
    return inputs_by_sample, problems


def _name_samples(spec: InspectSpec, notes: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each sample that `--sample-from name` would form.

    Args:
        spec: The inputs.
        notes: Is extended if the files cannot be divided.
    """
    with _collected_notes():  # they are about pairs, and were noted before
        try:
            reads = samples_by_file_name(spec)
        except ConfigError as error:
            notes.append(f"--sample-from name cannot be used here: {error}")
            return {}
    return {name: sample.all_inputs for name, sample in reads.items()}


# --- Reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limits:
    """How much is read of each file. Without a limit the number is infinite."""

    n_reads: float
    n_bases: float

    @property
    def reads_all(self) -> bool:
        """Tell whether all reads of all files are read."""
        return self.n_reads == inf

    @classmethod
    def of(cls, spec: InspectSpec, n_files: int) -> Self:
        """Return the limits that the user asked for, or the usual ones.

        Args:
            spec: The settings.
            n_files: The number of all files.
        """
        if spec.all_reads:
            return cls(inf, inf)
        if spec.sample is not None:
            return cls(spec.sample, inf)
        n_reads = max(MIN_READS, DEFAULT_READS // max(1, n_files))
        n_bases = max(MIN_BASES, DEFAULT_BASES // max(1, n_files))
        return cls(n_reads, n_bases)

    def for_files(self, n_files: int) -> "_Limits":
        """Return the limits for files that are read together."""
        return _Limits(n_files * self.n_reads, n_files * self.n_bases)


class _Head:
    """The first batches of some reads, up to a limit.

    Attributes:
        is_cut: There are more reads than were taken.
    """

    def __init__(self, batches: Iterator[ReadBatch], limits: _Limits) -> None:
        """Prepare to take batches; none is taken yet."""
        self.is_cut = False
        self._batches = batches
        self._limits = limits

    def __iter__(self) -> Iterator[ReadBatch]:
        """Yield batches until the limit is reached. The last one is cut to its first reads.

        A long read, which comes in parts, is yielded to its end.
        """
        n_reads = 0
        n_bases = 0
        for batch in self._batches:
            is_within_read = batch.part is not None and not batch.part.is_first
            is_full = n_reads >= self._limits.n_reads or n_bases >= self._limits.n_bases
            if is_full and not is_within_read:
                self.is_cut = True
                return
            head = batch
            if batch.part is None:
                head = self._cut(batch, n_reads, n_bases)
            yield head
            n_bases += len(head.bases.data)
            if batch.part is None or batch.part.is_last:
                n_reads += len(head)
            if len(head) < len(batch):
                self.is_cut = True
                return

    def _cut(self, batch: ReadBatch, n_reads: int, n_bases: int) -> ReadBatch:
        """Return the reads of a batch that are within the limits, at least one.

        Args:
            batch: The batch.
            n_reads: Reads that were taken before.
            n_bases: Bases that were taken before.
        """
        reads_left = self._limits.n_reads - n_reads
        bases_left = self._limits.n_bases - n_bases
        # Reads are taken until their bases reach the limit.
        n_within_bases = int(np.searchsorted(batch.bases.offsets[1:], bases_left)) + 1
        return batch.head(int(min(len(batch), reads_left, n_within_bases)))


class _Reader:
    """Reads files and counts what is in them."""

    def __init__(self, limits: _Limits, folder: Path, workers: Workers) -> None:
        """Prepare to read.

        Args:
            limits: How much is read of each file.
            folder: The folder for scratch files.
            workers: The processes that parse and translate.
        """
        self._limits = limits
        self._folder = folder
        self._workers = workers

    def read(
        self, group: tuple[str, ...], *, is_paired: bool, log: ParseLog
    ) -> Generator[BatchCounts, None, bool]:
        """Read the files of a group, and yield the counts of each batch of reads.

        Args:
            group: A file, or two files of mates.
            is_paired: The files hold mates.
            log: Is updated with the counts and errors of reading.

        Returns:
            Whether all reads were read.

        Raises:
            InputError: A file cannot be read, or is damaged.
        """
        work = partial(count_batch, model_lengths=MODEL_LENGTHS, folder=self._folder)
        long_reads = LongReads(MODEL_LENGTHS, self._folder, self._workers)
        head: _Head | None = None
        if is_paired:
            inputs = Inputs(group, (), ((group[0], group[-1]),))
            batches = pair_batches(inputs, log, with_records=False)
        else:
            batches = parse(group, log, block_bytes=BLOCK_BYTES)
        if self._limits.reads_all and not is_paired:
            results = map_batches(self._workers, work, group, log, block_bytes=BLOCK_BYTES)
        else:
            head = _Head(batches, self._limits.for_files(len(group)))
            results = self._workers.map(work, head, count_bytes=_count_bytes)
        for counts in results:
            if isinstance(counts, PartCounts):
                yield from long_reads.add(counts)
            else:
                yield counts
        return head is None or not head.is_cut


def _count_bytes(batch: ReadBatch) -> int:
    """Return the size of a batch for the workers."""
    return len(batch.bases.data)


def _inspect_sample(
    name: str, spec: InspectSpec, inputs: Inputs, reader: _Reader, total: Sums
) -> InspectedSample:
    """Read the files of a sample and return what they hold.

    Args:
        name: The name of the sample.
        spec: Its inputs.
        inputs: Its files and pairs.
        reader: Reads the files.
        total: Is extended by the sums of this sample.
    """
    log = ParseLog(spec.on_error, read_group=spec.read_group)
    sums = Sums()
    repeats = Repeats()
    files: list[InspectedFile] = []
    groups: list[InspectedGroup] = []
    pair_of_first = {pair[0]: pair for pair in inputs.pairs}
    for names in inputs.groups:
        pair = pair_of_first.get(names[0])
        reading = _read_group(names, reader, log, repeats, is_paired=pair is not None)
        found = [_describe_file(file, pair, log, reading) for file in names]
        n_reads: int | None = reading.totals.n_reads
        if not reading.is_complete and reading.error is None:
            n_reads = _sum_known([file.reads for file in found])
        group_sums = Sums.of_group(reading.totals, n_reads, is_complete=reading.is_complete)
        sums.add(group_sums)
        files += found
        groups.append(InspectedGroup(files=names, statistics=group_sums.statistics()))
    sums.use_repeats(repeats)
    total.add(sums)
    problem = ""
    if not any(file.problem for file in files):
        problem = _find_problem(spec, inputs, log)
    return InspectedSample(
        sample=name,
        read_group=spec.read_group,
        files=tuple(files),
        pairs=inputs.pairs,
        groups=tuple(groups),
        ignored=inputs.ignored_reasons,
        problem=problem,
    )


@dataclass(frozen=True)
class _Reading:
    """What was read of a file, or of two files of mates.

    Attributes:
        totals: What was counted.
        is_complete: All reads were read.
        error: Why the files cannot be used; None if they can.
    """

    totals: ReadTotals
    is_complete: bool
    error: InputError | None = None


def _read_group(
    names: tuple[str, ...], reader: _Reader, log: ParseLog, repeats: Repeats, *, is_paired: bool
) -> _Reading:
    """Read a file, or two files of mates, up to the limit, the end, or the first damage.

    Args:
        names: The files.
        reader: Reads the files.
        log: Is updated with the counts and errors of reading.
        repeats: Is extended by the reads and rows.
        is_paired: The files hold mates.

    Raises:
        UnreadableError: The system cannot read a file.
    """
    totals = ReadTotals()
    batches = reader.read(names, is_paired=is_paired, log=log)
    try:
        while True:
            counts = next(batches)
            totals.add(counts)
            repeats.add(counts)
    except StopIteration as end:
        is_complete: bool = end.value
        return _Reading(totals, is_complete)
    except InputError as error:
        return _Reading(totals, is_complete=False, error=error)


def _describe_file(
    file: str, pair: tuple[str, str] | None, log: ParseLog, reading: _Reading
) -> InspectedFile:
    """Return what was found in a file.

    Args:
        file: The file.
        pair: The files of first and second mates, of which it is one; None for single reads.
        log: The counts of reading.
        reading: What was read of the file and its mates.
    """
    size = Path(file).stat().st_size if can_be_read_twice(file) else None
    n_reads: int | None = log.reads_by_file[file]
    if not reading.is_complete and reading.error is None:
        n_reads = _estimate_reads(log.reads_by_file[file], log.bytes_used[file], size)
    role: Role = "single reads"
    mates = ""
    if pair is not None and pair[0] == pair[1]:
        role = "both mates"
    elif pair is not None:
        role = "first mates" if file == pair[0] else "second mates"
        mates = pair[1] if file == pair[0] else pair[0]
    problem = ""
    # The error of a pair is about one of its two files.
    if reading.error is not None and str(reading.error.file or file) == file:
        problem = str(reading.error)
    return InspectedFile(
        file=file,
        role=role,
        mates=mates,
        size=size,
        reads=n_reads,
        is_complete=reading.is_complete,
        skipped=log.skipped_by_file[file],
        problem=problem,
    )


def _estimate_reads(n_reads: int, n_bytes: int, size: int | None) -> int | None:
    """Estimate how many reads a file has, from its beginning; None for a pipe.

    Args:
        n_reads: The reads of its beginning.
        n_bytes: The bytes of its beginning, as they are on the disk.
        size: The bytes of the whole file; None for a pipe.
    """
    if size is None:
        return None
    return max(n_reads, round(n_reads * size / max(1, n_bytes)))


def _sum_known(numbers: list[int | None]) -> int | None:
    """Return the sum of some numbers; None if one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _find_problem(spec: InspectSpec, inputs: Inputs, log: ParseLog) -> str:
    """Return why a run would refuse the reads of a sample as a whole; empty if it would not.

    Args:
        spec: The inputs of the sample.
        inputs: Its files.
        log: The counts of reading them.
    """
    try:
        require_reads(spec, inputs, log)
        require_good_records(log)
    except InputError as error:
        return str(error)
    return ""
