"""A node as the submitting side sees it: its worker processes, and files that go there and back.

A node that shares no file system with us has a folder on its own disk. What a shard needs is sent
there and the shard's file comes back, chunk by chunk and proven. Each shard has a folder of its
own in the node's folder, laid out like a run directory.
"""

import asyncio
import hashlib
import itertools
import json
import math
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
from numpy.typing import NDArray

from virnuc_core.config import Precision
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.registry import PARTS
from virnuc_core.engine.node import (
    REPORT_S,
    End,
    Ended,
    Facts,
    NodeReport,
    Orders,
    WorkerLine,
)
from virnuc_core.engine.pool import JOB_ERRORS
from virnuc_core.engine.process import GRACE_S, Child, Closed, Failed, Inbox, Message, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardTask, is_sealed, read_plan, shard_path
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.reads.fast_parser import offsets_from_lengths
from virnuc_core.reads.store import COLUMNS, FORMAT, SCHEMA_VERSION, OrfStore, StoreCounts
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

ANSWER_S: Final = 60.0  # for a new node's first answer, and for a chunk of a file
END_S: Final = 5.0  # for word that a worker process has ended
# Fields of messages that are moments of the node's clock.
MOMENTS: Final = ("started_s", "finished_s", "arrived_s", "launched_s")
FIX_NODE: Final = "mend it, or take it out of the cluster"
PROBE: Final = ".virnuc-probe-"
CHUNK_BYTES: Final = 4 << 20
MAX_FETCHES: Final = 2  # to get a shard's file undamaged
_numbers = itertools.count()  # of worker processes, and of folders for shards


@dataclass(frozen=True, slots=True)
class SentTask:
    """A task that was sent to a node with its own disk, and is not answered."""

    folder: str  # for the shard, in the node's folder
    task: ShardTask  # as it is here


class RemoteChild(Child):
    """A worker process on a node. If its node is lost, that counts as its end."""

    silent = False  # its node reports how long it has done nothing

    def __init__(self, spec: WorkerSpec, inbox: Inbox, loop: asyncio.AbstractEventLoop) -> None:
        self.number = next(_numbers)
        self.orders: asyncio.Queue[Order] = asyncio.Queue()  # replaced by its node's
        self.status = -1
        self.sent: deque[SentTask] = deque()  # oldest first
        self._loop = loop
        self._is_over = threading.Event()
        self._begin(spec, inbox)

    def send(self, message: Message) -> None:
        """Send one message, by way of the node."""
        self.progress_s = time.monotonic()
        order = Order(self, message)
        with suppress(RuntimeError):  # the thread that serves nodes has ended
            self._loop.call_soon_threadsafe(self.orders.put_nowait, order)

    def end(self, grace_s: float = GRACE_S) -> int:
        """End the worker process, and return its exit status; -1 if its node does not answer."""
        if not self._is_over.is_set():
            self.send(End(grace_s=grace_s))
            if not self._is_over.wait(grace_s + END_S):
                self.close(last_words="its node does not tell of its end")
        self._forget()
        return self.status

    def fail(self, error: Exception) -> None:
        """End the worker as if it had met an error that occurred here on its behalf."""
        self.on_message(Failed(kind=type(error).__name__, message=str(error), traceback=""))
        self.send(End(grace_s=0))

    def close(
        self, status: int = -1, last_words: str = "its node is lost", *, lost: bool = False
    ) -> None:
        """Note that it has ended, or that its node is lost."""
        if self._is_over.is_set():
            return
        self.status = status
        self.last_words = last_words
        self.lost = lost
        self._is_over.set()
        self._inbox.put((self, Closed()))


@dataclass(frozen=True, slots=True)
class Order:
    """A message to a worker process of a node, or from one."""

    child: RemoteChild
    message: Message


