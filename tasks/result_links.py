"""Links in artifacts: to result files on a web server of the site, and to the run in the UI.

Browsers refuse links to files. So an artifact names the path, and links to it only where
`VIRNUC_RESULTS_URL` says under which address a web server shows the folder of results.
"""

import logging
import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import UUID

from virnuc.tasks.artifacts import inside_a_run, table_cell
from virnuc_core.markdown import Markdown

RESULTS_URL: Final = "VIRNUC_RESULTS_URL"  # FOLDER=https://…
RUN_PAGE: Final = "/runs/flow-run/"  # of the UI; the id follows
logger = logging.getLogger(__name__)


def result_address(path: Path) -> str | None:
    """Return the address at which a web server of the site shows a result.

    Args:
        path: A file or folder of a run.

    Returns:
        The address; None if no server is configured, or if the path lies outside its folder.
    """
    setting = os.environ.get(RESULTS_URL, "").strip()
    if not setting:
        return None
    folder_text, _, base = setting.partition("=http")
    folder = Path(folder_text)
    base = _without_credentials(f"http{base}")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc or not folder.is_absolute():
        logger.warning(
            "%s is not used: it must be a folder and an address, such as "
            "/srv/results=https://files.example.org/results",
            RESULTS_URL,
        )
        return None
    absolute_path = Path(os.path.abspath(path))  # noqa: PTH100 - links are not followed
    if not absolute_path.is_relative_to(folder):
        return None
    within = absolute_path.relative_to(folder).as_posix()
    return f"{base.rstrip('/')}/{quote(within)}"


def result_link(path: Path) -> Markdown:
    """Return the absolute path of a result as Markdown, with a link to it if there is an address.

    Args:
        path: A file or folder of a run.
    """
    text = table_cell(str(path.absolute()))
    address = result_address(path)
    if address is None:
        return Markdown(text)
    return Markdown(f"[{text}]({address})")


def run_page(flow_run_id: UUID) -> str:
    """Return the address of a run's page in the UI of the configured server."""
    from prefect.settings import PREFECT_UI_URL

    return f"{_without_credentials(str(PREFECT_UI_URL.value()))}{RUN_PAGE}{flow_run_id}"


def _without_credentials(address: str) -> str:
    """Return an address without user name, password, query and fragment.

    Everybody who may look at the server can read its artifacts. A browser asks for the password.
    """
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def run_link() -> Markdown:
    """Return a link to the current flow run, with its name; empty if there is none to link to.

    A temporary server has no UI, so nothing is linked there.
    """
    if not inside_a_run():
        return Markdown("")
    from prefect.context import FlowRunContext

    from virnuc.tasks.server_connection import connection

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or connection.embedded is not None:
        return Markdown("")
    flow_run = context.flow_run
    return Markdown(f"[{table_cell(flow_run.name)}]({run_page(flow_run.id)})")


def with_links(text: str, *, result: Path, kind: str) -> Markdown:
    """Return the description of an artifact: a text, then where the result and the run are.

    Args:
        text: The text. Markdown characters in it are escaped, unless it is of the class `Markdown`.
        result: A file or folder of the run.
        kind: What it is, such as `Report`.
    """
    description = f"{table_cell(text)} {kind}: {result_link(result)}"
    link = run_link()
    if link:
        description += f" · Run: {link}"
    return Markdown(description)
