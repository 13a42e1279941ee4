"""The encoders over packed tokens: ESM-2 and DNABERT-S."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.backends import Affine
from virnuc_core.encoders.layers import (
    Encoder,
    FeedForward,
    Layer,
    LinearLayer,
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
    HAS_PLAIN_GELU = True

    def _load_outer_tensors(self, load_float32: TensorReader, load_converted: TensorReader) -> None:
        """Load the embedding table, the rotary frequencies and the final norm.

        Also prepares the sums of biases that the norms add if the kernels are used.
        """
        table = load_float32("embed.weight")
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            table = table * TOKEN_DROPOUT_SCALE  # as the network expects, see MASKED_SHARE
        table[ESM2_PAD] = 0  # padding adds nothing
        self.table = table.to(DTYPES[self.precision])  # [vocab, width], scaled
        self.inv_freq = load_float32("inv_freq")  # float32 [head_dim / 2]
        self._final_norm = load_affine(load_converted, "final_norm")
        n_tokens = MAX_POOLED_RESIDUES + 2  # with the start and the end token
        self._cos, self._sin = rotary_tables(self.inv_freq, n_tokens)

        # With the kernels, linear layers add their product to the residual stream without their
        # bias. Nothing ever adds a bias to the stream itself. So each norm adds the biases of all
        # linear layers before it to its own input: their sum, float32 [width]. For the first norm
        # the sum is 0. A layer has two norms, and the final norm is one more.
        self._missing_biases: Sequence[Tensor | None] = [None] * (2 * self.shape.layers + 1)
        # The int8 kernels add the bias themselves.
        if self._backend.has_kernels and self.precision != "int8":
            no_bias = torch.zeros_like(self._final_norm[0], dtype=torch.float32)
            biases = []
            for layer in self.layers:
                biases += [layer.out.float32_bias, layer.down.float32_bias]
            self._missing_biases = list(accumulate(biases, initial=no_bias))

    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the output of the last layer after the final norm, for each token slot.

        Returns:
            [slots, width].
        """
        # Longer sequences than before need larger tables of angles, which are kept. The length is
        # rounded up to a power of two, so that this happens rarely.
        if batch.max_seqlen > len(self._cos):
            table_length = 1 << (batch.max_seqlen - 1).bit_length()
            self._cos, self._sin = rotary_tables(self.inv_freq, table_length)
        layout = RowLayout(
            batch.cu_seqlens,
            batch.rows,
            batch.max_seqlen,
            self.shape.heads,
            cos=self._cos,
            sin=self._sin,
        )
        if self._backend.has_kernels and self.precision == "int8":
            return self._run_layers_int8(batch.tokens, layout)
        norm_biases = self._missing_biases  # of two norms for each layer, then of the final norm

        def qkv_of_tokens(tokens: Tensor) -> Tensor:
            """Return the queries, keys and values of the first layer for some tokens."""
            return self._qkv(F.embedding(tokens, self.table), self.layers[0], norm_biases[0])

        stream = F.embedding(batch.tokens, self.table)
        for i, layer in enumerate(self.layers):
            if i == 0:
                qkv = self._first_qkv(batch.tokens, qkv_of_tokens)
            else:
                qkv = self._qkv(stream, layer, norm_biases[2 * i])
            mean_values = self._backend.attend(qkv, layout)  # [slots, width]
            stream = self._add_product(stream, mean_values, layer.out)
            stream = self._add_feed_forward(stream, layer, norm_biases[2 * i + 1])
        return self._backend.norm(stream, self._final_norm, self.shape.norm_eps, norm_biases[-1])

    def _qkv(self, stream: Tensor, layer: Layer, missing_bias: Tensor | None) -> Tensor:
        """Return the queries, keys and values of a layer's attention, [slots, 3 * width].

        Args:
            stream: The residual stream, [slots, width].
            layer: Weights of the layer.
            missing_bias: Sum of the biases that earlier linear layers have not added to the stream,
                float32 [width]. The kernels leave them out, and the norm adds them. None: none.
        """
        attention_input = self._backend.norm(
            stream, layer.attn_norm, self.shape.norm_eps, missing_bias
        )
        return self.apply_linear(attention_input, layer.qkv)

    def _add_feed_forward(
        self, stream: Tensor, layer: Layer, missing_bias: Tensor | None
    ) -> Tensor:
        """Add a layer's feed-forward part to the residual stream, and return the sum.

        Args:
            stream: The residual stream, [slots, width]. With the kernels it is changed in place.
            layer: Weights of the layer.
            missing_bias: Sum of the biases that earlier linear layers have not added to the stream,
                float32 [width]. The kernels leave them out, and the norm adds them. None: none.

        Returns:
            [slots, width].
        """
        ffn_input = self._backend.norm(stream, layer.ffn_norm, self.shape.norm_eps, missing_bias)
        if self.gelu == "tanh":
            gelu_outputs = self._tanh_gelu(ffn_input, layer.up)
        else:
            gelu_outputs = F.gelu(self.apply_linear(ffn_input, layer.up))  # [slots, ffn_width]
        return self._add_product(stream, gelu_outputs, layer.down)

    def _tanh_gelu(self, x: Tensor, layer: LinearLayer) -> Tensor:
        """Return GELU, approximated by tanh, of the output of a linear layer.

        GELU(x) is about x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))). In the fused
        backend the library (cuBLASLt) computes it within the product, which spares a pass over
        memory.

        Args:
            x: Input of the linear layer, [slots, width].
            layer: The linear layer.

        Returns:
            [slots, ffn_width].
        """
        if self._backend.has_kernels:
            assert layer.bias is not None
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        return F.gelu(self.apply_linear(x, layer), approximate="tanh")

    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which token slots of each protein are averaged: its first 1,024 residues.

        The start and the end token are left out. Without residues the span is empty.

        Args:
            cu_seqlens: First slot of each sequence, then the end, int32 [row_capacity + 1].

        Returns:
            The first slot, and the slot after the last one, int32 [row_capacity] each.
        """
        first_tokens = cu_seqlens[:-1]
        row_ends = cu_seqlens[1:]
        starts = torch.minimum(first_tokens + 1, row_ends)
        ends = torch.minimum(row_ends - 1, starts + MAX_POOLED_RESIDUES)
        # An unused row of the batch has no token at all: its end must not come before its start.
        return starts, torch.maximum(starts, ends)

    def _run_layers_int8(self, tokens: Tensor, layout: RowLayout) -> Tensor:
        """Run all layers in int8 by the kernels.

        Before a product its input is rotated, which mixes neighbouring numbers of a row, and then
        rounded to int8. The weights were rotated in the same way when they were loaded.

        Args:
            tokens: The tokens of a batch, [slots].
            layout: Where the sequences lie in the batch.

        Returns:
            The output of the last layer after the final norm, [slots, width].
        """
        from virnuc_core.encoders.kernels import norm  # Triton is needed here only

        rotation = hadamard_rotation(self.width, tokens.device)
        ffn_rotation = hadamard_rotation(self.shape.ffn_width, tokens.device)

        def qkv_of_tokens(tokens: Tensor) -> Tensor:
            """Return the queries, keys and values of the first layer for some tokens."""
            return self._qkv_int8(F.embedding(tokens, self.table), self.layers[0], rotation)

        stream = F.embedding(tokens, self.table)  # fp16 [slots, width]
        for i, layer in enumerate(self.layers):
            if i == 0:
                qkv = self._first_qkv(tokens, qkv_of_tokens)
            else:
                qkv = self._qkv_int8(stream, layer, rotation)
            mean_values = self._backend.attend(qkv, layout)  # fp16 [slots, width]
            self._add_attention_int8(stream, mean_values, layer, rotation)
            self._add_feed_forward_int8(stream, layer, rotation, ffn_rotation)
        return norm(stream, self._final_norm, self.shape.norm_eps)

    def _qkv_int8(self, stream: Tensor, layer: Layer, rotation: Tensor) -> Tensor:
        """Return the queries, keys and values of a layer's attention by an int8 product.

        Args:
            stream: The residual stream, fp16 [slots, width].
            layer: Weights of the layer, int8.
            rotation: The matrix that rotates rows of `width` before they are rounded.

        Returns:
            fp16 [slots, 3 * width].
        """
        from virnuc_core.encoders.kernels import int8_product

        rows, scale = self._norm_and_round(stream, layer.attn_norm, rotation)
        return int8_product(rows, scale, layer.qkv)

    def _norm_and_round(
        self, stream: Tensor, norm: Affine, rotation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply a layer norm to the residual stream, rotate its rows, and round them to int8.

        Args:
            stream: The residual stream, fp16 [slots, width]. It is not changed.
            norm: Weight and bias of the norm.
            rotation: The matrix that rotates rows of `width` before they are rounded.

        Returns:
            The rows in int8 [slots, width], and a scale for each row, float32 [slots, 1]. The int8
            numbers times the scale are about the row.
        """
        from virnuc_core.encoders.kernels import int8_rows

        eps = self.shape.norm_eps
        return int8_rows(stream, rotation, self.rows_library, norm=norm, eps=eps)

    def _add_attention_int8(
        self, stream: Tensor, mean_values: Tensor, layer: Layer, rotation: Tensor
    ) -> None:
        """Add a layer's attention to the residual stream, in place, by an int8 product.

        Args:
            stream: The residual stream, fp16 [slots, width].
            mean_values: The output of the attention heads, fp16 [slots, width].
            layer: Weights of the layer, int8.
            rotation: The matrix that rotates rows of `width` before they are rounded.
        """
        from virnuc_core.encoders.kernels import int8_product, int8_rows

        rows, scale = int8_rows(mean_values, rotation, self.rows_library)
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

        rows, scale = self._norm_and_round(stream, layer.ffn_norm, rotation)
        up_outputs = int8_product(rows, scale, layer.up)  # fp16 [slots, ffn_width], before GELU
        rows, scale = int8_rows(up_outputs, ffn_rotation, self.rows_library, gelu=True)
        int8_product(rows, scale, layer.down, add_to=stream)


