"""Cut regular FASTQ and FASTA into columns of reads, a whole block of bytes at a time.

The cutters compute on arrays of line positions and take no step per line. `cut_fastq` stops at the
first record that is not of the usual four lines. `slow_parser` reads such a file from there on.
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

# nucleotides, IUPAC codes, X for masked bases, gaps
LEGAL_LETTERS: Final = b"ACGTUNRYSWKMBDHVX-.acgtunryswkmbdhvx"
BLANKS: Final = b"\t\n\v\f\r\x1c\x1d\x1e\x1f "  # the bytes at which str.split() splits
_IS_BLANK: Final = np.isin(np.arange(33), list(BLANKS))  # by byte value
_MAX_SHOWN_LETTERS: Final = 200
_NEWLINE: Final = ord("\n")
_RETURN: Final = ord("\r")
_FASTA_MARK: Final = ord(">")
_FASTQ_MARK: Final = ord("@")
_PLUS: Final = ord("+")
_ILLEGAL_HINT: Final = "expected A C G T U N, IUPAC codes or gaps; is this a protein file?"


@dataclass(frozen=True, slots=True)
class Strings:
    """A column of byte strings: their bytes end to end, and where each of them begins."""

    data: bytes
    offsets: NDArray[np.int64]  # [n + 1]

    @classmethod
    def from_strings(cls, strings: Sequence[bytes]) -> Self:
        """Build a column from separate byte strings."""
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

    def printable_ids(self) -> "Strings":
        """Return these ids as printable UTF-8 words; a word may be empty.

        Control characters and bytes that are not UTF-8 are written as escape sequences.
        """
        letters = np.frombuffer(self.data, np.uint8)
        is_plain_ascii = not ((letters < 33) | (letters > 126)).any()
        if is_plain_ascii:  # this is true for nearly all files
            return self
        return Strings.from_strings([_printable_id(read_id) for read_id in self])

    def fill_empty_ids(self, n_earlier_reads: int) -> "Strings":
        """Return these ids with `unnamed_<number>` in place of each empty one.

        Args:
            n_earlier_reads: The number of reads before these. The numbers count all reads from 1.
        """
        if self.lengths.all():
            return self
        filled: list[bytes] = []
        for number, read_id in enumerate(self, n_earlier_reads + 1):
            filled.append(read_id or f"unnamed_{number}".encode())
        return Strings.from_strings(filled)


class Part(NamedTuple):
    """The position of a piece or batch within a FASTA record that is longer than a block."""

    id: bytes  # first word of the header, as it stands in the file
    line: int  # of the header
    n_bases_before: int = 0  # bases in the earlier parts
    is_first: bool = False
    is_last: bool = False
    # True for a last part without bases: the record is broken, so its earlier parts are discarded.
    is_dropped: bool = False


class Piece(NamedTuple):
    """A stretch of a file's text: whole records, as far as line ends show, or a part of one."""

    file_index: int  # place of the file among the inputs
    name: str
    format: Format
    data: bytes
    first_line: int  # number of the first line, from 1
    is_last: bool = False  # of its file
    damage: InputError | None = None  # why the file ends here; `data` then holds no whole record
    is_unreadable: bool = False  # for its damage, nothing of the file can be used
    part: Part | None = None

    def dropped_part(self, part: Part) -> "ReadBatch":
        """Return an empty batch that marks the end of a long record to be discarded.

        Its `part.is_dropped` tells the consumer to discard the earlier parts of this record.
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
    """Consecutive reads of a file as columns, or a part of one long read.

    Ids are printable UTF-8 words. Bases keep their case.
    """

    file_index: int  # place of the file among the inputs
    format: Format
    ids: Strings
    bases: Strings
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    records: Strings  # text of each record as it stands in the file; wrapped FASTQ is unwrapped
    part: Part | None = None
    follows_mate: NDArray[np.bool_] | None = None  # [n] the previous read is its mate; None: never

    def __len__(self) -> int:
        return len(self.ids)

    def id(self, index: int) -> str:
        """Return the id of one read."""
        return self.ids[index].decode()

    def drop_illegal(self, file_name: str) -> tuple["ReadBatch", list[InputError]]:
        """Leave out the reads that contain letters other than nucleotides.

        Args:
            file_name: The file that the errors name.

        Returns:
            The batch of the other reads, and an error for each read that was left out.
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
        """Describe the letter at a position (from 0) of a read that is not a nucleotide."""
        letter = self.bases[index][position : position + 1].decode("latin-1")
        base_number = position + 1
        if self.part is not None:
            base_number += self.part.n_bases_before
        return InputError(
            f"{letter!r} at base {base_number} is no nucleotide letter",
            file=file_name,
            line=int(self.lines[index]),
            read_id=shorten(self.id(index)),
            hint=_ILLEGAL_HINT,
        )


