"""Programs that end after the process that started them, whatever ended it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from flows.start import dying_with_parent

from .processes import PATIENCE_S, gone, wait_for


def test_a_program_that_dies_with_its_parent_keeps_its_arguments_its_signals_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(sys.argv[1:], flush=True)\n"
        "time.sleep(600)\n"
    )
    command = dying_with_parent("program", "--port", "1")
    found = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=found, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "['--port', '1']\n"
        program.terminate()
        assert program.wait(PATIENCE_S) == 7


def test_it_ends_after_its_parent_though_the_starting_thread_was_gone_before(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, threading, time\n"
        "from flows.start import dying_with_parent\n"
        "def start():\n"
        "    global child\n"
        "    child = subprocess.Popen(dying_with_parent('program'), stdout=subprocess.PIPE)\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "child.stdout.readline()\n"
        "print(child.pid, child.poll(), flush=True)\n"
        "time.sleep(600)\n"
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
    wait_for(lambda: gone([child]), "the child to end")
