"""Which commands a server may run, and what is imported before it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc.flows.cli.handed_over import (
    PROGRAMS,
    WITH_PREFECT,
    WITHOUT_PREFECT,
    may_be_handed_over,
    run_in_server,
    uses_prefect,
)
from virnuc.flows.cli.options import ENVIRONMENT, OTHER_VARIABLES
from virnuc.flows.cli.prefect_facts import VARIABLES, prefect_facts
from virnuc.flows.cli.prefect_settings import PREFECT_DEFAULTS
from virnuc_core.private_socket import SOCKET, PrivateListener
from virnuc_core.process_facts import START_VARIABLES, WORKER_VARIABLES

PATIENCE_S = 60.0
ALONE = {"VIRNUC_NO_PREFECT": "1"}


@pytest.mark.parametrize(
    ("line", "environment", "may"),
    [
        ("predict reads.fa -o out --no-prefect", {}, True),
        ("predict reads.fa -o out --no-prefect=false", {}, False),
        ("predict reads.fa -o out", ALONE, True),
        ("predict reads.fa -o out", {}, True),
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
def test_only_predictions_on_this_machine_are_handed_over(
    line: str, environment: dict[str, str], may: bool
) -> None:
    assert may_be_handed_over(line.split(), environment) == may


@pytest.mark.parametrize(
    ("line", "environment", "uses"),
    [
        ("predict reads.fa -o out", {}, True),
        ("predict reads.fa -o out --no-prefect", {}, False),
        ("predict reads.fa -o out", ALONE, False),
        ("predict reads.fa -o out", {"VIRNUC_NO_PREFECT": "0"}, True),
        ("predict reads.fa -o out", {"VIRNUC_NO_PREFECT": "False"}, True),
    ],
)
def test_a_command_asks_for_the_program_that_it_needs(
    line: str, environment: dict[str, str], uses: bool
) -> None:
    assert uses_prefect(line.split(), environment) == uses


def test_the_settings_of_prefect_are_compared_wherever_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    folder = tmp_path / "folder"
    for path in (home / ".prefect", folder):
        path.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(folder)
    profile = home / ".prefect" / "profiles.toml"
    other_profile = tmp_path / "other.toml"
    other_profile.write_text("[profiles.other]")
    facts = [prefect_facts({})]

    def note(**environment: str) -> None:
        facts.append(prefect_facts(environment))

    note(PREFECT_API_URL="http://one/api")
    note(prefect_api_key="secret")
    note(SSL_CERT_FILE="/certificates")
    note(PREFECT_HOME=str(tmp_path))
    note(PREFECT_PROFILES_PATH=str(other_profile))
    profile.write_text("[profiles.one]")
    note()
    for name, text in (
        (".env", "PREFECT_API_URL=http://two/api"),
        ("pyproject.toml", "[tool.prefect]"),
        ("pyproject.toml", "[tool.prefect]\nnot toml"),
        ("prefect.toml", "[logging]"),
    ):
        (folder / name).write_text(text)
        note()
    texts = [fact["setting of Prefect"] for fact in facts]
    assert len(set(texts)) == len(texts)
    assert "secret" not in str(facts)


def test_what_is_no_setting_of_prefect_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"HOME": str(tmp_path)}
    before = prefect_facts(environment)
    (tmp_path / "pyproject.toml").write_text("[project]\ndependencies = ['prefect']\n")
    os.mkfifo(tmp_path / ".env")
    assert prefect_facts({**environment, "SHLVL": "2"}) == before
    # What a command sets for Prefect itself may be there or not.
    assert prefect_facts({**environment, **PREFECT_DEFAULTS}) == before


def test_a_relative_path_to_the_profiles_is_another_file_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        facts.append(prefect_facts({"PREFECT_HOME": "home"}))
    assert facts[0] != facts[1]


def test_a_removed_working_directory_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = prefect_facts({"PREFECT_HOME": "home"})
    folder.rmdir()
    assert prefect_facts({"PREFECT_HOME": "home"}) != before


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
import virnuc.flows.cli.prefect_facts
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("virnuc")))
"""
    packages, modules = run_python(source).splitlines()
    allowed = {"__main__", "_distutils_hack", "sitecustomize", "virnuc", "virnuc_core"}
    assert set(packages.split()) <= allowed
    assert len(modules.split()) <= 12


READ_VARIABLES = """
import os
names = set()
read = os._Environ.__getitem__

def remember(self, name):
    names.add(name)
    return read(self, name)

os._Environ.__getitem__ = remember
from {module} import load
load()
print(*[name for name in names if isinstance(name, str)])
"""
# Variables that make no difference to a child, or that it reads anew
HARMLESS_VARIABLES = {
    "PATH",
    # Those of the example command line
    *ENVIRONMENT.values(),
    *OTHER_VARIABLES.values(),
    # The log handlers of Prefect, which look at the terminal, are made again.
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
}


