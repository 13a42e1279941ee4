"""The server of workers: to whom it lends them, and when it ends them."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.process_lookup import has_ended
from virnuc_core.config import EngineSpec
from virnuc_core.engine import borrowed, process, worker_server
from virnuc_core.engine.borrowed import (
    Borrow,
    BorrowedChild,
    Borrower,
    Lent,
    Refused,
    identity,
    refusal_of_identity,
    since,
)
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import (
    WORKER,
    Child,
    Closed,
    Inbox,
    LocalWorkers,
    Message,
    Ready,
    WorkerSpec,
    end_all_children,
)
from virnuc_core.engine.shards import Computed, ShardTask
from virnuc_core.engine.worker_server import HeldWorker, WorkerServer
from virnuc_core.errors import ConfigError, DeviceError, WorkerError
from virnuc_core.private_socket import Messages, PrivateListener, connect
from virnuc_core.rundir import DeviceRequests, ask_for_device, device_holder, lock_device
from virnuc_core.runfiles import Device

PATIENCE_S = 60.0
CORE = Device(id="cpu-core-0", kind="cpu", name="a core", core=min(os.sched_getaffinity(0)))
OTHER_CORE = CORE.model_copy(update={"id": "cpu-core-1"})
DIGESTS = {"esm2": "a", "dnabert_s": "b", "head": "c"}


@dataclass
class RunningServer:
    """A server with toy workers in a thread of this process.

    Attributes:
        folder: The folder of its socket.
        events: What it has reported.
    """

    folder: Path
    events: queue.Queue[str] = field(default_factory=queue.Queue)

    def borrow(
        self,
        device: Device = CORE,
        digests: dict[str, str] = DIGESTS,
        facts: dict[str, str] | None = None,
        **changes: object,
    ) -> tuple[BorrowedChild | Refused, Inbox]:
        """Ask for a worker as a run does, and return it with its inbox."""
        found = connect(self.folder)
        assert found is not None
        connection, _ = found
        engine = EngineSpec().model_copy(update=changes)
        spec = WorkerSpec(models="/models", device=device, engine=engine)
        request = Borrow(identity=facts or identity(), digests=digests, spec=spec)
        connection.send(request.line())
        line = connection.receive(PATIENCE_S)
        assert line is not None
        answer = Message.of(line)
        inbox: Inbox = queue.Queue()
        if isinstance(answer, Lent):
            return BorrowedChild(spec, inbox, connection, answer.pid), inbox
        connection.release()
        assert isinstance(answer, Refused)
        return answer, inbox

    def get(self, **changes: object) -> tuple[BorrowedChild, Inbox]:
        """Borrow a worker that must be lent."""
        child, inbox = self.borrow(**changes)  # type: ignore[arg-type]
        assert isinstance(child, BorrowedChild), child
        return child, inbox

    def wait_for(self, words: str) -> None:
        """Wait until the server has reported an event with these words."""
        while words not in self.events.get(timeout=PATIENCE_S):
            pass


@contextmanager
def running_server(folder: Path, idle_s: float = 600.0) -> Iterator[RunningServer]:
    """Run a server with toy workers until the block ends."""
    running = RunningServer(folder)
    server = WorkerServer(
        PrivateListener(folder),
        idle_s=idle_s,
        report=running.events.put,
        module="tests.unit.engine.toy_worker",
    )
    stopped = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stopped,))
    thread.start()
    try:
        yield running
    finally:
        stopped.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    # The module of the worker is in the folder of the tests, which is on no path by itself.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with running_server(tmp_path / "serve") as running:
        yield running


def task(shard: int) -> ShardTask:
    return ShardTask(run="/run", store="/store", reads_fingerprint="", shard=shard, lo=0, hi=1)


def compute(child: Child, inbox: Inbox, shard: int = 1) -> list[Message]:
    """Let a worker compute a shard, and return what it said until it was done or dead."""
    child.send(task(shard))
    messages: list[Message] = []
    while not messages or not isinstance(messages[-1], Computed | Closed):
        received = inbox.get(timeout=PATIENCE_S)
        assert received is not None
        messages.append(received[1])
    return messages


def wait_until(truth: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if truth():
            return
        deadline.wait(0.02)
    raise AssertionError("it does not come true")


def test_a_second_run_gets_the_same_process_and_hears_that_it_is_ready(
    server: RunningServer,
) -> None:
    first, inbox = server.get()
    assert [type(message) for message in compute(first, inbox)] == [Ready, Computed]
    assert first.end() == 0
    server.wait_for("is back")
    second, inbox = server.get()
    messages = compute(second, inbox)
    assert [type(message) for message in messages] == [Ready, Computed]
    assert second.pid == first.pid
    ready = messages[0]
    assert isinstance(ready, Ready)
    # Its start took no time of the second run.
    assert ready.record["ready_s"] == 0
    assert ready.record["started_s"] >= second.started_s
    second.end()


def test_other_models_or_settings_get_a_new_process(server: RunningServer) -> None:
    first, inbox = server.get()
    compute(first, inbox)
    first.end()
    server.wait_for("is back")
    process = psutil.Process(first.pid)
    replaced, inbox = server.get(digests={**DIGESTS, "head": "replaced"})
    compute(replaced, inbox)
    replaced.end()
    assert replaced.pid != first.pid
    wait_until(lambda: has_ended(process))
    server.wait_for("is back")
    other_settings, inbox = server.get(digests={**DIGESTS, "head": "replaced"}, token_budget=128)
    assert other_settings.pid != replaced.pid
    other_settings.end()


def test_a_worker_that_is_lent_is_refused_to_a_second_run_until_it_is_back(
    server: RunningServer,
) -> None:
    first, inbox = server.get()
    refused, _ = server.borrow()
    assert isinstance(refused, Refused)
    assert "another run of yours uses cpu-core-0" in refused.reason
    on_other_core, _ = server.get(device=OTHER_CORE)
    on_other_core.end()
    compute(first, inbox)
    first.end()
    server.wait_for("cpu-core-0 is back")
    second, _ = server.get()
    assert second.pid == first.pid
    second.end()


def test_a_run_that_goes_in_the_middle_of_its_work_takes_its_worker_along(
    server: RunningServer,
) -> None:
    """What the worker still computes must not be written into a folder that others may own."""
    child, _ = server.get()
    process = psutil.Process(child.pid)
    child.send(task(99))
    child._connection.close()  # as the kernel does for a run that was killed
    server.wait_for("its run has gone while it was at work")
    assert has_ended(process)
    second, inbox = server.get()
    assert second.pid != child.pid
    compute(second, inbox)
    second.end()


def test_a_run_that_ends_a_hanging_worker_gets_its_status(server: RunningServer) -> None:
    child, _ = server.get()
    child.send(task(99))
    process = psutil.Process(child.pid)
    assert child.end(grace_s=5.0) != 0
    assert has_ended(process)
    server.wait_for("its run has ended it")


def test_a_worker_that_dies_is_reported_with_its_last_words(
    server: RunningServer, tmp_path: Path
) -> None:
    child, inbox = server.get()
    child.log = tmp_path / "logs" / "worker.log"
    assert isinstance(compute(child, inbox, shard=13)[-1], Closed)
    assert child.end() == 3
    assert child.last_words == "computes shard 13"
    assert child.log.read_text() == "computes shard 13\n"
    second, _ = server.get()
    assert second.pid != child.pid
    second.end()


def test_last_words_that_are_read_late_still_reach_the_run(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of its own reads what a worker writes, and a busy machine may start it late."""
    read_errors = Child._read_errors

    def read_late(child: Child) -> None:
        child.process.wait()
        time.sleep(0.2)  # the server has noticed the end by then
        read_errors(child)

    monkeypatch.setattr(Child, "_read_errors", read_late)
    child, inbox = server.get()
    child.log = tmp_path / "logs" / "worker.log"
    compute(child, inbox, shard=13)
    assert child.end() == 3
    assert child.last_words == "computes shard 13"
    assert child.log.read_text() == "computes shard 13\n"


