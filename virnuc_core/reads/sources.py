"""Find the inputs that a user named (files, folders, standard input) and read them uncompressed."""

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

# about three times as fast as zlib; it checks the sums of every member, too
from isal import isal_zlib

from virnuc_core.allowed_paths import require_allowed
from virnuc_core.errors import ConfigError, InputError, printable, shorten
from virnuc_core.input_names import STDIN, is_address, is_remote
from virnuc_core.reads.file_names import ENDINGS, cut_endings, name_of_pair
from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import FileDigest
from virnuc_core.system_errors import (
    PERMISSION_ERRORS,
    REFUSED_ERRORS,
    read_with_retries,
    target_exists,
)

MAX_PATH_WORDS: Final = 6  # of a path with blanks that was not quoted
MAX_NAME: Final = 60  # letters of a sample name that is derived from a file name
REDACTED_URL: Final = re.compile(r"[^?#]+#query-[0-9a-f]{12}")  # see `redact_url`
full_urls: dict[str, str] = {}  # the addresses of this process, by their redacted forms
# Errors that have their cause in the name or the permissions of a file of reads.
_ERRORS_OF_INPUT: Final = PERMISSION_ERRORS | REFUSED_ERRORS
_PIECE_BYTES: Final = 1 << 18  # read from a file at a time
_PIPE_BYTES: Final = 1 << 16  # that wait in a pipe of Linux
_HEAD_BYTES: Final = 1 << 12  # read to find out whether a file in a folder holds reads
# The header of a gzip member is shorter: an extra field of 64 KiB at most, a name and a comment
_GZIP_HEADER_BYTES: Final = 1 << 17
_UNPACKED_BYTES: Final = 1 << 20  # limit of what is decompressed at a time
# The zstd library has no such limit, and data may expand to 30,000 times its size. So only a little
# compressed data is passed at a time.
_PACKED_ZSTD_BYTES: Final = 1 << 10
_UNPACKER_BYTES: Final = 1 << 28  # memory limit of the xz decompressor: a file names its need
_BINARY_ALIGNMENTS: Final = {b"BAM\1": "BAM", b"CRAM": "CRAM"}  # by the first four bytes
_SAM_HEADERS: Final = (b"@HD\t", b"@SQ\t", b"@RG\t", b"@PG\t")
SPECIAL_FILE_REASON: Final = (
    "a named pipe, socket or device, not read; a pipe is read if you name it"
)
NO_READS_REASON: Final = "neither FASTA nor FASTQ, not read"
_GZIP_MARK: Final = b"\x1f\x8b"


class ReadSpan(NamedTuple):
    """The range of reads in the store that comes from one file, or from the files of a pair."""

    files: tuple[str, ...]
    start: int  # number of the first read, from 0
    end: int  # one past the number of the last read


