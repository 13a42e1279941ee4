"""Simulated genomes and reads are as requested, and the two kinds can be told apart."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from pydantic import ValidationError
from xopen import xopen

from tests.columns import documented
from virnuc.flows.cli import main
from virnuc_core.errors import ConfigError
from virnuc_core.reads.parse import parse
from virnuc_core.reads.simulate import (
    SIMULATED_SIZES,
    TRUTH_HEADER,
    SimulateSpec,
    SimulateSummary,
    simulate,
)
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore

from .reads_twin import opposite_strand

Pairs = list[tuple[str, str]]


def reads_of(path: Path) -> Pairs:
    return [
        (batch.id(i), batch.bases[i].decode())
        for batch in parse((str(path),))
        for i in range(len(batch))
    ]


def truth_of(summary: SimulateSummary) -> dict[str, dict[str, str]]:
    lines = [line.split("\t") for line in summary.truth_file.read_text().splitlines()]
    assert tuple(lines[0]) == TRUTH_HEADER
    return {line[0]: dict(zip(TRUTH_HEADER, line, strict=True)) for line in lines[1:]}


def genomes_of(summary: SimulateSummary) -> dict[str, str]:
    with xopen(summary.genomes_file, "rt", threads=0) as handle:
        return dict(SimpleFastaParser(handle))


@pytest.mark.parametrize("name", ["r.fastq", "r.fq.gz", "r.fasta", "r.fa.gz"])
def test_reads_and_truth_agree(tmp_path: Path, name: str) -> None:
    summary = simulate(SimulateSpec(reads=200, error_rate=0, n_rate=0), tmp_path / name)
    reads, truth, genomes = reads_of(summary.reads_file), truth_of(summary), genomes_of(summary)
    assert documented(summary.truth_file, "reads.truth.tsv") == len(reads)
    assert [read_id for read_id, _ in reads] == list(truth)
    assert len(reads) == 200
    for read_id, bases in reads:
        fact = truth[read_id]
        start = int(fact["start"])
        source = genomes[fact["genome"]][start : start + 150]
        assert bases == (source if fact["strand"] == "+" else opposite_strand(source))
        assert fact["genome"].startswith(fact["label"])
    assert Counter(fact["label"] for fact in truth.values())["virus"] == summary.viral_reads
    assert {fact["strand"] for fact in truth.values()} == {"+", "-"}
    with xopen(summary.reads_file, "rb", threads=0) as handle:
        assert handle.read(1) == (b"@" if "q" in name else b">")


def test_copies_are_exact_and_marked(tmp_path: Path) -> None:
    summary = simulate(SimulateSpec(reads=2000, duplicate_share=0.3, seed=4), tmp_path / "r.fasta")
    reads, truth = dict(reads_of(summary.reads_file)), truth_of(summary)
    copies = {read_id: fact["copy_of"] for read_id, fact in truth.items() if fact["copy_of"]}
    assert 300 < len(copies) < 700
    assert all(reads[read_id] == reads[source] for read_id, source in copies.items())
    assert not set(copies) & set(copies.values())


def test_errors_and_ns_are_as_frequent_as_requested(tmp_path: Path) -> None:
    spec = SimulateSpec(reads=2000, error_rate=0.05, n_rate=0.01, duplicate_share=0, seed=1)
    summary = simulate(spec, tmp_path / "r.fasta")
    reads, truth, genomes = reads_of(summary.reads_file), truth_of(summary), genomes_of(summary)
    wrong = ns = 0
    for read_id, bases in reads:
        fact = truth[read_id]
        source = genomes[fact["genome"]][int(fact["start"]) :][:150]
        source = source if fact["strand"] == "+" else opposite_strand(source)
        ns += bases.count("N")
        wrong += sum(a not in ("N", b) for a, b in zip(bases, source, strict=True))
    total = 150 * 2000
    assert wrong / total == pytest.approx(0.05, rel=0.1)  # a place may be hit twice, or become an N
    assert ns / total == pytest.approx(0.01, rel=0.1)


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    def digests(seed: int, folder: str) -> list[str]:
        (tmp_path / folder).mkdir()
        simulate(SimulateSpec(reads=500, seed=seed), tmp_path / folder / "r.fastq.gz")
        return [
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((tmp_path / folder).iterdir())
        ]

    assert digests(3, "a") == digests(3, "b")
    assert not set(digests(3, "c")) & set(digests(4, "d"))


def test_presets() -> None:
    assert (
        SIMULATED_SIZES["tiny"],
        SIMULATED_SIZES["small"],
        SIMULATED_SIZES["medium"],
        SIMULATED_SIZES["large"],
    ) == (
        10,
        100,
        1000,
        10_000,
    )


def test_a_file_name_without_a_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(".fastq.gz")):
        simulate(SimulateSpec(reads=1), tmp_path / "reads.txt")
    assert list(tmp_path.iterdir()) == []


def test_reads_longer_than_genomes_are_refused() -> None:
    with pytest.raises(ValidationError, match="genome_length"):
        SimulateSpec(read_length=20_000)


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_very_few_reads(tmp_path: Path, reads: int) -> None:
    summary = simulate(SimulateSpec(reads=reads), tmp_path / "r.fasta")
    assert len(reads_of(summary.reads_file)) == reads
    if reads == 2:
        assert summary.viral_reads == 1


def test_kinds_can_be_told_apart_on_unseen_genomes(tmp_path: Path) -> None:
    """Classify half of the genomes by the nearest mean of amino acids of the other half."""
    summary = simulate(SimulateSpec(reads=3000, seed=2), tmp_path / "r.fasta")
    stage(StageSpec(reads=(str(summary.reads_file),)), tmp_path / "orfs.h5")
    store, truth = OrfStore.open(tmp_path / "orfs.h5"), truth_of(summary)
    names = store.read_ids(0, store.n_reads)
    facts = [truth[names[index]] for index in store.row_read]
    proteins = store.protein(0, store.n_uniques)
    letters = [
        np.bincount(np.frombuffer(proteins[u], np.uint8), minlength=128) for u in store.row_unique
    ]
    shares = np.array(letters) / np.array([row.sum() for row in letters])[:, None]
    viral = np.array([fact["label"] == "virus" for fact in facts])
    is_training = np.array([int(fact["genome"].rpartition("_")[2]) % 2 == 0 for fact in facts])
    means = [shares[is_training & (viral == kind)].mean(axis=0) for kind in (False, True)]
    guess = np.linalg.norm(shares - means[1], axis=1) < np.linalg.norm(shares - means[0], axis=1)
    assert (guess == viral)[~is_training].mean() > 0.9


def test_genomes_of_each_kind(tmp_path: Path) -> None:
    genomes = genomes_of(
        simulate(SimulateSpec(reads=1, viral_genomes=5, other_genomes=7), tmp_path / "r.fasta")
    )
    gc = defaultdict(list)
    for name, bases in genomes.items():
        gc[name.split("_")[0]].append((bases.count("G") + bases.count("C")) / len(bases))
    assert (len(gc["virus"]), len(gc["others"])) == (5, 7)
    assert max(gc["virus"]) < min(gc["others"])


@pytest.mark.parametrize("name", ["r.fastq.gz", "r.fasta"])
def test_pairs_are_the_two_ends_of_fragments(tmp_path: Path, name: str) -> None:
    """Each mate is where the truth says, and both face each other at the length of a fragment."""
    spec = SimulateSpec(reads=400, pairs=True, error_rate=0, n_rate=0, duplicate_share=0)
    summary = simulate(spec, tmp_path / name)
    assert summary.mates_file is not None
    ending = name.removeprefix("r")
    paths = (summary.reads_file, summary.mates_file)
    assert [path.name for path in paths] == [f"r_R1{ending}", f"r_R2{ending}"]
    firsts, seconds = (reads_of(path) for path in paths)
    truth, genomes = truth_of(summary), genomes_of(summary)
    assert documented(summary.truth_file, "reads.truth.tsv") == summary.n_reads == 400
    assert list(truth) == [
        read_id for pair in zip(firsts, seconds, strict=True) for read_id, _ in pair
    ]
    fragment_lengths = []
    for (first_id, first), (second_id, second) in zip(firsts, seconds, strict=True):
        assert (first_id[:-2], first_id[-2:], second_id[-2:]) == (second_id[:-2], "/1", "/2")
        facts = truth[first_id], truth[second_id]
        assert len({(fact["label"], fact["genome"]) for fact in facts}) == 1
        assert {fact["strand"] for fact in facts} == {"+", "-"}
        for fact, bases in zip(facts, (first, second), strict=True):
            source = genomes[fact["genome"]][int(fact["start"]) :][:150]
            assert bases == (source if fact["strand"] == "+" else opposite_strand(source))
        starts = {fact["strand"]: int(fact["start"]) for fact in facts}
        fragment_lengths.append(starts["-"] + 150 - starts["+"])
    assert min(fragment_lengths) >= 150
    assert np.mean(fragment_lengths) == pytest.approx(350, rel=0.05)
    labels = Counter(fact["label"] for fact in truth.values())
    assert labels["virus"] == summary.viral_reads


def test_copies_of_pairs_are_copies_of_both_mates(tmp_path: Path) -> None:
    spec = SimulateSpec(reads=2000, pairs=True, duplicate_share=0.3, seed=4)
    summary = simulate(spec, tmp_path / "r.fasta")
    assert summary.mates_file is not None
    reads = dict(reads_of(summary.reads_file) + reads_of(summary.mates_file))
    copies = {name: fact["copy_of"] for name, fact in truth_of(summary).items() if fact["copy_of"]}
    assert 300 < len(copies) < 700
    for read_id, source in copies.items():
        assert reads[read_id] == reads[source]
        assert read_id[-2:] == source[-2:], "a first mate copies a first mate"
    assert len({name[:-2] for name in copies}) == len(copies) // 2


def test_pairs_are_staged_as_pairs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    summary = simulate(SimulateSpec(reads=101, pairs=True), tmp_path / "in" / "r.fastq")
    assert summary.n_reads == 100, "of an odd number one is left out"
    named = stage(StageSpec(**summary.reads.model_dump()), tmp_path / "named.h5")
    for path in (summary.truth_file, summary.genomes_file):
        path.rename(tmp_path / path.name)
    found = stage(StageSpec(reads=(str(tmp_path / "in"),)), tmp_path / "found.h5")
    assert named.n_pairs == found.n_pairs == 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reads": 1}, "1 is half a pair"),
        ({"fragment_length": 149}, "149 is not between the read_length, 150"),
        ({"fragment_length": 15_001}, "half of the genome_length, 15000"),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulateSpec(pairs=True, **settings)
    SimulateSpec(**settings)  # without pairs, the fragments do not matter


def test_the_command_writes_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.fq"
    assert main(["simulate", str(out), "--reads", "20", "--pairs"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/r_R1.fq, {tmp_path}/r_R2.fq: 20 reads, ")
    assert not out.exists()
    assert main(["simulate", str(out), "--reads", "20", "--pairs"]) == 2
    assert "r_R1.fq, " in capsys.readouterr().err, "is there already"
