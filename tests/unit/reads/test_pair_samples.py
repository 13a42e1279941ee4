"""Samples of pairs: mates stay together, whatever their files and reads are called."""

from __future__ import annotations

import gzip
import logging
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnuc.flows.cli import main
from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.drawn import draw_subset
from virnuc_core.reads.fast_parser import ParseLog
from virnuc_core.reads.mate_files import detect_pairs
from virnuc_core.reads.pairs import pair_batches
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sampling import sample
from virnuc_core.reads.sources import find_inputs
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.rundir import RunDir

from .made_up import Pairs as Records  # header and bases of each read
from .made_up import fastq

MatePairs = list[tuple[tuple[str, str], tuple[str, str]]]  # header and bases of both mates
# How the ids of mates tell them apart: the headers of a first and a second mate.
ID_STYLES = (
    ("{}", "{}"),
    ("{}/1", "{}/2"),
    ("{} 1:N:0:ACGT", "{} 2:N:0:ACGT"),
    ("{}.1 length=5", "{}.2 length=5"),
    ("{}_1", "{}_2"),
    ("{}:1", "{}:2"),
)
# Names of mate files that tools write, some of which need a look at the ids.
FILE_STYLES = (
    ("A_S1_L001_R1_001.fastq.gz", "A_S1_L001_R2_001.fastq.gz"),
    ("A_1.fq", "A_2.fq"),
    ("A_R1_val_1.fq.gz", "A_R2_val_2.fq.gz"),
    ("A_1P.fastq", "A_2P.fastq"),
    ("A.pair1.truncated", "A.pair2.truncated"),
    ("A_Fwd.fq", "A_Rev.fq"),
    ("A-R1.fastq", "A-R2.fastq"),
)


