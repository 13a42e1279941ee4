"""The flow `predict`, the daily work: reads in, VirNucPro's two result files out.

`flows/predict.py` has its steps.
"""

from prefect import flow

from virnuc.flows import predict as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.predict import PredictSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.runfiles import RunSummary


@flow(name="predict", flow_run_name=named_by("reads", "samples", "devices", "cluster"))
@with_parameters(PredictSettings)
def predict(settings: PredictSettings) -> Outcome[RunSummary]:
    """Says which reads are viral. A run that stopped goes on where it was; a complete one is not
    computed again.
    """
    return steps.predict(settings)
