"""`virnuc models init-random`: three parts of the asked sizes, equal bytes for equal seeds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from virnuc.flows.cli import main
from virnuc.flows.cli.app import app
from virnuc.flows.cli.output import show_table
from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoders.digests import fingerprint


@pytest.mark.parametrize(
    ("words", "length"), [((), DEFAULT_MODEL_LENGTH), (("--head", "300"), 300)]
)
def test_the_head_is_for_the_asked_length(
    words: tuple[str, ...], length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    given = ["--esm2", "tiny", "--dnabert-s", "tiny", *words, "--seed", "4"]
    assert main(["models", "init-random", str(out), *given]) == 0
    assert json.loads((out / "head" / "config.json").read_text())["model_length"] == length
    assert f"head for length {length}" in capsys.readouterr().out


def test_the_shell_completes_files_of_reads(tmp_path: Path) -> None:
    (tmp_path / "lung_R1.fq").touch()
    script = tmp_path / "completion.bash"
    script.write_text(app.generate_completion(shell="bash"))
    ask = f"source {script}; ask() {{ COMP_WORDS=($@); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _virnuc; echo $COMPREPLY; }}"
    for words in (
        "predict lung",
        "predict -1 lung",
        "validate lung",
        "sample lung",
        "models quantize m lung",
    ):
        done = subprocess.run(
            ["bash", "-c", f"{ask}; ask virnuc {words}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "lung_R1.fq\n", words


def test_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["sample"], [["lung:x:1.fq [/red]"]], "[/of] a file")
    shown = capsys.readouterr().out
    assert "lung:x:1.fq [/red]" in shown
    assert "[/of] a file" in shown


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        assert (
            main(["models", "init-random", str(tmp_path / name), "--head", "300", "--seed", seed])
            == 0
        )
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert fingerprint(tmp_path / "a")["head"] != fingerprint(tmp_path / "c")["head"]


@pytest.mark.parametrize("word", ["2", "-300", "long", "3e2", ""])
def test_what_is_no_length_is_refused(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "init-random", str(tmp_path / "models"), f"--head={word}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--head" in line
    assert not (tmp_path / "models").exists()


def test_compare_takes_v1s_words_and_shows_what_the_report_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, rows = (
        "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n",
        ["a_chunk_1\tTrue\t0.1\t0.9\n"],
    )
    vanilla, ours = tmp_path / "vanilla.csv", tmp_path / "ours.csv"
    vanilla.write_text(head + "".join([*rows, "b_chunk_1\tFalse\t0.51\t0.49\n"]))
    ours.write_text(head + "".join([*rows, "b_chunk_1\tTrue\t0.49\t0.51\n"]))
    words = ["compare", "--vanilla", str(vanilla), "--refactored", str(ours), "--mode", "consensus"]
    assert main([*words, "--tolerance", "0.01"]) == 5
    said = capsys.readouterr().out
    assert "vanilla.csv / ours.csv: b_chunk_1: others / virus" in said
    shown = {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in said.splitlines())
    }
    assert shown["Agreement"] == "50.000 %"
    assert (shown["Of viral"], shown["Of non-viral"], shown["Of near threshold"]) == (
        "1 of 1",
        "0 of 1",
        "0 of 1",
    )
    assert main(["compare", str(vanilla), str(vanilla)]) == 0


@pytest.fixture
def hears_signals() -> Iterator[None]:
    """Puts back what an interrupted command leaves: a process that ignores further ones."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("hears_signals")
def test_an_error_after_the_word_to_end_is_that_ending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut_short(*_: object) -> int:
        with suppress(KeyboardInterrupt):  # as a library does that guards an import of its own
            os.kill(os.getpid(), signal.SIGTERM)
        raise AttributeError("module 'numpy' has no attribute 'matrix'")

    monkeypatch.setattr("virnuc.flows.cli.app._parse_and_call", cut_short)
    assert main(["devices"]) == 130
    said = capsys.readouterr().err
    assert "interrupted" in said
    assert "numpy" not in said


@pytest.mark.parametrize(
    ("name", "bands"), [("phase6-scaling", "248"), ("phase10-1m", "48"), ("ci-smoke", "")]
)
def test_the_thresholds_of_a_profile_are_shown_with_the_bands_that_are_targets(
    capsys: pytest.CaptureFixture[str], name: str, bands: str
) -> None:
    assert main(["profiles", name]) == 0
    assert re.findall(r"scaling on (\d) devices", capsys.readouterr().out) == list(bands)
