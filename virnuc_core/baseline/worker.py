"""A baseline's worker process: what the two algorithms to beat load, when, and in which batches they feed it.

One device, pinned; files in, embedded, merged and scored files out. Equal rows are embedded each. Messages in: a
WorkerSpec, then any number of FileTasks. Out: Ready, RowsDone, FileDone, Failed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.baseline.networks import Padded, PaddedDnabertS, PaddedEsm2, PlainHead, placed
from virnuc_core.config import BaselineName
from virnuc_core.encoders.checkpoint import open_dnabert, open_esm2, open_head
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.engine.process import Message, Parent, Ready, WorkerSpec
from virnuc_core.errors import InputError
from virnuc_core.rundir import storing

SAY_ROWS_EVERY_S: Final = 1.0
HEAD_BATCH_ROWS: Final = 256
FILE_ROWS: Final = 10_000
TOKENS_PER_BATCH: Final = 2_048

Batches = list[list[int]]
Operation = Literal["dnabert_s", "esm2", "merge", "predict"]


class FileTask(Message):
    """A file for the baseline's worker."""

    op: Operation
    algorithm: BaselineName
    folder: str
    file: int  # its number in the folder


class RowsDone(Message):
    """Rows the baseline's worker embedded since it last said so."""

    rows: int


class FileDone(Message):
    """One operation on one file."""

    file: int
    rows: int
    load_s: float  # getting the model ready
    compute_s: float  # the rest


def file_path(folder: Path, kind: str, number: int) -> Path:
    """Where an intermediate file lies."""
    return folder / f"{number:05d}_{kind}"


def write_fasta(path: Path, ids: Sequence[str], sequences: Sequence[bytes]) -> None:
    """Write rows as FASTA, one line each."""
    heads = [f">{name}\n".encode() for name in ids]
    with storing(path):
        path.write_bytes(b"".join(head + line + b"\n" for head, line in zip(heads, sequences, strict=True)))


def save(path: Path, array: NDArray[np.float32]) -> None:
    """Write an array; numpy alone would not say why a disk refuses. Errors: `StorageError`."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    with storing(path):
        path.write_bytes(buffer.getbuffer())


def read_fasta(path: Path) -> tuple[list[str], list[bytes]]:
    """The ids and sequences that `write_fasta` wrote."""
    lines = path.read_bytes().split(b"\n")
    return [head[1:].decode() for head in lines[:-1:2]], lines[1::2]


def sorted_batches(lengths: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Vanilla ESM-2 batches: shortest first, each as wide as its longest row plus one token, within the budget.

    >>> sorted_batches([1000, 10, 1040])
    [[1, 0], [2]]
    """
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _batches(rows, lambda batch: (max(lengths[row] for row in batch) + 1) * len(batch), budget)


