"""Tables of one run: its stages, its devices, and what became of its reads."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from virnuc.tasks.artifacts import Rows
from virnuc_core.markdown import Markdown
from virnuc_core.reads.stage import REMARKS
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.tables import OVERLAPPED, OVERLAPPED_TITLE, ROWS, STAGES

if TYPE_CHECKING:
    from virnuc_core.telemetry.statistics import DeviceBusy


def stage_rows(summary: RunSummary) -> Rows:
    """Return a row for each stage of a run, and one for the total.

    The nine stages of the method always have a row. Other parts, such as the start of the workers,
    have one if they were measured. Together they make up the total.

    Returns:
        Columns `stage`, `seconds` and `share` of the total time. A stage that is computed within
        another one has the word `fused` in place of seconds.
    """
    total_s = summary.total_s or 0.0
    shown_stages = [name for name in ROWS if name in STAGES or name in summary.stages]
    rows: list[dict[str, object]] = []
    for number, name in enumerate(shown_stages, start=1):
        title = f"Stage {number}: {name}" if name in STAGES else name
        seconds = summary.stages.get(name)
        if seconds is not None:
            seconds_text = f"{seconds:.2f}"
        elif name in summary.stages:
            seconds_text = "fused"
        else:
            seconds_text = "not measured"
        if name == OVERLAPPED:
            title = OVERLAPPED_TITLE
        share = None if seconds is None else _percent(seconds, total_s)
        rows.append({"stage": title, "seconds": seconds_text, "share": share})
    title = Markdown("**Total wall time**")
    rows.append({"stage": title, "seconds": f"{total_s:.2f}", "share": "100 %"})
    return rows


def device_rows(devices: Sequence["DeviceBusy"], deaths: Sequence[str]) -> Rows:
    """Return a row for each device of a cluster.

    Args:
        devices: What each device did.
        deaths: The messages of workers that died, which begin with the device's name.

    Returns:
        Columns `node`, `device`, `shards`, `tokens/s` (of both encoders, while it computed) and
        `restarts` (workers that died).
    """
    rows = []
    for busy in devices:
        device, _, node = busy.device.partition("@")
        rate = busy.tokens / busy.busy_s if busy.busy_s else None
        beginning = f"worker on {busy.device} "
        n_deaths = sum(message.startswith(beginning) for message in deaths)
        rows.append(
            {
                "node": node,
                "device": device,
                "shards": busy.shards,
                "tokens/s": rate,
                "restarts": n_deaths,
            }
        )
    return rows


def fate_rows(summary: RunSummary, tally: Mapping[str, int] | None = None) -> Rows:
    """Return a row for each fate of reads, and one for their sum.

    Args:
        summary: The summary of the run. Its fates add up to the reads that came in.
        tally: What staging counted. Its remarks on reads, and the records that never became a read,
            follow below the sum.

    Returns:
        Columns `fate`, `reads` and `share`.
    """
    rows = [_fate_row(fate, count, summary.n_reads) for fate, count in summary.fates.items()]
    n_reads = sum(summary.fates.values())
    rows.append({"fate": Markdown("**all reads**"), "reads": n_reads, "share": "100 %"})
    for name in REMARKS:
        if tally is not None and name in tally:
            rows.append(_fate_row(f"remark: {name}", tally[name], summary.n_reads))
    return rows


def _fate_row(fate: str, count: int, n_reads: int | None) -> dict[str, object]:
    """Return one row of the table of fates."""
    return {"fate": fate, "reads": count, "share": _percent(count, n_reads)}


def _percent(part: float, whole: float | None) -> str | None:
    """Return a share as text; None if there is no whole."""
    if not whole:
        return None
    return f"{100 * part / whole:,.1f} %"
