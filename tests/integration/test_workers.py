"""Deployments under a process worker and under `serve`: they deploy and run, and a cancelled run is really gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling

from tests.process_lookup import running_with
from virnuc.flows.cli.doctor_server import check_scheduler

from .deployment_runs import read, start, state_name, succeed
from .processes import PREFECT, ROOT, background, committed, gone, wait_for

pytestmark = pytest.mark.slow
SERVE = "from virnuc.flows.prefect_flows.predict import predict; predict.serve(name='served', pause_on_shutdown=False)"


def parameters(out: Path, reads: Path, models: Path) -> dict[str, Any]:
    return {
        "reads": [str(reads)],
        "out": str(out),
        "models": str(models),
        "devices": "cpu:1",
        "shard_tokens": 8192,
        "token_budget": 2048,
    }


def cancel_and_finish(
    deployment: str, process: subprocess.Popen[bytes], given: dict[str, Any], log: Path
) -> None:
    """Cancel a run in the middle: all of it is gone in time; the same parameters then end it."""
    out_dir = Path(given["out"])
    flow_run = start(deployment, given)
    wait_for(
        lambda: committed(out_dir) >= 3 or state_name(flow_run) in ("Failed", "Crashed"),
        "three shards",
    )
    assert state_name(flow_run) == "Running", log.read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    assert running_with("virnuc_core.engine.worker", family)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelling())
    engine = running_with("virnuc_core", family)
    wait_for(lambda: gone(engine), "the run's processes to end")
    wait_for(lambda: state_name(flow_run) == "Cancelled", "the state Cancelled")
    shards_before = committed(out_dir)
    second = start(deployment, given)
    wait_for(lambda: state_name(second) in ("Completed", "Failed", "Crashed"), "the second run")
    state = read(second).state
    assert state is not None
    assert state.name == "Completed", log.read_text()
    assert (out_dir / "prediction_results.txt").is_file()
    assert shards_before >= 3


@pytest.mark.usefixtures("prefect_backend")
def test_the_deployments_deploy_run_and_cancel_under_a_worker(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    made = subprocess.run(
        ["make", "deploy"],
        env=child_environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    with get_client(sync_client=True) as client:
        names = {f"{client.read_flow(d.flow_id).name}/{d.name}" for d in client.read_deployments()}
        nightly = client.read_deployment_by_name("validate/nightly-gpu")
        with pytest.raises(PrefectHTTPStatusError, match="'unknown' was unexpected"):
            client.create_flow_run_from_deployment(nightly.id, parameters={"unknown": 1})
    assert names >= {"validate/nightly-gpu", "predict-inbox/inbox"} | {
        f"{n}/{n}" for n in ("validate", "predict", "scale", "train")
    }
    log = tmp_path / "log"
    with background(
        (*PREFECT, "worker", "start", "-p", "gpu", "--limit", "1"), child_environment, log
    ) as process:
        cancel_and_finish(
            "predict/predict", process, parameters(tmp_path / "run", many_reads, models), log
        )


@pytest.mark.usefixtures("prefect_backend")
def test_a_served_flow_is_cancelled_to_the_last_process(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    log = tmp_path / "log"
    with background((sys.executable, "-c", SERVE), child_environment, log) as process:
        cancel_and_finish(
            "predict/served", process, parameters(tmp_path / "run", many_reads, models), log
        )


def test_a_scheduled_run_starts_by_itself_and_completes(
    tmp_path: Path, few_reads: Path, models: Path, server: dict[str, str]
) -> None:
    """Nobody starts it: the server's scheduler plans it, the worker takes it, and its files are there."""
    out_dir, log = tmp_path / "run", tmp_path / "log"
    parameters = json.dumps(
        {"reads": [str(few_reads)], "out": str(out_dir), "models": str(models), "devices": "cpu:1"}
    )
    succeed(server, "work-pool", "create", "gpu", "--type", "process")
    deployments = (
        "-n",
        "soon",
        "-p",
        "gpu",
        "--interval",
        "5",
        "--params",
        parameters,
        "--concurrency-limit",
        "1",
    )
    succeed(server, "deploy", "virnuc.flows.prefect_flows.predict.predict", *deployments)

    def ended() -> FlowRun | None:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs()
        return next((run for run in runs if run.state is not None and run.state.is_final()), None)

    with background((*PREFECT, "worker", "start", "-p", "gpu", "--limit", "1"), server, log):
        run = wait_for(ended, "a scheduled run to end")
    with httpx.Client(base_url=server["PREFECT_API_URL"]) as client:
        assert check_scheduler(client).verdict != "fail"  # the doctor's question
    assert run.auto_scheduled
    assert run.state.name == "Completed", log.read_text()
    assert (out_dir / "prediction_results.txt").is_file()
