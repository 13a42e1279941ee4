"""Commands that a child of the preloaded process runs: what they take over, and how they end.

The expected values are those of the same command in a process of its own.
"""

from __future__ import annotations

import json
import os
import pty
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.process_lookup import has_ended
from virnuc_core import command_handover, process_facts
from virnuc_core.command_handover import (
    ProcessState,
    TerminalProcess,
    format_message,
    parse_message,
)
from virnuc_core.engine.preloaded import (
    FAILED,
    LOADING,
    PreloadedProcess,
    _file_states,
    _loaded_files,
)
from virnuc_core.engine.worker_server import WorkerServer
from virnuc_core.private_socket import Messages, Peer, PrivateListener, connect

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
TERMINAL = ROOT / "tests/unit/engine/toy_terminal.py"


@dataclass
class Server:
    """A server in a thread of this process, with a preloaded process that has loaded a toy.

    Attributes:
        folder: The folder of its socket.
        events: What it has reported.
    """

    folder: Path
    server: WorkerServer
    events: queue.Queue[str] = field(default_factory=queue.Queue)

    @property
    def preloaded(self) -> psutil.Process:
        pid = self.server._preloaded["toy"].pid
        assert pid is not None
        return psutil.Process(pid)

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """Return the command line of a toy that asks this server."""
        return [sys.executable, str(TERMINAL), str(folder or self.folder), *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a toy as `subprocess.Popen` does."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.command(*words), text=True, **{**pipes, **options})

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a toy in a child of the server."""
        finished = self.run_anyhow(*words, **options)
        assert "itself" not in finished.stderr
        return finished

    def run_anyhow(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a toy in a child of the server, or by itself."""
        return run(self.command(*words), **options)

    def run_alone(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a toy without a server."""
        finished = run(self.command(*words, folder=self.folder / "none"), **options)
        assert "itself" in finished.stderr
        return finished


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
    )


def wait_for(truth: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (result := truth()):
        assert time.monotonic() < deadline_s, f"waited for {what}"
        time.sleep(0.01)
    return result


@contextmanager
def running_server(
    folder: Path, module: str = "tests.unit.engine.toy_command", idle_s: float = 600.0
) -> Iterator[Server]:
    """Run a server until the block ends. Its preloaded process is ready when the block begins."""
    events: queue.Queue[str] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TOY_OF_SERVER", "1")
        server = WorkerServer(
            PrivateListener(folder),
            idle_s=idle_s,
            report=events.put,
            programs={"toy": module, "second toy": module},
            first_program="toy",
        )
        stopped = threading.Event()
        thread = threading.Thread(target=server.serve, args=(stopped,))
        thread.start()
        try:
            running = Server(folder, server, events)
            patch.delenv("TOY_OF_SERVER")
            wait_until_ready(server, "toy")
            yield running
        finally:
            stopped.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def wait_until_ready(server: WorkerServer, program: str) -> None:
    preloaded = server._preloaded[program]

    def is_ready() -> bool:
        # The system may have refused it a moment ago. If it still does, this raises the reason.
        preloaded.start()
        with preloaded._lock:
            preloaded._update()
            return preloaded._facts is not None

    wait_for(is_ready, "the preloaded process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("preloaded") / "serve") as running:
        yield running


def child_of(terminal: subprocess.Popen[str]) -> psutil.Process:
    """Return the process that runs a toy which writes its number first."""
    assert terminal.stdout is not None
    child = psutil.Process(int(terminal.stdout.readline()))
    assert child.pid != terminal.pid
    return child


def end(terminal: subprocess.Popen[str]) -> None:
    terminal.kill()
    terminal.communicate(timeout=PATIENCE_S)


def test_a_child_sees_the_process_of_the_user(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "täst"
    folder.mkdir()

    def lower_limits() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(3)
        Path("/proc/self/oom_score_adj").write_text("700")

    environment = {**os.environ, "TOY": "a b\udcff", "TZ": "Asia/Kolkata"}
    environment.pop("TERM", None)
    options: dict[str, Any] = {
        "cwd": folder,
        "env": environment,
        "preexec_fn": lower_limits,
        "input": "",
    }
    own, alone = (
        json.loads(runs("show", "ä b", "\udcff", **options).stdout)
        for runs in (server.run, server.run_alone)
    )
    started_s = own.pop("started")
    assert 0 < alone.pop("started") - started_s < PATIENCE_S
    # The folder of the socket is the only word that differs.
    assert own == alone
    assert own["environment"]["TOY"] == "a b\udcff"
    assert "TOY_OF_SERVER" not in own["environment"]
    assert own["files"] == [64, 128]
    assert own["oom_score"] == "700\n"
    assert own["directory"] == str(folder)
    assert own["timezone"] == ["IST", "IST"]


def test_a_signal_is_not_lost_if_the_handover_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has got it, and this process runs the command itself."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    class BrokenConnection:
        def send(self, _text: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            raise BrokenPipeError

        def release(self) -> None: ...

    terminal_process = TerminalProcess(
        cast(Messages, BrokenConnection()), Peer(pid=1, uid=0), "toy"
    )
    child = subprocess.Popen(["sleep", "60"])
    terminal_process._child_handle = os.pidfd_open(child.pid)
    monkeypatch.setattr(terminal_process, "_hand_over", lambda _resources: True)
    try:
        assert terminal_process.run() is None
    finally:
        signal.signal(signal.SIGTERM, previous)
        child.kill()
    assert child.wait() == -signal.SIGTERM  # it had got the signal before
    assert received == [signal.SIGTERM]


def test_the_time_of_a_command_counts_from_its_terminal_process(server: Server) -> None:
    delay_s = 1.0  # between the start of the terminal process and that of the child
    environment = {**os.environ, "TOY_DELAY_S": str(delay_s)}
    before_s = time.monotonic()
    seen = json.loads(server.run("show", input="", env=environment).stdout)
    # The kernel counts in ticks of 10 ms.
    assert before_s - 0.02 <= seen["started"] <= time.monotonic() - delay_s


def test_input_reaches_the_child_and_output_comes_back(server: Server) -> None:
    text = "ACGT\n" * 100_000
    assert server.run("echo", input=text).stdout == text


def test_a_terminal_is_a_terminal_for_the_child(server: Server) -> None:
    outer, inner = pty.openpty()
    try:
        terminal = server.start("show", stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        shown = b""
        with suppress(OSError):  # nobody has the terminal open any more
            while piece := os.read(outer, 1 << 16):
                shown += piece
        assert terminal.wait(PATIENCE_S) == 0
    finally:
        os.close(outer)
    streams = json.loads(shown)["streams"]
    assert [stream["is_terminal"] for stream in streams] == [True, True, True]


@pytest.mark.parametrize("words", [("code", "0"), ("code", "5"), ("exit", "a reason"), ("late",)])
def test_the_end_is_that_of_a_command_of_its_own(server: Server, words: tuple[str, ...]) -> None:
    own = server.run(*words, input="")
    alone = server.run_alone(*words, input="")
    assert own.returncode == alone.returncode
    assert own.stdout == alone.stdout
    assert own.stderr == alone.stderr.removeprefix("itself\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_killed_child_ends_its_terminal_process_by_the_same_signal(
    server: Server, number: signal.Signals
) -> None:
    assert server.run("die", str(int(number)), input="").returncode == -number


def test_a_killed_terminal_process_takes_its_child_along(server: Server) -> None:
    terminal = server.start("wait")
    child = child_of(terminal)
    end(terminal)
    wait_for(lambda: has_ended(child), "the end of the child")


def test_a_killed_terminal_process_takes_a_stopped_child_along(server: Server) -> None:
    terminal = server.start("wait")
    child = child_of(terminal)
    child.suspend()
    end(terminal)
    wait_for(lambda: has_ended(child), "the end of the child")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_child_which_decides_what_follows(
    server: Server, number: signal.Signals, code: int
) -> None:
    terminal = server.start("patient")
    child = child_of(terminal)
    terminal.send_signal(number)
    terminal.communicate(timeout=PATIENCE_S)
    assert terminal.returncode == code
    assert has_ended(child)


def test_a_signal_that_the_terminal_process_does_not_handle_ends_both(server: Server) -> None:
    def handle_by_default() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup

    terminal = server.start("patient", preexec_fn=handle_by_default)
    child = child_of(terminal)
    terminal.send_signal(signal.SIGHUP)
    terminal.communicate(timeout=PATIENCE_S)
    assert terminal.returncode == -signal.SIGHUP
    wait_for(lambda: has_ended(child), "the end of the child")


def test_two_commands_run_at_the_same_time(server: Server) -> None:
    first, second = server.start("wait"), server.start("wait")
    children = [child_of(first), child_of(second)]
    assert children[0].pid != children[1].pid
    end(first)
    wait_for(lambda: has_ended(children[0]), "the end of the first child")
    assert not has_ended(children[1])
    end(second)
    wait_for(lambda: has_ended(children[1]), "the end of the second child")


def test_a_child_keeps_no_connection_of_another_one(server: Server) -> None:
    """A copy of another command's connection would hide that this command has ended."""
    first, second = server.start("wait"), server.start("wait")
    try:
        counts = [
            sum(
                "socket" in str(link.readlink()) for link in Path(f"/proc/{child.pid}/fd").iterdir()
            )
            for child in (child_of(first), child_of(second))
        ]
        assert counts[0] == counts[1]
    finally:
        end(first)
        end(second)


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "7"), ("LC_ALL", "C"), ("SLURM_JOB_ID", "1")]
)
def test_another_environment_that_matters_is_refused(server: Server, name: str, value: str) -> None:
    finished = server.run_anyhow("code", "3", env={**os.environ, name: value}, input="")
    assert finished.returncode == 3
    assert finished.stderr == "itself\nerr\n"


