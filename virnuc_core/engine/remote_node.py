"""A node of a cluster as the machine that started the run sees it (the submitting machine).

It sends messages to the worker processes of the node and receives theirs. If the node does not
share a file system with this machine, the files go over the network as well. What a shard needs is
sent to a folder on the node's disk, and the file of the computed shard is fetched, in chunks with
digests. In the node's folder, each shard has a separate folder, laid out like a run directory.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    Facts,
    NodeReport,
    Orders,
    WorkerLine,
)
from virnuc_core.engine.pool import JOB_ERRORS
from virnuc_core.engine.process import (
    GRACE_S,
    Child,
    Closed,
    End,
    Ended,
    Failed,
    Inbox,
    Message,
    WorkerSpec,
)
from virnuc_core.engine.shards import Computed, ShardTask, is_sealed, read_plan, shard_path
from virnuc_core.errors import DeviceError, StorageError, VirnucError
from virnuc_core.reads.fast_parser import offsets_from_lengths
from virnuc_core.reads.store import COLUMNS, FORMAT, SCHEMA_VERSION, OrfStore, StoreCounts
from virnuc_core.rundir import RunDir, atomic_file
from virnuc_core.runfiles import Device
from virnuc_core.system_errors import (
    describe_system_error,
    is_real_folder,
    is_regular_file,
    list_folder,
    storage_error,
)
from virnuc_core.telemetry.tables import DeviceSample

# Seconds to wait for the first answer of a new node, and for a chunk of a file.
ANSWER_S: Final = 60.0
# Seconds to wait for the message that a worker process has ended.
END_S: Final = 5.0
# Fields of messages that are times of the node's clock.
MOMENTS: Final = ("started_s", "finished_s", "arrived_s", "launched_s")
FIX_NODE: Final = "mend it, or take it out of the cluster"
# The names of folders and keys that test a node begin with this.
PROBE: Final = ".virnuc-probe-"
# Bytes that are sent over the network at a time.
CHUNK_BYTES: Final = 4 << 20
# How often the file of a shard is fetched if it arrives damaged.
MAX_FETCHES: Final = 2
# Gives a new number to each worker process, and to each folder of a shard.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SentTask:
    """A task that was sent, with its files, to a node without a shared file system."""

    folder: str  # folder of the shard, in the node's folder
    task: ShardTask  # with the paths of this machine


class RemoteChild(Child):
    """A worker process on a node. If its node is lost, the worker counts as ended."""

    # The parent class finds hung processes by their heartbeats, which stay on the node. The node
    # reports the time without progress instead.
    is_silent = False

    def __init__(self, spec: WorkerSpec, inbox: Inbox, loop: asyncio.AbstractEventLoop) -> None:
        """Note the state of a process that does not exist yet. Its node will start it.

        Args:
            spec: What the process will load.
            inbox: Gets the messages of the process.
            loop: The event loop of the thread that talks to nodes.
        """
        self.number = next(_numbers)
        # Messages to the process. When the process gets its node, this becomes the node's queue.
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.status = -1  # exit status; -1 as long as it is not known
        self.sent: deque[SentTask] = deque()  # tasks that are not answered, oldest first
        self._loop = loop
        self._is_over = threading.Event()
        self._set_common_attributes(spec, inbox)

    def send(self, message: Message) -> None:
        """Queue one message for the thread that talks to nodes. Any thread may call this.

        From now on, the worker process is expected to make progress.
        """
        # The process is ended if this time becomes too old.
        self.last_progress_s = time.monotonic()
        order = Order(self, message)
        with suppress(RuntimeError):  # that thread has ended, and all nodes with it
            self._loop.call_soon_threadsafe(self.orders.put_nowait, order)

    def end(self, grace_s: float = GRACE_S) -> int:
        """End the worker process, and wait until its node reports the end.

        Args:
            grace_s: Seconds in which the process may finish its shard.

        Returns:
            The exit status. -1 if the node does not answer; the process then counts as ended.
        """
        if not self._is_over.is_set():
            self.send(End(grace_s=grace_s))
            # `close` sets the event when the node reports the end.
            if not self._is_over.wait(grace_s + END_S):
                self.close(last_words="its node does not tell of its end")
        self._forget()
        return self.status

    def fail(self, error: Exception) -> None:
        """End the worker because of an error of this machine, such as a shard that cannot be sent.

        To the pool it looks as if the worker itself had reported the error.
        """
        self.on_message(Failed(kind=type(error).__name__, message=str(error), traceback=""))
        self.send(End(grace_s=0))

    def close(
        self, status: int = -1, last_words: str = "its node is lost", *, node_lost: bool = False
    ) -> None:
        """Note that the process has ended, and tell the pool so by the message `Closed`.

        A second call does nothing.

        Args:
            status: Exit status. -1 if it is not known.
            last_words: The last line that the process wrote to standard error, or why it counts
                as ended.
            node_lost: The whole node is lost.
        """
        if self._is_over.is_set():
            return
        self.status = status
        self.last_words = last_words
        self.node_lost = node_lost
        self._is_over.set()
        self._inbox.put((self, Closed()))


@dataclass(frozen=True, slots=True)
class Order:
    """A message together with the worker process that it goes to, or comes from."""

    child: RemoteChild
    message: Message


@dataclass(eq=False)
class RemoteNode:
    """A node of the cluster: a Dask worker that has joined."""

    address: str
    name: str
    threads: int  # threads that the Dask worker was started with
    transfer: bool  # it shares no file system with this machine, so files are sent
    actor: Any = None  # Dask's handle of its `Node`; None until the actor is started
    facts: Facts | None = None  # None until it has answered
    problem: VirnucError | None = None  # why it is not used; None if nothing is wrong
    way_out: str = FIX_NODE  # what the user can do if the step fails that it is at
    # The devices that the run uses on it. Empty until it is checked, and also if other Dask workers
    # of the same machine have all its devices.
    devices: tuple[Device, ...] = ()
    children: dict[int, RemoteChild] = field(default_factory=dict)
    orders: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    # Messages of its processes that the pool has not got yet.
    received: asyncio.Queue[Order] = field(default_factory=asyncio.Queue)
    last_answer_s: float = math.inf  # when it last answered; infinite until it is checked
    # Our clock minus the node's clock. Of all differences that were seen the smallest one is kept,
    # because it holds the shortest delay of the network.
    clock_offset_s: float = math.inf
    task: asyncio.Task[None] = field(init=False)  # checks it, and then exchanges messages

    def __str__(self) -> str:
        """Return "node NAME (ADDRESS)". Without a name of its own, a node has its address as name.

        The address is not repeated then.
        """
        if self.name == self.address:
            return f"node {self.name}"
        return f"node {self.name} ({self.address})"

    def lose(self) -> None:
        """Take this node out of use: its worker processes count as lost, alive or not.

        The pool gets `Closed` for each of them, and computes their shards elsewhere.
        """
        self.devices = ()
        self.task.cancel()  # the task that exchanges messages with the node
        for child in list(self.children.values()):
            child.close(node_lost=True)

    async def share(self, shared_folder: Path, models: Path) -> None:
        """Check that this node and this machine see the same files.

        Each writes a random text into a temporary folder, and the other reads it. The models are
        checked by one small file.

        Args:
            shared_folder: A folder that both should see.
            models: Models directory that the node must see.

        Raises:
            DeviceError: The node does not see a file, or writes to another folder.
        """
        with tempfile.TemporaryDirectory(
            prefix=PROBE, dir=shared_folder, ignore_cleanup_errors=True
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
            if not is_regular_file(answer_file) or answer_file.read_bytes() != text:
                problem = f"what it writes in {shared_folder} is not seen here"
                raise DeviceError(f"{problem}: it is no shared file system")

    async def install_models(self, models: Path, local: Path | None, precision: Precision) -> None:
        """Make the node copy the models to its own disk, and send them if they must be sent.

        Args:
            models: Models directory on this machine.
            local: Folder on the node's disk for the copy. None means the node's temporary folder,
                which is removed after the run.
            precision: Precision of the run. int8 needs the file of its calibration as well.

        Raises:
            WeightsError: The folder on the node holds other models.
            DeviceError: The node's disk is full, or fails.
        """
        digests = await asyncio.to_thread(fingerprint, models, precision)
        # Where the node finds the models: in the folder "models" of its own folder, to which they
        # are sent below, or on the shared file system.
        source = "models" if self.transfer else str(models)
        request = (source, str(local or ""), json.dumps(digests, sort_keys=True))
        has_models = await self._request_models(*request)
        if has_models:
            return
        for path in _files_of_models(models):
            with path.open("rb") as file:
                await self.send(f"models/{path.relative_to(models)}", file)
        await self._request_models(*request)

    async def _request_models(self, source: str, local: str, digests: str) -> bool:
        """Ask the node to copy the models, and return true if it has them, false if it needs them.

        Copying and checking may take minutes. Meanwhile the node gets empty orders, and must
        answer them, so that a node that has hung is found.

        Args:
            source: Where the models are: a path that the node sees, or "models" if they are sent.
            local: Folder on the node's disk for the copy. Empty for the node's temporary folder.
            digests: JSON object with the digest of each model.
        """
        request = asyncio.ensure_future(self.actor.install_models(source, local, digests))
        no_orders = Orders().model_dump_json()
        try:
            while not request.done():
                # A TimeoutError here means that the node has hung.
                async with asyncio.timeout(ANSWER_S):
                    await self.actor.follow(no_orders)
                await asyncio.wait([request], timeout=REPORT_S)
            return bool(request.result())
        finally:
            request.cancel()

    async def send(self, name: str, data: BinaryIO) -> None:
        """Write a whole file on the node, in chunks of `CHUNK_BYTES`.

        The file appears on the node when its last chunk has come.

        Args:
            name: Path on the node. A relative path is in the node's folder.
            data: The contents: an open file from which nothing was read yet.

        Raises:
            DeviceError: The node's disk is full, or fails.
            OSError: A chunk does not arrive as it was sent.
        """
        is_first = True
        is_last = False
        while not is_last:
            chunk = await asyncio.to_thread(data.read, CHUNK_BYTES)
            # A chunk that is shorter than the others is the last one. It may be empty.
            is_last = len(chunk) < CHUNK_BYTES
            digest = hashlib.sha256(chunk).hexdigest()
            async with asyncio.timeout(ANSWER_S):
                await self.actor.receive_chunk(name, chunk, digest, first=is_first, last=is_last)
            is_first = False

    async def _send_task(self, child: RemoteChild, task: ShardTask) -> ShardTask:
        """Send the plan and the sequences of a shard to the node.

        The node gets a folder for this shard, laid out like a run directory. Its store holds only
        the sequences of the shard, so that their indexes begin at 0 there.

        Args:
            child: The worker process that will compute the shard. The task is added to its `sent`.
            task: The task with the paths of this machine.

        Returns:
            The task with the paths and indexes of the node.

        Raises:
            InputError: The store is damaged.
            ShardError: The plan is damaged.
            StorageError: The disk here cannot be read.
        """
        folder = f"shard-{next(_numbers)}"
        child.sent.append(SentTask(folder, task))
        with errors_of_this_machine(Path(task.run)):
            plan = read_plan(RunDir(Path(task.run))).model_dump_json()
            store = await asyncio.to_thread(OrfStore.open, Path(task.store), check=False)
        store_path = f"{folder}/orfs.h5"
        await self.send(f"{folder}/shards/plan.json", BytesIO(plan.encode()))
        # The file of a store with the sequences of this shard only.
        with errors_of_this_machine(Path(task.store)):
            contents = await asyncio.to_thread(excerpt, store, task.lo, task.hi)
        await self.send(store_path, BytesIO(contents))
        changes = {
            "run": folder,
            "store": store_path,
            "lo": 0,
            "hi": task.hi - task.lo,
            "skipped_rows": tuple(row - task.lo for row in task.skipped_rows),
        }
        return task.model_copy(update=changes)

    async def _fetch(self, sent: SentTask) -> None:
        """Fetch the file of a computed shard from the node, check it, and commit it to the run.

        The file appears whole in the run directory of this machine. If it arrives damaged, it is
        fetched once more.

        Args:
            sent: The task of the shard, and the shard's folder on the node.

        Raises:
            DeviceError: The file does not arrive as it was committed there.
            StorageError: The disk here is full, or fails.
            ConfigError: Another process has taken over the run directory.
        """
        shard = sent.task.shard
        path = shard_path(RunDir(Path(sent.task.run)), shard)
        name = f"{sent.folder}/shards/{path.name}"
        with ExitStack() as stack:
            with errors_of_this_machine(path):
                temp_path = stack.enter_context(atomic_file(path))
            for _ in range(MAX_FETCHES):
                await self._download(name, temp_path)
                with errors_of_this_machine(path):
                    is_whole = await asyncio.to_thread(is_sealed, temp_path)
                if is_whole:
                    # At its end, `atomic_file` renames the file into place, which waits for the
                    # disk. This must not stop the event loop, so it is done in a thread: `pop_all`
                    # takes the end of `atomic_file` out of this `with` block, and `close` runs it.
                    commit = stack.pop_all().close
                    with errors_of_this_machine(path):
                        await asyncio.to_thread(commit)
                    return
            # `atomic_file` ends with this error, and removes the temporary file.
            problem = f"shard {shard:05d}: its copy from the node is damaged"
            raise DeviceError(problem)

    async def _download(self, name: str, path: Path) -> None:
        """Copy a file of the node's folder to a path on this machine.

        Raises:
            StorageError: The disk here is full, or fails.
            OSError: The node cannot be reached, or cannot read the file.
        """
        n_received_bytes = 0
        with errors_of_this_machine(path):
            file = path.open("wb")
        try:
            while True:
                chunk = await self.actor.read_chunk(name, n_received_bytes, CHUNK_BYTES)
                if not chunk:  # the end of the file
                    return
                with errors_of_this_machine(path):
                    await asyncio.to_thread(file.write, chunk)
                n_received_bytes += len(chunk)
        finally:
            with errors_of_this_machine(path):
                file.close()

    async def serve(self, samples: dict[str, DeviceSample]) -> None:
        """Exchange messages with the node's worker processes until the node is lost.

        Args:
            samples: The last measurement of each device, by the device's id. It is updated.

        Raises:
            ExceptionGroup: One of the three tasks has failed, for example because the connection
                is broken. The others are ended.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_orders())
            tasks.create_task(self._receive_reports(samples))
            tasks.create_task(self._pass_on())

    async def _send_orders(self) -> None:
        """Send the queued messages to the node, again and again, until this task is cancelled.

        Without a shared file system, the files of a task are sent before the task. If they cannot
        be read, the worker that should compute the task is ended with the error.
        """
        while True:
            # Wait for one message, and take all others that are there, to send them together.
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
        """Ask the node for reports until this task is cancelled, and distribute what they hold.

        Messages of workers go to the queue `received`, from which another task passes them to the
        pool. What workers wrote to standard error goes to their logs.

        Args:
            samples: The last measurement of each device, by the device's id. It is updated.
        """
        # The node's ids of its devices lack the name of its machine, which the ids of the run have.
        device_ids = {device.local: device.id for device in self.devices}
        while True:
            report = NodeReport.model_validate_json(await self.actor.report())
            self.last_answer_s = time.monotonic()
            # The clocks of two machines count from different moments. The smallest difference is
            # the one with the shortest delay on the network.
            self.clock_offset_s = min(self.clock_offset_s, self.last_answer_s - report.now_s)
            for number, text in report.stderr.items():
                self.children[number].on_stderr(text)
            for line in report.lines:
                message = on_our_clock(line.line, self.clock_offset_s)
                self.received.put_nowait(Order(self.children[line.number], message))
            for number, no_progress_s in report.no_progress_s.items():
                child = self.children[number]
                child.last_progress_s = max(
                    child.last_progress_s, self.last_answer_s - no_progress_s
                )
            for sample in report.samples:
                device_id = device_ids[sample.device]
                samples[device_id] = replace(sample, device=device_id)

    async def _pass_on(self) -> None:
        """Pass the messages of workers to the pool, in order, until this task is cancelled.

        Before the pool gets the message that a shard is computed, the file of the shard is fetched
        from a node without a shared file system. If that fails, the worker is ended with the error,
        and the pool gets no further messages of it but its end.
        """
        while True:
            received = await self.received.get()
            child = received.child
            message = received.message
            # A worker's answer, or its end, settles some of its tasks. Their files lie on the node.
            answered_tasks = _take_answered_tasks(child, message)
            for sent_task in answered_tasks:
                try:
                    # Probes (`done` is None) and ended workers have no file to fetch.
                    if isinstance(message, Computed) and message.done and not child.failure:
                        await self._fetch(sent_task)
                except JOB_ERRORS as error:
                    child.fail(error)  # sets `child.failure`
                await self.actor.delete(sent_task.folder)  # the shard's files on the node
            if isinstance(message, Ended):
                del self.children[child.number]
                child.close(message.status, message.last_words)
            elif not child.failure:
                child.on_message(message)


