"""Step trace."""

from prefect.client.schemas.objects import State

from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, retrying_task
from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.trace import TraceTable
from virnuc_core.tools.trace import trace as record


@retrying_task("trace", "trace {label} on {bench.devices}")
def record_traces(
    run: RunDir, bench: Bench, engine: EngineSpec, spec: TraceSpec, *, label: str
) -> State[tuple[TraceTable, ...]]:
    """Traces and their tables in `spec.folder`. Some of the run's shards are computed again for it and thrown away."""
    with device_slots(resolve(bench.devices)), run_lock(run.root):
        found = record(bench, engine, spec)
    return completed(found, messages.traced(found))