def filled_batches(sizes: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Batches of v1.0: file order, each closed before its sizes add up to more than the budget.

    >>> filled_batches([1000, 1000, 100, 3000])
    [[0, 1], [2], [3]]
    """
    return _batches(range(len(sizes)), lambda batch: sum(sizes[row] for row in batch), budget)


def _batches(rows: Iterable[int], cost: Callable[[list[int]], int], budget: int) -> Batches:
    """Rows in order, each batch closed before it costs more than the budget."""
    batches: Batches = []
    for row in rows:
        if batches and cost([*batches[-1], row]) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def assign(sizes: Sequence[float], devices: int) -> list[list[int]]:
    """Files to devices: the largest first, each to the device that has least; files by index, in the order given out.

    >>> assign([5, 9, 4, 1], 2)
    [[1, 3], [0, 2]]
    """
    loads = [0.0] * devices
    plan: list[list[int]] = [[] for _ in range(devices)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        device = loads.index(min(loads))
        plan[device].append(index)
        loads[device] += sizes[index]
    return plan


def cut(rows: int, file_rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows of each file."""
    for low in range(0, rows, file_rows):
        yield low, min(low + file_rows, rows)


def one_by_one(lengths: Sequence[int]) -> Batches:
    """A batch for each row."""
    return [[row] for row in range(len(lengths))]


def estimated_batches(lengths: Sequence[int]) -> Batches:
    """Batches of v1.0 for rows of so many bases, by its guess at their DNABERT-S tokens."""
    return filled_batches([length // 6 + 2 for length in lengths])


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of doing it."""

    half_on_cuda: bool  # what the encoders' weights are kept in there
    reload_dnabert_s: bool  # for each file; else once a worker. ESM-2 is loaded for each file by both
    dna_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in bases
    protein_batches: Callable[[Sequence[int]], Batches]  # from the rows' lengths in residues


ALGORITHMS: Final[dict[BaselineName, Algorithm]] = {
    "vanilla": Algorithm(False, True, dna_batches=one_by_one, protein_batches=sorted_batches),
    "v1": Algorithm(True, False, dna_batches=estimated_batches, protein_batches=filled_batches),
}


def load_esm2(models: Path, device: torch.device, dtype: torch.dtype) -> PaddedEsm2:
    """ESM-2 from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_esm2(models)
    return PaddedEsm2(placed(tensors.read, shape.tensors(), device, dtype), shape, Esm2Tokenizer())


def load_dnabert_s(models: Path, device: torch.device, dtype: torch.dtype) -> PaddedDnabertS:
    """DNABERT-S from a models directory; `WeightsError` when it cannot be used."""
    shape, tensors = open_dnabert(models)
    return PaddedDnabertS(placed(tensors.read, shape.tensors(), device, dtype), shape, DnabertTokenizer(models))


def load_head(models: Path, device: torch.device) -> PlainHead:
    """The classifier, float32."""
    shape, tensors = open_head(models)
    return PlainHead(placed(tensors.read, shape.tensors(), device, torch.float32), norm_eps=shape.norm_eps)


def embed_rows(
    network: Padded, sequences: list[bytes], batches: Batches, on_rows: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Embeddings of `sequences`, float32 [rows, width], in their own order whatever the order of the batches.

    `on_rows` hears how many rows each batch added.
    """
    parts = []
    with torch.inference_mode():
        for batch in batches:
            parts.append(network.embed([sequences[row] for row in batch]))
            on_rows(len(batch))
    joined = torch.cat(parts)
    out = torch.full_like(joined, torch.nan)
    out[torch.tensor([row for batch in batches for row in batch])] = joined
    return out


def merge_file(folder: Path, number: int) -> int:
    """Join the two embeddings of each row of a file, DNA first, in place of the two; returns the rows.

    Errors: `InputError` when the two files do not hold the same rows in the same order.
    """
    nucleotide, protein = file_path(folder, "nucleotide.fa", number), file_path(folder, "protein.fa", number)
    parts = file_path(folder, "dnabert_s.npy", number), file_path(folder, "esm2.npy", number)
    names, others = read_fasta(nucleotide)[0], read_fasta(protein)[0]
    arrays = [np.load(part) for part in parts]
    if names != others or any(len(array) != len(names) for array in arrays):
        raise InputError("the nucleotide and the protein file hold different rows", file=nucleotide)
    save(file_path(folder, "merged.npy", number), np.concatenate(arrays, axis=1))
    for part in parts:
        part.unlink()
    return len(names)


class FileWorker:
    """Does what the tasks ask for, one after the other; each answer is the rows, and the seconds of loading a model."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        self.parent, self.models = parent, Path(spec.models)
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.dnabert_s: Padded | None = None
        self._progress_s, self._unsaid_rows, self._said_s = time.monotonic(), 0, 0.0
        if self.device.type == "cpu":
            torch.set_num_threads(1)

    def serve(self) -> None:
        """Answer tasks until the process is ended."""
        self.parent.progress = lambda: self._progress_s
        self.parent.send(Ready())
        while isinstance(task := self.parent.receive(), FileTask):
            started = self._progress_s = time.monotonic()
            match task.op:
                case "merge":
                    rows, load_s = merge_file(Path(task.folder), task.file), 0.0
                case "predict":
                    rows, load_s = self._predict(Path(task.folder), task.file)
                case "dnabert_s" | "esm2":
                    rows, load_s = self._embed(Path(task.folder), task)
            self._progress_s = time.monotonic()
            compute_s = self._progress_s - started - load_s
            self.parent.send(FileDone(file=task.file, rows=rows, load_s=load_s, compute_s=compute_s))

    def _embed(self, folder: Path, task: FileTask) -> tuple[int, float]:
        algorithm, dna = ALGORITHMS[task.algorithm], task.op == "dnabert_s"
        sequences = read_fasta(file_path(folder, "nucleotide.fa" if dna else "protein.fa", task.file))[1]
        dtype = torch.float16 if algorithm.half_on_cuda and self.device.type == "cuda" else torch.float32
        started = time.monotonic()
        if not dna or algorithm.reload_dnabert_s:
            self.dnabert_s = None  # free the old one first
        network = self.dnabert_s or (load_dnabert_s if dna else load_esm2)(self.models, self.device, dtype)
        if dna:
            self.dnabert_s = network
        load_s = time.monotonic() - started
        batches = (algorithm.dna_batches if dna else algorithm.protein_batches)([len(one) for one in sequences])
        embeddings = embed_rows(network, sequences, batches, self._count_rows)
        save(file_path(folder, "dnabert_s.npy" if dna else "esm2.npy", task.file), embeddings.numpy())
        self._count_rows(0, last=True)
        return len(sequences), load_s

    def _count_rows(self, rows: int, *, last: bool = False) -> None:
        """Say now and then, and at the end of a file, how many rows came through an encoder."""
        self._progress_s = time.monotonic()
        self._unsaid_rows += rows
        if last or self._progress_s - self._said_s >= SAY_ROWS_EVERY_S:
            self.parent.send(RowsDone(rows=self._unsaid_rows))
            self._unsaid_rows, self._said_s = 0, self._progress_s

    def _predict(self, folder: Path, file: int) -> tuple[int, float]:
        started = time.monotonic()
        head = load_head(self.models, self.device)
        load_s = time.monotonic() - started
        merged = file_path(folder, "merged.npy", file)
        features = torch.from_numpy(np.load(merged))
        with torch.inference_mode():
            scores = torch.cat([head.scores(batch) for batch in features.split(HEAD_BATCH_ROWS)])
        save(file_path(folder, "scores.npy", file), scores.numpy())
        merged.unlink()
        return len(features), load_s


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Work on files until the parent ends this process."""
    FileWorker(parent, spec).serve()
