"""Rounds with a second user of the machine, who attacks while a run computes and between attempts."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from .accounts import Intruder
from .scene import VIRNUC
from .strikes import Running, strike
from .traps import play_traps

if TYPE_CHECKING:
    from .play import Play

REFUSALS: Final = (401, 403, 421)  # what the temporary server may answer
REPORT_REFUSALS: Final = (404, 421, 501)  # what the server of a report may answer; 501: no GET
PAUSE_S: Final = 0.2
ROUTES: Final = (
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/api/health"),
    ("GET", "/api/admin/settings"),
    ("GET", "/report.html"),
    ("GET", "/../../../../etc/passwd"),
    ("POST", "/api/flow_runs/filter"),
    ("POST", "/api/admin/database/clear"),
    ("OPTIONS", "/api/flow_runs/filter"),
)


def play_intruder(play: Play) -> None:
    """Play the round of a plan `intrude`."""
    kinds = {
        "server": _attack_server,
        "cluster": _attack_cluster,
        "report": _attack_report,
        "shared directory": play_traps,
        "directory": play_traps,
    }
    kinds[play.plan.whom](play)


def _uid_of(play: Play) -> int | None:
    """Return the user id under which the commands of a round run, if it is not ours."""
    return None if play.account is None else play.account.uid


def listeners(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    """Return the addresses and ports on which these processes listen."""
    doors = []
    for process in processes:
        with suppress(psutil.Error):
            for door in process.net_connections("inet"):
                if door.status == psutil.CONN_LISTEN:
                    doors.append((door.laddr.ip, door.laddr.port))
    return sorted(set(doors))


def _require_loopback(play: Play, doors: list[tuple[str, int]]) -> None:
    """Report sockets that other machines can reach."""
    for address, port in doors:
        if not address.startswith("127.") and address != "::1":
            play.report_problem(f"listens on {address}:{port}")


# --- the temporary Prefect server -------------------------------------------------------------------------------------


def _attack_server(play: Play) -> None:
    """Ask the temporary server of a run until the run ends or is killed, then take its port."""
    payload = _write_payload(play.folder)
    with Intruder(avoided=_uid_of(play)) as intruder:
        for attempt in ("struck", "again"):
            run = play.start()
            is_killed = attempt == "struck" and play.rng.random() < 0.5
            ports = _ask_until_end(play, run, intruder, payload, is_killed=is_killed)
            code = play.ends(run, (0, -9) if is_killed else (0,), attempt)
            if code == 0:
                play.compare(attempt)
            for port in ports:
                intruder.do("listen", port=port)
        play.resume()
        for words in intruder.do("tell_heard"):
            play.report_problem(f"somebody wrote to the port of a server that has ended: {words}")
    if payload.proof.exists():
        play.report_problem("a pickle of the intruder was loaded")


class Payload:
    """A state with a result that creates a file when it is loaded."""

    def __init__(self, proof: Path, state: dict[str, Any]) -> None:
        self.proof, self.state = proof, state


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.proof), "w")


def _write_payload(folder: Path) -> Payload:
    """Write a result as Prefect stores it, whose loading leaves a trace."""
    from prefect._internal.result_records import ResultRecord, ResultRecordMetadata
    from prefect.serializers import PickleSerializer

    proof, stored_result = folder / "loaded", folder / "stored"
    metadata = ResultRecordMetadata(storage_key=str(stored_result), serializer=PickleSerializer())
    stored_result.write_bytes(ResultRecord(result=Malicious(proof), metadata=metadata).serialize())
    data = metadata.model_dump(mode="json", serialize_as_any=True)
    state = {"type": "COMPLETED", "name": "Completed", "message": "as I say", "data": data}
    return Payload(proof, state)


def _ask_until_end(
    play: Play, run: Running, intruder: Intruder, payload: Payload, *, is_killed: bool
) -> list[int]:
    """Let the intruder ask the server of a run, time after time.

    Args:
        play: The round.
        run: The run.
        intruder: Asks.
        payload: What it would like to be loaded.
        is_killed: Kill the command, at a random moment after the first attempt.

    Returns:
        The ports of the server.
    """
    ports: set[int] = set()
    while run.alive:
        doors = listeners(run.family().get("server", []))
        _require_loopback(play, doors)
        for _, port in doors:
            if port not in intruder.do("find_listeners"):
                continue  # it has ended meanwhile
            ports.add(port)
            play.round.hit = True
            answers = intruder.do("ask", port=port, requests=_requests(run, payload))
            _check_answers(play, answers, REFUSALS)
            if is_killed:
                play.round.at_s, _ = strike(run, "kill", "main", play.truth.seconds / 4, play.rng)
                is_killed = False
        time.sleep(PAUSE_S)
    return sorted(ports)


def _requests(run: Running, payload: Payload) -> list[list[str]]:
    """Return requests to a Prefect server, among them some that end the runs in its database."""
    body = json.dumps({"state": payload.state, "force": True})
    requests = [[method, path, "{}" if method == "POST" else ""] for method, path in ROUTES]
    for run_id in _flow_runs(run.folder / "home" / "prefect.db"):
        requests.append(["POST", f"/api/flow_runs/{run_id}/set_state", body])
        requests.append(["DELETE", f"/api/flow_runs/{run_id}", ""])
    return requests


def _flow_runs(database: Path) -> list[str]:
    """Return the ids of the newest flow runs. The intruder cannot know them, but may guess well."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=0.1)) as records,
    ):
        return [row[0] for row in records.execute("SELECT id FROM flow_run LIMIT 3")]
    return []


