"""`virnuc serve` in tests: a real server, what it has done, and the child that it lets run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.process_lookup import running_with

from .processes import VIRNUC, background, wait_for

RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")


def serve_environment(home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server and of its runs, whose socket lies in a home of theirs."""
    runtime = home / "runtime"
    runtime.mkdir(exist_ok=True)
    return {**variables, "XDG_RUNTIME_DIR": str(runtime)}


@contextmanager
def serving(
    home: Path, variables: Mapping[str, str], *words: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `virnuc serve` until the block ends. It has the program loaded when the block begins.

    Args:
        home: A folder for its log and its socket.
        variables: The environment of the server, and of a command that needs the same program.
        words: Options of `virnuc serve`.
    """
    environment = serve_environment(home, variables)
    with background((*VIRNUC, "serve", *words), environment, home / "serve.log") as server:
        wait_for(lambda: "can use this server" in log_of(home), "the server")
        wait_for(lambda: is_handed_over(home, environment), "the program to be loaded")
        yield server


def is_handed_over(home: Path, environment: Mapping[str, str]) -> bool:
    """Return true if the server lets a child run a short command."""
    n_before = n_handed_over(home)
    command = (*VIRNUC, "predict", "--help")
    # Not in the folder of the project, whose pyproject.toml has settings of Prefect.
    subprocess.run(command, env=environment, cwd=home, capture_output=True, check=True)
    return n_handed_over(home) > n_before


def n_handed_over(home: Path) -> int:
    """Return how many commands the children of the server have run."""
    return log_of(home).count("runs the command of process")


def log_of(home: Path) -> str:
    """Return what the server has reported."""
    log = home / "serve.log"
    return log.read_text() if log.exists() else ""


def child_of_server(server: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the child that runs a command now."""
    children = []
    for preloaded in running_with("engine.preloaded", psutil.Process(server.pid).children()):
        children += preloaded.children()
    (child,) = children
    return child


def results(out: Path) -> dict[str, bytes]:
    """Return the result files and all committed shards of a run."""
    shards = sorted((out / "shards").glob("0*.h5"))
    return {path.name: path.read_bytes() for path in (*(out / name for name in RESULTS), *shards)}


def masked(text: str) -> str:
    """Return what a command says without its times and speeds.

    How often it says how far it is depends on how long it takes, so only the last time is kept.
    """
    text = re.sub(r"(?m)(^.*  Embedding: .*\n)+(?=.*  Embedding: )", "", text)
    text = re.sub(r"\d\d:\d\d(:\d\d)?|[\d,.]+ (tok/s|s\b)", "…", text)
    return re.sub(r"(elapsed|ETA|ready after) \S+", r"\1 …", text)
