"""The training of a classifier head on reads whose origin is known."""

from pathlib import Path

from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.staged_run import StagedRun, staged_run
from virnuc.tasks.embedding import embed
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.split import choose_examples
from virnuc.tasks.staging import stage
from virnuc.tasks.training import fit_head
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.encoders.kept_heads import install_head
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.reads.stage import StageSpec
from virnuc_core.rundir import RunDir
from virnuc_core.training.fragments import NO_GENOMES, write_fragments
from virnuc_core.training.splits import Examples
from virnuc_core.training.train_file import TrainFile
from virnuc_core.training.training import link_models, remove_results


def train(settings: TrainSettings) -> Outcome[TrainFile]:
    """Fit a classifier head on reads whose origin is known, and measure it on genomes it never met.

    Writes `head/`, `train.json` and `train.html` to the output directory. With `install`, the head
    also takes the place of the one in the models directory, which is kept as a copy.

    Returns:
        An outcome with the record of the training.

    Raises:
        VirnucError: The settings, the table of origins or the reads cannot be used.
    """
    head_shape = check_models(settings.models, settings.model_length)
    # Embeddings do not depend on a head, but a run needs one. So the run uses another models
    # directory, with links to the encoders and a head with random weights.
    models = link_models(settings.models, settings.out, head_shape)
    # The model length was put into that head. It need not be given again.
    embedding_settings = settings.model_copy(update={"models": models, "model_length": None})
    with staged_run(embedding_settings) as staged:
        examples = choose_examples(staged.run, settings, label=staged.label).result()
        staged.embed(RunMonitor(has_verdicts=False)).result()
        # The run has also written verdicts, but those of a head with random weights.
        remove_results(staged.run)
        # The run over fragments of genomes, or the reason why there is none.
        fragments_run: RunDir | str = NO_GENOMES
        if settings.genomes is not None:
            fragments_run = _embed_fragments(staged, examples, settings.genomes)
        training = fit_head(staged.run, examples, settings, fragments_run, label=staged.label)
        record = training.result()
        summary = training.message
        if settings.install or settings.install_anyway:
            head = staged.run.root / "head"
            installation = install_head(
                head, settings.models, install_anyway=settings.install_anyway
            )
            summary = f"{summary}; {installation}"
    return completed(record, summary)


def _embed_fragments(staged: StagedRun, examples: Examples, genomes: Path) -> RunDir | str:
    """Embed fragments of several lengths, cut from the genomes of the test set.

    They show how well the head does on shorter and longer reads. The run is written to the folder
    `lengths` of the run directory.

    Args:
        staged: The run over the training reads.
        examples: The split, which names the genomes of the test set.
        genomes: The file of genomes.

    Returns:
        The finished run, which is always made anew; or the reason why there is none.
    """
    run = RunDir(staged.run.root / "lengths")
    label = f"{staged.label}-lengths"
    fragments = run.root / "cuts.fasta"
    reason = write_fragments(examples, genomes, fragments)
    if reason:
        return reason
    stage_spec = StageSpec(reads=(str(fragments),), model_length=staged.staging.model_length)
    staging = stage(stage_spec, run.store, label=label, force=True).result()
    spec = staged.spec.model_copy(update={"force": True})
    embed(run, staging, spec, label=label, monitor=RunMonitor(has_verdicts=False)).result()
    remove_results(run)  # verdicts of a head with random weights
    return run
