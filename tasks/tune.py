"""Tune: the engine's rate under one set of settings, and the sweep as a table."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.client.schemas.objects import State

from tasks.artifacts import Rows, cell, percent
from tasks.guard import device_slots
from tasks.step import done, step
from virnuc_core.measure.bench import median, spread
from virnuc_core.measure.tune import Candidate, Recommendation, Sweep, Trial
from virnuc_core.report.formatting import number


@step("measure", "{name}")
def measure(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(sweep.bench.resolved()):
        found = sweep.trial(candidate, repeat)
    return done(found, describe(found), reused=isinstance(found, Trial) and found.reused)


def describe(found: Trial | str) -> str:
    """A trial in a sentence."""
    if isinstance(found, str):
        return f"cannot run: {found}"
    same = "" if not found.score_difference else f", scores differ by up to {found.score_difference:.2g}"
    return f"{found.tokens_per_s:,.0f} tokens/s in {found.window_s:.1f} s{same}"


def trial_rows(found: Sequence[Candidate], chosen: Recommendation, tolerance: float) -> Rows:
    """The sweep as a table, fastest first; what cannot run stands last."""
    ordered = sorted(found, key=lambda candidate: median(candidate.rates), reverse=True)
    return [_row(candidate, candidate is chosen.candidate, tolerance) for candidate in ordered]


def _row(candidate: Candidate, recommended: bool, tolerance: float) -> dict[str, str]:
    engine, rates = candidate.engine, candidate.rates
    last = candidate.trials[-1].model_dump() if candidate.trials else {}
    return {
        "settings": cell(candidate.label),
        "tokens/s": cell(round(median(rates))) if rates else "–",
        "spread": percent(spread(rates)) if len(rates) > 1 else "–",
        "runs": cell(len(rates)),
        "elapsed": cell(number(last.get("window_s"), 1, " s")),
        "utilisation": cell(number(last.get("utilisation"), 1, " %")),
        "packing": percent(last.get("packing")),
        "starved": percent(last.get("starved")),
        "queue depth": cell(engine.prefetch_factor * max(1, engine.num_workers)),
        "score difference": cell(candidate.difference),
        "labels changed": cell(last.get("labels_changed")),
        "verdict": "**recommended**" if recommended else cell(candidate.verdict(tolerance)),
        "why": cell(candidate.refused or ("slower, dropped by halving" if candidate.dropped else "")),
    }
