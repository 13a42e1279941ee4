"""Columns and partitions on disk, and the finding of repeats."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.reads import spool
from virnuc_core.reads.spool import Column, Partition, repeats


@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=20), max_size=10), st.data())
def test_a_column_gives_back_any_stretch(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[list[int]], data: st.DataObject
) -> None:
    with closing(Column(tmp_path_factory.mktemp("column") / "c", np.int32)) as column:
        everything: list[int] = []
        for piece in pieces:
            column.append(np.array(piece, np.int64))
            everything += piece
            low = data.draw(st.integers(0, len(everything)))
            high = data.draw(st.integers(low, len(everything)))
            assert column.read(low, high).tolist() == everything[low:high]
        assert len(column) == len(everything)


@pytest.mark.parametrize("held", [1, 100, 1 << 20])
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 99)), max_size=20), max_size=9)
)
def test_a_partition_keeps_each_record_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, held: int, batches: list[list[tuple[int, int, int]]]
) -> None:
    path = tmp_path_factory.mktemp("partition") / "p"
    with pytest.MonkeyPatch.context() as patch, closing(Partition(path, 2)) as partition:
        patch.setattr(spool, "_HELD_BYTES", held)
        expected = defaultdict(list)
        for batch in batches:
            columns = np.array(batch, np.int64).reshape(-1, 3)
            partition.add(columns[:, 0], columns[:, 1], columns[:, 2])
            for part, *record in batch:
                expected[part].append(record)
        assert partition.parts() == sorted(expected)
        for part in range(6):
            assert partition.read(part).tolist() == expected.get(part, [])
        assert len(partition) == sum(map(len, batches))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_repeats_are_numbered_in_order(pairs: list[tuple[int, int]]) -> None:
    records = np.array([(low, high, 10 * i) for i, (low, high) in enumerate(pairs)], np.uint64).reshape(-1, 3)
    expected = set()
    for i, pair in enumerate(pairs):
        if pair in pairs[:i]:
            expected.add((10 * i, 10 * pairs.index(pair), pairs[:i].count(pair) + 1))
    index, first, number = repeats(records)
    assert len(index) == len(expected)
    assert set(zip(index.tolist(), first.tolist(), number.tolist(), strict=True)) == expected
