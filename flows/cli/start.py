"""How a flow is started. What can be refused at once is refused before any work, by hand before the flow is loaded.

Nothing heavy is imported before it is needed, so that `virnuc predict --help` answers at once."""

import atexit
import importlib
import inspect
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, create_model
from pydantic_core import to_jsonable_python

from virnuc.flows.cli.options import Flag, OnTerminal, command
from virnuc.flows.cli.prestart import prestart_digest, prestart_workers
from virnuc.flows.output_folder import require_writable
from virnuc.flows.parameters import WITHOUT
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core.config import (
    INPUT_FIELDS,
)
from virnuc_core.errors import (
    ConfigError,
    StorageError,
    VirnucError,
    printable,
)
from virnuc_core.lease import command_start_s
from virnuc_core.rundir import parent_bound_command

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


PARTIAL, CRITERION_FAILED, NOT_JUDGED = (
    6,
    5,
    7,
)  # exit codes; the first: some rows had to be set aside
FLOWS: Final = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))[
    "flows"
]
HOME_BYTES: Final = 1 << 24  # of an own server's database and results, at least
APP: Final = "prefect.server.api.server:create_app"
SERVER: Final = (
    f"import uvicorn; uvicorn.run('{APP}', factory=True, fd=int(sys.argv[1]), log_level='error')"
)


def starts(name: str, model: type[BaseModel], *positional: str) -> Callable[..., int]:
    """The command that runs a flow of `commands.toml` by hand, with the model's fields as options, and says its end:
    what the flow's file of text holds (not in JSON), the state's message, and the facts."""

    @command(create_model(model.__name__, __base__=(model, OnTerminal)), *positional)
    def started(settings: Any) -> int:
        of = FLOWS[name]
        state = by_hand(of["flow"], settings)
        code, page = exit_code(state), _in_the_ui(state.state_details.flow_run_id)
        told = {name: fact.format(of=settings, ui=page) for name, fact in of["facts"].items()}
        if settings.as_json:
            data = to_jsonable_python(state.result(raise_on_failure=False), fallback=str)
            body = {"state": state.name, "message": state.message, "exit_code": code, "data": data}
            say(
                json.dumps(
                    body | {name.lower().replace(" ", "_"): fact for name, fact in told.items()},
                    indent=2,
                )
            )
            return code
        if "text" in of:
            say(Path(of["text"].format(of=settings)).read_text(encoding="utf-8"))
        say(state.message, *(f"{name}: {fact}" for name, fact in told.items()))
        return code

    return started


def exit_code(state: "State[Any]") -> int:
    """A flow's, by how it ended: 0, or one of those above."""
    from virnuc.flows.outcome import NOT_MET, REJECTED  # it imports Prefect

    if state.name in (NOT_MET, REJECTED):
        return CRITERION_FAILED
    found = state.result()
    if getattr(found, "outcome", "") == "not judged":
        return NOT_JUDGED
    return PARTIAL if getattr(found, "fates", {}).get("failed") else 0


def _in_the_ui(flow_run_id: object) -> str:
    from prefect.settings import PREFECT_HOME, PREFECT_UI_URL

    from virnuc.tasks.server_connection import connection

    address, run, first = PREFECT_UI_URL.value(), f"/runs/flow-run/{flow_run_id}", ""
    if connection.embedded is not None:
        home = (
            ""
            if PREFECT_HOME.value() == Path.home() / ".prefect"
            else f"PREFECT_HOME={PREFECT_HOME.value()} "
        )
        address, first = "http://127.0.0.1:4200", f"{home}prefect server start, then "
    return f"{first}{address}{run}"


class PredictOptions(PredictSettings):
    """What the command takes beside the flow's own."""

    no_prefect: Flag = Field(
        False, description="the same steps without a Prefect server; nothing is recorded there"
    )


predict = starts("predict", PredictOptions, "reads")


