"""What commits cost: pairs of runs over the same shards, with commits and without, and what they come to.

`checkpoint_overhead.json` names the run directories of each pair; their telemetry stays, so that every rate can be
computed again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from virnuc_core.report.files import RECORD, RawFolder
from virnuc_core.report.model import OverheadMetrics
from virnuc_core.runfiles import RunRecord
from virnuc_core.telemetry.statistics import committed_tokens_per_s
from virnuc_core.validation import MIN_PAIRS, OVERHEAD, OverheadFile, OverheadPair

MIN_SECONDS: Final = 10.0  # of each run; the rate of a shorter one is the luck of its scheduling
RELATIVE: Final = 1e-9
UNCOMMITTED_S: Final = 0.01  # a shard that is not written takes less than this where a commit would be


def overhead_metrics(raw: RawFolder) -> OverheadMetrics | None:
    """1 − tokens/s with commits ÷ tokens/s without: the median over the pairs, with least and most."""
    found = raw.read(OverheadFile, OVERHEAD)
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


def contradictions(out: Path) -> list[str]:
    """What in `checkpoint_overhead.json` its runs' telemetry and records do not bear out."""
    raw = RawFolder(out)
    found = raw.read(OverheadFile, OVERHEAD)
    said = [] if found is None else [line for pair in found.pairs for line in _of_pair(raw, found, pair)]
    return [f"{OVERHEAD}: {line}" for line in (*said, *raw.problems.get(OVERHEAD, ()))]


def _of_pair(raw: RawFolder, found: OverheadFile, pair: OverheadPair) -> Iterator[str]:
    spans = []
    for run, rate, commits in (
        (pair.with_run, pair.with_tokens_per_s, True),
        (pair.without_run, pair.without_tokens_per_s, False),
    ):
        measured = raw.telemetry(run, None)
        again = None if measured is None else committed_tokens_per_s(measured[1].batches, measured[1].shards)
        if again is None or not math.isclose(rate, again, rel_tol=RELATIVE):
            yield f"{run} says {rate} tokens/s, its telemetry gives {again}"
        record = raw.read(RunRecord, run, RECORD)
        if record is None or record.spec.get("commit") is not commits:
            yield f"{run} was not made with commits {'on' if commits else 'off'}"
        if measured is None:
            continue
        shards = measured[1].shards
        spans += [float(measured[1].batches.tokens.sum()) / again] if again else []
        if len(shards) != found.shards:
            yield f"{run} computed {len(shards)} shards, not {found.shards}"
        if not commits and (spent := float(shards.commit_s.sum())) > UNCOMMITTED_S * len(shards):
            yield f"{run} spent {spent:.3f} s on commits although they were off"
    if not math.isclose(pair.seconds, min(spans, default=0.0), rel_tol=RELATIVE):
        yield f"{pair.with_run} and its pair say {pair.seconds} s, telemetry gives {min(spans, default=0.0)}"
