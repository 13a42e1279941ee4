"""Where rows and tokens lie in a batch, and how positions enter attention.

ESM-2 has rotary embeddings, DNABERT-S has ALiBi.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

ROTARY_BASE: Final = 10_000


class RowLayout(NamedTuple):
    """Where the rows of a batch lie, and how positions enter attention.

    It is made once for a batch and used by every layer. With rotary positions `cos` and `sin` are
    set, with ALiBi `slopes`.
    """

    cu_seqlens: Tensor  # int32 [row_capacity + 1]
    rows: int  # the first so many are real
    max_seqlen: int
    heads: int
    cos: Tensor | None = None  # float32 [positions, head_dim / 2]
    sin: Tensor | None = None  # float32 [positions, head_dim / 2]
    slopes: Tensor | None = None  # float32 [heads]


def token_positions(cu_seqlens: Tensor, slots: int) -> Tensor:
    """Return the position of each token within its row, without reading device values on the host.

    Args:
        cu_seqlens: Where the rows begin and end, int32 [rows + 1].
        slots: Token slots of the batch.

    Returns:
        int64 [slots]; 0 in dead slots.
    """
    slot = torch.arange(slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens, slot, right=True) - 1
    position = slot - cu_seqlens[row]
    is_live = slot < cu_seqlens[-1]
    return torch.where(is_live, position, 0).long()


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each attention head.

    The slopes are a geometric series. If the number of heads is not a power of two, the heads
    beyond it take every other slope of the next power of two (Press, Smith, Lewis: Train Short,
    Test Long, 2021; `get_slopes` of its code).
    """
    power_of_two = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power_of_two) for i in range(power_of_two)]
    n_further = heads - power_of_two
    for i in range(0, 2 * n_further, 2):
        slopes.append(2.0 ** (-8.0 * (i + 1) / (2 * power_of_two)))
    return slopes


def alibi_bias(slopes: Tensor, length: int) -> Tensor:
    """Return what ALiBi adds to the attention scores of a row.

    Args:
        slopes: float32 [heads].
        length: Tokens of the row.

    Returns:
        Minus the slope times the distance of two tokens, float32 [heads, length, length].
    """
    step = torch.arange(length, device=slopes.device)
    distance = (step.unsqueeze(0) - step.unsqueeze(1)).abs()
    return -slopes.view(-1, 1, 1) * distance


def rotary_frequencies(head_dim: int) -> Tensor:
    """Return the frequencies of rotary embeddings, float32 [head_dim / 2] (Su et al. 2021)."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    return 1.0 / (ROTARY_BASE**exponents)


def rotary_tables(frequencies: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles of the positions 0 to `length` - 1.

    Args:
        frequencies: [head_dim / 2].
        length: Number of positions.

    Returns:
        Cosine and sine, float32 [length, head_dim / 2] each.
    """
    positions = torch.arange(length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.float())
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings in float32, in their rotate-half form.

    Args:
        x: Queries or keys, [slots, heads, head_dim].
        cos: Cosine of each token's angles, float32 [slots, head_dim / 2].
        sin: Sine of each token's angles, float32 [slots, head_dim / 2].

    Returns:
        float32 [slots, heads, head_dim].
    """
    half = x.shape[-1] // 2
    low, high = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
