"""Check a file against the digest that was recorded for it, before its content is used.

A bit that a disk or a copy has flipped makes few files unreadable. It changes a verdict, a time or
a name instead. So each file that virnuc writes and reads again has a recorded digest, and
`require_unchanged` compares the two. Every other function that reads such a file goes through it.

A digest is recorded in one of these places:

- JSON files of a run carry their own digest in their last field (`OWN_DIGEST`).
- Pages (`summary.html`, `summary.md`) carry their own digest in their last line (`PAGE_DIGEST`).
- Result files are listed in `summary.json` with size and SHA-256 (`runfiles.FileDigest`).
- HDF5 files begin with a seal, a digest of all bytes after it (`Seal`).
- Arrays (`.npy`) are followed by their digest (`ARRAY_DIGEST`).
- Lines of journals and of the history, and entries of the cache of digests, carry their own digest.
  `compare_text` compares them, because one damaged line must not make the others useless.

Files of older versions have no digest. They are still read, and the caller learns that they could
not be checked.

Two digests are compared elsewhere, because they do not cover the bytes of one file. The digest of
an int8 calibration covers its numbers, so files with another order of their metadata are equal
(`encoders.calibration`). The name of a kept head's folder holds the digest of all its files
(`encoders.kept_heads`). Public weights have no digest before virnuc has read them for the first
time: each run records theirs, and later runs compare.
"""

import hashlib
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from virnuc_core.errors import DamagedFileError
from virnuc_core.safe_files import MAX_JSON_BYTES, open_file, open_hdf5, read_file

if TYPE_CHECKING:
    import h5py
    import numpy as np
    from numpy.typing import NDArray

OWN_DIGEST_FIELD: Final = "own_sha256"
SEAL_BYTES: Final = 512  # the smallest user block of HDF5
READ_BYTES: Final = 1 << 20  # of a file that are read at a time
SHA256_LETTERS: Final = 64  # of a SHA-256 in hexadecimal letters
_SHA256_BYTES: Final = 32
_PAGE_DIGEST: Final = re.compile(
    rb"(.*)<!-- sha256 of all text above: ([0-9a-f]{64}) -->\n", re.DOTALL
)
# The last field of a JSON file with its own digest, and what precedes it. A changed bit may be in
# the name of the field.
_LAST_FIELD: Final = re.compile(rb'(.*),\n "([^"\n]*)": "([0-9a-f]{64})"\n\}\n', re.DOTALL)
_HDF5_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"  # an HDF5 file without a seal begins with it


class Match(Enum):
    """The result of comparing a file with its recorded digest."""

    SAME = "same"
    CHANGED = "changed"
    NOT_RECORDED = "not recorded"  # the file was written by a version that recorded no digest


def compare_text(text: bytes, recorded: str | None, n_letters: int = SHA256_LETTERS) -> Match:
    """Compare a text that carries its own digest, such as a line of a journal, with this digest.

    Args:
        text: What the digest covers.
        recorded: The SHA-256 that was written with it, in hexadecimal letters. None: none was.
        n_letters: How many letters were written; the first ones.
    """
    if recorded is None:
        return Match.NOT_RECORDED
    sha256 = hashlib.sha256(text).hexdigest()
    return Match.SAME if recorded == sha256[:n_letters] else Match.CHANGED


class RecordedDigest(Protocol):
    """The digest that was recorded for a file, wherever it is recorded."""

    @property
    def description(self) -> str:
        """Say where the digest is, as the beginning of a sentence: "the seal at its beginning"."""

    def compare(self, file: BufferedReader) -> Match:
        """Read an open file from its beginning, and compare it with the recorded digest.

        Raises:
            OSError: The file cannot be read.
        """


@dataclass(frozen=True, slots=True)
class RecordedSha256:
    """The SHA-256 of a file that its writer has told to its reader."""

    sha256: str

    @property
    def description(self) -> str:
        """Say where the digest is."""
        return "the process that wrote it"

    def compare(self, file: BufferedReader) -> Match:
        """Compare the digest of the whole file."""
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Match.SAME if sha256 == self.sha256 else Match.CHANGED


