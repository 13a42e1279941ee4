"""The pool: one worker process a device; shards handed out one by one, so that a slow device simply takes fewer.

A worker that dies is restarted and what it held is handed out again; one that is silent for too long is ended first. A
shard at which workers die repeatedly is searched for the row that does it (`poison_rows`); it is set aside and the
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
from virnuc_core.engine.messages import JobSpec, ShardTask, WorkerSpec
from virnuc_core.engine.poison_rows import Search
from virnuc_core.engine.process import Child, PrewarmedWorkers, cancel_token, end_children, start_worker
from virnuc_core.engine.shards import ShardPlan
from virnuc_core.telemetry.records import BatchRecord, ShardDone

log = logging.getLogger(__name__)

ORDERS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
MAX_DEATHS_BEFORE_READY: Final = 3  # in a row, of workers that never got to work
MAX_DIVISOR: Final = 64
NOT_TO_BE_RETRIED: Final = ("InputError", "ConfigError", "WeightsError", "DeviceError", "ShardError")
OF_THE_SYSTEM: Final = ("OSError", "PermissionError", "FileNotFoundError", "NotADirectoryError")


@dataclass(slots=True)
class WorkerSlot:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    child: Child | None = None
    held: deque[ShardTask] = field(default_factory=deque)  # given and not answered, oldest first
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
        plan: ShardPlan,
        workers: Sequence[WorkerSpec],
        job: JobSpec,
        on_done: Callable[[ShardDone], None],
        prewarmed: PrewarmedWorkers | None = None,
    ) -> None:
        self._plan, self._job, self._on_done = plan, job, on_done
        self._prewarmed = prewarmed
        self._slots = [WorkerSlot(spec) for spec in workers]
        self._attempts = workers[0].engine.max_shard_attempts
        self._inbox = queue.Queue[tuple[Child, dict[str, Any]]]() if prewarmed is None else prewarmed.inbox
        self._token = cancel_token()
        self._todo: deque[ShardTask] = deque()
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
        self._todo.extend(ShardTask(shard, *self._plan.range(shard)) for shard in shards)
        self._left.update(shards)
        try:
            for slot in self._slots[: len(self._left)]:
                self._start(slot)
            while self._left:
                self._step()
            for slot in self._slots:
                if slot.child is not None:
                    slot.child.send({"op": "stop"})
        finally:
            end_children([slot.child for slot in self._slots if slot.child is not None])
        aside = tuple(sorted(row for search in self._searches.values() for row in search.guilty))
        return PoolSummary(
            len(shards),
            sum(slot.restarts for slot in self._slots),
            tuple(self._deaths),
            tuple(self._workers.values()),
            aside,
            tuple(self._reduced),
        )

    def _start(self, slot: WorkerSlot) -> None:
        slot.ready = slot.failure = None
        log = Path(self._job.logs) / f"worker-{slot.spec.device.id}.log"
        waiting = None if self._prewarmed is None else self._prewarmed.take(slot.spec, log)
        slot.child = waiting or start_worker(slot.spec, self._inbox, log, self._token)
        slot.child.send(self._job.to_json())
        slot.progress_s = time.monotonic()
        self._feed(slot)

    def _feed(self, slot: WorkerSlot) -> None:
        """Give the worker tasks until it holds enough; a suspect travels alone, so that a death names it."""
        assert slot.child is not None
        while self._todo and len(slot.held) < ORDERS_AHEAD:
            if slot.held and (self._suspect(self._todo[0]) or self._suspect(slot.held[0])):
                return
            task = self._todo.popleft()
            task = replace(task, divisor=max(task.divisor, slot.spec.divisor))
            slot.held.append(task)
            slot.child.send(task.to_json())

    def _suspect(self, task: ShardTask) -> bool:
        return task.probe or self._killed[task.shard] > 0

    def _step(self) -> None:
        self._end_silent()
        try:
            child, message = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        slot = next((s for s in self._slots if s.child is child), None)
        if slot is None:
            return  # an earlier worker's last message
        match message["event"]:
            case "ready":
                self._ready(slot, message)
            case "alive":
                slot.progress_s = max(slot.progress_s, float(message["progress_s"]))
            case "committed":
                self._committed(slot, message)
            case "probed":
                self._probed(slot)
            case "oom" | "error":
                self._failed(slot, message)
            case "closed":
                self._died(slot)

    def _ready(self, slot: WorkerSlot, message: dict[str, Any]) -> None:
        device = slot.spec.device.id
        message = {key: value for key, value in message.items() if key != "event"}
        slot.ready, slot.unready_deaths, slot.progress_s = message, 0, time.monotonic()
        self._workers[device] = {"device": device, **message}
        log.info("%s ready after %.1f s", device, message["ready_s"])

    def _committed(self, slot: WorkerSlot, message: dict[str, Any]) -> None:
        shard = int(message["shard"])
        task = slot.held.popleft()
        if task.divisor > 1:
            self._reduced.append((shard, task.divisor))
        slot.progress_s = time.monotonic()
        self._left.discard(shard)
        self._killed.pop(shard, None)
        batches = tuple(BatchRecord(**batch) for batch in message["batches"])
        body = {key: value for key, value in message.items() if key not in ("event", "batches")}
        self._on_done(ShardDone(**body, batches=batches))
        self._feed(slot)

    def _probed(self, slot: WorkerSlot) -> None:
        task = slot.held.popleft()
        slot.progress_s = time.monotonic()
        self._todo.extendleft([self._searches[task.shard].survived(task)])
        self._feed(slot)

    def _failed(self, slot: WorkerSlot, message: dict[str, Any]) -> None:
        """What another try cannot mend stops the run; the rest is left to the death that follows."""
        kind, text = str(message["kind"]), str(message["message"])
        log.error("%s: %s: %s", slot.spec.device.id, kind, text)
        slot.failure = message
        if kind in NOT_TO_BE_RETRIED:
            raise as_raised(kind, text)
        if kind in OF_THE_SYSTEM:
            raise errors.VirnucError(text)

    def _died(self, slot: WorkerSlot) -> None:
        assert slot.child is not None
        status = slot.child.end(0.5)
        if self._token.is_set():
            raise errors.WorkerError("the run was interrupted; what was committed stays, run again to go on")
        said = self._last_words(slot, slot.child)
        held = [task.shard for task in slot.held]
        line = f"worker on {slot.spec.device.id} ended (status {status}), holding shards {held}; it said: {said}"
        log.warning("%s", line)
        self._deaths.append(line)
        if slot.ready is None and (slot.failure or {}).get("kind") == "OutOfMemoryError":
            slot.spec = replace(slot.spec, divisor=_halved(slot.spec.divisor, slot.spec.device.id))
        elif slot.ready is None:
            slot.unready_deaths += 1
            if slot.unready_deaths >= MAX_DEATHS_BEFORE_READY:
                trace = str((slot.failure or {}).get("traceback", ""))
                raise errors.WorkerError(
                    f"workers on {slot.spec.device.id} ended {slot.unready_deaths} times before they were ready; "
                    f"last words: {said}; see {slot.child.log}",
                    worker_traceback=trace,
                )
        elif slot.held:
            slot.held[0] = self._after_death(slot.held[0], slot.failure or {}, said)
        self._todo.extendleft(reversed(slot.held))
        slot.held.clear()
        slot.child = None
        slot.restarts += 1
        self._start(slot)

    def _last_words(self, slot: WorkerSlot, child: Child) -> str:
        if slot.failure is not None:
            return f"{slot.failure['kind']}: {slot.failure['message']}"
        words = child.last_words().splitlines()
        return words[-1] if words else "nothing"

    def _after_death(self, task: ShardTask, failure: dict[str, Any], said: str) -> ShardTask:
        """What to try next with the task at which a worker died."""
        if failure.get("kind") == "OutOfMemoryError":
            return replace(task, divisor=_halved(task.divisor, f"shard {task.shard:05d}"))
        if task.probe:
            return self._searches[task.shard].ended(task)
        self._killed[task.shard] += 1
        if self._killed[task.shard] < self._attempts:
            return task
        search = self._searches.setdefault(task.shard, Search(task))
        log.warning("shard %05d ended %d workers; searching for the row", task.shard, self._killed[task.shard])
        return search.begin(said)

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long; their death is then handled like any other."""
        now = time.monotonic()
        for slot in self._slots:
            limit = slot.spec.engine.silence_s
            if slot.child is not None and slot.held and now - slot.progress_s > limit:
                log.error("%s has been silent for more than %.0f s; ending it", slot.spec.device.id, limit)
                slot.progress_s = now
                slot.child.end(0.5)


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
