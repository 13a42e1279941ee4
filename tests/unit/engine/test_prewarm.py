"""Workers that wait for a job: they are the ones that do it, or they are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from virnuc_core.config import ClassifySpec, Devices, RunSpec
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import InputError
from virnuc_core.pipeline import predict, workers_for
from virnuc_core.reads.stage import StageSummary
from virnuc_core.telemetry.tables import OVERLAPPED

from .runs import PAUSE_S, SMALL, classify_store, no_workers_left, result_bytes, running_workers

ONE = Devices.parse("cpu:1")


@pytest.fixture
def prewarmed(tiny_models: Path) -> Iterator[Pool]:
    with workers_for(
        ClassifySpec(models=tiny_models, devices=ONE, engine=SMALL), Path(), warm=True
    ) as context:
        yield context
    assert no_workers_left()


def is_resting(pid: int) -> bool:
    """Return whether all threads of a process wait for something else than a processor or a disk."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return states == {"S"}


def only_child() -> int:
    while not (processes := running_workers()):
        time.sleep(0.01)
    (child,) = processes
    return child.pid


@pytest.mark.slow
def test_the_prestarted_worker_computes_the_run(
    prewarmed: Pool,
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    reference: Path,
) -> None:
    pid = only_child()
    worker, deadline, used_s = psutil.Process(pid), time.monotonic() + 240, -1.0
    while (
        time.monotonic() < deadline
    ):  # until it rests with all it needs: memory, and no more time of the processor
        before_s, used_s = used_s, sum(worker.cpu_times()[:2])
        has_all_memory = worker.memory_info().rss > 250 << 20
        if has_all_memory and used_s - before_s < 0.05 and is_resting(pid):
            break
        time.sleep(2)
    summary = classify_store(tmp_path / "run", staged, tiny_models, ONE, pool=prewarmed)
    assert [worker["pid"] for worker in summary.workers] == [pid]
    assert summary.workers[0]["waited_s"] > 0
    stage_seconds = {
        name: seconds for name, seconds in summary.stages.items() if seconds is not None
    }
    assert stage_seconds[OVERLAPPED] > 0.5 * (
        stage_seconds["Start-up: import"] + stage_seconds["Start-up: weights"]
    ), "it was ready before"
    assert sum(stage_seconds.values()) - 2 * stage_seconds[OVERLAPPED] == pytest.approx(
        summary.total_s, rel=0.01, abs=PAUSE_S
    )
    assert result_bytes(tmp_path / "run") == result_bytes(reference)
    assert [log.name for log in (tmp_path / "run" / "logs").iterdir()] == [
        f"worker-{summary.workers[0]['device']}.log"
    ]


@pytest.mark.slow
def test_a_prestarted_worker_that_died_is_replaced(
    prewarmed: Pool, tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    pid = only_child()
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(120)
    summary = classify_store(tmp_path / "run", staged, tiny_models, ONE, pool=prewarmed)
    assert summary.workers[0]["pid"] != pid
    assert summary.restarts == 0  # no work was lost


@pytest.mark.slow
def test_a_worker_started_with_other_settings_is_not_used(
    prewarmed: Pool, tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    pid = only_child()
    other_settings = SMALL.model_copy(update={"token_budget": 2048})
    summary = classify_store(
        tmp_path / "run", staged, tiny_models, ONE, engine=other_settings, pool=prewarmed
    )
    assert summary.workers[0]["pid"] != pid


def test_reads_that_cannot_be_staged_leave_no_worker_and_no_folder(
    tmp_path: Path, tiny_models: Path
) -> None:
    broken_file = tmp_path / "broken.fastq"
    broken_file.write_text("@r1\nACGT\n+\nIII\n")
    with pytest.raises(InputError, match=r"broken\.fastq"):
        predict(
            RunSpec(
                reads=(str(broken_file),),
                models=tiny_models,
                out=tmp_path / "out",
                devices="cpu:1",
                engine=SMALL,
            )
        )
    assert no_workers_left()
    assert not (tmp_path / "out").exists()
