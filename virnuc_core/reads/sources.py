"""Find inputs (files, folders, standard input) and read them as unpacked bytes."""

import bz2
import errno
import gzip
import hashlib
import lzma
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

# about three times as fast as zlib; it checks the sums of every member, too
from isal import isal_zlib

from virnuc_core.errors import ConfigError, InputError, join_first, printable
from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import FileDigest
from virnuc_core.system_errors import PERMISSION_ERRORS, REFUSED_ERRORS, read_with_retries

STDIN: Final = "-"
NCBI_PREFIX: Final = "ncbi:"
ENDINGS: Final = re.compile(
    r"(?i)(?<=.)(\.(fastq|fq|fasta|fa|fna|ffn|bam|cram|sam))?(\.(gz|bz2|xz|zst|bgz))?\Z"
)
MATE_MARK: Final = re.compile(r"(?<=.)[_.-]R?[12](_001)?\Z")
MAX_NAME: Final = 60
REDACTED_URL: Final = re.compile(r"[^?#]+#query-[0-9a-f]{12}")
full_urls: dict[str, str] = {}  # by their redacted forms
# Errors that have their cause in the name or the permissions of a file of reads.
_ERRORS_OF_INPUT: Final = PERMISSION_ERRORS | REFUSED_ERRORS
_PIECE_BYTES: Final = 1 << 18  # of a file, read at a time
_HEAD_BYTES: Final = 1 << 12  # looked at to tell whether a file of a folder holds reads
_UNPACKED_BYTES: Final = 1 << 20  # unpacked at a time
# zstd cannot bound what it unpacks at a time, and data may swell to 30,000 times its size
_PACKED_ZSTD_BYTES: Final = 1 << 10
_UNPACKER_BYTES: Final = 1 << 28  # memory that a file may ask its unpacker to take
_BINARY_ALIGNMENTS: Final = {b"BAM\1": "BAM", b"CRAM": "CRAM"}  # by the first four bytes
_SAM_HEADERS: Final = (b"@HD\t", b"@SQ\t", b"@RG\t", b"@PG\t")
_GZIP_MARK: Final = b"\x1f\x8b"


class ReadSpan(NamedTuple):
    """The range of reads in the store that come from one file, or from the two files of a pair."""

    files: tuple[str, ...]
    start: int  # number of the first read, from 0
    end: int  # one past the last read


class Inputs(NamedTuple):
    """The files named by a user, folders opened up, in the order in which they are read."""

    files: tuple[str, ...]  # paths, or "-" for standard input
    ignored: tuple[str, ...]  # files of a named folder that hold neither FASTA nor FASTQ
    pairs: tuple[tuple[str, str], ...] = ()  # first and second mates; one file twice for both

    @property
    def singles(self) -> tuple[str, ...]:
        """Return the files whose reads have no mates."""
        paired_files = set[str]()
        for pair in self.pairs:
            paired_files.update(pair)
        return tuple(name for name in self.files if name not in paired_files)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Return groups of files that are parsed together: each pair, and each single file."""
        pairs = [tuple(dict.fromkeys(pair)) for pair in self.pairs]
        return pairs + [(name,) for name in self.singles]

    def spans(self, reads_by_file: Mapping[str, int]) -> list[ReadSpan]:
        """Return the range of reads in the store for each group of files.

        Args:
            reads_by_file: The number of reads of each file.
        """
        spans: list[ReadSpan] = []
        start = 0
        for files in self.groups:
            end = start + sum(reads_by_file[name] for name in files)
            spans.append(ReadSpan(files, start, end))
            start = end
        return spans


def is_address(name: str) -> bool:
    """Return True for an http(s) address."""
    return name[:8].lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """Return True for an http(s) address or `ncbi:` accessions."""
    return is_address(name) or name.startswith(NCBI_PREFIX)


def redact_url(name: str) -> str:
    """Replace the query of an address by a digest, so that it can be shown and recorded.

    The query may hold a signature that opens the file to everybody. The full address is kept in
    this process only, in `full_urls`.

    Args:
        name: Any input; what is not an address is returned as it is.

    Raises:
        ConfigError: The address contains a user name or password.
    """
    if not is_address(name):
        return name
    address = re.split(r"[?#]", name, maxsplit=1)[0]
    _, at_sign, host = address.split("/")[2].rpartition("@")
    if at_sign:
        raise ConfigError(
            f"{host}: an address with a user name or password is not taken; "
            "sign it, or fetch the file"
        )
    if address == name or REDACTED_URL.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    redacted = f"{address}#query-{digest}"
    full_urls[redacted] = name
    return redacted


def sample_name(reads: Sequence[str]) -> str:
    """Return a short name for a list of input files.

    It is the name of the first file without its endings, followed by the number of further files:
    `lung+2`. Two files of mates are named by their common part: `lung` for `lung_R1.fq` and
    `lung_R2.fq`.
    """
    if not reads:
        return "no-reads"
    if len(reads) == 2:
        shared_name = _shared_name_of_mates(_file_name(reads[0]), _file_name(reads[1]))
        if shared_name:
            return shared_name
    if reads[0] == STDIN:
        name = "stdin"
    else:
        name = _file_name(reads[0])[:MAX_NAME] or "reads"
    if len(reads) > 1:
        name += f"+{len(reads) - 1}"
    return name


def _file_name(name: str) -> str:
    """Return the name of an input without its folder and endings, on one line."""
    if is_address(name):
        name = re.split(r"[?#]", name)[0]
    one_line = " ".join(printable(name).split())
    return ENDINGS.sub("", Path(one_line).name)


def _shared_name_of_mates(first: str, second: str) -> str:
    """Return the common part of the names of two files of mates, or an empty string.

    The string is empty if the names do not differ by their mate number only.
    """
    stem = MATE_MARK.sub("", first)
    has_marks = bool(MATE_MARK.search(first) and MATE_MARK.search(second))
    if has_marks and MATE_MARK.sub("", second) == stem:
        return stem[:MAX_NAME]
    return ""


def can_be_read_twice(name: str) -> bool:
    """Return True for a regular file: the data of a pipe is gone once it was read."""
    return name != STDIN and stat.S_ISREG(Path(name).stat().st_mode)


@contextmanager
def create_reads_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing reads. It gets its name when the `with` block ends without an error.

    A file whose name ends in `.gz` is compressed. The gzip header contains neither name nor time,
    so that equal reads give equal bytes.
    """
    with atomic_file(path) as temp_path, temp_path.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", compresslevel=4, fileobj=file, mtime=0) as gzip_file:
            yield cast(BinaryIO, gzip_file)


