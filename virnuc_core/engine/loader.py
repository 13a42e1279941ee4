"""Turn the sequences of shards into packed batches, ahead of the device.

A packed batch holds sequences end to end in a fixed number of token slots. Sequences are tokenised
in `num_workers` loader processes, or in the feeder thread if that is 0. The feeder thread packs the
batches and puts them into a queue, from which the launch loop takes them. Loader processes never
use CUDA.

There are only a few batch shapes, and the result of a row must not depend on the other rows of its
batch. So rows are grouped by the power of two above their length, because the attention kernel
chooses its block size by that. Each group is packed into the largest shape that it can fill, the
longest rows first. What is left goes into shapes of a quarter and a sixteenth.
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
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.registry import ENCODERS, EncoderInfo
from virnuc_core.encoders.tokenize import PackedBatch, Tokenizer
from virnuc_core.engine.shards import ShardTask
from virnuc_core.engine.slices import Slice, slices
from virnuc_core.errors import ConfigError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import die_with_parent
from virnuc_core.system_errors import shared_memory_error

# Runs for which a process keeps the store and the tokenizers open.
MAX_OPEN_SOURCES: Final = 8
# Rows with up to this many tokens are in one group.
SMALLEST_GROUP: Final = 64
# The token budget divided by each of these gives the shapes of batches, in token slots.
SHAPE_DIVISORS: Final = (1, 4, 16)
# A shape is used if at most 1/16 of its slots stay empty.
NEARLY_FULL: Final = 16
# A batch may hold (token slots / this) rows. Only proteins of less than 6 residues, which have two
# tokens more, could fill it with more rows.
MIN_TOKENS_PER_ROW: Final = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of tokens for one encoder, ready to launch."""

    encoder: EncoderName
    index: int  # number of the batch among those of its shard and encoder
    packed: PackedBatch
    rows: Tensor  # int64 [packed.rows], positions of the rows within the shard
    arrived_s: float  # when it was complete, `time.monotonic()`


# What the queue holds: for each shard its task, its batches, its task again. None ends the queue.
Item = ShardTask | Batch | None
# A function that returns the next item, and how long it waited for the item in milliseconds.
Take = Callable[[], tuple[Item, float]]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """The store that holds the sequences of a run, and the models whose tokenizers read them."""

    store: Path
    fingerprint: str  # fingerprint of the store for which the plan of the run was made
    models: Path


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open store, and a tokenizer for each encoder."""

    store: OrfStore
    tokenizers: dict[EncoderName, Tokenizer]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of some sequences, end to end in one array."""

    tokens: Ints  # [total]
    starts: Ints  # [rows + 1], position of the first token of each row, then the total

    @property
    def lengths(self) -> Ints:
        """Return how many tokens each row has, int64 [rows]."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows a batch holds, in their order, before the tokens are copied."""

    rows: Ints  # indexes of the rows
    slots: int  # token slots, those that stay empty included
    max_seqlen: int  # upper bound of the lengths of its rows, the same for all rows of a group
    tokens: int  # token slots that are filled


@lru_cache(maxsize=MAX_OPEN_SOURCES)
def open_source(source: Source) -> OpenSource:
    """Open the store of a run and the tokenizers. Later calls return the same objects.

    Only the fingerprint in the store is compared. Its bytes are not checked again.

    Raises:
        ConfigError: The file is not the store for which the run was planned.
    """
    # The process that planned the run has checked every byte of the store already.
    store = OrfStore.open(source.store, check=False)
    if store.fingerprint != source.fingerprint:
        problem = f"{source.store} is no longer the store this run was started on"
        raise ConfigError(f"{problem}; run it again")
    tokenizers = {encoder.name: encoder.open_tokenizer(source.models) for encoder in ENCODERS}
    return OpenSource(store, tokenizers)


def tokenise(source: Source, span: Slice) -> dict[EncoderName, TokenRows]:
    """Return the tokens of a range of sequences of a store, for each encoder.

    Args:
        source: The store and the models.
        span: Index of the first sequence, and the index after the last one.
    """
    opened = open_source(source)
    token_rows = {}
    for encoder in ENCODERS:
        # The DNA sequences for one encoder, and the proteins for the other.
        sequences = encoder.sequences(opened.store, *span)
        tokens, starts = opened.tokenizers[encoder.name].encode(sequences)
        token_rows[encoder.name] = TokenRows(tokens.numpy(), starts.numpy())
    return token_rows


def join(parts: Sequence[TokenRows]) -> TokenRows:
    """Return the rows of several parts as one array of tokens, in the order of the parts."""
    # Without parts there is nothing to concatenate, so the list begins with an empty array.
    tokens = [np.zeros(0, dtype=np.int64)]
    # The first row starts at 0; each further one at the sum of the lengths before it.
    lengths = [np.zeros(1, dtype=np.int64)]
    for part in parts:
        tokens.append(part.tokens)
        lengths.append(part.lengths)
    starts = np.concatenate(lengths).cumsum()
    return TokenRows(np.concatenate(tokens), starts)


