"""What ESM-2 and DNABERT-S have in common: reading weights to a device, means over rows, the way in and out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from virnuc_core.encoders.attention import Attend, Backend, reference
from virnuc_core.encoders.model_config import EncoderShape
from virnuc_core.encoders.precision import DTYPES, Dense, Resolved, make_dense
from virnuc_core.encoders.tokenize import PackedBatch

Read = Callable[[str], Tensor]  # a tensor of a model by our name for it
Affine = tuple[Tensor, Tensor]  # weight and bias of a norm, [width] each


class WeightReader:
    """Reads weights to `device`, one tensor at a time, in the form that `precision` runs on."""

    def __init__(self, read: Read, precision: Resolved, device: torch.device) -> None:
        self._stored, self._precision, self._device = read, precision, device

    def wide(self, name: str) -> Tensor:
        """One tensor in float32."""
        return self._read(name).float()

    def norm(self, name: str) -> Affine:
        """Weight and bias of a layer norm."""
        weight, bias = (self._read(f"{name}.{end}") for end in ("weight", "bias"))
        return weight.to(DTYPES[self._precision]), bias.to(DTYPES[self._precision])

    def linear(self, name: str, *, bias: bool = True) -> Dense:
        """A linear layer."""
        weight = self._read(f"{name}.weight")
        return make_dense(weight, self._read(f"{name}.bias") if bias else None, self._precision)

    def _read(self, name: str) -> Tensor:
        return self._stored(name).to(self._device)


class Encoder:
    """Packed tokens to one vector a row, on one device: by our own Triton kernels, or by plain torch operations."""

    def __init__(
        self, shape: EncoderShape, device: torch.device, *, pad_id: int, precision: Resolved, attention: Backend
    ) -> None:
        self.width, self.pad_id, self.device = shape.width, pad_id, device
        self.precision: Resolved = precision
        self.attention: Backend = attention
        self._quantises = precision == "fp8"
        # a product can add its result onto the stream, but not one of float8 rows; in float32 nothing is gained
        self._adds_in_product = attention == "fused" and precision in ("fp16", "bf16")
        self._attend = _attend_by(attention)
        self._flops = 2.0 * shape.linear_weights, 4.0 * shape.width * shape.layers

    def flops_per_token(self, seq_len: float) -> float:
        """Floating-point operations of one token in a row of `seq_len` tokens: linear layers and attention."""
        linear, attention = self._flops
        return linear + attention * seq_len

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean-pooled embeddings, float32 [row_capacity, width]; rows past `batch.rows` are zero.

        A row's values depend on its own tokens, the weights, the precision and the number of slots only.
        Never synchronises the device.
        """
        with torch.inference_mode():
            return self._mean(self.hidden(batch), *self.pooled_spans(batch.cu_seqlens))

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        raise NotImplementedError

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """First and last-but-one slot of what is averaged of each row, int32 [row_capacity] each."""
        raise NotImplementedError

    def _mean(self, hidden: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        if self.attention == "reference":
            return segment_mean(hidden, starts, ends)
        from virnuc_core.encoders.kernels import span_means  # the same without a float32 copy

        return span_means(hidden, starts, ends)


def _attend_by(backend: Backend) -> Attend:
    if backend == "reference":
        return reference
    from virnuc_core.encoders.attention_kernels import fused_attention  # triton is needed here only

    return fused_attention


def segment_mean(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Mean of `x` [tokens, width] over each span [start, end), float32 [spans, width]; zero where a span is empty.

    Spans ascend and do not overlap. Every span is summed on its own, first token to last, in float32: its mean does not
    depend on what else is in the batch, nor on dead slots (a difference of running sums would depend on both).
    """
    bounds = torch.stack((starts, ends), dim=1).flatten().long()  # a span, the gap after it, the next span, ...
    ends_and_tail = torch.cat((bounds, bounds[-1:]))
    sums = torch.segment_reduce(x.float(), "sum", offsets=ends_and_tail, axis=0, unsafe=True, initial=0)[::2]
    return sums / (ends - starts).clamp_min(1).unsqueeze(1)