def test_another_umask_is_refused(server: Server) -> None:
    finished = server.run_anyhow("code", "3", umask=0o77, input="")
    assert finished.stderr == "itself\nerr\n"


def test_another_limit_of_memory_is_refused(server: Server) -> None:
    """A child that begins above the limit would wait for ever for its first thread."""
    limit = 8 << 30

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    finished = server.run_anyhow("code", "3", preexec_fn=limit_memory, input="")
    assert finished.stderr == "itself\nerr\n"


def test_other_options_of_python_are_refused(server: Server) -> None:
    command = server.command("code", "3")
    finished = run([command[0], "-X", "faulthandler", *command[1:]], input="")
    assert finished.stderr == "itself\nerr\n"


def current_facts() -> dict[str, str]:
    """Return the facts of a terminal process. Other tests may have changed the environment."""
    facts = process_facts.process_facts()
    # pytest has other streams than a command
    facts["unbuffered output"] = str(bool(os.environ.get("PYTHONUNBUFFERED")))
    return facts


@pytest.mark.parametrize("name", process_facts.process_facts())
def test_each_fact_that_differs_is_refused_by_its_name(server: Server, name: str) -> None:
    assert f"another {name[:20]}" in refusal_of(server, current_facts() | {name: "other"})


def test_a_fact_that_only_one_side_has_is_refused(server: Server) -> None:
    assert "another TRITON_X" in refusal_of(server, current_facts() | {"TRITON_X": "1"})


