"""Read a sample sheet: a table that says which files belong to which sample.

Spreadsheet programs and people write such tables in many forms. What can be understood in one way
only is accepted. Everything else is refused, with the line, what was found, and what to do.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from virnuc_core.config import ReadsSpec, refuse_unreadable
from virnuc_core.errors import InputError, join_first, shorten
from virnuc_core.input_names import STDIN, expand_input, is_remote
from virnuc_core.reads.decision_log import decision_logger
from virnuc_core.reads.file_names import find_mates, group_samples
from virnuc_core.reads.mate_files import describe_missing_mate
from virnuc_core.reads.sources import find_inputs, identify_file, redact_url
from virnuc_core.rundir import GUARDED_FILES
from virnuc_core.system_errors import is_folder, target_exists

COLUMNS: Final = ("sample", "fastq_1", "fastq_2")  # the names that nf-core uses
FASTA_COLUMN: Final = "fasta"  # of nf-core's taxprofiler: used where `fastq_1` is empty
MAX_SHEET_BYTES: Final = 1 << 22  # a larger file is not a sample sheet
# The name of a sample is also the name of a folder: no slash, no blank or dot at its ends.
NAME: Final = re.compile(r"(?![ .-])[\w.+=@,() -]{1,100}(?<![ .])")
_SEPARATORS: Final = {",": "commas", "\t": "TABs", ";": "semicolons", "|": "bars"}
_SEPARATOR_LINE: Final = re.compile(r"(?i)\s*\"?sep=(.)\"?\s*")  # written by Excel
_QUOTES: Final = "'\"`´‘’‚“”„«»"  # that are no part of a path when they stand at both its ends
_NO_VALUE: Final = frozenset({"na", "n/a", "none", "null"})
# Characters without width that programs leave at the ends of cells.
_ZERO_WIDTH: Final = "\u200b\u200c\u200d\u2060\ufeff"
_INVISIBLE: Final = re.compile(r"[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\xad\0-\x1f]")
_log = decision_logger(__name__)

Lane = tuple[str, ...]  # one file of reads, or a file of first mates and one of second mates


@dataclass(frozen=True)
class _Columns:
    """Where the columns of a sheet are.

    Attributes:
        line: The number of the line with their names.
        separator: The letter between cells.
        names: The names of all columns, in small letters.
    """

    line: int
    separator: str
    names: list[str]

    @property
    def has_samples(self) -> bool:
        """Return False for a sheet of files alone, whose samples are named by the files."""
        return COLUMNS[0] in self.names


@dataclass(frozen=True)
class _SheetLine:
    """The cells of one line of a sample sheet that virnuc uses.

    Attributes:
        number: The number of the line, from 1.
        sample: The name of the sample; empty in a sheet of files alone.
        files: The text of the cells that name files: one, or two for mates.
        problem: Why the line cannot be used; empty if it can.
    """

    number: int
    sample: str
    files: tuple[str, ...]
    problem: str = ""


def read_sheet(path: Path) -> dict[str, ReadsSpec]:
    """Read a sample sheet, a table with commas, semicolons or TABs between the cells.

    A sample may have several lines, one per lane of the sequencer. Their files are joined. A
    relative path is searched in the working directory, then in the folder of the sheet. Files that
    do not exist are no error here; see `find_unusable_files`. A sheet of the columns `fastq_1` and
    `fastq_2` alone names its samples by the names of the files. As a side effect, doubtful lines
    are warned of in the log.

    Args:
        path: The sheet.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: The sheet cannot be used. The message names the line.
    """
    columns, lines = _read_lines(path)
    _warn_of_mates_apart(path, lines)
    lanes_by_sample = _group_lanes(path, lines, columns)
    _warn_of_similar_names(path, lanes_by_sample)
    return {sample: _join_lanes(lanes) for sample, lanes in lanes_by_sample.items()}


def find_unusable_files(path: Path) -> tuple[list[str], bool]:
    """Look for the files of a sheet, without reading them.

    Args:
        path: The sheet.

    Returns:
        What is wrong with files, with the line of each, and whether a sample is left whose files
        are all there.

    Raises:
        InputError: The sheet itself cannot be used. The message names the line.
    """
    _, lines = _read_lines(path)
    problems: list[str] = []
    samples = set[str]()
    broken_samples = set[str]()
    for line, lane in lines:
        sample = line.sample or f"line {line.number}"  # of a sheet of files alone
        samples.add(sample)
        for cell, file in zip(line.files, lane, strict=True):
            problem = _find_file_problem(path, cell, file, is_mate=len(lane) == 2)
            if problem:
                broken_samples.add(sample)
                where = f"{path}:{line.number}: "
                if line.sample:
                    where += f"sample '{join_first([line.sample])}': "
                problems.append(where + problem)
    return problems, samples != broken_samples


def _find_file_problem(sheet: Path, cell: str, file: str, *, is_mate: bool) -> str:
    """Return why a file of a sheet cannot be read and what to do; empty if it is there.

    Args:
        sheet: The sheet.
        cell: The text of the cell.
        file: The path or address that the cell names.
        is_mate: The file holds mates, so that it cannot be a folder.
    """
    if is_remote(file):
        return ""
    if target_exists(Path(file)):
        if is_mate and is_folder(Path(file)):
            return f"{file}: is a folder; name the file of mates in it"
        try:
            find_inputs((file,))
        except InputError as error:  # a folder without reads, or a file that may not be read
            return str(error)
        return ""
    bare_name = cell.strip(_QUOTES)
    if bare_name == cell:
        return f"{shorten(file)}: no such file or folder; check the path"
    hint = "remove the quotes around the path"
    if bare_name and target_exists(Path(_resolve(sheet, bare_name))):
        hint += ", the file is there without them"
    return f"{shorten(file)}: no such file or folder; {hint}"


def _read_lines(path: Path) -> tuple[_Columns, list[tuple[_SheetLine, Lane]]]:
    """Return the columns of a sheet, and its lines with the files of each.

    Raises:
        InputError: The sheet cannot be used. The message names the line.
    """
    # Not `splitlines`: that also cuts at letters such as U+2028, which a name may contain.
    text_lines = _read_text(path).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    lines: list[tuple[_SheetLine, Lane]] = []
    line_of_file: dict[object, _SheetLine] = {}  # by the identity of each file
    try:
        columns = _find_columns(path, text_lines)
        for line in _parse_lines(text_lines, columns):
            lane = _resolve_cells(path, line)
            problem = line.problem or _find_problem(line, lane, columns)
            problem = problem or _find_repeated_file(path, line, lane, line_of_file)
            if problem:
                raise InputError(
                    f"sample '{join_first([line.sample])}': {problem}", file=path, line=line.number
                )
            lines.append((line, lane))
    except _SheetSyntaxError as error:
        raise InputError(
            f"{error.reason}; is a quotation mark left open?", file=path, line=error.line
        ) from error
    if not lines:
        raise InputError(
            "the sheet names no sample",
            file=path,
            hint="write one line per sample, below the line with the names of the columns",
        )
    return columns, lines


# --- Text and columns -----------------------------------------------------------------------------


class _SheetSyntaxError(Exception):
    """The table cannot be divided into cells.

    Attributes:
        line: The number of the line, from 1.
        reason: The words of the csv module.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


