"""Staging: files of reads to one ORF store, made once for the same reads and settings."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import psutil
from pydantic import Field

from virnuc_core.config import DEFAULT_MODEL_LENGTH, Spec
from virnuc_core.errors import ConfigError, InputError, RunMismatchError, SpentInputError, WorkerError
from virnuc_core.reads.batch import ReadBatch
from virnuc_core.reads.crew import Crew
from virnuc_core.reads.lay import Laid, Lay, Look, Seen, to_send
from virnuc_core.reads.parse import OnError, ParseLog, Skipped, in_order
from virnuc_core.reads.pieces import Piece
from virnuc_core.reads.sources import Inputs, can_be_read_twice, find_inputs
from virnuc_core.reads.store import DUPLICATE_ID, EMPTY, OrfStore, StoreCounts
from virnuc_core.reads.write import StoreWriter, fingerprint_for
from virnuc_core.rundir import whole_file, write_text_whole

SKIPPED_LIST: Final = "skipped.tsv"
_log = logging.getLogger(__name__)


class StageSpec(Spec):
    """What is staged, and how strictly."""

    reads: tuple[str, ...] = Field(min_length=1, description="FASTA or FASTQ files or folders; - is standard input")
    model_length: int = Field(DEFAULT_MODEL_LENGTH, ge=1, description="the head's model length: chunk size in bases")
    workers: int = Field(1, ge=1, le=256, description="processes that stage; results do not depend on it")
    on_error: OnError = Field("stop", description="skip: leave broken records out, count and list them")
    strict: bool = Field(False, description="refuse reads that share an id")


@dataclass(frozen=True, slots=True)
class MadeIn:
    """Seconds that making a store took; what several workers did at once counts as shared evenly among them."""

    cut_s: float  # unpacking and cutting the text, which one process does for all; part of the next
    parse_s: float
    chunk_s: float
    translate_s: float
    store_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class FileReads:
    """What was met in one file."""

    file: str
    reads: int
    empty: int  # reads without bases
    skipped: int  # broken records left out
    duplicate_ids: int  # reads whose id an earlier read has, of this file or one before


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What staging read and made."""

    store: Path
    fingerprint: str
    reused: bool  # the store was there already, made from the same reads with the same settings
    model_length: int
    counts: StoreCounts
    files: tuple[str, ...]
    by_file: tuple[FileReads, ...]  # in the order of `files`
    ignored_files: tuple[str, ...]  # in a named folder, neither FASTA nor FASTQ
    empty_files: int
    skipped_records: int
    skipped_list: Path | None  # where they are listed
    unnamed_reads: int  # had no id and were given one
    cut_s: float  # this and the five below: as in `MadeIn`, also where the store was reused now
    parse_s: float
    chunk_s: float
    translate_s: float
    store_s: float
    total_s: float
    checked_s: float  # what this call took

    @property
    def reads_per_s(self) -> float:
        """Reads staged per second of wall time."""
        return self.counts.n_reads / self.total_s if self.total_s > 0 else 0.0

    @property
    def tally(self) -> dict[str, int]:
        """The counts that say what became of the input, by name."""
        counts = self.counts
        return {
            "reads": counts.n_reads,
            "empty": counts.n_empty,
            "skipped": self.skipped_records,
            "duplicate_ids": counts.n_duplicate_ids,
            "duplicates": counts.n_rows - counts.n_uniques,  # rows whose sequences an earlier row has
            "ambiguous": counts.n_ambiguous,
            "short_for_model": counts.n_short,
            "no_open_frame": counts.n_reads - counts.n_open_reads - counts.n_empty,
        }

    def warnings(self) -> list[str]:
        """What people should know about their files, a sentence each."""
        said = []
        for one in self.by_file:
            if one.skipped:
                said.append(f"{one.file}: {_many(one.skipped, 'broken record')} left out")
            if one.empty:
                said.append(f"{one.file}: {_many(one.empty, 'read')} without bases")
            if one.duplicate_ids:
                reads = _many(one.duplicate_ids, "read")
                said.append(f"{one.file}: {reads} with the id of an earlier read, told apart by a number added to it")
        return said + [f"{name}: neither FASTA nor FASTQ, not read" for name in self.ignored_files]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(slots=True)