def write_file(path: Path, records: Records) -> str:
    """Write FASTQ, gzipped if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = fastq(records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def read_file(path: Path) -> Records:
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    return [(lines[at][1:], lines[at + 1]) for at in range(0, len(lines), 4)]


def make_pairs(n: int, style: tuple[str, str] = ("{}", "{}"), seed: int = 0) -> MatePairs:
    """Make pairs whose mates have random lengths."""
    rng = random.Random(seed)
    pairs = []
    for number in range(n):
        first, second = (
            (mark.format(f"r{number}"), "".join(rng.choices("ACGT", k=rng.randrange(1, 40))))
            for mark in style
        )
        pairs.append((first, second))
    return pairs


def interleave(pairs: MatePairs) -> Records:
    return [record for pair in pairs for record in pair]


def write_two(folder: Path, names: tuple[str, str], pairs: MatePairs) -> list[str]:
    """Write a file of first mates and a file of second mates."""
    return [
        write_file(folder / name, [pair[side] for pair in pairs]) for side, name in enumerate(names)
    ]


def read_pairs(folder: Path, name: str = "out", ending: str = ".fq") -> MatePairs:
    """Read the two files of a sample, which have equally many reads."""
    firsts, seconds = (read_file(folder / f"{name}_R{mate}{ending}") for mate in (1, 2))
    return list(zip(firsts, seconds, strict=True))


def count_again(reads: ReadsSpec) -> tuple[int, int]:
    """Read a sample as a run reads it, and return the numbers of pairs and reads."""
    inputs = detect_pairs(reads, find_inputs(reads.all_inputs))
    log = ParseLog(reads.on_error)
    n_pairs = sum(int(batch.follows_mate.sum()) for batch in pair_batches(inputs, log))
    for _ in parse(inputs.singles, log):
        pass
    return n_pairs, log.n_reads


def stage_again(reads: ReadsSpec, folder: Path) -> StageSummary:
    """Read a sample as a run reads it."""
    return stage(StageSpec(**reads.model_dump()), folder / "orfs.h5")


@given(
    st.sampled_from(ID_STYLES),
    st.sampled_from(FILE_STYLES),
    st.integers(1, 60),
    st.integers(0, 8),
    st.integers(2, 150),
    st.sampled_from(["folder", "options", "names"]),
)
@settings(max_examples=20, deadline=None)
def test_mates_in_two_files_stay_together_in_any_convention(
    tmp_path_factory: pytest.TempPathFactory,
    id_style: tuple[str, str],
    file_style: tuple[str, str],
    n_pairs: int,
    n_singles: int,
    n: int,
    given_as: str,
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    pairs = make_pairs(n_pairs, id_style)
    singles = [(f"single{number}", "ACGTA") for number in range(n_singles)]
    first, second = write_two(folder / "in", file_style, pairs)
    others = [write_file(folder / "in" / "other.fq", singles)] if singles else []
    spec = {
        "folder": ReadsSpec(reads=(str(folder / "in"),)),
        "options": ReadsSpec(mates_1=(first,), mates_2=(second,), reads=tuple(others)),
        "names": ReadsSpec(reads=(first, second, *others)),
    }[given_as]

    summary = sample(spec, n, folder / "out.fq")

    drawn = read_pairs(folder)
    orphans_path = folder / "out_orphans.fq"
    orphans = read_file(orphans_path) if orphans_path.exists() else []
    assert drawn == [pair for pair in pairs if pair in drawn], "whole pairs, in order, unchanged"
    assert orphans == [single for single in singles if single in orphans]
    n_reads = 2 * n_pairs + n_singles
    n_drawn = 2 * len(drawn) + len(orphans)
    assert n_drawn == summary.reads_after
    assert n_drawn in ({n_reads} if n >= n_reads else {n, n - 1})
    assert (summary.pairs_before, summary.pairs_after) == (n_pairs, len(drawn))
    # What was written is read as the same pairs again.
    assert count_again(summary.reads) == (len(drawn), n_drawn)


@given(st.sampled_from(ID_STYLES), st.integers(1, 60), st.integers(2, 130), st.integers(0, 9))
@settings(max_examples=12, deadline=None)
def test_interleaved_mates_stay_next_to_each_other(
    tmp_path_factory: pytest.TempPathFactory,
    id_style: tuple[str, str],
    n_pairs: int,
    n: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    pairs = make_pairs(n_pairs, id_style, seed)
    spec = ReadsSpec(reads=(write_file(folder / "mixed.fq", interleave(pairs)),), interleaved=True)
    summary = sample(spec, n, folder / "out.fq.gz", seed)
    records = read_file(folder / "out.fq.gz")
    drawn = list(zip(records[::2], records[1::2], strict=True))
    assert drawn == [pair for pair in pairs if pair in drawn]
    assert len(drawn) == min(n // 2, n_pairs)
    assert summary.files == (folder / "out.fq.gz",)
    assert count_again(summary.reads) == (len(drawn), 2 * len(drawn))


def test_two_files_and_one_interleaved_file_give_the_same_pairs(tmp_path: Path) -> None:
    pairs = make_pairs(100)
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), pairs)
    mixed = write_file(tmp_path / "mixed.fq", interleave(pairs))
    sample(ReadsSpec(mates_1=(first,), mates_2=(second,)), 30, tmp_path / "out.fq", 5)
    sample(ReadsSpec(reads=(mixed,), interleaved=True), 30, tmp_path / "mixed_out.fq", 5)
    assert interleave(read_pairs(tmp_path)) == read_file(tmp_path / "mixed_out.fq")


def test_several_lanes_are_one_sample(tmp_path: Path) -> None:
    pairs = make_pairs(40)
    for lane in (1, 2):
        names = (f"A_S1_L00{lane}_R1_001.fq.gz", f"A_S1_L00{lane}_R2_001.fq.gz")
        write_two(tmp_path / "in", names, pairs[lane - 1 :: 2])
    write_file(tmp_path / "in" / "A_S1_L001_I1_001.fq.gz", [("index", "ACGT")])
    summary = sample(ReadsSpec(reads=(str(tmp_path / "in"),)), 20, tmp_path / "out.fq.gz")
    assert (summary.pairs_after, summary.reads_after) == (10, 20)
    drawn = read_pairs(tmp_path, ending=".fq.gz")
    assert all(first[0] == second[0] for first, second in drawn)


@pytest.mark.parametrize(
    ("n", "expected"), [(2, (1, 0)), (3, (1, 0)), (20, (10, 0)), (21, (10, 0)), (999, (50, 0))]
)
def test_of_an_odd_number_one_read_is_left_out(
    tmp_path: Path, n: int, expected: tuple[int, int]
) -> None:
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), make_pairs(50))
    summary = sample(ReadsSpec(mates_1=(first,), mates_2=(second,)), n, tmp_path / "out.fq")
    n_pairs, n_orphans = expected
    assert (summary.pairs_after, summary.reads_after) == (n_pairs, 2 * n_pairs + n_orphans)


def test_one_read_of_pairs_is_refused(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), make_pairs(50))
    with pytest.raises(ConfigError, match="a pair has two; request 2 or more"):
        sample(ReadsSpec(mates_1=(first,), mates_2=(second,)), 1, tmp_path / "out.fq")
    assert not list(tmp_path.glob("out*"))


def test_pairs_and_single_reads_are_drawn_in_proportion(tmp_path: Path) -> None:
    write_two(tmp_path / "in", ("a_R1.fq", "a_R2.fq"), make_pairs(300))
    write_file(tmp_path / "in" / "other.fq", [(f"s{number}", "ACGT") for number in range(200)])
    summary = sample(ReadsSpec(reads=(str(tmp_path / "in"),)), 80, tmp_path / "out.fq")
    assert (summary.pairs_after, summary.reads_after) == (30, 80)


def test_the_lengths_of_both_mates_are_those_of_the_whole(tmp_path: Path) -> None:
    """A draw that looks at first mates only has a distance of 0.06 for second mates here."""
    rng = random.Random(7)
    pairs: MatePairs = []
    for number in range(4000):
        first, second = ((f"r{number}", "A" * rng.randrange(30, 151)) for _ in range(2))
        pairs.append((first, second))
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), pairs)
    summary = sample(ReadsSpec(mates_1=(first,), mates_2=(second,)), 800, tmp_path / "out.fq")
    assert summary.distance < 0.015
    drawn = read_pairs(tmp_path)
    for side in (0, 1):
        before = sorted(len(pair[side][1]) for pair in pairs)
        after = sorted(len(pair[side][1]) for pair in drawn)
        # The quantiles of both differ by little.
        differences = [abs(before[10 * at] - length) for at, length in enumerate(after)]
        assert max(differences) <= 4


def test_equal_seeds_draw_equal_pairs(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), make_pairs(200))
    spec = ReadsSpec(mates_1=(first,), mates_2=(second,))
    drawn = {}
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        sample(spec, 40, tmp_path / f"{name}.fq", seed)
        drawn[name] = read_pairs(tmp_path, name)
    assert drawn["x"] == drawn["y"] != drawn["z"]


@pytest.mark.parametrize("damage", ["order", "shorter", "swapped", "orphan"])
def test_mates_out_of_step_are_the_error_of_a_run(tmp_path: Path, damage: str) -> None:
    pairs = make_pairs(30, ("{}/1", "{}/2"))
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    spec = ReadsSpec(mates_1=("a_R1.fq",), mates_2=("a_R2.fq",))
    match damage:
        case "order":
            seconds[3], seconds[9] = seconds[9], seconds[3]
        case "shorter":
            seconds = seconds[:-4]
        case "swapped":
            firsts, seconds = seconds, firsts
        case "orphan":
            spec = ReadsSpec(reads=("mixed.fq",), interleaved=True)
    write_file(tmp_path / "a_R1.fq", firsts)
    write_file(tmp_path / "a_R2.fq", seconds)
    write_file(
        tmp_path / "mixed.fq", [record for record in interleave(pairs) if record != firsts[4]]
    )
    paths = {
        use: tuple(str(tmp_path / name) for name in getattr(spec, use))
        for use in ("mates_1", "mates_2", "reads")
    }
    spec = spec.model_copy(update=paths)
    with pytest.raises(InputError) as of_sample:
        sample(spec, 10, tmp_path / "out.fq")
    with pytest.raises(InputError) as of_run:
        stage_again(spec, tmp_path)
    assert str(of_sample.value) == str(of_run.value)
    assert not list(tmp_path.glob("out*"))


def test_orphans_are_drawn_apart_if_broken_records_are_skipped(tmp_path: Path) -> None:
    pairs = make_pairs(30)
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), pairs)
    write_file(tmp_path / "a_R2.fq", [mate for _, mate in pairs if mate[0] not in ("r3", "r20")])
    spec = ReadsSpec(mates_1=(first,), mates_2=(second,), on_error="skip")
    summary = sample(spec, 99, tmp_path / "out.fq")
    assert summary.pairs_after == 28
    assert [header for header, _ in read_file(tmp_path / "out_orphans.fq")] == ["r3", "r20"]
    # Without orphans, the file of an earlier sample does not stay beside the new one.
    write_file(tmp_path / "a_R2.fq", [mate for _, mate in pairs])
    sample(spec, 10, tmp_path / "out.fq", force=True)
    assert not (tmp_path / "out_orphans.fq").exists()


def test_no_file_of_a_sample_replaces_another_without_force(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), make_pairs(30))
    (tmp_path / "out_R2.fq").write_text("precious")
    spec = ReadsSpec(mates_1=(first,), mates_2=(second,))
    with pytest.raises(ConfigError, match=r"out_R2\.fq would be overwritten"):
        sample(spec, 10, tmp_path / "out.fq")
    with pytest.raises(ConfigError, match="the reads are drawn from this file"):
        sample(spec, 10, tmp_path / "a.fq", force=True)
    assert (tmp_path / "out_R2.fq").read_text() == "precious"
    assert not (tmp_path / "out_R1.fq").exists()


def test_without_pairs_each_read_is_drawn_by_itself(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, ("a_R1.fq", "a_R2.fq"), make_pairs(30, ("{}/1", "{}/2")))
    spec = ReadsSpec(mates_1=(first,), mates_2=(second,), pairs=False)
    summary = sample(spec, 7, tmp_path / "out.fq")
    assert (summary.reads_after, summary.pairs_before) == (7, 0)
    assert len(read_file(tmp_path / "out.fq")) == 7


def test_mates_that_are_left_behind_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = make_pairs(30)
    first, _ = write_two(tmp_path, ("a_1.fq", "a_2.fq"), pairs)
    mixed = write_file(tmp_path / "mixed.fq", interleave(make_pairs(9, ("{}/1", "{}/2"))))
    with caplog.at_level(logging.WARNING):
        sample(ReadsSpec(reads=(first,)), 5, tmp_path / "out.fq")
        sample(ReadsSpec(reads=(mixed,)), 5, tmp_path / "mixed_out.fq")
    mates_beside, interleaved = caplog.messages
    assert mates_beside == (
        f"{first}: its mates are in {tmp_path / 'a_2.fq'}; -1 and -2 draw both files together"
    )
    assert interleaved.startswith(f"{mixed}: mates seem to follow each other")


def test_a_file_beside_a_sample_cannot_hinder_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What looks like the mates of a file is no input: it may be anything."""
    first, second = write_two(tmp_path / "outside", ("a_R1.fq", "a_R2.fq"), make_pairs(30))
    inside = tmp_path / "inside"
    inside.mkdir()
    Path(first).rename(inside / "a_R1.fq")
    (inside / "a_R2.fq").symlink_to(second)
    monkeypatch.setenv("VIRNUC_ROOTS", str(inside))
    sample(ReadsSpec(reads=(str(inside / "a_R1.fq"),)), 5, inside / "out.fq")
    assert not caplog.messages
    (inside / "a_R2.fq").unlink()
    os.mkfifo(inside / "a_R2.fq")  # opening it would wait for ever
    sample(ReadsSpec(reads=(str(inside / "a_R1.fq"),)), 5, inside / "out.fq", force=True)
    assert not caplog.messages


