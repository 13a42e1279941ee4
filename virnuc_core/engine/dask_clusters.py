"""Connect to a Dask scheduler: to a running one, or to one that is started for the run.

A cluster is named by an address, by the YAML file of a batch system, or by `local:N` for N nodes on
this machine.
"""

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import dask
import psutil
from distributed import Client, Scheduler
from distributed.utils import get_ip

from virnuc_core.config import ClusterSpec, read_small_text, refuse_unreadable
from virnuc_core.engine.cluster_security import (
    configured_security,
    folder_for_jobs,
    is_exposed,
    private_folder,
    temporary_security,
    tls_options,
)
from virnuc_core.engine.devices import visible_gpus
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.rundir import parent_bound_command

SCHEDULER_S: Final = 10.0  # for an answer of a scheduler that runs
START_S: Final = 60.0  # for a scheduler of our own to start
LOOK_S: Final = 0.1
TRACKER_S: Final = 5.0  # for the processes that remove the semaphores of those that were killed
LOCALHOST: Final = "127.0.0.1"
ENCRYPTED: Final = "distributed.comm.require-encryption"
NO_HTTP: Final = "virnuc_core.engine.no_http"  # never imported here, for it changes Dask
# A scheduler or nanny of our own. The first argument says which, the rest are its options.
PROGRAM: Final = (
    'import importlib; importlib.import_module("distributed.cli.dask_" + sys.argv.pop(1)).main()'
)
log = logging.getLogger(__name__)


