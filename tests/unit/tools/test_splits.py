"""Who learns and who is asked: truth held against reads, kin genomes kept together."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc_core.config import TrainSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.evaluation import Examples, choose, deal, draw, read_truth

COMPLEMENT = str.maketrans("ACGT", "TGCA")
HEADER = "read\tlabel\tgenome\n"


class World:
    """Reads with their origin, which tests change; `choose` stages them."""

    def __init__(self, folder: Path) -> None:
        made = simulate(
            SimulateSpec(reads=260, viral_genomes=5, other_genomes=5, genome_length=3_000, seed=3),
            folder / "r.fasta",
        )
        lines = made.reads_file.read_text().splitlines()
        self.folder, self.genomes = folder, made.genomes_file
        self.reads = dict(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))
        rows = [line.split("\t")[:3] for line in made.truth_file.read_text().splitlines()[1:]]
        self.truth = {read: (label, genome) for read, label, genome in rows}

    def choose(self, folder: Path, **given: Path | int) -> Examples:
        (folder / "r.fasta").write_text(
            "".join(f">{name}\n{bases}\n" for name, bases in self.reads.items())
        )
        rows = ("\t".join((read, *of)) for read, of in self.truth.items())
        (folder / "truth.tsv").write_text(HEADER + "".join(f"{row}\n" for row in rows))
        stage(StageSpec(reads=(str(folder / "r.fasta"),)), folder / "orfs.h5")
        return choose(
            OrfStore.open(folder / "orfs.h5"), TrainSpec(truth=folder / "truth.tsv", **given)
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def sides_of(found: Examples) -> Mapping[str, int]:
    return dict(zip(found.genomes["genome"], found.genomes["cluster"], strict=True))


def test_each_side_has_both_classes_and_no_cluster_is_on_two(world: World, tmp_path: Path) -> None:
    found = world.choose(tmp_path)
    assert found.genomes["cluster"].nunique() == 10, "these genomes are no kin"
    assert (found.rows.groupby("cluster")["side"].nunique() == 1).all()
    assert (found.rows.groupby("sequence")["side"].nunique() == 1).all()
    assert (found.rows.groupby("side")["label"].nunique() == 2).all()
    assert found.rows["side"].nunique() == 3


def test_the_same_genomes_on_the_other_strand_under_other_names_are_kin(
    world: World, tmp_path: Path
) -> None:
    for read, (label, genome) in list(world.truth.items()):
        world.truth[f"twin_{read}"] = (label, f"twin_{genome}")
        world.reads[f"twin_{read}"] = world.reads[read].translate(COMPLEMENT)[::-1]
    found = world.choose(tmp_path)
    cluster = sides_of(found)
    assert len(set(cluster.values())) == 10
    assert all(
        cluster[name] == cluster[f"twin_{name}"] for name in cluster if not name.startswith("twin_")
    )
    rows = found.rows[found.rows["side"] == 2]
    assert not set(rows["sequence"]) & set(found.rows.loc[found.rows["side"] != 2, "sequence"])


def test_other_reads_of_the_same_genome_are_kin_by_their_k_mers(
    world: World, tmp_path: Path
) -> None:
    for number, (read, (label, genome)) in enumerate(list(world.truth.items())):
        if genome == "virus_0001" and number % 2:
            world.truth[read] = (label, "strain")
    found = world.choose(tmp_path)
    assert sides_of(found)["strain"] == sides_of(found)["virus_0001"]
    assert len(set(sides_of(found).values())) == 10


def test_genomes_tell_kin_from_one_repeat_in_common_however_thin_the_reads(
    world: World, tmp_path: Path
) -> None:
    text = gzip.decompress(world.genomes.read_bytes()).decode().split()
    genome = dict(zip((name[1:] for name in text[::2]), text[1::2], strict=True))
    genome["virus_twin"] = genome["virus_0001"]
    genome["others_0001"] += (
        element := genome["others_0002"][600:700]
    )  # 3 % of the genome, a fifth of its reads
    places = dict.fromkeys(genome, (300, 1500)) | {
        "virus_twin": (900, 2_000),
        "others_0002": (300, 600),
    }
    places["others_0001"] = (300, len(genome["others_0001"]) - 150)
    assert genome["others_0001"].endswith(element)
    world.reads = {
        f"{name}_{at + turn}": genome[name][at + turn : at + 150]
        for name, both in places.items()
        for at in both
        for turn in range(3)  # a frame of each read is open, if any is
    }
    world.truth = {read: (read.split("_")[0], read.rsplit("_", 1)[0]) for read in world.reads}
    (tmp_path / "g.fasta").write_text(
        "".join(f">{name}\n{bases}\n" for name, bases in genome.items())
    )
    by_reads, by_genomes = (
        sides_of(world.choose(tmp_path)),
        sides_of(world.choose(tmp_path, genomes=tmp_path / "g.fasta")),
    )
    assert by_reads["virus_0001"] != by_reads["virus_twin"]
    assert by_reads["others_0001"] == by_reads["others_0002"]
    assert by_genomes["virus_0001"] == by_genomes["virus_twin"]
    assert len(set(by_genomes.values())) == 10


def test_groups_are_never_parted(world: World, tmp_path: Path) -> None:
    table = tmp_path / "groups.tsv"
    names = sorted({genome for _, genome in world.truth.values()})
    group = {name: "family" if name in ("virus_0001", "virus_0002") else name for name in names}
    table.write_text("genome\tgroup\n" + "".join(f"{name}\t{of}\n" for name, of in group.items()))
    found = world.choose(tmp_path, groups=table)
    assert sides_of(found)["virus_0001"] == sides_of(found)["virus_0002"]
    assert found.genomes["cluster"].nunique() == 9
    table.write_text("genome\tgroup\nvirus_0001\tfamily\n")
    with pytest.raises(InputError, match=r"no line for genome others_0001, .* and 6 more"):
        world.choose(tmp_path, groups=table)
    table.write_text("genome\tgroup\na\tb\na\tc\n")
    with pytest.raises(InputError, match=":3: genome 'a' stands on line 2"):
        world.choose(tmp_path, groups=table)


@pytest.mark.parametrize("turned", [False, True])
def test_a_sequence_under_both_labels_is_refused_by_both_names(
    world: World, tmp_path: Path, turned: bool
) -> None:
    read = next(read for read, (label, _) in world.truth.items() if label == "virus")
    bases = world.reads[read]
    world.reads["copy"] = bases.translate(COMPLEMENT)[::-1] if turned else bases
    world.truth["copy"] = ("others", "others_0001")
    with pytest.raises(
        InputError, match=f"'{read}' .virus. and 'copy' .others. hold the same sequence"
    ):
        world.choose(tmp_path)


def test_pairs_equal_ids_and_ids_of_mates_find_their_line(world: World, tmp_path: Path) -> None:
    text, first, second = "", *list(world.reads)[:2]
    for name, bases in world.reads.items():
        mate = bases.translate(COMPLEMENT)[::-1]
        ends = ("/1", "/2") if name == first else ("", "")
        text += f">{name}{ends[0]}\n{bases}\n>{name}{ends[1]} 2:N:0\n{mate}\n"
    (tmp_path / "pairs.fasta").write_text(text)
    rows = ["\t".join((read, *of)) for read, of in world.truth.items()]
    (tmp_path / "truth.tsv").write_text(
        "\n".join([HEADER.strip(), *rows, rows[0], "absent\tvirus\tvirus_0001"]) + "\n"
    )
    stage(StageSpec(reads=(str(tmp_path / "pairs.fasta"),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    found = choose(store, TrainSpec(truth=tmp_path / "truth.tsv"))
    assert store.n_reads == 2 * len(world.reads)
    assert store.read_ids(0, 4) == [f"{first}/1", f"{first}/2", second, f"{second}.2"]
    for read, label in found.rows[["read", "label"]].itertuples(index=False):
        assert label == (world.truth[list(world.reads)[read // 2]][0] == "virus")
    assert found.left_out["lines of the truth without a read"] == 1


def test_what_is_left_out_is_counted(world: World, tmp_path: Path) -> None:
    world.reads |= {"tiny": "ATGAAA", "stopped": "TAATTAATTAATTAA" * 6}
    world.truth |= {"tiny": ("virus", "virus_0001"), "stopped": ("virus", "virus_0001")}
    found = world.choose(tmp_path, rows_per_class=60)
    left = found.left_out
    assert left["frames of fewer than 21 bases"] >= 1
    assert left["reads without an open frame"] >= 1
    assert left["reads beyond 60 frames of a class"] >= 1
    assert found.rows.groupby("label").size().max() <= 60
    store = OrfStore.open(tmp_path / "orfs.h5")
    kept = found.rows["read"].nunique()
    beyond, none = left["reads beyond 60 frames of a class"], left["reads without an open frame"]
    assert (
        kept + beyond + none
        <= store.n_reads
        <= kept + beyond + none + left["frames of fewer than 21 bases"]
    )


def test_only_frames_in_coding_regions_are_kept_on_request(world: World, tmp_path: Path) -> None:
    text = gzip.decompress(world.genomes.read_bytes()).decode().split()
    genome = dict(zip((name[1:] for name in text[::2]), text[1::2], strict=True))
    lines, low, high = ["##gff-version 3"], 600, 2_100  # 0-based, a frame's bounds
    for name in genome:
        lines.append(f"{name}\tx\tgene\t1\t90\t.\t+\t.\tID=g")
        lines.append(
            f"{name}\tx\tCDS\t{low + 1}\t{high}\t.\t{'-+'[name.startswith('virus')]}\t0\tID=c"
        )
    (tmp_path / "a.gff").write_text("\n".join(lines) + "\n")
    world.reads, world.truth = {}, {}
    for name, bases in genome.items():
        for place in range(low - 450, high + 300, 75):
            read = f"{name}_{place}"
            world.reads[read] = bases[place : place + 150]
            world.truth[read] = ("virus" if name.startswith("virus") else "others", name)
    whole = world.choose(tmp_path)
    found = world.choose(tmp_path, coding_only=tmp_path / "a.gff", genomes=world.genomes)
    store = OrfStore.open(tmp_path / "orfs.h5")
    names = store.read_ids(0, store.n_reads)
    place = np.array([int(names[read].split("_")[2]) for read in found.rows["read"]])
    assert ((place >= low - 3) & (place + 150 <= high + 3)).all()
    at = {(row.read, row.unique) for row in found.rows.itertuples()}
    frames = {
        (int(store.row_read[r]), int(store.row_unique[r])): int(store.row_frame[r])
        for r in range(store.n_rows)
    }
    virus = {frames[one] for one in at if names[one[0]].startswith("virus")}
    assert virus == {0}, "reads begin at whole codons of the region, so that its frame is the first"
    assert found.left_out["frames outside coding regions"] == len(whole.rows) - len(found.rows) > 0
    (tmp_path / "bad.gff").write_text("g\tx\tCDS\tone\t90\t.\t+\t0\tID=c\n")
    with pytest.raises(InputError, match=r"bad\.gff: not valid GFF"):
        world.choose(tmp_path, coding_only=tmp_path / "bad.gff", genomes=world.genomes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("read\tlabel\n", ":1: no column genome"),
        (HEADER + "r1\tvirus\n", ":2: wanted read"),
        (HEADER + "1\tr1\tvirus\tg\n2\tr2\tothers\th\n", ":2: more fields than the header names"),
        (HEADER + "1\tr1\tvirus\tg\nr2\tothers\th\n", ":2: more fields than the header names"),
        (HEADER + "r1\tViral\tg\n", ":2: wanted a label"),
        ("", "not valid table"),
        ("read\tlabel\tgenome\tspecies\nr1\tvirus\tg\tx\n", ":1: unknown column species"),
        (
            HEADER + "r1\tvirus\tg\nr1\tvirus\th\n",
            ":3: read 'r1' stands on line 2 with other words",
        ),
        (HEADER + "r1\tvirus\tg\nr2\tothers\tg\n", ":3: genome 'g' stands on line 2"),
        (HEADER + "".join(f"r{n}\tvirus\tg{n}\n" for n in range(5)), "0 genomes labelled others"),
        (
            HEADER + "".join(f"r{n}\t{'virus' if n > 1 else 'others'}\tg{n}\n" for n in range(5)),
            "2 genomes labelled",
        ),
        (HEADER + "r\udcff\n", "cannot be read|not valid"),
    ],
)
def test_a_bad_truth_file_is_named_by_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "truth.tsv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=problem):
        read_truth(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_truth(tmp_path / "absent.tsv")


def test_quotes_blank_lines_and_repeated_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "truth.tsv"
    rows = [f'r"{n}\t{label}\t{label}{n}' for label in ("virus", "others") for n in range(3)]
    path.write_text(HEADER + "\n".join([*rows, rows[0], ""]) + "\n\n")
    with pytest.raises(InputError, match="stands on line"):
        read_truth(path)  # r"0 is both
    path.write_text(
        HEADER
        + "\n".join([*rows[:3], *(row.replace('"', "'") for row in rows[3:]), rows[0]])
        + "\n\n"
    )
    assert read_truth(path)["read"].tolist() == ['r"0', 'r"1', 'r"2', "r'0", "r'1", "r'2"]


def test_reads_without_truth_are_refused(world: World, tmp_path: Path) -> None:
    for read in list(world.truth)[-2:]:
        del world.truth[read]
    with pytest.raises(
        InputError,
        match=f"2 reads have no line in the truth file, among them .*{list(world.reads)[-1]}",
    ):
        world.choose(tmp_path)


def test_genomes_are_sampled_evenly_or_by_size() -> None:
    genome = np.repeat([0, 1, 2], [1000, 100, 20])
    table = pd.DataFrame({"label": 0, "genome": genome, "rows": 1})
    taken = {
        how: genome[draw(table, 120, how, np.random.default_rng(0))] for how in ("even", "natural")
    }
    assert np.bincount(taken["even"]).tolist() == [50, 50, 20]
    assert np.bincount(taken["natural"], minlength=3)[0] > 90


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=9),
    st.lists(st.integers(1, 60), min_size=3, max_size=9),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.2, 0.5]),
)
@settings(max_examples=25)
def test_no_cluster_is_in_two_folds_and_each_has_both_classes(
    others: list[int], virus: list[int], seed: int, share: float
) -> None:
    sizes = [*others, *virus]
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    rows = pd.DataFrame({"cluster": cluster, "label": (cluster >= len(others)).astype(int)})
    rows["fold"] = deal(rows, share, seed)
    assert (rows.groupby("cluster")["fold"].nunique() == 1).all()
    assert (rows.groupby("fold")["label"].nunique() == 2).all()


def test_a_cluster_that_holds_half_of_a_class_is_not_the_test() -> None:
    cluster = np.concatenate(
        [np.zeros(500, int), np.repeat(np.arange(1, 51), 10), np.repeat(np.arange(51, 151), 10)]
    )
    rows = pd.DataFrame({"cluster": cluster, "label": (cluster > 50).astype(int)})
    held = rows[deal(rows, 0.2, 0) == 0]
    assert held.groupby("label")["cluster"].nunique().min() >= 10
    assert held["label"].value_counts(normalize=True).min() > 0.05
