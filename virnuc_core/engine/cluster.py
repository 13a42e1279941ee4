"""Worker processes on many machines: those of a pool, started and heard through Dask.

What a pool does with them stays in `pool`. Here a thread of its own watches which Dask workers there are. On each, an
actor (`node.Node`) starts the same worker processes as on one machine, and what they say comes back in the same words.
A node that dies, or does not answer, takes its devices along, and brings them when it comes back."""

import asyncio
import logging
import math
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import dask
import psutil
from distributed import Client, Scheduler
from distributed.utils import get_ip

import virnuc_core
from virnuc_core.config import ClusterSpec, Devices, EngineSpec, read_small_text, refuse_unreadable
from virnuc_core.engine.cluster_security import (
    configured_security,
    folder_for_jobs,
    is_exposed,
    private_folder,
    temporary_security,
    tls_options,
)
from virnuc_core.engine.devices import resolve_engine, visible_gpus
from virnuc_core.engine.node import Facts
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import (
    WORKER,
    Child,
    LocalWorkers,
    Message,
    WorkerSpec,
    worker_specs,
)
from virnuc_core.engine.remote_node import ANSWER_S, PROBE, RemoteChild, RemoteNode
from virnuc_core.errors import ConfigError, DeviceError, VirnucError
from virnuc_core.rundir import parent_bound_command
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import DeviceSample

WATCH_S: Final = 0.5
SILENT_S: Final = 30.0  # a node answers every second
SCHEDULER_S: Final = 10.0  # for an answer of one that is there
START_S: Final = 60.0  # for one here
LOOK_S: Final = 0.1
TRACKER_S: Final = 5.0  # for the processes that remove the semaphores of those that were killed
HERE: Final = "127.0.0.1"
ENCRYPTED: Final = "distributed.comm.require-encryption"
NO_HTTP: Final = "virnuc_core.engine.no_http"  # never imported here, for it changes Dask
# a scheduler or nanny of our own; its words: which of them, and its options
PROGRAM: Final = (
    'import importlib; importlib.import_module("distributed.cli.dask_" + sys.argv.pop(1)).main()'
)
MEND: Final = "mend it, or take it out of the cluster"
log = logging.getLogger(__name__)


