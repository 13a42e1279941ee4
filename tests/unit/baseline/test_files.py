"""How the originals cut work: exact batches, files and shares."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.baseline.batches import (
    BATCHES,
    assign_to_devices,
    file_ranges,
    filled_batches,
    sorted_batches,
)
from virnuc_core.baseline.run import scaled_seconds
from virnuc_core.baseline.worker import FileDone, file_path, merge_file, write_fasta
from virnuc_core.reads.subsets import choose_reads

lengths = st.lists(st.integers(1, 166), max_size=200)


@given(lengths)
def test_sorted_batches_hold_each_row_once_within_the_padded_budget(sizes: list[int]) -> None:
    batches = sorted_batches(sizes, 400)
    assert sorted(row for batch in batches for row in batch) == list(range(len(sizes)))
    order = [sizes[row] for batch in batches for row in batch]
    assert order == sorted(order)
    for batch, following in pairwise(batches):
        longest = sizes[batch[-1]] + 1
        assert longest * len(batch) <= 400 or len(batch) == 1
        wider_slots = max(longest, sizes[following[0]] + 1)
        assert wider_slots * (len(batch) + 1) > 400, (
            "the batch was closed although the next row would have fitted"
        )


@given(lengths)
def test_filled_batches_keep_file_order_within_the_sum(sizes: list[int]) -> None:
    batches = filled_batches(sizes, 300)
    assert [row for batch in batches for row in batch] == list(range(len(sizes)))
    for batch, following in pairwise(batches):
        filled_slots = sum(sizes[row] for row in batch)
        assert filled_slots <= 300
        assert filled_slots + sizes[following[0]] > 300


def test_the_budget_counts_one_token_more_than_residues() -> None:
    assert sorted_batches([1023, 1023], 2048) == [[0, 1]]
    assert sorted_batches([1023, 1024], 2048) == [[0], [1]]
    assert filled_batches([1024, 1024, 1], 2048) == [[0, 1], [2]]
    assert sorted_batches([]) == filled_batches([]) == []
    assert sorted_batches([5000, 3]) == [[1], [0]]


def test_dna_tokens_are_guessed_as_v1_does() -> None:
    estimated_batches = BATCHES["v1", "dnabert_s"]
    assert estimated_batches([500] * 24 + [6, 5]) == [
        [*range(24), 24, 25]
    ]  # 24 times 85, 3 and 2 are 2,045 tokens
    assert estimated_batches([500] * 24 + [36, 6]) == [[*range(24), 24], [25]]  # 8 and 3 were 2,051


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 4))
def test_files_go_largest_first_to_the_least_loaded(sizes: list[int], devices: int) -> None:
    plan = assign_to_devices(sizes, devices)
    assert sorted(i for share in plan for i in share) == list(range(len(sizes)))
    for share in plan:
        assert [sizes[i] for i in share] == sorted((sizes[i] for i in share), reverse=True)
    loads = [sum(sizes[i] for i in share) for share in plan]
    for share, load in zip(plan, loads, strict=True):
        if share:
            assert load - sizes[share[-1]] <= min(loads), (
                "the last file went to a device that was not the least loaded"
            )


@given(st.integers(1, 5_000), st.integers(1, 300), st.integers(0, 3))
def test_chosen_reads_come_one_from_each_stretch(total: int, wanted: int, seed: int) -> None:
    reads = choose_reads(total, wanted, seed)
    assert len(reads) == min(total, wanted)
    assert reads.tolist() == sorted(set(reads.tolist()))
    assert reads[0] >= 0
    assert reads[-1] < total
    if wanted < total:
        bounds = np.arange(wanted + 1) * total // wanted
        assert (reads >= bounds[:-1]).all()
        assert (reads < bounds[1:]).all()
    assert np.array_equal(reads, choose_reads(total, wanted, seed))


def test_chosen_reads_do_not_follow_a_pattern_of_the_input() -> None:
    reads = choose_reads(
        100_000, 10_000, 0
    )  # mates in turn: a fixed step of ten would see one kind only
    assert (reads % 2).mean() == pytest.approx(
        0.5, abs=0.02
    )  # 4 standard deviations of a fair coin


def test_cut() -> None:
    assert list(file_ranges(25, 10)) == [(0, 10), (10, 20), (20, 25)]
    assert list(file_ranges(0, 10)) == []


@given(
    st.lists(
        st.tuples(st.text("abZ9_.|é-", min_size=1), st.text("ACGTN").map(str.encode)), max_size=20
    )
)
def test_fasta_has_two_lines_a_row(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("fasta") / "rows.fa"
    write_fasta(path, [name for name, _ in rows], [sequence for _, sequence in rows])
    assert path.read_bytes() == b"".join(
        b">%s\n%s\n" % (name.encode(), sequence) for name, sequence in rows
    )


def test_merging_joins_dna_first_and_refuses_another_number_of_rows(tmp_path: Path) -> None:
    dna, protein = (
        np.array([[1.0], [2.0]], dtype=np.float32),
        np.array([[3.0], [4.0]], dtype=np.float32),
    )
    np.save(file_path(tmp_path, "dnabert_s.npy", 1), dna)
    np.save(file_path(tmp_path, "esm2.npy", 1), protein)
    merge_file(tmp_path, 1)
    assert np.load(file_path(tmp_path, "merged.npy", 1)).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    np.save(file_path(tmp_path, "dnabert_s.npy", 1), dna)
    np.save(file_path(tmp_path, "esm2.npy", 1), protein[:1])
    with pytest.raises(ValueError, match="must match exactly"):
        merge_file(tmp_path, 1)


def test_scaling_counts_loads_by_file_and_computing_by_token() -> None:
    stage_times = (
        FileDone(load_s=10.0, compute_s=3.0),
        FileDone(load_s=12.0, compute_s=5.0),
    )
    scaled = partial(
        scaled_seconds, stage_times, 30.0, total_rows=30_000
    )  # three files of 10,000 rows
    per_file_s = (3.0 + 5.0) * 30.0 / 3
    assert scaled(devices=2, load_each_file=True) == pytest.approx(2 * (per_file_s + 11.0))
    assert scaled(devices=2, load_each_file=False) == pytest.approx(2 * per_file_s + 11.0)
    assert scaled(devices=1, load_each_file=True) == pytest.approx(3 * (per_file_s + 11.0))
