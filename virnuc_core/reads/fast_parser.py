"""Split FASTQ and FASTA text into columns of reads, a whole block of bytes at a time.

`cut_fastq` and `cut_fasta` compute with arrays of line positions and need no Python step per line.
`cut_fastq` stops at the first record that does not have the usual four lines. From that record on,
`slow_parser` reads the file.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import OnError
from virnuc_core.errors import InputError
from virnuc_core.runfiles import FileDigest

Format = Literal["fasta", "fastq"]

# Letters that may stand for a base: nucleotides, IUPAC codes, X for masked bases, gaps.
LEGAL_LETTERS: Final = b"ACGTUNRYSWKMBDHVX-.acgtunryswkmbdhvx"
BLANKS: Final = b"\t\n\v\f\r\x1c\x1d\x1e\x1f "  # ASCII characters at which str.split() splits
_IS_BLANK: Final = np.isin(np.arange(33), list(BLANKS))  # by byte value
_MAX_SHOWN_LETTERS: Final = 200  # of an id in a message
_NEWLINE: Final = ord("\n")
_RETURN: Final = ord("\r")
_FASTA_MARK: Final = ord(">")
_FASTQ_MARK: Final = ord("@")
_PLUS: Final = ord("+")
_ILLEGAL_HINT: Final = "expected A C G T U N, IUPAC codes or gaps; is this a protein file?"


@dataclass(frozen=True, slots=True)
class Strings:
    """A column of n byte strings, stored as one string.

    String i is `data[offsets[i] : offsets[i + 1]]`.
    """

    data: bytes  # all strings, concatenated
    offsets: NDArray[np.int64]  # [n + 1]

    @classmethod
    def from_strings(cls, strings: Sequence[bytes]) -> Self:
        """Build a column from separate byte strings.

        Args:
            strings: The strings, in order. They are copied.

        Returns:
            The column. Without strings it has the length 0.
        """
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(b"".join(strings), offsets_from_lengths(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[start:end] for start, end in pairwise(self.offsets.tolist()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each string in bytes: int64 [n]."""
        return np.diff(self.offsets)

    def head(self, count: int) -> "Strings":
        """Return a column of the first `count` strings, or of all if there are fewer."""
        offsets = self.offsets[: count + 1]
        return Strings(self.data[: offsets[-1]], offsets)

    def printable_ids(self) -> "Strings":
        """Return a column in which each read id is one printable UTF-8 word, or empty.

        Control characters and bytes that are not UTF-8 are replaced by escape sequences. An id is
        cut at its first blank.
        """
        letters = np.frombuffer(self.data, np.uint8)
        is_printable_ascii = not ((letters < 33) | (letters > 126)).any()
        if is_printable_ascii:  # the usual case: nothing to replace
            return self
        return Strings.from_strings([_printable_id(read_id) for read_id in self])

    def fill_empty_ids(self, n_earlier_reads: int) -> "Strings":
        """Return a column of read ids in which each empty id is replaced by `unnamed_<number>`.

        Args:
            n_earlier_reads: The number of reads in the input before this column. `<number>` is the
                number of the read in the whole input, from 1.
        """
        has_no_empty_id = self.lengths.all()
        if has_no_empty_id:
            return self
        new_ids: list[bytes] = []
        for number, read_id in enumerate(self, n_earlier_reads + 1):
            new_ids.append(read_id or f"unnamed_{number}".encode())
        return Strings.from_strings(new_ids)


class Part(NamedTuple):
    """The position of a text within a long FASTA record that is processed in several parts."""

    id: bytes  # first word of the header, unchanged
    line: int  # line number of the header
    n_bases_before: int = 0  # bases in the earlier parts of the record
    is_first: bool = False
    is_last: bool = False
    # Set in a last part without bases: the record is broken, and its earlier parts must be removed.
    is_dropped: bool = False


