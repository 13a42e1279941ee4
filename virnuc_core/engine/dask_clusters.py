"""The Dask scheduler of a run: one that is there, one whose nodes a batch system starts, or one for trying it here."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import dask
from distributed import Client, Security
from distributed.utils import get_ip

from virnuc_core.config import ClusterSpec, reading, small_text
from virnuc_core.engine.devices import visible_gpus
from virnuc_core.errors import ConfigError, DeviceError

ANSWER_S: Final = 10.0  # a scheduler that is there
START_S: Final = 60.0  # of a scheduler here
LOOK_S: Final = 0.1
HERE: Final = "127.0.0.1"
ENCRYPTED: Final = "distributed.comm.require-encryption"
# a scheduler or nanny of our own, bound to this process. Arguments: its parent's number, which of them, its options
PROGRAM: Final = """
import sys
from virnuc_core.rundir import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
import importlib
importlib.import_module("distributed.cli.dask_" + sys.argv.pop(1)).main()
"""


@asynccontextmanager
async def connect(spec: ClusterSpec) -> AsyncIterator[tuple[Any, int, Callable[[int], object]]]:
    """A client of the scheduler of a cluster; how many nodes are to be there at first; and what is told, now and then,
    for how many there is work. Errors: `DeviceError`, `ConfigError`."""
    name, fewest, most = spec.cluster or "", *([int(n) for n in spec.nodes.split(":")] * 2)[:2]
    async with AsyncExitStack() as held:
        where: dict[str, Any] = {"address": name}
        ask: Callable[[int], object] = int  # nothing is done with it, but by a batch system
        if name.startswith("local:"):
            fewest = int(name.partition(":")[2])
            where = {"scheduler_file": str(await held.enter_async_context(_local(fewest)))}
        elif "://" not in name:
            cluster = where["address"] = await held.enter_async_context(_batch_system(Path(name)))
            ask = lambda wanted: cluster.scale(jobs=max(fewest, min(wanted, most), len(cluster.worker_spec)))  # noqa: E731
        told = {"asynchronous": True, "direct_to_workers": True, "set_as_default": False, "timeout": ANSWER_S}
        try:
            client = await held.enter_async_context(Client(**where, **told))
        except (OSError, TimeoutError, TypeError, ValueError) as error:
            problem = f"no Dask scheduler answers there ({type(error).__name__}: {error})"
            raise DeviceError(f"cluster {name}: {problem}; start one, or mend the address") from error
        held.enter_context(client.as_current())  # by which actors find it
        yield client, fewest, ask


@asynccontextmanager
async def _batch_system(file: Path) -> AsyncIterator[Any]:
    """The cluster of the batch system that the key `jobqueue` of a YAML file names, with all of Dask's settings in it.

    Errors: `ConfigError`; `DeviceError` of the batch system.
    """
    try:
        with mock.patch("signal.signal"):  # a part of it takes Ctrl-C for itself, and fails but in the main thread
            import dask_jobqueue
            import dask_jobqueue.local  # jobs as processes of this machine
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster {file} needs {error.name}; install virnuc[cluster]") from error
    with reading(f"cluster {file}", "YAML"):
        small_text(file)
        (found,) = dask.config.collect_yaml([str(file)])
    kinds, named = found.get("jobqueue"), {**vars(dask_jobqueue), **vars(dask_jobqueue.local)}
    known = {name[:-7].lower(): one for name, one in named.items() if name.endswith("Cluster")}
    del known["jobqueue"]  # what they have in common
    if not isinstance(kinds, dict) or len(kinds) != 1 or not kinds.keys() <= known.keys():
        problem = f"its key jobqueue must hold one of {', '.join(sorted(known))}; see docs/cluster.md"
        raise ConfigError(f"cluster {file}: {problem}")
    kind = next(iter(kinds))
    with dask.config.set(dask.config.merge(dask.config.config, found)):
        settings, encrypted = dask.config.get(f"jobqueue.{kind}"), dask.config.get(ENCRYPTED, False)
        options = {"dashboard": False, **(settings.get("scheduler-options") or {})}
        if not settings.get("interface") and not {"host", "interface"} & set(options):
            options["host"] = get_ip()  # and not every address of this machine
        security = {"security": Security(), "protocol": "tls://"} if encrypted else {}
        try:
            async with known[kind](asynchronous=True, scheduler_options=options, **security) as cluster:
                yield cluster
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise DeviceError(f"cluster {file}: {' '.join(str(error).split())}; mend its settings") from error


@asynccontextmanager
async def _local(nodes: int) -> AsyncIterator[Path]:
    """A scheduler and Dask workers of one thread each on this machine, as processes that end with this one; its GPUs
    are dealt out to them. The scheduler's file."""
    with tempfile.TemporaryDirectory(prefix="virnuc-cluster-") as folder:
        file, said = Path(folder) / "scheduler.json", Path(folder) / "log"
        common = ["--host", HERE, "--no-dashboard", "--scheduler-file", str(file)]
        commands, gpus = [(["scheduler", *common, "--port", "0"], dict[str, str]())], visible_gpus()
        for node in range(nodes):
            named = ["--name", f"local-{node}", "--nthreads", "1", "--memory-limit", "0", "--local-directory", folder]
            own = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus[node::nodes])} if gpus else {}
            commands.append((["worker", *common, *named], own))
        started = []
        try:
            for words, own in commands:
                program = [sys.executable, "-P", "-c", PROGRAM, str(os.getpid()), *words]
                with said.open("a") as log:
                    how: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
                    started.append(subprocess.Popen(program, env={**os.environ, **own}, **how))
            for _ in range(int(START_S / LOOK_S)):
                if file.exists() or started[0].poll() is not None:
                    break
                await asyncio.sleep(LOOK_S)
            if not file.exists():
                last = said.read_text(errors="replace").strip().splitlines()[-1:]
                raise DeviceError(f"a scheduler of this machine's own does not start: {' '.join(last)}")
            yield file
        finally:
            for process in started:
                with suppress(ProcessLookupError):  # a nanny's own is not ended by its death where it is stopped
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
