"""The command at a terminal of 80 columns: what stands on the screen when it has ended."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.unit.telemetry.screen import screen

from .processes import PATIENCE_S, VIRNUC, own_server

COLUMNS = 80


def on_screen(environment: dict[str, str], *words: object) -> list[str]:
    """The lines that a terminal shows after the command."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    terminal_environment = {**environment, "TERM": "xterm"}
    process = subprocess.Popen(
        (*VIRNUC, *map(str, words)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=terminal_environment,
    )
    os.close(theirs)
    text = b""
    try:
        while data := os.read(ours, 1 << 16):
            text += data
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(PATIENCE_S) == 0, text.decode()
    return screen(text.decode(), COLUMNS)


@pytest.mark.slow
def test_bars_and_lines_share_a_narrow_terminal_and_prefect_adds_no_notice(
    tmp_path: Path, few_reads: Path, models: Path, database: Path
) -> None:
    duplicates = tmp_path / "twice.fasta"
    duplicates.write_text(">r1\n" + "ACGT" * 60 + "\n>r1\n" + "AACC" * 60 + "\n")
    words = (
        "predict",
        few_reads,
        duplicates,
        "--models",
        models,
        "--devices",
        "cpu:2",
        "--shard-tokens",
        1024,
        "-o",
    )
    environment = own_server(tmp_path / "prefect", database)
    lines = on_screen(environment, *words, tmp_path / "bars")
    names = ["cpu-core-0", "cpu-core-1", "Embedding"]
    assert [line.split()[0] for line in lines if "tok/s" in line] == names
    (total,) = [line for line in lines if line.startswith("Embedding")]
    assert re.search(r"100% ([\d,]+)/\1 +[\d,]+ tok/s ETA 00:00$", total)
    assert "told apart by a number added to it" in "".join(lines), (
        lines
    )  # wrapped where the line ends
    assert any("cpu-core-1 ready" in line for line in lines)
    assert not re.search("GPU|anonymous|analytics|telemetry", "".join(lines)), lines
    plain = on_screen(environment, *words, tmp_path / "plain", "--no-progress", "--no-prefect")
    assert not any("━" in line for line in plain)
    assert any(re.match(r"[\d:]{8}  Embedding: ", line) for line in plain)
