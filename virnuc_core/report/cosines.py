"""Compare the embeddings of two runs: the cosine of each sequence's embedding to its partner's.

The mean embedding is taken off both first. What all embeddings have in common makes plain cosines
0.99 and more, whatever the sequence.
"""

import errno
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.checked_files import open_checked_hdf5
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.engine.shards import EXACT_SEAL, is_sealed, store_path
from virnuc_core.engine.slices import slices
from virnuc_core.errors import InputError, UnreadableError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import (
    RunRecord,
    find_mismatches,
    identity,
    listed_digests,
    read,
)
from virnuc_core.safe_files import open_hdf5, read_dataset
from virnuc_core.system_errors import error_number, path_exists, read_with_retries
from virnuc_core.validation import CosineStats

# The paths of shards as `embeddings.h5` names them. It may show the content of no other files.
SHARD_PATH_PATTERN: Final = r"shards/[0-9]{5,}\.h5"
BLOCK_ROWS: Final = 1_024
RUN_AGAIN: Final = "run again to compute it"

RowNumbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of two embeddings files that are of the same sequences, in the same order."""

    in_a: RowNumbers
    in_b: RowNumbers


def cosines(a: Path, b: Path, dna_width: int | None = None) -> tuple[CosineStats, ...]:
    """Compare the embeddings of each sequence that both runs have.

    The mean embedding of run `a` is subtracted from the embeddings of both runs, because all
    embeddings have a large part in common, which would bring every cosine near 1. Failed rows (NaN)
    are left out.

    Args:
        a: A run directory.
        b: Another one.
        dna_width: Number of columns of the DNA encoder. If it is given, the encoders are compared
            separately.

    Returns:
        Statistics for each encoder, or for both together. Empty if a run has no embeddings, or the
        runs have no sequence in common.

    Raises:
        InputError: Embeddings cannot be read.
    """
    path_a = RunDir(a).embeddings
    path_b = RunDir(b).embeddings
    if not path_exists(path_a) or not path_exists(path_b):
        return ()
    try:
        with _open_embeddings(path_a, path_b) as (file_a, file_b):
            # A part is the columns of one encoder or, without a `dna_width`, all columns.
            cosines_of_part = _cosines_of_parts(RunDir(a), RunDir(b), file_a, file_b, dna_width)
    except (OSError, KeyError) as error:
        raise InputError(f"embeddings of {a} or {b} cannot be read ({error})") from error
    stats = []
    for part, values in cosines_of_part.items():
        known_values = values[~np.isnan(values)]
        if len(known_values):
            stats.append(
                CosineStats(
                    part=part,
                    n=len(known_values),
                    minimum=known_values.min(),
                    p1=np.percentile(known_values, 1),
                    mean=known_values.mean(),
                )
            )
    return tuple(stats)


def _cosines_of_parts(
    a: RunDir, b: RunDir, file_a: h5py.File, file_b: h5py.File, dna_width: int | None
) -> dict[str, NDArray[np.float64]]:
    """Return the centred cosine of each shared sequence.

    The files may be larger than the memory, so the rows are read in blocks: once for the mean of
    `a`, and once for the cosines.

    Returns:
        Cosines [sequences] by encoder, or under `joined` for all columns. NaN for a sequence that
        failed in one of the runs.
    """
    table_a = file_a["embeddings"]
    table_b = file_b["embeddings"]
    shared_rows = _shared_rows(a, b, file_a, file_b)
    n_rows = len(shared_rows.in_a)
    width = table_a.shape[1]
    if n_rows == 0 or table_b.shape[1] != width:  # the widths differ: other encoders
        return {}
    parts = {"joined": slice(0, width)}
    if dna_width is not None and 0 < dna_width < width:
        parts = {DNA.title: slice(0, dna_width), PROTEIN.title: slice(dna_width, width)}

    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, n_rows, BLOCK_ROWS)]
    total = np.zeros(width)
    n_good = 0
    for block in blocks:
        rows_a = _read_rows(table_a, shared_rows.in_a[block])
        total += np.nansum(rows_a, axis=0)
        n_good += int((~np.isnan(rows_a[:, 0])).sum())  # a failed row is NaN in all columns
    mean = total / max(1, n_good)  # if all rows have failed, all cosines become NaN

    cosines_of_part = {name: np.full(n_rows, np.nan) for name in parts}
    for block in blocks:
        centred_a = _read_rows(table_a, shared_rows.in_a[block]) - mean
        centred_b = _read_rows(table_b, shared_rows.in_b[block]) - mean
        for name, columns in parts.items():
            _write_cosines(
                centred_a[:, columns], centred_b[:, columns], out=cosines_of_part[name][block]
            )
    return cosines_of_part


def _write_cosines(
    a: NDArray[np.float64], b: NDArray[np.float64], out: NDArray[np.float64]
) -> None:
    """Write the cosine of each row of `a` and `b` to `out`.

    A row with a zero vector has no cosine. Its value in `out` stays as it was.

    Args:
        a: Vectors [rows, columns].
        b: Vectors of the same shape.
        out: Receives the cosines [rows].
    """
    dot_products = np.einsum("ij,ij->i", a, b)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    np.divide(dot_products, lengths, out=out, where=lengths > 0)


@contextmanager
def _open_embeddings(path_a: Path, path_b: Path) -> Iterator[tuple[h5py.File, h5py.File]]:
    """Open two embeddings files and all shards that they refer to.

    The dataset of an embeddings file is virtual: its rows are stored in many shards. For a shard
    that it cannot open, HDF5 returns infinity without an error. So all shards are opened here and
    stay open, which may need a higher limit on open files; the limit is raised meanwhile.

    Raises:
        InputError: A shard is missing or damaged, or this process may not open so many files.
        UnreadableError: The system cannot read a shard, so that nothing is known about it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        file_a = stack.enter_context(
            read_with_retries(path_a, partial(_open_embeddings_file, path_a))
        )
        file_b = stack.enter_context(
            read_with_retries(path_b, partial(_open_embeddings_file, path_b))
        )
        shard_paths = [*_shards_of(path_a, file_a), *_shards_of(path_b, file_b)]
        n_shard_rows = 0
        for shard_path in shard_paths:
            run_root = shard_path.parent.parent
            try:
                open_shard = partial(open_hdf5, shard_path, run_root)
                shard = stack.enter_context(read_with_retries(shard_path, open_shard))
                n_shard_rows += len(shard["embeddings"])
                _require_sealed(shard_path)
            except (OSError, KeyError, RuntimeError) as error:
                raise InputError(
                    f"cannot be read ({error})", file=shard_path, hint=RUN_AGAIN
                ) from error
            except UnreadableError as error:
                cause = error.__cause__
                if cause is None or error_number(cause) != errno.EMFILE:
                    raise
                raise InputError(
                    "cannot be opened",
                    file=shard_path,
                    hint=f"if {len(shard_paths)} files may not be open at the same time, raise "
                    "`ulimit -n`",
                ) from error
        # HDF5 would return infinity for rows that are in no shard.
        virtual_tables = [
            table for table in (file_a["embeddings"], file_b["embeddings"]) if table.is_virtual
        ]
        if sum(map(len, virtual_tables)) > n_shard_rows:
            raise InputError(
                "has more rows than its shards", file=path_a, hint="finish the run first"
            )
        yield file_a, file_b


