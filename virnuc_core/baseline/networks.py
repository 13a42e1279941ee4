"""The three models once more, as the original programs compute them, to compare the engine with.

Nothing is shared with `virnuc_core.encoders` but tokens, the models' sizes, the names of their
tensors and ALiBi's slopes. The rows of a batch are padded to the longest and masked, and attention
is written out as matrix products.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from virnuc_core.baseline.batches import Batches
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape
from virnuc_core.encoders.positions import alibi_slopes
from virnuc_core.encoders.registry import EncoderName, encoder_named
from virnuc_core.encoders.tokenize import Tokenizer

MASKED_IN_TRAINING: Final = 0.15 * 0.8  # share of the residues of ESM-2

Tensors = Mapping[str, Tensor]


def load_tensors(
    read: Callable[[str], Tensor], names: Iterable[str], device: torch.device, dtype: torch.dtype
) -> Tensors:
    """Load tensors to a device, one at a time.

    Args:
        read: Reads a tensor by its name.
        names: The names.
        device: Where they are put.
        dtype: Their format; rotary frequencies stay float32.
    """
    tensors = {}
    for name in names:
        tensor_dtype = torch.float32 if name == "inv_freq" else dtype
        tensors[name] = read(name).to(device).to(tensor_dtype)
    return tensors


class PaddedEncoder(ABC):
    """What both encoders do alike. Device and precision are those of the tensors."""

    N_END_TOKENS: ClassVar[int]  # tokens at either end of a row that do not enter its mean
    MAX_POOLED: ClassVar[int]  # tokens that do, at most

    def __init__(
        self, tensors: Tensors, shape: Esm2Shape | DnabertShape, tokenizer: Tokenizer
    ) -> None:
        """Take loaded tensors, by our names."""
        self.tensors = tensors
        self.shape = shape
        self.tokenizer = tokenizer
        self.device = tensors["embed.weight"].device

    @abstractmethod
    def hidden(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the last layer's output.

        Args:
            tokens: int64 [rows, longest].
            is_real: Which tokens are no padding, bool [rows, longest].

        Returns:
            [rows, longest, width]; it has no meaning where a token is padding.
        """

    def embed(self, sequences: list[bytes]) -> Tensor:
        """Embed sequences in one batch: the mean over each one's tokens.

        Each mean is taken in the precision of the run and fetched by itself, as the originals do.

        Returns:
            float32 [rows, width] on the CPU.
        """
        all_tokens, offsets = self.tokenizer.encode(sequences)
        lengths = offsets.diff()
        tokens = pad_sequence(
            all_tokens.split(lengths.tolist()),
            batch_first=True,
            padding_value=self.tokenizer.pad_id,
        )
        is_real = torch.arange(tokens.shape[1]) < lengths[:, None]
        hidden_states = self.hidden(tokens.to(self.device), is_real.to(self.device))
        counts = (lengths - 2 * self.N_END_TOKENS).clamp(max=self.MAX_POOLED).tolist()
        means = []
        for row, count in enumerate(counts):
            pooled = hidden_states[row, self.N_END_TOKENS : self.N_END_TOKENS + count]
            means.append(pooled.mean(0).float().cpu())
        return torch.stack(means)

    def _qkv(self, prefix: str, x: Tensor) -> Tensor:
        """Return queries, keys and values, [3, rows, heads, longest, head_dim]."""
        rows, longest, width = x.shape
        heads = self.shape.heads
        qkv = self._linear(f"{prefix}.qkv", x).view(rows, longest, 3, heads, width // heads)
        return qkv.permute(2, 0, 3, 1, 4)

    def _mix(self, prefix: str, weights: Tensor, values: Tensor) -> Tensor:
        """Mix values by attention weights, and apply the output layer: [rows, longest, width]."""
        mixed = (weights @ values).transpose(1, 2).flatten(2)
        return self._linear(f"{prefix}.out", mixed)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.shape.norm_eps)


