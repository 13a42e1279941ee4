"""Tell apart the rows of reads that share an id, with the two tables of reads beside the results.

VirNucPro's two files have the ids of the input. If two reads are called `r7`, so are the rows of
both, and if a row of the first could not be scored, the n-th row of one result is no longer the
n-th row of another. `reads.tsv` and `failed.tsv` have unique ids (`r7` and `r7.2`), and say how
many rows each read has and which of them have no score.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.errors import InputError
from virnuc_core.reads.subsets import read_table
from virnuc_core.report.result_tables import Part, iterate_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import listed_digest

Tables = Iterator[pd.DataFrame]

CHUNK: Final = "_chunk_"  # what follows the id of the read in the ids of chunks and frames
ROW_SUFFIX: Final = r"_chunk_\d+(?:[FR]\d)?$"
DUPLICATE: Final = r"duplicate_of=(.*)$"  # the last of the flags of a read
FRAME_CHARACTERS: Final = 2  # of a frame at the end of a row's id, such as "F1"


@dataclass(frozen=True, slots=True)
class RowNames:
    """The two names of each row of a result file, in the order of the file."""

    original: NDArray[np.object_]  # as in the file
    unique: NDArray[np.object_]


def unique_names(run: RunDir) -> dict[Part, RowNames]:
    """Return the unique names of the rows in a folder's result files.

    Args:
        run: The folder, with both tables of reads.

    Returns:
        The names of the frames and of the chunks. Empty if no two reads share an id, so that the
        names in the files are unique.

    Raises:
        InputError: The tables contradict the result files.
    """
    columns = {"id": "str", "open_frames": "int64", "flags": "str"}
    recorded = listed_digest(run.reads_table)
    reads = read_table(run.reads_table, columns, recorded=recorded)
    first_ids = reads["flags"].str.extract(DUPLICATE, expand=False)  # NaN: the id is not repeated
    if first_ids.isna().all():
        return {}
    original_ids = first_ids.fillna(reads["id"]).to_numpy(dtype=object)
    read_of_row = np.repeat(np.arange(len(reads)), _scored_rows(run, reads))
    frames = _frame_names(run, original_ids, reads["id"].to_numpy(dtype=object), read_of_row)
    return {"frames": frames, "consensus": _chunk_names(frames)}


def _scored_rows(run: RunDir, reads: pd.DataFrame) -> NDArray[np.int64]:
    """Return how many rows of each read have a score: all but those in `failed.tsv`, [reads].

    Raises:
        InputError: `failed.tsv` names rows of other reads, or more rows than a read has.
    """
    recorded = listed_digest(run.failed_rows)
    failed = read_table(run.failed_rows, {"Sequence_ID": "str"}, recorded=recorded)
    failed_reads = failed["Sequence_ID"].str.replace(ROW_SUFFIX, "", regex=True)
    read_of_failed = pd.Index(reads["id"]).get_indexer(pd.Index(failed_reads))
    if (read_of_failed < 0).any():
        unknown = failed["Sequence_ID"][read_of_failed < 0].iloc[0]
        raise InputError(f"'{unknown}' is a row of no read in reads.tsv", file=run.failed_rows)
    n_failed = np.bincount(read_of_failed, minlength=len(reads))
    n_scored: NDArray[np.int64] = reads["open_frames"].to_numpy() - n_failed
    if (n_scored < 0).any():
        raise InputError("names more rows than reads.tsv has frames", file=run.failed_rows)
    return n_scored


def _frame_names(
    run: RunDir,
    original_ids: NDArray[np.object_],
    unique_ids: NDArray[np.object_],
    read_of_row: NDArray[np.int64],
) -> RowNames:
    """Return the names of the rows of `prediction_results.txt`.

    Args:
        run: The folder.
        original_ids: The id in the input of each read, [reads].
        unique_ids: The unique id of each read, [reads].
        read_of_row: The read of each row, [rows].

    Raises:
        InputError: The file has other rows than the tables of reads say.
    """
    row_ids = [row_id for rows in iterate_results(run.predictions) for row_id in rows["id"]]
    if len(row_ids) != len(read_of_row):
        raise InputError(
            f"has {len(row_ids):,} rows, reads.tsv and failed.tsv tell of {len(read_of_row):,}",
            file=run.predictions,
        )
    names = []
    for row_id, read in zip(row_ids, read_of_row.tolist(), strict=True):
        original_id = original_ids[read]
        if not row_id.startswith(original_id + CHUNK):
            raise InputError(
                f"has the row '{row_id}' where reads.tsv has the read '{original_id}'",
                file=run.predictions,
            )
        names.append(unique_ids[read] + row_id[len(original_id) :])
    return RowNames(np.array(row_ids, dtype=object), np.array(names, dtype=object))


def _chunk_names(frames: RowNames) -> RowNames:
    """Return the names of the chunks of some frames, in the order of each chunk's first frame."""
    chunk_of_frame = pd.Series(frames.unique, dtype="str").str.slice(stop=-FRAME_CHARACTERS)
    first_frames = np.flatnonzero(~chunk_of_frame.duplicated())
    original = pd.Series(frames.original, dtype="str").str.slice(stop=-FRAME_CHARACTERS)
    return RowNames(
        original=original.to_numpy(dtype=object)[first_frames],
        unique=chunk_of_frame.to_numpy(dtype=object)[first_frames],
    )


def rename_rows(pieces: Tables, names: RowNames, path: Path) -> Tables:
    """Yield pieces of a result file with the unique names of the rows as their ids.

    Args:
        pieces: The rows of the file, in its order.
        names: The names of all its rows.
        path: The file, which an error names.

    Raises:
        InputError: The rows have other names than expected.
    """
    n_rows = 0
    for rows in pieces:
        part = slice(n_rows, n_rows + len(rows))
        if not np.array_equal(rows["id"].to_numpy(dtype=object), names.original[part]):
            raise InputError("its rows are not those of reads.tsv beside it", file=path)
        yield rows.assign(id=names.unique[part])
        n_rows += len(rows)
    if n_rows != len(names.original):
        raise InputError("lacks rows of reads.tsv beside it", file=path)
