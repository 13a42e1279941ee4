"""Staging: files of reads to one ORF store, made once for the same reads and settings."""

import logging
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import Field

from virnuc_core.config import DEFAULT_MODEL_LENGTH, OnError, ReadsSpec
from virnuc_core.errors import (
    ConfigError,
    InputError,
    RunMismatchError,
    SpentInputError,
    WorkerError,
    storage_error,
)
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.fingerprint import Fingerprint
from virnuc_core.reads.parse import BLOCK_BYTES, parse_by
from virnuc_core.reads.sources import (
    Inputs,
    can_be_read_twice,
    find_alignment_format_of_file,
    find_inputs,
)
from virnuc_core.reads.store import STORES, OrfStore, StoreCounts, StoreWriter, is_intact
from virnuc_core.reads.translate import DUPLICATE_ID, EMPTY, MATE, Segment, long_segments, process
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

SKIPPED_LIST: Final = "skipped.tsv"
MADE: Final = ".made.json"  # ending of the summary's file, beside the store
REMARKS: Final = (
    "short_for_model",
    "ambiguous",
    "duplicate_ids",
    "skipped",
)  # of the tally, what is told of reads
_log = logging.getLogger(__name__)


class StageSpec(ReadsSpec):
    """What is staged, and how."""

    model_length: int = Field(
        DEFAULT_MODEL_LENGTH, ge=1, description="the head's model length: chunk size in bases"
    )
    stage_workers: int = Field(
        1, ge=0, le=256, description="processes; results do not depend on it; 0: one a core"
    )


class StageSummary(RunFile):
    """What staging read and made, kept beside the store. Seconds are those of making it, also where it is reused; what
    several workers did at once counts as shared evenly among them."""

    chunk_s: float = 0.0  # unpacking and cutting, which one process does for all, and reading
    translate_s: float = 0.0  # six frames of each chunk, into the store
    total_s: float = 0.0
    store: Path
    reused: bool = (
        False  # the store was there already, made from the same files with the same settings
    )
    fingerprint: str
    model_length: int
    counts: StoreCounts
    files: tuple[str, ...]
    by_file: tuple[InputFile, ...]  # in the order of `files`
    ignored_files: tuple[str, ...]  # in a named folder, neither FASTA nor FASTQ
    on_error: OnError = "stop"  # as they were read
    read_group: str = ""
    pairs: tuple[tuple[str, str], ...] = ()  # as of `Inputs`
    n_pairs: int = 0

    @property
    def tally(self) -> dict[str, int]:
        """The counts that say what became of the input, by name."""
        counts = self.counts
        return {
            "reads": counts.n_reads,
            "empty": counts.n_empty,
            "skipped": sum(one.skipped for one in self.by_file),
            "duplicate_ids": counts.n_duplicate_ids,
            "duplicates": counts.n_rows
            - counts.n_uniques,  # rows whose sequences an earlier row has
            "ambiguous": counts.n_ambiguous,
            "short_for_model": counts.n_short,
            "no_open_frame": counts.n_reads - counts.n_open_reads - counts.n_empty,
        }

    def warnings(self) -> list[str]:
        """What people should know about their files, a sentence each."""
        told = (
            ("skipped", "broken record", "left out"),
            ("not_primary", "secondary or supplementary alignment", "left out"),
            ("empty", "read", "without bases"),
            ("orphans", "read", "without a mate, judged alone"),
            (
                "duplicate_ids",
                "read",
                "with the id of an earlier read, told apart by a number added to it",
            ),
        )
        met = (
            (one.file, getattr(one, name), what, end)
            for one in self.by_file
            for name, what, end in told
        )
        said = [
            f"{file}: {count:,} {what}{'s' * (count != 1)} {end}"
            for file, count, what, end in met
            if count
        ]
        said += [
            f"{one.file}: holds no reads"
            for one in self.by_file
            if self.counts.n_reads and not one.reads
        ]
        return said + [f"{name}: neither FASTA nor FASTQ, not read" for name in self.ignored_files]


