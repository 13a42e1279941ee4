"""Where the time of a run goes: the nine stages of an undisturbed run, then kernels and launches of a few shards."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.flow_commands import ProfileSettings
from flows.flow_run import named, with_parameters
from flows.predict import staged_run
from tasks.predict import stage_rows
from tasks.step import Rows, done, markdown_table, publish_markdown, publish_table
from tasks.tools import mark_rows, operation_rows, trace
from virnuc_core.config import TraceSpec
from virnuc_core.measure.bench import Bench
from virnuc_core.measure.trace import Traces, counted
from virnuc_core.rundir import write_text_whole

MEBIBYTE = 1 << 20


@flow(name="profile", flow_run_name=named("reads", "devices"))
@with_parameters(ProfileSettings)
def profile(settings: ProfileSettings) -> State[Traces]:
    """Records a few shards with torch's profiler, after a run of all reads that tells the seconds of the nine stages.

    The run is a prediction like any other and is not repeated when it is there; the recording is always made anew.
    """
    with staged_run(settings) as staged:
        run, label, devices = staged.run, staged.label, staged.devices
        summary = staged.embed()
        spec = TraceSpec(
            folder=str((run.telemetry / "traces").resolve()),
            shards=settings.traced_shards,
            operations=settings.operations,
            max_bytes=settings.max_trace_mb * MEBIBYTE,
            shapes=settings.shapes,
            memory=settings.memory,
        )
        found = trace(run, Bench(run.store, settings.models, devices), staged.engine, spec, label=label).result()
        found.write(summary)
        marks, operations = mark_rows(found.tables), operation_rows(found.tables, settings.operations)
        publish_table(f"operations-{label}-{devices}", operations, f"Operations that took most time: {label}")
        publish_table(f"marks-{label}-{devices}", marks, f"Recorded stages of {label}: {found.folder}")
        text = _text(found, (stage_rows(summary), marks, operations))
        path = found.folder / "profile.md"
        write_text_whole(path, text)
        publish_markdown(f"profile-{label}-{devices}", text, str(found), path)
    return done(found, f"{found}, {found.trace_bytes / MEBIBYTE:.1f} MiB of traces in {found.folder}")


def _text(found: Traces, tables: tuple[Rows, ...]) -> str:
    stages, marks, operations = map(markdown_table, tables)
    names = "\n".join(
        f"- `{table.trace or 'not kept: too large'}`: {counted(table.shards, 'shard')}, {table.batches} batches, "
        f"{table.tokens:,} tokens in {table.window_ms / 1e3:.2f} s"
        for table in found.tables
    )
    return (
        f"# Where the time goes\n\n## The nine stages of the run, undisturbed\n\n{stages}\n"
        f"## Recorded\n\n{names}\n\nOpen a trace in https://ui.perfetto.dev or chrome://tracing; both work on the "
        f"file where it lies. Recording slows the host's side, so these are shares, not rates.\n\n{marks}\n"
        f"## Operations that took most time\n\n{operations}"
    )