def find_inputs(reads: tuple[str, ...]) -> Inputs:
    """Return the files that a user named.

    A folder is replaced by its files of reads, sorted by name. Its sub-folders are ignored.

    Args:
        reads: Files, folders, or `-` for standard input.

    Raises:
        InputError: A file does not exist, cannot be read or is named twice, or a folder holds no
            reads.
    """
    files: list[str] = []
    ignored: list[str] = []
    for name in reads:
        path = Path(name)
        try:
            if name != STDIN and path.is_dir():
                folder = _list_folder(path)
                files += folder.files
                ignored += folder.ignored
            elif name == STDIN or path.exists():
                files.append(name)
            else:
                raise InputError("no such file or folder", file=path, hint="check the path")
        except OSError as error:
            raise _unreadable_error(name, error) from error
    _refuse_repeated_files(files)
    return Inputs(tuple(files), tuple(ignored))


def _list_folder(folder: Path) -> Inputs:
    """Return the files of reads in a folder, and separately its other files.

    Hidden files are ignored.

    Raises:
        InputError: The folder contains no file of reads.
    """
    entries: list[Path] = []
    for entry in folder.iterdir():
        # A broken link counts as a file, so that opening it later reports the error.
        is_broken_link = not entry.exists()
        if not entry.name.startswith(".") and (entry.is_file() or is_broken_link):
            entries.append(entry)
    files: list[str] = []
    ignored: list[str] = []
    for entry in sorted(entries):
        if _looks_like_reads(entry):
            files.append(str(entry))
        else:
            ignored.append(str(entry))
    if not files:
        raise InputError(
            "the folder holds no FASTA or FASTQ file", file=folder, hint="name the files"
        )
    return Inputs(tuple(files), tuple(ignored))


def _refuse_repeated_files(files: Sequence[str]) -> None:
    """Raise an `InputError` if a file is named twice, even by different paths or a link."""
    name_by_path: dict[Path, str] = {}
    for name in files:
        path = Path(name) if name == STDIN else Path(name).resolve()
        if path in name_by_path:
            raise InputError(
                f"the same file is named twice (also as {name_by_path[path]})",
                file=name,
                hint="name it once",
            )
        name_by_path[path] = name


