"""Stage reads: convert the input files into one store of open reading frames (`orfs.h5`).

A store that was made from the same files with the same settings is used again.
"""

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from virnuc_core.config import DEFAULT_MODEL_LENGTH, OnError, ReadsSpec
from virnuc_core.errors import (
    ConfigError,
    InputError,
    LimitError,
    RunMismatchError,
    SpentInputError,
    WorkerError,
)
from virnuc_core.input_names import STDIN
from virnuc_core.lease import make_folder
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.fingerprint import Fingerprint
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.parse import BLOCK_BYTES, map_batches
from virnuc_core.reads.sources import (
    NO_READS_REASON,
    Inputs,
    ReadSpan,
    can_be_read_twice,
    find_alignment_format_of_file,
    sample_name,
)
from virnuc_core.reads.store import (
    STORES,
    DuplicateId,
    OrfStore,
    StoreCounts,
    StoreWriter,
    is_intact,
)
from virnuc_core.reads.translate import (
    DUPLICATE_ID,
    EMPTY,
    MATE,
    BatchResult,
    LongPart,
    Segment,
    translate_batch,
    translate_long_read,
)
from virnuc_core.reads.workers import Workers
from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import (
    InputFile,
    RunFile,
    RunRecord,
    changed_inputs,
    digest,
    read_or_set_aside,
    write,
)
from virnuc_core.system_errors import (
    describe_system_error,
    is_regular_file,
    path_exists,
    process_limit_error,
    storage_error,
)

SKIPPED_LIST: Final = "skipped.tsv"
SUMMARY_SUFFIX: Final = ".made.json"  # of the file with the summary, beside the store
# The counts in `StageSummary.tally` that are shown as remarks on the reads of a sample.
REMARKS: Final = ("short_for_model", "ambiguous", "duplicate_ids", "skipped")
_log = logging.getLogger(__name__)


class StageSpec(ReadsSpec):
    """The reads to stage, and the settings for it."""

    model_length: int = Field(
        DEFAULT_MODEL_LENGTH, ge=1, description="the head's model length: chunk size in bases"
    )
    stage_workers: int = Field(
        1, ge=0, le=256, description="processes; results do not depend on it; 0: one a core"
    )


class StageSummary(RunFile):
    """What staging read and wrote. It is saved as a file beside the store.

    Times are those of the original staging, even if the store is reused. The time of parallel work
    is divided by the number of workers.
    """

    chunk_s: float = 0.0  # decompressing, parsing, and cutting reads into chunks
    translate_s: float = 0.0  # translating chunks in six frames, and writing the store
    total_s: float = 0.0
    store: Path
    reused: bool = False  # an existing store was used; nothing was staged
    fingerprint: str  # hash of all reads and of the settings that change a store
    model_length: int
    counts: StoreCounts
    files: tuple[str, ...]
    by_file: tuple[InputFile, ...]  # in the order of `files`
    ignored_files: tuple[str, ...]  # files that are not read, such as tables in a named folder
    # Why some ignored files are not read. The others are neither FASTA nor FASTQ.
    left_out: dict[str, str] = Field(default_factory=dict)
    on_error: OnError = "stop"  # the setting with which the reads were read
    read_group: str = ""
    pairs: tuple[tuple[str, str], ...] = ()  # see `Inputs.pairs`
    n_pairs: int = 0

    @property
    def tally(self) -> dict[str, int]:
        """Return the number of reads of each kind (empty, skipped, short, …), by name.

        The kinds may overlap. They are shown to users and written into result files.
        """
        counts = self.counts
        return {
            "reads": counts.n_reads,
            "empty": counts.n_empty,
            "skipped": sum(file.skipped for file in self.by_file),
            "duplicate_ids": counts.n_duplicate_ids,
            "duplicates": counts.n_rows - counts.n_uniques,  # rows that repeat an earlier one
            "ambiguous": counts.n_ambiguous,
            "short_for_model": counts.n_short,
            "no_open_frame": counts.n_reads - counts.n_open_reads - counts.n_empty,
        }

    def warnings(self) -> list[str]:
        """Return one sentence for each fact about the input files that the user should know."""
        warnings: list[str] = []
        for file in self.by_file:
            warnings += _warnings_about(file)
        for file in self.by_file:
            if file.reads == 0:
                warnings.append(f"{file.file}: holds no reads")
        for name in self.ignored_files:
            reason = self.left_out.get(name, NO_READS_REASON)
            warnings.append(f"{name}: {reason}")
        return warnings


