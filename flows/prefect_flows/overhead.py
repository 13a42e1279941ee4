"""The flow `overhead`: what features cost. `flows/overhead.py` has its steps."""

from prefect import flow

from virnuc.flows import overhead as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.validation import OverheadFile


@flow(name="overhead", flow_run_name=named_by("out", "devices"))
@with_parameters(OverheadSettings)
def overhead(settings: OverheadSettings) -> Outcome[OverheadFile]:
    """Times what commits, the sampler and loading the models anew cost, over the first shards of a
    validation.

    Its report is then made again. What was measured before, of the same all, is measured again by
    `force` only.
    """
    return steps.overhead(settings)
