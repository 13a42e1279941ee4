"""The daily work: reads in, VirNucPro's two result files out."""

from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.shared_steps import load_page_modules, publish_prediction
from virnuc.flows.staged_run import staged_run
from virnuc.tasks.outcome import REUSED, Outcome, completed
from virnuc_core.engine.embedding import RunMonitor
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
        embedding = staged.embed(RunMonitor(meanwhile=load_page_modules))
        summary = embedding.result()
        publish_prediction(staged.run, staged.label, summary, staged.staging)
    message = summary.answer.message
    if embedding.name == REUSED:
        message += "; nothing had to be computed"
    return completed(summary, message)
