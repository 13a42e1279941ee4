"""VirNucPro's classifier, a small network that scores joined embeddings.

The engine, rescoring and the tools score with `Head`. Training fits a `Classifier` and evaluates
it. The baseline has a second implementation (`baseline.networks.plain_scores`) on purpose, because
the engine's results are compared with it.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnuc_core.encoders.layers import TensorReader
from virnuc_core.encoders.model_config import HeadShape

BLOCK_ROWS: Final = 256  # rows of every matrix product, however many rows are scored
DROPOUT: Final = 0.5  # in training
N_CLASSES: Final = 2  # others, virus


class Classifier(nn.Module):
    """Joined embeddings to logits: linear, batch norm, ReLU, dropout, linear.

    Its tensors have the names of VirNucPro's `MLPClassifier`.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Create the layers, with random weights, for embeddings of the given sizes."""
        super().__init__()
        self.hidden_layer = nn.Linear(shape.width, shape.hidden)
        self.bn1 = nn.BatchNorm1d(shape.hidden, shape.norm_eps)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(DROPOUT)
        self.output_layer = nn.Linear(shape.hidden, N_CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of some rows: one number for "others" and one for "virus".

        Args:
            features: Joined embeddings, [rows, dna_width + protein_width].

        Returns:
            [rows, 2].
        """
        activations = self.relu(self.bn1(self.hidden_layer(features)))  # [rows, hidden]
        logits: Tensor = self.output_layer(self.dropout(activations))
        return logits


def probabilities(logits: Tensor) -> Tensor:
    """Convert logits to P(others) and P(virus), [rows, 2]."""
    return logits.softmax(-1)


class Head:
    """A trained classifier on one device, which scores rows in float32."""

    def __init__(self, shape: HeadShape, read_tensor: TensorReader, device: torch.device) -> None:
        """Load the weights of a classifier to a device, as float32.

        Args:
            shape: Sizes of the classifier.
            read_tensor: Returns a tensor when it is given the tensor's name.
            device: Where scores are computed.
        """
        self.shape = shape
        weights = {name: read_tensor(name).to(device).float() for name in shape.tensors()}
        # The device "meta" allocates no memory, so no time is spent on random initial weights.
        with torch.device("meta"):
            self._classifier = Classifier(shape).eval()
        # strict=False: batch norm's counter of training batches is not stored in our files.
        # assign=True: the loaded tensors replace the empty ones of the meta device.
        self._classifier.load_state_dict(weights, strict=False, assign=True)

    def scores(self, features: Tensor) -> Tensor:
        """Return the two class probabilities of each row of joined embeddings.

        Rows are scored in blocks of `BLOCK_ROWS`, and the last block is filled up with zeros. All
        matrix products have the same shape then, so the scores of a row do not depend on how many
        other rows are scored in the same call.

        Args:
            features: [rows, dna_width + protein_width], DNA first.

        Returns:
            P(others) and P(virus) of each row, float32 [rows, 2].
        """
        n_padding_rows = -len(features) % BLOCK_ROWS  # up to the next multiple of BLOCK_ROWS
        with torch.inference_mode():
            # `pad` takes the columns first: none before, none behind; then the rows.
            padded_features = F.pad(features.float(), (0, 0, 0, n_padding_rows))
            scores_of_blocks = []
            # Without rows, `split` returns one empty block, so `torch.cat` has something to join.
            for block in padded_features.split(BLOCK_ROWS):
                scores_of_blocks.append(probabilities(self._classifier(block)))
            return torch.cat(scores_of_blocks)[: len(features)]