def test_a_command_whose_program_has_other_facts_runs_itself(server: Server) -> None:
    assert "another TOY_FACT" in refusal_of(server, current_facts() | {"TOY_FACT": "other"})
    other = {**os.environ, "TOY_FACT": "other"}
    assert server.run_anyhow("code", "3", env=other, input="").stderr == "itself\nerr\n"


def test_a_second_program_is_loaded_when_a_command_asks_for_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TOY_PROGRAM": "second toy"}
    with running_server(tmp_path / "serve") as server:
        assert server.server._preloaded["second toy"].pid is None
        assert "itself" in server.run_anyhow("code", "3", env=environment, input="").stderr
        wait_until_ready(server.server, "second toy")
        assert server.run("code", "3", env=environment, input="").returncode == 3
        processes = [server.preloaded, psutil.Process(server.server._preloaded["second toy"].pid)]
        assert processes[0] != processes[1]
    wait_for(lambda: all(map(has_ended, processes)), "the end of both")


def test_a_program_that_cannot_be_loaded_is_not_tried_again_by_each_command() -> None:
    with ThreadPoolExecutor(1) as threads:
        preloaded = PreloadedProcess("no_such_module", lambda start: threads.submit(start).result())
        assert preloaded.hand_over({}, 0) == LOADING
        assert preloaded.pid is not None
        failed = psutil.Process(preloaded.pid)
        wait_for(lambda: has_ended(failed), "the end of the process")
        wait_for(lambda: preloaded.hand_over({}, 0) == FAILED, "the end of its connection")
        assert preloaded.pid is None
        preloaded._retry_at_s = 0.0  # after a while
        assert preloaded.hand_over({}, 0) == LOADING
        assert preloaded.pid is not None
        preloaded.end()


def test_the_server_reports_why_a_command_runs_itself(tmp_path: Path) -> None:
    environment = {**os.environ, "TOY_FACT": "other"}
    with running_server(tmp_path / "serve") as server:
        server.run_anyhow("code", "3", env=environment, input="")
        event = server.events.get(timeout=PATIENCE_S)
    assert event.endswith("runs its command itself: it has another TOY_FACT")


