"""Seals: a digest of all bytes of a file, before them; of a long file, the digest of its blocks' digests.

HDF5 looks at a fraction of a file, and may crash on a changed bit of that: a seal is checked before HDF5 sees the file.
It stands in HDF5's user block, which HDF5 passes over.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Final

SEAL_BYTES: Final = 512  # HDF5's smallest user block
_BLOCK_BYTES: Final = 1 << 20


def sealed(what: str, body: Iterable[bytes | memoryview]) -> bytes:
    """What stands before the bytes of a file: what they are, and a digest of them, so that any changed bit is seen."""
    digest = blake2b(digest_size=32)
    for piece in body:
        digest.update(piece)
    return f"virnuc {what}\n{digest.hexdigest()}\n".encode().ljust(SEAL_BYTES, b"\0")


def _seal_of(path: Path, what: str) -> bytes:
    """The seal of a file: over the digests of its blocks, which several threads make."""
    with ThreadPoolExecutor() as threads, path.open("rb") as file:

        def digest(at: int) -> bytes:
            return blake2b(os.pread(file.fileno(), _BLOCK_BYTES, at), digest_size=32).digest()

        return sealed(what, threads.map(digest, range(SEAL_BYTES, path.stat().st_size, _BLOCK_BYTES)))


def seal(path: Path, what: str) -> None:
    """Write the seal of a file that has room for one before its bytes."""
    made = _seal_of(path, what)
    with path.open("rb+") as file:
        file.write(made)


def is_intact(path: Path, what: str) -> bool | None:
    """Whether all bytes of a file are those that were sealed; None for an HDF5 file without a seal."""
    with path.open("rb") as file:
        kept = file.read(SEAL_BYTES)
    return None if kept.startswith(b"\x89HDF") else kept == _seal_of(path, what)
