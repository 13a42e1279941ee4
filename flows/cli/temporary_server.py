"""Starts, authenticates, awaits and ends the temporary Prefect server of a command.

A command starts one where the user named no server. `server_guard` is what runs in its process.
Prefect can start such a server itself, but later, within this process, and it would answer every
user of the machine.
"""

import atexit
import logging
import os
import re
import secrets
import socket
import sqlite3
import subprocess
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import IO, Any, Final
from urllib.request import getproxies

from virnuc.flows.output_folder import require_writable
from virnuc.flows.parameters import WITHOUT
from virnuc_core.errors import ConfigError, StorageError, VirnucError
from virnuc_core.rundir import parent_bound_command

MIN_HOME_BYTES: Final = 1 << 24  # of a server's database and results, at least
STOP_S: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
PENDING_CONNECTIONS: Final = 128
USER: Final = "virnuc"
GUARDED_APP: Final = "virnuc.flows.cli.server_guard:create_app"
SERVER_PROGRAM: Final = (
    f"import uvicorn; "
    f"uvicorn.run('{GUARDED_APP}', factory=True, fd=int(sys.argv[1]), log_level='error')"
)
# what a user can do if no server can be had; for the error messages
USE_NO_SERVER: Final = f"use {WITHOUT}"


@dataclass(frozen=True)
class TemporaryServer:
    """A Prefect server that this process has started, and that answers nobody else.

    Attributes:
        process: The server's process. It ends with this one, however that ends.
        url: The address of its API.
        password: The secret part of the authentication string, which is `virnuc:PASSWORD`.
        log: What the server writes to its standard error, if it goes to no terminal.
        alternative: What a user can do if the server does not start.
    """

    process: subprocess.Popen[bytes]
    url: str
    password: str
    log: IO[bytes]
    alternative: str

    def wait(self) -> None:
        """Return once the server answers.

        Raises:
            VirnucError: It ended or did not answer within Prefect's limit.
        """
        import httpx
        from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

        from virnuc.tasks.server_connection import connection

        connection.embedded = self.process
        limit_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        try:
            answer = httpx.get(f"{self.url}/health", timeout=limit_s, auth=(USER, self.password))
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self.log.seek(0)
            log_text = self.log.read().decode(errors="replace")
            errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", log_text, re.MULTILINE)
            reason = errors[-1] if errors else error
            raise VirnucError(
                f"Prefect's own server does not start: {reason}; mend it, or {self.alternative}"
            ) from error

    def stop(self) -> None:
        """End the server. What Prefect's threads still had to report has been reported by now."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_S)
        self.process.kill()


def start_temporary_server(*, debug: bool, alternative: str = USE_NO_SERVER) -> TemporaryServer:
    """Start a Prefect server, which from then on is the one that this process's clients ask.

    It answers nobody without a random secret, which is handed to it through a pipe and which no
    other process gets. A Ctrl-C at the terminal does not reach it, and it ends with this process.
    Prefect must be configured before (`prepare_prefect`), and no server may be named.

    Args:
        debug: Let the server write its errors to the standard error of this process.
        alternative: What a user can do without this server, for error messages.

    Raises:
        ConfigError: Prefect's home cannot hold the server's database.
    """
    require_usable_home(alternative)
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    password = secrets.token_urlsafe(32)
    environment = os.environ | {
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    environment |= get_current_settings().to_environment_variables(exclude_unset=True)
    log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
    # The port is bound before the server starts. So clients that connect early wait, and no other
    # process can get the port.
    with socket.socket() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((LOOPBACK, 0))
        listener.listen(PENDING_CONNECTIONS)
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/api"
        os.environ["PREFECT_API_URL"] = url
        environment["PREFECT_API_URL"] = url
        process = subprocess.Popen(
            parent_bound_command(SERVER_PROGRAM, str(listener.fileno())),
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stderr=None if debug else log,
        )
    assert process.stdin is not None
    # If the server has already ended, the pipe is broken. `wait` reports that.
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(f"{USER}:{password}\n".encode())
    server = TemporaryServer(process, url, password, log, alternative)
    atexit.register(server.stop)
    refresh_global_settings_context()
    _authenticate(f"{USER}:{password}")
    return server


def require_usable_home(alternative: str = USE_NO_SERVER) -> None:
    """Raise an error if Prefect's home directory cannot hold a server's database.

    Args:
        alternative: What a user can do without a server, for error messages.

    Raises:
        ConfigError: The home is full, cannot be written, or its database is none.
    """
    from prefect.settings import PREFECT_HOME

    if os.environ.get("PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        return
    home = PREFECT_HOME.value()
    database = home / "prefect.db"
    way_out = f"set another PREFECT_HOME, or {alternative}"
    try:
        require_writable(home, MIN_HOME_BYTES, "a server's records")
        if database.exists():
            with closing(sqlite3.connect(database, timeout=1.0)) as opened:
                opened.execute("PRAGMA schema_version")
    except (ConfigError, StorageError) as error:
        raise ConfigError(f"Prefect's home {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"Prefect's database {database}: {error}; {way_out}") from error


def _authenticate(auth_string: str) -> None:
    """Let the Prefect clients of this process use `auth_string`, and no other server's credentials.

    The settings are changed in memory. An environment variable would be inherited by workers.
    """
    from prefect import context
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY

    current = context.GLOBAL_SETTINGS_CONTEXT
    updates: dict[Any, Any] = {PREFECT_API_AUTH_STRING: auth_string, PREFECT_API_KEY: None}
    settings = current.settings.copy_with_update(updates=updates)
    # Custom headers could contain credentials for another server, so they are removed.
    client = settings.client.model_copy(update={"custom_headers": {}})
    settings = settings.model_copy(update={"client": client})
    context.GLOBAL_SETTINGS_CONTEXT = current.model_copy(update={"settings": settings})
    _bypass_proxy_for_loopback()
    logging.getLogger("websockets").setLevel(logging.INFO)  # at DEBUG it logs the headers it sends


def _bypass_proxy_for_loopback() -> None:
    """Exclude the loopback address from proxies.

    A proxy would be sent the secret, and could not reach the server.
    """
    excluded_hosts = []
    hosts_of_user = getproxies().get("no")  # Python keeps the user's no_proxy under this key
    if hosts_of_user:
        excluded_hosts.append(hosts_of_user)
    excluded_hosts.append(LOOPBACK)
    os.environ["no_proxy"] = ",".join(excluded_hosts)
