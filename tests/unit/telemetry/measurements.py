"""Batches and shards with figures a reader can add up in the head."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pandas as pd

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import BatchRecord, ShardDone, StageTime


def telemetry_of(
    shards: Sequence[ShardDone],
    samples: pd.DataFrame,
    host: pd.DataFrame,
    stages: Sequence[StageTime],
    *,
    origin_s: float,
    started: datetime,
) -> Telemetry:
    """The shards committed, with their batches, beside what was sampled."""
    devices = list(samples.device.cat.categories)
    batches = record_table(
        BatchRecord, (batch for shard in shards for batch in shard.batches), devices
    )
    shard_table = record_table(ShardDone, shards, devices)
    return Telemetry(
        batches, samples, host, shard_table, tuple(stages), origin_s, started.isoformat()
    )


def batch(
    launched_s: float = 0.0,
    *,
    device: str = "GPU-a",
    encoder: str = PROTEIN.name,
    shard: int = 0,
    index: int = 0,
    rows: int = 10,
    tokens: int = 900,
    slots: int = 1000,
    wait_ms: float = 0.1,
    device_ms: float | None = 100.0,
) -> BatchRecord:
    return BatchRecord(
        device,
        encoder,  # type: ignore[arg-type]
        shard,
        index,
        rows,
        tokens,
        slots,
        wait_ms,
        launched_s,
        launched_s,
        device_ms,
    )


def shard(
    number: int, batches: list[BatchRecord], *, device: str = "GPU-a", protein_s: float = 2.0
) -> ShardDone:
    return ShardDone(
        device=device,
        shard=number,
        rows=sum(b.rows for b in batches if b.encoder == PROTEIN.name),
        protein_tokens=sum(b.tokens for b in batches if b.encoder == PROTEIN.name),
        dna_tokens=sum(b.tokens for b in batches if b.encoder == DNA.name),
        started_s=min((b.launched_s for b in batches), default=0.0),
        finished_s=max((b.launched_s for b in batches), default=0.0) + 1.0,
        dna_s=0.5,
        protein_s=protein_s,
        head_s=0.1,
        commit_s=0.2,
        batches=tuple(batches),
    )
