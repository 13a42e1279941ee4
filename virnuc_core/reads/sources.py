"""Where reads come from: files, folders and standard input, opened as plain bytes whatever they are packed in."""

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
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

from isal import (
    isal_zlib,
)  # about three times as fast as zlib; it checks the sums of every member, too

from virnuc_core.errors import ConfigError, InputError, join_first, printable
from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import FileDigest

STDIN: Final = "-"
NCBI_PREFIX: Final = "ncbi:"
ENDINGS: Final = re.compile(
    r"(?i)(?<=.)(\.(fastq|fq|fasta|fa|fna|ffn|bam|cram|sam))?(\.(gz|bz2|xz|zst|bgz))?\Z"
)
MATE_MARK: Final = re.compile(r"(?<=.)[_.-]R?[12](_001)?\Z")
MAX_NAME: Final = 60
REDACTED_URL: Final = re.compile(r"[^?#]+#query-[0-9a-f]{12}")
full_urls: dict[str, str] = {}  # by how they are shown
_PIECE_BYTES: Final = 1 << 18
_UNPACKED_BYTES: Final = 1 << 20  # at a time
_PACKED_ZSTD_BYTES: Final = (
    1 << 10
)  # at a time, where that cannot be told: they swell to thirty thousand times as much
_BINARY: Final = {b"BAM\1": "BAM", b"CRAM": "CRAM"}
_SAM: Final = (b"@HD\t", b"@SQ\t", b"@RG\t", b"@PG\t")
_UNPACKER_BYTES: Final = 1 << 28  # memory that a file may ask its unpacker to take


class Inputs(NamedTuple):
    """The files named by a user, folders opened up, in the order they will be read."""

    files: tuple[str, ...]  # paths, or "-" for standard input
    ignored: tuple[str, ...]  # files of a named folder that hold neither FASTA nor FASTQ
    pairs: tuple[
        tuple[str, str], ...
    ] = ()  # files of first and second mates; one file twice where it holds both

    @property
    def singles(self) -> tuple[str, ...]:
        """The files whose reads have no mates."""
        paired = {name for pair in self.pairs for name in pair}
        return tuple(name for name in self.files if name not in paired)

    def spans(self, reads: Mapping[str, int]) -> list[tuple[tuple[str, ...], int, int]]:
        """Files whose reads stand together, the first of those and one past the last, by the `reads` of each file."""
        groups = [
            *(tuple(dict.fromkeys(pair)) for pair in self.pairs),
            *((name,) for name in self.singles),
        ]
        ends = [*accumulate((sum(reads[name] for name in group) for group in groups), initial=0)]
        return [*zip(groups, ends, ends[1:], strict=False)]


def is_address(name: str) -> bool:
    """Whether `name` is an http(s) address."""
    return name[:8].lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """Whether `name` is an http(s) address or `ncbi:` accessions."""
    return is_address(name) or name.startswith(NCBI_PREFIX)


def redact_url(name: str) -> str:
    """An input as it may be shown and recorded: a digest stands for the query of an address, which may be a signature;
    it stays in this process, in `full_urls`. Errors: `ConfigError` for an address with a password."""
    if not is_address(name):
        return name
    bare = re.split(r"[?#]", name, maxsplit=1)[0]
    _, at, host = bare.split("/")[2].rpartition("@")
    if at:
        raise ConfigError(
            f"{host}: an address with a user name or password is not taken; sign it, or fetch the file"
        )
    if bare == name or REDACTED_URL.fullmatch(name):
        return name
    shown = f"{bare}#query-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    full_urls[shown] = name
    return shown


def sample_name(reads: Sequence[str]) -> str:
    """A short name of the input: its first file without endings, and how many more there are; `lung` of two mates."""
    names = [re.split(r"[?#]", one)[0] if is_address(one) else one for one in reads[:2]]
    names = [ENDINGS.sub("", Path(" ".join(printable(one).split())).name) for one in names]
    if (
        len(reads) == 2
        and len({MATE_MARK.sub("", one) for one in names}) == 1
        and all(map(MATE_MARK.search, names))
    ):
        return MATE_MARK.sub("", names[0])[:MAX_NAME]
    first = (
        "no-reads" if not reads else "stdin" if reads[0] == "-" else names[0][:MAX_NAME] or "reads"
    )
    return first + (f"+{len(reads) - 1}" if len(reads) > 1 else "")


