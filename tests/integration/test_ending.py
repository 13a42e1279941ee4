"""Runs that are interrupted, killed or cancelled: nothing of them goes on, and the next start ends in equal bytes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from virnuc.flows.predict import predict

from .processes import PATIENCE_S, VIRNUC, background, committed, gone, own_server, wait_for

pytestmark = pytest.mark.usefixtures("prefect_backend")
RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")
SIZES = {"shard_tokens": 8192, "token_budget": 2048}
SERVER, WORKER = "uvicorn", "virnuc_core.engine.worker"


@dataclass(frozen=True)
class Run:
    """A `virnuc predict` that has committed its first shards and has many to do."""

    process: subprocess.Popen[bytes]
    family: list[psutil.Process]  # itself and all that it started
    out: Path
    log: Path

    def commands(self) -> str:
        return "\n".join(" ".join(process.cmdline()) for process in self.family)

    def worker(self) -> psutil.Process:
        return next(process for process in self.family if WORKER in process.cmdline())

    def ends(self) -> int:
        """The exit code, once neither it nor anything it started runs."""
        code = self.process.wait(PATIENCE_S)
        wait_for(lambda: gone(self.family), "the family to end")
        assert "Traceback" not in self.log.read_text()
        return code


@contextmanager
def running(folder: Path, reads: Path, models: Path, environment: dict[str, str]) -> Iterator[Run]:
    """The command, once it has committed two shards; whatever is left of it is killed afterwards."""
    out_dir, log = folder / "run", folder / "log"
    words = (
        "predict",
        str(reads),
        "-o",
        str(out_dir),
        "--models",
        str(models),
        "--devices",
        "cpu:1",
    )
    sizes = [
        word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))
    ]
    with background((*VIRNUC, *words, *sizes), environment, log) as process:
        wait_for(lambda: committed(out_dir) >= 2 or process.poll() is not None, "two shards")
        assert process.poll() is None, log.read_text()
        itself = psutil.Process(process.pid)
        family = [itself, *itself.children(recursive=True)]
        try:
            yield Run(process, family, out_dir, log)
        finally:
            for one in family:
                if one.is_running():
                    one.kill()


def digest(out: Path) -> str:
    """Of all result bytes."""
    return hashlib.sha256(b"".join((out / name).read_bytes() for name in RESULTS)).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, some_reads: Path, models: Path, prefect_backend: None
) -> str:
    """Digest of the results of a run nobody disturbed, on two cores."""
    out_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    predict(reads=[str(some_reads)], out=out_dir, models=models, devices="cpu:2", **SIZES)
    return digest(out_dir)


@pytest.mark.slow
def test_a_terminated_run_ends_with_all_it_started(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    with running(tmp_path, many_reads, models, child_environment) as run:
        run.process.terminate()
        assert run.ends() == 130, run.log.read_text()


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_temporary_server_too_and_leaves_nothing(
    tmp_path: Path, many_reads: Path, models: Path, database: Path
) -> None:
    with running(tmp_path, many_reads, models, own_server(tmp_path / "prefect", database)) as run:
        assert SERVER in run.commands(), "no temporary server to spare"
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.ends() == 130, run.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("temporary_server", [False, True])
def test_a_killed_run_leaves_no_process_and_goes_on_later_on_other_devices(
    tmp_path: Path,
    some_reads: Path,
    models: Path,
    undisturbed: str,
    request: pytest.FixtureRequest,
    temporary_server: bool,
) -> None:
    """SIGKILL, which no process can answer: what the killed run had started ends all the same."""
    environment = request.getfixturevalue("child_environment")
    if temporary_server:
        environment = own_server(tmp_path / "prefect", request.getfixturevalue("database"))
    with running(tmp_path, some_reads, models, environment) as run:
        assert (SERVER in run.commands()) == temporary_server
        assert WORKER in run.commands()
        run.process.kill()
        assert run.ends() == -signal.SIGKILL
    times_before = {path: path.stat().st_mtime_ns for path in (run.out / "shards").glob("*.h5")}
    predict(reads=[str(some_reads)], out=run.out, models=models, devices="cpu:2", **SIZES)
    assert {
        path: path.stat().st_mtime_ns for path in times_before
    } == times_before  # what was committed was not computed again
    assert digest(run.out) == undisturbed


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_flow_goes_on(
    tmp_path: Path,
    some_reads: Path,
    models: Path,
    child_environment: dict[str, str],
    undisturbed: str,
) -> None:
    with running(tmp_path, some_reads, models, child_environment) as run:
        run.worker().kill()
        assert run.ends() == 0, run.log.read_text()
        assert digest(run.out) == undisturbed


def flow_run_of(name: str) -> FlowRun:
    run_filter = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=run_filter)
    alive = [run for run in runs if run.state is not None and run.state.is_running()]
    assert len(alive) == 1
    return alive[0]


@pytest.mark.slow
def test_cancelling_a_run_started_by_hand_ends_it(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    reads = tmp_path / "cancelled.fastq.gz"  # its name is the run's
    reads.symlink_to(many_reads)
    with running(tmp_path, reads, models, child_environment) as run:
        run.worker().suspend()  # the run cannot end before it is told to, however slow the telling is
        flow_run = flow_run_of("cancelled · cpu:1")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelling())
        assert run.ends() == 130, run.log.read_text()
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.name == "Cancelled"
    assert "cancelled; what was committed stays" in run.log.read_text()
    assert committed(run.out) >= 2
