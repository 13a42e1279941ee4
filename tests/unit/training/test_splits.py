"""Whole clusters of genomes are assigned to sets, and what is left out is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.splits import assign_folds, subsample

from .origins import LabelledReads, Origin, reverse_complement


def test_each_set_has_both_classes_and_no_cluster_is_in_two(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    examples = labelled_reads.split(tmp_path)
    rows = examples.rows
    assert examples.genomes["cluster"].nunique() == 10, "these genomes are not related"
    assert (rows.groupby("cluster")["side"].nunique() == 1).all()
    assert (rows.groupby("sequence")["side"].nunique() == 1).all()
    assert (rows.groupby("side")["label"].nunique() == 2).all()
    assert rows["side"].nunique() == 3


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_sequence_with_both_labels_is_refused_with_the_names_of_its_reads(
    labelled_reads: LabelledReads, tmp_path: Path, is_reversed: bool
) -> None:
    viral_read = next(
        read_id for read_id, origin in labelled_reads.origins.items() if origin.label == "virus"
    )
    bases = labelled_reads.reads[viral_read]
    if is_reversed:
        bases = reverse_complement(bases)
    labelled_reads.reads["copy"] = bases
    labelled_reads.origins["copy"] = Origin("others", "others_0001")
    problem = f"'{viral_read}' .virus. and 'copy' .others. hold the same sequence"
    with pytest.raises(InputError, match=problem):
        labelled_reads.split(tmp_path)


def test_what_is_left_out_is_counted(labelled_reads: LabelledReads, tmp_path: Path) -> None:
    labelled_reads.reads |= {"tiny": "ATGAAA", "stopped": "TAATTAATTAATTAA" * 6}
    virus = Origin("virus", "virus_0001")
    labelled_reads.origins |= {"tiny": virus, "stopped": virus}
    examples = labelled_reads.split(tmp_path, rows_per_class=60)
    n_short_frames = examples.left_out["frames of fewer than 21 bases"]
    n_closed_reads = examples.left_out["reads without an open frame"]
    n_further_reads = examples.left_out["reads beyond 60 frames of a class"]
    assert min(n_short_frames, n_closed_reads, n_further_reads) >= 1
    assert examples.rows.groupby("label").size().max() <= 60
    n_kept_reads = examples.rows["read"].nunique()
    n_counted = n_kept_reads + n_further_reads + n_closed_reads
    n_reads = OrfStore.open(tmp_path / "orfs.h5").n_reads
    # A read all of whose frames are short is only among the frames.
    assert n_counted <= n_reads <= n_counted + n_short_frames


def test_genomes_are_sampled_evenly_or_by_size() -> None:
    genome = np.repeat([0, 1, 2], [1000, 100, 20])
    table = pd.DataFrame({"label": 0, "genome": genome, "rows": 1})
    even = subsample(table, 120, "even", np.random.default_rng(0))
    assert np.bincount(genome[even]).tolist() == [50, 50, 20]
    natural = subsample(table, 120, "natural", np.random.default_rng(0))
    assert np.bincount(genome[natural], minlength=3)[0] > 90


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=9),
    st.lists(st.integers(1, 60), min_size=3, max_size=9),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.2, 0.5]),
)
@settings(max_examples=25)
def test_no_cluster_is_in_two_folds_and_each_fold_has_both_classes(
    others_sizes: list[int], virus_sizes: list[int], seed: int, share: float
) -> None:
    sizes = [*others_sizes, *virus_sizes]
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    label = (cluster >= len(others_sizes)).astype(int)
    rows = pd.DataFrame({"cluster": cluster, "label": label})
    rows["fold"] = assign_folds(rows, share, seed)
    assert (rows.groupby("cluster")["fold"].nunique() == 1).all()
    assert (rows.groupby("fold")["label"].nunique() == 2).all()


def test_a_cluster_with_half_of_a_class_is_not_the_test_set() -> None:
    sizes = [500, *[10] * 50, *[10] * 100]  # of a large cluster, 50 more of others, 100 of viruses
    cluster = np.repeat(np.arange(151), sizes)
    rows = pd.DataFrame({"cluster": cluster, "label": (cluster > 50).astype(int)})
    test = rows[assign_folds(rows, 0.2, 0) == 0]
    assert test.groupby("label")["cluster"].nunique().min() >= 10
    assert test["label"].value_counts(normalize=True).min() > 0.05
