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
    """Records a few shards with torch's profiler, after a run of all reads that tells the seconds
    of the nine stages.

    The run is a prediction like any other and is not repeated when it is there; the recording is
    always made anew.
    """
    return steps.profile(settings)
