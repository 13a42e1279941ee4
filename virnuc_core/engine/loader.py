"""Shards to packed batches, ahead of the device.

Tokenising runs in `num_workers` loader processes (or in the feeder thread itself); packing runs in the feeder thread;
the launch loop only takes finished batches from a bounded queue. CUDA is never touched in a loader process.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch
from virnuc_core.engine.messages import ShardTask
from virnuc_core.engine.packing import BatchPlan, pack, row_capacity
from virnuc_core.errors import ConfigError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import die_with_parent
from virnuc_core.telemetry.tables import Encoder

SLICE_ROWS = 1024  # uniques tokenised in one call


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, ready to launch. `rows` are positions within the shard."""

    encoder: Encoder
    index: int
    packed: PackedBatch
    rows: Tensor  # int64 [batch.rows]
    arrived_s: float


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """All batches of the task have been handed over."""

    protein_tokens: int
    dna_tokens: int


# What the launch loop takes: a task, the task's batches, its end; after the last task None
Item = ShardTask | Batch | ShardEnd | None
Take = Callable[[], tuple[Item, float]]  # the next item, and how long it took to come, in milliseconds
Slice = tuple[int, int]
Tokens = tuple[Tensor, Tensor]  # int64: all tokens end to end, row offsets


def open_store(path: Path, fingerprint: str) -> OrfStore:
    """The store a plan was made for; `ConfigError` when another lies there now."""
    store = OrfStore.open(path)
    if store.fingerprint != fingerprint:
        raise ConfigError(f"{path} is no longer the store this run was started on; run it again")
    return store


class Tokeniser:
    """Ranges of uniques as tokens, from a store opened in whichever process reads."""

    def __init__(self, store: Path, fingerprint: str, models: Path) -> None:
        self._store = open_store(store, fingerprint)
        self.protein, self.dna = Esm2Tokenizer(), DnabertTokenizer(models)

    def __call__(self, span: Slice) -> tuple[Tokens, Tokens]:
        """Protein and DNA tokens of the uniques `[lo, hi)`."""
        return self.protein.encode(self._store.protein(*span)), self.dna.encode(self._store.dna(*span))


_tokeniser: Tokeniser  # of a loader process


def _begin_loading(store: Path, fingerprint: str, models: Path) -> None:
    """A loader process leaves with the worker that started it, and lets it handle Ctrl-C."""
    global _tokeniser
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokeniser = Tokeniser(store, fingerprint, models)


def _tokenise(span: Slice) -> list[NDArray[np.int64]]:
    """In a loader process. Arrays: tensors would travel through shared memory that dies with the process."""
    return [tensor.numpy() for tokens in _tokeniser(span) for tensor in tokens]


