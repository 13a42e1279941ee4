"""Find out which reads belong to which sample, and write the table with the result of each sample.

A sample is all files of one specimen. Samples are given by a sample sheet, by the names of files,
or by the read groups of alignments.
"""

import csv
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from virnuc_core.config import ReadsSpec, read_small_text, refuse_unreadable
from virnuc_core.errors import ConfigError, InputError, join_first
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.reads.file_names import ENDINGS, group_samples
from virnuc_core.reads.mate_files import detect_pairs
from virnuc_core.reads.sources import (
    Inputs,
    find_alignment_format_of_file,
    find_inputs,
    redact_url,
    sample_name,
)
from virnuc_core.reads.stage import REMARKS, StageSummary
from virnuc_core.rundir import GUARDED_FILES, write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary
from virnuc_core.spreadsheets import escape_formula
from virnuc_core.system_errors import target_exists

COLUMNS: Final = ("sample", "fastq_1", "fastq_2")  # the names that nf-core uses
MAX_SHEET_BYTES: Final = 1 << 22  # a larger file is not a sample sheet
# The name of a sample is also the name of a folder: no slash, no blank or dot at its ends.
NAME: Final = re.compile(r"(?![ .-])[\w.+=@,() -]{1,100}(?<![ .])")
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
    note: str = ""  # why the sample failed


def summarize_sample(sample: str, summary: RunSummary, staging: StageSummary) -> SampleRow:
    """Return the line of samples.tsv for a sample that was predicted.

    Args:
        sample: The name of the sample.
        summary: The summary of its run. It counts the reads by their fate (viral, others, …).
        staging: The summary of reading its files.
    """
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
        share=round(fates["viral"] / max(1, n_reads), 6),  # 0 if there are no reads
        flags=",".join(f"{name}={count}" for name, count in remarks.items() if count),
    )


