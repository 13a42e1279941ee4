"""A second implementation of the encoders and the classifier, as the original programs compute.

The engine's results and speed are compared with it. It shares only these things with
`virnuc_core.encoders`: the tokenizers, the sizes of the models, the names of their tensors, and
ALiBi's slopes. All sequences of a batch are padded to the longest one, the padding is masked, and
attention is written out as matrix products.
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
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.model_config import AnyEncoderShape, Esm2Shape
from virnuc_core.encoders.positions import alibi_slopes
from virnuc_core.encoders.registry import encoder_named
from virnuc_core.encoders.tokenize import Tokenizer

# ESM-2's training replaced this share of the residues by zeros ("token dropout").
MASKED_IN_TRAINING: Final = 0.15 * 0.8

Tensors = Mapping[str, Tensor]  # the tensors of a model by our names


def load_tensors(
    read_tensor: Callable[[str], Tensor],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensors:
    """Load tensors to a device, one after the other, and return them by their names.

    Args:
        read_tensor: Returns a tensor when it is given the tensor's name.
        names: Names of the tensors.
        device: The device.
        dtype: Number format on the device. Rotary frequencies are always float32.
    """
    tensors = {}
    for name in names:
        tensor_dtype = torch.float32 if name == "inv_freq" else dtype
        tensors[name] = read_tensor(name).to(device).to(tensor_dtype)
    return tensors


class PaddedEncoder(ABC):
    """An encoder over padded batches: what all encoders of this module have in common.

    It computes on the device and in the number format of its tensors.
    """

    # Tokens at the start and at the end of a sequence that are left out of its mean
    N_START_TOKENS: ClassVar[int]
    N_END_TOKENS: ClassVar[int]
    MAX_POOLED: ClassVar[int]  # at most so many of the other tokens are averaged

    def __init__(self, tensors: Tensors, shape: AnyEncoderShape, tokenizer: Tokenizer) -> None:
        """Keep the loaded tensors, the sizes and the tokenizer of an encoder.

        Args:
            tensors: The tensors by our names, all on one device.
            shape: Sizes of the encoder.
            tokenizer: Converts sequences to token ids.
        """
        self.tensors = tensors
        self.shape = shape
        self.tokenizer = tokenizer
        self.device = tensors["embed.weight"].device

    @abstractmethod
    def compute_hidden_states(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the output of the last layer for each token.

        Args:
            tokens: Token ids of the sequences, padded to the longest: int64 [rows, longest].
            is_real: False where a token is padding, bool [rows, longest].

        Returns:
            [rows, longest, width]. The values at padding tokens have no meaning.
        """

    def embed(self, sequences: list[bytes]) -> Tensor:
        """Embed sequences in one batch: average the last layer's output over each one's tokens.

        Each mean is computed in the number format of the run, and copied to the CPU by itself. This
        is slow, but it is what the original programs do.

        Args:
            sequences: DNA or proteins, as the encoder takes them.

        Returns:
            float32 [rows, width] on the CPU.
        """
        # Tokenise, and pad all sequences to the longest.
        all_tokens, offsets = self.tokenizer.encode(sequences)  # [all tokens], [rows + 1]
        n_tokens = offsets.diff()  # [rows]
        tokens = pad_sequence(  # [rows, longest]
            all_tokens.split(n_tokens.tolist()),
            batch_first=True,
            padding_value=self.tokenizer.pad_id,
        )
        is_real = torch.arange(tokens.shape[1]) < n_tokens[:, None]  # [rows, longest]
        hidden_states = self.compute_hidden_states(tokens.to(self.device), is_real.to(self.device))

        # Average over the tokens of each sequence, without some at its start and at its end.
        n_left_out = self.N_START_TOKENS + self.N_END_TOKENS
        n_pooled_tokens = (n_tokens - n_left_out).clamp(max=self.MAX_POOLED).tolist()
        means = []
        for row, n_pooled in enumerate(n_pooled_tokens):
            start = self.N_START_TOKENS
            pooled_states = hidden_states[row, start : start + n_pooled]  # [n_pooled, width]
            means.append(pooled_states.mean(0).float().cpu())
        return torch.stack(means)

    def _qkv(self, prefix: str, x: Tensor) -> Tensor:
        """Return the queries, keys and values of a layer.

        Args:
            prefix: Name of the layer, for instance `layers.0`.
            x: Input of the attention, [rows, longest, width].

        Returns:
            [3, rows, heads, longest, head_dim].
        """
        rows, longest, width = x.shape
        heads = self.shape.heads
        qkv = self._linear(f"{prefix}.qkv", x)  # [rows, longest, 3 * width]
        qkv = qkv.view(rows, longest, 3, heads, width // heads)
        return qkv.permute(2, 0, 3, 1, 4)

    def _mix(self, prefix: str, weights: Tensor, values: Tensor) -> Tensor:
        """Return the output of a layer's attention: the weighted values, after the output layer.

        Args:
            prefix: Name of the layer, for instance `layers.0`.
            weights: Attention weights after softmax, [rows, heads, longest, longest].
            values: [rows, heads, longest, head_dim].

        Returns:
            [rows, longest, width].
        """
        weighted_values = weights @ values  # [rows, heads, longest, head_dim]
        heads_side_by_side = weighted_values.transpose(1, 2).flatten(2)  # [rows, longest, width]
        return self._linear(f"{prefix}.out", heads_side_by_side)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """Apply the linear layer with this name to `x`."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Apply the layer norm with this name to `x`."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.shape.norm_eps)


class PaddedEsm2(PaddedEncoder):
    """ESM-2 over padded batches."""

    N_START_TOKENS = 1  # the start and the end token are not averaged
    N_END_TOKENS = 1
    MAX_POOLED = 1024  # VirNucPro averages the first 1,024 residues

    def compute_hidden_states(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the output of the last layer after the final norm.

        Args:
            tokens: Token ids of the sequences, padded to the longest: int64 [rows, longest].
            is_real: False where a token is padding, bool [rows, longest].

        Returns:
            [rows, longest, width].
        """
        # Embed the tokens. `x` is [rows, longest, width] from here to the end.
        x = F.embedding(tokens, self.tensors["embed.weight"])
        if isinstance(self.shape, Esm2Shape) and self.shape.token_dropout:
            # No residue is masked here, so all are scaled down to the mean size that embeddings
            # had in training.
            x = x * torch.tensor(1 - MASKED_IN_TRAINING).to(x)
        x = x * is_real[..., None]

        # Rotary angles are always computed in float32. Both halves of a head have the same ones.
        longest = tokens.shape[1]
        positions = torch.arange(longest, device=self.device, dtype=torch.float32)
        angles_of_half = torch.outer(positions, self.tensors["inv_freq"])
        angles = angles_of_half.repeat(1, 2)  # [longest, head_dim]
        cos = angles.cos().to(x.dtype)
        sin = angles.sin().to(x.dtype)
        is_padding = ~is_real[:, None, None, :]  # [rows, 1, 1, longest], of the keys

        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}"

            # Attention, which is added to the residual stream `x`:
            # softmax((q / sqrt(head_dim)) k^T) v. A padding token gets the weight 0.
            attention_input = self._norm(f"{prefix}.attn_norm", x)
            q, k, v = self._qkv(prefix, attention_input)  # each [rows, heads, longest, head_dim]
            head_dim = q.shape[-1]
            q = _rotate(q * head_dim**-0.5, cos, sin)
            k = _rotate(k, cos, sin)
            scores = q @ k.transpose(-1, -2)  # [rows, heads, longest, longest]
            scores = scores.masked_fill(is_padding, -math.inf)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
            x = x + self._mix(prefix, weights, v)

            # Feed-forward part: two linear layers with a GELU between them
            ffn_input = self._norm(f"{prefix}.ffn_norm", x)
            gelu_outputs = F.gelu(self._linear(f"{prefix}.fc1", ffn_input))
            x = x + self._linear(f"{prefix}.fc2", gelu_outputs)
        return self._norm("final_norm", x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position (rotary positions in their rotate-half form).

    Column i of the first half of a head and column i of its second half, (a, b), are the
    coordinates of a point. It becomes (a cos - b sin, b cos + a sin).

    Args:
        x: Queries or keys, [rows, heads, longest, head_dim].
        cos: Cosine of the angle of each position and column, [longest, head_dim].
        sin: Sine of the same angles.

    Returns:
        [rows, heads, longest, head_dim].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PaddedDnabertS(PaddedEncoder):
    """DNABERT-S over padded batches."""

    N_START_TOKENS = 0  # all tokens are averaged, [CLS] and [SEP] included
    N_END_TOKENS = 0
    MAX_POOLED = sys.maxsize  # no limit

    def compute_hidden_states(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Return the output of the last layer.

        Args:
            tokens: Token ids of the sequences, padded to the longest: int64 [rows, longest].
            is_real: False where a token is padding, bool [rows, longest].

        Returns:
            [rows, longest, width].
        """
        # Embed the tokens; each is of token type 0. `x` is [rows, longest, width] from here on.
        table = self.tensors["embed.weight"]
        x = F.embedding(tokens, table) + self.tensors["token_type.weight"][0]
        x = self._norm("embed_norm", x)

        # The same numbers are added to the attention scores of every layer: ALiBi, and minus
        # infinity for padding.
        is_padding = ~is_real[:, None, None, :]  # [rows, 1, 1, longest], of the keys
        alibi = self._alibi_bias(tokens.shape[1]).to(table.dtype)  # [1, heads, longest, longest]
        bias = alibi.masked_fill(is_padding, -math.inf)  # [rows, heads, longest, longest]

        for layer in range(self.shape.layers):
            prefix = f"layers.{layer}"

            # Attention, softmax(q k^T / sqrt(head_dim) + bias) v, then the norm behind it
            q, k, v = self._qkv(prefix, x)  # each [rows, heads, longest, head_dim]
            head_dim = q.shape[-1]
            products = q @ k.transpose(-1, -2)  # [rows, heads, longest, longest]
            scores = products / math.sqrt(head_dim) + bias
            weights = torch.softmax(scores, dim=-1)  # [rows, heads, longest, longest]
            attention_output = self._mix(prefix, weights, v)
            x = self._norm(f"{prefix}.attn_norm", attention_output + x)

            # Gated unit, then the norm behind it. One half of the inputs gates the other half.
            gated_inputs = F.linear(x, self.tensors[f"{prefix}.gated.weight"])
            gelu_half, other_half = gated_inputs.chunk(2, dim=-1)
            unit_output = self._linear(f"{prefix}.wo", F.gelu(gelu_half) * other_half)
            x = self._norm(f"{prefix}.ffn_norm", unit_output + x)
        return x

    def _alibi_bias(self, longest: int) -> Tensor:
        """Return what ALiBi adds to attention scores: minus the slope times the distance.

        Args:
            longest: Number of positions.

        Returns:
            [1, heads, longest, longest].
        """
        slopes = torch.tensor(alibi_slopes(self.shape.heads), device=self.device)  # [heads]
        positions = torch.arange(longest, device=self.device)
        offsets = positions[:, None] - positions[None, :]  # [longest, longest]
        distances = offsets.abs()
        slope_of_head = slopes[:, None, None]
        bias = -slope_of_head * distances  # [heads, longest, longest]
        return bias[None]


PADDED_NETWORKS: Final[dict[EncoderName, type[PaddedEncoder]]] = {
    "dnabert_s": PaddedDnabertS,
    "esm2": PaddedEsm2,
}


def load_network(
    models: Path, name: EncoderName, device: torch.device, dtype: torch.dtype
) -> PaddedEncoder:
    """Load an encoder of a models directory for padded batches.

    Args:
        models: Models directory.
        name: Name of the encoder in the registry.
        device: Where it computes.
        dtype: Number format in which it computes.

    Raises:
        WeightsError: The encoder cannot be used.
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
    """Embed sequences batch by batch, and return the embeddings in the order of the sequences.

    Args:
        network: The encoder.
        sequences: The sequences.
        batches: The indexes of the sequences of each batch. Each sequence is in exactly one batch.
        on_rows: Called after each batch with the number of its sequences.

    Returns:
        float32 [rows, width], in the order of the sequences.
    """
    embeddings_of_batches = []
    sequence_of_row = []  # the sequence that each row of the joined batches belongs to
    with torch.inference_mode():
        for batch in batches:
            batch_sequences = [sequences[sequence] for sequence in batch]
            embeddings_of_batches.append(network.embed(batch_sequences))
            sequence_of_row += batch
            on_rows(len(batch))
    row_of_sequence = torch.tensor(sequence_of_row).argsort()  # the inverse
    return torch.cat(embeddings_of_batches)[row_of_sequence]


def plain_scores(tensors: Tensors, features: Tensor, norm_eps: float) -> Tensor:
    """Score joined embeddings with the classifier, whose operations are written out here.

    The engine scores with `encoders.classifier`. This second implementation is deliberate: the
    engine's scores are compared with it.

    Args:
        tensors: The classifier's tensors by their names.
        features: Joined embeddings, float32 [rows, dna_width + protein_width], DNA first.
        norm_eps: A small number that is added to the variance in batch norm.

    Returns:
        P(others) and P(virus) of each row, float32 [rows, 2] on the CPU.
    """
    device = tensors["bn1.weight"].device
    outputs = F.linear(  # [rows, hidden], `hidden` being the width of the hidden layer
        features.to(device), tensors["hidden_layer.weight"], tensors["hidden_layer.bias"]
    )

    # Batch norm with the means and variances of the training, then ReLU
    scale = tensors["bn1.weight"] / torch.sqrt(tensors["bn1.running_var"] + norm_eps)
    centred_outputs = outputs - tensors["bn1.running_mean"]
    activations = torch.relu(centred_outputs * scale + tensors["bn1.bias"])

    logits = F.linear(activations, tensors["output_layer.weight"], tensors["output_layer.bias"])
    return torch.softmax(logits, dim=-1).cpu()
