"""What a node does for a run: a Dask actor that starts worker processes and relays their messages.

The processes are those of a run on one machine (`LocalWorkers`), with the same two nets that end
them with their parent, here the Dask worker. Heartbeats stay on the node: the submitting side is
told how long each process has done nothing. All that goes over the network is JSON, or bytes of
files.
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
from virnuc_core.engine.devices import resolve, visible_gpus
from virnuc_core.engine.process import Child, Closed, LocalWorkers, Message, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import DeviceError, WeightsError
from virnuc_core.runfiles import Device, version_of
from virnuc_core.telemetry.sampler import gpu_reader
from virnuc_core.telemetry.tables import DeviceSample

REPORT_S: Final = 1.0  # a node answers at least this often
GATHER_S: Final = 0.02  # messages of so short a time go into one report
DEVICE_WAIT_S: Final = 30.0  # for a GPU whose former worker is being ended


class End(Message):
    """To the node of a worker process: end it, after so much time for what it computes."""

    grace_s: float


class Ended(Message):
    """A node's last message of a worker process, in the place of `Closed`."""

    status: int
    last_words: str


class WorkerLine(Spec):
    """A message to or from one worker process of a node, as `Message.line` writes it."""

    number: int  # of the worker process
    line: str


class Orders(Spec):
    """Messages to a node's worker processes, in order."""

    lines: tuple[WorkerLine, ...] = ()


class NodeReport(Spec):
    """What happened on a node since the last report."""

    now_s: float  # by the node's own `time.monotonic()`
    lines: tuple[WorkerLine, ...] = ()  # messages of its worker processes, in order
    stderr: dict[int, str] = Field({})  # what each process wrote to standard error
    still_s: dict[int, float] = Field({})  # how long each process has done nothing
    samples: tuple[DeviceSample, ...] = ()


class Facts(Spec):
    """What a node is."""

    host: str
    virnuc: str
    torch: str
    gpus: tuple[Device, ...]
    cores: tuple[Device, ...]