@contextmanager
def errors_of_this_machine(path: Path) -> Iterator[None]:
    """Raise a `StorageError` for any error of the system in the body, which uses only this machine.

    An `OSError` would be taken for a broken connection. The node would be called lost, and the work
    repeated for ever, although the disk of this machine is to blame.

    Args:
        path: The file or folder that the body uses, for the message.

    Raises:
        StorageError: The system refused something.
    """
    try:
        yield
    except OSError as error:
        problem = storage_error(error, path)
        if problem is None:
            advice = f"{describe_system_error(error)} and run again, what was committed stays"
            problem = StorageError(f"{path}: {advice}")
        raise problem from error


def _take_answered_tasks(child: RemoteChild, message: Message) -> list[SentTask]:
    """Remove the sent tasks that a message answers from the worker's list, and return them.

    `Computed` (a shard is computed) answers the oldest task. `Ended` (the process has ended)
    answers all that are left. Other messages answer none.
    """
    n_answered = 0
    if isinstance(message, Ended):
        n_answered = len(child.sent)
    elif isinstance(message, Computed):
        # With a shared file system the list is always empty.
        n_answered = min(1, len(child.sent))
    return [child.sent.popleft() for _ in range(n_answered)]


def _files_of_models(models: Path) -> list[Path]:
    """Return the paths of all files of a models directory, sorted.

    Raises:
        UnreadableError: The system cannot list a folder or look at a file in it.
    """
    files = []
    pending = [models / part for part in PARTS]
    while pending:
        for path in list_folder(pending.pop()):
            if is_real_folder(path):
                pending.append(path)
            elif is_regular_file(path):
                files.append(path)
    return sorted(files)