def require_unchanged(
    path: Path, file: BufferedReader, recorded: RecordedDigest, *, remedy: str = ""
) -> bool:
    """Raise an error if an open file is not what was written, and go back to its beginning.

    Args:
        path: The path of the file, for the message.
        file: The file, open at its beginning.
        recorded: The digest that was recorded for it.
        remedy: What the user can do. If it is empty, a general advice is given.

    Returns:
        True if the file is as it was written; false if no digest was recorded for it, because an
        older version wrote it.

    Raises:
        DamagedFileError: The file has another content than recorded.
        OSError: The file cannot be read, so that nothing is known about it.
    """
    match = recorded.compare(file)
    if match is Match.CHANGED:
        raise DamagedFileError(
            f"is not as the run left it: {recorded.description} has another digest of this file",
            file=path,
            hint=remedy or "restore it from a copy, or repeat the command that wrote it",
        )
    file.seek(0)
    return match is Match.SAME


def open_checked(
    path: Path, recorded: RecordedDigest | None, root: Path | None = None, *, remedy: str = ""
) -> BufferedReader:
    """Open a file of a run to read it, if it is as it was written. No link is followed.

    Args:
        path: The file.
        recorded: The digest that was recorded for it. None: none is known, and nothing is compared.
        root: The run directory; see `safe_files.open_file`.
        remedy: See `require_unchanged`.

    Raises:
        DamagedFileError: The file has another content than recorded.
        UnsafeFileError: It is no regular file, or a folder on the way is a link.
        OSError: There is no such file, or it cannot be read.
    """
    file = open_file(path, root)
    if recorded is not None:
        try:
            require_unchanged(path, file, recorded, remedy=remedy)
        except BaseException:
            file.close()
            raise
    return file


def open_checked_hdf5(
    path: Path,
    recorded: RecordedDigest,
    root: Path | None = None,
    *,
    remedy: str = "",
    virtual_sources: str = "",
) -> "h5py.File":
    """Open an HDF5 file of a run to read it, if it is as it was written.

    HDF5 gets the file only after its digest was compared, because it may crash on a changed bit.

    Args:
        path: The file.
        recorded: The digest that was recorded for it.
        root: The run directory; see `safe_files.open_file`.
        remedy: See `require_unchanged`.
        virtual_sources: See `safe_files.open_hdf5`.

    Raises:
        DamagedFileError: The file has another content than recorded.
        UnsafeFileError: It is no regular file, or it leads to other files.
        OSError: There is no such file, it cannot be read, or it is no HDF5 file.
    """
    check = partial(require_unchanged, path, recorded=recorded, remedy=remedy)
    return open_hdf5(path, root, virtual_sources=virtual_sources, check=check)


# --- JSON files -----------------------------------------------------------------------------------


def with_own_digest(text: str) -> str:
    r"""Add a last field to a JSON object: the SHA-256 of all text before this field.

    >>> print(with_own_digest('{\n "reads": 7\n}')[:64])
    {
     "reads": 7,
     "own_sha256": "97315169fbe648aaa369a7c17a1e9c18f
    """
    body = text.rstrip().removesuffix("}").rstrip()
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},\n "{OWN_DIGEST_FIELD}": "{digest}"\n}}\n'


class _OwnDigest:
    """The digest that a JSON file carries in its last field; see `with_own_digest`."""

    description = f"its field {OWN_DIGEST_FIELD}"

    def compare(self, file: BufferedReader) -> Match:
        """Compare the text before the last field with the digest in the last field."""
        content = file.read(MAX_JSON_BYTES + 1)
        last_field = _LAST_FIELD.fullmatch(content)
        if last_field is not None:
            body, name, digest = last_field.groups()
            match = compare_text(body, digest.decode())
            if name == OWN_DIGEST_FIELD.encode():
                return match
            if match is Match.SAME:  # only the name of the field was changed
                return Match.CHANGED
        if f'"{OWN_DIGEST_FIELD}"'.encode() in content:
            # Somebody has edited the file, or the digest itself was changed.
            return Match.CHANGED
        return Match.NOT_RECORDED


OWN_DIGEST: Final = _OwnDigest()


