"""Find out which reads belong to which sample, and write the table of the samples' results.

A sample sheet tells the samples, or the names of files, or the read groups of alignments.
"""

import csv
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from virnuc_core.config import ReadsSpec, read_small_text, refuse_unreadable
from virnuc_core.errors import ConfigError, InputError, join_first
from virnuc_core.reads.pairs import detect_pairs
from virnuc_core.reads.sources import (
    ENDINGS,
    STDIN,
    Inputs,
    find_alignment_format_of_file,
    find_inputs,
    is_remote,
    redact_url,
    sample_name,
)
from virnuc_core.reads.stage import REMARKS, StageSummary
from virnuc_core.rundir import GUARDED_FILES, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary

COLUMNS: Final = ("sample", "fastq_1", "fastq_2")  # the names that nf-core uses
MAX_SHEET_BYTES: Final = 1 << 22
NAME: Final = re.compile(r"(?![ .-])[\w.+=@,() -]{1,100}(?<![ .])")  # of a sample
LANE: Final = re.compile(r"(?<=.)_L\d{3}\Z")
_SCORED_FATES: Final = ("viral", "others", "uncertain")
log = logging.getLogger(__name__)

Lane = tuple[str, ...]  # one file of reads, or a file of first mates and one of second mates


class SampleRow(RunFile):
    """One line of samples.tsv."""

    sample: str  # also the name of its run directory
    fate: Literal["predicted", "failed", "waiting"] = "waiting"
    reads: int | None = None
    scored: int | None = None  # reads with a viral score
    viral: int | None = None
    share: float | None = None  # of all reads, those that are viral
    flags: str = ""  # remarks on the reads: `name=count`, joined by commas
    note: str = ""  # why it failed


def summarize_sample(sample: str, summary: RunSummary, staging: StageSummary) -> SampleRow:
    """Return the line of samples.tsv for a sample that was predicted."""
    fates = summary.fates
    n_reads = staging.counts.n_reads
    remarks = {name: staging.tally[name] for name in REMARKS}
    remarks["failed"] = fates.get("failed", 0)
    remarks["orphans"] = sum(file.orphans for file in staging.by_file)
    return SampleRow(
        sample=sample,
        fate="predicted",
        reads=n_reads,
        scored=sum(fates.get(fate, 0) for fate in _SCORED_FATES),
        viral=fates["viral"],
        share=round(fates["viral"] / max(1, n_reads), 6),
        flags=",".join(f"{name}={count}" for name, count in remarks.items() if count),
    )


