"""Positions of tokens and means over rows, whatever lies around them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.encoders.positions import token_positions
from virnuc_core.encoders.reference import segment_mean


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 30), st.integers(0, 3))
def test_positions_restart_in_every_row(lengths: list[int], tail: int, spare: int) -> None:
    total = sum(lengths)
    bounds = torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0).tolist(), *[total] * spare], dtype=torch.int32
    )
    expected = [i for n in lengths for i in range(n)] + [0] * tail
    assert token_positions(bounds, total + tail).tolist() == expected


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 5))
def test_means_equal_each_span_by_itself_bit_for_bit(lengths: list[int], gap: int) -> None:
    spans, offset = [], gap
    for length in lengths:
        spans.append((offset, offset + length))
        offset += length + gap
    x = torch.randn(offset + 7, 16, generator=torch.Generator().manual_seed(len(lengths)))
    x[offset:] = torch.nan
    starts, ends = torch.tensor(spans).T
    got = segment_mean(x, starts, ends)
    for mean, (start, end) in zip(got, spans, strict=True):
        mean_alone = segment_mean(
            x[start:end].clone(), torch.tensor([0]), torch.tensor([end - start])
        )[0]
        assert torch.equal(mean, mean_alone)
        if end > start:
            torch.testing.assert_close(mean, x[start:end].mean(0), atol=1e-5, rtol=0)
        else:
            assert torch.equal(mean, torch.zeros(16))
