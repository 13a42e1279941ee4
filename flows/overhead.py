"""The cost of commits, of the sampler and of loading the models anew, measured on a finished
validation.
"""

from prefect import flow
from prefect.client.schemas.objects import State

from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.preflight import preflight
from virnuc.flows.run_names import named_by
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.tasks.overhead import measure_costs
from virnuc.tasks.running_mark import announce
from virnuc.tasks.task import completed
from virnuc_core.report.build import write_report
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.tools.bench import Bench
from virnuc_core.validation import OverheadFile


@flow(name="overhead", flow_run_name=named_by("out", "devices"))
@with_parameters(OverheadSettings)
def overhead(settings: OverheadSettings) -> State[OverheadFile]:
    """Times what commits, the sampler and loading the models anew cost, over the first shards of a
    validation.

    Its report is then made again. What was measured before, of the same all, is measured again by
    `force` only.
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
    return completed(measured.result(), measured.message or "")
