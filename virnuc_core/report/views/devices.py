"""Views of the devices at work: utilisation, packing, and the queue of batches."""

from collections.abc import Sequence
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.model import Criterion, TelemetryMetrics
from virnuc_core.report.sections import Row, Section, Table
from virnuc_core.report.text import (
    NOT_MEASURED,
    UNKNOWN,
    Mark,
    Number,
    cell,
    format_value,
    gibibytes,
    number,
    one_line,
    percent,
    target_text,
)
from virnuc_core.runfiles import ProductRate
from virnuc_core.telemetry.starvation import Starvation, StarvationVerdict
from virnuc_core.telemetry.statistics import QueueShares
from virnuc_core.telemetry.tables import GPU_STAGES

# What helps, by the verdict on the use of GPU and CPU
STARVATION_ADVICE: Final[dict[StarvationVerdict, str]] = {
    "not starved": "Nothing to do.",
    "CPU is the bottleneck": ("Give the run more cores, or raise num_workers and prefetch_factor."),
    "waits for other things": (
        "The CPU had time: look at commits, the disk, and restarts of workers."
    ),
}
# What a measured product is, by its role
PRODUCT_ROLES: Final = {
    "own": "own product",
    "library": "library",
    "reference": "reference, another number format",
}


def utilisation_section(telemetry: TelemetryMetrics, criterion: Criterion) -> Section:
    """Return the section on the use of each device, which begins with the criterion's verdict."""
    value = format_value(criterion)
    target = target_text(criterion.target, criterion.unit)
    verdict = Mark(criterion.verdict)
    sentence = (
        f"{criterion.perf_id}: lowest device {value}, required {target}: "
        f"{verdict} {criterion.reason}"
    )
    table = Table(device_rows(telemetry))
    sentences = [sentence.rstrip()]
    if any(device.sample_count for device in telemetry.devices):
        sentences.append(power_limit_sentence(telemetry))
    if telemetry.starvation is not None:
        sentences.append(starvation_sentence(telemetry.starvation))
    return Section("GPU Utilization", sentences=sentences, tables=[table])


def starvation_sentence(starvation: Starvation) -> str:
    """Return a sentence on whether GPUs idled while embedding, and what the CPU did meanwhile."""
    idle = percent(starvation.idle_share)
    busy = percent(starvation.idle_core_busy_share)
    return one_line(
        f"GPU and CPU on one clock: {starvation.verdict}. A GPU was under 50 % busy at {idle} of "
        f"{cell(starvation.moments)} moments while embedding, and at {busy} with a core of the "
        f"host at its limit. {STARVATION_ADVICE[starvation.verdict]}"
    )


def power_limit_sentence(telemetry: TelemetryMetrics) -> str:
    """Return a sentence on how long each GPU stood at its power limit, and on its energy."""
    parts = []
    for device in telemetry.devices:
        share = percent(device.power_limited, 0, " % of the samples") or NOT_MEASURED
        parts.append(f"{device.device} {share}")
    joules = number(telemetry.joules_per_million_tokens, 0, " J") or NOT_MEASURED
    return one_line(
        f"At the power limit, which lowers the clock, while embedding: {', '.join(parts)}. "
        f"Energy for a million {PROTEIN.title} tokens, all devices and both encoders: {joules}."
    )


def windows_section(telemetry: TelemetryMetrics) -> Section:
    """Return the section on the windows of a run, which show drift and stalls.

    A run with a single window has none to compare, and the section is empty.
    """
    if len(telemetry.windows) < 2:
        return Section("Windows")
    rows: list[Row] = [
        {
            "From (s)": number(window.start_s),
            "To (s)": number(window.end_s),
            "Batches": window.batches,
            "Tokens/s": number(window.tokens_per_s, 0),
            "Packing": percent(window.packing_efficiency),
            "Mean wait (ms)": number(window.avg_wait_ms, 2),
            "Starved": window.starved,
            "Lowest GPU %": number(min(window.gpu_util.values(), default=None)),
            "CPU %": number(window.cpu_percent),
        }
        for window in telemetry.windows
    ]
    return Section("Windows", sentences=[_windows_sentence(telemetry)], tables=[Table(rows)])


def _windows_sentence(telemetry: TelemetryMetrics) -> str:
    """Return a sentence on how far the speed of the windows differs, and on stalls."""
    slowest, fastest = window_speeds(telemetry)
    text = (
        f"The run in {cell(len(telemetry.windows))} windows of time, in seconds since its start. "
        f"Tokens/s of a window: {cell(number(slowest, 0))} to {cell(number(fastest, 0))}."
    )
    stalled_s = sum(
        window.end_s - window.start_s for window in telemetry.windows if not window.batches
    )
    if stalled_s:
        text += f" No batch was launched for {cell(number(stalled_s, 1, ' s'))}."
    return one_line(text)


def window_speeds(telemetry: TelemetryMetrics) -> tuple[float | None, float | None]:
    """Return the tokens per second of the slowest and of the fastest window.

    The first and the last window are left out if there are others: they are shorter, and the
    first one holds the slow first batches.
    """
    windows = telemetry.windows
    if len(windows) > 2:
        windows = windows[1:-1]
    speeds = [window.tokens_per_s for window in windows if window.tokens_per_s is not None]
    return min(speeds, default=None), max(speeds, default=None)


