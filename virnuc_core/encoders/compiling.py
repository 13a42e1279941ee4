"""One compiled graph for all layers of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")

GRAPHS_KEPT = 256  # shapes of batches and settings one process may meet; each is compiled once


def compile_block(block: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`block`, compiled at its first call with each shape of batch.

    The compiler would give up after a handful of shapes: a run has several budgets and bounds of row length.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS_KEPT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, GRAPHS_KEPT)
    return torch.compile(block, fullgraph=True, dynamic=False)
