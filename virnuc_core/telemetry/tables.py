"""What is measured of a run, as records. The fields of a record are the columns of its table (`statistics.frame`)."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

Span = tuple[float, float]  # seconds of `time.monotonic()`, both ends included
Encoder = Literal["dnabert_s", "esm2"]
Stage = Literal[
    "Sequence Chunking",
    "Six-Frame Translation",
    "Nucleotide Splitting",
    "Protein Splitting",
    "DNABERT-S",
    "ESM-2",
    "Feature Merging",
    "Model Prediction",
    "Consensus Scoring",
]
ENCODERS: Final[tuple[Encoder, ...]] = get_args(Encoder)
STAGES: Final[tuple[str, ...]] = get_args(Stage)
GPU_STAGES: Final = dict(zip(ENCODERS, STAGES[4:6], strict=True))
START_UP: Final = tuple(
    f"Start-up: {part}" for part in ("command", "import", "weights", "kernels", "first batch")
)
OVERLAPPED: Final = (
    "Overlapped"  # to be taken off: a start-up that passed while the reads were staged
)
ROWS: Final = (  # all that takes time: together, less what overlapped, the whole
    *STAGES,
    "Rest of staging",
    "Preparation",
    *START_UP,
    "Restarts",  # of workers, with the work that was lost
    "Waiting for batches",
    "Commits",  # while the device stood still for them, and those after its last batch
    "Device idle",
    "Shutdown",
    "Result files",
    "Earlier attempts: committed",
    "Earlier attempts: lost",
    OVERLAPPED,
)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One packed batch, as the launch loop saw it. Times are of `time.monotonic()`, which all processes share."""

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
    batches: tuple[BatchRecord, ...]
    budget_divisor: int = (
        1  # above 1: the device could not hold the token budget, and this shard ran on a part of it
    )
    skipped: int = 0  # rows set aside: they end every worker, or are not finite
    allocated_bytes: float | None = (
        None  # most that torch has allocated on the device so far; None on a CPU
    )


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one device. `None` where the device does not tell."""

    time_s: float  # time.monotonic()
    device: str
    utilisation: float | None = None  # percent
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of the host, on the clock of the device samples."""

    time_s: float
    cpu_percent: float | None  # of all cores this process may use: 100 is all busy
    rss_bytes: int | None  # of this process and its children


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage: its seconds, or the stage it is fused with."""

    name: str
    seconds: float | None  # None: fused, its work is part of `fused_into`
    fused_into: str | None = None
    started_s: float | None = None  # time.monotonic(); None when only seconds are known
    finished_s: float | None = None


class StageClock:
    """Collects the seconds of the nine stages and the other rows. One may run many times; its seconds add up."""

    def __init__(self) -> None:
        self._stages: dict[str, StageTime] = {}

    def add(self, name: str, seconds: float, span: Span | None = None) -> None:
        """Add seconds, and when they passed; a stage that takes turns has fewer than lie between start and end."""
        before = self._stages.get(name, StageTime(name, 0.0))
        moments = [s for s in (before.started_s, before.finished_s, *(span or ())) if s is not None]
        total = (before.seconds or 0.0) + seconds
        self._stages[name] = StageTime(
            name, total, None, min(moments, default=None), max(moments, default=None)
        )

    def fuse(self, name: Stage, into: Stage) -> None:
        """Say that stage `name` is done within `into`."""
        self._stages[name] = StageTime(name, None, into)

    def times(self) -> tuple[StageTime, ...]:
        """What was measured or fused so far, in the order of `ROWS`; what was not measured is not there."""
        return tuple(self._stages[name] for name in ROWS if name in self._stages)
