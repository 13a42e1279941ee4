"""What the report shows of speed: runs and their attempts, devices, encoders, the loader, cost, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from virnuc_core.report.formatting import (
    NOT_RUN,
    Mark,
    Number,
    Section,
    Table,
    cell,
    number,
    overhead_text,
    percent,
    shown,
    target_text,
)
from virnuc_core.report.model import Report
from virnuc_core.telemetry.tables import Encoder

GIB: Final = 1 / (1 << 30)
COSTS: Final = {"device_hours": 3, "kwh": 3, "price": 2}  # of a million reads, with digits
ENCODER_TITLES: Final[Mapping[Encoder, str]] = {"esm2": "ESM-2", "dnabert_s": "DNABERT-S"}


def runs(report: Report) -> Table:
    """What each run counted and took."""
    return Table(
        {
            "Run": run.name,
            "Devices": run.label,
            "Total": number(run.total_s, 2, " s"),
            "Staging": number(run.staging_s, 2, " s"),
            "Rest": number(run.wall_s, 2, " s"),
            "Reads": run.n_reads,
            "Rows": run.n_rows,
            "Distinct": run.n_uniques,
            "Reads/s": number(run.sequences_per_hour, scale=1 / 3600),
            f"Projected {report.profile.projection_reads:,}": number(run.hours_projected, 2, " h"),
            "Precision": run.precision,
            "Resumed": "yes" if run.resumed else "no",
            "Restarts": run.restarts,
            "Errors in logs": run.log_errors,
        }
        for run in report.runs
    )


def attempts(report: Report) -> Table:
    """Every attempt of the runs that took more than one; their sums are the runs' own figures."""
    return Table(
        (
            {
                "Run": run.name,
                "Started": one.started,
                "Rest": number(one.wall_s, 2, " s"),
                "First batch to last commit": number(one.worked_s, 2, " s"),
                "Shards": one.shards,
                "Deaths": "; ".join(one.deaths) or "none",
                "Telemetry": one.telemetry or "none",
            }
            for run in report.runs
            for one in run.attempts
            if len(run.attempts) > 1
        ),
        "Attempts",
    )


def telemetry_sections(report: Report) -> tuple[Section, ...]:
    """The devices' utilisation; packing and the loader."""
    if report.run is None or (telemetry := report.run.telemetry) is None:
        return ()
    judged = next(c for c in report.criteria if c.id == "gpu_utilisation")
    allocated, host = {b.device: b.allocated_peak_bytes for b in telemetry.busy}, telemetry.host
    devices = Table(
        {
            "GPU": d.device,
            "Avg Util %": number(d.gpu_util_avg),
            "Min to max %": Number(f"{cell(number(d.gpu_util_min, 0))} to {cell(number(d.gpu_util_max, 0))}"),
            "ESM-2 %": number(d.esm2_percent),
            "DNABERT-S %": number(d.dnabert_s_percent),
            "Peak Mem (GB)": number(d.mem_used_peak, 2, scale=GIB),
            "Allocated (GB)": number(allocated.get(d.device), 2, scale=GIB),
            "Power (W)": number(d.power_avg_w, 0),
            "Max °C": number(d.temperature_max_c, 0),
            "kWh": number(d.energy_kwh, 4),
            "Samples": d.sample_count,
        }
        for d in telemetry.devices
    )
    required = target_text(judged.target, judged.unit)
    lowest = f"{judged.perf_id}: lowest device {shown(judged)}, required {required}: {Mark(judged.verdict)}"
    encoders = Table(
        {
            "Encoder": ENCODER_TITLES[e.encoder],
            "Batches": e.batches,
            "Tokens": e.tokens,
            "Slots": e.slots,
            "Packing": percent(e.packing_efficiency),
            "Tokens/s of a device": number(e.tokens_per_device_s, 0),
            "Ceiling (tokens/s)": number(e.ceiling_tokens_per_s, 0) or NOT_RUN,
        }
        for e in telemetry.encoders
    )
    waits = (
        []
        if (queue := telemetry.queue) is None
        else [
            f"Waits: mean {telemetry.avg_wait_ms:.2f} ms, p95 {telemetry.p95_wait_ms:.2f} ms, "
            f"max {telemetry.max_wait_ms:.2f} ms. "
            f"Queue: full {percent(queue.full)}, normal {percent(queue.normal)}, starved {percent(queue.starved)} "
            f"(waited over 1 ms: {percent(telemetry.waiting_share)}). "
            f"Batches packed under 80 %: {telemetry.batches_below_threshold:,} of {telemetry.batches:,}. "
            f"Windows: {telemetry.windows:,}, without a batch {telemetry.windows_without_batch:,}.",
            f"Tokens/s, both encoders: {cell(number(telemetry.tokens_per_s, 0))} while embedding, "
            f"{cell(number(telemetry.steady_tokens_per_s, 0))} once warm (10 batches of each device left out). "
            f"Sequences/s: {cell(number(telemetry.rows_per_s))}, each counted once.",
            f"Host: CPU {cell(number(host.cpu_percent_avg, 0, ' %'))} on average, "
            f"{cell(number(host.cpu_percent_max, 0, ' %'))} at most; memory of all processes of the run "
            f"{cell(number(host.rss_peak_bytes, 2, ' GB', GIB))} at most.",
        ]
    )
    utilisation = Section("GPU Utilization", (f"{lowest} {judged.reason}".strip(),), (devices,))
    return utilisation, Section("Packing and loader", waits, (encoders,))


def economy(report: Report) -> Table:
    """MFU of each encoder against its ceiling and its data sheet, what a million reads take, and what commits cost."""
    run = report.run
    encoders = run.telemetry.encoders if run and run.telemetry else ()
    shares = {e.encoder: (e.mfu_of_ceiling, e.mfu_of_datasheet) for e in encoders}
    rows = []
    for name, title in ENCODER_TITLES.items():
        ceiling, sheet = (number(share, 1, "%", 100) or NOT_RUN for share in shares.get(name, (None, None)))
        both = NOT_RUN if ceiling == sheet == NOT_RUN else f"measured ceiling {ceiling}, datasheet {sheet}"
        rows.append((f"MFU of {title}", both))
    unit = "Core" if run is not None and run.devices and run.devices[0].kind == "cpu" else "GPU"
    hours, kwh, price = (
        number(getattr(run, f"{what}_per_million", None), digits) or NOT_RUN for what, digits in COSTS.items()
    )
    unpriced = f"{NOT_RUN} (the profile gives no price)"
    rows += [
        (f"{unit}-hours per million reads", str(hours)),
        ("kWh per million reads", str(kwh)),
        ("Price per million reads", unpriced if report.profile.price_per_device_hour is None else str(price)),
        ("Checkpoint overhead", overhead_text(report.overhead)),
    ]
    return Table({"What": what, "Value": value} for what, value in rows)


def bottleneck(report: Report) -> Section:
    """The avoidable losses of time, the largest first, and the stages that take most of it."""
    b, word = report.bottleneck, {True: "expected", False: "actionable"}
    losses = Table(
        {
            "Loss": loss.kind,
            "Saves at most": number(loss.saves_s, 1, " s"),
            "Share of time": percent(loss.share),
            "Verdict": word[loss.expected],
            "What": loss.detail,
            "Advice": loss.advice,
        }
        for loss in report.losses
        if loss.share is not None
    )
    saves = f"; removing it would save {b.saves_s:.1f} s at most, {percent(b.share)} of the time" if losses.rows else ""
    prose = f"({word[b.expected]}): {b.detail}{saves}. Advice: {b.advice}."
    return Section("Bottleneck", (prose, *report.findings), (losses,), b.kind)
