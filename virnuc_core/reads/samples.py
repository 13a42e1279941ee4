"""Samples: which reads are whose, by a sheet or by the names of files; and the table of what became of them."""

import csv
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

from virnuc_core.config import ReadsSpec, read_small_text, refuse_unreadable
from virnuc_core.errors import ConfigError, InputError, join_first
from virnuc_core.reads.pairs import detect_pairs
from virnuc_core.reads.sources import (
    ENDINGS,
    STDIN,
    find_alignment_format_of_file,
    find_inputs,
    is_remote,
    redact_url,
    sample_name,
)
from virnuc_core.reads.stage import REMARKS, StageSummary
from virnuc_core.rundir import GUARDED_FILES, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary

COLUMNS: Final = ("sample", "fastq_1", "fastq_2")  # nf-core's
SHEET_BYTES: Final = 1 << 22
NAME: Final = re.compile(r"(?![ .-])[\w.+=@,() -]{1,100}(?<![ .])")
LANE: Final = re.compile(r"(?<=.)_L\d{3}\Z")
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
    scored, share = (
        sum(fates.get(one, 0) for one in ("viral", "others", "uncertain")),
        fates["viral"] / max(1, reads),
    )
    flags = ",".join(f"{name}={count}" for name, count in met.items() if count)
    told = {
        "reads": reads,
        "scored": scored,
        "viral": fates["viral"],
        "share": round(share, 6),
        "flags": flags,
    }
    return SampleRow.model_validate({"sample": sample, "fate": "predicted", **told})