def _warnings_about(file: InputFile) -> list[str]:
    """Return a sentence for each kind of unusual record in a file, with the number of records."""
    oddities = (  # number of records, noun, what happened to the records
        (file.skipped, "broken record", "left out"),
        (file.not_primary, "secondary or supplementary alignment", "left out"),
        (file.empty, "read", "without bases"),
        (file.orphans, "read", "without a mate, judged alone"),
        (
            file.duplicate_ids,
            "read",
            "with the id of an earlier read, told apart by a number added to it",
        ),
    )
    warnings: list[str] = []
    for count, noun, predicate in oddities:
        if count == 0:
            continue
        plural = "" if count == 1 else "s"
        warnings.append(f"{file.file}: {count:,} {noun}{plural} {predicate}")
    return warnings


def stage(
    spec: StageSpec, out: Path, *, rebuild: bool = False, recorded_run: RunRecord | None = None
) -> StageSummary:
    """Read all inputs, cut and translate the reads, and write the store of open reading frames.

    An existing store is used again if it is intact and was made from the same files with the same
    settings. A new store appears under its name only when it is complete. Broken records that were
    skipped are listed in `skipped.tsv` beside the store. Warnings about the files are logged.

    Args:
        spec: The reads and the settings.
        out: The file of the store, in the run directory.
        rebuild: Write the store again even if it could be used again.
        recorded_run: The record of the run in this directory. The reads must be the same as in it.

    Returns:
        The summary of what was read and written.

    Raises:
        InputError: The reads cannot be used.
        ConfigError: `out` cannot be written.
        LimitError: A limit of the system, such as that on open files, is too low.
        RunMismatchError: These are not the reads of `recorded_run`. The message names what
            differs.
        SpentInputError: Staging failed for a reason that may pass, but it cannot be repeated,
            because the reads came through a pipe and are gone.
    """
    inputs = find_reads(spec)
    try:
        summary = _reuse_or_build(spec, inputs, out, rebuild=rebuild, recorded_run=recorded_run)
    except OSError as error:
        # Errors of the input are raised as an `InputError`, so this one is about the output.
        storage_problem = storage_error(error, out)  # None if the disk itself is not to blame
        if storage_problem is not None:
            raise storage_problem from error
        limit = process_limit_error(error)
        if limit is not None:
            raise limit from error
        reason = describe_system_error(error, "choose another directory")
        raise ConfigError(f"{out}: cannot be written: {reason}") from error
    except (WorkerError, LimitError, MemoryError) as error:
        spent_inputs = [name for name in inputs.files if not can_be_read_twice(name)]
        if not spent_inputs:
            raise
        raise SpentInputError(
            f"{error or 'out of memory'}; what came from {', '.join(spent_inputs)} is gone; "
            "send it again, or put it into a file"
        ) from error
    for warning in summary.warnings():
        _log.warning("%s", warning)
    return summary


def _reuse_or_build(
    spec: StageSpec, inputs: Inputs, out: Path, *, rebuild: bool, recorded_run: RunRecord | None
) -> StageSummary:
    """Use the existing store again if possible; otherwise build a new one and save its summary.

    As a side effect, scratch folders of earlier runs that were killed are removed.

    Args:
        spec: The reads and the settings.
        inputs: The files.
        out: The file of the store.
        rebuild: Build a new store in any case.
        recorded_run: The record of the run in this directory, whose reads must be the same. None if
            there is no run.

    Returns:
        The summary of the store.

    Raises:
        InputError: The reads cannot be used.
        RunMismatchError: These are not the reads of `recorded_run`.
    """
    make_folder(out.parent)
    scratch_prefix = f".{out.name}.scratch"
    # This process holds the lease of the run directory. So nobody else uses these folders.
    for leftover in out.parent.glob(f"{scratch_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=scratch_prefix, dir=out.parent, ignore_cleanup_errors=True
    ) as folder:
        summary = None if rebuild else _reusable_store(spec, inputs, out)
        if summary is not None:
            _require_same_reads(spec, inputs, out, summary.fingerprint, recorded_run)
            return summary
        with _create_log(spec, out) as log, Workers(spec.workers) as workers:
            times = _build_store(spec, inputs, out, Path(folder), log, workers, recorded_run)
        summary = _summarize(spec, inputs, out, log, times)
        write(out.with_suffix(SUMMARY_SUFFIX), summary)
    return summary