def test_a_worker_that_nobody_uses_is_ended_and_the_next_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with running_server(tmp_path / "serve", idle_s=0.1) as server:
        child, inbox = server.get()
        process = psutil.Process(child.pid)
        compute(child, inbox)
        child.end()
        server.wait_for("no run has used it for long")
        assert has_ended(process)
        second, _ = server.get()
        assert second.pid != child.pid
        second.end()


def test_the_end_of_the_server_ends_all_workers_and_runs_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with running_server(tmp_path / "serve") as server:
        lent, inbox = server.get()
        idle, _ = server.get(device=OTHER_CORE)
        idle.end()
        processes = [psutil.Process(lent.pid), psutil.Process(idle.pid)]
    assert all(map(has_ended, processes))
    received = inbox.get(timeout=PATIENCE_S)
    assert received is not None
    assert isinstance(received[1], Closed)
    assert not lent.is_running
    lent.end()
    assert connect(tmp_path / "serve") is None


def test_a_gpu_is_given_back_when_another_process_asks_but_not_while_a_run_computes(
    server: RunningServer,
) -> None:
    gpu = Device(id=f"GPU-serve-{os.getpid()}", kind="cuda", name="none")
    child, inbox = server.get(device=gpu)
    process = psutil.Process(child.pid)
    compute(child, inbox)
    assert device_holder(gpu.local) == f"process {child.pid}"
    with pytest.raises(DeviceError, match=f"process {child.pid}"):
        lock_device(gpu.local, wait_s=0)
    child.end()
    server.wait_for("is back")
    os.close(lock_device(gpu.local, wait_s=0))
    assert has_ended(process)
    server.wait_for("another process asks")
    second, inbox = server.get(device=gpu)
    compute(second, inbox)
    second.end()


