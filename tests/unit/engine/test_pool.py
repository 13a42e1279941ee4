"""A pool that serves several runs: they share its workers and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import (
    Alive,
    Child,
    Inbox,
    LocalWorkers,
    Message,
    WorkerSpec,
    end_all_children,
    worker_specs,
)
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import ConfigError, RunMismatchError, VirnucError, WorkerError
from virnuc_core.pipeline import prepare, workers_for
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, RunSummary

from .runs import (
    ALL_CORES,
    PAUSE_S,
    SMALL,
    classify_store,
    no_workers_left,
    result_bytes,
    running_workers,
)

Staged = tuple[Path, StageSummary]
DEVICES = Devices.parse(ALL_CORES)

# For pools whose workers are stand-ins
CORE = Device(id="cpu-core-0", kind="cpu", name="", core=0)
SPEC = WorkerSpec(models="", device=CORE, engine=EngineSpec())
TASK = ShardTask(run="run", store="", reads_fingerprint="", model_digests={}, shard=0, lo=0, hi=1)


@pytest.fixture
def other(tmp_path: Path) -> Staged:
    """Other reads, a few shards of them."""
    reads = simulate(SimulateSpec(reads=120, seed=8), tmp_path / "other.fastq").reads_file
    store = tmp_path / "other" / "orfs.h5"
    return store, stage(StageSpec(reads=(str(reads),), model_length=300), store)


@pytest.fixture
def kept(tiny_models: Path) -> Iterator[Pool]:
    with workers_for(
        ClassifySpec(models=tiny_models, devices=DEVICES, engine=SMALL), Path(), keep=True
    ) as pool:
        yield pool
    assert no_workers_left()
    assert "pool" not in [thread.name for thread in threading.enumerate()]


def pids(*summaries: RunSummary) -> set[int]:
    return {worker["pid"] for summary in summaries for worker in summary.workers}


@pytest.mark.usefixtures("forked_workers")
def test_simultaneous_runs_share_workers_and_give_the_bytes_of_single_runs(
    kept: Pool, tmp_path: Path, staged: Staged, other: Staged, tiny_models: Path, reference: Path
) -> None:
    roots = [tmp_path / name for name in ("first", "second", "alone")]
    with ThreadPoolExecutor() as threads:
        futures = [
            threads.submit(classify_store, root, future, tiny_models, DEVICES, pool=kept)
            for root, future in zip(roots, (staged, other), strict=False)
        ]
        summaries = [future.result() for future in futures]
    at_work = {child.pid for child in running_workers()}
    single_summary = classify_store(roots[2], other, tiny_models, DEVICES, pool=kept)
    assert result_bytes(roots[0]) == result_bytes(reference)
    assert result_bytes(roots[1]) == result_bytes(roots[2])
    assert {child.pid for child in running_workers()} == at_work
    assert len(at_work) == len(DEVICES.ids)
    assert pids(*summaries, single_summary) <= at_work
    assert single_summary.stages["Start-up: weights"] == single_summary.stages["Overlapped"] == 0, (
        "they were there before"
    )
    for summary in (*summaries, single_summary):
        assert (summary.restarts, summary.shards_computed) == (0, summary.shards)
        stage_seconds = {
            name: seconds for name, seconds in summary.stages.items() if seconds is not None
        }
        assert sum(stage_seconds.values()) - 2 * stage_seconds["Overlapped"] == pytest.approx(
            summary.total_s, rel=0.02, abs=PAUSE_S
        )


@pytest.mark.slow
def test_an_error_of_one_run_fails_no_other_and_dead_workers_are_replaced(
    kept: Pool, tmp_path: Path, staged: Staged, other: Staged, tiny_models: Path, reference: Path
) -> None:
    """A store that is gone when a worker opens it, between two good runs; then a kill while nothing is to be done."""

    first_summary = classify_store(tmp_path / "first", other, tiny_models, DEVICES, pool=kept)
    with ThreadPoolExecutor() as threads:
        good = threads.submit(
            classify_store, tmp_path / "good", staged, tiny_models, DEVICES, pool=kept
        )
        bad = threads.submit(go_without_a_plan, tmp_path / "bad", other, tiny_models, kept)
        with pytest.raises(ConfigError, match="no longer the store"):
            bad.result()
        good.result()
    assert result_bytes(tmp_path / "good") == result_bytes(reference)
    for child in running_workers():
        child.kill()
        child.wait(60)
    second_summary = classify_store(tmp_path / "again", other, tiny_models, DEVICES, pool=kept)
    assert result_bytes(tmp_path / "again") == result_bytes(tmp_path / "first")
    assert second_summary.restarts == first_summary.restarts == 0, "nothing was lost by it"
    assert pids(first_summary).isdisjoint(pids(second_summary))


def go_without_a_plan(root: Path, staged: Staged, models: Path, pool: Pool) -> None:
    """Compute as `classify_store` does, from a store that was replaced after the plan was made."""
    job = prepare(
        RunDir(root), staged[0], ClassifySpec(models=models, devices=DEVICES, engine=SMALL)
    )
    tasks = [
        task.model_copy(update={"reads_fingerprint": "of others"}) for task in job.tasks(job.todo)
    ]
    pool.compute(tasks, root / "logs", lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")  # one that imports torch sends no heartbeat meanwhile
def test_an_idle_worker_that_is_stopped_is_replaced(
    tmp_path: Path, other: Staged, tiny_models: Path
) -> None:
    engine = SMALL.model_copy(update={"heartbeat_s": 0.1, "silence_s": 4.0})
    spec = ClassifySpec(models=tiny_models, devices=Devices.parse("cpu:1"), engine=engine)
    with workers_for(spec, tmp_path, keep=True) as pool:
        first_summary = classify_store(
            tmp_path / "first", other, tiny_models, Devices.parse("cpu:1"), engine=engine, pool=pool
        )
        (pid,) = pids(first_summary)
        os.kill(pid, signal.SIGSTOP)
        psutil.Process(pid).wait(60)
        assert (
            classify_store(
                tmp_path / "next",
                other,
                tiny_models,
                Devices.parse("cpu:1"),
                engine=engine,
                pool=pool,
            ).restarts
            == 0
        )


@pytest.mark.slow
def test_changed_models_are_reloaded_and_never_mixed(
    tmp_path: Path, other: Staged, tiny_models: Path
) -> None:
    """A new head between two runs, and one that comes when a run has begun."""
    models, one_core, heads = tmp_path / "models", Devices.parse("cpu:1"), tmp_path / "heads"
    shutil.copytree(tiny_models, models)
    init_random(heads, "tiny", "tiny", model_length=300, seed=4)

    def exchange() -> None:
        for source, target in (
            (models / "head", heads / "aside"),
            (heads / "head", models / "head"),
        ):
            source.rename(target)
        (heads / "aside").rename(heads / "head")

    spec = ClassifySpec(models=models, devices=one_core, engine=SMALL)
    with workers_for(spec, Path(), keep=True) as pool:
        first_summary = classify_store(tmp_path / "first", other, models, one_core, pool=pool)
        exchange()
        second = classify_store(tmp_path / "second", other, models, one_core, pool=pool)
        exchange()
        job = prepare(RunDir(tmp_path / "third"), other[0], spec)
        exchange()
        with pytest.raises(
            RunMismatchError, match="models: head is no longer what the run began with; put it back"
        ):
            pool.compute(job.tasks(job.todo), tmp_path / "logs", lambda _: None)
    classify_store(tmp_path / "alone", other, models, one_core)
    assert (
        result_bytes(tmp_path / "second")
        == result_bytes(tmp_path / "alone")
        != result_bytes(tmp_path / "first")
    )
    assert (first_summary.restarts, second.restarts) == (0, 1), (
        "only who has other models is replaced"
    )
    assert not list(RunDir(tmp_path / "third").shards.glob("*.h5"))


def test_a_pool_that_is_interrupted_or_closed_computes_nothing(
    tmp_path: Path, tiny_models: Path
) -> None:
    from virnuc_core.engine.devices import resolve
    from virnuc_core.engine.shards import ShardTask

    tasks = [ShardTask(run="run", store="", reads_fingerprint="", shard=0, lo=0, hi=1)]
    specs = worker_specs(tiny_models, resolve(Devices.parse("cpu:1")), EngineSpec(precision="fp32"))
    with Pool(specs, LocalWorkers("virnuc_core.engine.worker"), keep=True) as pool:
        end_all_children()
        with pytest.raises(WorkerError, match="interrupted"):
            pool.compute(tasks, tmp_path, lambda _: None)
    with pytest.raises(Exception, match="interrupted"):
        pool.compute(tasks, tmp_path, lambda _: None)


def test_nobody_waits_for_a_pool_whose_workers_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the run directory is gone: the pool's thread fails twice, and the job still ends."""

    def fail(*_: object) -> None:
        raise OSError("the directory is gone")

    pool = Pool([SPEC], LocalWorkers("none"))
    monkeypatch.setattr(pool, "_start_workers", fail)
    monkeypatch.setattr(pool, "_end_workers", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of the pool's thread
    with ThreadPoolExecutor(1) as threads, pool:
        computing = threads.submit(pool.compute, [TASK], tmp_path, lambda _: None)
        assert isinstance(computing.exception(timeout=30), OSError)
        with pytest.raises(VirnucError, match="interrupted"):
            pool.compute([TASK], tmp_path, lambda _: None)


class _DeafWorker(Child):
    """A worker without a process that takes tasks and never answers."""

    def __init__(self, spec: WorkerSpec, inbox: Inbox) -> None:
        self._set_common_attributes(spec, inbox)
        self.pid = 0
        self.taken: list[Message] = []
        self.n_endings = 0

    @property
    def is_running(self) -> bool:
        return True

    def send(self, message: Message) -> None:
        self.taken.append(message)

    def end(self, grace_s: float = 0.0) -> int:
        self.n_endings += 1
        self._forget()
        return 0

    def was_last_active(self, seconds_ago: float) -> None:
        """Make it so long ago that the worker made progress and sent anything."""
        self.last_progress_s -= seconds_ago
        self._last_message_s -= seconds_ago


def deaf_worker_in(pool: Any) -> _DeafWorker:
    """Give the only device of a pool a worker that never answers."""
    [slot] = pool._slots
    slot.worker = worker = _DeafWorker(SPEC, Queue())
    return worker


def test_a_worker_without_tasks_is_ended_only_if_its_heartbeats_stop() -> None:
    """It can make no progress, and still occupies the device if it hangs."""
    pool: Any = Pool([SPEC], LocalWorkers("none"), keep=True)
    worker = deaf_worker_in(pool)
    long_ago = 2 * SPEC.engine.silence_s

    worker.was_last_active(long_ago)
    worker.on_message(Alive(last_progress_s=worker.last_progress_s))
    pool._end_silent()
    assert worker.n_endings == 0

    worker.was_last_active(long_ago)
    pool._end_silent()
    assert worker.n_endings == 1
    assert pool._slots[0].worker is None, "the next step starts another one"


def test_a_worker_that_makes_no_progress_with_its_task_is_ended_once() -> None:
    """Its heartbeats do not save it, and its end comes as a message later."""
    pool: Any = Pool([SPEC], LocalWorkers("none"), keep=True)
    worker = deaf_worker_in(pool)
    pool._slots[0].tasks.append(TASK)
    pool._end_silent()
    assert worker.n_endings == 0

    worker.was_last_active(2 * SPEC.engine.silence_s)
    worker.on_message(Alive(last_progress_s=worker.last_progress_s))
    pool._end_silent()
    pool._end_silent()
    assert worker.n_endings == 1
    assert list(pool._slots[0].tasks) == [TASK], "to be sent again when the end is known"


def test_what_is_loaded_meanwhile_does_not_delay_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = LocalWorkers("none")
    worker = _DeafWorker(SPEC, workers._inbox)
    monkeypatch.setattr(workers, "_make", lambda _: worker)
    taken_before: Queue[list[Message]] = Queue()
    with ThreadPoolExecutor(1) as threads, Pool([SPEC], workers) as pool:
        computing = threads.submit(
            pool.compute,
            [TASK],
            tmp_path,
            lambda _: None,
            meanwhile=lambda: taken_before.put(list(worker.taken)),
        )
        taken = taken_before.get(timeout=30)
        assert any(isinstance(message, ShardTask) for message in taken)
        assert not computing.done()
    with pytest.raises(VirnucError, match="interrupted"):
        computing.result()


def test_a_job_without_any_worker_ends_although_something_is_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: WorkerSpec) -> Child:
        raise OSError("no process can be started")

    workers = LocalWorkers("none")
    monkeypatch.setattr(workers, "_make", refuse)
    with ThreadPoolExecutor(1) as threads, Pool([SPEC], workers) as pool:
        computing = threads.submit(
            pool.compute, [TASK], tmp_path, lambda _: None, meanwhile=lambda: None
        )
        assert isinstance(computing.exception(timeout=30), OSError)
