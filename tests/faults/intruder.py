"""What another user of the machine tries. It is a program that root starts, and that gives up root.

`intruder.py UID [dask]` reads one order for each line, as JSON: the name of a function below and its
arguments. It answers each with one line of JSON. With `dask` it can also speak to Dask's sockets.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - imported now: another user may not read this Python later
import http.client
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_S = 30
GUESS = "dmlybnVjOmd1ZXNz"  # virnuc:guess
VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "guessed secret": {"Authorization": f"Basic {GUESS}"},
    "foreign host": {"Host": "evil.example"},
    "foreign origin": {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
}
heard: list[str] = []  # what somebody has sent to a port on which this process listens


def find_listeners() -> list[int]:
    """Return the ports on which somebody listens, as every user of a machine can see them."""
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, address, _, state = line.split()[:4]
        if state == "0A":  # LISTEN
            ports.append(int(address.split(":")[1], 16))
    return ports


def ask(port: int, requests: list[list[str]]) -> list[list[Any]]:
    """Send requests, each in every variant.

    Args:
        port: A port of 127.0.0.1.
        requests: Method, path and body of each.

    Returns:
        For each a description, the status or the error, and whether an answer lets web pages in.
    """
    answers: list[list[Any]] = []
    for method, path, body in requests:
        for variant, headers in VARIANTS.items():
            name = f"{method} {path}, {variant}"
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            try:
                connection.request(
                    method, path, body or None, {"Content-Type": "application/json", **headers}
                )
                answer = connection.getresponse()
                has_cors = any(
                    key.lower().startswith("access-control") for key, _ in answer.getheaders()
                )
                answers.append([name, answer.status, has_cors])
            except (OSError, http.client.HTTPException) as error:
                answers.append([name, type(error).__name__, False])
            finally:
                connection.close()
    return answers


def run_code(port: int) -> list[str]:
    """Try to run code through a socket of Dask; return what it said."""
    answers = []
    for address, security in (
        (f"tcp://127.0.0.1:{port}", None),
        (f"tls://127.0.0.1:{port}", STRANGE_SECURITY),
    ):
        try:
            with Client(address, security=security, timeout=2) as client:
                uid = client.run_on_scheduler(os.getuid)
                answers.append(f"ran code as {uid}")
        except (OSError, TypeError, ValueError) as error:
            answers.append(f"refused: {type(error).__name__}")
    return answers


def lay(kind: str, path: str, target: str, aside: str = "") -> str:
    """Lay a trap; return "" or the reason why it could not be laid.

    Args:
        kind: link, fifo, hard link, file, folder, or folder of links.
        path: Where.
        target: What a link leads to.
        aside: If given, what is there is renamed: this is appended to its name.
    """
    trap = Path(path)
    if os.path.lexists(trap) and not aside:
        return "something is there"
    try:
        if aside:
            trap.rename(path + aside)
        if kind == "link":
            trap.symlink_to(target)
        elif kind == "fifo":
            os.mkfifo(trap, 0o666)
        elif kind == "hard link":
            own_file = trap.with_name(f"{trap.name}.mine")
            own_file.write_text("of the intruder\n")
            own_file.chmod(0o666)
            trap.hardlink_to(own_file)
        elif kind == "file":
            trap.write_text("{}\n")
        else:
            trap.mkdir()
            trap.chmod(0o777)
            if kind == "folder of links":
                for name in ("worker-0.log", "plan.json", "00000.h5", "report.html"):
                    (trap / name).symlink_to(target)
    except OSError as error:
        return f"{error.strerror}"
    return ""


def spoil(folder: str) -> list[str]:
    """Try to change, rename and remove every file of others in a folder; return what succeeded.

    Files in a folder of one's own are left out: who owns a folder may rename what is in it.
    """
    successes = []
    paths = []
    # `Path.rglob` raises an error if a run removes a folder meanwhile.
    for parent, folder_names, file_names in os.walk(folder):
        paths += [Path(parent, name) for name in (*folder_names, *file_names)]
    for path in sorted(paths):
        try:
            is_own = os.getuid() in (path.lstat().st_uid, path.parent.stat().st_uid)
        except OSError:
            continue
        if is_own or not path.is_file() or path.is_symlink():
            continue
        with suppress(OSError):
            path.open("r+b").close()
            successes.append(f"can write {path}")
        with suppress(OSError):
            path.chmod(0o777)
            successes.append(f"changed the rights of {path}")
        with suppress(OSError):
            path.rename(path.with_name("stolen"))
            successes.append(f"renamed {path}")
        with suppress(OSError):
            path.unlink()
            successes.append(f"removed {path}")
    return successes


def read(paths: list[str]) -> list[str]:
    """Return those of these files that this user can read."""
    readable = []
    for path in paths:
        with suppress(OSError), Path(path).open("rb") as file:
            file.read(1)
            readable.append(path)
    return readable


def listen(port: int) -> str:
    """Take a port that has become free, and note what is sent to it; return "" or the reason."""
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind(("127.0.0.1", port))
    except OSError as error:
        return f"{error.strerror}"
    door.listen()

    def note() -> None:
        """Note the beginning of what each caller sends."""
        while True:
            visitor, _ = door.accept()
            with visitor, suppress(OSError):
                visitor.settimeout(5)
                heard.append(repr(visitor.recv(4096)))

    threading.Thread(target=note, daemon=True).start()
    return ""


def tell_heard() -> list[str]:
    """Return what was sent to the ports on which this process listens."""
    return heard


ORDERS = {
    function.__name__: function
    for function in (find_listeners, ask, run_code, lay, spoil, read, listen, tell_heard)
}


def main() -> None:
    """Give up the rights of root, then carry out one order after the other."""
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0)
    print(json.dumps(os.getuid()), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = ORDERS[order.pop("order")](**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if "dask" in sys.argv:
        import distributed.protocol  # noqa: F401
        from distributed import Client, Security

        STRANGE_SECURITY = Security.temporary()
    main()
