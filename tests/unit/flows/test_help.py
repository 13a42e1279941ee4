"""The help texts: commands by use, options in groups, defaults as values, and examples that work."""

from __future__ import annotations

import shlex

import pytest

from virnuc.flows.cli.app import app, main
from virnuc.flows.cli.options import FURTHER_OPTIONS, OPTION_GROUPS
from virnuc.flows.cli.registry import COMMANDS, CommandEntry
from virnuc_core.config import EngineSpec


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the help text of a command, with single blanks."""
    assert main([*words, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_what_is_used_most_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    places = [
        text.index(f" {name}: ") for name in ("predict", "doctor", "train", "validate", "tune")
    ]
    assert places == sorted(places)


def test_options_of_a_prediction_all_stand_in_named_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "predict")
    places = [text.index(f"{group.title}:") for group in OPTION_GROUPS]
    assert places == sorted(places)
    assert FURTHER_OPTIONS not in text
    assert places[1] < text.index("--write-viral") < places[2]


def test_the_default_of_the_engine_is_shown_where_no_profile_decides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget = EngineSpec().token_budget
    assert f"ESM-2 batch [default: {budget}]" in help_of(capsys, "predict")
    assert "ESM-2 batch [default: the profile's]" in help_of(capsys, "validate")


def test_defaults_are_never_the_text_of_a_python_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "tune")
    assert "[default: 8192 16384 32768]" in text
    assert "[default: (" not in text
    assert "[default: None]" not in text


@pytest.mark.parametrize("entry", [item for item in COMMANDS if item.example], ids=lambda e: e.name)
def test_the_example_of_a_command_is_understood(
    entry: CommandEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(entry.example)
    assert words[:2] == ["virnuc", entry.name]
    app.parse_args(words[1:], exit_on_error=False, print_error=False)
    capsys.readouterr()
    assert f"Example: {entry.example}" in help_of(capsys, entry.name)


def test_models_has_an_example_although_it_has_subcommands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Example: virnuc models verify models" in help_of(capsys, "models")
