"""Connect to a Dask scheduler that is running, or start one for the run.

The option `--cluster` is the address of a scheduler, a YAML file with the settings of a batch
system such as Slurm, or `local:N` for N nodes on this machine.
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
from virnuc_core.errors import ConfigError, DeviceError, missing_package_error
from virnuc_core.rundir import parent_bound_command

# Seconds to wait for the answer of a running scheduler.
SCHEDULER_S: Final = 10.0
# Seconds to wait until a scheduler that we start is ready.
START_S: Final = 60.0
# Seconds between two looks at something that we wait for.
LOOK_S: Final = 0.1
# Seconds in which Python's resource trackers may remove the semaphores of killed processes.
TRACKER_S: Final = 5.0
LOCALHOST: Final = "127.0.0.1"
# Dask's setting that requires encrypted connections.
ENCRYPTED: Final = "distributed.comm.require-encryption"
# Dask asks NVIDIA's library about the GPUs as well, for pages that we do not show. It ends with an
# error if the driver does not work, also if no GPU is used.
NO_GPU_MONITOR: Final = {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
# A module that only Dask's processes import, because the import changes Dask.
NO_HTTP: Final = "virnuc_core.engine.no_http"
# What Python runs in a scheduler or Dask worker that we start. The first argument is "scheduler" or
# "worker", the others are its options.
PROGRAM: Final = (
    'import importlib; importlib.import_module("distributed.cli.dask_" + sys.argv.pop(1)).main()'
)
log = logging.getLogger(__name__)


def _request_nothing(_n_nodes: int) -> None:
    """Do nothing. Used for clusters whose nodes somebody else starts."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a Dask scheduler.

    Attributes:
        client: Dask's client.
        min_nodes: Number of nodes to wait for before the run begins.
        request_nodes: Function that tells a batch system for how many nodes there is work.
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
        """Parse the option `--nodes`: `4` for exactly four nodes, `2:8` for two to eight."""
        minimum, _, maximum = text.partition(":")
        return cls(int(minimum), int(maximum or minimum))


@asynccontextmanager
async def connect(spec: ClusterSpec, shared: Path | None = None) -> AsyncIterator[Connection]:
    """Connect to the scheduler of a cluster, and start it unless the settings give an address.

    The setting `cluster` is one of three: `local:N` starts a scheduler and N nodes on this machine,
    an address such as "tls://host:8786" is that of a running scheduler, and anything else is a YAML
    file with the settings of a batch system. At the end of the `with` block the connection is
    closed, and what was started is ended.

    Args:
        spec: Settings of the cluster.
        shared: A folder that all nodes see, or None.

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
        # Arguments that tell Dask's client where the scheduler is.
        location: dict[str, Any] = {"address": name}
        if name.startswith("local:"):
            min_nodes = int(name.removeprefix("local:"))
            location = await stack.enter_async_context(_local_cluster(min_nodes))
        elif "://" not in name:
            cluster = await stack.enter_async_context(_batch_system(Path(name), shared))
            location = {"address": cluster}

            def request_nodes(n_nodes: int) -> None:
                """Have the batch system start as many nodes, within the limits of `--nodes`."""
                n_started = len(cluster.worker_spec)
                n_wanted = max(nodes.minimum, min(n_nodes, nodes.maximum))
                # Never fewer than were started, because Dask would stop nodes that compute.
                cluster.scale(jobs=max(n_wanted, n_started))

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
                    direct_to_workers=True,  # messages to nodes do not go through the scheduler
                    set_as_default=False,
                    timeout=SCHEDULER_S,
                )
            )
        except (OSError, TimeoutError, TypeError, ValueError) as error:
            problem = f"no Dask scheduler answers there ({type(error).__name__}: {error})"
            way_out = "start one, or mend the address"
            raise DeviceError(f"cluster {name}: {problem}; {way_out}") from error
        # Handles of actors use the current client to send their calls.
        stack.enter_context(client.as_current())
        yield Connection(client, min_nodes, request_nodes)


@asynccontextmanager
async def _batch_system(file: Path, shared: Path | None) -> AsyncIterator[Any]:
    """Start a Dask scheduler in this process whose nodes are jobs of a batch system.

    At the end of the `with` block the scheduler and its jobs are ended.

    Args:
        file: YAML file with settings of Dask. Its key `jobqueue` names the batch system.
        shared: A folder that all nodes see, or None.

    Yields:
        The cluster object of dask-jobqueue, which starts jobs.

    Raises:
        ConfigError: The settings cannot be used.
        DeviceError: The batch system fails.
    """
    # Read the file, and find out which batch system it names. The key `jobqueue` must hold exactly
    # one, such as "slurm".
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

    # Start the cluster while the settings of the file are in force.
    with dask.config.set(dask.config.merge(dask.config.config, contents)):
        settings = dask.config.get(f"jobqueue.{kind}")
        try:
            base = folder_for_jobs(settings.get("shared-temp-directory"), shared)
        except ConfigError as error:
            raise ConfigError(f"cluster {file}: {error}") from error
        is_local = kind == "local"  # its jobs are processes of this machine
        if is_local:
            # The folder need not be shared, and nobody else must reach the scheduler.
            base = Path(tempfile.gettempdir())
            host = LOCALHOST
        else:
            host = get_ip()
        try:
            with private_folder(base) as folder:
                arguments = _batch_arguments(file, settings, folder, host)
                if is_local and not settings.get("local-directory"):
                    arguments["local_directory"] = str(folder)
                # The scheduler runs in this process, and puts its temporary files there as well.
                with dask.config.set({"temporary-directory": str(folder)}):
                    async with kinds[kind](asynchronous=True, **arguments) as cluster:
                        yield cluster
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            problem = " ".join(str(error).split())  # in one line
            raise DeviceError(f"cluster {file}: {problem}; mend its settings") from error


def _batch_system_kinds(file: Path) -> dict[str, Any]:
    """Return the cluster classes of dask-jobqueue by the name of the batch system, like "slurm".

    Args:
        file: The user's YAML file, for messages.

    Raises:
        ConfigError: dask-jobqueue is not installed.
    """
    try:
        # A module of dask-jobqueue sets a handler for Ctrl-C when it is imported. That fails
        # outside the main thread, and the handler is not wanted.
        with mock.patch("signal.signal"):
            import dask_jobqueue
            import dask_jobqueue.local  # not imported by the package itself
    except ModuleNotFoundError as error:
        raise missing_package_error(error.name, "cluster", f"cluster {file}") from error
    suffix = "Cluster"
    kinds = {}
    for module in (dask_jobqueue, dask_jobqueue.local):
        for name, member in vars(module).items():
            if name.endswith(suffix):
                kinds[name.removesuffix(suffix).lower()] = member
    del kinds["jobqueue"]  # the base class of the others
    return kinds


class QuietScheduler(Scheduler):  # type: ignore[misc] # Dask has no types
    """A Dask scheduler in this process that starts no HTTP server."""

    def start_http_server(self, *_: Any, **__: Any) -> None:
        """Do nothing, where Dask's own method would open a socket."""


