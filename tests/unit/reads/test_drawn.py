"""Reads that a flow makes before it uses them: made once, from what was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xopen import xopen

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError
from virnuc_core.reads.drawn import draw_subset, simulate_reads
from virnuc_core.rundir import RunDir


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty reads of ten lengths."""
    path = tmp_path / "lung.fa"
    path.write_text("".join(f">r{i}\n{'ACGT' * (5 + i % 10)}\n" for i in range(40)))
    return path


def ids(path: Path) -> list[str]:
    with xopen(path) as file:
        return [line[1:].strip() for line in file if line.startswith(">")]


def test_a_subset_is_drawn_once_and_is_the_users_reads(tmp_path: Path, source: Path) -> None:
    run = RunDir(tmp_path / "out")
    run.root.mkdir()
    first = draw_subset(run, ReadsSpec(reads=(str(source),)), 10, 0, force=False)
    assert not first.reused
    assert first.path == run.root / "drawn" / "lung.subset.gz"
    assert "10 of 40 reads drawn" in first.description
    drawn_ids = ids(first.path)
    assert len(set(drawn_ids)) == 10
    assert sorted(int(name[1:]) % 10 for name in drawn_ids) == list(range(10)), "each length once"
    changed_ns = first.path.stat().st_mtime_ns
    second = draw_subset(run, ReadsSpec(reads=(str(source),)), 10, 0, force=False)
    assert second.reused
    assert second.path.stat().st_mtime_ns == changed_ns


@pytest.mark.parametrize("change", ["number", "seed", "source", "result", "force"])
def test_it_is_drawn_again_where_anything_is_another(
    tmp_path: Path, source: Path, change: str
) -> None:
    run = RunDir(tmp_path / "out")
    run.root.mkdir()
    first = draw_subset(run, ReadsSpec(reads=(str(source),)), 10, 0, force=False)
    n_reads, seed, force = 10, 0, False
    match change:
        case "number":
            n_reads = 11
        case "seed":
            seed = 1
        case "source":
            os.utime(source, ns=(0, 0))
        case "result":
            first.path.write_bytes(b"cut off")
        case "force":
            force = True
    second = draw_subset(run, ReadsSpec(reads=(str(source),)), n_reads, seed, force=force)
    assert not second.reused
    assert len(ids(second.path)) == n_reads


@pytest.mark.parametrize("name", ["-", "https://a.b/r.fa", "ncbi:NC_045512", "/dev/null"])
def test_what_cannot_be_read_twice_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is read twice"):
        draw_subset(RunDir(tmp_path), ReadsSpec(reads=(name,)), 10, 0, force=False)


def test_synthetic_reads_are_made_once_with_their_labels(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = simulate_reads(run, "tiny", 3, force=False)
    assert "10 synthetic reads" in first.description
    truth = (run.root / "drawn" / "simulated-10.truth.tsv").read_text().splitlines()
    assert len(truth) == 11
    content = first.path.read_bytes()
    assert simulate_reads(run, "10", 3, force=False).reused
    again = simulate_reads(run, "10", 4, force=False)
    assert not again.reused
    assert again.path.read_bytes() != content


def test_synthetic_pairs_are_made_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    simulate_reads(run, "tiny", 3, force=False)
    pairs = simulate_reads(run, "tiny", 3, pairs=True, force=False)
    assert not pairs.reused, "single reads are there, but no pairs"
    assert [Path(name).name for name in pairs.reads.all_inputs] == [
        "simulated-10_R1.fastq.gz",
        "simulated-10_R2.fastq.gz",
    ]
    again = simulate_reads(run, "tiny", 3, pairs=True, force=False)
    assert again.reused
    assert again.reads == pairs.reads
