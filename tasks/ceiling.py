"""The step that measures how fast the linear layers can be at most on the devices."""

from pathlib import Path

from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.config import EngineSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.report import messages
from virnuc_core.runfiles import ModelFlops
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.ceiling import measure_ceilings


@retrying_task("ceiling", "ceiling of {bench.devices}")
def measure_ceiling(out: Path, bench: Bench, engine: EngineSpec) -> Outcome[ModelFlops]:
    """Measure the ceiling of each device: the highest speed that the encoders' products reach.

    Args:
        out: The directory of the validation; logs are written to `out/logs`.
        bench: The models and devices.
        engine: Settings of the runs.
    """
    devices = resolve(bench.devices)
    resolved_engine = resolve_engine(engine, devices)
    with device_slots(devices):
        flops = measure_ceilings(bench.models, devices, resolved_engine, out / "logs")
    return completed(flops, messages.ceiling_message(flops))
