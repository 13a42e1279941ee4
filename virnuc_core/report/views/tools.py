"""Views of what the tools measure: sweeps of settings, overheads, and recorded traces."""

from collections.abc import Sequence
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.sections import Row, with_columns_of_first
from virnuc_core.report.text import number, percent
from virnuc_core.tools.trace import WAIT, Operation, TraceTable
from virnuc_core.tools.tune import Candidate
from virnuc_core.validation import OverheadPair

MARK_TITLES: Final[dict[str, str]] = {
    WAIT: "(waiting for a batch)",
    DNA.name: DNA.title,
    PROTEIN.name: PROTEIN.title,
    "head": "Model Prediction",
}
NAME_WIDTH: Final = 90  # kernels of templates have names of a thousand letters


def candidate_rows(
    candidates: Sequence[Candidate], *, chosen: Candidate, recommended: str, tolerance: float
) -> list[Row]:
    """Return a table row for each candidate of a sweep, with its speed and verdict.

    Args:
        candidates: The candidates in the order of the rows.
        chosen: The recommended candidate.
        recommended: The word that is shown as the verdict on the recommended candidate.
        tolerance: Candidates whose scores differ by more than this are not usable.
    """
    rows: list[Row] = []
    for candidate in candidates:
        reason = candidate.refusal_reason  # why it cannot be used; "" if it can
        if not reason and candidate.is_dropped:
            reason = "slower, dropped by halving"
        is_chosen = candidate is chosen
        result: Row = {
            "score difference": candidate.difference,
            "labels changed": candidate.trials[-1].labels_changed if candidate.trials else None,
            "verdict": recommended if is_chosen else candidate.verdict(tolerance),
            "why": reason,
        }
        rows.append({"settings": candidate.label} | _rate_cells(candidate) | result)
    return rows


def _rate_cells(candidate: Candidate) -> Row:
    """Return the rates of all trials of a candidate, and the details of its last one.

    A candidate is a set of engine settings, and a trial one measurement of it.
    """
    rate = spread = None
    if candidate.rates:
        rate = round(candidate.rate)
    if len(candidate.rates) > 1:
        spread = percent(candidate.spread)
    elapsed_s = utilisation = packing = starved = None
    if candidate.trials:
        last = candidate.trials[-1]
        elapsed_s = last.span_s
        utilisation = last.utilisation
        packing = last.packing_efficiency
        starved = None if last.queue is None else last.queue.starved
    return {
        "tokens/s": rate,
        "spread": spread,
        "runs": len(candidate.rates),
        "elapsed": number(elapsed_s, 1, " s"),
        "utilisation": number(utilisation, 1, " %"),
        "packing": percent(packing),
        "starved": percent(starved),
        "queue depth": candidate.queue_depth,
    }


def overhead_rows(pairs: Sequence[OverheadPair]) -> list[Row]:
    """Return a table row for each pair of runs: its speed with and without a feature."""
    return [
        {
            "pair": place,
            "of": pair.switch,
            "tokens/s with": round(pair.with_tokens_per_s),
            "tokens/s without": round(pair.without_tokens_per_s),
            "overhead": percent(pair.overhead),
            "worker restarts": pair.restarts,
        }
        for place, pair in enumerate(pairs, start=1)
    ]


def mark_rows(tables: Sequence[TraceTable]) -> list[Row]:
    """Return a table row for each stage in the recorded traces.

    The time of the host is the time to launch the stage's work. The time of the device is the time
    to compute it.
    """
    rows: list[Row] = []
    for table in tables:
        on_gpu = table.kind == "cuda"
        for mark in table.marks:
            # A wait for a batch takes place on the host, so only the host's time counts.
            computes = on_gpu and mark.name != WAIT
            stage_ms = mark.device_ms if computes else mark.host_ms
            rows.append(
                {
                    "device": table.device,
                    "stage": MARK_TITLES[mark.name],
                    "calls": mark.calls,
                    "host ms": round(mark.host_ms, 2),
                    "device ms": round(mark.device_ms, 2) if on_gpu else None,
                    "share of the recording": percent(stage_ms / table.window_ms),
                }
            )
    return rows


def memory_history_lines(tables: Sequence[TraceTable]) -> list[str]:
    """Return a line on the memory history of each device, or why it has none.

    No line is returned for devices of which none was asked for.
    """
    lines = []
    for table in tables:
        if table.memory.history is not None:
            lines.append(f"{table.device}: {table.memory.history}")
        elif table.memory.history_reason:
            lines.append(f"{table.device}: {table.memory.history_reason}")
    return lines


def operation_rows(tables: Sequence[TraceTable], *, limit: int) -> list[Row]:
    """Return a table row for each of the longest operations, up to `limit` per device."""
    rows: list[Row] = []
    for table in tables:
        has_shapes = any(operation.shapes for operation in table.operations)
        for operation in table.operations[:limit]:
            row = _operation_cells(operation, table)
            if has_shapes:
                row["shapes"] = operation.shapes
            rows.append(row)
    return with_columns_of_first(rows)


def _operation_cells(operation: Operation, table: TraceTable) -> Row:
    """Return the table row on one operation, with its time on the processor that ran it."""
    own_ms = operation.device_ms if operation.on == "device" else operation.host_ms
    return {
        "device": table.device,
        "operation": operation.name[:NAME_WIDTH],
        "on": operation.on,
        "calls": operation.calls,
        "ms": round(own_ms, 2),
        "ms a call": round(own_ms / operation.calls, 3),
        "share of the recording": percent(own_ms / table.window_ms),
    }
