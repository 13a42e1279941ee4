"""From the time of some reads to the time of all: compute grows with the tokens, loading with the files."""

from __future__ import annotations

from dataclasses import dataclass

from virnuc_core.baseline.crew import Phase
from virnuc_core.baseline.files import FILE_ROWS, assign, cut


@dataclass(frozen=True, slots=True)
class Growth:
    """How much larger the whole input is than what was measured."""

    tokens: float  # ratio
    rows: float  # ratio
    total_rows: int
    devices: int


def scale_phase(phase: Phase, growth: Growth, *, load_each_file: bool) -> float:
    """Seconds the phase would take on all rows in files of 10,000, dealt to the devices as the algorithm does.

    The measured seconds of computing are shared out over those files by their rows; each file, or each device when the
    model stays loaded, costs the mean time of a load besides.
    """
    files = [high - low for low, high in cut(growth.total_rows, FILE_ROWS)]
    compute_s = sum(one.compute_s for one in phase.done) * growth.tokens
    loads = [one.load_s for one in phase.done if one.load_s > 0]
    load_s = sum(loads) / len(loads) if loads else 0.0
    costs = [compute_s * rows / growth.total_rows + load_s * load_each_file for rows in files]
    busiest = max(sum(costs[i] for i in share) for share in assign(files, growth.devices))
    return busiest if load_each_file else busiest + load_s


def scale_stage(seconds: float, growth: Growth) -> float:
    """Seconds a stage without a model would take on all rows."""
    return seconds * growth.rows
