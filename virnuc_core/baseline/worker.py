"""A baseline's worker process: what the two algorithms to beat load, when, and in which batches they feed it.

One device, pinned; files in, embedded, merged and scored files out. Equal rows are embedded each. Messages in: a
WorkerSpec, then any number of FileTasks. Out: Ready, RowsDone, FileDone, Failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from virnuc_core.baseline.files import (
    HEAD_BATCH_ROWS,
    FileDone,
    FileTask,
    Folder,
    RowsDone,
    dna_token_estimate,
    filled_batches,
    merge_file,
    read_fasta,
    sorted_batches,
)
from virnuc_core.baseline.networks import Padded, PaddedDnabertS, PaddedEsm2, PlainHead, pad, placed
from virnuc_core.config import BaselineName
from virnuc_core.encoders.checkpoint import open_dnabert, open_esm2, open_head
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, Tokenizer
from virnuc_core.engine.process import Parent, Ready, WorkerSpec

SAY_ROWS_EVERY_S: Final = 1.0

Batches = list[list[int]]


def one_by_one(lengths: Sequence[int]) -> Batches:
    """A batch for each row."""
    return [[row] for row in range(len(lengths))]


def _estimated(lengths: Sequence[int]) -> Batches:
    return filled_batches([dna_token_estimate(length) for length in lengths])


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of doing it."""

    half_on_cuda: bool  # what the encoders' weights are kept in there
    reload_dnabert_s: bool  # for each file; else once a worker. ESM-2 is loaded for each file by both
    dna_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in bases
    protein_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in residues


ALGORITHMS: Final[dict[BaselineName, Algorithm]] = {
    "vanilla": Algorithm(False, True, dna_batches=one_by_one, protein_batches=sorted_batches),
    "v1": Algorithm(True, False, dna_batches=_estimated, protein_batches=filled_batches),
}


@dataclass(frozen=True, slots=True)
class Reader:
    """An encoder with its tokenizer."""

    network: Padded
    tokenizer: Tokenizer


def load_esm2(models: Path, device: torch.device, dtype: torch.dtype) -> Reader:
    """ESM-2 from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_esm2(models)
    network = PaddedEsm2(placed(tensors.read, shape.tensors(), device, dtype), shape)
    return Reader(network, Esm2Tokenizer())


def load_dnabert_s(models: Path, device: torch.device, dtype: torch.dtype) -> Reader:
    """DNABERT-S from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_dnabert(models)
    network = PaddedDnabertS(placed(tensors.read, shape.tensors(), device, dtype), shape)
    return Reader(network, DnabertTokenizer(models))


def load_head(models: Path, device: torch.device) -> PlainHead:
    """The classifier, float32."""
    shape, tensors = open_head(models)
    return PlainHead(placed(tensors.read, shape.tensors(), device, torch.float32), norm_eps=shape.norm_eps)


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


class FileWorker:
    """Does what the tasks ask for, one after the other; each answer is the rows, and the seconds of loading a model."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        self.parent, self.models = parent, Path(spec.models)
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.dnabert_s: Reader | None = None
        self._progress_s, self._unsaid_rows, self._said_s = time.monotonic(), 0, 0.0
        if self.device.type == "cpu":
            torch.set_num_threads(1)

    def serve(self) -> None:
        """Answer tasks until the process is ended."""
        self.parent.progress = lambda: self._progress_s
        self.parent.send(Ready())
        while isinstance(task := self.parent.receive(), FileTask):
            started = self._progress_s = time.monotonic()
            rows, load_s = self._do(task)
            self._say_rows()
            self._progress_s = time.monotonic()
            compute_s = self._progress_s - started - load_s
            self.parent.send(FileDone(file=task.file, rows=rows, load_s=load_s, compute_s=compute_s))

    def _do(self, task: FileTask) -> tuple[int, float]:
        folder = Folder(Path(task.folder))
        match task.op:
            case "merge":
                return merge_file(folder, task.file), 0.0
            case "predict":
                return self._predict(folder, task.file)
            case "dnabert_s" | "esm2":
                return self._embed(folder, task)

    def _embed(self, folder: Folder, task: FileTask) -> tuple[int, float]:
        algorithm, dna = ALGORITHMS[task.algorithm], task.op == "dnabert_s"
        sequences = read_fasta(folder.path("nucleotide.fa" if dna else "protein.fa", task.file))[1]
        dtype = torch.float16 if algorithm.half_on_cuda and self.device.type == "cuda" else torch.float32
        started = time.monotonic()
        if not dna or algorithm.reload_dnabert_s:
            self.dnabert_s = None  # free the old one first
        reader = self.dnabert_s or (load_dnabert_s if dna else load_esm2)(self.models, self.device, dtype)
        if dna:
            self.dnabert_s = reader
        load_s = time.monotonic() - started
        batches = (algorithm.dna_batches if dna else algorithm.protein_batches)([len(one) for one in sequences])
        embeddings = embed_rows(reader, sequences, batches, self._count_rows)
        np.save(folder.path("dnabert_s.npy" if dna else "esm2.npy", task.file), embeddings.numpy())
        return len(sequences), load_s

    def _predict(self, folder: Folder, file: int) -> tuple[int, float]:
        started = time.monotonic()
        head = load_head(self.models, self.device)
        load_s = time.monotonic() - started
        features = torch.from_numpy(np.load(folder.path("merged.npy", file)))
        np.save(folder.path("scores.npy", file), score_rows(head, features).numpy())
        folder.path("merged.npy", file).unlink()
        return len(features), load_s

    def _count_rows(self, rows: int) -> None:
        self._progress_s = time.monotonic()
        self._unsaid_rows += rows
        if self._progress_s - self._said_s >= SAY_ROWS_EVERY_S:
            self._say_rows()

    def _say_rows(self) -> None:
        if self._unsaid_rows:
            self.parent.send(RowsDone(rows=self._unsaid_rows))
        self._unsaid_rows, self._said_s = 0, time.monotonic()


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Work on files until the parent ends this process."""
    FileWorker(parent, spec).serve()
