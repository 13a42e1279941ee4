"""Decide which input files hold pairs of mates, by their names and by the ids of their first reads.

`file_names` says which files are mates by their names. If a name may also mean something else, the
ids of the first reads decide: mates have the same ids. It makes no difference whether a user named
the files one by one or their folder. Each decision is one line of the log.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.input_names import STDIN, is_remote
from virnuc_core.reads.decision_log import decision_logger
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.file_names import UNPAIRED_REASON, MateNames, NamedPair, find_mates
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import (
    Inputs,
    can_be_read_twice,
    find_alignment_format_of_file,
    find_inputs,
    identify_file,
    sample_name,
)
from virnuc_core.system_errors import target_exists

UNGROUPED_BAM_WARNING: Final = (
    "%s: mates do not follow each other, so each read is judged by itself; "
    "samtools collate puts mates next to each other"
)
BY_NAME: Final = "by their names; --no-pairs judges each read by itself"
_AS_ASKED: Final = "as asked"
MAX_MARK_DIFFERENCE: Final = 3  # letters by which two marks of mates differ in length
_HEAD_BYTES: Final = 1 << 16  # of a file that are read to compare the ids of its first reads
_MAX_IDS: Final = 100  # ids of a file that are compared
_ID_ENDS: Final = re.compile(rb"(.+)[/._:]([123])")  # an id that ends in the number of the mate
_log = decision_logger(__name__)
_joined_by_name: Final = set[tuple[str, str]]()  # pairs for which this process has logged so


def find_reads(spec: ReadsSpec) -> Inputs:
    """Find the input files of a run, and which of them hold pairs of mates.

    Args:
        spec: The inputs as the user named them, and the settings for pairs.

    Returns:
        The files in the order in which they are read, with their pairs.

    Raises:
        InputError: See `find_inputs`.
        UnreadableError: The system cannot read a folder or file.
    """
    refuse_one_file_as_both_mates(spec)
    inputs = find_inputs(spec.all_inputs)
    # A single file of FASTA or FASTQ holds no pairs, unless the user says that mates alternate.
    is_one_plain_file = (
        len(inputs.files) == 1
        and not spec.interleaved
        and not find_alignment_format_of_file(inputs.files[0])
    )
    if is_one_plain_file:
        if spec.pairs:
            _warn_of_mates_beside(inputs.files)
        return inputs
    return detect_pairs(spec, inputs)


def refuse_one_file_as_both_mates(spec: ReadsSpec) -> None:
    """Raise an `InputError` if the same file is named as the first and as the second mates."""
    for first, second in zip(spec.mates_1, spec.mates_2, strict=True):
        is_there = is_remote(first) or target_exists(Path(first))  # else it is reported as missing
        if is_there and identify_file(first) == identify_file(second):
            raise InputError(
                f"-1 and -2 name the same file, {first}; {describe_missing_mate(first, '-1', '-2')}"
            )


def describe_missing_mate(file: str, first_place: str, second_place: str) -> str:
    """Return what a file of mates that was named twice lacks, with the file that may be meant.

    Args:
        file: The file.
        first_place: The option or column that takes files of first mates.
        second_place: That of second mates.
    """
    pair = find_pair_beside(file)
    if pair is None:
        return f"{second_place} takes the second mates"
    if pair.first == file:
        return f"{second_place} takes the second mates (is it {pair.second}?)"
    return f"{first_place} takes the first mates (is it {pair.first}?)"


def find_pair_beside(file: str) -> NamedPair | None:
    """Return the pair that a file forms, by its name, with another file of its folder.

    No file is opened.

    Args:
        file: A path. An address or standard input has nothing beside it.
    """
    path = Path(file)
    if file == STDIN or is_remote(file):
        return None
    siblings = [file]
    try:
        for entry in path.parent.iterdir():
            name = entry.name
            # Marks of mates differ by a few letters: `R1` and `R2`, `fwd` and `rev`.
            is_similar = abs(len(name) - len(path.name)) <= MAX_MARK_DIFFERENCE
            if is_similar and name != path.name and name[-1] == file[-1]:
                siblings.append(file.removesuffix(path.name) + name)  # written like `file`
    except OSError:  # the file itself is reported when it is read
        return None
    pairs = find_mates(siblings).pairs
    return next((pair for pair in pairs if file in (pair.first, pair.second)), None)


def _warn_of_mates_beside(files: Iterable[str]) -> list[str]:
    """Log a warning for each file whose mates lie beside it and are not read.

    Args:
        files: Files that are read without mates.

    Returns:
        The files that were warned of.
    """
    files_with_mates = []
    for file in files:
        pair = find_pair_beside(file)
        if pair is None or find_problem_of_pair(pair):
            continue
        mate = pair.second if pair.first == file else pair.first
        _log.warning(
            "%s: its mate %s lies beside it and is not read; name both to judge pairs, or use "
            "--no-pairs",
            file,
            mate,
        )
        files_with_mates.append(file)
    return files_with_mates


def detect_pairs(spec: ReadsSpec, inputs: Inputs) -> Inputs:
    """Find out which input files hold pairs of mates. Each decision is written to the log.

    Files are a pair if the user named them so, or by their names or flags (BAM, CRAM, SAM). If the
    user wants each read to be judged by itself (`spec.pairs` is false), no files are. Files of
    index reads are left out.

    Args:
        spec: The files of mates that the user named, and the settings for pairs.
        inputs: All files.

    Returns:
        The same inputs with their pairs. Files with mates come first.
    """
    named_pairs = list(zip(spec.mates_1, spec.mates_2, strict=True))
    other_files = _without_pairs(inputs.files, named_pairs)
    names = find_mates(other_files)
    for file, reason in names.left_out.items():
        _log.warning("%s: %s", file, reason)
    reasons: dict[tuple[str, str], str] = {}  # by a pair of files: why they are a pair
    if spec.pairs:
        other_files = [file for file in other_files if file not in names.left_out]
        if spec.interleaved:
            named_pairs += [(name, name) for name in other_files]
        reasons = dict.fromkeys(named_pairs, _AS_ASKED)
        if not spec.interleaved:
            reasons |= _detect_unnamed_pairs(spec, other_files)
    _log_pairs(reasons)
    paired_files: list[str] = []
    for pair in reasons:
        paired_files += dict.fromkeys(pair)  # once, if one file holds both mates
    singles = [
        name for name in inputs.files if name not in paired_files and name not in names.left_out
    ]
    return Inputs(
        (*paired_files, *singles),
        (*inputs.ignored, *names.left_out),
        tuple(reasons),
        {**inputs.left_out, **names.left_out},
    )


def _log_pairs(reasons: Mapping[tuple[str, str], str]) -> None:
    """Log why files are pairs, a line for each pair.

    Files that were joined by their names before the samples of a run began are named as mates in
    the settings of their sample. This is no news, and not logged again.

    Args:
        reasons: The reason for each pair.
    """
    for pair, reason in reasons.items():
        if reason == BY_NAME:
            _joined_by_name.add(pair)
        elif reason == _AS_ASKED and pair in _joined_by_name:
            continue
        _log.info("pairs: %s and %s, %s", *pair, reason)


def _without_pairs(files: tuple[str, ...], pairs: list[tuple[str, str]]) -> list[str]:
    """Return the files that are in none of the pairs."""
    return [name for name in files if not any(name in pair for pair in pairs)]


def _detect_unnamed_pairs(spec: ReadsSpec, files: list[str]) -> dict[tuple[str, str], str]:
    """Detect pairs among files that the user did not name as pairs; warn about doubtful cases.

    Files of a folder and files that the user named one by one follow the same rule.

    Args:
        spec: The settings for pairs.
        files: The files.

    Returns:
        The reason why two files are a pair, by the two files. A file that holds both mates occurs
        twice in its key.
    """
    reasons: dict[tuple[str, str], str] = {}
    files_without_flags: list[str] = []
    for file in files:
        # Alignments tell by their flags whether they are paired.
        format_ = find_alignment_format_of_file(file)
        if not format_:
            files_without_flags.append(file)
        elif _alignments_hold_pairs(spec, file, format_):
            reasons[file, file] = "by their flags; --no-pairs judges each read by itself"
    names = find_mates(files_without_flags)
    for pair in names.pairs:
        problem = find_problem_of_pair(pair)
        if not problem:
            reasons[pair.first, pair.second] = BY_NAME
        else:
            _log.warning("%s and %s %s", pair.first, pair.second, problem)
    _warn_of_unjoined(names, is_one_file=len(files) == 1)
    return reasons


def _alignments_hold_pairs(spec: ReadsSpec, file: str, format_: str) -> bool:
    """Return True if a file of alignments holds pairs whose mates are next to each other.

    If it holds pairs whose mates are apart, a warning is logged: they cannot be read as pairs.
    """
    from virnuc_core.reads.alignments import SampleFilter, mates_follow  # few files need it

    sample_filter = SampleFilter(spec.read_group, ungrouped_sample=sample_name((file,)))
    follow = mates_follow(file, format_, sample_filter)  # None: the reads are not paired
    if follow is False:
        _log.warning(UNGROUPED_BAM_WARNING, file)
    return bool(follow)


def find_problem_of_pair(pair: NamedPair) -> str:
    """Return why two files that are mates by their names are not joined; empty if they are.

    As a side effect, the beginning of both files is read.

    Args:
        pair: The files.
    """
    first, second = _read_beginning(pair.first), _read_beginning(pair.second)
    if first.is_fasta or second.is_fasta:
        return (
            "differ only by what looks like a mate mark; FASTA is not joined by its name, "
            "-1 and -2 before the files judge pairs"
        )
    if not pair.is_certain and (first.is_pipe or second.is_pipe):
        return (
            "differ only by what looks like a mate mark, and the reads of a pipe cannot be looked "
            "at first, so each read is judged by itself; -1 and -2 before the files judge pairs"
        )
    if not pair.is_certain and not first.may_be_mates_of(second):
        return (
            "differ only by what looks like a mate mark, but hold other reads, so each read is "
            "judged by itself; -1 and -2 before the files judge pairs"
        )
    return ""


def find_other_mate_mark(first: str, second: str) -> str:
    """Return what the ids of mates have before the 1 and the 2 at their ends, in place of `/`.

    The beginning of both files is read.

    Args:
        first: The FASTQ file of the first mates.
        second: That of the second mates; the same file if it holds both.

    Returns:
        `.`, `_` or `:`. Empty if the ids are equal, end in `/1` and `/2`, or cannot be read.
    """
    ids = _read_beginning(first).ids
    other_ids = _read_beginning(second).ids
    if first == second:
        ids, other_ids = ids[::2], ids[1::2]
    if not ids or not other_ids or ids[0] == other_ids[0]:
        return ""
    for mark in (b".", b"_", b":"):
        is_first = all(read_id.endswith(mark + b"1") for read_id in ids)
        if is_first and all(read_id.endswith(mark + b"2") for read_id in other_ids):
            return mark.decode()
    return ""


def _warn_of_unjoined(names: MateNames, *, is_one_file: bool) -> None:
    """Log a warning for files that look like mates and are not joined, and for missing files.

    Args:
        names: What the names of the files say.
        is_one_file: There is only this file. Then nothing is said of missing mates.
    """
    for unjoined in names.unjoined:
        if unjoined.reason == UNPAIRED_REASON:  # nothing is in doubt
            _log.info("%s: %s", _list_files(unjoined.files), unjoined.reason)
            continue
        _log.warning(
            "%s differ only by what looks like a mate mark; %s; each read is judged by itself, "
            "-1 and -2 before the files judge pairs",
            _list_files(unjoined.files),
            unjoined.reason,
        )
    for first, second in names.similar:
        if _read_beginning(first).shares_ids_with(_read_beginning(second)):
            _log.warning(
                "%s and %s differ only by a 1 and a 2 in their names, and their reads have the "
                "same ids; each read is judged by itself, -1 and -2 before the files judge pairs",
                first,
                second,
            )
    if is_one_file:
        return
    warned_files = _warn_of_mates_beside(names.lonely)
    lonely_files = tuple(file for file in names.lonely if file not in warned_files)
    if lonely_files:
        _log.warning(
            "%s: no file with its mates beside it; each read is judged by itself",
            _list_files(lonely_files),
        )


def _list_files(files: tuple[str, ...]) -> str:
    """Return the names of some files for a message; of many only the first ones."""
    if len(files) > 4:
        return f"{', '.join(files[:3])} and {len(files) - 3:,} more"
    return " and ".join(files)


@dataclass(frozen=True)
class _Beginning:
    """What the first bytes of a file tell about its reads.

    Attributes:
        ids: The ids of the first reads of a FASTQ file; none for FASTA.
        is_fasta: The file holds FASTA.
        is_known: False if the file cannot be read here. Staging then tells why.
        is_pipe: The bytes come only once, so that they were not read here.
    """

    ids: tuple[bytes, ...] = ()
    is_fasta: bool = False
    is_known: bool = True
    is_pipe: bool = False

    def may_be_mates_of(self, other: "_Beginning") -> bool:
        """Return True if the first reads of both files have ids in common.

        Ids may end in the number of the mate, if all ids of both files do. Two empty files may be
        mates: those of a negative control.
        """
        if not (self.is_known and other.is_known):
            return True
        if not self.ids and not other.ids:
            return True
        return self.shares_ids_with(other)

    def shares_ids_with(self, other: "_Beginning") -> bool:
        """Return True if the first reads of both files have ids in common."""
        if set(self.ids) & set(other.ids):
            return True
        names, other_names = self._ids_without_mates(), other._ids_without_mates()
        return bool(set(names) & set(other_names))

    def _ids_without_mates(self) -> tuple[bytes, ...]:
        """Return the ids without the number of the mate at their ends; none if one has none."""
        matches = [_ID_ENDS.fullmatch(name) for name in self.ids]
        names = tuple(match[1] for match in matches if match is not None)
        is_same_mate = len({match[2] for match in matches if match is not None}) == 1
        return names if is_same_mate and len(names) == len(self.ids) else ()


def _read_beginning(file: str) -> _Beginning:
    """Read the first reads of a file, to compare their ids with those of another file.

    A pipe is not read, because its bytes come only once.
    """
    log = ParseLog(on_error="skip")
    try:
        if not can_be_read_twice(file):
            return _Beginning(is_known=False, is_pipe=True)
        with closing(parse((file,), log, block_bytes=_HEAD_BYTES)) as batches:
            batch = next(batches, None)
    except (InputError, OSError):  # staging reports it
        return _Beginning(is_known=False)
    if batch is None:
        # A file with broken records only is not empty. Staging reports it.
        return _Beginning(is_known=not log.first_broken)
    if batch.format == "fasta":
        return _Beginning(is_fasta=True)
    ids = itertools.islice(batch.ids, _MAX_IDS)
    return _Beginning(tuple(read_id for read_id in ids if read_id))