def _request_nothing(_n_nodes: int) -> None:
    """Request no nodes: they are started by others."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a Dask scheduler.

    Attributes:
        client: Dask's client.
        min_nodes: Nodes to wait for at first.
        request_nodes: Tells a batch system for how many nodes there is work.
    """

    client: Any
    min_nodes: int
    request_nodes: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a batch system may start."""

    minimum: int
    maximum: int

    @classmethod
    def parse(cls, text: str) -> "NodeRange":
        """Parse `4` or `2:8`."""
        minimum, _, maximum = text.partition(":")
        return cls(int(minimum), int(maximum or minimum))


@asynccontextmanager
async def connect(spec: ClusterSpec, shared: Path | None = None) -> AsyncIterator[Connection]:
    """Connect to the scheduler of a cluster, and start it if it is to be ours.

    Args:
        spec: Settings of the cluster.
        shared: A folder that nodes see, if there is one.

    Yields:
        The connection.

    Raises:
        DeviceError: No scheduler answers, or none can be started.
        ConfigError: The settings of the batch system cannot be used.
    """
    name = spec.cluster or ""
    nodes = NodeRange.parse(spec.nodes)
    min_nodes = nodes.minimum
    request_nodes: Callable[[int], object] = _request_nothing
    async with AsyncExitStack() as stack:
        location: dict[str, Any] = {"address": name}
        if name.startswith("local:"):
            min_nodes = int(name.removeprefix("local:"))
            location = await stack.enter_async_context(_local_cluster(min_nodes))
        elif "://" not in name:
            cluster = await stack.enter_async_context(_batch_system(Path(name), shared))
            location = {"address": cluster}

            def request_nodes(n_nodes: int) -> None:
                n_started = len(cluster.worker_spec)
                n_wanted = max(nodes.minimum, min(n_nodes, nodes.maximum))
                cluster.scale(jobs=max(n_wanted, n_started))  # none is stopped

        elif is_exposed(name):
            log.warning(
                "cluster %s: this connection has no TLS. Anyone who reaches that address can run "
                "code on its nodes, and read what is sent. Use tls:// with certificates, or a "
                "network that nobody else reaches.",
                name,
            )
        try:
            client = await stack.enter_async_context(
                Client(
                    **location,
                    asynchronous=True,
                    direct_to_workers=True,
                    set_as_default=False,
                    timeout=SCHEDULER_S,
                )
            )
        except (OSError, TimeoutError, TypeError, ValueError) as error:
            problem = f"no Dask scheduler answers there ({type(error).__name__}: {error})"
            way_out = "start one, or mend the address"
            raise DeviceError(f"cluster {name}: {problem}; {way_out}") from error
        stack.enter_context(client.as_current())  # by which actors find it
        yield Connection(client, min_nodes, request_nodes)


@asynccontextmanager
async def _batch_system(file: Path, shared: Path | None) -> AsyncIterator[Any]:
    """Start the scheduler of a batch system's cluster.

    Args:
        file: YAML file whose key `jobqueue` names the batch system, with Dask's settings.
        shared: A folder that nodes see, if there is one.

    Yields:
        The cluster of dask-jobqueue.

    Raises:
        ConfigError: The settings cannot be used.
        DeviceError: The batch system fails.
    """
    kinds = _batch_system_kinds(file)
    with refuse_unreadable(f"cluster {file}", "YAML"):
        read_small_text(file)
        (contents,) = dask.config.collect_yaml([str(file)])
    batch_systems = contents.get("jobqueue")
    if (
        not isinstance(batch_systems, dict)
        or len(batch_systems) != 1
        or not batch_systems.keys() <= kinds.keys()
    ):
        names = ", ".join(sorted(kinds))
        problem = f"its key jobqueue must hold one of {names}; see docs/cluster.md"
        raise ConfigError(f"cluster {file}: {problem}")
    (kind,) = batch_systems
    with dask.config.set(dask.config.merge(dask.config.config, contents)):
        settings = dask.config.get(f"jobqueue.{kind}")
        try:
            base = folder_for_jobs(settings.get("shared-temp-directory"), shared)
        except ConfigError as error:
            raise ConfigError(f"cluster {file}: {error}") from error
        is_local = kind == "local"  # jobs are processes of this machine
        if is_local:
            base = Path(tempfile.gettempdir())
            host = LOCALHOST
        else:
            host = get_ip()
        try:
            with private_folder(base) as folder:
                arguments = _batch_arguments(file, settings, folder, host)
                if is_local and not settings.get("local-directory"):
                    arguments["local_directory"] = str(folder)
                # The folder is also that of the scheduler, which is in this process.
                with dask.config.set({"temporary-directory": str(folder)}):
                    async with kinds[kind](asynchronous=True, **arguments) as cluster:
                        yield cluster
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            problem = " ".join(str(error).split())
            raise DeviceError(f"cluster {file}: {problem}; mend its settings") from error


def _batch_system_kinds(file: Path) -> dict[str, Any]:
    """Return the cluster classes of dask-jobqueue by the names of their batch systems.

    Raises:
        ConfigError: dask-jobqueue is not installed.
    """
    try:
        # A part of it takes Ctrl-C for itself, which fails outside of the main thread.
        with mock.patch("signal.signal"):
            import dask_jobqueue
            import dask_jobqueue.local  # jobs as processes of this machine
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster {file} needs {error.name}; install virnuc[cluster]") from error
    suffix = "Cluster"
    kinds = {}
    for module in (dask_jobqueue, dask_jobqueue.local):
        for name, member in vars(module).items():
            if name.endswith(suffix):
                kinds[name.removesuffix(suffix).lower()] = member
    del kinds["jobqueue"]  # what they have in common
    return kinds


class QuietScheduler(Scheduler):  # type: ignore[misc] # Dask has no types
    """A scheduler of this process that starts no HTTP server."""

    def start_http_server(self, *_: Any, **__: Any) -> None:
        """Open no socket."""


def _batch_arguments(
    file: Path, settings: dict[str, Any], folder: Path, host: str
) -> dict[str, Any]:
    """Return the arguments of a batch system's cluster.

    They say who may connect and where it listens, and that it opens no HTTP server.

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
    arguments["worker_extra_args"] = _worker_words(settings, folder)
    protocol = str(own_options.get("protocol") or "tls")
    if protocol.startswith("tls") and dask.config.get(ENCRYPTED, None) is not False:
        arguments["security"] = configured_security() or temporary_security(folder)
        arguments["protocol"] = "tls://"
        # Dask puts certificates of its settings that are not files there.
        arguments["shared_temp_directory"] = str(folder)
    else:
        log.warning(
            "cluster %s: its settings turn TLS off. "
            "Anyone who reaches it can run code on its nodes.",
            file,
        )
    return arguments


