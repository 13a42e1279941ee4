"""Chunks: the method's published positions, and what must hold for every length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.reads.translate import chunk

from .reads_twin import chunks


def spans(lengths: list[int], size: int) -> list[list[tuple[int, int]]]:
    table = chunk(np.array(lengths, np.int64), size)
    by_read: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for sequence, number, start, end in zip(
        table.read, table.number, table.start, table.end, strict=True
    ):
        assert number == len(by_read[sequence])
        by_read[sequence].append((int(start), int(end)))
    return by_read


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, [(0, 1)]),
        (500, [(0, 500)]),
        (501, [(0, 500), (250, 501)]),
        (1001, [(0, 500), (333, 833), (666, 1001)]),
        (1200, [(0, 500), (399, 899), (798, 1200)]),
    ],
)
def test_positions_for_a_model_of_500(length: int, expected: list[tuple[int, int]]) -> None:
    assert spans([length], 500) == [expected]


def test_last_chunk_of_2600() -> None:
    assert spans([2600], 500)[0][-1] == (2165, 2600)


@pytest.mark.parametrize(("size", "shortest"), [(500, 251), (300, 151)])
def test_shortest_last_chunk_of_a_cut_read(size: int, shortest: int) -> None:
    last_chunks = [
        chunks_of_read[-1] for chunks_of_read in spans(list(range(size + 1, 20 * size)), size)
    ]
    assert min(end - start for start, end in last_chunks) == shortest


@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 700))
def test_equals_the_slow_twin(lengths: list[int], size: int) -> None:
    assert spans(lengths, size) == [chunks(length, size) for length in lengths]


@given(st.integers(1, 20_000), st.integers(1, 700))
def test_chunks_cover_the_read_without_a_gap_and_end_with_it(length: int, size: int) -> None:
    (chunks_of_read,) = spans([length], size)
    assert chunks_of_read[0][0] == 0
    assert chunks_of_read[-1][1] == length
    assert all(0 < end - start <= size for start, end in chunks_of_read)
    assert all(end - start == size for start, end in chunks_of_read[:-1])
    assert all(
        next_chunk[0] <= chunk_before[1] for chunk_before, next_chunk in pairwise(chunks_of_read)
    )