@dataclass(eq=False)
class RemoteNode:
    """A Dask worker that has joined."""

    address: str
    name: str
    threads: int
    transfer: bool  # it shares no file system with us
    actor: Any = None  # its `Node`
    facts: Facts | None = None
    problem: VirnucError | None = None  # why it is not used
    way_out: str = FIX_NODE  # what the user can do if its present step fails
    # Once it is used; none if other Dask workers of its machine have them all.
    devices: tuple[Device, ...] = ()
    children: dict[int, RemoteChild] = field(default_factory=dict)
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    received: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)  # not passed on yet
    heard_s: float = math.inf  # when it last answered, once it is used
    clock_offset_s: float = math.inf  # our clock minus its own; the least that was seen
    task: asyncio.Task[None] = field(init=False)

    def __str__(self) -> str:
        if self.name == self.address:
            return f"node {self.name}"
        return f"node {self.name} ({self.address})"

    def lose(self) -> None:
        """Give its worker processes up, whether they live or not."""
        self.devices = ()
        self.task.cancel()
        for child in list(self.children.values()):
            child.close(lost=True)

    async def share(self, place: Path, models: Path) -> None:
        """Check that this node and we see the same files.

        Args:
            place: Folder in which each must see what the other writes.
            models: Models directory that the node must see.

        Raises:
            DeviceError: The node does not see a file, or writes to another folder.
        """
        with tempfile.TemporaryDirectory(
            prefix=PROBE, dir=place, ignore_cleanup_errors=True
        ) as folder:
            question_file = Path(folder) / "asked"
            answer_file = Path(folder) / "answer"
            text = secrets.token_bytes(16)
            question_file.write_bytes(text)
            for file in (question_file, models / "head" / "config.json"):
                contents = await self.actor.read_chunk(str(file), 0, CHUNK_BYTES)
                if contents != file.read_bytes():
                    raise DeviceError(f"{file} is another file there")
            await self.send(str(answer_file), BytesIO(text))
            if not answer_file.is_file() or answer_file.read_bytes() != text:
                problem = f"what it writes in {place} is not seen here"
                raise DeviceError(f"{problem}: it is no shared file system")

    async def install_models(self, models: Path, local: Path | None, precision: Precision) -> None:
        """Have the node hold the models on its own disk.

        Args:
            models: Models directory, here.
            local: Folder on the node's disk; None for the folder that goes with the run.
            precision: Precision of the run, which may need more files.

        Raises:
            WeightsError: The node holds other models there.
            DeviceError: Its disk is full, or fails.
        """
        digests = await asyncio.to_thread(fingerprint, models, precision)
        source = "models" if self.transfer else str(models)
        request = (source, str(local or ""), json.dumps(digests, sort_keys=True))
        if await self._request_models(*request):
            return
        for path in _files_of_models(models):
            with path.open("rb") as file:
                await self.send(f"models/{path.relative_to(models)}", file)
        await self._request_models(*request)

    async def _request_models(self, source: str, local: str, digests: str) -> bool:
        """Return whether the node holds the models; false if they are yet to be sent.

        To copy and prove them may take long, but the node must answer meanwhile.
        """
        request = asyncio.ensure_future(self.actor.install_models(source, local, digests))
        no_orders = Orders().model_dump_json()
        try:
            while not request.done():
                async with asyncio.timeout(ANSWER_S):
                    await self.actor.follow(no_orders)
                await asyncio.wait([request], timeout=REPORT_S)
            return bool(request.result())
        finally:
            request.cancel()

    async def send(self, name: str, data: BinaryIO) -> None:
        """Write a whole file on the node.

        Args:
            name: Path there; a relative one is in the node's folder.
            data: The file's contents, from their beginning.

        Raises:
            DeviceError: The node's disk is full, or fails.
            OSError: A chunk does not arrive as it was sent.
        """
        is_first = True
        is_last = False
        while not is_last:
            chunk = await asyncio.to_thread(data.read, CHUNK_BYTES)
            is_last = len(chunk) < CHUNK_BYTES
            digest = hashlib.sha256(chunk).hexdigest()
            async with asyncio.timeout(ANSWER_S):
                await self.actor.receive_chunk(name, chunk, digest, first=is_first, last=is_last)
            is_first = False

    async def _send_task(self, child: RemoteChild, task: ShardTask) -> ShardTask:
        """Send what a shard needs, and return the task as it is on the node.

        Raises:
            InputError: The store cannot be read.
            ShardError: The plan cannot be read.
        """
        folder = f"shard-{next(_numbers)}"
        child.sent.append(SentTask(folder, task))
        plan = read_plan(RunDir(Path(task.run))).model_dump_json()
        store = await asyncio.to_thread(OrfStore.open, Path(task.store), check=False)
        store_path = f"{folder}/orfs.h5"
        await self.send(f"{folder}/shards/plan.json", BytesIO(plan.encode()))
        contents = await asyncio.to_thread(excerpt, store, task.lo, task.hi)
        await self.send(store_path, BytesIO(contents))
        changes = {
            "run": folder,
            "store": store_path,
            "lo": 0,
            "hi": task.hi - task.lo,
            "skip": tuple(row - task.lo for row in task.skip),
        }
        return task.model_copy(update=changes)

    async def _fetch(self, sent: SentTask) -> None:
        """Commit to the run what was computed on the node. The file appears whole.

        Raises:
            DeviceError: The file does not arrive as it was committed there.
            StorageError: The disk here is full, or fails.
            ConfigError: Another process has taken over the run directory.
        """
        shard = sent.task.shard
        path = shard_path(RunDir(Path(sent.task.run)), shard)
        name = f"{sent.folder}/shards/{path.name}"
        with ExitStack() as stack:
            temp_path = stack.enter_context(atomic_file(path))
            for _ in range(MAX_FETCHES):
                await self._download(name, temp_path)
                if await asyncio.to_thread(is_sealed, temp_path):
                    # Leaving `atomic_file` without an error renames the file into place. It waits
                    # for the disk, so that it is done in a thread.
                    commit = stack.pop_all().close
                    await asyncio.to_thread(commit)
                    return
            problem = f"shard {shard:05d}: its copy from the node is damaged"
            raise DeviceError(problem)

    async def _download(self, name: str, path: Path) -> None:
        """Read a file of the node's folder, and write it here."""
        with path.open("wb") as file:
            while True:
                chunk = await self.actor.read_chunk(name, file.tell(), CHUNK_BYTES)
                if not chunk:
                    return
                await asyncio.to_thread(file.write, chunk)

    async def serve(self, samples: dict[str, DeviceSample]) -> None:
        """Send messages to its worker processes, and pass on their answers, as long as it lasts.

        Args:
            samples: By device, what was last measured of it; updated here.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_orders())
            tasks.create_task(self._receive_reports(samples))
            tasks.create_task(self._pass_on())

    async def _send_orders(self) -> None:
        """Send all messages that wait, and the files of their tasks, again and again."""
        while True:
            waiting_orders = [await self.orders.get()]
            while not self.orders.empty():
                waiting_orders.append(self.orders.get_nowait())
            lines = []
            for order in waiting_orders:
                message: Message = order.message
                try:
                    if self.transfer and isinstance(message, ShardTask):
                        message = await self._send_task(order.child, message)
                except JOB_ERRORS as error:
                    order.child.fail(error)
                else:
                    lines.append(WorkerLine(number=order.child.number, line=message.line()))
            await self.actor.follow(Orders(lines=tuple(lines)).model_dump_json())

    async def _receive_reports(self, samples: dict[str, DeviceSample]) -> None:
        """Ask for reports again and again, and take note of what they say.

        Args:
            samples: By device, what was last measured of it; updated here.
        """
        device_ids = {device.local: device.id for device in self.devices}
        while True:
            report = NodeReport.model_validate_json(await self.actor.report())
            self.heard_s = time.monotonic()
            self.clock_offset_s = min(self.clock_offset_s, self.heard_s - report.now_s)
            for number, text in report.stderr.items():
                self.children[number].on_stderr(text)
            for line in report.lines:
                message = on_our_clock(line.line, self.clock_offset_s)
                self.received.put_nowait(Order(self.children[line.number], message))
            for number, still_s in report.still_s.items():
                child = self.children[number]
                child.progress_s = max(child.progress_s, self.heard_s - still_s)
            for sample in report.samples:
                device_id = device_ids[sample.device]
                samples[device_id] = replace(sample, device=device_id)

    async def _pass_on(self) -> None:
        """Pass messages of workers on to the pool; that a shard is committed, once it is here."""
        while True:
            received = await self.received.get()
            child = received.child
            message = received.message
            for sent in _take_answered(child, message):
                try:
                    if isinstance(message, Computed) and message.done and not child.failed:
                        await self._fetch(sent)
                except JOB_ERRORS as error:
                    child.fail(error)
                await self.actor.delete(sent.folder)
            if isinstance(message, Ended):
                del self.children[child.number]
                child.close(message.status, message.last_words)
            elif not child.failed:
                child.on_message(message)


def _take_answered(child: RemoteChild, message: Message) -> list[SentTask]:
    """Take the tasks that a message answers: one, or all that are left at the worker's end."""
    n_answered = 0
    if isinstance(message, Ended):
        n_answered = len(child.sent)
    elif isinstance(message, Computed):
        n_answered = min(1, len(child.sent))  # none is listed where the file system is shared
    return [child.sent.popleft() for _ in range(n_answered)]


