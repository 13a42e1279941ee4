"""Split."""

from prefect.client.schemas.objects import State

from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import TrainSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.rundir import RunDir
from virnuc_core.training.evaluation import Examples, choose


@retrying_task("split", "split {label}")
def choose_examples(run: RunDir, spec: TrainSpec, *, label: str) -> State[Examples]:
    """The rows to learn from and to be judged by. Errors: `InputError` where truth and reads do not fit each other."""
    found = choose(OrfStore.open(run.store), spec)
    return completed(found, messages.split(found))
