"""The page on a recording of torch's profiler: `profile.md`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from virnuc_core.report.filling import fill_template
from virnuc_core.report.model import Bottleneck
from virnuc_core.report.sections import Row
from virnuc_core.report.text import gibibytes
from virnuc_core.report.views.losses import bottleneck_sentence, loss_rows
from virnuc_core.report.views.tools import memory_history_lines
from virnuc_core.tools.trace import TraceTable


@dataclass(frozen=True, slots=True)
class Recording:
    """A line of the page: the file of a recording, and how much was recorded on one device."""

    file: str
    amount: str


def profile_markdown(
    tables: Sequence[TraceTable],
    *,
    stages: Sequence[Mapping[str, object]],
    marks: Sequence[Row],
    operations: Sequence[Row],
    losses: Sequence[Bottleneck] = (),
) -> str:
    """Return `profile.md`: where the time of a run goes, as the profiler of torch recorded it.

    Args:
        tables: What the profiler recorded on each device.
        stages: Times of the nine stages in the whole run.
        marks: Times of the stages, as the program marked them, while the profiler recorded.
        operations: The recorded operations with the longest times.
        losses: What the run lost time by, the largest loss first. Without any, the page names no
            bottleneck.
    """
    return fill_template(
        "profile.md.j2",
        recordings=[_recording(table) for table in tables],
        stages=stages,
        marks=marks,
        operations=operations,
        memory=[_memory_row(table) for table in tables if table.kind == "cuda"],
        bottleneck=losses[0].kind if losses else "",
        bottleneck_sentence=bottleneck_sentence(losses),
        losses=loss_rows(losses),
        histories=memory_history_lines(tables),
    )


def _memory_row(table: TraceTable) -> Row:
    """Return the table row on the memory of a GPU while it was recorded."""
    memory = table.memory
    return {
        "device": table.device,
        "at the start (GiB)": gibibytes(memory.start_bytes),
        "peak (GiB)": gibibytes(memory.peak_bytes),
        "at the end (GiB)": gibibytes(memory.end_bytes),
    }


def _recording(table: TraceTable) -> Recording:
    """Return the line of the page on one recording."""
    shards = f"{table.shards:,} shards" if table.shards != 1 else "1 shard"
    if table.shard_numbers:
        numbers = ", ".join(str(number) for number in table.shard_numbers)
        shards += f" (number {numbers} of the plan)"
    seconds = f"{table.window_ms / 1e3:.2f} s"
    batches = f"{table.batches} batches, {table.tokens:,} tokens"
    return Recording(
        file=table.trace or "not kept: too large",
        amount=f"{shards}, {batches} in {seconds}",
    )
