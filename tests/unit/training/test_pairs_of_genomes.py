"""Mates are of one genome, and are never on two sides of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from virnuc.flows.parameters import build
from virnuc.flows.settings.train import TrainSettings
from virnuc_core.config import TrainSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.simulate import SimulateSpec, SimulateSummary, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.splits import Examples, choose_examples


@pytest.fixture(scope="module")
def simulated_pairs(tmp_path_factory: pytest.TempPathFactory) -> SimulateSummary:
    """Pairs of five viruses and five other genomes."""
    spec = SimulateSpec(
        reads=400, pairs=True, viral_genomes=5, other_genomes=5, genome_length=3_000, seed=3
    )
    return simulate(spec, tmp_path_factory.mktemp("pairs") / "lung.fastq")


def rewrite_ids(source: SimulateSummary, folder: Path, ends: tuple[str, str]) -> list[str]:
    """Write the pairs again with other ends of their ids, in place of `/1` and `/2`."""
    assert source.mates_file is not None
    files = []
    for old_end, new_end, path in zip(
        ("/1", "/2"), ends, (source.reads_file, source.mates_file), strict=True
    ):
        text = path.read_text().replace(f"{old_end}\n", f"{new_end}\n")
        (folder / path.name).write_text(text)
        files.append(str(folder / path.name))
    return files


def split(folder: Path, truth: Path, **spec: Any) -> tuple[Examples, OrfStore]:
    stage(StageSpec(**spec), folder / "orfs.h5")
    store = OrfStore.open(folder / "orfs.h5")
    return choose_examples(store, TrainSpec(truth=truth)), store


@pytest.mark.parametrize("ends", [("/1", "/2"), ("", ""), (" 1:N:0:A", " 2:N:0:A"), (".1", ".2")])
@pytest.mark.parametrize("by_pair", [False, True])
def test_mates_find_their_genome_by_their_id_or_that_of_the_pair(
    simulated_pairs: SimulateSummary, tmp_path: Path, ends: tuple[str, str], by_pair: bool
) -> None:
    first, second = rewrite_ids(simulated_pairs, tmp_path, ends)
    lines = simulated_pairs.truth_file.read_text().splitlines()
    if by_pair:  # one line a pair
        rows = {line.split("\t")[0][:-2]: line.split("\t")[1:3] for line in lines[1:]}
    else:
        rows = {}
        for line in lines[1:]:
            read_id, label, genome, *_ = line.split("\t")
            number = int(read_id[-1]) - 1
            rows[read_id[:-2] + ends[number].split(" ")[0]] = [label, genome]
    text = "".join("\t".join([name, *cells]) + "\n" for name, cells in rows.items())
    (tmp_path / "truth.tsv").write_text("read\tlabel\tgenome\n" + text)
    spec = {"mates_1": (first,), "mates_2": (second,)}
    examples, store = split(tmp_path, tmp_path / "truth.tsv", **spec)
    assert store.paired
    genomes = examples.genomes["genome"].to_numpy()
    genome_of_pair = {line.split("\t")[0][:-2]: line.split("\t")[2] for line in lines[1:]}
    for row in examples.rows.itertuples():
        pair_id = store.read_ids(row.read, row.read + 1)[0][:-2]
        assert genomes[row.genome] == genome_of_pair[pair_id]


@pytest.mark.parametrize("given_as", ["options", "folder", "interleaved"])
def test_mates_are_never_on_two_sides(
    simulated_pairs: SimulateSummary, tmp_path: Path, given_as: str
) -> None:
    (tmp_path / "in").mkdir()
    first, second = rewrite_ids(simulated_pairs, tmp_path / "in", ("/1", "/2"))
    records = [Path(name).read_text().split("@sim")[1:] for name in (first, second)]
    mixed = tmp_path / "mixed.fq"
    mixed.write_text("".join(f"@sim{a}@sim{b}" for a, b in zip(*records, strict=True)))
    spec = {
        "options": {"mates_1": (first,), "mates_2": (second,)},
        "folder": {"reads": (str(tmp_path / "in"),)},
        "interleaved": {"reads": (str(mixed),), "interleaved": True},
    }[given_as]
    settings = {"truth": simulated_pairs.truth_file, "out": tmp_path / "o", "models": tmp_path}
    assert build(TrainSettings, settings | spec).pairs, "as `predict` does"
    examples, store = split(tmp_path, simulated_pairs.truth_file, **spec)
    rows = examples.rows
    assert store.paired
    assert rows["fragment"].nunique() < rows["read"].nunique()
    assert (rows["fragment"] == rows["read"] // 2).all()
    for column in ("side", "genome", "label", "cluster"):
        assert (rows.groupby("fragment")[column].nunique() == 1).all()


def test_pairs_are_left_out_as_a_whole(simulated_pairs: SimulateSummary, tmp_path: Path) -> None:
    spec = simulated_pairs.reads.model_dump()
    stage(StageSpec(**spec), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    truth = simulated_pairs.truth_file
    all_rows = choose_examples(store, TrainSpec(truth=truth)).rows
    some_rows = choose_examples(store, TrainSpec(truth=truth, rows_per_class=60)).rows
    assert len(some_rows) < len(all_rows)
    n_frames = all_rows.groupby("fragment").size()
    kept_frames = some_rows.groupby("fragment").size()
    assert (kept_frames == n_frames[kept_frames.index]).all()


def test_single_reads_are_fragments_of_their_own(
    simulated_pairs: SimulateSummary, tmp_path: Path
) -> None:
    spec = simulated_pairs.reads.model_dump() | {"pairs": False}
    examples, _ = split(tmp_path, simulated_pairs.truth_file, **spec)
    assert np.array_equal(examples.rows["fragment"], examples.rows["read"])


def test_mates_of_two_genomes_are_refused_by_name(
    simulated_pairs: SimulateSummary, tmp_path: Path
) -> None:
    lines = simulated_pairs.truth_file.read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    other_genome = next(row for row in rows[3:] if row[2] != rows[1][2])
    rows[2][1:3] = other_genome[1:3]  # the second mate of the first pair
    truth = tmp_path / "truth.tsv"
    truth.write_text("".join("\t".join(row) + "\n" for row in rows))
    with pytest.raises(InputError) as error:
        split(tmp_path, truth, **simulated_pairs.reads.model_dump())
    message = str(error.value)
    assert "'sim_0000001/1' and 'sim_0000001/2' are of one fragment" in message
    assert rows[1][2] in message
    assert other_genome[2] in message
    # As single reads they may be of any genome.
    split(tmp_path, truth, **simulated_pairs.reads.model_dump() | {"pairs": False})
