"""What every round shares: reads, models, a Prefect server, the commands, and what undisturbed ones leave behind."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

from virnuc_core.encoders.convert import init_random

ROOT: Final = Path(__file__).resolve().parents[2]
INJECT: Final = ROOT / "tests" / "faults" / "inject"
VIRNUC: Final = (sys.executable, "-P", "-m", "virnuc.flows.cli")
MARK: Final = "VIRNUC_FAULTS_ROUND"  # in the environment of all that a round starts
SIZES: Final = {
    "token-budget": 1024,
    "dna-token-budget": 1024,
    "shard-tokens": 4096,
    "stage-workers": 2,
}
SETTINGS: Final = "silence_s = 20.0\nheartbeat_s = 0.5\n"
SAID: Final = re.compile(r"[\d,]+ of [\d,]+ reads are viral|Reads: +[\d,]+ = .*")
PER_RUN: Final = ("telemetry", "logs", "damaged")  # folders whose files differ from run to run
PAGES: Final = ("summary.html", "summary.md")
TIMES: Final = ("benchmark_", "regression.json", ".lock", ".virnuc")
SUMMARY: Final = (
    "n_reads",
    "n_chunks",
    "n_rows",
    "n_uniques",
    "fates",
    "threshold",
    "rows_virus",
    "chunks_virus",
)
BOUND: Final = """
import runpy, sys
from virnuc_core.rundir import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)
"""
NO_SERVER_HERE: Final = "no Prefect server starts here"
Tree = dict[str, str]


class NotRunError(Exception):
    """A round cannot be played on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """One command line, without the directory it writes to."""

    command: str = "predict"  # or validate, predict-inbox
    reads: str = "a"
    threshold: int = 0  # which of the scene's two
    nodes: int = 0  # of a cluster on this machine; its results are those of one machine
    transfer: bool = field(default=False, compare=False)  # its files go through Dask


@dataclass(frozen=True, slots=True)
class Truth:
    """What an undisturbed run of some work does."""

    files: Tree
    said: str
    seconds: float
    nbytes: int
    largest: int


