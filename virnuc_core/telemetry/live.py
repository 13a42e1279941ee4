"""Show the progress of a run while it goes on, and the seconds of its stages at the end."""

import functools
import importlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn

from virnuc_core import gpus
from virnuc_core.config import OnShare
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import OVERLAPPED, STAGES, ShardDone, StageTime

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 10.0
CALLBACK_EVERY_S: Final = 5.0
WIDE_TERMINAL: Final = 100  # columns; there is room for the packing, too
SHORT_NAME: Final = 12  # characters of a device's id that are shown
TITLE: Final = "Embedding"
RULE: Final = "=" * 80
STAGE_WIDTH: Final = 34  # of "Stage 6: ESM-2 ......"
MIN_SHOWN_S: Final = 0.05  # of what is no stage


@functools.cache
def shared_console() -> Console:
    """Return the console of this process's log lines and bars.

    There is only one: two consoles on one terminal wipe each other's lines.
    """
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


@dataclass(frozen=True, slots=True)
class ProgressTexts:
    """What is shown of some devices: how many rows are done, and the rest as text."""

    completed: int
    count: str
    tokens: str
    gpu: str
    pack: str
    eta: str


class InferenceProgressReporter:
    """Shows the progress of a run while the `with` block lasts.

    On a terminal and in a notebook it shows bars. Elsewhere it logs a line every `LOG_EVERY_S`.
    """

    def __init__(
        self,
        total_sequences: int,
        monitor: Sampler,
        on_progress: OnShare,
        *,
        on_status: Callable[[str], None] | None = None,
        already_done: int = 0,
        has_verdicts: bool = True,
    ) -> None:
        """Prepare to show progress.

        Args:
            total_sequences: How many sequences the run has.
            monitor: Gives the devices and their newest readings.
            on_progress: Gets the share that is done, at most every `CALLBACK_EVERY_S` and once at
                the end.
            on_status: Gets a line of live figures at the same times, just before that.
            already_done: Sequences that an earlier attempt at this run did. They count as done,
                but not for the speed.
            has_verdicts: False if the classifier of the run has random weights, as in a training.
                Then nothing is called viral.
        """
        self._has_verdicts = has_verdicts
        self._total = total_sequences
        self._monitor = monitor
        self._on_progress = on_progress
        self._on_status = on_status
        self._console = shared_console()
        self._already_done = already_done
        self._done = already_done
        # rows, tokens, slots and viral rows of this run by device
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        now_s = time.monotonic()
        self._started_s = now_s
        self._first_batch_s = now_s  # until the first shard tells when its first batch started
        self._last_log_s = now_s
        self._last_callback_s = now_s
        self._bars: Progress | None = None
        self._notebook_cell: Any = None  # that shows the bars

    def __enter__(self) -> Self:
        """Show bars on a terminal and in a notebook. Elsewhere, show nothing yet."""
        if self._console.is_interactive or self._console.is_jupyter:
            self._bars = self._make_bars()
            if self._console.is_jupyter:
                # rich's own live display in notebooks would need the package ipywidgets. So the
                # bars are printed as a cell, which `_show` replaces.
                display = importlib.import_module("IPython.display").display
                self._notebook_cell = display(self._bars, display_id=True)
            else:
                self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the progress a last time, give it to the callback, and stop the bars."""
        self._show()
        if self._bars is not None and self._notebook_cell is None:  # bars of a terminal
            self._bars.stop()
        self._call_back()

    def _make_bars(self) -> Progress:
        """Return a bar for each device, if there are several, and one for the whole run."""
        devices = self._monitor.devices
        columns: list[ProgressColumn] = [
            TextColumn("[bold blue]{task.description}"),
            BarColumn(bar_width=None),  # as wide as the texts leave it
            TaskProgressColumn(show_speed=False),
            _text_column("count"),
            _text_column("tokens"),
        ]
        has_gpus = any(device.startswith(gpus.UUID_PREFIXES) for device in devices)
        if has_gpus:
            columns.append(_text_column("gpu", " GPU"))
        if self._console.width >= WIDE_TERMINAL:
            columns.append(_text_column("pack", " pack"))
        columns.append(_text_column("eta"))
        bars = Progress(*columns, console=self._console, expand=True)
        if len(devices) > 1:
            for device in devices:
                texts = asdict(self.progress(device))
                # A device has no total, because devices take shards as they become free.
                bars.add_task(device[:SHORT_NAME], total=None, devices=(device,), **texts)
        # No devices stands for the whole run.
        bars.add_task(TITLE, total=self._total, devices=(), **asdict(self.progress()))
        return bars

    @property
    def share(self) -> float:
        """Return how much is done, 0 to 1. A run of nothing is done."""
        if not self._total:
            return 1.0
        return min(1.0, self._done / self._total)

    @property
    def eta(self) -> str:
        """Return the time left, if the run goes on as fast as since its first batch.

        It is `--:--` before this attempt has finished anything.
        """
        elapsed_s = time.monotonic() - self._first_batch_s
        n_new = self._done - self._already_done  # sequences that this attempt did
        n_left = self._total - self._done
        if n_left <= 0:
            return clock_text(0.0)
        if n_new <= 0 or elapsed_s <= 0:
            return "--:--"
        return clock_text(elapsed_s * n_left / n_new)

    def update(self, shard: ShardDone) -> None:
        """Count a committed shard, and show the progress if the last time is long enough ago."""
        if self._done == self._already_done:
            # This is the first shard. The speed counts from its first batch, because what came
            # before, such as loading the models, was not embedding.
            launches_s = [batch.launched_s for batch in shard.batches]
            self._first_batch_s = min(launches_s, default=self._first_batch_s)
        self._counts[shard.device].update(
            rows=shard.rows,
            tokens=sum(batch.tokens for batch in shard.batches),
            slots=sum(batch.slots for batch in shard.batches),
            viral=int(shard.viral or 0),
        )
        self._done += shard.rows
        now_s = time.monotonic()
        # Bars are brought up to date with every shard. Log lines would be too many.
        if self._bars is not None or now_s - self._last_log_s >= LOG_EVERY_S:
            self._last_log_s = now_s
            self._show()
        if now_s - self._last_callback_s >= CALLBACK_EVERY_S:
            self._last_callback_s = now_s
            self._call_back()

    def _call_back(self) -> None:
        """Give the line of live figures and the share that is done to whoever asked for them."""
        if self._on_status is not None:
            self._on_status(self.status_line())
        self._on_progress(self.share)

    def progress(self, *devices: str) -> ProgressTexts:
        """Return the texts that show the progress of these devices.

        Without devices they show the whole run: its total and the time left, too.
        """
        device_ids = devices or self._monitor.devices
        counts: Counter[str] = Counter()
        for device in device_ids:
            counts.update(self._counts[device])
        elapsed_s = time.monotonic() - self._first_batch_s

        completed = self._done
        count = f"{self._done:,}/{self._total:,}"
        eta = f"ETA {self.eta}"
        if devices:
            completed = counts["rows"]
            count = f"{completed:,}"
            eta = ""
        tokens = "- tok/s"
        if counts["tokens"] and elapsed_s > 0:
            tokens = f"{counts['tokens'] / elapsed_s:,.0f} tok/s"
        pack = "n/a"
        if counts["slots"]:
            pack = f"{100 * counts['tokens'] / counts['slots']:.1f} %"
        gpu = self._utilisation_text(device_ids)
        return ProgressTexts(completed, count, tokens, gpu, pack, eta)

    def _utilisation_text(self, devices: Sequence[str]) -> str:
        """Return how busy the devices are, as the mean of their newest readings, or `n/a`."""
        percents = []
        for device in devices:
            sample = self._monitor.latest.get(device)
            if sample is not None and sample.utilisation is not None:
                percents.append(sample.utilisation)
        if not percents:
            return "n/a"
        return f"{sum(percents) / len(percents):.0f} %"

    def _show(self) -> None:
        """Bring the bars up to date. Where there are no bars, log a line."""
        if self._bars is None:
            self._log_line()
            return
        for task in self._bars.tasks:
            texts = self.progress(*task.fields["devices"])
            self._bars.update(task.id, **asdict(texts))
        if self._notebook_cell is not None:
            self._notebook_cell.update(self._bars)

    def _log_line(self) -> None:
        """Log the progress of the whole run in one line."""
        log.info("%s: %s", TITLE, self.status_line())

    def status_line(self) -> str:
        """Return the live figures of the whole run in one line.

        `viral sequences so far` are first verdicts: sequences that have been scored since the
        start, with a score from the threshold on. They are open frames and not reads. A training
        has no verdicts.
        """
        texts = self.progress()
        elapsed_time = clock_text(time.monotonic() - self._started_s)
        percent_done = 100 * self.share
        figures = [f"{self._done:,} of {self._total:,} sequences ({percent_done:.1f} %)"]
        if self._has_verdicts:
            n_viral = sum(counts["viral"] for counts in self._counts.values())
            figures.append(f"{n_viral:,} viral sequences so far")
        figures += [
            texts.tokens,
            f"gpu util {texts.gpu}",
            f"packing efficiency {texts.pack}",
            f"elapsed {elapsed_time}",
            texts.eta,
        ]
        return " | ".join(figures)


def _text_column(name: str, unit: str = "") -> TextColumn:
    """Return a column that shows a field of `ProgressTexts`, set to the right."""
    return TextColumn(f"{{task.fields[{name}]}}{unit}", justify="right")


def clock_text(seconds: float) -> str:
    """Return seconds as `MM:SS`, from one hour on as `H:MM:SS`. Parts of a second are cut.

    >>> clock_text(3200.6), clock_text(12600), clock_text(7.9)
    ('53:20', '3:30:00', '00:07')
    """
    whole_seconds = int(max(0.0, seconds))
    minutes, seconds_left = divmod(whole_seconds, 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes_left:02d}:{seconds_left:02d}"
    return f"{minutes:02d}:{seconds_left:02d}"


def pipeline_summary(stages: Sequence[StageTime], total_s: float) -> str:
    """Return the block `PIPELINE SUMMARY`.

    It has a line for each stage, the whole time, and a line for all else that took time, such as
    starting up. The stages and the rest add up to the whole time.

    Args:
        stages: The stages and the other parts of the run, with their seconds.
        total_s: The whole time of the run.
    """
    stage_of_name = {stage.name: stage for stage in stages}
    lines = [RULE, "PIPELINE SUMMARY", RULE]
    for number, name in enumerate(STAGES, start=1):
        title = f"Stage {number}: {name} ".ljust(STAGE_WIDTH, ".")
        lines.append(f"{title}  {_stage_text(stage_of_name.get(name), total_s)}")
    lines.append(f"Total wall time: {clock_text(total_s)} ({total_s:.1f} s)")
    other_parts = []
    overlapped_s = None
    for stage in stages:
        is_shown = stage.seconds is not None and stage.seconds >= MIN_SHOWN_S
        if not is_shown or stage.name in STAGES:
            continue
        if stage.name == OVERLAPPED:
            overlapped_s = stage.seconds
        else:
            other_parts.append(f"{stage.name} {stage.seconds:.1f} s")
    if other_parts:
        lines.append(f"The rest: {', '.join(other_parts)}")
    if overlapped_s:
        lines.append(f"Of this, {overlapped_s:.1f} s passed at the same time as other parts.")
    lines.append(RULE)
    return "\n".join(lines)


def _stage_text(stage: StageTime | None, total_s: float) -> str:
    """Return the seconds of a stage and its share of the whole time, or why there are none."""
    if stage is None:
        return "not measured"
    if stage.seconds is None:  # its work is done within another stage
        return f"0.0 s (fused into {stage.fused_into or 'another stage'})"
    share = ""
    if total_s > 0:
        share = f" ({100 * stage.seconds / total_s:.1f} %)"
    return f"{stage.seconds:.1f} s{share}"
