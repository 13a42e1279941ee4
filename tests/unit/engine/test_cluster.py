"""A run over nodes: a pool whose devices come and go, and real Dask workers on this machine, good ones and bad ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

from tests.process_lookup import running_with
from tests.unit.tiny_calibration import write_calibration
from virnuc_core.config import ClassifySpec, ClusterSpec, Devices, EngineSpec, Precision
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.quantise import quantise
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve_engine
from virnuc_core.engine.node import Node
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import (
    Child,
    Closed,
    LocalWorkers,
    Message,
    Ready,
    WorkerSpec,
    worker_specs,
)
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.errors import ConfigError, DeviceError, VirnucError
from virnuc_core.pipeline import classify, prepare, workers_for
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import ShardDone

from .runs import SMALL, classify_store, no_workers_left, result_bytes

pytest.importorskip("distributed")
Staged = tuple[Path, StageSummary]
NODES = [Device(id=f"GPU-{i}@node{i}", kind="cuda", name="a card") for i in range(3)]


def done(task: ShardTask, device: str) -> Computed:
    times = {
        "started_s": 1.0,
        "finished_s": 2.0,
        "dna_s": 0.1,
        "protein_s": 0.1,
        "head_s": 0.0,
        "commit_s": 0.0,
    }
    return Computed(done=ShardDone(device, task.shard, 1, 1, 1, **times, batches=()))


class OneOf(Child):
    """A worker that computes what it is told, until its node is taken away."""

    def __init__(
        self, spec: WorkerSpec, inbox: queue.Queue[tuple[Child, Message] | None], last: int
    ) -> None:
        self._set_common_attributes(spec, inbox)
        self.left = last
        inbox.put((self, Ready(record={"pid": id(self), "ready_s": 0.0})))

    def send(self, message: Message) -> None:
        if isinstance(message, ShardTask) and not self.node_lost:
            self.left -= 1
            self.node_lost = self.left < 0
            self._inbox.put((self, Closed() if self.node_lost else done(message, self.device)))

    def end(self, grace_s: float = 0.0) -> int:
        self._forget()
        return -1


class Coming(LocalWorkers):
    """Two nodes at first, of which one goes after three shards; a third comes later."""

    def __init__(self) -> None:
        super().__init__("none")
        self.later = deque([NODES[2]])
        self.last = {NODES[0].id: 3, NODES[1].id: 1_000, NODES[2].id: 1_000}
        self.began: list[str] = []

    def _make(self, spec: WorkerSpec) -> Child:
        self.began.append(spec.device.id)
        return OneOf(spec, self._inbox, self.last[spec.device.id])

    def new_devices(self, n_waiting: int) -> list[Device]:
        return [self.later.popleft()] if n_waiting < 30 and self.later else []


class NotStarting(LocalWorkers):
    """Nodes on which no worker can be started."""

    def __init__(self) -> None:
        super().__init__("none")

    def _make(self, spec: WorkerSpec) -> Child:
        raise DeviceError(f"asked for a worker on {spec.device.id}")


def test_a_lost_node_takes_its_device_along_and_one_that_comes_is_used(tmp_path: Path) -> None:
    workers, progress = Coming(), []
    shard_message: dict[str, Any] = {
        "run": str(tmp_path),
        "store": "none",
        "reads_fingerprint": "none",
    }
    with Pool(worker_specs(tmp_path, NODES[:2], EngineSpec(precision="fp16")), workers) as pool:
        tasks = [ShardTask(**shard_message, shard=i, lo=i, hi=i + 1) for i in range(40)]
        committed = pool.compute(tasks, tmp_path, progress.append)
    assert sorted(message.shard for message in progress if isinstance(message, ShardDone)) == list(
        range(40)
    )
    assert set(committed.ready_records) == {device.id for device in NODES}
    assert workers.began.count(NODES[0].id) == 1  # it never came back, and was not called for
    assert len(committed.deaths) == 1


@pytest.fixture(scope="module")
def int8_models(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models with a calibration, so that they may run in int8."""
    models = tmp_path_factory.mktemp("int8") / "models"
    shutil.copytree(tiny_models, models)
    write_calibration(models)
    return models


