"""The steps from reads to verdicts: stage and embed."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from virnuc.tasks.server import device_slots
from virnuc.tasks.step import (
    Markdown,
    Rows,
    done,
    first_attempt,
    on_host,
    progress_artifact,
    publish_table,
    step,
    time_limit,
)
from virnuc_core.config import ClassifySpec
from virnuc_core.engine.devices import resolve_here
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import join_first
from virnuc_core.pipeline import classify, read_summary, stage_reads
from virnuc_core.reads.stage import REMARKS, StageSpec, StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops, RunSummary, read, write
from virnuc_core.telemetry.log import TelemetryFile
from virnuc_core.telemetry.statistics import DeviceBusy
from virnuc_core.telemetry.tables import OVERLAPPED, ROWS, STAGES


@step("stage", "stage {label}")
def stage(spec: StageSpec, store: Path, *, label: str, force: bool = False) -> State[StageSummary]:
    """The store at `store` holds the reads of `spec`; one that does is used as it is. Errors: of `stage_reads`."""
    summary = stage_reads(spec, store, force=force)
    counts, how = summary.counts, "reused, content unchanged" if summary.reused else "staged"
    text = f"{counts.n_reads:,} reads {how}: {counts.n_rows:,} open frames, {counts.n_uniques:,} distinct"
    text += f"; {summary.n_pairs:,} pairs" if summary.n_pairs else ""
    text += f"; {join_first(remarks)}" if (remarks := summary.warnings()) else ""
    return done(summary, text, reused=summary.reused)


@step("embed", "embed {label} on {spec.devices}")
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
        on_host(f"stages-{label}-{devices}"),
        stage_rows(summary),
        f"Where the time went on {devices}",
    )
    if spec.cluster and summary.telemetry is not None:
        rows = device_rows(
            read(run.telemetry / summary.telemetry, TelemetryFile).summary.devices,
            summary.deaths or (),
        )
        publish_table(
            on_host(f"devices-{label}-{devices}"), rows, f"What the devices of {spec.cluster} did"
        )
    if before is not None and (summary.total_s, summary.telemetry) == (
        before.total_s,
        before.telemetry,
    ):
        return done(
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
    return done(summary, f"{computed} in {summary.wall_s:.1f} s{again}{deaths}")


def stage_rows(summary: RunSummary) -> Rows:
    """The nine stages of a run and the other parts that were measured, in seconds and shares: together the whole."""
    total_s, rows = summary.total_s or 0.0, []
    for place, name in enumerate(row for row in ROWS if row in STAGES or row in summary.stages):
        seconds = summary.stages.get(name)
        spent = (
            f"{seconds:.2f}"
            if seconds is not None
            else "fused"
            if name in summary.stages
            else "not measured"
        )
        share = None if seconds is None else _share(seconds, total_s)
        title = f"Stage {place + 1}: {name}" if name in STAGES else name
        rows.append({"stage": title, "seconds": "-" * (name == OVERLAPPED) + spent, "share": share})
    return [
        *rows,
        {"stage": Markdown("**Total wall time**"), "seconds": f"{total_s:.2f}", "share": "100 %"},
    ]


def device_rows(busy: Sequence[DeviceBusy], deaths: Sequence[str]) -> Rows:
    """What each device did: shards, both encoders' tokens a second of computing, workers that died."""
    rows = []
    for one in busy:
        (device, _, node), rate = (
            one.device.partition("@"),
            one.tokens / one.busy_s if one.busy_s else None,
        )
        died = sum(line.startswith(f"worker on {one.device} ") for line in deaths)
        rows.append(
            {
                "node": node,
                "device": device,
                "shards": one.shards,
                "tokens/s": rate,
                "restarts": died,
            }
        )
    return rows


def fate_rows(summary: RunSummary, tally: Mapping[str, int] | None = None) -> Rows:
    """What became of the reads; the fates add up to the reads that came in. `tally` is what staging counted: its
    remarks on reads, and the records that never became one, follow below the sum."""

    def row(what: str, count: int) -> dict[str, object]:
        return {"fate": what, "reads": count, "share": _share(count, summary.n_reads)}

    total = {
        "fate": Markdown("**all reads**"),
        "reads": sum(summary.fates.values()),
        "share": "100 %",
    }
    remarks = [
        row(f"remark: {name}", tally[name])
        for name in REMARKS
        if tally is not None and name in tally
    ]
    return [*(row(*fate) for fate in summary.fates.items()), total, *remarks]


def _share(part: float, whole: float | None) -> str | None:
    return f"{100 * part / whole:,.1f} %" if whole else None
