"""Starts, authenticates, awaits and ends the temporary Prefect server of a command.

A command starts one where the user named no server. `server_guard` is what runs in its process.
Prefect can start such a server itself, but later, in a new process that imports Prefect again, and
it would answer every user of the machine.

Half of a small run's processor time is the start of this server. So its process begins as a copy of
the command's, which has imported Prefect already. Where a copy is not safe, a new process runs the
same application.
"""

import atexit
import importlib
import logging
import os
import re
import secrets
import socket
import sqlite3
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import psutil

from virnuc.flows.cli.forked_process import ForkedProcess, can_fork
from virnuc.flows.output_folder import require_writable
from virnuc.flows.parameters import WITHOUT
from virnuc_core.errors import ConfigError, StorageError, VirnucError
from virnuc_core.first_use import FirstUseLock
from virnuc_core.rundir import parent_bound_command, write_text_atomically
from virnuc_core.system_errors import describe_system_error

MIN_HOME_BYTES: Final = 1 << 24  # of a server's database and results, at least
STOP_S: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
PENDING_CONNECTIONS: Final = 128
USER: Final = "virnuc"
DATABASE_URL: Final = "PREFECT_SERVER_DATABASE_CONNECTION_URL"  # if set, the home has no database
MIGRATE: Final = "PREFECT_SERVER_DATABASE_MIGRATE_ON_START"  # to look for migrations takes 0.2 s
POLL_S: Final = 5.0  # how long one attempt to reach the server takes
# what shows that a server works; a process that only waits uses a little of each as well
MIN_PROGRESS_S: Final = 0.05  # processor time
MIN_PROGRESS_BYTES: Final = 4096  # read or written; one page of a database
SERVER_PROGRAM: Final = (
    "from virnuc.flows.cli.server_guard import serve_new; serve_new(int(sys.argv[1]))"
)
# Packages that the server and the command both import. A copy of the command has them.
SHARED_PACKAGES: Final = ("prefect.main", "fastapi")
# A package of Prefect's queues would check the types of its arguments. To write these checks takes
# a tenth of a second at each import.
SKIP_TYPE_CHECKS: Final = {"PY_KEY_VALUE_DISABLE_BEARTYPE": "true"}
# What a server gets in its environment
SERVER_DEFAULTS: Final = {
    # as Prefect sets them for a server of its own that lives as long as one process
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    **SKIP_TYPE_CHECKS,
}
log = logging.getLogger(__name__)
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
        first_use: The lock on a database that this server sets up. It is released once the server
            answers. None if the database is no file in Prefect's home.
    """

    process: subprocess.Popen[bytes] | ForkedProcess
    url: str
    password: str
    log: IO[bytes]
    alternative: str
    first_use: "FirstUse | None" = None

    def wait(self) -> None:
        """Return once the server answers. Mark its database as ready, and let others use it.

        From now on the connection of this process knows that the server is its own.

        Raises:
            VirnucError: It ended, or gave no sign of life within Prefect's limit.
        """
        import httpx

        from virnuc.tasks.server_connection import connection

        connection.embedded = self.process
        try:
            self._wait_for_answer()
            if self.first_use is not None:
                self.first_use.finish()
                self.first_use.release()
        except httpx.HTTPError as error:
            self.log.seek(0)
            log_text = self.log.read().decode(errors="replace")
            # The last lines of tracebacks. The last traceback tells why the server ended.
            errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", log_text, re.MULTILINE)
            reason = errors[-1] if errors else error
            self.stop()  # one that hangs would stay as long as this process
            raise VirnucError(
                f"Prefect's own server does not start: {reason}; mend it, or {self.alternative}"
            ) from error

    def _wait_for_answer(self) -> None:
        """Ask the server until it answers.

        A server that migrates its database on a busy machine or on a slow disk may need minutes. So
        the limit is for the time in which its process gave no sign of life, not for the whole time.

        Raises:
            httpx.HTTPError: It ended, or did not answer, compute, read or write within the limit.
        """
        import httpx
        from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

        limit_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        last_progress = Progress(0.0, 0)
        give_up_s = time.monotonic() + limit_s
        # trust_env=False: a proxy would be sent the password, and could not reach the server.
        with httpx.Client(auth=(USER, self.password), trust_env=False) as client:
            while True:
                timeout_s = min(limit_s, POLL_S)
                if self.process.poll() is not None:
                    # Another user may have its port now, and must not get the password.
                    raise httpx.ConnectError("its process has ended")
                try:
                    client.get(f"{self.url}/health", timeout=timeout_s).raise_for_status()
                    return
                except httpx.TimeoutException:
                    progress = progress_of(self.process.pid)
                    if progress.shows_work_since(last_progress):
                        last_progress = progress
                        give_up_s = time.monotonic() + limit_s
                    elif time.monotonic() >= give_up_s:
                        raise

    def stop(self) -> None:
        """End the server, by force if it takes longer than `STOP_S`. Let others use its database.

        Prefect's threads must have sent all reports before.
        """
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_S)
        self.process.kill()
        if self.first_use is not None:
            self.first_use.release()


@dataclass(frozen=True)
class Progress:
    """What a process has done since its start.

    Attributes:
        cpu_s: The processor time that it has used.
        io_bytes: The bytes that it has read and written, also where the system kept them in memory.
            The size of its database is no better sign: servers of other runs write to it, too.
    """

    cpu_s: float
    io_bytes: int

    def shows_work_since(self, earlier: "Progress") -> bool:
        """Return whether the process has worked since an earlier moment, and not only waited."""
        has_computed = self.cpu_s >= earlier.cpu_s + MIN_PROGRESS_S
        has_transferred = self.io_bytes >= earlier.io_bytes + MIN_PROGRESS_BYTES
        return has_computed or has_transferred


def progress_of(pid: int) -> Progress:
    """Return what a process has done since its start.

    Numbers that the system does not tell are 0, as in a sandbox without `/proc`, or if the process
    has ended.
    """
    cpu_s = 0.0
    io_bytes = 0
    with suppress(psutil.Error, OSError):
        times = psutil.Process(pid).cpu_times()
        cpu_s = times.user + times.system
    # psutil raises a RuntimeError if the kernel does not count bytes.
    with suppress(psutil.Error, OSError, RuntimeError):
        counters = psutil.Process(pid).io_counters()
        io_bytes = counters.read_chars + counters.write_chars
    return Progress(cpu_s, io_bytes)


class FirstUse:
    """The first use of a Prefect home by one version of Prefect, by one process at a time.

    The first server in a home creates or migrates its SQLite database. Servers that do so at the
    same time damage each other's work. A marker file tells that the database is ready, so later
    commands need no lock, and their servers need not compare the database with all migrations.
    """

    def __init__(self, home: Path) -> None:
        """Wait until the database of a home is ready, or until this process may set it up.

        Args:
            home: Prefect's home. It is created if it is missing.

        Raises:
            OSError: The home cannot be written to.
        """
        from prefect import __version__ as prefect_version

        self._marker = home / f".virnuc-database-{prefect_version}"
        self._database = home / "prefect.db"
        self._lock = FirstUseLock(home, "Prefect's database", self._is_ready)
        self._lock.take()
        if self._lock.is_held:
            # A new database file may get the inode of one that was removed.
            with suppress(OSError):
                self._marker.unlink(missing_ok=True)

    @property
    def is_set_up(self) -> bool:
        """Return whether the database that Prefect's settings name has been set up before.

        Settings other than the environment may name another database than that of the home.
        """
        from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

        own_url = f"sqlite+aiosqlite:///{self._database}"
        return not self._lock.is_held and PREFECT_SERVER_DATABASE_CONNECTION_URL.value() == own_url

    def _is_ready(self) -> bool:
        """Return whether this version of Prefect has set up the database that is there now.

        The marker file, whose name has the version, holds the identity of the database file for
        which it was written.
        """
        try:
            return self._marker.read_text() == self._database_identity()
        except (OSError, sqlite3.Error):
            return False

    def _database_identity(self) -> str:
        """Return the numbers of the database's disk and file (device and inode) and its revision.

        A file that replaces the database has another inode number, so that the two can be told
        apart. The revision is that of the last migration. It changes if the user takes migrations
        back, or if another version of Prefect uses the database.

        Raises:
            OSError: There is no database, or it cannot be read.
            sqlite3.Error: It is no database of Prefect's.
        """
        status = self._database.stat()
        with closing(sqlite3.connect(self._database, timeout=1.0)) as database:
            revisions = database.execute("SELECT version_num FROM alembic_version").fetchall()
        names = " ".join(name for (name,) in revisions)
        return f"{status.st_dev} {status.st_ino} {names}"

    def finish(self) -> None:
        """Record that the database is ready."""
        if self._lock.is_held:
            with suppress(OSError, sqlite3.Error, VirnucError):
                write_text_atomically(self._marker, self._database_identity())

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._lock.release()


def start_temporary_server(*, debug: bool, alternative: str = USE_NO_SERVER) -> TemporaryServer:
    """Start a Prefect server, which from then on is the one that this process's clients ask.

    It answers nobody without a random secret, which no other process gets. A Ctrl-C at the terminal
    does not reach it, and it ends with this process. Prefect must be configured before
    (`prepare_prefect`), and no server may be named.

    Args:
        debug: Let the server write its errors to the standard error of this process.
        alternative: What a user can do without this server, for error messages.

    Raises:
        ConfigError: Prefect's home cannot hold the server's database.
    """
    require_usable_home(alternative)
    first_use = _begin_first_use(alternative)
    try:
        server = _start_process(first_use, debug=debug, alternative=alternative)
    except BaseException:
        if first_use is not None:
            first_use.release()  # others need not wait for a server that does not start
        raise
    atexit.register(server.stop)
    _use_server(server)
    return server


def _begin_first_use(alternative: str) -> FirstUse | None:
    """Wait until this process may start a server in Prefect's home.

    Returns:
        The lock on the database, to be released once the server answers. None if the user has
        named a database elsewhere.

    Raises:
        ConfigError: The home cannot be written to.
    """
    from prefect.settings import PREFECT_HOME

    if os.environ.get(DATABASE_URL):
        return None
    home = PREFECT_HOME.value()
    try:
        return FirstUse(home)
    except OSError as error:
        raise ConfigError(
            f"Prefect's home {home}: {describe_system_error(error)}; set another PREFECT_HOME, "
            f"or {alternative}"
        ) from error


def _start_process(first_use: FirstUse | None, *, debug: bool, alternative: str) -> TemporaryServer:
    """Start the process of a server, which alone gets its secret.

    `PREFECT_API_URL` is set in this process, so that Prefect's clients here ask this server.

    Args:
        first_use: The lock on the database, which the server holds until it answers.
        debug: Let the server write its errors to the standard error of this process.
        alternative: What a user can do without this server, for error messages.

    Raises:
        OSError: The system refuses the process, the port or the file for its log.
    """
    password = secrets.token_urlsafe(32)
    secret = f"{USER}:{password}"
    server_log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
    error_file = None if debug else server_log.fileno()
    is_set_up = first_use is not None and first_use.is_set_up
    # The port is bound before the server starts. So clients that connect early wait, and no other
    # process can get the port.
    with socket.socket() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((LOOPBACK, 0))
        listener.listen(PENDING_CONNECTIONS)
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/api"
        process: subprocess.Popen[bytes] | ForkedProcess
        environment = _server_environment(url, is_set_up=is_set_up)
        if can_fork():
            process = _fork_server(listener.fileno(), error_file, secret, environment)
        else:
            process = _spawn_server(listener.fileno(), error_file, secret, environment)
    os.environ["PREFECT_API_URL"] = url
    return TemporaryServer(process, url, password, server_log, alternative, first_use)


def _server_environment(url: str, *, is_set_up: bool) -> dict[str, str]:
    """Return the environment of a server, with Prefect's settings that are in force here.

    Args:
        url: The address of the server.
        is_set_up: The database has all migrations of this version of Prefect.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    environment = {**os.environ, **SERVER_DEFAULTS, **settings, "PREFECT_API_URL": url}
    if is_set_up:
        environment[MIGRATE] = "false"
    return environment


