"""The actor that runs on each node of a cluster: it starts worker processes for a run.

A node is a Dask worker. Its actor is an object in that process, whose methods the machine that
started the run (the submitting machine) calls over the network. The actor starts the same worker
processes as a run on one machine (`LocalWorkers`), sends them messages, and reports theirs. If the
Dask worker dies, its worker processes end as well.

Heartbeats are not sent over the network. Instead, each report says how long each process has made
no progress. All arguments and results are JSON texts, or bytes of files.
"""

import asyncio
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import Field

import virnuc_core
from virnuc_core.config import Devices, Precision, Spec
from virnuc_core.engine.devices import find_gpus, resolve
from virnuc_core.engine.process import (
    Child,
    Closed,
    End,
    Ended,
    LocalWorkers,
    Message,
    WorkerSpec,
)
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import DeviceError, WeightsError
from virnuc_core.runfiles import Device, version_of
from virnuc_core.system_errors import path_exists
from virnuc_core.telemetry.sampler import gpu_reader
from virnuc_core.telemetry.tables import DeviceSample

# Seconds that a node waits for messages before it sends an empty report.
REPORT_S: Final = 1.0
# Seconds after a message in which further messages are collected for the same report.
GATHER_S: Final = 0.02
# Seconds that a new worker waits for a GPU, because the previous worker may still be ending.
DEVICE_WAIT_S: Final = 30.0


class WorkerLine(Spec):
    """A message to or from one worker process of a node."""

    number: int  # number of the worker process
    line: str  # the message as `Message.line` writes it


class Orders(Spec):
    """Messages to the worker processes of a node, in the order in which they were sent."""

    lines: tuple[WorkerLine, ...] = ()


class NodeReport(Spec):
    """What happened on a node since the last report. The dicts are by number of the process."""

    now_s: float  # the node's `time.monotonic()`
    lines: tuple[WorkerLine, ...] = ()  # messages of its worker processes, in order
    stderr: dict[int, str] = Field({})  # what each process wrote to standard error
    no_progress_s: dict[int, float] = Field({})  # seconds without progress of each process
    samples: tuple[DeviceSample, ...] = ()


class Facts(Spec):
    """What a node reports about its machine and its software."""

    host: str  # name of the machine
    virnuc: str  # version
    torch: str  # version
    gpus: tuple[Device, ...]
    # Why `gpus` is empty for `--devices auto`, a clause. Empty if there are GPUs.
    gpu_absence: str = ""
    cores: tuple[Device, ...]


