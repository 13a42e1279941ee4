"""Turn shards into packed batches, ahead of the device.

Sequences are tokenised in `num_workers` loader processes (or in the feeder thread itself) and
packed in the feeder thread. The launch loop only takes finished batches from a bounded queue. A
loader process never touches CUDA.

Three rules of packing make a row's numbers independent of its neighbours, with only a handful of
batch shapes. Rows are grouped by the power of two above their length, because the kernel's block
is chosen by that. A group is filled into the largest shape that it can fill, longest rows first.
The rest goes into shapes of a quarter and a sixteenth.
"""

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.registry import ENCODERS, EncoderInfo, EncoderName
from virnuc_core.encoders.tokenize import PackedBatch, Tokenizer
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import ConfigError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import die_with_parent

MAX_OPEN_SOURCES: Final = 8  # runs whose stores a process keeps open
SLICE_ROWS: Final = 1024  # sequences tokenised in one call
SMALLEST_GROUP: Final = 64
SHAPE_DIVISORS: Final = (1, 4, 16)  # of the token budget: the shapes of batches
# A shape is worth launching if less than one part in this many stays empty.
NEARLY_FULL: Final = 16
# Sets the row capacity of a batch; only rows shorter than 6 residues could ask for more.
MIN_TOKENS_PER_ROW: Final = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, ready to launch."""

    encoder: EncoderName
    index: int
    packed: PackedBatch
    rows: Tensor  # int64 [packed.rows], positions within the shard
    arrived_s: float


# What the launch loop takes: a task, its batches, the task again, …, and None after the last.
Item = ShardTask | Batch | None
# Returns the next item, and how long it took to come, in milliseconds.
Take = Callable[[], tuple[Item, float]]
Slice = tuple[int, int]  # the first sequence, and one past the last
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the sequences of a run come from, and what must lie there."""

    store: Path
    fingerprint: str  # of the store that the plan was made for
    models: Path  # for the tokenizers


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open store, and a tokenizer for each encoder."""

    store: OrfStore
    tokenizers: dict[EncoderName, Tokenizer]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of some sequences, end to end."""

    tokens: Ints  # [total]
    starts: Ints  # [rows + 1], where each row starts, and the total

    @property
    def lengths(self) -> Ints:
        """Return the tokens of each row, int64 [rows]."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows a batch holds, in order, in how many token slots."""

    rows: Ints
    slots: int
    max_seqlen: int  # the upper bound of the group's lengths
    tokens: int


@lru_cache(maxsize=MAX_OPEN_SOURCES)
def open_source(source: Source) -> OpenSource:
    """Open the store that a plan was made for, and the tokenizers.

    Raises:
        ConfigError: Another store lies there now.
    """
    store = OrfStore.open(source.store, check=False)  # whoever planned the run has checked it
    if store.fingerprint != source.fingerprint:
        problem = f"{source.store} is no longer the store this run was started on"
        raise ConfigError(f"{problem}; run it again")
    tokenizers = {encoder.name: encoder.open_tokenizer(source.models) for encoder in ENCODERS}
    return OpenSource(store, tokenizers)


def tokenise(source: Source, span: Slice) -> dict[EncoderName, TokenRows]:
    """Tokenise some sequences of a store for each encoder."""
    run_data = open_source(source)
    token_rows = {}
    for encoder in ENCODERS:
        sequences = encoder.sequences(run_data.store, *span)
        tokens, starts = run_data.tokenizers[encoder.name].encode(sequences)
        token_rows[encoder.name] = TokenRows(tokens.numpy(), starts.numpy())
    return token_rows


def slices(positions: Ints) -> list[Slice]:
    """Cut sorted positions into runs of consecutive ones, none longer than `SLICE_ROWS`.

    Returns:
        The first position of each run, and one past its last.
    """
    starts_run = np.diff(positions) != 1
    starts_slice = positions[1:] % SLICE_ROWS == 0
    cuts = np.flatnonzero(starts_run | starts_slice) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts) if len(run)]


