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
    """Times what three features cost: checkpoints, the sampler, and models that are not kept.

    The first shards of a validation are computed with and without each feature. Then its report is
    made again. A cost that was measured before, with the same settings, is measured again only
    with `force`.
    """
    return steps.overhead(settings)
