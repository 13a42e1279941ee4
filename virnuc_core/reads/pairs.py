"""Read pairs as one stream in which mates follow each other, from two files or from one.

Mates have equal ids, or ids that end in `/1` and `/2`. In the stream all ids end so, which keeps
mates apart. If broken records are skipped, a read without its mate is an orphan and stands alone.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch, Strings
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import Inputs, find_alignment_format_of_file, sample_name

# stem, letter, mate, part of a lane
MATE_FILE: Final = re.compile(r"(.+)_(R?)([12])(_\d{3})?(?:\.\w+)*")
MATE_ENDS: Final = (b"/1", b"/2")  # of ids
ORDER_HINT: Final = (
    "mates must follow in the same order; "
    "--on-error skip judges orphans alone, --no-pairs each read"
)
UNGROUPED_BAM_WARNING: Final = (
    "%s: mates do not follow each other, so each read is judged by itself; "
    "samtools collate mends that"
)
BATCH_READS: Final = 1 << 14
_COMPARED_AT_ONCE: Final = 1 << 12  # pairs
_NEAR: Final = 1 << 6  # reads among which the next pair is searched, at first
_FAR: Final = 1 << 16  # and then
_log = logging.getLogger(__name__)


def detect_pairs(spec: ReadsSpec, inputs: Inputs) -> Inputs:
    """Decide which files hold the two mates of read pairs, and log each pair with the reason.

    Args:
        spec: The files of mates that the user named, and the settings for pairs.
        inputs: All files.

    Returns:
        The same inputs with their pairs. Paired files come first. A file with both mates is a pair
        with itself.
    """
    reasons: dict[tuple[str, str], str] = {}  # by the two files: why they are a pair
    if spec.pairs:
        named_pairs = list(zip(spec.mates_1, spec.mates_2, strict=True))
        other_files = _without_pairs(inputs.files, named_pairs)
        if spec.interleaved:
            named_pairs += [(name, name) for name in other_files]
        reasons = dict.fromkeys(named_pairs, "as asked")
        if not spec.interleaved:
            reasons |= _detect_unnamed_pairs(spec, other_files)
    for (first, second), reason in reasons.items():
        _log.info("pairs: %s and %s, %s", first, second, reason)
    paired_files: list[str] = []
    for pair in reasons:
        paired_files += dict.fromkeys(pair)
    singles = [name for name in inputs.files if name not in paired_files]
    return Inputs((*paired_files, *singles), inputs.ignored, tuple(reasons))


def _without_pairs(files: tuple[str, ...], pairs: list[tuple[str, str]]) -> list[str]:
    """Return the files that are in none of the pairs."""
    return [name for name in files if not any(name in pair for pair in pairs)]


class _MateName(NamedTuple):
    """What the names of two files of mates have in common."""

    folder: Path
    stem: str
    letter: str  # R, or empty
    lane_part: str | None


@dataclass
class _MateCandidates:
    """Files that differ only by the number of the mate in their names."""

    firsts: list[str] = field(default_factory=list)
    seconds: list[str] = field(default_factory=list)


def _detect_unnamed_pairs(spec: ReadsSpec, files: list[str]) -> dict[tuple[str, str], str]:
    """Detect pairs among files that the user did not call mates; warn about doubtful ones.

    Returns:
        The reason for each pair.
    """
    reasons: dict[tuple[str, str], str] = {}
    candidates_by_name: dict[_MateName, _MateCandidates] = {}
    for file in files:
        format_ = find_alignment_format_of_file(file)
        if format_:
            if _alignments_hold_pairs(spec, file, format_):
                reasons[file, file] = "by their flags; --no-pairs judges each read by itself"
            continue
        match = MATE_FILE.fullmatch(Path(file).name)
        if match is None:
            continue
        stem, letter, mate, lane_part = match.groups()
        mate_name = _MateName(Path(file).parent, stem, letter, lane_part)
        candidates = candidates_by_name.setdefault(mate_name, _MateCandidates())
        if mate == "1":
            candidates.firsts.append(file)
        else:
            candidates.seconds.append(file)
    for mate_name, candidates in candidates_by_name.items():
        if _are_a_pair(spec, mate_name, candidates):
            pair = candidates.firsts[0], candidates.seconds[0]
            reasons[pair] = "by their names; --no-pairs judges each read by itself"
    return reasons


def _alignments_hold_pairs(spec: ReadsSpec, file: str, format_: str) -> bool:
    """Return whether mates follow each other in a file of alignments; warn if they do not."""
    from virnuc_core.reads.alignments import SampleFilter, mates_follow  # imported late: rare

    sample_filter = SampleFilter(spec.read_group, ungrouped_sample=sample_name((file,)))
    follow = mates_follow(file, format_, sample_filter)
    if follow is False:
        _log.warning(UNGROUPED_BAM_WARNING, file)
    return bool(follow)


def _are_a_pair(spec: ReadsSpec, mate_name: _MateName, candidates: _MateCandidates) -> bool:
    """Return whether files whose names differ only by the mate number are a pair.

    Files that the user listed one by one, instead of naming their folder, are never joined. If such
    files look like a pair, or a mate is missing, a warning says so.
    """
    files = (*candidates.firsts, *candidates.seconds)
    are_named = any(file in spec.reads for file in files)
    if candidates.firsts and candidates.seconds:
        if are_named or len(files) > 2:
            _log.warning(
                "%s seem to hold pairs; each read is judged by itself, "
                "-1 and -2 before the files judge pairs",
                " and ".join(files),
            )
            return False
        return True
    if mate_name.letter and not are_named:
        _log.warning(
            "%s: no file with its mates beside it; each read is judged by itself", files[0]
        )
    return False


@dataclass(slots=True)
class _Reads:
    """Consecutive reads of one file, as columns."""

    names: list[bytes] = field(default_factory=list)  # ids without /1 and /2, equal for mates
    bases: list[bytes] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # as they stand in the file
    lines: list[int] = field(default_factory=list)  # of the headers
    mates: bytes = b""  # 1 or 2 by the header of each read, 0 where it does not tell

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: slice) -> "_Reads":
        return _Reads(
            self.names[rows],
            self.bases[rows],
            self.records[rows],
            self.lines[rows],
            self.mates[rows],
        )

    def __add__(self, later: "_Reads") -> "_Reads":
        return _Reads(
            self.names + later.names,
            self.bases + later.bases,
            self.records + later.records,
            self.lines + later.lines,
            self.mates + later.mates,
        )


@dataclass(slots=True)
class _Stream:
    """Reads of the joint stream, as columns."""

    ids: list[bytes] = field(default_factory=list)  # end in /1 or /2
    bases: list[bytes] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    follows_mate: list[bool] = field(default_factory=list)  # the previous read is its mate

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, later: "_Stream") -> None:
        """Add reads to the end."""
        self.ids += later.ids
        self.bases += later.bases
        self.records += later.records
        self.lines += later.lines
        self.follows_mate += later.follows_mate

    def to_batch(self, format_: Format, *, with_records: bool) -> ReadBatch:
        """Return these reads as a batch."""
        return ReadBatch(
            file_index=0,
            format=format_,
            ids=Strings.from_strings(self.ids),
            bases=Strings.from_strings(self.bases),
            lines=np.array(self.lines),
            records=Strings.from_strings(self.records if with_records else ()),
            follows_mate=np.array(self.follows_mate),
        )


def pair_batches(
    inputs: Inputs, log: ParseLog, *, with_records: bool = True
) -> Iterator[ReadBatch]:
    """Read the files with mates.

    Args:
        inputs: The files.
        log: Takes the counts and the errors of the records that are left out.
        with_records: Keep the text of each record.

    Yields:
        Batches of reads in which mates follow each other.

    Raises:
        InputError: As of `parse`. Also for files that are out of step or the wrong way round and,
            unless `log.on_error` is `skip`, for a read without its mate.
    """
    for files in inputs.pairs:
        first = _Side(files[0], log)
        is_interleaved = files[0] == files[1]
        second = first if is_interleaved else _Side(files[1], log)
        stream = _Stream()
        for reads in _join_sides(first, second, log):
            stream.append(reads)
            if len(stream) >= BATCH_READS:
                yield stream.to_batch(first.format, with_records=with_records)
                stream = _Stream()
        if len(stream) > 0:
            yield stream.to_batch(first.format, with_records=with_records)


class _Side:
    """One file of a pair, with a buffer of reads that were parsed but not used yet."""

    def __init__(self, file: str, log: ParseLog) -> None:
        """Open a file.

        Args:
            file: The file.
            log: Receives counts and errors of parsing.
        """
        self.file = file
        self.format: Format = "fastq"
        self._batches = parse((file,), log)
        self._reads = _Reads()
        self._next = 0  # index in `_reads` of the first read that was not used yet

    def __len__(self) -> int:
        """Return the number of reads in the buffer."""
        return len(self._reads) - self._next

    def fill(self, count: int) -> bool:
        """Parse further reads until the buffer has at least `count` reads.

        Returns:
            False if the file ends before.

        Raises:
            InputError: A read is too long for a pair, or an error of `parse`.
        """
        while len(self) < count:
            batch = next(self._batches, None)
            if batch is None:
                return False
            if batch.part is not None:
                raise InputError(
                    "too long for the read of a pair", file=self.file, line=int(batch.lines[0])
                )
            self.format = batch.format
            self._reads = self._reads[self._next :] + _with_mates(batch)
            self._next = 0
        return True

    def next_names(self, count: int) -> list[bytes]:
        """Return the names of the next reads."""
        return self._reads.names[self._next : self._next + count]

    def next_line(self) -> int:
        """Return the line number of the next read's header."""
        return self._reads.lines[self._next]

    def take(self, count: int) -> _Reads:
        """Return the next `count` reads and remove them from the buffer."""
        taken = self._reads[self._next : self._next + count]
        self._next += count
        return taken

    def error(self, reads: _Reads, index: int, problem: str, hint: str = ORDER_HINT) -> InputError:
        """Return an error about the read with this index among `reads`, which are of this file."""
        return InputError(
            problem,
            file=self.file,
            line=reads.lines[index],
            read_id=reads.names[index].decode(),
            hint=hint,
        )


