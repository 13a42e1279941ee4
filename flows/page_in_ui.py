"""Where a flow run is shown in the Prefect UI."""

from pathlib import Path
from typing import Final
from uuid import UUID

from virnuc.tasks.result_links import RUN_PAGE, run_page

DEFAULT_UI: Final = "http://127.0.0.1:4200"  # where `prefect server start` serves the UI


def page_in_ui(flow_run_id: UUID) -> str:
    """Return the address of a run's page in the Prefect UI.

    A temporary server has no UI. Its database stays, so the text then begins with the command that
    starts a server with the same database.

    Args:
        flow_run_id: The run at its server.
    """
    from prefect.settings import PREFECT_HOME

    from virnuc.tasks.server_connection import connection

    if connection.embedded is None:
        return run_page(flow_run_id)
    home = PREFECT_HOME.value()
    start = "prefect server start"
    if home != Path.home() / ".prefect":
        start = f"PREFECT_HOME={home} {start}"
    return f"{start}, then {DEFAULT_UI}{RUN_PAGE}{flow_run_id}"
