"""What the report says beside the criteria: efficiency, cost, commits, reads, approval and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from virnuc_core.report.model import Accounting, ApprovalState, OverheadMetrics, Report, RunMetrics
from virnuc_core.report.text import RULE
from virnuc_core.telemetry.records import Encoder

NOT_RUN: Final = "not run"
ENCODER_TITLES: Final = {"esm2": "ESM-2", "dnabert_s": "DNABERT-S"}
COLUMN: Final = 33


def measured(value: float | None, digits: int = 1, unit: str = "", scale: float = 1.0) -> str:
    """A figure with its unit; `not run` where it was not measured."""
    return NOT_RUN if value is None else f"{value * scale:,.{digits}f}{unit}"


def render_extras(report: Report) -> str:
    """The lines below the block of `report.txt`."""
    lines = [f"BESIDE THE CRITERIA ({'no run' if report.run is None else report.run.label})"]
    for words, value in facts(report):
        lines.append(f"  {words + ':':<{COLUMN}}{value}")
    if found := warnings_of(report):
        lines += ["", f"WARNINGS ({len(found)})", *(f"  - {one_line(line)}" for line in found)]
    return "\n".join(["", *lines, RULE]) + "\n"


def warnings_of(report: Report) -> tuple[str, ...]:
    """The report's warnings, and one on an answer that is older than the figures it stands beside."""
    if report.approval is None or not report.approval.of_earlier_run:
        return report.warnings
    return (*report.warnings, "The approval was given before these figures were measured: it speaks of an earlier run.")


def one_line(text: str) -> str:
    """Text from files on one line, with nothing a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def facts(report: Report) -> list[tuple[str, str]]:
    """Efficiency, cost, commits, reads, software and approval as words and values."""
    return [
        *efficiency(report.run),
        *cost(report),
        ("Checkpoint overhead", overhead_text(report.overhead)),
        ("Reads", accounts_text(report.accounting)),
        ("Driver, CUDA, torch", software(report.provenance.versions)),
        ("Approval", approval_text(report.approval)),
    ]


def efficiency(run: RunMetrics | None) -> list[tuple[str, str]]:
    """MFU of each encoder, against the ceiling measured on the same device and against its data sheet."""
    telemetry = None if run is None else run.telemetry
    found = {encoder.encoder: encoder for encoder in (telemetry.encoders if telemetry else ())}
    lines = []
    names: tuple[Encoder, ...] = ("esm2", "dnabert_s")
    for name in names:
        encoder = found.get(name)
        ceiling = measured(encoder.mfu_of_ceiling if encoder else None, 1, "%", 100)
        sheet = measured(encoder.mfu_of_datasheet if encoder else None, 1, "%", 100)
        both = NOT_RUN if ceiling == sheet == NOT_RUN else f"measured ceiling {ceiling}, datasheet {sheet}"
        lines.append((f"MFU of {ENCODER_TITLES[name]}", both))
    return lines


def hours_title(run: RunMetrics | None) -> str:
    """`GPU-hours` or, where no GPU ran, `Core-hours`."""
    return "Core-hours" if run is not None and run.devices and run.devices[0].kind == "cpu" else "GPU-hours"


def cost(report: Report) -> list[tuple[str, str]]:
    """What a million reads take, by the run that is judged."""
    run = report.run
    price = measured(run.price_per_million if run else None, 2)
    if report.profile.price_per_device_hour is None:
        price = f"{NOT_RUN} (the profile gives no price)"
    return [
        (f"{hours_title(run)} per million reads", measured(run.device_hours_per_million if run else None, 3)),
        ("kWh per million reads", measured(run.kwh_per_million if run else None, 3)),
        ("Price per million reads", price),
    ]


def overhead_text(found: OverheadMetrics | None) -> str:
    """`1.2% (median of 3 pairs of runs, 0.9 to 1.4%)`."""
    if found is None or found.median is None or found.least is None or found.most is None:
        return NOT_RUN if found is None or not found.problem else f"{NOT_RUN} ({found.problem})"
    spread = f"{100 * found.least:.1f} to {100 * found.most:.1f}%"
    why = f"; {found.problem}" if found.problem else ""
    return f"{100 * found.median:.1f}% (median of {found.pairs} pairs of runs, {spread}{why})"


def accounts_text(found: Accounting | None) -> str:
    """`2,000 = 892 viral + 789 others + …`."""
    if found is None:
        return NOT_RUN
    parts = " + ".join(f"{n:,} {name}" for name, n in found.fates.items())
    return f"{found.reads:,} = {parts}{'' if found.adds_up else ' (does NOT add up with the run)'}"


def fate_lines(found: Accounting, n_reads: int | None) -> list[tuple[str, int | None]]:
    """The fates, their sum, and what it must be."""
    return [*found.fates.items(), ("sum of the fates", sum(found.fates.values())), ("reads that came in", n_reads)]


def remark_lines(found: Accounting) -> list[tuple[str, str]]:
    """Remarks on reads, and what of the input never became a read."""
    kept = [(f"reads: {name}", f"{n:,}") for name, n in found.flags.items()]
    left = (("records skipped", found.skipped_records), ("files ignored", found.ignored_files))
    return kept + [(name, "not recorded" if n is None else f"{n:,}") for name, n in left]


def software(versions: Mapping[str, str]) -> str:
    """Versions of driver, CUDA and torch, as far as recorded."""
    cuda = versions.get("cuda") or versions.get("cuda_driver")
    return ", ".join((versions.get("driver") or "none", cuda or "none", versions.get("torch") or "unknown"))


def approval_text(found: ApprovalState | None) -> str:
    """`approved by R. Reviewer, 2026-03-01T12:00:00+00:00`."""
    if found is None:
        return "not asked for"
    if found.reviewer is None:
        return f"{found.verdict}: nobody has answered yet"
    when = "" if found.when is None else f", {found.when.replace('T', ' ').replace('+00:00', ' UTC')}"
    older = "; the answer is older than these figures" if found.of_earlier_run else ""
    return one_line(f"{found.verdict} by {found.reviewer}{when}{older}")