class Inputs(NamedTuple):
    """The input files, in the order in which they are read. Folders are replaced by their files."""

    files: tuple[str, ...]  # paths, or "-" for standard input
    ignored: tuple[str, ...]  # files that are not read, such as tables in a named folder
    # File of first mates and file of second mates. A file with both mates is named twice.
    pairs: tuple[tuple[str, str], ...] = ()
    # Why some of the ignored files are not read. The others are neither FASTA nor FASTQ.
    left_out: Mapping[str, str] = MappingProxyType({})

    @property
    def ignored_reasons(self) -> dict[str, str]:
        """Return why each ignored file is not read, by its name."""
        return {name: self.left_out.get(name, NO_READS_REASON) for name in self.ignored}

    @property
    def singles(self) -> tuple[str, ...]:
        """Return the files whose reads have no mates."""
        paired_files = set[str]()
        for pair in self.pairs:
            paired_files.update(pair)
        return tuple(name for name in self.files if name not in paired_files)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Return the files in groups that are read together: first each pair, then each other file.

        A file that holds both mates is a group by itself.
        """
        # `dict.fromkeys` removes the repetition if one file holds both mates.
        pairs = [tuple(dict.fromkeys(pair)) for pair in self.pairs]
        return pairs + [(name,) for name in self.singles]

    def spans(self, reads_by_file: Mapping[str, int]) -> list[ReadSpan]:
        """Compute which range of reads in the store comes from which files.

        Args:
            reads_by_file: The number of reads of each file.

        Returns:
            One range per group of files (see `groups`), in order.
        """
        spans: list[ReadSpan] = []
        start = 0
        for files in self.groups:
            end = start + sum(reads_by_file[name] for name in files)
            spans.append(ReadSpan(files, start, end))
            start = end
        return spans


def redact_url(name: str) -> str:
    """Replace the query of an http(s) address by a digest, so that it can be shown and recorded.

    The query may contain a signature with which anybody could read the file. As a side effect, the
    full address is remembered in `full_urls` of this process, and nowhere else.

    Args:
        name: Any input. A name that is not an address is returned unchanged.

    Returns:
        The address with `#query-<digest>` in place of its query; unchanged if it has no query.

    Raises:
        ConfigError: The address contains a user name or password.
    """
    if not is_address(name):
        return name
    address = re.split(r"[?#]", name, maxsplit=1)[0]
    host_part = address.split("/")[2]  # "https:", "", "user:password@host", path …
    _, at_sign, host = host_part.rpartition("@")
    if at_sign:
        raise ConfigError(
            f"{host}: an address with a user name or password is not accepted; "
            "use a signed address, or download the file yourself"
        )
    has_no_query = address == name
    is_redacted = bool(REDACTED_URL.fullmatch(name))
    if has_no_query or is_redacted:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    redacted = f"{address}#query-{digest}"
    full_urls[redacted] = name
    return redacted


def sample_name(reads: Sequence[str]) -> str:
    """Return a short name for some inputs, to be used as the name of the sample.

    The name of the first file is used, without its folder and endings. `+2` is added if there are
    two more files. For two files of mates it is the part that they share: `lung` for `lung_R1.fq`
    and `lung_R2.fq`. Without inputs it is `no-reads`.

    Args:
        reads: The inputs as the user named them: paths, addresses, accessions, or `-`.
    """
    if not reads:
        return "no-reads"
    if len(reads) == 2:
        shared_name = name_of_pair(_one_line(reads[0]), _one_line(reads[1]))
        if shared_name:
            return shared_name[:MAX_NAME]
    if reads[0] == STDIN:
        name = "stdin"
    else:
        name = _file_name(reads[0])[:MAX_NAME] or "reads"
    if len(reads) > 1:
        name += f"+{len(reads) - 1}"
    return name


def _one_line(name: str) -> str:
    """Return the path of an input, or its address without the query, as one printable line."""
    if is_address(name):
        name = re.split(r"[?#]", name)[0]
    return " ".join(printable(name).split())


def _file_name(name: str) -> str:
    """Return the name of an input without its folder and endings, as one line of printable text."""
    return cut_endings(_one_line(name))


def can_be_read_twice(name: str) -> bool:
    """Return True for a regular file. The data of a pipe or of standard input can be read once."""
    return name != STDIN and stat.S_ISREG(Path(name).stat().st_mode)


@contextmanager
def create_reads_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write reads to. The file appears under its name only when it is complete.

    The file is gzipped if its name ends in `.gz`. The gzip header holds neither name nor time, so
    that the same reads give the same bytes.

    Args:
        path: The file. An existing file is replaced.

    Yields:
        The file object to write to.
    """
    with atomic_file(path) as temp_path, temp_path.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        # Level 4 is much faster than the default of 9, and the files are little larger.
        with gzip.GzipFile("", "wb", compresslevel=4, fileobj=file, mtime=0) as gzip_file:
            yield cast(BinaryIO, gzip_file)


