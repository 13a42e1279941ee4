"""The measurements that travel: from worker to pool, to telemetry files, to the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Encoder = Literal["dnabert_s", "esm2"]
QueueState = Literal["full", "normal", "starved"]

FULL_BELOW_MS: Final = 1.0
STARVED_ABOVE_MS: Final = 50.0

STAGES: Final = (
    "Sequence Chunking",
    "Six-Frame Translation",
    "Nucleotide Splitting",
    "Protein Splitting",
    "DNABERT-S",
    "ESM-2",
    "Feature Merging",
    "Model Prediction",
    "Consensus Scoring",
)


def queue_state(wait_ms: float) -> QueueState:
    """How ready the next batch was when the launch loop asked for it."""
    if wait_ms < FULL_BELOW_MS:
        return "full"
    return "starved" if wait_ms > STARVED_ABOVE_MS else "normal"


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One packed batch, as the launch loop saw it. Times are seconds of `time.monotonic()` of the host, which all
    processes of one machine share."""

    device: str  # device id within the run, e.g. "GPU-3f2c…" or "cpu-core-1"
    encoder: Encoder
    shard: int
    index: int  # of the batch within the shard and encoder
    rows: int
    tokens: int  # real ones
    slots: int  # launched
    wait_ms: float
    arrived_s: float  # when the loader handed it over
    launched_s: float
    device_ms: float | None  # by device events; on CPU the time of the call


@dataclass(frozen=True, slots=True)
class ShardDone:
    """One shard committed by a worker."""

    device: str
    shard: int
    rows: int
    protein_tokens: int
    dna_tokens: int
    started_s: float
    finished_s: float
    dnabert_s: float  # seconds of device time
    esm2_s: float
    head_s: float
    commit_s: float
    merge_s: float  # joining the two embeddings; 0 when both encoders write into one buffer
    batches: tuple[BatchRecord, ...]
    budget_divisor: int = 1  # above 1: the device could not hold the token budget, and this shard ran on a part of it
    skipped: int = 0  # rows set aside because they end every worker


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one device. `None` where the device does not tell."""

    time_s: float  # time.monotonic()
    device: str
    utilisation: float | None  # percent
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
