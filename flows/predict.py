"""The daily work: reads in, VirNucPro's two result files out."""

from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.shared_steps import publish_prediction
from virnuc.flows.staged_run import staged_run
from virnuc.tasks.outcome import REUSED, Outcome, completed
from virnuc_core.runfiles import RunSummary


def predict(settings: PredictSettings) -> Outcome[RunSummary]:
    """Say which reads are viral, and write the result files.

    A run that stopped goes on where it was. A complete one is not computed again, and says so.
    Several samples are several runs, one for each.

    Returns:
        An outcome with the summary of the run. Its message has the numbers of viral reads.

    Raises:
        VirnucError: The settings, the reads or the weights cannot be used, or the run failed.
    """
    if settings.has_samples:
        from virnuc.flows.predict_samples import predict_samples  # few runs need it

        return predict_samples(settings)
    with staged_run(settings) as staged:
        embedding = staged.embed()
        summary = embedding.result()
        publish_prediction(staged.run, staged.label, summary, staged.staging)
    message = describe_result(summary)
    if embedding.name == REUSED:
        message += "; nothing had to be computed"
    return completed(summary, message)


def describe_result(summary: RunSummary) -> str:
    """Return one line with the numbers of viral, uncertain and failed reads, and of viral pairs."""
    fates = summary.fates
    if not summary.n_reads:
        return "the input holds no reads; the tables have no lines"
    message = f"{fates.get('viral', 0):,} of {summary.n_reads:,} reads are viral"
    if "uncertain" in fates:
        message += f", {fates['uncertain']:,} are uncertain"
    n_pairs = sum(summary.pairs.values())
    if n_pairs:
        message += f"; {summary.pairs['viral']:,} of {n_pairs:,} pairs"
    n_failed = fates.get("failed", 0)
    if n_failed:
        message += f"; {n_failed:,} reads have rows that had to be set aside (failed.tsv)"
    return message
