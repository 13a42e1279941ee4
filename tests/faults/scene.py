"""What every round shares: reads, models, a Prefect server, the commands, and what undisturbed ones leave behind."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
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

    def reads(self, name: str) -> Path:
        """A folder of several files."""
        return self.folder / f"reads-{name}"

    def words(self, work: Work, out: Path, devices: str, *more: str) -> list[str]:
        """The command line; `out` is the directory it writes."""
        nodes = [
            "--devices",
            "cpu",
            "--cluster",
            f"local:{work.nodes}",
            *["--transfer"] * work.transfer,
        ]
        where = nodes if work.nodes else ["--devices", devices]
        words = [
            *VIRNUC,
            work.command,
            "--models",
            str(self.folder / "models"),
            *where,
            "-o",
            str(out),
        ]
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
        """Of a process of round `mark`; `server`: an address, `embedded`, or `none` (a run without Prefect)."""
        kept = {
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
            "PYTHONPATH": python_path(*[INJECT] * bool(self.mutant)),
        }
        if self.mutant:
            own["VIRNUC_FAULT"] = json.dumps({"kind": self.mutant})
        if server.startswith("http"):
            own |= {"PREFECT_API_URL": server, "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"}
        elif server == "none":
            own["VIRNUC_NO_PREFECT"] = "1"
        return kept | own | {"OMP_NUM_THREADS": "1"}

    def truth(self, work: Work) -> Truth:
        """Of an undisturbed run on two cores, made when it is first asked for."""
        work = replace(work, nodes=0)
        if work not in self.truths:
            if not self.url and work.command != "predict":
                raise NotRunError(NO_SERVER_HERE)
            out = (
                self.folder
                / f"truth-{work.command}-{work.reads}-{work.threshold}-{os.getpid()}"
                / "out"
            )
            out.parent.mkdir()
            whole = Scene(self.folder, self.url, thresholds=self.thresholds)
            environment = whole.environment("truth", self.url or "none", out.parent / "home")
            began_s = time.monotonic()
            words = self.words(work, out, "cpu:2")
            done = subprocess.run(
                words, env=environment, cwd=out.parent, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
            seconds, sizes = (
                time.monotonic() - began_s,
                [p.stat().st_size for p in out.rglob("*") if p.is_file()],
            )
            self.truths[work] = Truth(
                leaves(out), said(done.stdout), seconds, sum(sizes), max(sizes)
            )
            shutil.rmtree(out.parent)
        return self.truths[work]


def python_path(*more: Path) -> str:
    """Of a child: `more`, this source, and where this process finds packages that are not installed."""
    return os.pathsep.join(
        [*map(str, more), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def said(output: str) -> str:
    """The counts of reads that a command told."""
    return " ".join(SAID.findall(output))


def write_reads(folder: Path, seed: int, count: int = 240, files: int = 4) -> None:
    """Random reads of 60 to 400 bases in several files, so that staging has work for two processes."""
    rng = random.Random(seed)
    folder.mkdir()
    for number in range(files):
        with gzip.GzipFile(folder / f"s{number}.fasta.gz", "wb", mtime=0) as file:
            for i in range(number, count, files):
                file.write(
                    f">r{seed}_{i}\n{''.join(rng.choices('ACGT', k=rng.randint(60, 400)))}\n".encode()
                )


@contextmanager
def server(
    folder: Path, database: Path | None, mark: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Prefect server as a team has it; its address and its process, which is surely ended.

    Errors: `NotRunError` where none starts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if database is not None and database.exists():
        shutil.copy(database, folder / "prefect.db")
    kept = {
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
                env=kept | own | {"PYTHONPATH": python_path()},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            if healthy(url := f"http://127.0.0.1:{port}/api", process):
                yield url, process
                return
        finally:
            process.kill()
            process.wait()
    raise NotRunError(NO_SERVER_HERE)


def healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the server of this process, and no other, answers within some time."""
    for _ in range(1200):
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return process.poll() is None
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    return False


