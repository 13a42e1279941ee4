"""Runs that are interrupted, killed or cancelled: nothing of them goes on, and the next start ends in equal bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelling

from virnuc.flows.prefect_flows.predict import predict

from .flow_runs import running_flow_run
from .processes import committed, own_server
from .running_command import SERVER, SIZES, WORKER, results_digest, running

pytestmark = pytest.mark.usefixtures("prefect_backend")


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
    assert results_digest(run.out) == undisturbed


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
        assert results_digest(run.out) == undisturbed


@pytest.mark.slow
def test_cancelling_a_run_started_by_hand_ends_it(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> None:
    reads = tmp_path / "cancelled.fastq.gz"  # its name is the run's
    reads.symlink_to(many_reads)
    with running(tmp_path, reads, models, child_environment) as run:
        run.worker().suspend()  # the run cannot end before it is told to, however slow the telling is
        flow_run = running_flow_run("cancelled · cpu:1")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelling())
        assert run.ends() == 130, run.log.read_text()
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.name == "Cancelled"
    assert "cancelled; what was committed stays" in run.log.read_text()
    assert committed(run.out) >= 2
