"""The health check of the worker's image: does the worker still ask its server for runs?

`prefect worker start --with-healthcheck` answers at an address of this machine. The answer is
"unavailable" if the worker has not asked for a while, for example because the server is gone.
"""

import http.client
import os
import sys
from typing import Final

TIMEOUT_S: Final = 5


def is_healthy(host: str, port: int) -> bool:
    """Return whether a worker answers at the address and still asks its server for runs.

    The question goes straight to the address, whichever proxy the environment names.
    """
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    """Return 0 if the worker is healthy, otherwise 1."""
    host = os.environ.get("PREFECT_WORKER_WEBSERVER_HOST", "127.0.0.1")
    port = int(os.environ.get("PREFECT_WORKER_WEBSERVER_PORT", "8080"))
    if is_healthy(host, port):
        return 0
    print(f"no healthy worker answers at {host}:{port}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
