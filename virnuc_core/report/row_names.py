"""Tell apart the rows of reads that share an id, with the two tables of reads beside the results.

VirNucPro's two files have the ids of the input. If two reads are called `r7`, so are the rows of
both, and if a row of the first could not be scored, the n-th row of one result is no longer the
n-th row of another. `reads.tsv` and `failed.tsv` have unique ids (`r7` and `r7.2`), and say how
many rows each read has and which of them have no score.

All of these files are in the order of the input. So they are read side by side, a piece at a time,
and the memory that is needed does not grow with the reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final, NamedTuple

import pandas as pd

from virnuc_core.errors import InputError
from virnuc_core.reads.subsets import iterate_table
from virnuc_core.report.result_tables import Part, iterate_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import listed_digest

Tables = Iterator[pd.DataFrame]

CHUNK: Final = "_chunk_"  # what follows the id of the read in the ids of chunks and frames
ROW_SUFFIX: Final = r"_chunk_\d+(?:[FR]\d)?$"
DUPLICATE_FLAG: Final = "duplicate_of="  # the last of the flags of a read
DUPLICATE: Final = rf"{DUPLICATE_FLAG}(.*)$"
FRAME_CHARACTERS: Final = 2  # of a frame at the end of a row's id, such as "F1"
READ_COLUMNS: Final = {"id": "str", "open_frames": "int64", "flags": "str"}


class TwoNames(NamedTuple):
    """The two names of a read, a chunk or a frame."""

    original: str  # as in VirNucPro's files
    unique: str


@dataclass(frozen=True, slots=True)
class RowNames:
    """How the rows of a folder's result files are named, where reads share an id."""

    run: RunDir
    n_failed_of_read: dict[str, int]  # rows without a score, of the reads that have such
    n_rows: int  # all rows with a score


def find_row_names(run: RunDir) -> RowNames | None:
    """Return how the rows in a folder's result files are named.

    Args:
        run: The folder, with both tables of reads.

    Returns:
        What `rename_rows` needs. None if no two reads share an id, so that the names in the files
        are unique.

    Raises:
        InputError: The tables contradict each other.
    """
    has_repeated_ids = any(
        reads["flags"].str.contains(DUPLICATE_FLAG, regex=False).any()
        for reads in _iterate_reads(run)
    )
    if not has_repeated_ids:
        return None
    return _count_rows(run)


def _iterate_reads(run: RunDir) -> Tables:
    """Yield the columns of `reads.tsv` that names are made of, piece by piece."""
    recorded = listed_digest(run.reads_table)
    return iterate_table(run.reads_table, READ_COLUMNS, recorded=recorded)


def _count_rows(run: RunDir) -> RowNames:
    """Count how many rows have a score: all but those in `failed.tsv`.

    Raises:
        InputError: `failed.tsv` names rows of other reads, or more rows than a read has.
    """
    n_failed_of_read: dict[str, int] = {}
    first_failed_row: dict[str, str] = {}  # of each of these reads
    recorded = listed_digest(run.failed_rows)
    for failed in iterate_table(run.failed_rows, {"Sequence_ID": "str"}, recorded=recorded):
        read_ids = failed["Sequence_ID"].str.replace(ROW_SUFFIX, "", regex=True)
        for row_id, read_id in zip(failed["Sequence_ID"], read_ids, strict=True):
            n_failed_of_read[read_id] = n_failed_of_read.get(read_id, 0) + 1
            first_failed_row.setdefault(read_id, row_id)

    n_rows = 0
    names_too_many = False
    for reads in _iterate_reads(run):
        n_failed = reads["id"].map(n_failed_of_read).fillna(0)
        n_scored = reads["open_frames"] - n_failed
        names_too_many |= bool((n_scored < 0).any())
        n_rows += int(n_scored.sum())
        for read_id in reads["id"][n_failed > 0]:
            first_failed_row.pop(read_id, None)
    if first_failed_row:  # of reads that are not in the table
        unknown = next(iter(first_failed_row.values()))
        raise InputError(f"'{unknown}' is a row of no read in reads.tsv", file=run.failed_rows)
    if names_too_many:
        raise InputError("names more rows than reads.tsv has frames", file=run.failed_rows)
    return RowNames(run, n_failed_of_read, n_rows)