def by_hand(flow: str, settings: Any) -> "State[Any]":
    """The final state of `module:flow` on these settings, which are also those of the terminal."""
    prepare_prefect()
    module, _, name = flow.partition(":")

    def tell(what: str) -> None:
        if not settings.quiet:
            told = f"{what}, {time.monotonic() - command_start_s():.1f} s after the command"
            sys.stderr.write(f"{time.strftime('%X')}  {told}\n")

    ready: Callable[[], object] | None = None
    named = False
    if not getattr(settings, "no_prefect", False):
        from prefect.settings import PREFECT_API_URL

        ready, named = lambda: None, PREFECT_API_URL.value() is not None
        if not named:
            ready = None if settings.is_done() else own_server(tell, debug=settings.debug)
    with ExitStack() as prestarted:
        if not named:  # a named server says whose turn it is on the devices
            prestart_workers(settings, prestarted)
        devices = preflight(settings)
        if not named:
            prestart_digest(settings)
        on = getattr(settings, "cluster", None) or devices
        tell(f"{name} into {printable(str(settings.out))} on {on}: reads and weights will do")
        from virnuc.flows import flow_run
        from virnuc_core.reads.sources import redact_url

        called = getattr(importlib.import_module(module), name)
        values = {name: getattr(settings, name) for name in inspect.signature(called).parameters}
        values |= {
            name: tuple(map(redact_url, values[name])) for name in INPUT_FIELDS if name in values
        }  # which Prefect keeps
        tell("Prefect is loaded")
        state = flow_run.run_flow(called, values, settings, ready)
    tell("done")
    return state


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set himself; Prefect reads it on import, and a server of our own inherits it."""
    for name, value in tomllib.loads(
        Path(__file__).with_name("prefect.toml").read_text(encoding="utf-8")
    ).items():
        environment.setdefault(name, value)


def usable_home() -> None:
    """Refuse a home in which a server of our own could not keep its database."""
    from prefect.settings import PREFECT_HOME

    if os.environ.get("PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        return
    home = PREFECT_HOME.value()
    database, way_out = home / "prefect.db", f"set another PREFECT_HOME, or use {WITHOUT}"
    try:
        require_writable(home, HOME_BYTES, "a server's records")
        if database.exists():
            with closing(sqlite3.connect(database, timeout=1.0)) as there:
                there.execute("PRAGMA schema_version")
    except (ConfigError, StorageError) as error:
        raise ConfigError(f"Prefect's home {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"Prefect's database {database}: {error}; {way_out}") from error


def own_server(tell: Callable[[str], None], *, debug: bool) -> Callable[[], None]:
    """Start a Prefect server of this process's own, which from then on is the named one; returns what waits for it and
    tells of it.

    A Ctrl-C at the terminal does not reach it, and it ends with this process, however that ends. Prefect's own would
    be imported here, and start later. Errors: those of `usable_home`; of what is returned `VirnucError`: no answer."""
    usable_home()
    from prefect.context import refresh_global_settings_context
    from prefect.settings import (
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
        get_current_settings,
    )

    log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
    own = {
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    own |= get_current_settings().to_environment_variables(exclude_unset=True)
    with (
        socket.socket() as door
    ):  # bound before the server is there: who knocks waits, and no other has its port
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        door.bind(("127.0.0.1", 0))
        door.listen(128)
        os.environ["PREFECT_API_URL"] = url = f"http://127.0.0.1:{door.getsockname()[1]}/api"
        how: dict[str, Any] = {"start_new_session": True, "stderr": None if debug else log}
        words, env = parent_bound_command(SERVER, str(door.fileno())), {**os.environ, **own}
        server = subprocess.Popen(words, env=env, pass_fds=[door.fileno()], **how)

    def end() -> None:  # what Prefect's threads still had to tell has been told
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=5)
        server.kill()

    atexit.register(end)
    refresh_global_settings_context()

    def wait() -> None:
        import httpx

        from virnuc.tasks.server_connection import connection

        connection.embedded = server
        try:
            limit_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
            httpx.get(f"{url}/health", timeout=limit_s).raise_for_status()
        except httpx.HTTPError as error:
            log.seek(0)
            text = log.read().decode(errors="replace")
            said = re.findall(r"^[\w.]+(?:Error|Exception): .*", text, re.MULTILINE) or [error]
            raise VirnucError(
                f"Prefect's own server does not start: {said[-1]}; mend it, or use {WITHOUT}"
            ) from error
        tell("its server answers")

    return wait


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{printable(str(line))}\n" for line in lines))
