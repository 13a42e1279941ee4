"""Records of what is measured in a run, and the names of its stages.

The fields of a record are the columns of its table (`statistics.record_table`).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, get_args

from pydantic import ConfigDict, Field

from virnuc_core.encoder_names import DNA, NAMES, PROTEIN, EncoderName, EncoderTitle

Span = tuple[float, float]  # seconds of `time.monotonic()`, both ends included
Stage = Literal[
    "Sequence Chunking",
    "Six-Frame Translation",
    "Nucleotide Splitting",
    "Protein Splitting",
    EncoderTitle,  # one stage for each encoder
    "Feature Merging",
    "Model Prediction",
    "Consensus Scoring",
]
STAGES: Final[tuple[str, ...]] = get_args(Stage)
# The stage of each encoder, by the name of the encoder
GPU_STAGES: Final[dict[EncoderName, Stage]] = {names.name: names.title for names in NAMES}
# Columns of tables whose names differ from those of the record's fields
COLUMN_NAMES: Final = {"dna_s": DNA.seconds_column, "protein_s": PROTEIN.seconds_column}
START_UP: Final = tuple(
    f"Start-up: {part}" for part in ("command", "import", "weights", "kernels", "first batch")
)
# A start-up that passed while the reads were staged. It is taken off the sum.
OVERLAPPED: Final = "Overlapped"
OVERLAPPED_TITLE: Final = "At the same time as other parts (counted once in the total)"
# All that takes time. Together, less what overlapped, it is the whole time of a run.
ROWS: Final = (
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
    """One packed batch, as the launch loop saw it.

    Times are of `time.monotonic()`, which all processes share.
    """

    device: str  # device id within the run, e.g. "GPU-3f2c…" or "cpu-core-1"
    encoder: EncoderName
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
    """One shard committed by a worker.

    Files have the names of the encoders in two of the columns, see `COLUMN_NAMES`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        serialize_by_alias=True, validate_by_name=True, validate_by_alias=True
    )

    device: str
    shard: int
    rows: int
    protein_tokens: int
    dna_tokens: int
    started_s: float
    finished_s: float
    # Seconds of device time
    dna_s: Annotated[float, Field(alias=DNA.seconds_column)]
    protein_s: Annotated[float, Field(alias=PROTEIN.seconds_column)]
    head_s: float
    commit_s: float
    batches: tuple[BatchRecord, ...]
    # above 1: the device could not hold the token budget, and this shard ran on a part of it
    budget_divisor: int = 1
    skipped: int = 0  # rows set aside: they end every worker, or are not finite
    # most that torch has allocated on the device so far; None on a CPU
    allocated_bytes: float | None = None
    # sequences with a score from the threshold on; None in files of older versions
    viral: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of one device. A number that the device does not give is `None`."""

    time_s: float  # time.monotonic()
    device: str
    utilisation: float | None = None  # percent
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    # What files of older versions lack
    energy_j: float | None = None  # all that the device has taken since its driver was loaded
    power_limited: float | None = None  # 1: clocked down because of its power limit; 0: not


@dataclass(frozen=True, slots=True)
class HostSample:
    """One reading of the host, on the clock of the device samples."""

    time_s: float
    cpu_percent: float | None  # of all cores this process may use: 100 is all busy
    rss_bytes: int | None  # of this process and its children
    # What files of older versions lack
    busiest_core_percent: float | None = None  # of the cores this process may use
    # All that the disks of the machine have read and written since it was started
    disk_read_bytes: float | None = None
    disk_written_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage: its seconds, or the stage it is fused with."""

    name: str
    seconds: float | None  # None: fused, its work is part of `fused_into`
    fused_into: str | None = None
    started_s: float | None = None  # time.monotonic(); None when only seconds are known
    finished_s: float | None = None


class StageClock:
    """Collects the seconds of the stages and of the other rows of the stage table.

    A stage may run many times. Its seconds add up.
    """

    def __init__(self) -> None:
        self._stages: dict[str, StageTime] = {}

    def add(self, name: str, seconds: float, span: Span | None = None) -> None:
        """Add seconds to a stage.

        Args:
            name: The stage, or another row of the table.
            seconds: The seconds that it took. A stage that takes turns with others took fewer
                than lie between its start and its end.
            span: Its start and its end, by `time.monotonic()`. The stage keeps its earliest start
                and its latest end. Without a span they stay as they are.
        """
        earlier = self._stages.get(name, StageTime(name, 0.0))
        started_s, finished_s = earlier.started_s, earlier.finished_s
        if span is not None:
            span_start_s, span_end_s = span
            started_s = span_start_s if started_s is None else min(started_s, span_start_s)
            finished_s = span_end_s if finished_s is None else max(finished_s, span_end_s)
        self._stages[name] = StageTime(
            name,
            seconds=(earlier.seconds or 0.0) + seconds,  # a fused stage has no seconds
            started_s=started_s,
            finished_s=finished_s,
        )

    def fuse(self, name: Stage, into: Stage) -> None:
        """Record that a stage is done within another one, so that it has no seconds of its own."""
        self._stages[name] = StageTime(name, None, into)

    def times(self) -> tuple[StageTime, ...]:
        """Return what was measured or fused so far, in the order of `ROWS`."""
        return tuple(self._stages[name] for name in ROWS if name in self._stages)
