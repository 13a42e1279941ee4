"""The backend `reference`: attention, norm and means by plain torch operations, on any device."""

import itertools
import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.positions import RowLayout, alibi_bias, rotate, token_positions

PADDING_MULTIPLE: Final = 16  # tokens; rows are padded to a multiple of this
MAX_SCORES: Final = 1 << 24  # attention scores in memory at the same time: 64 MiB of float32


def reference_attention(qkv: Tensor, layout: RowLayout) -> Tensor:
    """Compute attention within each row of a packed batch, with scores and softmax in float32.

    A row is one DNA or protein sequence of the batch. Positions enter by rotary embeddings or by
    ALiBi, according to the layout.

    Args:
        qkv: Queries of all heads, keys of all heads, values of all heads: [slots, 3 * width].
        layout: Where the rows lie in the batch.

    Returns:
        [slots, width] in the format of `qkv`; zeros in the unused slots behind the last row.
    """
    q, k, v = qkv.unflatten(1, (3, layout.heads, -1)).unbind(1)  # [slots, heads, head_dim] each
    # ESM-2 was trained with queries that are scaled before they are rotated.
    q = q * (1 / math.sqrt(q.shape[-1]))
    if layout.cos is not None and layout.sin is not None:
        positions = token_positions(layout.cu_seqlens, len(qkv))
        cos, sin = layout.cos[positions], layout.sin[positions]
        q = rotate(q, cos, sin).to(qkv.dtype)
        k = rotate(k, cos, sin).to(qkv.dtype)
    if qkv.device.type == "cpu":
        mean_values = _attend_equal_lengths(q, k, v, layout)  # [slots, heads, head_dim]
    else:
        mean_values = _attend_padded(q, k, v, layout)
    return mean_values.flatten(1)


def _attend_equal_lengths(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Compute attention for all neighbouring rows of the same length together, without padding.

    This is for CPUs, where the lengths of the rows can be read without waiting. Packed batches are
    sorted by length, so many neighbouring rows have the same length. Each row and head is a matrix
    product of its own, so it does not matter how many rows are computed together.

    Args:
        q, k, v: Queries, keys and values, [slots, heads, head_dim] each.
        layout: Where the rows lie in the batch.

    Returns:
        [slots, heads, head_dim]; zeros in the unused slots behind the last row.
    """
    out = torch.zeros(v.shape, dtype=v.dtype)
    start = 0
    for length, equal_lengths in itertools.groupby(layout.cu_seqlens.diff().tolist()):
        n_rows = len(list(equal_lengths))
        span = slice(start, start + n_rows * length)  # the slots of these rows
        start = span.stop
        if length == 0:  # the rows that the batch does not have
            continue
        # [rows * length, heads, head_dim] becomes [rows, heads, length, head_dim].
        queries, keys, values = (
            tensor[span].unflatten(0, (n_rows, length)).transpose(1, 2) for tensor in (q, k, v)
        )
        bias = None
        if layout.slopes is not None:
            bias = alibi_bias(layout.slopes, length)  # [heads, length, length]
        mean_values = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=bias,
            scale=1.0,  # the queries are scaled already
        )
        out[span] = mean_values.transpose(1, 2).flatten(0, 1)
    return out


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Compute attention with all rows padded to the longest length that is possible.

    This is for GPUs, where reading the lengths on the host would wait for all launched kernels. All
    shapes are fixed, and no value of the device is read. Rows are treated in portions, so that the
    scores of a portion fit into a limited memory.

    Args:
        q, k, v: Queries, keys and values, [slots, heads, head_dim] each.
        layout: Where the rows lie in the batch.

    Returns:
        [slots, heads, head_dim]; zeros in the unused slots behind the last row.
    """
    padded_length = math.ceil(layout.max_seqlen / PADDING_MULTIPLE) * PADDING_MULTIPLE
    rows_per_portion = max(1, MAX_SCORES // (layout.heads * padded_length * padded_length))
    n_slots = len(v)
    positions = torch.arange(padded_length, device=v.device)
    # One slot more than the batch has: the results of padding are written there and dropped.
    out = v.new_zeros(n_slots + 1, *v.shape[1:])
    starts_of_portions = layout.cu_seqlens[:-1].long().split(rows_per_portion)
    lengths_of_portions = layout.cu_seqlens.diff().long().split(rows_per_portion)
    for starts, lengths in zip(starts_of_portions, lengths_of_portions, strict=True):
        # Gather the tokens of the portion's rows. Padding repeats the row's first token, so no
        # value of another row or of an unused slot is read.
        is_real = positions < lengths.unsqueeze(1)  # [rows, padded_length]
        first_slots = starts.unsqueeze(1)  # [rows, 1]
        # The first slot of an empty row may lie behind the batch.
        readable_first_slots = first_slots.clamp_max(n_slots - 1)
        slots = torch.where(is_real, first_slots + positions, readable_first_slots)
        # [rows, padded_length, heads, head_dim] becomes [rows, heads, padded_length, head_dim].
        queries, keys, values = (tensor[slots].transpose(1, 2) for tensor in (q, k, v))

        # [rows, heads, padded_length, padded_length]
        scores = (queries @ keys.transpose(2, 3)).float()
        if layout.slopes is not None:
            scores += alibi_bias(layout.slopes, padded_length)
        scores.masked_fill_(~is_real[:, None, None, :], -math.inf)
        # An empty row has no key, and a softmax over minus infinity alone would give NaN. Its
        # scores are set to 0; its results are dropped in any case.
        is_empty = lengths == 0  # [rows]
        scores.masked_fill_(is_empty[:, None, None, None], 0.0)
        weights = scores.softmax(-1).to(values.dtype)
        mean_values = (weights @ values).transpose(1, 2)  # [rows, padded_length, heads, head_dim]

        # Write each token's result to its slot, and that of padding to the additional slot.
        out[torch.where(is_real, slots, n_slots)] = mean_values
    return out[:-1]


def layer_norm(
    x: Tensor, affine: tuple[Tensor, Tensor], eps: float, _shift: Tensor | None = None
) -> Tensor:
    """Apply layer norm to each row.

    Args:
        x: [rows, width].
        affine: Weight and bias of the norm, [width] each.
        eps: A small number that is added to the variance.
        _shift: Not used. The kernels' norm has this argument for biases that linear layers left
            out; with this backend they leave out none.

    Returns:
        [rows, width].
    """
    weight, bias = affine
    return F.layer_norm(x, x.shape[1:], weight, bias, eps)


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Average `x` over each span of neighbouring tokens.

    Each span is summed by itself in float32, from its first token to its last. So its mean does not
    depend on the tokens outside the span. (It would, if it were a difference of running sums.)

    Args:
        x: [tokens, width].
        starts: First token of each span, [spans]. Spans are in ascending order and do not overlap.
        ends: Token after the last one of each span, [spans].

    Returns:
        float32 [spans, width]; zeros where a span is empty.
    """
    # `segment_reduce` sums adjoining segments. The spans and the gaps between them adjoin, so the
    # offsets are start, end, start, end, ... The last gap is empty. Every second sum is a span's.
    bounds = torch.stack((starts, ends), dim=1).flatten().long()  # [2 * spans]
    offsets = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(
        x.float(),
        "sum",
        offsets=offsets,
        axis=0,
        unsafe=True,  # without a check of the offsets, which would wait for a GPU
        initial=0,
    )
    span_sums = sums[::2]  # [spans, width]
    n_tokens = (ends - starts).clamp_min(1).unsqueeze(1)  # [spans, 1]; an empty span has the mean 0
    return span_sums / n_tokens
