"""Worker processes on many machines: those of a pool, started and heard through Dask.

What a pool does with them stays in `pool`. Here, a thread of its own watches which Dask workers
have joined. On each of them, an actor (`node.Node`) starts the same worker processes as on one
machine, and their messages come back unchanged. A node that dies, or does not answer, takes its
devices along. It brings them again when it comes back.
"""

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import virnuc_core
from virnuc_core.config import ClusterSpec, Devices, EngineSpec
from virnuc_core.engine.dask_clusters import Connection, connect
from virnuc_core.engine.devices import resolve_engine
from virnuc_core.engine.node import Facts
from virnuc_core.engine.pool import TASKS_PER_WORKER, Pool
from virnuc_core.engine.process import (
    WORKER,
    Child,
    LocalWorkers,
    Message,
    WorkerSpec,
    worker_specs,
)
from virnuc_core.engine.remote_node import ANSWER_S, FIX_NODE, PROBE, RemoteChild, RemoteNode
from virnuc_core.errors import DeviceError, VirnucError
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

WATCH_S: Final = 0.5
SILENT_S: Final = 30.0  # a node answers every second
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What decides whether two nodes give the same bytes."""

    name: str  # of the GPU or the processor
    torch: str


class Cluster(AbstractContextManager["Cluster"]):
    """The nodes of a Dask scheduler, and a thread that watches them.

    The connection is gone when the `with` block ends.

    Attributes:
        spec: Settings of the cluster.
        loop: The event loop of the thread.
        samples: By device, what was last measured of it.
        waiting_shards: Shards for which there is no device yet; set by the pool.
        error: Why the thread has ended, if it has.
    """

    def __init__(
        self, spec: ClusterSpec, models: Path, devices: Devices, engine: EngineSpec, out: Path
    ) -> None:
        """Connect, and wait for nodes.

        Args:
            spec: Settings of the cluster.
            models: Models directory.
            devices: Devices to use of each node.
            engine: Settings of the engine.
            out: The run directory, which nodes must see unless files are sent to them.

        Raises:
            DeviceError: A node cannot be used, and which; or none has come in time.
            ConfigError: The cluster's settings cannot be used.
        """
        self.spec = spec
        self._models = models
        self._wanted_devices = devices
        self._engine = engine
        self._is_local = str(spec.cluster).startswith("local:")
        self._silence_s = min(SILENT_S, engine.silence_s)
        # Where files for nodes can lie. None if they share no file system with us.
        self._shared = None if spec.transfer else _first_folder(out.resolve().parents)
        self._place = _first_folder([out, *out.absolute().parents]).resolve()
        self._nodes: dict[str, RemoteNode] = {}  # by address
        self._unresponsive: set[str] = set()  # addresses of nodes that are not waited for
        self._kind: Literal["", "cuda", "cpu"] = ""  # of the devices, once it is decided
        self._model: DeviceModel | None = None  # of the first node, which others must be like
        self._waiting_since_s = time.monotonic()
        self.waiting_shards = 0
        self.samples: dict[str, DeviceSample] = {}
        self.error: VirnucError | None = None
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="virnuc-cluster", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
            if self.error is not None:
                raise self.error
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def used(self) -> list[RemoteNode]:
        """Return the nodes that have devices for us, by name."""
        used = [node for node in list(self._nodes.values()) if node.devices]
        return sorted(used, key=str)

    def pool(
        self, devices: Collection[Device] | None = None, *, keep: bool = False, warm: bool = False
    ) -> Pool:
        """Return a pool of workers on the nodes.

        Args:
            devices: Devices of the pool. If None, all of them, also those of nodes that join
                later; the connection then ends with the pool.
            keep: Keep workers between jobs.
            warm: Let workers load the weights before there is a job.

        Raises:
            DeviceError: A device is gone.
        """
        workers = ClusterWorkers(self, devices)
        present = list(workers.new_devices(0))
        missing_devices = [device.id for device in devices or () if device not in present]
        if missing_devices:
            problem = f"{', '.join(missing_devices)} is gone"
            raise self.problem(f"{problem}; start nodes and run again, what was committed stays")
        engine = resolve_engine(self._engine, present[0].kind)
        specs = worker_specs(self._models, present, engine)
        return Pool(specs, workers, keep=keep, warm=warm)

    def problem(self, problem: str) -> DeviceError:
        """Return the error that names this cluster and what is wrong with it."""
        return DeviceError(f"cluster {self.spec.cluster}: {problem}")

    def _serve(self) -> None:
        """Run the thread: watch the nodes until the run is over."""
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._work())
        except VirnucError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever Dask raises, who waits must hear of it
            self.error = self.problem(f"{type(error).__name__}: {error}")
        finally:
            self._ready.set()

    async def _work(self) -> None:
        """Watch the nodes, and ask for as many as there is work, until the run is over."""
        async with connect(self.spec, self._shared) as connection:
            try:
                while not self._over.is_set():
                    await self._watch(connection)
                    connection.request_nodes(self._count_useful_nodes())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), WATCH_S)
            finally:
                for node in self._nodes.values():
                    node.lose()

    def _count_useful_nodes(self) -> int:
        """Return for how many nodes there is work: those in use, and more for waiting shards."""
        used = self.used
        n_devices = max((len(node.devices) for node in used), default=1)  # of a node
        tasks_per_node = TASKS_PER_WORKER * n_devices
        return len(used) + math.ceil(self.waiting_shards / tasks_per_node)

    async def _watch(self, connection: Connection) -> None:
        """Drop nodes that are gone, and take up those that have joined.

        Raises:
            DeviceError: The scheduler is gone, or a node cannot be used.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                identity = await connection.client.scheduler.identity(n_workers=-1)
        except (OSError, TimeoutError) as error:
            problem = "its scheduler is gone; start it and run again, what was committed stays"
            raise self.problem(problem) from error
        workers = identity["workers"]  # of Dask, by address
        for address, node in list(self._nodes.items()):
            is_served = node.problem is None  # else it need not answer
            is_silent = is_served and time.monotonic() - node.heard_s > self._silence_s
            has_ended = is_served and node.task.done()
            if address not in workers or is_silent or has_ended:
                cause = " (it does not answer)" if is_silent else ""
                log.warning("%s is lost%s", node, cause)
                self._nodes.pop(address).lose()
        for address in workers.keys() - self._nodes.keys():
            name = str(workers[address]["name"])
            node = RemoteNode(address, name, workers[address]["nthreads"], self.spec.transfer)
            self._nodes[address] = node
            node.task = asyncio.create_task(self._use(connection.client, node))
        if not self._ready.is_set():
            self._begin_if_complete(connection.min_nodes)

    def _begin_if_complete(self, min_nodes: int) -> None:
        """Begin once enough nodes have joined and all of them are known to be usable.

        First the kind of the devices is decided, when each node has said what it has. Then each
        node is checked. After that, the run is ready.

        Args:
            min_nodes: Nodes to wait for, as long as `node_wait_s`.

        Raises:
            DeviceError: A node cannot be used, or none has come in time.
        """
        nodes = [node for node in self._nodes.values() if node.address not in self._unresponsive]
        for node in nodes:
            if node.problem is not None:
                raise node.problem
        if self.used and all(node.heard_s < math.inf for node in nodes):
            self._ready.set()
            return
        if self._kind and nodes:  # they are being checked
            self._waiting_since_s = time.monotonic()
            return
        wait_s = self.spec.node_wait_s
        if self._is_local:
            wait_s = min(wait_s, ANSWER_S)
        waited_enough = time.monotonic() - self._waiting_since_s > wait_s
        if not nodes:
            if waited_enough:
                problem = f"no node has answered in {wait_s:.0f} s"
                raise self.problem(f"{problem}; start Dask workers, or use --node-wait-s")
            return
        has_enough = len(nodes) >= min_nodes
        if (has_enough or waited_enough) and all(node.facts for node in nodes):
            if not has_enough:
                text = "%d of %d nodes have come in %.0f s; they begin"
                log.warning(text, len(nodes), min_nodes, wait_s)
            self._kind = self._choose_kind(nodes)

    def _choose_kind(self, nodes: list[RemoteNode]) -> Literal["cuda", "cpu"]:
        """Return the kind of devices to use: GPUs if any node has one, unless cores are wanted."""
        if self._wanted_devices.kind == "cpu":
            return "cpu"
        has_gpu = any(node.facts.gpus for node in nodes if node.facts)
        return "cuda" if has_gpu else "cpu"

    async def _use(self, client: Any, node: RemoteNode) -> None:
        """Check a node, and serve its worker processes as long as it lasts."""
        try:
            await self._start_actor(client, node)
            await self._prepare(node)
            await node.serve(self.samples)
        except ExceptionGroup as group:  # of the tasks that serve it
            self._handle_failure(node, group.exceptions[0])
        except Exception as error:  # noqa: BLE001 - whatever Dask raises of a node
            self._handle_failure(node, error)

    async def _start_actor(self, client: Any, node: RemoteNode) -> None:
        """Start the actor on a node, and ask what the node is."""

        # Defined here so that Dask pickles it by value: a node without virnuc then fails with its
        # own ImportError.
        def make_actor() -> object:
            from distributed import get_worker

            from virnuc_core.engine.node import Node

            return Node(WORKER, get_worker().local_directory)

        future = client.submit(
            make_actor,
            actor=True,
            key=f"{PROBE}{secrets.token_hex(8)}",
            workers=[node.address],
            allow_other_workers=False,
        )
        async with asyncio.timeout(ANSWER_S):
            node.actor = await future
            facts = await node.actor.facts(str(self._wanted_devices))
            node.facts = Facts.model_validate_json(facts)

    async def _prepare(self, node: RemoteNode) -> None:
        """Check a node's devices and files, and give it devices, once their kind is decided.

        Files are sent to a node that shares no file system with us; the models may also be copied
        to its own disk.

        Raises:
            DeviceError: The node cannot be used.
            WeightsError: It holds other models than this machine.
        """
        assert node.facts is not None
        while not self._kind:
            await asyncio.sleep(WATCH_S / 5)
        devices = self._usable_devices(node.facts)
        models = self._models.resolve()
        if not self.spec.transfer:
            await self._require_shared_files(node, models)
        if self.spec.transfer or self.spec.models_local:
            await node.install_models(models, self.spec.models_local, self._engine.precision)
        self._admit(node, devices)

    async def _require_shared_files(self, node: RemoteNode, models: Path) -> None:
        """Check that the node sees the run directory and the models.

        Raises:
            DeviceError: It does not see them.
        """
        node.way_out = "share it with this node, or use --transfer"
        async with asyncio.timeout(ANSWER_S):
            await node.share(self._place, models)
        node.way_out = FIX_NODE

    def _handle_failure(self, node: RemoteNode, error: Exception) -> None:
        """Give up a node that failed, or leave it to be tried again."""
        if isinstance(error, TimeoutError):
            self._unresponsive.add(node.address)
        if node.devices:
            is_passing = isinstance(error, OSError)  # of its connection
        else:
            is_passing = not isinstance(error, VirnucError | ImportError)
        others_go_on = self._ready.is_set() or node.address in self._unresponsive
        if is_passing and others_go_on:
            log.warning("%s: %r; it is tried again while it is there", node, error)
            return
        way_out = node.way_out
        if isinstance(error, ImportError):
            way_out = f"install virnuc {virnuc_core.__version__} there"
        node.problem = DeviceError(f"{node}: {str(error) or repr(error)}; {way_out}")
        if self._ready.is_set():
            log.warning("%s; it is left out", node.problem)
        node.lose()

    def _usable_devices(self, facts: Facts) -> tuple[Device, ...]:
        """Return the devices of a node that are of the chosen kind.

        Raises:
            DeviceError: The node would not give the same bytes as the others, or has no such
                device.
        """
        if facts.virnuc != virnuc_core.__version__:
            raise DeviceError(f"has virnuc {facts.virnuc}, here is {virnuc_core.__version__}")
        devices = facts.gpus if self._kind == "cuda" else facts.cores
        if not devices:
            raise DeviceError("has no GPU; use --devices cpu")
        model = DeviceModel(devices[0].name, facts.torch)
        if self._model is None:
            self._model = model
        if model != self._model and not self.spec.mixed_devices:
            problem = f"has {model.name} and torch {model.torch}"
            other_model = f"another {self._model.name} and torch {self._model.torch}"
            effect = "results would not be bit-exact; use --mixed-devices"
            raise DeviceError(f"{problem}, {other_model}: {effect}")
        return devices

    def _admit(self, node: RemoteNode, devices: tuple[Device, ...]) -> None:
        """Give a node the devices of its machine that no other Dask worker there has.

        Args:
            node: The node, which has been checked.
            devices: The devices of its machine, of the chosen kind.
        """
        assert node.facts is not None
        host = node.facts.host
        max_devices = len(devices)
        if self._kind == "cpu":
            max_devices = len(self._wanted_devices.ids) or node.threads
        if self._is_local:
            # All nodes are on this machine, and each counts as a host of its own. Node i begins
            # with core i, so that not all nodes take the first cores.
            host = node.name
            if self._kind == "cpu":
                number = int(host.removeprefix("local-"))
                first_core = number % len(devices)
                devices = devices[first_core:] + devices[:first_core]
        taken_ids = {device.id for other in self.used for device in other.devices}
        free_devices = []
        for device in devices:
            device_id = f"{device.local}@{host}"
            if device_id not in taken_ids:
                free_devices.append(device.model_copy(update={"id": device_id}))
        node.devices = tuple(free_devices[:max_devices])
        node.heard_s = time.monotonic()
        names = ", ".join(device.id for device in node.devices)
        log.info("%s: %s", node, names or "no device is left")


