"""What the command sets for Prefect where the user has not set it."""

import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import Final

LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
PROXY_VARIABLES: Final = ("all_proxy", "http_proxy", "https_proxy")  # also in capital letters

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
    # (tasks/task.py)
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def prepare_prefect(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults that the user has not set himself.

    Prefect reads them on its import, so this comes before it. A temporary server inherits them.

    Args:
        environment: The environment to change, that of this process unless given.
    """
    for name, value in PREFECT_DEFAULTS.items():
        environment.setdefault(name, value)
    bypass_proxies(environment)


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Exclude this machine's loopback addresses from the user's proxies.

    A proxy cannot reach a server on this machine, and would be sent its password. SOCKS proxies
    are removed if the package for them is missing: Prefect's client would fail with an ImportError,
    also for servers that need no proxy. Downloads of reads never use SOCKS proxies.

    Args:
        environment: The environment to change.
    """
    excluded_hosts = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host.strip() for host in excluded_hosts.split(",") if host.strip()]
    hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    environment["no_proxy"] = ",".join(hosts)
    # Some programs read one spelling, some the other.
    environment["NO_PROXY"] = environment["no_proxy"]

    if find_spec("socksio") is None:
        for variable in PROXY_VARIABLES:
            for spelling in (variable, variable.upper()):
                if environment.get(spelling, "").startswith("socks"):
                    del environment[spelling]
