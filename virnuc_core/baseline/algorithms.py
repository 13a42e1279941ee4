"""The two algorithms to beat: what they load, when, and in which batches they feed it. Equal rows are embedded each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from virnuc_core.baseline.files import HEAD_BATCH_ROWS, dna_token_estimate, filled_batches, sorted_batches
from virnuc_core.baseline.networks import PaddedDnabertS, PaddedEsm2, PlainHead, Sizes, pad, placed
from virnuc_core.config import BaselineName
from virnuc_core.encoders.checkpoint import open_dnabert, open_esm2, open_head
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, Tokenizer

Batches = list[list[int]]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of doing it."""

    name: BaselineName
    half_on_cuda: bool
    one_device: bool
    reload_dnabert_s: bool  # for each file; else once a worker. ESM-2 is loaded for each file by both
    dna_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in bases
    protein_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in residues

    def precision(self, device: torch.device) -> torch.dtype:
        """What the encoders' weights are kept in."""
        return torch.float16 if self.half_on_cuda and device.type == "cuda" else torch.float32


def one_by_one(lengths: Sequence[int]) -> Batches:
    """A batch for each row."""
    return [[row] for row in range(len(lengths))]


def _estimated(lengths: Sequence[int]) -> Batches:
    return filled_batches([dna_token_estimate(length) for length in lengths])


VANILLA: Final = Algorithm(
    "vanilla",
    half_on_cuda=False,
    one_device=True,
    reload_dnabert_s=True,
    dna_batches=one_by_one,
    protein_batches=sorted_batches,
)
V1: Final = Algorithm(
    "v1",
    half_on_cuda=True,
    one_device=False,
    reload_dnabert_s=False,
    dna_batches=_estimated,
    protein_batches=filled_batches,
)
ALGORITHMS: Final = {algorithm.name: algorithm for algorithm in (VANILLA, V1)}


class Network(Protocol):
    """A padded encoder."""

    def embed(self, tokens: Tensor, lengths: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """An encoder with its tokenizer."""

    network: Network
    tokenizer: Tokenizer


def load_esm2(models: Path, device: torch.device, dtype: torch.dtype) -> Reader:
    """ESM-2 from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_esm2(models)
    sizes = Sizes(shape.layers, shape.heads, shape.norm_eps)
    network = PaddedEsm2(placed(tensors, device, dtype), sizes, token_dropout=shape.token_dropout)
    return Reader(network, Esm2Tokenizer())


def load_dnabert_s(models: Path, device: torch.device, dtype: torch.dtype) -> Reader:
    """DNABERT-S from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_dnabert(models)
    network = PaddedDnabertS(placed(tensors, device, dtype), Sizes(shape.layers, shape.heads, shape.norm_eps))
    return Reader(network, DnabertTokenizer(models))


def load_head(models: Path, device: torch.device) -> PlainHead:
    """The classifier, float32."""
    shape, tensors = open_head(models)
    return PlainHead(placed(tensors, device, torch.float32), norm_eps=shape.norm_eps)


def embed_rows(
    reader: Reader, sequences: list[bytes], batches: Batches, on_rows: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Embeddings of `sequences`, float32 [rows, width], in their own order whatever the order of the batches.

    `on_rows` hears how many rows each batch added.
    """
    parts = []
    with torch.inference_mode():
        for batch in batches:
            flat, offsets = reader.tokenizer.encode([sequences[row] for row in batch])
            parts.append(reader.network.embed(*pad(flat, offsets, reader.tokenizer.pad_id)))
            on_rows(len(batch))
    order = torch.tensor([row for batch in batches for row in batch])
    joined = torch.cat(parts)
    out = torch.full_like(joined, torch.nan)
    out[order] = joined
    return out


def score_rows(head: PlainHead, features: Tensor) -> Tensor:
    """Scores of merged features, float32 [rows, 2], in batches of 256 as the originals."""
    with torch.inference_mode():
        return torch.cat([head.scores(batch) for batch in features.split(HEAD_BATCH_ROWS)])
