"""An encoder whose whole stack of kernels is launched by one call of the host, from a recorded CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from virnuc_core.encoders.packed import Encoder, PackedBatch
from virnuc_core.errors import DeviceError

WARM_UP_CALLS = 2  # the first call compiles and tunes, the second finds everything in place


@dataclass(frozen=True, slots=True)
class _Recording:
    """One recorded shape: what goes in is copied to `batch`, what comes out lies in `pooled`."""

    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    pooled: Tensor  # float32 [row_capacity, width]


class Graphed:
    """The same numbers as the encoder it wraps; each shape of batch is recorded the first time it comes."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        if device.type != "cuda":
            raise DeviceError(f"a CUDA graph needs a CUDA device, this is {device}; leave graphs off")
        self._encoder, self._device = encoder, device
        self._recordings: dict[tuple[int, int, int], _Recording] = {}

    @property
    def width(self) -> int:
        return self._encoder.width

    @property
    def pad_id(self) -> int:
        return self._encoder.pad_id

    def embed(self, batch: PackedBatch) -> Tensor:
        """Mean-pooled embeddings, float32 [row_capacity, width]."""
        shape = batch.slots, batch.row_capacity, batch.max_seqlen
        if shape not in self._recordings:
            self._recordings[shape] = self._record(batch)
        kept = self._recordings[shape]
        kept.batch.tokens.copy_(batch.tokens, non_blocking=True)
        kept.batch.cu_seqlens.copy_(batch.cu_seqlens, non_blocking=True)
        kept.graph.replay()
        return kept.pooled.clone()

    def _record(self, batch: PackedBatch) -> _Recording:
        kept = PackedBatch(
            batch.tokens.clone(), batch.cu_seqlens.clone(), batch.rows, batch.max_seqlen, batch.real_tokens
        )
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                self._encoder.embed(kept)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pooled = self._encoder.embed(kept)
        return _Recording(graph, kept, pooled)