def test_a_request_that_comes_just_after_a_run_has_returned_the_worker_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Device(id=f"GPU-returned-{os.getpid()}", kind="cuda", name="none")
    ended = threading.Event()
    child = SimpleNamespace(device=gpu.id, end=lambda _: ended.set())
    held = HeldWorker(child, DIGESTS, DeviceRequests(gpu.local))  # type: ignore[arg-type]
    answers: queue.Queue[bool] = queue.Queue()
    lend = HeldWorker.lend

    def lend_then_return(worker: HeldWorker) -> bool:
        """Find the worker lent. Then its run returns it, and another process asks for the GPU."""
        is_reserved = lend(worker)
        if not is_reserved:
            worker.is_lent = False
            threading.Thread(target=lambda: answers.put(ask_for_device(gpu.local))).start()
            wait_until(lambda: bool(select.select([worker.requests._socket], [], [], 0)[0]))
        return is_reserved

    monkeypatch.setattr(HeldWorker, "lend", lend_then_return)
    with closing(PrivateListener(tmp_path / "serve")) as listener:
        server = WorkerServer(listener, idle_s=600.0)
        server._held[gpu.id] = held
        server._give_up_unused()
        server._give_up_unused()
    assert answers.get(timeout=PATIENCE_S)
    assert ended.is_set()