def int8_nodes(*capabilities: tuple[int, int]) -> list[Device]:
    """Return one GPU per node, of these compute capabilities."""
    return [
        node.model_copy(update={"capability": capability})
        for node, capability in zip(NODES, capabilities, strict=False)
    ]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is built for x86_64")
@pytest.mark.parametrize(
    ("first", "later", "way_out"),
    [
        ([(9, 0)], [(8, 0)], "use nodes that have only H100 or H200 GPUs"),
        ([(9, 0), (9, 0)], [(9, 0), (10, 0)], "use nodes that have only H100 or H200 GPUs"),
        ([(8, 0)], [(9, 0)], "use --int8-kernels triton"),
        ([(9, 0), (8, 0)], [(9, 0)], "use --int8-kernels triton"),
    ],
)
def test_a_run_is_not_continued_by_nodes_that_round_int8_in_another_way(
    tmp_path: Path,
    int8_models: Path,
    staged: Staged,
    first: list[tuple[int, int]],
    later: list[tuple[int, int]],
    way_out: str,
) -> None:
    engine = EngineSpec(precision="int8")
    spec = ClassifySpec(models=int8_models, engine=engine, cluster="tcp://nowhere:1")
    run, (store, staging) = RunDir(tmp_path / "run"), staged
    cards = int8_nodes(*first)
    begun = prepare(run, store, spec, staging=staging, devices=tuple(cards))
    workers = Coming()
    other_cards = int8_nodes(*later)
    chosen = resolve_engine(engine, other_cards)  # what the nodes choose, before the run is read
    specs = worker_specs(int8_models, other_cards, chosen)
    with Pool(specs, workers) as pool, pytest.raises(ConfigError) as error_info:
        classify(run, staging, spec, pool=pool)
    message = str(error_info.value)
    assert f"{run.root} began with int8 kernels '{begun.engine.int8_kernels}'" in message
    assert way_out in message
    assert "\n" not in message
    assert workers.began == []  # no worker was started
    assert not list(run.root.glob("shards/*.h5"))


def test_a_run_is_continued_by_nodes_that_round_int8_in_its_way(
    tmp_path: Path, int8_models: Path, staged: Staged
) -> None:
    engine = EngineSpec(precision="int8", int8_kernels="triton")
    spec = ClassifySpec(models=int8_models, engine=engine, cluster="tcp://nowhere:1")
    run, (store, staging) = RunDir(tmp_path / "run"), staged
    prepare(run, store, spec, staging=staging, devices=tuple(int8_nodes((8, 0))))
    cards = int8_nodes((9, 0))
    specs = worker_specs(int8_models, cards, resolve_engine(engine, cards))
    # The nodes are accepted: a worker is started on one, which fails here.
    refusal = f"asked for a worker on {cards[0].id}"
    with Pool(specs, NotStarting()) as pool, pytest.raises(DeviceError, match=refusal):
        classify(run, staging, spec, pool=pool)


def test_times_of_a_node_are_moved_to_the_clock_of_this_machine() -> None:
    from virnuc_core.engine.remote_node import on_our_clock

    translated = on_our_clock(
        done(ShardTask(run="", store="", reads_fingerprint="", shard=1, lo=0, hi=1), "x").line(),
        100.0,
    )
    assert isinstance(translated, Computed)
    assert translated.done is not None
    assert (translated.done.started_s, translated.done.finished_s, translated.done.protein_s) == (
        101.0,
        102.0,
        0.1,
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [("jobqueue: {slurmy: {}}", "slurm"), ("[", "not valid YAML"), ("x: 1", "jobqueue")],
)
def test_a_file_that_names_no_batch_system_is_refused(tmp_path: Path, text: str, word: str) -> None:
    from virnuc_core.engine.dask_clusters import connect

    (tmp_path / "c.yaml").write_text(text)

    async def begin() -> None:
        async with connect(ClusterSpec(cluster=str(tmp_path / "c.yaml"))):
            pass

    with pytest.raises(ConfigError, match=word):
        asyncio.run(begin())


