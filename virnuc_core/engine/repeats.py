"""Embed rows again in fp16 if their score from int8 is near the threshold.

Rounding to int8 moves scores by a few hundredths. It can change the verdict only of rows whose
score is near the threshold, so these rows are embedded a second time, by a copy of the protein
encoder in fp16. All batches here have the same number of token slots. Therefore the result of a
row depends on its tokens, the weights and the settings, and not on which other rows are near the
threshold.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.models import NETWORKS
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.engine.loader import (
    SHAPE_DIVISORS,
    Source,
    TokenRows,
    open_source,
    packed,
)
from virnuc_core.engine.shards import ShardResult, ShardTask

# Scores within this distance of the threshold are near it. These were 1.2 % of the frames on which
# the distance was chosen (docs/results/measurement-diary.md).
NEAR_DISTANCE: Final = 0.05


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

    def repeat(self, result: ShardResult, task: ShardTask, head: Head) -> int:
        """Compute the rows of a shard whose score is near the threshold again, in fp16.

        Their protein embeddings are computed by the fp16 encoder, and their scores from these and
        from the DNA embeddings that are there. In `result`, they replace the values from int8.

        Args:
            result: The results that int8 gave. They are changed.
            task: The task of the shard.
            head: The classifier.

        Returns:
            The number of such rows.
        """
        # A row that was left out has the score NaN, and a comparison with NaN is false.
        distances = np.abs(result.scores[:, 1] - task.threshold)
        near_rows = np.flatnonzero(distances < NEAR_DISTANCE)
        if len(near_rows) == 0:
            return 0
        slots = self.slots(task.budget_divisor)
        token_rows, pad = self._tokenise(task, near_rows)
        # The embeddings of the protein encoder are the last columns.
        own_columns = slice(-self.encoder.width, None)
        with torch.cuda.stream(self.stream):
            # With the divisor 1 alone, all batches have the same number of slots. So the result of
            # a row does not depend on how many rows are near the threshold.
            for plan, batch in packed(token_rows, slots, pad, divisors=(1,)):
                row_embeddings = self.encoder.embed(batch.to(self._device))[: batch.rows]
                rows = near_rows[plan.rows]
                result.embeddings[rows, own_columns] = row_embeddings.cpu().numpy()
            features = torch.from_numpy(result.embeddings[near_rows]).to(self._device)
            result.scores[near_rows] = head.scores(features).cpu().numpy()
        return len(near_rows)

    def _tokenise(self, task: ShardTask, positions: NDArray[np.int64]) -> tuple[TokenRows, int]:
        """Return the tokens of some proteins of a shard, and the padding token.

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
        return TokenRows(tokens.numpy(), starts.numpy()), tokenizer.pad_id