class Cluster(AbstractContextManager["Cluster"]):
    """The nodes of a Dask scheduler, and a thread that watches them; the connection is gone when the `with` block ends.
    Errors: `DeviceError` names the node that cannot be used; `ConfigError`."""

    def __init__(
        self, spec: ClusterSpec, given: tuple[Path, Devices, EngineSpec], out: Path
    ) -> None:
        """`given`: models, devices, engine; `out`: the run's directory, which nodes must see."""
        (self._models, self._wanted_devices, self._engine), self.spec = given, spec
        self._local, self._silence_s = (
            str(spec.cluster).startswith("local:"),
            min(SILENT_S, self._engine.silence_s),
        )
        # of the run directory's parents, which nodes see unless files are sent to them
        self._shared = (
            None if spec.transfer else next(path for path in out.resolve().parents if path.is_dir())
        )
        self._place = next(
            folder.resolve() for folder in (out, *out.absolute().parents) if folder.is_dir()
        )
        self._nodes, self._mute = (
            dict[str, RemoteNode](),
            set[str](),
        )  # nobody waits for those that did not answer
        self._kind, self._alike = (
            "",
            ("", ""),
        )  # of devices; name and torch of the first, that others must be like
        self.waiting_shards, self._began_s, self.samples = (
            0,
            time.monotonic(),
            dict[str, DeviceSample](),
        )
        self.error: VirnucError | None = None
        self._ready, self._over, self.loop = (
            threading.Event(),
            asyncio.Event(),
            asyncio.new_event_loop(),
        )
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
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def used(self) -> list[RemoteNode]:
        """The nodes that have devices for us, by name."""
        return sorted((node for node in list(self._nodes.values()) if node.devices), key=str)

    def pool(
        self, devices: Collection[Device] | None = None, *, keep: bool = False, warm: bool = False
    ) -> Pool:
        """A pool of all devices, those of nodes still to come too, which ends the connection; or of some `devices`."""
        workers = ClusterWorkers(self, devices)
        found = workers.joined(0)
        if gone := [one.id for one in devices or () if one not in found]:
            raise self.problem(
                f"{', '.join(gone)} is gone; start nodes and run again, what was committed stays"
            )
        engine = resolve_engine(self._engine, found[0].kind)
        return Pool(worker_specs(self._models, found, engine), workers, keep=keep, warm=warm)

    def problem(self, what: str) -> DeviceError:
        """The error that says what is wrong with it."""
        return DeviceError(f"cluster {self.spec.cluster}: {what}")

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._work())
        except Exception as error:  # noqa: BLE001 - whatever Dask raises, who waits must hear of it
            self.error = (
                error
                if isinstance(error, VirnucError)
                else self.problem(f"{type(error).__name__}: {error}")
            )
        finally:
            self._ready.set()

    async def _work(self) -> None:
        """Watch the nodes until the run is over."""
        async with connect(self.spec, self._shared) as (client, fewest, ask):
            try:
                while not self._over.is_set():
                    await self._watch(client, fewest)
                    each = 2 * max(
                        (len(node.devices) for node in self.used), default=1
                    )  # are in hand of a node
                    ask(len(self.used) + math.ceil(self.waiting_shards / each))
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), WATCH_S)
            finally:
                for node in self._nodes.values():
                    node.lose()

    async def _watch(self, client: Any, fewest: int) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                there = (await client.scheduler.identity(n_workers=-1))["workers"]
        except (OSError, TimeoutError) as error:
            raise self.problem(
                "its scheduler is gone; start it and run again, what was committed stays"
            ) from error
        for address, node in list(self._nodes.items()):
            quiet = not node.problem and time.monotonic() - node.heard_s > self._silence_s
            if address not in there or quiet or (node.task.done() and not node.problem):
                log.warning("%s is lost%s", node, " (it does not answer)" if quiet else "")
                self._nodes.pop(address).lose()
        for address in there.keys() - self._nodes.keys():
            node = RemoteNode(
                address, str(there[address]["name"]), there[address]["nthreads"], self.spec.transfer
            )
            self._nodes[address], node.task = node, asyncio.create_task(self._use(client, node))
        if not self._ready.is_set():
            self._settle(fewest)

    def _settle(self, fewest: int) -> None:
        """Begin once enough nodes are there and all of them are known to be of use."""
        nodes = [node for node in self._nodes.values() if node.address not in self._mute]
        waited_s = time.monotonic() - self._began_s
        for node in nodes:
            if node.problem is not None:
                raise node.problem
        wait_s = min(self.spec.node_wait_s, ANSWER_S if self._local else math.inf)
        if self.used and all(node.heard_s < math.inf for node in nodes):
            self._ready.set()
        elif self._kind and nodes:
            self._began_s = time.monotonic()  # from now on: since when there is none
        elif waited_s > wait_s and not nodes:
            raise self.problem(
                f"no node has answered in {wait_s:.0f} s; start Dask workers, or use --node-wait-s"
            )
        elif (len(nodes) >= fewest or waited_s > wait_s) and all(node.facts for node in nodes):
            if len(nodes) < fewest:
                log.warning(
                    "%d of %d nodes have come in %.0f s; they begin", len(nodes), fewest, wait_s
                )
            gpus = (
                any(node.facts.gpus for node in nodes if node.facts)
                and self._wanted_devices.kind != "cpu"
            )
            self._kind = "cuda" if gpus else "cpu"

    async def _use(self, client: Any, node: RemoteNode) -> None:
        """Start the actor on a node, see whether it is of use, and serve its worker processes as long as it lasts."""

        def actor() -> (
            object
        ):  # within, and so sent by value: that a node has no virnuc is its own error
            from distributed import get_worker

            from virnuc_core.engine.node import Node

            return Node(WORKER, get_worker().local_directory)

        mend = MEND
        try:
            where = {"workers": [node.address], "allow_other_workers": False}
            future = client.submit(actor, actor=True, key=f"{PROBE}{secrets.token_hex(8)}", **where)
            async with asyncio.timeout(ANSWER_S):
                node.actor = await future
                node.facts = Facts.model_validate_json(
                    await node.actor.facts(str(self._wanted_devices))
                )
            while not self._kind:
                await asyncio.sleep(WATCH_S / 5)
            devices, models = self._checked(node.facts), self._models.resolve()
            if not self.spec.transfer:
                mend = "share it with this node, or use --transfer"
                async with asyncio.timeout(ANSWER_S):
                    await node.share(self._place, models)
                mend = MEND
            if self.spec.transfer or self.spec.models_local:
                await node.install_models(models, self.spec.models_local, self._engine.precision)
            self._admit(node, devices)
            await node.serve(self.samples)
        except Exception as found:  # noqa: BLE001 - whatever Dask raises of a node
            error = found.exceptions[0] if isinstance(found, ExceptionGroup) else found
            passing = (
                isinstance(error, OSError)
                if node.devices
                else not isinstance(error, VirnucError | ImportError)
            )
            if isinstance(error, TimeoutError):
                self._mute.add(node.address)
            if passing and (self._ready.is_set() or node.address in self._mute):
                log.warning("%s: %r; it is tried again while it is there", node, error)
                return
            way_out = (
                f"install virnuc {virnuc_core.__version__} there"
                if isinstance(error, ImportError)
                else mend
            )
            node.problem = DeviceError(f"{node}: {str(error) or repr(error)}; {way_out}")
            if self._ready.is_set():
                log.warning("%s; it is left out", node.problem)
            node.lose()

    def _checked(self, facts: Facts) -> tuple[Device, ...]:
        """The devices of a node. Errors: `DeviceError` for one that would not give the same bytes."""
        if facts.virnuc != virnuc_core.__version__:
            raise DeviceError(f"has virnuc {facts.virnuc}, here is {virnuc_core.__version__}")
        if not (devices := facts.gpus if self._kind == "cuda" else facts.cores):
            raise DeviceError("has no GPU; use --devices cpu")
        own = devices[0].name, facts.torch
        self._alike = self._alike if any(self._alike) else own
        if own != self._alike and not self.spec.mixed_devices:
            told = "has {} and torch {}, another {} and torch {}".format(*own, *self._alike)
            raise DeviceError(f"{told}: results would not be bit-exact; use --mixed-devices")
        return devices

    def _admit(self, node: RemoteNode, found: tuple[Device, ...]) -> None:
        """Give a node the devices of its machine that no other Dask worker there has."""
        most, at = len(found), node.facts.host if node.facts else ""
        if self._kind == "cpu":
            most = len(self._wanted_devices.ids) or node.threads
        if self._local:
            at, turn = (
                node.name,
                int(node.name.partition("-")[2]) % len(found) if self._kind == "cpu" else 0,
            )
            found = (*found[turn:], *found[:turn])
        taken = {device.id for other in self.used for device in other.devices}
        named = [device.model_copy(update={"id": f"{device.local}@{at}"}) for device in found]
        node.devices = tuple([device for device in named if device.id not in taken][:most])
        node.heard_s = time.monotonic()
        log.info(
            "%s: %s", node, ", ".join(device.id for device in node.devices) or "no device is left"
        )


