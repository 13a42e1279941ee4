"""The profile of a run: where its time goes, down to the kernels of the GPU."""

from collections.abc import Sequence
from pathlib import Path

from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.staged_run import staged_run
from virnuc.tasks.artifacts import Rows, host_key, publish_markdown, publish_table
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.run_tables import stage_rows
from virnuc.tasks.trace import record_traces
from virnuc_core.config import TraceOptions, TraceSpec
from virnuc_core.report import messages
from virnuc_core.report.bottlenecks import rank_losses
from virnuc_core.report.metrics import metrics_of_run
from virnuc_core.report.model import Bottleneck
from virnuc_core.report.profile_page import profile_markdown
from virnuc_core.report.sections import Row
from virnuc_core.report.views.tools import mark_rows, operation_rows
from virnuc_core.rundir import write_text_atomically
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.trace import TraceTable


def profile(settings: ProfileSettings) -> Outcome[tuple[TraceTable, ...]]:
    """Run all reads, and record a few shards of them with torch's profiler.

    The run is a prediction like any other and is not repeated if it is complete. The recording is
    always made anew. Writes the tables to `telemetry/traces/profile.md`.

    Returns:
        An outcome with the tables of the traces, one for each device.

    Raises:
        VirnucError: The settings, the reads or the weights cannot be used, or the run failed.
    """
    with staged_run(settings) as staged:
        run, label = staged.run, staged.label
        devices = staged.spec.devices
        summary = staged.embed().result()

        folder = (run.telemetry / "traces").resolve()
        options = settings.model_dump(include={*TraceOptions.model_fields})
        spec = TraceSpec(folder=str(folder), **options)
        bench = Bench(run.store, settings.models, devices)
        tables = record_traces(run, bench, staged.spec.engine, spec, label=label).result()

        # Rows of two tables: stages that our code marks in the trace, and operations of torch.
        marks = mark_rows(tables)
        operations = operation_rows(tables, limit=settings.operations)
        subject = f"{label}-{devices}"
        publish_table(
            host_key(f"operations-{subject}"),
            operations,
            f"Operations that took most time: {label}",
        )
        publish_table(host_key(f"marks-{subject}"), marks, f"Recorded stages of {label}: {folder}")
        losses = rank_losses(metrics_of_run(run))
        page = _write_page(folder, tables, losses, stage_rows(summary), marks, operations)
        publish_markdown(
            host_key(f"profile-{subject}"),
            page.read_text(encoding="utf-8"),
            messages.trace_extent(tables),
            page,
        )
    return completed(tables, messages.profile_message(tables, spec.folder, losses))


def _write_page(
    folder: Path,
    traces: Sequence[TraceTable],
    losses: Sequence[Bottleneck],
    stages: Rows,
    marks: list[Row],
    operations: list[Row],
) -> Path:
    """Write `profile.md`, a page with all tables, and return its path.

    Args:
        folder: The folder of the traces, which gets the page.
        traces: What was recorded, one table for each device.
        losses: What the whole run lost time by, the largest loss first.
        stages: Rows of the table of stages: the seconds of each stage of the whole run.
        marks: Rows of the table of recorded stages.
        operations: Rows of the table of operations on the device.
    """
    text = profile_markdown(
        traces, stages=stages, marks=marks, operations=operations, losses=losses
    )
    page = folder / "profile.md"
    write_text_atomically(page, text)
    return page