def test_a_program_that_the_server_does_not_know_is_refused(server: Server) -> None:
    environment = {**os.environ, "TOY_PROGRAM": "unknown"}
    assert "itself" in server.run_anyhow("code", "3", env=environment, input="").stderr


def refusal_of(server: Server, facts: dict[str, str]) -> str:
    """Return why the preloaded process refuses a command. The facts of the toy come first."""
    fits = {"PYTHONPATH": str(ROOT), "TOY_FACT": "same", **facts}
    found = connect(server.folder)
    assert found is not None
    connection, _ = found
    connection.send(format_message("RunCommand", program="toy", facts=fits))
    name, fields = parse_message(connection.receive(PATIENCE_S))
    connection.release()
    assert name == "Refused"
    return str(fields["reason"])


def test_a_process_without_the_right_to_a_higher_limit_runs_its_command_itself(
    tmp_path: Path,
) -> None:
    """Root may raise limits, so the refusal is provoked by a limit that nobody may have."""
    impossible_limits = {"RLIMIT_NOFILE": [1 << 40, 1 << 40]}
    state = replace(ProcessState.of_this_process(), limits=impossible_limits)
    own, other = socket.socketpair()
    handles = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    handles.append(os.open(tmp_path, os.O_RDONLY))
    life, life_end = socket.socketpair()
    with own, life, life_end:
        pid = os.fork()  # only a process of its own may take over another one
        if pid == 0:
            own.close()
            os._exit(int(command_handover.take_over(Messages(other))))
        other.close()
        terminal = Messages(own)
        assert parse_message(terminal.receive(PATIENCE_S)) == ("Child", {"pid": pid})
        handover = format_message("Handover", state=asdict(state))
        terminal.send_handles(handover, [*handles, life_end.fileno()])
        name, _ = parse_message(terminal.receive(PATIENCE_S))
        assert name == "Refused"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for handle in handles:
        os.close(handle)


def test_a_child_does_not_begin_before_the_last_word(server: Server, tmp_path: Path) -> None:
    """A terminal process that has waited too long runs its command itself, and the child does not."""
    found = connect(server.folder)
    assert found is not None
    connection, _ = found
    facts = current_facts() | {"PYTHONPATH": str(ROOT), "TOY_FACT": "same"}
    connection.send(format_message("RunCommand", program="toy", facts=facts))
    name, fields = parse_message(connection.receive(PATIENCE_S))
    assert name == "Child", fields
    child = psutil.Process(fields["pid"])
    output = tmp_path / "output"
    life, life_end = socket.socketpair()
    with output.open("w") as file, life, life_end:
        state = replace(ProcessState.of_this_process(), arguments=["toy", "code", "0"])
        handover = format_message("Handover", state=asdict(state))
        with Path(os.devnull).open() as nothing:
            folder = os.open("/", os.O_RDONLY)
            streams = [nothing.fileno(), file.fileno(), file.fileno()]
            connection.send_handles(handover, [*streams, folder, life_end.fileno()])
            os.close(folder)
        assert parse_message(connection.receive(PATIENCE_S))[0] == "Accepted"
        connection.release()
        wait_for(lambda: has_ended(child), "the end of the child")
    assert output.read_text() == ""


@pytest.mark.parametrize("answer", [None, "Refused {}", "nonsense", 'Child {"pid": 1}'])
def test_any_other_answer_lets_the_command_run_itself(
    answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_handover, "ANSWER_S", 0.2)
    own, other = socket.socketpair()
    with other:
        server_end = Messages(other)
        if answer is not None:
            server_end.send(answer)
        peer = Peer(os.getpid(), os.geteuid())
        assert TerminalProcess(Messages(own), peer, "toy").run() is None


