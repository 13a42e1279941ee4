"""The worker pool: shards handed out one by one, so that a slow device simply takes fewer.

A worker that dies is restarted and what it held is handed out again; one that is silent for too long is ended first. A
shard at which workers die repeatedly is searched for the row that does it (`Search`); it is set aside and the rest is
computed. A device that runs out of memory gets the shard again with half the token budget. Errors of reads,
weights, settings and devices stop the run at once.

All of that is policy. Where the workers run is the `Transport`'s: `process.LocalWorkers` are processes of this machine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from virnuc_core.config import Spec
from virnuc_core.engine.messages import (
    Closed,
    Computed,
    Event,
    Failed,
    JobSpec,
    Ready,
    ShardTask,
    Stop,
    WorkerSpec,
)
from virnuc_core.engine.process import INTERRUPTED
from virnuc_core.engine.shards import ShardPlan
from virnuc_core.errors import DeviceError, ShardError, WorkerError
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

TASKS_AHEAD: Final = 2  # in a worker's hands: the one it computes and the one its loader prepares
TICK_S: Final = 0.5
MAX_DEATHS_BEFORE_READY: Final = 3  # in a row, of workers that never got to work
MAX_DIVISOR: Final = 64
PROOFS: Final = 2
MAX_SEARCHES: Final = 3  # in vain, before the shard is given up
MAX_GUILTY: Final = 16  # of one shard: more is not a poisoned row but a broken machine


class Connection(Protocol):
    """A worker, wherever it runs."""

    log: Path
    progress_s: float  # `time.monotonic()` when it last did something, or was last told to

    def send(self, message: Spec) -> bool: ...

    def end(self, grace_s: float) -> int: ...

    def last_words(self) -> str: ...


class Transport(Protocol):
    """Starts workers and brings their events. `Closed` is the last event of each, however it ended."""

    @property
    def cancelled(self) -> bool: ...

    def start(self, spec: WorkerSpec, log: Path) -> Connection: ...

    def receive(self, timeout_s: float) -> tuple[Connection, Event] | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class WorkerSlot:
    """A device's place in the pool: who works there now, and what it holds."""

    spec: WorkerSpec
    worker: Connection | None = None
    held: deque[ShardTask] = field(default_factory=deque)  # given and not answered, oldest first
    ready: bool = False  # whether the present worker has said so
    failure: Failed | None = None  # what it said of its failure
    restarts: int = 0
    unready_deaths: int = 0

    @property
    def device(self) -> str:
        return self.spec.device.id

    @property
    def out_of_memory(self) -> bool:
        """Whether the present worker ended of it."""
        return self.failure is not None and self.failure.out_of_memory


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
        transport: Transport,
    ) -> None:
        self._plan, self._job, self._on_done = plan, job, on_done
        self._transport = transport
        self._slots = [WorkerSlot(spec) for spec in workers]
        self._attempts = workers[0].engine.max_shard_attempts
        self._silence_s = workers[0].engine.silence_s
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
        for shard in shards:
            lo, hi = self._plan.range(shard)
            self._todo.append(ShardTask(shard=shard, lo=lo, hi=hi))
        self._left.update(shards)
        try:
            for slot in self._slots[: len(self._left)]:
                self._start(slot)
            while self._left:
                self._end_silent()
                if (received := self._transport.receive(TICK_S)) is not None:
                    self._hear(*received)
            for slot in self._slots:
                if slot.worker is not None:
                    slot.worker.send(Stop())
        finally:
            self._transport.close()
        return PoolSummary(
            computed=len(shards),
            restarts=sum(slot.restarts for slot in self._slots),
            deaths=tuple(self._deaths),
            workers=tuple(self._workers.values()),
            set_aside=tuple(sorted(row for search in self._searches.values() for row in search.guilty)),
            reduced=tuple(self._reduced),
        )

    # --- handing out

    def _start(self, slot: WorkerSlot) -> None:
        slot.ready, slot.failure = False, None
        slot.worker = self._transport.start(slot.spec, Path(self._job.logs) / f"worker-{slot.device}.log")
        slot.worker.send(self._job)
        self._feed(slot)

    def _feed(self, slot: WorkerSlot) -> None:
        """Give the worker tasks until it holds enough; a suspect travels alone, so that a death names it."""
        assert slot.worker is not None
        while self._todo and len(slot.held) < TASKS_AHEAD:
            if slot.held and (self._is_suspect(self._todo[0]) or self._is_suspect(slot.held[0])):
                return
            task = self._todo.popleft()
            task = task.model_copy(update={"divisor": max(task.divisor, slot.spec.divisor)})
            slot.held.append(task)
            slot.worker.send(task)

    def _is_suspect(self, task: ShardTask) -> bool:
        return task.probe or self._killed[task.shard] > 0

    # --- what workers say

    def _hear(self, worker: Connection, event: Event) -> None:
        slot = next((slot for slot in self._slots if slot.worker is worker), None)
        if slot is None:
            return  # an earlier worker's last message
        match event:
            case Ready():
                slot.ready, slot.unready_deaths = True, 0
                self._workers[slot.device] = event.record
                log.info("%s ready after %.1f s", slot.device, event.record["ready_s"])
            case Computed():
                self._computed(slot, event.done)
            case Failed():
                self._failed(slot, event)
            case Closed():
                self._died(slot, worker)

    def _computed(self, slot: WorkerSlot, done: ShardDone | None) -> None:
        task = slot.held.popleft()
        if done is None:
            self._todo.appendleft(self._searches[task.shard].survived(task))
        else:
            if task.divisor > 1:
                self._reduced.append((task.shard, task.divisor))
            self._left.discard(task.shard)
            self._killed.pop(task.shard, None)
            self._on_done(done)
        self._feed(slot)

    def _failed(self, slot: WorkerSlot, failure: Failed) -> None:
        """What another try cannot mend stops the run; the rest is left to the death that follows."""
        log.error("%s: %s: %s", slot.device, failure.kind, failure.message)
        slot.failure = failure
        if (error := failure.own_error()) is not None:
            raise error

    # --- deaths

    def _end_silent(self) -> None:
        """End workers that hold work and have not moved for too long; their death is then handled like any other."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.worker is not None and slot.held and now - slot.worker.progress_s > self._silence_s:
                log.error("%s has been silent for more than %.0f s; ending it", slot.device, self._silence_s)
                slot.worker.progress_s = now
                slot.worker.end(0.5)

    def _died(self, slot: WorkerSlot, worker: Connection) -> None:
        """Hand out again what a dead worker held, and start another in its place."""
        status = worker.end(0.5)
        if self._transport.cancelled:
            raise WorkerError(INTERRUPTED)
        said = f"{slot.failure.kind}: {slot.failure.message}" if slot.failure else worker.last_words()
        held = [task.shard for task in slot.held]
        line = f"worker on {slot.device} ended (status {status}), holding shards {held}; it said: {said}"
        log.warning("%s", line)
        self._deaths.append(line)
        if not slot.ready:
            self._died_unready(slot, worker, said)
        elif slot.held:
            slot.held[0] = self._after_death(slot.held[0], slot, said)
        self._todo.extendleft(reversed(slot.held))
        slot.held.clear()
        slot.restarts += 1
        self._start(slot)

    def _died_unready(self, slot: WorkerSlot, worker: Connection, said: str) -> None:
        """The device is too small for the budgets, or, a few times in a row, no worker can live there."""
        if slot.out_of_memory:
            slot.spec = slot.spec.model_copy(update={"divisor": _doubled(slot.spec.divisor, slot.device)})
            return
        slot.unready_deaths += 1
        if slot.unready_deaths >= MAX_DEATHS_BEFORE_READY:
            raise WorkerError(
                f"workers on {slot.device} ended {slot.unready_deaths} times before they were ready; "
                f"last words: {said}; see {worker.log}",
                worker_traceback=slot.failure.traceback if slot.failure else "",
            )

    def _after_death(self, task: ShardTask, slot: WorkerSlot, said: str) -> ShardTask:
        """What to try next with the task at which a worker died."""
        if slot.out_of_memory:
            return task.model_copy(update={"divisor": _doubled(task.divisor, f"shard {task.shard:05d}")})
        if task.probe:
            return self._searches[task.shard].ended(task)
        self._killed[task.shard] += 1
        if self._killed[task.shard] < self._attempts:
            return task
        search = self._searches.setdefault(task.shard, Search(task))
        log.warning("shard %05d ended %d workers; searching for the row", task.shard, self._killed[task.shard])
        return search.begin(said)


def _doubled(divisor: int, what: str) -> int:
    """The next smaller budget for a device or shard that ran out of memory."""
    if divisor >= MAX_DIVISOR:
        raise DeviceError(
            f"{what}: out of memory even with 1/{divisor} of the token budget; free the device or use a smaller model"
        )
    log.warning("%s: out of memory, trying 1/%d of the token budget", what, divisor * 2)
    return divisor * 2


@dataclass(slots=True)
class Search:
    """The search within one shard for the row that ends workers, by halving. Each answer says what to do next.

    A worker may also be killed from outside, and no innocent row may be accused. So a row is set aside only when it has
    ended `PROOFS` workers all alone, and a search in which every part survives clears the shard, which is then simply
    computed again.
    """

    whole: ShardTask
    guilty: list[int] = field(default_factory=list)
    _waiting: list[tuple[int, int]] = field(default_factory=list)  # parts still to be probed, next last
    _alone: int = 0  # deaths of the single row under suspicion
    _found: bool = False
    _in_vain: int = 0

    def begin(self, said: str) -> ShardTask:
        """Start, or start again; `ShardError` when the shard cannot be cleared."""
        if self._in_vain >= MAX_SEARCHES or len(self.guilty) > MAX_GUILTY:
            raise ShardError(
                f"ends workers, and no single row of it is the cause; last words: {said}", shard=self.whole.shard
            )
        self._found = False
        lo, hi = self.whole.lo, self.whole.hi
        return self._probe(lo, hi) if hi - lo == 1 else self._halve(lo, hi)

    def ended(self, task: ShardTask) -> ShardTask:
        """A worker died at this probe."""
        if task.hi - task.lo > 1:
            self._waiting.clear()  # the row is in here; what is outside is looked at when the shard runs again
            return self._halve(task.lo, task.hi)
        self._alone += 1
        if self._alone < PROOFS:
            return self._probe(task.lo, task.hi)
        self.guilty.append(task.lo)
        self._found, self._alone = True, 0
        return self._verdict()

    def survived(self, task: ShardTask) -> ShardTask:
        """A worker computed this probe."""
        self._alone = 0
        if self._waiting:
            return self._probe(*self._waiting.pop())
        return self._verdict()

    def _halve(self, lo: int, hi: int) -> ShardTask:
        middle = (lo + hi) // 2
        self._waiting.append((middle, hi))
        return self._probe(lo, middle)

    def _probe(self, lo: int, hi: int) -> ShardTask:
        skip = tuple(row for row in self.guilty if lo <= row < hi)
        return self.whole.model_copy(update={"lo": lo, "hi": hi, "skip": skip, "probe": True})

    def _verdict(self) -> ShardTask:
        """The shard again, without the rows found guilty."""
        self._in_vain = 0 if self._found else self._in_vain + 1
        self._waiting.clear()
        self.whole = self.whole.model_copy(update={"skip": tuple(sorted(self.guilty))})
        return self.whole