def test_a_run_that_comes_while_the_server_looks_for_idle_workers_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reserves a worker to look at it. That is no other run."""
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    child = SimpleNamespace(device=CORE.id, spec=spec)
    held = HeldWorker(child, DIGESTS, None)  # type: ignore[arg-type]
    held.is_lent = False
    held.returned_s = time.monotonic()
    request = Borrow(identity=identity(), digests=DIGESTS, spec=spec)
    answers: queue.Queue[HeldWorker | Refused | None] = queue.Queue()
    lend = HeldWorker.lend
    with closing(PrivateListener(tmp_path / "serve")) as listener:
        server = WorkerServer(listener, idle_s=600.0)
        server._held[CORE.id] = held

        def lend_while_a_run_asks(worker: HeldWorker) -> bool:
            """Reserve the worker. Before it is free again, a run asks for it."""
            is_reserved = lend(worker)
            monkeypatch.undo()
            run = threading.Thread(target=lambda: answers.put(server._answer(request)[0]))
            run.start()
            run.join(0.2)  # as long as it takes, if nothing holds it up
            return is_reserved

        monkeypatch.setattr(HeldWorker, "lend", lend_while_a_run_asks)
        server._give_up_unused()
        assert answers.get(timeout=PATIENCE_S) is held


@pytest.mark.parametrize("name", ["version", "program", "umask", "cores", "CUDA_VISIBLE_DEVICES"])
def test_a_run_in_other_surroundings_is_refused_and_told_what_differs(
    server: RunningServer, name: str
) -> None:
    refused, _ = server.borrow(facts=identity() | {name: "another"})
    assert isinstance(refused, Refused)
    assert refused.reason == f"it has another {name}"


@pytest.mark.parametrize(
    "name",
    [
        "ATEN_CPU_CAPABILITY",  # torch then uses other instructions, which round in another order
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_MAX_CPU_ISA",
        "KMP_AFFINITY",
        "HDF5_USE_FILE_LOCKING",
        "SLURM_JOB_ID",  # a job has limits of its own, and must not compute outside them
        "VIRNUC_ROOTS",
    ],
)
def test_a_variable_by_which_a_worker_works_in_another_way_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = identity()
    monkeypatch.setenv(name, "another")
    assert refusal_of_identity(before, identity()) == f"it has another {name}"


def test_another_environment_of_python_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two environments may share a checkout of virnuc, and have different packages."""
    before = identity()
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert refusal_of_identity(before, identity()) == "it has another Python"