def test_a_node_refuses_chunks_that_are_not_what_was_sent(tmp_path: Path) -> None:
    node, digest = Node("none", str(tmp_path)), hashlib.sha256(b"some").hexdigest()
    with pytest.raises(OSError, match="does not arrive there as it was sent"):
        node.receive_chunk("a/file", b"soma", digest, first=True, last=True)
    for is_first, is_last in ((True, False), (True, False), (False, True)):
        with pytest.raises(DeviceError, match=r"cannot use .*a/file: No such file"):
            node.read_chunk("a/file", 0, 9)
        node.receive_chunk("a/file", b"some", digest, first=is_first, last=is_last)
    assert (node.read_chunk("a/file", 0, 5), node.read_chunk("a/file", 5, 5)) == (b"somes", b"ome")
    (tmp_path / "no-folder").touch()
    with pytest.raises(DeviceError, match="cannot use"):
        node.receive_chunk(
            str(tmp_path / "no-folder" / "file"), b"some", digest, first=True, last=True
        )
    node.delete("a")
    assert list(node.folder.iterdir()) == []


def test_models_are_installed_once_and_checked(tmp_path: Path, tiny_models: Path) -> None:
    prints, local = json.dumps(fingerprint(tiny_models), sort_keys=True), tmp_path / "local"
    assert not Node("none", str(tmp_path)).install_models("models", str(local), prints)
    for _ in range(2):
        assert Node("none", str(tmp_path)).install_models(str(tiny_models), str(local), prints)
    assert Node("none", str(tmp_path)).install_models(
        "models", str(local), prints
    )  # no need to send them
    (copy,) = local.iterdir()
    assert Node("none", str(tmp_path)).install_models("models", str(copy), prints)
    weights = copy / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(VirnucError, match="remove it and run again"):
        Node("none", str(tmp_path)).install_models(str(tiny_models), str(local), prints)


def test_a_copy_of_models_without_the_int8_calibration_is_not_used(
    tmp_path: Path, tiny_models: Path
) -> None:
    """A node that has the weights from a run in fp16, or from one before the models were calibrated anew."""
    from virnuc_core.engine.remote_node import RemoteNode

    models, local, int8 = tmp_path / "models", tmp_path / "local", "esm2/int8.safetensors"
    shutil.copytree(tiny_models, models)

    class Here:
        transfer = False

        async def _request_models(self, *what: str) -> bool:
            return Node("none", str(tmp_path)).install_models(*what)

    def bring(precision: Precision) -> None:
        asyncio.run(RemoteNode.install_models(cast(RemoteNode, Here()), models, local, precision))

    bring("fp16")
    for seed in (1, 2):
        reads = simulate(
            SimulateSpec(reads=400, seed=seed), tmp_path / f"reads{seed}.fasta"
        ).reads_file
        quantise(models, str(reads), torch.device("cpu"))
        bring("int8")
        (copy,) = (
            path
            for path in local.glob(f"*/{int8}")
            if path.read_bytes() == (models / int8).read_bytes()
        )
    copy.unlink()
    with pytest.raises(VirnucError, match="no such file; int8 needs it"):
        bring("int8")


def test_an_excerpt_has_the_sequences_and_names_of_a_shard(tmp_path: Path, staged: Staged) -> None:
    from virnuc_core.engine.remote_node import excerpt

    full_store, lo, hi = OrfStore.open(staged[0]), 17, 60
    (tmp_path / "orfs.h5").write_bytes(excerpt(full_store, lo, hi))
    part = OrfStore.open(tmp_path / "orfs.h5", check=False)
    assert (part.fingerprint, part.n_uniques) == (full_store.fingerprint, hi - lo)
    assert part.protein(0, hi - lo) == full_store.protein(lo, hi)
    assert part.dna(0, hi - lo) == full_store.dna(lo, hi)
    for unique in (0, 5, hi - lo - 1):
        row, expected_row = int(part.unique_row[unique]), int(full_store.unique_row[lo + unique])
        assert part.row_ids(row, row + 1) == full_store.row_ids(expected_row, expected_row + 1)


