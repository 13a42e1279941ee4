"""Command-line options made from a model."""

from __future__ import annotations

import pytest

from flows.options import add_options, command_parser, given
from flows.parameters import PredictSettings
from virnuc_core.errors import ConfigError


def _parsed(*words: str) -> dict[str, object]:
    parser = command_parser("predict", "")
    add_options(parser, PredictSettings, positional=("reads",))
    return given(parser.parse_args(words), PredictSettings)


def test_only_what_was_given_is_passed_on() -> None:
    assert _parsed("a.fq", "b.fq", "-o", "out", "--models", "m") == {
        "reads": ["a.fq", "b.fq"],
        "out": "out",
        "models": "m",
    }


def test_flags_choices_and_numbers() -> None:
    found = _parsed("a", "-o", "x", "--models", "m", "--force", "--on-error", "skip", "--token-budget", "512")
    assert (found["force"], found["on_error"], found["token_budget"]) == (True, "skip", "512")


@pytest.mark.parametrize(
    "words",
    [
        ("a", "--models", "m"),  # no output
        ("a", "-o", "x", "--models", "m", "--on-error", "maybe"),
        ("a", "-o", "x", "--models", "m", "--unknown"),
        ("a", "-o", "x", "--models", "m", "--forc"),  # no guessing of abbreviations
    ],
)
def test_a_wrong_command_line_is_a_one_line_error(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        _parsed(*words)
    assert "\n" not in str(caught.value)
    assert "virnuc predict --help" in str(caught.value)
