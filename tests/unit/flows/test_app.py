"""What all commands share: completion in the shell, tables, and how an interrupted one ends."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from virnuc.flows.cli import main
from virnuc.flows.cli.app import app
from virnuc.flows.cli.output import show_table

# prints the first completion of the words given to `ask`
ASK = "ask() { COMP_WORDS=($@); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _virnuc; echo $COMPREPLY; }"


@pytest.mark.parametrize(
    "words",
    ["predict lung", "predict -1 lung", "validate lung", "sample lung", "models quantize m lung"],
)
def test_the_shell_completes_files_of_reads(words: str, tmp_path: Path) -> None:
    (tmp_path / "lung_R1.fq").touch()
    script = tmp_path / "completion.bash"
    script.write_text(app.generate_completion(shell="bash"))
    process = subprocess.run(
        ["bash", "-c", f"source {script}; {ASK}; ask virnuc {words}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "lung_R1.fq\n"


def test_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["sample"], [["lung:x:1.fq [/red]"]], "[/of] a file")
    output = capsys.readouterr().out
    assert "lung:x:1.fq [/red]" in output
    assert "[/of] a file" in output


def test_an_error_that_a_signal_causes_is_reported_as_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_interrupted(*_: object) -> int:
        with suppress(KeyboardInterrupt):  # as a library does that guards an import of its own
            os.kill(os.getpid(), signal.SIGTERM)
        raise AttributeError("module 'numpy' has no attribute 'matrix'")

    monkeypatch.setattr("virnuc.flows.cli.app._parse_and_call", import_interrupted)
    assert main(["devices"]) == 130
    message = capsys.readouterr().err
    assert "interrupted" in message
    assert "numpy" not in message
