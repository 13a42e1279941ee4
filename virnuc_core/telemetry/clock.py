"""Seconds of the nine stages, and the block in the log that says them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from virnuc_core.telemetry.records import STAGES

RULE_WIDTH = 80
NAME_WIDTH = 34


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage: its seconds, or the stage it is fused with."""

    name: str
    seconds: float | None  # None: fused, its work is part of `fused_into`
    fused_into: str | None = None
    started_s: float | None = None  # time.monotonic(); None when only seconds are known
    finished_s: float | None = None


class StageClock:
    """Collects the seconds of the nine stages. A stage may run many times; its seconds add up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._spans: dict[str, tuple[float, float]] = {}
        self._fused: dict[str, str] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as part of stage `name`, also when it raises; traces show it under that name."""
        _check(name)
        started = self._now()
        try:
            with mark(name):
                yield
        finally:
            self.add(name, max(0.0, self._now() - started), started_s=started)

    def add(self, name: str, seconds: float, *, started_s: float | None = None) -> None:
        """Add seconds measured elsewhere, e.g. device time; `ValueError` for an unknown stage or negative seconds."""
        _check(name)
        if seconds < 0:
            raise ValueError(f"stage '{name}': {seconds} s is negative")
        if name in self._fused:
            raise ValueError(f"stage '{name}' is fused into '{self._fused[name]}' and has no time of its own")
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if started_s is not None:
            self.seen(name, started_s, started_s + seconds)

    def seen(self, name: str, started_s: float, finished_s: float) -> None:
        """Say when a stage ran, without adding seconds: those of a stage that takes turns with others are fewer than
        lie between its start and its end. `ValueError` for an unknown stage."""
        _check(name)
        first, last = self._spans.get(name, (started_s, finished_s))
        self._spans[name] = (min(first, started_s), max(last, finished_s))

    def fuse(self, name: str, into: str) -> None:
        """Say that stage `name` is done within `into`; `ValueError` when it has a time of its own."""
        _check(name)
        _check(into)
        if name in self._seconds:
            raise ValueError(f"stage '{name}' has a time of its own and cannot be fused")
        self._fused[name] = into

    def times(self) -> tuple[StageTime, ...]:
        """The stages measured or fused so far, in the order of the nine; what was not measured is not there."""
        found = []
        for name in STAGES:
            if name in self._fused:
                found.append(StageTime(name, None, self._fused[name]))
            elif name in self._seconds:
                started, finished = self._spans.get(name, (None, None))
                found.append(StageTime(name, self._seconds[name], None, started, finished))
        return tuple(found)

    def seconds(self) -> dict[str, float | None]:
        """Stage name to seconds, `None` when fused: the form of summary.json."""
        return {stage.name: stage.seconds for stage in self.times()}


def _check(name: str) -> None:
    if name not in STAGES:
        raise ValueError(f"'{name}' is not one of the nine stages: {', '.join(STAGES)}")


def mark(name: str) -> AbstractContextManager[Any]:
    """A named span in profiler traces; nothing where torch has not been loaded."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.profiler.record_function(name)


def clock_text(seconds: float) -> str:
    """Seconds as `MM:SS`, from one hour on `H:MM:SS`; parts of a second are cut.

    >>> clock_text(3200.6), clock_text(12600), clock_text(7.9)
    ('53:20', '3:30:00', '00:07')
    """
    whole = int(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


def pipeline_summary(stages: Sequence[StageTime], total_s: float) -> str:
    """The block `PIPELINE SUMMARY` with one line a stage and the line `Total wall time`, for the log."""
    rule = "=" * RULE_WIDTH
    known = {stage.name: stage for stage in stages}
    lines = [rule, "PIPELINE SUMMARY", rule]
    for number, name in enumerate(STAGES, start=1):
        lines.append(f"Stage {number}: {name} ".ljust(NAME_WIDTH, ".") + "  " + _stage_text(known.get(name), total_s))
    lines += [f"Total wall time: {clock_text(total_s)} ({total_s:.1f} s)", rule]
    return "\n".join(lines)


def _stage_text(stage: StageTime | None, total_s: float) -> str:
    if stage is None:
        return "not measured"
    if stage.seconds is None:
        return f"0.0 s (fused into {stage.fused_into})" if stage.fused_into else "0.0 s (fused)"
    share = f" ({100 * stage.seconds / total_s:.1f} %)" if total_s > 0 else ""
    return f"{stage.seconds:.1f} s{share}"
