"""Write the results of a run as Kraken's two tables.

Kraken calls a read, or a pair of mates, a *fragment*. Both tables count fragments. Tools such as
KrakenTools' `extract_kraken_reads.py` look up the id of each read of both files in the first table,
after they have cut off `/1` or `/2`. So a pair has one line there, with its id without the mark. A
read whose mate is missing has an id that they do not find, so that both files stay in step.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.allowed_paths import require_allowed
from virnuc_core.errors import InputError, VirnucError
from virnuc_core.reads.mate_files import find_other_mate_mark
from virnuc_core.reads.pairs import MATE_ENDS
from virnuc_core.reads.subsets import WRITE_AGAIN, read_columns
from virnuc_core.rundir import atomic_file
from virnuc_core.runfiles import FileDigest, RunRecord
from virnuc_core.system_errors import is_regular_file

VIRUSES_TAXON: Final = 10239  # "Viruses" in NCBI's taxonomy
UNCLASSIFIED_TAXON: Final = 0
SCORE_BINS: Final = 50  # of the histogram of scores
PIECE_FRAGMENTS: Final = 65_536  # fragments that are held in memory together
ORPHAN_END: Final = ":orphan"  # of the id of a read in a file of pairs whose mate is missing
_READ_COLUMNS: Final = ("id", "length", "open_frames", "fate", "viral_score", "flags")
_PAIR_COLUMNS: Final = ("id", "mate", "fate", "viral_score")
_MATE_ENDS: Final = tuple(end.decode() for end in MATE_ENDS)
_DUPLICATE_FLAG: Final = "duplicate_of="  # the last flag of a read with the id of an earlier one


@dataclass(slots=True)
class FragmentCounts:
    """What was counted while the table of fragments was written.

    Attributes:
        num_fragments: The fragments: pairs of mates, and reads without a mate.
        num_viral: Those of them that are viral.
        num_orphans: The reads of files of pairs whose mates are missing.
        by_score: The number of fragments by viral score, in `SCORE_BINS` equal bins from 0 to 1.
    """

    num_fragments: int = 0
    num_viral: int = 0
    num_orphans: int = 0
    by_score: NDArray[np.int64] = field(default_factory=lambda: np.zeros(SCORE_BINS, np.int64))


@dataclass(frozen=True, slots=True)
class ResultTables:
    """The tables of a run, with the digests that the run recorded for them (None: recorded none).

    Attributes:
        reads: `reads.tsv`.
        reads_digest: Its digest.
        pairs: `pairs.tsv`; None for a run of single reads.
        pairs_digest: Its digest.
    """

    reads: Path
    reads_digest: FileDigest | None
    pairs: Path | None = None
    pairs_digest: FileDigest | None = None

    def require_intact(self) -> None:
        """Raise an error if a table is not as the run left it. Nothing else is read.

        Raises:
            DamagedFileError: A table was changed.
        """
        # The first lines are enough: the digest is that of the whole file.
        read_columns(self.reads, {"id": "str"}, recorded=self.reads_digest, nrows=0)
        if self.pairs is not None:
            read_columns(self.pairs, {"id": "str"}, recorded=self.pairs_digest, nrows=0)


@dataclass(frozen=True, slots=True)
class _Fragments:
    """Fragments as columns, and the viral scores of those that have one.

    Attributes:
        ids: The ids, without `/1` and `/2` if the reads come from files of pairs.
        lengths: The number of bases; of a pair those of both mates, as `150|120`.
        is_viral: The verdict.
        frames: The number of open frames of the read, or of the first mate.
        mate_frames: The number of open frames of the second mate; empty without one.
        scores: The viral scores of the fragments that have one.
    """

    ids: pd.Series
    lengths: pd.Series
    is_viral: NDArray[np.bool_]
    frames: pd.Series
    mate_frames: pd.Series | None
    scores: NDArray[np.float64]


def write_kraken_reads(path: Path, tables: ResultTables, record: RunRecord) -> FragmentCounts:
    """Write Kraken's table of reads: one line per fragment, classified (C) if it is viral.

    A pair is viral if `pairs.tsv` says so, and a read without a mate if `reads.tsv` says so.

    Args:
        path: The table to write.
        tables: The results of the run.
        record: The record of the run. It says how many reads came from files of pairs.

    Returns:
        The counts.

    Raises:
        InputError: The tables of reads and pairs are not of the same reads, or cannot be read.
    """
    counts = FragmentCounts()
    with atomic_file(path) as table:
        table.touch()  # the file also exists if there are no reads
        for fragments in _read_fragments(tables, record):
            taxon_id = np.where(fragments.is_viral, VIRUSES_TAXON, UNCLASSIFIED_TAXON)
            taxon = pd.Series(taxon_id, fragments.ids.index).astype(str)
            append_rows(
                table,
                np.where(fragments.is_viral, "C", "U"),  # classified or not
                fragments.ids,
                taxon,
                fragments.lengths,
                _hits(taxon, fragments),
            )
            counts.num_fragments += len(fragments.ids)
            counts.num_viral += int(fragments.is_viral.sum())
            counts.num_orphans += int(fragments.ids.str.endswith(ORPHAN_END).sum())
            counts.by_score += np.histogram(fragments.scores, SCORE_BINS, (0.0, 1.0))[0]
    return counts


def write_kraken_report(path: Path, counts: FragmentCounts) -> None:
    """Write Kraken's table of taxa with three lines: unclassified, root and viruses.

    Args:
        path: The table to write.
        counts: The number of fragments.
    """
    num_viral = counts.num_viral
    num_others = counts.num_fragments - num_viral
    # Of each line: the fragments of this taxon and of all taxa below it, and those of the taxon
    # itself. All classified fragments are below the root.
    in_clade = np.array([num_others, num_viral, num_viral])
    in_taxon = np.array([num_others, 0, num_viral])
    # max: without reads, all shares are 0.
    percent = [f"{100 * count / max(counts.num_fragments, 1):6.2f}" for count in in_clade]
    ranks = ["U", "R", "D"]
    taxa = [UNCLASSIFIED_TAXON, 1, VIRUSES_TAXON]
    names = ["unclassified", "root", "  Viruses"]
    with atomic_file(path) as table:
        append_rows(table, percent, in_clade, in_taxon, ranks, taxa, names)


def find_id_problem(record: RunRecord) -> str:
    """Return why tools cannot find the ids of Kraken's table in the files of reads; else nothing.

    They cut `/1` and `/2` off the ids of mates, but no other mark. The files of pairs are looked
    at if they are still where the run has read them.

    Args:
        record: The record of the run.
    """
    sizes = {file.file: file.content.size for file in record.inputs if file.content is not None}
    for first, second in record.pairs or ():
        if not all(_may_be_looked_at(file, sizes.get(file)) for file in (first, second)):
            continue
        mark = find_other_mate_mark(first, second)
        if mark:
            return (
                f"{first}: the ids of mates end in {mark}1 and {mark}2. Tools that look reads up "
                "by their ids, such as KrakenTools, know only /1 and /2, and find no pair; "
                "predict --write-viral writes the viral pairs"
            )
    return ""


def _may_be_looked_at(file: str, recorded_bytes: int | None) -> bool:
    """Return True if a path from a record is that of the regular file that the run has read.

    A record may come from somebody else. So no pipe, device or file of the system is opened, which
    have no size, and no file outside the allowed folders.

    Args:
        file: The path.
        recorded_bytes: The size of the file when the run read it; None if it is not known.
    """
    path = Path(file)
    try:
        require_allowed(path, file)
        return is_regular_file(path) and 0 < path.stat().st_size == recorded_bytes
    except (OSError, VirnucError, ValueError):
        return False


def append_rows(table: Path, *columns: object) -> None:
    """Append columns to a file as TAB-separated lines, without a line of names and without quotes.

    Args:
        table: The file.
        columns: The columns, all of the same length.
    """
    # The names of the columns only keep pandas from joining the columns by their own indices.
    rows = pd.DataFrame({str(index): np.asarray(column) for index, column in enumerate(columns)})
    rows.to_csv(
        table,
        mode="a",
        sep="\t",
        header=False,
        index=False,
        quoting=csv.QUOTE_NONE,
        lineterminator="\n",
    )


def _hits(taxon: pd.Series, fragments: _Fragments) -> pd.Series:
    """Return Kraken's list of the taxa of a fragment's parts: here all open frames have one taxon.

    Kraken separates the lists of two mates by `|:|`.
    """
    hits = taxon + ":" + fragments.frames
    if fragments.mate_frames is None:
        return hits
    mate_hits = " |:| " + taxon + ":" + fragments.mate_frames
    return hits + mate_hits.where(fragments.mate_frames != "", "")


def _read_fragments(tables: ResultTables, record: RunRecord) -> Iterator[_Fragments]:
    """Yield the fragments of a run, many at a time, in input order.

    Raises:
        InputError: See `_read_paired_fragments`.
    """
    with _open_table(tables.reads, _READ_COLUMNS, tables.reads_digest) as reads_table:
        if tables.pairs is not None:
            with _open_table(tables.pairs, _PAIR_COLUMNS, tables.pairs_digest) as pairs_table:
                yield from _read_paired_fragments(reads_table, pairs_table, tables, record)
            return
        for reads in reads_table:
            yield _Fragments(
                ids=reads.id,
                lengths=reads.length,
                is_viral=(reads.fate == "viral").to_numpy(),
                frames=reads.open_frames,
                mate_frames=None,
                scores=_scores(reads),
            )


def _open_table(path: Path, columns: Sequence[str], recorded: FileDigest | None) -> Any:
    """Open a table for reading it piece by piece; see `read_columns`.

    Returns:
        A `TextFileReader` of pandas, which is also a context that closes the table.
    """
    types = dict.fromkeys(columns, "str")
    return read_columns(path, types, recorded=recorded, chunksize=PIECE_FRAGMENTS)


def _read_paired_fragments(
    reads_table: Any, pairs_table: Any, tables: ResultTables, record: RunRecord
) -> Iterator[_Fragments]:
    """Yield the fragments of a run of pairs.

    Args:
        reads_table: The open table of reads.
        pairs_table: The open table of pairs.
        tables: Where they are, for messages.
        record: The record of the run.

    Raises:
        InputError: The two tables are not of the same reads.
    """
    mismatch = InputError(
        f"its reads are not those of {tables.reads.name}",
        file=tables.pairs or "",
        hint=WRITE_AGAIN,
    )
    num_reads_of_pair_files = _count_reads_of_pair_files(record)
    num_earlier_reads = 0
    for pairs in pairs_table:
        has_mate = (pairs.mate != "").to_numpy()
        # The second mate directly follows the first.
        first_rows = np.arange(len(pairs)) + np.cumsum(has_mate) - has_mate
        num_reads = len(pairs) + int(has_mate.sum())
        reads = _next_rows(reads_table, num_reads)
        if len(reads) != num_reads:
            raise mismatch
        firsts = reads.iloc[first_rows].reset_index(drop=True)
        mates = reads.iloc[first_rows + has_mate].reset_index(drop=True)
        mate_ids = mates.id.where(has_mate, "")
        if firsts.id.tolist() != pairs.id.tolist() or mate_ids.tolist() != pairs.mate.tolist():
            raise mismatch
        is_of_pair_file = num_earlier_reads + first_rows < num_reads_of_pair_files
        yield _Fragments(
            ids=_fragment_ids(firsts, has_mate, is_of_pair_file),
            lengths=firsts.length + ("|" + mates.length).where(has_mate, ""),
            is_viral=(pairs.fate == "viral").to_numpy(),
            frames=firsts.open_frames,
            mate_frames=mates.open_frames.where(has_mate, ""),
            scores=_scores(pairs),
        )
        num_earlier_reads += num_reads
    if len(_next_rows(reads_table, 1)):
        raise mismatch


def _count_reads_of_pair_files(record: RunRecord) -> float:
    """Return the number of reads that came from files of pairs; they are the first reads of a run.

    Infinite for records of older versions, which do not tell.
    """
    if not record.pairs or not record.inputs:
        return float("inf")
    pair_files = {file for pair in record.pairs for file in pair}
    return sum(file.reads for file in record.inputs if file.file in pair_files)


def _next_rows(table: Any, count: int) -> pd.DataFrame:
    """Return the next rows of an open table; fewer, or none, if it ends before."""
    try:
        rows: pd.DataFrame = table.get_chunk(count)
    except StopIteration:
        return pd.DataFrame(columns=list(_READ_COLUMNS), dtype=str)
    return rows.reset_index(drop=True)


def _fragment_ids(
    firsts: pd.DataFrame, has_mate: NDArray[np.bool_], is_of_pair_file: NDArray[np.bool_]
) -> pd.Series:
    """Return the ids of fragments: that of a pair has no `/1`, that of an orphan ends in a word.

    Args:
        firsts: The first read of each fragment.
        has_mate: Whether the fragment is a pair.
        is_of_pair_file: Whether it comes from a file of pairs. The ids of other reads stay.
    """
    ids = firsts.id.to_numpy(dtype=object, copy=True)
    flags = firsts["flags"].tolist()
    for row in np.flatnonzero(is_of_pair_file).tolist():
        read_id = ids[row]
        # Of a read with the id of an earlier read, the mark stands before the number that tells
        # the two apart: `r7/1.2`.
        original_id = flags[row].partition(_DUPLICATE_FLAG)[2] or read_id
        if not original_id.endswith(_MATE_ENDS):
            continue  # a single read among the pairs of a BAM file
        if has_mate[row]:
            number_of_copy = read_id[len(original_id) :]
            ids[row] = original_id[:-2] + number_of_copy
        else:
            ids[row] = read_id + ORPHAN_END
    return pd.Series(ids, dtype=str)


def _scores(reads: pd.DataFrame) -> NDArray[np.float64]:
    """Return the viral scores of the reads that have one."""
    scores: NDArray[np.float64] = pd.to_numeric(reads.viral_score).dropna().to_numpy(np.float64)
    return scores
