"""Two runs and one GPU: the second waits, and when the first is killed it takes over, never sooner.

The GPU is one by name only, so that this runs anywhere; slots, locks, processes, signals and the server are the real
ones. (The other tests' backend has no services, so that a dead holder's slot would never come back.)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from virnuc.tasks.server_slots import LEASE_S
from virnuc_core.errors import DeviceError
from virnuc_core.rundir import lock_device
from virnuc_core.runfiles import Device

from .processes import PATIENCE_S, ROOT, gone, wait_for

pytestmark = pytest.mark.slow
# All processes of the machine see the lock of a GPU, also those of other tests.
GPU = Device(id=f"GPU-guarded-{os.getpid()}", kind="cuda", name="a GPU by name")
SLOT = f"virnuc-{GPU.id}".lower()
WORK_S = 3.0

# what a worker does with a device: works, says so; the device is locked before, and it dies with the run it is of
WORKER = """
import json, os, time

def work(parent, spec):
    with open(os.environ["GUARD_LOG"], "a") as log:
        for word in ("begins", "ends"):
            log.write(json.dumps({"run": spec.models, "word": word, "pid": os.getpid(), "at": time.time()}) + "\\n")
            log.flush()
            time.sleep(float(os.environ["GUARD_WORK_S"]) if word == "begins" else 0)
"""

# what a flow does with a device: takes the slot, starts the worker, waits for it
FLOW = """
import os, sys
from pathlib import Path
from prefect import flow
from virnuc.tasks.device_slots import device_slots
from virnuc_core.config import EngineSpec
from virnuc_core.runfiles import Device
from virnuc_core.engine.process import Closed, LocalWorkers, WorkerSpec

run, log, work_s, gpu_id = sys.argv[1:]
os.environ |= {"GUARD_LOG": log, "GUARD_WORK_S": work_s}
gpu = Device(id=gpu_id, kind="cuda", name="a GPU by name")

@flow(name="guarded", flow_run_name=run)
def guarded():
    with device_slots([gpu]), LocalWorkers("guarded_worker") as workers:
        workers.start(WorkerSpec(models=run, device=gpu, engine=EngineSpec()), Path(log + ".errors"))
        while not isinstance(event := workers.receive(600)[1], Closed):
            Path(log + ".errors").write_text(event.message)  # Failed is all that it may say

guarded()
"""


class Lines:
    """What the workers wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, run: str, word: str) -> dict[str, Any] | None:
        text = self.path.read_text() if self.path.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        entries = [json.loads(line) for line in whole_lines]
        return next((line for line in entries if (line["run"], line["word"]) == (run, word)), None)


@contextmanager
def running(
    run: str, folder: Path, work_s: float, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "guarded_worker.py").write_text(WORKER)
    words = [sys.executable, "-c", FLOW, run, str(folder / "log"), str(work_s), GPU.id]
    with (folder / f"{run}.out").open("wb") as stdout_file:
        process = subprocess.Popen(
            words,
            stdout=stdout_file,
            stderr=stdout_file,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": f"{folder}:{ROOT}"},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def state_of(run: str) -> str:
    with get_client(sync_client=True) as client:
        flow_runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run]))
        )
    return (flow_runs[0].state.name or "") if flow_runs and flow_runs[0].state is not None else ""


def slots_taken() -> float:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(SLOT).active_slots


def test_the_second_run_waits_for_the_first_to_end(tmp_path: Path, server: dict[str, str]) -> None:
    lines = Lines(tmp_path / "log")
    with running("first", tmp_path, WORK_S, server) as first_run:
        wait_for(lambda: lines.of("first", "begins"), "the first to begin")
        with running("second", tmp_path, 0.1, server) as second:
            assert second.wait(PATIENCE_S) == 0, (tmp_path / "second.out").read_text()
        assert first_run.wait(PATIENCE_S) == 0
    first_end_s, began = lines.of("first", "ends"), lines.of("second", "begins")
    assert first_end_s is not None
    assert began is not None
    assert first_end_s["at"] <= began["at"]
    assert slots_taken() == 0


def test_when_the_holder_is_killed_its_worker_dies_and_the_waiting_run_takes_over(
    tmp_path: Path, server: dict[str, str]
) -> None:
    lines = Lines(tmp_path / "log")
    with running("killed", tmp_path, 600, server) as first_run:
        worker = psutil.Process(
            wait_for(lambda: lines.of("killed", "begins"), "the first to begin")["pid"]
        )
        with running("heir", tmp_path, 0.1, server) as second:
            wait_for(lambda: state_of("heir") == "Running", "the second to queue")
            time.sleep(WORK_S)
            assert lines.of("heir", "begins") is None
            assert slots_taken() == 1
            os.kill(first_run.pid, signal.SIGKILL)
            killed_at = time.time()
            wait_for(lambda: gone([worker]), "its worker to end")
            os.close(
                lock_device(GPU.id, LEASE_S)
            )  # free as soon as its last thread is gone; the slot, when its lease is over
            assert second.wait(LEASE_S + PATIENCE_S) == 0, (tmp_path / "second.out").read_text()
    began = lines.of("heir", "begins")
    assert began is not None
    assert began["at"] > killed_at
    assert slots_taken() == 0


def test_a_slot_given_away_too_early_still_lets_nobody_onto_the_device(
    tmp_path: Path, server: dict[str, str]
) -> None:
    lines = Lines(tmp_path / "log")
    with running("holder", tmp_path, 600, server):
        wait_for(lambda: lines.of("holder", "begins"), "the holder to begin")
        with get_client(
            sync_client=True
        ) as client:  # as `prefect gcl update … --active-slots 0` does
            client.update_global_concurrency_limit(
                SLOT, GlobalConcurrencyLimitUpdate(active_slots=0)
            )
        with running("intruder", tmp_path, 0.1, server) as intruder:
            intruder.wait(PATIENCE_S)
        assert lines.of("intruder", "begins") is None
        assert f"{GPU.id} is in use by process" in (tmp_path / "log.errors").read_text()
        with pytest.raises(DeviceError, match="in use"):
            lock_device(GPU.id, 0.0)
