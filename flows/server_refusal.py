"""Turns what a Prefect server answers instead of starting a run into one line with advice."""

import json
from http import HTTPStatus
from typing import Final

import httpx
import prefect

from virnuc.flows.parameters import WITHOUT
from virnuc.flows.tls_errors import causes, tls_problem
from virnuc_core.errors import VirnucError

CREDENTIALS: Final = "set PREFECT_API_AUTH_STRING to the server's (PREFECT_API_KEY for a cloud)"
ADDRESS: Final = "PREFECT_API_URL must be the address of a Prefect server, which ends with /api"
VERSION: Final = (
    f"use a server of the same version as this Prefect, {prefect.__version__}: run "
    "`prefect version` where it runs"
)
FAULT: Final = "look into the server's log, or try later"
ADVICE: Final = {
    HTTPStatus.UNAUTHORIZED: CREDENTIALS,
    HTTPStatus.FORBIDDEN: CREDENTIALS,
    HTTPStatus.PROXY_AUTHENTICATION_REQUIRED: "exclude the server from your proxy with no_proxy",
    HTTPStatus.NOT_FOUND: ADDRESS,
    HTTPStatus.METHOD_NOT_ALLOWED: ADDRESS,
    HTTPStatus.UNPROCESSABLE_ENTITY: VERSION,
}


def server_refusal(
    error: BaseException, url: str, *, alternative: str = f", or use {WITHOUT}"
) -> VirnucError | None:
    """Return an error for the user if a server did not accept a run, or does not answer.

    Args:
        error: The error of Prefect's client, before the function of the flow was called.
        url: The address of the server's API, without a password.
        alternative: The end of the message: what else can be done. A command that needs the server
            gives an empty text.

    Returns:
        The error in one line: what the server answered, and what to do. `None` if this error is not
        about an answer of a server.
    """
    problem = tls_problem(error)
    if problem is not None:
        return VirnucError(f"the Prefect server at {url} {problem}{alternative}")
    for cause in causes(error):
        if isinstance(cause, httpx.ConnectError | ConnectionRefusedError):
            return VirnucError(
                f"nothing answers at {url}: start the Prefect server there, or set PREFECT_API_URL "
                f"to the address of one{alternative}"
            )
        if isinstance(cause, httpx.TransportError):
            return VirnucError(
                f"no Prefect server answers at {url}; look whether it still runs{alternative}"
            )
        if isinstance(cause, httpx.HTTPStatusError):
            code = cause.response.status_code
            advice = FAULT
            if _is_known(code):  # HTTPStatus raises an error for any other number
                advice = ADVICE.get(HTTPStatus(code), FAULT)
            return VirnucError(
                f"the Prefect server at {url} answers {code} "
                f"({cause.response.reason_phrase}); {advice}{alternative}"
            )
        if isinstance(cause, json.JSONDecodeError):
            return VirnucError(
                f"what answers at {url} is no Prefect server: it sends no JSON; {ADDRESS}"
                f"{alternative}"
            )
    return None


def _is_known(code: int) -> bool:
    """Return whether a status code of HTTP is a standard one."""
    return code in [status.value for status in HTTPStatus]