def stage(
    spec: StageSpec, out: Path, *, anew: bool = False, expected: RunRecord | None = None
) -> StageSummary:
    """Read everything, cut it, translate it and write the store `out`; or find, unless it is to be made `anew`, that it
    is there already, made from files of the same content, to the last bit. The store appears whole or not at all.
    Skipped records are listed in `skipped.tsv` beside it. Errors: `InputError` for reads that cannot be used;
    `ConfigError` when `out` cannot be written; `RunMismatchError` naming what is other, for reads not of the `expected`
    run; `SpentInputError` for what another try might mend, where reads were piped."""
    inputs = find_inputs(spec.named)
    if len(inputs.files) != 1 or spec.interleaved or find_alignment_format_of_file(inputs.files[0]):
        from virnuc_core.reads.pairs import arranged  # one file is the usual case

        inputs = arranged(spec, inputs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{out.name}.scratch"
        for left in out.parent.glob(f"{prefix}*"):  # by killed ones: nobody stages beside us
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            "", prefix, out.parent, ignore_cleanup_errors=True
        ) as folder:
            if (summary := None if anew else _kept(spec, inputs, out)) is not None:
                _accept(spec, inputs, out, summary.fingerprint, expected)
            else:
                with _log_of(spec, out) as log, Workers(spec.workers) as workers:
                    seconds = _make(spec, inputs, out, Path(folder), log, workers, expected)
                summary = _summary(spec, inputs, out, log, seconds)
                write(out.with_suffix(MADE), summary)
    except OSError as error:  # reading tells its troubles by InputError: this is the output's
        said = f"{out}: cannot be written: {error.strerror or error}; make room or choose a place"
        raise storage_error(error, out) or ConfigError(said) from error
    except (WorkerError, MemoryError) as error:
        if not (spent := [name for name in inputs.files if not can_be_read_twice(name)]):
            raise
        said = f"{error or 'out of memory'}; what came from {', '.join(spent)} is gone"
        raise SpentInputError(f"{said}; send it again, or put it into a file") from error
    for warning in summary.warnings():
        _log.warning("%s", warning)
    return summary


def _make(
    spec: StageSpec,
    inputs: Inputs,
    out: Path,
    temp: Path,
    log: ParseLog,
    workers: Workers,
    expected: RunRecord | None,
) -> dict[str, float]:
    """Read and translate everything, find what repeats, write the store; gives the seconds of each part."""
    began, seconds = time.perf_counter(), defaultdict[str, float](float)
    of_pairs = f" pairs, {len(inputs.singles)} other files" if inputs.pairs else ""
    writer, fingerprint = (
        StoreWriter(temp, spec.model_length),
        Fingerprint(f"{STORES} {spec.model_length}{of_pairs}"),
    )
    work = partial(process, model_length=spec.model_length, folder=temp)
    batches = parse_by(workers, work, inputs.singles, log, block_bytes=BLOCK_BYTES)
    if inputs.pairs:
        from virnuc_core.reads.pairs import pair_batches

        paired = workers.map(
            work, pair_batches(inputs, log, text=False), lambda batch: len(batch.bases.data)
        )
        batches = chain(paired, batches)
    ambiguous = False  # the long read whose parts are coming in
    for made, leaves, taken in batches:
        before = time.perf_counter()
        fingerprint.add(leaves)
        if isinstance(made, Segment):
            writer.add(made)
        else:
            ambiguous = made.ambiguous or (ambiguous and not made.part.is_first)
            if made.part.is_dropped:
                Path(made.path).unlink()
            elif made.part.is_last:
                for segment in long_segments(made, ambiguous, spec.model_length, temp, workers):
                    writer.add(segment)
        seconds["translate_s"] += time.perf_counter() - before
        for part, part_s in taken.items():
            seconds[part] += part_s / spec.workers  # side by side with those of others
    seconds["chunk_s"] += log.cut_s + log.parse_s / spec.workers
    if log.n_reads == 0 and (
        spec.read_group or not all(can_be_read_twice(name) for name in inputs.files)
    ):
        of, hint = "", "did what writes to it fail?"
        if spec.read_group:
            of, hint = (
                f" of read group {spec.read_group}",
                "samtools view -H names those that there are",
            )
        raise InputError(f"no read{of} came in from {', '.join(inputs.files)}", hint=hint)
    _accept(spec, inputs, out, fingerprint.hexdigest(), expected)
    for name, first in log.first_broken.items():
        if not log.reads_by_file[name]:
            problem = f"none of its records can be read: {log.skipped_by_file[name]:,} broken, the first is {first}"
            raise InputError(problem, file=name, hint="mend the file or leave it out")
    before = time.perf_counter()
    twice = writer.find_repeats(workers)
    if spec.strict and twice is not None:
        raise _shared_id(writer, inputs, log, *twice)
    writer.write(out, fingerprint.hexdigest(), workers, paired=bool(inputs.pairs))
    seconds["translate_s"] += time.perf_counter() - before
    return {**seconds, "total_s": time.perf_counter() - began}


def _summary(
    spec: StageSpec, inputs: Inputs, out: Path, log: ParseLog, seconds: dict[str, float]
) -> StageSummary:
    store = OrfStore.open(out, check=False)
    return StageSummary(
        **seconds,
        store=out,
        **{name: getattr(store, name) for name in ("fingerprint", "model_length", "counts")},
        files=inputs.files,
        by_file=_by_file(inputs, log, store),
        pairs=inputs.pairs,
        n_pairs=int(np.count_nonzero(store.read_flags & MATE)) if inputs.pairs else 0,
        ignored_files=inputs.ignored,
        **{name: getattr(spec, name) for name in ("on_error", "read_group")},
    )


