"""What `virnuc doctor` asks of the Prefect server: its version, its scheduler, who can reach it."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any, Final

import httpx
import psutil

from virnuc.flows.cli.doctor_checks import check_of_problem
from virnuc.flows.running_alone import reason_in_one_line
from virnuc.flows.tls_errors import tls_problem
from virnuc_core.allowed_paths import ROOTS
from virnuc_core.encoders.verify import Check
from virnuc_core.errors import ConfigError
from virnuc_core.proxies import EXCEPTIONS, LOOPBACK_HOSTS, proxy_of_loopback_server
from virnuc_core.runfiles import redact_credentials

SERVER_CHECK: Final = "Prefect server"
SCHEDULER_CHECK: Final = "Prefect scheduler"
ACCESS_CHECK: Final = "Prefect doors"
WORKERS_CHECK: Final = "Prefect workers"
TIMEOUT_S: Final = 3.0
HTTPS_PORT: Final = 443
HTTP_PORT: Final = 80
LOOPBACK: Final = re.compile(r"(localhost|\[?::1\]?)$|127\.")


def check_prefect_server() -> Iterator[Check]:
    """Yield checks of the Prefect server: does it answer, plan runs, and who can reach it?

    If Prefect cannot be used here at all, the only check says so.

    Raises:
        ConfigError: The named server does not answer, or refuses the password that is set here.
    """
    try:
        from prefect.settings import get_current_settings

        settings = get_current_settings()
    except Exception as error:  # noqa: BLE001 - an absent or damaged package raises any error
        reason = reason_in_one_line(error)
        detail = f"Prefect cannot be used here ({reason}); virnuc predict --no-prefect works"
        yield Check(SERVER_CHECK, "warn", detail)
        return
    url = settings.api.url
    if url is None:
        # Without an address, Prefect starts a server by itself (the embedded one).
        if not settings.server.ephemeral.enabled:
            raise ConfigError("none is named (PREFECT_API_URL) and the embedded one is forbidden")
        detail = f"none is named: the embedded one, with its data in {settings.home}"
        yield Check(SERVER_CHECK, "ok", detail)
        return
    auth_string = ""
    if settings.api.auth_string:
        auth_string = settings.api.auth_string.get_secret_value()
    user, _, password = auth_string.partition(":")
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        try:
            # First without a password, to see whether strangers are answered.
            anonymous_answer = client.get("/admin/version")
            answers_anybody = anonymous_answer.status_code != httpx.codes.UNAUTHORIZED
            client.auth = httpx.BasicAuth(user, password)
            yield _check_version(client, url)
            yield check_scheduler(client)
        except (httpx.HTTPError, ValueError) as error:
            shown_url = redact_credentials(url)
            problem = tls_problem(error)
            if isinstance(error, httpx.ConnectError) and problem is None:
                raise ConfigError(
                    f"nothing answers at {shown_url}: start the server there, or unset "
                    "PREFECT_API_URL"
                ) from error
            if problem is None:
                problem = f"does not answer ({type(error).__name__}); start it, or unset it"
            raise ConfigError(f"{shown_url} {problem}") from error
    yield check_access(httpx.URL(url), answers_anybody=answers_anybody)


def _check_version(client: httpx.Client, url: str) -> Check:
    """Return whether the server has the version of Prefect that is installed here.

    Raises:
        ConfigError: The server does not accept the password that is set here.
    """
    shown_url = redact_credentials(url)
    answer = client.get("/admin/version")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{shown_url} wants another PREFECT_API_AUTH_STRING than is set here")
    server_version = answer.raise_for_status().json()
    own_version = metadata.version("prefect")
    detail = f"{shown_url} answers, version {server_version}"
    problem = ""
    if server_version != own_version:
        problem = f"{detail}; this side is {own_version}"
    return check_of_problem(problem, SERVER_CHECK, detail)


def check_scheduler(client: httpx.Client) -> Check:
    """Return whether the server plans runs of all active schedules, and whether runs are late.

    A scheduled deployment without any planned run is a failure: the server's scheduler does not
    work. Late runs are a warning: probably no worker takes them.
    """
    deployments = _post(client, "/deployments/filter")
    active = [deployment for deployment in deployments if _is_scheduled(deployment)]
    idle_deployments = []
    for deployment in active:
        n_planned = _count_runs(
            client,
            deployment_id={"any_": [deployment["id"]]},
            state={"type": {"any_": ["SCHEDULED"]}},
        )
        if not n_planned:
            idle_deployments.append(deployment["name"])
    if idle_deployments:
        problem = (
            f"no run of {', '.join(idle_deployments)} is planned; "
            "look for errors of its scheduler in the server's log"
        )
        return Check(SCHEDULER_CHECK, "fail", problem)
    n_late = _count_runs(client, state={"name": {"any_": ["Late"]}})
    problem = ""
    if n_late:
        problem = f"{n_late} runs are late; is a worker of their pool at work?"
    detail = f"{len(active)} active schedules are planned, no run is late"
    return check_of_problem(problem, SCHEDULER_CHECK, detail)


def _is_scheduled(deployment: dict[str, Any]) -> bool:
    """Return whether a deployment is not paused and has an active schedule."""
    if deployment["paused"]:
        return False
    return any(schedule["active"] for schedule in deployment["schedules"])


def _count_runs(client: httpx.Client, **run_filter: object) -> int:
    """Return the number of flow runs that match a filter of the server's API."""
    return int(_post(client, "/flow_runs/count", flow_runs=run_filter))