@dataclass(slots=True)
class Scene:
    """The stage of all rounds, in one folder."""

    folder: Path
    url: str = ""  # of a real server
    mutant: str = ""  # what is taken out of the product, to test the harness itself
    thresholds: tuple[str, str] = ("0.5", "0.5")  # about 60 and 30 % of the reads are above them
    truths: dict[Work, Truth] = field(default_factory=dict)
    # How often undisturbed runs make each call of the system; see `failing_disk`.
    counted_calls: dict[str, Counter[str]] = field(default_factory=dict)

    def reads(self, name: str) -> Path:
        """A folder of several files."""
        return self.folder / f"reads-{name}"

    def words(self, work: Work, out: Path, devices: str, *more: str) -> list[str]:
        """Return the command line; `out` is the directory that it writes."""
        words = [*VIRNUC, work.command, "--models", str(self.folder / "models"), "-o", str(out)]
        if work.nodes:
            words += ["--devices", "cpu", "--cluster", f"local:{work.nodes}"]
            if work.transfer:
                words.append("--transfer")
        else:
            words += ["--devices", devices]
        words += [f"--{name}={value}" for name, value in SIZES.items()]
        words += ["--settings", str(self.folder / "settings.toml")]
        reads = str(self.reads(work.reads))
        if work.command == "predict":
            words += [reads, "--write-viral", f"--threshold={self.thresholds[work.threshold]}"]
        elif work.command == "validate":
            words += [
                "--reads",
                reads,
                "--profile",
                "ci-smoke",
                "--history",
                str(out.with_name("history.jsonl")),
            ]
        else:
            words += ["--inbox", reads, "--settle-s", "0", f"--threshold={self.thresholds[0]}"]
        return [*words, *more]

    def environment(self, mark: str, server: str, home: Path) -> dict[str, str]:
        """Return the environment of a process of round `mark`.

        Args:
            mark: The round's mark.
            server: An address, `embedded`, or `none` (a run without Prefect).
            home: Prefect's folder.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "VIRNUC_"))
        }
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "prefect.db").exists() and (self.folder / "prefect.db").exists():
            shutil.copy(self.folder / "prefect.db", home)
        own = {
            MARK: mark,
            "PREFECT_HOME": str(home),
            "PYTHONPATH": python_path(),
        }
        if self.mutant:
            own["PYTHONPATH"] = python_path(INJECT)
            own["VIRNUC_FAULT"] = json.dumps({"kind": self.mutant})
        if server.startswith("http"):
            own |= {"PREFECT_API_URL": server, "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"}
        elif server == "none":
            own["VIRNUC_NO_PREFECT"] = "1"
        return environment | own | {"OMP_NUM_THREADS": "1"}

    def truth(self, work: Work) -> Truth:
        """Return what an undisturbed run on two cores does; it is made when it is first needed."""
        work = replace(work, nodes=0)
        if work not in self.truths:
            if not self.url and work.command != "predict":
                raise NotRunError(NO_SERVER_HERE)
            output_dir = (
                self.folder
                / f"truth-{work.command}-{work.reads}-{work.threshold}-{os.getpid()}"
                / "out"
            )
            output_dir.parent.mkdir()
            scene = Scene(self.folder, self.url, thresholds=self.thresholds)
            environment = scene.environment("truth", self.url or "none", output_dir.parent / "home")
            began_s = time.monotonic()
            words = self.words(work, output_dir, "cpu:2")
            process = subprocess.run(
                words,
                env=environment,
                cwd=output_dir.parent,
                capture_output=True,
                text=True,
                check=False,
            )
            assert process.returncode == 0, f"{' '.join(words)}\n{process.stdout}\n{process.stderr}"
            seconds = time.monotonic() - began_s
            sizes = [path.stat().st_size for path in output_dir.rglob("*") if path.is_file()]
            self.truths[work] = Truth(
                leaves(output_dir), said(process.stdout), seconds, sum(sizes), max(sizes)
            )
            shutil.rmtree(output_dir.parent)
        return self.truths[work]


def python_path(*more: Path) -> str:
    """Return a child's PYTHONPATH: `more`, this source, and what is on the path of this process."""
    folders = [*map(str, more), str(ROOT / "src"), str(ROOT)]
    inherited_path = os.environ.get("PYTHONPATH")
    if inherited_path:
        folders.append(inherited_path)
    return os.pathsep.join(folders)


def said(output: str) -> str:
    """Return the counts of reads that a command has printed."""
    return " ".join(SAID.findall(output))


def write_reads(folder: Path, seed: int, count: int = 240, files: int = 4) -> None:
    """Write random reads of 60 to 400 bases, in several files so that two processes can stage them."""
    rng = random.Random(seed)
    folder.mkdir()
    for number in range(files):
        with gzip.GzipFile(folder / f"s{number}.fasta.gz", "wb", mtime=0) as file:
            for i in range(number, count, files):
                bases = "".join(rng.choices("ACGT", k=rng.randint(60, 400)))
                file.write(f">r{seed}_{i}\n{bases}\n".encode())