def _first_folder(paths: Iterable[Path]) -> Path:
    """Return the first of some paths that is a folder."""
    return next(path for path in paths if path.is_dir())


class ClusterWorkers(LocalWorkers):
    """Worker processes on a cluster's nodes."""

    def __init__(self, cluster: Cluster, devices: Collection[Device] | None) -> None:
        """Choose the devices.

        Args:
            cluster: The cluster.
            devices: Devices to use. If None, all of them; the connection then ends with the
                workers.
        """
        super().__init__(WORKER)
        self._cluster = cluster
        self._devices = devices
        self._last_used_s = time.monotonic()  # when there was last a node with devices for us
        self._known: set[RemoteNode] = set()

    def _own_devices(self, node: RemoteNode) -> list[Device]:
        """Return the devices of a node that are for these workers."""
        if self._devices is None:
            return list(node.devices)
        return [device for device in node.devices if device in self._devices]

    def new_devices(self, n_waiting: int) -> list[Device]:
        """Return the devices that have joined since the last call.

        Args:
            n_waiting: Shards for which there is no device yet.
        """
        self._cluster.waiting_shards = n_waiting if self._devices is None else 0
        nodes = [node for node in self._cluster.used if node not in self._known]
        self._known.update(nodes)
        return [device for node in nodes for device in self._own_devices(node)]

    def _make(self, spec: WorkerSpec) -> Child:
        """Start a worker process on the node that has the device, or report it as lost."""
        child = RemoteChild(spec, self._inbox, self._cluster.loop)
        nodes = [node for node in self._cluster.used if spec.device in node.devices]
        if nodes:
            child.orders = nodes[0].orders
            nodes[0].children[child.number] = child
        if not nodes or spec.device not in nodes[0].devices:  # the node was lost meanwhile
            child.close(lost=True)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """Return the next message; None if none comes in time.

        Raises:
            DeviceError: There has been no node for too long.
            VirnucError: The connection has failed.
        """
        received = super().receive(timeout_s)
        if received is not None:
            return received
        if self._cluster.error is not None:
            raise self._cluster.error
        now_s = time.monotonic()
        wait_s = self._cluster.spec.node_wait_s
        if any(self._own_devices(node) for node in self._cluster.used):
            self._last_used_s = now_s
        elif now_s - self._last_used_s > wait_s:
            problem = f"no node is left, and none has come for {wait_s:.0f} s"
            way_out = "start nodes and run again, what was committed stays"
            raise self._cluster.problem(f"{problem}; {way_out}")
        return None

    def reader(self, device: str, time_s: float) -> DeviceSample:
        """Return what a node last measured of its device, as of `time_s`."""
        sample = self._cluster.samples.get(device, DeviceSample(time_s, device))
        return replace(sample, time_s=time_s)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._devices is None:
            self._cluster.__exit__()
