"""A run whose reads are staged while worker processes load the weights. Predictions, profiles and
training begin so.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from virnuc.flows.preflight import preflight
from virnuc.flows.settings.shared import RunSettings
from virnuc.flows.shared_steps import stage_reads_of
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.embedding import embed
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.running_mark import announce
from virnuc_core.config import ClassifySpec
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.pipeline import read_summary, workers_for
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary

FREE_NOW_S: Final = 1.0  # a device whose slot takes longer to get is used by another run


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A run whose reads are staged and whose settings are known to work.

    Attributes:
        run: The run directory.
        staging: How many reads and rows were staged, and from which files.
        label: The name of the sample, for names in the UI.
        spec: Settings of the run.
        pool: Workers that have loaded the weights. None if the devices were busy, or if the run is
            complete.
        workers: Ends the workers when it is closed.
    """

    run: RunDir
    staging: StageSummary
    label: str
    spec: ClassifySpec
    pool: Pool | None
    workers: ExitStack

    def embed(self, monitor: RunMonitor | None = None) -> Outcome[RunSummary]:
        """Embed and score the staged reads, write the result files, and end the workers.

        Args:
            monitor: How the run is observed, and what is loaded meanwhile.
        """
        with self.workers:
            return embed(
                self.run,
                self.staging,
                self.spec,
                label=self.label,
                monitor=monitor,
                pool=self.pool,
            )


@contextmanager
def staged_run(settings: RunSettings) -> Iterator[StagedRun]:
    """Check the settings, stage the reads, and let workers load the weights meanwhile.

    No workers start if the run is complete, or if other runs use the devices. The devices of the
    workers stay reserved until the `with` block ends, and the workers end with it at the latest.

    Raises:
        VirnucError: The settings, the reads or the weights cannot be used; see `preflight`.
    """
    preflight(settings)
    label = sample_name(settings.all_inputs)
    run = RunDir(settings.out)
    spec = settings.spec(label)
    announce(label, spec.devices.kind)
    with ExitStack() as slots, ExitStack() as workers:
        pool = None
        is_complete = read_summary(run) is not None
        if not is_complete:
            # If other runs use the devices, no workers start now. The step that embeds then waits
            # for the devices and starts workers of its own.
            with suppress(TimeoutError):
                slots.enter_context(device_slots(resolve_here(spec), wait_s=FREE_NOW_S))
                pool = workers.enter_context(workers_for(spec, run.root, warm=True))
        staging = stage_reads_of(settings, label)
        yield StagedRun(run, staging, label, spec, pool, workers)
