"""What Prefect knows of a flow run in these tests."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State, TaskRun

from .processes import wait_for

RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")


def run_of(state: State[Any]) -> UUID:
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    return flow_run_id


def task_runs(state: State[Any], *expected: str) -> dict[str, TaskRun]:
    """Return the task runs of a flow run that has ended, by name.

    Prefect reports them as events, which a busy server takes in after the end of the flow run. So
    they are waited for.

    Args:
        state: The state of the flow run.
        expected: Names that must be there.
    """
    run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[run_of(state)]))
    known_runs: dict[str, TaskRun] = {}

    def all_are_over() -> bool:
        """Ask the server, and return true if all task runs are there and have ended."""
        known_runs.clear()
        for run in client.read_task_runs(flow_run_filter=run_filter):
            known_runs[run.name] = run
        are_over = [run.state is not None and run.state.is_final() for run in known_runs.values()]
        return known_runs.keys() >= set(expected) and all(are_over)

    with get_client(sync_client=True) as client:
        wait_for(all_are_over, "the end of the task runs")
    return known_runs


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
