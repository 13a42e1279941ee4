"""Runs that are interrupted, killed or cancelled: nothing of them goes on, and the next start ends in equal bytes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

pytestmark = pytest.mark.usefixtures("prefect_backend")
RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")
SHARD_TOKENS = 8192
GONE_WITHIN_S = 10


def words(out: Path, reads: Path, models: Path, devices: str = "cpu:1") -> list[str]:
    """A `virnuc predict` of many small shards."""
    return [
        *(sys.executable, "-m", "flows.cli", "predict", str(reads), "-o", str(out), "--models", str(models)),
        *("--devices", devices, "--shard-tokens", str(SHARD_TOKENS), "--token-budget", "2048"),
    ]


def digest(out: Path) -> str:
    """Of all result bytes."""
    return hashlib.sha256(b"".join((out / name).read_bytes() for name in RESULTS)).hexdigest()


def committed(out: Path) -> int:
    return len(list((out / "shards").glob("*.h5")))


def wait_for(truth: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs; a zombie waiting for its parent is gone."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@contextmanager
def running(command: list[str], out: Path, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, once it has committed three shards; whatever is left of it is killed afterwards."""
    with log.open("wb") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle, env=environment, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        wait_for(lambda: committed(out) >= 3 or process.poll() is not None, 90, "three shards")
        assert process.poll() is None, log.read_text()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) >= 2  # itself and a worker
        process.family = family  # type: ignore[attr-defined]
        yield process
    finally:
        for one in family:
            if one.is_running():
                one.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, many_reads: Path, models: Path, child_environment: dict[str, str]
) -> str:
    """Digest of the results of a run nobody disturbed, on two cores."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(words(out, many_reads, models, "cpu:2"), check=True, capture_output=True, env=child_environment)
    return digest(out)


def finish(out: Path, reads: Path, models: Path, environment: dict[str, str]) -> str:
    """Start the same again, on another number of cores, and digest what it leaves."""
    before = {path: path.stat().st_mtime_ns for path in (out / "shards").glob("*.h5")}
    done = subprocess.run(
        words(out, reads, models, "cpu:2"), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was committed was not computed again
    return digest(out)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sign: sign.name)
def test_a_signal_ends_the_whole_family_and_the_run_goes_on_later(
    sign: signal.Signals,
    tmp_path: Path,
    many_reads: Path,
    models: Path,
    child_environment: dict[str, str],
    undisturbed: str,
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with running(words(out, many_reads, models), out, child_environment, log) as process:
        family: list[psutil.Process] = process.family  # type: ignore[attr-defined]
        os.kill(process.pid, sign)
        code = process.wait(GONE_WITHIN_S)
        wait_for(lambda: gone(family), GONE_WITHIN_S, "the family to end")
    assert code == (-sign if sign == signal.SIGKILL else 130), log.read_text()
    assert "Traceback" not in log.read_text()
    if sign != signal.SIGINT:  # Ctrl-C and SIGTERM go the same way
        assert finish(out, many_reads, models, child_environment) == undisturbed


def test_a_killed_worker_is_replaced_and_the_flow_goes_on(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str], undisturbed: str
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with running(words(out, many_reads, models), out, child_environment, log) as process:
        for child in psutil.Process(process.pid).children():
            if "virnuc_core.engine.worker" in child.cmdline():
                child.kill()
        assert process.wait(120) == 0, log.read_text()
    assert digest(out) == undisturbed


def flow_run_of(name: str) -> FlowRun:
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=wanted)
    alive = [run for run in runs if run.state is not None and run.state.is_running()]
    assert len(alive) == 1
    return alive[0]


def test_cancelling_a_run_started_by_hand_ends_it(
    tmp_path: Path, many_reads: Path, models: Path, child_environment: dict[str, str], undisturbed: str
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with running(words(out, many_reads, models), out, child_environment, log) as process:
        family: list[psutil.Process] = process.family  # type: ignore[attr-defined]
        flow_run = flow_run_of("many · cpu:1")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelling())
        assert process.wait(GONE_WITHIN_S) == 130, log.read_text()
        wait_for(lambda: gone(family), GONE_WITHIN_S, "the family to end")
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.name == "Cancelled"
    assert "cancelled; what was committed stays" in log.read_text()
    assert finish(out, many_reads, models, child_environment) == undisturbed
