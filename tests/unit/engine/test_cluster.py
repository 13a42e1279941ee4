"""A run over nodes: a pool whose devices come and go, and real Dask workers on this machine, good ones and bad ones."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from virnuc_core.config import ClassifySpec, ClusterSpec, Devices, EngineSpec
from virnuc_core.engine.node import Node
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import Child, Closed, LocalWorkers, Message, Ready, WorkerSpec, worker_specs
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.errors import ConfigError, DeviceError, VirnucError
from virnuc_core.pipeline import workers_for
from virnuc_core.reads.stage import StageSummary
from virnuc_core.runfiles import Device
from virnuc_core.telemetry.tables import ShardDone

from .test_runs import SMALL, go, no_children, result_bytes

pytest.importorskip("distributed")
Staged = tuple[Path, StageSummary]
NODES = [Device(id=f"GPU-{i}@node{i}", kind="cuda", name="a card") for i in range(3)]


def done(task: ShardTask, device: str) -> Computed:
    times = {"started_s": 1.0, "finished_s": 2.0, "dnabert_s": 0.1, "esm2_s": 0.1, "head_s": 0.0, "commit_s": 0.0}
    return Computed(done=ShardDone(device, task.shard, 1, 1, 1, **times, batches=()))


class OneOf(Child):
    """A worker that computes what it is told, until its node is taken away."""

    def __init__(self, spec: WorkerSpec, inbox: queue.Queue[tuple[Child, Message] | None], last: int) -> None:
        self._begin(spec, inbox)
        self.left = last
        inbox.put((self, Ready(record={"pid": id(self), "ready_s": 0.0})))

    def send(self, message: Message) -> None:
        if isinstance(message, ShardTask) and not self.lost:
            self.left -= 1
            self.lost = self.left < 0
            self._inbox.put((self, Closed() if self.lost else done(message, self.device)))

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

    def joined(self, waiting: int) -> list[Device]:
        return [self.later.popleft()] if waiting < 30 and self.later else []


def test_a_lost_node_takes_its_device_along_and_one_that_comes_is_used(tmp_path: Path) -> None:
    workers, noted = Coming(), []
    told: dict[str, Any] = {"run": str(tmp_path), "store": "none", "reads": "none"}
    with Pool(worker_specs(tmp_path, NODES[:2], EngineSpec(precision="fp16")), workers) as pool:
        tasks = [ShardTask(**told, shard=i, lo=i, hi=i + 1) for i in range(40)]
        found = pool.compute(tasks, tmp_path, noted.append)
    assert sorted(one.shard for one in noted if isinstance(one, ShardDone)) == list(range(40))
    assert set(found.records) == {device.id for device in NODES}
    assert workers.began.count(NODES[0].id) == 1  # it never came back, and was not called for
    assert len(found.deaths) == 1


def test_moments_of_a_node_are_told_by_the_clock_here() -> None:
    from virnuc_core.engine.cluster import moved

    heard = moved(done(ShardTask(run="", store="", reads="", shard=1, lo=0, hi=1), "x").line(), 100.0)
    assert isinstance(heard, Computed)
    assert heard.done is not None
    assert (heard.done.started_s, heard.done.finished_s, heard.done.esm2_s) == (101.0, 102.0, 0.1)


@pytest.mark.parametrize(
    ("text", "word"), [("jobqueue: {slurmy: {}}", "slurm"), ("[", "not valid YAML"), ("x: 1", "jobqueue")]
)
def test_a_file_that_names_no_batch_system_is_refused(tmp_path: Path, text: str, word: str) -> None:
    from virnuc_core.engine.dask_clusters import connect

    (tmp_path / "c.yaml").write_text(text)

    async def begin() -> None:
        async with connect(ClusterSpec(cluster=str(tmp_path / "c.yaml"))):
            pass

    with pytest.raises(ConfigError, match=word):
        asyncio.run(begin())


def test_a_node_sees_only_what_is_shared(tmp_path: Path, tiny_models: Path) -> None:
    node, probe = Node("none"), tmp_path / "probe"
    with pytest.raises(DeviceError, match=r"cannot use .*probe: No such file"):
        node.look(str(probe), "text", str(tiny_models), "")
    probe.write_text("another")
    with pytest.raises(DeviceError, match="is another directory there"):
        node.look(str(probe), "text", str(tiny_models), "")
    probe.write_text("text")
    with pytest.raises(DeviceError, match="holds other models there"):
        node.look(str(probe), "text", str(tiny_models), "")


def test_models_are_copied_once_and_proven(tmp_path: Path, tiny_models: Path) -> None:
    import json

    from virnuc_core.encoders.checkpoint import fingerprint

    prints = json.dumps(fingerprint(tiny_models), sort_keys=True)
    for _ in range(2):
        Node("none").bring(str(tiny_models), str(tmp_path / "local"), prints)
    (copy,) = (tmp_path / "local").iterdir()
    weights = copy / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(VirnucError, match="remove it and run again"):
        Node("none").bring(str(tiny_models), str(tmp_path / "local"), prints)


# --- real ones --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_of_this_machine_give_the_bytes_of_one_core_though_one_is_killed(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path
) -> None:
    def dask_workers() -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        return [
            one for one in found if "spawn_main" in " ".join(one.cmdline()) and "dask" in str(one.parent().cmdline())
        ]

    with workers_for(
        tiny_models, Devices.parse("cpu"), SMALL, cluster=ClusterSpec(cluster="local:2"), out=tmp_path
    ) as pool:
        killed = dask_workers()[0]
        killed.kill()
        summary = go(tmp_path / "run", staged, tiny_models, Devices.parse("cpu"), pool=pool, cluster="local:2")
    assert result_bytes(tmp_path / "run") == result_bytes(reference)
    assert summary.shards_computed == summary.shards
    assert {worker["device"].partition("@")[2] for worker in summary.workers} <= {"local-0", "local-1"}
    assert list((tmp_path / "run" / "logs").glob("worker-cpu-core-*@local-*.log"))
    assert not [path for path in tmp_path.iterdir() if "probe" in path.name]
    assert no_children()


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
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        import json

        yield json.loads(file.read_text())["address"]
    finally:
        process.kill()
        process.wait()


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
    "cannot use .*: No such file": "",  # in a mount namespace of its own
}


@pytest.mark.slow
@pytest.mark.parametrize("why", BAD)
def test_a_node_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, tiny_models: Path, scheduler: str, why: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\n" + textwrap.dedent(BAD[why]))
    place, words = tmp_path / "place", [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--no-nanny"]
    place.mkdir()
    words += [
        "--host",
        "127.0.0.1",
        "--nthreads",
        "1",
        "--name",
        "bad-one",
        "--local-directory",
        str(tmp_path / "dask"),
    ]
    if not BAD[why]:
        if os.geteuid() or not shutil.which("unshare"):
            pytest.skip("another file system needs root")
        words = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(place), *words]
    own = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}", "PYTHONNOUSERSITE": ""}
    cluster = ClusterSpec(cluster=scheduler, node_wait_s=60)
    worker = subprocess.Popen(words, env=own, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(DeviceError, match=f"node bad-one .*({why})"):
            workers_for(tiny_models, Devices.parse("cpu"), SMALL, cluster=cluster, out=place / "run")
    finally:
        worker.kill()
        worker.wait()
    assert list(place.iterdir()) == []


def test_a_scheduler_that_is_not_there_is_said(
    tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virnuc_core.engine.dask_clusters.ANSWER_S", 0.3)
    with pytest.raises(DeviceError, match="no Dask scheduler answers there"):
        workers_for(
            tiny_models, Devices.parse("cpu"), SMALL, cluster=ClusterSpec(cluster="tcp://127.0.0.1:9"), out=tmp_path
        )
    assert ClassifySpec(models=tiny_models).cluster is None
