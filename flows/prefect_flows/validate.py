"""The flow `validate`, which proves a release or a machine. `flows/validate.py` has its steps."""

from prefect import flow

from virnuc.flows import validate as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.outcome import ValidationResult
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.outcome import Outcome


@flow(name="validate", flow_run_name=named_by("reads", "profile", "devices", "cluster"))
@with_parameters(ValidateSettings)
def validate(settings: ValidateSettings) -> Outcome[ValidationResult]:
    """Proves a machine: the same reads by the baseline, on one device, two and all, compared and
    judged by a profile.

    A validation that stopped goes on where it was; one that is complete is judged again without
    computing anything.
    """
    return steps.validate(settings)
