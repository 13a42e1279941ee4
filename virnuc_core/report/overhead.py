"""What commits cost: pairs of runs over the same shards, with commits and without, and what they come to.

`checkpoint_overhead.json` names the run directories of each pair; their telemetry stays, so that every rate can be
computed again.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Final

from virnuc_core.report.files import RECORD, RawFolder, mapping
from virnuc_core.report.model import OverheadMetrics
from virnuc_core.runfiles import MIN_PAIRS, OVERHEAD, OverheadFile, OverheadPair
from virnuc_core.telemetry.batches import committed_tokens_per_s

MIN_SECONDS: Final = 10.0  # of each run; the rate of a shorter one is the luck of its scheduling
UNCOMMITTED_S: Final = 0.01  # a shard that is not written takes less than this where a commit would be


def read_overhead(raw: RawFolder) -> OverheadFile | None:
    """What was measured; `None` when the file is missing or is not ours (which is noted)."""
    return raw.read(OverheadFile, OVERHEAD)


def overhead_metrics(raw: RawFolder) -> OverheadMetrics | None:
    """1 − tokens/s with commits ÷ tokens/s without: the median over the pairs, with least and most."""
    found = read_overhead(raw)
    if found is None:
        return None
    shares = [share for pair in found.pairs if (share := pair.overhead) is not None]
    shortest_s = min((pair.seconds for pair in found.pairs), default=0.0)
    problem = None
    if len(shares) < MIN_PAIRS:
        problem = f"{len(shares)} undisturbed pairs of runs; {MIN_PAIRS} are needed"
    elif shortest_s < MIN_SECONDS:
        problem = f"a run took {shortest_s:.1f} s; {MIN_SECONDS:g} s are needed, more shards or more reads"
    return OverheadMetrics(
        pairs=len(shares),
        median=statistics.median(shares) if shares else None,
        least=min(shares, default=None),
        most=max(shares, default=None),
        shards=found.shards,
        shard_tokens=found.shard_tokens,
        problem=problem,
    )


def rate_of(raw: RawFolder, run: str) -> tuple[float, float] | None:
    """Tokens/s and seconds of one run of a pair, first launch to last commit; `None` without telemetry."""
    measured = raw.telemetry(run, None)
    rate = None if measured is None else committed_tokens_per_s(measured[1].batches, measured[1].shards)
    return None if measured is None or not rate else (rate, float(measured[1].batches.tokens.sum()) / rate)


def contradictions(out: Path) -> list[str]:
    """What in `checkpoint_overhead.json` its runs' telemetry and records do not bear out."""
    raw = RawFolder(out)
    found = read_overhead(raw)
    said = [] if found is None else [line for pair in found.pairs for line in _of_pair(raw, found, pair)]
    return said + [problem for problem in raw.problems if OVERHEAD in problem]


def _of_pair(raw: RawFolder, found: OverheadFile, pair: OverheadPair) -> list[str]:
    said = []
    spans = []
    sides: tuple[tuple[str, float, bool], ...] = (
        (pair.with_run, pair.with_tokens_per_s, True),
        (pair.without_run, pair.without_tokens_per_s, False),
    )
    for run, rate, commits in sides:
        again = rate_of(raw, run)
        if again is None or not _alike(rate, again[0]):
            said.append(f"{OVERHEAD}: {run} says {rate} tokens/s, its telemetry gives {again and again[0]}")
        spans.append(0.0 if again is None else again[1])
        if mapping(raw.json(run, RECORD), "spec").get("commit") is not commits:
            said.append(f"{OVERHEAD}: {run} was not made with commits {'on' if commits else 'off'}")
        said += _commits(raw, found, run, commits)
    if not _alike(pair.seconds, min(spans)):
        said.append(f"{OVERHEAD}: {pair.with_run} and its pair say {pair.seconds} s, telemetry gives {min(spans)}")
    return said


def _alike(said: float, found: float) -> bool:
    return math.isclose(said, found, rel_tol=1e-9)


def _commits(raw: RawFolder, found: OverheadFile, run: str, commits: bool) -> list[str]:
    measured = raw.telemetry(run, None)
    if measured is None:
        return []
    shards = measured[1].shards
    said = []
    if len(shards) != found.shards:
        said.append(f"{OVERHEAD}: {run} computed {len(shards)} shards, not {found.shards}")
    spent = float(shards.commit_s.sum())
    if not commits and spent > UNCOMMITTED_S * len(shards):
        said.append(f"{OVERHEAD}: {run} spent {spent:.3f} s on commits although they were off")
    return said