class Piece(NamedTuple):
    """A section of the text of a file that can be parsed independently of the rest.

    It contains whole records (as far as the line ends show), or one part of a long FASTA record.
    """

    file_index: int  # index of the file among the inputs
    name: str  # path of the file
    format: Format
    data: bytes  # the text
    first_line: int  # number of its first line in the file, from 1
    is_last: bool = False  # this is the last piece of its file
    damage: InputError | None = None  # why the file ends early; `data` then has no whole record
    is_unreadable: bool = False  # nothing of the file can be used, because of `damage`
    part: Part | None = None  # set if this is a part of a long FASTA record

    def dropped_part(self, part: Part) -> "ReadBatch":
        """Return a message to the later steps that a long FASTA record must be dropped.

        The message is a batch with one read without bases, marked by `part.is_dropped`.

        Args:
            part: The last part of the broken record.
        """
        empty = Strings.from_strings([b""])
        return ReadBatch(
            file_index=self.file_index,
            format=self.format,
            ids=empty,
            bases=empty,
            lines=np.array([part.line]),
            records=empty,
            part=part._replace(is_dropped=True),
        )


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Consecutive reads of a file, stored as columns; or one part of one long read.

    Bases keep their case.
    """

    file_index: int  # index of the file among the inputs
    format: Format
    ids: Strings
    bases: Strings
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    records: Strings  # unchanged text of each record; only wrapped FASTQ is unwrapped
    part: Part | None = None  # set if this is a part of a long read
    # [n] whether the previous read is the mate of this read; None if the file has no pairs
    follows_mate: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def id(self, index: int) -> str:
        """Return the id of one read."""
        return self.ids[index].decode()

    def head(self, count: int) -> "ReadBatch":
        """Return the first `count` reads of a batch of whole reads, or all if there are fewer."""
        if count >= len(self):
            return self
        follows_mate = self.follows_mate
        if follows_mate is not None:
            follows_mate = follows_mate[:count]
        return ReadBatch(
            file_index=self.file_index,
            format=self.format,
            ids=self.ids.head(count),
            bases=self.bases.head(count),
            lines=self.lines[:count],
            records=self.records.head(count),
            follows_mate=follows_mate,
        )

    def drop_illegal(self, file_name: str) -> tuple["ReadBatch", list[InputError]]:
        """Remove the reads that contain letters other than nucleotide codes.

        The batch itself is not changed.

        Args:
            file_name: The file of the reads, for messages.

        Returns:
            A batch of the legal reads, and an error for each read that was removed.

        Raises:
            InputError: FASTQ follows within FASTA. Its records would be lost as one illegal read.
        """
        has_only_legal_letters = not self.bases.data.translate(None, LEGAL_LETTERS)
        if has_only_legal_letters:
            return self, []
        legal_reads: list[int] = []
        errors: list[InputError] = []
        for index, letters in enumerate(self.bases):
            illegal_letters = letters.translate(None, LEGAL_LETTERS)
            if illegal_letters:
                position = letters.index(illegal_letters[:1])
                if self.format == "fasta" and b"\n@" in self.records[index]:
                    raise mixed_formats_error(file_name, int(self.lines[index]), "FASTQ", "FASTA")
                errors.append(self._illegal_letter_error(index, position, file_name))
            else:
                legal_reads.append(index)
        batch = ReadBatch(
            file_index=self.file_index,
            format=self.format,
            ids=Strings.from_strings([self.ids[index] for index in legal_reads]),
            bases=Strings.from_strings([self.bases[index] for index in legal_reads]),
            lines=self.lines[legal_reads],
            records=Strings.from_strings([self.records[index] for index in legal_reads]),
            part=self.part,
        )
        return batch, errors

    def _illegal_letter_error(self, index: int, position: int, file_name: str) -> InputError:
        """Return an error that describes an illegal letter in a read.

        Args:
            index: The index of the read in this batch.
            position: The position of the letter in this batch's bases of the read, from 0.
            file_name: The file of the read.
        """
        letter = self.bases[index][position : position + 1].decode("latin-1")
        base_number = position + 1
        if self.part is not None:
            base_number += self.part.n_bases_before
        return InputError(
            f"{letter!r} at base {base_number} is not a nucleotide code",
            file=file_name,
            line=int(self.lines[index]),
            read_id=shorten(self.id(index)),
            hint=_ILLEGAL_HINT,
        )


def mixed_formats_error(file: str, line: int, later: str, earlier: str) -> InputError:
    """Return the error for a file in which records of one format follow those of another.

    Such a file is refused as a whole, because it is not known how many of its reads are lost.

    Args:
        file: The name of the file.
        line: The line of the record in which, or at which, the other format begins.
        later: The format that begins there.
        earlier: The format of the file up to there.
    """
    return InputError(
        f"{later} begins in or at this record of a {earlier} file",
        file=file,
        line=line,
        hint="were two files joined? give them as two files",
    )


@dataclass(slots=True)
class ParseLog:
    """The counts and errors of reading some files. It is updated while the reads are drawn."""

    on_error: OnError = "stop"  # what to do with a broken record
    on_skipped: Callable[[InputError], None] | None = (
        None  # called for each record that is left out
    )
    read_group: str = ""  # the sample whose reads are taken from alignment files; empty for all
    n_illegal: int = 0  # reads left out because of letters that are not nucleotide codes
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(default_factory=Counter)  # broken and illegal records
    first_broken: dict[str, InputError] = field(default_factory=dict)  # first error of each file
    contents: dict[str, FileDigest] = field(default_factory=dict)  # of files read to their end
    bytes_used: Counter[str] = field(default_factory=Counter)  # of each file, mostly compressed
    not_primary: Counter[str] = field(default_factory=Counter)  # secondary alignments left out
    cut_s: float = 0.0  # seconds of unpacking, cutting, and parsing line by line
    parse_s: float = 0.0  # seconds of parsing pieces, summed over all workers
    _is_long_read_good: bool = True  # no part so far of the current long read is illegal

    @property
    def n_reads(self) -> int:
        """Return the number of reads so far, without those that were left out."""
        return self.reads_by_file.total()

    @property
    def n_records(self) -> int:
        """Return the number of records so far that had an id, legal letters or not."""
        return self.n_reads + self.n_illegal

    def count_reads(
        self, name: str, part: Part | None, n_reads: int, illegal: Sequence[InputError]
    ) -> bool:
        """Add the reads of a piece or batch to the counts, and report the reads left out of it.

        A long read in several parts is counted once, with its last part.

        Args:
            name: The file.
            part: The position within a long read; None for whole reads.
            n_reads: The number of reads, without those left out.
            illegal: An error for each read that was left out because of its letters.

        Returns:
            True if the reads may be used. False if they belong to a long read that is dropped, or
            that has an illegal letter in this or an earlier part.

        Raises:
            InputError: The first of `illegal`, if `on_error` is `stop`.
        """
        if part is not None:
            # A long read is good as long as no part of it is illegal or dropped.
            is_good = (part.is_first or self._is_long_read_good) and not part.is_dropped
            if not is_good:
                illegal = ()  # an earlier part was reported: one error per read is enough
            self._is_long_read_good = is_good and not illegal
            n_reads = int(self._is_long_read_good and part.is_last)
        self.reads_by_file[name] += n_reads
        for error in illegal:
            self.n_illegal += 1
            self.skip_or_raise(error)
        return part is None or self._is_long_read_good

    def skip_or_raise(self, error: InputError) -> None:
        """Handle a broken record as the user asked: raise its error, or count and report it.

        Args:
            error: Describes the record. Its file must be set.

        Raises:
            InputError: The given error, if `on_error` is `stop`.
        """
        if self.on_error == "stop":
            raise error
        file = str(error.file)
        self.skipped_by_file[file] += 1
        self.first_broken.setdefault(file, error)
        if self.on_skipped is not None:
            self.on_skipped(error)


def offsets_from_lengths(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the start of each of n adjacent segments, then the end of the last: int64 [n + 1]."""
    return np.append(np.int64(0), np.cumsum(lengths, dtype=np.int64))


