"""Where rows and tokens lie in a batch, and how positions enter attention.

ESM-2 has rotary embeddings, DNABERT-S has ALiBi.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

ROTARY_BASE: Final = 10_000


class RowLayout(NamedTuple):
    """Where the rows of a batch lie, and how positions enter attention.

    A row is one sequence: the token slots from `cu_seqlens[row]` to `cu_seqlens[row + 1]`. The
    layout is made once for a batch and used by every layer. With rotary positions `cos` and `sin`
    are set, with ALiBi `slopes`.
    """

    cu_seqlens: Tensor  # int32 [row_capacity + 1]; the rows behind the last real one are empty
    rows: int  # number of real rows
    max_seqlen: int  # no row is longer
    heads: int  # attention heads
    cos: Tensor | None = None  # float32 [positions, head_dim / 2]
    sin: Tensor | None = None  # float32 [positions, head_dim / 2]
    slopes: Tensor | None = None  # float32 [heads]


def token_positions(cu_seqlens: Tensor, slots: int) -> Tensor:
    """Return the position of each token within its sequence, counted from 0.

    The computation stays on the device: no value is copied to the host, which would wait for the
    GPU.

    Args:
        cu_seqlens: First slot of each sequence, then the end of the last, int32 [rows + 1].
        slots: Number of token slots of the batch.

    Returns:
        int64 [slots]; 0 in the unused slots behind the last sequence.
    """
    slot = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens, slot, right=True) - 1  # the row in which each slot lies
    position = slot - cu_seqlens[row]
    is_live = slot < cu_seqlens[-1]
    return torch.where(is_live, position, 0).long()


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each attention head.

    ALiBi subtracts slope * distance from the score of two tokens. For n heads, n a power of two,
    the slopes are 2 ** (-8 / n), 2 ** (-16 / n), and so on. For another number of heads, the first
    heads get the slopes of the next smaller power of two, and the others get every second slope of
    the next larger one (Press, Smith, Lewis: Train Short, Test Long, 2021; `get_slopes`).
    """
    power_of_two = 1 << (heads.bit_length() - 1)  # the largest one that is at most `heads`
    slopes = []
    for i in range(power_of_two):
        slopes.append(2.0 ** (-8.0 * (i + 1) / power_of_two))
    # The remaining heads get the first, third, fifth ... slope of twice as many heads.
    n_remaining = heads - power_of_two
    for i in range(0, 2 * n_remaining, 2):
        slopes.append(2.0 ** (-8.0 * (i + 1) / (2 * power_of_two)))
    return slopes


def alibi_bias(slopes: Tensor, length: int) -> Tensor:
    """Return the numbers that ALiBi adds to the attention scores of a sequence.

    Args:
        slopes: The slope of each head, float32 [heads].
        length: Tokens of the sequence.

    Returns:
        Minus the slope times the distance of two tokens, float32 [heads, length, length].
    """
    positions = torch.arange(length, device=slopes.device)
    distances = (positions.unsqueeze(0) - positions.unsqueeze(1)).abs()  # [length, length]
    return -slopes.view(-1, 1, 1) * distances


def rotary_frequencies(head_dim: int) -> Tensor:
    """Return the frequencies of rotary embeddings, float32 [head_dim / 2] (Su et al. 2021)."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    return 1.0 / (ROTARY_BASE**exponents)


def rotary_tables(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles by which rotary positions rotate queries and keys.

    Args:
        frequencies: The angle from one position to the next, for each pair of columns that is
            rotated together, [head_dim / 2].
        length: Number of positions, which are counted from 0.

    Returns:
        Cosine and sine, float32 [length, head_dim / 2] each.
    """
    positions = torch.arange(length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.float())
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position (rotary embeddings), in float32.

    Column i of the first half of a head is rotated together with column i of the second half (the
    "rotate-half" form of ESM-2; other models rotate neighbouring columns).

    Args:
        x: Queries or keys, [slots, heads, head_dim].
        cos: Cosine of each token's angles, float32 [slots, head_dim / 2].
        sin: Sine of each token's angles, float32 [slots, head_dim / 2].

    Returns:
        float32 [slots, heads, head_dim].
    """
    half = x.shape[-1] // 2
    low = x[..., :half].float()  # [slots, heads, half]
    high = x[..., half:].float()
    cos = cos.unsqueeze(1)  # [slots, 1, half]: the same for all heads
    sin = sin.unsqueeze(1)
    # The point (low, high) is rotated by its angle.
    rotated_low = low * cos - high * sin
    rotated_high = high * cos + low * sin
    return torch.cat((rotated_low, rotated_high), dim=-1)
