"""Shards to packed batches, ahead of the device.

Tokenising runs in `num_workers` loader processes (or in the feeder thread itself); packing runs in the feeder thread;
the launch loop only takes finished batches from a bounded queue. CUDA is never touched in a loader process.

Three rules of packing make a row's numbers independent of its neighbours, with only a handful of shapes: rows are
grouped by the power of two above their length (the kernel's block is chosen by the row itself), a group is filled into
the largest shape it can fill, longest rows first, and the rest goes into shapes of a quarter and a sixteenth."""

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.tokenize import ESM2_PAD, DnabertTokenizer, Esm2Tokenizer, PackedBatch
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import ConfigError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import die_with_parent
from virnuc_core.telemetry.tables import ENCODERS, Encoder

JOBS_OPEN = 8  # runs whose stores a process keeps open
SLICE_ROWS = 1024  # uniques tokenised in one call
SMALLEST_GROUP = 64
PARTS = (1, 4, 16)  # of a token budget: the shapes of batches
NEARLY = 16  # a shape is worth launching when less than one part in this many stays empty
MIN_TOKENS_PER_ROW = 8  # row capacity of a batch = slots / this; only rows shorter than 6 residues could ask for more


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, ready to launch. `rows` are positions within the shard."""

    encoder: Encoder
    index: int
    packed: PackedBatch
    rows: Tensor  # int64 [batch.rows]
    arrived_s: float


Item = (
    ShardTask | Batch | None
)  # what the launch loop takes: a task, its batches, the task again; after the last None
Take = Callable[
    [], tuple[Item, float]
]  # the next item, and how long it took to come, in milliseconds
Source = tuple[Path, str, Path]  # a store, the fingerprint it must have, a models directory
Slice = tuple[int, int]
Ints = NDArray[np.int64]
Tokens = tuple[Ints, Ints]  # all tokens end to end, row offsets


@lru_cache(maxsize=JOBS_OPEN)
def opened(path: Path, fingerprint: str, models: Path) -> tuple[OrfStore, DnabertTokenizer]:
    """The store a plan was made for, and DNA's tokenizer; `ConfigError` when another store lies there now."""
    store = OrfStore.open(path, check=False)  # whoever planned the run has checked it
    if store.fingerprint != fingerprint:
        raise ConfigError(f"{path} is no longer the store this run was started on; run it again")
    return store, DnabertTokenizer(models)


def tokenise(source: Source, span: Slice) -> tuple[Tokens, Tokens]:
    """Protein and DNA tokens of the uniques `[lo, hi)`."""
    store, dnas = opened(*source)
    protein, dna = Esm2Tokenizer().encode(store.protein(*span)), dnas.encode(store.dna(*span))
    return (protein[0].numpy(), protein[1].numpy()), (dna[0].numpy(), dna[1].numpy())


def slices(kept: Ints) -> list[Slice]:
    """Runs of consecutive uniques, none longer than `SLICE_ROWS`."""
    cuts = np.flatnonzero((np.diff(kept) != 1) | (kept[1:] % SLICE_ROWS == 0)) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(kept, cuts) if len(run)]


