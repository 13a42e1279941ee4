"""The Dask scheduler of a run: one that is there, one whose nodes a batch system starts, or one for trying it here."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import dask
import psutil
from distributed import Client, Security
from distributed.deploy import Adaptive
from distributed.utils import get_ip

from virnuc_core.config import ClusterSpec, reading, small_text
from virnuc_core.engine.devices import visible_gpus
from virnuc_core.errors import ConfigError, DeviceError

ANSWER_S: Final = 10.0  # a scheduler that is there
START_S: Final = 60.0  # of a scheduler here
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
async def connect(spec: ClusterSpec, wanted: Callable[[], int]) -> AsyncIterator[tuple[Any, int]]:
    """A client of the scheduler of a cluster, and how many nodes are to be there at first.

    `wanted` says, now and then, how many nodes there is work for. Errors: `DeviceError`, `ConfigError`.
    """
    name, fewest, most = spec.cluster or "", *([int(n) for n in spec.nodes.split(":")] * 2)[:2]
    if name.startswith("local:"):
        with tempfile.TemporaryDirectory(prefix="virnuc-cluster-") as folder:
            async with _local(int(name.partition(":")[2]), Path(folder)) as file, _client(name, file) as client:
                yield client, int(name.partition(":")[2])
    elif "://" in name:
        async with _client(name, name) as client:
            yield client, fewest
    else:
        async with _batch_system(Path(name)) as cluster:
            limits = {"minimum_jobs": fewest, "maximum_jobs": max(fewest, most), "interval": "2s"}
            cluster.adapt(Adaptive=type("ByShards", (_ByShards,), {"wanted": staticmethod(wanted)}), **limits)
            async with _client(name, cluster) as client:
                yield client, fewest


@asynccontextmanager
async def _client(name: str, where: Any) -> AsyncIterator[Any]:
    how = {"scheduler_file": str(where)} if isinstance(where, Path) else {"address": where}
    told = {"asynchronous": True, "direct_to_workers": True, "set_as_default": False, "timeout": ANSWER_S}
    try:
        client = await Client(**how, **told)
    except (OSError, TimeoutError, TypeError, ValueError) as error:
        problem = f"no Dask scheduler answers there ({type(error).__name__}: {error}); start one, or mend the address"
        raise DeviceError(f"cluster {name}: {problem}") from error
    try:
        with client.as_current():  # by which actors find it
            yield client
    finally:
        await client.close()


class _ByShards(Adaptive):  # type: ignore[misc]  # Dask is not type-checked here
    """As many nodes as there is work for. Those that are there stay to the end of the run."""

    async def target(self) -> int:
        return max(len(self.plan), int(self.wanted()))

    async def workers_to_close(self, target: int) -> list[str]:
        return []


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
async def _local(nodes: int, folder: Path) -> AsyncIterator[Path]:
    """A scheduler and Dask workers of one thread each on this machine, as processes that end with this one; its GPUs
    are dealt out to them."""
    file, common = folder / "scheduler.json", ["--host", HERE, "--no-dashboard", "--scheduler-file"]
    commands, gpus = [(["scheduler", *common, str(file), "--port", "0"], dict(os.environ))], visible_gpus()
    for node in range(nodes):
        named = ["--name", f"local-{node}", "--nthreads", "1", "--memory-limit", "0", "--local-directory", str(folder)]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus[node::nodes])} if gpus else {}
        commands.append((["worker", *common, str(file), *named], {**os.environ, **own}))
    started = []
    with (folder / "log").open("w") as log:
        try:
            for words, own in commands:
                program = [sys.executable, "-P", "-c", PROGRAM, str(os.getpid()), *words]
                begun = asyncio.create_subprocess_exec(
                    *program, stdout=log, stderr=log, env=own, start_new_session=True
                )
                started.append(await begun)
            async with asyncio.timeout(START_S):
                while not file.exists():
                    if started[0].returncode is not None:
                        raise TimeoutError
                    await asyncio.sleep(0.1)
            yield file
        except TimeoutError as error:
            said = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
            raise DeviceError(f"a scheduler of this machine's own does not start: {' '.join(said)}") from error
        finally:
            for process in started:
                with suppress(psutil.Error):  # a nanny's own is not ended by its death where it is stopped
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