class Node:
    """The actor.

    When it is released, or its Dask worker dies, its worker processes end and its folder goes.
    """

    def __init__(self, module: str, disk: str | None = None) -> None:
        """Make a folder for what will be sent.

        Args:
            module: The module that says what worker processes do.
            disk: Folder on the node's own disk; None for the system's temporary folder.
        """
        # Dask sets it: memory would be given back at once, and asked for again.
        os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
        self._workers = LocalWorkers(module)
        # Its thread lives as long as this process: to the kernel, it is the workers' parent.
        self._starter = ThreadPoolExecutor(1)
        self._children: dict[int, Child] = {}
        # Relative paths that this node is given are in this folder.
        self.folder = Path(tempfile.mkdtemp(prefix="virnuc-", dir=disk))
        self._sampled_gpus: list[str] = []
        self._read_gpu: Callable[[str, float], DeviceSample] | None = None
        self._local_models: str | None = None

    def __del__(self) -> None:
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        """End the worker processes, and remove the folder."""
        self._workers.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self, devices: str) -> str:
        """Return this node's `Facts`.

        Args:
            devices: The devices that the run wants, as the option `--devices` has them.

        Raises:
            DeviceError: `devices` names a GPU that is not here.
        """
        wanted_devices = Devices.parse(devices)
        if wanted_devices.kind == "auto":
            gpus = tuple(visible_gpus())
        elif wanted_devices.kind == "cuda":
            gpus = resolve(wanted_devices)
        else:
            gpus = ()
        n_cores = len(os.sched_getaffinity(0))
        facts = Facts(
            host=platform.node(),
            virnuc=virnuc_core.__version__,
            torch=version_of("torch"),
            gpus=gpus,
            cores=resolve(Devices.parse(f"cpu:{n_cores}")),
        )
        return facts.model_dump_json()

    def install_models(self, models: str, local: str, digests: str) -> bool:
        """Have the models on a disk of this node: copied once, or taken from what was sent.

        Args:
            models: Where the models are: an absolute path that this node sees, or a relative one
                of files that are sent here.
            local: Folder on this node for the copy, or an earlier copy itself.
            digests: JSON object with the digests of the models' parts.

        Returns:
            False if the files are yet to be sent.

        Raises:
            WeightsError: The copy is not what it should be.
        """
        from virnuc_core.encoders.digests import fingerprint

        source = self.folder / models
        copy = self._place_of_copy(self.folder / local, digests)
        is_sent = not Path(models).is_absolute()
        if not copy.exists():
            if is_sent and not source.exists():
                return False
            self._copy_models(source, copy, move=is_sent)
        expected_digests: dict[str, str] = json.loads(digests)
        precision: Precision = "int8" if '"int8"' in digests else "auto"
        if fingerprint(copy, precision) != expected_digests:
            raise WeightsError(f"{copy} does not hold the same models; remove it and run again")
        self._local_models = str(copy)
        return True

    def _place_of_copy(self, folder: Path, digests: str) -> Path:
        """Return the folder itself if it holds models, else one in it, named by its content."""
        from virnuc_core.encoders.registry import PARTS

        if (folder / PARTS[0]).exists():
            return folder
        name = hashlib.sha256(digests.encode()).hexdigest()[:16]
        return folder / f"virnuc-{name}"

    def _copy_models(self, source: Path, copy: Path, *, move: bool) -> None:
        """Copy or move the parts of a models directory. The copy appears whole."""
        from virnuc_core.encoders.registry import PARTS

        transfer = shutil.move if move else shutil.copytree
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=copy.parent) as folder:
            temp_copy = Path(folder) / "copy"
            temp_copy.mkdir()
            for part in PARTS:
                transfer(source / part, temp_copy / part)
            if not copy.exists():  # another Dask worker of this machine may have been faster
                temp_copy.rename(copy)

    def receive_chunk(
        self, name: str, chunk: bytes, digest: str, *, first: bool, last: bool
    ) -> None:
        """Write a chunk of a file, which appears with the last chunk.

        Args:
            name: Path of the file; a relative one is in this node's folder.
            chunk: Bytes of the file.
            digest: SHA-256 of the chunk.
            first: Whether it is the first chunk.
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
        """Return at most so many bytes of a file.

        Raises:
            DeviceError: The file cannot be read.
        """
        path = self.folder / name
        with self._disk_errors(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    @contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        """Raise a `DeviceError` for an error of the disk."""
        try:
            yield
        except OSError as error:
            raise DeviceError(f"cannot use {path}: {error.strerror or error}") from error

    def delete(self, name: str) -> None:
        """Remove what was sent and computed of a shard."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    async def follow(self, orders: str) -> None:
        """Follow `Orders`, in their order."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._follow, Orders.model_validate_json(orders))

    def _follow(self, orders: Orders) -> None:
        """Start, end, or send a message to worker processes, as the orders say."""
        for order in orders.lines:
            message = Message.of(order.line)
            if isinstance(message, WorkerSpec):
                self._children[order.number] = self._workers.start(self._adapt(message))
                continue
            child = self._children.get(order.number)
            if child is None:  # it has ended, as the next report says
                continue
            if isinstance(message, End):
                threading.Thread(target=child.end, args=(message.grace_s,)).start()
            elif isinstance(message, ShardTask):
                run = str(self.folder / message.run)
                store = str(self.folder / message.store)
                child.send(message.model_copy(update={"run": run, "store": store}))
            else:
                child.send(message)

    def _adapt(self, spec: WorkerSpec) -> WorkerSpec:
        """Return a worker's settings as they are on this node, and sample its GPU from now on."""
        device_wait_s = max(DEVICE_WAIT_S, spec.engine.device_wait_s)
        engine = spec.engine.model_copy(update={"device_wait_s": device_wait_s})
        gpu = spec.device.local
        if spec.device.kind == "cuda" and gpu not in self._sampled_gpus:
            self._sampled_gpus.append(gpu)
            self._read_gpu = gpu_reader(self._sampled_gpus)
        models = self._local_models or spec.models
        return spec.model_copy(update={"engine": engine, "models": models})

    async def report(self) -> str:
        """Return a `NodeReport` once a worker process has sent something, or a second later."""
        report = await asyncio.to_thread(self._collect)
        return report.model_dump_json()

    def _collect(self) -> NodeReport:
        """Wait for a message of a worker process, and report all that happened."""
        lines = []
        ended_children: dict[int, Child] = {}
        received = self._workers.receive(REPORT_S)
        if received is not None:
            time.sleep(GATHER_S)
        while received is not None:
            child, message = received
            number = self._number_of(child)
            if isinstance(message, Closed):
                message = Ended(status=child.end(0.5), last_words=child.last_words)
                ended_children[number] = self._children.pop(number)
            lines.append(WorkerLine(number=number, line=message.line()))
            received = self._workers.receive(0)
        now_s = time.monotonic()
        running = self._children.copy()
        samples: tuple[DeviceSample, ...] = ()
        if self._read_gpu is not None:
            samples = tuple(self._read_gpu(gpu, now_s) for gpu in self._sampled_gpus)
        return NodeReport(
            now_s=now_s,
            lines=tuple(lines),
            stderr=_take_stderr(running | ended_children),
            still_s={number: now_s - child.progress_s for number, child in running.items()},
            samples=samples,
        )

    def _number_of(self, child: Child) -> int:
        """Return the number by which the submitting side knows a worker process."""
        # A copy, because another thread adds to it.
        numbers = [number for number, own in self._children.copy().items() if own is child]
        return numbers[0]


def _take_stderr(children: dict[int, Child]) -> dict[int, str]:
    """Return what each process has written to standard error since the last call, if anything.

    Lines are taken one by one, because a thread of the child's adds to them.
    """
    texts = {}
    for number, child in children.items():
        n_lines = len(child.unlogged)
        if n_lines:
            texts[number] = "".join(child.unlogged.pop(0) for _ in range(n_lines))
    return texts