@dataclass
class _StageTimes:
    """The seconds that the steps of staging took, see `StageSummary`."""

    chunk_s: float = 0.0
    translate_s: float = 0.0
    total_s: float = 0.0


def _build_store(
    spec: StageSpec,
    inputs: Inputs,
    out: Path,
    folder: Path,
    log: ParseLog,
    workers: Workers,
    recorded_run: RunRecord | None,
) -> _StageTimes:
    """Read and translate all reads, find repeated sequences and ids, and write the store.

    Args:
        spec: The settings.
        inputs: The files.
        out: The file of the store.
        folder: The folder for scratch files.
        log: Is updated with the counts and errors of reading.
        workers: The processes that do the work.
        recorded_run: The record of the run in this directory, whose reads must be the same. None if
            there is no run.

    Returns:
        The seconds of each step.

    Raises:
        InputError: The reads cannot be used.
        RunMismatchError: These are not the reads of `recorded_run`.
    """
    start_s = time.perf_counter()
    times = _StageTimes()
    # The fingerprint covers the reads and the settings that change the store.
    settings = f"{STORES} {spec.model_length}"
    if inputs.pairs:
        settings += f" pairs, {len(inputs.singles)} other files"
    fingerprint = Fingerprint(settings)

    # Read and translate. Each batch becomes a segment: a scratch file with a part of the store.
    writer = StoreWriter(folder, spec.model_length)
    long_reads = _LongReads(spec.model_length, folder, workers)
    for result in _translate_inputs(spec, inputs, folder, log, workers):
        result_start_s = time.perf_counter()
        fingerprint.add(result.leaves)
        if isinstance(result.output, Segment):
            writer.add(result.output)
        else:  # a part of a long read; its segments come with the last part
            for segment in long_reads.add(result.output):
                writer.add(segment)
        times.translate_s += time.perf_counter() - result_start_s
        # Workers work at the same time, so divide the sum of their times.
        times.chunk_s += result.chunk_s / spec.workers
        times.translate_s += result.translate_s / spec.workers
    times.chunk_s += log.cut_s + log.parse_s / spec.workers

    # Refuse reads that cannot be used.
    require_reads(spec, inputs, log)
    _require_same_reads(spec, inputs, out, fingerprint.hexdigest(), recorded_run)
    require_good_records(log)

    # Join the segments to the store.
    write_start_s = time.perf_counter()
    duplicate = writer.find_repeats(workers)
    if spec.strict and duplicate is not None:
        raise _duplicate_id_error(writer, inputs, log, duplicate)
    writer.write(out, fingerprint.hexdigest(), workers, paired=bool(inputs.pairs))
    end_s = time.perf_counter()
    times.translate_s += end_s - write_start_s
    times.total_s = end_s - start_s
    return times


def _translate_inputs(
    spec: StageSpec, inputs: Inputs, folder: Path, log: ParseLog, workers: Workers
) -> Iterator[BatchResult]:
    """Parse and translate all files, with several workers: first the pairs, then the other files.

    Returns:
        An iterator over the result of each batch of reads, in the order of the reads.
    """
    work = partial(translate_batch, model_length=spec.model_length, folder=folder)
    results = map_batches(workers, work, inputs.singles, log, block_bytes=BLOCK_BYTES)
    if not inputs.pairs:
        return results
    from virnuc_core.reads.pairs import pair_batches

    pairs = pair_batches(inputs, log, with_records=False)
    paired_results = workers.map(work, pairs, count_bytes=lambda batch: len(batch.bases.data))
    return chain(paired_results, results)


class _LongReads:
    """Handles long reads, which are parsed in parts, and translates each when it is complete."""

    def __init__(self, model_length: int, folder: Path, workers: Workers) -> None:
        """Begin without a read.

        Args:
            model_length: The size of a chunk in bases.
            folder: The folder for scratch files.
            workers: The processes that translate.
        """
        self._model_length = model_length
        self._folder = folder
        self._workers = workers
        # A part of the current read has letters other than A, C, G, T.
        self._is_ambiguous = False

    def add(self, long_part: LongPart) -> Iterator[Segment]:
        """Add the next part of a long read. If it is the last part, translate the whole read.

        A read that is marked as dropped is not translated, and its scratch file is removed.

        Args:
            long_part: The part. Its bases are already in the scratch file of the read.

        Yields:
            The segments (parts of the store) of the read if it is complete; otherwise nothing.
        """
        part = long_part.part
        if part.is_first:
            self._is_ambiguous = False
        self._is_ambiguous |= long_part.is_ambiguous
        if part.is_dropped:
            Path(long_part.path).unlink()
        elif part.is_last:
            yield from translate_long_read(
                long_part, self._is_ambiguous, self._model_length, self._folder, self._workers
            )
            Path(long_part.path).unlink()


