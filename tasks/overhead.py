"""The step that measures what commits, the sampler and loading the models anew cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from virnuc.tasks.artifacts import host_key, progress_artifact, publish_table
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.task import retrying_task
from virnuc_core.config import EngineSpec, Switch
from virnuc_core.engine.devices import resolve
from virnuc_core.report import messages
from virnuc_core.report.views.tools import overhead_rows
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.overhead import measure_overhead
from virnuc_core.validation import OverheadFile


@retrying_task("overhead", "overhead of {label} on {bench.devices}")
def measure_costs(
    out: Path,
    bench: Bench,
    engine: EngineSpec,
    *,
    label: str,
    force: bool = False,
    switches: Sequence[Switch] | None = None,
    pairs: int | None = None,
    shards: int | None = None,
) -> Outcome[OverheadFile]:
    """Measure what features cost: run the same shards with and without each of them.

    Writes `checkpoint_overhead.json`.

    A measurement of the same work that is already there is used. Settings left at None are those
    of `measure_overhead`.

    Args:
        out: The directory of the validation.
        bench: The reads, models and devices.
        engine: Settings of the runs.
        label: The name of the sample, for names in the UI.
        force: Measure again.
        switches: What is switched on and off.
        pairs: Pairs of runs for each switch.
        shards: Shards of each run, for each device.
    """
    options: dict[str, Any] = {"switches": switches, "pairs": pairs, "shards": shards}
    given_options = {name: value for name, value in options.items() if value is not None}
    progress = progress_artifact(
        f"progress-{label}-overhead", f"Runs with and without what costs, of {label}"
    )
    must_measure = force and first_attempt()
    with device_slots(resolve(bench.devices)), progress as show:
        costs = measure_overhead(
            out, bench, engine, force=must_measure, on_run=show, **given_options
        )
    publish_table(
        host_key(f"overhead-{label}"),
        overhead_rows(costs.pairs),
        f"What these cost, {label} on {bench.devices}",
    )
    return completed(costs, messages.overhead_message(costs.pairs))
