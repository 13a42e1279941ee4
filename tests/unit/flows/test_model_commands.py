"""`virnuc models init-random`: a head for the asked length, and equal bytes for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from virnuc.flows.cli import main
from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoders.digests import fingerprint


@pytest.mark.parametrize(
    ("options", "length"), [((), DEFAULT_MODEL_LENGTH), (("--head", "300"), 300)]
)
def test_the_head_is_for_the_asked_length(
    options: tuple[str, ...], length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "models"
    sizes = ["--esm2", "tiny", "--dnabert-s", "tiny"]
    assert main(["models", "init-random", str(out_dir), *sizes, *options, "--seed", "4"]) == 0
    config = json.loads((out_dir / "head" / "config.json").read_text())
    assert config["model_length"] == length
    assert f"head for length {length}" in capsys.readouterr().out


@pytest.mark.usefixtures("tokenizers_trained_anew")
def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        words = ["models", "init-random", str(tmp_path / name), "--head", "300", "--seed", seed]
        assert main(words) == 0
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert fingerprint(tmp_path / "a")["head"] != fingerprint(tmp_path / "c")["head"]


@pytest.mark.parametrize("length", ["2", "-300", "long", "3e2", ""])
def test_a_head_of_an_impossible_length_is_refused(
    length: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "models"
    assert main(["models", "init-random", str(out_dir), f"--head={length}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--head" in line
    assert not out_dir.exists()
