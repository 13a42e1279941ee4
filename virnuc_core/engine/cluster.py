"""Start the worker processes of a pool on many machines, through Dask.

A node is a Dask worker, usually one for each machine. A thread (`Cluster`) watches which nodes have
joined. On each node, an actor (`node.Node`) starts the same worker processes as a run on one
machine, and their messages come back unchanged, so that the pool (`pool`) need not know about
machines. If a node dies or does not answer, its devices are lost to the pool. If the node comes
back, they are added again.
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
from virnuc_core.system_errors import is_folder
from virnuc_core.telemetry.tables import DeviceSample

# Seconds between two looks at the list of nodes.
WATCH_S: Final = 0.5
# A node answers every second. After this many seconds without an answer it counts as lost.
SILENT_S: Final = 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The properties in which two nodes must agree, so that they compute the same bytes."""

    name: str  # name of the GPU or the processor
    torch: str  # version of torch


class Cluster(AbstractContextManager["Cluster"]):
    """The connection to a Dask scheduler, and a thread that watches the nodes of the cluster.

    Use it in a `with` block; the connection is closed when the block ends.

    Attributes:
        spec: Settings of the cluster.
        loop: The event loop of the thread.
        samples: The last measurement of each device, by the device's id.
        waiting_shards: How many shards wait for a free device. The pool sets it.
        error: The error that has ended the thread, or None.
    """

    def __init__(
        self, spec: ClusterSpec, models: Path, devices: Devices, engine: EngineSpec, out: Path
    ) -> None:
        """Connect to the scheduler, and wait until nodes have joined and are checked.

        Args:
            spec: Settings of the cluster.
            models: Models directory.
            devices: Devices to use of each node.
            engine: Settings of the engine.
            out: The run directory, which need not exist yet. Nodes must see the folder in which it
                is, unless files are sent to them.

        Raises:
            DeviceError: A node cannot be used (the message names it), or no node has joined in
                time.
            ConfigError: The cluster's settings cannot be used.
        """
        self.spec = spec
        self._models = models
        self._wanted_devices = devices
        self._engine = engine
        self._is_local = str(spec.cluster).startswith("local:")
        # A node that has not answered for this long counts as lost.
        self._silence_s = min(SILENT_S, engine.silence_s)
        # A folder that nodes see, for the files of the cluster. None if they share no file system
        # with this machine.
        self._shared = None if spec.transfer else _first_folder(out.resolve().parents)
        # The folder in which each node must show that it shares the file system.
        self._probe_folder = _first_folder([out, *out.absolute().parents]).resolve()
        self._nodes: dict[str, RemoteNode] = {}  # by address
        # Addresses of nodes that did not answer. The run begins without them.
        self._unresponsive: set[str] = set()
        # Kind of the devices that are used; empty as long as it is not decided.
        self._kind: Literal["", "cuda", "cpu"] = ""
        # Why `auto` takes cores, a sentence for the record of the run. Empty if it does not.
        self.device_remark = ""
        # The model of the first node's devices. Other nodes must have the same.
        self._model: DeviceModel | None = None
        self._waiting_since_s = time.monotonic()  # for the first nodes
        self.waiting_shards = 0
        self.samples: dict[str, DeviceSample] = {}
        self.error: VirnucError | None = None
        self._ready = threading.Event()
        self._over = asyncio.Event()  # the run has ended, and the thread is to end
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="virnuc-cluster", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()  # until enough nodes are checked, or the thread has failed
            if self.error is not None:
                raise self.error
        except BaseException:
            # Nobody will call `__exit__` for an object that was not made.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """End the thread, and with it the connection. A second call does nothing."""
        with suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def used(self) -> list[RemoteNode]:
        """Return the nodes whose devices this run uses, sorted by name.

        A node without such devices is not checked yet, has a problem, or shares its machine with
        another node that uses all of them.
        """
        # A copy of the values, because the cluster's thread adds and removes nodes meanwhile.
        nodes = list(self._nodes.values())
        nodes_in_use = [node for node in nodes if node.devices]
        return sorted(nodes_in_use, key=str)

    def pool(
        self, devices: Collection[Device] | None = None, *, keep: bool = False, warm: bool = False
    ) -> Pool:
        """Return a pool of workers on the nodes.

        Args:
            devices: Devices of the pool. None means all devices, also those of nodes that join
                later. In this case the connection is closed when the pool ends.
            keep: Keep workers between jobs.
            warm: Let workers load the weights before there is a job. Otherwise workers are started
                when there is a shard to compute.

        Raises:
            DeviceError: A device is no longer there.
        """
        workers = ClusterWorkers(self, devices)
        # The first call returns all devices that are there. No shard waits yet.
        present = list(workers.new_devices(n_waiting=0))
        missing_devices = [device.id for device in devices or () if device not in present]
        if missing_devices:
            problem = f"{', '.join(missing_devices)} is gone"
            raise self.problem(f"{problem}; start nodes and run again, what was committed stays")
        engine = resolve_engine(self._engine, present)
        specs = worker_specs(self._models, present, engine)
        return Pool(specs, workers, keep=keep, warm=warm, device_remark=self.device_remark)

    def problem(self, problem: str) -> DeviceError:
        """Return an error (without raising it) that begins with the name of this cluster."""
        return DeviceError(f"cluster {self.spec.cluster}: {problem}")

    def _serve(self) -> None:
        """Run the event loop until the run is over. This is the function of the thread.

        An error is kept in `error`, where other threads find it. `_ready` is set in any case,
        because the thread that made this object waits for it.
        """
        try:
            # The loop was made before, so that other threads can send messages to it.
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._work())
        except VirnucError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - Dask may raise any error; others wait for it
            self.error = self.problem(f"{type(error).__name__}: {error}")
        finally:
            self._ready.set()

    async def _work(self) -> None:
        """Connect, then watch the nodes until the run is over.

        Every `WATCH_S` seconds, a batch system is told for how many nodes there is work. It may
        start more then. At the end, the workers of all nodes count as lost.
        """
        async with connect(self.spec, self._shared) as connection:
            try:
                while not self._over.is_set():
                    await self._watch(connection)
                    connection.request_nodes(self._count_useful_nodes())
                    # Wait for `WATCH_S`, or shorter if the run is over.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), WATCH_S)
            finally:
                for node in self._nodes.values():
                    node.lose()

    def _count_useful_nodes(self) -> int:
        """Return for how many nodes there is work.

        These are the nodes in use, and as many more as the waiting shards could occupy.
        """
        used = self.used
        # A new node is expected to have as many devices as the largest one that is there.
        devices_per_node = max((len(node.devices) for node in used), default=1)
        shards_per_node = TASKS_PER_WORKER * devices_per_node
        return len(used) + math.ceil(self.waiting_shards / shards_per_node)

    async def _watch(self, connection: Connection) -> None:
        """Compare the nodes that we know with the scheduler's list, once.

        A node that is gone, hangs or has ended is removed, and its workers count as lost. For each
        new node a task is started that checks and serves it. Until the run has begun, this also
        decides whether enough nodes are there.

        Raises:
            DeviceError: The scheduler does not answer, or a node cannot be used.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                # -1 asks for all Dask workers, and not only for the first few.
                identity = await connection.client.scheduler.identity(n_workers=-1)
        except (OSError, TimeoutError) as error:
            problem = "its scheduler is gone; start it and run again, what was committed stays"
            raise self.problem(problem) from error
        workers = identity["workers"]  # what the scheduler knows of each Dask worker, by address
        for address, node in list(self._nodes.items()):
            # A node with a problem is not used, so it need not answer.
            is_served = node.problem is None
            is_silent = is_served and time.monotonic() - node.last_answer_s > self._silence_s
            # The task that exchanges messages with it has ended because of an error that may pass.
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
        """Let the run begin if enough nodes have joined and all of them are checked.

        This is called again and again until the run begins, and does one of these steps:

        1. As long as too few nodes have said what devices they have, it does nothing.
        2. When enough have, it decides between GPUs and cores. The nodes are then checked by their
           own tasks, which wait for this decision.
        3. When all are checked, the event `_ready` is set, and the run begins.

        Args:
            min_nodes: Number of nodes to wait for. After `node_wait_s` the run begins with fewer.

        Raises:
            DeviceError: A node cannot be used, or none has joined in time.
        """
        nodes = [node for node in self._nodes.values() if node.address not in self._unresponsive]
        for node in nodes:
            if node.problem is not None:
                raise node.problem
        # `last_answer_s` is infinite until a node has been checked. A checked node may have no
        # device left for the run, so at least one node must be in use.
        if self.used and all(node.last_answer_s < math.inf for node in nodes):
            self._ready.set()
            return
        if self._kind and nodes:
            # The nodes are being checked. If they all disappear, the waiting time starts again.
            self._waiting_since_s = time.monotonic()
            return
        wait_s = self.spec.node_wait_s
        if self._is_local:
            # Nodes on this machine are started by this process, and wait in no queue. If they do
            # not come soon, they never will.
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
        """Return the kind of devices to use: GPUs if any node has one, or else cores.

        If the user asked for cores, these are used. If `auto` takes cores, a warning says why, and
        `device_remark` keeps it for the record of the run.
        """
        if self._wanted_devices.kind == "cpu":
            return "cpu"
        facts = [node.facts for node in nodes if node.facts]
        if any(node_facts.gpus for node_facts in facts):
            return "cuda"
        # Nodes usually lack GPUs for the same reason. Each reason is named once, with the first
        # machine that has it.
        machine_by_reason: dict[str, str] = {}
        for node_facts in facts:
            machine_by_reason.setdefault(node_facts.gpu_absence, node_facts.host)
        reasons = [f"{host}: {reason}" for reason, host in machine_by_reason.items()]
        self.device_remark = (
            "--devices auto takes CPU cores of the nodes, which are far slower than GPUs: "
            + "; ".join(reasons)
        )
        log.warning("%s", self.device_remark)
        return "cpu"

    async def _use(self, client: Any, node: RemoteNode) -> None:
        """Check a node, and then exchange messages with it until it is lost.

        This is the task of the node. Its errors are not raised: the node is left out or tried
        again, or they end the run.

        Args:
            client: Dask's client.
            node: The node.
        """
        try:
            await self._start_actor(client, node)
            await self._prepare(node)
            await node.serve(self.samples)
        except ExceptionGroup as group:
            # Raised by the task group in `serve`. The first error ended the other tasks.
            self._handle_failure(node, group.exceptions[0])
        except Exception as error:  # noqa: BLE001 - Dask may raise any error for a node
            self._handle_failure(node, error)

    async def _start_actor(self, client: Any, node: RemoteNode) -> None:
        """Start the actor on a node, and ask which devices and versions the node has.

        The actor is an object in the node's process, whose methods can be called from here. It is
        kept in `node.actor`, and its answer in `node.facts`.

        Args:
            client: Dask's client.
            node: The node.

        Raises:
            TimeoutError: The node does not answer.
            ImportError: virnuc is not installed there.
        """

        # Dask sends a nested function as a whole, and a function of a module only by its name. So
        # a node without virnuc fails inside the function, with an ImportError that can be reported.
        def make_actor() -> object:
            """Make the actor in the node's process. Its files go to that Dask worker's folder."""
            from distributed import get_worker

            from virnuc_core.engine.node import Node

            return Node(WORKER, get_worker().local_directory)

        future = client.submit(
            make_actor,
            actor=True,
            # Dask would return an earlier actor for a key that was used before.
            key=f"{PROBE}{secrets.token_hex(8)}",
            workers=[node.address],
            allow_other_workers=False,
        )
        async with asyncio.timeout(ANSWER_S):
            node.actor = await future
            facts = await node.actor.facts(str(self._wanted_devices))
            node.facts = Facts.model_validate_json(facts)

    async def _prepare(self, node: RemoteNode) -> None:
        """Check a node's devices and files, and decide which of its devices the run uses.

        It waits until it is decided whether the run uses GPUs or cores. With the option
        `--transfer` the models are sent to the node, which shares no file system with this machine.
        With `--models-local` they are copied to the node's own disk.

        Raises:
            DeviceError: The node cannot be used.
            WeightsError: It holds other models than this machine.
        """
        assert node.facts is not None
        while not self._kind:  # `_begin_if_complete` sets it
            await asyncio.sleep(WATCH_S / 5)
        devices = self._usable_devices(node.facts)
        models = self._models.resolve()
        if not self.spec.transfer:
            await self._require_shared_files(node, models)
        if self.spec.transfer or self.spec.models_local:
            await node.install_models(models, self.spec.models_local, self._engine.precision)
        self._admit(node, devices)

    async def _require_shared_files(self, node: RemoteNode, models: Path) -> None:
        """Check that the node sees the run directory and the models on a shared file system.

        Args:
            node: The node.
            models: Models directory.

        Raises:
            DeviceError: The node does not see them.
        """
        # If the check fails, `_handle_failure` adds this advice to the message.
        node.way_out = "share it with this node, or use --transfer"
        async with asyncio.timeout(ANSWER_S):
            await node.share(self._probe_folder, models)
        node.way_out = FIX_NODE

    def _handle_failure(self, node: RemoteNode, error: Exception) -> None:
        """Decide what an error of a node means: it is tried again, left out, or ends the run.

        An error that may pass, such as a broken connection, is only logged if the run can go on
        without the node. `_watch` then removes the node and adds it again. Any other error is kept
        in `node.problem`: the node is left out, and a run that has not begun stops with it.

        Args:
            node: The node.
            error: What its task has raised.
        """
        if isinstance(error, TimeoutError):
            # The run begins without this node.
            self._unresponsive.add(node.address)
        if node.devices:
            # The node was in use. An OSError comes from its connection.
            may_pass = isinstance(error, OSError)
        else:
            # The node was being checked. Our own errors and a missing virnuc stay until somebody
            # mends the node.
            may_pass = not isinstance(error, VirnucError | ImportError)
        run_goes_on = self._ready.is_set() or node.address in self._unresponsive
        if may_pass and run_goes_on:
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
        """Return the devices of a node that are of the kind that the run uses.

        The first node that is looked at decides the model of device for all others: the name of its
        GPU or processor, and its version of torch.

        Args:
            facts: What the node has reported about itself.

        Raises:
            DeviceError: The node has another version or another model of device, so that its
                results would differ, or it has no device of this kind.
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
        """Decide which devices of its machine a node uses, and set `node.devices`.

        If several nodes (Dask workers) run on one machine, each device is used by one of them. A
        node may get none. The run calls a device "ID@HOST", because the same GPU number or core
        exists on many machines.

        Args:
            node: The node, which has been checked.
            devices: The devices of its machine, of the kind that the run uses.
        """
        assert node.facts is not None
        host = node.facts.host
        max_devices = len(devices)
        if self._kind == "cpu":
            # As many cores as `--devices` asks for, or else as the Dask worker has threads.
            max_devices = len(self._wanted_devices.ids) or node.threads
        if self._is_local:
            # All nodes are on this machine, and each counts as a separate host. Node i takes cores
            # from core i onwards. Otherwise all nodes would take the same first cores.
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
        node.last_answer_s = time.monotonic()
        names = ", ".join(device.id for device in node.devices)
        log.info("%s: %s", node, names or "no device is left")


