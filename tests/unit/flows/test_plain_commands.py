"""`virnuc models init-random`: three parts of the asked sizes, equal bytes for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import main
from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoders.checkpoint import fingerprint


@pytest.mark.parametrize(("words", "length"), [((), DEFAULT_MODEL_LENGTH), (("--head", "300"), 300)])
def test_the_head_is_for_the_asked_length(
    words: tuple[str, ...], length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    given = ["--esm2", "tiny", "--dnabert-s", "tiny", *words, "--seed", "4"]
    assert main(["models", "init-random", str(out), *given]) == 0
    assert json.loads((out / "head" / "config.json").read_text())["model_length"] == length
    assert f"head for length {length}" in capsys.readouterr().out


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        assert main(["models", "init-random", str(tmp_path / name), "--head", "300", "--seed", seed]) == 0
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert fingerprint(tmp_path / "a")["head"] != fingerprint(tmp_path / "c")["head"]


@pytest.mark.parametrize("word", ["2", "-300", "long", "3e2", ""])
def test_what_is_no_length_is_refused(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "init-random", str(tmp_path / "models"), f"--head={word}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--head" in line
    assert not (tmp_path / "models").exists()
