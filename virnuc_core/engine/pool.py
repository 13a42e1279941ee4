"""The pool: one worker process a device; shards handed out one by one, so that a slow device simply takes fewer.

A worker that dies is restarted and what it held is handed out again; one that is silent for too long is ended first. A
shard at which workers die repeatedly is searched for the row that does it (`suspects`); that row is set aside and the
rest is computed. A device that runs out of memory gets the shard again with half the token budget. Errors of reads,
weights, settings and devices stop the run at once.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from virnuc_core import errors
from virnuc_core.engine.messages import JobSpec, Order, WorkerSpec
from virnuc_core.engine.poison_rows import Search
from virnuc_core.engine.prewarm import Standby, start_worker
from virnuc_core.engine.process import Child, end_children, generation
from virnuc_core.engine.shards import Plan
from virnuc_core.telemetry.records import BatchRecord, ShardDone

log = logging.getLogger(__name__)

ORDERS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
MAX_DEATHS_BEFORE_READY: Final = 3  # in a row, of workers that never got to work
MAX_DIVISOR: Final = 64
NOT_TO_BE_RETRIED: Final = ("InputError", "ConfigError", "WeightsError", "DeviceError", "ShardError")
OF_THE_SYSTEM: Final = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


@dataclass(slots=True)
class Seat:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    child: Child | None = None
    held: deque[Order] = field(default_factory=deque)  # given and not answered, oldest first
    ready: dict[str, Any] | None = None  # what the present worker said when it was ready
    failure: dict[str, Any] | None = None  # what it said of its failure
    progress_s: float = 0.0
    restarts: int = 0
    unready_deaths: int = 0


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """What the pool did."""

    computed: int
    restarts: int
    deaths: tuple[str, ...]  # one line each
    workers: tuple[dict[str, Any], ...]  # what each said when ready
    set_aside: tuple[int, ...]  # uniques that end every worker
    reduced: tuple[tuple[int, int], ...]  # shard and what its token budgets were divided by


class Pool:
    """Computes shards of a plan on workers. Use `run` once."""

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[WorkerSpec],
        job: JobSpec,
        on_done: Callable[[ShardDone], None],
        standby: Standby | None = None,
    ) -> None:
        self._plan, self._job, self._on_done = plan, job, on_done
        self._standby = standby
        self._seats = [Seat(spec) for spec in workers]
        self._attempts = workers[0].engine.max_shard_attempts
        self._inbox = queue.Queue[tuple[Child, dict[str, Any]]]() if standby is None else standby.inbox
        self._born = generation()
        self._todo: deque[Order] = deque()
        self._left: set[int] = set()
        self._killed: Counter[int] = Counter()  # deaths with this shard first in line
        self._searches: dict[int, Search] = {}
        self._deaths: list[str] = []
        self._workers: dict[str, dict[str, Any]] = {}
        self._reduced: list[tuple[int, int]] = []

    def run(self, shards: Sequence[int]) -> PoolSummary:
        """Compute `shards`; returns when all are committed. Workers are gone when it returns or raises.

        Errors: `InputError`, `ConfigError`, `WeightsError`, `DeviceError`, `ShardError` as the worker raised them;
        `ShardError` for a shard that ends workers though no row of it does alone; `WorkerError` with the worker's
        traceback for workers that never get ready, and after `end_all_children`.
        """
        self._todo.extend(Order(shard, *self._plan.range(shard)) for shard in shards)
        self._left.update(shards)
        try:
            for seat in self._seats[: len(self._left)]:
                self._start(seat)
            while self._left:
                self._step()
            for seat in self._seats:
                if seat.child is not None:
                    seat.child.send({"op": "stop"})
        finally:
            end_children([seat.child for seat in self._seats if seat.child is not None])
        aside = tuple(sorted(row for search in self._searches.values() for row in search.guilty))
        return PoolSummary(
            len(shards),
            sum(seat.restarts for seat in self._seats),
            tuple(self._deaths),
            tuple(self._workers.values()),
            aside,
            tuple(self._reduced),
        )

    def _start(self, seat: Seat) -> None:
        seat.ready = seat.failure = None
        log = Path(self._job.logs) / f"worker-{seat.spec.device.id}.log"
        waiting = None if self._standby is None else self._standby.take(seat.spec, log)
        seat.child = waiting or start_worker(seat.spec, self._inbox, log, self._born)
        seat.child.send(self._job.to_json())
        seat.progress_s = time.monotonic()
        self._feed(seat)

    def _feed(self, seat: Seat) -> None:
        """Give the worker orders until it holds enough; a suspect travels alone, so that a death names it."""
        assert seat.child is not None
        while self._todo and len(seat.held) < ORDERS_AHEAD:
            if seat.held and (self._suspect(self._todo[0]) or self._suspect(seat.held[0])):
                return
            order = self._todo.popleft()
            order = replace(order, divisor=max(order.divisor, seat.spec.divisor))
            seat.held.append(order)
            seat.child.send(order.to_json())

    def _suspect(self, order: Order) -> bool:
        return order.probe or self._killed[order.shard] > 0

    def _step(self) -> None:
        self._end_silent()
        try:
            child, message = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        seat = next((s for s in self._seats if s.child is child), None)
        if seat is None:
            return  # an earlier worker's last message
        match message["event"]:
            case "ready":
                self._ready(seat, message)
            case "alive":
                seat.progress_s = max(seat.progress_s, float(message["progress_s"]))
            case "committed":
                self._committed(seat, message)
            case "probed":
                self._probed(seat)
            case "oom" | "error":
                self._failed(seat, message)
            case "closed":
                self._died(seat)

    def _ready(self, seat: Seat, message: dict[str, Any]) -> None:
        device = seat.spec.device.id
        message = {key: value for key, value in message.items() if key != "event"}
        seat.ready, seat.unready_deaths, seat.progress_s = message, 0, time.monotonic()
        self._workers[device] = {"device": device, **message}
        log.info("%s ready after %.1f s", device, message["ready_s"])

    def _committed(self, seat: Seat, message: dict[str, Any]) -> None:
        shard = int(message["shard"])
        order = seat.held.popleft()
        if order.divisor > 1:
            self._reduced.append((shard, order.divisor))
        seat.progress_s = time.monotonic()
        self._left.discard(shard)
        self._killed.pop(shard, None)
        batches = tuple(BatchRecord(**batch) for batch in message["batches"])
        body = {key: value for key, value in message.items() if key not in ("event", "batches")}
        self._on_done(ShardDone(**body, batches=batches))
        self._feed(seat)

    def _probed(self, seat: Seat) -> None:
        order = seat.held.popleft()
        seat.progress_s = time.monotonic()
        self._todo.extendleft([self._searches[order.shard].survived(order)])
        self._feed(seat)

    def _failed(self, seat: Seat, message: dict[str, Any]) -> None:
        """What another try cannot mend stops the run; the rest is left to the death that follows."""
        kind, text = str(message["kind"]), str(message["message"])
        log.error("%s: %s: %s", seat.spec.device.id, kind, text)
        seat.failure = message
        if kind in NOT_TO_BE_RETRIED:
            raise as_raised(kind, text)
        if kind in OF_THE_SYSTEM:
            raise errors.VirnucError(text)

    def _died(self, seat: Seat) -> None:
        assert seat.child is not None
        status = seat.child.end(0.5)
        if self._born != generation():
            raise errors.WorkerError("the run was interrupted; what was committed stays, run again to go on")
        said = self._last_words(seat, seat.child)
        held = [order.shard for order in seat.held]
        line = f"worker on {seat.spec.device.id} ended (status {status}), holding shards {held}; it said: {said}"
        log.warning("%s", line)
        self._deaths.append(line)
        if seat.ready is None and (seat.failure or {}).get("kind") == "OutOfMemoryError":
            seat.spec = replace(seat.spec, divisor=_halved(seat.spec.divisor, seat.spec.device.id))
        elif seat.ready is None:
            seat.unready_deaths += 1
            if seat.unready_deaths >= MAX_DEATHS_BEFORE_READY:
                trace = str((seat.failure or {}).get("traceback", ""))
                raise errors.WorkerError(
                    f"workers on {seat.spec.device.id} ended {seat.unready_deaths} times before they were ready; "
                    f"last words: {said}; see {seat.child.log}",
                    worker_traceback=trace,
                )
        elif seat.held:
            seat.held[0] = self._after_death(seat.held[0], seat.failure or {}, said)
        self._todo.extendleft(reversed(seat.held))
        seat.held.clear()
        seat.child = None
        seat.restarts += 1
        self._start(seat)

    def _last_words(self, seat: Seat, child: Child) -> str:
        if seat.failure is not None:
            return f"{seat.failure['kind']}: {seat.failure['message']}"
        words = child.last_words().splitlines()
        return words[-1] if words else "nothing"

    def _after_death(self, order: Order, failure: dict[str, Any], said: str) -> Order:
        """What to try next with the order at which a worker died."""
        if failure.get("kind") == "OutOfMemoryError":
            return replace(order, divisor=_halved(order.divisor, f"shard {order.shard:05d}"))
        if order.probe:
            return self._searches[order.shard].ended(order)
        self._killed[order.shard] += 1
        if self._killed[order.shard] < self._attempts:
            return order
        search = self._searches.setdefault(order.shard, Search(order))
        log.warning("shard %05d ended %d workers; searching for the row", order.shard, self._killed[order.shard])
        return search.begin(said)

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long; their death is then handled like any other."""
        now = time.monotonic()
        for seat in self._seats:
            limit = seat.spec.engine.silence_s
            if seat.child is not None and seat.held and now - seat.progress_s > limit:
                log.error("%s has been silent for more than %.0f s; ending it", seat.spec.device.id, limit)
                seat.progress_s = now
                seat.child.end(0.5)


def as_raised(kind: str, text: str) -> errors.VirnucError:
    """The worker's error as one of ours."""
    known: type[errors.VirnucError] = getattr(errors, kind)
    return known(text)


def _halved(divisor: int, what: str) -> int:
    """The next smaller budget for a device or shard that ran out of memory."""
    if divisor >= MAX_DIVISOR:
        raise errors.DeviceError(
            f"{what}: out of memory even with 1/{divisor} of the token budget; free the device or use a smaller model"
        )
    log.warning("%s: out of memory, trying 1/%d of the token budget", what, divisor * 2)
    return divisor * 2
