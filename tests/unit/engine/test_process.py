"""Worker processes that never outlive their parent: real ones, really killed."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.process_lookup import family_of, has_ended
from virnuc_core.baseline.run import next_message
from virnuc_core.config import EngineSpec
from virnuc_core.engine import process
from virnuc_core.engine.process import Message, WorkerSpec
from virnuc_core.errors import InputError, WorkerError
from virnuc_core.runfiles import Device

FIRST = min(os.sched_getaffinity(0))
CORE = Device(id=f"cpu-core-{FIRST}", kind="cpu", name="a core", core=FIRST)
# answers a number with the same, and starts a process that only a kill of its group can end
WORKER = """
import signal, subprocess, sys, time
from virnuc_core.engine.process import Message
from virnuc_core.errors import InputError

class Number(Message):
    number: int

def work(parent, spec):
    if spec.models == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("noise from a library", flush=True)
    parent.send(Number(number=kid.pid))
    while True:
        while (coming := parent.peek()) is None:
            time.sleep(0.01)
        number = parent.receive().number
        assert coming == Number(number=number)
        if number == 13:
            raise InputError("unlucky", file="x.fa", line=13)
        parent.send(Number(number=number))
"""


class Number(Message):
    """The worker's own kind of message, by the same name."""

    number: int


PARENT = """
import sys, time
import echo_worker
from pathlib import Path
from virnuc_core.config import EngineSpec
from virnuc_core.engine.process import LocalWorkers, WorkerSpec
from virnuc_core.runfiles import Device
spec = WorkerSpec(models="stubborn", device=Device.model_validate_json('{device}'), engine=EngineSpec())
workers = LocalWorkers("echo_worker")
child = workers.start(spec, Path(sys.argv[1]))
workers.receive(60)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.LocalWorkers]:
    (tmp_path / "echo_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with process.LocalWorkers("echo_worker") as local_workers:
        yield local_workers


def start(
    workers: process.LocalWorkers,
    tmp_path: Path,
    models: str = "",
    engine: EngineSpec | None = None,
) -> tuple[process.Child, int]:
    """A worker, and its own child's number."""
    spec = WorkerSpec(models=models, device=CORE, engine=engine or EngineSpec())
    child = workers.start(spec, tmp_path / "log" / "echo.log")
    text = heard(workers)
    assert isinstance(text, Number)
    return child, text.number


def heard(workers: process.LocalWorkers) -> Message:
    message = workers.receive(120)
    assert message is not None
    return message[1]


def gone(pid: int, within_s: float = 120) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if all(has_ended(process) for process in family_of(pid)[:1]):
            return True
        time.sleep(0.05)
    return False


