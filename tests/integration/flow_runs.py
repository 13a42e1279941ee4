"""What Prefect knows of a flow run in these tests."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State, TaskRun

RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")


def run_of(state: State[Any]) -> UUID:
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    return flow_run_id


def task_runs(state: State[Any]) -> dict[str, TaskRun]:
    """Task runs of a flow run by name."""
    run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[run_of(state)]))
    with get_client(sync_client=True) as client:
        return {run.name: run for run in client.read_task_runs(flow_run_filter=run_filter)}


def message(run: TaskRun) -> str:
    assert run.state is not None
    return run.state.message or ""


def running_flow_run(name: str) -> FlowRun:
    """Return the flow run of this name that is running. There must be exactly one."""
    run_filter = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=run_filter)
    running_runs = [run for run in runs if run.state is not None and run.state.is_running()]
    assert len(running_runs) == 1
    return running_runs[0]
