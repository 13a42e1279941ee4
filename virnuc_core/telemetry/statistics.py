"""Add up the tables of a run. Each number of its telemetry is computed here, and nowhere else.

A table is a DataFrame with the fields of its record as columns (see `tables`). A device or an
encoder is a category, and a missing number is NaN. In the results, what is not known is `None`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, Final

import numpy as np
import pandas as pd
from pydantic import Field

from virnuc_core.encoder_names import DNA, ENCODER_NAMES, PROTEIN, EncoderName, Molecule
from virnuc_core.runfiles import RunFile
from virnuc_core.telemetry.tables import (
    COLUMN_NAMES,
    BatchRecord,
    DeviceSample,
    HostSample,
    ShardDone,
    Span,
)

TIME_COLUMNS: Final = {
    BatchRecord: "launched_s",
    DeviceSample: "time_s",
    HostSample: "time_s",
    ShardDone: "finished_s",
}
QUEUE_STATES: Final = ("full", "normal", "starved")
FULL_BELOW_MS: Final = 1.0
STARVED_ABOVE_MS: Final = 50.0
LOW_PACKING: Final = 0.80
WARM_UP_BATCHES: Final = 10
IDLE_BELOW_PERCENT: Final = 50.0
IDLE_FOR_S: Final = 10.0
IMBALANCE_POINTS: Final = 10.0
JOULES_PER_KWH: Final = 3.6e6
MIN_WINDOW_S: Final = 1e-9  # less is no time to any clock


def record_table(
    kind: type[Any], records: Iterable[Any], devices: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the table of records of one kind, in the order of their times.

    Args:
        kind: The class of the records. Its fields become the columns.
        records: The records.
        devices: The devices of the run. They become the first categories of the column `device`,
            also those that have no record.
    """
    rows = sorted(records, key=attrgetter(TIME_COLUMNS[kind]))
    device_names = [*devices]
    if "device" in {field.name for field in fields(kind)}:
        device_names += [row.device for row in rows]
    # The type of a field decides the type of its column. All other fields hold floats or `None`.
    types: dict[Any, Any] = {
        int: "int64",
        str: pd.CategoricalDtype(list(dict.fromkeys(device_names))),
        EncoderName: pd.CategoricalDtype([*ENCODER_NAMES]),
    }
    columns = {}
    for field in fields(kind):
        if field.name != "batches":  # of a shard: they have a table of their own
            values = [getattr(row, field.name) for row in rows]
            column = COLUMN_NAMES.get(field.name, field.name)
            columns[column] = pd.Series(values, dtype=types.get(field.type, "float64"))
    return pd.DataFrame(columns)


def none_if_nan(value: float) -> float | None:
    """Return a number, or `None` for NaN, with which pandas marks a number that is not known."""
    if np.isnan(value):
        return None
    return float(value)


class QueueShares(RunFile):
    """The share of batches in each queue state."""

    full: float
    normal: float
    starved: float


class BatchCounts(RunFile):
    """What batches come to, whatever time they took.

    What is not known without a batch is `None`.
    """

    batches: int
    # Sequences, each counted once. Both encoders embed them; the protein encoder's are counted,
    # because it is the last one.
    rows: int
    tokens: int  # real ones
    slots: int  # launched, tails included
    packing_efficiency: float | None  # tokens / slots, 0 to 1
    avg_wait_ms: float | None
    max_wait_ms: float | None


class BatchMetrics(BatchCounts):
    """Batches added up."""

    min_packing_efficiency: float | None  # of one batch
    batches_below_threshold: int  # packed under 80 %
    p95_wait_ms: float | None
    queue: QueueShares | None
    waiting_share: float | None  # share of batches waited for longer than 1 ms
    device_s: float | None  # sum of device time; None when no batch has one
    span_s: float  # first launch to last finish
    tokens_per_s: float | None  # tokens / span
    rows_per_s: float | None
    steady_tokens_per_s: float | None  # the same without the first 10 batches of each device


