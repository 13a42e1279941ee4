"""Chooses the Prefect server that shows a run from a terminal, or none.

It is the one that the user named, or a temporary one that this process starts.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any, Final

from virnuc.flows.cli.temporary_server import (
    USE_NO_SERVER,
    TemporaryServer,
    start_temporary_server,
)
from virnuc.flows.running_alone import reason_in_one_line, warn_of_running_alone
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.proxies import warn_of_removed_proxies

LEAVE_OUT_APPROVAL: Final = "leave out --approval, for which a server is needed"


@dataclass(frozen=True)
class ChosenServer:
    """The Prefect server that is to show a run.

    Attributes:
        temporary: The server that this process has started. None if the user named a server.
        is_needed: The run must not go on without the server. The user looks for it at the server
            that he named, and a reviewer answers there.
    """

    temporary: TemporaryServer | None
    is_needed: bool

    def wait(self) -> None:
        """Return once the server answers. One that the user named is assumed to be running.

        Raises:
            VirnucError: The temporary server does not start.
        """
        if self.temporary is not None:
            self.temporary.wait()

    def finish(self) -> None:
        """Send what Prefect's threads still hold to the server, then end it if it is ours.

        The user waits for both, so both come before the command says how long it took.
        """
        # If the flow could not be loaded, nothing was sent, and Prefect may not be importable.
        server_connection = sys.modules.get("virnuc.tasks.server_connection")
        if server_connection is not None:
            server_connection.connection.send_rest()
        self.stop()

    def stop(self) -> None:
        """End the server, if this process has started it."""
        if self.temporary is not None:
            self.temporary.stop()


def choose_server(settings: Any) -> ChosenServer | None:
    """Find the server that is to show the run. Start a temporary one, if one is needed.

    A warning is logged if no server can be had and the flow can run without one.

    Args:
        settings: The settings of the flow and of the terminal.

    Returns:
        The server, or None if the flow runs without one: the run is complete and only looked at,
        or no server can be had.

    Raises:
        VirnucError: The flow needs a server, and none can be had.
        OSError: The same, if the system refuses something.
    """
    has_approval = bool(getattr(settings, "approval", False))
    way_out = LEAVE_OUT_APPROVAL if has_approval else USE_NO_SERVER
    try:
        if _has_named_server(way_out):
            warn_of_removed_proxies()
            return ChosenServer(temporary=None, is_needed=True)
        if settings.is_done():
            return None
        server = start_temporary_server(debug=settings.debug, alternative=way_out)
    except (VirnucError, OSError) as error:
        # Where Prefect cannot be loaded, the variable alone tells that the user named a server.
        if has_approval or os.environ.get("PREFECT_API_URL"):
            raise
        warn_of_running_alone(error)
        return None
    return ChosenServer(server, is_needed=has_approval)


def _has_named_server(way_out: str) -> bool:
    """Return whether the user named a server, in the environment or in a profile of Prefect.

    Args:
        way_out: What a user can do without a server, for error messages.

    Raises:
        ConfigError: Prefect cannot be loaded. A package is damaged, or its settings are.
    """
    try:
        # In a child of a process of `virnuc serve`, Prefect was imported before the child began.
        preload_module = sys.modules.get("virnuc.flows.cli.preload_prefect")
        if preload_module is not None:
            preload_module.read_settings_again()
        from prefect.settings import PREFECT_API_URL

        url = PREFECT_API_URL.value()
    except Exception as error:  # what a damaged `profiles.toml` raises is not one type of error
        raise ConfigError(
            f"Prefect cannot be loaded ({reason_in_one_line(error)}); mend its profiles.toml, the "
            f"PREFECT_… variables, HOME or the installation, or {way_out}"
        ) from error
    return url is not None
