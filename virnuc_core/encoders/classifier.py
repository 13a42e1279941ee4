"""VirNucPro's classifier: the only place with its forward pass.

The engine, rescoring and the tools score with `Head`. Training fits a `Classifier` and evaluates
it. There is one deliberate twin: the baseline computes the scores with operations of its own
(`baseline.networks.plain_scores`), because the engine is compared with it.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnuc_core.encoders.layers import Read
from virnuc_core.encoders.model_config import HeadShape

BLOCK_ROWS: Final = 256  # rows of every matrix product, however many rows are scored
DROPOUT: Final = 0.5  # in training
N_CLASSES: Final = 2  # others, virus


class Classifier(nn.Module):
    """Joined embeddings to logits: linear, batch norm, ReLU, dropout, linear.

    Its tensors have the names of VirNucPro's `MLPClassifier`.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Make the layers, with random weights."""
        super().__init__()
        self.hidden_layer = nn.Linear(shape.width, shape.hidden)
        self.bn1 = nn.BatchNorm1d(shape.hidden, shape.norm_eps)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(DROPOUT)
        self.output_layer = nn.Linear(shape.hidden, N_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits [rows, 2] of joined embeddings [rows, dna_width + protein_width]."""
        hidden = self.relu(self.bn1(self.hidden_layer(features)))
        logits: Tensor = self.output_layer(self.dropout(hidden))
        return logits


def probabilities(logits: Tensor) -> Tensor:
    """Convert logits to P(others) and P(virus), [rows, 2]."""
    return logits.softmax(-1)


class Head:
    """A trained classifier on one device, which scores rows in float32."""

    def __init__(self, shape: HeadShape, read: Read, device: torch.device) -> None:
        """Load the weights to a device.

        Args:
            shape: Sizes of the classifier.
            read: Reads a tensor by its name.
            device: Where scores are computed.
        """
        self.shape = shape
        weights = {name: read(name).to(device).float() for name in shape.tensors()}
        with torch.device("meta"):  # no random weights are drawn, which would cost time
            self._classifier = Classifier(shape).eval()
        # Batch norm's counter of training batches is not stored.
        self._classifier.load_state_dict(weights, strict=False, assign=True)

    def scores(self, features: Tensor) -> Tensor:
        """Score rows of joined embeddings.

        All matrix products have the same number of rows, the last one filled up with zeros. So the
        scores of a row do not depend on how many others are scored with it.

        Args:
            features: [rows, dna_width + protein_width], DNA first.

        Returns:
            P(others) and P(virus) of each row, float32 [rows, 2].
        """
        n_missing = -len(features) % BLOCK_ROWS
        with torch.inference_mode():
            filled = F.pad(features.float(), (0, 0, 0, n_missing))
            blocks = []
            for block in filled.split(BLOCK_ROWS):  # of no rows there is one empty block
                blocks.append(probabilities(self._classifier(block)))
            return torch.cat(blocks)[: len(features)]
