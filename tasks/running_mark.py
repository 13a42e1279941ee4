"""The mark of a running flow run: which process it is. By it, runs whose process was killed are
found.

Prefect hears from nobody that a process was killed, and its run would stay "Running" for ever.
"""

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from virnuc.tasks.server_use import with_server
from virnuc_core.lease import is_alive, process_namespace, process_start_ticks

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

# labels of a flow run
NAMESPACE_LABEL: Final = "virnuc.place"  # of process numbers: a machine or container
PROCESS_LABEL: Final = "virnuc.process"
START_LABEL: Final = "virnuc.ticks"  # when the process began, which tells it from a later one
MAX_SAMPLE_TAGS: Final = 200  # a page of the UI shows all tags of each run
logger = logging.getLogger(__name__)


def announce(*tags: str) -> None:
    """Write this process and some tags on the current flow run at the server.

    Then mark flow runs as crashed whose processes on this machine were killed. Outside a flow run
    nothing happens.

    Args:
        tags: Tags besides `virnuc`.
    """
    flow_run = _current_flow_run()
    if flow_run is None:
        return
    from prefect.client.orchestration import get_client

    from virnuc.tasks.server_connection import connection

    labels: dict[str, Any] = {
        NAMESPACE_LABEL: process_namespace(),
        PROCESS_LABEL: os.getpid(),
        START_LABEL: process_start_ticks(os.getpid()),
    }
    flow_run.tags = sorted({*flow_run.tags, "virnuc", *tags})
    with connection.reporting("its process and tags"), get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, labels)
        client.update_flow_run(flow_run.id, tags=flow_run.tags)
        _end_orphans(client)


def add_tags(*tags: str) -> None:
    """Write tags on the current flow run at the server, besides those that it has.

    Outside a flow run nothing happens.

    Args:
        tags: The tags, such as names of samples, by which people find the run. Empty ones are left
            out, and those after the first `MAX_SAMPLE_TAGS`.
    """
    new_tags = [tag for tag in tags if tag][:MAX_SAMPLE_TAGS]
    flow_run = _current_flow_run()
    if flow_run is None or not new_tags:
        return
    from prefect.client.orchestration import get_client

    from virnuc.tasks.server_connection import connection

    flow_run.tags = sorted({*flow_run.tags, *new_tags})
    with connection.reporting("its tags"), get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=flow_run.tags)


def _current_flow_run() -> "FlowRun | None":
    """Return the flow run in which this code runs; None if there is none."""
    if not with_server():
        return None
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return None if context is None else context.flow_run


def _end_orphans(client: "SyncPrefectClient") -> None:
    """Mark flow runs as crashed that run or wait at the server, but whose process is gone.

    Args:
        client: Asks the server. Only runs of virnuc, by their tag, are looked at.
    """
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed

    is_unfinished = {"type": {"any_": ["RUNNING", "CANCELLING", "PAUSED"]}}
    ours = {"tags": {"all_": ["virnuc"]}, "state": is_unfinished}
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(ours))
    for flow_run in runs:
        if is_orphan(flow_run):
            logger.warning("flow run %s: its process is gone; it is called crashed", flow_run.name)
            crashed: State[Any] = Crashed(
                message="its process is gone, and had not told how it ended"
            )
            client.set_flow_run_state(flow_run.id, crashed, force=True)


def is_orphan(flow_run: "FlowRun") -> bool:
    """Return whether a flow run belongs to a process of this machine that no longer exists.

    Of a run on another machine, or in another container, nothing is known here: the answer is no.
    """
    if flow_run.labels.get(NAMESPACE_LABEL) != process_namespace():
        return False
    start_ticks = str(flow_run.labels.get(START_LABEL, ""))
    if not start_ticks:  # the system does not tell when a process started
        return False
    process_id = int(str(flow_run.labels.get(PROCESS_LABEL, "")))
    return is_alive(process_id, start_ticks) is False  # None: not known