# --- real ones --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_local_nodes_give_the_same_bytes_as_one_core_even_if_one_is_killed(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    def dask_workers() -> list[psutil.Process]:
        descendants = psutil.Process().children(recursive=True)
        nanny_ids = {nanny.pid for nanny in running_with("dask", descendants)}
        spawned = running_with("spawn_main", descendants)
        return [process for process in spawned if process.ppid() in nanny_ids]

    spec = ClassifySpec(
        models=tiny_models, devices=Devices.parse("cpu"), engine=SMALL, cluster="local:2"
    )
    with workers_for(spec, tmp_path) as pool:
        killed_worker = dask_workers()[0]
        killed_worker.kill()
        summary = classify_store(
            tmp_path / "run",
            staged,
            tiny_models,
            Devices.parse("cpu"),
            pool=pool,
            cluster="local:2",
        )
    assert result_bytes(tmp_path / "run") == result_bytes(reference)
    assert summary.shards_computed == summary.shards
    assert list((tmp_path / "run" / "logs").glob("worker-cpu-core-*@local-*.log"))
    assert {worker["device"].partition("@")[2] for worker in summary.workers} <= {
        "local-0",
        "local-1",
    }
    assert not [path for path in tmp_path.iterdir() if "probe" in path.name]
    assert no_workers_left()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # dask-jobqueue leaves its subprocesses
def test_jobs_of_a_yaml_file_give_the_bytes_of_one_core(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text("jobqueue: {local: {cores: 1, processes: 1, memory: 1GB}}")
    cluster = {"cluster": str(file), "nodes": "2"}
    spec = ClassifySpec(models=tiny_models, devices=Devices.parse("cpu"), engine=SMALL, **cluster)
    with workers_for(spec, tmp_path) as pool:
        summary = classify_store(
            tmp_path / "run", staged, tiny_models, Devices.parse("cpu"), pool=pool, **cluster
        )
    assert result_bytes(tmp_path / "run") == result_bytes(reference)
    assert summary.shards_computed == summary.shards


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    words = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
    ]
    file = tmp_path / "scheduler.json"
    process = subprocess.Popen([*words, "--scheduler-file", str(file)], stderr=subprocess.DEVNULL)
    try:
        while (address := address_in(file)) is None:
            assert process.poll() is None
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def address_in(scheduler_file: Path) -> str | None:
    """Return the address of a scheduler, or None while it has not written its file to the end."""
    try:
        return str(json.loads(scheduler_file.read_text())["address"])
    except (FileNotFoundError, json.JSONDecodeError):
        return None


BAD = {
    "cannot import|No module named|install virnuc": """
        import importlib.abc
        class No(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.split(".")[0] == "virnuc_core":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, No())
    """,
    "has virnuc 0.0.9": "import virnuc_core; virnuc_core.__version__ = '0.0.9'",
    "cannot use .*: No such file.*; share it with this node, or use --transfer": "",  # in a mount namespace of its own
}


