"""Ceiling: what each GPU sustains with nothing but the encoders' linear layers, measured just before the runs."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from tasks.guard import device_slots
from tasks.logs import core_logs
from tasks.retries import POLICY
from tasks.states import done
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.messages import resolve_engine
from virnuc_core.measure.ceiling import measure_ceilings
from virnuc_core.telemetry.flops import ModelFlops


@task(name="ceiling", task_run_name="ceiling of {devices}", cache_policy=NO_CACHE, **POLICY)
def ceiling(out: Path, *, models: Path, devices: Devices, engine: EngineSpec) -> State[ModelFlops]:
    """The ceilings of `devices` with these weights. Errors: those of `measure_ceilings`."""
    found = resolve(devices)
    with core_logs(), device_slots(found):
        flops = measure_ceilings(models, found, resolve_engine(engine, found[0].kind), out / "logs")
    return done(flops, describe(flops))


def describe(flops: ModelFlops) -> str:
    """The ceilings, in a sentence."""
    if not flops.esm2_ceiling_tokens_s:
        return "no GPU, no ceiling"
    each = ", ".join(f"{rate:,.0f}" for rate in flops.esm2_ceiling_tokens_s.values())
    return f"linear layers of ESM-2 alone: {each} tokens/s"
