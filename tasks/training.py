"""The step that fits a classifier head, and writes its card and the report on its training."""

from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.config import TrainSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report import messages
from virnuc_core.report.training_pages import model_card, training_page
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.training.splits import Examples
from virnuc_core.training.train_file import TrainFile
from virnuc_core.training.training import train_head


@retrying_task("train", "train {label}")
def fit_head(
    run: RunDir, examples: Examples, spec: TrainSpec, cuts: RunDir | str, *, label: str
) -> Outcome[TrainFile]:
    """Fit a head on the embeddings of a run, and measure it on genomes that it does not know.

    Writes `head/` with the head and its card, `train.json` and `train.html` to the run directory.

    Args:
        run: The run directory with the embeddings.
        examples: The split.
        spec: Settings of the training.
        cuts: The run over fragments of several lengths; or the reason why there is none.
        label: The name of the sample, for names in the UI.
    """
    record = train_head(run, OrfStore.open(run.store), examples, spec, cuts)
    page = run.root / "train.html"
    write_text_atomically(page, training_page(record))
    card = model_card(record, with_charts=False)
    write_text_atomically(run.root / "head" / "README.md", card)

    card_with_charts = model_card(record, with_charts=True)
    summary = messages.training_message(record)
    publish_markdown(host_key(f"head-{label}"), card_with_charts, summary, page)
    return completed(record, summary)