def _read_text(path: Path) -> str:
    """Return the text of a sheet, in UTF-8 or, as Excel writes "Unicode text", in UTF-16.

    Raises:
        InputError: The file cannot be read, is too large, or is no text in these encodings.
    """
    with refuse_unreadable(path, "UTF-8 (save the sheet as CSV UTF-8)", InputError):
        with path.open("rb") as file:
            content = file.read(MAX_SHEET_BYTES + 1)
        if len(content) > MAX_SHEET_BYTES:
            raise InputError(
                f"larger than {MAX_SHEET_BYTES:,} bytes", file=path, hint="is it a sample sheet?"
            )
        if content.startswith(b"PK\3\4"):
            raise InputError(
                "this is a workbook, not a table as text", file=path, hint="save it as CSV UTF-8"
            )
        encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        text = content.decode(encoding)
    if "\0" in text:
        raise InputError("holds NUL bytes", file=path, hint="save the sheet as CSV UTF-8")
    return text


def _find_columns(path: Path, lines: Sequence[str]) -> _Columns:
    """Find the line with the names of the columns, and the letter between cells.

    Blank lines, comments (`# …`) and the line `sep=;` may stand before it. Capital letters do not
    matter.

    Raises:
        InputError: A required column is missing, or named twice.
        _SheetSyntaxError: The line cannot be divided into cells.
    """
    given_separator = ""
    for number, text in enumerate(lines, start=1):
        if match := _SEPARATOR_LINE.fullmatch(text):
            given_separator = match[1]
            continue
        if not text.strip(_ZERO_WIDTH + ' \t,;"') or _is_comment(text):
            continue
        separators = [given_separator] if given_separator else list(_SEPARATORS)
        candidates = []
        for separator in separators:
            names = [_clean(name).lower() for name in _split_line(text, separator, number)]
            names[0] = names[0].removeprefix("#").strip()
            candidates.append(_Columns(number, separator, names))
        # The separator with which the line names most of our columns.
        columns = max(candidates, key=lambda found: len(set(found.names) & set(COLUMNS)))
        _check_columns(path, columns)
        return columns
    raise InputError(
        f"no column sample; the first line names {', '.join(COLUMNS)}, but the sheet is empty",
        file=path,
        line=1,
    )