def _batch_arguments(
    file: Path, settings: dict[str, Any], folder: Path, host: str
) -> dict[str, Any]:
    """Return the arguments for the cluster object of a batch system.

    Without other settings of the user, the connections are encrypted with a new certificate, the
    scheduler listens on one address, and no HTTP server is started. Certificates and modules that
    the nodes need are written to `folder`.

    Args:
        file: The YAML file, for messages.
        settings: The file's settings for the batch system, with the defaults of dask-jobqueue.
        folder: A private folder that the nodes see.
        host: The address on which the scheduler listens if the settings name none.
    """
    user_options = settings.get("scheduler-options") or {}
    # The user's options take precedence. What they say decides about the dashboard:
    #   neither option below    no dashboard, and no HTTP server
    #   dashboard_address       a dashboard at this address
    #   dashboard: true         a dashboard at an address that Dask chooses
    options = {
        "dashboard": bool(user_options.get("dashboard_address")),
        "dashboard_address": None,
        **user_options,
    }
    # The user may name the address to listen on: as `interface` for nodes and scheduler, or as
    # `host` or `interface` of the scheduler alone. Otherwise Dask would listen on all addresses of
    # this machine, so it gets one.
    is_address_named = settings.get("interface") or {"host", "interface"} & set(options)
    if not is_address_named:
        options["host"] = host
    arguments: dict[str, Any] = {"scheduler_options": options}
    if not options["dashboard"] and not options["dashboard_address"]:
        arguments["scheduler_cls"] = QuietScheduler  # starts no HTTP server
    arguments["worker_extra_args"] = _worker_words(settings, folder)
    protocol = str(user_options.get("protocol") or "tls")
    # False is the user's wish for unencrypted connections. Without the setting, it is None.
    if protocol.startswith("tls") and dask.config.get(ENCRYPTED, None) is not False:
        arguments["security"] = configured_security() or temporary_security(folder)
        arguments["protocol"] = "tls://"
        # Certificates that the settings hold as text are written there by Dask.
        arguments["shared_temp_directory"] = str(folder)
    else:
        log.warning(
            "cluster %s: its settings turn TLS off. "
            "Anyone who reaches it can run code on its nodes.",
            file,
        )
    return arguments