class Loader:
    """Turns shard ranges into packed batches, through `num_workers` processes that stay up between shards."""

    def __init__(self, store: Path, fingerprint: str, models: Path, engine: EngineSpec, *, pin: bool) -> None:
        self.engine, self.pin = engine, pin
        self._tokeniser = Tokeniser(store, fingerprint, models)
        self._processes: ProcessPoolExecutor | None = None
        if engine.num_workers:
            self._processes = ProcessPoolExecutor(
                engine.num_workers,
                multiprocessing.get_context("spawn"),
                _begin_loading,
                (store, fingerprint, models),
            )

    def _tokens(self, spans: list[Slice]) -> tuple[Tokens, Tokens]:
        """Protein and DNA tokens of all spans."""
        if self._processes is None:
            parts = [self._tokeniser(span) for span in spans]
        else:
            arrays = (map(torch.from_numpy, part) for part in self._processes.map(_tokenise, spans))
            parts = [((p, p_starts), (d, d_starts)) for p, p_starts, d, d_starts in arrays]
        return join([protein for protein, _ in parts]), join([dna for _, dna in parts])

    def load(self, task: ShardTask) -> Iterator[Item]:
        """The task, its batches, DNA first, and its end."""
        yield task
        kept = np.setdiff1d(np.arange(task.lo, task.hi), np.array(task.skip, dtype=np.int64))
        protein, dna = self._tokens(slices(kept))
        encoders: tuple[tuple[Encoder, Tokens, int, int], ...] = (
            ("dnabert_s", dna, self.engine.dna_token_budget, self._tokeniser.dna.pad_id),
            ("esm2", protein, self.engine.token_budget, self._tokeniser.protein.pad_id),
        )
        for name, tokens, budget, pad_id in encoders:
            for index, (plan, batch) in enumerate(packed(tokens, max(1, budget // task.divisor), pad_id)):
                ready = batch.pin() if self.pin else batch
                rows = torch.from_numpy(kept[plan.rows] - task.lo)
                yield Batch(name, index, ready, rows, time.monotonic())
        yield ShardEnd(int(protein[1][-1]), int(dna[1][-1]))


def slices(kept: NDArray[np.int64]) -> list[Slice]:
    """Runs of consecutive uniques, none longer than `SLICE_ROWS`."""
    if len(kept) == 0:
        return []
    breaks = np.flatnonzero(np.diff(kept) != 1) + 1
    spans = []
    for run in np.split(kept, breaks):
        first, end = int(run[0]), int(run[-1]) + 1
        spans += [(at, min(at + SLICE_ROWS, end)) for at in range(first, end, SLICE_ROWS)]
    return spans


def join(parts: list[Tokens]) -> Tokens:
    """Token runs of consecutive slices as one."""
    offsets = [torch.zeros(1, dtype=torch.int64)]
    total = 0
    for _, starts in parts:
        offsets.append(starts[1:] + total)
        total += int(starts[-1])
    tokens = [tokens for tokens, _ in parts] or [torch.zeros(0, dtype=torch.int64)]
    return torch.cat(tokens), torch.cat(offsets)


def packed(tokens: Tokens, budget: int, pad: int) -> Iterator[tuple[BatchPlan, PackedBatch]]:
    """Pack rows of tokens into batches of fixed shapes."""
    flat, starts = tokens[0].numpy(), tokens[1].numpy()
    lengths = np.diff(starts)
    for plan in pack(lengths, budget):
        yield plan, fill(plan, flat, starts, pad)


def fill(plan: BatchPlan, flat: NDArray[np.int64], starts: NDArray[np.int64], pad: int) -> PackedBatch:
    """Lay the plan's rows end to end in its slots."""
    lengths = (starts[plan.rows + 1] - starts[plan.rows]).astype(np.int64)
    ends = np.cumsum(lengths)
    source = np.repeat(starts[plan.rows] - (ends - lengths), lengths) + np.arange(plan.tokens)
    slots = np.full(plan.slots, pad, dtype=np.int64)
    slots[: plan.tokens] = flat[source]
    cu_seqlens = np.full(row_capacity(plan.slots) + 1, plan.tokens, dtype=np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(ends) + 1] = ends
    return PackedBatch(
        torch.from_numpy(slots), torch.from_numpy(cu_seqlens), len(plan.rows), plan.max_seqlen, plan.tokens
    )


class Feeder:
    """A thread that keeps the launch loop's queue filled with the tasks it is told."""

    def __init__(self, loader: Loader, next_task: Callable[[], ShardTask | None], depth: int) -> None:
        self._loader, self._next = loader, next_task
        self._items: queue.Queue[Item | BaseException] = queue.Queue(maxsize=depth)
        threading.Thread(target=self._run, name="feeder", daemon=True).start()

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                for item in self._loader.load(task):
                    self._items.put(item)
            self._items.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the launch loop, where `take` raises it
            self._items.put(error)

    def take(self) -> tuple[Item, float]:
        """The next item and how long it took to come, in milliseconds. Errors: what loading raised."""
        asked = time.perf_counter()
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item, (time.perf_counter() - asked) * 1e3
