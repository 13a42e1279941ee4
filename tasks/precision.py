"""fp32."""

from pathlib import Path

from prefect.client.schemas.objects import State

from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.tools.bench import Bench, measure_precision


@retrying_task("precision", "fp32 sequences of {label}")
def embed_in_fp32(
    out: Path, bench: Bench, engine: EngineSpec, sequences: int, *, label: str
) -> State[bool]:
    """About so many sequences in fp32 in `out/fp32`, unless the runs compute in fp32 themselves."""
    with device_slots(resolve(bench.devices)[:1]):
        made = measure_precision(out, bench, engine, sequences)
    return completed(
        made,
        f"a part of {label} was embedded in fp32" if made else "the runs are in fp32 themselves",
    )
