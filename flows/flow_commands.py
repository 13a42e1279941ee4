"""Commands that start a flow by hand. What can be refused at once is refused before Prefect starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

from flows.parameters import InboxSettings, PredictSettings, RunSettings, command
from virnuc_core.config import EngineSpec

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

PARTIAL: Final = 6  # done, but some rows had to be set aside
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


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set himself.

    Prefect reads its settings on import, and hands them to the temporary server it starts where none is configured.
    """
    for name, value in PREFECT_DEFAULTS.items():
        environment.setdefault(name, value)


def start(flow: str, settings: RunSettings | InboxSettings, debug: bool) -> State[Any]:
    """The final state of `module:flow` on these settings."""
    base = EngineSpec()
    if profile := getattr(settings, "profile", None):
        from virnuc_core.profiles import load_profile

        base = load_profile(profile).engine
    prepare_prefect()
    from flows import preflight

    preflight.check(settings, base)
    from flows.local_run import run_flow

    module, _, name = flow.partition(":")
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    return run_flow(getattr(importlib.import_module(module), name), values, debug=debug)


def say(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


@command(PredictSettings, "reads")
def predict(settings: PredictSettings, debug: bool) -> int:
    """Say which reads are viral."""
    state = start("flows.predict:predict", settings, debug)
    say(state.message, f"Results: {settings.out}")
    return PARTIAL if state.result().fates["failed"] else 0


@command(InboxSettings)
def predict_inbox(settings: InboxSettings, debug: bool) -> int:
    """Predict each new file of a folder, once."""
    state = start("flows.predict_inbox:predict_inbox", settings, debug)
    say(state.message, f"Fates: {settings.out / 'inbox.tsv'}")
    return 0