@contextmanager
def dask_worker(
    scheduler: str, name: str, folder: Path, hidden: Path | None = None, **env: str
) -> Iterator[Any]:
    """A Dask worker with its own disk in `folder`, before which nothing of what lies in `hidden` is seen."""
    words = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        scheduler,
        "--no-nanny",
        "--host",
        "127.0.0.1",
    ]
    words += ["--nthreads", "1", "--name", name, "--local-directory", str(folder)]
    if hidden is not None:
        if os.geteuid() or not shutil.which("unshare"):
            pytest.skip("another file system needs root")
        words = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs none "$0" && exec "$@"',
            str(hidden),
            *words,
        ]
    worker = subprocess.Popen(words, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.slow
@pytest.mark.parametrize("why", BAD)
def test_a_node_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, tiny_models: Path, scheduler: str, why: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\n" + textwrap.dedent(BAD[why]))
    (place := tmp_path / "place").mkdir()
    own = {"PYTHONPATH": f"{tmp_path / 'site'}", "PYTHONNOUSERSITE": ""}
    cpu = Devices.parse("cpu")
    spec = ClassifySpec(
        models=tiny_models, devices=cpu, engine=SMALL, cluster=scheduler, node_wait_s=60
    )
    with (
        dask_worker(scheduler, "bad-one", tmp_path / "dask", None if BAD[why] else place, **own),
        pytest.raises(DeviceError, match=f"node bad-one .*({why})"),
    ):
        workers_for(spec, place / "run")
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["damaged", "killed"])
def test_nodes_without_a_shared_file_system_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    staged: Staged,
    tiny_models: Path,
    reference: Path,
    scheduler: str,
    strike: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though what is on its way from a node is damaged, or the node dies."""
    requested, base, settings = (
        list[Path](),
        tmp_path_factory.getbasetemp(),
        {"PYTHONPROFILEIMPORTTIME": "1"},
    )  # on stderr

    def is_sealed(path: Path) -> bool:
        requested.append(path)
        if len(requested) == 2:
            path.write_bytes(path.read_bytes()[:-1] + b"!") if strike == "damaged" else nodes[
                0
            ].kill()
        return len(requested) != 2 and shards.is_sealed(path)

    monkeypatch.setattr("virnuc_core.engine.remote_node.is_sealed", is_sealed)
    monkeypatch.setattr("virnuc_core.engine.remote_node.CHUNK_BYTES", 10_000)
    run, cluster = tmp_path / "run", {"cluster": scheduler, "nodes": "2", "transfer": True}
    with ExitStack() as resources:
        nodes = [
            resources.enter_context(
                dask_worker(scheduler, f"n{i}", base / f"dask{i}", base, **settings)
            )
            for i in range(2)
        ]
        spec = ClassifySpec(
            models=tiny_models, devices=Devices.parse("cpu"), engine=SMALL, **cluster
        )
        with workers_for(spec, run) as pool:
            summary = classify_store(
                run, staged, tiny_models, Devices.parse("cpu"), pool=pool, **cluster
            )
    assert result_bytes(run) == result_bytes(reference)
    assert len(requested) > summary.shards_computed == summary.shards
    assert "import time" in next((run / "logs").glob("worker-cpu-core-*@*.log")).read_text()
    assert not list(run.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 1])
def test_a_node_stopped_during_the_transfer_of_models_is_not_waited_for(
    tmp_path: Path,
    staged: Staged,
    tiny_models: Path,
    reference: Path,
    scheduler: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other computes it all; where there is no other, the run ends, as where none has come."""
    from virnuc_core.engine.remote_node import RemoteNode

    bring = RemoteNode.install_models

    async def struck(node: RemoteNode, *models: Any) -> None:
        if node.name == "n0":
            nodes[0].send_signal(signal.SIGSTOP)
        await bring(node, *models)

    monkeypatch.setattr(RemoteNode, "install_models", struck)
    monkeypatch.setattr("virnuc_core.engine.remote_node.ANSWER_S", 3.0)
    run, cluster = tmp_path / "run", {"cluster": scheduler, "nodes": str(count), "transfer": True}
    spec = ClassifySpec(
        models=tiny_models, devices=Devices.parse("cpu"), engine=SMALL, node_wait_s=15, **cluster
    )
    with ExitStack() as resources:
        nodes = [
            resources.enter_context(dask_worker(scheduler, f"n{i}", tmp_path / f"dask{i}"))
            for i in range(count)
        ]
        if count == 1:
            resources.enter_context(
                pytest.raises(DeviceError, match="no node has answered in 15 s")
            )
        with workers_for(spec, run) as pool:
            summary = classify_store(
                run, staged, tiny_models, Devices.parse("cpu"), pool=pool, **cluster
            )
        assert result_bytes(run) == result_bytes(reference)
        assert {worker["device"].partition("@")[0] for worker in summary.workers} == {"cpu-core-0"}


def test_a_missing_scheduler_is_reported(
    tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virnuc_core.engine.dask_clusters.SCHEDULER_S", 0.3)
    with pytest.raises(DeviceError, match="no Dask scheduler answers there"):
        workers_for(ClassifySpec(models=tiny_models, cluster="tcp://127.0.0.1:9"), tmp_path)
    assert ClassifySpec(models=tiny_models).cluster is None
