"""No letter of ours, and no name of a user, is an error where output is not UTF-8."""

from __future__ import annotations

import codecs
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc.flows.cli.output import ASCII_REPLACEMENTS, accept_all_letters
from virnuc.flows.cli.registry import COMMAND_NAMES

# Runs several command lines, each given as a JSON list, in one process.
PROGRAM = """
import json, sys
from virnuc.flows.cli import main
for words in json.loads(sys.argv[1]):
    print(main(words), *words)
"""
HELP = [["--help"], *([name, "--help"] for name in COMMAND_NAMES), ["profiles"]]
# Encodings as a user's environment asks for them: by Python's own variable, and by a locale.
ENVIRONMENTS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "cp1252": {"PYTHONIOENCODING": "cp1252:strict"},
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


def run_command_lines(
    command_lines: list[list[str]], environment: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(command_lines)],
        env=os.environ | environment,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [
        "ascii",
        pytest.param("latin-1", marks=pytest.mark.slow),
        pytest.param("cp1252", marks=pytest.mark.slow),
        pytest.param("C locale", marks=pytest.mark.slow),
    ],
)
def test_every_help_page_is_written_in_every_encoding(name: str) -> None:
    outcome = run_command_lines(HELP, ENVIRONMENTS[name])
    assert outcome.stderr == b""
    codes = [line for line in outcome.stdout.decode("latin-1").splitlines() if "--help" in line]
    for words in HELP[:-1]:
        assert f"0 {' '.join(words)}" in codes
    assert b">= " in outcome.stdout or b"\\u" in outcome.stdout or name != "ascii"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_error_that_names_a_file_is_written_in_every_encoding(name: str, tmp_path: Path) -> None:
    """The sentence of the error is there, and not one about encoding."""
    source = tmp_path / "reads"
    source.mkdir()
    outcome = run_command_lines([["history", "no-→-ł.jsonl"]], ENVIRONMENTS[name])
    message = outcome.stderr.decode("latin-1")
    assert "no such file" in message or "locale" in message
    assert "unexpected" not in message
    assert "codec" not in message


def test_a_letter_without_replacement_becomes_an_escape_sequence() -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, "ascii")
    accept_all_letters(stream, None, io.StringIO())
    stream.write("a ≥ b → ł\N{GRINNING FACE}\udcff…")
    stream.flush()
    assert buffer.getvalue() == rb"a >= b -> \u0142\U0001f600\udcff..."


def test_a_utf8_stream_writes_its_letters_and_escapes_parts_of_letters() -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, "utf-8")
    accept_all_letters(stream)
    stream.write("≥ \udcff")
    stream.flush()
    assert buffer.getvalue().decode() == r"≥ \udcff"


def test_replacements_are_ascii_and_have_no_meaning_in_json() -> None:
    for letter, replacement in ASCII_REPLACEMENTS.items():
        assert len(letter) == 1
        assert replacement.isascii()
        assert json.loads(f'"{replacement}"') == replacement


def test_other_errors_of_encoding_stay_errors() -> None:
    accept_all_letters()
    with pytest.raises(UnicodeDecodeError):
        codecs.decode(b"\xff", "utf-8", "virnuc.replace")
