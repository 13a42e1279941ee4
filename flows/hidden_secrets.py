"""Keeps secrets out of what a flow run reports to its server."""

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from prefect.settings import get_current_settings

from virnuc_core.confidential import hide_credentials, redact_error, secrets_hidden

Result = TypeVar("Result")
WORKERS_CHILD: Final = "PREFECT__FLOW_RUN_ID"  # set in the process that a worker starts for a run


def without_secrets(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a flow's function whose log lines and errors show no password, key or mail address.

    Args:
        function: The function, which is called with keyword arguments.
    """

    def call(**values: Any) -> Result:
        """Call the function. Prefect writes the text of an error into the state of the run."""
        _hide_credentials_of_client()
        # A process of a worker ends with its run, and what it logs until then has no secrets.
        with secrets_hidden(for_good=WORKERS_CHILD in os.environ):
            try:
                return function(**values)
            except BaseException as error:
                redact_error(error)
                raise

    return call


def _hide_credentials_of_client() -> None:
    """Remember the password and the key for the server, wherever the user has set them."""
    api = get_current_settings().api
    for secret in (api.auth_string, api.key):
        if secret is not None:
            hide_credentials(secret.get_secret_value())
