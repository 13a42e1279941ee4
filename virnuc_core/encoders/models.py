"""The encoders over packed tokens: ESM-2 and DNABERT-S."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.layers import (
    Encoder,
    FeedForward,
    Layer,
    TensorReader,
    apply_linear,
    load_affine,
)
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.positions import RowLayout, alibi_slopes, rotary_tables
from virnuc_core.encoders.precision import DTYPES, hadamard_rotation
from virnuc_core.encoders.registry import DNABERT_S, ESM2
from virnuc_core.encoders.tokenize import ESM2_PAD, PackedBatch, Tokenizer

# VirNucPro averages the first 1,024 residues of a protein. Attention also sees the later ones.
MAX_POOLED_RESIDUES: Final = 1024
# ESM-2's training replaced this share of the residues by zeros ("token dropout"). No residue is
# replaced here, so all embeddings are scaled down to the same mean size.
MASKED_SHARE: Final = 0.15 * 0.8
TOKEN_DROPOUT_SCALE: Final = 1 - MASKED_SHARE


class Esm2(Encoder):
    """ESM-2. A row's embedding is the mean over its first 1,024 residues, without start and end.

    Lin et al., Evolutionary-scale prediction of atomic-level protein structure, 2023; fair-esm's
    `esm/model/esm2.py`.
    """

    INFO = ESM2
    FEED_FORWARD = FeedForward("fc1", "fc2", up_has_bias=True)

    def _load_outer_tensors(self, load_float32: TensorReader, load_converted: TensorReader) -> None:
        """Load the embedding table, the rotary frequencies and the final norm."""
        table = load_float32("embed.weight")
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            table = table * TOKEN_DROPOUT_SCALE
        table[ESM2_PAD] = 0
        self.table = table.to(DTYPES[self.precision])  # [vocab, width], scaled
        self.inv_freq = load_float32("inv_freq")  # float32 [head_dim / 2]
        self._final_norm = load_affine(load_converted, "final_norm")
        self._cos, self._sin = rotary_tables(self.inv_freq, MAX_POOLED_RESIDUES + 2)

        # With the kernels, linear layers add their product to the residual stream without their
        # bias. Before each norm, the stream lacks the sum of all biases so far: this sum is the
        # norm's shift, float32 [width]. A layer has two norms, and the final norm is one more.
        self._shifts: Sequence[Tensor | None] = [None] * (2 * self.shape.layers + 1)
        if self._backend.has_kernels and self.precision != "int8":
            no_shift = torch.zeros_like(self._final_norm[0], dtype=torch.float32)
            biases = []
            for layer in self.layers:
                biases += [layer.out.wide_bias, layer.down.wide_bias]
            self._shifts = list(accumulate(biases, initial=no_shift))

    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the output of the last layer after the final norm, for each token slot.

        Returns:
            [slots, width].
        """
        # Longer sequences than before need larger tables of angles, which are kept.
        if batch.max_seqlen > len(self._cos):
            next_power_of_two = 1 << (batch.max_seqlen - 1).bit_length()
            self._cos, self._sin = rotary_tables(self.inv_freq, next_power_of_two)
        layout = RowLayout(
            batch.cu_seqlens,
            batch.rows,
            batch.max_seqlen,
            self.shape.heads,
            cos=self._cos,
            sin=self._sin,
        )
        stream = F.embedding(batch.tokens, self.table)
        if self._backend.has_kernels and self.precision == "int8":
            return self._hidden_int8(stream, layout)
        for i, layer in enumerate(self.layers):
            stream = self._add_attention(stream, layer, layout, self._shifts[2 * i])
            stream = self._add_feed_forward(stream, layer, self._shifts[2 * i + 1])
        return self._backend.norm(stream, self._final_norm, self.shape.norm_eps, self._shifts[-1])

    def _add_attention(
        self, stream: Tensor, layer: Layer, layout: RowLayout, shift: Tensor | None
    ) -> Tensor:
        """Add a layer's attention to the residual stream, and return the sum.

        Args:
            stream: The residual stream, [slots, width]. With the kernels it is changed in place.
            layer: Weights of the layer.
            layout: Where the sequences lie in the batch.
            shift: Biases that the stream lacks, see `_shifts`; None: none.

        Returns:
            [slots, width].
        """
        normed = self._backend.norm(stream, layer.attn_norm, self.shape.norm_eps, shift)
        mixed = self._backend.attend(self.apply_linear(normed, layer.qkv), layout)
        return self._add_product(stream, mixed, layer.out)

    def _add_feed_forward(self, stream: Tensor, layer: Layer, shift: Tensor | None) -> Tensor:
        """Add a layer's feed-forward part to the residual stream, and return the sum.

        Args:
            stream: The residual stream, [slots, width]. With the kernels it is changed in place.
            layer: Weights of the layer.
            shift: Biases that the stream lacks, see `_shifts`; None: none.

        Returns:
            [slots, width].
        """
        normed = self._backend.norm(stream, layer.ffn_norm, self.shape.norm_eps, shift)
        activated = F.gelu(self.apply_linear(normed, layer.up))
        return self._add_product(stream, activated, layer.down)

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which token slots of each protein are averaged: its first 1,024 residues.

        The start and the end token are left out. Without residues the span is empty.

        Args:
            cu_seqlens: First slot of each sequence, then the end, int32 [row_capacity + 1].

        Returns:
            The first slot, and the slot after the last one, int32 [row_capacity] each.
        """
        first_tokens, row_ends = cu_seqlens[:-1], cu_seqlens[1:]
        starts = torch.minimum(first_tokens + 1, row_ends)
        ends = torch.minimum(row_ends - 1, starts + MAX_POOLED_RESIDUES)
        return starts, torch.maximum(starts, ends)

    def _hidden_int8(self, stream: Tensor, layout: RowLayout) -> Tensor:
        """Run all layers in int8 by the kernels.

        Args:
            stream: Embedded tokens, fp16 [slots, width]. The tensor is overwritten.
            layout: Where the sequences lie in the batch.

        Returns:
            The output of the last layer after the final norm, [slots, width].
        """
        from virnuc_core.encoders.kernels import norm  # Triton is needed here only

        rotation = hadamard_rotation(self.width, stream.device)
        ffn_rotation = hadamard_rotation(self.shape.ffn_width, stream.device)
        for layer in self.layers:
            self._add_attention_int8(stream, layer, layout, rotation)
            self._add_feed_forward_int8(stream, layer, rotation, ffn_rotation)
        return norm(stream, self._final_norm, self.shape.norm_eps)

    def _add_attention_int8(
        self, stream: Tensor, layer: Layer, layout: RowLayout, rotation: Tensor
    ) -> None:
        """Add a layer's attention to the residual stream, in place, with int8 products.

        Args:
            stream: The residual stream, fp16 [slots, width].
            layer: Weights of the layer, int8.
            layout: Where the sequences lie in the batch.
            rotation: The matrix that rotates rows of `width` before they are rounded.
        """
        from virnuc_core.encoders.kernels import int8_product, int8_rows

        rows, scale = int8_rows(stream, rotation, norm=layer.attn_norm, eps=self.shape.norm_eps)
        mixed = self._backend.attend(int8_product(rows, scale, layer.qkv), layout)
        rows, scale = int8_rows(mixed, rotation)
        int8_product(rows, scale, layer.out, add_to=stream)

    def _add_feed_forward_int8(
        self, stream: Tensor, layer: Layer, rotation: Tensor, ffn_rotation: Tensor
    ) -> None:
        """Add a layer's feed-forward part to the residual stream, in place, with int8 products.

        Args:
            stream: The residual stream, fp16 [slots, width].
            layer: Weights of the layer, int8.
            rotation: The matrix that rotates rows of `width` before they are rounded.
            ffn_rotation: The same for rows of `ffn_width`.
        """
        from virnuc_core.encoders.kernels import int8_product, int8_rows

        rows, scale = int8_rows(stream, rotation, norm=layer.ffn_norm, eps=self.shape.norm_eps)
        ffn_inputs = int8_product(rows, scale, layer.up)
        rows, scale = int8_rows(ffn_inputs, ffn_rotation, gelu=True)
        int8_product(rows, scale, layer.down, add_to=stream)


class DnabertS(Encoder):
    """DNABERT-S. A row's embedding is the mean over all of its tokens, [CLS] and [SEP] included.

    Zhou et al., DNABERT-S: pioneering species differentiation with species-aware DNA embeddings,
    2024; `bert_layers.py` of its repository.
    """

    INFO = DNABERT_S
    FEED_FORWARD = FeedForward("gated", "wo", up_has_bias=False)

    def _load_outer_tensors(self, load_float32: TensorReader, load_converted: TensorReader) -> None:
        """Load the embedding table, and prepare ALiBi and the gated units."""
        # The network adds the embedding of token type 0 to every token and normalises the sum. The
        # result depends on the token only, so the table holds it ready for every token.
        table = load_float32("embed.weight") + load_float32("token_type.weight")[0]
        table = table.to(DTYPES[self.precision])
        weight, bias = load_affine(load_converted, "embed_norm")
        self.table = F.layer_norm(table, (self.width,), weight, bias, self.shape.norm_eps)
        slopes = alibi_slopes(self.shape.heads)
        self._slopes = torch.tensor(slopes, dtype=torch.float32, device=table.device)

        # The int8 kernels add the product of a linear layer to the residual stream, but not its
        # bias. So the norm that follows adds this bias: `_shifts` has it for both linear layers of
        # each block, float32 [width].
        self._shifts: list[tuple[Tensor | None, Tensor | None]]
        if self._backend.has_kernels:
            self._shifts = [(layer.out.wide_bias, layer.down.wide_bias) for layer in self.layers]
        else:
            self._shifts = [(None, None)] * self.shape.layers

        # Weights of the gated units in the order that their kernel needs. The list stays empty if
        # the kernel cannot run here, and the units are computed by torch.
        self._interleaved: list[Tensor] = []
        if self._backend.has_kernels and self.precision != "fp32":
            from virnuc_core.encoders.kernels import can_gate, gated_unit, interleave

            self._gated_unit = gated_unit
            if can_gate(self.shape.ffn_width, table.device):
                self._interleaved = [interleave(layer.up.weight) for layer in self.layers]

    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the output of the last layer for each token slot, [slots, width]."""
        layout = RowLayout(
            batch.cu_seqlens, batch.rows, batch.max_seqlen, self.shape.heads, slopes=self._slopes
        )
        attend, norm, eps = self._backend.attend, self._backend.norm, self.shape.norm_eps
        stream = F.embedding(batch.tokens, self.table)
        for i, layer in enumerate(self.layers):
            attn_shift, ffn_shift = self._shifts[i]

            # Attention, then the norm behind it
            mixed = attend(apply_linear(stream, layer.qkv), layout)
            stream = self._add_product(stream, mixed, layer.out)
            stream = norm(stream, layer.attn_norm, eps, attn_shift)

            # The gated unit: exact GELU of half of the product, times the other half; then the norm
            if self._interleaved:
                unit = self._gated_unit(stream, self._interleaved[i])
            else:
                gelu_half, other_half = apply_linear(stream, layer.up).chunk(2, dim=-1)
                unit = F.gelu(gelu_half) * other_half
            stream = self._add_product(stream, unit, layer.down)
            stream = norm(stream, layer.ffn_norm, eps, ffn_shift)
        return stream

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which token slots of each sequence are averaged: all, [CLS] and [SEP] included.

        Args:
            cu_seqlens: First slot of each sequence, then the end, int32 [row_capacity + 1].

        Returns:
            The first slot, and the slot after the last one, int32 [row_capacity] each.
        """
        return cu_seqlens[:-1], cu_seqlens[1:]


NETWORKS: Final[dict[EncoderName, type[Encoder]]] = {
    network.INFO.name: network for network in (DnabertS, Esm2)
}


def embed_sequences(
    encoder: Encoder, tokenizer: Tokenizer, sequences: list[bytes], device: torch.device
) -> Tensor:
    """Embed a few sequences in one batch that has exactly as many token slots as they need.

    Args:
        encoder: A loaded encoder.
        tokenizer: The tokenizer of this encoder.
        sequences: DNA or proteins.
        device: Where the encoder was loaded.

    Returns:
        float32 [sequences, width].
    """
    tokens, offsets = tokenizer.encode(sequences)
    longest = int(offsets.diff().max())
    batch = PackedBatch(tokens, offsets.int(), len(sequences), longest, len(tokens))
    return encoder.embed(batch.to(device))