def local_files(reads: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of all inputs that are on this machine, without addresses and accessions.

    Raises:
        InputError: See `find_inputs`.
    """
    local = tuple(name for name in reads if not is_remote(name))
    return find_inputs(local).files if local else ()


def _looks_like_reads(path: Path) -> bool:
    """Return True if a file begins like FASTA or FASTQ.

    A file that cannot be unpacked counts as well, so that its damage is reported when it is read.
    """
    try:
        with Source.open(str(path)) as source:
            head = source.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
            if not head:
                return source.damage is not None
            return head[:1] in (b">", b"@", b";")
    except InputError:
        return True


@dataclass(frozen=True)
class _Packing:
    """A way in which a file is packed."""

    name: str  # in messages
    new_unpacker: Callable[[], Any]  # for one member; has the methods of `zlib.decompressobj`
    errors: tuple[Any, ...]  # that the unpacker raises for damaged data
    can_bound_output: bool = True  # `decompress` takes a maximal number of bytes


class Source:
    """One opened input, read as unpacked bytes.

    The first bytes of a file tell how it is packed, never its name.

    Attributes:
        name: The path, or `-`.
        damage: The reason why unpacking or reading ended early; what came before is good.
        left_out: The number of alignments that are not the primary one of their read.
    """

    def __init__(self, name: str, stream: BinaryIO, read_group: str = "") -> None:
        """Read the first bytes of an open stream and choose how to unpack it; see `open`."""
        self.name = name
        self.damage: InputError | None = None
        self.left_out = 0
        self._stream = stream
        # A buffered stream waits until all bytes are there, or the stream ends.
        head = stream.read(_PIECE_BYTES)
        self._size = len(head)
        self._sha256 = hashlib.sha256(head)
        # `open` closes this iterator, and only generators have a method `close`.
        raw_pieces = (piece for piece in chain((head,), iter(self._next_piece, b"")))
        alignment_format = find_alignment_format(head)
        packing = _find_packing(head)
        if alignment_format:
            self._pieces = self._read_alignments(raw_pieces, alignment_format, read_group)
        elif read_group:
            raise InputError("neither BAM, CRAM nor SAM, which alone have read groups", file=name)
        elif packing is None:
            self._pieces = raw_pieces
        else:
            self._pieces = self._unpack(head, packing)

    @classmethod
    @contextmanager
    def open(cls, name: str, read_group: str = "") -> Iterator[Self]:
        """Open a file, or standard input, which stays open afterwards.

        Args:
            name: A path, or `-` for standard input.
            read_group: The sample whose reads are taken from alignments; all reads if empty.

        Raises:
            InputError: It cannot be opened.
        """
        if name == STDIN and sys.stdin is None:
            raise InputError(
                "standard input is closed", file=name, hint="give it reads, or name a file"
            )
        with ExitStack() as stack:
            try:
                if name == STDIN:
                    stream: BinaryIO = sys.stdin.buffer
                else:
                    stream = stack.enter_context(_open_input(Path(name)))
                source = cls(name, stream, read_group)
            except OSError as error:
                raise _unreadable_error(name, error) from error
            stack.callback(source._pieces.close)
            yield source

    def read(self, size: int) -> bytes:
        """Return the next unpacked bytes: at least `size`, or all that are left of the file."""
        pieces: list[bytes] = []
        while size > 0:
            piece = next(self._pieces, None)
            if piece is None:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def content(self) -> FileDigest:
        """Return the size and digest of the packed file. The rest of the file is read first."""
        while self._next_piece():
            pass
        return FileDigest(size=self._size, sha256=self._sha256.hexdigest())

    def _read_alignments(
        self, raw_pieces: Iterator[bytes], format_: str, read_group: str
    ) -> Generator[bytes]:
        """Return an iterator over alignments as FASTQ.

        Damage is stored in `damage` when the iterator meets it.

        Raises:
            InputError: pysam is not installed.
        """
        from virnuc_core.reads.alignments import (  # imported late: rarely used
            SampleFilter,
            fastq,
            import_pysam,
        )

        pysam = import_pysam(format_, self.name)
        sample_filter = SampleFilter(read_group, ungrouped_sample=sample_name((self.name,)))

        def records() -> Generator[bytes]:
            """Yield FASTQ text, and count the alignments that are left out."""
            try:
                for piece in fastq(pysam, raw_pieces, format_, self.name, sample_filter):
                    self.left_out += piece.n_left_out
                    yield piece.text.encode()
            except InputError as error:
                self.damage = self.damage or error

        return records()

    def _unpack(self, head: bytes, packing: _Packing) -> Generator[bytes]:
        """Yield the unpacked bytes of a file.

        A packed file may consist of several members, one after the other, as bgzip writes them.
        Damage ends the iteration and is stored in `damage`.

        Args:
            head: The first bytes of the file.
            packing: How the file is packed.
        """
        step = _PIECE_BYTES if packing.can_bound_output else _PACKED_ZSTD_BYTES
        unpacker = None
        packed = head
        while True:
            packed = packed or self._next_piece()
            if not packed:
                break
            if unpacker is None:
                packed = packed.lstrip(b"\0")  # some tools pad the end of a file with zeros
                if not packed:
                    continue
                unpacker = packing.new_unpacker()
            current = packed[:step]
            packed = packed[step:]
            try:
                yield from _decompress(unpacker, current, packing)
            except packing.errors as error:
                details = str(error) or type(error).__name__
                self._note_damage(f"damaged {packing.name} data: {details}")
                return
            if unpacker.eof:
                packed = unpacker.unused_data + packed
                unpacker = None
        if unpacker is not None:
            self._note_damage(f"the {packing.name} data ends early: the file is cut off")

    def _note_damage(self, problem: str, hint: str = "copy it again") -> None:
        """Store this problem in `damage`, unless an earlier one is stored already."""
        if self.damage is None:
            self.damage = InputError(problem, file=self.name, hint=hint)

    def _next_piece(self) -> bytes:
        """Return the next bytes of the file as they are packed, or none at its end.

        Raises:
            UnreadableError: The system cannot read the file. This is no damage: the bytes that were
                not read may be good.
        """
        piece = read_with_retries(Path(self.name), lambda: self._stream.read(_PIECE_BYTES))
        self._size += len(piece)
        self._sha256.update(piece)
        return piece


def _decompress(unpacker: Any, packed: bytes, packing: _Packing) -> Iterator[bytes]:
    """Unpack some bytes, and yield the result in pieces of at most `_UNPACKED_BYTES`.

    A packing that cannot limit the size of its output yields one piece.
    """
    if not packing.can_bound_output:
        yield unpacker.decompress(packed)
        return
    unpacked = unpacker.decompress(packed, _UNPACKED_BYTES)
    yield unpacked
    while len(unpacked) == _UNPACKED_BYTES and not unpacker.eof:
        # zlib's unpacker returns its unused input in `unconsumed_tail`; others keep it themselves.
        waiting = getattr(unpacker, "unconsumed_tail", b"")
        unpacked = unpacker.decompress(waiting, _UNPACKED_BYTES)
        yield unpacked


def find_alignment_format(head: bytes) -> str:
    """Return `BAM`, `CRAM` or `SAM` from the first bytes of a file, or an empty string."""
    if head.startswith(_GZIP_MARK):
        with suppress(cast(type[Exception], isal_zlib.error)):
            head = isal_zlib.decompressobj(wbits=31).decompress(head, 4)
    if head.startswith(_SAM_HEADERS):
        return "SAM"
    return _BINARY_ALIGNMENTS.get(head[:4], "")


def find_alignment_format_of_file(name: str) -> str:
    """Return the alignment format of a file, as `find_alignment_format` does for its first bytes.

    The string is empty for a pipe, for a file that is absent, and for a file that this user may not
    read.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """

    def read_head() -> bytes:
        """Read the first bytes of the file; none of a pipe."""
        if not can_be_read_twice(name):
            return b""
        with Path(name).open("rb") as file:
            return file.read(_PIECE_BYTES)

    try:
        head = read_with_retries(Path(name), read_head, immediate=_ERRORS_OF_INPUT)
    except OSError:
        # The file is absent, or this user may not read it. Staging reports that.
        return ""
    return find_alignment_format(head)


def _open_input(path: Path) -> BinaryIO:
    """Open a file of reads. If the system fails, try again a few times.

    Raises:
        OSError: There is no such file, or this user may not read it.
        UnreadableError: The system cannot open the file, so that nothing is known about it.
    """
    return read_with_retries(path, lambda: path.open("rb"), immediate=_ERRORS_OF_INPUT)


def _unreadable_error(name: str, error: OSError) -> InputError:
    """Return the error for a file that the system cannot open."""
    is_too_long = error.errno == errno.ENAMETOOLONG
    return InputError(
        f"cannot be read: {error.strerror or error}",
        file=join_first([name]) if is_too_long else name,
        hint="check the path and its permissions",
    )


def _find_packing(head: bytes) -> _Packing | None:
    """Return how a file is packed, judged by its first bytes, or None for plain text."""
    if head.startswith(_GZIP_MARK):
        new_gzip_unpacker = partial(isal_zlib.decompressobj, wbits=31)
        return _Packing("gzip", new_gzip_unpacker, (isal_zlib.error,))
    if head.startswith(b"BZh"):
        return _Packing("bzip2", bz2.BZ2Decompressor, (OSError, EOFError, ValueError))
    if head.startswith(b"\xfd7zXZ\0"):
        new_xz_unpacker = partial(lzma.LZMADecompressor, memlimit=_UNPACKER_BYTES)
        return _Packing("xz", new_xz_unpacker, (lzma.LZMAError, EOFError))
    is_zstd_frame = head.startswith(b"\x28\xb5\x2f\xfd")
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    if is_zstd_frame or is_skippable_frame:
        import zstandard  # imported late: rarely used

        return _Packing(
            "zstd",
            lambda: zstandard.ZstdDecompressor().decompressobj(),
            (zstandard.ZstdError,),
            can_bound_output=False,
        )
    return None
