"""Rounds with a second user of the machine, who attacks while a run computes and between attempts."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from .accounts import unused_uid
from .scene import VIRNUC, NotRunError
from .strikes import Running, strike

if TYPE_CHECKING:
    from .play import Play

PROGRAM: Final = Path(__file__).with_name("intruder.py")
REFUSALS: Final = (401, 403, 421)  # what the temporary server may answer
REPORT_REFUSALS: Final = (404, 421, 501)  # what the server of a report may answer; 501: no GET
PAUSE_S: Final = 0.2
TRAP_PAUSE_S: Final = 1.0  # between two traps, at most
ANSWERS_WITHIN_S: Final = 180.0
CODES: Final = (0, 1, 2, 3, 4)
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
# Names that a run opens, makes, replaces or removes in its directory.
TRAPPED_NAMES: Final = (
    "logs",
    "shards",
    "shards.look",
    "telemetry",
    "report",
    ".virnuc",
    ".virnuc.1",
    ".virnuc.2",
    "run.json",
    "orfs.h5",
    "orfs.made.json",
    "skipped.tsv",
    "summary.json",
    "summary.json.former",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "reads.tsv",
    "failed.tsv",
    "embeddings.h5",
    "viral.fasta.gz",
    ".run.json.1-0a.part",
    ".reads.tsv.1-0a.part",
    "shards/00001.h5",
    "shards/plan.json",
    "shards/.look",
    "logs/worker-0.log",
    "telemetry/attempt.jsonl",
)
TRAPS: Final = ("link", "link", "fifo", "hard link", "file", "folder", "folder of links")


class Intruder:
    """The process of another user, to whom orders are given."""

    def __init__(self, *extras: str) -> None:
        """Start it under a user id that nobody has.

        Raises:
            NotRunError: Only root can start a process of another user.
        """
        if os.geteuid() != 0:
            raise NotRunError("only root can act as a second user")
        self.uid = unused_uid()
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), str(self.uid), *extras],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == self.uid

    def answer(self) -> Any:
        """Return the answer to an order.

        Raises:
            TimeoutError: There is none within `ANSWERS_WITHIN_S`.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWERS_WITHIN_S)[0]:
            raise TimeoutError("the intruder does not answer")
        return json.loads(self.process.stdout.readline())

    def do(self, order: str, **words: Any) -> Any:
        """Give an order, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"order": order, **words}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def play_intruder(play: Play) -> None:
    """Play the round of a plan `intrude`."""
    kinds = {
        "server": _attack_server,
        "cluster": _attack_cluster,
        "report": _attack_report,
        "shared directory": _lay_traps,
        "directory": _lay_traps,
    }
    kinds[play.plan.whom](play)


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
    with Intruder() as intruder:
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
    with Intruder("dask") as intruder:
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
    with Intruder() as intruder:
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


# --- traps in a shared directory --------------------------------------------------------------------------------------


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Make a folder that every user can reach and write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="virnuc-shared-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Victim:
    """Files of somebody else, to which traps lead and which nobody may read, change or remove."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = secrets.token_hex(16)
        for name in ("precious.txt", "00001.h5", "plan.json", "worker-0.log", "attempt.jsonl"):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{self.secret}\n")
            path.chmod(0o600)
        self.state = self._look()

    def _look(self) -> dict[str, tuple[int, int, bytes]]:
        """Return what is in the folder: inode, time of change and content of each file."""
        state = {}
        for path in sorted(self.folder.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            state[path.name] = (status.st_ino, status.st_mtime_ns, content)
        return state

    def problems(self, out: Path) -> list[str]:
        """Return what has happened to the files, and where their secret has come to light."""
        problems = []
        state = self._look()
        for name in sorted(self.state.keys() | state.keys()):
            if self.state.get(name) != state.get(name):
                problems.append(f"a foreign file was changed, made or removed: {name}")
        for path in out.rglob("*"):
            is_shown = path.is_file() and not path.is_symlink() and path.stat().st_nlink < 2
            if is_shown and self.secret.encode() in path.read_bytes():
                problems.append(f"a foreign file was read into {path.name}")
        return problems


def _lay_traps(play: Play) -> None:
    """Lay links, pipes and folders in place of a run's files, before, in and between its attempts.

    The directory is our own and open to everybody, or one that the intruder has made.
    """
    with _shared_folder() as shared, Intruder() as intruder:
        victim = Victim(play.folder / "victim")
        play.out = shared / "out"
        if play.plan.whom == "shared directory":
            play.out.mkdir()
            play.out.chmod(0o1777)
        else:
            intruder.do("lay", kind="folder", path=str(play.out), target="")
        n_laid = 0
        for attempt in ("first", "second"):
            # Most runs refuse a directory in which there are traps at their start.
            if play.rng.random() < 0.3:
                n_laid += _lay_one(play, intruder, victim)
            run = play.start()
            will_kill = play.rng.random() < 0.3
            kill_at_s = time.monotonic() + play.rng.random() * play.truth.seconds
            # Others meet their first trap while they work.
            wants_marker = play.rng.random() < 0.8
            while run.alive:
                if not wants_marker or (play.out / ".virnuc").exists():
                    n_laid += _lay_one(play, intruder, victim)
                if will_kill and time.monotonic() > kill_at_s:
                    run.process.kill()
                    break
                time.sleep(play.rng.random() * TRAP_PAUSE_S)
            code = play.ends(run, (*CODES, -9) if will_kill else CODES, attempt)
            if play.plan.whom == "shared directory":
                for problem in intruder.do("spoil", folder=str(play.out)):
                    play.report_problem(f"{attempt}: the intruder {problem}")
            for problem in victim.problems(play.out):
                play.report_problem(f"{attempt}: {problem}")
            _remove_of(play.out, intruder.uid)
            if code == 0:
                play.compare(attempt)
        play.round.hit = n_laid > 0
        play.resume()
        for problem in victim.problems(play.out):
            play.report_problem(f"again: {problem}")


def _lay_one(play: Play, intruder: Intruder, victim: Victim) -> bool:
    """Lay one trap at random; return whether it could be laid."""
    name = play.rng.choice(TRAPPED_NAMES)
    target = play.rng.choice((victim.folder, victim.folder / "precious.txt", victim.folder / "new"))
    kind = play.rng.choice(TRAPS)
    reason = intruder.do("lay", kind=kind, path=str(play.out / name), target=str(target))
    if not reason:
        play.round.traps.append(f"{kind} {name}")
    return not reason


def _remove_of(folder: Path, uid: int) -> None:
    """Remove what a user has laid in a folder; what others wrote into his folders stays."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):
            if path.lstat().st_uid != uid:
                continue
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
