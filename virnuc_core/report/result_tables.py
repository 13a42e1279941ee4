"""Read result files of virnuc, of the original algorithm and of its successor.

The consensus file of the original has two columns, that of its successor four.
"""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pandas as pd

from virnuc_core import consensus
from virnuc_core.config import refuse_unreadable
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import read_columns
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.runfiles import (
    MODEL_LENGTH,
    RunRecord,
    find_mismatches,
    identity,
    listed_digest,
    read,
)
from virnuc_core.safe_files import open_file, regular_file_exists
from virnuc_core.system_errors import is_folder, is_link, list_folder, real_path

log = logging.getLogger(__name__)

Part = Literal["frames", "consensus"]

MAX_FOREIGN_SHARE: Final = 0.01  # of ids that only one side has, in results of the same reads
MAX_HEADER_BYTES: Final = 1 << 16  # of the first line, which has the names of the columns
BLOCK_LINES: Final = 1 << 16  # some 15 MB


@dataclass(frozen=True, slots=True)
class TableFormat:
    """The columns of a result file, and the words for its two labels."""

    columns: tuple[str, str, str, str]  # id, label, score of others, score of virus
    virus: str
    others: str


FORMATS: Final[dict[Part, TableFormat]] = {
    "frames": TableFormat(("Sequence_ID", "Prediction", "score1", "score2"), "virus", "others"),
    "consensus": TableFormat(
        ("Modified_ID", "Is_Virus", "max_score_0", "max_score_1"), "True", "False"
    ),
}
OUR_COLUMNS: Final = ("id", "virus", "score1", "score2")
SCORE_COLUMNS: Final = OUR_COLUMNS[2:]
OUR_TYPES: Final = ("str", "str", "float64", "float64")


def load_results(path: Path) -> pd.DataFrame:
    """Read the rows of a result file.

    Returns:
        Columns `id`, `virus` (bool), and `score1` and `score2` (float64). Rows without a finite
        score are left out. A consensus file of two columns has no scores.

    Raises:
        InputError: This is not a result file, a line has an unknown label, or the file is not as
            the run left it, according to the digest in the summary beside it.
    """
    return pd.concat(iterate_results(path), ignore_index=True)


def iterate_results(path: Path) -> Iterator[pd.DataFrame]:
    """Yield the scored rows of a result file in pieces of `BLOCK_LINES` rows; see `load_results`.

    Rows whose scores are not both finite are set aside, and a warning tells their number: programs
    write a label beside such scores, too, but it says nothing. virnuc itself writes no such rows.
    The index of the rows continues from piece to piece, so it also tells the line of a row.
    """
    n_set_aside = 0
    for rows in _iterate_all_rows(path):
        scores = rows.loc[:, rows.columns.isin(SCORE_COLUMNS)]  # none in a file of two columns
        is_finite = np.isfinite(scores.to_numpy()).all(axis=1)
        n_set_aside += int((~is_finite).sum())
        yield rows[is_finite]
    if n_set_aside:
        log.warning("%s: %d rows without a finite score are left out", path, n_set_aside)


def _iterate_all_rows(path: Path) -> Iterator[pd.DataFrame]:
    """Yield all rows of a result file, also those without a finite score; see `iterate_results`."""
    part, header = _identify(path)
    table_format = FORMATS[part]
    columns = list(table_format.columns)
    if part == "consensus" and not set(columns) <= set(header):
        columns = columns[:2]  # id and label: an older form of the file, without scores
    missing = [name for name in columns if name not in header]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}; columns are separated by tabs", file=path, line=1
        )
    label_column = columns[1]
    labels = (table_format.virus, table_format.others)
    types = dict(zip(columns, OUR_TYPES, strict=False))  # not strict: the scores may be absent
    # Only these texts are a missing score. Other words in a column of scores are an error.
    missing_numbers = {name: ["", "nan", "NaN"] for name in columns[2:]}
    try:
        table = read_columns(
            path,
            types,
            recorded=listed_digest(path),
            na_values=missing_numbers,
            chunksize=BLOCK_LINES,
        )
        with table as pieces:
            for piece in pieces:
                rows = piece[columns]
                rows.columns = pd.Index(OUR_COLUMNS[: len(columns)])
                unknown = rows["virus"][~rows["virus"].isin(labels)]
                if len(unknown):
                    raise InputError(
                        f"{label_column} is '{unknown.iloc[0]}', neither {' nor '.join(labels)}",
                        file=path,
                        line=int(unknown.index[0]) + 2,  # lines count from 1, and 1 is the header
                    )
                yield rows.assign(virus=rows["virus"] == table_format.virus)
    except ValueError as error:  # pandas' own errors are such
        raise InputError(f"not a table of results ({error})", file=path) from error


def _identify(path: Path) -> tuple[Part, list[str]]:
    """Return whether a result file has frames or chunks, and the names of its columns.

    Returns:
        `frames`, or `consensus` for chunks, and the names in the first line of the file.

    Raises:
        InputError: The file has neither.
    """
    with (
        refuse_unreadable(path, "text", InputError),
        open_file(path) as file,
    ):
        first_line = file.readline(MAX_HEADER_BYTES).decode("utf-8", "surrogateescape")
        header = first_line.rstrip("\r\n").split("\t")
    for part, table_format in FORMATS.items():
        if table_format.columns[0] in header:
            return part, header
    raise InputError(
        "not a result file: its first line has neither Sequence_ID nor Modified_ID",
        file=path,
        line=1,
    )


