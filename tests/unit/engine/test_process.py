"""Children that never outlive their parent: real processes, really killed."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from virnuc_core.engine import process
from virnuc_core.errors import WorkerError


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A child that echoes, and starts a grandchild that only a group kill can end."""
    (tmp_path / "echo_child.py").write_text(
        textwrap.dedent(
            """
            import subprocess, sys, signal
            from virnuc_core.engine.process import Parent
            parent = Parent()
            if parent.spec.get("stubborn"):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print("noise from a library")
            parent.send({"event": "ready", "kid": kid.pid})
            parent.listen()
            while True:
                parent.send({"event": "echo", "said": parent.messages.get()})
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "echo_child"
    process.end_all_children(1)


def start(module: str, tmp_path: Path, **spec: object) -> tuple[process.Child, queue.Queue, int]:
    inbox: queue.Queue = queue.Queue()
    child = process.spawn(
        module, spec, name="echo", inbox=inbox, log=tmp_path / "log" / "echo.log", token=process.cancel_token()
    )
    _, ready = inbox.get(timeout=20)
    return child, inbox, ready["kid"]


def gone(pid: int, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_messages_go_both_ways_and_prints_do_not_garble_them(child_module: str, tmp_path: Path) -> None:
    child, inbox, _ = start(child_module, tmp_path)
    child.send({"op": "hello"})
    assert inbox.get(timeout=10)[1] == {"event": "echo", "said": {"op": "hello"}}
    assert "noise from a library" in child.last_words()


@pytest.mark.parametrize("stubborn", [False, True])
def test_ending_a_child_takes_its_children_along(child_module: str, tmp_path: Path, stubborn: bool) -> None:
    child, _, kid = start(child_module, tmp_path, stubborn=stubborn)
    child.end(grace_s=1)
    assert gone(child.pid)
    assert gone(kid)


def test_after_ending_all_no_new_child_of_that_generation_is_started(child_module: str, tmp_path: Path) -> None:
    token = process.cancel_token()
    child, _, _ = start(child_module, tmp_path)
    assert process.end_all_children(1) == 1
    assert gone(child.pid)
    with pytest.raises(WorkerError, match="interrupted"):
        process.spawn(child_module, {}, name="late", inbox=queue.Queue(), log=tmp_path / "late.log", token=token)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_child_along(child_module: str, tmp_path: Path, sig: signal.Signals) -> None:
    program = textwrap.dedent(
        f"""
        import queue, pathlib, time
        from virnuc_core.engine import process
        inbox = queue.Queue()
        child = process.spawn("{child_module}", {{"stubborn": True}}, name="e", inbox=inbox,
                              log=pathlib.Path({str(tmp_path)!r}) / "e.log", token=process.cancel_token())
        inbox.get()
        print(child.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(sig)
    parent.wait(10)
    parent.stdout.close()
    assert gone(child)
