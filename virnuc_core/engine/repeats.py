"""Embed rows again in fp16 if their score from int8 is near the threshold.

Rounding to int8 moves scores by a few hundredths. It can change the verdict only of rows whose
score is near the threshold, so these rows are embedded a second time, by a copy of the protein
encoder in fp16. All batches here have the same number of token slots. Therefore the result of a
row depends on its tokens, the weights and the settings, and not on which other rows are near the
threshold, nor on the shards from which the other rows of its batch come.

The rows of one shard do not fill whole batches. So rows wait until rows of later shards fill the
batch, and their shard is committed after that.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.models import NETWORKS
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.engine.loader import (
    SHAPE_DIVISORS,
    Ints,
    Source,
    TokenRows,
    group_bounds,
    open_source,
    packed,
    row_capacity,
)
from virnuc_core.engine.shards import ShardResult, ShardTask

# Scores within this distance of the threshold are near it. These were 1.2 % of the frames on which
# the distance was chosen (docs/results/measurement-diary.md).
NEAR_DISTANCE: Final = 0.05


@dataclass(slots=True, eq=False)
class RepeatedShard:
    """A shard with the results of int8, some rows of which are embedded again in fp16."""

    result: ShardResult  # its values are replaced, row by row
    near_rows: Ints  # positions within the shard of the rows near the threshold
    n_left: int  # of these rows, those that are not embedded again yet


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """A row that is to be embedded again."""

    shard: RepeatedShard
    position: int  # within the shard
    tokens: Ints


class RowQueue:
    """Rows of several shards that wait for a batch.

    A batch holds rows of one group of lengths, because the attention kernel depends on it.
    """

    def __init__(self) -> None:
        """Begin without rows."""
        self._rows_by_group: dict[int, deque[QueuedRow]] = {}  # oldest first

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows_by_group.values())

    def add(self, shard: RepeatedShard, token_rows: TokenRows) -> None:
        """Add the rows near the threshold of a shard.

        Args:
            shard: The shard.
            token_rows: The tokens of these rows, in the order of `shard.near_rows`.
        """
        groups = group_bounds(token_rows.lengths).tolist()
        starts = token_rows.starts.tolist()
        for index, position in enumerate(shard.near_rows.tolist()):
            tokens = token_rows.tokens[starts[index] : starts[index + 1]]
            rows = self._rows_by_group.setdefault(groups[index], deque())
            rows.append(QueuedRow(shard, position, tokens))

    def take_full_batch(self, slots: int) -> list[QueuedRow]:
        """Remove and return the rows of a full batch; no rows if they cannot fill one.

        Args:
            slots: Token slots of a batch.
        """
        for rows in self._rows_by_group.values():
            n_tokens = sum(len(row.tokens) for row in rows)
            if n_tokens >= slots or len(rows) >= row_capacity(slots):
                return _take_fitting(rows, slots)
        return []

    def take_batch_of(self, shard: RepeatedShard, slots: int) -> list[QueuedRow]:
        """Remove and return rows of a shard and as many others as fit into the batch, full or not.

        The rows that have waited longest are taken. So they are of this shard if it is the oldest.

        Args:
            shard: The shard. If none of its rows waits, no rows are returned.
            slots: Token slots of a batch.
        """
        for rows in self._rows_by_group.values():
            if any(row.shard is shard for row in rows):
                return _take_fitting(rows, slots)
        return []


def _take_fitting(rows: deque[QueuedRow], slots: int) -> list[QueuedRow]:
    """Remove and return the rows of one batch: the oldest ones that fit.

    Args:
        rows: The rows, oldest first, at least one. Those that are left keep their order.
        slots: Token slots of the batch. The oldest row is taken even if it is longer.
    """
    taken_rows = [rows.popleft()]
    free_slots = slots - len(taken_rows[0].tokens)
    left_rows = []
    while rows and free_slots > 0 and len(taken_rows) < row_capacity(slots):
        row = rows.popleft()
        if len(row.tokens) <= free_slots:
            taken_rows.append(row)
            free_slots -= len(row.tokens)
        else:
            left_rows.append(row)
    rows.extendleft(reversed(left_rows))
    return taken_rows


class Repeater:
    """A copy of the protein encoder in fp16, which computes rows of finished shards again.

    The thread that commits shards uses it, while the launch loop computes the next shard. On a GPU
    it therefore has its own CUDA stream.
    """

    def __init__(
        self, models: Path, device: torch.device, engine: EngineSpec, longest: int
    ) -> None:
        """Load the weights of the protein encoder to the device.

        Args:
            models: Models directory.
            device: The device.
            engine: Settings of the engine.
            longest: Tokens of the longest row.

        Raises:
            WeightsError: The weights cannot be used.
            DeviceError: The device cannot run fp16.
        """
        self._models = models
        self._device = device
        self._budget = engine.token_budget
        self._longest = longest
        # Only the protein encoder runs in int8, so only its rows are repeated, in fp16.
        network = NETWORKS[PROTEIN_ENCODER.name]
        self.encoder = load_encoder(network, models, device, "fp16", engine.attention)
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # The launch loop fills the device with work for seconds, and a commit waits for this
            # encoder. -1 gives it a higher priority.
            self.stream = torch.cuda.Stream(device, priority=-1)
            # The weights may still be on their way to the device, in the stream that loads them.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._queue = RowQueue()
        # Of the batches for these rows: token slots, and the token that fills the empty ones.
        self._slots = 0
        self._pad = 0

    def slots(self, budget_divisor: int) -> int:
        """Return the number of token slots that each batch of repeated rows has.

        It is the middle one of the three batch sizes of the first pass. The rows near the threshold
        of a shard fill one or a few such batches; with the smallest size there would be four times
        as many launches. A batch always has room for the longest row.

        Args:
            budget_divisor: The token budget is divided by this, on a device with little memory.
        """
        middle_shape = self._budget // budget_divisor // SHAPE_DIVISORS[1]
        return max(self._longest, middle_shape)

    def add(self, result: ShardResult, task: ShardTask) -> RepeatedShard:
        """Queue the rows of a shard whose score is near the threshold.

        Rows that wait already must be of shards with the same `budget_divisor`.

        Args:
            result: The results that int8 gave. They will be changed.
            task: The task of the shard.

        Returns:
            The shard. It is complete when its `n_left` is 0 and `finish` was called for it.
        """
        # A row that was left out has the score NaN, and a comparison with NaN is false.
        distances = np.abs(result.scores[:, 1] - task.threshold)
        near_rows = np.flatnonzero(distances < NEAR_DISTANCE)
        shard = RepeatedShard(result, near_rows, n_left=len(near_rows))
        if len(near_rows) == 0:
            return shard
        slots = self.slots(task.budget_divisor)
        assert slots == self._slots or not self._queue, "batches of two sizes"
        self._slots = slots
        self._queue.add(shard, self._tokenise(task, near_rows))
        return shard

    def embed_full_batch(self) -> bool:
        """Embed a batch of rows again if there are enough rows to fill one.

        Returns:
            Whether there were enough.
        """
        rows = self._queue.take_full_batch(self._slots)
        self._embed(rows)
        return len(rows) > 0

    def embed_batch_of(self, shard: RepeatedShard) -> None:
        """Embed a batch with rows of a shard again, be it full or not.

        Args:
            shard: The oldest shard that has rows in the queue.
        """
        rows = self._queue.take_batch_of(shard, self._slots)
        assert rows, "no row of this shard is in the queue"
        self._embed(rows)

    def finish(self, shard: RepeatedShard, head: Head) -> int:
        """Compute the scores of the rows that were embedded again.

        They are computed from the protein embeddings in fp16 and the DNA embeddings that are there.
        In the result of the shard, they replace the scores from int8.

        Args:
            shard: A shard of which no row waits.
            head: The classifier.

        Returns:
            The number of such rows.
        """
        rows = shard.near_rows
        if len(rows):
            with torch.cuda.stream(self.stream):
                features = torch.from_numpy(shard.result.embeddings[rows]).to(self._device)
                shard.result.scores[rows] = head.scores(features).cpu().numpy()
        return len(rows)

    def _embed(self, rows: list[QueuedRow]) -> None:
        """Embed rows again, and replace the embeddings in the results of their shards.

        Args:
            rows: Rows that fit into one batch. With no rows, nothing is done.
        """
        if not rows:
            return
        tokens = [row.tokens for row in rows]
        starts = np.cumsum([0, *map(len, tokens)])
        token_rows = TokenRows(np.concatenate(tokens), starts)
        # The embeddings of the protein encoder are the last columns.
        own_columns = slice(-self.encoder.width, None)
        with torch.cuda.stream(self.stream):
            # With the divisor 1 alone, all batches have the same number of slots. So the result of
            # a row does not depend on how many rows are near the threshold.
            for plan, batch in packed(token_rows, self._slots, self._pad, divisors=(1,)):
                row_embeddings = self.encoder.embed(batch.to(self._device))[: batch.rows]
                embeddings = row_embeddings.cpu().numpy()
                for index, embedding in zip(plan.rows.tolist(), embeddings, strict=True):
                    row = rows[index]
                    row.shard.result.embeddings[row.position, own_columns] = embedding
                    row.shard.n_left -= 1

    def _tokenise(self, task: ShardTask, positions: Ints) -> TokenRows:
        """Return the tokens of some proteins of a shard, and note the padding token.

        Args:
            task: The task of the shard.
            positions: Positions of the rows within the shard.
        """
        opened = open_source(Source(Path(task.store), task.reads_fingerprint, self._models))
        sequences = []
        for row in (positions + task.lo).tolist():
            # `sequences` returns the proteins of a range of rows, here of a single one.
            sequences += PROTEIN_ENCODER.sequences(opened.store, row, row + 1)
        tokenizer = opened.tokenizers[PROTEIN_ENCODER.name]
        tokens, starts = tokenizer.encode(sequences)
        self._pad = tokenizer.pad_id
        return TokenRows(tokens.numpy(), starts.numpy())
