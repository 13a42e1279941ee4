"""The scaling curve: the same reads on one, two, four, … devices of this machine."""

from __future__ import annotations

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows import preflight
from flows.finished import finished_runs, unless_computed
from flows.forms import takes
from flows.measure import measure
from flows.names import from_parameters, sample_of
from flows.parameters import ScaleSettings
from flows.running import watch_for_cancellation
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.states import done
from tasks.tables import percent
from virnuc_core.config import load_profile
from virnuc_core.report.formatting import number
from virnuc_core.report.model import Report


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "profile", "devices")


@flow(name="scale", flow_run_name=_run_name)
@takes(ScaleSettings)
def scale(settings: ScaleSettings) -> State[Report]:
    """Measures time against number of devices; results must be equal bit for bit on all of them."""
    profile = load_profile(settings.profile)
    with no_orphans(), core_logs():
        watch_for_cancellation()
        preflight.check(settings, reads=settings.reads, models=settings.models, out=settings.out, base=profile.engine)
        counts = steps(len(preflight.devices(settings, profile.engine)))
        before = finished_runs(settings.out)
        judged = measure(settings, profile, sample_of(settings.reads), counts, with_baseline=False)
    return done(judged, describe(judged) + unless_computed(settings.out, before))


def steps(devices: int) -> list[int]:
    """Numbers of devices to run on: doubled from one, and all of them.

    >>> steps(1), steps(2), steps(6), steps(8)
    ([1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8])
    """
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power <= devices]
    return sorted({*doubled, devices})


def describe(judged: Report) -> str:
    """The curve in a sentence."""
    parts = [
        f"{figure.num_gpus} devices: {number(figure.speedup, 2, 'x')} ({percent(figure.efficiency)})"
        for figure in judged.scaling
    ]
    return "; ".join(parts) or "one device only: there is no curve"
