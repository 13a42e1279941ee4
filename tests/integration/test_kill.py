"""SIGKILL, which no process can answer: what the killed run had started ends all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.server import attended

GONE_WITHIN_S = 10


def alive(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that still run; a zombie waiting for its parent is gone."""
    return [
        " ".join(p.cmdline()) for p in processes if p.is_running() and p.status() not in (psutil.STATUS_ZOMBIE, "dead")
    ]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := alive(processes):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_a_killed_ad_hoc_run_leaves_no_process_behind(tmp_path: Path, many_reads: Path, models: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect")}
    out, log = tmp_path / "run", tmp_path / "log"
    words = [sys.executable, "-m", "flows.cli", "predict", str(many_reads), "-o", str(out), "--models", str(models)]
    words += ["--devices", "cpu:1", "--shard-tokens", "8192", "--token-budget", "2048"]
    family: list[psutil.Process] = []
    with log.open("wb") as handle:
        run = subprocess.Popen(words, stdout=handle, stderr=handle, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while len(list((out / "shards").glob("0*.h5"))) < 2:
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        family = psutil.Process(run.pid).children(recursive=True)
        commands = [" ".join(one.cmdline()) for one in family]
        assert any("uvicorn" in command for command in commands), "no embedded server to leave behind"
        assert any("virnuc_core.engine.worker" in command for command in commands)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        wait_until_gone(family)
    finally:
        for one in (*family, psutil.Process(run.pid) if run.poll() is None else None):
            if one is not None and one.is_running():
                one.kill()
        run.wait()


def test_an_attended_program_keeps_its_arguments_its_signals_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(sys.argv[1:], flush=True)\n"
        "time.sleep(60)\n"
    )
    command = attended([sys.executable, "-m", "program", "--port", "1"])
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=found, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "['--port', '1']\n"
        program.terminate()
        assert program.wait(10) == 7


def test_an_attended_program_ends_after_its_parent_though_the_starting_thread_was_gone_before(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, threading, time\n"
        "from flows.server import attended\n"
        "def start():\n"
        "    global child\n"
        "    child = subprocess.Popen(attended([sys.executable, '-m', 'program']))\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "time.sleep(2)\n"
        "print(child.pid, child.poll(), flush=True)\n"
        "time.sleep(60)\n"
    )
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, env=found, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, code = parent.stdout.readline().split()
        assert code == "None", "it ended with the thread that started it"
        child = psutil.Process(int(pid))
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    wait_until_gone([child])


def test_a_command_that_is_not_understood_is_started_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert attended(["uvicorn", "--port", "1"]) == ["uvicorn", "--port", "1"]
    assert "may outlive a killed run" in caplog.text
