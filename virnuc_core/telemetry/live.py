"""What is seen of a run while it goes on: readings of devices and host, its progress, and the seconds of its stages.

Devices are read by NVML (nvitop), by UUID. Without it only the host is read, and utilisation is `None`, never zero."""

import functools
import importlib
import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from virnuc_core import gpus
from virnuc_core.config import OnShare
from virnuc_core.telemetry.tables import (
    OVERLAPPED,
    STAGES,
    DeviceSample,
    HostSample,
    ShardDone,
    StageTime,
)

log = logging.getLogger(__name__)

CHILDREN_EVERY: Final = (
    10  # samples between two looks for new child processes: the look reads every process
)
PLAIN_EVERY_S: Final = 10.0
CALLBACK_EVERY_S: Final = 5.0
WIDE: Final = 100  # columns of a terminal that has room for the packing, too
TITLE: Final = "Embedding"
RULE: Final = "=" * 80
LEAST_SHOWN_S: Final = 0.05  # of what is no stage

Note = Callable[..., None]  # hears samples as they are taken
Reader = Callable[[str, float], DeviceSample]  # reads a device now, stamped with a time; may raise


def nvml_reader(devices: Sequence[str]) -> Reader | None:
    """Return a function that reads the GPUs among `devices`, each by its UUID.

    Returns:
        `None` if no device is a GPU, or if NVML cannot be used, which is logged.
    """
    uuids = [device for device in devices if device.startswith(gpus.UUID_PREFIXES)]
    if not uuids:
        return None
    try:
        read_gpu = gpus.NVML.reader(uuids)
    except gpus.NvmlError as error:
        log.warning("NVML cannot be used (%s): gpu utilisation is not measured", error)
        return None

    def read(device: str, time_s: float) -> DeviceSample:
        reading = read_gpu(device)
        return DeviceSample(
            time_s,
            device,
            utilisation=reading.utilisation_percent,
            memory_used_bytes=reading.memory_used_bytes,
            power_w=reading.power_w,
            temperature_c=reading.temperature_c,
        )

    return read


class Sampler:
    """Background thread that reads devices and host every `every_s` while the `with` block lasts."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        every_s: float = 0.5,
        note: Note = lambda *_: None,
        read: Reader | None = None,
    ) -> None:
        """`note` hears every sample at once; `read`: of devices elsewhere."""
        self.devices, self._every_s, self._note = tuple(devices), every_s, note
        self._read, self._failed = read or nvml_reader(devices), False
        self._looks, self._processes = itertools.count(), list[psutil.Process]()
        psutil.cpu_percent(interval=None)  # the first call has no interval to speak of
        self.latest: dict[str, DeviceSample] = {}  # the newest reading of each device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="virnuc-sampler", daemon=True)

    def sample_once(self) -> None:
        """Take one reading of everything now."""
        now = time.monotonic()
        for device in self.devices if self._read else ():
            assert self._read is not None
            try:
                self.latest[device] = self._read(device, now)
            except Exception as error:  # noqa: BLE001  a driver may fail in any way; the run must not
                self.latest[device] = DeviceSample(now, device)
                if not self._failed:
                    log.warning(
                        "reading %s failed (%s): its numbers are unknown at that moment",
                        device,
                        error,
                    )
                self._failed = True
        self._note(*self.latest.values(), self.host(now))

    def host(self, time_s: float) -> HostSample:
        """CPU and memory of this process's machine."""
        if next(self._looks) % CHILDREN_EVERY == 0:
            here = psutil.Process()
            self._processes = [here, *here.children(recursive=True)]
        rss_bytes = 0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended
                rss_bytes += process.memory_info().rss
        return HostSample(time_s, psutil.cpu_percent(interval=None), rss_bytes)

    def _loop(self) -> None:
        self.sample_once()
        while not self._stop.wait(self._every_s):
            self.sample_once()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample_once()  # so that even a short run has one