def test_messages_go_both_ways_and_prints_do_not_garble_them(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    child, _ = start(workers, tmp_path)
    child.send(Number(number=7))
    assert heard(workers) == Number(number=7)
    assert psutil.Process(child.pid).cpu_affinity() == [CORE.core]
    child.end(grace_s=1)
    assert child.last_words == "noise from a library"
    assert (tmp_path / "log" / "echo.log").read_text() == "noise from a library\n"


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_gpu_worker_gets_a_folder_without_kernels_if_its_specification_says_so(
    is_fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []

    def note_environment(*_: object, env: dict[str, str], **__: object) -> None:
        environments.append(env)
        raise OSError("no process is started in this test")

    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept")
    monkeypatch.setattr(process.subprocess, "Popen", note_environment)
    gpu = Device(id="GPU-1", kind="cuda", name="x")
    spec = WorkerSpec(models="", device=gpu, engine=EngineSpec(), fresh_kernels=is_fresh)
    with pytest.raises(OSError, match="no process"):
        process.Child("none", spec, queue.Queue())
    [environment] = environments
    assert (environment["TRITON_CACHE_DIR"] != "/kept") == is_fresh


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1", "utf-16"])
def test_messages_are_utf8_whatever_the_environment_says(
    encoding: str, workers: process.LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification names directories, which may have any letters."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    child, _ = start(workers, tmp_path, models="modèles → ł")
    child.send(Number(number=7))
    assert heard(workers) == Number(number=7)


def test_a_workers_own_error_is_raised_by_its_type(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    child, _ = start(workers, tmp_path)
    child.send(Number(number=13))
    with pytest.raises(InputError, match=r"x\.fa:13: unlucky"):
        next_message(workers, {child}, 30)


def test_a_worker_that_does_not_move_or_dies_is_an_error(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    child, _ = start(workers, tmp_path)
    child.last_progress_s -= 100
    with pytest.raises(WorkerError, match=rf"{CORE.id} has not moved for 1\d\d s"):
        next_message(workers, {child}, 60)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"status -9\); last words: noise from a library"):
        next_message(workers, {child}, 1000)


def test_a_stopped_worker_is_an_error_however_long_it_may_load(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    """Its heartbeats say that it moves while it loads, or waits; a stopped process says nothing."""
    quick = EngineSpec(heartbeat_s=0.1, silence_s=0.6)
    child, _ = start(workers, tmp_path, engine=quick)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"{CORE.id} has not moved for \d{{1,3}} s"):
        next_message(workers, {child}, 1800)


def test_a_worker_that_hangs_gets_no_time_to_end(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    quick = EngineSpec(heartbeat_s=0.1, silence_s=0.5)
    child, _ = start(workers, tmp_path, engine=quick)
    os.kill(child.pid, signal.SIGSTOP)  # a stopped process does not react to SIGTERM
    while not child.is_silent:
        time.sleep(0.05)
    started_s = time.monotonic()
    assert child.end(grace_s=60) == -signal.SIGKILL
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("models", ["", "stubborn"])
def test_ending_a_worker_takes_its_children_along(
    workers: process.LocalWorkers, tmp_path: Path, models: str
) -> None:
    child, kid = start(workers, tmp_path, models)
    child.end(grace_s=1)
    assert gone(child.pid)
    assert gone(kid)


def test_after_ending_all_no_new_worker_is_started(
    workers: process.LocalWorkers, tmp_path: Path
) -> None:
    child, _ = start(workers, tmp_path)
    process.end_all_children(1)
    assert gone(child.pid)
    with pytest.raises(WorkerError, match="interrupted"):
        start(workers, tmp_path)
    assert not process.LocalWorkers("echo_worker").cancelled


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_worker_along(
    workers: process.LocalWorkers, tmp_path: Path, sig: signal.Signals
) -> None:
    program = textwrap.dedent(PARENT).replace("{device}", CORE.model_dump_json())
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "e.log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(sig)
    parent.wait(120)
    parent.stdout.close()
    assert gone(child)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the worker had started does not watch anybody


def test_a_worker_ends_with_its_parent_though_its_input_stays_open() -> None:
    """The closed input is one net; this is the other: here the test itself holds the input's other end."""
    read_end, write_end = os.pipe()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "from virnuc_core.engine.process import PROGRAM\n"
            "from virnuc_core.rundir import parent_bound_command\n"
            "command = parent_bound_command(PROGRAM, 'virnuc_core.engine.worker')\n"
            f"child = subprocess.Popen(command, stdin={read_end}, start_new_session=True)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(read_end,),
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.communicate()
        assert gone(child, 60)
    finally:
        parent.kill()
        os.close(read_end)
        os.close(write_end)


@pytest.fixture
def ahead(workers: process.LocalWorkers) -> WorkerSpec:
    """What workers of this module are started for before anybody asks for them."""
    return WorkerSpec(models="", device=CORE, engine=EngineSpec())


def test_a_prestarted_worker_is_claimed_once(
    ahead: WorkerSpec,
) -> None:
    with (
        process.LocalWorkers("echo_worker", [ahead]),
        process.local_workers("echo_worker", [ahead]) as first_workers,
    ):
        (prestarted,) = first_workers.prestarted
        assert first_workers.start(ahead) is prestarted
        assert prestarted.requested_s < prestarted.started_s
        with process.local_workers("echo_worker", [ahead]) as second:
            assert second is not first_workers
            assert not second.prestarted
    assert gone(prestarted.pid)


@pytest.mark.parametrize("other", ["settings", "work", "nothing"])
def test_prestarted_workers_for_other_settings_are_ended(
    ahead: WorkerSpec, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    with process.LocalWorkers("echo_worker", [ahead]):
        (waiting,) = process._prestarted[0].prestarted
        requested = ahead.model_copy(update={"budget_divisor": 2}) if other == "settings" else ahead
        if other != "nothing":
            process.local_workers("another" if other == "work" else "echo_worker", [requested])
            assert gone(waiting.pid)
    assert gone(waiting.pid)
    assert ("the run wants others" in caplog.text) == (other != "nothing")


def test_a_prestarted_worker_that_died_before_it_was_claimed_is_replaced(ahead: WorkerSpec) -> None:
    with (
        process.LocalWorkers("echo_worker", [ahead]),
        process.local_workers("echo_worker", [ahead]) as taken_workers,
    ):
        (dead,) = taken_workers.prestarted
        os.kill(dead.pid, signal.SIGKILL)
        dead.process.wait(120)
        assert taken_workers.start(ahead).pid != dead.pid