def require_reads(spec: ReadsSpec, inputs: Inputs, log: ParseLog) -> None:
    """Raise an `InputError` if a pipe gave no read, or nothing knows the read group of the user.

    An empty file is not an error.

    Args:
        spec: The settings.
        inputs: The files.
        log: The counts of reading them.
    """
    if log.n_reads > 0:
        return
    files = ", ".join(inputs.files)
    if spec.read_group:
        if any(_names_read_group(name, spec.read_group) for name in inputs.files):
            return  # the header names the group, and no read is of it: a negative control
        raise InputError(
            f"{files}: no read belongs to read group {spec.read_group}",
            hint="samtools view -H shows the read groups of a file",
        )
    # An empty file that was compressed has some bytes also in a pipe. A pipe without any byte comes
    # from a command that has failed.
    has_bytes = any(content.size > 0 for content in log.contents.values())
    if not has_bytes and not all(can_be_read_twice(name) for name in inputs.files):
        raise InputError(
            f"no read came in from {files}", hint="did the command that writes to it fail?"
        )


def _names_read_group(file: str, sample: str) -> bool:
    """Return True if the header of a file of alignments has a read group of a sample."""
    from virnuc_core.reads.alignments import find_samples  # few files need it

    if not can_be_read_twice(file):
        return False
    format_ = find_alignment_format_of_file(file)
    changed_ns = Path(file).stat().st_mtime_ns
    return sample in find_samples(file, format_, sample_name((file,)), changed_ns)


def require_good_records(log: ParseLog) -> None:
    """Raise an `InputError` if a file has broken records and not a single good one.

    Args:
        log: The counts of reading the files.
    """
    for name, first_error in log.first_broken.items():
        if log.reads_by_file[name] == 0:
            raise InputError(
                f"none of its records can be read: {log.skipped_by_file[name]:,} broken, "
                f"the first is {first_error}",
                file=name,
                hint="mend the file or leave it out",
            )


def _summarize(
    spec: StageSpec, inputs: Inputs, out: Path, log: ParseLog, times: _StageTimes
) -> StageSummary:
    """Return the summary of a store that was just written.

    Args:
        spec: The settings.
        inputs: The files.
        out: The file of the store; it is opened to read its counts.
        log: The counts of reading.
        times: The seconds of each step.
    """
    store = OrfStore.open(out, check=False)  # it was just written, so it need not be checked
    n_pairs = 0
    if inputs.pairs:
        n_pairs = int(np.count_nonzero(store.read_flags & MATE))
    return StageSummary(
        chunk_s=times.chunk_s,
        translate_s=times.translate_s,
        total_s=times.total_s,
        store=out,
        fingerprint=store.fingerprint,
        model_length=store.model_length,
        counts=store.counts,
        files=inputs.files,
        by_file=_summarize_files(inputs, log, store),
        ignored_files=inputs.ignored,
        left_out=dict(inputs.left_out),
        on_error=spec.on_error,
        read_group=spec.read_group,
        pairs=inputs.pairs,
        n_pairs=n_pairs,
    )


def _require_same_reads(
    spec: StageSpec, inputs: Inputs, out: Path, fingerprint: str, recorded_run: RunRecord | None
) -> None:
    """Raise an error if the reads are not those of the run that is in the same directory.

    Args:
        spec: The current settings.
        inputs: The current files.
        out: The file of the store.
        fingerprint: The fingerprint of the current reads.
        recorded_run: The record of the run in the directory; None if there is none.

    Raises:
        RunMismatchError: The message names the files and settings that differ.
    """
    if recorded_run is None or recorded_run.fingerprints.get("reads", "") == fingerprint:
        return
    differences = [
        *changed_inputs(recorded_run.inputs, inputs.files),
        *_changed_settings(spec, inputs, recorded_run),
    ]
    details = "; ".join(differences) or "the same files in another order"
    raise RunMismatchError(
        f"{out.parent} holds a run of other reads, or of reads cut otherwise ({details}); "
        "choose another directory or --force"
    )


