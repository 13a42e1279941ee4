"""Regular FASTQ and FASTA cut into columnar batches of reads on whole blocks of bytes, without a step per line.

A cutter takes what it is sure of from the front of a block; FASTQ from anything unusual on is left to `slow_parser`."""

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

LEGAL: Final = (
    b"ACGTUNRYSWKMBDHVX-.acgtunryswkmbdhvx"  # nucleotides, IUPAC codes, X for masked bases, gaps
)
_LONGEST_SHOWN: Final = 200
_NEWLINE, _RETURN, _HEADER_FASTA, _HEADER_FASTQ, _PLUS = b"\n\r>@+"
BLANKS: Final = b"\t\n\v\f\r\x1c\x1d\x1e\x1f "  # what str.split() takes for such
_SPLITS: Final = np.isin(np.arange(33), list(BLANKS))


@dataclass(frozen=True, slots=True)
class Strings:
    """Byte strings, end to end."""

    data: bytes
    offsets: NDArray[np.int64]  # [n + 1]

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Self:
        """Those given."""
        return cls(
            b"".join(strings), offsets_of(np.fromiter(map(len, strings), np.int64, len(strings)))
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[a:b] for a, b in pairwise(self.offsets.tolist()))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n]"""
        return np.diff(self.offsets)

    def printable(self) -> "Strings":
        """Ids as printable UTF-8 words, some perhaps empty; nearly always they are just that already."""
        raw = np.frombuffer(self.data, np.uint8)
        if not ((raw < 33) | (raw > 126)).any():
            return self
        texts = (one.decode("utf-8", "backslashreplace") for one in self)
        return Strings.of([_printable("".join(text.split(None, 1)[:1])).encode() for text in texts])

    def named(self, before: int) -> "Strings":
        """Ids with a name for each that is empty, by the number of reads `before`."""
        if self.lengths.all():
            return self
        return Strings.of(
            [name or f"unnamed_{before + i}".encode() for i, name in enumerate(self, 1)]
        )


class Part(NamedTuple):
    """Which part of a FASTA record that is longer than a block a piece or batch holds, and nothing else."""

    id: bytes  # first word of the header, as it stands
    line: int  # of the header
    before: int = 0  # bases in the parts before
    first: bool = False
    last: bool = False
    dropped: bool = False  # this last part, without bases, says that the record is broken: those before do not count


class Piece(NamedTuple):
    """Text of one file: whole records, as far as line ends tell, or a part of one."""

    file: int  # place of the file among the inputs
    name: str
    form: Format
    data: bytes
    line: int  # number of the first line
    last: bool = False  # of its file
    damage: InputError | None = (
        None  # why the file ends here, within a record perhaps: this piece holds no whole one
    )
    refused: bool = False  # the file cannot be read at all, for its damage
    part: Part | None = None

    def dropped(self, part: Part) -> "ReadBatch":
        """What says that the long record which ends with this part does not count."""
        nothing, end = Strings.of([b""]), part._replace(dropped=True)
        return ReadBatch(
            self.file, self.form, nothing, nothing, np.array([part.line]), nothing, end
        )


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Consecutive reads of a file, or part of one, as columns. Ids are printable UTF-8 words; bases keep their case."""

    file: int  # place of the file among the inputs
    form: Format
    ids: Strings
    bases: Strings
    lines: NDArray[np.int64]  # [n] line of each header in its file, from 1
    text: Strings  # the records as they stand in the file; wrapped FASTQ may be unwrapped
    part: Part | None = None
    mate: NDArray[np.bool_] | None = None  # [n] whether the read before is its mate; none are

    def __len__(self) -> int:
        return len(self.ids)

    def id(self, index: int) -> str:
        """Id of one read."""
        return self.ids[index].decode()

    def without_illegal(self, name: str) -> tuple["ReadBatch", list[InputError]]:
        """The batch without reads that hold other letters than nucleotides, and what is to be said of those."""
        bases = self.bases
        if not bases.data.translate(None, LEGAL):
            return self, []
        hint = "expected A C G T U N, IUPAC codes or gaps; is this a protein file?"
        before, kept, errors = (
            self.part.before + 1 if self.part else 1,
            list[int](),
            list[InputError](),
        )
        for i, letters in enumerate(bases):
            if odd := letters.translate(None, LEGAL)[:1]:
                what = f"{odd.decode('latin-1')!r} at base {letters.index(odd) + before} is no nucleotide letter"
                read_id = shortened(self.id(i))
                errors.append(
                    InputError(what, file=name, line=int(self.lines[i]), read_id=read_id, hint=hint)
                )
            else:
                kept.append(i)
        ids, bases, text = (
            Strings.of([column[i] for i in kept]) for column in (self.ids, bases, self.text)
        )
        return ReadBatch(
            self.file, self.form, ids, bases, self.lines[kept], text, self.part
        ), errors