def has_own_digest(path: Path, root: Path | None = None) -> bool:
    """Return whether a JSON file carries its own digest. Older versions wrote none.

    Raises:
        DamagedFileError: It carries one, and it is not as it was written.
        UnsafeFileError: It is no regular file.
        OSError: There is no such file, or it cannot be read.
    """
    with open_file(path, root) as file:
        return require_unchanged(path, file, OWN_DIGEST)


def read_checked_json(path: Path, root: Path | None = None, *, check: bool = True) -> bytes:
    """Return the content of a JSON file without its own digest, if it is as it was written.

    Args:
        path: The file.
        root: The run directory; see `safe_files.open_file`.
        check: If false, the digest is not compared. Only a caller that compares the content itself
            may do so.

    Raises:
        DamagedFileError: It carries its own digest, and has another content.
        UnsafeFileError: It is no regular file in the run directory, or it is too large.
        OSError: There is no such file, or it cannot be read.
    """
    content = read_file(path, root)
    remedy = (
        "restore it from a copy, or repeat the command that wrote it; if you changed it on "
        f"purpose, remove its field {OWN_DIGEST_FIELD}"
    )
    if check:
        _require_unchanged_content(path, content, OWN_DIGEST, remedy)
    # Models of some files refuse unknown fields.
    content = without_own_digest(content)
    if not check and OWN_DIGEST_FIELD.encode() in content:  # somebody has edited the file
        values = json.loads(content)
        values.pop(OWN_DIGEST_FIELD, None)
        content = json.dumps(values).encode()
    return content


def without_own_digest(content: bytes) -> bytes:
    """Return the content of a JSON file as it was before `with_own_digest` added the last field."""
    last_field = _LAST_FIELD.fullmatch(content)
    if last_field is None or last_field[2] != OWN_DIGEST_FIELD.encode():
        return content
    return last_field[1] + b"\n}\n"


def _require_unchanged_content(
    path: Path, content: bytes, recorded: RecordedDigest, remedy: str
) -> bool:
    """Call `require_unchanged` for the content of a small file, which was read already."""
    file = cast(BufferedReader, io.BytesIO(content))  # it has the same methods
    return require_unchanged(path, file, recorded, remedy=remedy)


# --- Pages ----------------------------------------------------------------------------------------


def with_page_digest(text: str) -> str:
    """Add a last line to a page of HTML or Markdown: a comment with the SHA-256 of all text above.

    Args:
        text: The page. It ends with a line end.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}<!-- sha256 of all text above: {digest} -->\n"


class _PageDigest:
    """The digest that a page carries in its last line; see `with_page_digest`."""

    description = "its last line"

    def compare(self, file: BufferedReader) -> Match:
        """Compare the text before the last line with the digest in the last line."""
        content = file.read(MAX_JSON_BYTES + 1)
        last_line = _PAGE_DIGEST.fullmatch(content)
        if last_line is not None:
            body, digest = last_line.groups()
            return compare_text(body, digest.decode())
        # A changed bit may have hit the words of the line. Then one of its two halves is whole.
        end = content[-2 * SHA256_LETTERS :]
        if b"<!-- sha256 of all" in end or b"text above: " in end:
            return Match.CHANGED
        return Match.NOT_RECORDED


PAGE_DIGEST: Final = _PageDigest()


# --- HDF5 files -----------------------------------------------------------------------------------


def seal_text(kind: str, body: Iterable[bytes | memoryview]) -> bytes:
    """Return the seal for a file: a block of 512 bytes with its kind and a digest of its bytes.

    Args:
        kind: The kind of file.
        body: The bytes of the file after the block.
    """
    digest = hashlib.blake2b(digest_size=32)
    for piece in body:
        digest.update(piece)
    return (_first_line(kind) + f"{digest.hexdigest()}\n".encode()).ljust(SEAL_BYTES, b"\0")


def _first_line(kind: str) -> bytes:
    """Return the first line of the seal for a kind of file."""
    return f"virnuc {kind}\n".encode()


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal at the beginning of an HDF5 file of one kind.

    Attributes:
        kind: The kind of file that the seal names.
        is_optional: Older versions wrote files of this kind without a seal.
    """

    kind: str
    is_optional: bool = False

    @property
    def description(self) -> str:
        """Say where the digest is."""
        return "the seal at its beginning"

    def seal_of(self, image: bytes) -> bytes:
        """Return the seal for an HDF5 file that is in memory. It goes before the file's bytes."""
        return seal_text(self.kind, [image])

    def compare(self, file: BufferedReader) -> Match:
        """Compare the seal with the digest of all bytes after it."""
        seal = file.read(SEAL_BYTES)
        if self.is_optional and seal.startswith(_HDF5_SIGNATURE):
            return Match.NOT_RECORDED
        if not seal.startswith(_first_line(self.kind)):
            return Match.CHANGED  # nothing more is read: the file may be huge
        # Blocks until an empty one, which means the end of the file.
        blocks = iter(partial(file.read, READ_BYTES), b"")
        return Match.SAME if seal == seal_text(self.kind, blocks) else Match.CHANGED


