"""The classifier: joined embeddings to the two scores."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders.layers import Read
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.errors import WeightsError

OTHERS: Final = 0
VIRUS: Final = 1
BLOCK: Final = 256  # rows of one matrix product, always: a row's scores do not depend on how many others came with it


class HeadWeights(NamedTuple):
    """Weights of the head on one device, float32."""

    hidden: tuple[Tensor, Tensor]  # [hidden, width], [hidden]
    running_mean: Tensor
    running_var: Tensor
    norm: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]  # [2, hidden], [2]


def place_head(read: Read, device: torch.device) -> HeadWeights:
    """Read the weights to `device`."""

    def wide(name: str) -> Tensor:
        return read(name).to(device).float()

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return wide(f"{name}.weight"), wide(f"{name}.bias")

    return HeadWeights(
        hidden=pair("hidden_layer"),
        running_mean=wide("bn1.running_mean"),
        running_var=wide("bn1.running_var"),
        norm=pair("bn1"),
        output=pair("output_layer"),
    )


class Head:
    """Linear, batch norm by running statistics, ReLU, linear, softmax."""

    def __init__(self, shape: HeadShape, weights: HeadWeights) -> None:
        self.shape, self.weights = shape, weights
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
        w = self.weights
        hidden = F.linear(features, *w.hidden)
        hidden = F.batch_norm(hidden, w.running_mean, w.running_var, *w.norm, training=False, eps=self.shape.norm_eps)
        return F.linear(hidden.relu(), *w.output).softmax(-1)