def packing(batches: pd.DataFrame) -> pd.Series:
    """Return the packing efficiency of each batch: its tokens over the slots that were launched.

    It is NaN for a batch without a slot.
    """
    return batches.tokens / batches.slots.where(batches.slots > 0)


def queue_state(batches: pd.DataFrame) -> pd.Series:
    """Return the state of the queue of batches at each launch, as a category.

    The time that the device waited for the batch tells the state. The queue was `full` if the
    batch was there at once (below 1 ms), `starved` if the wait was longer than 50 ms, and
    `normal` in between.
    """
    n_limits_reached = np.zeros(len(batches), "int8")
    n_limits_reached += (batches.wait_ms >= FULL_BELOW_MS).to_numpy()
    n_limits_reached += (batches.wait_ms > STARVED_ABOVE_MS).to_numpy()
    # No limit reached is "full", one is "normal", both are "starved".
    states = pd.Categorical.from_codes(n_limits_reached, pd.Index(QUEUE_STATES))
    return pd.Series(states, index=batches.index)


def embedding_span(batches: pd.DataFrame) -> Span | None:
    """Return the first launch and the last finish of batches, or `None` without batches.

    A batch ends one device time after its launch. A batch whose device time is not known counts
    as if it ended at its launch.
    """
    if batches.empty:
        return None
    finished_s = batches.launched_s + batches.device_ms.fillna(0.0) / 1000.0
    return float(batches.launched_s.min()), float(finished_s.max())


def _span_seconds(batches: pd.DataFrame) -> float:
    """Return the seconds from the first launch to the last finish; 0 without batches."""
    span = embedding_span(batches)
    if span is None:
        return 0.0
    start_s, end_s = span
    return end_s - start_s


def _count_batches(batches: pd.DataFrame, counting: EncoderName) -> BatchCounts:
    """Count batches, and the sequences, tokens and slots in them.

    Args:
        batches: The batches.
        counting: The encoder whose rows are counted as sequences. Both encoders embed each
            sequence, so the rows of both would count it twice.
    """
    # Whole numbers are added as arrays, because a long run has many windows of few batches, and
    # operations on short columns of a table take much longer than the sums.
    is_counted = (batches.encoder == counting).to_numpy()
    tokens = int(batches.tokens.to_numpy().sum())
    slots = int(batches.slots.to_numpy().sum())
    wait_ms = batches.wait_ms
    return BatchCounts(
        batches=len(batches),
        rows=int(batches.rows.to_numpy()[is_counted].sum()),
        tokens=tokens,
        slots=slots,
        packing_efficiency=tokens / slots if slots else None,
        avg_wait_ms=none_if_nan(wait_ms.mean()),
        max_wait_ms=none_if_nan(wait_ms.max()),
    )


def batch_metrics(batches: pd.DataFrame, counting: EncoderName = PROTEIN.name) -> BatchMetrics:
    """Add up the batches of a table: their contents, their waits and their speed.

    Args:
        batches: The batches.
        counting: The encoder whose rows are counted as sequences. Both encoders embed each
            sequence, so the rows of both would count it twice.
    """
    counts = _count_batches(batches, counting)
    packing_of_batch = packing(batches)
    span_s = _span_seconds(batches)
    queue = None
    if counts.batches:
        queue = QueueShares(**queue_state(batches).value_counts(normalize=True))
    return BatchMetrics(
        **dict(counts),
        min_packing_efficiency=none_if_nan(packing_of_batch.min()),
        batches_below_threshold=int((packing_of_batch < LOW_PACKING).sum()),
        p95_wait_ms=none_if_nan(float(batches.wait_ms.quantile(0.95))),
        queue=queue,
        waiting_share=none_if_nan(float((batches.wait_ms > FULL_BELOW_MS).mean())),
        # Without `min_count` a sum over unknown times only would be 0.
        device_s=none_if_nan(batches.device_ms.sum(min_count=1) / 1000.0),
        span_s=span_s,
        tokens_per_s=counts.tokens / span_s if span_s > 0 else None,
        rows_per_s=counts.rows / span_s if span_s > 0 else None,
        steady_tokens_per_s=_steady_tokens_per_s(batches),
    )


