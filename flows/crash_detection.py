"""Which process works for a flow run, written on the run itself; and an end for runs whose process is dead.

Prefect learns of a process that is killed from nobody: its run stays "Running" for ever. Every run of ours therefore
bears its process in its labels, and each new run on the same machine first looks for those whose process is gone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.states import Crashed

TAG: Final = "virnuc"
PLACE, PROCESS, BEGAN = "virnuc.place", "virnuc.process", "virnuc.began"
SAME_START_S: Final = 1.0
logger = logging.getLogger(__name__)


def place() -> str:
    """Where a process number means something: this boot of this machine, and this namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/pid').readlink()}"


def announce(*tags: str) -> None:
    """Write on the current flow run who works for it, and its tags; then end the runs of dead processes."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    own = psutil.Process()
    labels: dict[str, str | int | float | bool] = {
        PLACE: place(),
        PROCESS: own.pid,
        BEGAN: own.create_time(),
    }
    with get_client(sync_client=True) as client:
        flow_run_id = context.flow_run.id
        client.update_flow_run_labels(flow_run_id, labels)
        client.update_flow_run(flow_run_id, tags=sorted({*context.flow_run.tags, TAG, *tags}))
        try:
            _end_dead(client)
        except (httpx.HTTPError, PrefectException) as error:
            logger.warning("runs of dead processes could not be looked for: %s", error)


def _end_dead(client: SyncPrefectClient) -> None:
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG]), state=running)
    for flow_run in client.read_flow_runs(flow_run_filter=wanted):
        if is_dead(flow_run):
            logger.warning("flow run %s: its process is gone; it is called crashed", flow_run.name)
            client.set_flow_run_state(flow_run.id, Crashed(message="its process was killed"), force=True)


def is_dead(flow_run: FlowRun) -> bool:
    """Whether the run's process is known to be gone; never true of a run of another machine, or of unknown origin."""
    labels = flow_run.labels
    number, began = labels.get(PROCESS), labels.get(BEGAN)
    if labels.get(PLACE) != place() or not isinstance(number, int) or not isinstance(began, (int, float)):
        return False
    try:
        return bool(abs(psutil.Process(number).create_time() - began) > SAME_START_S)
    except psutil.NoSuchProcess:
        return True