def _check_answers(play: Play, answers: list[list[Any]], refusals: tuple[int, ...]) -> None:
    """Report answers that are no refusals. A server that has ended gives none."""
    for name, status, has_cors in answers:
        if has_cors:
            play.report_problem(f"{name}: web pages are let in")
        if isinstance(status, int) and status not in refusals:
            play.report_problem(f"{name}: answered with {status}")


# --- a cluster --------------------------------------------------------------------------------------------------------


def _attack_cluster(play: Play) -> None:
    """Try to run code through the sockets of a cluster of this machine until the run ends."""
    play.round.hit = False
    with Intruder("dask", avoided=_uid_of(play)) as intruder:
        run = play.start()
        while run.alive:
            family = run.family()
            doors = listeners([process for group in family.values() for process in group])
            _require_loopback(play, doors)
            ports = {port for _, port in listeners(family.get("scheduler", []))}
            if doors:
                ports.add(play.rng.choice(doors)[1])
            for port in ports & set(intruder.do("find_listeners")):
                play.round.hit = True
                requests = [[method, path, ""] for method, path in ROUTES[:3]]
                _check_answers(play, intruder.do("ask", port=port, requests=requests), ())
                for answer in intruder.do("run_code", port=port):
                    if not answer.startswith("refused"):
                        play.report_problem(f"port {port}: {answer}")
            time.sleep(PAUSE_S)
        if play.ends(run, (0,), "struck") == 0:
            play.compare("struck")
    play.resume()


# --- the server of a report -------------------------------------------------------------------------------------------


def _attack_report(play: Play) -> None:
    """Ask the server of a report without its token."""
    if play.ends(play.start(), (0,), "first") != 0:
        return
    with Intruder(avoided=_uid_of(play)) as intruder:
        words = [*VIRNUC, "report", str(play.out), "--serve"]
        run = play.start_words(words)
        while run.alive and "(Ctrl-C ends it)" not in run.printed():
            time.sleep(0.05)
        doors = listeners(run.family().get("main", []))
        _require_loopback(play, doors)
        play.round.hit = bool(doors)
        names = ["report.html", "report.json", "../run.json", "guess/report.html", "//report.html"]
        requests = [["GET", f"/{name}", ""] for name in names]
        requests += [[method, path, ""] for method, path in ROUTES]
        for _, port in doors:
            _check_answers(play, intruder.do("ask", port=port, requests=requests), REPORT_REFUSALS)
        run.process.send_signal(signal.SIGINT)
        if run.ends() != 0:
            play.report_problem(f"report --serve: ended with {run.process.returncode}")
    play.compare("served")
    play.resume()