def _steady_tokens_per_s(batches: pd.DataFrame) -> float | None:
    """Return the tokens per second without the first batches of each device, which are slower.

    Returns:
        `None` if a device has fewer than twice the batches of its warm-up, because too few are
        left to measure then.
    """
    batches_of_device = batches.groupby("device", observed=True)
    if (batches_of_device.size() < 2 * WARM_UP_BATCHES).any():
        return None
    # `cumcount` numbers the batches of each device from 0, in the order of their launches.
    steady_batches = batches[batches_of_device.cumcount() >= WARM_UP_BATCHES]
    span_s = _span_seconds(steady_batches)
    if span_s <= 0:
        return None
    return float(steady_batches.tokens.sum()) / span_s


def by_encoder(batches: pd.DataFrame) -> dict[EncoderName, BatchMetrics]:
    """Return the metrics of the batches of each encoder. An encoder without a batch is left out."""
    metrics = {}
    for encoder in ENCODER_NAMES:
        own_batches = batches[batches.encoder == encoder]
        if len(own_batches):
            metrics[encoder] = batch_metrics(own_batches, encoder)
    return metrics


class Window(BatchCounts):
    """One stretch of the run. A stretch without any batch is one window, however long."""

    start_s: float  # since the run's start
    end_s: float
    tokens_per_s: float | None  # None: no time passed
    starved: int
    # device -> mean; only devices with samples in the window, where samples were given
    gpu_util: dict[str, float]
    cpu_percent: float | None = None  # mean of the host; None without a sample of it


def windows(
    batches: pd.DataFrame,
    window_s: float,
    origin_s: float,
    samples: pd.DataFrame | None = None,
    host: pd.DataFrame | None = None,
) -> tuple[Window, ...]:
    """Cut a run into windows of equal length. A batch belongs to the window it was launched in.

    The first window begins with the first launch, and the last ends with the last finish. Empty
    windows in a row become one.

    Args:
        batches: The batches of the run.
        window_s: The length of a window.
        origin_s: The start of the run, `time.monotonic()`. Windows are counted from it.
        samples: Samples of the devices. Without them, the windows have no utilisation.
        host: Samples of the host. Without them, the windows do not tell how busy the CPU was.

    Returns:
        The windows in the order of their times; none without a batch.
    """
    span = embedding_span(batches)
    if span is None:
        return ()
    first_s, last_s = span
    window_of_batch = np.floor((batches.launched_s - origin_s) / window_s).astype("int64")
    batches_of_window = dict([*batches.groupby(window_of_batch)])
    # Each window with batches has a bound at its start and one at its end. Two bounds that are
    # further apart enclose the empty windows between them, as one.
    bounds = sorted({*batches_of_window, *(number + 1 for number in batches_of_window)})
    cut_windows = []
    for start, end in pairwise(bounds):
        own_batches = batches_of_window.get(start, batches[:0])
        start_s = first_s - origin_s if start == bounds[0] else start * window_s
        end_s = last_s - origin_s if end == bounds[-1] else end * window_s
        duration_s = end_s - start_s
        counts = _count_batches(own_batches, PROTEIN.name)
        window_span = (origin_s + start_s, origin_s + end_s)
        cut_windows.append(
            Window(
                **dict(counts),
                start_s=start_s,
                end_s=end_s,
                tokens_per_s=counts.tokens / duration_s if duration_s > MIN_WINDOW_S else None,
                starved=int((own_batches.wait_ms > STARVED_ABOVE_MS).sum()),
                gpu_util={} if samples is None else _mean_utilisation(samples, window_span),
                cpu_percent=None if host is None else _mean_cpu_percent(host, window_span),
            )
        )
    return tuple(cut_windows)


def _mean_utilisation(samples: pd.DataFrame, span: Span) -> dict[str, float]:
    """Return the mean utilisation in a span of each device that has samples in it."""
    samples_in_span = samples[samples.time_s.between(*span)]
    means = samples_in_span.groupby("device", observed=True).utilisation.mean()
    return {str(device): float(mean) for device, mean in means.dropna().items()}