class _Clock:
    """Seconds by stage."""

    workers: int
    started: float = field(default_factory=time.perf_counter)
    parse_s: float = 0.0
    chunk_s: float = 0.0
    translate_s: float = 0.0
    store_s: float = 0.0

    def add(self, laid: Laid) -> None:
        """Count what a worker took."""
        self.parse_s += laid.parse_s / self.workers
        self.chunk_s += laid.chunk_s / self.workers
        self.translate_s += laid.translate_s / self.workers
        self.store_s += laid.store_s / self.workers

    def made_in(self, cut_s: float) -> MadeIn:
        """All of it, up to now."""
        total_s = time.perf_counter() - self.started
        return MadeIn(cut_s, cut_s + self.parse_s, self.chunk_s, self.translate_s, self.store_s, total_s)


def stage(spec: StageSpec, out: Path, *, may_replace: bool = True) -> StageSummary:
    """Read everything, cut it, translate it and write the store `out`; or find that it is there already.

    The store appears whole or not at all. Skipped records are listed in `skipped.tsv` beside it.
    Errors: `InputError` for reads that cannot be used; `ConfigError` when `out` cannot be written; `RunMismatchError`
    when `out` holds other reads and may not be replaced; `SpentInputError` for what another try might mend, where reads
    came through a pipe.
    """
    inputs = find_inputs(spec.reads)
    try:
        return _stage(spec, inputs, out, may_replace)
    except (WorkerError, MemoryError, OSError) as error:
        spent = [name for name in inputs.files if not can_be_read_twice(name)]
        if not spent:
            raise
        raise SpentInputError(
            f"{error or 'out of memory'}; what came from {', '.join(spent)} is gone",
            hint="send it again, or put it into a file",
        ) from error


def _stage(spec: StageSpec, inputs: Inputs, out: Path, may_replace: bool) -> StageSummary:
    clock = _Clock(spec.workers)
    try:
        with (
            _scratch(out) as folder,
            _skip_list(spec, out, folder) as log,
            Crew(folder, spec.workers) as crew,
        ):
            reused = _is_current(spec, inputs, out, log, crew)
            if not reused:
                _refuse_to_replace(out, may_replace)
                log.start_over()
                writer = StoreWriter(folder, spec.model_length, inputs.files, crew, strict=spec.strict)
                _write(spec, inputs, out, writer, crew, log.log, clock)
    except OSError as error:  # reading tells its troubles by InputError: this is the output's
        raise ConfigError(
            f"{out}: cannot be written: {error.strerror or error}; make room or choose a place"
        ) from error
    summary = _summary(spec, inputs, out, log.log, clock, reused)
    for warning in summary.warnings():
        _log.warning("%s", warning)
    return summary


def _refuse_to_replace(out: Path, may_replace: bool) -> None:
    if out.exists() and not may_replace:
        raise RunMismatchError(
            f"{out.parent} holds a run of other reads, or of reads cut otherwise; choose another directory or --force"
        )


def _summary(
    spec: StageSpec, inputs: Inputs, out: Path, counted: ParseLog, clock: _Clock, reused: bool
) -> StageSummary:
    store = OrfStore.open(out)
    this = clock.made_in(counted.cut_s)
    made = (_made_in(out, store.fingerprint) if reused else None) or this
    if not reused:
        write_text_whole(_made_path(out), json.dumps({"fingerprint": store.fingerprint, **asdict(made)}) + "\n")
    return StageSummary(
        store=out,
        fingerprint=store.fingerprint,
        reused=reused,
        model_length=store.model_length,
        counts=store.counts,
        files=inputs.files,
        by_file=_by_file(inputs.files, counted, store),
        ignored_files=inputs.ignored,
        empty_files=counted.empty_files,
        skipped_records=counted.skipped,
        skipped_list=out.with_name(SKIPPED_LIST) if spec.on_error == "skip" else None,
        unnamed_reads=counted.unnamed,
        **asdict(made),
        checked_s=this.total_s,
    )


