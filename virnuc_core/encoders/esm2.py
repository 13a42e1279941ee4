"""ESM-2 over packed tokens: pre-norm layers, rotary positions, exact GELU, a final layer norm, mean over residues."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.attention import Attend, Backend, Layers, Rows, bind, rotary_tables, rows_to_launch
from virnuc_core.encoders.compiling import compile_block
from virnuc_core.encoders.model_config import Esm2Shape
from virnuc_core.encoders.packed import PackedBatch
from virnuc_core.encoders.precision import DTYPES, Dense, Resolved, dense, make_dense
from virnuc_core.encoders.segments import mean_of, positions
from virnuc_core.encoders.tensor_files import Readable
from virnuc_core.encoders.tuning import PLAIN, Tuning

PAD_ID: Final = 1
POOLED_RESIDUES: Final = 1024  # the mean stops here; the residues behind it are attended to
TOKEN_DROPOUT_SCALE: Final = 1 - 0.15 * 0.8  # training hid this share of the residues; no token is hidden here


class Esm2Layer(NamedTuple):
    """Weights of one layer."""

    attn_norm: tuple[Tensor, Tensor]
    qkv: Dense
    out: Dense
    ffn_norm: tuple[Tensor, Tensor]
    fc1: Dense
    fc2: Dense


class Esm2Weights(NamedTuple):
    """Weights of the model on one device, in the form one precision runs on."""

    embed: Tensor  # [vocab, width]; already scaled, zero for the pad token
    inv_freq: Tensor  # float32 [head_dim / 2]
    layers: tuple[Esm2Layer, ...]
    final_norm: tuple[Tensor, Tensor]


def place_esm2(tensors: Readable, shape: Esm2Shape, precision: Resolved, device: torch.device) -> Esm2Weights:
    """Read the weights to `device`, one tensor at a time; a misshapen one raises `WeightsError` with its name."""
    dtype = DTYPES[precision]

    def norm(name: str) -> tuple[Tensor, Tensor]:
        return tensors.read(f"{name}.weight", device).to(dtype), tensors.read(f"{name}.bias", device).to(dtype)

    def linear(name: str) -> Dense:
        return make_dense(tensors.read(f"{name}.weight", device), tensors.read(f"{name}.bias", device), precision)

    embed = tensors.read("embed.weight", device).float()
    if shape.token_dropout:
        embed = embed * TOKEN_DROPOUT_SCALE
    embed[PAD_ID] = 0
    layers = tuple(
        Esm2Layer(
            attn_norm=norm(f"layers.{i}.attn_norm"),
            qkv=linear(f"layers.{i}.qkv"),
            out=linear(f"layers.{i}.out"),
            ffn_norm=norm(f"layers.{i}.ffn_norm"),
            fc1=linear(f"layers.{i}.fc1"),
            fc2=linear(f"layers.{i}.fc2"),
        )
        for i in range(shape.layers)
    )
    return Esm2Weights(embed.to(dtype), tensors.read("inv_freq", device).float(), layers, norm("final_norm"))


def esm2_block(x: Tensor, layer: Esm2Layer, rows: Rows, attend: Attend, eps: float) -> Tensor:
    """One layer, [slots, width] to the same."""
    width = (x.shape[1],)
    normed = F.layer_norm(x, width, *layer.attn_norm, eps)
    x = x + dense(attend(dense(normed, layer.qkv), rows), layer.out)
    normed = F.layer_norm(x, width, *layer.ffn_norm, eps)
    return x + dense(F.gelu(dense(normed, layer.fc1)), layer.fc2)


class Esm2:
    """The encoder: packed tokens to one vector a row."""

    def __init__(
        self,
        shape: Esm2Shape,
        weights: Esm2Weights,
        *,
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
        self._layers = self._kernel_layers() if tuning.kernels else self._block_layers()
        self._tables = rotary_tables(weights.inv_freq, POOLED_RESIDUES + 2)

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def pad_id(self) -> int:
        return PAD_ID

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    def flops_per_token(self, seq_len: float) -> float:
        """Floating-point operations of one token in a row of `seq_len` tokens: linear layers and attention."""
        return 2.0 * self.shape.linear_weights + 4.0 * seq_len * self.shape.width * self.shape.layers

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean over each row's first 1,024 residues, start and end tokens left out: float32 [row_capacity, width]."""
        with torch.inference_mode():
            return self._pool(self.hidden(batch), batch.cu_seqlens)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the last layer, after the final norm: [slots, width]."""
        with torch.inference_mode():
            return self._layers(F.embedding(batch.tokens, self.weights.embed), self._rows(batch), self._attend)

    def _block_layers(self) -> Layers:
        """The layers one by one, in torch operations; compiled, one graph serves all of them."""
        weights, eps = self.weights, self.shape.norm_eps
        block = compile_block(esm2_block) if self.compiled else esm2_block

        def run(x: Tensor, rows: Rows, attend: Attend) -> Tensor:
            for layer in weights.layers:
                x = block(x, layer, rows, attend, eps)
            return F.layer_norm(x, (x.shape[1],), *weights.final_norm, eps)

        return run

    def _kernel_layers(self) -> Layers:
        from virnuc_core.encoders.stacks import Esm2Stack

        return Esm2Stack(self.weights, self.shape.norm_eps, self.tuning)

    def _rows(self, batch: PackedBatch) -> Rows:
        if batch.max_seqlen > self._tables[0].shape[0]:
            self._tables = rotary_tables(self.weights.inv_freq, 1 << (batch.max_seqlen - 1).bit_length())
        cos, sin = self._tables
        place = None if self.attention == "fused" else positions(batch.cu_seqlens, batch.slots)
        return Rows(
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            launched=rows_to_launch(batch, compiled=self.compiled),
            heads=self.shape.heads,
            cos_table=cos,
            sin_table=sin,
            cos=None if place is None else cos[place],
            sin=None if place is None else sin[place],
        )

    def _pool(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        starts = torch.minimum(cu_seqlens[:-1] + 1, cu_seqlens[1:])
        ends = torch.maximum(starts, torch.minimum(cu_seqlens[1:] - 1, starts + POOLED_RESIDUES))
        return mean_of(kernels=self.tuning.kernels)(hidden, starts, ends)