def _post(client: httpx.Client, path: str, **body: object) -> Any:
    """Send a POST request with a JSON body, and return the parsed answer."""
    return client.post(path, json=body).raise_for_status().json()


def check_worker_proxy(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield a warning if workers of Prefect would ask a proxy for the server of this machine.

    Commands of virnuc do without the proxy. A worker reads the variables before any code of ours
    runs: it sends the password of the server to the proxy, and ends with an error. Yields nothing
    if no server of this machine is named.

    Args:
        environment: The environment as the user set it, which workers would have.
    """
    try:
        from prefect.settings import PREFECT_API_URL

        url = httpx.URL(PREFECT_API_URL.value() or "")
    except Exception:  # noqa: BLE001 - `check_prefect_server` says what is wrong
        return
    if not LOOPBACK.match(url.host):
        return
    variable = proxy_of_loopback_server(environment, url.host)
    problem = ""
    if variable:
        hosts = ",".join(LOOPBACK_HOSTS)
        problem = (
            f"workers started here would ask the proxy of {variable} for the server of this "
            f"machine: set {EXCEPTIONS}={hosts}"
        )
    yield check_of_problem(problem, WORKERS_CHECK, "workers reach the server without a proxy")


def check_access(url: httpx.URL, *, answers_anybody: bool) -> Check:
    """Return whether the server is protected against strangers.

    Anybody who can use the server's API can run commands with the account of its workers.

    Args:
        url: The address of the server's API.
        answers_anybody: The server answers without a password.
    """
    is_local = LOOPBACK.match(url.host) is not None
    port = url.port
    if port is None:
        port = HTTPS_PORT if url.scheme == "https" else HTTP_PORT
    # A server on this machine may listen on other addresses than the one that the URL names.
    reachable_hosts = _public_addresses(port) if is_local else [url.host]
    problems = []
    if answers_anybody and reachable_hosts:
        problems.append(
            f"anybody who reaches {', '.join(reachable_hosts)} port {port} can run commands "
            "as the workers: bind 127.0.0.1 and set PREFECT_SERVER_API_AUTH_STRING"
        )
    if not is_local and url.scheme == "http":
        problems.append("what goes to and fro can be read on the way: put TLS before it")
    if os.geteuid() == 0:
        problems.append("workers started here run as root: give them an account with few rights")
    if not os.environ.get(ROOTS):
        problems.append(f"runs may name any path this account can open: set {ROOTS}")
    # The words that are shown if there is no problem. A server elsewhere uses TLS then.
    openness = "open to this machine only" if is_local else "TLS"
    protection = "no password" if answers_anybody else "a password"
    return check_of_problem("; ".join(problems), ACCESS_CHECK, f"{openness}, {protection}")


def _public_addresses(port: int) -> list[str]:
    """Return the addresses, other than loopback, on which a process of this machine listens.

    If the system does not allow to list connections, the result is empty.
    """
    addresses = set()
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr.port == port:
                addresses.add(connection.laddr.ip)
    return sorted(address for address in addresses if not LOOPBACK.match(address))