def _changed_settings(spec: StageSpec, inputs: Inputs, recorded_run: RunRecord) -> list[str]:
    """Return a phrase such as `model length 300 → 500` for each setting that differs from a run.

    Args:
        spec: The current settings.
        inputs: The current files.
        recorded_run: The record of the run. Settings that it does not mention are not compared.
    """
    changes: list[str] = []
    if recorded_run.model_length not in (None, spec.model_length):
        changes.append(f"model length {recorded_run.model_length} → {spec.model_length}")
    recorded_on_error = recorded_run.spec.get("on_error")
    if recorded_on_error not in (None, spec.on_error):
        changes.append(f"on_error {recorded_on_error} → {spec.on_error}")
    recorded_read_group = recorded_run.spec.get("read_group")
    if recorded_read_group not in (None, spec.read_group):
        changes.append(f"read_group {recorded_read_group} → {spec.read_group}")
    if recorded_run.spec:
        recorded_pairs = "yes" if recorded_run.pairs else "no"
        current_pairs = "yes" if inputs.pairs else "no"
        if recorded_pairs != current_pairs:
            changes.append(f"pairs {recorded_pairs} → {current_pairs}")
    return changes


def _duplicate_id_error(
    writer: StoreWriter, inputs: Inputs, log: ParseLog, duplicate: DuplicateId
) -> InputError:
    """Return an error that names two reads with the same id, with their files and lines."""
    location = writer.locate(duplicate.read)
    first_location = writer.locate(duplicate.first_read)
    spans = inputs.spans(log.reads_by_file)
    first_file = _file_of_read(spans, duplicate.first_read, location.id)
    return InputError(
        f"this id is also used on {first_file}:{first_location.line}",
        file=_file_of_read(spans, duplicate.read, location.id),
        line=location.line,
        read_id=location.id,
        hint="ids must be unique in strict mode, rename one",
    )


def _file_of_read(spans: list[ReadSpan], read: int, read_id: str) -> str:
    """Return the file that holds a read.

    Args:
        spans: The range of reads of each file, or of the two files of a pair.
        read: The number of the read.
        read_id: The id of the read. In a pair of files, `/2` at its end means the second file.
    """
    for span in spans:
        if span.start <= read < span.end:
            return span.files[-1] if read_id.endswith("/2") else span.files[0]
    raise IndexError(f"read {read} is beyond the reads of all files")


def _reusable_store(spec: StageSpec, inputs: Inputs, out: Path) -> StageSummary | None:
    """Return the summary of the store that is there, if it can be used again.

    It can if the same files were staged with the same settings, and the store is intact.
    """
    if not path_exists(out) or not all(can_be_read_twice(name) for name in inputs.files):
        return None
    summary = read_or_set_aside(out.with_suffix(SUMMARY_SUFFIX), StageSummary)
    if summary is None or not _has_same_settings(summary, spec, inputs):
        return None
    lacks_skipped_list = summary.tally["skipped"] > 0 and not is_regular_file(
        out.with_name(SKIPPED_LIST)
    )
    # The error for equal ids names the lines of the reads, which only staging knows.
    has_forbidden_ids = spec.strict and summary.counts.n_duplicate_ids > 0
    if lacks_skipped_list or has_forbidden_ids:
        return None

    # These checks read all of the input and all of the store.
    if not _has_same_files(summary, inputs):
        return None
    if not is_intact(out):
        _log.warning("%s: not what was staged (checksum); the reads are staged again", out)
        return None
    # The store and its summary are two files. Somebody may have copied another store here.
    was_replaced = OrfStore.open(out, check=False).fingerprint != summary.fingerprint
    if was_replaced:
        return None
    return summary.model_copy(
        update={
            "store": out,
            "reused": True,
            "ignored_files": inputs.ignored,
            "left_out": dict(inputs.left_out),
        }
    )


def _has_same_settings(summary: StageSummary, spec: StageSpec, inputs: Inputs) -> bool:
    """Return True if the settings that change a store are the same as in its summary."""
    return (
        summary.model_length == spec.model_length
        and summary.on_error == spec.on_error
        and summary.read_group == spec.read_group
        and summary.pairs == inputs.pairs
    )