def test_the_command_takes_mates_as_predict_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = make_pairs(40)
    first, second = write_two(tmp_path, ("a_1.fq", "a_2.fq"), pairs)
    mixed = write_file(tmp_path / "mixed.fq", interleave(pairs))
    for words in (["-1", first, "-2", second], [first, second], ["--interleaved", mixed]):
        out = tmp_path / "out.fq"
        assert main(["sample", *words, "-n", "11", "-o", str(out), "--seed", "4", "--force"]) == 0
        assert "10 of 80 reads (5 of 40 pairs)" in capsys.readouterr().out
    drawn = read_file(tmp_path / "out.fq")
    assert interleave(read_pairs(tmp_path)) == drawn
    assert main(["sample", "-1", first, "-n", "2", "-o", str(tmp_path / "x.fq")]) == 2
    assert "-1 names 1 files, -2 0" in capsys.readouterr().err
    assert main(["sample", "-n", "2", "-o", str(tmp_path / "x.fq")]) == 2
    assert "none are named" in capsys.readouterr().err


# --- Subsets that a flow draws ---


def run_in(folder: Path) -> RunDir:
    run = RunDir(folder)
    run.root.mkdir()
    return run


@pytest.mark.parametrize("given_as", ["options", "folder", "interleaved"])
def test_a_subset_of_pairs_is_drawn_once(tmp_path: Path, given_as: str) -> None:
    pairs = make_pairs(60)
    first, second = write_two(tmp_path / "in", ("lung_R1.fq.gz", "lung_R2.fq.gz"), pairs)
    mixed = write_file(tmp_path / "mixed.fq", interleave(pairs))
    spec = {
        "options": ReadsSpec(mates_1=(first,), mates_2=(second,)),
        "folder": ReadsSpec(reads=(str(tmp_path / "in"),)),
        "interleaved": ReadsSpec(reads=(mixed,), interleaved=True),
    }[given_as]
    run = run_in(tmp_path / "out")
    drawn = draw_subset(run, spec, 20, 0, force=False)
    assert "20 of 120 reads (10 of 60 pairs) drawn" in drawn.description
    again = draw_subset(run, spec, 20, 0, force=False)
    assert (drawn.reused, again.reused) == (False, True)
    assert again.reads == drawn.reads
    assert stage_again(again.reads, tmp_path).n_pairs == 10
    # Both files are watched: what was changed is drawn again.
    last_file = Path(drawn.reads.all_inputs[-1])
    content = last_file.read_bytes()
    last_file.write_bytes(b"cut off")
    assert not draw_subset(run, spec, 20, 0, force=False).reused
    assert last_file.read_bytes() == content