@dataclass(slots=True)
class ParseLog:
    """What was met on the way; filled while the batches are drawn."""

    on_error: OnError = "stop"
    report: Callable[[InputError], None] | None = None  # given each broken record that is left out
    read_group: str = ""  # the sample whose reads are taken from alignments
    left_out: int = 0  # reads with letters that are no nucleotides
    reads_by_file: Counter[str] = field(default_factory=Counter)
    skipped_by_file: Counter[str] = field(
        default_factory=Counter
    )  # broken records, reads left out among them
    first_broken: dict[str, InputError] = field(default_factory=dict)  # of each file
    contents: dict[str, FileDigest] = field(default_factory=dict)  # of what was read to its end
    not_primary: Counter[str] = field(
        default_factory=Counter
    )  # alignments left out, for their reads are there
    cut_s: float = 0.0  # unpacking, cutting, and reading line by line
    parse_s: float = 0.0  # reading pieces, of all workers
    _good: bool = True  # the long record that is being read

    @property
    def reads(self) -> int:
        """Good ones so far."""
        return self.reads_by_file.total()

    def take(self, name: str, part: Part | None, reads: int, illegal: Sequence[InputError]) -> bool:
        """Count the reads of a piece or batch of the file `name`, those that are left out, a long one once it is whole.
        Gives whether it is to be used: in a long read nothing was illegal so far."""
        if part is not None:
            good = (self._good or part.first) and not part.dropped
            illegal = illegal if good else ()
            self._good = good and not illegal
            reads = int(self._good and part.last)
        self.reads_by_file[name] += reads
        for error in illegal:
            self.left_out += 1
            self.broken(error)
        return part is None or self._good

    def broken(self, error: InputError) -> None:
        """Stop at a broken record, or count it and go on, as was asked."""
        if self.on_error == "stop":
            raise error
        self.skipped_by_file[str(error.file)] += 1
        self.first_broken.setdefault(str(error.file), error)
        if self.report is not None:
            self.report(error)


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each of the segments starts, and the end of the last: int64 [n + 1]."""
    return np.append(np.int64(0), np.cumsum(lengths, dtype=np.int64))


def shortened(text: str) -> str:
    """Printable, and no longer than people read: what stands in a broken file may be anything."""
    return _printable(text[:_LONGEST_SHOWN]) + "…" * (len(text) > _LONGEST_SHOWN)


def first_word(text: bytes) -> bytes:
    """Of a header, the id; possibly empty."""
    return b"".join(text.split(None, 1)[:1])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Lines:
    """Whole lines of a block: `data[start:end]`, without line ends."""

    def __init__(self, data: bytes) -> None:
        letters = np.frombuffer(data, np.uint8)
        low = np.flatnonzero(letters <= 32)
        is_newline = letters[low] == _NEWLINE
        newlines = low[is_newline]
        nexts = newlines + 1  # where the following line starts
        starts, ends = np.append(0, nexts)[:-1], newlines
        low = low[~is_newline]
        if b"\r" in data:
            ends = newlines - ((newlines > starts) & (letters[newlines - 1] == _RETURN))
            low = low[letters[low] != _RETURN]
        self.data, self.letters, self.starts, self.ends, self.nexts = (
            data,
            letters,
            starts,
            ends,
            nexts,
        )
        self.low = low  # places of blanks and control characters inside lines

    def pick(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """The bytes of the given stretches."""
        data, spans = self.data, zip(starts.tolist(), ends.tolist(), strict=True)
        return Strings(b"".join([data[a:b] for a, b in spans]), offsets_of(ends - starts))

    def ids(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Strings:
        """The first word of each of these stretches, possibly empty."""
        blanks = self.low[_SPLITS[self.letters[self.low]]]
        following = np.append(blanks, len(self.data))[np.searchsorted(blanks, starts)]
        if (following > starts).all():
            return self.pick(starts, np.minimum(following, ends))
        return Strings.of([*map(first_word, self.pick(starts, ends))])


def cut_fastq(piece: Piece) -> tuple[ReadBatch | None, int]:
    """Four-line records from the front of a piece, with any ids, and how many bytes are left from the first irregular
    one on."""
    data = piece.data
    lines = _Lines(data if data.endswith(b"\n") else data + b"\n")
    n = len(lines.starts) // 4
    if n == 0:
        return None, len(data) if data.strip() else 0
    starts, ends = lines.starts[: 4 * n].reshape(n, 4), lines.ends[: 4 * n].reshape(n, 4)
    lengths = ends - starts
    fits: NDArray[np.bool_] = (  # plain records, by the rules of Biopython's parser
        (lines.letters[starts[:, 0]] == _HEADER_FASTQ)
        & (lines.letters[starts[:, 2]] == _PLUS)
        & (lengths[:, 1] == lengths[:, 3])
        & (lengths[:, 2] >= 1)
    )
    for i in np.flatnonzero(
        fits & (lengths[:, 2] > 1)
    ).tolist():  # "+" may repeat the header, and nothing else
        header = lines.data[starts[i, 0] + 1 : ends[i, 0]].rstrip()
        fits[i] = lines.data[starts[i, 2] + 1 : ends[i, 2]].rstrip() in (header, b"")
    # blanks belong into headers only; elsewhere a parser may strip them, so they are not ours to judge
    line_of = np.searchsorted(lines.nexts, lines.low, side="right")
    fits[line_of[(line_of % 2 == 1) & (line_of < starts.size)] // 4] = False
    whole = n if fits.all() else int(np.argmin(fits))
    if whole == 0:
        return None, len(data)
    rest = data[lines.nexts[4 * whole - 1] :]
    ids, bases = (
        lines.ids(starts[:whole, 0] + 1, ends[:whole, 0]),
        lines.pick(starts[:whole, 1], ends[:whole, 1]),
    )
    text = Strings(
        lines.data[: lines.nexts[4 * whole - 1]], np.append(0, lines.nexts[3 : 4 * whole : 4])
    )
    headers = piece.line + 4 * np.arange(whole, dtype=np.int64)
    return ReadBatch(piece.file, "fastq", ids, bases, headers, text), len(
        rest
    ) if rest.strip() else 0


def cut_fasta(piece: Piece) -> ReadBatch:
    """All records of a piece of FASTA, in which blank lines stand for comments."""
    header = b">%b\n" % piece.part.id if piece.part and not piece.part.first else b""
    lines = _Lines(header + piece.data + b"\n" * (not piece.data.endswith(b"\n")))
    is_header = lines.letters[lines.starts] == _HEADER_FASTA
    if piece.part:
        is_header[1:] = False  # it begins within a line, perhaps with a letter that is none
    is_sequence = ~is_header & (lines.ends > lines.starts)
    id_starts = lines.starts[is_header] + 1
    starts, ends, owners = (
        lines.starts[is_sequence],
        lines.ends[is_sequence],
        (np.cumsum(is_header) - 1)[is_sequence],
    )
    base_lengths = np.bincount(owners, weights=ends - starts, minlength=len(id_starts)).astype(
        np.int64
    )
    bases = Strings(lines.pick(starts, ends).data, offsets_of(base_lengths))
    if is_sequence[np.searchsorted(lines.nexts, lines.low, side="right")].any():
        bases = Strings.of([one.translate(None, BLANKS) for one in bases])
    ids, headers = (
        lines.ids(id_starts, lines.ends[is_header]),
        piece.line + np.flatnonzero(is_header),
    )
    text = Strings(lines.data, np.append(id_starts - 1, len(lines.data)))
    if piece.part is not None:
        whole = piece.data + b"\n" * (
            piece.part.last and not piece.data.endswith(b"\n")
        )  # a record may follow it
        headers, text = np.array([piece.part.line]), Strings.of([whole])
    return ReadBatch(piece.file, "fasta", ids, bases, headers, text, piece.part)
