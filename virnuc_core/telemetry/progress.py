"""Live progress: one line a device plus the total on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from virnuc_core.telemetry.clock import clock_text
from virnuc_core.telemetry.monitor import DeviceProgress, RunMonitor


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """How far the run is."""

    done: int
    total: int
    elapsed_s: float
    eta_s: float | None  # None before anything is done
    tokens_per_s: float | None
    gpu_util: float | None  # percent
    packing_efficiency: float | None  # 0 to 1

    @property
    def percent(self) -> float:
        """0 to 100; a run of nothing is done."""
        return 100.0 * min(1.0, self.done / self.total) if self.total else 100.0


class InferenceProgressReporter:
    """Shows the progress of a run while the `with` block lasts.

    On a terminal: rich bars with tokens/s, gpu %, pack % and the time left. Elsewhere: one plain line every
    `plain_every_s` seconds to `plain` (the console, when not given). `on_progress` gets a snapshot at most every
    `callback_every_s` seconds and once at the end: what a progress artifact wants. `already_done` is what an earlier
    run had done of the total: it counts as done, and says nothing of this run's speed.
    """

    def __init__(
        self,
        total_sequences: int,
        monitor: RunMonitor,
        *,
        already_done: int = 0,
        description: str = "Embedding",
        unit: str = "reads",
        console: Console | None = None,
        plain: Callable[[str], None] | None = None,
        plain_every_s: float = 10.0,
        on_progress: Callable[[ProgressSnapshot], None] | None = None,
        callback_every_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._monitor, self._description, self._unit = total_sequences, monitor, description, unit
        self._console = console or Console(stderr=True)
        self._plain = plain or (lambda line: self._console.print(line, markup=False, highlight=False, soft_wrap=True))
        self._plain_every_s, self._callback_every_s = plain_every_s, callback_every_s
        self._on_progress = on_progress
        self._now = now
        self._started_s = now()
        self._first = self._done = already_done
        self._last_plain_s = self._last_callback_s = self._started_s
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._started_s = self._last_plain_s = self._last_callback_s = self._now()
        if self._console.is_terminal:
            self._bars = _bars(self._console)
            many = len(self._monitor.devices) > 1
            for device in self._monitor.devices if many else ():
                self._tasks[device] = self._bars.add_task(_short(device), total=None, count="", **_fields(None))
            self._tasks["total"] = self._bars.add_task(
                self._description, total=self._total, count=self._count(), **_fields(None)
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        snapshot = self.snapshot()
        if self._bars is not None:
            self._refresh()
            self._bars.stop()
            self._bars = None
        else:
            self._plain(self._line(snapshot))
        if self._on_progress is not None:
            self._on_progress(snapshot)

    def update(self, sequences_processed: int) -> None:
        """Say how many of the total are done by now, those of an earlier run included."""
        self._done = sequences_processed
        now = self._now()
        if self._bars is not None:
            self._refresh()
        elif now - self._last_plain_s >= self._plain_every_s:
            self._last_plain_s = now
            self._plain(self._line(self.snapshot()))
        if self._on_progress is not None and now - self._last_callback_s >= self._callback_every_s:
            self._last_callback_s = now
            self._on_progress(self.snapshot())

    def snapshot(self) -> ProgressSnapshot:
        """How far the run is now."""
        elapsed = max(0.0, self._now() - self._started_s)
        total = self._monitor.total()
        return ProgressSnapshot(
            self._done,
            self._total,
            elapsed,
            self._eta(elapsed),
            total.tokens_per_s,
            total.gpu_util,
            total.packing_efficiency,
        )

    def _eta(self, elapsed: float) -> float | None:
        made = self._done - self._first
        if self._done >= self._total:
            return 0.0
        return elapsed * (self._total - self._done) / made if made > 0 and elapsed > 0 else None

    def _refresh(self) -> None:
        assert self._bars is not None
        for device, task in self._tasks.items():
            if device == "total":
                self._bars.update(task, completed=self._done, count=self._count(), **_fields(self._monitor.total()))
            else:
                progress = self._monitor.progress(device)
                self._bars.update(task, completed=progress.rows, count=f"{progress.rows:,}", **_fields(progress))

    def _count(self) -> str:
        return f"{self._done:,}/{self._total:,} {self._unit}"

    def _line(self, snapshot: ProgressSnapshot) -> str:
        fields = _fields(self._monitor.total())
        eta = "--:--" if snapshot.eta_s is None else clock_text(snapshot.eta_s)
        return (
            f"{self._description}: {snapshot.done:,} of {snapshot.total:,} {self._unit} ({snapshot.percent:.1f} %) | "
            f"{fields['tokens']} | gpu util {fields['gpu']} | packing efficiency {fields['pack']} | "
            f"elapsed {clock_text(snapshot.elapsed_s)} | ETA {eta}"
        )


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold blue]{task.description}"),
        BarColumn(bar_width=None),  # what the figures leave
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[count]:>}"),
        TextColumn("[yellow]{task.fields[tokens]:>12}"),
        TextColumn("[green]{task.fields[gpu]:>5} GPU"),
        TextColumn("[cyan]{task.fields[pack]:>6} pack"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


def _fields(progress: DeviceProgress | None) -> dict[str, Any]:
    if progress is None:
        return {"tokens": "- tok/s", "gpu": "n/a", "pack": "n/a"}
    return {
        "tokens": "- tok/s" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tok/s",
        "gpu": "n/a" if progress.gpu_util is None else f"{progress.gpu_util:.0f} %",
        "pack": "n/a" if progress.packing_efficiency is None else f"{100 * progress.packing_efficiency:.1f} %",
    }


def _short(device: str) -> str:
    return device[:12]
