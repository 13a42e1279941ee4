"""Where each row of a packed batch lies, and its mean: nothing here reads a device value on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def positions(cu_seqlens: Tensor, slots: int) -> Tensor:
    """Position of each token within its row, int64 [slots]; 0 in dead slots."""
    slot = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens, slot, right=True) - 1
    within = slot - cu_seqlens[row]
    return torch.where(slot < cu_seqlens[-1], within, 0).long()


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.

    Spans ascend and do not overlap. Every span is summed on its own, first token to last, in float32: its mean does not
    depend on what else is in the batch, nor on dead slots (a difference of running sums would depend on both).
    """
    bounds = torch.stack((starts, ends), dim=1).flatten().long()  # a span, the gap after it, the next span, ...
    ends_and_tail = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(x.float(), "sum", offsets=ends_and_tail, axis=0, unsafe=True, initial=0)[::2]
    return sums / (ends - starts).clamp_min(1).unsqueeze(1)


def mean_of(*, kernels: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`segment_mean`, or the kernel that computes the same without a float32 copy of `x`."""
    if not kernels:
        return segment_mean
    from virnuc_core.encoders.kernels import span_means

    return span_means