def join(parts: Sequence[Tokens]) -> Tokens:
    """Token runs of consecutive slices as one."""
    lengths = [np.diff(starts) for _, starts in parts]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *lengths]).cumsum()
    return np.concatenate([np.zeros(0, dtype=np.int64), *(tokens for tokens, _ in parts)]), starts


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch: which rows, in order, in how many slots."""

    rows: Ints
    slots: int
    max_seqlen: int  # the group's bound
    tokens: int


def shapes(budget: int, parts: Sequence[int] = PARTS) -> tuple[int, ...]:
    """The batch shapes of a token budget, largest first."""
    return tuple(dict.fromkeys(max(1, budget // part) for part in parts))


def row_capacity(slots: int) -> int:
    """Rows a batch of `slots` can hold."""
    return max(1, slots // MIN_TOKENS_PER_ROW)


def group_bounds(lengths: Ints) -> Ints:
    """The power of two each row of `lengths` tokens is grouped under, at least `SMALLEST_GROUP`."""
    bounds: Ints = 1 << np.frexp(lengths - 1)[1].astype(np.int64)
    return bounds.clip(SMALLEST_GROUP)


def pack(
    lengths: Sequence[int] | Ints, budget: int, parts: Sequence[int] = PARTS
) -> list[BatchPlan]:
    """Place every row of `lengths` (tokens, specials included, each ≥ 1) in exactly one batch; the same gives the same.
    A row longer than the budget gets a batch of its own, of the smallest multiple of the budget that holds it."""
    sizes = np.asarray(lengths, dtype=np.int64)
    bounds, batches = group_bounds(sizes), list[BatchPlan]()
    for bound in np.unique(bounds)[::-1].tolist():
        batches += _pack_group(np.flatnonzero(bounds == bound), sizes, bound, shapes(budget, parts))
    return batches


def _pack_group(members: Ints, sizes: Ints, bound: int, allowed: Sequence[int]) -> list[BatchPlan]:
    """Batches of one group: first-fit decreasing, bin by bin, over counts of equal lengths."""
    distinct, counts = np.unique(sizes[members], return_counts=True)
    by_size = members[np.argsort(sizes[members], kind="stable")]
    left = dict(zip(distinct.tolist(), np.split(by_size, np.cumsum(counts)[:-1]), strict=True))
    remaining = int((distinct * counts).sum())
    batches = []
    while remaining:
        slots = _slots(
            remaining, max(length for length, rows in left.items() if len(rows)), allowed
        )
        room, places, chosen = slots, row_capacity(slots), []
        for length in sorted(left, reverse=True):
            rows = left[length][: min(room // length, places)]
            left[length] = left[length][len(rows) :]
            chosen.append(rows)
            room -= length * len(rows)
            places -= len(rows)
        remaining -= slots - room
        batches.append(BatchPlan(np.concatenate(chosen), slots, bound, slots - room))
    return batches


def _slots(remaining: int, longest: int, allowed: Sequence[int]) -> int:
    """The largest shape the remaining tokens nearly fill, or the smallest; never too small for the longest row."""
    fitting = [size for size in allowed if longest <= size]
    if not fitting:
        return -(-longest // allowed[0]) * allowed[0]
    return next((size for size in fitting if remaining >= size - size // NEARLY), fitting[-1])


def packed(
    tokens: Tokens, budget: int, pad: int, parts: Sequence[int] = PARTS
) -> Iterator[tuple[BatchPlan, PackedBatch]]:
    """Rows of tokens in batches of fixed shapes: each batch's rows end to end in its slots, then `pad`."""
    flat, starts = tokens
    for plan in pack(np.diff(starts), budget, parts):
        lengths = starts[plan.rows + 1] - starts[plan.rows]
        ends = np.cumsum(lengths)
        source = np.repeat(starts[plan.rows] - (ends - lengths), lengths) + np.arange(plan.tokens)
        slots = np.full(plan.slots, pad, dtype=np.int64)
        slots[: plan.tokens] = flat[source]
        cu_seqlens = np.full(row_capacity(plan.slots) + 1, plan.tokens, dtype=np.int32)
        cu_seqlens[0] = 0
        cu_seqlens[1 : len(ends) + 1] = ends
        arrays = torch.from_numpy(slots), torch.from_numpy(cu_seqlens)
        yield plan, PackedBatch(*arrays, len(plan.rows), plan.max_seqlen, plan.tokens)


class Loader:
    """Turns shard ranges into packed batches, through `num_workers` processes that stay up between shards."""

    def __init__(self, models: Path, engine: EngineSpec, *, pin: bool) -> None:
        self.engine, self.pin, self._models = engine, pin, models
        self._map: Callable[..., Iterable[tuple[Tokens, Tokens]]] = map
        if engine.num_workers:
            context = multiprocessing.get_context("spawn")
            self._map = ProcessPoolExecutor(engine.num_workers, context, die_with_parent).map

    def load(self, task: ShardTask) -> Iterator[Item]:
        """The task, its batches, DNA first, and the task again."""
        yield task
        source = Path(task.store), task.reads, self._models
        kept = np.setdiff1d(np.arange(task.lo, task.hi), np.array(task.skip, dtype=np.int64))
        parts = list(self._map(partial(tokenise, source), slices(kept)))
        protein, dna = (join([part[which] for part in parts]) for which in (0, 1))
        budgets, pads = (
            (self.engine.dna_token_budget, self.engine.token_budget),
            (opened(*source)[1].pad_id, ESM2_PAD),
        )
        for name, tokens, budget, pad in zip(ENCODERS, (dna, protein), budgets, pads, strict=True):
            for index, (plan, batch) in enumerate(
                packed(tokens, max(1, budget // task.divisor), pad)
            ):
                ready = batch.pin() if self.pin else batch
                yield Batch(
                    name,
                    index,
                    ready,
                    torch.from_numpy(kept[plan.rows] - task.lo),
                    time.monotonic(),
                )
        yield task

    def feed(self, next_task: Callable[[], ShardTask | None], depth: int) -> Take:
        """Keep a queue of `depth` items filled in a thread; what takes from it, and raises what loading raised."""
        items: queue.Queue[Item | BaseException] = queue.Queue(maxsize=depth)

        def fill() -> None:
            try:
                while (task := next_task()) is not None:
                    for item in self.load(task):
                        items.put(item)
                items.put(None)
            except BaseException as error:  # noqa: BLE001 - raised where it is taken
                items.put(error)

        def take() -> tuple[Item, float]:
            asked = time.perf_counter()
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            return item, (time.perf_counter() - asked) * 1e3

        threading.Thread(target=fill, name="feeder", daemon=True).start()
        return take