@pytest.mark.parametrize("package", ["torch", "numpy", "tokenizers", "triton"])
def test_a_package_that_was_updated_below_the_server_is_noticed(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    before = identity()
    version_of = borrowed.version_of
    monkeypatch.setattr(
        borrowed, "version_of", lambda name: "9.9" if name == package else version_of(name)
    )
    assert refusal_of_identity(before, identity()) == f"it has another {package}"


@pytest.mark.parametrize("name", ["changed.py", "kernels.so"])
def test_a_file_of_the_program_that_is_replaced_by_an_older_one_is_noticed(
    tmp_path: Path, name: str
) -> None:
    """Package managers keep the times of files, so a new file need not be the newest one."""
    (tmp_path / "encoders").mkdir()
    changed, newest = tmp_path / "encoders" / name, tmp_path / "newest.py"
    changed.write_text("a = 1")
    newest.write_text("b = 1")
    os.utime(changed, (1_000, 1_000))
    before = borrowed.program_state(tmp_path)
    assert borrowed.program_state(tmp_path) == before
    changed.write_text("a = 2")
    os.utime(changed, (2_000, 2_000))
    assert borrowed.program_state(tmp_path) != before


@pytest.mark.parametrize(
    "text",
    [
        "Borrow {}",
        "Borrow []",
        'Borrow {"identity": {}, "digests": {}, "spec": {"new_setting": 1}}',
        "BorrowInAnotherWay {}",
    ],
)
def test_a_run_of_another_version_is_told_so(server: RunningServer, text: str) -> None:
    """Another version may have other messages, which this one cannot read."""
    found = connect(server.folder)
    assert found is not None
    found[0].send(text)
    line = found[0].receive(PATIENCE_S)
    assert line is not None
    answer = Message.of(line)
    assert isinstance(answer, Refused)
    assert "another version of virnuc" in answer.reason
    found[0].release()


@pytest.mark.parametrize("text", ["", "nonsense", "LentInAnotherWay {}", "Lent {}", "Refused []"])
def test_a_server_of_another_version_is_no_reason_for_a_run_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(borrowed, "fingerprint", lambda *_: DIGESTS)
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    with PrivateListener(tmp_path / "serve") as listener:
        found = connect(tmp_path / "serve")
        accepted = listener.accept_own(PATIENCE_S)
        assert found is not None
        assert accepted is not None
        accepted[0].send(text)
        answer = borrowed.ask(found[0], spec)
        assert isinstance(answer, Refused)
        assert "another version of virnuc" in answer.reason
        found[0].release()
        accepted[0].release()


def test_a_run_may_read_its_weights_for_long_before_it_asks(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of large weights that were never used take minutes on a slow disk."""
    monkeypatch.setattr(worker_server, "FIRST_MESSAGE_S", 0.05, raising=False)
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())

    def compute_slowly(*_: object) -> dict[str, str]:
        """Take longer than the server waits for other messages."""
        time.sleep(0.3)
        return DIGESTS

    monkeypatch.setattr(borrowed, "fingerprint", compute_slowly)
    found = connect(server.folder)
    assert found is not None
    answer = borrowed.ask(found[0], spec)
    assert isinstance(answer, Lent)
    found[0].release()


@pytest.mark.parametrize("text", ["", "nonsense", "Nothing {}", "Borrow []", "Closed {}"])
def test_a_server_that_gets_nonsense_goes_on(server: RunningServer, text: str) -> None:
    found = connect(server.folder)
    assert found is not None
    found[0].send(text)
    found[0].receive(PATIENCE_S)
    assert found[0].receive(PATIENCE_S) is None  # the connection has ended
    found[0].release()
    answer, _ = server.borrow(facts={"version": "none"})
    assert isinstance(answer, Refused)


def test_the_borrower_says_once_why_the_run_starts_its_own_workers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(borrowed, "socket_folders", lambda: [server.folder])
    monkeypatch.setattr(borrowed, "fingerprint", lambda *_: DIGESTS)
    monkeypatch.setattr(borrowed, "identity", lambda: identity() | {"umask": "0777"})
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    inbox: Inbox = queue.Queue()
    lender = Borrower("auto")
    assert lender(spec, inbox) is None
    assert lender(spec, inbox) is None
    (record,) = caplog.records
    assert "starts its own: it has another umask" in record.getMessage()
    with pytest.raises(ConfigError, match="another umask"):
        Borrower("require")(spec, inbox)


def test_without_a_server_nothing_is_said_unless_one_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(borrowed, "socket_folders", lambda: [tmp_path / "none"])
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    assert Borrower("auto")(spec, queue.Queue()) is None
    assert not caplog.records
    with pytest.raises(ConfigError, match="start it with: virnuc serve"):
        Borrower("require")(spec, queue.Queue())


@dataclass
class SilentServer:
    """A server that accepts connections and answers nothing, as one that was stopped."""

    listener: PrivateListener

    def accept_request(self) -> Messages:
        """Return the connection of a run that has asked for a worker and waits for the answer."""
        accepted = self.listener.accept_own(PATIENCE_S)
        assert accepted is not None
        connection, _ = accepted
        line = connection.receive(PATIENCE_S)
        assert line is not None
        assert isinstance(Message.of(line), Borrow)
        return connection


@pytest.fixture
def silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentServer]:
    """Let runs of this process ask a server that does not answer within a minute."""
    folder = tmp_path / "silent"
    monkeypatch.setattr(borrowed, "socket_folders", lambda: [folder])
    monkeypatch.setattr(borrowed, "fingerprint", lambda *_: DIGESTS)
    monkeypatch.setattr(borrowed, "ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(process, "_lender", Borrower("require"))
    with PrivateListener(folder) as listener:
        yield SilentServer(listener)


OBEYED_S = PATIENCE_S / 2  # an interrupt must be obeyed long before a silent server is given up


def lend_late(connection: Messages) -> None:
    """Lend a worker to a run that was interrupted, and check that the run returns it."""
    connection.send(Lent(pid=1, has_loaded=True).line())
    require_return(connection)


def require_return(connection: Messages) -> None:
    """Check that a run returns the worker that it was lent: it closes the connection."""
    readable, _, _ = select.select([connection], [], [], PATIENCE_S)
    assert readable
    assert connection.receive() is None
    connection.release()


def test_the_end_of_all_workers_does_not_wait_for_a_silent_server(
    silent_server: SilentServer,
) -> None:
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    workers = LocalWorkers(WORKER)
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(workers.start, spec)
        connection = silent_server.accept_request()
        began_s = time.monotonic()
        end_all_children()
        error = start.exception(PATIENCE_S)
        assert time.monotonic() - began_s < OBEYED_S
    assert isinstance(error, WorkerError)
    assert "interrupted" in str(error)
    lend_late(connection)


def test_the_end_of_a_pool_does_not_wait_for_a_silent_server(silent_server: SilentServer) -> None:
    """Ctrl-C first leaves the block of the pool."""
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    with Pool([spec], LocalWorkers(WORKER), warm=True):
        connection = silent_server.accept_request()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < OBEYED_S
    lend_late(connection)


def test_an_interrupt_of_the_main_thread_does_not_wait_for_a_silent_server(
    silent_server: SilentServer,
) -> None:
    """Workers that are started before the run are borrowed by the main thread."""
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())

    def interrupt() -> Messages:
        connection = silent_server.accept_request()
        os.kill(os.getpid(), signal.SIGINT)
        return connection

    with ThreadPoolExecutor(1) as threads:
        connection = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            LocalWorkers(WORKER, [spec])
        lend_late(connection.result(PATIENCE_S))


def test_a_worker_that_is_lent_just_before_an_interrupt_is_returned(
    silent_server: SilentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the run has its answer, and does not yet list the worker."""
    spec = WorkerSpec(models="/models", device=CORE, engine=EngineSpec())
    workers = LocalWorkers(WORKER)
    borrow = workers._borrow

    def borrow_and_interrupt(spec: WorkerSpec) -> Child | None:
        child = borrow(spec)
        end_all_children()
        return child

    monkeypatch.setattr(workers, "_borrow", borrow_and_interrupt)
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(workers.start, spec)
        connection = silent_server.accept_request()
        connection.send(Lent(pid=1, has_loaded=True).line())
        assert isinstance(start.exception(PATIENCE_S), WorkerError)
    require_return(connection)


def test_equal_surroundings_are_no_reason_to_refuse() -> None:
    assert refusal_of_identity(identity(), identity()) == ""


# The moments of a start: process 10, imported 11, loaded 15, ready without waiting 16, waited 4.
RECORD = {
    "started_s": 10.0,
    "import_s": 1.0,
    "load_s": 5.0,
    "ready_s": 6.0,
    "waited_s": 4.0,
    "pid": 1,
}


@pytest.mark.parametrize(
    ("borrowed_s", "expected"),
    [
        (5.0, (10.0, 1.0, 5.0, 6.0, 4.0)),  # started for this run
        (12.0, (12.0, 0.0, 3.0, 4.0, 4.0)),  # borrowed while it loaded
        (18.0, (18.0, 0.0, 0.0, 0.0, 2.0)),  # loaded, and without a task until 20
        (30.0, (30.0, 0.0, 0.0, 0.0, 0.0)),  # ready since long ago
    ],
)
def test_a_start_before_the_run_takes_no_time_of_the_run(
    borrowed_s: float, expected: tuple[float, ...]
) -> None:
    record = since(RECORD, borrowed_s)
    names = ("started_s", "import_s", "load_s", "ready_s", "waited_s")
    assert tuple(record[name] for name in names) == expected
    assert record["borrowed"] is True
    assert record["pid"] == 1
