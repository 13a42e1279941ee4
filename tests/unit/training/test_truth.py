"""The table of origins is checked line by line, and each read finds its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.config import TrainSpec
from virnuc_core.errors import InputError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.training.splits import choose_examples
from virnuc_core.training.truth import read_truth

from .origins import HEADER, LabelledReads, reverse_complement


def lines_of_genomes(*labels: str) -> str:
    """Return a line for each label, each of a genome of its own."""
    return "".join(f"r{number}\t{label}\tg{number}\n" for number, label in enumerate(labels))


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
        (
            "read\tlabel\tgenome\tkind\nr1\tvirus\tg\tphage\nr2\tvirus\tg\tRNA virus\n",
            ":3: genome 'g' stands on line 2",
        ),
        (
            "read\tlabel\tgenome\tkind\nr1\tvirus\tg\tphage\nr2\tvirus\tg\t\n",
            ":3: genome 'g' stands on line 2",
        ),
        (HEADER + lines_of_genomes(*["virus"] * 5), "0 genomes labelled others"),
        (HEADER + lines_of_genomes("others", "others", *["virus"] * 3), "2 genomes labelled"),
        (HEADER + "r\udcff\n", "cannot be read|not valid"),
    ],
)
def test_a_bad_truth_file_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "truth.tsv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=problem):
        read_truth(path)


def test_a_missing_truth_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_truth(tmp_path / "absent.tsv")


def test_quotes_are_letters_and_blank_and_repeated_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "truth.tsv"
    virus_lines = [f'r"{number}\tvirus\tvirus{number}' for number in range(3)]
    others_lines = [f"r'{number}\tothers\tothers{number}" for number in range(3)]
    repeated_line = virus_lines[0]
    path.write_text(HEADER + "\n".join([*virus_lines, *others_lines, repeated_line]) + "\n\n")
    assert read_truth(path)["read"].tolist() == ['r"0', 'r"1', 'r"2', "r'0", "r'1", "r'2"]


def test_a_quoted_name_with_two_labels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "truth.tsv"
    lines = [
        f'r"{number}\t{label}\t{label}{number}'
        for label in ("virus", "others")
        for number in range(3)
    ]
    path.write_text(HEADER + "\n".join([*lines, ""]) + "\n\n")
    with pytest.raises(InputError, match="stands on line"):
        read_truth(path)


def test_the_kind_of_a_genome_is_stated_in_either_table_or_is_its_label(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    labelled_reads.kinds |= {"virus_0001": "phage", "others_0001": "NA", "others_0002": "plant"}
    groups = tmp_path / "groups.tsv"
    kind_in_groups = {"virus_0002": "RNA virus", "others_0002": "plant"}
    groups.write_text(
        "genome\tgroup\tkind\n"
        + "".join(
            f"{name}\t{name}\t{kind_in_groups.get(name, '')}\n" for name in labelled_reads.genomes()
        )
    )
    examples = labelled_reads.split(tmp_path, groups=groups)
    kinds = examples.genomes.set_index("genome")["kind"].to_dict()
    stated = {
        "virus_0001": "phage",
        "virus_0002": "RNA virus",
        "others_0001": "NA",
        "others_0002": "plant",
    }
    assert kinds == {name: stated.get(name, name.split("_")[0]) for name in kinds}
    names_of_rows = examples.genomes["genome"].to_numpy()[examples.rows["genome"]]
    assert examples.rows["kind"].tolist() == [kinds[name] for name in names_of_rows]
    assert len(examples.rows) > 0


def test_tables_without_a_column_of_kinds_give_every_genome_its_label(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    examples = labelled_reads.split(tmp_path)
    kinds = examples.genomes.set_index("genome")["kind"].to_dict()
    assert kinds == {name: name.split("_")[0] for name in labelled_reads.genomes()}


def test_two_tables_that_state_different_kinds_are_refused(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    labelled_reads.kinds["virus_0003"] = "phage"
    groups = tmp_path / "groups.tsv"
    lines = [f"{name}\t{name}\t\n" for name in labelled_reads.genomes()]
    number = lines.index("virus_0003\tvirus_0003\t\n")
    lines[number] = "virus_0003\tvirus_0003\tRNA virus\n"
    groups.write_text("genome\tgroup\tkind\n" + "".join(lines))
    problem = f":{number + 2}: genome 'virus_0003' is of the kind 'RNA virus' here, .* 'phage'"
    with pytest.raises(InputError, match=problem):
        labelled_reads.split(tmp_path, groups=groups)


def test_pairs_equal_ids_and_ids_of_mates_find_their_line(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    """The first read is a pair named `/1` and `/2`; the mates of the others have equal ids."""
    first_read, second = list(labelled_reads.reads)[:2]
    text = ""
    for name, bases in labelled_reads.reads.items():
        mate = reverse_complement(bases)
        if name == first_read:
            text += f">{name}/1\n{bases}\n>{name}/2 2:N:0\n{mate}\n"
        else:
            text += f">{name}\n{bases}\n>{name} 2:N:0\n{mate}\n"
    (tmp_path / "pairs.fasta").write_text(text)
    origin = labelled_reads.origins[first_read]
    repeated_line = f"{first_read}\t{origin.label}\t{origin.genome}"
    labelled_reads.write_truth(tmp_path / "truth.tsv", repeated_line, "absent\tvirus\tvirus_0001")

    stage(StageSpec(reads=(str(tmp_path / "pairs.fasta"),)), tmp_path / "orfs.h5")
    store = OrfStore.open(tmp_path / "orfs.h5")
    examples = choose_examples(store, TrainSpec(truth=tmp_path / "truth.tsv"))

    assert store.n_reads == 2 * len(labelled_reads.reads)
    assert store.read_ids(0, 4) == [f"{first_read}/1", f"{first_read}/2", second, f"{second}.2"]
    names = list(labelled_reads.reads)
    for row in examples.rows.itertuples():
        origin = labelled_reads.origins[names[row.read // 2]]
        assert row.label == (origin.label == "virus")
    assert examples.left_out["lines of the truth without a read"] == 1


def test_reads_without_a_line_are_refused(labelled_reads: LabelledReads, tmp_path: Path) -> None:
    last_two = list(labelled_reads.origins)[-2:]
    for read_id in last_two:
        del labelled_reads.origins[read_id]
    problem = f"2 reads have no line in the truth file, among them .*{last_two[-1]}"
    with pytest.raises(InputError, match=problem):
        labelled_reads.split(tmp_path)