@dataclass(slots=True)
class ParseLog:
    """Counts and errors of parsing. They grow while the caller iterates over the batches."""

    on_error: OnError = "stop"
    report: Callable[[InputError], None] | None = None  # called for each record that is left out
    read_group: str = ""  # the sample whose reads are taken from alignments
    n_illegal: int = 0  # reads left out for letters that are not nucleotides
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(default_factory=Counter)  # broken and illegal records
    first_broken: dict[str, InputError] = field(default_factory=dict)  # of each file
    contents: dict[str, FileDigest] = field(default_factory=dict)  # of files read to their end
    not_primary: Counter[str] = field(default_factory=Counter)  # secondary alignments left out
    cut_s: float = 0.0  # seconds of unpacking, cutting, and reading line by line
    parse_s: float = 0.0  # seconds of reading pieces, summed over all workers
    _is_long_read_good: bool = True  # of the long read whose parts are coming in

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
        """Count the reads of a piece or batch and the reads that were left out of it.

        A long read that comes in parts is counted once, when its last part comes in.

        Args:
            name: The file.
            part: The position within a long read, if this is a part of one.
            n_reads: The number of reads without those left out.
            illegal: An error for each read that was left out for its letters.

        Returns:
            True if the reads are to be used. False if they are a part of a long read that is
            dropped, or that has an illegal letter in this or an earlier part.

        Raises:
            InputError: The first of `illegal`, if `on_error` is `stop`.
        """
        if part is not None:
            # A long read stays good until one of its parts is dropped or has an illegal letter.
            is_good = (part.is_first or self._is_long_read_good) and not part.is_dropped
            if not is_good:
                illegal = ()  # an error of this read was already reported
            self._is_long_read_good = is_good and not illegal
            n_reads = int(self._is_long_read_good and part.is_last)
        self.reads_by_file[name] += n_reads
        for error in illegal:
            self.n_illegal += 1
            self.skip_or_raise(error)
        return part is None or self._is_long_read_good

    def skip_or_raise(self, error: InputError) -> None:
        """Count a broken record and report it.

        Raises:
            InputError: The given error, if `on_error` is `stop`.
        """
        if self.on_error == "stop":
            raise error
        file = str(error.file)
        self.skipped_by_file[file] += 1
        self.first_broken.setdefault(file, error)
        if self.report is not None:
            self.report(error)