class ClusterWorkers(LocalWorkers):
    """Worker processes on a cluster's nodes: on some `devices`, or on all, and then the connection ends with them."""

    def __init__(self, cluster: Cluster, devices: Collection[Device] | None) -> None:
        super().__init__(WORKER)
        self._cluster, self._devices, self._used_s = cluster, devices, time.monotonic()
        self._known = set[RemoteNode]()

    def _of(self, node: RemoteNode) -> list[Device]:
        return [
            device for device in node.devices if self._devices is None or device in self._devices
        ]

    def joined(self, waiting: int) -> list[Device]:
        """Devices that have come since this was last asked; for so many shards there is none yet."""
        self._cluster.waiting_shards = waiting if self._devices is None else 0
        nodes = [node for node in self._cluster.used if node not in self._known]
        self._known.update(nodes)
        return [device for node in nodes for device in self._of(node)]

    def _make(self, spec: WorkerSpec) -> Child:
        child = RemoteChild(spec, self._inbox, self._cluster.loop)
        node = next((one for one in self._cluster.used if spec.device in one.devices), None)
        if node is not None:
            child.orders, node.children[child.number] = node.orders, child
        if node is None or spec.device not in node.devices:  # by now
            child.close(lost=True)
        return child

    def receive(self, timeout_s: float) -> tuple[Child, Message] | None:
        """The next message; None when none comes in time. Errors: `DeviceError` when there is no node any more."""
        if (received := super().receive(timeout_s)) is None:
            now, wait_s = time.monotonic(), self._cluster.spec.node_wait_s
            if self._cluster.error is not None:
                raise self._cluster.error
            if any(self._of(node) for node in self._cluster.used):
                self._used_s = now
            elif now - self._used_s > wait_s:
                none = f"no node is left, and none has come for {wait_s:.0f} s"
                raise self._cluster.problem(
                    f"{none}; start nodes and run again, what was committed stays"
                )
        return received

    def reader(self, device: str, time_s: float) -> DeviceSample:
        """What a node last measured of its device."""
        return replace(
            self._cluster.samples.get(device, DeviceSample(time_s, device)), time_s=time_s
        )

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._devices is None:
            self._cluster.__exit__()


