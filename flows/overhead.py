"""The cost of commits, of the sampler and of loading the models anew, measured on a finished
validation.
"""

from virnuc.flows.preflight import preflight
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.overhead import measure_costs
from virnuc.tasks.running_mark import announce
from virnuc_core.report.build import write_report
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.tools.bench import Bench
from virnuc_core.validation import OverheadFile


def overhead(settings: OverheadSettings) -> Outcome[OverheadFile]:
    """Measure what commits, the sampler and loading the models anew cost, on a finished validation.

    The first shards of the validation are run with and without each of them. Its report is then
    written again. Measurements of the same work are used again, unless `force` is set.

    Returns:
        An outcome with the measured costs.

    Raises:
        VirnucError: The settings cannot be used, or the directory holds no finished validation.
    """
    out = settings.out
    profile = settings.profile
    devices = preflight(settings)
    announce(out.name, profile.name, devices.kind)
    bench = Bench(RunDir(out).store, settings.models, devices, profile.sample_s)
    with run_lock(out):
        measured = measure_costs(
            out,
            bench,
            settings.engine(),
            label=out.name,
            force=settings.force,
            switches=settings.switches,
            pairs=settings.pairs,
            shards=settings.shards,
        )
        write_report(out, profile)
    return completed(measured.result(), measured.message)