@pytest.mark.parametrize("change", ["second file", "roles", "no pairs"])
def test_a_subset_of_pairs_is_drawn_again_where_anything_is_another(
    tmp_path: Path, change: str
) -> None:
    first, second = write_two(tmp_path, ("lung_R1.fq", "lung_R2.fq"), make_pairs(60))
    spec = ReadsSpec(mates_1=(first,), mates_2=(second,))
    run = run_in(tmp_path / "out")
    draw_subset(run, spec, 20, 0, force=False)
    match change:
        case "second file":
            os.utime(second, ns=(0, 0))
        case "roles":
            spec = ReadsSpec(reads=(first, second))
        case "no pairs":
            spec = spec.model_copy(update={"pairs": False})
    assert not draw_subset(run, spec, 20, 0, force=False).reused


def test_files_named_one_by_one_are_pairs_in_a_subset_as_in_a_run(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, ("lung_R1.fq", "lung_R2.fq"), make_pairs(60))
    spec = ReadsSpec(reads=(first, second))
    drawn = draw_subset(run_in(tmp_path / "out"), spec, 9, 0, force=True)
    assert drawn.description.startswith("8 of 120 reads (4 of 60 pairs) drawn")
    assert len(drawn.reads.mates_1) == len(drawn.reads.mates_2) == 1
    single = spec.model_copy(update={"pairs": False})
    drawn = draw_subset(run_in(tmp_path / "single"), single, 9, 0, force=True)
    assert drawn.description.startswith("9 of 120 reads drawn")
    assert drawn.reads == ReadsSpec(reads=(str(tmp_path / "single" / "drawn" / "lung.subset.gz"),))


# --- Inputs that failed once ---


@pytest.fixture
def cases() -> Path:
    """Folder of pairs that a sample once parted: `../shared/cases` beside the checkout."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "cases"
    if not (folder / "sample-of-pairs").is_dir():
        pytest.skip("the cases are not in ../shared/cases")
    return folder


def test_a_sample_of_the_cases_keeps_mates_together(cases: Path, tmp_path: Path) -> None:
    folder = cases / "sample-of-pairs"
    two = ReadsSpec(mates_1=(str(folder / "sp_1.fq"),), mates_2=(str(folder / "sp_2.fq"),))
    sample(two, 50, tmp_path / "out.fq")
    drawn = read_pairs(tmp_path)
    assert len(drawn) == 25
    assert all(first[0].split()[0] == second[0].split()[0] for first, second in drawn)
    mixed = ReadsSpec(reads=(str(folder / "sp_i.fq"),), interleaved=True)
    sample(mixed, 50, tmp_path / "mixed.fq")
    names = [header[:-2] for header, _ in read_file(tmp_path / "mixed.fq")]
    assert len(names) == 50
    assert names[::2] == names[1::2]