def _with_mates(batch: ReadBatch) -> _Reads:
    """Return the reads of a batch, with ids that are equal for both mates.

    An ending `/1` or `/2` is removed from the id.
    """
    # This is a hot loop, so the ending is checked and removed in one pass.
    names = [read_id[:-2] if read_id.endswith(MATE_ENDS) else read_id for read_id in batch.ids]
    return _Reads(
        names=names,
        bases=list(batch.bases),
        records=list(batch.records),
        lines=batch.lines.tolist(),
        mates=_mates_from_headers(batch),
    )


def _mates_from_headers(batch: ReadBatch) -> bytes:
    """Return the mate number that each header states: 1, 2, or 0 if the header states none.

    A header states it with an id that ends in `/1` or `/2`, or with a word like `1:N:0:ACGT` after
    the id (the format of Illumina's Casava).

    Returns:
        One byte per read.
    """
    # The three letters after each id are looked at; padding makes sure that they exist.
    padding = bytes(3)
    letters = np.frombuffer(batch.records.data + padding, np.uint8)
    # An id with escaped characters is longer than the original id in the header, so its end may be
    # outside the text.
    id_ends = np.minimum(
        batch.records.offsets[:-1] + 1 + batch.ids.lengths, len(letters) - len(padding)
    )
    has_slash = letters[id_ends - 2] == ord("/")
    has_blank = letters[id_ends] == ord(" ")
    has_colon = letters[id_ends + 2] == ord(":")
    digits_behind_id = (has_blank & has_colon) * letters[id_ends + 1]
    digits = np.where(has_slash, letters[id_ends - 1], digits_behind_id)
    mates = np.zeros(len(batch), np.uint8)
    mates[digits == ord("1")] = 1
    mates[digits == ord("2")] = 2
    return mates.tobytes()


