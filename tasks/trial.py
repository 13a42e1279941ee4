"""Trial."""

from prefect.client.schemas.objects import State

from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.tools.tune import Candidate, Sweep, Trial


@retrying_task("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(resolve(sweep.bench.devices)):
        found = sweep.trial(candidate, repeat)
    if isinstance(found, str):
        return completed(found, f"cannot run: {found}")
    return completed(found, messages.trial(found), reused=found.reused)
