"""How a flow is started. What can be refused at once is refused before any work, by hand even before Prefect is there.

Nothing heavy is imported before it is needed, so that `virnuc predict --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from flows.parameters import FlowSettings, PredictSettings, RunSettings, command
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.errors import ConfigError, InputError, printable, storage_error

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from virnuc_core.reads.fast_parser import OnError

PARTIAL: Final = 6  # done, but some rows had to be set aside
LOOKED_AT_BYTES: Final = 1 << 16  # unpacked bytes of a batch, about
LOOKED_AT: Final = 2  # batches of a file: what is wrong in a small one shows after its good reads only
PREFECT_DEFAULTS: Final = {
    # the statistics client contends for an embedded server's database and logs a traceback where there is no network
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the first start migrates the database: 12 to 18 s on two cores, too close to the stock limit of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    # leases kept in a server's memory leak their slot when that server ends
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # threads of the core log without a run context; their records carry the run's id instead (tasks/step.py)
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


class PredictOptions(PredictSettings):
    """What the command takes beside the flow's own."""

    no_prefect: bool = Field(False, description="the same steps without a Prefect server; nothing is recorded there")


@command(PredictOptions, "reads")
def predict(settings: PredictOptions, debug: bool) -> int:
    """Say which reads are viral."""
    state = by_hand("flows.predict:predict", settings, debug, not settings.no_prefect)
    say(state.message, f"Results: {settings.out}")
    return PARTIAL if state.result().fates["failed"] else 0


def by_hand(flow: str, settings: FlowSettings, debug: bool, tell: bool = True) -> State[Any]:
    """The final state of `module:flow` on these settings; without `tell` no Prefect server hears of it."""
    base = EngineSpec()
    if profile := getattr(settings, "profile", None):
        from virnuc_core.profiles import load_profile

        base = load_profile(profile).engine
    prepare_prefect()
    check(settings, base)
    if tell:
        usable_home()
    from flows import flow_run
    from virnuc_core.reads.sources import hidden

    module, _, name = flow.partition(":")
    values = {name: getattr(settings, name) for name in type(settings).model_fields if name != "no_prefect"}
    if "reads" in values:  # which Prefect keeps
        values["reads"] = tuple(map(hidden, values["reads"]))
    return flow_run.run_flow(getattr(importlib.import_module(module), name), values, debug=debug, tell=tell)


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set himself.

    Prefect reads its settings on import, and hands them to the temporary server it starts where none is configured.
    """
    for name, value in PREFECT_DEFAULTS.items():
        environment.setdefault(name, value)


def usable_home() -> None:
    """Refuse a home in which an embedded server could not keep its database; a configured server needs none here."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME

    if PREFECT_API_URL.value() is not None or os.environ.get("PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        return
    home = PREFECT_HOME.value()
    database, way_out = home / "prefect.db", "set another PREFECT_HOME, or use virnuc predict --no-prefect"
    try:
        writable(home)
        if database.exists():
            with closing(sqlite3.connect(database, timeout=1.0)) as there:
                there.execute("PRAGMA schema_version")
    except ConfigError as error:
        raise ConfigError(f"Prefect's home {error}; {way_out}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"Prefect's database {database}: {error}; {way_out}") from error


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{printable(str(line))}\n" for line in lines))


def check(settings: FlowSettings, base: EngineSpec) -> Devices:
    """The devices by name, `auto` too, of a flow that can work; refuses at once what could only fail later.

    Nothing is written. `base`: the profile's engine settings.

    Errors: `InputError` for reads that are not there, are no reads, hold none, or are wanted twice from a pipe, for an
    inbox that is no folder and for files that one flow alone takes; `WeightsError` for what the headers of the weights
    tell; `DeviceError`; `ConfigError` for settings that cannot run on these devices or an output that cannot be
    written.
    """
    from virnuc_core.encoders.checkpoint import check_models
    from virnuc_core.engine.devices import resolve, resolve_engine
    from virnuc_core.reads.sources import is_remote

    if isinstance(settings, RunSettings):
        local = tuple(name for name in settings.reads if not is_remote(name))
        if local:
            readable(local, settings.on_error, alone=len(local) == len(settings.reads))
        if local and isinstance(settings, PredictSettings) and settings.write_viral:
            from virnuc_core.reads.subsets import readable_twice  # few runs need it

            readable_twice(local)
    settings.check_place()
    settings.check_own_files()
    check_models(settings.models)
    found = resolve(Devices.parse(settings.devices))
    resolve_engine(settings.engine(base), found[0].kind)
    writable(settings.out)
    names = tuple(device.id if device.kind == "cuda" else str(core) for core, device in enumerate(found))
    return Devices(kind=found[0].kind, ids=names)


def readable(reads: tuple[str, ...], on_error: OnError, *, alone: bool = True) -> None:
    """Parse the beginning of every file; `alone`: there are no other reads than these.

    Pipes and standard input are left for staging, which alone may draw from them. An empty file among others is
    counted by staging; `InputError` when all of them are empty.
    """
    from virnuc_core.reads.fast_parser import ParseLog
    from virnuc_core.reads.parse import parse
    from virnuc_core.reads.sources import find_inputs

    files, empty = find_inputs(reads).files, []
    for name in files:
        if Path(name).is_file():
            log = ParseLog(on_error)
            found = sum(len(batch) for batch in islice(parse((name,), log, block_bytes=LOOKED_AT_BYTES), LOOKED_AT))
            empty += [name] * (not found and not log.skipped_by_file)
    if alone and empty and len(empty) == len(files):
        raise InputError("holds no reads", file=empty[0], hint="was it written to the end? name a file with reads")


def writable(out: Path) -> None:
    """Check that `out` is or can become a directory to write in; leaves nothing behind.

    A file is really made, and gone at once: permission bits know nothing of full, frozen or read-only disks.
    """
    nearest = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{out}: {nearest} is a file; choose another directory")
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"virnuc")
            file.flush()
    except OSError as error:
        raise storage_error(error, out) or ConfigError(
            f"{out}: cannot write in {nearest}: {error.strerror or error}; make room or choose another directory"
        ) from error
