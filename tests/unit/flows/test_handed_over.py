"""Which commands a server may run, and what is imported before it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc.flows.cli.handed_over import may_be_handed_over, run_in_server
from virnuc.flows.cli.options import ENVIRONMENT, OTHER_VARIABLES
from virnuc_core.private_socket import SOCKET, PrivateListener
from virnuc_core.process_facts import START_VARIABLES, WORKER_VARIABLES

PATIENCE_S = 60.0
ALONE = {"VIRNUC_NO_PREFECT": "1"}


@pytest.mark.parametrize(
    ("line", "environment", "may"),
    [
        ("predict reads.fa -o out --no-prefect", {}, True),
        ("predict reads.fa -o out", ALONE, True),
        ("predict reads.fa -o out", {}, False),
        ("predict reads.fa -o out", {"VIRNUC_NO_PREFECT": "0"}, False),
        ("predict reads.fa -o out", {"VIRNUC_NO_PREFECT": "False"}, False),
        ("predict - -o out", ALONE, True),
        ("predict reads.fa --serve off", ALONE, False),
        ("predict reads.fa --serve=off", ALONE, False),
        ("predict reads.fa --serve require", ALONE, True),
        ("predict reads.fa", {**ALONE, "VIRNUC_SERVE": "off"}, False),
        ("predict reads.fa --serve auto", {**ALONE, "VIRNUC_SERVE": "off"}, True),
        ("predict reads.fa --serve", ALONE, True),
        ("predict reads.fa --cluster local:2", ALONE, False),
        ("predict reads.fa --cluster=slurm.toml", ALONE, False),
        ("predict /dev/fd/63 -o out", ALONE, False),
        ("predict -1=/proc/self/fd/5 -o out", ALONE, False),
        ("predict-inbox --inbox in", ALONE, False),
        ("validate reads.fa --no-prefect", {}, False),
        ("--debug predict reads.fa", ALONE, False),
        ("", ALONE, False),
    ],
)
def test_only_predictions_without_prefect_on_this_machine_are_handed_over(
    line: str, environment: dict[str, str], may: bool
) -> None:
    assert may_be_handed_over(line.split(), environment) == may


def test_without_a_server_the_command_runs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    words = ["predict", "reads.fa", "-o", "out", "--no-prefect"]
    assert run_in_server(words) is None
    # A folder that others may enter, or a socket at which nobody listens, is no server.
    folder = tmp_path / "virnuc"
    folder.mkdir(mode=0o755)
    assert run_in_server(words) is None
    folder.chmod(0o700)
    (folder / SOCKET).touch()
    assert run_in_server(words) is None


def test_ctrl_c_while_a_server_is_asked_is_one_line(tmp_path: Path) -> None:
    """A server that was stopped, or is busy, does not answer for some seconds."""
    words = ["predict", "reads.fastq", "-o", "out", "--no-prefect"]
    with PrivateListener(tmp_path / "virnuc") as listener:
        command = subprocess.Popen(
            [sys.executable, "-m", "virnuc.flows.cli", *words],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        accepted = listener.accept_own(PATIENCE_S)
        assert accepted is not None
        connection, _ = accepted
        request = connection.receive(PATIENCE_S)
        assert request is not None
        assert request.startswith("RunCommand ")
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=PATIENCE_S)
        connection.release()
    assert command.returncode == 130
    assert errors.startswith("virnuc: interrupted; ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def run_python(source: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        text=True,
    ).stdout


def test_nothing_heavy_is_imported_before_the_server_is_asked() -> None:
    source = """
import sys
import virnuc.flows.cli.handed_over, virnuc_core.command_handover, virnuc_core.private_socket
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("virnuc")))
"""
    packages, modules = run_python(source).splitlines()
    allowed = {"__main__", "_distutils_hack", "sitecustomize", "virnuc", "virnuc_core"}
    assert set(packages.split()) <= allowed
    assert len(modules.split()) <= 12


@pytest.mark.slow
def test_all_variables_that_are_read_while_the_program_loads_are_compared() -> None:
    """Otherwise a child would go on with the value that the server has."""
    source = """
import os
names = set()
read = os._Environ.__getitem__

def remember(self, name):
    names.add(name)
    return read(self, name)

os._Environ.__getitem__ = remember
from virnuc.flows.cli import preload
preload.load()
print(*[name for name in names if isinstance(name, str)])
"""
    names = run_python(source).split()
    # The search for a program of the system, and the options of the example command line. The child
    # reads those of its own command line anew.
    harmless = {"PATH", *ENVIRONMENT.values(), *OTHER_VARIABLES.values()}
    unknown = [
        name
        for name in names
        if not name.startswith((*WORKER_VARIABLES, *START_VARIABLES)) and name not in harmless
    ]
    assert unknown == []
    assert "PANDAS_COPY_ON_WRITE" in names  # pandas was imported, and its variables were seen


@pytest.mark.slow
def test_a_wrong_value_of_an_option_does_not_keep_the_program_from_being_loaded() -> None:
    source = "from virnuc.flows.cli import preload; preload.load(); print('loaded')"
    assert run_python(source, VIRNUC_SERVE="wrong", VIRNUC_NO_PREFECT="wrong") == "loaded\n"
