"""Connections within this machine use no proxy, and connections to others use the user's.

The libraries that read the environment are the real ones, in child processes, because they read it
in several places and at several times.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core import proxies
from virnuc_core.errors import ConfigError
from virnuc_core.proxies import (
    bypass_for_loopback,
    proxy_of_loopback_server,
    warn_of_removed_proxies,
    without_loopback,
)
from virnuc_core.reads.remote import _client

from .engine.forked_programs import ForkedPrograms

ROOT = Path(__file__).resolve().parents[2]
DEAD_PROXY = "http://127.0.0.1:9"
LOOPBACK = "127.0.0.1,localhost,::1"
# A process in which the variables are prepared before any client is imported, as in the command.
NEW_PROCESS = """
from virnuc.flows.cli.prefect_settings import prepare_prefect
prepare_prefect()
from tests.unit.proxy_routes import print_routes
print_routes()
"""
Routes = dict[str, dict[str, bool]]  # host -> client -> whether it uses a proxy


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of the tests with these variables about proxies, and no others."""
    environment = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    return environment | variables


def routes_of(programs: ForkedPrograms, variables: dict[str, str]) -> Routes:
    """Return which clients of a child process use a proxy for which host.

    Args:
        programs: Forks the child from a process that has imported the clients.
        variables: The environment variables about proxies.
    """
    environment = json.dumps(environment_with(variables))
    name = "tests.unit.proxy_routes.print_routes_in_fork"
    child = programs.run(name, arguments=(environment,))
    assert child.returncode == 0, child.stderr
    routes: Routes = json.loads(child.stdout.splitlines()[-1])
    return routes


ALL_VARIABLES = {
    spelling: DEAD_PROXY
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")
    for spelling in (name, name.upper())
}


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": DEAD_PROXY},
        {"HTTP_PROXY": DEAD_PROXY},
        {"Http_Proxy": DEAD_PROXY},
        {"http_proxy": "127.0.0.1:9"},
        {"http_proxy": f" {DEAD_PROXY} "},
        ALL_VARIABLES,
        ALL_VARIABLES | {"NO_PROXY": "", "no_proxy": ""},
        ALL_VARIABLES | {"no_proxy": "", "NO_PROXY": "127.0.0.1"},
        ALL_VARIABLES | {"No_Proxy": "data.example.org"},
        ALL_VARIABLES | {"NO_PROXY": "[::1]:4200, host:port,<local>;ünï\tfe80::/10 10.0.0.0/8"},
        ALL_VARIABLES | {"NO_PROXY": " , ,"},
    ],
)
def test_loopback_is_reached_directly_and_others_through_the_proxy(
    programs: ForkedPrograms, variables: dict[str, str]
) -> None:
    result = routes_of(programs, variables)
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert not result[host]["httpx"], host
    for host in ("127.0.0.1", "localhost"):
        assert not any(result[host].values()), host
    assert all(result["prefect.example.org"].values())
    is_exception = "data.example.org" in variables.get("No_Proxy", "")
    assert result["data.example.org"]["httpx"] is not is_exception


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "SOCKS5H://127.0.0.1:9"),
        ("all_proxy", "SOCKS5H://127.0.0.1:9"),
        ("HTTPS_PROXY", "SOCKS5H://127.0.0.1:9"),
        ("ALL_PROXY", "socks4://127.0.0.1:9"),
        ("all_proxy", "socks://127.0.0.1:9"),
        ("ALL_PROXY", "quic://127.0.0.1:9"),
        ("http_proxy", "http://127.0.0.1:port"),
        ("ALL_PROXY", "http://[::1"),
        ("https_proxy", "://"),
        ("HTTP_PROXY", "http://"),
        ("ALL_PROXY", ""),
    ],
)
def test_a_proxy_that_cannot_be_used_ends_no_connection(
    programs: ForkedPrograms, name: str, address: str
) -> None:
    result = routes_of(programs, {name: address})
    assert not any(result["127.0.0.1"].values())