def _accept(
    spec: StageSpec, inputs: Inputs, out: Path, found: str, expected: RunRecord | None
) -> None:
    """Refuse reads, by the fingerprint `found`, of another run than the one beside `out`."""
    if expected is not None and expected.fingerprints.get("reads", "") != found:
        told: dict[str, tuple[object, ...]] = {
            "model length": (expected.model_length, spec.model_length)
        }
        told |= {
            name: (expected.spec.get(name), getattr(spec, name))
            for name in ("on_error", "read_group")
        }
        if expected.spec:
            told["pairs"] = tuple(
                "yes" if some else "no" for some in (expected.pairs, inputs.pairs)
            )
        others = [
            f"{name} {was} → {now}" for name, (was, now) in told.items() if was not in (None, now)
        ]
        said = (
            "; ".join([*changed_inputs(expected.inputs, inputs.files), *others])
            or "the same files in another order"
        )
        other = f"{out.parent} holds a run of other reads, or of reads cut otherwise ({said})"
        raise RunMismatchError(f"{other}; choose another directory or --force")


def _shared_id(
    writer: StoreWriter, inputs: Inputs, log: ParseLog, read: int, first: int
) -> InputError:
    spans = inputs.spans(log.reads_by_file)
    (name, line), (_, first_line) = writer.place(read), writer.place(first)
    file, first_file = (
        files[-name.endswith("/2")]
        for place in (read, first)
        for files, low, high in spans
        if low <= place < high
    )
    problem, hint = (
        f"this id stands also on {first_file}:{first_line}",
        "ids must be unique in strict mode, rename one",
    )
    return InputError(problem, file=file, line=line, read_id=name, hint=hint)


def _kept(spec: StageSpec, inputs: Inputs, out: Path) -> StageSummary | None:
    """What was staged of these very files, with these settings, and lies in `out` still; None if something differs."""
    if not out.is_file() or not all(can_be_read_twice(name) for name in inputs.files):
        return None
    made = read_or_set_aside(out.with_suffix(MADE), StageSummary)
    asked = spec.model_length, spec.on_error, spec.read_group, inputs.pairs
    if made is None or (made.model_length, made.on_error, made.read_group, made.pairs) != asked:
        return None
    unlisted = made.tally["skipped"] and not out.with_name(SKIPPED_LIST).is_file()
    if unlisted or (spec.strict and made.counts.n_duplicate_ids):
        return None
    if [(one.file, one.content) for one in made.by_file] != [
        (name, digest(Path(name))) for name in inputs.files
    ]:
        return None
    if not is_intact(out):
        _log.warning("%s: not what was staged (checksum); the reads are staged again", out)
        return None
    if OrfStore.open(out, check=False).fingerprint != made.fingerprint:  # it was replaced since
        return None
    return made.model_copy(update={"store": out, "reused": True, "ignored_files": inputs.ignored})


def _by_file(inputs: Inputs, log: ParseLog, store: OrfStore) -> tuple[InputFile, ...]:
    """What was met in each file; the reads of a file, or of two with mates, follow each other in the store."""
    counted, paired = [], dict(inputs.pairs)
    for files, low, high in inputs.spans(log.reads_by_file):
        flags = store.read_flags[low:high]
        second = (flags & MATE) > 0
        mates = int(second.sum()) * (3 - len(files))  # in each file
        if len(files) == 2:  # of a read without its mate the id tells which it is
            alone = np.flatnonzero(~second & ~np.append(second[1:], False))
            second[alone] = store.read_id_bytes[store.read_id_offsets[low + alone + 1] - 1] == ord(
                "2"
            )
        for number, name in enumerate(files):
            own = flags[second == number] if len(files) == 2 else flags
            empty, again = (int(np.count_nonzero(own & bit)) for bit in (EMPTY, DUPLICATE_ID))
            met = {"empty": empty, "skipped": log.skipped_by_file[name], "duplicate_ids": again}
            met |= {
                "not_primary": log.not_primary[name],
                "orphans": len(own) - mates if files[0] in paired else 0,
            }
            content = log.contents[name] if Path(name).is_file() else None
            counted.append(InputFile(file=name, reads=len(own), content=content, **met))
    return tuple(counted)


@contextmanager
def _log_of(spec: StageSpec, out: Path) -> Iterator[ParseLog]:
    """The log of a reading; the records that it skips are listed beside `out` in the end."""
    listed = out.with_name(SKIPPED_LIST)
    if spec.on_error == "stop":
        yield ParseLog(read_group=spec.read_group)
        listed.unlink(missing_ok=True)  # of an earlier store
        return
    with (
        atomic_file(listed) as aside,
        aside.open("w", encoding="utf-8", errors="backslashreplace") as listing,
    ):

        def note(error: InputError) -> None:
            cells = [
                re.sub(r"\s", " ", str(cell))
                for cell in (error.file, error.line or "", error.read_id, error)
            ]
            listing.write("\t".join(cells) + "\n")

        listing.write("file\tline\tread\tproblem\n")
        yield ParseLog(spec.on_error, note, spec.read_group)
