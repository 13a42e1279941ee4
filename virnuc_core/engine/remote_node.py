"""A node as it is seen here: its worker processes, what it is told and says, and files that go there and come back.

A node that shares no file system with us has a folder on its own disk. What a shard needs goes there and its file comes
back, piece by piece and proven; each shard has a folder of its own in it, laid out like a run's."""

import asyncio
import hashlib
import itertools
import json
import math
import queue
import secrets
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import h5py
import numpy as np

from virnuc_core.config import Precision
from virnuc_core.encoders.checkpoint import PARTS, fingerprint
from virnuc_core.engine.node import HEAR_S, End, Ended, Facts, Told
from virnuc_core.engine.pool import JOB_ERRORS
from virnuc_core.engine.process import GRACE_S, Child, Closed, Failed, Message, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask, is_sealed, read_plan, shard_path
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.reads.fast_parser import offsets_from_lengths
from virnuc_core.reads.store import COLUMNS, FORMAT, SCHEMA_VERSION, OrfStore, StoreCounts
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

ANSWER_S: Final = 60.0  # of a node that has been found, at first, and for a piece of a file
END_S: Final = 5.0  # for word that a worker process has ended
MOMENTS: Final = (
    "started_s",
    "finished_s",
    "arrived_s",
    "launched_s",
)  # of a clock, in what workers say
PROBE: Final = ".virnuc-probe-"
PIECE_BYTES: Final = 4 << 20
TRIES: Final = 2  # to get a shard's file as it was
_numbers = itertools.count()  # of worker processes, and of folders for shards