def _is_comment(line: str) -> bool:
    """Return True for a line that begins with `#`, unless it names the columns (`#sample,…`)."""
    text = line.lstrip()
    return text.startswith("#") and not re.search(r"(?i)\bfastq_1\b", text)


def _check_columns(path: Path, columns: _Columns) -> None:
    """Check the names of the columns of a sheet.

    Raises:
        InputError: A required column is missing. A sheet with more than two columns must have the
            column of second mates, although its cells may be empty. Otherwise a column of second
            mates under another name would be ignored.
    """
    names = [name for name in columns.names if name]
    for name in COLUMNS:
        if names.count(name) > 1:
            raise InputError(
                f"the column {name} is named twice; rename one", file=path, line=columns.line
            )
    if names and set(names) <= set(COLUMNS[1:]) and COLUMNS[1] in names:
        return  # a sheet of files alone
    required_columns = COLUMNS if len(names) > 2 else COLUMNS[:2]
    for name in required_columns:
        if name not in names:
            raise InputError(
                f"no column {name}; the first line names {', '.join(COLUMNS)}; "
                f"found: {join_first(columns.names)}",
                file=path,
                line=columns.line,
            )


def _split_line(text: str, separator: str, number: int) -> list[str]:
    """Return the cells of one line.

    Args:
        text: The line.
        separator: The letter between cells.
        number: The number of the line, for the error.

    Raises:
        _SheetSyntaxError: A cell is longer than the csv module accepts.
    """
    try:
        return next(csv.reader([text], delimiter=separator, skipinitialspace=True), [""])
    except csv.Error as error:
        raise _SheetSyntaxError(number, str(error)) from error


def _clean(cell: str) -> str:
    """Return a cell without blanks and characters without width at its ends."""
    return cell.strip().strip(_ZERO_WIDTH).strip()


# --- Lines ----------------------------------------------------------------------------------------


def _parse_lines(text_lines: Sequence[str], columns: _Columns) -> list[_SheetLine]:
    """Return the lines of a sheet below the names of its columns, without blank ones.

    Raises:
        _SheetSyntaxError: A cell is longer than the csv module accepts.
    """
    # With its line ends, because a quoted cell may contain some.
    rest = [f"{line}\n" for line in text_lines[columns.line :]]
    reader = csv.reader(rest, delimiter=columns.separator, skipinitialspace=True)
    lines: list[_SheetLine] = []
    try:
        for cells in reader:
            cleaned = [_clean(cell) for cell in cells]
            if any(cleaned):
                lines.append(_parse_line(cleaned, columns, columns.line + reader.line_num))
    except csv.Error as error:
        raise _SheetSyntaxError(columns.line + reader.line_num, str(error)) from error
    return lines


def _parse_line(cells: Sequence[str], columns: _Columns, number: int) -> _SheetLine:
    """Return what one line of a sheet says.

    Args:
        cells: The cells, without blanks around them. There may be fewer or more than columns.
        columns: The columns.
        number: The number of the line.
    """
    cell_of_column = dict.fromkeys((*COLUMNS, FASTA_COLUMN), "")
    # Not strict: cells at the end of a line may be missing.
    cell_of_column |= dict(zip(columns.names, cells, strict=False))
    sample, first_file, second_file = (cell_of_column[name] for name in COLUMNS)
    problem = ""
    if "".join(cells[len(columns.names) :]):
        problem = "more cells than columns"
    elif len(cells) == 1 and len(columns.names) > 1:
        for separator, word in _SEPARATORS.items():
            if separator != columns.separator and separator in cells[0]:
                problem = (
                    f"the cells are separated by {word}, those of the first line by "
                    f"{_SEPARATORS.get(columns.separator, columns.separator)}; use one of them"
                )
    if second_file.lower() in _NO_VALUE and not target_exists(Path(second_file)):
        second_file = ""
    if not first_file and not second_file:
        first_file = cell_of_column[FASTA_COLUMN]
    if not first_file and not problem:
        problem = _find_name_problem_if_named(sample, columns) or (
            "no file in fastq_1; name a file, for pairs the file of the first mates"
        )
    files = tuple(file for file in (first_file, second_file) if file)
    return _SheetLine(number, sample, files, problem)