def offsets_from_lengths(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where each of n adjacent segments starts, and the end of the last: int64 [n + 1]."""
    return np.append(np.int64(0), np.cumsum(lengths, dtype=np.int64))


def shorten(text: str) -> str:
    """Make a text printable and short enough for a message: broken files may hold anything."""
    shown = _escape_unprintable(text[:_MAX_SHOWN_LETTERS])
    if len(text) > _MAX_SHOWN_LETTERS:
        shown += "…"
    return shown


def first_word(header: bytes) -> bytes:
    """Return the first word of a header, which is the id; it may be empty."""
    words = header.split(None, 1)
    return words[0] if words else b""


def _printable_id(read_id: bytes) -> bytes:
    """Return the first word of an id as printable UTF-8.

    The id is decoded before it is split, because Unicode has further blanks, such as U+2003.
    """
    words = read_id.decode("utf-8", "backslashreplace").split(None, 1)
    if not words:
        return b""
    return _escape_unprintable(words[0]).encode()


def _escape_unprintable(text: str) -> str:
    """Write unprintable characters as Python's escape sequences."""
    letters: list[str] = []
    for letter in text:
        if letter.isprintable():
            letters.append(letter)
        else:
            quoted = ascii(letter)
            letters.append(quoted[1:-1])
    return "".join(letters)


class _Lines:
    """The lines of a block of whole lines, as positions in `data`.

    Attributes:
        data: The text; each line ends with a newline.
        letters: The same as byte values: uint8 [bytes].
        starts: The first byte of each line: int64 [lines].
        ends: One past its last byte, without the line end: int64 [lines].
        next_starts: The first byte of the line after it: int64 [lines].
        blanks: Positions of blanks and control characters within lines, ascending: int64.
    """

    def __init__(self, data: bytes) -> None:
        """Find all line ends and blanks of a text whose last line ends with a newline."""
        letters = np.frombuffer(data, np.uint8)
        # Newlines and blanks all have codes up to 32, so one pass over the bytes finds both.
        low_positions = np.flatnonzero(letters <= 32)
        is_newline = letters[low_positions] == _NEWLINE
        newlines = low_positions[is_newline]
        next_starts = newlines + 1
        starts = np.append(0, next_starts)[:-1]
        ends = newlines
        blanks = low_positions[~is_newline]
        if b"\r" in data:
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
        """Return the index of the line that holds each of these positions."""
        return np.searchsorted(self.next_starts, positions, side="right")

    def slices(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """Return the bytes of the given stretches."""
        data = self.data
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return Strings(
            b"".join([data[start:end] for start, end in spans]), offsets_from_lengths(ends - starts)
        )

    def first_words(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """Return the first word of each of these stretches; it may be empty."""
        separators = self.blanks[_IS_BLANK[self.letters[self.blanks]]]
        separators = np.append(separators, len(self.data))
        next_separators = separators[np.searchsorted(separators[:-1], starts)]
        has_leading_blank = not (next_separators > starts).all()
        if has_leading_blank:
            stretches = self.slices(starts, ends)
            return Strings.from_strings([first_word(stretch) for stretch in stretches])
        return self.slices(starts, np.minimum(next_separators, ends))


class FastqCut(NamedTuple):
    """The regular records at the front of a piece of FASTQ."""

    batch: ReadBatch | None  # None if there are none
    n_bytes_left: int  # from the first irregular record to the end of the piece


def cut_fastq(piece: Piece) -> FastqCut:
    """Cut the regular four-line records from the front of a piece of FASTQ.

    Ids are returned as they are in the file; they may be empty or unprintable.
    """
    data = piece.data
    lines = _Lines(data if data.endswith(b"\n") else data + b"\n")
    n_records = len(lines.starts) // 4
    if n_records == 0:
        return FastqCut(None, len(data) if data.strip() else 0)
    is_regular = _find_regular_records(lines, n_records)
    n_regular = n_records if is_regular.all() else int(np.argmin(is_regular))
    if n_regular == 0:
        return FastqCut(None, len(data))

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
    """Find the records that are regular by the rules of Biopython's FASTQ parser.

    Returns:
        bool [n_records]. A record with a blank in its bases or qualities counts as irregular, too.
        Parsers treat such blanks differently, so the slow parser decides.
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

    # The third line may repeat the header after its '+', but have no other text.
    has_text_after_plus = is_regular & (plus_length > 1)
    for i in np.flatnonzero(has_text_after_plus).tolist():
        header = lines.data[starts[i, 0] + 1 : ends[i, 0]].rstrip()
        text_after_plus = lines.data[starts[i, 2] + 1 : ends[i, 2]].rstrip()
        is_regular[i] = text_after_plus in (header, b"")

    # Bases and qualities are the second and fourth line of a record: the lines 1, 3, 5, 7, ...
    line_of_blank = lines.lines_at(lines.blanks)
    is_within_record = line_of_blank < 4 * n_records
    is_bases_or_quality = line_of_blank % 2 == 1
    is_regular[line_of_blank[is_within_record & is_bases_or_quality] // 4] = False
    return is_regular


def cut_fasta(piece: Piece) -> ReadBatch:
    """Return all records of a piece of FASTA, or the one part of a long record that it holds.

    Comment lines were replaced by blank lines before.
    """
    part = piece.part
    data = piece.data
    if part is not None and not part.is_first:
        # Only the first part of a long record has the header. The others get one for parsing.
        data = b">%b\n" % part.id + data
    if not piece.data.endswith(b"\n"):
        data += b"\n"
    lines = _Lines(data)
    is_header = lines.letters[lines.starts] == _FASTA_MARK
    if part is not None:
        # A part may begin in the middle of a line. A '>' there is an illegal letter, not a header.
        is_header[1:] = False
    header_starts = lines.starts[is_header]
    if part is None:
        header_lines = piece.first_line + np.flatnonzero(is_header)
        records = Strings(lines.data, np.append(header_starts, len(lines.data)))
    else:
        header_lines = np.array([part.line])
        text = piece.data
        if part.is_last and not text.endswith(b"\n"):
            text += b"\n"  # so that another record can follow in an output file
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
    """Return the bases of each FASTA record, without line ends and blanks.

    Args:
        lines: The text, which begins with a header.
        is_header: Which lines are headers: bool [lines].
    """
    is_sequence = ~is_header & (lines.ends > lines.starts)
    starts = lines.starts[is_sequence]
    ends = lines.ends[is_sequence]
    record_of_line = np.cumsum(is_header) - 1
    n_bases = np.bincount(
        record_of_line[is_sequence], weights=ends - starts, minlength=np.count_nonzero(is_header)
    )
    offsets = offsets_from_lengths(n_bases.astype(np.int64))
    bases = Strings(lines.slices(starts, ends).data, offsets)
    has_blank_in_sequence = is_sequence[lines.lines_at(lines.blanks)].any()
    if has_blank_in_sequence:
        return Strings.from_strings([sequence.translate(None, BLANKS) for sequence in bases])
    return bases
