"""The scaling curve: the same reads on one, two, four, … devices of this machine."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.flow_commands import ScaleSettings
from flows.flow_run import named, with_parameters
from flows.validate import Judged, in_short, measure
from tasks.step import done
from virnuc_core.report.formatting import number, percent
from virnuc_core.report.model import Report


@flow(name="scale", flow_run_name=named("reads", "profile", "devices"))
@with_parameters(ScaleSettings)
def scale(settings: ScaleSettings) -> State[Judged]:
    """Measures time against number of devices; results must be equal bit for bit on all of them."""
    judged, message = measure(settings, steps, with_baseline=False)
    return done(in_short(settings.out, judged), describe(judged) + message)


def steps(devices: int) -> list[int]:
    """Numbers of devices to run on: doubled from one, and all of them.

    >>> steps(1), steps(2), steps(6), steps(8)
    ([1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8])
    """
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power <= devices]
    return sorted({*doubled, devices})


def describe(judged: Report) -> str:
    """The curve in a sentence."""
    parts = []
    for row in judged.scaling:
        parts.append(f"{row.num_gpus} devices: {number(row.speedup, 2, 'x')} ({percent(row.efficiency)})")
    return "; ".join(parts) or "one device only: there is no curve"