def _worker_words(settings: dict[str, Any], folder: Path) -> list[str]:
    """Return additional words for the command that starts a Dask worker on a node.

    They are the user's own words, and options that make the Dask worker import modules of ours
    (`--preload`), so that it listens on one address only and starts no HTTP server. If the user's
    words ask for a dashboard, it does start one. The modules are copied to `folder`, because a node
    may have no virnuc.

    Args:
        settings: The user's settings for the batch system.
        folder: A folder that the nodes see.
    """
    # "extra" is the name that older versions of dask-jobqueue have for "worker-extra-args".
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
    """Start a scheduler and Dask workers on this machine, and kill them at the end of the block.

    They also end when this process ends. Each Dask worker has one thread and its share of the GPUs.

    Args:
        n_nodes: How many Dask workers to start.

    Yields:
        The arguments with which Dask's client connects to the scheduler.

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
            # Dask's programs find certificates of the user's settings by themselves.
            for command in commands:
                command.words += tls_options(security, command.role)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                processes.append(_start(command, folder, log_file))
            # The first command is that of the scheduler.
            await _wait_for_scheduler(processes[0], scheduler_file, log_file)
            yield {"scheduler_file": str(scheduler_file), "security": security}
        finally:
            _kill_sessions(processes)


@dataclass(slots=True)
class LocalCommand:
    """The command that starts a Dask scheduler or a Dask worker."""

    role: str  # "scheduler" or "worker"
    words: list[str]  # options of the command
    environment: dict[str, str]  # variables that are added to those of this process


def _local_commands(n_nodes: int, folder: Path, scheduler_file: Path) -> list[LocalCommand]:
    """Return the commands that start a scheduler and `n_nodes` Dask workers on this machine.

    Args:
        n_nodes: Number of Dask workers.
        folder: Folder for their temporary files.
        scheduler_file: File that the scheduler writes and the others read to find its address.
    """
    # Without a dashboard Dask still starts an HTTP server. The module `NO_HTTP` prevents that.
    common = ["--host", LOCALHOST, "--protocol", "tls", "--no-dashboard"]
    common += ["--scheduler-file", str(scheduler_file), "--preload", NO_HTTP]
    # Port 0 lets the system choose a free port.
    commands = [LocalCommand("scheduler", [*common, "--port", "0"], NO_GPU_MONITOR)]
    try:
        gpus = visible_gpus()
    except DeviceError:
        gpus = []  # cores need no driver, and a node that is to use GPUs reports this error itself
    for number in range(n_nodes):
        # With the memory limit 0, Dask does not restart a worker that uses much memory.
        words = [*common, "--name", f"local-{number}", "--nthreads", "1", "--memory-limit", "0"]
        words += ["--local-directory", str(folder)]
        environment = dict(NO_GPU_MONITOR)
        if gpus:
            # Every n-th GPU, beginning with this node's number.
            own_gpus = gpus[number::n_nodes]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.id for gpu in own_gpus)
        commands.append(LocalCommand("worker", words, environment))
    return commands


def _start(command: LocalCommand, folder: Path, log_file: Path) -> subprocess.Popen[bytes]:
    """Start a Dask scheduler or worker in a new session. It is killed when this process ends.

    In its own session it does not get the Ctrl-C of a terminal, and can be killed with all
    processes that it starts.

    Args:
        command: The command.
        folder: Folder for its temporary files.
        log_file: File to which its output is appended.
    """
    # Dask also imports Python files from its temporary folder, so it must be a private one.
    scratch = {"DASK_TEMPORARY_DIRECTORY": str(folder)}
    with log_file.open("ab") as output:
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
    """Wait until a scheduler that was started has written its file.

    Args:
        scheduler: The process of the scheduler.
        scheduler_file: The file, which holds the address.
        log_file: File with the output of the scheduler.

    Raises:
        DeviceError: It has not started in time, or has ended. The message holds the last line of
            its output.
    """
    for _ in range(int(START_S / LOOK_S)):
        if scheduler_file.exists() or scheduler.poll() is not None:
            break
        await asyncio.sleep(LOOK_S)
    if not scheduler_file.exists():
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else ""
        raise DeviceError(f"a scheduler of this machine's own does not start: {last_line}")


def _kill_sessions(leaders: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes and everything that they have started, and leave no semaphores behind.

    For each program, Python starts another process, its resource tracker. It waits for the end of
    the program's processes, and then removes the semaphores that they have left. So the trackers
    get some time before they are killed as well. All other processes of the sessions are killed one
    by one: a Dask worker that is stopped (SIGSTOP) does not notice that its parent has ended.

    Args:
        leaders: Processes that were started in new sessions.
    """
    for leader in leaders:
        # The leaders first, so that they cannot start new processes.
        leader.kill()
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
        # Trackers, and processes that were started while this function ran.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for leader in leaders:
        leader.wait()  # collects the exit status, so that no zombie stays


def _is_alive(process: psutil.Process) -> bool:
    """Return true if a process still runs. A zombie has ended, but its parent has not noticed."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
