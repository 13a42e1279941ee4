"""An input without reads is a result, as a negative control has it: tables without lines, exit 0."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc.flows import cli
from virnuc_core.rundir import RunDir

FASTQ = b"@r1\n" + b"ACGTTGCAACCGGTTAACGT" * 20 + b"\n+\n" + b"I" * 400 + b"\n"


def write(folder: Path, name: str, data: bytes = b"") -> Path:
    """Write a file, gzipped if its name ends in .gz."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return path


def header_of_bam(folder: Path) -> Path:
    """Write a BAM file that has a header only."""
    pysam = pytest.importorskip("pysam")
    path = folder / "ntc.bam"
    with pysam.AlignmentFile(str(path), "wb", header={"HD": {"VN": "1.6"}}):
        pass
    return path


@pytest.fixture
def run_virnuc(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, without Prefect; it returns the exit code."""
    monkeypatch.setenv("VIRNUC_MODELS", str(models))

    def run(*words: object) -> int:
        return cli.main([str(word) for word in words])

    return run


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: write(folder, "empty.fq"),
        lambda folder: write(folder, "blank.fa", b"\n \n"),
        lambda folder: write(folder, "ntc.fq.gz"),
        lambda folder: write(folder, "in/a_R1.fq.gz").parent,
        header_of_bam,
    ],
)
def test_an_input_without_reads_gives_tables_without_lines(
    make: Callable[[Path], Path],
    tmp_path: Path,
    run_virnuc: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = ["-o", out, "--devices", "cpu:1", "--no-prefect", "--write-viral"]
    assert run_virnuc("predict", make(tmp_path), *words) == 0
    assert "the input holds no reads" in "".join(capsys.readouterr())
    run = RunDir(out)
    assert len(run.reads_table.read_text().splitlines()) == 1
    assert json.loads(run.summary.read_text())["n_reads"] == 0
    assert run_virnuc("export", out) == 0
    general = json.loads((out / "export" / "virnuc_general_mqc.json").read_text())
    [sample] = general["data"].values()
    assert (sample["reads"], sample["viral_reads"], sample["viral_percent"]) == (0, 0, 0)


def test_a_negative_control_among_samples_is_a_row(
    tmp_path: Path, run_virnuc: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a_1.fq", "a_2.fq"):
        write(tmp_path, name, FASTQ)
    for name in ("ntc_1.fq.gz", "ntc_2.fq.gz", "z_1.fq", "z_2.fq"):
        write(tmp_path, name)
    sheet = write(
        tmp_path,
        "sheet.csv",
        b"sample,fastq_1,fastq_2\nA,a_1.fq,a_2.fq\nNTC,ntc_1.fq.gz,ntc_2.fq.gz\n"
        b"blank,z_1.fq,z_2.fq\n",
    )
    out = tmp_path / "out"
    words = ["--samples", sheet, "-o", out, "--devices", "cpu:1", "--no-prefect"]
    assert run_virnuc("predict", *words) == 0
    assert "without reads: NTC, blank" in "".join(capsys.readouterr())
    lines = [line.split("\t") for line in (out / "samples.tsv").read_text().splitlines()]
    rows = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}
    assert [(row["fate"], row["reads"], row["viral"]) for row in rows.values()] == [
        ("predicted", "2", rows["A"]["viral"]),
        ("predicted", "0", "0"),
        ("predicted", "0", "0"),
    ]
    assert rows["NTC"]["note"] == "holds no reads"
    assert len(RunDir(out / "NTC").pairs_table.read_text().splitlines()) == 1, "only the header"
    # The same command again finds complete runs.
    assert run_virnuc("predict", *words) == 0


def test_a_validation_without_reads_is_refused(
    tmp_path: Path,
    run_virnuc: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The settings of Prefect are those of this process, and no flow is started.
    monkeypatch.setattr("virnuc.flows.cli.run_from_terminal.prepare_prefect", lambda: None)
    empty = write(tmp_path, "empty.fq")
    words = ["-o", tmp_path / "out", "--devices", "cpu:1"]
    assert run_virnuc("validate", empty, *words) == 2
    assert "empty.fq: holds no reads" in capsys.readouterr().err
