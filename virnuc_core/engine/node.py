"""What a node does for a run: a Dask actor that starts worker processes there and relays what they say, as JSON.

The processes are those of a run on one machine (`LocalWorkers`), with the same two nets that end them with their
parent, here the Dask worker. Heartbeats stay here: the submitting side is told how long each has been still."""

import asyncio
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import Field

import virnuc_core
from virnuc_core.config import Devices, Spec
from virnuc_core.engine.devices import resolve, visible_gpus
from virnuc_core.engine.process import Child, Closed, LocalWorkers, Message, WorkerSpec
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import DeviceError, WeightsError
from virnuc_core.runfiles import Device, version_of
from virnuc_core.telemetry.live import nvml_reader
from virnuc_core.telemetry.tables import DeviceSample

HEAR_S: Final = 1.0  # a node answers at least this often
GATHER_S: Final = 0.02  # what is said in so short a time is told together
DEVICE_WAIT_S: Final = 30.0  # for a GPU whose former worker is being ended


class End(Message):
    """To a worker process's node: end it, with so much time for what it is at."""

    grace_s: float


class Ended(Message):
    """A node's last word on a worker process, in the place of `Closed`."""

    status: int
    last_words: str


class Told(Spec):
    """What a node has to say since it was last asked, by its own clock."""

    now_s: float
    said: tuple[tuple[int, str], ...] = ()  # messages of its worker processes, in order
    wrote: dict[int, str] = Field({})  # what each wrote on standard error
    still_s: dict[int, float] = Field({})  # how long each has done nothing
    samples: tuple[DeviceSample, ...] = ()


class Facts(Spec):
    """What a node is."""

    host: str
    virnuc: str
    torch: str
    gpus: tuple[Device, ...]
    cores: tuple[Device, ...]


