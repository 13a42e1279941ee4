"""DNABERT-S over packed tokens: post-norm layers, ALiBi, gated linear units, mean over all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Attend, Backend, Layers, Rows, alibi_slopes, bind, rows_to_launch
from virnuc_core.encoders.compiling import compile_block
from virnuc_core.encoders.model_config import DnabertShape
from virnuc_core.encoders.packed import PackedBatch
from virnuc_core.encoders.precision import DTYPES, Dense, Resolved, dense, make_dense
from virnuc_core.encoders.segments import mean_of
from virnuc_core.encoders.tensor_files import Readable
from virnuc_core.encoders.tuning import PLAIN, Tuning


class DnabertLayer(NamedTuple):
    """Weights of one layer."""

    qkv: Dense
    out: Dense
    attn_norm: tuple[Tensor, Tensor]
    gated: Dense  # first half of its output is activated, the second half multiplied in
    wo: Dense
    ffn_norm: tuple[Tensor, Tensor]


class DnabertWeights(NamedTuple):
    """Weights of the model on one device, in the form one precision runs on."""

    embed: Tensor  # [vocab, width]; the embedding of token type 0 already added
    embed_norm: tuple[Tensor, Tensor]
    layers: tuple[DnabertLayer, ...]


def place_dnabert(tensors: Readable, shape: DnabertShape, precision: Resolved, device: torch.device) -> DnabertWeights:
    """Read the weights to `device`, one tensor at a time; a misshapen one raises `WeightsError` with its name."""
    dtype = DTYPES[precision]

    def norm(name: str) -> tuple[Tensor, Tensor]:
        return tensors.read(f"{name}.weight", device).to(dtype), tensors.read(f"{name}.bias", device).to(dtype)

    def linear(name: str, *, bias: bool = True) -> Dense:
        shift = tensors.read(f"{name}.bias", device) if bias else None
        return make_dense(tensors.read(f"{name}.weight", device), shift, precision)

    embed = tensors.read("embed.weight", device).float() + tensors.read("token_type.weight", device).float()[0]
    layers = tuple(
        DnabertLayer(
            qkv=linear(f"layers.{i}.qkv"),
            out=linear(f"layers.{i}.out"),
            attn_norm=norm(f"layers.{i}.attn_norm"),
            gated=linear(f"layers.{i}.gated", bias=False),
            wo=linear(f"layers.{i}.wo"),
            ffn_norm=norm(f"layers.{i}.ffn_norm"),
        )
        for i in range(shape.layers)
    )
    return DnabertWeights(embed.to(dtype), norm("embed_norm"), layers)


def dnabert_block(x: Tensor, layer: DnabertLayer, rows: Rows, attend: Attend, eps: float) -> Tensor:
    """One layer, [slots, width] to the same."""
    width = (x.shape[1],)
    attended = dense(attend(dense(x, layer.qkv), rows), layer.out)
    x = F.layer_norm(attended + x, width, *layer.attn_norm, eps)
    active, passed = dense(x, layer.gated).chunk(2, dim=-1)
    return F.layer_norm(dense(F.gelu(active) * passed, layer.wo) + x, width, *layer.ffn_norm, eps)


class DnabertS:
    """The encoder: packed tokens to one vector a row."""

    def __init__(
        self,
        shape: DnabertShape,
        weights: DnabertWeights,
        *,
        pad_id: int,
        precision: Resolved,
        attention: Backend,
        compile: bool,
        tuning: Tuning = PLAIN,
    ) -> None:
        tuning.check(precision, compile=compile)
        self.shape, self.weights, self.tuning = shape, weights, tuning
        self.precision: Resolved = precision
        self.attention: Backend = attention
        self.compiled = compile
        self._attend = bind(attention, compiled=compile)
        self._pad_id = pad_id
        # there are no positions to add, so the norm behind the embedding is a property of each token
        self._embed = F.layer_norm(weights.embed, (shape.width,), *weights.embed_norm, shape.norm_eps)
        self._layers = self._kernel_layers() if tuning.kernels else self._block_layers()
        self._slopes = torch.tensor(alibi_slopes(shape.heads), dtype=torch.float32, device=weights.embed.device)

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def pad_id(self) -> int:
        return self._pad_id

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    def flops_per_token(self, seq_len: float) -> float:
        """Floating-point operations of one token in a row of `seq_len` tokens: linear layers and attention."""
        return 2.0 * self.shape.linear_weights + 4.0 * seq_len * self.shape.width * self.shape.layers

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean over all tokens of each row, first and last included: float32 [row_capacity, width]."""
        with torch.inference_mode():
            mean = mean_of(kernels=self.tuning.kernels)
            return mean(self.hidden(batch), batch.cu_seqlens[:-1], batch.cu_seqlens[1:])

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer: [slots, width]."""
        with torch.inference_mode():
            x = F.embedding(batch.tokens, self._embed)
            rows = Rows(
                cu_seqlens=batch.cu_seqlens,
                max_seqlen=batch.max_seqlen,
                launched=rows_to_launch(batch, compiled=self.compiled),
                heads=self.shape.heads,
                slopes=self._slopes,
            )
            return self._layers(x, rows, self._attend)

    def _block_layers(self) -> Layers:
        """The layers one by one, in torch operations; compiled, one graph serves all of them."""
        layers, eps = self.weights.layers, self.shape.norm_eps
        block = compile_block(dnabert_block) if self.compiled else dnabert_block

        def run(x: Tensor, rows: Rows, attend: Attend) -> Tensor:
            for layer in layers:
                x = block(x, layer, rows, attend, eps)
            return x

        return run

    def _kernel_layers(self) -> Layers:
        from virnuc_core.encoders.stacks import DnabertStack

        return DnabertStack(self.weights, self.shape.norm_eps, self.tuning)
