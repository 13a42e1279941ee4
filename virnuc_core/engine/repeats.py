"""ESM-2 in fp16 beside the one in int8: it embeds again the rows whose score is near the threshold, and decides them.

int8 moves scores by a few hundredths, so that it turns few verdicts but those. Each batch here has the same number of
slots: what a row gets depends on its tokens, the weights and the settings, not on which other rows are near."""

from pathlib import Path
from typing import Final

import numpy as np
import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.models import Esm2, Head
from virnuc_core.encoders.tokenize import ESM2_PAD, Esm2Tokenizer
from virnuc_core.engine.loader import PARTS, opened, packed
from virnuc_core.engine.shards import ShardResult, ShardTask

NEAR: Final = (
    0.05  # of the threshold: 1.2 % of the frames on which this was chosen (docs/performance.md)
)


class Repeater:
    """Embeds rows of finished shards again, on a stream of its own; for the thread that commits them."""

    def __init__(
        self, models: Path, device: torch.device, engine: EngineSpec, longest: int
    ) -> None:
        """Load the weights, for rows of up to `longest` tokens. Errors: those of `load_encoder`."""
        self._models, self._device, self._budget, self._longest = (
            models,
            device,
            engine.token_budget,
            longest,
        )
        self.esm2 = load_encoder(Esm2, models, device, "fp16", engine.attention)
        # before the launch loop's work, which fills the device for seconds: a commit waits for this
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def slots(self, divisor: int) -> int:
        """Of each batch: the middle one of the launch loop's shapes, and room for any row. The rows of a shard that are
        near fill one or a few of them; of the smallest it would be four times as many launches."""
        return max(self._longest, self._budget // divisor // PARTS[1])

    def repeat(self, result: ShardResult, task: ShardTask, head: Head) -> int:
        """Put what fp16 gives in the place of what `result` has for the rows near the threshold; how many they are."""
        near = np.flatnonzero(
            np.abs(result.scores[:, 1] - task.threshold) < NEAR
        )  # none without a score
        if not len(near):
            return 0
        store, _ = opened(Path(task.store), task.reads, self._models)
        proteins = [store.protein(row, row + 1)[0] for row in (near + task.lo).tolist()]
        tokens, starts = Esm2Tokenizer().encode(proteins)
        with torch.cuda.stream(self.stream):
            for plan, batch in packed(
                (tokens.numpy(), starts.numpy()), self.slots(task.divisor), ESM2_PAD, parts=(1,)
            ):
                pooled = self.esm2.embed(batch.to(self._device))[: batch.rows]
                result.embeddings[near[plan.rows], -self.esm2.width :] = pooled.cpu().numpy()
            scores = head.scores(torch.from_numpy(result.embeddings[near]).to(self._device))
            result.scores[near] = scores.cpu().numpy()
        return len(near)
