"""`virnuc compare`: it takes v1.0's option names, and shows what the report shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc.flows.cli import main

HEADER = "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\n"
AGREED = "a_chunk_1\tTrue\t0.1\t0.9\n"


def test_compare_takes_the_options_of_v1_and_shows_what_the_report_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vanilla = tmp_path / "vanilla.csv"
    vanilla.write_text(f"{HEADER}{AGREED}b_chunk_1\tFalse\t0.51\t0.49\n")
    ours = tmp_path / "ours.csv"
    ours.write_text(f"{HEADER}{AGREED}b_chunk_1\tTrue\t0.49\t0.51\n")
    words = ["compare", "--vanilla", str(vanilla), "--refactored", str(ours), "--mode", "consensus"]
    assert main([*words, "--tolerance", "0.01"]) == 5
    output = capsys.readouterr().out
    assert "vanilla.csv / ours.csv: b_chunk_1: others / virus" in output
    figures = {}
    for line in output.splitlines():
        name, _, value = line.partition(":")
        figures[name] = value.strip()
    assert figures["Agreement"] == "50.000 %"
    assert figures["Of viral"] == "1 of 1"
    assert figures["Of non-viral"] == "0 of 1"
    assert figures["Of near threshold"] == "0 of 1"


def test_a_file_compared_with_itself_agrees(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    results.write_text(f"{HEADER}{AGREED}")
    assert main(["compare", str(results), str(results)]) == 0
