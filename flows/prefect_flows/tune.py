"""The flow `tune`, a sweep over engine settings. `flows/tune.py` has its steps."""

from prefect import flow

from virnuc.flows import tune as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.tune import TuneSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.tools.tune import Recommendation


@flow(name="tune", flow_run_name=named_by("reads", "profile", "devices"))
@with_parameters(TuneSettings)
def tune(settings: TuneSettings) -> Outcome[Recommendation]:
    """Finds the fastest engine settings that do not change the results.

    The settings are measured for this machine, these weights and these reads.

    Measurements are kept: a sweep that stopped goes on where it was, and one that is complete
    measures nothing again.
    """
    return steps.tune(settings)