def write_samples(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write samples.tsv whole."""
    lines = [
        [*SampleRow.model_fields],
        *(["" if cell is None else cell for _, cell in row] for row in rows),
    ]
    write_text_atomically(
        path,
        "".join("\t".join(" ".join(str(cell).split()) for cell in line) + "\n" for line in lines),
    )


def read_sheet(path: Path) -> dict[str, ReadsSpec]:
    """The reads of each sample of a sheet, comma- or TAB-separated; a sample's rows are its lanes, joined. Paths are
    those of the working directory, or else of the sheet's. Whether they are there shows when they are read. Errors:
    `InputError` names the sheet and the line."""
    with refuse_unreadable(path, "UTF-8", InputError):
        lines = read_small_text(path, SHEET_BYTES).removeprefix("\ufeff").splitlines()
    table = csv.DictReader(
        lines, delimiter="\t" if "\t" in "".join(lines[:1]) else ",", skipinitialspace=True
    )
    found = defaultdict[str, list[tuple[str, ...]]](list)
    try:
        table.fieldnames = columns = [name.strip() for name in table.fieldnames or ()]
        # beside others a column of mates may be empty, and must be there: by another name it would be passed over
        if missing := [
            name for name in COLUMNS[: 3 if len(columns) > 2 else 2] if name not in columns
        ]:
            raise InputError(
                f"no column {missing[0]}; the first line names {', '.join(COLUMNS)}",
                file=path,
                line=1,
            )
        for row in table:
            sample, *cells = ((row.get(name) or "").strip() for name in COLUMNS)
            beyond = "".join(row.get(None, ())).strip()
            if not (sample or any(cells) or beyond):
                continue  # as a spreadsheet leaves it
            names = tuple(_found(path, name) for name in cells if name)
            wrong = _unfit(sample) or _wrong(cells[0], names, found[sample])
            if problem := "more cells than columns" if beyond else wrong:
                raise InputError(
                    f"sample '{join_first([sample])}': {problem}", file=path, line=table.line_num
                )
            found[sample].append(names)
    except (
        csv.Error
    ) as error:  # of a cell beyond any name of a file; `table` counts the lines that it gave
        raise InputError(
            f"{error}; is a quotation mark left open?", file=path, line=table.reader.line_num
        ) from error
    if not found:
        raise InputError(
            "names no sample", file=path, hint="write a line for each, below that of the columns"
        )
    return {sample: _spec(lanes) for sample, lanes in found.items()}


def _unfit(sample: str) -> str:
    """Why a name is none for a run directory, and the way out; "" if it is one."""
    if not NAME.fullmatch(sample):
        return "not the name of a directory; use letters, digits and _ . - + = @"
    ours = any(fnmatch(sample, pattern.split("/")[0]) for pattern in GUARDED_FILES)
    return "a name of virnuc's own in a results directory; use another" if ours else ""


def _wrong(first: str, names: tuple[str, ...], before: list[tuple[str, ...]]) -> str:
    """What is wrong with the files of a line, and the way out; "" for nothing."""
    if not first or STDIN in names:
        return "no file in fastq_1; name one, of pairs that of the first mates"
    if len(named := [*sum(before, ()), *names]) > len({*named}):
        return f"{max(names, key=named.count)} is named twice; name it once"
    mixed = before and len(before[0]) != len(names)
    return (
        "has lanes with fastq_2 and without; name both mates of each, or give it another name"
        if mixed
        else ""
    )


def _found(sheet: Path, name: str) -> str:
    beside = str(sheet.parent / name)
    here, there = map(os.path.exists, (name, beside))  # False where a name is too long
    return beside if there and not here and not is_remote(name) else redact_url(name)


def _spec(lanes: list[tuple[str, ...]]) -> ReadsSpec:
    sides = [tuple(side) for side in zip(*lanes, strict=True)]
    return ReadsSpec(
        **dict(zip(("reads",) if len(sides) == 1 else ("mates_1", "mates_2"), sides, strict=True))
    )


def by_read_group(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """The samples of BAM, CRAM and SAM files, by their read groups; what is of none is a sample by its file's name.
    Errors: those of `find_inputs` and `find_samples`; `InputError` for other files; `ConfigError` for unfit names."""
    from virnuc_core.reads.alignments import find_samples  # few files are such

    files_of = defaultdict[str, list[str]](list)
    for file in find_inputs(spec.named).files:
        if not (form := find_alignment_format_of_file(file)):
            raise InputError("not a BAM, CRAM or SAM file, which alone have read groups", file=file)
        for sample in find_samples(file, form, sample_name((file,)), Path(file).stat().st_mtime_ns):
            if problem := _unfit(sample):
                raise ConfigError(
                    f"{file}: read groups of '{sample}': {problem} in their SM (samtools addreplacerg)"
                )
            files_of[sample].append(file)
    return {
        sample: ReadsSpec(reads=tuple(files), read_group=sample)
        for sample, files in files_of.items()
    }


def by_name(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """The inputs as samples, each file or pair of files by its name; those that differ by lane (`_L001`) are joined.
    Errors: those of `find_inputs`; `ConfigError` for names that are not fit, or the same though no lane tells why."""
    inputs = find_inputs(spec.named)
    # what a folder holds under the name of reads without being any, empty files above all, is a sample that fails
    named_so = (
        name for name in inputs.ignored if (told := ENDINGS.search(Path(name).name)) and told[1]
    )
    # as in a folder, files with mates are known by their names
    inputs = detect_pairs(
        spec.model_copy(update={"reads": ()}), inputs._replace(files=(*inputs.files, *named_so))
    )
    found, whole = defaultdict[str, list[tuple[str, ...]]](list), set[str]()
    for names in (
        *(tuple(dict.fromkeys(pair)) for pair in inputs.pairs),
        *((name,) for name in inputs.singles),
    ):
        named = sample_name(names)
        before, problem = found[LANE.sub("", named)], _unfit(LANE.sub("", named))
        if named in whole or (before and len(before[0]) != len(names)):
            problem = f"named as {before[0][0]} is; rename one"
        if problem:
            raise ConfigError(f"{names[0]}: {problem}, or write a sample sheet")
        whole.add(named)
        before.append(names)
    return {sample: _spec(lanes) for sample, lanes in found.items()}