def _by_file(files: tuple[str, ...], log: ParseLog, store: OrfStore) -> tuple[FileReads, ...]:
    """What was met in each file; the reads of a file follow each other in the store."""
    counted, low = [], 0
    for name in files:
        high = low + log.reads_by_file[name]
        flags = store.read_flags[low:high]
        empty, again = (int(np.count_nonzero(flags & bit)) for bit in (EMPTY, DUPLICATE_ID))
        counted.append(FileReads(name, high - low, empty, log.skipped_by_file[name], again))
        low = high
    return tuple(counted)


def _made_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.made.json")


def _made_in(out: Path, fingerprint: str) -> MadeIn | None:
    """What making the store took; None where that was not kept, or belongs to another store."""
    try:
        body = json.loads(_made_path(out).read_text(encoding="utf-8"))
        return MadeIn(**body) if body.pop("fingerprint") == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    spec: StageSpec, inputs: Inputs, out: Path, writer: StoreWriter, crew: Crew, log: ParseLog, clock: _Clock
) -> None:
    numbers = itertools.count()

    def lay(item: Piece | ReadBatch) -> Future[Laid]:
        return crew.submit(Lay(next(numbers), to_send(item), spec.model_length))

    for laid in in_order(inputs.files, log, lay, ahead=crew.ahead):
        writer.add(laid)
        clock.add(laid)
    count = next(numbers)
    if count == 0 and not all(can_be_read_twice(name) for name in inputs.files):
        raise InputError(f"no read came in from {', '.join(inputs.files)}", hint="did what writes to it fail?")
    before = time.perf_counter()
    writer.finish(out, count)
    clock.store_s += time.perf_counter() - before


def _is_current(spec: StageSpec, inputs: Inputs, out: Path, log: _SkipLog, crew: Crew) -> bool:
    """Whether `out` holds these very reads already: they are read again, which takes a fraction of staging them."""
    if not out.is_file() or not all(can_be_read_twice(name) for name in inputs.files):
        return False
    try:
        store = OrfStore.open(out)
    except InputError:
        return False  # unreadable, or of an earlier version: made anew
    if store.model_length != spec.model_length or (spec.strict and store.counts.n_duplicate_ids):
        return False

    def look(item: Piece | ReadBatch) -> Future[Seen]:
        return crew.submit(Look(to_send(item)))

    fingerprint = fingerprint_for(spec.model_length)
    for seen in in_order(inputs.files, log.log, look, ahead=crew.ahead):
        fingerprint.add(seen.leaves)
    return fingerprint.hexdigest() == store.fingerprint


class _SkipLog:
    """The parser's log, with its broken records written to a list as they come."""

    def __init__(self, on_error: OnError, listing: TextIO | None) -> None:
        self._on_error, self._listing = on_error, listing
        self.log = ParseLog()
        self.start_over()

    def start_over(self) -> None:
        """Forget what was counted and listed."""
        self.log = ParseLog(self._on_error, self._note)
        if self._listing is not None:
            self._listing.seek(0)
            self._listing.truncate()
            self._listing.write("file\tline\tread\tproblem\n")

    def _note(self, skipped: Skipped) -> None:
        if self._listing is not None:
            fields = (skipped.file, skipped.line, skipped.read_id, skipped.problem)
            cells = ["" if cell is None else re.sub(r"\s", " ", str(cell)) for cell in fields]
            self._listing.write("\t".join(cells) + "\n")


@contextmanager
def _skip_list(spec: StageSpec, out: Path, folder: Path) -> Iterator[_SkipLog]:
    if spec.on_error == "stop":
        yield _SkipLog(spec.on_error, None)
        return
    draft = folder / SKIPPED_LIST
    with draft.open("w", encoding="utf-8", errors="backslashreplace") as listing:
        yield _SkipLog(spec.on_error, listing)
    with whole_file(out.with_name(SKIPPED_LIST)) as aside:
        shutil.copyfile(draft, aside)


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder beside `out` for this run of staging; those that killed runs left behind are removed too."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    folder = out.with_name(f".{out.name}.{os.getpid()}.scratch")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(out: Path) -> None:
    for entry in out.parent.glob(f".{out.name}.*"):
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.(scratch|part)", entry.name)
        if match is None or psutil.pid_exists(int(match[1])):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
