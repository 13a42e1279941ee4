"""Load what a classifier learns from: the embeddings of frames, and their 4-mers for a baseline."""

from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from virnuc_core.engine import shards
from virnuc_core.errors import VirnucError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.training.evaluation import Floats

FOUR_MERS: Final = tuple("".join(letters) for letters in product("ACGT", repeat=4))
MAX_LOST_PERCENT: Final = 1  # of frames without a finite embedding
GC_BOUNDS: Final = (0.3, 0.4, 0.5, 0.6)  # between the bins of GC content


@dataclass(frozen=True, slots=True)
class Features:
    """Frames with what is learnt from them."""

    rows: pd.DataFrame  # with the column gc (share of G and C in the DNA)
    embeddings: Tensor  # [rows, width] float32
    four_mers: Floats  # [rows, 256] shares of each 4-mer of the DNA

    def select(self, rows: NDArray[Any]) -> "Features":
        """Return some of the rows.

        Args:
            rows: Their positions, or a mask of all rows.
        """
        return Features(
            self.rows.iloc[rows], self.embeddings[torch.tensor(rows)], self.four_mers[rows]
        )


def load_features(run: RunDir, store: OrfStore, rows: pd.DataFrame) -> Features:
    """Load what is learnt from translated frames of reads: embeddings and shares of 4-mers.

    Frames without a finite embedding are left out. A run stores an embedding once for all frames
    with the same sequence.

    Args:
        run: The run with the embeddings.
        store: The staged reads that the frames are from.
        rows: A row for each frame, with the column unique (number of its distinct sequence).

    Raises:
        VirnucError: More than one in a hundred frames have no finite embedding.
        ShardError: A shard is missing or damaged.
    """
    uniques, unique_of_row = np.unique(rows["unique"], return_inverse=True)
    embeddings = torch.from_numpy(shards.read_embeddings(run, uniques))
    four_mers = _four_mer_shares(store, uniques)
    is_finite = embeddings.isfinite().all(dim=1)[unique_of_row]  # [rows]
    kept_rows = np.flatnonzero(is_finite)
    n_lost = len(rows) - len(kept_rows)
    if 100 * n_lost > MAX_LOST_PERCENT * len(rows):
        raise VirnucError(
            f"{run.root}: {n_lost} of {len(rows)} frames have no finite embedding; "
            "see its failed.tsv"
        )
    rows = rows.assign(gc=gc_shares(store, rows["unique"].to_numpy()))
    features = Features(rows, embeddings[unique_of_row], four_mers[unique_of_row])
    return features.select(kept_rows)


def _four_mer_shares(store: OrfStore, uniques: NDArray[np.int64]) -> Floats:
    """Return the share of each 4-mer in the DNA of distinct sequences, [uniques, 256]."""
    texts = [store.dna(unique, unique + 1)[0].decode() for unique in uniques.tolist()]
    # Without `idf` weights and with the l1 norm, the result is the count of a 4-mer ÷ all 4-mers.
    vectorizer = TfidfVectorizer(
        norm="l1",
        use_idf=False,
        analyzer="char",
        ngram_range=(4, 4),
        lowercase=False,
        vocabulary=FOUR_MERS,
    )
    shares: Floats = vectorizer.fit_transform(texts).toarray()
    return shares


def gc_shares(store: OrfStore, uniques: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of G and C in the DNA of distinct sequences, [uniques].

    Args:
        store: The staged reads.
        uniques: Numbers of the sequences.
    """
    letters = np.asarray(store.dna_bytes[:])
    is_gc = (letters == ord("G")) | (letters == ord("C"))
    n_gc_before = np.concatenate([[0], np.cumsum(is_gc)])  # of each place in `letters`
    offsets = np.asarray(store.dna_offsets[:])
    starts = offsets[uniques]
    ends = offsets[uniques + 1]
    n_gc = n_gc_before[ends] - n_gc_before[starts]
    n_bases = ends - starts
    shares: NDArray[np.float64] = n_gc / n_bases
    return shares
