"""The launch loop: batches in, results out, and nothing in between that makes the device wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.models import Head
from virnuc_core.engine.loader import Batch, ShardEnd, Take, packed
from virnuc_core.engine.messages import ShardTask
from virnuc_core.engine.shards import ShardResult
from virnuc_core.telemetry.tables import BatchRecord

Mark = torch.cuda.Event | float  # a moment of the device: an event on CUDA, the host's clock on CPU
Span = tuple[Mark, Mark]


def milliseconds(span: Span) -> float:
    """Device time of a launch; valid once the device has passed its end."""
    match span:
        case torch.cuda.Event() as start, torch.cuda.Event() as end:
            return float(start.elapsed_time(end))
        case float(start), float(end):
            return (end - start) * 1e3
    raise TypeError(span)


@dataclass(frozen=True, slots=True)
class Launched:
    """One batch on its way through the device."""

    batch: Batch
    wait_ms: float
    launched_s: float
    span: Span


@dataclass(slots=True)
class Pending:
    """A shard whose batches have been launched; its results arrive on a side stream."""

    task: ShardTask
    started_s: float
    protein_tokens: int = 0
    dna_tokens: int = 0
    launched: list[Launched] = field(default_factory=list)
    head: Span | None = None
    embeddings: Tensor | None = None  # host, float32 [rows, dna + protein]
    scores: Tensor | None = None  # host, float32 [rows, 2]
    arrived: torch.cuda.Event | None = None

    @property
    def rows(self) -> int:
        return self.task.hi - self.task.lo

    def wait(self) -> ShardResult:
        """Block until the results are on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.embeddings is not None
        assert self.scores is not None
        return ShardResult(self.embeddings.numpy(), self.scores.numpy())

    def batches(self, device: str) -> tuple[BatchRecord, ...]:
        """What the launch loop saw of each batch."""
        return tuple(
            BatchRecord(
                device=device,
                encoder=one.batch.encoder,
                shard=self.task.shard,
                index=one.batch.index,
                rows=one.batch.packed.rows,
                tokens=one.batch.packed.real_tokens,
                slots=one.batch.packed.slots,
                wait_ms=one.wait_ms,
                arrived_s=one.batch.arrived_s,
                launched_s=one.launched_s,
                device_ms=milliseconds(one.span),
            )
            for one in self.launched
        )


class Runner:
    """Both encoders and the head on one device."""

    def __init__(self, esm2: Encoder, dnabert_s: Encoder, head: Head, device: torch.device) -> None:
        self.esm2, self.dnabert_s, self.head, self.device = esm2, dnabert_s, head, device
        self.dna_width = dnabert_s.width
        self.width = dnabert_s.width + esm2.width
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.progress_s = time.monotonic()

    def warm_up(self, budgets: dict[str, int], length: int) -> None:
        """Launch one full batch of rows of `length` tokens on each encoder: compiles, and proves that the budget fits.

        Errors: `torch.OutOfMemoryError` when it does not.
        """
        for encoder, budget in ((self.dnabert_s, budgets["dnabert_s"]), (self.esm2, budgets["esm2"])):
            rows = max(1, budget // length)
            tokens = torch.full((rows * length,), encoder.pad_id, dtype=torch.int64).random_(5, 9)
            starts = torch.arange(rows + 1) * length
            for _, batch in packed((tokens, starts), budget, encoder.pad_id):
                with torch.inference_mode():
                    encoder.embed(batch.to(self.device))
                break
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.progress_s = time.monotonic()

    def run(self, take: Take, hand_over: Callable[[Pending], None]) -> None:
        """Launch everything that `take` gives; each finished shard goes to `hand_over`, which may block.

        Errors: what `take` or a launch raised.
        """
        pending: Pending | None = None
        features: Tensor | None = None
        while True:
            item, wait_ms = take()
            self.progress_s = time.monotonic()
            match item:
                case None:
                    return
                case ShardTask():
                    pending = Pending(item, time.monotonic())
                    features = torch.zeros(pending.rows, self.width, dtype=torch.float32, device=self.device)
                case Batch():
                    assert pending is not None
                    assert features is not None
                    pending.launched.append(self._launch(item, wait_ms, features))
                case ShardEnd():
                    assert pending is not None
                    assert features is not None
                    pending.protein_tokens, pending.dna_tokens = item.protein_tokens, item.dna_tokens
                    self._finish(pending, features)
                    hand_over(pending)
                    pending = features = None

    def _mark(self) -> Mark:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _launch(self, batch: Batch, wait_ms: float, features: Tensor) -> Launched:
        launched_s = time.monotonic()
        start = self._mark()
        encoder = self.dnabert_s if batch.encoder == "dnabert_s" else self.esm2
        first = 0 if batch.encoder == "dnabert_s" else self.dna_width
        with torch.inference_mode(), torch.profiler.record_function(batch.encoder):
            pooled = encoder.embed(batch.packed.to(self.device))  # [row_capacity, width]
            rows = batch.rows.to(self.device, non_blocking=True)
            features[:, first : first + encoder.width].index_copy_(0, rows, pooled[: batch.packed.rows])
        return Launched(batch, wait_ms, launched_s, (start, self._mark()))

    def _finish(self, pending: Pending, features: Tensor) -> None:
        start = self._mark()
        with torch.inference_mode(), torch.profiler.record_function("head"):
            if pending.task.skip:
                left_out = torch.tensor(pending.task.skip, device=self.device) - pending.task.lo
                features[left_out] = torch.nan
            scores = self.head.scores(features)  # [rows, 2]
        pending.head = start, self._mark()
        if self._side is None:
            pending.embeddings, pending.scores = features, scores
            return
        done = torch.cuda.Event()
        done.record()
        self._side.wait_event(done)
        with torch.cuda.stream(self._side):
            pending.embeddings = _to_host(features)
            pending.scores = _to_host(scores)
            pending.arrived = torch.cuda.Event()
            pending.arrived.record()
        for tensor in (features, scores):
            tensor.record_stream(self._side)


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def not_finite(result: ShardResult, task: ShardTask) -> list[int]:
    """Uniques whose embedding or score is NaN or infinite, those left out on purpose excepted."""
    fine = np.isfinite(result.embeddings).all(axis=1) & np.isfinite(result.scores).all(axis=1)
    return sorted(set((np.flatnonzero(~fine) + task.lo).tolist()) - set(task.skip))