def on_our_clock(line: str, clock_offset_s: float) -> Message:
    """Parse a message of a node, and convert its times to the clock of this machine.

    Args:
        line: The message: the name of its class, a space, and its fields as JSON. All fields that
            `MOMENTS` names are times of the node's clock.
        clock_offset_s: The clock of this machine minus that of the node.
    """

    def convert_times(fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the times of one JSON object. The parser calls this for nested objects, too."""
        for name in MOMENTS:
            if name in fields:
                fields[name] += clock_offset_s
        return fields

    class_name, body = line.split(" ", 1)
    converted_fields = json.loads(body, object_hook=convert_times)
    return Message.of(f"{class_name} {json.dumps(converted_fields)}")


def excerpt(store: OrfStore, lo: int, hi: int) -> bytes:
    """Return the bytes of a store file that holds only the distinct sequences `lo` to `hi - 1`.

    A distinct sequence may come from many reading frames, and each frame is a row of the store. In
    the new store each sequence has one row, that of its first frame, and one read, the read of this
    frame. A worker computes the same results from it.

    Args:
        store: The store of the run.
        lo: Index of the first sequence.
        hi: Index after the last sequence.
    """
    n_sequences = hi - lo
    sequences = np.arange(lo, hi)
    rows = store.unique_row[lo:hi]  # the first frame of each sequence
    reads = store.row_read[rows]  # the read of each of these frames

    # Columns of numbers. In the new store, sequence i is that of row i, which is a frame of read i.
    columns: dict[str, NDArray[Any]] = {}
    for name in ("row_read", "row_unique", "unique_row"):
        columns[name] = np.arange(n_sequences)
    for name in ("read_length", "read_chunks", "read_rows", "read_flags", "read_copy"):
        columns[name] = getattr(store, name)[reads]
    for name in ("row_chunk", "row_frame"):
        columns[name] = getattr(store, name)[rows]

    # Columns of texts: all texts end to end as bytes, and the offset of each.
    for name, chosen_entries in (("read_id", reads), ("protein", sequences), ("dna", sequences)):
        starts = getattr(store, f"{name}_offsets")
        offsets = offsets_from_lengths(starts[chosen_entries + 1] - starts[chosen_entries])
        # For each byte of the new column, `positions` says where the byte is in the store's column.
        # Within a text, the two places differ by a constant, which `shifts` has for each text.
        shifts = starts[chosen_entries] - offsets[:-1]
        positions = np.repeat(shifts, np.diff(offsets)) + np.arange(offsets[-1])
        columns[f"{name}_offsets"] = offsets
        columns[f"{name}_bytes"] = getattr(store, f"{name}_bytes")[positions]

    # Attributes. Counts that do not matter to a worker are 0.
    attributes: dict[str, Any] = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
    attributes |= dict.fromkeys(StoreCounts.__slots__, 0)
    for name in ("n_reads", "n_rows", "n_uniques"):
        attributes[name] = n_sequences
    for name in ("fingerprint", "model_length", "duplicate_mark"):
        attributes[name] = getattr(store, name)

    # Write an HDF5 file in memory (driver "core"), never to a disk. Its name only has to differ
    # from those of other files that are open.
    with h5py.File(f"{store.path}:{lo}", "w", driver="core", backing_store=False) as file:
        file.attrs.update(attributes)
        for name in COLUMNS:
            file.create_dataset(name, data=columns[name])
        file.flush()
        return bytes(file.id.get_file_image())
