"""The steps from reads to verdicts: stage and embed."""

from collections.abc import Mapping, Sequence

from virnuc.tasks.artifacts import Markdown, Rows
from virnuc_core.reads.stage import REMARKS
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.statistics import DeviceBusy
from virnuc_core.telemetry.tables import OVERLAPPED, ROWS, STAGES


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