class Node:
    """The actor of one node. Dask calls its methods for the submitting machine.

    It has a folder on the node's disk for files that are sent to it. When the actor is released,
    its worker processes are ended and the folder is removed.
    """

    def __init__(self, module: str, disk: str | None = None) -> None:
        """Make the folder for files that will be sent.

        Args:
            module: The module whose function `work` the worker processes run.
            disk: Folder on the node's own disk, in which the new folder is made. None means the
                system's temporary folder.
        """
        # Dask sets this variable for its workers. With it, memory that is freed goes back to the
        # system immediately and must be requested again, which makes our processes slow.
        os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
        self._workers = LocalWorkers(module)
        # The thread that starts all worker processes. The kernel ends a worker when this thread
        # ends, so it lives as long as the actor.
        self._starter = ThreadPoolExecutor(1)
        # Running worker processes by the number that the submitting machine has given them.
        self._children: dict[int, Child] = {}
        # Relative paths in calls of this actor are relative to this folder.
        self.folder = Path(tempfile.mkdtemp(prefix="virnuc-", dir=disk))
        self._sampled_gpus: list[str] = []
        # Measures one of these GPUs. None as long as no worker uses a GPU.
        self._read_gpu: Callable[[str, float], DeviceSample] | None = None
        # Where the models are on this node's own disk. None if they are read where the run has
        # them.
        self._local_models: str | None = None

    def __del__(self) -> None:
        """End the worker processes and remove the folder, when Dask releases the actor.

        This is done in a thread, because it takes seconds and Dask's event loop must not wait.
        """
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        """End the worker processes, and remove the folder."""
        self._workers.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self, devices: str) -> str:
        """Return the `Facts` of this node as JSON: its devices and the versions of its software.

        Args:
            devices: The value of the option `--devices` of the run.

        Raises:
            DeviceError: `devices` names a GPU that this node does not have.
        """
        wanted_devices = Devices.parse(devices)
        gpu_absence = ""
        if wanted_devices.kind == "auto":
            usable = find_gpus()
            gpus = usable.devices
            gpu_absence = usable.absence
        elif wanted_devices.kind == "cuda":
            gpus = resolve(wanted_devices)
        else:
            gpus = ()  # the run uses only cores
        n_cores = len(os.sched_getaffinity(0))
        facts = Facts(
            host=platform.node(),
            virnuc=virnuc_core.__version__,
            torch=version_of("torch"),
            gpus=gpus,
            gpu_absence=gpu_absence,
            cores=resolve(Devices.parse(f"cpu:{n_cores}")),
        )
        return facts.model_dump_json()

    def install_models(self, models: str, local: str, digests: str) -> bool:
        """Make sure that the models are on a disk of this node, and check their digests.

        They are copied from a shared file system, or moved from the files that were sent. A copy
        that an earlier run has made is used again.

        Args:
            models: Where the models are now: an absolute path on a shared file system, or a
                path in this node's folder, to which the files are sent.
            local: Folder on this node for the copy, or an earlier copy itself. Empty for this
                node's folder, which is removed after the run.
            digests: JSON object with the digest of each model.

        Returns:
            True if the models are there. False if their files must be sent first.

        Raises:
            WeightsError: The copy holds other models than the run.
        """
        from virnuc_core.encoders.digests import fingerprint

        # Joining a folder with an absolute path gives the absolute path.
        source = self.folder / models
        copy = self._place_of_copy(self.folder / local, digests)
        is_sent = not Path(models).is_absolute()
        if not path_exists(copy):
            if is_sent and not path_exists(source):
                return False
            self._copy_models(source, copy, move=is_sent)
        expected_digests: dict[str, str] = json.loads(digests)
        # Only a run in int8 has a digest of this name, that of its calibration.
        precision: Precision = "int8" if "int8" in expected_digests else "auto"
        if fingerprint(copy, precision) != expected_digests:
            raise WeightsError(f"{copy} does not hold the same models; remove it and run again")
        self._local_models = str(copy)
        return True

    def _place_of_copy(self, folder: Path, digests: str) -> Path:
        """Return the path of the copy of the models.

        It is the folder itself if that holds models. Otherwise it is a folder in it, whose name is
        derived from the digests, so that different models do not replace each other. Nothing is
        made here.

        Args:
            folder: The folder that the user has named for the copy.
            digests: JSON object with the digest of each model.
        """
        from virnuc_core.encoders.registry import PARTS

        if path_exists(folder / PARTS[0]):
            return folder
        name = hashlib.sha256(digests.encode()).hexdigest()[:16]
        return folder / f"virnuc-{name}"

    def _copy_models(self, source: Path, copy: Path, *, move: bool) -> None:
        """Copy or move a models directory. The copy appears whole or not at all.

        Args:
            source: The models directory.
            copy: Path of the copy.
            move: Move the files instead of copying them.
        """
        from virnuc_core.encoders.registry import PARTS

        transfer = shutil.move if move else shutil.copytree
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Work in a temporary folder on the same disk, so that a rename can put the whole copy into
        # its place.
        with tempfile.TemporaryDirectory(dir=copy.parent) as folder:
            temp_copy = Path(folder) / "copy"
            temp_copy.mkdir()
            for part in PARTS:
                transfer(source / part, temp_copy / part)
            # Another Dask worker of this machine may have made the same copy meanwhile.
            if not path_exists(copy):
                temp_copy.rename(copy)

    def receive_chunk(
        self, name: str, chunk: bytes, digest: str, *, first: bool, last: bool
    ) -> None:
        """Append a chunk (some bytes) to a file. The file appears when the last chunk has come.

        Args:
            name: Path of the file. A relative path is in this node's folder.
            chunk: Bytes of the file.
            digest: SHA-256 of the chunk, as hexadecimal text.
            first: Whether it is the first chunk. It replaces what an earlier attempt has left.
            last: Whether it is the last chunk.

        Raises:
            OSError: The chunk is not what was sent.
            DeviceError: The disk is full, or fails.
        """
        if hashlib.sha256(chunk).hexdigest() != digest:
            raise OSError(f"{name} does not arrive there as it was sent")
        path = self.folder / name
        with self._disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temp_path = path.with_name(f"{path.name}.part")
            with temp_path.open("wb" if first else "ab") as file:
                file.write(chunk)
            if last:
                temp_path.rename(path)

    def read_chunk(self, name: str, offset: int, max_bytes: int) -> bytes:
        """Return some bytes of a file.

        Args:
            name: Path of the file. A relative path is in this node's folder.
            offset: Position of the first byte.
            max_bytes: Number of bytes to return at most. At the end of the file there are fewer.

        Raises:
            DeviceError: The file cannot be read.
        """
        path = self.folder / name
        with self._disk_errors(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    @contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        """Turn an error of the system in the `with` block into a `DeviceError` with the path."""
        try:
            yield
        except OSError as error:
            raise DeviceError(f"cannot use {path}: {error.strerror or error}") from error

    def delete(self, name: str) -> None:
        """Remove the folder of a shard, with everything that was sent and computed for it.

        Args:
            name: Name of the folder, which is in this node's folder. It may be gone already.
        """
        shutil.rmtree(self.folder / name, ignore_errors=True)

    async def follow(self, orders: str) -> None:
        """Carry out the messages to worker processes that the submitting machine has sent.

        They are carried out one after the other, in the thread that starts all processes. This
        returns when all are done.

        Args:
            orders: `Orders` as JSON.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._follow, Orders.model_validate_json(orders))

    def _follow(self, orders: Orders) -> None:
        """Start and end worker processes, and send them messages, as the orders say.

        A `WorkerSpec` starts a process, and `End` ends it. Any other message goes to the process.
        """
        for order in orders.lines:
            message = Message.of(order.line)
            if isinstance(message, WorkerSpec):
                self._children[order.number] = self._workers.start(self._adapt(message))
                continue
            child = self._children.get(order.number)
            if child is None:
                # The process has ended. The next report will say so.
                continue
            if isinstance(message, End):
                # In a thread, because the end takes seconds and other orders must not wait.
                threading.Thread(target=child.end, args=(message.grace_s,)).start()
            elif isinstance(message, ShardTask):
                # Relative paths become paths in this node's folder. Absolute paths stay.
                run = str(self.folder / message.run)
                store = str(self.folder / message.store)
                child.send(message.model_copy(update={"run": run, "store": store}))
            else:
                child.send(message)

    def _adapt(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the settings of a worker as they must be on this node.

        The worker waits longer for its GPU, because the one before it may still be ending. It loads
        the models from this node's disk if they are there. As a side effect, its GPU is measured
        for each report from now on.
        """
        device_wait_s = max(DEVICE_WAIT_S, spec.engine.device_wait_s)
        engine = spec.engine.model_copy(update={"device_wait_s": device_wait_s})
        gpu = spec.device.local  # its id on this machine
        if spec.device.kind == "cuda" and gpu not in self._sampled_gpus:
            self._sampled_gpus.append(gpu)
            # A reader is made for a fixed list of GPUs, so a new one is needed.
            self._read_gpu = gpu_reader(self._sampled_gpus)
        models = self._local_models or spec.models
        return spec.model_copy(update={"engine": engine, "models": models})

    async def report(self) -> str:
        """Return a `NodeReport` as JSON when a worker process has sent a message.

        If none comes within `REPORT_S`, the report is returned without messages.
        """
        report = await asyncio.to_thread(self._collect)
        return report.model_dump_json()

    def _collect(self) -> NodeReport:
        """Wait for a message of a worker process, and return a report of all that happened.

        Without any message the report is returned after `REPORT_S`. Worker processes that have
        ended are removed from `_children`.
        """
        lines = []
        ended_children: dict[int, Child] = {}
        received = self._workers.receive(REPORT_S)
        if received is not None:
            # Others often send at the same time. Their messages go into the same report.
            time.sleep(GATHER_S)
        while received is not None:
            child, message = received
            number = self._number_of(child)
            if isinstance(message, Closed):
                # The process has ended. `end` collects its exit status.
                status = child.end(grace_s=0.5)
                message = Ended(status=status, last_words=child.last_words)
                ended_children[number] = self._children.pop(number)
            lines.append(WorkerLine(number=number, line=message.line()))
            received = self._workers.receive(0)
        now_s = time.monotonic()
        running = self._children.copy()  # another thread adds to the dict
        samples: tuple[DeviceSample, ...] = ()
        if self._read_gpu is not None:
            samples = tuple(self._read_gpu(gpu, now_s) for gpu in self._sampled_gpus)
        return NodeReport(
            now_s=now_s,
            lines=tuple(lines),
            stderr=_take_stderr(running | ended_children),
            no_progress_s={
                number: now_s - child.last_progress_s for number, child in running.items()
            },
            samples=samples,
        )

    def _number_of(self, child: Child) -> int:
        """Return the number that the submitting machine has given to a worker process."""
        # A copy of the dict, because another thread adds to it.
        children = self._children.copy()
        numbers = [number for number, known_child in children.items() if known_child is child]
        return numbers[0]


def _take_stderr(children: dict[int, Child]) -> dict[int, str]:
    """Return what each process has written to standard error since the last call.

    The text is removed from the children. Processes that have written nothing are left out.
    """
    texts = {}
    for number, child in children.items():
        # Another thread may append lines meanwhile. So the number of lines is read once, and the
        # lines are removed one by one from the front.
        n_lines = len(child.unlogged)
        if n_lines:
            texts[number] = "".join(child.unlogged.pop(0) for _ in range(n_lines))
    return texts
