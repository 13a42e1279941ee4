"""ESM-2, DNABERT-S and the head once more, in the plainest padded form: the packed encoders are held against it.

Nothing here is shared with `virnuc_core.encoders` but tokens, the models' sizes, the names of their tensors and ALiBi's
slopes. Rows of a batch are padded to the longest and masked; attention is written out as matrix products.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from virnuc_core.encoders.layers import alibi_slopes
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape
from virnuc_core.encoders.tokenize import Tokenizer

MASKED_IN_TRAINING: Final = 0.15 * 0.8

Tensors = Mapping[str, Tensor]


def pad(flat: Tensor, offsets: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token rows laid end to end, as a padded batch: int64 [rows, longest] and lengths int64 [rows]."""
    lengths = offsets.diff()
    return pad_sequence(flat.split(lengths.tolist()), batch_first=True, padding_value=pad_id), lengths


def placed(read: Callable[[str], Tensor], names: Iterable[str], device: torch.device, dtype: torch.dtype) -> Tensors:
    """The tensors of these names on the device, one at a time, in `dtype`; rotary frequencies stay float32."""
    return {name: read(name).to(device).to(torch.float32 if name == "inv_freq" else dtype) for name in names}


class Padded:
    """What both encoders do alike. The device and the precision of `tensors` are those of the run."""

    ENDS: ClassVar[int]  # tokens at either end of a row that do not enter its mean
    LIMIT: ClassVar[int]  # tokens that do, at most

    def __init__(self, tensors: Tensors, shape: Esm2Shape | DnabertShape, tokenizer: Tokenizer) -> None:
        self.w, self.shape, self.tokenizer = tensors, shape, tokenizer
        self.device = tensors["embed.weight"].device

    def hidden(self, tokens: Tensor, real: Tensor) -> Tensor:
        """The last layer's output, [rows, longest, width]; it holds no meaning where no `real` token is."""
        raise NotImplementedError

    def embed(self, sequences: list[bytes]) -> Tensor:
        """Mean over each sequence's tokens: float32 [rows, width] on the CPU.

        Each row's mean is taken in the precision of the run and fetched by itself, as the originals do.
        """
        tokens, lengths = pad(*self.tokenizer.encode(sequences), self.tokenizer.pad_id)
        real = torch.arange(tokens.shape[1]) < lengths[:, None]  # [rows, longest]
        out = self.hidden(tokens.to(self.device), real.to(self.device))
        counts = (lengths - 2 * self.ENDS).clamp(max=self.LIMIT).tolist()
        rows = (out[row, self.ENDS : self.ENDS + n] for row, n in enumerate(counts))
        return torch.stack([row.mean(0).float().cpu() for row in rows])

    def _heads(self, p: str, x: Tensor) -> Tensor:
        """Queries, keys and values: [3, rows, heads, longest, head_dim]."""
        rows, longest, width = x.shape
        heads = self.shape.heads
        return self._linear(f"{p}.qkv", x).view(rows, longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4)

    def _mixed(self, p: str, weights: Tensor, values: Tensor) -> Tensor:
        return self._linear(f"{p}.out", (weights @ values).transpose(1, 2).flatten(2))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.shape.norm_eps)


class PaddedEsm2(Padded):
    """ESM-2 over padded batches."""

    ENDS, LIMIT = 1, 1024  # residues alone, and no more of them

    def hidden(self, tokens: Tensor, real: Tensor) -> Tensor:
        """The last layer's output after the final norm."""
        x = F.embedding(tokens, self.w["embed.weight"])
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            x = x * torch.tensor(1 - MASKED_IN_TRAINING).to(x)  # no token is masked here
        x = x * real[..., None]
        # rotary angles [longest, head_dim], computed in float32 whatever they are kept in
        positions = torch.arange(tokens.shape[1], device=self.device, dtype=torch.float32)
        angles = torch.outer(positions, self.w["inv_freq"]).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in range(self.shape.layers):
            p = f"layers.{layer}"
            q, k, v = self._heads(p, self._norm(f"{p}.attn_norm", x))
            scores = _rotated(q * q.shape[-1] ** -0.5, cos, sin) @ _rotated(k, cos, sin).transpose(-1, -2)
            scores = scores.masked_fill(~real[:, None, None, :], -math.inf)
            x = x + self._mixed(p, torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)
            inner = F.gelu(self._linear(f"{p}.fc1", self._norm(f"{p}.ffn_norm", x)))
            x = x + self._linear(f"{p}.fc2", inner)
        return self._norm("final_norm", x)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, rotate-half form; [rows, heads, longest, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PaddedDnabertS(Padded):
    """DNABERT-S over padded batches."""

    ENDS, LIMIT = 0, sys.maxsize  # all tokens, special ones included

    def hidden(self, tokens: Tensor, real: Tensor) -> Tensor:
        """The last layer's output."""
        x = F.embedding(tokens, self.w["embed.weight"]) + self.w["token_type.weight"][0]
        x = self._norm("embed_norm", x)
        # ALiBi: each head's slope times minus the distance, [1, heads, longest, longest]
        slopes = torch.tensor(alibi_slopes(self.shape.heads), device=self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        distance = (positions[:, None] - positions[None, :]).abs()
        bias = (-slopes[:, None, None] * distance)[None].to(self.w["embed.weight"].dtype)
        bias = bias.masked_fill(~real[:, None, None, :], -math.inf)
        for layer in range(self.shape.layers):
            p = f"layers.{layer}"
            q, k, v = self._heads(p, x)
            weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias, dim=-1)
            x = self._norm(f"{p}.attn_norm", self._mixed(p, weights, v) + x)
            activated, gate = F.linear(x, self.w[f"{p}.gated.weight"]).chunk(2, dim=-1)
            x = self._norm(f"{p}.ffn_norm", self._linear(f"{p}.wo", F.gelu(activated) * gate) + x)
        return x


def plain_scores(w: Tensors, features: Tensor, norm_eps: float) -> Tensor:
    """The head: linear, batch norm on stored statistics, ReLU, linear, softmax; float32 [rows, 2] on the CPU.

    P(others) and P(virus) of each row of `features` (float32 [rows, DNA + protein]).
    """
    x = F.linear(features.to(w["bn1.weight"].device), w["hidden_layer.weight"], w["hidden_layer.bias"])
    scale = w["bn1.weight"] / torch.sqrt(w["bn1.running_var"] + norm_eps)
    x = torch.relu((x - w["bn1.running_mean"]) * scale + w["bn1.bias"])
    x = F.linear(x, w["output_layer.weight"], w["output_layer.bias"])
    return torch.softmax(x, dim=-1).cpu()