@contextmanager
def server(
    folder: Path, database: Path | None, mark: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a Prefect server as a team has it, and end it surely.

    Yields:
        Its address and its process.

    Raises:
        NotRunError: No server starts here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if database is not None and database.exists():
        shutil.copy(database, folder / "prefect.db")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    own = {MARK: mark, "PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    for _ in range(3):  # a port that was free may be another's by then
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        app = (
            "--factory",
            "prefect.server.api.server:create_app",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        words = (sys.executable, "-P", "-c", BOUND, str(os.getpid()), *app, "--log-level", "error")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                words,
                env=environment | own | {"PYTHONPATH": python_path()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}/api"
            if is_healthy(url, process):
                yield url, process
                return
        finally:
            process.kill()
            process.wait()
    raise NotRunError(NO_SERVER_HERE)


def is_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Return whether the server of this process, and no other, answers within some time."""
    for _ in range(1200):
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return process.poll() is None
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    return False


@contextmanager
def prepared(folder: Path, *, with_server: bool = True) -> Iterator[Scene]:
    """Prepare reads, models and thresholds, and a server if one is wanted and starts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("a", 11), ("b", 12)):
        write_reads(folder / f"reads-{name}", seed, count=240 if name == "a" else 60)
    write_reads(folder / "reads-inbox", 13, count=120, files=2)
    (folder / "settings.toml").write_text(SETTINGS)
    init_random(folder / "models", "tiny", "tiny", model_length=300, seed=3)
    with ExitStack() as servers:
        scene, first_dir = Scene(folder), folder / "first"
        if with_server:
            _start_shared_server(scene, servers)
        environment = scene.environment("first", scene.url or "none", folder / "home")
        subprocess.run(
            scene.words(Work(), first_dir, "cpu:2"),
            env=environment,
            check=True,
            capture_output=True,
        )
        table = np.loadtxt(
            first_dir / "prediction_results_highestscore.csv", skiprows=1, usecols=3, delimiter="\t"
        )
        scene.thresholds = (f"{np.quantile(table, 0.4):.4f}", f"{np.quantile(table, 0.7):.4f}")
        shutil.rmtree(first_dir)
        yield scene


def _start_shared_server(scene: Scene, servers: ExitStack) -> None:
    """Start the server that rounds share, if one starts here, and copy its new database."""
    with suppress(NotRunError):
        scene.url, _ = servers.enter_context(server(scene.folder / "server", None, "shared"))
        with (
            closing(sqlite3.connect(scene.folder / "server" / "prefect.db")) as server_database,
            closing(sqlite3.connect(scene.folder / "prefect.db")) as template_database,
        ):
            server_database.backup(template_database)


# --- what a user reads ------------------------------------------------------------------------------------------------


def leaves(out: Path) -> Tree:
    """Return a digest of each file of a finished run, by name.

    It covers all that must not depend on the way the file was made.
    """
    digests = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        volatile = any(part in PER_RUN for part in name.parts) or path.name.startswith(TIMES)
        if path.is_file() and not volatile and path.suffix not in (".damaged", ".lock"):
            digests[str(name)] = digest_or_problem(path)
    return digests


def digest_or_problem(path: Path) -> str:
    """Return a digest of what a file says, or what is wrong with it."""
    try:
        if path.name in ("orfs.h5", "embeddings.h5"):
            return h5_digest(path)
        if path.suffix == ".json" and path.name != "plan.json":
            return digest(json.dumps(json_facts(path), sort_keys=True).encode())
        # Pages have the time and the command of their run. Their figures are those of JSON files.
        if path.name.startswith("report.") or path.name in PAGES:
            return "there"
        if path.name == "inbox.tsv":
            return digest(json.dumps(inbox_rows(path)).encode())
        return digest(path.read_bytes())
    except (OSError, ValueError, KeyError, RuntimeError, RecursionError, LookupError) as error:
        return f"cannot be read: {error}"


def inbox_rows(path: Path) -> list[list[str]]:
    """Return what an inbox's table says of the good files, whose names begin with s."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if any(None in row.values() for row in rows):
        raise ValueError("a row is cut off")
    columns = ("file", "fate", "reads", "viral")
    return sorted([row[name] for name in columns] for row in rows if row["file"].startswith("s"))


def digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def h5_digest(path: Path) -> str:
    """Return a digest of every dataset; rows that are not there would read as NaN."""
    digest = hashlib.blake2b(digest_size=8)
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visit(names.append)
        for name in sorted(names):
            if isinstance(file[name], h5py.Dataset):
                values = file[name][()]
                digest.update(
                    f"{name}{values.dtype.str}{values.shape}".encode()
                    + np.ascontiguousarray(values).tobytes()
                )
                if values.dtype.kind == "f" and np.isnan(values).any():
                    return f"NaN in {name}"
    return digest.hexdigest()


def json_facts(path: Path) -> Any:
    """Return what a JSON file says apart from times, processes and machines."""
    body = json.loads(path.read_text())
    if path.name == "summary.json":
        return {name: body.get(name) for name in SUMMARY}
    if path.name == "run.json":
        return {name: body[name] for name in ("model_length", "fingerprints") if name in body}
    if path.name == "report.json":
        return {name: body[name] for name in ("comparisons", "accounting")}
    if path.name == "comparison.json":  # its list of digests is of files that hold times
        return body["comparisons"]
    if path.parent.name == "fates":
        return {name: body[name] for name in ("sha256", "fate", "file", "reads", "viral")}
    return "there"
