"""A `virnuc predict` that is in the middle of its work, for tests that disturb it."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.process_lookup import family_of, kill_all, running_with, words_of
from virnuc.flows.cli.server_guard import PROCESS_NAME

from .flow_runs import RESULTS
from .processes import PATIENCE_S, VIRNUC, background, committed, gone, wait_for

# Small shards and batches, so that a run commits its first shards soon and has many to do.
SIZES = {"shard_tokens": 8192, "token_budget": 2048}
# words in the names or command lines of the processes that a run starts
SERVER = PROCESS_NAME
WORKER = "virnuc_core.engine.worker"


@dataclass(frozen=True)
class RunningCommand:
    """A `virnuc predict` that has committed its first shards and has many to do.

    Attributes:
        process: The command itself.
        family: The command and every process that it had started when it was looked at.
        out: Its run directory.
        log: The file that has its standard output and standard error.
    """

    process: subprocess.Popen[bytes]
    family: list[psutil.Process]
    out: Path
    log: Path

    def commands(self) -> str:
        """Return the names and command lines of the family, one process per line."""
        return "\n".join(map(words_of, self.family))

    def worker(self) -> psutil.Process:
        """Return the first worker process of the run."""
        return running_with(WORKER, self.family)[0]

    def server(self) -> psutil.Process:
        """Return the temporary Prefect server of the run."""
        return running_with(SERVER, self.family)[0]

    def ends(self) -> int:
        """Wait until neither the command nor anything it started runs; return its exit code."""
        code = self.process.wait(PATIENCE_S)
        wait_for(lambda: gone(self.family), "the family to end")
        assert "Traceback" not in self.log.read_text()
        return code


@contextmanager
def running(
    folder: Path, reads: Path, models: Path, environment: dict[str, str]
) -> Iterator[RunningCommand]:
    """Start the command in a folder, and yield once it has committed two shards.

    Whatever is left of the command is killed after the body.
    """
    out_dir = folder / "run"
    log = folder / "log"
    files = ("predict", str(reads), "-o", str(out_dir), "--models", str(models))
    sizes = []
    for name, size in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        sizes += [option, str(size)]
    command = (*VIRNUC, *files, "--devices", "cpu:1", *sizes)
    with background(command, environment, log) as process:
        wait_for(lambda: committed(out_dir) >= 2 or process.poll() is not None, "two shards")
        assert process.poll() is None, log.read_text()
        family = family_of(process.pid)
        try:
            yield RunningCommand(process, family, out_dir, log)
        finally:
            kill_all(family)


def results_digest(out: Path) -> str:
    """Return the SHA-256 of the bytes of all result files of a run."""
    content = b"".join((out / name).read_bytes() for name in RESULTS)
    return hashlib.sha256(content).hexdigest()
