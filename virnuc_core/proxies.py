"""The environment variables that name proxies: keep connections within this machine away from them.

Libraries read the variables when they open a connection. A proxy cannot reach a server that listens
on this machine only, and would be sent its password. Besides, the libraries that we use (httpx,
through Prefect) end with an error for some values that other programs accept, even if the
connection needs no proxy.
"""

import ipaddress
import logging
import re
from collections.abc import Mapping, MutableMapping
from typing import Final
from urllib.parse import urlsplit

LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
PROXY_VARIABLES: Final = frozenset({"all_proxy", "http_proxy", "https_proxy"})  # in any case
EXCEPTIONS: Final = "no_proxy"  # the variable with the hosts that are reached without a proxy
EVERY_HOST: Final = "*"
# Of an entry of `no_proxy`: a host, or the end of its name, with or without a port.
_HOST: Final = re.compile(r"[\w.-]+(:\d{1,5})?", re.ASCII)
_SOCKS_PACKAGE: Final = "it needs the package socksio (pip install 'httpx[socks]')"
log = logging.getLogger(__name__)

# The variables that were removed in this process, and why they cannot be used.
_removed: dict[str, str] = {}


def bypass_for_loopback(environment: MutableMapping[str, str], *, has_socks: bool) -> None:
    """Exclude this machine's loopback addresses from the user's proxies.

    Other connections keep their proxy. A proxy that cannot be used at all is removed: with it in
    the environment, no connection could be opened. `warn_of_removed_proxies` then says so to those
    who connect to other machines.

    Args:
        environment: The environment to change.
        has_socks: The package for SOCKS proxies is installed.
    """
    exceptions = without_loopback(_value_of(environment, EXCEPTIONS))
    environment[EXCEPTIONS] = exceptions
    # Some programs read one spelling, some the other.
    environment[EXCEPTIONS.upper()] = exceptions

    for name in list(environment):
        if name.lower() not in PROXY_VARIABLES:
            continue
        address = environment[name].strip()
        problem = _problem_of(address, has_socks=has_socks)
        if problem:
            del environment[name]
            _removed[name] = problem
        else:
            environment[name] = address


def _value_of(environment: Mapping[str, str], variable: str) -> str:
    """Return the value of a variable that may be written in any case; empty if it is not set.

    As for all programs in Python, the variable in small letters counts if it is set, also if it is
    empty.
    """
    if variable in environment:
        return environment[variable]
    spellings = [name for name in environment if name.lower() == variable]
    return environment[spellings[-1]] if spellings else ""


def without_loopback(exceptions: str) -> str:
    """Return a value of `no_proxy` with the loopback addresses added.

    Entries that httpx does not understand, and with which it would refuse to work, are brought into
    its form or left out.

    Args:
        exceptions: The user's value: hosts, separated by commas or spaces.
    """
    hosts = []
    for entry in re.split(r"[,\s]+", exceptions):
        host = _exception_for_httpx(entry)
        if host == EVERY_HOST:
            return EVERY_HOST  # some programs know the star only if it stands alone
        if host:
            hosts.append(host)
    hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    return ",".join(hosts)


def _exception_for_httpx(entry: str) -> str:
    """Return an entry of `no_proxy` in the form that httpx knows, or an empty text.

    For example "::1" for "[::1]:4200", and ".example.org" for "*.example.org".
    """
    if entry == EVERY_HOST:
        return entry
    bracketed = re.match(r"\[([^\]]+)\]", entry)
    host = bracketed[1] if bracketed else entry
    if host.startswith("*."):
        host = host[1:]
    address, slash, _ = host.partition("/")
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return host if _HOST.fullmatch(host) else ""
    if slash and version == 6:
        return ""  # a network of IPv6 addresses, which httpx cannot compare with a host
    return host


def proxy_of_loopback_server(environment: Mapping[str, str], host: str) -> str:
    """Return which variable makes programs ask a proxy for a server on this machine.

    Args:
        environment: The environment of the program, such as a worker of Prefect.
        host: The loopback address of the server, as its URL names it.

    Returns:
        The name of the variable. Empty if the server is reached without a proxy.
    """
    for entry in re.split(r"[,\s]+", _value_of(environment, EXCEPTIONS)):
        excepted_host = _exception_for_httpx(entry)
        if excepted_host in (EVERY_HOST, host) or excepted_host.partition(":")[0] == host:
            return ""
    for name, address in environment.items():
        if name.lower() in ("http_proxy", "all_proxy") and address.strip():
            return name
    return ""


def _problem_of(address: str, *, has_socks: bool) -> str:
    """Return why httpx cannot use the address of a proxy; empty if it can, or if there is none."""
    if not address:
        return ""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        _ = parts.port  # raises an error if it is not a number
    except ValueError:
        return "it is not the address of a proxy"
    if parts.scheme in ("socks5", "socks5h"):
        return "" if has_socks else _SOCKS_PACKAGE
    if parts.scheme not in ("http", "https"):
        return f"proxies of the kind {parts.scheme!r} are not supported"
    if not parts.hostname:
        return "it is not the address of a proxy"
    return ""


def warn_of_removed_proxies() -> None:
    """Log once which of the user's proxies are not used. Called before a connection to outside."""
    for name, problem in _removed.items():
        log.warning("%s is not used: %s; connecting without it", name, problem)
    _removed.clear()