def _iterate_read_of_row(names: RowNames) -> Iterator[TwoNames]:
    """Yield the names of the read of each row with a score, in the order of the file."""
    for reads in _iterate_reads(names.run):
        first_ids = reads["flags"].str.extract(DUPLICATE, expand=False)  # NaN: not repeated
        original_ids = first_ids.fillna(reads["id"])
        columns = zip(original_ids, reads["id"], reads["open_frames"], strict=True)
        for original, unique, n_frames in columns:
            n_rows = n_frames - names.n_failed_of_read.get(unique, 0)
            yield from repeat(TwoNames(original, unique), n_rows)


def _iterate_frame_names(names: RowNames) -> Iterator[TwoNames]:
    """Yield the names of the rows of `prediction_results.txt`, in the order of the file.

    Raises:
        InputError: The file has other rows than the tables of reads say.
    """
    path = names.run.predictions
    read_of_row = _iterate_read_of_row(names)
    ids = chain.from_iterable(rows["id"] for rows in iterate_results(path))
    n_rows = 0
    for row_id in ids:
        read = next(read_of_row, None)
        n_rows += 1
        is_as_expected = read is not None and row_id.startswith(read.original + CHUNK)
        if read is None or not is_as_expected:
            _require_number_of_rows(names, n_rows + sum(1 for _ in ids))
            assert read is not None  # else there are more rows than the tables tell of
            raise InputError(
                f"has the row '{row_id}' where reads.tsv has the read '{read.original}'",
                file=path,
            )
        yield TwoNames(row_id, read.unique + row_id[len(read.original) :])
    _require_number_of_rows(names, n_rows)


def _require_number_of_rows(names: RowNames, n_rows: int) -> None:
    """Raise an `InputError` if the file of rows has another number of them than the tables say."""
    if n_rows != names.n_rows:
        raise InputError(
            f"has {n_rows:,} rows, reads.tsv and failed.tsv tell of {names.n_rows:,}",
            file=names.run.predictions,
        )


def _iterate_chunk_names(names: RowNames) -> Iterator[TwoNames]:
    """Yield the names of the chunks of all rows, in the order of each chunk's first row."""
    read_id = None
    seen_chunks: set[str] = set()  # of this read
    frames = zip(_iterate_frame_names(names), _iterate_read_of_row(names), strict=True)
    for frame, read in frames:
        if read.unique != read_id:
            read_id = read.unique
            seen_chunks.clear()
        chunk = frame.unique[:-FRAME_CHARACTERS]
        if chunk not in seen_chunks:
            seen_chunks.add(chunk)
            yield TwoNames(frame.original[:-FRAME_CHARACTERS], chunk)


def rename_rows(pieces: Tables, part: Part, names: RowNames) -> Tables:
    """Yield pieces of a result file with the unique names of the rows as their ids.

    Args:
        pieces: The rows of the file, in its order.
        part: Whether the file has frames or chunks.
        names: How its rows are named.

    Raises:
        InputError: The rows have other names than the tables of reads say.
    """
    if part == "frames":
        path = names.run.predictions
        name_of_row = _iterate_frame_names(names)
    else:
        path = names.run.consensus
        name_of_row = _iterate_chunk_names(names)
    for rows in pieces:
        unique_ids = []
        for row_id in rows["id"]:
            name = next(name_of_row, None)
            if name is None or name.original != row_id:
                raise InputError("its rows are not those of reads.tsv beside it", file=path)
            unique_ids.append(name.unique)
        yield rows.assign(id=pd.Series(unique_ids, index=rows.index, dtype=rows["id"].dtype))
    if next(name_of_row, None) is not None:
        raise InputError("lacks rows of reads.tsv beside it", file=path)