@asynccontextmanager
async def connect(
    spec: ClusterSpec, shared: Path | None = None
) -> AsyncIterator[tuple[Any, int, Callable[[int], object]]]:
    """A client of the scheduler of a cluster; how many nodes are to be there at first; and what is told, now and then,
    for how many there is work. `shared`: a folder that nodes see. Errors: `DeviceError`, `ConfigError`."""
    name, fewest, most = spec.cluster or "", *([int(n) for n in spec.nodes.split(":")] * 2)[:2]
    async with AsyncExitStack() as held:
        where: dict[str, Any] = {"address": name}
        ask: Callable[[int], object] = int  # nothing is done with it, but by a batch system
        if name.startswith("local:"):
            fewest = int(name.partition(":")[2])
            where = await held.enter_async_context(_local(fewest))
        elif "://" not in name:
            cluster = await held.enter_async_context(_batch_system(Path(name), shared))
            where["address"] = cluster

            def ask(wanted: int) -> None:
                cluster.scale(jobs=max(fewest, min(wanted, most), len(cluster.worker_spec)))

        elif is_exposed(name):
            log.warning(
                "cluster %s: this connection has no TLS. Anyone who reaches that address can run code "
                "on its nodes, and read what is sent. Use tls:// with certificates, or a network that "
                "nobody else reaches.",
                name,
            )
        told = {
            "asynchronous": True,
            "direct_to_workers": True,
            "set_as_default": False,
            "timeout": SCHEDULER_S,
        }
        try:
            client = await held.enter_async_context(Client(**where, **told))
        except (OSError, TimeoutError, TypeError, ValueError) as error:
            problem = f"no Dask scheduler answers there ({type(error).__name__}: {error})"
            raise DeviceError(
                f"cluster {name}: {problem}; start one, or mend the address"
            ) from error
        held.enter_context(client.as_current())  # by which actors find it
        yield client, fewest, ask


@asynccontextmanager
async def _batch_system(file: Path, shared: Path | None) -> AsyncIterator[Any]:
    """The cluster of the batch system that the key `jobqueue` of a YAML file names, with all of Dask's settings in it.
    Errors: `ConfigError`; `DeviceError` of the batch system."""
    try:
        with mock.patch(
            "signal.signal"
        ):  # a part of it takes Ctrl-C for itself, and fails but in the main thread
            import dask_jobqueue
            import dask_jobqueue.local  # jobs as processes of this machine
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster {file} needs {error.name}; install virnuc[cluster]") from error
    with refuse_unreadable(f"cluster {file}", "YAML"):
        read_small_text(file)
        (found,) = dask.config.collect_yaml([str(file)])
    kinds, named = found.get("jobqueue"), {**vars(dask_jobqueue), **vars(dask_jobqueue.local)}
    known = {name[:-7].lower(): one for name, one in named.items() if name.endswith("Cluster")}
    del known["jobqueue"]  # what they have in common
    if not isinstance(kinds, dict) or len(kinds) != 1 or not kinds.keys() <= known.keys():
        problem = (
            f"its key jobqueue must hold one of {', '.join(sorted(known))}; see docs/cluster.md"
        )
        raise ConfigError(f"cluster {file}: {problem}")
    kind = next(iter(kinds))
    with dask.config.set(dask.config.merge(dask.config.config, found)):
        settings = dask.config.get(f"jobqueue.{kind}")
        here = kind == "local"  # jobs are processes of this machine
        try:
            base = folder_for_jobs(settings.get("shared-temp-directory"), shared)
        except ConfigError as error:
            raise ConfigError(f"cluster {file}: {error}") from error
        try:
            with private_folder(Path(tempfile.gettempdir()) if here else base) as folder:
                arguments = _batch_arguments(file, settings, folder, HERE if here else get_ip())
                if here and not settings.get("local-directory"):
                    arguments["local_directory"] = str(folder)
                with dask.config.set(
                    {"temporary-directory": str(folder)}
                ):  # of the scheduler, in this process
                    async with known[kind](asynchronous=True, **arguments) as cluster:
                        yield cluster
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise DeviceError(
                f"cluster {file}: {' '.join(str(error).split())}; mend its settings"
            ) from error


class QuietScheduler(Scheduler):  # type: ignore[misc] # Dask has no types
    """A scheduler of this process that starts no HTTP server."""

    def start_http_server(self, *_: Any, **__: Any) -> None:
        """Open no socket."""


