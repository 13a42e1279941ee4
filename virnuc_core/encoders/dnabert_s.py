"""DNABERT-S over packed tokens: post-norm layers, ALiBi, gated linear units, mean over all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Backend, Rows, alibi_slopes
from virnuc_core.encoders.layers import Affine, Dense, Encoder, Read, Resolved, WeightReader, dense, product
from virnuc_core.encoders.model_config import DnabertShape
from virnuc_core.encoders.tokenize import PackedBatch


class DnabertS(Encoder):
    """The encoder: mean over all tokens of each row, first and last included.

    Weights are read to `device` one tensor at a time; a misshapen one raises `WeightsError` with its name.
    """

    def __init__(
        self,
        shape: DnabertShape,
        read: Read,
        device: torch.device,
        *,
        pad_id: int,
        precision: Resolved,
        attention: Backend,
    ) -> None:
        weights = WeightReader(read, precision, device)
        layers = weights.layers(shape.layers, "gated", "wo", up_bias=False)
        super().__init__(shape, layers, pad_id=pad_id, precision=precision, attention=attention)
        # each token is of type 0; there are no positions to add, so the norm behind the embedding is a property of each
        table = (weights.wide("embed.weight") + weights.wide("token_type.weight")[0]).to(weights.dtype)
        self.table = F.layer_norm(table, (shape.width,), *weights.norm("embed_norm"), shape.norm_eps)  # [vocab, width]
        self._slopes = torch.tensor(alibi_slopes(shape.heads), dtype=torch.float32, device=device)
        self._shifts = [(layer.out.wide_bias, layer.down.wide_bias) for layer in layers]
        self._gated: list[Tensor] = []  # the gated units' weights as the kernel for them wants them, where it can run
        if self._adds_in_product:
            from virnuc_core.encoders.kernels import can_gate, interleave

            if can_gate(shape.ffn_width, device):
                self._gated = [interleave(layer.up.weight) for layer in layers]

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        x = F.embedding(batch.tokens, self.table)
        rows = Rows(batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, slopes=self._slopes)
        return self._by_kernels(x, rows) if self.attention == "fused" else self._by_torch(x, rows)

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows."""
        return cu_seqlens[:-1], cu_seqlens[1:]

    def _by_torch(self, x: Tensor, rows: Rows) -> Tensor:
        """The layers one by one: [slots, width] to the last hidden state."""
        width, eps = (self.width,), self.shape.norm_eps
        for layer in self.layers:
            mixed = dense(self._attend(dense(x, layer.qkv), rows), layer.out)
            x = F.layer_norm(mixed + x, width, *layer.attn_norm, eps)
            active, passed = dense(x, layer.up).chunk(2, dim=-1)
            x = F.layer_norm(dense(F.gelu(active) * passed, layer.down) + x, width, *layer.ffn_norm, eps)
        return x

    def _by_kernels(self, x: Tensor, rows: Rows) -> Tensor:
        """The same with one pass over memory between two products; `x` is used up.

        Where the product adds onto the stream in place, its bias is left to the norm behind it.
        """
        from virnuc_core.encoders.kernels import activation, gated_unit, norm  # triton is needed here only

        def ready(x: Tensor) -> tuple[Tensor, Tensor | None]:
            return activation(x, gelu=False, quantise=True) if self._quantises else (x, None)

        def gated(x: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
            if self._gated:
                return gated_unit(x, self._gated[i]), None
            both = product(*ready(x), self.layers[i].up)
            return activation(both, gated=True, quantise=self._quantises)

        def add_and_norm(
            x: Tensor, rows: tuple[Tensor, Tensor | None], last: Dense, shift: Tensor, affine: Affine
        ) -> Tensor:
            if not self._adds_in_product:
                return norm(x, affine, self.shape.norm_eps, delta=product(*rows, last))[0]
            x.addmm_(rows[0], last.weight.t())
            return norm(x, affine, self.shape.norm_eps, shift=shift)[0]

        for i, layer in enumerate(self.layers):
            after_mix, after_unit = self._shifts[i]
            mixed = self._attend(product(*ready(x), layer.qkv), rows)
            x = add_and_norm(x, ready(mixed), layer.out, after_mix, layer.attn_norm)
            x = add_and_norm(x, gated(x, i), layer.down, after_unit, layer.ffn_norm)
        return x