def can_be_read_twice(name: str) -> bool:
    """Whether an input is a file: what comes through a pipe is gone once it was read."""
    return name != STDIN and stat.S_ISREG(Path(name).stat().st_mode)


@contextmanager
def reads_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write reads to, gzipped (no name and time in it) if its name ends in .gz; it appears once whole."""
    with atomic_file(path) as aside, aside.open("wb") as out:
        if path.suffix != ".gz":
            yield out
            return
        with gzip.GzipFile("", "wb", compresslevel=4, fileobj=out, mtime=0) as packed:
            yield cast(BinaryIO, packed)


def find_inputs(reads: tuple[str, ...]) -> Inputs:
    """What the user named; folders give their read files in order of name, not those of sub-folders. Errors:
    `InputError` for what does not exist, is named twice, cannot be read, or a folder without reads."""
    files, ignored = list[str](), list[str]()
    for name in reads:
        path = Path(name)
        try:
            if name != STDIN and path.is_dir():
                every = (
                    one for one in path.iterdir() if one.is_file() or not one.exists()
                )  # a link to nothing
                inside = sorted(one for one in every if not one.name.startswith("."))
                found = {str(entry): _looks_like_reads(entry) for entry in inside}
                if not any(found.values()):
                    raise InputError(
                        "the folder holds no FASTA or FASTQ file", file=path, hint="name the files"
                    )
                files += [entry for entry, holds in found.items() if holds]
                ignored += [entry for entry, holds in found.items() if not holds]
            elif name == STDIN or path.exists():
                files.append(name)
            else:
                raise InputError("no such file or folder", file=path, hint="check the path")
        except OSError as error:
            raise _unreadable(name, error) from error
    seen: dict[Path, str] = {}
    for name in files:
        key = Path(name) if name == STDIN else Path(name).resolve()
        if key in seen:
            raise InputError(
                f"the same file is named twice (also as {seen[key]})",
                file=name,
                hint="name it once",
            )
        seen[key] = name
    return Inputs(tuple(files), tuple(ignored))


def local_files(reads: tuple[str, ...]) -> tuple[str, ...]:
    """The files of those inputs that are not fetched. Errors: those of `find_inputs`."""
    local = tuple(name for name in reads if not is_remote(name))
    return find_inputs(local).files if local else ()


def _looks_like_reads(path: Path) -> bool:
    """Whether the file begins like FASTA or FASTQ; one that cannot be unpacked counts, to be named later."""
    try:
        with Source.open(str(path)) as source:
            head = source.read(1 << 12).lstrip(b"\xef\xbb\xbf \t\r\n")
            return head[:1] in (b">", b"@", b";") or (not head and source.damage is not None)
    except InputError:
        return True


class Source:
    """One opened input: `read` gives unpacked bytes; `damage` says why they ended, where that was not their end. What
    it is packed as is told by its first bytes, never by its name."""

    def __init__(self, name: str, stream: BinaryIO, read_group: str = "") -> None:
        self.name = name
        self.damage: InputError | None = (
            None  # unpacking or reading came no further; what came before is good
        )
        self._stream = stream
        head = stream.read(_PIECE_BYTES)  # fewer only at the end: a slow pipe is waited for
        self._size, self._sha256 = len(head), hashlib.sha256(head)
        self.left_out = 0  # alignments that are not the primary one of their read
        packed_as, make, errors = _unpacker_for(head)
        plain = (piece for piece in chain((head,), iter(self._next_piece, b"")))
        if form := alignments_in(head):
            from virnuc_core.reads.alignments import fastq, pysam_for  # few files are such

            kept = (read_group, sample_name((name,)))
            self._pieces = self._records(fastq(pysam_for(form, name), plain, form, name, kept))
        elif read_group:
            raise InputError("neither BAM, CRAM nor SAM, which alone have read groups", file=name)
        else:
            self._pieces = plain if make is None else self._unpacked(head, packed_as, make, errors)

    @classmethod
    @contextmanager
    def open(cls, name: str, read_group: str = "") -> Iterator[Self]:
        """A path, or standard input for `-`, which stays open; of alignments the reads of a `read_group`, if one is
        named. Errors: `InputError` when it cannot be opened."""
        if name == STDIN and sys.stdin is None:
            raise InputError(
                "standard input is closed", file=name, hint="give it reads, or name a file"
            )
        with ExitStack() as opened:
            try:
                stream = (
                    sys.stdin.buffer
                    if name == STDIN
                    else opened.enter_context(Path(name).open("rb"))
                )
                source = cls(name, stream, read_group)
            except OSError as error:
                raise _unreadable(name, error) from error
            opened.callback(source._pieces.close)
            yield source

    def read(self, size: int) -> bytes:
        """At least `size` bytes, fewer only before the end; `b""` at the end."""
        pieces: list[bytes] = []
        while size > 0 and (piece := next(self._pieces, None)) is not None:
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def content(self) -> FileDigest:
        """Of all that the stream held, packed as it was; what was not read yet is read now."""
        while self._next_piece():
            pass
        return FileDigest(size=self._size, sha256=self._sha256.hexdigest())

    def _records(self, fastq: Iterator[tuple[str, int]]) -> Generator[bytes]:
        try:
            for text, left_out in fastq:
                self.left_out += left_out
                yield text.encode()
        except InputError as error:
            self.damage = self.damage or error

    def _unpacked(
        self, packed: bytes, packed_as: str, make: Callable[[], Any], errors: tuple[Any, ...]
    ) -> Generator[bytes]:
        unpacker = None
        step, bounds = (
            (_PACKED_ZSTD_BYTES, ()) if packed_as == "zstd" else (_PIECE_BYTES, (_UNPACKED_BYTES,))
        )
        while packed or (packed := self._next_piece()):
            if unpacker is None:
                packed = packed.lstrip(
                    b"\0"
                )  # tapes and some tools pad with zeros after the last member
                if not packed:
                    continue
                unpacker = make()
            now, packed = packed[:step], packed[step:]
            try:
                yield (piece := unpacker.decompress(now, *bounds))
                while len(piece) == _UNPACKED_BYTES and bounds and not unpacker.eof:
                    yield (
                        piece := unpacker.decompress(
                            getattr(unpacker, "unconsumed_tail", b""), *bounds
                        )
                    )
            except errors as error:
                self._end(f"damaged {packed_as} data: {str(error) or type(error).__name__}")
                return
            if unpacker.eof:
                packed, unpacker = unpacker.unused_data + packed, None
        if unpacker is not None:
            self._end(f"the {packed_as} data ends early: the file is cut off")

    def _end(self, problem: str, hint: str = "copy it again") -> None:
        self.damage = self.damage or InputError(problem, file=self.name, hint=hint)

    def _next_piece(self) -> bytes:
        try:
            piece = self._stream.read(_PIECE_BYTES)
        except OSError as error:
            self._end(f"reading failed: {error.strerror or error}", hint="")
            return b""
        self._size += len(piece)
        self._sha256.update(piece)
        return piece


def alignments_in(head: bytes) -> str:
    """`BAM`, `CRAM` or `SAM` by the first bytes of a file; else nothing."""
    if head.startswith(b"\x1f\x8b"):
        with suppress(cast(type[Exception], isal_zlib.error)):
            head = isal_zlib.decompressobj(wbits=31).decompress(head, 4)
    return "SAM" if head.startswith(_SAM) else _BINARY.get(head[:4], "")


def alignments_at(name: str) -> str:
    """The same of an input; nothing of a pipe."""
    with suppress(OSError):
        if can_be_read_twice(name):
            with Path(name).open("rb") as file:
                return alignments_in(file.read(_PIECE_BYTES))
    return ""


def _unreadable(name: str, error: OSError) -> InputError:
    problem, hint = (
        f"cannot be read: {error.strerror or error}",
        "check the path and its permissions",
    )
    return InputError(
        problem, file=join_first([name]) if error.errno == errno.ENAMETOOLONG else name, hint=hint
    )


def _unpacker_for(head: bytes) -> tuple[str, Callable[[], Any] | None, tuple[Any, ...]]:
    """What a file is packed as by its first bytes, its unpackers (as `zlib.decompressobj`), and their errors."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip", partial(isal_zlib.decompressobj, wbits=31), (isal_zlib.error,)
    if head.startswith(b"BZh"):
        return "bzip2", bz2.BZ2Decompressor, (OSError, EOFError, ValueError)
    if head.startswith(b"\xfd7zXZ\0"):
        return (
            "xz",
            partial(lzma.LZMADecompressor, memlimit=_UNPACKER_BYTES),
            (lzma.LZMAError, EOFError),
        )
    if head.startswith(b"\x28\xb5\x2f\xfd") or (
        head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    ):
        import zstandard  # few files are such

        return "zstd", lambda: zstandard.ZstdDecompressor().decompressobj(), (zstandard.ZstdError,)
    return "plain", None, ()