def shorten(text: str) -> str:
    """Return a printable and short form of a text from a file, for a message.

    Unprintable characters become escape sequences. A long text is cut and ends with `…`.

    Args:
        text: The text, for example a read id.
    """
    short_text = _escape_unprintable(text[:_MAX_SHOWN_LETTERS])
    if len(text) > _MAX_SHOWN_LETTERS:
        short_text += "…"
    return short_text


def first_word(header: bytes) -> bytes:
    """Return the first word of a header line, which is the read id; b"" for a blank header.

    Args:
        header: The line without its mark, `>` or `@`.
    """
    words = header.split(None, 1)
    return words[0] if words else b""


def _printable_id(read_id: bytes) -> bytes:
    """Return the first word of a read id as printable UTF-8; b"" if the id is blank.

    Bytes that are not UTF-8 and unprintable characters become escape sequences.
    """
    # Decode before splitting: Unicode has more blanks than `bytes.split` knows.
    words = read_id.decode("utf-8", "backslashreplace").split(None, 1)
    if not words:
        return b""
    return _escape_unprintable(words[0]).encode()


def _escape_unprintable(text: str) -> str:
    """Return a text in which unprintable characters are replaced by Python's escape sequences."""
    letters: list[str] = []
    for letter in text:
        if letter.isprintable():
            letters.append(letter)
        else:
            quoted = ascii(letter)
            letters.append(quoted[1:-1])  # without the quotation marks
    return "".join(letters)


