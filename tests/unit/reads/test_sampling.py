"""Sampling: exact shares by length, whole records, the same draw for the same seed."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from xopen import xopen

from virnuc.flows.cli import main
from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sampling import SampleSummary
from virnuc_core.reads.sampling import sample as draw_sample

from .conftest import WriteReads


def sample(source: str, n: int, out: Path, seed: int = 0, *, force: bool = False) -> SampleSummary:
    """Draw from one file or folder."""
    return draw_sample(ReadsSpec(reads=(source,)), n, out, seed, force=force)


def fastq(lengths: list[int]) -> str:
    return "".join(
        f"@r{i} some words\n{'ACGTA' * (n // 5) + 'ACGTA'[: n % 5]}\n+\n{'F' * n}\n"
        for i, n in enumerate(lengths)
    )


def lengths_of(path: Path) -> list[int]:
    return [int(n) for batch in parse((str(path),)) for n in batch.bases.lengths]


def test_every_length_keeps_its_share(write: WriteReads, tmp_path: Path) -> None:
    lengths = [75] * 500 + [150] * 3000 + [151] * 1500
    random.Random(0).shuffle(lengths)
    summary = sample(write(fastq(lengths)), 100, tmp_path / "out.fastq")
    assert Counter(lengths_of(tmp_path / "out.fastq")) == {75: 10, 150: 60, 151: 30}
    assert (summary.reads_before, summary.reads_after, summary.distance) == (5000, 100, 0.0)
    assert [(part.shortest, part.before, part.after) for part in summary.bins.itertuples()] == [
        (75, 500, 10), (150, 3000, 60), (151, 1500, 30)
    ]  # fmt: skip


def test_records_come_whole_and_in_order(write: WriteReads, tmp_path: Path) -> None:
    text = fastq([random.Random(1).randrange(30, 300) for _ in range(400)])
    sample(write(text), 50, tmp_path / "out.fq.gz")
    with xopen(tmp_path / "out.fq.gz", "rt", threads=0) as handle:
        lines = handle.read().splitlines()
    records = ["\n".join(lines[i : i + 4]) for i in range(0, len(lines), 4)]
    assert len(records) == 50
    places = [text.index(record + "\n") for record in records]
    assert places == sorted(places)


def test_equal_seeds_draw_equal_reads(write: WriteReads, tmp_path: Path) -> None:
    path = write(fastq([100] * 1000))

    def drawn(seed: int, name: str) -> bytes:
        sample(path, 30, tmp_path / name, seed)
        return (tmp_path / name).read_bytes()

    assert drawn(1, "a.fq") == drawn(1, "b.fq")
    assert drawn(1, "c.fq") != drawn(2, "d.fq")


def test_every_read_can_be_drawn(write: WriteReads, tmp_path: Path) -> None:
    path = write(fastq([50] * 10))
    drawn_reads = set()
    for seed in range(40):
        sample(path, 2, tmp_path / "out.fq", seed, force=True)
        drawn_reads |= {
            batch.id(i) for batch in parse((str(tmp_path / "out.fq"),)) for i in range(len(batch))
        }
    assert len(drawn_reads) == 10


def test_all_reads_when_more_are_asked_for(write: WriteReads, tmp_path: Path) -> None:
    text = fastq([10, 0, 30])
    summary = sample(write(text), 99, tmp_path / "out.fq")
    assert (tmp_path / "out.fq").read_text() == text
    assert summary.reads_after == 3


def test_inputs_that_cannot_be_read_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read twice"):
        sample("-", 5, tmp_path / "out.fq")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("https://a.b/r.fq?signature=secret", "https://a.b/r.fq#query-"),
        ("ncbi:NC_045512", "ncbi:NC_045512: "),
    ],
)
def test_addresses_are_refused_with_a_way_out(tmp_path: Path, name: str, shown: str) -> None:
    with pytest.raises(InputError, match="download the reads first") as error:
        sample(name, 5, tmp_path / "out.fq")
    assert str(error.value).startswith(shown)
    assert "secret" not in str(error.value)


def test_nothing_to_draw_from(write: WriteReads, tmp_path: Path) -> None:
    summary = sample(write(""), 5, tmp_path / "out.fq")
    assert (summary.reads_after, (tmp_path / "out.fq").read_bytes()) == (0, b"")
    assert "0 of 0 reads" in summary.lines()[-1]


def test_wrong_settings_are_refused(write: WriteReads, tmp_path: Path) -> None:
    path = write(">a\nAC\n", "in/a.fa")
    with pytest.raises(ConfigError, match="FASTA"):
        sample(path, 1, tmp_path / "out.fastq")
    with pytest.raises(ConfigError, match="1 or more"):
        sample(path, 0, tmp_path / "out.fa")
    write("@b\nAC\n+\nII\n", "in/b.fq")
    with pytest.raises(InputError, match="mixed"):
        sample(str(tmp_path / "in"), 1, tmp_path / "out.fa")
    assert not list(tmp_path.glob("out*"))


def test_the_table_shows_both_histograms(write: WriteReads, tmp_path: Path) -> None:
    lines = sample(write(fastq([75] * 10 + [150] * 30)), 4, tmp_path / "out.fq").lines()
    assert [line.split() for line in lines[1:3]] == [
        ["75", "10", "25.00%", "1", "25.00%"], ["150", "30", "75.00%", "3", "75.00%"]
    ]  # fmt: skip
    assert lines[-1] == "4 of 40 reads; distance of lengths 0.0000"


def test_lengths_of_a_sample_are_those_of_the_whole(write: WriteReads, tmp_path: Path) -> None:
    lengths = [int(n) for n in np.random.default_rng(3).gamma(2, 200, 3000)]
    summary = sample(write(fastq(lengths)), 300, tmp_path / "out.fq")
    assert summary.distance <= 1 / 300 + 1e-9
    assert summary.bins[["before", "after"]].sum().tolist() == [3000, 300]
    assert all(a.longest < b.shortest for a, b in pairwise(summary.bins.itertuples()))


def test_lengths_of_long_reads_stay_close(real_data: Path, tmp_path: Path) -> None:
    summary = sample(
        str(real_data / "reads" / "nanopore_flu_BC01.fastq.gz"),
        200,
        tmp_path / "out.fastq.gz",
        seed=3,
    )
    assert (summary.reads_before, summary.reads_after) == (1000, 200)
    assert summary.distance < 0.03  # a draw without bins has about 0.06 on 200 reads


def test_a_sample_never_replaces_what_it_is_drawn_from(tmp_path: Path) -> None:
    path = tmp_path / "reads.fa"
    path.write_text(">a\nACGT\n>b\nACGTA\n")
    with pytest.raises(ConfigError, match="the reads are drawn from this file"):
        sample(str(path), 1, tmp_path / "." / "reads.fa", force=True)
    assert path.read_text().count(">") == 2


def test_an_existing_file_is_only_replaced_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sample_path = tmp_path / "reads.fa", tmp_path / "out.fa"
    source.write_text(">a\nACGT\n>b\nACGTA\n")
    sample_path.write_text("precious")
    words = ["sample", str(source), "-n", "2", "-o", str(sample_path)]
    assert main(words) == 2
    assert (
        capsys.readouterr().err
        == f"virnuc: {sample_path} would be overwritten; choose another name, or --force\n"
    )
    assert sample_path.read_text() == "precious"
    assert main([*words, "--force"]) == 0
    assert sample_path.read_text() == source.read_text()