def variables_read_by(module: str, folder: Path) -> set[str]:
    """Return the variables that are read while a program loads, without those of this process."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    finished = subprocess.run(
        [sys.executable, "-P", "-c", READ_VARIABLES.format(module=module)],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    return set(finished.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "more_compared", "seen"),
    [
        (WITHOUT_PREFECT, (), "PANDAS_COPY_ON_WRITE"),
        (WITH_PREFECT, VARIABLES, "PREFECT_PROFILES_PATH"),
    ],
)
def test_all_variables_that_are_read_while_a_program_loads_are_compared(
    tmp_path: Path, program: str, more_compared: tuple[str, ...], seen: str
) -> None:
    """Otherwise a child would go on with the value that the server has."""
    names = variables_read_by(PROGRAMS[program], tmp_path)
    compared = (*WORKER_VARIABLES, *START_VARIABLES, *more_compared)
    unknown = [
        name
        for name in names
        if not name.upper().startswith(compared) and name not in HARMLESS_VARIABLES
    ]
    assert sorted(unknown) == []
    assert seen in names


@pytest.mark.slow
@pytest.mark.parametrize("module", PROGRAMS.values())
def test_a_wrong_value_of_an_option_does_not_keep_a_program_from_being_loaded(
    tmp_path: Path, module: str
) -> None:
    source = f"from {module} import load; load(); print('loaded')"
    wrong = {"VIRNUC_SERVE": "wrong", "VIRNUC_NO_PREFECT": "wrong"}
    assert run_python(source, HOME=str(tmp_path), **wrong) == "loaded\n"


@pytest.mark.slow
def test_log_lines_of_prefect_go_through_the_stream_that_hides_secrets(tmp_path: Path) -> None:
    """Prefect is loaded before its command has replaced the streams."""
    source = """
import logging, os, sys
from virnuc.flows.cli import preload_prefect
preload_prefect.load()
os.environ["PREFECT_LOGGING_LEVEL"] = "DEBUG"
from virnuc.flows.cli.server_choice import _has_named_server
from virnuc_core.confidential import secrets_hidden
with secrets_hidden(streams=True):
    assert not _has_named_server("")
    for name in ("", "uvicorn"):
        (handler,) = logging.getLogger(name).handlers
        print(handler.console.file is sys.stderr)
    (handler,) = logging.getLogger("prefect._internal").handlers
    print(handler.stream is sys.stderr)
print(logging.getLogger("prefect").level == logging.DEBUG)
"""
    assert run_python(source, HOME=str(tmp_path)) == 4 * "True\n"


LOGGING_OF_THE_USER = """
version: 1
disable_existing_loggers: false
formatters:
  plain: {format: '%(message)s'}
handlers:
  stream: {class: logging.StreamHandler, formatter: plain}
root: {handlers: [stream]}
"""


@pytest.mark.slow
def test_handlers_of_the_user_are_made_anew_and_none_is_there_twice(tmp_path: Path) -> None:
    settings = tmp_path / "logging.yml"
    settings.write_text(LOGGING_OF_THE_USER)
    source = """
import logging, sys
from virnuc.flows.cli import preload_prefect
preload_prefect.load()
sys.stderr = own = open("/dev/null", "w")
preload_prefect.read_settings_again()
(handler,) = logging.getLogger().handlers
print(handler.stream is own)
print(len(logging.getLogger("more").handlers))
"""
    names = {
        "PREFECT_LOGGING_SETTINGS_PATH": str(settings),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "more",
    }
    expected = run_python(
        "import logging, prefect.main; print(len(logging.getLogger('more').handlers))",
        HOME=str(tmp_path),
        **names,
    )
    assert run_python(source, HOME=str(tmp_path), **names) == f"True\n{expected}"


@pytest.mark.slow
def test_settings_that_can_no_longer_be_read_end_no_run(tmp_path: Path) -> None:
    """The run goes on without a server, as in a process of its own."""
    settings = tmp_path / "logging.yml"
    settings.write_text(LOGGING_OF_THE_USER)
    source = f"""
from pathlib import Path
from virnuc.flows.cli import preload_prefect
preload_prefect.load()
Path({str(settings)!r}).write_text("{{")
from virnuc.flows.cli.server_choice import _has_named_server
from virnuc_core.errors import ConfigError
try:
    _has_named_server("leave it out")
except ConfigError as error:
    print("refused")
"""
    names = {"PREFECT_LOGGING_SETTINGS_PATH": str(settings)}
    assert run_python(source, HOME=str(tmp_path), **names) == "refused\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PREFECT_API_REQUEST_TIMEOUT", "no number", "request_timeout"),
        ("PREFECT_PLUGINS_ENABLED", "true", "plugins of Prefect begin when it is imported"),
    ],
)
def test_no_command_fits_a_process_in_which_prefect_cannot_be_loaded_for_others(
    tmp_path: Path, name: str, value: str, reason: str
) -> None:
    source = """
from virnuc.flows.cli import preload_prefect
preload_prefect.load()
print(preload_prefect.facts())
"""
    finished = subprocess.run(
        [sys.executable, "-P", "-c", source],
        env={**os.environ, "HOME": str(tmp_path), name: value},
        capture_output=True,
        check=True,
        text=True,
    )
    assert finished.stdout == "{'setting of Prefect': 'Prefect cannot be loaded'}\n"
    line = finished.stderr.splitlines()[-1]
    assert line.startswith("Prefect cannot be loaded for the next commands: ")
    assert reason in line