def _mean_cpu_percent(host: pd.DataFrame, span: Span) -> float | None:
    """Return how busy the CPU was in a span on average; `None` if no sample tells it."""
    return none_if_nan(host[host.time_s.between(*span)].cpu_percent.mean())


class DeviceBusy(RunFile):
    """The seconds that one device spent on shards."""

    device: str
    shards: int
    tokens: int = 0  # of both encoders; none in files of older versions
    dna_s: Annotated[float, Field(alias=DNA.seconds_column)]
    protein_s: Annotated[float, Field(alias=PROTEIN.seconds_column)]
    head_s: float
    commit_s: float
    allocated_peak_bytes: float | None  # by torch, on it; None on a CPU
    busy_s: float  # of compute

    def encoder_s(self, molecule: Molecule) -> float:
        """Return the seconds that the encoder of this molecule took."""
        return self.dna_s if molecule == "dna" else self.protein_s


def device_busy(shards: pd.DataFrame) -> tuple[DeviceBusy, ...]:
    """Return the seconds that each device computed, in the order of the devices.

    A device that has done no shard is left out.
    """
    busy_devices = []
    for device, own_shards in shards.groupby("device", observed=True):
        dna_s = float(own_shards[DNA.seconds_column].sum())
        protein_s = float(own_shards[PROTEIN.seconds_column].sum())
        head_s = float(own_shards.head_s.sum())
        busy_devices.append(
            DeviceBusy(
                device=str(device),
                shards=len(own_shards),
                tokens=int(own_shards.protein_tokens.sum() + own_shards.dna_tokens.sum()),
                dna_s=dna_s,
                protein_s=protein_s,
                head_s=head_s,
                commit_s=float(own_shards.commit_s.sum()),
                allocated_peak_bytes=none_if_nan(own_shards.allocated_bytes.max()),
                busy_s=dna_s + protein_s + head_s,
            )
        )
    return tuple(busy_devices)


def device_time_spread(busy: Sequence[DeviceBusy]) -> float | None:
    """Return how unevenly the work was spread: 1 − fewest ÷ most busy seconds of a device.

    0 means that all devices were busy for the same time.

    Returns:
        `None` if there are fewer than two devices, or if none was busy.
    """
    seconds = [device.busy_s for device in busy]
    if len(seconds) < 2 or max(seconds) <= 0:
        return None
    return 1.0 - min(seconds) / max(seconds)


def committed_span_s(batches: pd.DataFrame, shards: pd.DataFrame) -> float:
    """Return the seconds from the first launch of a batch to the end of the last commit.

    Without batches or shards it is 0.
    """
    last_commit_s = (shards.finished_s + shards.commit_s).max()
    return none_if_nan(last_commit_s - batches.launched_s.min()) or 0.0


class DeviceUsage(RunFile):
    """One device within a span. `None` where no sample tells."""

    device: str
    gpu_util_avg: float | None  # percent
    gpu_util_min: float | None
    gpu_util_max: float | None
    mem_used_avg: float | None
    mem_used_peak: float | None
    power_avg_w: float | None
    power_peak_w: float | None
    temperature_max_c: float | None
    energy_kwh: float | None  # None with fewer than two readings
    sample_count: int  # samples that tell the utilisation
    power_limited: float | None = None  # share of the samples at the power limit, 0 to 1


class HostUsage(RunFile):
    """The host over a run."""

    cpu_percent_avg: float | None
    cpu_percent_max: float | None
    rss_peak_bytes: float | None
    sample_count: int


