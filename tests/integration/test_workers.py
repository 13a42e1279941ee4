"""Deployments under a process worker and under `serve`: they deploy and run, and a cancelled run is really gone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

pytestmark = [pytest.mark.usefixtures("prefect_backend"), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN_S = 10
SERVE = "from flows.predict import predict; predict.serve(name='served', pause_on_shutdown=False)"


def wait_for(truth: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := truth()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)
    return found


def read(flow_run_id: UUID) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def state_name(flow_run_id: UUID) -> str:
    state = read(flow_run_id).state
    assert state is not None
    return state.name or ""


@contextmanager
def background(command: list[str], environment: dict[str, str], log: Path) -> Iterator[psutil.Process]:
    """A long-lived command; it and all it started are killed afterwards."""
    with log.open("wb") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle, env=environment, cwd=ROOT)
    host = psutil.Process(process.pid)
    try:
        yield host
    finally:
        for one in [*host.children(recursive=True), host]:
            if one.is_running():
                one.kill()
        process.wait(10)


def start(deployment: str, parameters: dict[str, Any]) -> UUID:
    def known() -> Any:
        with get_client(sync_client=True) as client:
            return next((d for d in client.read_deployments() if f"{d.name}" == deployment.split("/")[1]), None)

    wait_for(known, 60, f"deployment {deployment}")
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name(deployment)
        return client.create_flow_run_from_deployment(found.id, parameters=parameters).id


def parameters(out: Path, reads: Path, models: Path) -> dict[str, Any]:
    return {
        "reads": [str(reads)],
        "out": str(out),
        "models": str(models),
        "devices": "cpu:1",
        "shard_tokens": 8192,
        "token_budget": 2048,
    }


def committed(out: Path) -> int:
    return len(list((out / "shards").glob("*.h5")))


def cancel_and_finish(deployment: str, host: psutil.Process, given: dict[str, Any], log: Path) -> None:
    """Cancel a run in the middle: all of it is gone in time; the same parameters then end it."""
    out = Path(given["out"])
    first = start(deployment, given)
    wait_for(lambda: committed(out) >= 3 or state_name(first) in ("Failed", "Crashed"), 120, "three shards")
    assert state_name(first) == "Running", log.read_text()
    family = host.children(recursive=True)
    assert any("virnuc_core.engine.worker" in one.cmdline() for one in family)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(first, Cancelling())
    ours = [one for one in family if one.is_running()]
    engine = [one for one in ours if "virnuc_core" in " ".join(one.cmdline())]
    wait_for(lambda: not any(one.is_running() for one in engine), GONE_WITHIN_S, "the run's processes to end")
    wait_for(lambda: state_name(first) == "Cancelled", 60, "the state Cancelled")
    kept = committed(out)
    second = start(deployment, given)
    wait_for(lambda: state_name(second) in ("Completed", "Failed", "Crashed"), 180, "the second run")
    state = read(second).state
    assert state is not None
    assert state.name == "Completed", log.read_text()
    assert (out / "prediction_results.txt").is_file()
    assert kept >= 3


def test_the_deployments_deploy_run_and_cancel_under_a_worker(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    subprocess.run(
        [*prefect, "work-pool", "create", "gpu", "--type", "process"],
        env=child_environment,
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    deployed = subprocess.run(
        [*prefect, "deploy", "--prefect-file", "deployments/prefect.yaml", "--all"],
        env=child_environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with get_client(sync_client=True) as client:
        names = {f"{client.read_flow(d.flow_id).name}/{d.name}" for d in client.read_deployments()}
    assert names >= {
        "validate/nightly",
        "predict-inbox/inbox",
        "validate/ad-hoc",
        "predict/ad-hoc",
        "scale/ad-hoc",
        "train/ad-hoc",
    }
    log = tmp_path / "log"
    command = [*prefect, "worker", "start", "-p", "gpu", "--limit", "1"]
    with background(command, child_environment, log) as host:
        cancel_and_finish("predict/ad-hoc", host, parameters(tmp_path / "run", many_reads, models), log)


def test_a_served_flow_is_cancelled_to_the_last_process(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    log = tmp_path / "log"
    with background([sys.executable, "-c", SERVE], child_environment, log) as host:
        cancel_and_finish("predict/served", host, parameters(tmp_path / "run", many_reads, models), log)