@contextmanager
def prepared(folder: Path) -> Iterator[Scene]:
    """Reads, models, thresholds and a server, where one starts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("a", 11), ("b", 12)):
        write_reads(folder / f"reads-{name}", seed, count=240 if name == "a" else 60)
    write_reads(folder / "reads-inbox", 13, count=120, files=2)
    (folder / "settings.toml").write_text(SETTINGS)
    init_random(folder / "models", "tiny", "tiny", model_length=300, seed=3)
    with ExitStack() as servers:
        scene, first = Scene(folder), folder / "first"
        with suppress(NotRunError):
            scene.url, _ = servers.enter_context(server(folder / "server", None, "shared"))
            with (
                closing(sqlite3.connect(folder / "server" / "prefect.db")) as there,
                closing(sqlite3.connect(folder / "prefect.db")) as here,
            ):
                there.backup(here)
        environment = scene.environment("first", scene.url or "none", folder / "home")
        subprocess.run(
            scene.words(Work(), first, "cpu:2"), env=environment, check=True, capture_output=True
        )
        table = np.loadtxt(
            first / "prediction_results_highestscore.csv", skiprows=1, usecols=3, delimiter="\t"
        )
        scene.thresholds = (f"{np.quantile(table, 0.4):.4f}", f"{np.quantile(table, 0.7):.4f}")
        shutil.rmtree(first)
        yield scene


def limit_file_size(nbytes: int) -> None:
    """For a child before it becomes the command: no file may become longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


# --- what a user reads ------------------------------------------------------------------------------------------------


def leaves(out: Path) -> Tree:
    """Every file of a finished run by name, with a digest of all in it that must not depend on the way it was made."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        volatile = any(part in PER_RUN for part in name.parts) or path.name.startswith(TIMES)
        if path.is_file() and not volatile and path.suffix not in (".damaged", ".lock"):
            found[str(name)] = told(path)
    return found


def told(path: Path) -> str:
    """Digest of what a file says; what is wrong with it where it cannot be read."""
    try:
        if path.name in ("orfs.h5", "embeddings.h5"):
            return h5_digest(path)
        if path.suffix == ".json" and path.name != "plan.json":
            return digest(json.dumps(json_facts(path), sort_keys=True).encode())
        if path.name.startswith("report."):
            return "there"
        if path.name == "inbox.tsv":
            rows = [line.split("\t") for line in path.read_text().splitlines()]
            keep = [rows[0].index(name) for name in ("file", "fate", "reads", "viral")]
            return digest(
                json.dumps(
                    sorted([row[i] for i in keep] for row in rows if row[keep[0]].startswith("s"))
                ).encode()
            )
        return digest(path.read_bytes())
    except (OSError, ValueError, KeyError, RuntimeError, RecursionError, LookupError) as error:
        return f"cannot be read: {error}"


def digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def h5_digest(path: Path) -> str:
    """Of every dataset, read through; rows that are not there would read as NaN."""
    seen = hashlib.blake2b(digest_size=8)
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visit(names.append)
        for name in sorted(names):
            if isinstance(file[name], h5py.Dataset):
                values = file[name][()]
                seen.update(
                    f"{name}{values.dtype.str}{values.shape}".encode()
                    + np.ascontiguousarray(values).tobytes()
                )
                if values.dtype.kind == "f" and np.isnan(values).any():
                    return f"NaN in {name}"
    return seen.hexdigest()


def json_facts(path: Path) -> Any:
    """What a JSON file says apart from times, processes and machines."""
    body = json.loads(path.read_text())
    if path.name == "summary.json":
        return {name: body.get(name) for name in SUMMARY}
    if path.name == "run.json":
        return {name: body[name] for name in ("model_length", "fingerprints") if name in body}
    if path.name == "report.json":
        return {name: body[name] for name in ("comparisons", "accounting")}
    if path.name == "comparison.json":
        return body
    if path.parent.name == "fates":
        return {name: body[name] for name in ("sha256", "fate", "file", "reads", "viral")}
    return "there"