class Node:
    """The actor. Its worker processes end, and its folder goes, when it is released, or its Dask worker dies."""

    def __init__(self, module: str, disk: str | None = None) -> None:
        os.environ.pop(
            "MALLOC_TRIM_THRESHOLD_", None
        )  # Dask's: memory given back at once, and asked for again
        self._workers = LocalWorkers(module)
        self._starter = ThreadPoolExecutor(
            1
        )  # lives as long as the process: to the kernel it is the parent
        self._children: dict[int, Child] = {}
        self.folder = Path(
            tempfile.mkdtemp(prefix="virnuc-", dir=disk)
        )  # for what is sent; relative paths are in it
        self._sampled: list[str] = []
        self._read: Any = None
        self._local_models: str | None = None

    def __del__(self) -> None:
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        self._workers.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self, devices: str) -> str:
        """What is here. Errors: `DeviceError` when `devices` names GPUs that are not."""
        wanted, cores = Devices.parse(devices), len(os.sched_getaffinity(0))
        gpus = (
            visible_gpus()
            if wanted.kind == "auto"
            else resolve(wanted)
            if wanted.kind == "cuda"
            else ()
        )
        told = {
            "virnuc": virnuc_core.__version__,
            "torch": version_of("torch"),
            "host": platform.node(),
        }
        return Facts(
            **told, gpus=tuple(gpus), cores=resolve(Devices.parse(f"cpu:{cores}"))
        ).model_dump_json()

    def bring(self, models: str, local: str, prints: str) -> bool:
        """Have the models on a disk of this node, copied once or sent to its folder, proven by the digests of their
        parts; False where they are yet to be sent."""
        from virnuc_core.encoders.checkpoint import PARTS, fingerprint

        source, place, sent = (
            self.folder / models,
            self.folder / local,
            not Path(models).is_absolute(),
        )
        if not (place / PARTS[0]).exists():
            place /= f"virnuc-{hashlib.sha256(prints.encode()).hexdigest()[:16]}"
        if not place.exists():
            if sent and not source.exists():
                return False
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                (copy := Path(folder) / "copy").mkdir()
                for part in PARTS:
                    (shutil.move if sent else shutil.copytree)(source / part, copy / part)
                if not place.exists():  # another Dask worker of this node may have been faster
                    copy.rename(place)
        if fingerprint(place, "int8" if '"int8"' in prints else "auto") != json.loads(prints):
            raise WeightsError(f"{place} does not hold the same models; remove it and run again")
        self._local_models = str(place)
        return True

    def put(self, name: str, piece: bytes, digest: str, *, first: bool, last: bool) -> None:
        """Write a piece of a file, which appears with the last one. Errors: `DeviceError` of the disk; `OSError` when
        the piece is not what was sent."""
        if hashlib.sha256(piece).hexdigest() != digest:
            raise OSError(f"{name} does not arrive there as it was sent")
        with self._using(path := self.folder / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            with (aside := path.with_name(f"{path.name}.part")).open(
                "wb" if first else "ab"
            ) as file:
                file.write(piece)
            if last:
                aside.rename(path)

    def piece(self, name: str, at: int, most: int) -> bytes:
        """So many bytes at most of a file."""
        with self._using(path := self.folder / name), path.open("rb") as file:
            file.seek(at)
            return file.read(most)

    @contextmanager
    def _using(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DeviceError(f"cannot use {path}: {error.strerror or error}") from error

    def drop(self, name: str) -> None:
        """Remove what was sent and computed of a shard."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    async def tell(self, orders: str) -> None:
        """Follow orders, in turn."""
        await asyncio.get_running_loop().run_in_executor(self._starter, self._follow, orders)

    def _follow(self, orders: str) -> None:
        for number, line in json.loads(orders):
            message = Message.of(line)
            if isinstance(message, WorkerSpec):
                self._children[number] = self._workers.start(self._here(message))
            elif (
                child := self._children.get(number)
            ) is not None:  # else it has ended, as will be heard
                if isinstance(message, ShardTask):
                    own = {
                        "run": str(self.folder / message.run),
                        "store": str(self.folder / message.store),
                    }
                    message = message.model_copy(update=own)
                if isinstance(message, End):
                    threading.Thread(target=child.end, args=(message.grace_s,)).start()
                else:
                    child.send(message)

    def _here(self, spec: WorkerSpec) -> WorkerSpec:
        """A worker's settings as they are here."""
        engine = spec.engine.model_copy(
            update={"device_wait_s": max(DEVICE_WAIT_S, spec.engine.device_wait_s)}
        )
        if spec.device.kind == "cuda" and spec.device.local not in self._sampled:
            self._sampled.append(spec.device.local)
            self._read = nvml_reader(self._sampled)
        return spec.model_copy(
            update={"engine": engine, "models": self._local_models or spec.models}
        )

    async def hear(self) -> str:
        """What worker processes have said and done, as soon as one has said something, else after a second."""
        return await asyncio.to_thread(self._collect)

    def _collect(self) -> str:
        said, ended = [], dict[int, Child]()
        if (received := self._workers.receive(HEAR_S)) is not None:
            time.sleep(GATHER_S)
        while received is not None:
            child, message = received
            number = next(number for number, one in list(self._children.items()) if one is child)
            if isinstance(message, Closed):
                message = Ended(status=child.end(0.5), last_words=child.last_words)
                ended[number] = self._children.pop(number)
            said.append((number, message.line()))
            received = self._workers.receive(0)
        now_s, living = time.monotonic(), self._children.copy()
        unlogged = {
            number: child.unlogged for number, child in (living | ended).items() if child.unlogged
        }
        wrote = {
            number: "".join(lines.pop(0) for _ in range(len(lines)))
            for number, lines in unlogged.items()
        }
        still_s = {number: now_s - child.progress_s for number, child in living.items()}
        samples = tuple(self._read(uuid, now_s) for uuid in self._sampled) if self._read else ()
        return Told(
            now_s=now_s, said=tuple(said), wrote=wrote, still_s=still_s, samples=samples
        ).model_dump_json()
