"""What the command sets for Prefect where the user has not set it."""

import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import Final

PREFECT_DEFAULTS: Final = {
    # also prevents Prefect's notice that use is counted
    "DO_NOT_TRACK": "1",
    # the statistics client contends for a temporary server's database, and logs a traceback where
    # there is no network
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the first start migrates the database: 12 to 18 s on two cores, too close to the stock limit
    # of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    # threads of the core log without a run context; their records carry the run's id instead
    # (tasks/server_logs.py)
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults that the user has not set himself.

    Prefect reads them on its import, so this comes before it. A temporary server inherits them.

    Args:
        environment: The environment to change, that of this process unless given.
    """
    set_prefect_defaults(environment)
    bypass_proxies(environment)


def set_prefect_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables of Prefect that the user has not set.

    Args:
        environment: The environment to change.
    """
    for name, value in PREFECT_DEFAULTS.items():
        environment.setdefault(name, value)


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Exclude this machine's loopback addresses from the user's proxies, which Prefect would use.

    Args:
        environment: The environment to change.
    """
    # A command that a server runs does not need it, so it is imported here.
    from virnuc_core.proxies import bypass_for_loopback

    bypass_for_loopback(environment, has_socks=find_spec("socksio") is not None)
