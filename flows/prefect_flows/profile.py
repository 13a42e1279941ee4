"""The flow `profile`: where the time of a run goes. `flows/profile.py` has its steps."""

from prefect import flow

from virnuc.flows import profile as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.tools.trace import TraceTable


@flow(name="profile", flow_run_name=named_by("reads", "devices"))
@with_parameters(ProfileSettings)
def profile(settings: ProfileSettings) -> Outcome[tuple[TraceTable, ...]]:
    """Records a shard of each device with torch's profiler, and times the nine stages of a run.

    First all reads are predicted, which gives the seconds of each stage from reading to results.
    If this run is complete already, it is used again. The recording is always made anew.
    """
    return steps.profile(settings)