def test_a_stopped_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = socket.socketpair()
    with subprocess.Popen(["sleep", "60"]) as stopped, other:
        stopped.send_signal(signal.SIGSTOP)
        process = psutil.Process(stopped.pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
        peer = Peer(stopped.pid, os.geteuid())
        assert TerminalProcess(Messages(own), peer, "toy").run() is None
        assert other.recv(1) == b""  # nothing was asked
        stopped.kill()


def test_a_preloaded_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with running_server(tmp_path / "serve") as server:
        terminal = server.start("patient")
        child = child_of(terminal)
        server.preloaded.kill()
        # The command goes on, and its signals still reach it.
        assert "itself" in server.run_anyhow("code", "3", input="").stderr
        terminal.send_signal(signal.SIGTERM)
        terminal.communicate(timeout=PATIENCE_S)
        assert terminal.returncode == 143
        assert has_ended(child)
        wait_until_ready(server.server, "toy")
        assert server.run("code", "3", input="").returncode == 3


def test_a_process_without_a_free_handle_refuses_commands_and_goes_on(tmp_path: Path) -> None:
    with running_server(tmp_path / "serve") as server:
        terminal = server.start("wait")
        child = child_of(terminal)
        preloaded = server.preloaded
        # It has opened a handle for the child, and waits for the next command.
        wait_for(lambda: preloaded.status() == psutil.STATUS_SLEEPING, "the process to rest")
        used_handles = {int(path.name) for path in Path(f"/proc/{preloaded.pid}/fd").iterdir()}
        free_handle = min(set(range(len(used_handles) + 1)) - used_handles)
        # The connection of the next command takes it. None is left to notice the end of a child.
        limits = (free_handle + 1, free_handle + 1)
        resource.prlimit(preloaded.pid, resource.RLIMIT_NOFILE, limits)
        refused = server.run_anyhow("code", "3", input="")
        assert refused.returncode == 3
        assert "itself" in refused.stderr
        assert server.preloaded.pid == preloaded.pid
        # The first command is still looked after: only the process knows by which signal it ended.
        child.send_signal(signal.SIGUSR1)
        terminal.communicate(timeout=PATIENCE_S)
        assert terminal.returncode == -signal.SIGUSR1


FORK_WITHOUT_PIDFD = """
import os, time
from virnuc_core.engine.preloaded import _fork_with_pidfd
def refuse(pid):
    raise OSError("no handle")
os.pidfd_open = refuse
try:
    pid, _ = _fork_with_pidfd()
    if pid == 0:
        time.sleep(600)
except OSError as error:
    print(error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""


def test_a_child_whose_end_could_not_be_noticed_is_ended() -> None:
    finished = run([sys.executable, "-c", FORK_WITHOUT_PIDFD])
    assert finished.stdout.splitlines() == ["no handle", "no child"]


def test_an_unused_process_ends_and_comes_back_with_the_next_command(tmp_path: Path) -> None:
    with running_server(tmp_path / "serve", idle_s=0.3) as server:
        process = server.server._preloaded["toy"]
        # If this process rests for long, the other one may have ended, and been started again.
        while process.pid is not None:
            while "no longer kept loaded" not in server.events.get(timeout=PATIENCE_S):
                pass
        server.server._idle_s = 600.0  # the next one stays
        assert "itself" in server.run_anyhow("code", "3", input="").stderr
        assert process.pid is not None


def test_the_end_of_the_server_leaves_its_commands_running(tmp_path: Path) -> None:
    with running_server(tmp_path / "serve") as server:
        terminal = server.start("patient")
        child = child_of(terminal)
    assert terminal.poll() is None
    assert not has_ended(child)
    terminal.send_signal(signal.SIGINT)
    terminal.communicate(timeout=PATIENCE_S)
    assert terminal.returncode == 130
    assert has_ended(child)


def test_a_changed_removed_or_new_package_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "program"
    program.mkdir()
    template = program / "page.html"
    template.write_text("page")
    files = _loaded_files([program])
    state = _file_states(files)
    assert _file_states(files) == state
    template.write_text("another page")
    changed = _file_states(files)
    assert changed != state
    (tmp_path / "package.dist-info").mkdir()
    assert _file_states(files) != changed
    template.unlink()
    assert None in _file_states(files)


def test_limits_of_control_groups_are_found_with_their_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    job = tmp_path / "user" / "job"
    job.mkdir(parents=True)
    (tmp_path / "user" / "memory.max").write_text("max\n")
    (job / "cpu.max").write_text("max 100000\n")

    def limits(groups: str) -> str:
        return process_facts.control_group_limits(str(tmp_path), groups)

    assert limits("0::/user/job\n") == ""
    (job / "memory.max").write_text("1000\n")
    assert limits("0::/user/job\n") == "user/job/memory.max 1000"
    assert limits("0::/user\n") == ""
    # The first version of control groups is compared by name.
    assert limits("1:cpu:/a\n0::/user\n") == "1:cpu:/a\n0::/user\n"
    assert limits("0::/../other\n") == "0::/../other\n"