def write_samples(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write samples.tsv; it appears when it is complete."""
    lines = ["\t".join(SampleRow.model_fields)]
    for row in rows:
        cells: list[str] = []
        for _, value in row:
            text = "" if value is None else str(value)
            cells.append(" ".join(text.split()))  # on one line
        lines.append("\t".join(cells))
    write_text_atomically(path, "".join(line + "\n" for line in lines))


class _SheetLine(NamedTuple):
    """The cells of one line of a sample sheet."""

    sample: str
    first_file: str
    second_file: str
    surplus: str  # text beyond the last column

    @property
    def is_blank(self) -> bool:
        """Return True for a line of empty cells, as spreadsheets leave it."""
        return not any(self)


def read_sheet(path: Path) -> dict[str, ReadsSpec]:
    """Read the samples of a comma- or TAB-separated sample sheet.

    A sample may have several lines, one per lane. Its lanes are joined. Relative paths start at the
    working directory or, if there is no such file, at the folder of the sheet. This function does
    not check whether the files exist.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: The sheet cannot be used. The message names the line.
    """
    with refuse_unreadable(path, "UTF-8", InputError):
        text = read_small_text(path, MAX_SHEET_BYTES)
    lines = text.removeprefix("\ufeff").splitlines()
    is_tab_separated = bool(lines) and "\t" in lines[0]
    table = csv.DictReader(
        lines, delimiter="\t" if is_tab_separated else ",", skipinitialspace=True
    )
    lanes_by_sample = defaultdict[str, list[Lane]](list)
    try:
        table.fieldnames = _check_columns(path, table.fieldnames or ())
        for row in table:
            line = _parse_line(row)
            if line.is_blank:
                continue
            cells = (line.first_file, line.second_file)
            lane = tuple(_resolve(path, cell) for cell in cells if cell)
            problem = _find_problem(line, lane, lanes_by_sample[line.sample])
            if problem:
                raise InputError(
                    f"sample '{join_first([line.sample])}': {problem}",
                    file=path,
                    line=table.line_num,
                )
            lanes_by_sample[line.sample].append(lane)
    except csv.Error as error:  # a cell is longer than csv allows
        # `table.line_num` counts only the lines of complete rows, so the inner reader is asked.
        raise InputError(
            f"{error}; is a quotation mark left open?", file=path, line=table.reader.line_num
        ) from error
    if not lanes_by_sample:
        raise InputError(
            "names no sample", file=path, hint="write a line for each, below that of the columns"
        )
    return {sample: _join_lanes(lanes) for sample, lanes in lanes_by_sample.items()}


def _check_columns(path: Path, names: Sequence[str]) -> list[str]:
    """Return the names of a sheet's columns without blanks around them.

    Raises:
        InputError: A required column is missing. In a sheet with more than two columns, `fastq_2`
            is required as well: if it had another name, the second mates would silently be ignored.
    """
    columns = [name.strip() for name in names]
    required_columns = COLUMNS if len(columns) > 2 else COLUMNS[:2]
    for name in required_columns:
        if name not in columns:
            raise InputError(
                f"no column {name}; the first line names {', '.join(COLUMNS)}", file=path, line=1
            )
    return columns


def _parse_line(row: dict[Any, Any]) -> _SheetLine:
    """Return the cells of a row of `csv.DictReader`, without blanks around them."""
    sample, first_file, second_file = ((row.get(name) or "").strip() for name in COLUMNS)
    surplus = "".join(row.get(None, ())).strip()
    return _SheetLine(sample, first_file, second_file, surplus)


def _find_problem(line: _SheetLine, lane: Lane, earlier_lanes: list[Lane]) -> str:
    """Return what is wrong with a line of a sheet and how to mend it, or an empty string.

    Args:
        line: The line.
        lane: The files of the line.
        earlier_lanes: The files of earlier lines of the same sample.
    """
    if line.surplus:
        return "more cells than columns"
    problem = _find_name_problem(line.sample)
    if problem:
        return problem
    if not line.first_file or STDIN in lane:
        return "no file in fastq_1; name one, of pairs that of the first mates"
    files = list(lane)
    for earlier_lane in earlier_lanes:
        files += earlier_lane
    for file in lane:
        if files.count(file) > 1:
            return f"{file} is named twice; name it once"
    if earlier_lanes and len(earlier_lanes[0]) != len(lane):
        return (
            "has lanes with fastq_2 and without; name both mates of each, or give it another name"
        )
    return ""


def _find_name_problem(sample: str) -> str:
    """Return why a sample name cannot be the name of a run directory, or an empty string."""
    if not NAME.fullmatch(sample):
        return "not the name of a directory; use letters, digits and _ . - + = @"
    for pattern in GUARDED_FILES:
        first_part = pattern.split("/")[0]
        if fnmatch(sample, first_part):
            return "a name of virnuc's own in a results directory; use another"
    return ""


def _resolve(sheet: Path, name: str) -> str:
    """Return the path, or the redacted address, that a cell of a sheet names."""
    path_beside_sheet = str(sheet.parent / name)
    # `Path.exists` raises an error for a name that is too long; `os.path.exists` returns False.
    is_here = os.path.exists(name)  # noqa: PTH110
    is_beside_sheet = os.path.exists(path_beside_sheet)  # noqa: PTH110
    if is_beside_sheet and not is_here and not is_remote(name):
        return path_beside_sheet
    return redact_url(name)


def _join_lanes(lanes: list[Lane]) -> ReadsSpec:
    """Return the reads of a sample with several lanes.

    Either all lanes have one file, or all lanes have two files of mates.
    """
    first_files = tuple(lane[0] for lane in lanes)
    if len(lanes[0]) == 1:
        return ReadsSpec(reads=first_files)
    second_files = tuple(lane[1] for lane in lanes)
    return ReadsSpec(mates_1=first_files, mates_2=second_files)


def samples_by_read_group(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """Return the samples in BAM, CRAM and SAM files, by their read groups.

    Reads without a read group form a sample with the name of the file.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: A file is not BAM, CRAM or SAM, or an error of `find_inputs` or `find_samples`.
        ConfigError: The name of a sample cannot be the name of a run directory.
    """
    from virnuc_core.reads.alignments import find_samples  # imported late: rarely used

    files_by_sample = defaultdict[str, list[str]](list)
    for file in find_inputs(spec.named).files:
        format_ = find_alignment_format_of_file(file)
        if not format_:
            raise InputError("not a BAM, CRAM or SAM file, which alone have read groups", file=file)
        changed_ns = Path(file).stat().st_mtime_ns
        for sample in find_samples(file, format_, sample_name((file,)), changed_ns):
            problem = _find_name_problem(sample)
            if problem:
                raise ConfigError(
                    f"{file}: read groups of '{sample}': {problem} in their SM "
                    "(samtools addreplacerg)"
                )
            files_by_sample[sample].append(file)
    return {
        sample: ReadsSpec(reads=tuple(files), read_group=sample)
        for sample, files in files_by_sample.items()
    }


def samples_by_file_name(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """Return the samples of a folder or of files, by the names of the files.

    Each file, or pair of files, is a sample. Files whose names differ only by the lane (`_L001`)
    are joined to one sample.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: See `find_inputs`.
        ConfigError: A name cannot be the name of a run directory, or two samples have the same
            name.
    """
    lanes_by_sample = defaultdict[str, list[Lane]](list)
    lane_names = set[str]()
    for files in _find_named_reads(spec).groups:
        lane_name = sample_name(files)
        sample = LANE.sub("", lane_name)
        lanes = lanes_by_sample[sample]
        is_mixed = bool(lanes) and len(lanes[0]) != len(files)  # of pairs and single files
        if lane_name in lane_names or is_mixed:
            problem = f"named as {lanes[0][0]} is; rename one"
        else:
            problem = _find_name_problem(sample)
        if problem:
            raise ConfigError(f"{files[0]}: {problem}, or write a sample sheet")
        lane_names.add(lane_name)
        lanes.append(files)
    return {sample: _join_lanes(lanes) for sample, lanes in lanes_by_sample.items()}


def _find_named_reads(spec: ReadsSpec) -> Inputs:
    """Return all files that are named like files of reads, and the pairs among them.

    `find_inputs` leaves out files of a folder that contain no reads. Such a file is added here if
    its name is that of a file of reads, so that an empty file is reported as a failed sample.
    """
    inputs = find_inputs(spec.named)
    files = list(inputs.files)
    for name in inputs.ignored:
        match = ENDINGS.search(Path(name).name)
        if match is not None and match[1]:
            files.append(name)
    # Files that the user named one by one are otherwise never paired. For samples by file name
    # they are, as in a folder.
    spec_without_names = spec.model_copy(update={"reads": ()})
    return detect_pairs(spec_without_names, inputs._replace(files=tuple(files)))
