"""The flow `predict-inbox`: each new file of a folder, once. `flows/inbox.py` has its steps."""

from collections import Counter

from prefect import flow

from virnuc.flows import inbox as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.inbox import RowFate


@flow(name="predict-inbox", flow_run_name=named_by("inbox", "devices"))
@with_parameters(InboxSettings)
def predict_inbox(settings: InboxSettings) -> Outcome[Counter[RowFate]]:
    """Predicts each new file of a folder once, and writes one row for each file with its fate to
    inbox.tsv.
    """
    return steps.predict_inbox(settings)