def _worker_words(settings: dict[str, Any], folder: Path) -> list[str]:
    """Return further words of the command that starts a Dask worker on a node.

    They have it listen on one address only, and start no HTTP server unless it is to have a
    dashboard. What they name is copied to the folder, which the nodes see.
    """
    words = list(settings.get("worker-extra-args") or settings.get("extra") or [])
    preloads = ["one_address.py"]
    if not any(str(word).startswith("--dashboard") for word in words):
        preloads.append("no_http.py")
    for name in preloads:
        copy = folder / name
        copy.write_text(Path(__file__).with_name(name).read_text())
        words += ["--preload", str(copy)]
    return words


@asynccontextmanager
async def _local_cluster(n_nodes: int) -> AsyncIterator[dict[str, Any]]:
    """Start a scheduler and Dask workers of one thread each on this machine.

    They are processes that end with this one. The GPUs are dealt out to them.

    Yields:
        What a client needs to connect.

    Raises:
        DeviceError: The scheduler does not start.
    """
    with private_folder(Path(tempfile.gettempdir())) as folder:
        security = configured_security()
        is_temporary = security is None
        if security is None:
            security = temporary_security(folder)
        scheduler_file = folder / "scheduler.json"
        log_file = folder / "log"
        commands = _local_commands(n_nodes, folder, scheduler_file)
        if is_temporary:
            for command in commands:
                command.words += tls_options(security, command.role)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                processes.append(_start(command, folder, log_file))
            await _wait_for_scheduler(processes[0], scheduler_file, log_file)
            yield {"scheduler_file": str(scheduler_file), "security": security}
        finally:
            _kill_sessions(processes)


@dataclass(slots=True)
class LocalCommand:
    """A command of Dask: a scheduler, or a worker."""

    role: str  # scheduler or worker
    words: list[str]  # options
    environment: dict[str, str]


def _local_commands(n_nodes: int, folder: Path, scheduler_file: Path) -> list[LocalCommand]:
    """Return the commands of a scheduler and of Dask workers on this machine."""
    common = ["--host", LOCALHOST, "--protocol", "tls", "--no-dashboard"]
    common += ["--scheduler-file", str(scheduler_file), "--preload", NO_HTTP]
    commands = [LocalCommand("scheduler", [*common, "--port", "0"], {})]
    gpus = visible_gpus()
    for number in range(n_nodes):
        words = [*common, "--name", f"local-{number}", "--nthreads", "1", "--memory-limit", "0"]
        words += ["--local-directory", str(folder)]
        environment = {}
        if gpus:
            own_gpus = gpus[number::n_nodes]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.id for gpu in own_gpus)
        commands.append(LocalCommand("worker", words, environment))
    return commands


def _start(command: LocalCommand, folder: Path, log_file: Path) -> subprocess.Popen[bytes]:
    """Start a command of Dask as a process that ends with this one, in a session of its own."""
    # Dask also imports from this folder.
    scratch = {"DASK_TEMPORARY_DIRECTORY": str(folder)}
    with log_file.open("a") as output:
        return subprocess.Popen(
            parent_bound_command(PROGRAM, command.role, *command.words),
            env={**os.environ, **scratch, **command.environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


async def _wait_for_scheduler(
    scheduler: subprocess.Popen[bytes], scheduler_file: Path, log_file: Path
) -> None:
    """Wait until a scheduler has written its file.

    Raises:
        DeviceError: It does not start. Names the last line that it wrote.
    """
    for _ in range(int(START_S / LOOK_S)):
        if scheduler_file.exists() or scheduler.poll() is not None:
            break
        await asyncio.sleep(LOOK_S)
    if not scheduler_file.exists():
        lines = log_file.read_text(errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else ""
        raise DeviceError(f"a scheduler of this machine's own does not start: {last_line}")


def _kill_sessions(leaders: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes with all that they started, but let Python remove their semaphores first.

    Python's resource trackers do that; they are killed last. A nanny's own Dask worker does not
    end with it where it is stopped, so each process is killed.
    """
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