class RemoteChild(Child):
    """A worker process on a node; of one whose node is gone, its end is heard."""

    silent = False  # its node tells how long it has done nothing

    def __init__(
        self, spec: WorkerSpec, inbox: queue.Queue[Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.number, self.orders, self._loop = next(_numbers), asyncio.Queue["Order"](), loop
        self.status, self._over = -1, threading.Event()
        self.sent = deque[
            tuple[str, ShardTask]
        ]()  # what it has not answered, and the folder of each on its node
        self._begin(spec, inbox)

    def send(self, message: Message) -> None:
        """Write one message."""
        self.progress_s = time.monotonic()
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self.orders.put_nowait, (self, message))

    def end(self, grace_s: float = GRACE_S) -> int:
        """As of one on this machine."""
        if not self._over.is_set():
            self.send(End(grace_s=grace_s))
            if not self._over.wait(grace_s + END_S):
                self.close(last_words="its node does not tell of its end")
        self._forget()
        return self.status

    def fail(self, error: Exception) -> None:
        """What it was to do, or did, came to nothing here: it ends of that, as if it had met it itself."""
        self.heard(Failed(kind=type(error).__name__, message=str(error), traceback=""))
        self.send(End(grace_s=0))

    def close(
        self, status: int = -1, last_words: str = "its node is lost", *, lost: bool = False
    ) -> None:
        """It has ended, or its node is `lost`."""
        if not self._over.is_set():
            self.status, self.last_words, self.lost = status, last_words, lost
            self._over.set()
            self._inbox.put((self, Closed()))


Order = tuple[RemoteChild, Message]


@dataclass(eq=False)
class RemoteNode:
    """A Dask worker that is there."""

    address: str
    name: str
    threads: int
    transfer: bool  # it shares no file system with us
    actor: Any = None  # its `Node`
    facts: Facts | None = None
    problem: VirnucError | None = None  # why it is not used
    devices: tuple[
        Device, ...
    ] = ()  # once it is used; none where others of its machine have them all
    children: dict[int, RemoteChild] = field(default_factory=dict)
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    said: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)  # and not passed on yet
    heard_s: float = math.inf  # when it last answered, once it is used
    offset_s: float = math.inf  # of its clock, with the least delay that there was
    task: asyncio.Task[None] = field(init=False)

    def __str__(self) -> str:
        return f"node {self.name}" + f" ({self.address})" * (self.name != self.address)

    def lose(self) -> None:
        """Its worker processes are of no use any more, whether they live or not."""
        self.devices = ()
        self.task.cancel()
        for child in list(self.children.values()):
            child.close(lost=True)

    async def share(self, place: Path, models: Path) -> None:
        """See to it that it sees the models, and in `place` each what the other writes. Errors: `DeviceError`."""
        with tempfile.TemporaryDirectory(
            prefix=PROBE, dir=place, ignore_cleanup_errors=True
        ) as folder:
            asked, answer, text = (
                Path(folder) / "asked",
                Path(folder) / "answer",
                secrets.token_bytes(16),
            )
            asked.write_bytes(text)
            for file in (asked, models / "head" / "config.json"):
                if await self.actor.piece(str(file), 0, PIECE_BYTES) != file.read_bytes():
                    raise DeviceError(f"{file} is another file there")
            await self.send(str(answer), BytesIO(text))
            if not answer.is_file() or answer.read_bytes() != text:
                raise DeviceError(
                    f"what it writes in {place} is not seen here: it is no shared file system"
                )

    async def bring(self, models: Path, local: Path | None, precision: Precision) -> None:
        """Have it hold the models on its own disk, in the folder `local` if there is one."""
        prints = json.dumps(await asyncio.to_thread(fingerprint, models, precision), sort_keys=True)
        what = "models" if self.transfer else str(models), str(local or ""), prints
        if not await self._brought(*what):
            for path in sorted(
                path for part in PARTS for path in (models / part).rglob("*") if path.is_file()
            ):
                with path.open("rb") as file:
                    await self.send(f"models/{path.relative_to(models)}", file)
            await self._brought(*what)

    async def _brought(self, *what: str) -> bool:
        """Whether it holds the models. To copy and prove them may take long, but it answers meanwhile."""
        asked = asyncio.ensure_future(self.actor.bring(*what))
        try:
            while not asked.done():
                async with asyncio.timeout(ANSWER_S):
                    await self.actor.tell("[]")  # no orders
                await asyncio.wait([asked], timeout=HEAR_S)
            return bool(asked.result())
        finally:
            asked.cancel()

    async def send(self, name: str, data: BinaryIO) -> None:
        """Write a file there, whole. Errors: `DeviceError` of its disk; `OSError` where a piece arrives otherwise."""
        piece = bytes(PIECE_BYTES)
        while len(piece) == PIECE_BYTES:
            first, piece = data.tell() == 0, await asyncio.to_thread(data.read, PIECE_BYTES)
            part = {"first": first, "last": len(piece) < PIECE_BYTES}
            async with asyncio.timeout(ANSWER_S):
                await self.actor.put(name, piece, hashlib.sha256(piece).hexdigest(), **part)

    async def _send_task(self, child: RemoteChild, task: ShardTask) -> ShardTask:
        """Send what a shard needs; the task as it is there. Errors: of store and plan."""
        child.sent.append((folder := f"shard-{next(_numbers)}", task))
        plan = read_plan(RunDir(Path(task.run))).model_dump_json()
        store = await asyncio.to_thread(OrfStore.open, Path(task.store), check=False)
        await self.send(f"{folder}/shards/plan.json", BytesIO(plan.encode()))
        await self.send(
            f"{folder}/orfs.h5", BytesIO(await asyncio.to_thread(excerpt, store, task.lo, task.hi))
        )
        there = {"run": folder, "store": f"{folder}/orfs.h5", "lo": 0, "hi": task.hi - task.lo}
        return task.model_copy(update=there | {"skip": tuple(row - task.lo for row in task.skip)})

    async def _fetch(self, folder: str, task: ShardTask) -> None:
        """Commit to the run what was computed there: the file appears whole, as it was committed there. Errors:
        `DeviceError` where it does not arrive so; `StorageError`, `ConfigError` of the run's directory."""
        path = shard_path(RunDir(Path(task.run)), task.shard)
        with ExitStack() as held:
            aside = held.enter_context(atomic_file(path))
            for _ in range(TRIES):
                with aside.open("wb") as file:
                    while piece := await self.actor.piece(
                        f"{folder}/shards/{path.name}", file.tell(), PIECE_BYTES
                    ):
                        await asyncio.to_thread(file.write, piece)
                if await asyncio.to_thread(is_sealed, aside):
                    return await asyncio.to_thread(held.pop_all().close)  # waits for the disk
            raise DeviceError(
                f"shard {task.shard:05d} does not arrive from there as it was committed"
            )

    async def serve(self, samples: dict[str, DeviceSample]) -> None:
        """Tell its worker processes what they are told, and pass on what they say, as long as it lasts. `samples`: of
        each device, what it last measured."""
        async with asyncio.TaskGroup() as tasks:
            for part in (self._tell(), self._hear(samples), self._pass_on()):
                tasks.create_task(part)

    async def _tell(self) -> None:
        while True:
            orders, told = [await self.orders.get()], []
            orders += [self.orders.get_nowait() for _ in range(self.orders.qsize())]
            for child, message in orders:
                try:
                    there: Message = message
                    if self.transfer and isinstance(message, ShardTask):
                        there = await self._send_task(child, message)
                    told.append((child.number, there.line()))
                except JOB_ERRORS as error:
                    child.fail(error)
            await self.actor.tell(json.dumps(told))

    async def _hear(self, samples: dict[str, DeviceSample]) -> None:
        names = {device.local: device.id for device in self.devices}
        while True:
            told = Told.model_validate_json(await self.actor.hear())
            self.heard_s = time.monotonic()
            self.offset_s = min(self.offset_s, self.heard_s - told.now_s)
            for number, text in told.wrote.items():
                self.children[number].wrote(text)
            for number, line in told.said:
                self.said.put_nowait((self.children[number], moved(line, self.offset_s)))
            for number, still_s in told.still_s.items():
                child = self.children[number]
                child.progress_s = max(child.progress_s, self.heard_s - still_s)
            for sample in told.samples:
                samples[names[sample.device]] = replace(sample, device=names[sample.device])

    async def _pass_on(self) -> None:
        """Let the pool hear what workers have said; that a shard is committed, once it is, here."""
        while True:
            child, message = await self.said.get()
            over = isinstance(message, Ended)
            answered = (
                len(child.sent) if over else min(len(child.sent), isinstance(message, Computed))
            )
            for folder, task in [child.sent.popleft() for _ in range(answered)]:
                try:
                    if isinstance(message, Computed) and message.done and not child.failed:
                        await self._fetch(folder, task)
                except JOB_ERRORS as error:
                    child.fail(error)
                await self.actor.drop(folder)
            if isinstance(message, Ended):
                self.children.pop(child.number).close(message.status, message.last_words)
            elif not child.failed:
                child.heard(message)