def _has_same_files(summary: StageSummary, inputs: Inputs) -> bool:
    """Return True if the files have the same names and the same content as when they were staged.

    All files are read to compute their digests.
    """
    if tuple(file.file for file in summary.by_file) != inputs.files:
        return False
    return all(file.content == digest(Path(file.file)) for file in summary.by_file)


def _summarize_files(inputs: Inputs, log: ParseLog, store: OrfStore) -> tuple[InputFile, ...]:
    """Count the reads, empty reads, duplicate ids, orphans and skipped records of each file.

    Args:
        inputs: The files.
        log: The counts of reading.
        store: The store. It has the reads of a file, or of two files of mates, in one range.

    Returns:
        One summary per file, in the order of the files.
    """
    first_mate_files = {first for first, _ in inputs.pairs}
    summaries: list[InputFile] = []
    for span in inputs.spans(log.reads_by_file):
        # Divide the flags of the range between its one or two files.
        flags = store.read_flags[span.start : span.end]
        is_second_mate = (flags & MATE) > 0
        n_second_mates = int(is_second_mate.sum())
        if len(span.files) == 2:
            n_mates_in_file = n_second_mates
            is_in_second_file = is_second_mate | _find_second_orphans(store, span, is_second_mate)
            flags_of_files = [flags[~is_in_second_file], flags[is_in_second_file]]
        else:
            n_mates_in_file = 2 * n_second_mates
            flags_of_files = [flags]

        # Count in each file.
        for name, flags_of_file in zip(span.files, flags_of_files, strict=True):
            n_orphans = 0
            is_paired = span.files[0] in first_mate_files
            if is_paired:
                n_orphans = len(flags_of_file) - n_mates_in_file
            is_file = name != STDIN and is_regular_file(Path(name))
            summary = InputFile(
                file=name,
                reads=len(flags_of_file),
                empty=int(np.count_nonzero(flags_of_file & EMPTY)),
                skipped=log.skipped_by_file[name],
                duplicate_ids=int(np.count_nonzero(flags_of_file & DUPLICATE_ID)),
                orphans=n_orphans,
                not_primary=log.not_primary[name],
                # A pipe has no content that could be compared later.
                content=log.contents[name] if is_file else None,
            )
            summaries.append(summary)
    return tuple(summaries)


def _find_second_orphans(
    store: OrfStore, span: ReadSpan, is_second_mate: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Find the reads without a mate (orphans) that come from the second of two files of mates.

    In the store the id of such a read ends in `/2`.

    Args:
        store: The store.
        span: The range of reads of the two files.
        is_second_mate: Which reads follow their mates: bool [reads].

    Returns:
        bool [reads].
    """
    is_first_mate = np.append(is_second_mate[1:], False)  # the next read is the mate
    orphans = np.flatnonzero(~is_second_mate & ~is_first_mate)
    id_ends = store.read_id_offsets[span.start + orphans + 1]
    last_letters = store.read_id_bytes[id_ends - 1]
    is_second_orphan = np.zeros(len(is_second_mate), bool)
    is_second_orphan[orphans] = last_letters == ord("2")
    return is_second_orphan


@contextmanager
def _create_log(spec: StageSpec, out: Path) -> Iterator[ParseLog]:
    """Create the log for reading the input. Skipped records are listed in `skipped.tsv`.

    The list appears beside the store only if the `with` statement ends without an error. If broken
    records are an error, there is no list, and the list of an earlier store is removed.

    Args:
        spec: The settings.
        out: The file of the store.

    Yields:
        The log.
    """
    skipped_list = out.with_name(SKIPPED_LIST)
    if spec.on_error == "stop":
        yield ParseLog(read_group=spec.read_group)
        skipped_list.unlink(missing_ok=True)
        return
    with (
        atomic_file(skipped_list) as temp_path,
        temp_path.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):

        def list_record(error: InputError) -> None:
            """Write one line for a record that is skipped.

            Args:
                error: Tells the file, the line and the id of the record, and what is wrong with it.
            """
            cells = [error.file, error.line or "", error.read_id, error]
            one_line_cells = [re.sub(r"\s", " ", str(cell)) for cell in cells]
            file.write("\t".join(one_line_cells) + "\n")

        file.write("file\tline\tread\tproblem\n")
        yield ParseLog(spec.on_error, list_record, spec.read_group)
