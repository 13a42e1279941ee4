"""A baseline's worker process: the three models once more, when the algorithms to beat load them, and their batches.

The packed encoders are held against these: nothing is shared with `virnuc_core.encoders` but tokens, the models' sizes,
the names of their tensors and ALiBi's slopes. Rows of a batch are padded to the longest and masked; attention is
written out as matrix products. One device, pinned; files in, embedded, merged and scored files out. Equal rows are
embedded each. Messages in: a WorkerSpec, then any number of FileTasks. Out: Ready, RowsDone, FileDone, Failed."""

import io
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from virnuc_core.config import BaselineName
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape
from virnuc_core.encoders.positions import alibi_slopes
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, Tokenizer
from virnuc_core.engine.process import Message, Parent, Ready, WorkerSpec
from virnuc_core.rundir import storage_errors

SAY_ROWS_EVERY_S: Final = 1.0
HEAD_BATCH_ROWS: Final = 256
FILE_ROWS: Final = 10_000
TOKENS_PER_BATCH: Final = 2_048
MASKED_IN_TRAINING: Final = 0.15 * 0.8

Batches = list[list[int]]
Tensors = Mapping[str, Tensor]
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

    load_s: float  # getting the model ready
    compute_s: float  # the rest


def file_path(folder: Path, kind: str, number: int) -> Path:
    """Where an intermediate file lies."""
    return folder / f"{number:05d}_{kind}"


def write_fasta(path: Path, ids: Sequence[str], sequences: Sequence[bytes]) -> None:
    """Write rows as FASTA, one line each."""
    rows = zip(ids, sequences, strict=True)
    with storage_errors(path):
        path.write_bytes(b"".join(b">%s\n%s\n" % (name.encode(), line) for name, line in rows))


