"""Compute digests of models: models with equal digests give equal scores.

The digest of a large file is remembered in `~/.cache/virnuc/digests`, by the file's path and state,
because computing it anew takes seconds.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from virnuc_core.checked_files import Match, compare_text
from virnuc_core.config import Precision, refuse_unreadable
from virnuc_core.encoders.calibration import (
    CALIBRATION,
    calibration_digest,
    is_older_digest,
    read_calibration,
)
from virnuc_core.encoders.checkpoint import part_folder, weight_files
from virnuc_core.encoders.composition import COMPOSITION
from virnuc_core.encoders.model_config import CONFIG
from virnuc_core.encoders.registry import ENCODERS, PARTS
from virnuc_core.errors import VirnucError, WeightsError
from virnuc_core.first_use import first_use
from virnuc_core.rundir import write_text_atomically
from virnuc_core.runfiles import sha256_of
from virnuc_core.system_errors import path_exists, read_with_retries

LARGE_BYTES: Final = 1 << 26  # from this size on, a digest is worth remembering on disk
PIECE_BYTES: Final = 1 << 24  # of a large file, hashed by one thread
HASH_THREADS: Final = 8
CACHE: Final = "~/.cache/virnuc/digests"
INT8: Final = "int8"  # key of the calibration's digest
# Two threads that need the same digest must not both compute it: the second one waits.
_digest_lock: Final = threading.Lock()


def fingerprint(
    models: Path, precision: Precision = "auto", *, recompute: bool = False
) -> dict[str, str]:
    """Return the SHA-256 of each model of a models directory, and of the calibration for int8.

    Args:
        models: Models directory.
        precision: With int8, the calibration is included.
        recompute: Read all files, even if their digests are remembered.

    Returns:
        The digests by the names of the models; that of the calibration under "int8".

    Raises:
        WeightsError: A model is missing. With int8 also: the calibration is missing or was made
            for other weights.
    """
    further_files: dict[str, list[Path]] = {part: [] for part in PARTS}
    for encoder in ENCODERS:
        further_files[encoder.name] = [models / encoder.name / name for name in encoder.extra_files]
    digests = {}
    for part in PARTS:
        folder = part_folder(models, part)
        digests[part] = part_digest(folder, *further_files[part], recompute=recompute)
    if precision == "int8":
        for encoder in ENCODERS:
            if encoder.has_int8:
                path = models / encoder.name / CALIBRATION
                if read_calibration(models, encoder).weights != digests[encoder.name]:
                    raise WeightsError(
                        f"{path}: was made for other weights of {encoder.title}; "
                        "make it anew with virnuc models quantize"
                    )
                with refuse_unreadable(path, "calibration", WeightsError):
                    read_digest = functools.partial(calibration_digest, path)
                    digests[INT8] = read_with_retries(path, read_digest)
    return digests


def accept_older_digest(
    models: Path, digests: Mapping[str, str], recorded: Mapping[str, str]
) -> dict[str, str]:
    """Return the digests of a models directory, with the calibration's digest as a run recorded it.

    Older versions computed another digest of the same calibration. If the run recorded such an
    older digest, it takes the place of the present one, so that the run can be continued. In every
    other case the digests are returned as they are.

    Args:
        models: Models directory.
        digests: Its digests, as `fingerprint` returned them.
        recorded: The digests in the record of the run; empty if there is no run yet.
    """
    accepted = dict(digests)
    recorded_digest = recorded.get(INT8)
    if INT8 not in digests or recorded_digest is None or recorded_digest == digests[INT8]:
        return accepted
    for encoder in ENCODERS:
        path = models / encoder.name / CALIBRATION
        is_older = functools.partial(is_older_digest, recorded_digest, path)
        if encoder.has_int8 and read_with_retries(path, is_older):
            accepted[INT8] = recorded_digest
    return accepted


def part_digest(folder: Path, *further_files: Path, recompute: bool = False) -> str:
    """Return the SHA-256 of one model: of its sizes, its weights and further files.

    The composition of a classifier's training data belongs to it, if it has one.

    Args:
        folder: Folder of the model.
        further_files: Other files that belong to the model, for instance a tokenizer.
        recompute: Read all files, even if their digests are remembered.

    Raises:
        WeightsError: A file cannot be read, or there are no weights.
    """
    lines = ""
    paths = [folder / CONFIG, *weight_files(folder), *further_files]
    if path_exists(folder / COMPOSITION):  # only classifiers that virnuc has trained have one
        paths.append(folder / COMPOSITION)
    for path in paths:
        with refuse_unreadable(path, "file", WeightsError):
            status = read_with_retries(path, path.stat)
        with _digest_lock:  # a second thread that needs this digest waits for it
            digest = _cached_digest(path.resolve(), _file_state(status), recompute)
        lines += f"{path.name} {digest}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def _file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return numbers of a file's status that change if the file is replaced or written to."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


@functools.cache
def _cached_digest(path: Path, state: tuple[int, ...], recompute: bool) -> str:
    """Return the digest of a file, from the user's cache if the file has not changed.

    The digest of a large file is written to the cache in the user's home. Processes that start at
    the same time do not all read the file: one computes the digest, and the others wait. A cache
    that cannot be read or written is not an error: the digest is computed then.

    Args:
        path: The file.
        state: Numbers that change if the file changes, such as its size and its times.
        recompute: Read the file, even if its digest is in the cache.
    """
    key = hashlib.sha256(f"{path} {state}".encode()).hexdigest()
    cache_path = None
    with suppress(RuntimeError):  # the user has no home
        cache_path = Path(CACHE, key).expanduser()
    if cache_path is None or not _is_large(path):
        return read_with_retries(path, lambda: digest_of(path))

    def is_cached() -> bool:
        """Return whether another process has computed the digest, and it may be used."""
        return not recompute and _read_cached_digest(cache_path) is not None

    with first_use(cache_path.parent, f"the digest of {path.name}", is_cached) as must_compute:
        if not must_compute:
            cached_digest = _read_cached_digest(cache_path)
            if cached_digest is not None:
                return cached_digest
        digest = read_with_retries(path, lambda: digest_of(path))
        with suppress(OSError, VirnucError):
            write_text_atomically(cache_path, _cache_text(key, digest))
        return digest


def _is_large(path: Path) -> bool:
    """Return whether a file is so large that its digest is worth keeping in the cache.

    A file that cannot be read counts as small.
    """
    with suppress(OSError):
        return path.stat().st_size >= LARGE_BYTES
    return False


def _read_cached_digest(cache_path: Path) -> str | None:
    """Return the digest in a file of the cache, or None if there is no usable one."""
    with suppress(OSError):
        text = cache_path.read_text("ascii", "replace")
        # An entry of an older version has no checksum, and is not used either.
        digest, _, checksum = text.removesuffix("\n").partition(" ")
        if compare_text(_checked_text(cache_path.name, digest), checksum) is Match.SAME:
            return digest
    return None


def _cache_text(key: str, digest: str) -> str:
    """Return the content of a file of the cache: a digest, and the SHA-256 that protects it.

    Args:
        key: The name of the file, which stands for the path and the state of the hashed file.
        digest: The digest of the hashed file.
    """
    checksum = hashlib.sha256(_checked_text(key, digest)).hexdigest()
    return f"{digest} {checksum}\n"


def _checked_text(key: str, digest: str) -> bytes:
    """Return the text that the checksum in a file of the cache covers; see `_cache_text`."""
    return f"{key} {digest}".encode()


def digest_of(path: Path) -> str:
    """Return the digest of a file, computed from its content by several threads.

    For a file of up to `PIECE_BYTES` this is its SHA-256. A larger file is cut into pieces, and the
    digest is the SHA-256 of the joined SHA-256 digests of the pieces.

    Raises:
        OSError: The file cannot be read.
    """

    def piece_digest(start: int) -> bytes:
        """Return the SHA-256 of the piece of the file that begins at this byte."""
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE_BYTES)).digest()

    size = path.stat().st_size
    if size <= PIECE_BYTES:
        return sha256_of(path)
    starts = range(0, size, PIECE_BYTES)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        digests = b"".join(threads.map(piece_digest, starts))
    return hashlib.sha256(digests).hexdigest()