def moved(line: str, by_s: float) -> Message:
    """A message of a node, with its moments by the clock of this machine."""
    name, body = line.split(" ", 1)
    found = json.loads(
        body, object_hook=lambda one: {k: v + by_s if k in MOMENTS else v for k, v in one.items()}
    )
    return Message.of(f"{name} {json.dumps(found)}")


def excerpt(store: OrfStore, lo: int, hi: int) -> bytes:
    """A store of the uniques `lo` to `hi` alone, each with its first row and the read of that, as bytes of a file."""
    kept = {name: getattr(store, name) for name in COLUMNS}
    found = dict.fromkeys(("row_read", "row_unique", "unique_row"), np.arange(hi - lo))
    uniques, rows = np.arange(lo, hi), kept["unique_row"][lo:hi]
    reads = kept["row_read"][rows]
    found |= {
        name: kept[name][reads]
        for name in ("read_length", "read_chunks", "read_rows", "read_flags", "read_copy")
    }
    found |= {name: kept[name][rows] for name in ("row_chunk", "row_frame")}
    for kind, which in (("read_id", reads), ("protein", uniques), ("dna", uniques)):
        starts = kept[f"{kind}_offsets"]
        offsets = offsets_from_lengths(starts[which + 1] - starts[which])
        places = np.repeat(starts[which] - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
        found |= {f"{kind}_offsets": offsets, f"{kind}_bytes": kept[f"{kind}_bytes"][places]}
    counts = dict.fromkeys(StoreCounts.__slots__, 0) | dict.fromkeys(
        ("n_reads", "n_rows", "n_uniques"), hi - lo
    )
    about = {
        name: getattr(store, name) for name in ("fingerprint", "model_length", "duplicate_mark")
    }
    with h5py.File(f"{store.path}:{lo}", "w", driver="core", backing_store=False) as file:
        file.attrs.update({"format": FORMAT, "schema_version": SCHEMA_VERSION} | counts | about)
        for name in COLUMNS:
            file.create_dataset(name, data=found[name])
        file.flush()
        return bytes(file.id.get_file_image())
