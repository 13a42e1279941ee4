"""The step that measures one candidate of a sweep once."""

from prefect.client.schemas.objects import State

from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.tools.tune import Candidate, Sweep, Trial


@retrying_task("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """Measure a candidate. A trial of the same work that is already there is used.

    Args:
        sweep: How candidates are measured.
        candidate: The settings to measure.
        repeat: Which of its measurements this is.
        name: The name of the task run.

    Returns:
        A state with the trial, or with the reason why the candidate cannot run.
    """
    with device_slots(resolve(sweep.bench.devices)):
        outcome = sweep.trial(candidate, repeat)
    if isinstance(outcome, str):
        return completed(outcome, f"cannot run: {outcome}")
    return completed(outcome, messages.trial_message(outcome), reused=outcome.reused)
