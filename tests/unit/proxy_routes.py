"""How clients of a process reach servers: through a proxy, or directly. Programs for child processes."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

import httpx
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from virnuc.flows.cli.prefect_settings import prepare_prefect

HOSTS = ("127.0.0.1", "localhost", "[::1]", "prefect.example.org", "data.example.org")


def print_routes() -> None:
    """Print, as JSON, which client uses a proxy for which host."""
    routes = {}
    with httpx.Client(verify=False) as client:  # loads no certificates, which takes long
        for host in HOSTS:
            url = httpx.URL(f"http://{host}:4200/api")
            is_direct = client._transport_for_url(url) is client._transport
            websocket_proxy = get_proxy(parse_uri(f"ws://{host}:4200/api/events/in"))
            uses_urllib = bool(urllib.request.getproxies())
            uses_urllib = uses_urllib and not urllib.request.proxy_bypass(host)
            routes[host] = {
                "httpx": not is_direct,
                "websockets": websocket_proxy is not None,
                "urllib": uses_urllib,
            }
    print(json.dumps(routes))


def print_routes_in_fork() -> None:
    """Print the routes of a process with other variables. Argument: the environment, as JSON."""
    os.environ.clear()
    os.environ.update(json.loads(sys.argv[1]))
    prepare_prefect()
    print_routes()
