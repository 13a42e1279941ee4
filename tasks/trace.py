"""The step that records profiler traces of a few shards."""

from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.config import EngineSpec, TraceSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.tools import trace as tracer
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.trace import TraceTable


@retrying_task("trace", "trace {label} on {bench.devices}")
def record_traces(
    run: RunDir, bench: Bench, engine: EngineSpec, spec: TraceSpec, *, label: str
) -> Outcome[tuple[TraceTable, ...]]:
    """Record traces, and tables of what they show, in `spec.folder`.

    Some of the run's shards are computed again for it, and the results are thrown away.

    Args:
        run: The finished run.
        bench: The reads, models and devices.
        engine: Settings of the run.
        spec: What to record, and where.
        label: The name of the sample, for names in the UI.
    """
    with device_slots(resolve(bench.devices)), run_lock(run.root):
        tables = tracer.trace(bench, engine, spec)
    return completed(tables, messages.trace_extent(tables))