@dataclass(frozen=True, slots=True)
class ComputedSeal:
    """A seal that is computed in a way of its own, such as that of the store by several threads.

    Attributes:
        kind: The kind of file that the seal names.
        compute: Returns the seal of an open file, whatever its first bytes are.
    """

    kind: str
    compute: Callable[[BufferedReader], bytes]

    @property
    def description(self) -> str:
        """Say where the digest is."""
        return "the seal at its beginning"

    def compare(self, file: BufferedReader) -> Match:
        """Compare the first bytes of the file with the seal that is computed from the others."""
        seal = file.read(SEAL_BYTES)
        if not seal.startswith(_first_line(self.kind)):
            return Match.CHANGED  # nothing more is read: the file may be huge
        return Match.SAME if seal == self.compute(file) else Match.CHANGED


# --- Arrays ---------------------------------------------------------------------------------------


def array_bytes(array: "NDArray[Any]") -> bytes:
    """Return the content of a `.npy` file for an array, followed by the SHA-256 of that content.

    Programs that read `.npy` files ignore what follows the array.
    """
    import numpy as np  # slow to import, and most users of this module need no arrays

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    content = buffer.getvalue()
    return content + hashlib.sha256(content).digest()


# What NumPy raises if the first bytes of a `.npy` file are damaged: they hold a Python expression.
_ARRAY_ERRORS: Final = (
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    OverflowError,
    MemoryError,
)


class _ArrayDigest:
    """The SHA-256 that follows the array in a `.npy` file; see `array_bytes`."""

    description = "the end of the file"

    def compare(self, file: BufferedReader) -> Match:
        """Compare the bytes of the array with the digest that follows them."""
        import numpy as np

        try:
            np.load(file, allow_pickle=False)
        except _ARRAY_ERRORS:
            return Match.CHANGED
        array_end = file.tell()
        recorded = file.read(_SHA256_BYTES + 1)
        if not recorded:
            return Match.NOT_RECORDED
        file.seek(0)
        digest = hashlib.sha256(file.read(array_end)).digest()
        return Match.SAME if recorded == digest else Match.CHANGED


ARRAY_DIGEST: Final = _ArrayDigest()


def read_checked_array(
    path: Path, root: Path | None = None, *, max_bytes: int, remedy: str = ""
) -> "NDArray[np.float32]":
    """Return the array in a `.npy` file of a run, if it is as it was written.

    Args:
        path: The file.
        root: The run directory; see `safe_files.open_file`.
        max_bytes: A larger file is refused.
        remedy: See `require_unchanged`.

    Raises:
        DamagedFileError: It has another content than was written, or is no array of float32.
        UnsafeFileError: It is no regular file, or it is too large.
        OSError: There is no such file, or it cannot be read.
    """
    import numpy as np

    content = read_file(path, root, max_bytes)
    _require_unchanged_content(path, content, ARRAY_DIGEST, remedy)
    array: NDArray[np.float32] = np.load(io.BytesIO(content), allow_pickle=False)
    if array.dtype != np.float32:
        raise DamagedFileError(
            f"has values of type {array.dtype}, not float32", file=path, hint=remedy
        )
    return array
