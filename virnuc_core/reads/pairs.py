"""Read pairs of mates, from two files or from one, as one sequence of reads.

In this sequence the second mate of a pair directly follows the first. Mates have equal ids in the
files, or ids that end in `/1` and `/2`. In the sequence all ids end in `/1` or `/2`, so that they
are unique. A read whose mate is missing is called an orphan. Orphans are allowed only if the user
asked to skip broken records.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from virnuc_core.errors import InputError
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch, Strings
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import Inputs, find_alignment_format_of_file

MATE_ENDS: Final = (b"/1", b"/2")  # at the end of ids
# Reads that show how the ids of mates end, if the file has so many. The first batch alone may have
# one read only: a batch ends where FASTQ becomes irregular.
_SHOWN_READS: Final = 1000
DIGITS: Final = tuple(b"0123456789")
# What ends the ids of mates in some files in place of `/1` and `/2`: one of these before the number
OTHER_MARKS: Final = (b".", b"_", b":")
ORDER_HINT: Final = (
    "mates must follow in the same order; "
    "--on-error skip judges orphans alone, --no-pairs each read"
)
NAMES_HINT: Final = (
    "the ids of mates must be equal, or end in /1 and /2 (or .1 and .2, _1 and _2, :1 and :2); "
    "--no-pairs judges each read"
)
BATCH_READS: Final = 1 << 14  # reads of a batch, at least
_COMPARED_AT_ONCE: Final = 1 << 12  # pairs whose names are compared in one step
# After a read without its mate, the next complete pair is searched in this many reads of both
# files: first in a few, because mostly single reads are missing, then in many.
_NEAR: Final = 1 << 6
_FAR: Final = 1 << 16


@dataclass(slots=True)
class _Reads:
    """Consecutive reads of one file, as columns."""

    names: list[bytes] = field(default_factory=list)  # ids without /1 and /2: equal for mates
    bases: list[bytes] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # unchanged text of the records
    lines: list[int] = field(default_factory=list)  # line numbers of the headers
    mates: bytes = b""  # one byte per read: 1 or 2 according to its header, 0 if it does not tell

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, rows: slice) -> "_Reads":
        """Return a range of the reads."""
        return _Reads(
            self.names[rows],
            self.bases[rows],
            self.records[rows],
            self.lines[rows],
            self.mates[rows],
        )

    def __add__(self, later: "_Reads") -> "_Reads":
        """Return these reads followed by later ones."""
        return _Reads(
            self.names + later.names,
            self.bases + later.bases,
            self.records + later.records,
            self.lines + later.lines,
            self.mates + later.mates,
        )


@dataclass(slots=True)
class _Stream:
    """Reads in the order of the output: mates next to each other, and orphans. As columns."""

    ids: list[bytes] = field(default_factory=list)  # each ends in /1 or /2
    bases: list[bytes] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # unchanged text of the records
    lines: list[int] = field(default_factory=list)  # line numbers of the headers
    follows_mate: list[bool] = field(default_factory=list)  # the previous read is the read's mate

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, later: "_Stream") -> None:
        """Add the reads of another sequence to the end of this one.

        Args:
            later: The reads to add.
        """
        self.ids += later.ids
        self.bases += later.bases
        self.records += later.records
        self.lines += later.lines
        self.follows_mate += later.follows_mate

    def to_batch(self, format_: Format, *, with_records: bool) -> ReadBatch:
        """Return these reads as a batch.

        Args:
            format_: The format of the records.
            with_records: Include the text of the records; otherwise that column is empty.

        Returns:
            The batch. It names no file, because its reads come from two.
        """
        return ReadBatch(
            file_index=0,  # has no meaning here
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
    """Read all files of pairs, and yield batches in which the second mate follows the first.

    Args:
        inputs: The files. Only those in `inputs.pairs` are read.
        log: Is updated with the counts, and the errors of the records that are left out.
        with_records: Keep the text of each record.

    Yields:
        Batches of reads. A pair is never divided between two batches.

    Raises:
        InputError: See `parse`. Also if the files have their reads in different orders, if the
            first and the second file were exchanged, or if a read has no mate (the last only unless
            `log.on_error` is `skip`).
    """
    for files in inputs.pairs:
        first = _Side(files[0], log)
        holds_both_mates = files[0] == files[1]
        if holds_both_mates:
            joined_reads = _join_interleaved(first, log)
        else:
            joined_reads = _join_two_files(first, _Side(files[1], log), log)
        stream = _Stream()
        for reads in joined_reads:
            stream.append(reads)
            if len(stream) >= BATCH_READS:
                yield stream.to_batch(first.format, with_records=with_records)
                stream = _Stream()
        if len(stream) > 0:
            yield stream.to_batch(first.format, with_records=with_records)


def begins_with_pair(batch: ReadBatch) -> bool:
    """Return True if the first two reads of a batch are the mates of one pair by their headers.

    Args:
        batch: The first reads of a file that is not read as pairs.
    """
    if len(batch) < 2 or batch.follows_mate is not None:
        return False
    reads = _with_mates(batch)
    return reads.names[0] == reads.names[1] and reads.mates[:2] == b"\1\2"


class _Side:
    """One file of a pair, with a buffer of reads that were parsed but not taken yet.

    Attributes:
        file: The path.
        format: The format; it is known after the first reads were parsed.
    """

    def __init__(self, file: str, log: ParseLog) -> None:
        """Prepare to read a file; nothing is read yet."""
        self.file = file
        self.format: Format = "fastq"  # until the first batch tells
        self._batches = parse((file,), log)
        self._reads = _Reads()  # the buffer
        self._next = 0  # index in the buffer of the first read that was not taken
        self._mate_ends: tuple[bytes, ...] = ()  # that every id has in place of `/1` or `/2`

    def __len__(self) -> int:
        """Return the number of reads in the buffer that were not taken yet."""
        return len(self._reads) - self._next

    def fill(self, count: int) -> bool:
        """Parse more of the file until the buffer has at least `count` reads that were not taken.

        Args:
            count: The wanted number of reads in the buffer.

        Returns:
            False if the file ended before.

        Raises:
            InputError: A read is too long to be one of a pair, or the file cannot be parsed (see
                `parse`).
        """
        while len(self) < count:
            batch = next(self._batches, None)
            if batch is None:
                return False
            if batch.part is not None:  # `parse` cuts only very long reads into parts
                raise InputError(
                    "this read is too long to be one of a pair",
                    file=self.file,
                    line=int(batch.lines[0]),
                )
            self.format = batch.format
            new_reads = _with_mates(batch)
            self._remove_mate_ends(new_reads)
            self._reads = self._reads[self._next :] + new_reads
            self._next = 0
        return True

    def use_mate_ends(self, ends: tuple[bytes, ...]) -> None:
        """Remove these ends from the names of all reads that were not taken, and of later ones.

        Args:
            ends: What the id of every read must end in, such as `.1`. Of two, the first is that of
                first mates.

        Raises:
            InputError: An id has another end.
        """
        self._mate_ends = ends
        self._remove_mate_ends(self._reads)

    def _remove_mate_ends(self, reads: _Reads) -> None:
        """Remove the ends of this file's ids from the names of some reads, in place.

        The numbers in these ends say which mate each read is.
        """
        if not self._mate_ends:
            return
        mates: list[int] = []
        for index, name in enumerate(reads.names):
            if not name.endswith(self._mate_ends):
                wanted = " or ".join(end.decode() for end in self._mate_ends)
                problem = f"its id does not end in {wanted}, as those before it"
                raise self.error(reads, index, problem)
            reads.names[index] = name[:-2]
            mates.append(int(name[-1:]))
        reads.mates = bytes(mates)

    def next_names(self, count: int) -> list[bytes]:
        """Return the names of the next `count` reads in the buffer, without taking the reads."""
        return self._reads.names[self._next : self._next + count]

    def next_line(self) -> int:
        """Return the line number of the next read in the buffer."""
        return self._reads.lines[self._next]

    def next_mate(self) -> int:
        """Return which mate the next read in the buffer is; 0 if its header does not tell."""
        return self._reads.mates[self._next]

    def take(self, count: int) -> _Reads:
        """Remove the next `count` reads from the buffer and return them.

        Args:
            count: The number of reads. They must be in the buffer; see `fill`.
        """
        reads = self._reads[self._next : self._next + count]
        self._next += count
        return reads

    def error(self, reads: _Reads, index: int, problem: str, hint: str = ORDER_HINT) -> InputError:
        """Return an error about one read of this file, to be raised by the caller.

        Args:
            reads: Reads that were taken from this file.
            index: The index of the read among them.
            problem: What is wrong.
            hint: What the user can do.
        """
        return InputError(
            problem,
            file=self.file,
            line=reads.lines[index],
            read_id=reads.names[index].decode(),
            hint=hint,
        )


def _with_mates(batch: ReadBatch) -> _Reads:
    """Return the reads of a batch, with ids without `/1` and `/2`, and the number of each mate."""
    # This is a hot loop, so one comprehension does it all.
    names = [read_id[:-2] if read_id.endswith(MATE_ENDS) else read_id for read_id in batch.ids]
    return _Reads(
        names=names,
        bases=list(batch.bases),
        records=list(batch.records),
        lines=batch.lines.tolist(),
        mates=_mates_from_headers(batch),
    )


def _mates_from_headers(batch: ReadBatch) -> bytes:
    """Find out from the header of each read whether the read is a first or a second mate.

    A header tells it by an id that ends in `/1` or `/2`, or by a word such as `1:N:0:ACGT` after
    the id, as Illumina's Casava writes it: the mate, whether the read was filtered (Y or N), and a
    number. Other words that begin with `1:` or `2:` mean something else.

    Returns:
        One byte per read: 1 or 2; 0 if the header does not tell.
    """
    padding = bytes(6)  # so that there are six letters after the last id, too
    letters = np.frombuffer(batch.records.data + padding, np.uint8)
    # A record begins with a mark and the id. An id with escape sequences is longer than the id in
    # the text, so limit the position to the text.
    id_ends = np.minimum(
        batch.records.offsets[:-1] + 1 + batch.ids.lengths, len(letters) - len(padding)
    )
    # The id ends before `id_ends`: a slash would be its last letter but one. Of a word after the
    # id, the blank is at `id_ends`, and the letters of the word follow.
    has_slash = letters[id_ends - 2] == ord("/")
    is_casava = letters[id_ends] == ord(" ")
    is_casava &= letters[id_ends + 2] == ord(":")
    is_casava &= np.isin(letters[id_ends + 3], (ord("Y"), ord("N")))
    is_casava &= letters[id_ends + 4] == ord(":")
    is_casava &= np.isin(letters[id_ends + 5], DIGITS)
    digits_after_id = is_casava * letters[id_ends + 1]  # 0 where there is no such word
    digits = np.where(has_slash, letters[id_ends - 1], digits_after_id)
    mates = np.zeros(len(batch), np.uint8)
    mates[digits == ord("1")] = 1
    mates[digits == ord("2")] = 2
    return mates.tobytes()


def _agree_on_mate_ends(first: _Side, second: _Side) -> None:
    """Find out whether the ids of mates end in `.1` and `.2`, `_1` and `_2`, or `:1` and `:2`.

    They do if the first names of both files differ and all names of the first thousands of reads
    end so. The ends are then removed from the names of both files.

    Raises:
        InputError: See `_Side.fill`.
    """
    first.fill(_SHOWN_READS)
    second.fill(_SHOWN_READS)
    if not (len(first) and len(second)):
        return
    first_names = first.next_names(len(first))
    second_names = second.next_names(len(second))
    if first_names[0] == second_names[0]:
        return
    for mark in OTHER_MARKS:
        first_end = mark + b"1"
        second_end = mark + b"2"
        first_has = all(name.endswith(first_end) for name in first_names)
        if first_has and all(name.endswith(second_end) for name in second_names):
            first.use_mate_ends((first_end,))
            second.use_mate_ends((second_end,))
            return


def _find_mate_ends_of_interleaved(side: _Side) -> None:
    """Do the same as `_agree_on_mate_ends` for a file that holds both mates of each pair.

    The ids of mates end so if all names of the first thousands of reads do, and if neighbours are
    more often mates by these ends than equal. Mates called `run.1` and `run.1` are equal. Then the
    ends are part of the name of a pair, because archives number the pairs.

    Raises:
        InputError: See `_Side.fill`.
    """
    side.fill(_SHOWN_READS)
    if len(side) < 2:
        return
    names = side.next_names(len(side))
    n_equal = sum(name == next_name for name, next_name in itertools.pairwise(names))
    for mark in OTHER_MARKS:
        ends = (mark + b"1", mark + b"2")
        if not all(name.endswith(ends) for name in names):
            continue
        if _count_mates_by_ends(names, ends) > n_equal:
            side.use_mate_ends(ends)
        return


def _count_mates_by_ends(names: list[bytes], ends: tuple[bytes, bytes]) -> int:
    """Count the neighbours whose names differ only by these ends, in this order."""
    count = 0
    for name, next_name in itertools.pairwise(names):
        if name.endswith(ends[0]) and next_name == name[:-2] + ends[1]:
            count += 1
    return count


def _join_interleaved(side: _Side, log: ParseLog) -> Iterator[_Stream]:
    """Divide the reads of a file that holds both mates into pairs and orphans, in their order.

    Args:
        side: The file.
        log: Its `on_error` decides whether reads without mates (orphans) are an error.

    Yields:
        Reads in which each second mate follows its first mate, and orphans between the pairs.

    Raises:
        InputError: See `pair_batches`.
    """
    # In alignment files flags tell which reads are mates, and so which of them are single reads.
    has_flags = bool(find_alignment_format_of_file(side.file))
    max_pairs = _COMPARED_AT_ONCE
    _find_mate_ends_of_interleaved(side)
    while side.fill(2):
        n_compared = min(len(side), max_pairs) // 2
        names = side.next_names(2 * n_compared)
        n_pairs = _count_equal_names(names[::2], names[1::2])
        reads = side.take(2 * n_pairs)
        yield _weave(reads[::2], reads[1::2], side, side)
        max_pairs = min(2 * max_pairs, _COMPARED_AT_ONCE)
        if n_pairs < n_compared:
            # The next two reads have different names, so the first one has no mate here.
            if has_flags and side.next_mate() == 0:
                yield _single_reads(side.take(1))
            else:  # mate=0: its header tells which mate it is
                yield _orphans(side, 1, side, mate=0, log=log)
            max_pairs = _NEAR  # more mates may be missing nearby: compare in small steps
    while side.fill(1):  # one read is left
        if has_flags and side.next_mate() == 0:
            yield _single_reads(side.take(1))
        else:
            yield _orphans(side, 1, side, mate=0, log=log)


def _join_two_files(first: _Side, second: _Side, log: ParseLog) -> Iterator[_Stream]:
    """Combine the reads of a file of first mates and a file of second mates, in their order.

    Args:
        first: The file of first mates.
        second: The file of second mates.
        log: Its `on_error` decides whether reads without mates (orphans) are an error.

    Yields:
        Reads in which each second mate follows its first mate, and orphans between the pairs.

    Raises:
        InputError: See `pair_batches`.
    """
    # After the last pair the rest of both files may be orphans. Without any pair before, the files
    # do not belong together, and `_find_next_pair` raises an error.
    had_pairs = False
    max_pairs = _COMPARED_AT_ONCE
    _agree_on_mate_ends(first, second)  # ids may end in .1 and .2 in place of /1 and /2
    while first.fill(1) and second.fill(1):
        if first.format != second.format:
            raise InputError(
                f"is {first.format}, but {second.file} with its mates {second.format}",
                file=first.file,
            )
        n_compared = min(len(first), len(second), max_pairs)
        n_pairs = _count_equal_names(first.next_names(n_compared), second.next_names(n_compared))
        yield _weave(first.take(n_pairs), second.take(n_pairs), first, second)
        had_pairs = had_pairs or n_pairs > 0
        max_pairs = min(2 * max_pairs, _COMPARED_AT_ONCE)
        if n_pairs < n_compared:
            # All reads before the next complete pair are orphans.
            gap = _find_next_pair(first, second, had_pairs)
            yield _orphans(first, gap.n_first, second, mate=1, log=log)
            yield _orphans(second, gap.n_second, first, mate=2, log=log)
            max_pairs = _NEAR  # more mates may be missing nearby: compare in small steps
    # One file has ended. All further reads of the other file are orphans.
    while first.fill(1):
        yield _orphans(first, len(first), second, mate=1, log=log)
    while second.fill(1):
        yield _orphans(second, len(second), first, mate=2, log=log)


def _count_equal_names(first_names: list[bytes], second_names: list[bytes]) -> int:
    """Count the complete pairs at the beginning of two equally long lists of names.

    Returns:
        The index of the first two names that differ; the length of the lists if none differ.
    """
    if first_names == second_names:  # the usual case: one fast comparison of two lists
        return len(first_names)
    for index, (first_name, second_name) in enumerate(zip(first_names, second_names, strict=True)):
        if first_name != second_name:
            return index
    return len(first_names)


def _weave(first_reads: _Reads, second_reads: _Reads, first: _Side, second: _Side) -> _Stream:
    """Merge first and second mates into one sequence: first, second, first, second, …

    Args:
        first_reads: The first mates.
        second_reads: The second mates, in the same order.
        first: The file of the first mates, for messages.
        second: The file of the second mates, for messages.

    Raises:
        InputError: According to its header, a first mate is a second one or the other way round.
    """
    _refuse_other_mate(first, first_reads, mate=1)
    _refuse_other_mate(second, second_reads, mate=2)
    n_pairs = len(first_reads)
    bases = zip(first_reads.bases, second_reads.bases, strict=True)
    records = zip(first_reads.records, second_reads.records, strict=True)
    lines = zip(first_reads.lines, second_reads.lines, strict=True)
    return _Stream(
        ids=[name + end for name in first_reads.names for end in MATE_ENDS],
        bases=list(itertools.chain.from_iterable(bases)),
        records=list(itertools.chain.from_iterable(records)),
        lines=list(itertools.chain.from_iterable(lines)),
        follows_mate=[False, True] * n_pairs,
    )


def _refuse_other_mate(side: _Side, reads: _Reads, mate: int) -> None:
    """Raise an `InputError` if the header of a read says that it is the other mate of its pair.

    Args:
        side: The file of the reads.
        reads: The reads.
        mate: The mate that all reads should be: 1 or 2. Headers may also tell nothing.
    """
    other_mate = 3 - mate
    index = reads.mates.find(other_mate)
    if index >= 0:
        raise side.error(
            reads,
            index,
            f"the header says mate {other_mate}, but mate {mate} is expected here",
            hint="are the files swapped?",
        )


def _orphans(side: _Side, count: int, other: _Side, mate: int, log: ParseLog) -> _Stream:
    """Take reads whose mates are missing (orphans) from a file.

    Args:
        side: The file of the reads.
        count: The number of reads.
        other: The file in which their mates are missing, for messages.
        mate: Which mate they are: 1 or 2. With 0 the header of each read decides; a read whose
            header does not tell is a first mate.
        log: Orphans are an error if `log.on_error` is `stop`.

    Raises:
        InputError: There is an orphan, and orphans are an error.
    """
    reads = side.take(count)
    if count > 0 and log.on_error == "stop":
        next_names = other.next_names(1)
        if next_names:
            position = f"where '{next_names[0].decode()}' is next, at line {other.next_line()}"
        else:
            position = "which ends"
        raise side.error(reads, 0, f"has no mate in {other.file}, {position}")
    ids: list[bytes] = []
    for name, mate_of_header in zip(reads.names, reads.mates, strict=True):
        ids.append(b"%b/%d" % (name, mate or mate_of_header or 1))
    return _Stream(ids, reads.bases, reads.records, reads.lines, [False] * count)


def _single_reads(reads: _Reads) -> _Stream:
    """Return reads that were not sequenced as pairs, with their own ids."""
    return _Stream(reads.names, reads.bases, reads.records, reads.lines, [False] * len(reads))


class _Gap(NamedTuple):
    """The numbers of reads that come before the next complete pair."""

    n_first: int  # in the first file
    n_second: int  # in the second file


def _find_next_pair(first: _Side, second: _Side, had_pairs: bool) -> _Gap:
    """Count the reads of each file that come before the next complete pair.

    The pair is searched in the next 64 reads of both files, then in the next 65,536.

    Args:
        first: The file of first mates.
        second: The file of second mates.
        had_pairs: The files had pairs before this place. Then it is not an error if both files end
            without a further pair: all reads that are left have no mate.

    Raises:
        InputError: The files do not have their reads in the same order.
    """
    for reach in (_NEAR, _FAR):  # reads of each file that are looked at
        first_goes_on = first.fill(reach)
        second_goes_on = second.fill(reach)
        first_names = first.next_names(reach)
        second_names = second.next_names(reach)
        index_in_second: dict[bytes, int] = {}  # of the first read with this name
        for index, name in enumerate(second_names):
            index_in_second.setdefault(name, index)
        for n_first, name in enumerate(first_names):
            if name not in index_in_second:
                continue
            # The first read of the first file that has a mate. If a read before this mate has a
            # mate, too, the files are in different orders.
            n_second = index_in_second[name]
            if set(second_names[:n_second]).isdisjoint(first_names):
                return _Gap(n_first, n_second)
            raise _order_error(first, second)
    if had_pairs and not first_goes_on and not second_goes_on:
        return _Gap(len(first), len(second))
    raise _order_error(first, second)


def _order_error(first: _Side, second: _Side) -> InputError:
    """Return the error for two files of mates whose reads are not in the same order.

    It is about the next read of the first file, which has another mate in the second file than the
    next one, or none. As a side effect, the read is taken from the first file.

    Args:
        first: The file of first mates.
        second: The file of second mates.
    """
    second_name = second.next_names(1)[0].decode()
    reads = first.take(1)
    if _differ_by_last_word(reads.names[0].decode(), second_name):
        problem = f"its mate has another id, '{second_name}' in {second.file}"
        return first.error(reads, 0, problem, NAMES_HINT)
    problem = f"its mates do not follow in {second.file}, where '{second_name}' is next"
    return first.error(reads, 0, problem)


def _differ_by_last_word(first_name: str, second_name: str) -> bool:
    """Return whether two names differ only by their last words, as `x_forward` and `x_reverse`.

    Numbers count as such words only behind an R: plain numbers often tell reads apart.
    """
    *first_stem, first_word = re.split("[._:/-]", first_name)
    *second_stem, second_word = re.split("[._:/-]", second_name)
    if first_stem != second_stem or not first_stem or first_word == second_word:
        return False
    return all(re.fullmatch("[A-Za-z]+|[Rr][12]", word) for word in (first_word, second_word))