def write_samples(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write samples.tsv, with one line per sample. The file appears only when it is complete.

    A name or note that begins like a formula gets a leading apostrophe.

    Args:
        path: The file.
        rows: The lines, in their order in the file.
    """
    lines = ["\t".join(SampleRow.model_fields)]
    for row in rows:
        cells: list[str] = []
        for _, value in row:
            text = "" if value is None else str(value)
            text = " ".join(text.split())  # without line ends and TABs
            if isinstance(value, str):  # numbers come from us
                text = escape_formula(text)
            cells.append(text)
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
        """Return True for a line of empty cells, which spreadsheet programs may write."""
        return not any(self)


def read_sheet(path: Path) -> dict[str, ReadsSpec]:
    """Read a sample sheet, a table with commas or TABs between the cells.

    A sample may have several lines, one per lane of the sequencer. Their files are joined. A
    relative path is searched in the working directory, then in the folder of the sheet. Files that
    do not exist are reported later, when they are read.

    Args:
        path: The sheet.

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
    except csv.Error as error:
        # A cell is longer than the limit of the csv module. `table.line_num` counts only the lines
        # of complete rows, so take the line number of the underlying reader.
        raise InputError(
            f"{error}; is a quotation mark left open?", file=path, line=table.reader.line_num
        ) from error
    if not lanes_by_sample:
        raise InputError(
            "the sheet names no sample",
            file=path,
            hint="write one line per sample, below the line with the names of the columns",
        )
    return {sample: _join_lanes(lanes) for sample, lanes in lanes_by_sample.items()}


def _check_columns(path: Path, names: Sequence[str]) -> list[str]:
    """Return the names of the columns of a sheet, without blanks around them.

    Raises:
        InputError: A required column is missing. A sheet with more than two columns must have the
            column of second mates, although its cells may be empty. Otherwise a column of second
            mates under another name would be ignored.
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
    """Return the cells of one line of a sheet, without blanks around them.

    Args:
        row: The line as `csv.DictReader` returns it. Missing cells are None, and cells after the
            last column are listed under the key None.
    """
    sample, first_file, second_file = ((row.get(name) or "").strip() for name in COLUMNS)
    surplus = "".join(row.get(None, ())).strip()
    return _SheetLine(sample, first_file, second_file, surplus)


def _find_problem(line: _SheetLine, lane: Lane, earlier_lanes: list[Lane]) -> str:
    """Return what is wrong with a line of a sheet and how to correct it; empty if it is good.

    Args:
        line: The line.
        lane: The files of the line.
        earlier_lanes: The files of the same sample on earlier lines.
    """
    if line.surplus:
        return "more cells than columns"
    problem = _find_name_problem(line.sample)
    if problem:
        return problem
    if not line.first_file or STDIN in lane:
        return "no file in fastq_1; name a file, for pairs the file of the first mates"
    files = list(lane)
    for earlier_lane in earlier_lanes:
        files += earlier_lane
    for file in lane:
        if files.count(file) > 1:
            return f"{file} is named twice; name it once"
    if earlier_lanes and len(earlier_lanes[0]) != len(lane):
        return (
            "some of its lines have a file in fastq_2 and some have none; "
            "name both files on each line, or use two names for the sample"
        )
    return ""


def _find_name_problem(sample: str) -> str:
    """Return why a sample name cannot be used as a directory name; empty if it can be used.

    The name must not be the name of a file that virnuc writes into a results directory.
    """
    if not NAME.fullmatch(sample):
        return "not the name of a directory; use letters, digits and _ . - + = @"
    for pattern in GUARDED_FILES:
        first_part = pattern.split("/")[0]
        if fnmatch(sample, first_part):
            return "virnuc writes a file of this name itself; use another name"
    return ""


def _resolve(sheet: Path, name: str) -> str:
    """Return the path, or the address without its query, that a cell of a sheet names.

    Args:
        sheet: The sheet. A relative path is also searched in its folder.
        name: The text of the cell.

    Raises:
        UnreadableError: It is not known which of the two paths exists.
    """
    path_beside_sheet = str(sheet.parent / name)
    if is_remote(name) or target_exists(Path(name)):
        return redact_url(name)
    if target_exists(Path(path_beside_sheet)):
        return path_beside_sheet
    return redact_url(name)


def _join_lanes(lanes: list[Lane]) -> ReadsSpec:
    """Return the reads of a sample, with the files of all its lanes.

    Args:
        lanes: One tuple per lane: one file of reads, or two files of mates. All have the same
            length.
    """
    first_files = tuple(lane[0] for lane in lanes)
    if len(lanes[0]) == 1:
        return ReadsSpec(reads=first_files)
    second_files = tuple(lane[1] for lane in lanes)
    return ReadsSpec(mates_1=first_files, mates_2=second_files)


def samples_by_read_group(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """Divide the reads of BAM, CRAM and SAM files into samples, according to their read groups.

    Reads without a read group belong to a sample with the name of their file.

    Args:
        spec: The inputs.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: A file has another format; or see `find_inputs` and `find_samples`.
        ConfigError: The name of a sample cannot be used as a directory name.
    """
    from virnuc_core.reads.alignments import find_samples  # imported only if needed

    files_by_sample = defaultdict[str, list[str]](list)
    for file in find_inputs(spec.all_inputs).files:
        format_ = find_alignment_format_of_file(file)
        if not format_:
            raise InputError("only BAM, CRAM and SAM have read groups; this is none", file=file)
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
    """Divide files into samples by their names.

    Each file, or pair of files, is a sample. Files whose names differ only by the lane (`_L001`)
    are lanes of one sample. `file_names` has the rule.

    Args:
        spec: The inputs.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: See `find_inputs`.
        ConfigError: A name cannot be used as a directory name, or two samples have the same name.
    """
    inputs = _find_named_reads(spec)
    samples, clashes = group_samples(inputs.files, inputs.pairs)
    for file, earlier_file in clashes:
        raise ConfigError(
            f"{file}: named as {earlier_file} is; rename one, or write a sample sheet"
        )
    reads_by_sample: dict[str, ReadsSpec] = {}
    for sample in samples:
        first_file = sample.pairs[0][0] if sample.pairs else sample.singles[0]
        problem = _find_name_problem(sample.name)
        if sample.name in reads_by_sample:
            problem = "its sample is named as another one is; rename one"
        if problem:
            raise ConfigError(f"{first_file}: {problem}, or write a sample sheet")
        n_groups = len(sample.pairs) + len(sample.singles)
        if n_groups > 1:
            log.info(
                "sample %s: %d files or pairs are joined by their names, beginning with %s",
                sample.name,
                n_groups,
                first_file,
            )
        reads_by_sample[sample.name] = ReadsSpec(
            reads=tuple(sample.singles),
            mates_1=tuple(first for first, _ in sample.pairs),
            mates_2=tuple(second for _, second in sample.pairs),
        )
    return reads_by_sample


def _find_named_reads(spec: ReadsSpec) -> Inputs:
    """Find the input files and detect pairs among them by their names.

    Files in a folder that have the name of a reads file (such as `.fastq`) but hold no reads are
    included. They are mostly empty, and their sample is reported as failed instead of missing.
    """
    inputs = find_inputs(spec.all_inputs)
    files = list(inputs.files)
    for name in inputs.ignored:
        match = ENDINGS.search(Path(name).name)
        if match is not None and match[1]:  # the ending of a format, such as `.fastq`
            files.append(name)
    # Files that a user named one by one are normally not detected as pairs. Here they are, as in a
    # folder. So leave out the names.
    spec_without_names = spec.model_copy(update={"reads": ()})
    return detect_pairs(spec_without_names, inputs._replace(files=tuple(files)))
