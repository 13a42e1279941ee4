"""Write `contigs.tsv`: the verdict on each read of several chunks, from the votes of its chunks.

A chunk without an open frame has no vote. The others vote with the bases that they add to the
contig. Neighbouring chunks overlap, and there are two ways to count these bases:

- By default, a chunk counts with the bases that the next chunk does not contain, whether or not the
  next chunk has an open frame. So the bases of all chunks add up to the contig.
- With `framed_only`, chunks without an open frame are treated as if they did not exist. A chunk
  counts with the bases that the next chunk *with an open frame* does not contain. So the bases
  add up to the part of the contig that lies in chunks with an open frame.

Only the weights differ. In both ways the same chunks vote.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core import consensus
from virnuc_core.engine.shards import read_scores, require_kept_shards, store_of
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import chunk
from virnuc_core.report.kraken import append_rows
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.runfiles import read_record

PIECE_READS: Final = 65_536  # reads that are held in memory together
CONTIG_COLUMNS: Final = (
    "id",
    "length",
    "chunks",
    "scored_chunks",
    "viral_chunks",
    "scored_bases",
    "viral_bases",
    "viral_score",
    "label",
    "framed_share",
    "weights",
)
SHARE_DECIMALS: Final = 4


def write_contigs(run: RunDir, path: Path, threshold: float, *, framed_only: bool = False) -> None:
    """Write `contigs.tsv`: one line per read of several chunks, with the vote of its chunks.

    Args:
        run: The run directory, with its store and all shards.
        path: The file to write.
        threshold: The score from which a read is a virus.
        framed_only: Weigh the chunks as if those without an open frame did not exist.

    Raises:
        InputError: The run's store cannot be read.
        ShardError: The run's shards cannot be read.
    """
    record = read_record(run)
    require_kept_shards(run, record)
    store = store_of(run, record)
    scores, has_failed = read_scores(run)
    with atomic_file(path) as table:
        table.write_text("\t".join(CONTIG_COLUMNS) + "\n")
        for reads in _pieces(store.n_reads):
            frames = _frame_scores(store, reads, scores, has_failed)
            lengths = np.asarray(store.read_length[reads], np.int64)
            contigs = roll_up_chunks(
                frames, lengths, store.model_length, threshold, framed_only=framed_only
            )
            names = np.array(store.read_ids(reads.start, reads.stop), dtype=object)
            contigs = contigs.assign(id=names)
            contigs = contigs[contigs.chunks > 1]
            append_rows(table, *(contigs[column] for column in CONTIG_COLUMNS))


def roll_up_chunks(
    frames: pd.DataFrame,
    lengths: NDArray[np.int64],
    model_length: int,
    threshold: float,
    *,
    framed_only: bool = False,
) -> pd.DataFrame:
    """Return the verdict on each read, from the scores of its open frames.

    Args:
        frames: The columns `read` (counted from 0), `chunk` (counted from 0 in its read), `others`
            and `virus` (scores, NaN if the frame has failed) and `has_failed`, a row for each open
            frame, in any order.
        lengths: The bases of each read, [reads].
        model_length: The bases of a chunk.
        threshold: The score from which a read is a virus.
        framed_only: Weigh the chunks as if those without an open frame did not exist.

    Returns:
        The columns of `contigs.tsv` but `id`, a row for each read, also for those of one chunk.
    """
    places = chunk(lengths, model_length)
    num_chunks = np.bincount(places.read, minlength=len(lengths))
    first_chunks = np.cumsum(num_chunks) - num_chunks  # place of each read's first chunk
    chunks = _chunk_votes(frames)  # only chunks with an open frame have a row
    rows = first_chunks[chunks.read] + chunks.chunk.to_numpy()  # their rows in `places`
    if framed_only:
        bases = _added_bases(places.read[rows], places.start[rows], places.end[rows])
    else:
        bases = _added_bases(places.read, places.start, places.end)[rows]
    chunks["bases"] = bases
    contigs = _contig_votes(chunks, len(lengths), threshold)
    num_framed = np.bincount(chunks.read, minlength=len(lengths))
    shares = num_framed / np.maximum(num_chunks, 1)  # an empty read has no chunk
    contigs["length"] = lengths
    contigs["chunks"] = num_chunks
    contigs["framed_share"] = shares.round(SHARE_DECIMALS)
    contigs["weights"] = "framed_chunks" if framed_only else "all_chunks"
    return contigs[[column for column in CONTIG_COLUMNS if column != "id"]]


def _pieces(num_reads: int) -> Iterator[slice]:
    """Yield the ranges of reads that are held in memory together."""
    for first in range(0, num_reads, PIECE_READS):
        yield slice(first, min(first + PIECE_READS, num_reads))


def _frame_scores(
    store: OrfStore, reads: slice, scores: NDArray[np.float32], has_failed: NDArray[np.bool_]
) -> pd.DataFrame:
    """Return a table of the open frames of some reads.

    Its columns are the read (counted from 0 within the range), the chunk, both scores, and whether
    the frame could not be embedded.

    Args:
        store: The store of open frames.
        reads: The range of reads.
        scores: Scores of the distinct sequences, [n, 2] with others first.
        has_failed: Which distinct sequences have no score, [n].
    """
    first_row, end_row = np.searchsorted(store.row_read, (reads.start, reads.stop))
    rows = slice(first_row, end_row)
    unique = np.asarray(store.row_unique[rows])
    frame_scores = scores[unique].astype(np.float64)
    frames = pd.DataFrame(frame_scores, columns=["others", "virus"])
    frames["read"] = np.asarray(store.row_read[rows]) - reads.start
    frames["chunk"] = np.asarray(store.row_chunk[rows])
    frames["has_failed"] = has_failed[unique]
    return frames


def _added_bases(
    reads: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of bases of each chunk that the next chunk of its read does not contain.

    Args:
        reads: The read of each chunk, ascending, [chunks].
        starts: The first base of each chunk, ascending in a read, [chunks].
        ends: The base after its last one, [chunks].
    """
    is_followed = np.diff(reads, append=-1) == 0  # by a chunk of the same read
    next_starts = np.roll(starts, -1)
    own_ends = np.where(is_followed, np.minimum(next_starts, ends), ends)
    return own_ends - starts