def _find_name_problem_if_named(sample: str, columns: _Columns) -> str:
    """Return what is wrong with the name of a sample; empty in a sheet of files alone."""
    return find_name_problem(sample) if columns.has_samples else ""


def _find_problem(line: _SheetLine, lane: Lane, columns: _Columns) -> str:
    """Return what is wrong with a line of a sheet and how to correct it; empty if it is good.

    Args:
        line: The line.
        lane: The files of the line.
        columns: The columns of the sheet.
    """
    problem = _find_name_problem_if_named(line.sample, columns)
    if problem:
        return problem
    if STDIN in lane:
        return "no file in fastq_1; name a file, for pairs the file of the first mates"
    for file in lane:
        invisible = _INVISIBLE.search(file)
        if invisible and not is_remote(file) and not target_exists(Path(file)):
            return (
                f"the name of a file holds the invisible character U+{ord(invisible[0]):04X}, "
                "and there is no such file; remove it"
            )
    return ""


def find_name_problem(sample: str) -> str:
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


def _resolve_cells(sheet: Path, line: _SheetLine) -> Lane:
    """Return the paths and addresses of the files of a line.

    Raises:
        InputError: A cell names an address that has to be fetched first (`s3://`). The message has
            the line.
    """
    try:
        return tuple(_resolve(sheet, cell) for cell in line.files)
    except InputError as error:
        raise InputError(
            f"sample '{join_first([line.sample])}': {error}", file=sheet, line=line.number
        ) from error


def _resolve(sheet: Path, name: str) -> str:
    """Return the path, or the address without its query, that a cell of a sheet names.

    Args:
        sheet: The sheet. A relative path is also searched in its folder.
        name: The text of the cell.

    Raises:
        InputError: The cell names an address that has to be fetched first.
        UnreadableError: It is not known which of the two paths exists.
    """
    name = expand_input(name)
    path_beside_sheet = str(sheet.parent / name)
    if is_remote(name) or target_exists(Path(name)):
        return redact_url(name)
    if target_exists(Path(path_beside_sheet)):
        return path_beside_sheet
    return redact_url(name)


def _find_repeated_file(
    sheet: Path, line: _SheetLine, lane: Lane, line_of_file: dict[object, _SheetLine]
) -> str:
    """Return a problem if the files of a line were named before, in this or another sample.

    Two paths or links to one file are the same file. A pair of mates belongs to one sample, also
    with its mates exchanged. A single file in two samples is only warned of, in the log.

    Args:
        sheet: The sheet, for the warning.
        line: The line.
        lane: Its files.
        line_of_file: The line of each earlier file. The files of this line are added.
    """
    identities = [identify_file(file) for file in lane]
    if len(set(identities)) < len(lane):
        hint = describe_missing_mate(lane[0], *COLUMNS[1:])
        return f"fastq_1 and fastq_2 name the same file, {lane[0]}; {hint}"
    earlier_lines = [line_of_file.get(identity) for identity in identities]
    for file, identity, earlier_line in zip(lane, identities, earlier_lines, strict=True):
        if earlier_line is None:
            line_of_file[identity] = line
            continue
        if earlier_line.sample == line.sample:
            return f"{file} is named twice; name it once"
        problem = (
            f"{file} is also a file of sample '{join_first([earlier_line.sample])}' "
            f"(line {earlier_line.number})"
        )
        if len(lane) == 2 and earlier_lines[0] is earlier_lines[1]:
            return f"{problem}, and so is its mate; give each pair to one sample"
        _log.warning(
            "%s:%d: sample '%s': %s", sheet, line.number, join_first([line.sample]), problem
        )
    return ""


# --- Samples --------------------------------------------------------------------------------------


