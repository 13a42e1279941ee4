"""The performance summary in words and columns: workload, throughput, packing, loader, devices, requirements."""

from __future__ import annotations

from typing import Final

from virnuc_core.report.model import Report
from virnuc_core.report.text import UNKNOWN, criterion, mark, shown, target_text

RULE: Final = "=" * 70
GIGA: Final = 1e9


def render_summary(report: Report) -> str:
    """The judged run in a page of text; what was not measured is `n/a`, and what is projected says so."""
    lines = ["Performance Validation Summary", RULE, ""]
    for section in (_workload, _throughput, _packing, _loader, _devices):
        lines += [*section(report), ""]
    lines += [RULE, "", "Requirements Validation:"]
    for name, words in (("two_device_time", "time"), ("gpu_utilisation", "GPU"), ("packing", "packing")):
        found = criterion(report, name)
        asked = f"{found.perf_id} ({words} {target_text(found)}):"
        lines.append(f"  {asked:<32} {shown(found):>12}  {mark(found)}")
    return "\n".join([*lines, "", RULE]) + "\n"


def _line(words: str, value: float | None, digits: int = 0, unit: str = "") -> str:
    return f"  {words + ':':<28}{UNKNOWN if value is None else f'{value:,.{digits}f}':>14}{unit and ' ' + unit}"


def _workload(report: Report) -> list[str]:
    run, projected = report.run, report.profile.projection_reads
    hours = run.total_s / 3600 if run and run.total_s is not None else None
    rate = run.reads_per_s * 3600 if run and run.reads_per_s is not None else None
    return [
        "Workload:",
        _line("Total sequences", run.n_reads if run else None),
        _line("Total runtime", hours, 4, "hours"),
        _line("Sequences/hour", rate),
        _line(f"Projected {projected:,}", run.hours_projected if run else None, 2, "hours (projection)"),
    ]


def _throughput(report: Report) -> list[str]:
    run = report.run
    telemetry = run.telemetry if run else None
    return [
        "Throughput (PERF-05):",
        _line("Sequences/sec", run.reads_per_s if run else None, 1),
        _line("Tokens/sec", telemetry.tokens_per_s if telemetry else None),
    ]


def _packing(report: Report) -> list[str]:
    telemetry = report.run.telemetry if report.run else None
    mean, least = (telemetry.packing_efficiency, telemetry.min_packing_efficiency) if telemetry else (None, None)
    return [
        "Packing Efficiency (PERF-05):",
        _line("Average", None if mean is None else 100 * mean, 1, "%"),
        _line("Minimum", None if least is None else 100 * least, 1, "%"),
        _line("Batches <80%", telemetry.batches_below_80 if telemetry else None),
    ]


def _loader(report: Report) -> list[str]:
    telemetry = report.run.telemetry if report.run else None
    queue = telemetry.queue if telemetry else None
    return [
        "DataLoader I/O (PERF-05):",
        _line("Avg wait time", queue.mean_wait_ms if queue else None, 2, "ms"),
        _line("P95 wait time", queue.p95_wait_ms if queue else None, 2, "ms"),
        _line("Queue starved", 100 * queue.starved if queue else None, 1, "%"),
    ]


def _devices(report: Report) -> list[str]:
    telemetry = report.run.telemetry if report.run else None
    lines = ["GPU Utilization (PERF-02):"]
    for number, device in enumerate(telemetry.devices if telemetry else ()):
        used = UNKNOWN if device.embedding_percent is None else f"{device.embedding_percent:.1f} %"
        peak = UNKNOWN if device.memory_peak_bytes is None else f"{device.memory_peak_bytes / GIGA:.1f} GB"
        lines.append(f"  Device {number} ({device.device}): {used} (peak mem: {peak})")
    return lines if len(lines) > 1 else [*lines, f"  {UNKNOWN}"]