def _files_of_models(models: Path) -> list[Path]:
    """Return the files of a models directory, in a fixed order."""
    files = []
    for part in PARTS:
        files += [path for path in (models / part).rglob("*") if path.is_file()]
    return sorted(files)


def on_our_clock(line: str, offset_s: float) -> Message:
    """Return a node's message with its moments (`MOMENTS`) moved to our clock."""

    def move(fields: dict[str, Any]) -> dict[str, Any]:
        for name in MOMENTS:
            if name in fields:
                fields[name] += offset_s
        return fields

    name, body = line.split(" ", 1)
    moved_fields = json.loads(body, object_hook=move)
    return Message.of(f"{name} {json.dumps(moved_fields)}")


def excerpt(store: OrfStore, lo: int, hi: int) -> bytes:
    """Return a store file with only the distinct sequences `lo` to `hi - 1`.

    Each of them has its first frame, and the read of that.
    """
    n_sequences = hi - lo
    sequences = np.arange(lo, hi)
    rows = store.unique_row[lo:hi]
    reads = store.row_read[rows]
    columns: dict[str, NDArray[Any]] = {}
    for name in ("row_read", "row_unique", "unique_row"):
        columns[name] = np.arange(n_sequences)
    for name in ("read_length", "read_chunks", "read_rows", "read_flags", "read_copy"):
        columns[name] = getattr(store, name)[reads]
    for name in ("row_chunk", "row_frame"):
        columns[name] = getattr(store, name)[rows]
    for name, chosen_entries in (("read_id", reads), ("protein", sequences), ("dna", sequences)):
        starts = getattr(store, f"{name}_offsets")
        offsets = offsets_from_lengths(starts[chosen_entries + 1] - starts[chosen_entries])
        shifts = (
            starts[chosen_entries] - offsets[:-1]
        )  # from a place in the excerpt to one in the store
        places = np.repeat(shifts, np.diff(offsets)) + np.arange(offsets[-1])
        columns[f"{name}_offsets"] = offsets
        columns[f"{name}_bytes"] = getattr(store, f"{name}_bytes")[places]
    attributes: dict[str, Any] = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    attributes |= dict.fromkeys(StoreCounts.__slots__, 0)
    for name in ("n_reads", "n_rows", "n_uniques"):
        attributes[name] = n_sequences
    for name in ("fingerprint", "model_length", "duplicate_mark"):
        attributes[name] = getattr(store, name)
    with h5py.File(f"{store.path}:{lo}", "w", driver="core", backing_store=False) as file:
        file.attrs.update(attributes)
        for name in COLUMNS:
            file.create_dataset(name, data=columns[name])
        file.flush()
        return bytes(file.id.get_file_image())