def _chunk_votes(frames: pd.DataFrame) -> pd.DataFrame:
    """Return a table of chunks: the highest scores of their frames, and whether a frame failed."""
    by_chunk = frames.groupby(["read", "chunk"])
    chunks = by_chunk[["has_failed"]].max().reset_index()
    frame_scores = frames[["others", "virus"]].to_numpy()
    chunk_of_frame = np.asarray(by_chunk.ngroup(), np.int64)  # the row of `chunks` for each frame
    tops = consensus.top_scores_by_chunk(frame_scores, chunk_of_frame)
    chunks["others"] = tops[:, 0]
    chunks["virus"] = tops[:, 1]
    return chunks


def _contig_votes(chunks: pd.DataFrame, num_reads: int, threshold: float) -> pd.DataFrame:
    """Return the result of each read: the vote of its chunks, weighted by bases (see `consensus`).

    A chunk whose frames all failed has no score. A read with a failed frame gets no label.

    Args:
        chunks: Columns `read`, `others`, `virus`, `bases` and `has_failed` of each chunk.
        num_reads: The number of reads, which are counted from 0.
        threshold: The score from which a read is a virus.

    Returns:
        The columns `scored_chunks` to `label` of `contigs.tsv`, a row for each read.
    """
    is_scored = chunks.virus.notna()
    is_viral = consensus.is_viral_chunk(chunks.others.to_numpy(), chunks.virus.to_numpy())
    scored_bases = chunks.bases * is_scored
    votes = pd.DataFrame({"read": chunks.read, "has_failed": chunks.has_failed})
    votes["scored_chunks"] = is_scored.astype(np.int64)
    votes["viral_chunks"] = is_viral.astype(np.int64)
    votes["scored_bases"] = scored_bases
    votes["viral_bases"] = scored_bases * is_viral

    sums = votes.groupby("read").sum()
    sums = sums.reindex(range(num_reads), fill_value=0)  # reads without an open frame
    margins = (chunks.virus - chunks.others)[is_scored]
    mean_margins = consensus.mean_margins(
        margins.to_numpy(),
        chunks.read[is_scored].to_numpy(),
        num_reads,
        weights=scored_bases[is_scored].to_numpy(),
    )
    scores = consensus.viral_scores(mean_margins)
    has_vote = (sums.scored_chunks > 0) & (sums.has_failed == 0)
    sums["viral_score"] = pd.Series(scores, sums.index).where(has_vote)
    sums["label"] = np.where(consensus.is_viral(scores, threshold), "virus", "others")
    sums.loc[~has_vote, "label"] = ""
    return sums