def _warn_of_mates_apart(sheet: Path, lines: Sequence[tuple[_SheetLine, Lane]]) -> None:
    """Log a warning for files that are mates by their names, but not in the sheet."""
    lane_of_file = {file: lane for _, lane in lines for file in lane}
    line_of_file = {file: line for line, lane in lines for file in lane}
    for pair in find_mates(lane_of_file).pairs:
        lane = lane_of_file[pair.first]
        if lane == (pair.first, pair.second):
            continue
        line = line_of_file[pair.first]
        if lane == (pair.second, pair.first):
            remark = f"{pair.second} is in fastq_1 and {pair.first} in fastq_2"
        elif pair.is_certain or len(lane) == 2:
            remark = f"{pair.first} and {pair.second} are not on one line"
        else:
            continue  # `patient_1` and `patient_2` on lines of their own
        _log.warning(
            "%s:%d: %s, although their names are those of mates", sheet, line.number, remark
        )


def _warn_of_similar_names(sheet: Path, samples: dict[str, list[Lane]]) -> None:
    """Log a warning for samples whose names differ only by capital letters.

    Their results would be in one folder on a disk that does not tell such names apart.
    """
    first_name: dict[str, str] = {}
    for sample in samples:
        similar_name = first_name.setdefault(sample.casefold(), sample)
        if similar_name != sample:
            _log.warning(
                "%s: samples '%s' and '%s' differ only by capital letters",
                sheet,
                similar_name,
                sample,
            )


def _group_lanes(
    sheet: Path, lines: Sequence[tuple[_SheetLine, Lane]], columns: _Columns
) -> dict[str, list[Lane]]:
    """Return the files of each sample, by its name.

    Args:
        sheet: The sheet, for errors.
        lines: The lines with their files.
        columns: The columns of the sheet.

    Raises:
        InputError: A line of a sample names mates, and another one a file of one mate alone. Or
            samples without names in the sheet cannot be told apart by the names of their files.
    """
    if not columns.has_samples:
        return _name_by_files(sheet, [lane for _, lane in lines])
    lanes_by_sample = defaultdict[str, list[Lane]](list)
    for line, lane in lines:
        lanes = lanes_by_sample[line.sample]
        lanes.append(lane)
        is_mixed = len({len(files) for files in lanes}) > 1
        if is_mixed and not _are_one_sample(lanes):
            raise InputError(
                f"sample '{join_first([line.sample])}': "
                "some of its lines have a file in fastq_2 and some have none; "
                "name both files on each line, or use two names for the sample",
                file=sheet,
                line=line.number,
            )
    return dict(lanes_by_sample)


def _are_one_sample(lanes: Sequence[Lane]) -> bool:
    """Return True if the single files of a sample are, by their names, reads without mates.

    Archives give `SRR_1`, `SRR_2` and, for the reads without a mate, `SRR`.
    """
    files = [file for lane in lanes for file in lane]
    pairs = [(lane[0], lane[1]) for lane in lanes if len(lane) == 2]
    samples, clashes = group_samples(files, pairs)
    return len(samples) == 1 and not clashes


def _name_by_files(sheet: Path, lanes: Sequence[Lane]) -> dict[str, list[Lane]]:
    """Return the lanes of each sample, whose name comes from the names of its files.

    Raises:
        InputError: The names cannot be used, or two samples have the same name.
    """
    files = [file for lane in lanes for file in lane]
    samples, clashes = group_samples(files, [(one[0], one[1]) for one in lanes if len(one) == 2])
    for file, earlier_file in clashes:
        raise InputError(
            f"{file}: named as {earlier_file} is", file=sheet, hint="add a column sample"
        )
    lanes_by_sample: dict[str, list[Lane]] = {}
    for sample in samples:
        problem = find_name_problem(sample.name)
        if problem:
            raise InputError(
                f"sample '{sample.name}': {problem}", file=sheet, hint="add a column sample"
            )
        lanes_by_sample[sample.name] = [*sample.pairs, *((file,) for file in sample.singles)]
    return lanes_by_sample


def _join_lanes(lanes: list[Lane]) -> ReadsSpec:
    """Return the reads of a sample, with the files of all its lanes.

    Args:
        lanes: One tuple per lane: one file of reads, or two files of mates.
    """
    pairs = [lane for lane in lanes if len(lane) == 2]
    return ReadsSpec(
        reads=tuple(lane[0] for lane in lanes if len(lane) == 1),
        mates_1=tuple(lane[0] for lane in pairs),
        mates_2=tuple(lane[1] for lane in pairs),
    )
