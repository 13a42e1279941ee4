"""What several forms of the report say of it: its warnings, what was met, what has no figure."""

from __future__ import annotations

from virnuc_core.profiles import Target
from virnuc_core.report.metrics import BASELINE_TITLES
from virnuc_core.report.model import Report


def warnings(report: Report) -> tuple[str, ...]:
    """The report's warnings, and one on an answer that is older than the figures it stands beside."""
    too_old = "The approval was given before these figures were measured: it speaks of an earlier run."
    return (*report.warnings, *([too_old] if report.approval and report.approval.of_earlier_run else []))


def met_sentence(report: Report) -> str:
    """`6 of 7 asked criteria met`, what was missed, and what could not be judged: that first where nothing failed."""
    left = ", ".join(c.title for c in report.asked if c.verdict in ("not run", "projected"))
    said = [f"{report.met} of {len(report.asked)} asked criteria met", f"not met: {', '.join(report.missed)}"]
    said = [*said[: 2 if report.missed else 1], *([f"not judged here: {left}"] if left or not report.asked else [])]
    return "; ".join(reversed(said) if report.outcome == "not judged" else said)


def baseline_title(report: Report) -> str:
    """`v1.0` or `vanilla`."""
    name = report.baseline.name if report.baseline else report.profile.baseline.name
    return BASELINE_TITLES.get(name, name)


def skipped(report: Report) -> dict[int, str]:
    """Numbers of devices of which there is no figure: those that were not here for a band, and runs without a time."""
    here = max((len(run.devices) for run in report.runs), default=0)
    bands = sorted(map(int, report.profile.scaling_bands))
    why = {len(run.devices): run.untimed for run in report.runs if run.untimed}
    return why | {count: f"there were {here} devices" for count in bands if count > here > 0}


def share_of(target: Target | None, devices: int) -> Target | None:
    """The target of a speed-up as efficiency: percent of the devices."""
    return None if target is None else Target(op=target.op, value=100.0 * target.value / devices)
