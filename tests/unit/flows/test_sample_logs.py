"""What the log says of samples before they run: each decision once, and names that clash later."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from virnuc.flows.predict_samples import SampleTable, _error_of_samples, _warn_of_merged_names
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core.errors import InputError
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.samples import SampleRow

FILES = (
    *("pair_R1.fq", "pair_R2.fq", "apart_R1_x.fq", "apart_R2_x.fq", "R1_c.fq", "R2_c.fq"),
    *("lane_S1_L001_R1_001.fq", "lane_S1_L001_R2_001.fq"),
    *("lane_S1_L002_R1_001.fq", "lane_S1_L002_R2_001.fq", "tags_S2_L001_I1_001.fq"),
    *("AR1.fq", "AR2.fq", "lonely_R1.fq", "patient_1.fq", "patient_2.fq", "one.fq"),
)


def write_reads(folder: Path) -> None:
    """Write a read into each file. Patients have different reads, mates have the same ids."""
    folder.mkdir()
    for name in FILES:
        read_id = name if name.startswith("patient") else "r"
        (folder / name).write_text(f"@{read_id}\nACGT\n+\nIIII\n")


def lines_about(files: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log that name a file."""
    return [record.message for record in caplog.records if f"{files}.fq" in record.message]


def test_each_decision_about_files_of_samples_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_reads(tmp_path / "in")
    settings = PredictSettings(
        reads=(str(tmp_path / "in"),), sample_from="name", out=tmp_path / "out", models=tmp_path
    )
    settings.check_flow_files()
    settings.check_flow_files()
    assert caplog.records == [], "the run says it"
    samples = settings.by_sample()
    for sample in samples.values():
        find_reads(sample)  # as the staging of each sample does
    for first in ("pair_R1", "apart_R1_x", "R1_c", "AR1", "lonely_R1", "patient_1"):
        assert len(lines_about(first, caplog)) == 1, first
    assert len(lines_about("tags_S2_L001_I1_001", caplog)) == 1
    # Lanes are joined as pairs, a line each, and as a sample.
    pairs = [line for line in lines_about("lane_S1_L002_R1_001", caplog) if "pairs:" in line]
    assert len(pairs) == 1


def test_pairs_of_a_sheet_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_reads(tmp_path / "in")
    sheet = tmp_path / "sheet.csv"
    sheet.write_text("sample,fastq_1,fastq_2\nA,in/pair_R1.fq,in/pair_R2.fq\nB,in/one.fq,\n")
    settings = PredictSettings(samples=sheet, out=tmp_path / "out", models=tmp_path)
    settings.check_flow_files()
    for sample in settings.by_sample().values():
        find_reads(sample)
    assert len(lines_about("pair_R1", caplog)) == 1
    sheet.write_text("sample,fastq_1,fastq_2\nA,,\n")
    with pytest.raises(InputError, match="no file in fastq_1"):
        settings.check_flow_files()


def test_samples_that_multiqc_would_merge_are_named_before_they_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_of_merged_names(["P1", "P2", "P1_trimmed", "x", "P2.sorted", "P3"])
    messages = [record.message for record in caplog.records]
    assert [message.partition(";")[0] for message in messages] == [
        "samples P1, P1_trimmed: MultiQC would show all of them as 'P1'",
        "samples P2, P2.sorted: MultiQC would show all of them as 'P2'",
    ]
    caplog.clear()
    _warn_of_merged_names(["P1", "P2"])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("names", "failed", "words"),
    [
        ("a", "a", "the only sample failed"),
        ("ab", "ab", "all 2 samples failed"),
        ("abc", "b", "1 of 3 samples failed, the others are done"),
    ],
)
def test_the_error_of_samples_speaks_of_others_only_if_there_are_some(
    tmp_path: Path, names: str, failed: str, words: str
) -> None:
    table = SampleTable(tmp_path / "samples.tsv", {name: SampleRow(sample=name) for name in names})
    for name in failed:
        table.add_error(name, InputError("is broken", file=f"{name}.fq"))
    error = _error_of_samples(table)
    first = failed[0]
    expected = f"{words} ({tmp_path}/samples.tsv tells of each); {first}: {first}.fq: is broken"
    assert str(error) == expected
    assert error.exit_code == 2