def shapes(budget: int, divisors: Sequence[int] = SHAPE_DIVISORS) -> tuple[int, ...]:
    """Return the numbers of token slots that batches may have, largest first, each once.

    Args:
        budget: Token slots of the largest batch.
        divisors: The budget divided by each of these gives a shape.
    """
    sizes = [max(1, budget // divisor) for divisor in divisors]
    # A dict keeps the order and drops repeated sizes, which very small budgets have.
    return tuple(dict.fromkeys(sizes))


def row_capacity(slots: int) -> int:
    """Return how many rows a batch with this number of token slots can hold.

    The number is fixed for each size of batch, so that all its arrays have a fixed shape.
    """
    return max(1, slots // MIN_TOKENS_PER_ROW)


def group_bounds(lengths: NDArray[np.integer]) -> Ints:
    """Return the group of each row: the smallest power of two that is not below its length.

    All rows with up to `SMALLEST_GROUP` tokens are in the group of that name.

    Args:
        lengths: Tokens of each row.
    """
    # The second result of frexp is, for an integer, its number of binary digits, which is the
    # exponent of the next larger power of two. A power of two itself must stay in its own group,
    # hence - 1.
    exponents = np.frexp(lengths - 1)[1].astype(np.int64)
    bounds: Ints = 1 << exponents
    return bounds.clip(SMALLEST_GROUP)


def pack(
    lengths: Sequence[int] | Ints, budget: int, divisors: Sequence[int] = SHAPE_DIVISORS
) -> list[BatchPlan]:
    """Decide which rows each batch holds. The same lengths always give the same batches.

    Rows whose lengths have the same power of two above them form a group, and a batch holds rows of
    one group. Every row is in exactly one batch. A row longer than the budget gets a larger batch,
    with the smallest multiple of the budget that holds it.

    Args:
        lengths: Tokens of each row, special tokens included; each at least 1.
        budget: Token slots of the largest batch shape.
        divisors: The batch shapes, as divisors of the budget.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    bounds = group_bounds(sizes)  # each row's group, named by its largest length
    allowed = shapes(budget, divisors)
    batches: list[BatchPlan] = []
    for bound in np.unique(bounds)[::-1].tolist():  # the longest rows first
        members = np.flatnonzero(bounds == bound)
        batches += _pack_group(members, sizes, bound, allowed)
    return batches


def _pack_group(members: Ints, sizes: Ints, bound: int, allowed: Sequence[int]) -> list[BatchPlan]:
    """Distribute the rows of one group over batches, longest rows first.

    Each batch takes as many of the longest rows as fit, and fills the rest of its slots with
    shorter ones. All rows of one length are handled together. This is fast, because there are only
    a few different lengths.

    Args:
        members: Indexes of the rows of the group.
        sizes: Tokens of every row, also of other groups.
        bound: Upper bound of the lengths in the group.
        allowed: Token slots that a batch may have, largest first.
    """
    distinct_lengths, counts = np.unique(sizes[members], return_counts=True)
    by_length = members[np.argsort(sizes[members], kind="stable")]
    rows_of_length = np.split(by_length, np.cumsum(counts)[:-1])
    # Indexes of the rows that are in no batch yet, by their length.
    rows_left = dict(zip(distinct_lengths.tolist(), rows_of_length, strict=True))
    tokens_left = int((distinct_lengths * counts).sum())
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
    """Return how many token slots the next batch gets.

    It is the largest shape that the remaining tokens nearly fill, or the smallest shape if they
    fill none. A shape that is too short for the longest row is not considered.

    Args:
        tokens_left: Tokens of the rows that are in no batch yet.
        longest: Tokens of the longest of these rows.
        allowed: Token slots that a batch may have, largest first.
    """
    fitting = [slots for slots in allowed if longest <= slots]
    if not fitting:
        n_budgets = -(-longest // allowed[0])  # rounded up
        return n_budgets * allowed[0]
    for slots in fitting:
        max_empty = slots // NEARLY_FULL
        if tokens_left >= slots - max_empty:
            return slots
    return fitting[-1]


def packed(
    token_rows: TokenRows, budget: int, pad: int, divisors: Sequence[int] = SHAPE_DIVISORS
) -> Iterator[tuple[BatchPlan, PackedBatch]]:
    """Pack rows into batches of fixed shapes.

    Args:
        token_rows: The tokens of all rows.
        budget: Token slots of the largest batch.
        pad: Token that fills the slots after the last row of a batch.
        divisors: The batch shapes, as divisors of the budget.

    Yields:
        Which rows a batch holds, and the batch itself: its rows end to end, then `pad` up to the
        fixed number of token slots.
    """
    for plan in pack(token_rows.lengths, budget, divisors):
        row_starts = token_rows.starts[plan.rows]
        lengths = token_rows.starts[plan.rows + 1] - row_starts
        ends = np.cumsum(lengths)  # position after each row's last token, in the batch

        # Copy the tokens of all rows with one indexing operation. For each slot of the batch,
        # `positions` says where its token is in `token_rows.tokens`. Within a row, this differs
        # from the slot's number by a constant, which `shifts` has for each row.
        starts_in_batch = ends - lengths
        shifts = row_starts - starts_in_batch
        positions = np.repeat(shifts, lengths) + np.arange(plan.tokens)
        slots = np.full(plan.slots, pad, dtype=np.int64)
        slots[: plan.tokens] = token_rows.tokens[positions]

        # The cumulative sequence lengths, from which the attention kernel reads where rows begin
        # and end. The array has a fixed length for each shape. Entries after the last row repeat
        # its end, which makes empty rows.
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
    """Turns shards into packed batches. Its `num_workers` processes tokenise the sequences."""

    def __init__(self, models: Path, engine: EngineSpec, *, pin: bool) -> None:
        """Prepare the processes that tokenise. They start with the first shard, and then stay.

        Args:
            models: Models directory, which holds the tokenizers.
            engine: Settings of the engine.
            pin: Put batches into page-locked memory, from which a GPU can copy in the background.

        Raises:
            LimitError: The system gives no semaphores for the processes.
        """
        self._models = models
        self._engine = engine
        self._pin = pin
        # Like Python's `map`, which is used if there are no processes: calls a function for each
        # slice of a shard, and returns the results in order.
        self._map: Callable[..., Iterable[dict[EncoderName, TokenRows]]] = map
        if engine.num_workers:
            context = multiprocessing.get_context("spawn")
            try:
                executor = ProcessPoolExecutor(engine.num_workers, context, die_with_parent)
            except OSError as error:
                raise shared_memory_error(error) from error
            self._map = executor.map

    def load(self, task: ShardTask) -> Iterator[Item]:
        """Yield the task of a shard, its batches encoder by encoder, and the task again.

        The loop that launches batches on the device sees by the task that a shard begins, and by
        its repetition that it ends.
        """
        yield task
        source = Source(Path(task.store), task.reads_fingerprint, self._models)
        skipped_rows = np.array(task.skipped_rows, dtype=np.int64)
        kept_rows = np.setdiff1d(np.arange(task.lo, task.hi), skipped_rows)
        parts = list(self._map(partial(tokenise, source), slices(kept_rows)))
        positions = kept_rows - task.lo  # of the kept rows within the shard
        for encoder in ENCODERS:
            token_rows = join([part[encoder.name] for part in parts])
            # The divisor is above 1 if the device has run out of memory before.
            budget = max(1, encoder.token_budget(self._engine) // task.budget_divisor)
            pad = open_source(source).tokenizers[encoder.name].pad_id
            yield from self._batches(encoder, token_rows, positions, budget, pad)
        yield task

    def _batches(
        self, encoder: EncoderInfo, token_rows: TokenRows, positions: Ints, budget: int, pad: int
    ) -> Iterator[Batch]:
        """Yield the batches of a shard for one encoder.

        Args:
            encoder: The encoder.
            token_rows: The tokens of the shard's rows.
            positions: Position of each of these rows within the shard.
            budget: Token slots of the largest batch.
            pad: Token that fills the slots after the last row.
        """
        for index, (plan, batch) in enumerate(packed(token_rows, budget, pad)):
            # A copy in page-locked memory, if that is wanted.
            ready = batch.pin() if self._pin else batch
            rows = torch.from_numpy(positions[plan.rows])
            yield Batch(encoder.name, index, ready, rows, arrived_s=time.monotonic())

    def feed(self, next_task: Callable[[], ShardTask | None], queue_size: int) -> Take:
        """Start a thread that loads shards and keeps a queue of items filled.

        An item is a task or a packed batch. None is the last one.

        Args:
            next_task: Returns the next task, or None after the last one. It may wait.
            queue_size: Number of items that the queue may hold.

        Returns:
            A function that takes the next item from the queue, and also returns how long it waited.
            If loading raised an error, the function raises the error.
        """
        items: queue.Queue[Item | BaseException] = queue.Queue(maxsize=queue_size)

        def fill() -> None:
            """Put the items of all tasks into the queue, then None. An error is put there, too."""
            try:
                while (task := next_task()) is not None:
                    for item in self.load(task):
                        items.put(item)
                items.put(None)
            except BaseException as error:  # noqa: BLE001 - `take` raises it
                items.put(error)

        def take() -> tuple[Item, float]:
            """Return the next item, and the milliseconds that it took to come.

            If loading has failed, raise that error in the thread that calls this.
            """
            began_s = time.perf_counter()
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            wait_s = time.perf_counter() - began_s
            return item, wait_s * 1e3

        threading.Thread(target=fill, name="feeder", daemon=True).start()
        return take
