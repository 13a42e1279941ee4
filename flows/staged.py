"""How a flow over one run directory begins: what it was given is checked, the run has a name, its reads are staged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flows import preflight
from flows.crash_detection import announce
from flows.names import sample_of
from flows.parameters import PredictSettings, ProfileSettings, TrainSettings
from flows.running import watch_for_cancellation
from tasks.embed import embed
from tasks.guard import device_slots
from tasks.stage import stage
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.process import PrewarmedWorkers
from virnuc_core.pipeline import model_length, prewarm, read_summary
from virnuc_core.reads.stage import StageSpec, StageSummary
from virnuc_core.results import THRESHOLD
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary

FREE_NOW_S: Final = 1.0  # a device's slot that takes longer to get is another run's


@dataclass(frozen=True, slots=True)
class Staged:
    """A run whose reads are staged and whose settings are known to work."""

    run: RunDir
    staging: StageSummary
    label: str  # of the sample, for names in the UI
    devices: Devices
    engine: EngineSpec
    models: Path
    force: bool  # results of an earlier run are dropped
    prewarmed: (
        PrewarmedWorkers | None
    )  # workers that have the weights by now; None where the devices were busy or nothing is left

    def embed(self, *, threshold: float = THRESHOLD) -> RunSummary:
        """Result files of the staged reads. Errors: those of the embed task."""
        return embed(
            self.run,
            self.staging,
            store=self.run.store,
            models=self.models,
            devices=self.devices,
            engine=self.engine,
            label=self.label,
            force=self.force,
            prewarmed=self.prewarmed,
            threshold=threshold,
        ).result()


@contextmanager
def begin(settings: PredictSettings | ProfileSettings | TrainSettings) -> Iterator[Staged]:
    """Check everything, announce the run and stage its reads, while workers load the weights on devices that are free.

    The devices stay this run's until the body ends. Errors: those of `preflight.check` and of the stage task.
    """
    watch_for_cancellation()
    base = EngineSpec()
    preflight.check(settings, reads=settings.reads, models=settings.models, out=settings.out, base=base)
    label, devices, run = sample_of(settings.reads), settings.parsed_devices(), RunDir(settings.out)
    engine = settings.engine(base)
    announce(label, devices.kind)
    spec = StageSpec(
        reads=settings.reads,
        model_length=model_length(settings.models),
        workers=settings.staging_processes,
        on_error=settings.on_error,
        strict=settings.strict,
    )
    with ExitStack() as held:
        prewarmed: PrewarmedWorkers | None = None
        if read_summary(run) is None:
            with suppress(TimeoutError):  # busy devices are waited for when there is work for them
                held.enter_context(device_slots(resolve(devices), wait_s=FREE_NOW_S))
                prewarmed = prewarm(settings.models, devices, engine)
                held.callback(prewarmed.close)
        staging = stage(spec, run.store, label=label, email=settings.email, force=settings.force).result()
        yield Staged(run, staging, label, devices, engine, settings.models, settings.force, prewarmed)