def test_a_star_excludes_all_hosts_for_all_programs(programs: ForkedPrograms) -> None:
    for value in ("*", "localhost, *"):
        result = routes_of(programs, ALL_VARIABLES | {"NO_PROXY": value})
        for host, uses_proxy in result.items():
            assert not any(uses_proxy.values()), host


def test_a_new_process_has_the_same_routes_as_the_forks_of_these_tests(
    programs: ForkedPrograms,
) -> None:
    """No client has read the variables on its import, before the fork got others."""
    answer = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS],
        env=environment_with(ALL_VARIABLES),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    routes = json.loads(answer.stdout.splitlines()[-1])
    assert routes == routes_of(programs, ALL_VARIABLES)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", LOOPBACK),
        ("data.example, 127.0.0.1", "data.example,127.0.0.1,localhost,::1"),
        ("*.example.org", f".example.org,{LOOPBACK}"),
        ("[::1]:4200", "::1,127.0.0.1,localhost"),
        ("[fe80::1]", f"fe80::1,{LOOPBACK}"),
        ("10.0.0.0/8 a.example:80", f"10.0.0.0/8,a.example:80,{LOOPBACK}"),
        ("fe80::/10,host:port,ünï,[", LOOPBACK),
        ("a,*,b", "*"),
    ],
)
def test_exceptions_stay_and_loopback_is_added(value: str, expected: str) -> None:
    assert without_loopback(value) == expected
    assert without_loopback(expected) == expected


def test_who_connects_to_others_is_told_once_that_a_proxy_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "_removed", {})
    environment = {"ALL_PROXY": "socks5://user:secret@proxy:1080", "http_proxy": "http://proxy:80"}
    bypass_for_loopback(environment, has_socks=False)
    assert "ALL_PROXY" not in environment
    assert environment["http_proxy"] == "http://proxy:80"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_of_removed_proxies()
        warn_of_removed_proxies()
    (record,) = caplog.records
    assert record.getMessage().startswith("ALL_PROXY is not used: it needs the package socksio")
    assert "secret" not in caplog.text
    environment["ALL_PROXY"] = "socks5://proxy:1080"
    bypass_for_loopback(environment, has_socks=True)
    assert environment["ALL_PROXY"] == "socks5://proxy:1080"


def test_a_program_that_only_uses_the_core_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is not changed, and httpx cannot use it."""
    monkeypatch.setenv("no_proxy", "[::1]")
    monkeypatch.setenv("http_proxy", DEAD_PROXY)
    with pytest.raises(ConfigError, match=r"no_proxy.*correct or unset them"):
        _client()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"http_proxy": DEAD_PROXY}, "http_proxy"),
        ({"ALL_PROXY": DEAD_PROXY}, "ALL_PROXY"),
        ({"https_proxy": DEAD_PROXY}, ""),
        ({"http_proxy": " "}, ""),
        ({"http_proxy": DEAD_PROXY, "no_proxy": "localhost,::1"}, "http_proxy"),
        ({"http_proxy": DEAD_PROXY, "no_proxy": "localhost,127.0.0.1"}, ""),
        ({"http_proxy": DEAD_PROXY, "NO_PROXY": "data.example.org 127.0.0.1:4200"}, ""),
        ({"http_proxy": DEAD_PROXY, "NO_PROXY": "*"}, ""),
        # the one in small letters counts
        ({"http_proxy": DEAD_PROXY, "no_proxy": "", "NO_PROXY": "127.0.0.1"}, "http_proxy"),
    ],
)
def test_the_proxy_that_a_worker_would_ask_for_the_server_of_its_machine_is_named(
    variables: dict[str, str], expected: str
) -> None:
    assert proxy_of_loopback_server(variables, "127.0.0.1") == expected


@pytest.mark.parametrize("entry", ["::1", "[::1]", "[::1]:4200"])
def test_a_server_at_an_ipv6_address_may_be_excepted_in_each_form(entry: str) -> None:
    variables = {"http_proxy": DEAD_PROXY, "no_proxy": entry}
    assert proxy_of_loopback_server(variables, "::1") == ""
