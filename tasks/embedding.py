"""The step that embeds and scores the staged reads, and writes the result files."""

from contextlib import nullcontext
from dataclasses import replace

from virnuc.tasks.artifacts import host_key, progress_artifact, publish_table
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.run_tables import device_rows, stage_rows
from virnuc.tasks.task import retrying_task
from virnuc.tasks.time_limit import time_limit
from virnuc_core.config import ClassifySpec
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.pipeline import classify, read_summary, write_stopped_summary
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops, RunSummary, read


@retrying_task("embed", "embed {label} on {spec.devices}")
def embed(
    run: RunDir,
    staging: StageSummary,
    spec: ClassifySpec,
    *,
    label: str,
    monitor: RunMonitor | None = None,
    time_limit_s: float | None = None,
    pool: Pool | None = None,
    flops: ModelFlops | None = None,
) -> Outcome[RunSummary]:
    """Embed and score the staged reads, and write the result files of the run.

    Shards that were committed before are kept. `spec.force` drops them, but a retry keeps what the
    attempt before it committed.

    Args:
        run: The run directory.
        staging: The summary of the staging: counts, and how the reads were cut.
        spec: Settings of the run.
        label: The name of the sample, for names in the UI.
        monitor: How often to sample the devices, and whether the run has the terminal to itself.
        time_limit_s: End the run after this time; its summary then says so.
        pool: Workers that are already there. None starts workers for this run.
        flops: The measured ceilings of the GPUs, for the report.

    Returns:
        An outcome with the summary of the run, named `Reused` if nothing had to be computed.

    Raises:
        TimeLimitError: The run was ended at its time limit.
        VirnucError: The run failed; see `classify`.
    """
    devices = spec.devices
    # A retry must keep the shards that the attempt before it committed.
    spec = spec.model_copy(update={"force": spec.force and first_attempt()})
    monitor = monitor or RunMonitor()
    previous_summary = read_summary(run)

    def write_stopped(wall_s: float) -> None:
        """Write the summary of a run that was stopped at its time limit."""
        write_stopped_summary(run, staging, resolve_here(spec), wall_s)

    progress = progress_artifact(f"progress-{label}-{devices}", f"Embedding {label} on {devices}")
    slots = device_slots(resolve_here(spec))
    # Of runs that share the workers, the flow shows one bar for all.
    with slots, progress if monitor.alone else nullcontext() as show:
        monitor = replace(monitor, on_progress=show)
        if show is not None:
            monitor = replace(monitor, on_status=show.show_status)
        with time_limit(run.root, time_limit_s, write_stopped):
            summary = classify(run, staging, spec, monitor=monitor, pool=pool, flops=flops)
        if show is not None:
            show(1.0)
    _publish_tables(run, spec, summary, label)
    if previous_summary is not None and _is_same_run(previous_summary, summary):
        message = f"all {summary.shards} shards were committed: nothing to compute"
        return completed(summary, message, reused=True)
    return completed(summary, _describe(summary))


def _is_same_run(previous: RunSummary, summary: RunSummary) -> bool:
    """Return whether two summaries are of the same computation, so that nothing was computed."""
    return previous.total_s == summary.total_s and previous.telemetry == summary.telemetry


def _publish_tables(run: RunDir, spec: ClassifySpec, summary: RunSummary, label: str) -> None:
    """Publish a table of the stages' times and, for a cluster, a table of the devices."""
    devices = spec.devices
    publish_table(
        host_key(f"stages-{label}-{devices}"),
        stage_rows(summary),
        f"Where the time went on {devices}",
    )
    if spec.cluster and summary.telemetry is not None:
        from virnuc_core.telemetry.log import TelemetryFile  # few runs need it

        telemetry = read(run.telemetry / summary.telemetry, TelemetryFile, run.root)
        publish_table(
            host_key(f"devices-{label}-{devices}"),
            device_rows(telemetry.summary.devices, summary.deaths or ()),
            f"What the devices of {spec.cluster} did",
        )


def _describe(summary: RunSummary) -> str:
    """Return one line on the work of a run: shards, time, repeated rows and worker deaths."""
    text = f"{summary.shards_computed} of {summary.shards} shards computed"
    if summary.shards_reused:
        text += f", {summary.shards_reused} were committed before"
    text += f" in {summary.wall_s:.1f} s"
    if summary.rows_repeated:
        text += f"; {summary.rows_repeated:,} rows near the threshold again in fp16"
    if summary.deaths:
        text += f"; {len(summary.deaths)} worker deaths survived"
    return text
