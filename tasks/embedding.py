"""The step that embeds and scores."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from prefect.client.schemas.objects import State

from virnuc.tasks.artifacts import host_key, progress_artifact, publish_table
from virnuc.tasks.run_tables import device_rows, stage_rows
from virnuc.tasks.server_connection import device_slots
from virnuc.tasks.task import completed, first_attempt, retrying_task
from virnuc.tasks.time_limit import time_limit
from virnuc_core.config import ClassifySpec
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.pipeline import classify, read_summary
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops, RunSummary, read, write
from virnuc_core.telemetry.log import TelemetryFile


@retrying_task("embed", "embed {label} on {spec.devices}")
def embed(
    run: RunDir,
    staging: StageSummary,
    spec: ClassifySpec,
    *,
    label: str,
    watch: RunMonitor | None = None,
    time_limit_s: float | None = None,
    pool: Pool | None = None,
    flops: ModelFlops | None = None,
) -> State[RunSummary]:
    """Result files in `run`. Shards committed before are kept; `force` drops them, once. Errors: `TimeLimitError` after
    `time_limit_s`, as the summary then says; those of `classify`."""
    devices = spec.devices
    watch = watch or RunMonitor()
    progress = progress_artifact(f"progress-{label}-{devices}", f"Embedding {label} on {devices}")
    spec = spec.model_copy(update={"force": spec.force and first_attempt()})

    def write_stopped(
        wall_s: float,
    ) -> None:  # how long it had taken, and nothing that was not measured
        told: dict[str, Any] = {
            "staging_s": staging.total_s,
            "total_s": staging.total_s + wall_s,
            "wall_s": wall_s,
        }
        told |= {"n_reads": staging.counts.n_reads, "devices": resolve_here(spec)}
        write(run.summary, RunSummary(stopped_at_limit=True, **told))

    before = read_summary(run)
    with device_slots(resolve_here(spec)), progress if watch.alone else nullcontext() as show:
        watch = replace(watch, on_progress=show)
        with time_limit(run.root, time_limit_s, write_stopped):
            summary = classify(run, staging, spec, watch=watch, pool=pool, flops=flops)
        if show is not None:
            show(1.0)
    publish_table(
        host_key(f"stages-{label}-{devices}"),
        stage_rows(summary),
        f"Where the time went on {devices}",
    )
    if spec.cluster and summary.telemetry is not None:
        rows = device_rows(
            read(run.telemetry / summary.telemetry, TelemetryFile).summary.devices,
            summary.deaths or (),
        )
        publish_table(
            host_key(f"devices-{label}-{devices}"), rows, f"What the devices of {spec.cluster} did"
        )
    if before is not None and (summary.total_s, summary.telemetry) == (
        before.total_s,
        before.telemetry,
    ):
        return completed(
            summary, f"all {summary.shards} shards were committed: nothing to compute", reused=True
        )
    kept = f", {summary.shards_reused} were committed before" if summary.shards_reused else ""
    deaths = f"; {len(summary.deaths)} worker deaths survived" if summary.deaths else ""
    again = (
        f"; {summary.rows_repeated:,} rows near the threshold again in fp16"
        if summary.rows_repeated
        else ""
    )
    computed = f"{summary.shards_computed} of {summary.shards} shards computed{kept}"
    return completed(summary, f"{computed} in {summary.wall_s:.1f} s{again}{deaths}")
