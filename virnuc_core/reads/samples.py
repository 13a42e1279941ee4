"""Samples: which reads are whose, by a sheet or by the names of files; and the table of what became of them."""

from __future__ import annotations

import csv
import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

from virnuc_core.config import ReadsSpec, reading, small_text
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.pairs import arranged
from virnuc_core.reads.sources import STDIN, find_inputs, hidden, is_remote, sample_of
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import GUARDED, write_text_whole
from virnuc_core.runfiles import RunFile, RunSummary

COLUMNS: Final = ("sample", "fastq_1", "fastq_2")  # nf-core's
SHEET_BYTES: Final = 1 << 22
NAME: Final = re.compile(r"(?![ .-])[\w.+=@,() -]{1,100}(?<![ .])")
LANE: Final = re.compile(r"(?<=.)_L\d{3}\Z")
REMARKS: Final = ("short_for_model", "ambiguous", "duplicate_ids", "skipped")
log = logging.getLogger(__name__)


class SampleRow(RunFile):
    """One line of samples.tsv."""

    sample: str  # its run directory's name, too
    fate: Literal["predicted", "failed", "waiting"] = "waiting"
    reads: int | None = None
    scored: int | None = None  # reads with a viral score
    viral: int | None = None
    share: float | None = None  # of all reads, those that are viral
    flags: str = ""  # what was met among the reads, `name=count` joined by commas
    note: str = ""  # why it failed


def row_of(sample: str, summary: RunSummary, staging: StageSummary) -> SampleRow:
    """What a sample that was predicted came to."""
    fates, reads = summary.fates, staging.counts.n_reads
    met = {name: staging.tally[name] for name in REMARKS} | {"failed": fates.get("failed", 0)}
    met["orphans"] = sum(one.orphans for one in staging.by_file)
    viral, uncertain = fates.get("viral", 0), fates.get("uncertain", 0)
    return SampleRow(
        sample=sample,
        fate="predicted",
        reads=reads,
        scored=viral + fates.get("others", 0) + uncertain,
        viral=viral,
        share=round(viral / reads, 6) if reads else None,
        flags=",".join(f"{name}={count}" for name, count in met.items() if count),
    )


def write_samples(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write samples.tsv whole."""
    lines = [[*SampleRow.model_fields], *(["" if cell is None else cell for _, cell in row] for row in rows)]
    write_text_whole(path, "".join("\t".join(" ".join(str(cell).split()) for cell in line) + "\n" for line in lines))


def read_sheet(path: Path) -> dict[str, ReadsSpec]:
    """The reads of each sample of a sheet, comma- or TAB-separated; a sample's rows are its lanes, joined. Paths are
    those of the working directory, or else of the sheet's. Whether the files are there shows when they are read.
    Errors: `InputError` names the sheet and the line."""
    with reading(path, "a sample sheet", InputError):
        lines = small_text(path, SHEET_BYTES).removeprefix("\ufeff").splitlines()
    table = csv.DictReader(lines, delimiter="\t" if "\t" in "".join(lines[:1]) else ",", restval="")
    if missing := [name for name in COLUMNS[:2] if name not in (table.fieldnames or ())]:
        told = f"no column {missing[0]}; the first line names the columns {', '.join(COLUMNS)}"
        raise InputError(told, file=path, line=1)
    found = defaultdict[str, list[tuple[str, ...]]](list)
    for row in table:
        sample, first, second = ((row.get(name) or "").strip() for name in COLUMNS)
        names = tuple(_found(path, name) for name in (first, second) if name)
        if problem := _wrong(sample, first, names, found[sample]):
            raise InputError(problem, file=path, line=table.line_num)
        found[sample].append(names)
    if not found:
        raise InputError("names no sample", file=path, hint="write a line for each, below that of the columns")
    return {sample: _spec(lanes) for sample, lanes in found.items()}


def _wrong(sample: str, first: str, names: tuple[str, ...], before: list[tuple[str, ...]]) -> str:
    """What is wrong with a line of a sheet, and the way out; "" for nothing."""
    if not sample:
        return "no sample's name; give it one"
    if reason := _unfit(sample):
        return reason
    if not first:
        return f"sample '{sample}' has no fastq_1; name its file, of pairs that of the first mates"
    if STDIN in names:
        return f"sample '{sample}': standard input has no place in a sheet; name a file"
    if len(named := [*sum(before, ()), *names]) > len({*named}):
        return f"sample '{sample}': {max(names, key=named.count)} is named twice; name it once"
    if before and len(before[0]) != len(names):
        return f"sample '{sample}' has lanes with fastq_2 and without; name both mates of each, or give it another name"
    return ""


def _unfit(sample: str) -> str:
    """Why a name is none for a run directory; "" if it is one."""
    if not NAME.fullmatch(sample):
        return f"'{sample}' cannot name a sample's directory; use letters, digits and _ . - + = @"
    if any(fnmatch(sample, pattern.split("/")[0]) for pattern in GUARDED):
        return f"'{sample}' is a name of virnuc's own in a results directory; use another"
    return ""


def _found(sheet: Path, name: str) -> str:
    beside = sheet.parent / name
    return hidden(name) if is_remote(name) or Path(name).exists() or not beside.exists() else str(beside)


def _spec(lanes: list[tuple[str, ...]]) -> ReadsSpec:
    sides = [tuple(side) for side in zip(*lanes, strict=True)]
    return ReadsSpec(**dict(zip(("reads",) if len(sides) == 1 else ("mates_1", "mates_2"), sides, strict=True)))


def by_name(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """The inputs as samples, each file or pair of files by its name; those that differ by lane (`_L001`) are joined.
    Errors: those of `find_inputs`; `ConfigError` for names that are not fit, or the same though no lane tells why."""
    # as in a folder, files with mates are known by their names
    inputs = arranged(spec.model_copy(update={"reads": ()}), find_inputs(spec.named))
    found, whole = defaultdict[str, list[tuple[str, ...]]](list), dict[str, str]()
    for names in (*(tuple(dict.fromkeys(pair)) for pair in inputs.pairs), *((name,) for name in inputs.singles)):
        named = sample_of(names)
        sample = LANE.sub("", named)
        if reason := _unfit(sample):
            raise ConfigError(f"{names[0]}: {reason}, or write a sample sheet")
        if whole.setdefault(named, names[0]) != names[0] or (found[sample] and len(found[sample][0]) != len(names)):
            other = found[sample][0][0]
            raise ConfigError(f"{other} and {names[0]} are both named '{sample}'; rename one, or write a sample sheet")
        found[sample].append(names)
    return {sample: _spec(lanes) for sample, lanes in found.items()}
