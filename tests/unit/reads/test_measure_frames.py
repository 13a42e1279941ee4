"""The shares of chunks and reads with an open frame that the documentation tells."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.benchmarks.measure_frames import FrameCounts, add_indels, count_frames, cut_reads

OPEN = "A" * 60  # lysine forwards and phenylalanine backwards, in every frame
CLOSED = ("TAACTAGCTGA" * 6)[:60]  # has a stop codon in each of the six frames


def test_shares_are_those_of_reads_made_by_hand(tmp_path: Path) -> None:
    # With a model length of 60: two chunks, of which one has frames; one chunk without; two with;
    # an empty read without a chunk.
    reads = [OPEN + CLOSED, CLOSED, OPEN + OPEN, ""]
    path = tmp_path / "reads.fa"
    path.write_text("".join(f">r{number}\n{bases}\n" for number, bases in enumerate(reads)))
    assert count_frames(path, 60) == FrameCounts(
        reads=4, median_length=90, framed_reads=2, full_reads=1, chunks=5, framed_chunks=3
    )


def test_insertions_and_deletions_come_at_the_rate_and_balance() -> None:
    rng = random.Random(1)
    bases = bytes(rng.choices(b"ACGT", k=40_000))
    assert add_indels(rng, bases, 0) == bases
    # At rate 1 each base is deleted, or kept with another one behind it. The expected length is
    # that of the read, with a standard deviation of 200 bases.
    assert len(add_indels(rng, bases, 1)) == pytest.approx(40_000, abs=1_000)
    # A read with 5 % of changes ends before or behind its place, but not by much.
    changed = add_indels(rng, bases, 0.05)
    assert changed != bases
    assert len(changed) == pytest.approx(40_000, abs=250)


def test_reads_are_cut_out_of_either_strand_and_without_unknown_bases(tmp_path: Path) -> None:
    genome = "".join(random.Random(2).choices("ACGT", k=300)) + "N" * 50 + "ACGTTGCA" * 20
    path = tmp_path / "genome.fa"
    path.write_text(f">g\n{genome.lower()}\n>too short\nACGT\n")
    reads = [read.decode() for read in cut_reads(random.Random(3), [path, path], 30, 40)]
    other_strand = genome[::-1].translate(str.maketrans("ACGT", "TGCA"))
    assert len(reads) == 60
    assert {len(read) for read in reads} == {40}
    assert all(read in genome or read in other_strand for read in reads)
    assert any(read not in genome for read in reads)
    assert not any("N" in read for read in reads)