def _first_folder(paths: Iterable[Path]) -> Path:
    """Return the first path that is a folder. One of them must be, for example "/"."""
    return next(path for path in paths if is_folder(path))


class ClusterWorkers(LocalWorkers):
    """Starts worker processes on the nodes of a cluster, and receives their messages."""

    may_borrow = False

    def __init__(self, cluster: Cluster, devices: Collection[Device] | None) -> None:
        """Note which devices may be used. No worker is started.

        Args:
            cluster: The cluster.
            devices: Devices to use. None means all devices. In this case the connection is closed
                when the workers end.
        """
        super().__init__(WORKER)
        self._cluster = cluster
        self._devices = devices
        # When a node with one of these devices was last there, `time.monotonic()`.
        self._last_used_s = time.monotonic()
        # Nodes whose devices `new_devices` has returned.
        self._known: set[RemoteNode] = set()

    def _own_devices(self, node: RemoteNode) -> list[Device]:
        """Return the devices of a node that these workers may use."""
        if self._devices is None:  # all devices
            return list(node.devices)
        return [device for device in node.devices if device in self._devices]

    def new_devices(self, n_waiting: int) -> list[Device]:
        """Return the devices of nodes that have joined since the last call.

        The cluster learns by this call how many shards wait. It may ask a batch system for more
        nodes, if these workers may use devices that join later.

        Args:
            n_waiting: How many shards wait for a free device.
        """
        if self._devices is None:
            self._cluster.waiting_shards = n_waiting
        else:
            self._cluster.waiting_shards = 0  # other nodes would be of no use
        nodes = [node for node in self._cluster.used if node not in self._known]
        self._known.update(nodes)
        return [device for node in nodes for device in self._own_devices(node)]

    def _make(self, spec: WorkerSpec) -> Child:
        """Start a worker process on the node that has the device.

        If the node is lost, the worker is returned as one that has ended already.
        """
        child = RemoteChild(spec, self._inbox, self._cluster.loop)
        # One node at most, because the ids of devices are different on all nodes.
        nodes = [node for node in self._cluster.used if spec.device in node.devices]
        if nodes:
            # What is sent to the child goes into the queue of messages to its node.
            child.orders = nodes[0].orders
            nodes[0].children[child.number] = child
        # The node may have been lost between the first check and this one, in another thread.
        if not nodes or spec.device not in nodes[0].devices:
            child.close(node_lost=True)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """Wait for the next message of any worker.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            The worker and its message. None if no message comes in time.

        Raises:
            DeviceError: For `node_wait_s` there has been no node whose devices these workers may
                use.
            VirnucError: The connection to the scheduler has failed.
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
        """Return the last measurement of a device that came from its node, with the time `time_s`.

        Nothing is measured now: the nodes send measurements at regular times. Without any
        measurement so far the fields are empty.

        Args:
            device: Id of the device.
            time_s: The time now, `time.monotonic()`.
        """
        nothing_measured = DeviceSample(time_s, device)
        sample = self._cluster.samples.get(device, nothing_measured)
        return replace(sample, time_s=time_s)

    def __exit__(self, *_: object) -> None:
        """End the workers. If they could use all devices, close the connection as well."""
        super().__exit__()
        if self._devices is None:
            self._cluster.__exit__()
