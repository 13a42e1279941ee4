"""The step that measures one candidate of a sweep once."""

from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.tools.tune import Candidate, Sweep, Trial


@retrying_task("measure", "{name}")
def run_trial(
    sweep: Sweep, candidate: Candidate, repeat: int, *, name: str
) -> Outcome[Trial | str]:
    """Measure a candidate. A trial of the same work that is already there is used.

    Args:
        sweep: How candidates are measured.
        candidate: The settings to measure.
        repeat: Which of its measurements this is.
        name: The name of the task run.

    Returns:
        An outcome with the trial, or with the reason why the candidate cannot run.
    """
    with device_slots(resolve(sweep.bench.devices)):
        trial = sweep.trial(candidate, repeat)
    if isinstance(trial, str):
        return completed(trial, f"cannot run: {trial}")
    return completed(trial, messages.trial_message(trial), reused=trial.reused)