class DnabertS(Encoder):
    """DNABERT-S. A row's embedding is the mean over all of its tokens, [CLS] and [SEP] included.

    Zhou et al., DNABERT-S: pioneering species differentiation with species-aware DNA embeddings,
    2024; `bert_layers.py` of its repository.
    """

    INFO = DNABERT_S
    FEED_FORWARD = FeedForward("gated", "wo", up_has_bias=False)

    def _load_outer_tensors(self, load_float32: TensorReader, load_converted: TensorReader) -> None:
        """Load the embedding table, and prepare ALiBi and the gated units.

        Also collects the biases that the norms add if the kernels are used.
        """
        # The network adds the embedding of token type 0 to every token and normalises the sum. The
        # result depends on the token only, so the table holds it ready for every token.
        table = load_float32("embed.weight") + load_float32("token_type.weight")[0]
        table = table.to(DTYPES[self.precision])
        weight, bias = load_affine(load_converted, "embed_norm")
        self.table = F.layer_norm(table, (self.width,), weight, bias, self.shape.norm_eps)
        slopes = alibi_slopes(self.shape.heads)
        self._slopes = torch.tensor(slopes, dtype=torch.float32, device=table.device)

        # With the kernels, linear layers add their product to the residual stream without their
        # bias. A norm follows each of them and adds this bias, float32 [width]. Each layer has two:
        # the bias of the attention's output, and that of the feed-forward part's second layer.
        self._missing_biases: list[tuple[Tensor | None, Tensor | None]]
        if self._backend.has_kernels:
            self._missing_biases = [
                (layer.out.float32_bias, layer.down.float32_bias) for layer in self.layers
            ]
        else:
            self._missing_biases = [(None, None)] * self.shape.layers

        # A gated unit's weight has two halves: one for the values, one for their gates. The kernel
        # needs blocks of rows of the one to alternate with blocks of the other. The list stays
        # empty if the kernel cannot run here. Then torch computes the units.
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
        eps = self.shape.norm_eps

        def qkv_of_tokens(tokens: Tensor) -> Tensor:
            """Return the queries, keys and values of the first layer for some tokens."""
            return apply_linear(F.embedding(tokens, self.table), self.layers[0].qkv)

        stream = F.embedding(batch.tokens, self.table)  # [slots, width]
        for i, layer in enumerate(self.layers):
            # With the kernels, `_add_product` leaves out the bias of a linear layer. The norm that
            # follows gets this bias and adds it.
            out_bias, down_bias = self._missing_biases[i]

            # Attention, then the norm behind it
            if i == 0:  # depends on the token alone, and is looked up
                qkv = self._first_qkv(batch.tokens, qkv_of_tokens)  # [slots, 3 * width]
            else:
                qkv = apply_linear(stream, layer.qkv)
            mean_values = self._backend.attend(qkv, layout)  # [slots, width]
            stream = self._add_product(stream, mean_values, layer.out)
            stream = self._backend.norm(stream, layer.attn_norm, eps, out_bias)

            # The gated unit: exact GELU of half of the product, times the other half; then the norm
            if self._interleaved:
                unit_output = self._gated_unit(stream, self._interleaved[i])
            else:
                gelu_half, other_half = apply_linear(stream, layer.up).chunk(2, dim=-1)
                unit_output = F.gelu(gelu_half) * other_half  # [slots, ffn_width]
            stream = self._add_product(stream, unit_output, layer.down)
            stream = self._backend.norm(stream, layer.ffn_norm, eps, down_bias)
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
    batch = PackedBatch(
        tokens,
        cu_seqlens=offsets.int(),
        rows=len(sequences),
        max_seqlen=longest,
        real_tokens=len(tokens),
    )
    return encoder.embed(batch.to(device))
