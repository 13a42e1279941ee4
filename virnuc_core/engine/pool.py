"""The pool: one worker process a device; shards handed out one by one, so that a slow device simply takes fewer.

A worker that dies is restarted and its shards are handed out again; one that is silent for too long is ended first. A
shard that was first in line at several deaths stops the run, by name. Errors of reads, weights and settings stop it at
once.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from virnuc_core import errors
from virnuc_core.engine.process import Child, end_children, generation, spawn
from virnuc_core.engine.spec import WorkerSpec
from virnuc_core.telemetry.records import BatchRecord, ShardDone

log = logging.getLogger(__name__)

SHARDS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
MAX_RESTARTS_WITHOUT_PROGRESS: Final = 3  # of one worker, before it has committed anything


@dataclass(slots=True)
class Seat:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    child: Child | None = None
    held: deque[int] = field(default_factory=deque)  # shards given and not committed, oldest first
    ready: dict[str, Any] | None = None
    progress_s: float = 0.0
    restarts: int = 0
    fruitless: int = 0  # deaths since the last commit


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """What the pool did."""

    computed: int
    restarts: int
    deaths: tuple[str, ...]  # one line each
    workers: tuple[dict[str, Any], ...]  # what each said when ready


class Pool:
    """Computes shards on workers. Use `run` once."""

    def __init__(self, workers: Sequence[WorkerSpec], logs: Path, on_done: Callable[[ShardDone], None]) -> None:
        self._inbox: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        self._seats = [Seat(spec) for spec in workers]
        self._logs, self._on_done = logs, on_done
        self._born = generation()
        self._todo: deque[int] = deque()
        self._left: set[int] = set()
        self._killed: Counter[int] = Counter()  # deaths with this shard first in line
        self._deaths: list[str] = []

    def run(self, shards: Sequence[int]) -> PoolSummary:
        """Compute `shards`; returns when all are committed. Workers are gone when it returns or raises.

        Errors: `ShardError` names a shard that ends every worker; `WeightsError`, `ConfigError`, `DeviceError`,
        `InputError` as the worker raised them; `WorkerError` with the worker's traceback for anything else.
        """
        self._todo.extend(shards)
        self._left.update(shards)
        count = len(self._left)
        try:
            for seat in self._seats[: max(1, count)] if count else []:
                self._start(seat)
            while self._left:
                self._step()
            self._stop()
        finally:
            end_children([seat.child for seat in self._seats if seat.child is not None])
        ready = tuple({"device": s.spec.device.id, **s.ready} for s in self._seats if s.ready is not None)
        return PoolSummary(count, sum(s.restarts for s in self._seats), tuple(self._deaths), ready)

    def _start(self, seat: Seat) -> None:
        device = seat.spec.device
        seat.child = spawn(
            "virnuc_core.engine.worker",
            seat.spec.to_json(),
            name=device.id,
            inbox=self._inbox,
            log=self._logs / f"worker-{device.id}.log",
            born=self._born,
            environment=device.environment(),
        )
        seat.progress_s = time.monotonic()
        self._feed(seat)

    def _feed(self, seat: Seat) -> None:
        """Give the worker shards until it holds enough; one that killed before travels alone: it can be named."""
        assert seat.child is not None
        while self._todo and len(seat.held) < SHARDS_AHEAD:
            suspect = self._killed[self._todo[0]] > 0
            if seat.held and (suspect or self._killed[seat.held[0]] > 0):
                return
            shard = self._todo.popleft()
            seat.held.append(shard)
            seat.child.send({"op": "shard", "shard": shard})

    def _step(self) -> None:
        try:
            child, message = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            self._end_silent()
            return
        seat = next((s for s in self._seats if s.child is child), None)
        if seat is None:
            return  # an earlier worker's last message
        match message["event"]:
            case "ready":
                seat.ready = {k: v for k, v in message.items() if k != "event"}
                seat.progress_s = time.monotonic()
                log.info("%s ready after %.1f s", seat.spec.device.id, message["load_s"])
            case "alive":
                seat.progress_s = max(seat.progress_s, float(message["progress_s"]))
            case "committed":
                self._committed(seat, message)
            case "error":
                self._refuse(seat, message)
            case "closed":
                self._died(seat)
        self._end_silent()

    def _committed(self, seat: Seat, message: dict[str, Any]) -> None:
        shard = int(message["shard"])
        seat.held.remove(shard)
        seat.fruitless = 0
        seat.progress_s = time.monotonic()
        self._left.discard(shard)
        body = {key: value for key, value in message.items() if key not in ("event", "batches")}
        self._on_done(ShardDone(**body, batches=tuple(BatchRecord(**batch) for batch in message["batches"])))
        self._feed(seat)

    def _refuse(self, seat: Seat, message: dict[str, Any]) -> None:
        """Errors that another try cannot mend stop the run; the rest is left to the restart that follows the death."""
        kind, text = message["kind"], message["message"]
        log.error("%s: %s: %s", seat.spec.device.id, kind, text)
        known = getattr(errors, kind, None)
        if kind in ("InputError", "ConfigError", "WeightsError", "DeviceError", "ShardError"):
            raise known(text)  # type: ignore[misc]
        if kind in ("OSError", "PermissionError", "FileNotFoundError"):
            raise errors.VirnucError(text)
        seat.ready = {**(seat.ready or {}), "last_error": f"{kind}: {text}", "traceback": message["traceback"]}

    def _died(self, seat: Seat) -> None:
        assert seat.child is not None
        status = seat.child.end(0.5)
        if self._born != generation():
            raise errors.WorkerError("the run was interrupted; what was committed stays, run again to go on")
        words = seat.child.last_words().splitlines()
        said = (seat.ready or {}).get("last_error") or (words[-1] if words else "nothing")
        held = list(seat.held)
        line = f"worker on {seat.spec.device.id} ended (status {status}), holding shards {held}; it said: {said}"
        log.warning("%s", line)
        self._deaths.append(line)
        trace = str((seat.ready or {}).get("traceback", ""))
        if seat.held:
            self._killed[seat.held[0]] += 1
            worst = seat.held[0]
            if self._killed[worst] >= seat.spec.engine.max_shard_attempts:
                raise errors.ShardError(
                    f"ended {self._killed[worst]} workers; last words: {said}; see {seat.child.log}", shard=worst
                )
        self._todo.extendleft(reversed(seat.held))
        seat.held.clear()
        seat.child = None
        seat.fruitless += 1
        if seat.fruitless >= MAX_RESTARTS_WITHOUT_PROGRESS:
            raise errors.WorkerError(
                f"worker on {seat.spec.device.id} ended {seat.fruitless} times in a row; last words: {said}",
                worker_traceback=trace,
            )
        seat.restarts += 1
        self._start(seat)

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long; their death is then handled like any other."""
        now = time.monotonic()
        for seat in self._seats:
            limit = seat.spec.engine.silence_s
            if seat.child is not None and seat.held and now - seat.progress_s > limit:
                log.error("%s has been silent for more than %.0f s; ending it", seat.spec.device.id, limit)
                seat.progress_s = now
                seat.child.end(0.5)

    def _stop(self) -> None:
        for seat in self._seats:
            if seat.child is not None:
                seat.child.send({"op": "stop"})
