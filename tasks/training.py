"""Train."""

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import TrainSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.render import (
    message,
    templates,
)
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.training.evaluation import Examples
from virnuc_core.training.training import TrainFile, train_head


@retrying_task("train", "train {label}")
def fit_head(
    run: RunDir, examples: Examples, spec: TrainSpec, cuts: RunDir | str, *, label: str
) -> State[TrainFile]:
    """The head in `run/head` with its card, and `train.json` and `train.html`: how well it does on unknown genomes."""
    found = train_head(run, OrfStore.open(run.store), examples, spec, cuts)
    page, card = map(templates().get_template, ("train.html.j2", "model_card.md.j2"))
    write_text_atomically(run.root / "train.html", page.render(found=found))
    write_text_atomically(run.root / "head" / "README.md", card.render(found=found, pictures=False))
    text, summary = card.render(found=found, pictures=True), message("trained", found)
    publish_markdown(host_key(f"head-{label}"), text, summary, run.root / "train.html")
    return completed(found, summary)