def device_rows(telemetry: TelemetryMetrics) -> list[Row]:
    """Return utilisation, memory, power and temperature of each device."""
    peak_bytes = {busy.device: busy.allocated_peak_bytes for busy in telemetry.busy}
    rows: list[Row] = []
    for device in telemetry.devices:
        lowest = cell(number(device.gpu_util_min, 0))
        highest = cell(number(device.gpu_util_max, 0))
        rows.append(
            {
                "GPU": device.device,
                "Avg Util %": number(device.gpu_util_avg),
                "Min to max %": Number(f"{lowest} to {highest}"),
                f"{PROTEIN.title} %": number(device.protein_percent),
                f"{DNA.title} %": number(device.dna_percent),
                "Peak Mem (GiB)": gibibytes(device.mem_used_peak),
                "Allocated (GiB)": gibibytes(peak_bytes.get(device.device)),
                "Power (W)": number(device.power_avg_w, 0),
                "At power limit %": percent(device.power_limited, 0, "") or NOT_MEASURED,
                "Max °C": number(device.temperature_max_c, 0),
                "kWh": number(device.energy_kwh, 4),
                "Samples": device.sample_count,
            }
        )
    return rows


def packing_section(telemetry: TelemetryMetrics) -> Section:
    """Return the section on packing, on waits for batches, and on the host."""
    sentences = []
    if telemetry.queue is not None:
        sentences = [
            _waits_sentence(telemetry, telemetry.queue),
            _speed_sentence(telemetry),
            _host_sentence(telemetry),
        ]
    table = Table(encoder_rows(telemetry))
    return Section("Packing and loader", sentences=sentences, tables=[table])


def _waits_sentence(telemetry: TelemetryMetrics, queue: QueueShares) -> str:
    """Return a sentence on how long the launch loop waited for batches, and how full these were.

    The launch loop sends the batches, which are prepared in advance, to the GPU.

    Args:
        telemetry: What was measured.
        queue: The shares of the batches that were ready in time (full), just in time (normal) or
            late (starved).
    """
    mean = _milliseconds(telemetry.avg_wait_ms)
    p95 = _milliseconds(telemetry.p95_wait_ms)
    longest = _milliseconds(telemetry.max_wait_ms)
    shares = (
        f"full {percent(queue.full)}, normal {percent(queue.normal)}, "
        f"starved {percent(queue.starved)} (waited over 1 ms: {percent(telemetry.waiting_share)})"
    )
    badly_packed = f"{cell(telemetry.batches_below_threshold)} of {cell(telemetry.batches)}"
    return one_line(
        f"Waits: mean {mean}, p95 {p95}, max {longest}. Queue: {shares}. "
        f"Batches packed under 80 %: {badly_packed}."
    )


def _milliseconds(value: float | None) -> str:
    """Return a time in milliseconds with its unit."""
    return UNKNOWN if value is None else f"{value:.2f} ms"


def _speed_sentence(telemetry: TelemetryMetrics) -> str:
    """Return a sentence on the number of tokens and distinct frames embedded per second.

    Frames are not called sequences here: sequences per second are the reads of the whole run.
    """
    rate = cell(number(telemetry.tokens_per_s, 0))
    steady_rate = cell(number(telemetry.steady_tokens_per_s, 0))
    distinct_frames = cell(number(telemetry.rows_per_s))
    return one_line(
        f"Tokens/s, both encoders: {rate} while embedding, {steady_rate} once warm "
        f"(10 batches of each device left out). "
        f"Distinct open frames/s while embedding: {distinct_frames}."
    )


def _host_sentence(telemetry: TelemetryMetrics) -> str:
    """Return a sentence on the load of the processor and the memory of the run."""
    host = telemetry.host
    average = cell(number(host.cpu_percent_avg, 0, " %"))
    highest = cell(number(host.cpu_percent_max, 0, " %"))
    peak = cell(gibibytes(host.rss_peak_bytes, " GiB"))
    return one_line(
        f"Host: CPU {average} on average, {highest} at most; "
        f"memory of all processes of the run {peak} at most."
    )


def encoder_rows(telemetry: TelemetryMetrics) -> list[Row]:
    """Return packing and speed of each encoder."""
    return [
        {
            "Encoder": GPU_STAGES[encoder.encoder],
            "Batches": encoder.batches,
            "Tokens": encoder.tokens,
            "Slots": encoder.slots,
            "Packing": percent(encoder.packing_efficiency),
            "Tokens/s of a device": number(encoder.device_tokens_per_s, 0),
            "Ceiling (tokens/s)": number(encoder.ceiling_tokens_per_s, 0) or "not run",
        }
        for encoder in telemetry.encoders
    ]


def products_section(products: Sequence[ProductRate]) -> Section:
    """Return the section on the matrix products alone, as they were measured just before the run.

    Without products, as on a CPU, it is empty.
    """
    rows: list[Row] = [
        {
            "GPU": rate.device,
            "Encoder": GPU_STAGES[rate.encoder],
            "Product": rate.product,
            "Role": PRODUCT_ROLES[rate.role],
            "Alone (tokens/s)": number(rate.tokens_per_s, 0) or NOT_MEASURED,
            "Alone (J per million tokens)": (
                number(rate.joules_per_million_tokens, 0) or NOT_MEASURED
            ),
            "Alone (% at power limit)": percent(rate.power_limited, 0, "") or NOT_MEASURED,
        }
        for rate in products
    ]
    if not rows:
        return Section("Linear layers alone")
    sentence = (
        "The linear layers of each encoder without anything else, measured just before the run. "
        "The fastest product in the number format of the run is the ceiling."
    )
    return Section("Linear layers alone", sentences=[sentence], tables=[Table(rows)])
