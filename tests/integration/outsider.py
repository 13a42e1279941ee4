"""Ask a server as another user of the machine would: with nothing but the standard library.

Run as a program by root: `outsider.py PORT`, with a JSON list of [method, path] on standard input.
It gives up its user and groups for those of `nobody`. It prints a JSON object: for each request the
status and whether CORS headers came with it.
"""

import encodings.idna  # noqa: F401 - imported now: nobody may not read this Python later
import http.client
import json
import os
import socket
import sys

NOBODY = 65534
GUESS = "dmlybnVjOmd1ZXNz"  # virnuc:guess
VARIANTS = {
    "plain": {},
    "guessed secret": {"Authorization": f"Basic {GUESS}"},
    "bearer": {"Authorization": "Bearer guess"},
    "foreign host": {"Host": "evil.example"},
    "foreign origin": {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
}
SOCKETS = (
    "/api/events/in",
    "/api/events/out",
    "/api/logs/out",
    "/api/task_runs/subscriptions/scheduled",
)
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Protocol: prefect\r\n\r\n"
)


def ask(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, bool]:
    """Return the status, and whether the answer has a CORS header."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = "{}" if method in ("POST", "PUT", "PATCH") else None
    connection.request(method, path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    has_cors = any(name.lower().startswith("access-control") for name, _ in answer.getheaders())
    connection.close()
    return answer.status, has_cors


def open_websocket(port: int, path: str) -> int:
    """Return the status that a WebSocket's handshake gets; 101 would let us in."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as door:
        door.sendall(HANDSHAKE.format(path=path, port=port).encode())
        return int(door.recv(4096).split()[1])


def main() -> None:
    """Give up the rights of root, ask everything, and print what came of it."""
    port, requests = int(sys.argv[1]), json.load(sys.stdin)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    answers = {}
    for variant, headers in VARIANTS.items():
        for method, path in requests:
            answers[f"{method} {path}, {variant}"] = ask(port, method, path, headers)
    for path in SOCKETS:
        answers[f"websocket {path}"] = (open_websocket(port, path), False)
    print(json.dumps({"uid": os.getuid(), "answers": answers}))


if __name__ == "__main__":
    main()