def device_usage(samples: pd.DataFrame, device: str, span: Span | None = None) -> DeviceUsage:
    """Summarise the samples of one device.

    Args:
        samples: The samples of all devices.
        device: The device.
        span: Take only the samples within this span.
    """
    start_s, end_s = span or (-np.inf, np.inf)
    own = samples[(samples.device == device) & samples.time_s.between(start_s, end_s)]
    energy_j = _energy_j(own)
    return DeviceUsage(
        device=device,
        gpu_util_avg=none_if_nan(own.utilisation.mean()),
        gpu_util_min=none_if_nan(own.utilisation.min()),
        gpu_util_max=none_if_nan(own.utilisation.max()),
        mem_used_avg=none_if_nan(own.memory_used_bytes.mean()),
        mem_used_peak=none_if_nan(own.memory_used_bytes.max()),
        power_avg_w=none_if_nan(own.power_w.mean()),
        power_peak_w=none_if_nan(own.power_w.max()),
        temperature_max_c=none_if_nan(own.temperature_c.max()),
        energy_kwh=None if energy_j is None else energy_j / JOULES_PER_KWH,
        sample_count=int(own.utilisation.count()),
        power_limited=none_if_nan(own.power_limited.mean()),
    )


def _energy_j(samples: pd.DataFrame) -> float | None:
    """Return the joules that a device took between its first and its last sample.

    The device's own counter is taken. Where it has none, energy is power times the time between
    two readings (the trapezoid rule). With fewer than two readings it is `None`.

    Args:
        samples: The samples of one device, in the order of their times.
    """
    counts = samples.energy_j.dropna()
    if len(counts) > 1:
        energy_j = float(counts.iloc[-1] - counts.iloc[0])
        if energy_j >= 0:  # the counter begins again if the driver is loaded again
            return energy_j
    metered_samples = samples[samples.power_w.notna()]
    if len(metered_samples) < 2:
        return None
    return float(np.trapezoid(metered_samples.power_w, metered_samples.time_s))


def host_usage(samples: pd.DataFrame) -> HostUsage:
    """Summarise all samples of the host."""
    return HostUsage(
        cpu_percent_avg=none_if_nan(samples.cpu_percent.mean()),
        cpu_percent_max=none_if_nan(samples.cpu_percent.max()),
        rss_peak_bytes=none_if_nan(samples.rss_bytes.max()),
        sample_count=len(samples),
    )


def alarms(samples: pd.DataFrame, span: Span | None) -> tuple[str, ...]:
    """Return a sentence on each device that idled for long, and one on an uneven load.

    The load is uneven if the mean utilisations of two devices differ by over 10 percent points.

    Args:
        samples: The samples of all devices.
        span: The start and the end of the time in which the run embedded. If it embedded
            nothing, there is no alarm.
    """
    if span is None:
        return ()
    sentences = []
    samples_in_span = samples[samples.time_s.between(*span) & samples.utilisation.notna()]
    for device, own in samples_in_span.groupby("device", observed=True):
        idle_s = _longest_idle_s(own)
        if idle_s >= IDLE_FOR_S:
            below = f"below {IDLE_BELOW_PERCENT:g} % for {idle_s:.0f} s while embedding"
            sentences.append(f"gpu utilisation of {device} {below}")
    means = samples_in_span.groupby("device", observed=True).utilisation.mean()
    if len(means) and means.max() - means.min() > IMBALANCE_POINTS:
        low = f"gpu utilisation of {means.idxmin()} is {means.min():.1f} %"
        high = f"of {means.idxmax()} {means.max():.1f} %"
        sentences.append(f"{low}, {high}: uneven load")
    return tuple(sentences)


def _longest_idle_s(samples: pd.DataFrame) -> float:
    """Return the seconds of the longest unbroken time in which a device idled.

    It is NaN if the device never did.

    Args:
        samples: The samples of one device, in the order of their times.
    """
    is_idle = samples.utilisation < IDLE_BELOW_PERCENT
    # The count of busy samples so far is the same for all idle samples between two busy ones.
    stretch_of_sample = (~is_idle).cumsum()
    idle_times_s = samples.time_s[is_idle]
    stretches = idle_times_s.groupby(stretch_of_sample[is_idle])
    durations_s = stretches.max() - stretches.min()
    longest_s: float = durations_s.max()
    return longest_s
