"""A profile's time limit: a run over it is ended, and its directory says so."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from virnuc_core.config import Devices
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, device_records, read, write


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


class TimeLimit:
    """Ends all child processes when the body takes longer than `limit_s`; the work fails, and `reached` is true."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None
        self._started_s = 0.0
        self.reached = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the body began."""
        return time.monotonic() - self._started_s

    def _end(self) -> None:
        self.reached = True
        end_all_children()

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._limit_s is not None:
            self._timer = threading.Timer(self._limit_s, self._end)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def write_stopped(run: RunDir, staging: StageSummary, devices: Devices, wall_s: float) -> None:
    """summary.json of a run that was ended: how long it had taken, and nothing that was not measured."""
    stopped = RunSummary(
        stopped_at_limit=True,
        wall_s=wall_s,
        staging_s=staging.total_s,
        total_s=staging.total_s + wall_s,
        n_reads=staging.counts.n_reads,
        devices=device_records(device.record() for device in resolve(devices)),
    )
    write(run.summary, stopped)


def forget_stopped(run: RunDir) -> None:
    """Remove the summary of a run that was ended, so that the run can go on."""
    if run.summary.is_file() and read(run.summary, RunSummary).stopped_at_limit:
        run.summary.unlink()
