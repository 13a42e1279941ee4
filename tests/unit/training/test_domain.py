"""A card tells how a head judges each kind, with numbers that a hand calculation gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from virnuc_core.encoders.model_config import DomainRow, HeadShape, read_shape, write_shape
from virnuc_core.training.clusters import independent_genomes, source_sequence
from virnuc_core.training.domain import FURTHER_KINDS, MAX_KINDS, describe_domain
from virnuc_core.training.evaluation import cluster_precision, cluster_share
from virnuc_core.training.features import gc_shares
from virnuc_core.training.train_file import TrainFile

from .conftest import TrainingRun
from .origins import LabelledReads, Origin

KINDS = ("phage", "RNA virus", "plant")


def reads_table(n_genomes: int = 6) -> pd.DataFrame:
    """Return 10 reads of each of six genomes of three kinds; every fifth read has no frame.

    Of the eight reads with a frame of a genome, phages have 6 called viral, RNA viruses 8, and
    plants 2.
    """
    rows = []
    for genome in range(n_genomes):
        kind = KINDS[genome % 3]
        n_called = {"phage": 6, "RNA virus": 8, "plant": 2}[kind]
        for number in range(10):
            has_frame = number < 8
            rows.append(
                {
                    "label": 0 if kind == "plant" else 1,
                    "kind": kind,
                    "source": genome,
                    "bases": 150 if number % 2 else 300,
                    "gc": 0.25 + 0.1 * (genome % 3) if has_frame else np.nan,
                    "has_frame": has_frame,
                    "called": float(number < n_called),
                    "weight": 1.0,
                }
            )
    return pd.DataFrame(rows)


def find(rows: tuple[DomainRow, ...], name: str, label: str) -> DomainRow:
    """Return a row of a table."""
    [row] = [row for row in rows if (row.name, row.label) == (name, label)]
    return row


def test_recall_and_false_positives_of_each_kind_are_counted() -> None:
    domain = describe_domain(reads_table(), {}, prevalence=0.01, seed=0)
    assert [(row.name, row.label) for row in domain.kinds] == [
        ("phage", "virus"),
        ("RNA virus", "virus"),
        ("plant", "others"),
    ]
    phage = find(domain.kinds, "phage", "virus")
    assert (phage.genomes, phage.reads, phage.share_with_frame) == (2, 16, 0.8)
    assert phage.called is not None
    assert phage.called_of_all is not None
    assert phage.called.value == 6 / 8
    assert phage.called_of_all.value == 6 / 10
    plant = find(domain.kinds, "plant", "others")
    assert plant.called is not None
    assert plant.called.value == 2 / 8
    # Of 40 viral reads, 28 are called; of 20 others, 4.
    assert domain.recall_of_all is not None
    assert domain.recall_of_all.value == 28 / 40
    assert domain.precision_of_all is not None
    right, wrong = 0.01 * 28 / 40, 0.99 * 4 / 20
    assert domain.precision_of_all.value == pytest.approx(right / (right + wrong))


def test_reads_are_counted_by_gc_and_by_length() -> None:
    domain = describe_domain(reads_table(), {}, prevalence=0.01, seed=0)
    gc_rows = {(row.name, row.label): row.reads for row in domain.gc}
    assert gc_rows == {
        ("below 30 %", "virus"): 16,
        ("30 to 40 %", "virus"): 16,
        ("40 to 50 %", "others"): 16,
    }
    assert {row.called_of_all for row in domain.gc} == {None}, "GC without a frame is not known"
    lengths = {(row.name, row.label): row.reads for row in domain.lengths}
    assert lengths == {
        ("150 to 199 bases", "virus"): 16,
        ("150 to 199 bases", "others"): 8,
        ("300 to 499 bases", "virus"): 16,
        ("300 to 499 bases", "others"): 8,
    }
    assert domain.length_ranges == {"virus": (150, 300), "others": (150, 300)}
    low, high = domain.gc_ranges["virus"]
    assert (low, high) == pytest.approx((0.25, 0.35))


def test_fragments_of_the_test_genomes_follow_in_the_table_of_lengths() -> None:
    table = reads_table()
    domain = describe_domain(table, {"500 bases": table}, prevalence=0.01, seed=0)
    row = find(domain.lengths, "fragments of 500 bases", "virus")
    assert row.reads == 32


def test_a_read_without_a_frame_counts_as_many_as_it_stands_for() -> None:
    table = reads_table()
    table.loc[~table["has_frame"], "weight"] = 0.5
    phage = find(describe_domain(table, {}, 0.01, 0).kinds, "phage", "virus")
    assert phage.called_of_all is not None
    assert phage.called_of_all.value == pytest.approx(6 / 9)
    assert phage.share_with_frame == pytest.approx(8 / 9)


def test_one_genome_says_nothing_of_others() -> None:
    share = cluster_share(np.ones(50), np.ones(50), np.zeros(50), seed=0)
    assert share is not None
    assert (share.value, share.low, share.high) == (1, 0, 1)


def test_no_call_at_all_is_no_proof_that_there_is_never_one() -> None:
    """Every resample has the share 0. Wilson's interval for 0 of 40 ends at 0.0876."""
    share = cluster_share(np.zeros(40), np.ones(40), np.arange(40) // 4, seed=0)
    assert share is not None
    assert (share.value, share.low) == (0, 0)
    assert share.high == pytest.approx(0.0876, abs=1e-4)


def test_genomes_that_differ_make_the_interval_wider_than_their_reads_do() -> None:
    called = np.repeat([0.0, 1.0], 200)
    alike = cluster_share(np.tile([0.0, 1.0], 200), np.ones(400), np.arange(400) // 100, seed=0)
    different = cluster_share(called, np.ones(400), np.arange(400) // 100, seed=0)
    assert alike is not None
    assert different is not None
    assert alike.value == different.value == 0.5
    assert different.high - different.low > 3 * (alike.high - alike.low)


def test_without_a_class_or_a_call_there_is_no_precision() -> None:
    table = reads_table().rename(columns={"source": "cluster"})
    assert cluster_precision(table[table["label"] == 1], 0.01, 0) is None
    assert cluster_precision(table.assign(called=0.0), 0.01, 0) is None
    assert cluster_share(np.empty(0), np.empty(0), np.empty(0), 0) is None


def test_the_rarest_of_very_many_kinds_are_put_together() -> None:
    table = reads_table(3 * (MAX_KINDS + 5))
    is_virus = table["label"] == 1
    table.loc[is_virus, "kind"] = table["source"].map("species {}".format)
    kinds = describe_domain(table, {}, 0.01, 0).kinds
    viruses = [row for row in kinds if row.label == "virus"]
    assert len(viruses) == MAX_KINDS
    assert sum(row.reads for row in viruses) == (is_virus & table["has_frame"]).sum()
    further = find(kinds, FURTHER_KINDS, "virus")
    assert further.genomes > 1
    assert find(kinds, "plant", "others").genomes == MAX_KINDS + 5


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("chr22_20000", "chr22"),
        ("chrX_0", "chrX"),
        ("NC_000022.11:1-20000", "NC_000022.11"),
        ("NC_000022.11_20000", "NC_000022.11"),
        ("contig7:0-500", "contig7"),
        ("scaffold_12_400-900", "scaffold_12"),
        ("CP001071.1_500000", "CP001071.1"),
        ("virus_0001", "virus_0001"),
        ("NC_001802", "NC_001802"),
        ("NC_001802.1", "NC_001802.1"),
        ("MT-human", "MT-human"),
        ("chromobacterium_2", "chromobacterium_2"),
        ("Influenza_A_1934-1", "Influenza_A_1934-1"),
        ("sample.1_7", "sample.1_7"),
    ],
)
def test_windows_are_told_by_their_names(name: str, source: str) -> None:
    assert source_sequence(name) == source


def test_windows_of_one_sequence_and_genomes_of_one_cluster_count_as_one() -> None:
    names = pd.Series(["chr22_0", "chr22_20000", "virus_1", "virus_2", "chr21_0", "other"])
    clusters = np.array([0, 1, 2, 2, 3, 1])
    numbers = independent_genomes(names, clusters)
    # `other` is related to the second window, and so to the first.
    assert numbers[0] == numbers[1] == numbers[5]
    assert numbers[2] == numbers[3]
    assert len(set(numbers.tolist())) == 3


def test_windows_may_be_in_different_sets_but_are_one_genome_on_the_card(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    for read_id, origin in labelled_reads.origins.items():
        if origin.label == "others":
            window = origin.genome.replace("others_", "chr1_")
            labelled_reads.origins[read_id] = Origin("others", window)
    genomes = labelled_reads.split(tmp_path).genomes
    others = genomes[genomes["label"] == 0]
    assert others["cluster"].nunique() == 5
    assert others["source"].nunique() == 1


@pytest.fixture(scope="module")
def record(training_run: TrainingRun) -> TrainFile:
    """A short training without a cross-validation: the card speaks of the test."""
    return training_run.train(epochs=2)


def test_the_tables_agree_with_the_figures_of_the_card(
    record: TrainFile, training_run: TrainingRun
) -> None:
    domain = record.card.domain
    assert domain is not None
    virus = find(domain.kinds, "virus", "virus")
    assert virus.called is not None
    assert virus.called.value == pytest.approx(record.card.metrics["recall"].value)
    truth = pd.read_csv(training_run.truth, sep="\t")
    side_of_read = truth["genome"].map(lambda name: record.genomes[name]["side"])
    n_reads = truth.loc[side_of_read == "test", "label"].value_counts()
    for row in domain.kinds:
        assert row.share_with_frame is not None
        # All reads of a genome are used, so their number ÷ the share is that of all reads.
        assert row.reads / row.share_with_frame == pytest.approx(n_reads[row.label])
        assert row.called_of_all is not None
        assert row.called is not None
        expected = row.called.value * row.share_with_frame
        assert row.called_of_all.value == pytest.approx(expected)
    assert {row.name for row in domain.lengths} == {"150 to 199 bases"}


def test_if_few_reads_are_used_those_without_a_frame_are_thinned_alike(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "few").mkdir()
    complete = labelled_reads.split(tmp_path / "all")
    few = labelled_reads.split(tmp_path / "few", rows_per_class=60)
    assert set(complete.closed_reads["weight"]) == {1.0}
    shares = []
    for examples in (complete, few):
        n_open = examples.rows["read"].nunique()
        shares.append(n_open / (n_open + examples.closed_reads["weight"].sum()))
    assert few.rows["read"].nunique() < complete.rows["read"].nunique() / 2
    # "even" sampling takes as many reads of each genome, so the shares differ a little.
    assert shares[1] == pytest.approx(shares[0], abs=0.05)


def test_gc_is_that_of_the_stored_sequences(training_run: TrainingRun) -> None:
    store = training_run.store
    uniques = np.array([0, 5, store.n_uniques - 1])
    for unique, share in zip(uniques.tolist(), gc_shares(store, uniques), strict=True):
        dna = store.dna(unique, unique + 1)[0]
        assert share == pytest.approx((dna.count(b"G") + dna.count(b"C")) / len(dna))


def test_a_card_is_read_as_it_was_written_and_an_older_one_has_no_domain(
    record: TrainFile, training_run: TrainingRun, tmp_path: Path
) -> None:
    shape = read_shape(training_run.head / "config.json", HeadShape)
    assert shape.card == record.card
    assert shape.card is not None
    older_card = shape.card.model_copy(update={"domain": None})
    write_shape(shape.model_copy(update={"card": older_card}), tmp_path / "config.json")
    assert '"domain"' not in (tmp_path / "config.json").read_text()
    older = read_shape(tmp_path / "config.json", HeadShape)
    assert older.card == older_card
