"""Runs of deployments in tests: deployed by Prefect's own command, and run by a worker of a pool."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from .processes import PREFECT, ROOT, background, wait_for


def succeed(environment: dict[str, str], *words: str) -> None:
    """Run a command of Prefect, which must succeed."""
    process = subprocess.run(
        (*PREFECT, *words), env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


def deploy_predict(environment: dict[str, str], pool: str) -> None:
    """Create a work pool, and register our deployment `predict` for it."""
    succeed(environment, "work-pool", "create", pool, "--type", "process")
    succeed(environment, "deploy", "--name", "predict", "--pool", pool)


@contextmanager
def worker_of(pool: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    """Run a worker of a pool while the body runs. Its output is appended to the file `log`."""
    with background((*PREFECT, "worker", "start", "-p", pool, "--limit", "1"), environment, log):
        yield


def read(flow_run_id: UUID) -> FlowRun:
    """Return a flow run as the server knows it now."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def state_name(flow_run_id: UUID) -> str:
    """Return the name of the state that a flow run has now."""
    state = read(flow_run_id).state
    assert state is not None
    return state.name or ""


def start(deployment: str, parameters: dict[str, Any]) -> UUID:
    """Create a run of a deployment as soon as the server knows it, and return its id."""

    def known() -> Any:
        with get_client(sync_client=True) as client:
            return next(
                (d for d in client.read_deployments() if f"{d.name}" == deployment.split("/")[1]),
                None,
            )

    wait_for(known, f"deployment {deployment}")
    with get_client(sync_client=True) as client:
        deployment_info = client.read_deployment_by_name(deployment)
        return client.create_flow_run_from_deployment(deployment_info.id, parameters=parameters).id


def ended_run(flow_run_id: UUID) -> FlowRun:
    """Wait until a flow run has ended, and return it."""

    def ended() -> FlowRun | None:
        run = read(flow_run_id)
        is_over = run.state is not None and run.state.is_final()
        return run if is_over else None

    run: FlowRun = wait_for(ended, "the run of the deployment to end")
    return run
