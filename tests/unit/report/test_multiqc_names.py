"""Names of samples in exports: one for all files, and a warning where MultiQC would merge two.

What MultiQC makes of names was recorded with MultiQC itself (`tests/data/README.md`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from virnuc_core.reads.samples import SampleRow, write_samples
from virnuc_core.report.multiqc_names import (
    GENERAL_FILE,
    export_name,
    exported_samples,
    find_merged_samples,
    multiqc_name,
    name_warnings,
    samples_beside,
)

RECORDED_NAMES: dict[str, str] = json.loads(
    Path(__file__).parents[2].joinpath("data", "multiqc_names.json").read_text("utf-8")
)


def test_names_are_shortened_as_multiqc_does() -> None:
    assert len(RECORDED_NAMES) > 500
    # MultiQC shows the name as it is if nothing is left of it.
    shown_names = {name: multiqc_name(name) or name for name in RECORDED_NAMES}
    assert shown_names == RECORDED_NAMES


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("lung", "lung"),
        ("a b", "a_b"),
        ("P1 (day 3), left", "P1__day_3___left"),
        ("Süd-Ost_7.2", "Süd-Ost_7.2"),
        ("x+y=z@home", "x_y_z_home"),
        ("../etc", ".._etc"),
        ("a <img src='x'>\x07 \"lung\"&`1`", "a__img_src__x_____lung___1_"),
    ],
)
def test_an_export_has_one_name_that_is_neither_html_nor_a_path(sample: str, name: str) -> None:
    assert export_name(sample) == name
    assert export_name(name) == name
    assert re.fullmatch(r"[\w.-]+", name)


def test_merged_samples_are_those_with_one_name_in_multiqc() -> None:
    samples = ["P1", "P1_trimmed", "P2", "P2.sorted", "P2.sorted.bam", "a b", "a_b", "P3", "P33"]
    assert find_merged_samples(samples) == {
        "P1": ["P1", "P1_trimmed"],
        "P2": ["P2", "P2.sorted", "P2.sorted.bam"],
        "a_b": ["a b", "a_b"],
    }
    # Many samples: two share a name if and only if MultiQC shows both under one.
    names = [name for name in RECORDED_NAMES if export_name(name) == name]
    merged = find_merged_samples(names)
    for shown_name, samples_of_name in merged.items():
        same_names = [name for name in names if RECORDED_NAMES[name] == shown_name]
        assert samples_of_name == same_names
    num_merged = sum(len(samples_of_name) for samples_of_name in merged.values())
    shown_names = [RECORDED_NAMES[name] for name in names]
    assert num_merged == sum(shown_names.count(name) > 1 for name in shown_names)


def test_a_warning_names_the_samples_that_would_be_merged() -> None:
    (warning,) = name_warnings("P1_trimmed", ["P2", "P1", "P1.fastq", "P11"])
    assert warning == (
        "sample P1_trimmed: MultiQC shows it as 'P1', as it does P1, P1.fastq, and one hides the "
        "other; --sample gives it another name"
    )
    (warning,) = name_warnings("a b", ["a_b"])
    assert "'a_b', as it does a_b" in warning
    (warning,) = name_warnings("x", ["x"])
    assert "'x', as it does x" in warning
    (warning,) = name_warnings("ccs1", [])
    assert "MultiQC cuts off its whole name" in warning
    assert name_warnings("P1", ["P2", "P1_b", "p1"]) == []
    (warning,) = name_warnings("a\x1b[31m", ["a__31m", "a\n[31m"])
    assert warning.isprintable(), "names may come from somebody else"


def write_export(folder: Path, *samples: str) -> None:
    """Write the file of an export that tells the name of its sample."""
    folder.mkdir(parents=True)
    content = {"data": {sample: {"viral": 1} for sample in samples}}
    (folder / GENERAL_FILE).write_text(json.dumps(content))


def test_the_table_of_samples_names_those_beside_a_run(tmp_path: Path) -> None:
    names = ["P1", "P1_trimmed", "=P2", "-x y"]
    write_samples(tmp_path / "samples.tsv", [SampleRow(sample=name) for name in names])
    write_export(tmp_path / "old" / "export", "not of this batch")
    run = tmp_path / "P1"
    assert samples_beside(run, run / "export", "P1") == ["P1_trimmed", "=P2", "-x y"]
    # A run that the table does not list belongs to no batch.
    run = tmp_path / "other"
    assert samples_beside(run, run / "export", "P1") == ["not of this batch"]


def test_exports_beside_a_run_or_its_export_name_other_samples(tmp_path: Path) -> None:
    runs, exports = tmp_path / "runs", tmp_path / "exports"
    write_export(runs / "a" / "export", "a")
    write_export(runs / "b" / "export", "b")
    write_export(exports / "a", "a again")
    write_export(exports / "c", "c")
    assert samples_beside(runs / "a", runs / "a" / "export", "a") == ["b"]
    assert samples_beside(runs / "a", exports / "a", "a") == ["b", "c"]
    assert samples_beside(runs / "a", exports / "a", "c") == ["b"], "may be a copy of this export"
    assert samples_beside(runs / "a", runs / "a" / "export", "b") == ["b"], "is of another run"
    assert samples_beside(runs / "z", tmp_path / "z", "z") == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"data": 3}', b"\xff", b'{"data": null}'])
def test_a_file_of_somebody_else_names_no_sample(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / GENERAL_FILE
    path.write_bytes(content)
    assert exported_samples(path) == []
    assert exported_samples(tmp_path / "missing") == []
