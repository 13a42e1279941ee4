"""Embed: a staged store to verdicts, on the devices asked for; a retry computes only what is not committed."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import replace

from prefect.client.schemas.objects import State

from tasks.artifacts import publish_table
from tasks.guard import device_slots
from tasks.limit import TimeLimit, TimeLimitError, forget_stopped, write_stopped
from tasks.progress import ProgressArtifact
from tasks.step import done, first_attempt, step
from tasks.tables import stage_rows
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.process import PrewarmedWorkers
from virnuc_core.errors import WorkerError
from virnuc_core.pipeline import ClassifySpec, Watch, classify, read_summary
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops, RunSummary


@step("embed", "embed {label} on {spec.devices}")
def embed(
    run: RunDir,
    staging: StageSummary,
    spec: ClassifySpec,
    *,
    label: str,
    watch: Watch | None = None,
    time_limit_s: float | None = None,
    prewarmed: PrewarmedWorkers | None = None,
    flops: ModelFlops | None = None,
) -> State[RunSummary]:
    """Result files in `run`. Shards committed by an earlier attempt or run are kept; `force` drops them, once.

    A run that takes longer than `time_limit_s` is ended and says so in its summary. Errors: `TimeLimitError` then,
    which is not tried again; else those of `classify`.
    """
    devices = spec.devices
    progress = ProgressArtifact(f"progress-{label}-{devices}", f"Embedding {label} on {devices}")
    watch = replace(watch or Watch(), on_progress=lambda snapshot: progress.show(snapshot.percent / 100))
    spec = spec.model_copy(update={"force": spec.force and first_attempt()})
    forget_stopped(run)
    before = read_summary(run)
    limit = TimeLimit(time_limit_s)
    with device_slots(resolve(devices)), progress, closing(prewarmed) if prewarmed else nullcontext():
        try:
            with limit:
                summary = classify(run, staging, spec, watch=watch, prewarmed=prewarmed, flops=flops)
        except WorkerError as error:
            if not limit.reached:
                raise
            write_stopped(run, staging, devices, limit.elapsed_s)
            raise TimeLimitError(f"{run.root}: ended at the limit of {time_limit_s or 0:,.0f} s") from error
        progress.show(1.0)
    publish_table(f"stages-{label}-{devices}", stage_rows(summary), f"Seconds of the nine stages on {devices}")
    return done(summary, describe(summary, before), reused=summary == before)


def describe(summary: RunSummary, before: RunSummary | None = None) -> str:
    """What was computed, in a sentence; `before` is what the directory said at the start."""
    if summary == before:
        return f"all {summary.shards} shards were committed: nothing to compute"
    kept = f", {summary.shards_reused} were committed before" if summary.shards_reused else ""
    deaths = f"; {len(summary.deaths)} worker deaths survived" if summary.deaths else ""
    return f"{summary.shards_computed} of {summary.shards} shards computed{kept} in {summary.wall_s:.1f} s{deaths}"