class _Lines:
    """A text and the positions of its lines.

    Attributes:
        data: The text. Each line ends with a newline.
        letters: The same text as byte values: uint8 [bytes].
        starts: The position of the first byte of each line: int64 [lines].
        ends: The position after the last byte of each line, without its line end: int64 [lines].
        next_starts: The position of the first byte of the following line: int64 [lines].
        blanks: The positions of blanks and control characters within lines, ascending: int64.
    """

    def __init__(self, data: bytes) -> None:
        """Find all lines of a text; nothing is copied.

        Args:
            data: The text. It must end with a newline.
        """
        letters = np.frombuffer(data, np.uint8)
        # Newlines, blanks and control characters are the bytes up to 32. Comparing all bytes once
        # finds them together, which is faster than a search for each kind.
        low_positions = np.flatnonzero(letters <= 32)
        is_newline = letters[low_positions] == _NEWLINE
        newlines = low_positions[is_newline]
        next_starts = newlines + 1
        starts = np.append(0, next_starts)[:-1]
        ends = newlines
        blanks = low_positions[~is_newline]
        if b"\r" in data:
            # Lines of Windows end with "\r\n": the "\r" belongs to the line end.
            ends_with_return = (newlines > starts) & (letters[newlines - 1] == _RETURN)
            ends = newlines - ends_with_return
            blanks = blanks[letters[blanks] != _RETURN]
        self.data = data
        self.letters = letters
        self.starts = starts
        self.ends = ends
        self.next_starts = next_starts
        self.blanks = blanks

    def lines_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the line that contains each position of the text: int64 [n]."""
        return np.searchsorted(self.next_starts, positions, side="right")

    def slices(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """Return the parts `data[start:end]` of the text as a column of strings.

        Args:
            starts: The start of each part: int64 [n].
            ends: The end of each part: int64 [n].
        """
        data = self.data
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return Strings(
            b"".join([data[start:end] for start, end in spans]), offsets_from_lengths(ends - starts)
        )

    def first_words(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """Return the first word of each part `data[start:end]`; a word may be empty.

        Args:
            starts: The start of each part: int64 [n].
            ends: The end of each part: int64 [n].
        """
        # `blanks` also has control characters that are no blanks. They do not end a word.
        separators = self.blanks[_IS_BLANK[self.letters[self.blanks]]]
        # The end of the text is a separator, too, so that there is always a next one.
        separators = np.append(separators, len(self.data))
        next_separators = separators[np.searchsorted(separators[:-1], starts)]
        has_leading_blank = not (next_separators > starts).all()
        if has_leading_blank:
            stretches = self.slices(starts, ends)
            return Strings.from_strings([first_word(stretch) for stretch in stretches])
        return self.slices(starts, np.minimum(next_separators, ends))


class FastqCut(NamedTuple):
    """The regular records at the front of a FASTQ text."""

    batch: ReadBatch | None  # None if the first record is irregular, or there is no record
    n_bytes_left: int  # from the first irregular record to the end of the text


def cut_fastq(piece: Piece) -> FastqCut:
    """Split a FASTQ text into reads, up to the first record that is not regular.

    A regular record has four lines: header, bases, `+` and qualities. Ids are returned unchanged,
    so they may be empty or unprintable.

    Args:
        piece: A text that begins with a record.

    Returns:
        The regular records, and the number of bytes after them, which the slow parser must read.
    """
    # Count the regular records at the front. Blank text after the last record does not count.
    data = piece.data
    lines = _Lines(data if data.endswith(b"\n") else data + b"\n")
    n_records = len(lines.starts) // 4
    if n_records == 0:
        return FastqCut(None, len(data) if data.strip() else 0)
    is_regular = _find_regular_records(lines, n_records)
    if is_regular.all():
        n_regular = n_records
    else:
        n_regular = int(np.argmin(is_regular))  # the index of the first False
    if n_regular == 0:
        return FastqCut(None, len(data))

    # Take their columns. In the tables of positions, a row is a record and a column one of its
    # four lines.
    n_lines = 4 * n_regular
    starts = lines.starts[:n_lines].reshape(n_regular, 4)
    ends = lines.ends[:n_lines].reshape(n_regular, 4)
    regular_end = lines.next_starts[n_lines - 1]
    record_offsets = np.append(0, lines.next_starts[3:n_lines:4])
    batch = ReadBatch(
        file_index=piece.file_index,
        format="fastq",
        ids=lines.first_words(starts[:, 0] + 1, ends[:, 0]),
        bases=lines.slices(starts[:, 1], ends[:, 1]),
        lines=piece.first_line + 4 * np.arange(n_regular, dtype=np.int64),
        records=Strings(lines.data[:regular_end], record_offsets),
    )
    rest = data[regular_end:]
    return FastqCut(batch, len(rest) if rest.strip() else 0)


def _find_regular_records(lines: _Lines, n_records: int) -> NDArray[np.bool_]:
    """Return which records of four lines follow the rules of Biopython's FASTQ parser.

    A record with a blank in its bases or qualities counts as irregular, because a parser may strip
    blanks. The slow parser decides about such a record.

    Args:
        lines: The lines of the text.
        n_records: The number of records. The first `4 * n_records` lines are checked.

    Returns:
        bool [n_records].
    """
    starts = lines.starts[: 4 * n_records].reshape(n_records, 4)
    ends = lines.ends[: 4 * n_records].reshape(n_records, 4)
    lengths = ends - starts
    n_bases = lengths[:, 1]
    plus_length = lengths[:, 2]
    n_qualities = lengths[:, 3]
    has_header = lines.letters[starts[:, 0]] == _FASTQ_MARK
    has_plus = (lines.letters[starts[:, 2]] == _PLUS) & (plus_length >= 1)
    is_regular: NDArray[np.bool_] = has_header & has_plus & (n_bases == n_qualities)

    # The text after '+' must be empty or repeat the header.
    has_text_after_plus = is_regular & (plus_length > 1)
    for i in np.flatnonzero(has_text_after_plus).tolist():
        header = lines.data[starts[i, 0] + 1 : ends[i, 0]].rstrip()
        text_after_plus = lines.data[starts[i, 2] + 1 : ends[i, 2]].rstrip()
        is_regular[i] = text_after_plus in (header, b"")

    # Within a record, bases and qualities are lines 1 and 3 (from 0), so their numbers are odd.
    line_of_blank = lines.lines_at(lines.blanks)
    is_within_record = line_of_blank < 4 * n_records
    is_bases_or_quality = line_of_blank % 2 == 1
    line_with_blank = line_of_blank[is_within_record & is_bases_or_quality]
    is_regular[line_with_blank // 4] = False
    return is_regular


def cut_fasta(piece: Piece) -> ReadBatch:
    """Split a FASTA text into reads. Comment lines must have been replaced by blanks before.

    Ids are returned unchanged, so they may be empty or unprintable.

    Args:
        piece: Whole records, or a part of a long record.

    Returns:
        The reads. A part of a long record becomes a batch of one read.
    """
    part = piece.part
    data = piece.data
    if part is not None and not part.is_first:
        # Add the header of the record, so that each part can be parsed like a whole record.
        data = b">%b\n" % part.id + data
    if not piece.data.endswith(b"\n"):
        data += b"\n"
    lines = _Lines(data)
    is_header = lines.letters[lines.starts] == _FASTA_MARK
    if part is not None:
        # Only the first line is a header. The text of a part may begin in the middle of a sequence
        # line, and a '>' there is an illegal letter, not a header.
        is_header[1:] = False
    header_starts = lines.starts[is_header]
    if part is None:
        header_lines = piece.first_line + np.flatnonzero(is_header)
        records = Strings(lines.data, np.append(header_starts, len(lines.data)))
    else:
        header_lines = np.array([part.line])
        text = piece.data
        if part.is_last and not text.endswith(b"\n"):
            text += b"\n"  # so that another record can be written after this record
        records = Strings.from_strings([text])
    return ReadBatch(
        file_index=piece.file_index,
        format="fasta",
        ids=lines.first_words(header_starts + 1, lines.ends[is_header]),
        bases=_join_sequence_lines(lines, is_header),
        lines=header_lines,
        records=records,
        part=part,
    )


def _join_sequence_lines(lines: _Lines, is_header: NDArray[np.bool_]) -> Strings:
    """Return the bases of each FASTA record: its sequence lines, joined, without blanks.

    Args:
        lines: The lines of the text. The first line is a header.
        is_header: Which lines are headers: bool [lines].

    Returns:
        A column with one string per header. A string is empty if no sequence line follows.
    """
    is_sequence = ~is_header & (lines.ends > lines.starts)
    starts = lines.starts[is_sequence]
    ends = lines.ends[is_sequence]
    record_of_line = np.cumsum(is_header) - 1  # the number of headers up to a line, less one
    n_bases = np.bincount(
        record_of_line[is_sequence], weights=ends - starts, minlength=np.count_nonzero(is_header)
    )
    offsets = offsets_from_lengths(n_bases.astype(np.int64))
    bases = Strings(lines.slices(starts, ends).data, offsets)
    has_blank_in_sequence = is_sequence[lines.lines_at(lines.blanks)].any()
    if has_blank_in_sequence:
        return Strings.from_strings([sequence.translate(None, BLANKS) for sequence in bases])
    return bases