def save(path: Path, array: NDArray[np.float32]) -> None:
    """Write an array; numpy alone would not say why a disk refuses. Errors: `StorageError`."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    with storage_errors(path):
        path.write_bytes(buffer.getbuffer())


def sorted_batches(lengths: Sequence[int], budget: int = TOKENS_PER_BATCH) -> Batches:
    """Vanilla ESM-2 batches: shortest first, each as wide as its longest row plus one token, within the budget.

    >>> sorted_batches([1000, 10, 1040])
    [[1, 0], [2]]
    """
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    return _batches(
        rows, lambda batch: (max(lengths[row] for row in batch) + 1) * len(batch), budget
    )


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


def cut(rows: int, file_rows: int) -> list[tuple[int, int]]:
    """The ranges of rows of each file."""
    return [(low, min(low + file_rows, rows)) for low in range(0, rows, file_rows)]


# how each method batches rows of these lengths, in bases and in residues; v1.0 guesses at the tokens of DNABERT-S
BATCHES: Final[dict[tuple[BaselineName, Operation], Callable[[Sequence[int]], Batches]]] = {
    ("vanilla", "dnabert_s"): lambda lengths: [[row] for row in range(len(lengths))],
    ("vanilla", "esm2"): sorted_batches,
    ("v1", "dnabert_s"): lambda lengths: filled_batches([length // 6 + 2 for length in lengths]),
    ("v1", "esm2"): filled_batches,
}


def placed(
    read: Callable[[str], Tensor], names: Iterable[str], device: torch.device, dtype: torch.dtype
) -> Tensors:
    """The tensors of these names on the device, one at a time, in `dtype`; rotary frequencies stay float32."""
    return {
        name: read(name).to(device).to(torch.float32 if name == "inv_freq" else dtype)
        for name in names
    }


class Padded(ABC):
    """What both encoders do alike. The device and the precision of `tensors` are those of the run."""

    ENDS: ClassVar[int]  # tokens at either end of a row that do not enter its mean
    LIMIT: ClassVar[int]  # tokens that do, at most

    def __init__(
        self, tensors: Tensors, shape: Esm2Shape | DnabertShape, tokenizer: Tokenizer
    ) -> None:
        self.w, self.shape, self.tokenizer = tensors, shape, tokenizer
        self.device = tensors["embed.weight"].device

    @abstractmethod
    def hidden(self, tokens: Tensor, real: Tensor) -> Tensor:
        """The last layer's output, [rows, longest, width]; it holds no meaning where no `real` token is."""

    def embed(self, sequences: list[bytes]) -> Tensor:
        """Mean over each sequence's tokens: float32 [rows, width] on the CPU. Each row's is taken in the precision of
        the run and fetched by itself, as the originals do."""
        flat, offsets = self.tokenizer.encode(sequences)
        lengths = offsets.diff()
        tokens = pad_sequence(
            flat.split(lengths.tolist()), batch_first=True, padding_value=self.tokenizer.pad_id
        )
        real = torch.arange(tokens.shape[1]) < lengths[:, None]  # [rows, longest]
        out = self.hidden(tokens.to(self.device), real.to(self.device))
        counts = (lengths - 2 * self.ENDS).clamp(max=self.LIMIT).tolist()
        rows = (out[row, self.ENDS : self.ENDS + n] for row, n in enumerate(counts))
        return torch.stack([row.mean(0).float().cpu() for row in rows])

    def _heads(self, p: str, x: Tensor) -> Tensor:
        """Queries, keys and values: [3, rows, heads, longest, head_dim]."""
        rows, longest, width = x.shape
        heads = self.shape.heads
        return (
            self._linear(f"{p}.qkv", x)
            .view(rows, longest, 3, heads, width // heads)
            .permute(2, 0, 3, 1, 4)
        )

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
            scores = _rotated(q * q.shape[-1] ** -0.5, cos, sin) @ _rotated(k, cos, sin).transpose(
                -1, -2
            )
            scores = scores.masked_fill(~real[:, None, None, :], -math.inf)
            x = x + self._mixed(
                p, torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v
            )
            x = x + self._linear(
                f"{p}.fc2", F.gelu(self._linear(f"{p}.fc1", self._norm(f"{p}.ffn_norm", x)))
            )
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
    """The head: linear, batch norm on stored statistics, ReLU, linear, softmax: P(others) and P(virus) of each row of
    `features` (float32 [rows, DNA + protein]), as float32 [rows, 2] on the CPU."""
    x = F.linear(
        features.to(w["bn1.weight"].device), w["hidden_layer.weight"], w["hidden_layer.bias"]
    )
    scale = w["bn1.weight"] / torch.sqrt(w["bn1.running_var"] + norm_eps)
    x = torch.relu((x - w["bn1.running_mean"]) * scale + w["bn1.bias"])
    x = F.linear(x, w["output_layer.weight"], w["output_layer.bias"])
    return torch.softmax(x, dim=-1).cpu()


def load(models: Path, which: Operation, device: torch.device, dtype: torch.dtype) -> Padded:
    """The encoder `which` of a models directory; `WeightsError` when it cannot be used."""
    if which == "dnabert_s":
        dna, read = open_part(models, DnabertShape)
        return PaddedDnabertS(
            placed(read, dna.tensors(), device, dtype), dna, DnabertTokenizer(models)
        )
    shape, read = open_part(models, Esm2Shape)
    return PaddedEsm2(placed(read, shape.tensors(), device, dtype), shape, Esm2Tokenizer())


def embed_rows(
    network: Padded,
    sequences: list[bytes],
    batches: Batches,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Embeddings of `sequences`, float32 [rows, width], in their own order; `on_rows` hears of each batch's rows."""
    parts = []
    with torch.inference_mode():
        for batch in batches:
            parts.append(network.embed([sequences[row] for row in batch]))
            on_rows(len(batch))
    return torch.cat(parts)[torch.tensor([row for batch in batches for row in batch]).argsort()]


def merge_file(folder: Path, number: int) -> None:
    """Join both embeddings of each row of a file, DNA first, in their place. Errors: `ValueError` for unequal rows."""
    parts = file_path(folder, "dnabert_s.npy", number), file_path(folder, "esm2.npy", number)
    save(
        file_path(folder, "merged.npy", number),
        np.concatenate([np.load(part) for part in parts], axis=1),
    )
    for part in parts:
        part.unlink()


class FileWorker:
    """Does one task after the other; what does it returns the seconds of loading a model."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        self.parent, self.models = parent, Path(spec.models)
        self.device = torch.device("cuda:0" if spec.device.kind == "cuda" else "cpu")
        self.dnabert_s: Padded | None = None
        self.progress_s, self._unsaid_rows, self._said_s = time.monotonic(), 0, 0.0

    def embed(self, folder: Path, task: FileTask) -> float:
        """The embeddings of a file of sequences."""
        v1, dna = task.algorithm == "v1", task.op == "dnabert_s"
        rows = file_path(folder, "nucleotide.fa" if dna else "protein.fa", task.file)
        sequences = rows.read_bytes().split(b"\n")[1::2]
        dtype = torch.float16 if v1 and self.device.type == "cuda" else torch.float32
        started = time.monotonic()
        if not (dna and v1):  # v1 alone keeps DNABERT-S; ESM-2 is loaded for each file by both
            self.dnabert_s = None  # free the old one first
        network = self.dnabert_s or load(self.models, task.op, self.device, dtype)
        if dna:
            self.dnabert_s = network
        load_s = time.monotonic() - started
        batches = BATCHES[task.algorithm, task.op]([len(one) for one in sequences])
        embeddings = embed_rows(network, sequences, batches, self._count_rows)
        save(
            file_path(folder, "dnabert_s.npy" if dna else "esm2.npy", task.file), embeddings.numpy()
        )
        self._count_rows(0, last=True)
        return load_s

    def _count_rows(self, rows: int, *, last: bool = False) -> None:
        """Say now and then, and at the end of a file, how many rows came through an encoder."""
        self.progress_s = time.monotonic()
        self._unsaid_rows += rows
        if last or self.progress_s - self._said_s >= SAY_ROWS_EVERY_S:
            self.parent.send(RowsDone(rows=self._unsaid_rows))
            self._unsaid_rows, self._said_s = 0, self.progress_s

    def predict(self, folder: Path, task: FileTask) -> float:
        """The scores of a file of merged embeddings."""
        started = time.monotonic()
        shape, read = open_part(self.models, HeadShape)
        weights = placed(read, shape.tensors(), self.device, torch.float32)
        load_s = time.monotonic() - started
        merged = file_path(folder, "merged.npy", task.file)
        features = torch.from_numpy(np.load(merged))
        with torch.inference_mode():
            parts = [
                plain_scores(weights, part, shape.norm_eps)
                for part in features.split(HEAD_BATCH_ROWS)
            ]
        save(file_path(folder, "scores.npy", task.file), torch.cat(parts).numpy())
        merged.unlink()
        return load_s


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Work on files until the parent ends this process."""
    worker = FileWorker(parent, spec)
    parent.progress = lambda: worker.progress_s
    parent.send(Ready())
    while isinstance(task := parent.receive(), FileTask):
        started, load_s, folder = time.monotonic(), 0.0, Path(task.folder)
        worker.progress_s = started
        if task.op == "merge":
            merge_file(folder, task.file)
        else:
            load_s = (
                worker.predict(folder, task) if task.op == "predict" else worker.embed(folder, task)
            )
        worker.progress_s = time.monotonic()
        parent.send(FileDone(load_s=load_s, compute_s=worker.progress_s - started - load_s))