def _fork_server(
    listening_socket: int, error_file: int | None, secret: str, environment: dict[str, str]
) -> ForkedProcess:
    """Start a server in a copy of this process. The secret never leaves the memory of the two.

    Args:
        listening_socket: The number of the socket at which the server is asked.
        error_file: The number of the file for its standard error. None keeps that of this process.
        secret: The authentication string, as `user:password`.
        environment: The environment of the server.
    """
    from virnuc.flows.cli.server_guard import serve_copied

    for package in SHARED_PACKAGES:
        # A damaged package raises errors of any type. The server will say so.
        with suppress(Exception):
            importlib.import_module(package)
    serve = partial(serve_copied, listening_socket, secret, environment)
    return ForkedProcess(serve, kept_file=listening_socket, error_file=error_file)


def _spawn_server(
    listening_socket: int, error_file: int | None, secret: str, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server in a new process, and hand its secret to it through a pipe.

    The arguments are those of `_fork_server`.
    """
    process = subprocess.Popen(
        parent_bound_command(SERVER_PROGRAM, str(listening_socket)),
        env=environment,
        pass_fds=[listening_socket],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stderr=error_file,
    )
    assert process.stdin is not None
    # If the server has already ended, the pipe is broken. `wait` reports that.
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(f"{secret}\n".encode())
    return process


def require_usable_home(alternative: str = USE_NO_SERVER) -> None:
    """Raise an error if Prefect's home directory cannot hold a server's database.

    Args:
        alternative: What a user can do without a server, for error messages.

    Raises:
        ConfigError: The home is full or cannot be written, or its database is no SQLite file.
    """
    from prefect.settings import PREFECT_HOME

    if os.environ.get(DATABASE_URL):  # the user keeps the database elsewhere
        return
    home = PREFECT_HOME.value()
    database = home / "prefect.db"
    way_out = f"set another PREFECT_HOME, or {alternative}"
    try:
        require_writable(home, MIN_HOME_BYTES, "a server's records")
        if database.exists():
            with closing(sqlite3.connect(database, timeout=1.0)) as opened:
                opened.execute("PRAGMA schema_version")  # an error if it is no SQLite file
    except (ConfigError, StorageError) as error:
        raise ConfigError(f"Prefect's home {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"Prefect's database {database}: {error}; {way_out}") from error


def _use_server(server: TemporaryServer) -> None:
    """Let the Prefect clients of this process ask a server, and use no other server's credentials.

    The secret is changed in memory. An environment variable would be inherited by workers.
    """
    from prefect import context
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_KEY,
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    )

    current = context.GLOBAL_SETTINGS_CONTEXT
    updates: dict[Any, Any] = {
        PREFECT_API_URL: server.url,
        PREFECT_API_AUTH_STRING: f"{USER}:{server.password}",
        PREFECT_API_KEY: None,
    }
    if "heartbeat_frequency" not in current.settings.flows.model_fields_set:
        # A flow run waits up to a second for the end of the thread that says it is alive. The
        # server ends with this command, so nobody would miss a run that says nothing.
        updates[PREFECT_FLOWS_HEARTBEAT_FREQUENCY] = None
    settings = current.settings.copy_with_update(updates=updates)
    # Custom headers could contain credentials for another server, so they are removed.
    client = settings.client.model_copy(update={"custom_headers": {}})
    settings = settings.model_copy(update={"client": client})
    context.GLOBAL_SETTINGS_CONTEXT = current.model_copy(update={"settings": settings})
    logging.getLogger("websockets").setLevel(logging.INFO)  # at DEBUG it logs the headers it sends
