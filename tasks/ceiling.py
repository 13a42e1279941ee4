"""Ceiling."""

from pathlib import Path

from prefect.client.schemas.objects import State

from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import EngineSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.report import messages
from virnuc_core.runfiles import ModelFlops
from virnuc_core.tools.bench import Bench, measure_ceilings


@retrying_task("ceiling", "ceiling of {bench.devices}")
def measure_ceiling(out: Path, bench: Bench, engine: EngineSpec) -> State[ModelFlops]:
    """The ceilings of these devices with these weights. Errors: those of `measure_ceilings`."""
    found = resolve(bench.devices)
    with device_slots(found):
        flops = measure_ceilings(
            bench.models, found, resolve_engine(engine, found[0].kind), out / "logs"
        )
    return completed(flops, messages.ceiling(flops.esm2_ceiling_tokens_s))