def _batch_arguments(
    file: Path, settings: dict[str, Any], folder: Path, host: str
) -> dict[str, Any]:
    """Return the arguments of a batch system's cluster: who may connect, where it listens, and no HTTP server.

    Args:
        file: The YAML file, for messages.
        settings: What it says of the batch system, with the defaults of dask-jobqueue.
        folder: A private folder that the nodes see, for the files that they need.
        host: The address on which the scheduler listens if no other is named.
    """
    own_options = settings.get("scheduler-options") or {}
    options = {
        "dashboard": bool(own_options.get("dashboard_address")),
        "dashboard_address": None,
        **own_options,
    }
    if not settings.get("interface") and not {"host", "interface"} & set(options):
        options["host"] = host  # and not every address of this machine
    arguments: dict[str, Any] = {"scheduler_options": options}
    if not options["dashboard"] and not options["dashboard_address"]:
        arguments["scheduler_cls"] = QuietScheduler

    worker_words = settings.get("worker-extra-args") or settings.get("extra") or []
    preloads = ["one_address.py"]
    if not any(str(word).startswith("--dashboard") for word in worker_words):
        preloads.append("no_http.py")
    for name in preloads:
        copy = folder / name
        copy.write_text(Path(__file__).with_name(name).read_text())
        worker_words = [*worker_words, "--preload", str(copy)]
    arguments["worker_extra_args"] = worker_words

    protocol = str(own_options.get("protocol") or "tls")
    if protocol.startswith("tls") and dask.config.get(ENCRYPTED, None) is not False:
        security = configured_security() or temporary_security(folder)
        # Dask puts certificates of its settings that are not files there
        arguments |= {
            "security": security,
            "protocol": "tls://",
            "shared_temp_directory": str(folder),
        }
    else:
        log.warning(
            "cluster %s: its settings turn TLS off. Anyone who reaches it can run code on its nodes.",
            file,
        )
    return arguments


@asynccontextmanager
async def _local(nodes: int) -> AsyncIterator[dict[str, Any]]:
    """Start a scheduler and Dask workers of one thread each on this machine; its GPUs are dealt out to them.

    They are processes that end with this one. Yields what a client needs to connect."""
    with private_folder(Path(tempfile.gettempdir())) as folder:
        scheduler_tls, worker_tls = list[str](), list[str]()
        security = configured_security()
        if security is None:
            security = temporary_security(folder)
            scheduler_tls, worker_tls = (
                tls_options(security, "scheduler"),
                tls_options(security, "worker"),
            )
        file, said = folder / "scheduler.json", folder / "log"
        common = [
            "--host",
            HERE,
            "--protocol",
            "tls",
            "--no-dashboard",
            "--scheduler-file",
            str(file),
        ]
        common += ["--preload", NO_HTTP]
        commands, gpus = (
            [(["scheduler", *common, "--port", "0", *scheduler_tls], dict[str, str]())],
            visible_gpus(),
        )
        for node in range(nodes):
            named = ["--name", f"local-{node}", "--nthreads", "1", "--memory-limit", "0"]
            named += ["--local-directory", str(folder), *worker_tls]
            own = (
                {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus[node::nodes])}
                if gpus
                else {}
            )
            commands.append((["worker", *common, *named], own))
        started = []
        try:
            for words, own in commands:
                with said.open("a") as log:
                    how: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
                    scratch = {
                        "DASK_TEMPORARY_DIRECTORY": str(folder)
                    }  # which Dask also imports from
                    env = {**os.environ, **scratch, **own}
                    started.append(
                        subprocess.Popen(parent_bound_command(PROGRAM, *words), env=env, **how)
                    )
            for _ in range(int(START_S / LOOK_S)):
                if file.exists() or started[0].poll() is not None:
                    break
                await asyncio.sleep(LOOK_S)
            if not file.exists():
                last = said.read_text(errors="replace").strip().splitlines()[-1:]
                raise DeviceError(
                    f"a scheduler of this machine's own does not start: {' '.join(last)}"
                )
            yield {"scheduler_file": str(file), "security": security}
        finally:
            _kill_sessions(started)


def _kill_sessions(leaders: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes with all that they started, but let Python's resource trackers remove their semaphores.

    A nanny's own Dask worker does not end with it where it is stopped, so each is killed."""
    for leader in leaders:
        leader.kill()  # first, so that it starts no others
    groups = {leader.pid for leader in leaders}
    trackers = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) not in groups:
                continue
            if "resource_tracker" in " ".join(process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
    deadline_s = time.monotonic() + TRACKER_S
    while any(map(_is_alive, trackers)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S / 10)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):  # those started meanwhile
            os.killpg(group, signal.SIGKILL)
    for leader in leaders:
        leader.wait()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