@functools.cache
def shared_console() -> Console:
    """The console of this process's log lines and bars: two consoles on one terminal wipe each other's lines."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


class InferenceProgressReporter:
    """Shows the progress of a run while the `with` block lasts. On a terminal and in a notebook: bars; elsewhere: a
    line in the log every `PLAIN_EVERY_S`. `on_progress` hears the share that is done at most every `CALLBACK_EVERY_S`
    and once at the end. `already_done`: by an earlier run, so that it says nothing of this one's speed."""

    def __init__(
        self, total_sequences: int, monitor: Sampler, on_progress: OnShare, *, already_done: int = 0
    ) -> None:
        self._total, self._monitor, self._on_progress = total_sequences, monitor, on_progress
        self._console = shared_console()
        self._first = self._done = already_done
        self._totals = defaultdict[str, Counter[str]](
            Counter
        )  # by device: rows, tokens and slots of this run
        self._began_s = self._started_s = self._last_plain_s = self._last_callback_s = (
            time.monotonic()
        )
        self._bars: Progress | None = None
        self._cell: Any = None  # of a notebook, that shows the bars

    def __enter__(self) -> Self:
        if self._console.is_interactive or self._console.is_jupyter:
            devices = self._monitor.devices
            on_gpu = any(device.startswith(gpus.UUID_PREFIXES) for device in devices)
            words = [
                "count",
                "tokens",
                *["gpu"] * on_gpu,
                *["pack"] * (self._console.width >= WIDE),
                "eta",
            ]
            units = {"gpu": " GPU", "pack": " pack"}
            columns = [
                TextColumn(f"{{task.fields[{w}]}}{units.get(w, '')}", justify="right")
                for w in words
            ]
            bar = (
                BarColumn(bar_width=None),
                TaskProgressColumn(show_speed=False),
            )  # as wide as the words leave it
            name = TextColumn("[bold blue]{task.description}")
            self._bars = Progress(name, *bar, *columns, console=self._console, expand=True)
            for device in devices if len(devices) > 1 else ():
                self._bars.add_task(
                    device[:12], total=None, devices=(device,), **self.progress(device)
                )
            self._bars.add_task(TITLE, total=self._total, devices=(), **self.progress())
            if self._console.is_jupyter:  # without widgets, which rich would ask for
                self._cell = importlib.import_module("IPython.display").display(
                    self._bars, display_id=True
                )
            else:
                self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        if self._bars is not None and self._cell is None:
            self._bars.stop()
        self._on_progress(self.share)

    @property
    def share(self) -> float:
        """How much is done, 0 to 1; a run of nothing is done."""
        return min(1.0, self._done / self._total) if self._total else 1.0

    @property
    def eta(self) -> str:
        """The time left at this run's speed since its first batch; `--:--` before anything is done."""
        elapsed, made, left = (
            time.monotonic() - self._began_s,
            self._done - self._first,
            self._total - self._done,
        )
        return (
            clock_text(elapsed * max(0, left) / max(1, made))
            if left <= 0 or (made > 0 and elapsed > 0)
            else "--:--"
        )

    def update(self, shard: ShardDone) -> None:
        """Count a committed shard, and show it when it is time."""
        if self._done == self._first:  # what came before the first batch was not embedding
            self._began_s = min(
                (batch.launched_s for batch in shard.batches), default=self._began_s
            )
        tokens, slots = (
            sum(getattr(batch, what) for batch in shard.batches) for what in ("tokens", "slots")
        )
        self._totals[shard.device].update(rows=shard.rows, tokens=tokens, slots=slots)
        self._done, now = self._done + shard.rows, time.monotonic()
        if self._bars is not None or now - self._last_plain_s >= PLAIN_EVERY_S:
            self._last_plain_s = now
            self._show()
        if now - self._last_callback_s >= CALLBACK_EVERY_S:
            self._last_callback_s = now
            self._on_progress(self.share)

    def progress(self, *devices: str) -> dict[str, Any]:
        """What is shown of `devices`, or of all: rows done so far, and the rest in words."""
        names, elapsed = devices or self._monitor.devices, time.monotonic() - self._began_s
        rows, tokens, slots = (
            sum(self._totals[name][what] for name in names) for what in ("rows", "tokens", "slots")
        )
        newest = (
            self._monitor.latest[name].utilisation for name in names if name in self._monitor.latest
        )
        told = [used for used in newest if used is not None]
        return {
            "completed": rows if devices else self._done,
            "count": f"{rows:,}" if devices else f"{self._done:,}/{self._total:,}",
            "eta": "" if devices else f"ETA {self.eta}",
            "tokens": f"{tokens / elapsed:,.0f} tok/s" if tokens and elapsed > 0 else "- tok/s",
            "gpu": f"{sum(told) / len(told):.0f} %" if told else "n/a",
            "pack": f"{100 * tokens / slots:.1f} %" if slots else "n/a",
        }

    def _show(self) -> None:
        """Bring the bars up to date, or say a line."""
        if self._bars is not None:
            for task in self._bars.tasks:
                self._bars.update(task.id, **self.progress(*task.fields["devices"]))
            if self._cell is not None:
                self._cell.update(self._bars)
            return
        words = self.progress()
        log.info(
            f"{TITLE}: {self._done:,} of {self._total:,} sequences ({100 * self.share:.1f} %) | "
            f"{words['tokens']} | gpu util {words['gpu']} | packing efficiency {words['pack']} | "
            f"elapsed {clock_text(time.monotonic() - self._started_s)} | {words['eta']}"
        )


def clock_text(seconds: float) -> str:
    """Seconds as `MM:SS`, from one hour on `H:MM:SS`; parts of a second are cut.

    >>> clock_text(3200.6), clock_text(12600), clock_text(7.9)
    ('53:20', '3:30:00', '00:07')
    """
    minutes, left = divmod(int(max(0.0, seconds)), 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours}:{rest:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


def pipeline_summary(stages: Sequence[StageTime], total_s: float) -> str:
    """The block `PIPELINE SUMMARY` for the log: the stages, and what else took time, which together is the whole."""
    texts = dict.fromkeys(STAGES, "not measured")
    for one in stages:
        if one.seconds is None:
            texts[one.name] = f"0.0 s (fused into {one.fused_into})"
        else:
            share = f" ({100 * one.seconds / total_s:.1f} %)" if total_s > 0 else ""
            texts[one.name] = f"{one.seconds:.1f} s{share}"
    told = (
        f"Stage {n}: {name} ".ljust(34, ".") + f"  {texts[name]}"
        for n, name in enumerate(STAGES, start=1)
    )
    total = f"Total wall time: {clock_text(total_s)} ({total_s:.1f} s)"
    others = [
        one
        for one in stages
        if one.name not in STAGES and one.seconds and one.seconds >= LEAST_SHOWN_S
    ]
    shown = (f"{one.name} {'-' * (one.name == OVERLAPPED)}{one.seconds:.1f} s" for one in others)
    rest = ["The rest: " + ", ".join(shown)] if others else []
    return "\n".join([RULE, "PIPELINE SUMMARY", RULE, *told, total, *rest, RULE])
