"""The flow `scale`: the same reads on more and more devices. `flows/scale.py` has its steps."""

from prefect import flow

from virnuc.flows import scale as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.outcome import ValidationResult
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.tasks.outcome import Outcome


@flow(name="scale", flow_run_name=named_by("reads", "profile", "devices", "cluster"))
@with_parameters(ScaleSettings)
def scale(settings: ScaleSettings) -> Outcome[ValidationResult]:
    """Measures time against number of devices; results must be equal bit for bit on all of them."""
    return steps.scale(settings)
