"""How a flow is started. What can be refused at once is refused before any work, by hand before the flow is loaded.

Nothing heavy is imported before it is needed, so that `virnuc predict --help` answers at once."""

import importlib
import inspect
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field, create_model
from pydantic_core import to_jsonable_python

from virnuc.flows.cli.options import Flag, OnTerminal, command
from virnuc.flows.cli.prestart import prestart_digest, prestart_workers
from virnuc.flows.cli.temporary_server import start_temporary_server
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core.config import (
    INPUT_FIELDS,
)
from virnuc_core.errors import (
    printable,
)
from virnuc_core.lease import command_start_s

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
            ready = None
            if not settings.is_done():
                ready = _start_server(tell, debug=settings.debug)
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


def _start_server(tell: Callable[[str], None], *, debug: bool) -> Callable[[], None]:
    """Start a temporary server. Return the function that waits for it and then tells of it."""
    server = start_temporary_server(debug=debug)

    def wait() -> None:
        server.wait()
        tell("its server answers")

    return wait


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set himself; Prefect reads it on import, and a server of our own inherits it."""
    for name, value in tomllib.loads(
        Path(__file__).with_name("prefect.toml").read_text(encoding="utf-8")
    ).items():
        environment.setdefault(name, value)


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{printable(str(line))}\n" for line in lines))
