"""Partitions on disk, and the finding of repeats."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.reads import spool
from virnuc_core.reads.spool import Partition, names_of, read_all, repeats


@pytest.mark.parametrize("held", [1, 100, 1 << 20])
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 99)), max_size=20), max_size=9)
)
def test_a_partition_keeps_each_record_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, held: int, batches: list[list[tuple[int, int, int]]]
) -> None:
    partition = Partition(tmp_path_factory.mktemp("partition") / "p", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "_HELD_BYTES", held)
        expected = defaultdict(list)
        for batch in batches:
            columns = np.array(batch, np.int64).reshape(-1, 3)
            partition.add(columns[:, 0], columns[:, 1], columns[:, 2])
            for part, *record in batch:
                expected[part].append(record)
        parts = pickle.loads(pickle.dumps(partition.finish()))
    assert names_of([parts]) == sorted(expected)
    for part in range(6):
        assert parts.read(part).tolist() == expected.get(part, [])
        assert read_all([parts, parts], part, 2).tolist() == 2 * expected.get(part, [])
    assert len(parts) == sum(map(len, batches))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), st.randoms())
def test_repeats_are_numbered_in_order(pairs: list[tuple[int, int]], chance: random.Random) -> None:
    records = np.array([(low, high, 10 * i) for i, (low, high) in enumerate(pairs)], np.uint64).reshape(-1, 3)
    expected = set()
    for i, pair in enumerate(pairs):
        if pair in pairs[:i]:
            expected.add((10 * i, 10 * pairs.index(pair), pairs[:i].count(pair) + 1))
    order = list(range(len(pairs)))
    chance.shuffle(order)  # workers bring them in any order
    index, first, number = repeats(records[order])
    assert len(index) == len(expected)
    assert set(zip(index.tolist(), first.tolist(), number.tolist(), strict=True)) == expected
