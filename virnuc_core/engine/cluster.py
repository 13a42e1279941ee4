"""Worker processes on many machines: those of a pool, started and heard through Dask.

What a pool does with them stays in `pool`. Here a thread of its own watches which Dask workers there are. On each, an
actor (`node.Node`) starts the same worker processes as on one machine, and what they say comes back in the same words.
A node that dies, or does not answer, takes its devices along, and brings them when it comes back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import virnuc_core
from virnuc_core.config import ClusterSpec, Devices, EngineSpec
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine.dask_clusters import connect
from virnuc_core.engine.node import Facts, Order, Told
from virnuc_core.engine.process import GRACE_S, Child, Closed, LocalWorkers, Message, WorkerSpec
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

WATCH_S: Final = 0.5
ANSWER_S: Final = 60.0  # a node that has been found, at first
SILENT_S: Final = 30.0  # a node answers every second
END_S: Final = 5.0  # for word that a worker process has ended
CLOCKS: Final = 100  # answers by which a node's clock is known: the fastest tells best
MOMENTS: Final = ("started_s", "finished_s", "arrived_s", "launched_s")  # of a clock, in what workers say
PROBE: Final = ".virnuc-probe-"
log = logging.getLogger(__name__)


class RemoteChild(Child):
    """A worker process on a node."""

    def __init__(self, spec: WorkerSpec, workers: ClusterWorkers, node: RemoteNode, number: int) -> None:
        self._workers, self._node, self._number = workers, node, number
        self.status, self._over = -1, threading.Event()
        self._begin(spec, workers.inbox)

    def _order(self, **wanted: Any) -> None:
        """Have the node do something with it; of a node that is gone, its end is heard."""
        order = Order(child=self._number, **wanted).model_dump(mode="json", exclude_none=True)
        with suppress(RuntimeError):  # the thread has ended
            self._workers.loop.call_soon_threadsafe(self._node.orders.put_nowait, order)

    @property
    def log(self) -> Path | None:
        """Its file, on the shared file system."""
        return self._log

    @log.setter
    def log(self, path: Path | None) -> None:
        before, self._log = getattr(self, "_log", None), path
        if path != before:
            self._order(log=str(path.resolve()) if path else "")

    def send(self, message: Message) -> None:
        """Write one message."""
        self.progress_s = time.monotonic()
        first = isinstance(message, WorkerSpec)
        self._order(start=message) if first else self._order(line=message.line())

    def end(self, grace_s: float = GRACE_S) -> int:
        """As of one on this machine."""
        if not self._over.is_set():
            self._order(end_s=grace_s)
            self._over.wait(grace_s + END_S)
        self._forget()
        return self.status

    @property
    def silent(self) -> bool:
        """Whether its node is gone."""
        return self.lost

    heard = Child._heard

    def close(self, *, status: int = -1, lost: bool = False) -> None:
        """It has ended, or its node is `lost`."""
        if not self._over.is_set():
            self.status, self.lost = status, lost
            self.last_words = "its node is lost" if lost else self.last_words
            self._over.set()
            self._inbox.put((self, Closed()))


@dataclass(eq=False)
class RemoteNode:
    """A Dask worker that is there."""

    address: str
    label: str  # in messages
    threads: int
    place: int  # among nodes of this machine
    facts: Facts | None = None
    problem: VirnucError | None = None  # why it is not used
    devices: tuple[Device, ...] | None = None  # once it is used; none where others of its machine have them all
    children: dict[int, RemoteChild] = field(default_factory=dict)
    orders: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    heard_s: float = math.inf
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=CLOCKS))  # of clocks, delays included
    task: asyncio.Task[None] | None = None


def moved(line: str, by_s: float) -> Message:
    """A message of a node, with its moments by the clock of this machine."""
    name, body = line.split(" ", 1)
    found = json.loads(body, object_hook=lambda one: {k: v + by_s if k in MOMENTS else v for k, v in one.items()})
    return Message.of(f"{name} {json.dumps(found)}")


class ClusterWorkers(LocalWorkers):
    """Worker processes of a cluster's nodes. They and the connection are gone when the `with` block ends.

    Errors: `DeviceError` names the node that cannot be used; `ConfigError`.
    """

    def __init__(self, module: str, spec: ClusterSpec, given: tuple[Path, Devices, EngineSpec], out: Path) -> None:
        """`given`: models, devices, engine; `out`: the run's directory, which nodes must see."""
        super().__init__(module)
        self._spec, self._local, self.inbox = spec, str(spec.cluster).startswith("local:"), self._inbox
        self._models, self._wanted_devices, self._silence_s = given[0], given[1], min(SILENT_S, given[2].silence_s)
        self._place = next(folder.resolve() for folder in (out, *out.absolute().parents) if folder.is_dir())
        self._nodes: dict[str, RemoteNode] = {}
        self._kind, self._alike = "", ("", "")  # of devices; torch and name of the first, that others must be like
        self._joined = deque[Device]()
        self._waiting_shards, self._used_s, self._count = 0, time.monotonic(), 0
        self._samples: dict[str, DeviceSample] = {}
        self._error: VirnucError | None = None
        self._ready, self._over = threading.Event(), asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="virnuc-cluster", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
            self._raise()
        except BaseException:
            self.__exit__()
            raise
        self.devices = tuple(self.joined(0))

    # --- what a pool asks for -----------------------------------------------------------------------------------------

    def joined(self, waiting: int) -> Iterable[Device]:
        """Devices that have come since this was last asked; for so many shards there is none yet."""
        self._waiting_shards = waiting
        return [self._joined.popleft() for _ in range(len(self._joined))]

    def _make(self, spec: WorkerSpec) -> Child:
        self._count += 1
        nodes = [node for node in list(self._nodes.values()) if spec.device in (node.devices or ())]
        node = nodes[0] if nodes else RemoteNode("", "", 0, 0)
        child = node.children[self._count] = RemoteChild(spec, self, node, self._count)
        if self._nodes.get(node.address) is not node:
            child.close(lost=True)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """The next message; None when none comes in time. Errors: `DeviceError` when there is no node any more."""
        received = super().receive(timeout_s)
        if received is None:
            self._raise()
        return received

    def reader(self, device: str, time_s: float) -> DeviceSample:
        """What a node last measured of its device."""
        return replace(self._samples.get(device, DeviceSample(time_s, device)), time_s=time_s)

    def _problem(self, what: str) -> DeviceError:
        return DeviceError(f"cluster {self._spec.cluster}: {what}")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._work())
        except VirnucError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - whatever Dask raises, who waits must hear of it
            self._error = self._problem(f"{type(error).__name__}: {error}")
        finally:
            for node in self._nodes.values():
                self._lose(node)
            self._ready.set()

    async def _work(self) -> None:
        """Watch the nodes until the run is over."""
        async with connect(self._spec, self._wanted) as (client, fewest):
            try:
                while not self._over.is_set():
                    await self._watch(client, fewest)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), WATCH_S)
            finally:
                for node in self._nodes.values():
                    if node.task is not None:
                        node.task.cancel()

    def _wanted(self) -> int:
        """Nodes for which there is work: those that are there have theirs in hand."""
        used = [node for node in self._nodes.values() if node.devices]
        each = 2 * max((len(node.devices or ()) for node in used), default=1)
        return len(used) + math.ceil(self._waiting_shards / each)

    async def _watch(self, client: Any, fewest: int) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                there = (await client.scheduler.identity(n_workers=-1))["workers"]
        except (OSError, TimeoutError) as error:
            raise self._problem("its scheduler is gone; start it and run again, what was committed stays") from error
        now = time.monotonic()
        for address, node in list(self._nodes.items()):
            quiet = now - node.heard_s > self._silence_s
            if address not in there or quiet or (node.task is not None and node.task.done() and not node.problem):
                log.warning("node %s is lost%s", node.label, " (it does not answer)" if quiet else "")
                self._lose(self._nodes.pop(address))
        for address in there.keys() - self._nodes.keys():
            named = str(there[address]["name"])
            place = int(named.partition("-")[2]) if self._local else 0
            label = address if named == address else f"{named} ({address})"
            node = self._nodes[address] = RemoteNode(address, label, there[address]["nthreads"], place)
            node.task = asyncio.create_task(self._use(client, node))
        if any(node.devices for node in self._nodes.values()):
            self._used_s = now
        if not self._ready.is_set():
            self._settle(fewest, now)
        elif now - self._used_s > self._spec.node_wait_s:
            none = f"no node is left, and none has come for {self._spec.node_wait_s:.0f} s"
            raise self._problem(f"{none}; start nodes and run again, what was committed stays")

    def _settle(self, fewest: int, now: float) -> None:
        """Begin once enough nodes are there and all of them are known to be of use."""
        nodes = list(self._nodes.values())
        for node in nodes:
            if node.problem is not None:
                raise node.problem
        wait_s = min(self._spec.node_wait_s, ANSWER_S if self._local else math.inf)
        if len(nodes) < fewest and not self._kind:
            if now - self._used_s < wait_s:
                return
            if not nodes:
                raise self._problem(f"no node has come in {wait_s:.0f} s; start Dask workers, or use --node-wait-s")
            log.warning("%d of %d nodes have come in %.0f s; they begin", len(nodes), fewest, wait_s)
        if not self._kind and all(node.facts for node in nodes):
            gpus = any(node.facts.gpus for node in nodes if node.facts) and self._wanted_devices.kind != "cpu"
            self._kind = "cuda" if gpus else "cpu"
        if self._kind and all(node.devices is not None for node in nodes):
            self._ready.set()

    async def _use(self, client: Any, node: RemoteNode) -> None:
        """Start the actor on a node, see whether it is of use, and serve its worker processes as long as it lasts."""
        module = self.module

        def actor() -> object:  # within, and so sent by value: that a node has no virnuc is its own error
            from virnuc_core.engine.node import Node

            return Node(module)

        try:
            where = {"workers": [node.address], "allow_other_workers": False}
            future = client.submit(actor, actor=True, key=f"{PROBE}{secrets.token_hex(8)}", **where)
            async with asyncio.timeout(ANSWER_S):
                remote = await future
                facts = node.facts = Facts.model_validate_json(await remote.facts(str(self._wanted_devices)))
            while not self._kind:
                await asyncio.sleep(WATCH_S / 5)
            self._check(facts)
            await self._share(remote)
            if self._spec.models_local is not None:
                prints = json.dumps(await asyncio.to_thread(fingerprint, self._models), sort_keys=True)
                await remote.bring(str(self._models.resolve()), str(self._spec.models_local), prints)
        except Exception as error:  # noqa: BLE001 - whatever Dask raises of a node
            if not isinstance(error, (VirnucError, ImportError)) and self._ready.is_set():
                log.info("node %s: %r; it is tried again while it is there", node.label, error)
                return
            said = "does not answer" if isinstance(error, TimeoutError) else str(error) or repr(error)
            way_out = f"; install virnuc {virnuc_core.__version__} there" * isinstance(error, ImportError)
            node.problem = DeviceError(
                f"node {node.label}: {said}{way_out or '; mend it, or take it out of the cluster'}"
            )
            if self._ready.is_set():
                log.warning("%s; it is left out", node.problem)
            return
        self._admit(node, facts)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._tell(node, remote))
                both.create_task(self._hear(node, remote))
        except* OSError as errors:  # if it is still there, it is tried again
            log.info("node %s: %r", node.label, errors.exceptions[0])
        except* Exception as errors:  # noqa: BLE001 - whatever Dask raises
            node.problem = DeviceError(f"node {node.label}: {errors.exceptions[0]!r}")
            log.warning("%s; it is left out", node.problem)
            self._lose(node)

    def _check(self, facts: Facts) -> None:
        """Refuse a node that would not give the same bytes. Errors: `DeviceError`."""
        if facts.virnuc != virnuc_core.__version__:
            raise DeviceError(f"has virnuc {facts.virnuc}, here is {virnuc_core.__version__}")
        if self._kind == "cuda" and not facts.gpus:
            raise DeviceError("has no GPU; use --devices cpu")
        device = (facts.gpus if self._kind == "cuda" else facts.cores)[0]
        first = self._alike = self._alike if any(self._alike) else (facts.torch, device.name)
        if first != (facts.torch, device.name) and not self._spec.mixed_devices:
            told = f"has {device.name} and torch {facts.torch}, another {first[1]} and torch {first[0]}"
            raise DeviceError(f"{told}: results would not be bit-exact; use --mixed-devices")

    async def _share(self, remote: Any) -> None:
        """See to it that a node sees the run's directory and the models, and that what it writes is seen here."""
        probe, text = self._place / f"{PROBE}{secrets.token_hex(8)}", secrets.token_hex(16)
        models = self._models.resolve()
        head = hashlib.sha256((models / "head" / "config.json").read_bytes()).hexdigest()
        answer = None
        try:
            probe.write_text(text)
            answer = Path(await remote.look(str(probe), text, str(models), head))
            if not answer.is_file() or answer.read_text() != text:
                raise DeviceError(f"what it writes in {self._place} is not seen here: it is no shared file system")
        finally:
            probe.unlink(missing_ok=True)
            if answer is not None:
                answer.unlink(missing_ok=True)

    def _admit(self, node: RemoteNode, facts: Facts) -> None:
        """Give a node the devices of its machine that no other Dask worker there has."""
        wanted, cores = self._wanted_devices, facts.cores
        at, turn = (f"local-{node.place}", node.place % len(cores)) if self._local else (facts.host, 0)
        found = facts.gpus if self._kind == "cuda" else (*cores[turn:], *cores[:turn])
        most = len(wanted.ids) or (node.threads if self._kind == "cpu" else len(found))
        taken = {device.id for other in self._nodes.values() for device in other.devices or ()}
        named = [device.model_copy(update={"id": f"{device.local}@{at}"}) for device in found]
        node.devices = tuple([device for device in named if device.id not in taken][:most])
        node.heard_s = time.monotonic()
        self._joined.extend(node.devices)
        log.info("node %s: %s", node.label, ", ".join(device.id for device in node.devices) or "no device is left")

    def _lose(self, node: RemoteNode) -> None:
        """Its worker processes are of no use any more, whether they live or not."""
        node.devices = ()
        if node.task is not None:
            node.task.cancel()
        for child in list(node.children.values()):
            child.close(lost=True)

    async def _tell(self, node: RemoteNode, remote: Any) -> None:
        while True:
            orders = [await node.orders.get()]
            orders += [node.orders.get_nowait() for _ in range(node.orders.qsize())]
            await remote.tell(json.dumps(orders))

    async def _hear(self, node: RemoteNode, remote: Any) -> None:
        names = {device.local: device.id for device in node.devices or ()}
        while True:
            told = Told.model_validate_json(await remote.hear())
            node.heard_s = time.monotonic()
            node.offsets_s.append(node.heard_s - told.now_s)
            for number, line in told.said:
                node.children[number].heard(moved(line, min(node.offsets_s)))
            for number, still_s in told.still_s.items():
                child = node.children[number]
                child.progress_s = max(child.progress_s, node.heard_s - still_s)
            for number, (status, words) in told.ended.items():
                child = node.children.pop(number)
                child.last_words = words
                child.close(status=status)
            for sample in told.samples:
                self._samples[names[sample.device]] = replace(sample, device=names[sample.device])
