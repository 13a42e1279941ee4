"""`virnuc serve` and runs that borrow its workers: real processes, really killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process_lookup import family_of, running_with
from virnuc_core.encoders.convert import init_random
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir

from .processes import PATIENCE_S, VIRNUC, background, committed, gone, wait_for

pytestmark = pytest.mark.slow

WORKER = "virnuc_core.engine.worker"
RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")
# So many shards that a run can be struck in the middle.
SMALL_SHARDS = ("--shard-tokens", "1000")


def environment(home: Path, **more: str) -> dict[str, str]:
    runtime = home / "runtime"
    runtime.mkdir(exist_ok=True)
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime),
        "VIRNUC_NO_PREFECT": "1",
        **more,
    }


@contextmanager
def serving(home: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `virnuc serve` until the block ends."""
    with background((*VIRNUC, "serve", *words), environment(home), home / "serve.log") as server:
        wait_for(lambda: "can use this server" in log_of(home), "the server")
        yield server


def log_of(home: Path) -> str:
    log = home / "serve.log"
    return log.read_text() if log.exists() else ""


def words_of(reads: Path, models: Path, out: Path, *more: str) -> tuple[str, ...]:
    paths = ("predict", str(reads), "-o", str(out), "--models", str(models))
    return (*VIRNUC, *paths, "--devices", "cpu:1", *SMALL_SHARDS, *more)


def predict(home: Path, reads: Path, models: Path, out: Path, *more: str) -> str:
    """Make a prediction to its end, and return what it said on standard error."""
    finished = subprocess.run(
        words_of(reads, models, out, *more),
        env=environment(home),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


def results(out: Path) -> dict[str, bytes]:
    """Return the result files and all committed shards of a run."""
    shards = sorted((out / "shards").glob("0*.h5"))
    return {path.name: path.read_bytes() for path in (*(out / name for name in RESULTS), *shards)}


def worker_pids(out: Path) -> list[int]:
    summary = read_summary(RunDir(out))
    assert summary is not None
    return [worker["pid"] for worker in summary.workers]


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, some_reads: Path, models: Path
) -> dict[str, bytes]:
    """The files of a run with workers of its own."""
    home = tmp_path_factory.mktemp("alone")
    predict(home, some_reads, models, home / "run", "--serve", "off")
    return results(home / "run")


def test_borrowed_workers_give_the_same_bytes_and_a_replaced_model_is_loaded_anew(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    own_models = tmp_path / "models"
    shutil.copytree(models, own_models)
    with serving(tmp_path) as server:
        first, second, replaced = (tmp_path / name for name in ("first", "second", "replaced"))
        predict(tmp_path, some_reads, own_models, first, "--serve", "require")
        predict(tmp_path, some_reads, own_models, second)
        assert results(first) == alone
        assert results(second) == alone
        assert worker_pids(first) == worker_pids(second)
        # Another model under the same path. A worker that kept the old one would be caught by its
        # results, and by its process.
        shutil.rmtree(own_models)
        init_random(own_models, seed=2)
        predict(tmp_path, some_reads, own_models, replaced)
        assert worker_pids(replaced) != worker_pids(second)
        assert results(replaced) != alone
        workers = list(running_with(WORKER, family_of(server.pid)))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        wait_for(lambda: gone(workers), "the workers to end")
    assert "Traceback" not in log_of(tmp_path)


def test_a_run_outlives_its_server(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            workers = list(running_with(WORKER, family_of(server.pid)))
            assert workers
            # A stopped worker cannot finish the run before its server is killed.
            for worker in workers:
                worker.send_signal(signal.SIGSTOP)
            server.kill()
            assert run.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
            wait_for(lambda: gone(workers), "the workers to end")
    assert results(out) == alone
    said = (tmp_path / "log").read_text()
    # A server that is just dying may still be connected to, and then does not answer.
    assert re.search("the run starts its own: it (has ended|does not answer)", said)
    assert "Traceback" not in said


def test_a_killed_run_leaves_no_worker_in_its_folder_and_can_be_resumed(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            (worker,) = running_with(WORKER, family_of(server.pid))
            # A stopped worker cannot finish. In this time its run has sent it the next task.
            worker.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            run.kill()
            run.wait(PATIENCE_S)
            wait_for(lambda: gone([worker]), "the worker to end")
        predict(tmp_path, some_reads, models, out, "--serve", "require")
        assert results(out) == alone


def test_a_required_server_that_does_not_run_is_one_line(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    refused = subprocess.run(
        words_of(few_reads, models, tmp_path / "run", "--serve", "require"),
        env=environment(tmp_path),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("virnuc: virnuc serve lends no worker")
    assert "start it with: virnuc serve" in refused.stderr
    assert "Traceback" not in refused.stderr