def _join_sides(first: _Side, second: _Side, log: ParseLog) -> Iterator[_Stream]:
    """Join the reads of two files, or of one file that holds both mates.

    Reads are compared in blocks. If all names of a block are equal, which is nearly always the
    case, the block is joined as a whole. Otherwise the reads before the next pair are orphans:
    reads without a mate.

    Args:
        first: The file of first mates.
        second: The file of second mates; the same object if one file holds both.
        log: Its `on_error` decides whether orphans are allowed.

    Yields:
        Reads in which mates follow each other, with orphans in between.

    Raises:
        InputError: See `pair_batches`.
    """
    is_interleaved = first is second
    step = 2 if is_interleaved else 1  # reads of the first file per pair
    # Mate number of an orphan of the first file. 0: unknown, so its header decides.
    first_mate = 0 if is_interleaved else 1
    had_pairs = False
    max_pairs = _COMPARED_AT_ONCE
    while first.fill(step) and second.fill(1):
        if first.format != second.format:
            raise InputError(
                f"is {first.format}, but {second.file} with its mates {second.format}",
                file=first.file,
            )
        n_compared = min(len(first), len(second), max_pairs) // step
        n_pairs = _count_equal_names(first, second, n_compared)
        reads = first.take(step * n_pairs)
        if is_interleaved:
            yield _weave(reads[::2], reads[1::2], first, second)
        else:
            yield _weave(reads, second.take(n_pairs), first, second)
        had_pairs = had_pairs or n_pairs > 0
        max_pairs = min(2 * max_pairs, _COMPARED_AT_ONCE)
        if n_pairs < n_compared:
            gap = _Gap(1, 0) if is_interleaved else _find_next_pair(first, second, had_pairs)
            yield _orphans(first, gap.n_first, second, first_mate, log)
            yield _orphans(second, gap.n_second, first, 2, log)
            # Where one mate is missing, others often are. Compare small blocks for a while.
            max_pairs = _NEAR
    while first.fill(1):
        yield _orphans(first, len(first), second, first_mate, log)
    while second.fill(1):
        yield _orphans(second, len(second), first, 2, log)


