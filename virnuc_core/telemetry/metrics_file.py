"""A file of live figures of a run, in the text format of Prometheus.

The "textfile collector" of Prometheus' node_exporter reads such files, so that a run shows up in
Grafana without a port that other users of the machine could ask. Each line is a figure; the label
`run` is the name of the file without `.prom`, so that several runs can be told apart.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.rundir import write_text_atomically
from virnuc_core.safe_files import read_file
from virnuc_core.system_errors import path_exists
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

FIRST_LINE: Final = "# virnuc: live figures of a run"
SUFFIX: Final = ".prom"  # the only files that node_exporter reads
WRITE_EVERY_S: Final = 5.0
WORK_OF_DEVICES: Final = {
    "tokens": "Real tokens embedded, of both encoders.",
    "slots": "Token slots launched; tokens divided by slots is the packing efficiency.",
    "batches": "Batches launched.",
}
MAX_BYTES: Final = 1 << 20  # of a file that may be one of ours; it has some kilobytes


def require_metrics_file(path: Path) -> None:
    """Raise a `ConfigError` if a file with live figures cannot be written at this path.

    A file that virnuc did not write is never replaced.
    """
    if path.suffix != SUFFIX:
        raise ConfigError(f"metrics_file: {path} must end in {SUFFIX}, or no collector reads it")
    if not path_exists(path):
        return
    try:
        is_ours = read_file(path, None, MAX_BYTES).startswith(FIRST_LINE.encode())
    except (OSError, VirnucError) as error:
        raise ConfigError(f"metrics_file: {path} cannot be replaced ({error})") from error
    if not is_ours:
        raise ConfigError(f"metrics_file: {path} was not written by virnuc; choose another name")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a figure, with the labels that tell it from the figure's other values."""

    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure: its name, its meaning and its values."""

    name: str
    kind: Literal["counter", "gauge"]  # of Prometheus: a counter only grows, a gauge may fall
    meaning: str
    values: Sequence[Value]  # none if it is not known; then the figure is left out


class MetricsFile:
    """Keeps a file of live figures up to date while the `with` block lasts.

    At the end the file stays, and says whether the run came to its end. An error of the disk is
    logged once, and does not stop the run.
    """

    def __init__(self, path: Path, total: int, sampler: Sampler, *, already_done: int = 0) -> None:
        """Prepare to write; nothing is written yet.

        Args:
            path: The file, which `require_metrics_file` accepts.
            total: How many distinct sequences the run has.
            sampler: Gives the newest readings of the devices.
            already_done: Sequences that an earlier attempt at this run did.
        """
        self._path = path
        self._total = total
        self._already_done = already_done
        self._sampler = sampler
        self._started_epoch_s = time.time()
        self._started_s = time.monotonic()
        self._state = "running"
        self._n_deaths = 0
        # rows, tokens, slots, batches and viral rows of this attempt by device
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._has_failed = False
        self._lock = threading.Lock()  # the counts are changed by one thread and read by another
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="virnuc-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Write the file a last time, with the state in which the run ended."""
        self._stop.set()
        self._thread.join()
        self._state = "completed" if error_type is None else "failed"
        self._write()

    def update(self, event: ShardDone | str) -> None:
        """Count a computed shard, or the death of a worker (a text)."""
        with self._lock:
            if isinstance(event, str):
                self._n_deaths += 1
                return
            self._counts[event.device].update(
                rows=event.rows,
                viral=int(event.viral or 0),
                batches=len(event.batches),
                tokens=sum(batch.tokens for batch in event.batches),
                slots=sum(batch.slots for batch in event.batches),
            )

    def text(self) -> str:
        """Return the content of the file: all figures as they are now."""
        with self._lock:
            metrics = [*self._run_metrics(), *self._work_of_devices(), *self._readings()]
        lines = [FIRST_LINE]
        for metric in metrics:
            if not metric.values:
                continue
            lines.append(f"# HELP {metric.name} {metric.meaning}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            for value in metric.values:
                labels = _label_text({"run": self._path.stem, **value.labels})
                lines.append(f"{metric.name}{{{labels}}} {value.value:.15g}")
        return "\n".join(lines) + "\n"

    def _run_metrics(self) -> list[Metric]:
        """Return the figures of the whole run."""
        n_done = self._already_done + self._sum("rows")
        states = [
            Value(float(state == self._state), {"state": state})
            for state in ("running", "completed", "failed")
        ]
        deaths = [Value(self._n_deaths)]
        viral = "Of those scored since this start, those from the threshold on: first verdicts."
        return [
            _gauge("virnuc_start_time_seconds", "Unix time of the start.", self._started_epoch_s),
            _gauge("virnuc_update_time_seconds", "Unix time of these figures.", time.time()),
            Metric("virnuc_state", "gauge", "1 for the state of the run, else 0.", states),
            _gauge("virnuc_sequences", "Distinct sequences of the run.", self._total),
            _gauge("virnuc_sequences_done", "Of these, those that have a score.", n_done),
            _gauge("virnuc_sequences_viral", viral, self._sum("viral")),
            _gauge("virnuc_eta_seconds", "Estimated time that is left.", self._eta_s(n_done)),
            Metric("virnuc_worker_deaths_total", "counter", "Workers that died.", deaths),
        ]

    def _eta_s(self, n_done: int) -> float | None:
        """Return the seconds that are left at the speed so far; `None` before the first shard."""
        n_new = n_done - self._already_done
        if n_new <= 0:
            return None
        elapsed_s = time.monotonic() - self._started_s
        return max(0, self._total - n_done) * elapsed_s / n_new

    def _work_of_devices(self) -> list[Metric]:
        """Return what each device has done since the start."""
        metrics = []
        for name, meaning in WORK_OF_DEVICES.items():
            values = [
                Value(counts[name], {"device": device}) for device, counts in self._counts.items()
            ]
            metrics.append(Metric(f"virnuc_{name}_total", "counter", meaning, values))
        return metrics

    def _readings(self) -> list[Metric]:
        """Return the newest readings of each GPU. What a GPU does not tell is left out."""
        busy, memory, power = [], [], []
        for device, sample in self._sampler.latest.items():
            labels = {"device": device}
            if sample.utilisation is not None:
                busy.append(Value(sample.utilisation / 100.0, labels))
            if sample.memory_used_bytes is not None:
                memory.append(Value(sample.memory_used_bytes, labels))
            if sample.power_w is not None:
                power.append(Value(sample.power_w, labels))
        return [
            Metric("virnuc_device_busy_ratio", "gauge", "How busy the GPU is, 0 to 1.", busy),
            Metric("virnuc_device_memory_bytes", "gauge", "Memory of the GPU in use.", memory),
            Metric("virnuc_device_power_watts", "gauge", "Power that the GPU takes.", power),
        ]

    def _sum(self, name: str) -> int:
        """Return a count of all devices together."""
        return sum(counts[name] for counts in self._counts.values())

    def _loop(self) -> None:
        """Write the file every few seconds until the `with` block ends."""
        self._write()
        while not self._stop.wait(WRITE_EVERY_S):
            self._write()

    def _write(self) -> None:
        """Write the file so that a reader never sees half of it."""
        try:
            write_text_atomically(self._path, self.text())
        except (OSError, VirnucError) as error:
            if not self._has_failed:
                log.warning("the file of live figures cannot be written: %s", error)
            self._has_failed = True


def _gauge(name: str, meaning: str, value: float | None) -> Metric:
    """Return a figure of the whole run. One that is not known has no value."""
    values = [] if value is None else [Value(value)]
    return Metric(name, "gauge", meaning, values)


def _label_text(labels: Mapping[str, str]) -> str:
    """Return labels as Prometheus writes them, with special characters escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(value: str) -> str:
    """Return a text in which backslash, quotation mark and line end are escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
