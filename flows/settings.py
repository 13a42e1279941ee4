"""The one place that reads and sets the environment, for Prefect and for this command.

`prepare` must run before Prefect is imported: Prefect reads its settings on import, and hands them to the temporary
server it starts where no server is configured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

PREFECT_DEFAULTS: Final[Mapping[str, str]] = {
    # the statistics client contends for an embedded server's database and logs a traceback where there is no network
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the first start migrates the database: 12 to 18 s on two cores, too close to the stock limit of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    # leases kept in a server's memory leak their slot when that server ends
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # threads of the core log without a run context; their records carry the run's id instead (tasks/logs.py)
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def prepare(environment: MutableMapping[str, str] | None = None) -> None:
    """Set what the user has not set himself; of use only before Prefect is imported."""
    environment = os.environ if environment is None else environment
    for name, value in PREFECT_DEFAULTS.items():
        environment.setdefault(name, value)


def models_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """The models directory named by `VIRNUC_MODELS`, for commands that are given none."""
    named = (os.environ if environment is None else environment).get("VIRNUC_MODELS")
    return Path(named) if named else None


def plain_output(environment: Mapping[str, str] | None = None) -> bool:
    """Whether to write without colours and moving bars: `NO_COLOR` is set, or the terminal is `dumb`."""
    environment = os.environ if environment is None else environment
    return bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
