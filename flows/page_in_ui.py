"""Where a flow run is shown in the Prefect UI."""

from pathlib import Path
from typing import Final
from uuid import UUID

DEFAULT_UI: Final = "http://127.0.0.1:4200"  # where `prefect server start` serves the UI


def page_in_ui(flow_run_id: UUID) -> str:
    """Return the address of a run's page in the Prefect UI.

    A temporary server has no UI. Its database stays, so the text then begins with the command that
    starts a server with the same database.

    Args:
        flow_run_id: The run at its server.
    """
    from prefect.settings import PREFECT_HOME, PREFECT_UI_URL

    from virnuc.tasks.server_connection import connection

    page = f"/runs/flow-run/{flow_run_id}"
    if connection.embedded is None:
        return f"{PREFECT_UI_URL.value()}{page}"
    home = PREFECT_HOME.value()
    start = "prefect server start"
    if home != Path.home() / ".prefect":
        start = f"PREFECT_HOME={home} {start}"
    return f"{start}, then {DEFAULT_UI}{page}"
