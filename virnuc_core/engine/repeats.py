"""ESM-2 in fp16 beside the one in int8: it decides the rows whose score is near the threshold.

int8 moves scores by a few hundredths, so the rows near the threshold are the only ones whose
verdict it can change. They are embedded again in fp16. Each batch here has the same number of
slots, so what a row gets depends on its tokens, the weights and the settings, and not on which
other rows are near the threshold.
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

# Distance from the threshold: it holds 1.2 % of the frames on which it was chosen
# (docs/performance.md).
NEAR: Final = 0.05


class Repeater:
    """Embeds rows of finished shards again, for the thread that commits them.

    On a GPU it works on a stream of its own.
    """

    def __init__(
        self, models: Path, device: torch.device, engine: EngineSpec, longest: int
    ) -> None:
        """Load the weights.

        Args:
            models: Models directory.
            device: Where the weights go.
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
        network = NETWORKS[PROTEIN_ENCODER.name]  # the only one that runs in int8
        self.encoder = load_encoder(network, models, device, "fp16", engine.attention)
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # A higher priority than the launch loop's work, which fills the device for seconds: a
            # commit waits for this.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def slots(self, divisor: int) -> int:
        """Return the slots of each batch: the launch loop's middle shape, or the longest row.

        The rows of a shard that are near the threshold fill one or a few such batches; of the
        smallest shape, it would be four times as many launches.

        Args:
            divisor: Of the token budget, on a device with little memory.
        """
        middle_shape = self._budget // divisor // SHAPE_DIVISORS[1]
        return max(self._longest, middle_shape)

    def repeat(self, result: ShardResult, task: ShardTask, head: Head) -> int:
        """Replace embeddings and scores of the rows near the threshold by those of fp16.

        Args:
            result: What int8 gave for a shard; changed in place.
            task: The shard.
            head: The classifier.

        Returns:
            The number of such rows.
        """
        distances = np.abs(result.scores[:, 1] - task.threshold)  # NaN for rows without a score
        near = np.flatnonzero(distances < NEAR)
        if len(near) == 0:
            return 0
        slots = self.slots(task.divisor)
        token_rows, pad = self._tokenise(task, near)
        own_columns = slice(-self.encoder.width, None)  # the protein encoder's are the last
        with torch.cuda.stream(self.stream):
            for plan, batch in packed(token_rows, slots, pad, divisors=(1,)):
                row_embeddings = self.encoder.embed(batch.to(self._device))[: batch.rows]
                result.embeddings[near[plan.rows], own_columns] = row_embeddings.cpu().numpy()
            features = torch.from_numpy(result.embeddings[near]).to(self._device)
            result.scores[near] = head.scores(features).cpu().numpy()
        return len(near)

    def _tokenise(self, task: ShardTask, positions: NDArray[np.int64]) -> tuple[TokenRows, int]:
        """Tokenise some rows of a shard; return them, and the token to fill batches with."""
        run_data = open_source(Source(Path(task.store), task.reads, self._models))
        sequences = []
        for row in (positions + task.lo).tolist():
            sequences += PROTEIN_ENCODER.sequences(run_data.store, row, row + 1)
        tokenizer = run_data.tokenizers[PROTEIN_ENCODER.name]
        tokens, starts = tokenizer.encode(sequences)
        return TokenRows(tokens.numpy(), starts.numpy()), tokenizer.pad_id
