"""Staging: files of reads to one ORF store, made once for the same reads and settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TextIO

import psutil
from pydantic import Field

from virnuc_core.config import DEFAULT_MODEL_LENGTH, Spec
from virnuc_core.errors import ConfigError, InputError, RunMismatchError
from virnuc_core.reads.frames import each_with_frames
from virnuc_core.reads.parse import OnError, ParseLog, ReadBatch, Skipped, parse
from virnuc_core.reads.sources import STDIN, Inputs, find_inputs
from virnuc_core.reads.store import OrfStore, StoreCounts
from virnuc_core.reads.write import Fingerprint, StoreWriter
from virnuc_core.rundir import whole_file, write_text_whole

SKIPPED_LIST: Final = "skipped.tsv"


class StageSpec(Spec):
    """What is staged, and how strictly."""

    reads: tuple[str, ...] = Field(min_length=1, description="FASTA or FASTQ files or folders; - is standard input")
    model_length: int = Field(DEFAULT_MODEL_LENGTH, ge=1, description="the head's model length: chunk size in bases")
    workers: int = Field(1, ge=1, le=256, description="processes that translate; results do not depend on it")
    on_error: OnError = Field("stop", description="skip: leave broken records out, count and list them")
    strict: bool = Field(False, description="refuse reads that share an id")


@dataclass(frozen=True, slots=True)
class MadeIn:
    """Seconds that making a store took."""

    parse_s: float
    chunk_s: float
    translate_s: float
    store_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What staging read and made."""

    store: Path
    fingerprint: str
    reused: bool  # the store was there already, made from the same reads with the same settings
    model_length: int
    counts: StoreCounts
    files: tuple[str, ...]
    ignored_files: tuple[str, ...]  # in a named folder, neither FASTA nor FASTQ
    empty_files: int
    skipped_records: int
    skipped_list: Path | None  # where they are listed
    unnamed_reads: int  # had no id and were given one
    parse_s: float  # this and the four below: when the store was made, also where it was reused now
    chunk_s: float  # summed over workers
    translate_s: float  # summed over workers
    store_s: float
    total_s: float
    checked_s: float  # what this call took

    @property
    def reads_per_s(self) -> float:
        """Reads staged per second of wall time."""
        return self.counts.n_reads / self.total_s if self.total_s > 0 else 0.0


@dataclass(slots=True)
class _Clock:
    """Seconds by stage."""

    started: float = field(default_factory=time.perf_counter)
    parse_s: float = 0.0
    chunk_s: float = 0.0
    translate_s: float = 0.0
    store_s: float = 0.0

    def timed(self, batches: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
        """The batches, with the time they take counted as parsing."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.parse_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch


def stage(spec: StageSpec, out: Path, *, may_replace: bool = True) -> StageSummary:
    """Read everything, cut it, translate it and write the store `out`; or find that it is there already.

    The store appears whole or not at all. Skipped records are listed in `skipped.tsv` beside it.
    Errors: `InputError` for reads that cannot be used; `ConfigError` when `out` cannot be written; `RunMismatchError`
    when `out` holds other reads and may not be replaced.
    """
    clock = _Clock()
    inputs = find_inputs(spec.reads)
    try:
        with _scratch(out) as folder, _skip_list(spec, out, folder) as log:
            reused = _is_current(spec, inputs, out, log, clock)
            if not reused:
                if out.exists() and not may_replace:
                    raise RunMismatchError(
                        f"{out.parent} holds a run of other reads, or of reads cut otherwise; "
                        "choose another directory or --force"
                    )
                log.start_over()
                _write(spec, inputs, out, folder, log, clock)
    except OSError as error:  # reading tells its troubles by InputError: this is the output's
        raise ConfigError(
            f"{out}: cannot be written: {error.strerror or error}; make room or choose a place"
        ) from error
    counted = log.log
    store = OrfStore.open(out)
    checked_s = time.perf_counter() - clock.started
    made = _made_in(out, store.fingerprint) if reused else None
    if made is None:
        made = MadeIn(clock.parse_s, clock.chunk_s, clock.translate_s, clock.store_s, checked_s)
    if not reused:
        write_text_whole(_made_path(out), json.dumps({"fingerprint": store.fingerprint, **asdict(made)}) + "\n")
    return StageSummary(
        store=out,
        fingerprint=store.fingerprint,
        reused=reused,
        model_length=store.model_length,
        counts=store.counts,
        files=inputs.files,
        ignored_files=inputs.ignored,
        empty_files=counted.empty_files,
        skipped_records=counted.skipped,
        skipped_list=out.with_name(SKIPPED_LIST) if spec.on_error == "skip" else None,
        unnamed_reads=counted.unnamed,
        parse_s=made.parse_s,
        chunk_s=made.chunk_s,
        translate_s=made.translate_s,
        store_s=made.store_s,
        total_s=made.total_s,
        checked_s=checked_s,
    )


def _made_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.made.json")


def _made_in(out: Path, fingerprint: str) -> MadeIn | None:
    """What making the store took; None where that was not kept, or belongs to another store."""
    try:
        body = json.loads(_made_path(out).read_text(encoding="utf-8"))
        return MadeIn(**body) if body.pop("fingerprint") == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(spec: StageSpec, inputs: Inputs, out: Path, folder: Path, log: _SkipLog, clock: _Clock) -> None:
    writer = StoreWriter(folder, spec.model_length, inputs.files, strict=spec.strict)
    try:
        batches = clock.timed(parse(inputs.files, log.log))
        for batch, frames in each_with_frames(batches, spec.model_length, spec.workers):
            before = time.perf_counter()
            writer.add(batch, frames)
            clock.chunk_s += frames.chunk_s
            clock.translate_s += frames.translate_s
            clock.store_s += time.perf_counter() - before
        before = time.perf_counter()
        writer.finish(out)
        clock.store_s += time.perf_counter() - before
    finally:
        writer.close()


def _is_current(spec: StageSpec, inputs: Inputs, out: Path, log: _SkipLog, clock: _Clock) -> bool:
    """Whether `out` holds these very reads already: they are read again, which takes a fraction of staging them."""
    if not out.is_file() or not all(_can_be_read_twice(name) for name in inputs.files):
        return False
    try:
        store = OrfStore.open(out)
    except InputError:
        return False  # unreadable, or of an earlier version: made anew
    if store.model_length != spec.model_length or (spec.strict and store.counts.n_duplicate_ids):
        return False
    fingerprint = Fingerprint(spec.model_length)
    for batch in clock.timed(parse(inputs.files, log.log)):
        fingerprint.add(batch)
    return fingerprint.hexdigest() == store.fingerprint


def _can_be_read_twice(name: str) -> bool:
    return name != STDIN and stat.S_ISREG(Path(name).stat().st_mode)


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
