"""What people see of a run: its progress while it goes on, and the seconds of its stages when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import STAGES, ShardDone, StageTime

PLAIN_EVERY_S: Final = 10.0
CALLBACK_EVERY_S: Final = 5.0
TITLE: Final = "Embedding"
UNIT: Final = "sequences"
TOTAL: Final = "total"
RULE: Final = "=" * 80
NAME_WIDTH: Final = 34


@dataclass(frozen=True, slots=True)
class DeviceProgress:
    """What one device, or all of them, have done so far. `None` where nothing tells."""

    rows: int
    tokens: int
    tokens_per_s: float | None
    gpu_util: float | None  # percent, newest samples
    packing_efficiency: float | None  # 0 to 1

    @property
    def words(self) -> dict[str, Any]:
        """Speed, utilisation and packing as people read them."""
        rate, used, packing = self.tokens_per_s, self.gpu_util, self.packing_efficiency
        return {
            "tokens": "- tok/s" if rate is None else f"{rate:,.0f} tok/s",
            "gpu": "n/a" if used is None else f"{used:.0f} %",
            "pack": "n/a" if packing is None else f"{100 * packing:.1f} %",
        }


NOTHING: Final = DeviceProgress(0, 0, None, None, None)


class RunMonitor:
    """Totals by device, fed with each committed shard; safe to read from another thread."""

    def __init__(
        self, devices: Sequence[str], sampler: Sampler | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.devices = tuple(devices)
        self._sampler = sampler
        self._now = now
        self._started_s = now()
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(devices, (0, 0, 0))  # rows, tokens, slots

    def add_shard(self, done: ShardDone) -> None:
        """Count a committed shard."""
        tokens, slots = sum(b.tokens for b in done.batches), sum(b.slots for b in done.batches)
        with self._lock:
            before = self._totals.get(done.device, (0, 0, 0))
            self._totals[done.device] = (before[0] + done.rows, before[1] + tokens, before[2] + slots)

    def progress(self, device: str) -> DeviceProgress:
        """One device so far."""
        return self._progress((device,))

    def total(self) -> DeviceProgress:
        """All devices together; utilisation is their mean."""
        return self._progress(self._totals)

    def _progress(self, devices: Collection[str]) -> DeviceProgress:
        with self._lock:
            rows, tokens, slots = (sum(self._totals[device][i] for device in devices) for i in range(3))
        elapsed = self._now() - self._started_s
        samples = [] if self._sampler is None else [self._sampler.latest(device) for device in devices]
        known = [s.utilisation for s in samples if s is not None and s.utilisation is not None]
        return DeviceProgress(
            rows,
            tokens,
            tokens / elapsed if elapsed > 0 else None,
            sum(known) / len(known) if known else None,
            tokens / slots if slots else None,
        )


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """How far the run is."""

    done: int
    total: int
    elapsed_s: float
    eta_s: float | None  # None before anything is done
    devices: DeviceProgress  # all of them

    @property
    def percent(self) -> float:
        """0 to 100; a run of nothing is done."""
        return 100.0 * min(1.0, self.done / self.total) if self.total else 100.0


class InferenceProgressReporter:
    """Shows the progress of a run while the `with` block lasts.

    On a terminal: rich bars with tokens/s, gpu %, pack % and the time left. Elsewhere: one plain line every
    `PLAIN_EVERY_S` to `plain` (the console, when not given). `on_progress` gets a snapshot at most every
    `CALLBACK_EVERY_S` and once at the end: what a progress artifact wants. `already_done` is what an earlier run had
    done of the total: it counts as done, and says nothing of this run's speed.
    """

    def __init__(
        self,
        total_sequences: int,
        monitor: RunMonitor,
        *,
        already_done: int = 0,
        console: Console | None = None,
        plain: Callable[[str], None] | None = None,
        on_progress: Callable[[ProgressSnapshot], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._monitor, self._on_progress, self._now = total_sequences, monitor, on_progress, now
        self._console = console or Console(stderr=True)
        self._plain = plain or (lambda line: self._console.print(line, markup=False, highlight=False, soft_wrap=True))
        self._first = self._done = already_done
        self._started_s = self._last_plain_s = self._last_callback_s = now()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._started_s = self._last_plain_s = self._last_callback_s = self._now()
        if self._console.is_terminal:
            self._bars = _bars(self._console)
            devices = self._monitor.devices if len(self._monitor.devices) > 1 else ()
            nothing: dict[str, Any] = {"count": "", **NOTHING.words}
            self._tasks = {device: self._bars.add_task(device[:12], total=None, **nothing) for device in devices}
            self._tasks[TOTAL] = self._bars.add_task(TITLE, total=self._total, **nothing | {"count": self._count()})
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        snapshot = self.snapshot()
        if self._bars is not None:
            self._refresh(self._bars)
            self._bars.stop()
            self._bars = None
        else:
            self._plain(self._line(snapshot))
        self._on_progress(snapshot)

    def update(self, sequences_processed: int) -> None:
        """Say how many of the total are done by now, those of an earlier run included."""
        self._done = sequences_processed
        now = self._now()
        if self._bars is not None:
            self._refresh(self._bars)
        elif now - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = now
            self._plain(self._line(self.snapshot()))
        if now - self._last_callback_s >= CALLBACK_EVERY_S:
            self._last_callback_s = now
            self._on_progress(self.snapshot())

    def snapshot(self) -> ProgressSnapshot:
        """How far the run is now."""
        elapsed, made = max(0.0, self._now() - self._started_s), self._done - self._first
        eta_s = elapsed * (self._total - self._done) / made if made > 0 and elapsed > 0 else None
        left_s = 0.0 if self._done >= self._total else eta_s
        return ProgressSnapshot(self._done, self._total, elapsed, left_s, self._monitor.total())

    def _refresh(self, bars: Progress) -> None:
        for device, task in self._tasks.items():
            if device == TOTAL:
                bars.update(task, completed=self._done, count=self._count(), **self._monitor.total().words)
            else:
                progress = self._monitor.progress(device)
                bars.update(task, completed=progress.rows, count=f"{progress.rows:,}", **progress.words)

    def _count(self) -> str:
        return f"{self._done:,}/{self._total:,} {UNIT}"

    def _line(self, snapshot: ProgressSnapshot) -> str:
        words = snapshot.devices.words
        eta = "--:--" if snapshot.eta_s is None else clock_text(snapshot.eta_s)
        return (
            f"{TITLE}: {snapshot.done:,} of {snapshot.total:,} {UNIT} ({snapshot.percent:.1f} %) | "
            f"{words['tokens']} | gpu util {words['gpu']} | packing efficiency {words['pack']} | "
            f"elapsed {clock_text(snapshot.elapsed_s)} | ETA {eta}"
        )


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold blue]{task.description}"),
        BarColumn(bar_width=None),  # what the numbers leave
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[count]:>}"),
        TextColumn("[yellow]{task.fields[tokens]:>12}"),
        TextColumn("[green]{task.fields[gpu]:>5} GPU"),
        TextColumn("[cyan]{task.fields[pack]:>6} pack"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


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
    known = {stage.name: stage for stage in stages}
    lines = [RULE, "PIPELINE SUMMARY", RULE]
    for number, name in enumerate(STAGES, start=1):
        lines.append(f"Stage {number}: {name} ".ljust(NAME_WIDTH, ".") + "  " + _stage_text(known.get(name), total_s))
    lines += [f"Total wall time: {clock_text(total_s)} ({total_s:.1f} s)", RULE]
    return "\n".join(lines)


def _stage_text(stage: StageTime | None, total_s: float) -> str:
    if stage is None:
        return "not measured"
    if stage.seconds is None:
        return f"0.0 s (fused into {stage.fused_into})" if stage.fused_into else "0.0 s (fused)"
    share = f" ({100 * stage.seconds / total_s:.1f} %)" if total_s > 0 else ""
    return f"{stage.seconds:.1f} s{share}"