def _open_embeddings_file(path: Path) -> h5py.File:
    """Open the `embeddings.h5` of a run, if it is as the run left it.

    Its digest is in the summary of the run. Embeddings in fp32, whose folder has no summary, begin
    with a seal: a digest of all other bytes of the file.
    """
    # The embeddings of a run lie in the files of its shards, to which this file refers.
    recorded = listed_digests(RunDir(path.parent)).get(path.name) or EXACT_SEAL
    return open_checked_hdf5(
        path, recorded, path.parent, remedy=RUN_AGAIN, virtual_sources=SHARD_PATH_PATTERN
    )


def _require_sealed(shard_path: Path) -> None:
    """Raise an error if a shard does not have the bytes that were committed.

    A flipped bit in an embedding changes a cosine, but makes no file unreadable. So the whole file
    is compared with its seal before a row of it is used.

    Raises:
        InputError: The shard was changed or damaged.
        UnreadableError: The system cannot read the shard, so that nothing is known about it.
    """
    if not read_with_retries(shard_path, partial(is_sealed, shard_path)):
        raise InputError("has other bytes than were committed", file=shard_path, hint=RUN_AGAIN)


def _shards_of(path: Path, file: h5py.File) -> list[Path]:
    """Return the paths of the shards that an embeddings file refers to."""
    table = file["embeddings"]
    if not table.is_virtual:  # the file holds the embeddings itself
        return []
    return [path.parent / source.file_name for source in table.virtual_sources()]


def _shared_rows(a: RunDir, b: RunDir, file_a: h5py.File, file_b: h5py.File) -> SharedRows:
    """Find the rows of two embeddings files that belong to the same sequences.

    If both runs have the same reads, their sequences have the same numbers. Otherwise sequences are
    matched by their letters.
    """
    record_a = _record_of(a)
    record_b = _record_of(b)
    # By the keys, a row of one file is found in the other. Usually these are the numbers of the
    # sequences in the store.
    keys_a: list[Any] = _sequence_numbers(file_a)
    keys_b: list[Any] = _sequence_numbers(file_b)
    if "reads" in find_mismatches(identity(record_a), identity(record_b)):
        keys_a = _sequences(a, record_a, keys_a)
        keys_b = _sequences(b, record_b, keys_b)
    # For each row of b, the row of a with the same sequence; -1 if there is none.
    row_in_a = pd.Index(keys_a).get_indexer(pd.Index(keys_b))
    has_partner = row_in_a >= 0
    return SharedRows(in_a=row_in_a[has_partner].astype(np.int64), in_b=np.flatnonzero(has_partner))


def _record_of(run: RunDir) -> RunRecord:
    """Return the record of a run, or a record without fingerprints if the run has none."""
    if path_exists(run.record):
        return read(run.record, RunRecord)
    return RunRecord(fingerprints={})


def _sequence_numbers(file: h5py.File) -> Any:
    """Return the number of the sequence of each row of an embeddings file.

    A file of only some sequences lists their numbers. Without a list, it has all of them in order.
    """
    if "uniques" in file:
        return read_dataset(file["uniques"])
    return range(len(file["embeddings"]))


def _sequences(run: RunDir, record: RunRecord, numbers: list[int]) -> list[bytes]:
    """Return DNA and protein of the sequences with these numbers, separated by a blank."""
    store = OrfStore.open(store_path(run, record))
    dna = store.dna(0, store.n_uniques)
    protein = store.protein(0, store.n_uniques)
    return [dna[number] + b" " + protein[number] for number in numbers]


def _read_rows(table: h5py.Dataset, rows: RowNumbers) -> NDArray[np.float64]:
    """Return the given rows of a table. Consecutive rows are read together.

    A row that is not finite throughout becomes NaN in all columns, so that it counts as failed.
    """
    stretches = [table[start:end] for start, end in slices(rows)]
    values = np.concatenate([np.asarray(stretch, dtype=np.float64) for stretch in stretches])
    values[~np.isfinite(values).all(axis=1)] = np.nan
    return values