def _count_equal_names(first: _Side, second: _Side, n_compared: int) -> int:
    """Return how many of the next `n_compared` pairs have equal names, until the first mismatch."""
    if first is second:
        names = first.next_names(2 * n_compared)
        first_names = names[::2]
        second_names = names[1::2]
    else:
        first_names = first.next_names(n_compared)
        second_names = second.next_names(n_compared)
    if first_names == second_names:  # the usual case, and a fast comparison
        return n_compared
    for index, (name, other_name) in enumerate(zip(first_names, second_names, strict=True)):
        if name != other_name:
            return index
    return n_compared


def _weave(first_reads: _Reads, second_reads: _Reads, first: _Side, second: _Side) -> _Stream:
    """Join equally many first and second mates so that each second mate follows its first mate.

    Raises:
        InputError: A header states another mate number than that of its file.
    """
    _refuse_other_mate(first, first_reads, mate=1)
    _refuse_other_mate(second, second_reads, mate=2)
    n_pairs = len(first_reads)
    bases = zip(first_reads.bases, second_reads.bases, strict=True)
    records = zip(first_reads.records, second_reads.records, strict=True)
    lines = zip(first_reads.lines, second_reads.lines, strict=True)
    return _Stream(
        ids=[name + end for name in first_reads.names for end in MATE_ENDS],
        bases=list(chain.from_iterable(bases)),
        records=list(chain.from_iterable(records)),
        lines=list(chain.from_iterable(lines)),
        follows_mate=[False, True] * n_pairs,
    )


def _refuse_other_mate(side: _Side, reads: _Reads, mate: int) -> None:
    """Raise an `InputError` if a header states the other mate number: 2 for 1, or 1 for 2."""
    other_mate = 3 - mate
    index = reads.mates.find(other_mate)
    if index >= 0:
        raise side.error(
            reads,
            index,
            f"is mate {other_mate}, mate {mate} belongs here",
            hint="are the files swapped?",
        )


def _orphans(side: _Side, count: int, other: _Side, mate: int, log: ParseLog) -> _Stream:
    """Remove the next reads of a file from its buffer and return them as orphans.

    Args:
        side: The file.
        count: Number of orphans.
        other: The file that lacks their mates.
        mate: Mate number of the orphans. If 0, their headers decide, and a read whose header states
            none counts as mate 1.
        log: Orphans are allowed if its `on_error` is `skip`.

    Raises:
        InputError: Orphans are not allowed, and there is one.
    """
    reads = side.take(count)
    if count > 0 and log.on_error == "stop":
        next_names = other.next_names(1)
        if next_names:
            where = f"where '{next_names[0].decode()}' is next, at line {other.next_line()}"
        else:
            where = "which ends"
        raise side.error(reads, 0, f"has no mate in {other.file}, {where}")
    ids: list[bytes] = []
    for name, mate_of_header in zip(reads.names, reads.mates, strict=True):
        ids.append(b"%b/%d" % (name, mate or mate_of_header or 1))
    return _Stream(ids, reads.bases, reads.records, reads.lines, [False] * count)


class _Gap(NamedTuple):
    """Numbers of reads before the next pair."""

    n_first: int  # of the first file
    n_second: int  # of the second file


def _find_next_pair(first: _Side, second: _Side, had_pairs: bool) -> _Gap:
    """Count the reads of each file that come before the next pair. These reads are orphans.

    The next pair is searched among the next `_NEAR` reads of both files, then among `_FAR` reads.

    Args:
        first: The file of first mates.
        second: The file of second mates.
        had_pairs: There were pairs before. If so, and both files end without another pair, all
            remaining reads are orphans. If not, the files do not belong together.

    Raises:
        InputError: The files do not hold their reads in the same order.
    """
    for reach in (_NEAR, _FAR):
        first_goes_on = first.fill(reach)
        second_goes_on = second.fill(reach)
        first_names = first.next_names(reach)
        second_names = second.next_names(reach)
        first_index_by_name: dict[bytes, int] = {}
        for index, name in enumerate(second_names):
            first_index_by_name.setdefault(name, index)
        for n_first, name in enumerate(first_names):
            if name not in first_index_by_name:
                continue
            n_second = first_index_by_name[name]
            # If a skipped read of the second file has its mate later in the first file, the order
            # of the two files differs.
            if set(second_names[:n_second]).isdisjoint(first_names):
                return _Gap(n_first, n_second)
            raise _order_error(first, second)
    if had_pairs and not first_goes_on and not second_goes_on:
        return _Gap(len(first), len(second))
    raise _order_error(first, second)


def _order_error(first: _Side, second: _Side) -> InputError:
    """Return an error about the next read of the first file, whose mate is not in order."""
    next_name = second.next_names(1)[0].decode()
    return first.error(
        first.take(1), 0, f"its mates do not follow in {second.file}, where '{next_name}' is next"
    )
