"""Digests of models: equal ones mean equal scores.

The digest of a large file is remembered in `~/.cache/virnuc/digests`, by the file's path and state,
because computing it anew takes seconds.
"""

import functools
import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from virnuc_core.config import Precision, refuse_unreadable
from virnuc_core.encoders.calibration import CALIBRATION, read_calibration
from virnuc_core.encoders.checkpoint import part_folder, weight_files
from virnuc_core.encoders.model_config import CONFIG
from virnuc_core.encoders.registry import ENCODERS, PARTS
from virnuc_core.errors import VirnucError, WeightsError
from virnuc_core.rundir import write_text_atomically
from virnuc_core.runfiles import sha256_of

LARGE_BYTES: Final = 1 << 26  # of a file whose digest takes longer than looking it up
STRETCH_BYTES: Final = 1 << 24
HASH_THREADS: Final = 8
CACHE: Final = "~/.cache/virnuc/digests"
_hashing: Final = threading.Lock()  # if another thread computes a digest, wait for it


def fingerprint(
    models: Path, precision: Precision = "auto", *, anew: bool = False
) -> dict[str, str]:
    """Return the digest of each part of a models directory, and of the calibration for int8.

    Args:
        models: Models directory.
        precision: With int8, the calibration is included.
        anew: Compute digests even if they are remembered.

    Returns:
        SHA-256 by the name of the part, and under "int8" that of the calibration.

    Raises:
        WeightsError: A part is missing; for int8 also if the calibration is missing or was made for
            other weights.
    """
    further_files: dict[str, list[Path]] = {part: [] for part in PARTS}
    for encoder in ENCODERS:
        further_files[encoder.name] = [models / encoder.name / name for name in encoder.extra_files]
    digests = {}
    for part in PARTS:
        folder = part_folder(models, part)
        digests[part] = part_digest(folder, *further_files[part], anew=anew)
    if precision == "int8":
        for encoder in ENCODERS:
            if encoder.has_int8:
                path = models / encoder.name / CALIBRATION
                if read_calibration(models, encoder).weights != digests[encoder.name]:
                    raise WeightsError(
                        f"{path}: was made for other weights of {encoder.title}; "
                        "make it anew with virnuc models quantize"
                    )
                digests["int8"] = sha256_of(path)
    return digests


def part_digest(folder: Path, *further_files: Path, anew: bool = False) -> str:
    """Return the digest of one part: of its config, its weights and further files.

    Raises:
        WeightsError: A file cannot be read, or there are no weights.
    """
    lines = ""
    for path in (folder / CONFIG, *weight_files(folder), *further_files):
        with refuse_unreadable(path, "file", WeightsError):
            status = path.stat()
        with _hashing:
            digest = _cached_digest(path.resolve(), _file_state(status), anew)
        lines += f"{path.name} {digest}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def _file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change if a file is replaced or written to."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@functools.cache
def _cached_digest(path: Path, state: tuple[int, ...], anew: bool) -> str:
    """Return the digest of a file in this state, and remember that of a large file for the user."""
    key = hashlib.sha256(f"{path} {state}".encode()).hexdigest()
    cache_path = Path(CACHE, key)
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        cache_path = cache_path.expanduser()
        if not anew:
            cached_text = cache_path.read_text("ascii", "replace")
            if re.fullmatch("[0-9a-f]{64}", cached_text):
                return cached_text
    digest = digest_of(path)
    with suppress(OSError, VirnucError):
        if path.stat().st_size >= LARGE_BYTES and cache_path.is_absolute():
            write_text_atomically(cache_path, digest)
    return digest


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file; of a large one that of the digests of its stretches.

    Stretches are hashed by several threads: 6 GB would take one thread seconds.

    Raises:
        OSError: The file cannot be read.
    """

    def stretch_digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(STRETCH_BYTES)).digest()

    size = path.stat().st_size
    if size <= STRETCH_BYTES:
        return sha256_of(path)
    starts = range(0, size, STRETCH_BYTES)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = b"".join(threads.map(stretch_digest, starts))
    return hashlib.sha256(digests).hexdigest()
