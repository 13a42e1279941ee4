"""Two run directories compared below the level of labels: embeddings by cosine, results and shards byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.report.compare import open_side, refuse_unlike
from virnuc_core.report.model import BitwiseEquality, CosineStats
from virnuc_core.rundir import RunDir

BLOCK_ROWS: Final = 8_192
BLOCK_BYTES: Final = 1 << 20
NAMED: Final = 8
RESULT_FILES: Final = ("predictions", "consensus", "reads_table", "failed_rows")


def cosines(a: Path, b: Path, dna_width: int | None = None) -> tuple[CosineStats, ...]:
    """Cosine of each sequence's embedding in run `a` and run `b`; by encoder too, when the DNA width is known.

    Empty when a run keeps no embeddings, or not of the same sequences. Rows that failed (NaN) on either side raise no
    cosine but are left out of `n`. Raises `RunMismatchError` for unlike runs.
    """
    refuse_unlike(open_side(a), open_side(b))
    left, right = RunDir(a).embeddings, RunDir(b).embeddings
    if not left.is_file() or not right.is_file():
        return ()
    try:
        with h5py.File(left, "r") as file_a, h5py.File(right, "r") as file_b:
            rows_a, rows_b = file_a["embeddings"], file_b["embeddings"]
            if rows_a.shape != rows_b.shape or not rows_a.shape[0]:
                return ()
            parts = {"joined": slice(0, rows_a.shape[1])}
            if dna_width is not None and 0 < dna_width < rows_a.shape[1]:
                parts |= {"DNABERT-S": slice(0, dna_width), "ESM-2": slice(dna_width, rows_a.shape[1])}
            found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in parts}
            for lo in range(0, rows_a.shape[0], BLOCK_ROWS):
                block_a = np.asarray(rows_a[lo : lo + BLOCK_ROWS], dtype=np.float64)
                block_b = np.asarray(rows_b[lo : lo + BLOCK_ROWS], dtype=np.float64)
                for name, columns in parts.items():
                    found[name].append(_cosine(block_a[:, columns], block_b[:, columns]))
    except (OSError, KeyError) as error:
        raise InputError(f"embeddings of {a} or {b} cannot be read ({error})") from error
    return tuple(stats for name, blocks in found.items() if (stats := _stats(name, np.concatenate(blocks))))


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Row by row; NaN where a row has no length or is not a number."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("ij,ij->i", a, b)
    cosine: NDArray[np.float64] = np.divide(dots, norms, out=np.full(len(a), np.nan), where=norms > 0)
    return cosine


def _stats(name: str, values: NDArray[np.float64]) -> CosineStats | None:
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    return CosineStats(
        part=name,
        n=int(known.size),
        minimum=float(known.min()),
        p1=float(np.percentile(known, 1)),
        mean=float(known.mean()),
    )


def bitwise(a: Path, b: Path) -> BitwiseEquality:
    """Compare result files byte for byte, and every array of every shard bit for bit.

    Raises `RunMismatchError` for unlike runs. Nothing to compare is not identity.
    """
    refuse_unlike(open_side(a), open_side(b))
    run_a, run_b = RunDir(a), RunDir(b)
    differing: list[str] = []
    files = 0
    for part in RESULT_FILES:
        path_a, path_b = getattr(run_a, part), getattr(run_b, part)
        if not path_a.is_file() and not path_b.is_file():
            continue
        files += 1
        if not same_bytes(path_a, path_b):
            differing.append(path_a.name)
    names_a, names_b = _shard_names(run_a), _shard_names(run_b)
    differing += [f"shards/{name} is in one run only" for name in sorted(names_a ^ names_b)]
    shared = sorted(names_a & names_b)
    for name in shared:
        differing += [f"shards/{name}: {what}" for what in _shard_differences(run_a.shards / name, run_b.shards / name)]
    if not files:
        differing.append("no result file to compare")
    if not shared:
        differing.append("no shard to compare")
    return BitwiseEquality(
        identical=not differing,
        files_compared=files,
        shards_compared=len(shared),
        differing=tuple(differing[:NAMED])
        + ((f"and {len(differing) - NAMED} more",) if len(differing) > NAMED else ()),
    )


def same_bytes(a: Path, b: Path) -> bool:
    """Whether both files are there and hold the same bytes."""
    if not a.is_file() or not b.is_file() or a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while block := left.read(BLOCK_BYTES):
            if block != right.read(BLOCK_BYTES):
                return False
    return True


def _shard_names(run: RunDir) -> set[str]:
    return {path.name for path in run.shards.glob("*.h5")}


def _shard_differences(a: Path, b: Path) -> Iterator[str]:
    try:
        with h5py.File(a, "r") as file_a, h5py.File(b, "r") as file_b:
            arrays_a, arrays_b = _arrays(file_a), _arrays(file_b)
            for name in sorted(arrays_a.keys() | arrays_b.keys()):
                left, right = arrays_a.get(name), arrays_b.get(name)
                if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
                    yield f"{name} is not the same kind of array"
                elif left.tobytes() != right.tobytes():
                    yield f"{name} differs"
    except OSError as error:
        yield f"cannot be read ({error})"


def _arrays(file: h5py.File) -> dict[str, NDArray[Any]]:
    return {name: item[()] for name, item in file.items() if isinstance(item, h5py.Dataset)}