def find_inputs(reads: tuple[str, ...]) -> Inputs:
    """Find the input files for the names that a user gave.

    A folder is replaced by its files of reads, sorted by name, without its sub-folders. As a side
    effect, the first bytes of each file in a folder are read, to find out whether it holds reads.

    Args:
        reads: Files, folders, or `-` for standard input.

    Returns:
        The files, and the files in folders that are ignored because they hold no reads.

    Raises:
        InputError: A file does not exist, may not be read or is named twice, or a folder holds no
            reads.
        UnreadableError: The system cannot read a folder, so that nothing is known about it.
    """
    files: list[str] = []
    ignored: list[str] = []
    left_out: dict[str, str] = {}
    for name in reads:
        if name == STDIN:
            files.append(name)
            continue
        path = Path(name)
        try:
            status = read_with_retries(path, path.stat, expected_errors=_ERRORS_OF_INPUT)
            if stat.S_ISDIR(status.st_mode):
                folder = _list_folder(path)
                files += folder.files
                ignored += folder.ignored
                left_out.update(folder.left_out)
            else:
                files.append(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "check the path"
            whole_path = _find_unquoted_path(name, reads)
            if whole_path:
                hint = f'put quotes around a path with blanks: "{whole_path}"'
            raise InputError("no such file or folder", file=path, hint=hint) from error
        except OSError as error:
            raise _unreadable_error(name, error) from error
    _refuse_repeated_files(files)
    return Inputs(tuple(files), tuple(ignored), left_out=left_out)


def _find_unquoted_path(name: str, reads: Sequence[str]) -> str:
    """Return the existing path with blanks of which a shell made several inputs; empty if none.

    Args:
        name: The input that does not exist.
        reads: All inputs in their order, this one included.
    """
    candidates = []
    for start in range(len(reads)):
        for end in range(start + 2, min(len(reads), start + MAX_PATH_WORDS) + 1):
            candidates.append(reads[start:end])
    # Of `-1 my R1.fq -2 my R2.fq`, only the first word of each path is a file of mates.
    candidates += [(name, other) for other in reads]
    for words in candidates:
        path = " ".join(words)
        if name in words and target_exists(Path(path)):
            return path
    return ""


def _list_folder(folder: Path) -> Inputs:
    """List the files of reads in a folder, sorted by name, and the other files as ignored.

    Sub-folders and hidden files are neither listed nor reported. Named pipes, sockets and devices
    are ignored with a reason: reading one of them could wait for ever.

    Raises:
        InputError: There is no file of reads.
    """

    def list_entries() -> list[Path]:
        """Return the files, sorted by name. It is called again if the system fails."""
        entries = []
        for entry in folder.iterdir():
            # A broken link is listed like a file of reads, so that opening the link reports it by
            # name.
            is_broken_link = not entry.exists()
            if not entry.name.startswith(".") and (is_broken_link or not entry.is_dir()):
                entries.append(entry)
        return sorted(entries)

    entries = read_with_retries(folder, list_entries, expected_errors=_ERRORS_OF_INPUT)
    files: list[str] = []
    ignored: list[str] = []
    left_out: dict[str, str] = {}
    for entry in entries:
        if entry.exists() and not entry.is_file():
            ignored.append(str(entry))
            left_out[str(entry)] = SPECIAL_FILE_REASON
        elif _looks_like_reads(entry):
            files.append(str(entry))
        else:
            ignored.append(str(entry))
    if not files:
        # Files that are called reads and are empty: those of a negative control.
        files = [name for name in ignored if name not in left_out and _is_called_reads(name)]
        ignored = [name for name in ignored if name not in files]
    if not files:
        raise InputError(
            "the folder holds no FASTA, FASTQ, BAM, CRAM or SAM file",
            file=folder,
            hint="name the files",
        )
    return Inputs(tuple(files), tuple(ignored), left_out=left_out)


def _is_called_reads(name: str) -> bool:
    """Return True if the name of a file ends as reads do (`.fastq`, `.fa.gz`)."""
    match = ENDINGS.search(Path(name).name)
    return match is not None and bool(match[1])


def _refuse_repeated_files(files: Sequence[str]) -> None:
    """Raise an `InputError` if the same file is named twice, also by different paths or links."""
    name_by_identity: dict[object, str] = {}
    for name in files:
        identity = identify_file(name)
        if identity in name_by_identity:
            raise InputError(
                f"the same file is named twice (also as {name_by_identity[identity]})",
                file=name,
                hint="name it once",
            )
        name_by_identity[identity] = name


def identify_file(name: str) -> object:
    """Return a value that is equal for all paths, links and hard links to the same file.

    What does not exist, and an address, is known by its name: opening it reports the problem.

    Args:
        name: A path, an address, or `-` for standard input.
    """
    if name == STDIN or is_remote(name):
        return name
    try:
        status = Path(name).stat()
    except (OSError, ValueError):
        # Unlike `Path.resolve`, this raises no error for links that lead to each other.
        return os.path.realpath(name) if "\0" not in name else name
    return (status.st_dev, status.st_ino)


def local_files(reads: tuple[str, ...]) -> tuple[str, ...]:
    """Return the local files among some inputs, with folders replaced by their files.

    Addresses and `ncbi:` accessions are left out, because they must be downloaded first.

    Args:
        reads: The inputs as the user named them.

    Raises:
        InputError: See `find_inputs`.
    """
    local = tuple(name for name in reads if not is_remote(name))
    return find_inputs(local).files if local else ()


def _looks_like_reads(path: Path) -> bool:
    """Return True if a file begins like FASTA or FASTQ, after decompression.

    True is also returned for a file that cannot be opened or decompressed. So it is not ignored,
    and its damage is reported when it is read.
    """
    try:
        with Source.open(str(path)) as source:
            # without the byte order mark of UTF-8 and blanks
            head = source.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
            if not head:  # an empty file, or one of which nothing can be decompressed
                return source.damage is not None
            return head[:1] in (b">", b"@", b";")
    except InputError:
        return True


@dataclass(frozen=True)
class _Packing:
    """A compression format."""

    name: str  # for messages
    # Creates an object with the methods of `zlib.decompressobj`, for one member of a file. (A gzip
    # file, for example, may consist of several members, each compressed by itself.)
    new_unpacker: Callable[[], Any]
    errors: tuple[Any, ...]  # the classes of errors that it raises for damaged data
    can_bound_output: bool = True  # its `decompress` accepts a maximum number of bytes
    # How many bytes of a member must be there before it is recognised and decompressed.
    header_bytes: int = 6  # the longest magic number


class Source:
    """One opened input. It is read as decompressed bytes; alignments are read as FASTQ.

    The first bytes of a file decide how it is compressed, not its name.

    Attributes:
        name: The path, or `-`.
        damage: Why decompressing or reading ended early; None if all is good. All data that was
            read before is good.
        n_left_out: The number of secondary and supplementary alignments, which are not read.
    """

    def __init__(self, name: str, stream: BinaryIO, read_group: str = "") -> None:
        """Read the first bytes of a stream and find out how to decompress it.

        Args:
            name: The path, or `-`.
            stream: The opened file. The caller closes it.
            read_group: The sample whose reads are taken from alignments; all reads if empty.

        Raises:
            InputError: A read group was given, but these are not alignments; or pysam is missing.
            OSError: The stream cannot be read.
        """
        self.name = name
        self.damage: InputError | None = None
        self.n_left_out = 0
        self._stream = stream
        # This waits for a slow pipe. Fewer bytes are returned only at the end of the data.
        head = stream.read(_PIECE_BYTES)
        self._size = len(head)
        self._n_waiting = 0  # bytes that were read from the stream, but not decompressed yet
        self._sha256 = hashlib.sha256(head)
        # `Source.open` closes `self._pieces` at the end, whichever of the ways below made it. A
        # generator has a method `close`; `chain` alone has none.
        raw_pieces = (piece for piece in chain((head,), iter(self._next_piece, b"")))
        alignment_format = find_alignment_format(head)
        packing = _find_packing(head)
        if alignment_format:
            if packing is not None and _is_in_plain_gzip(head):
                raw_pieces = self._unpack(head, packing)
            self._pieces = self._read_alignments(raw_pieces, alignment_format, read_group)
        elif read_group:
            raise InputError("only BAM, CRAM and SAM have read groups; this is none", file=name)
        elif packing is None:
            self._pieces = raw_pieces
        else:
            self._pieces = self._unpack(head, packing)

    @classmethod
    @contextmanager
    def open(cls, name: str, read_group: str = "") -> Iterator[Self]:
        """Open a file, or standard input, for a `with` statement.

        A file is closed when the statement ends. Standard input stays open.

        Args:
            name: A path, or `-` for standard input.
            read_group: The sample whose reads are taken from alignments; all reads if empty.

        Yields:
            The source. Its first bytes have been read already, to find out the compression.

        Raises:
            InputError: The input cannot be opened.
            ConfigError: The path is not allowed (`VIRNUC_ROOTS`).
        """
        if name != STDIN:
            require_allowed(Path(name), "reads")
        if name == STDIN and sys.stdin is None:
            raise InputError(
                "standard input is closed", file=name, hint="pipe reads into it, or name a file"
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
        """Return at least `size` decompressed bytes.

        Fewer bytes are returned only at the end of the data or before damage, and b"" after that.

        Args:
            size: The wanted number of bytes. More may be returned, because the data comes in
                pieces.

        Raises:
            UnreadableError: The system cannot read the file, so that nothing is known about the
                rest.
        """
        pieces: list[bytes] = []
        while size > 0:
            piece = next(self._pieces, None)
            if piece is None:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    @property
    def n_bytes_used(self) -> int:
        """Return how many bytes of the file are those of the text that `read` returned so far.

        These are bytes as they are on the disk, mostly compressed. The number is exact for plain
        text, gzip and zstd. For alignments, bzip2 and xz it is right to some 100,000 bytes.
        """
        return self._size - self._n_waiting

    def content(self) -> FileDigest:
        """Return the size and the SHA-256 of the whole file, as it is on the disk (compressed).

        As a side effect, the rest of the stream is read.
        """
        while self._next_piece():
            pass
        return FileDigest(size=self._size, sha256=self._sha256.hexdigest())

    def _read_alignments(
        self, raw_pieces: Iterator[bytes], format_: str, read_group: str
    ) -> Generator[bytes]:
        """Return a generator that converts alignments to FASTQ.

        The generator counts the alignments it leaves out in `n_left_out`, and stores an error in
        `damage` instead of raising it.

        Args:
            raw_pieces: The bytes of the file.
            format_: `BAM`, `CRAM` or `SAM`.
            read_group: The sample whose reads are taken; all reads if empty.

        Raises:
            InputError: pysam is not installed. It is raised at once, not by the generator.
        """
        from virnuc_core.reads.alignments import (  # imported only if needed: few files are such
            SampleFilter,
            fastq,
            import_pysam,
        )

        pysam = import_pysam(format_, self.name)
        sample_filter = SampleFilter(read_group, ungrouped_sample=sample_name((self.name,)))

        def records() -> Generator[bytes]:
            """Yield FASTQ; count what is left out, and store an error in `damage`."""
            try:
                for piece in fastq(pysam, raw_pieces, format_, self.name, sample_filter):
                    self.n_left_out += piece.n_left_out
                    # One piece is being written to pysam's pipe, which is full.
                    self._n_waiting = min(_PIECE_BYTES + _PIPE_BYTES, self._size)
                    yield piece.text.encode()
            except InputError as error:
                self.damage = self.damage or error

        return records()

    def _unpack(self, head: bytes, packing: _Packing) -> Generator[bytes]:
        """Yield the decompressed bytes of a compressed file.

        A file may consist of several members (parts that were compressed one by one), as gzip and
        bgzip write them. If the data is damaged, the generator ends early and sets `damage`.

        Args:
            head: The first bytes of the file, which were read already.
            packing: The compression format.
        """
        step = _PIECE_BYTES if packing.can_bound_output else _PACKED_ZSTD_BYTES
        unpacker = None  # of the current member; None between members
        is_later_member = False
        packed = head
        while True:
            packed = packed or self._next_piece()  # read on when all bytes so far are used up
            if not packed:
                break
            if unpacker is None:
                # Tape drives and some tools add zero bytes after the last member. Skip them.
                packed = packed.lstrip(b"\0")
                if not packed:
                    continue
                # The first bytes of a member say what it is. They may lie on both sides of a border
                # between two pieces. The gzip library wants a whole header in its first call.
                while len(packed) < packing.header_bytes:
                    more = self._next_piece()
                    if not more:
                        break
                    packed += more
                if is_later_member and not _find_packing(packed):
                    self._note_damage(
                        f"{packed[:4].hex(' ')} … follows the {packing.name} data, "
                        "which is complete",
                        hint="these bytes are of something else; remove them, or decompress the "
                        "file and use the result",
                    )
                    return
                is_later_member = True
                unpacker = packing.new_unpacker()
            current = packed[:step]
            packed = packed[step:]
            try:
                for unpacked in _decompress(unpacker, current, packing):
                    n_left = len(getattr(unpacker, "unconsumed_tail", b""))
                    self._n_waiting = len(packed) + n_left + len(unpacker.unused_data)
                    yield unpacked
            except packing.errors as error:
                details = str(error) or type(error).__name__
                if packing.name == "zstd" and "too much memory" in details:
                    self._note_damage(
                        "was compressed with a longer window than 128 MiB (zstd --long)",
                        hint="decompress it with zstd -d --long=31 and use the result",
                    )
                else:
                    self._note_damage(f"damaged {packing.name} data: {details}")
                return
            if unpacker.eof:
                packed = unpacker.unused_data + packed
                unpacker = None
        if unpacker is not None:
            self._note_damage(f"the {packing.name} data ends early: the file is cut off")

    def _note_damage(self, problem: str, hint: str = "copy it again") -> None:
        """Set `damage`, unless earlier damage was found."""
        if self.damage is None:
            self.damage = InputError(problem, file=self.name, hint=hint)

    def _next_piece(self) -> bytes:
        """Return the next compressed bytes of the file, and update its size and digest.

        Returns:
            b"" at the end of the file.

        Raises:
            UnreadableError: The system cannot read the file. This is not damage: the bytes that
                were not read may be good.
        """
        piece = read_with_retries(Path(self.name), lambda: self._stream.read(_PIECE_BYTES))
        self._size += len(piece)
        self._sha256.update(piece)
        return piece


def _decompress(unpacker: Any, packed: bytes, packing: _Packing) -> Iterator[bytes]:
    """Decompress some bytes and yield the result in pieces.

    The pieces have at most `_UNPACKED_BYTES`, so that a small file that expands enormously does not
    fill the memory. If the format has no such limit, there is one piece.

    Args:
        unpacker: The decompressor of the current member. Its state moves forward.
        packed: The next compressed bytes.
        packing: The compression format.
    """
    if not packing.can_bound_output:
        yield unpacker.decompress(packed)
        return
    unpacked = unpacker.decompress(packed, _UNPACKED_BYTES)
    yield unpacked
    while len(unpacked) == _UNPACKED_BYTES and not unpacker.eof:
        # Decompressors with the interface of zlib return the input that they did not use yet. The
        # others keep the rest themselves and continue with empty input.
        unused_input = getattr(unpacker, "unconsumed_tail", b"")
        unpacked = unpacker.decompress(unused_input, _UNPACKED_BYTES)
        yield unpacked


def _is_in_plain_gzip(head: bytes) -> bool:
    """Return whether an alignment file is gzipped as a whole, and not in blocks as usual.

    Args:
        head: The first bytes of the file.
    """
    from virnuc_core.reads.alignments import is_plain_gzip  # imported only if needed

    return is_plain_gzip(head)


def find_alignment_format(head: bytes) -> str:
    """Return `BAM`, `CRAM` or `SAM` if a file has this format; an empty text for other formats.

    Args:
        head: The first bytes of the file, compressed or not.
    """
    if head.startswith(_GZIP_MARK):
        # A BAM file is gzipped: look at its first four bytes after decompression.
        with suppress(cast(type[Exception], isal_zlib.error)):
            head = isal_zlib.decompressobj(wbits=31).decompress(head, 4)  # 31: with gzip's header
    if head.startswith(_SAM_HEADERS):
        return "SAM"
    return _BINARY_ALIGNMENTS.get(head[:4], "")


def find_alignment_format_of_file(name: str) -> str:
    """Return `BAM`, `CRAM` or `SAM` if an input has this format; an empty text otherwise.

    An empty text is also returned for a pipe, because reading would consume its first bytes, and
    for a file that is absent or that this user may not read, because opening it later reports that.

    Args:
        name: A path, or `-` for standard input.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
        ConfigError: The path is not allowed (`VIRNUC_ROOTS`).
    """
    if name != STDIN:
        require_allowed(Path(name), "reads")

    def read_head() -> bytes:
        """Read the first bytes of the file; none of a pipe."""
        if not can_be_read_twice(name):
            return b""
        with Path(name).open("rb") as file:
            return file.read(_PIECE_BYTES)

    try:
        head = read_with_retries(Path(name), read_head, expected_errors=_ERRORS_OF_INPUT)
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
    return read_with_retries(path, lambda: path.open("rb"), expected_errors=_ERRORS_OF_INPUT)


def _unreadable_error(name: str, error: OSError) -> InputError:
    """Return an error with the system's reason why a file cannot be read.

    A name that is too long for the system is shortened in the message.
    """
    is_too_long = error.errno == errno.ENAMETOOLONG
    return InputError(
        f"cannot be read: {error.strerror or error}",
        file=shorten(name) if is_too_long else name,
        hint="check the path and its permissions",
    )


def _find_packing(head: bytes) -> _Packing | None:
    """Return the compression format of a file, according to its first bytes; None for plain text.

    Each format has a magic number: bytes with which all of its files begin.
    """
    if head.startswith(_GZIP_MARK):
        new_gzip_unpacker = partial(isal_zlib.decompressobj, wbits=31)  # 31: with gzip's header
        return _Packing(
            "gzip", new_gzip_unpacker, (isal_zlib.error,), header_bytes=_GZIP_HEADER_BYTES
        )
    if head.startswith(b"BZh"):
        return _Packing("bzip2", bz2.BZ2Decompressor, (OSError, EOFError, ValueError))
    if head.startswith(b"\xfd7zXZ\0"):
        new_xz_unpacker = partial(lzma.LZMADecompressor, memlimit=_UNPACKER_BYTES)
        return _Packing("xz", new_xz_unpacker, (lzma.LZMAError, EOFError))
    is_zstd_frame = head.startswith(b"\x28\xb5\x2f\xfd")
    # A zstd file may begin with a frame for other data, whose magic number ends in any digit.
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    if is_zstd_frame or is_skippable_frame:
        import zstandard  # imported only if needed: few files are such

        return _Packing(
            "zstd",
            lambda: zstandard.ZstdDecompressor().decompressobj(),
            (zstandard.ZstdError,),
            can_bound_output=False,
        )
    return None
