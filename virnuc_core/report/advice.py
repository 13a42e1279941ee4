"""Where the time goes, in sentences.

Two rules point at stages: over 30 % of the time, or a GPU stage under 80 % utilisation. ESM-2 is always over 30 %;
while its GPU is busy that is expected, and only the rest is worth a person's time. The bottleneck is the largest
avoidable loss of time, by class, with what removing it would save at most.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from virnuc_core.report.model import Bottleneck, RunMetrics
from virnuc_core.telemetry.tables import GPU_STAGES, OVERLAPPED, STAGES

TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
WORTH: Final = 0.05  # of the whole time: a smaller loss is not worth a person's
LONG_S: Final = 600.0
ADVICE: Final = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
STAGE_ADVICE: Final = {
    **{stage: loss["advice"] for loss in ADVICE["losses"].values() for stage in loss["stages"]},
    **ADVICE["stages"],
}


def findings(run: RunMetrics | None) -> tuple[str, ...]:
    """A sentence on each stage the two rules point at, largest share first; no time or no total gives none."""
    if run is None:
        return ()
    found, measured = [], run.telemetry
    busiest = {stage: measured.lowest_percent(encoder) for encoder, stage in GPU_STAGES.items()} if measured else {}
    for name in STAGES:
        share, used = run.stage_shares.get(name, 0.0), busiest.get(name)
        idle = used is not None and used < BUSY_PERCENT
        if share > TIME_SHARE or idle:
            expected = name == "ESM-2" and not idle
            advice = _further(run) if expected else ADVICE["busy"] if idle else STAGE_ADVICE[name]
            busy = "" if used is None else f", the lowest GPU {used:.1f} % busy"
            word = "expected" if expected else "actionable"
            found.append((-share, f"{name} takes {100 * share:.1f} % of the time{busy} ({word}): {advice}."))
    return tuple(text for _, text in sorted(found))


def _further(run: RunMetrics) -> str:
    """What helps where the encoders do their work well."""
    return str(ADVICE["gpu" if (run.total_s or 0.0) >= LONG_S else "work"])


def losses(run: RunMetrics | None) -> tuple[Bottleneck, ...]:
    """Every avoidable loss of time, the largest first; never empty."""
    if run is None or not run.total_s:
        return (Bottleneck(kind="unknown", detail="no run was timed", advice="run validate"),)
    spent = {row: seconds for row, seconds in run.stages.items() if seconds}
    found = [*_computing(run, spent)]
    for kind, loss in ADVICE["losses"].items():
        own = sorted(((spent[row], row) for row in loss["stages"] if row in spent), reverse=True)
        # what passed while the reads were staged saves nothing, whichever of the two is removed
        hidden_s = spent.get(OVERLAPPED, 0.0) if kind in ("start-up", "staging") else 0.0
        whole_s = sum(seconds for seconds, _ in own)
        detail = ", ".join(f"{row} {seconds:.1f} s" for seconds, row in own if seconds > WORTH * whole_s)
        found.append((whole_s - hidden_s, kind, detail, loss["advice"], False))
    ranked = tuple(
        Bottleneck(
            kind=kind, detail=detail, advice=advice, saves_s=saves_s, share=share, expected=good or share < WORTH
        )
        for saves_s, kind, detail, advice, good in sorted(found, reverse=True)
        if (share := saves_s / run.total_s) > 0
    )
    return ranked or (Bottleneck(kind="unknown", detail="no stage was measured", advice="look at the log of the run"),)


def _computing(run: RunMetrics, spent: Mapping[str, float]) -> Iterator[tuple[float, str, str, str, bool]]:
    """What devices at work lose, by slots without a token and by speed below the measured ceiling, else below full
    utilisation: seconds, class, detail, the way out, and whether they do their work well."""
    still_s = spent.get("Device idle", 0.0)
    empty_s, slow_s, said, idle = 0.0, still_s, [f"a device stands still for {still_s:.1f} s"], False
    measured = run.telemetry
    for found in measured.encoders if measured else ():
        stage, packing, share = GPU_STAGES[found.encoder], found.packing_efficiency or 1.0, 1.0
        if measured and (used := measured.lowest_percent(found.encoder)) is not None:
            idle, share = idle or used < BUSY_PERCENT, used / 100.0
            said.append(f"{stage} keeps the lowest GPU {used:.1f} % busy")
        if found.mfu_of_ceiling is not None:
            share = found.mfu_of_ceiling / packing
            said.append(f"{stage} runs at {100 * share:.0f} % of what its linear layers alone sustain")
        empty_s += spent.get(stage, 0.0) * (1.0 - packing)
        slow_s += spent.get(stage, 0.0) * packing * max(0.0, 1.0 - share)
    good = not idle and still_s <= slow_s / 2
    yield slow_s, "GPU compute", "; ".join(said), _further(run) if good else ADVICE["busy"], good
    yield empty_s, "packing", "slots without a token", "raise token_budget or shard_tokens", False
