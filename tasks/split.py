"""The step that splits labelled reads into training, validation and test sets."""

from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.config import TrainSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.rundir import RunDir
from virnuc_core.training import splits
from virnuc_core.training.splits import Examples


@retrying_task("split", "split {label}")
def choose_examples(run: RunDir, spec: TrainSpec, *, label: str) -> Outcome[Examples]:
    """Choose the rows that the head learns from, and those that it is tested on.

    Args:
        run: The run directory with the staged reads.
        spec: The table of origins, and how to split.
        label: The name of the sample, for names in the UI.

    Raises:
        InputError: The table of origins and the reads do not fit each other.
    """
    examples = splits.choose_examples(OrfStore.open(run.store), spec)
    return completed(examples, messages.split_message(examples))
