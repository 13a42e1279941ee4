"""The flow `train`, which fits a classifier head. `flows/train.py` has its steps."""

from prefect import flow

from virnuc.flows import train as steps
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.train import TrainSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.training.train_file import TrainFile


@flow(name="train", flow_run_name=named_by("reads", "devices"))
@with_parameters(TrainSettings)
def train(settings: TrainSettings) -> Outcome[TrainFile]:
    """Fits a head on reads whose origin is known; no genome, nor one of its kin, is on both sides
    of a split.

    The figures are of genomes that the head has never met, with intervals and baselines:
    `OUT/train.json` and `OUT/train.html`. The head is written to `OUT/head`; with `install` it
    takes the place of the models directory's own, which is kept (`virnuc models heads`).
    """
    return steps.train(settings)