class PaddedEsm2(PaddedEncoder):
    """ESM-2 over padded batches."""

    N_END_TOKENS = 1  # residues alone are averaged, and no more of them than this:
    MAX_POOLED = 1024

    def hidden(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the last layer's output after the final norm, [rows, longest, width]."""
        x = F.embedding(tokens, self.tensors["embed.weight"])
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            x = x * torch.tensor(1 - MASKED_IN_TRAINING).to(x)  # no token is masked here
        x = x * is_real[..., None]
        # Rotary angles [longest, head_dim] are computed in float32 whatever they are kept in.
        positions = torch.arange(tokens.shape[1], device=self.device, dtype=torch.float32)
        angles = torch.outer(positions, self.tensors["inv_freq"]).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        is_padding = ~is_real[:, None, None, :]
        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}"
            q, k, v = self._qkv(prefix, self._norm(f"{prefix}.attn_norm", x))
            q = _rotate(q * q.shape[-1] ** -0.5, cos, sin)
            k = _rotate(k, cos, sin)
            scores = (q @ k.transpose(-1, -2)).masked_fill(is_padding, -math.inf)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
            x = x + self._mix(prefix, weights, v)
            normed = self._norm(f"{prefix}.ffn_norm", x)
            activated = F.gelu(self._linear(f"{prefix}.fc1", normed))
            x = x + self._linear(f"{prefix}.fc2", activated)
        return self._norm("final_norm", x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in their rotate-half form; `x` is [rows, heads, longest, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PaddedDnabertS(PaddedEncoder):
    """DNABERT-S over padded batches."""

    N_END_TOKENS = 0  # all tokens are averaged, special ones included
    MAX_POOLED = sys.maxsize

    def hidden(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the last layer's output, [rows, longest, width]."""
        table = self.tensors["embed.weight"]
        x = F.embedding(tokens, table) + self.tensors["token_type.weight"][0]
        x = self._norm("embed_norm", x)
        bias = self._alibi_bias(tokens.shape[1]).to(table.dtype)
        bias = bias.masked_fill(~is_real[:, None, None, :], -math.inf)
        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}"
            q, k, v = self._qkv(prefix, x)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
            mixed = self._mix(prefix, torch.softmax(scores, dim=-1), v)
            x = self._norm(f"{prefix}.attn_norm", mixed + x)
            gated = F.linear(x, self.tensors[f"{prefix}.gated.weight"])
            activated, gate = gated.chunk(2, dim=-1)
            unit = self._linear(f"{prefix}.wo", F.gelu(activated) * gate)
            x = self._norm(f"{prefix}.ffn_norm", unit + x)
        return x

    def _alibi_bias(self, longest: int) -> Tensor:
        """Return each head's slope times minus the distance, [1, heads, longest, longest]."""
        slopes = torch.tensor(alibi_slopes(self.shape.heads), device=self.device)
        positions = torch.arange(longest, device=self.device)
        distance = (positions[:, None] - positions[None, :]).abs()
        return (-slopes[:, None, None] * distance)[None]


PADDED_NETWORKS: Final[dict[EncoderName, type[PaddedEncoder]]] = {
    "dnabert_s": PaddedDnabertS,
    "esm2": PaddedEsm2,
}


def load_network(
    models: Path, name: EncoderName, device: torch.device, dtype: torch.dtype
) -> PaddedEncoder:
    """Load an encoder of a models directory.

    Raises:
        WeightsError: It cannot be used.
    """
    encoder = encoder_named(name)
    shape, read_tensor = open_part(models, encoder.shape_type)
    tensors = load_tensors(read_tensor, shape.tensors(), device, dtype)
    return PADDED_NETWORKS[name](tensors, shape, encoder.open_tokenizer(models))


def embed_rows(
    network: PaddedEncoder,
    sequences: list[bytes],
    batches: Batches,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Embed sequences batch by batch.

    Args:
        network: The encoder.
        sequences: The sequences.
        batches: Indexes of the sequences of each batch; each sequence is in one batch.
        on_rows: Called with the number of rows after each batch.

    Returns:
        float32 [rows, width], in the order of the sequences.
    """
    embeddings, order = [], []
    with torch.inference_mode():
        for batch in batches:
            embeddings.append(network.embed([sequences[row] for row in batch]))
            order += batch
            on_rows(len(batch))
    return torch.cat(embeddings)[torch.tensor(order).argsort()]


def plain_scores(tensors: Tensors, features: Tensor, norm_eps: float) -> Tensor:
    """Score joined embeddings with the classifier, its batch norm written out.

    This is the deliberate twin of `encoders.classifier`.

    Args:
        tensors: The classifier's tensors by their names.
        features: float32 [rows, dna_width + protein_width], DNA first.
        norm_eps: Added to the variance of batch norm.

    Returns:
        P(others) and P(virus) of each row, float32 [rows, 2] on the CPU.
    """
    device = tensors["bn1.weight"].device
    x = F.linear(features.to(device), tensors["hidden_layer.weight"], tensors["hidden_layer.bias"])
    scale = tensors["bn1.weight"] / torch.sqrt(tensors["bn1.running_var"] + norm_eps)
    x = torch.relu((x - tensors["bn1.running_mean"]) * scale + tensors["bn1.bias"])
    x = F.linear(x, tensors["output_layer.weight"], tensors["output_layer.bias"])
    return torch.softmax(x, dim=-1).cpu()
