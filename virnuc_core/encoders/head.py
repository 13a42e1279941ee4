"""The classifier: joined embeddings to the two scores."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.layers import Read
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.errors import WeightsError

OTHERS: Final = 0
VIRUS: Final = 1
BLOCK: Final = 256  # rows of one matrix product, always: a row's scores do not depend on how many others came with it


class Head:
    """Linear, batch norm by running statistics, ReLU, linear, softmax; in float32.

    `read` gives the tensors by their names, which are VirNucPro's.
    """

    def __init__(self, shape: HeadShape, read: Read, device: torch.device) -> None:
        self.shape = shape
        self._weights = {name: read(name).to(device).float() for name in shape.tensors()}
        self.model_length = shape.model_length  # bases of the chunks it was trained on
        self.dna_width, self.protein_width = shape.dna_width, shape.protein_width

    def scores(self, features: Tensor) -> Tensor:
        """P(others) and P(virus) of each row of `features` (float32 [n, dna_width + protein_width], DNA first)."""
        if features.ndim != 2 or features.shape[1] != self.shape.width:
            raise WeightsError(
                f"head: features are {tuple(features.shape)}, it takes {self.shape.width} columns "
                f"({self.dna_width} of DNA, {self.protein_width} of protein)"
            )
        with torch.inference_mode():
            padded = F.pad(features.float(), (0, 0, 0, -len(features) % BLOCK))
            blocks = [self._block(block) for block in padded.split(BLOCK)]
            return torch.cat(blocks)[: len(features)] if blocks else padded.new_empty(0, 2)

    def _block(self, features: Tensor) -> Tensor:
        w = self._weights
        mean, variance = w["bn1.running_mean"], w["bn1.running_var"]
        norm = w["bn1.weight"], w["bn1.bias"]
        hidden = F.linear(features, w["hidden_layer.weight"], w["hidden_layer.bias"])
        hidden = F.batch_norm(hidden, mean, variance, *norm, training=False, eps=self.shape.norm_eps)
        return F.linear(hidden.relu(), w["output_layer.weight"], w["output_layer.bias"]).softmax(-1)