def result_files(path: Path) -> dict[Part, Path]:
    """Return the result files of a folder, or the single file that is given, by their kind.

    VirNucPro and its successor write them into a folder `NAME_merged` inside their output folder.
    That output folder can be given, too.

    Raises:
        InputError: The folder has no result file, or several folders with result files.
    """
    if not is_folder(path):
        # The user has named this file, so it may be a link.
        if is_link(path):
            path = real_path(path)
        part, _ = _identify(path)
        return {part: path}
    files = _result_files_in(path)
    if files:
        return files
    merged_folders = [folder for folder in list_folder(path, "*_merged") if is_folder(folder)]
    files_of_folder = {folder: _result_files_in(folder) for folder in merged_folders}
    filled_folders = [folder for folder, found in files_of_folder.items() if found]
    if len(filled_folders) > 1:
        names = ", ".join(folder.name for folder in filled_folders)
        raise InputError(f"{names} all have results; give one of these folders", file=path)
    if not filled_folders:
        run = RunDir(path)
        names = f"neither {run.predictions.name} nor {run.consensus.name}"
        raise InputError(f"{names} is in this folder", file=path)
    return files_of_folder[filled_folders[0]]


def _result_files_in(folder: Path) -> dict[Part, Path]:
    """Return the result files that lie in a folder itself, by their kind."""
    run = RunDir(folder)
    files: dict[Part, Path] = {}
    if regular_file_exists(run.predictions):
        files["frames"] = run.predictions
    if regular_file_exists(run.consensus):
        files["consensus"] = run.consensus
    return files


def derive_consensus(frames: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the chunks, computed from the results of their frames.

    As in the original program, a chunk gets the highest score of its frames in each of the two
    columns, and the label of the higher one. The id of a frame is the id of its chunk followed by
    two characters, such as "F1".

    Args:
        frames: Rows of frames, as `load_results` reads them.

    Returns:
        The same columns for chunks, in the order of each chunk's first row.
    """
    chunk_ids = frames["id"].str.slice(stop=-2)
    chunk_of_frame, ids = pd.factorize(chunk_ids)  # in order of first occurrence
    frame_scores = frames[["score1", "score2"]].to_numpy()
    tops = consensus.top_scores_by_chunk(frame_scores, chunk_of_frame)
    return pd.DataFrame(
        {
            "id": ids,
            "score1": tops[:, 0],
            "score2": tops[:, 1],
            "virus": consensus.is_viral_chunk(tops[:, 0], tops[:, 1]),
        }
    )


def has_read_tables(run: RunDir) -> bool:
    """Return whether a folder has its rows and both tables that tell reads of one id apart."""
    paths = (run.predictions, run.reads_table, run.failed_rows)
    return all(regular_file_exists(path) for path in paths)


def take_results(path: Path, run: RunDir, store: OrfStore) -> None:
    """Copy the result files of an earlier baseline into a run directory.

    A file that the earlier baseline does not have is removed there.

    Args:
        path: The folder of the result files, or one of the files.
        run: The run directory.
        store: The staged reads. The results must be of the same reads.

    Raises:
        InputError: More than 1 % of the ids in the results do not occur in these reads, or more
            than 1 % of the ids of these reads are missing in the results.
        RunMismatchError: According to the run.json in the folder, the results are of other reads or
            another model length.
    """
    record_path = RunDir(path if is_folder(path) else path.parent).record
    if regular_file_exists(record_path):
        expected = {"reads": store.fingerprint, MODEL_LENGTH: str(store.model_length)}
        mismatches = find_mismatches(identity(read(record_path, RunRecord)), expected)
        if mismatches:
            names = ", ".join(mismatches)
            raise RunMismatchError(
                f"{record_path.parent} holds results of other {names}; give those of these reads"
            )
    files = result_files(path)
    # The ids of our frames as the original program writes them, such as `r7_chunk_1F2`. Without
    # the last two characters (`F2`, the frame), this is the id of the chunk, `r7_chunk_1`. Results
    # by consensus have one row for each chunk.
    frame_ids = pd.Series(store.row_ids(0, store.n_rows, original=True), dtype="str")
    chunk_ids = frame_ids.str.slice(stop=-2)
    for part, file in files.items():
        ids = frame_ids if part == "frames" else chunk_ids
        _require_same_ids(file, pd.Index(ids).unique())
    folder = RunDir(path if is_folder(path) else path.parent)
    sources: dict[Path, Path | None] = {
        run.predictions: files.get("frames"),
        run.consensus: files.get("consensus"),
        run.reads_table: None,
        run.failed_rows: None,
    }
    # virnuc's own baselines have two tables that tell reads of the same id apart.
    if is_folder(path) and has_read_tables(folder):
        sources |= {run.reads_table: folder.reads_table, run.failed_rows: folder.failed_rows}
    for target, source in sources.items():
        if source is None:
            target.unlink(missing_ok=True)  # it would be the file of an earlier baseline
            continue
        with atomic_file(target) as temp_path:
            shutil.copyfile(source, temp_path)


def _require_same_ids(file: Path, expected: "pd.Index[str]") -> None:
    """Raise an `InputError` if more than 1 % of the ids are only in the file, or only expected."""
    all_rows = pd.concat(_iterate_all_rows(file), ignore_index=True)
    ids = pd.Index(all_rows["id"]).unique()
    foreign = ids.difference(expected)
    missing = expected.difference(ids)
    if max(len(foreign), len(missing)) > MAX_FOREIGN_SHARE * len(expected):
        raise InputError(
            f"results of other reads: {len(foreign):,} of its {len(ids):,} ids are not among "
            f"these reads, {len(missing):,} of the {len(expected):,} ids of these reads "
            "are missing",
            file=file,
            hint="give results of the very reads",
        )
