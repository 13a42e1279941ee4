"""Names of files: which are mates, lanes and samples, by the conventions of public tools.

The conventions are in `name_conventions`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from virnuc_core.reads.file_names import MateNames, find_mates, group_samples

from .name_conventions import CONVENTIONS


def with_ending(names: str, ending: str) -> list[str]:
    """Return the names of a row of the table as paths of files."""
    return [f"in/{name}{ending}" for name in names.split()]


def joined(names: MateNames) -> list[tuple[str, str]]:
    """Return the files of each pair."""
    return [(pair.first, pair.second) for pair in names.pairs]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("ending", [".fastq.gz", ".fq"])
def test_the_files_of_a_convention_are_one_sample(convention: str, ending: str) -> None:
    first, second, singles, left_out = CONVENTIONS[convention]
    [first_file], [second_file] = with_ending(first, ending), with_ending(second, ending)
    single_files, others = with_ending(singles, ending), with_ending(left_out, ending)
    files = [first_file, second_file, *single_files, *others]
    for order in (files, files[::-1]):
        names = find_mates(order)
        assert joined(names) == [(first_file, second_file)]
        assert sorted(names.left_out) == sorted(others)
        used_files = [file for file in order if file not in names.left_out]
        samples, clashes = group_samples(used_files, joined(names))
        assert clashes == []
        assert [(sample.pairs, sorted(sample.singles)) for sample in samples] == [
            ([(first_file, second_file)], sorted(single_files))
        ]


@pytest.mark.parametrize(
    ("first", "second", "sample"),
    [
        ("sampleA_R1_val_1.fq.gz", "sampleA_R2_val_2.fq.gz", "sampleA"),
        ("A_S1_L001_R1_001.fastp.fastq.gz", "A_S1_L001_R2_001.fastp.fastq.gz", "A_S1"),
        ("A_R1_kneaddata_paired_1.fastq", "A_R1_kneaddata_paired_2.fastq", "A"),
        ("A_R1_001_kneaddata_paired_1.fastq", "A_R1_001_kneaddata_paired_2.fastq", "A"),
        ("DP8400012345BR_L01_501_1.fq", "DP8400012345BR_L01_501_2.fq", "DP8400012345BR_501"),
        ("lung_2_1P.fq", "lung_2_2P.fq", "lung_2"),
        ("A.un.1.fq", "A.un.2.fq", "A"),
        ("A__R1.fq", "A__R2.fq", "A"),
    ],
)
def test_a_sample_is_called_as_its_files_without_marks_and_words_of_tools(
    first: str, second: str, sample: str
) -> None:
    [named], _ = group_samples([first, second], [(first, second)])
    assert named.name == sample


@pytest.mark.parametrize(
    "files",
    [
        "A_1.fq A_2.fq A_3.fq",  # archives: which of three is the index is not known
        "patient_1.fq patient_2.fq patient_3.fq patient_4.fq",
        "run_0.fastq run_1.fastq run_2.fastq",  # MinKNOW numbers its files on
        "R1_lung.fq R2_lung.fq",
        "A_R1.fq A_R1.fq.gz A_R2.fq",
        "A_1U.fq A_2U.fq",
        "plot_1_dry.fq plot_2_dry.fq",
        # no separator that this module knows stands around the mark
        "AR1.fq AR2.fq",
        "sampleR1.fq.gz sampleR2.fq.gz",
        "A+R1.fq A+R2.fq",
        "A,r1.fq A,r2.fq",
        "A=Read1.fq A=Read2.fq",
        "A_R1(1).fq A_R2(1).fq",
        "A_R1[x].fq A_R2[x].fq",
        "A(R1).fq A(R2).fq",
        "A_R1a_S7.fq A_R2a_S7.fq",
        "AR1_001.fq AR2_001.fq",
        "A#mate1.fq A#mate2.fq",
        "AFwd.fq ARev.fq",
        "lungforward.fq lungreverse.fq",
        "2R1~.fq 2R2~.fq",
    ],
)
def test_what_looks_like_mates_and_is_not_joined_is_reported_once(files: str) -> None:
    names = find_mates(files.split())
    assert names.pairs == ()
    [unjoined] = names.unjoined
    assert set(unjoined.files) <= set(files.split())
    assert unjoined.reason


@pytest.mark.parametrize(
    "files",
    [
        "leaf_rep1.fq leaf_rep2.fq",
        "sample1.fq sample2.fq",
        "1.fq 2.fq",
        "a_R1.fq b_R2.fq",
        "donor1.fq donor2.fq",
        "AR11.fq AR12.fq",
        "AR1.fq AR3.fq AR4.fq",
        "a/AR1.fq b/AR2.fq",
        "A+R1.fq B+R2.fq",
        "A+R1(1).fq A+R2(2).fq",
    ],
)
def test_numbers_that_are_no_mate_marks_are_left_alone(files: str) -> None:
    names = find_mates(files.split())
    assert (names.pairs, names.unjoined) == ((), ())


def test_numbers_within_words_are_noted_as_similar_so_that_the_reads_can_tell() -> None:
    files = ["donor1.fq", "donor2.fq", "tumor1.fq", "tumor2.fq", "tumor3.fq", "x12.fq", "x22.fq"]
    for order in (files, files[::-1]):
        assert find_mates(order).similar == (("donor1.fq", "donor2.fq"),)
    assert find_mates(["AR1.fq", "AR2.fq", "B_R1.fq", "B_R2.fq"]).similar == ()


@pytest.mark.parametrize(
    ("files", "is_certain"),
    [
        ("A_R1.fq A_R2.fq", True),
        ("A_R1_val_1.fq A_R2_val_2.fq", True),
        ("patient_1.fq patient_2.fq", False),  # or an archive's mates: the reads tell
        ("lung_left.fq lung_right.fq", False),
        ("leaf_R1_dry.fq leaf_R2_dry.fq", False),  # replicates, or the words of a tool
        ("A_1.fq A_3.fq", False),
    ],
)
def test_names_with_several_meanings_are_not_certain(files: str, is_certain: bool) -> None:
    [pair] = find_mates(files.split()).pairs
    assert pair.is_certain == is_certain


def test_replicates_are_not_mates_of_each_other() -> None:
    files = ["rep_1_R1.fq", "rep_1_R2.fq", "rep_2_R1.fq", "rep_2_R2.fq"]
    assert joined(find_mates(files)) == [(files[0], files[1]), (files[2], files[3])]
    assert joined(find_mates([files[0], files[3]])) == []


def test_raw_and_trimmed_files_are_two_samples_because_they_hold_the_same_reads() -> None:
    files = ["A_R1.fq", "A_R2.fq", "A_R1_trimmed.fq", "A_R2_trimmed.fq"]
    samples, clashes = group_samples(files, joined(find_mates(files)))
    assert ([sample.name for sample in samples], clashes) == (["A", "A_trimmed"], [])


def test_single_lanes_are_one_sample() -> None:
    files = ["A_S1_L001_R1_001.fastq.gz", "A_S1_L002_R1_001.fastq.gz"]
    names = find_mates(files)
    [sample], _ = group_samples(files, [])
    assert (names.lonely, sample.name, sample.singles) == (tuple(files), "A_S1", files)


def test_files_that_cannot_be_told_apart_clash() -> None:
    assert group_samples(["a/x.fq", "b/x.fq"], [])[1] == [("b/x.fq", "a/x.fq")]
    # The second lane lacks its second mates.
    files = ["A_L001_R1.fq", "A_L001_R2.fq", "A_L002_R1.fq"]
    assert group_samples(files, joined(find_mates(files)))[1] == [(files[2], files[0])]


def test_index_reads_need_files_of_mates_or_a_lane_beside_them() -> None:
    assert find_mates(["plot_I1.fq", "plot_I2.fq"]).left_out == {}
    assert set(find_mates(["A_I1.fq", "A_R1.fq"]).left_out) == {"A_I1.fq"}


# --- Any name of the grammar ----------------------------------------------------------------------

MARKS = [("R1", "R2"), ("r1", "r2"), ("1", "2"), ("fwd", "rev"), ("1P", "2P"), ("val_1", "val_2")]
MARKS += [("read1", "read2"), ("pair1", "pair2"), ("mate1", "mate2"), ("unmapped_1", "unmapped_2")]
TAILS = ["", "001", "trimmed", "fastp", "L003", "trim-20", "clean", "dedup.q20", "kneaddata"]
SAMPLE_WORDS = ["lung", "P7", "2024", "rep1", "1", "2", "x", "S12", "H3N2", "barcode07", "NTC"]


def compose(rng: random.Random) -> tuple[str, str]:
    """Return the names of two mates of a random sample."""
    sample = "".join(rng.choice(SAMPLE_WORDS) + rng.choice("_.-") for _ in range(rng.randint(1, 3)))
    lane = rng.choice(["", "", "L001_", "S3_L002_"])
    first_mark, second_mark = rng.choice(MARKS)
    tail = rng.choice(TAILS)
    if first_mark == "1" and tail == "001":
        tail = ""
    end = (rng.choice("_.") + tail if tail else "") + rng.choice([".fq", ".fastq.gz", ".fastq"])
    head = f"{sample}{lane}"
    return f"{head}{first_mark}{end}", f"{head}{second_mark}{end}"


def test_both_mates_of_any_name_are_one_sample_in_any_order() -> None:
    rng = random.Random(7)
    for _ in range(1_000):
        first, second = compose(rng)
        for files in ([first, second], [second, first]):
            assert joined(find_mates(files)) == [(first, second)], "mates are never exchanged"
            samples, clashes = group_samples(files, [(first, second)])
            assert ([sample.pairs for sample in samples], clashes) == ([[(first, second)]], [])


def test_mates_of_many_samples_in_one_folder_are_not_mixed() -> None:
    rng = random.Random(11)
    for _ in range(100):
        mark, tail = rng.choice(MARKS), rng.choice(TAILS)
        end = f"_{tail}.fq" if tail else ".fq"
        pairs = []
        for number in range(1, rng.randint(3, 12)):
            sample = f"patient_{number}"
            pairs.append((f"{sample}_{mark[0]}{end}", f"{sample}_{mark[1]}{end}"))
        files = [file for pair in pairs for file in pair]
        rng.shuffle(files)
        assert sorted(joined(find_mates(files))) == sorted(pairs)
        samples, clashes = group_samples(files, pairs)
        assert (len(samples), clashes) == (len(pairs), [])


def test_mates_lie_in_one_folder(tmp_path: Path) -> None:
    assert find_mates([str(tmp_path / "a/x_R1.fq"), str(tmp_path / "b/x_R2.fq")]).pairs == ()