def join(parts: Sequence[TokenRows]) -> TokenRows:
    """Join the token rows of consecutive slices."""
    tokens = [np.zeros(0, dtype=np.int64)]  # where there is no part
    lengths = [np.zeros(1, dtype=np.int64)]  # the first row starts at 0
    for part in parts:
        tokens.append(part.tokens)
        lengths.append(part.lengths)
    starts = np.concatenate(lengths).cumsum()
    return TokenRows(np.concatenate(tokens), starts)


def shapes(budget: int, divisors: Sequence[int] = SHAPE_DIVISORS) -> tuple[int, ...]:
    """Return the batch shapes of a token budget in slots, largest first."""
    return tuple(dict.fromkeys(max(1, budget // divisor) for divisor in divisors))


def row_capacity(slots: int) -> int:
    """Return how many rows a batch of so many `slots` can hold."""
    return max(1, slots // MIN_TOKENS_PER_ROW)


def group_bounds(lengths: NDArray[np.integer]) -> Ints:
    """Return the power of two under which each row is grouped, at least `SMALLEST_GROUP`.

    Args:
        lengths: Tokens of each row.
    """
    exponents = np.frexp(lengths - 1)[1].astype(np.int64)
    bounds: Ints = 1 << exponents
    return bounds.clip(SMALLEST_GROUP)


def pack(
    lengths: Sequence[int] | Ints, budget: int, divisors: Sequence[int] = SHAPE_DIVISORS
) -> list[BatchPlan]:
    """Place every row in exactly one batch. The same lengths give the same batches.

    A row longer than the budget gets a batch of its own, of the smallest multiple of the budget
    that holds it.

    Args:
        lengths: Tokens of each row, special tokens included; each at least 1.
        budget: Token slots of the largest batch shape.
        divisors: The batch shapes, as divisors of the budget.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bounds = group_bounds(sizes)
    allowed = shapes(budget, divisors)
    batches: list[BatchPlan] = []
    for bound in np.unique(bounds)[::-1].tolist():
        members = np.flatnonzero(bounds == bound)
        batches += _pack_group(members, sizes, bound, allowed)
    return batches


def _pack_group(members: Ints, sizes: Ints, bound: int, allowed: Sequence[int]) -> list[BatchPlan]:
    """Fill the rows of one group into batches, the longest rows first (first-fit decreasing).

    Rows of one length are taken together, which makes this fast: there are few different lengths.
    """
    distinct, counts = np.unique(sizes[members], return_counts=True)
    by_size = members[np.argsort(sizes[members], kind="stable")]
    groups = np.split(by_size, np.cumsum(counts)[:-1])
    rows_left = dict(zip(distinct.tolist(), groups, strict=True))  # by length
    tokens_left = int((distinct * counts).sum())
    batches = []
    while tokens_left:
        longest = max(length for length, rows in rows_left.items() if len(rows))
        slots = _choose_shape(tokens_left, longest, allowed)
        free_slots = slots
        free_rows = row_capacity(slots)
        chosen_rows = []
        for length in sorted(rows_left, reverse=True):
            n_fitting = min(free_slots // length, free_rows)
            rows = rows_left[length][:n_fitting]
            rows_left[length] = rows_left[length][len(rows) :]
            chosen_rows.append(rows)
            free_slots -= length * len(rows)
            free_rows -= len(rows)
        tokens = slots - free_slots
        tokens_left -= tokens
        batches.append(BatchPlan(np.concatenate(chosen_rows), slots, bound, tokens))
    return batches


def _choose_shape(tokens_left: int, longest: int, allowed: Sequence[int]) -> int:
    """Return the largest shape that the remaining tokens nearly fill, or else the smallest one.

    It is never too small for the longest row.
    """
    fitting = [slots for slots in allowed if longest <= slots]
    if not fitting:
        n_budgets = -(-longest // allowed[0])  # rounded up
        return n_budgets * allowed[0]
    for slots in fitting:
        if tokens_left >= slots - slots // NEARLY_FULL:
            return slots
    return fitting[-1]


def packed(
    token_rows: TokenRows, budget: int, pad: int, divisors: Sequence[int] = SHAPE_DIVISORS
) -> Iterator[tuple[BatchPlan, PackedBatch]]:
    """Yield batches of fixed shapes: each batch's rows end to end in its slots, then `pad`."""
    for plan in pack(token_rows.lengths, budget, divisors):
        row_starts = token_rows.starts[plan.rows]
        lengths = token_rows.starts[plan.rows + 1] - row_starts
        ends = np.cumsum(lengths)  # of each row, in the batch
        shifts = row_starts - (ends - lengths)  # from a place in the batch to one in the tokens
        places = np.repeat(shifts, lengths) + np.arange(plan.tokens)
        slots = np.full(plan.slots, pad, dtype=np.int64)
        slots[: plan.tokens] = token_rows.tokens[places]
        cu_seqlens = np.full(row_capacity(plan.slots) + 1, plan.tokens, dtype=np.int32)
        cu_seqlens[0] = 0
        cu_seqlens[1 : len(ends) + 1] = ends
        batch = PackedBatch(
            torch.from_numpy(slots),
            torch.from_numpy(cu_seqlens),
            rows=len(plan.rows),
            max_seqlen=plan.max_seqlen,
            real_tokens=plan.tokens,
        )
        yield plan, batch


class Loader:
    """Turns shards into packed batches, through `num_workers` processes that stay up."""

    def __init__(self, models: Path, engine: EngineSpec, *, pin: bool) -> None:
        self._models = models
        self._engine = engine
        self._pin = pin
        self._map: Callable[..., Iterable[dict[EncoderName, TokenRows]]] = map
        if engine.num_workers:
            context = multiprocessing.get_context("spawn")
            self._map = ProcessPoolExecutor(engine.num_workers, context, die_with_parent).map

    def load(self, task: ShardTask) -> Iterator[Item]:
        """Yield the task, its batches in the order of the encoders, and the task again."""
        yield task
        source = Source(Path(task.store), task.reads, self._models)
        skipped_rows = np.array(task.skip, dtype=np.int64)
        kept_rows = np.setdiff1d(np.arange(task.lo, task.hi), skipped_rows)
        parts = list(self._map(partial(tokenise, source), slices(kept_rows)))
        positions = kept_rows - task.lo  # of the kept rows within the shard
        for encoder in ENCODERS:
            token_rows = join([part[encoder.name] for part in parts])
            budget = max(1, encoder.token_budget(self._engine) // task.divisor)
            pad = open_source(source).tokenizers[encoder.name].pad_id
            yield from self._batches(encoder, token_rows, positions, budget, pad)
        yield task

    def _batches(
        self, encoder: EncoderInfo, token_rows: TokenRows, positions: Ints, budget: int, pad: int
    ) -> Iterator[Batch]:
        """Yield the batches of one encoder, in page-locked memory if the device is a GPU."""
        for index, (plan, batch) in enumerate(packed(token_rows, budget, pad)):
            ready = batch.pin() if self._pin else batch
            rows = torch.from_numpy(positions[plan.rows])
            yield Batch(encoder.name, index, ready, rows, arrived_s=time.monotonic())

    def feed(self, next_task: Callable[[], ShardTask | None], depth: int) -> Take:
        """Keep a queue of loaded items filled, in a thread.

        Args:
            next_task: Returns the next task; None after the last.
            depth: Items that the queue holds.

        Returns:
            A function that takes the next item from the queue. It raises what loading raised.
        """
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
            asked_s = time.perf_counter()
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            return item, (time.perf_counter() - asked_s) * 1e3

        threading.Thread(target=fill, name="feeder", daemon=True).start()
        return take
