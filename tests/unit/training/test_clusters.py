"""Related genomes are in one cluster, and strangers are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.errors import InputError

from .origins import (
    LabelledReads,
    Origin,
    cluster_of_genome,
    reverse_complement,
    write_fasta,
)


def test_the_same_genomes_on_the_other_strand_under_other_names_are_related(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    for read_id, origin in list(labelled_reads.origins.items()):
        twin = f"twin_{read_id}"
        labelled_reads.origins[twin] = Origin(origin.label, f"twin_{origin.genome}")
        labelled_reads.reads[twin] = reverse_complement(labelled_reads.reads[read_id])
    examples = labelled_reads.split(tmp_path)
    cluster = cluster_of_genome(examples)
    assert len(set(cluster.values())) == 10
    for name in cluster:
        if not name.startswith("twin_"):
            assert cluster[name] == cluster[f"twin_{name}"]
    is_test = examples.rows["side"] == 2
    test_sequences = set(examples.rows.loc[is_test, "sequence"])
    other_sequences = set(examples.rows.loc[~is_test, "sequence"])
    assert not test_sequences & other_sequences


def test_other_reads_of_the_same_genome_are_related_by_their_k_mers(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    for number, (read_id, origin) in enumerate(list(labelled_reads.origins.items())):
        if origin.genome == "virus_0001" and number % 2:
            labelled_reads.origins[read_id] = Origin(origin.label, "strain")
    cluster = cluster_of_genome(labelled_reads.split(tmp_path))
    assert cluster["strain"] == cluster["virus_0001"]
    assert len(set(cluster.values())) == 10


def test_sequences_of_genomes_tell_twins_from_one_common_repeat_if_reads_are_few(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    """Twins have no read in common. The repeat is 3 % of a genome, and a fifth of its reads."""
    genomes = labelled_reads.genomes()
    genomes["virus_twin"] = genomes["virus_0001"]
    repeat = genomes["others_0002"][600:700]
    genomes["others_0001"] += repeat
    starts = dict.fromkeys(genomes, (300, 1500))
    starts["virus_twin"] = (900, 2_000)
    starts["others_0002"] = (300, 600)
    starts["others_0001"] = (300, len(genomes["others_0001"]) - 150)

    labelled_reads.reads = {}
    labelled_reads.origins = {}
    for genome, bases in genomes.items():
        for start in starts[genome]:
            for shift in range(3):  # so that a frame of some read is open
                read_id = f"{genome}_{start + shift}"
                labelled_reads.reads[read_id] = bases[start + shift : start + 150]
                labelled_reads.origins[read_id] = Origin(genome.split("_")[0], genome)
    write_fasta(tmp_path / "g.fasta", genomes)

    by_reads = cluster_of_genome(labelled_reads.split(tmp_path))
    assert by_reads["virus_0001"] != by_reads["virus_twin"]
    assert by_reads["others_0001"] == by_reads["others_0002"]
    by_genomes = cluster_of_genome(labelled_reads.split(tmp_path, genomes=tmp_path / "g.fasta"))
    assert by_genomes["virus_0001"] == by_genomes["virus_twin"]
    assert len(set(by_genomes.values())) == 10


def test_genomes_of_a_group_are_never_parted(labelled_reads: LabelledReads, tmp_path: Path) -> None:
    table = tmp_path / "groups.tsv"
    lines = ["genome\tgroup"]
    for name in sorted(labelled_reads.genomes()):
        group = "family" if name in ("virus_0001", "virus_0002") else name
        lines.append(f"{name}\t{group}")
    table.write_text("\n".join(lines) + "\n")
    cluster = cluster_of_genome(labelled_reads.split(tmp_path, groups=table))
    assert cluster["virus_0001"] == cluster["virus_0002"]
    assert len(set(cluster.values())) == 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("genome\tgroup\nvirus_0001\tfamily\n", r"no line for genome others_0001, .* and 6 more"),
        ("genome\tgroup\na\tb\na\tc\n", ":3: genome 'a' stands on line 2"),
    ],
)
def test_a_table_of_groups_that_does_not_fit_is_refused(
    labelled_reads: LabelledReads, tmp_path: Path, text: str, problem: str
) -> None:
    table = tmp_path / "groups.tsv"
    table.write_text(text)
    with pytest.raises(InputError, match=problem):
        labelled_reads.split(tmp_path, groups=table)
