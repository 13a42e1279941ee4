"""Train."""

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import TrainSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.report.training_pages import model_card, training_page
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.training.evaluation import Examples
from virnuc_core.training.training import TrainFile, train_head


@retrying_task("train", "train {label}")
def fit_head(
    run: RunDir, examples: Examples, spec: TrainSpec, cuts: RunDir | str, *, label: str
) -> State[TrainFile]:
    """The head in `run/head` with its card, and `train.json` and `train.html`: how well it does on unknown genomes."""
    found = train_head(run, OrfStore.open(run.store), examples, spec, cuts)
    write_text_atomically(run.root / "train.html", training_page(found))
    write_text_atomically(run.root / "head" / "README.md", model_card(found, with_charts=False))
    summary = messages.trained(found)
    card = model_card(found, with_charts=True)
    publish_markdown(host_key(f"head-{label}"), card, summary, run.root / "train.html")
    return completed(found, summary)
