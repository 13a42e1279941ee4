"""Results joined by id: whatever the order, the columns, the ids on one side only; and never apples with pears."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc.flows.cli import main
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.agreement import RowPair, agreement, meets
from virnuc_core.report.compare import compare
from virnuc_core.report.result_tables import (
    derive_consensus,
    load_results,
    result_files,
    take_results,
)
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import write
from virnuc_core.validation import BaselineSubset, BaselineSummary

FRAMES_HEAD = "Sequence_ID\tPrediction\tscore1\tscore2\n"
Row = tuple[str, float]  # id and score of virus


def frames(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{name}\t{'virus' if s > 1 - s else 'others'}\t{1 - s!r}\t{s!r}\n" for name, s in rows
    ]
    path.write_text(FRAMES_HEAD + "".join(lines), encoding="utf-8")
    return path


def consensus2(path: Path, rows: list[tuple[str, bool]]) -> Path:
    path.write_text(
        "Modified_ID\tIs_Virus\n" + "".join(f"{n}\t{v}\n" for n, v in rows), encoding="utf-8"
    )
    return path


def run_dir(folder: Path, rows: list[Row], **record: object) -> Path:
    frames(folder / "prediction_results.txt", rows)
    if record:
        (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


ROWS: list[Row] = [
    ("r1_chunk_1F1", 0.9),
    ("r1_chunk_1R2", 0.2),
    ("r2_chunk_1F3", 0.4),
    ("r3_chunk_1F1", 0.7),
]


def test_order_does_not_matter(tmp_path: Path) -> None:
    shuffled_rows = ROWS[:]
    random.Random(3).shuffle(shuffled_rows)
    comparison = compare(
        frames(tmp_path / "a.txt", ROWS), frames(tmp_path / "b.txt", shuffled_rows)
    )
    assert comparison.frames is not None
    assert (comparison.frames.agreement, comparison.frames.agreeing, comparison.frames.in_both) == (
        1.0,
        4,
        4,
    )
    assert comparison.frames.score is not None
    assert comparison.frames.score.max == 0
    assert meets(comparison, 1.0)


@pytest.mark.parametrize(("version", "is_told"), [(1, False), (2, True)])
def test_results_of_another_version_are_told_before_they_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, is_told: bool
) -> None:
    """A record without a version is of the first one."""
    old = run_dir(tmp_path / "old", ROWS, fingerprints={"reads": "a"})
    new = run_dir(tmp_path / "new", ROWS, fingerprints={"reads": "a"}, results_version=version)
    compare(old, new)
    assert ("old and new have results of the versions 1 and 2" in caplog.text) == is_told


def test_ids_of_one_side_are_disagreements(tmp_path: Path) -> None:
    comparison = compare(
        frames(tmp_path / "a.txt", ROWS),
        frames(tmp_path / "b.txt", [*ROWS[:2], ("r9_chunk_1F1", 0.5)]),
        mode="frame",
    ).frames
    assert comparison is not None
    assert (comparison.in_both, comparison.only_in_a, comparison.only_in_b) == (2, 2, 1)
    assert comparison.agreement == pytest.approx(2 / 5)
    assert "r9_chunk_1F1: only in b" in comparison.examples


def test_labels_that_differ_are_named(tmp_path: Path) -> None:
    changed_rows = [*ROWS[:3], ("r3_chunk_1F1", 0.45)]
    comparison = compare(frames(tmp_path / "a.txt", ROWS), frames(tmp_path / "b.txt", changed_rows))
    assert comparison.frames is not None
    assert comparison.frames.examples == ("r3_chunk_1F1: virus / others",)
    assert comparison.frames.score is not None
    assert comparison.frames.score.max == pytest.approx(0.25)
    assert comparison.frames.score.share_within_tolerance == 0.75
    assert not comparison.frames.score.allclose
    assert comparison.consensus is not None
    assert comparison.consensus.agreement == pytest.approx(2 / 3)
    assert not meets(comparison, 0.99)


def test_agreement_is_told_by_class_and_near_the_threshold(tmp_path: Path) -> None:
    rows = [("a_chunk_1F1", 0.9), ("b_chunk_1F1", 0.53), ("c_chunk_1F1", 0.2), ("d_chunk_1F1", 0.1)]
    other_rows = [
        ("a_chunk_1F1", 0.9),
        ("b_chunk_1F1", 0.49),
        ("c_chunk_1F1", 0.2),
        ("e_chunk_1F1", 0.99),
    ]
    labels = compare(
        frames(tmp_path / "a.txt", rows), frames(tmp_path / "b.txt", other_rows)
    ).frames
    assert labels is not None
    agreements = {
        name: (label_class.ids, label_class.agreeing)
        for name, label_class in labels.classes.items()
    }
    assert agreements == {"viral": (3, 1), "non-viral": (2, 1), "near threshold": (1, 0)}
    assert (
        sum(label_class.agreeing for label_class in list(labels.classes.values())[:2])
        == labels.agreeing
    )


def test_the_strict_score_test_is_a_thousandth(tmp_path: Path) -> None:
    for shift, close in ((0.0009, True), (0.01, False)):
        shifted_rows = [(name, score + shift) for name, score in ROWS]
        labels = compare(
            frames(tmp_path / "a.txt", ROWS), frames(tmp_path / "b.txt", shifted_rows)
        ).frames
        assert labels is not None
        assert labels.score is not None
        assert labels.score.allclose is close


def test_vanilla_and_successor_files_are_read_alike(tmp_path: Path) -> None:
    two = consensus2(tmp_path / "two.csv", [("r2_chunk_1", False), ("r1_chunk_1", True)])
    four = tmp_path / "four.csv"
    four.write_text(
        "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\nr1_chunk_1\tTrue\t0.1\t0.9\nr2_chunk_1\tFalse\t0.6\t0.4\n",
        encoding="utf-8",
    )
    comparison = compare(two, four, mode="consensus").consensus
    assert comparison is not None
    assert comparison.agreement == 1.0
    assert comparison.score is None, "two columns have no scores"
    assert compare(four, four).consensus.score.max == 0  # type: ignore[union-attr]


def test_a_consensus_file_against_a_run_directory(tmp_path: Path) -> None:
    two = consensus2(
        tmp_path / "two.csv", [("r1_chunk_1", True), ("r2_chunk_1", False), ("r3_chunk_1", True)]
    )
    comparison = compare(two, run_dir(tmp_path / "run", ROWS))
    assert comparison.frames is None
    assert comparison.consensus is not None
    assert comparison.consensus.agreement == 1.0


def test_shortest_and_widened_scores_are_the_same(tmp_path: Path) -> None:
    value = np.float32(0.12100612)
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(f"{FRAMES_HEAD}x_chunk_1F1\tothers\t{1 - value!s}\t{value!s}\n", encoding="utf-8")
    b.write_text(
        f"{FRAMES_HEAD}x_chunk_1F1\tothers\t{float(1 - value)!r}\t{float(value)!r}\n",
        encoding="utf-8",
    )
    labels = compare(a, b).frames
    assert labels is not None
    assert labels.score is not None
    assert labels.score.max < 1e-8


def test_a_tie_of_the_chunk_is_a_virus(tmp_path: Path) -> None:
    votes = derive_consensus(
        load_results(frames(tmp_path / "a.txt", [("x_chunk_1F1", 0.5), ("y_chunk_1F1", 0.49)]))
    )
    assert votes["id"].tolist() == ["x_chunk_1", "y_chunk_1"]
    assert votes["virus"].tolist() == [True, False]


def test_ids_that_look_like_nothing_stay_ids(tmp_path: Path) -> None:
    rows = [("NA", 0.9), ("nan", 0.1), ("#N/A", 0.8), ('"q', 0.3), ("id with spaces", 0.3)]
    results = load_results(frames(tmp_path / "a.txt", rows))
    assert results["id"].tolist() == [name for name, _ in rows]


def test_ids_that_stand_twice_are_joined_one_to_one_if_both_sides_have_all_of_them(
    tmp_path: Path,
) -> None:
    """In a file alone nothing tells which of two reads with one id a single row belongs to."""
    x1, x2, y = ("x_chunk_1F1", 0.9), ("x_chunk_1F1", 0.1), ("y_chunk_1F1", 0.9)
    expected = {
        (y, x1, x2): (3, 3, 0, 0),
        (y, x2, x1): (3, 1, 0, 0),  # the first is held against the first
        (y, x2): (1, 1, 2, 1),
        (y, x1): (1, 1, 2, 1),
        (y,): (1, 1, 2, 0),
        (y, x1, x2, x2): (1, 1, 2, 3),
    }
    for rows, counts in expected.items():
        found = compare(
            frames(tmp_path / "a.txt", [x1, x2, y]),
            frames(tmp_path / "b.txt", list(rows)),
            mode="frame",
        ).frames
        assert found is not None
        assert (found.in_both, found.agreeing, found.only_in_a, found.only_in_b) == counts, rows


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.booleans(), max_size=12),
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.booleans(), max_size=12),
)
def test_agreement_is_that_of_the_slow_count(a: dict[str, bool], b: dict[str, bool]) -> None:
    import pandas as pd

    left_rows, right = (
        pd.DataFrame({"id": pd.Series(list(d), dtype="str"), "virus": list(d.values())})
        for d in (a, b)
    )
    labels = agreement([RowPair(left_rows, right)], 0.01)
    all_ids = a.keys() | b.keys()
    same = sum(a.get(name) == b.get(name) for name in all_ids)
    assert labels.total == len(all_ids)
    assert labels.agreeing == same
    assert labels.agreement == (same / len(all_ids) if all_ids else None)


def test_results_read_in_pieces_agree_as_results_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"r{number}_chunk_1F1", number / 20) for number in range(20)]
    for place, other_run in enumerate(
        (rows, rows[:9] + rows[10:] + rows[9:10], rows[3:], [*rows[:7], ("x_chunk_1F1", 0.5)])
    ):
        a, b = (
            frames(tmp_path / "a.txt", rows),
            frames(tmp_path / f"{place}.txt", [(n, s / 2) for n, s in other_run]),
        )
        full_comparison = compare(a, b)
        monkeypatch.setattr("virnuc_core.report.result_tables.BLOCK_LINES", 3)
        assert compare(a, b) == full_comparison
        monkeypatch.undo()


def test_two_empty_results_agree_on_nothing(tmp_path: Path) -> None:
    comparison = compare(frames(tmp_path / "a.txt", []), frames(tmp_path / "b.txt", []))
    assert comparison.frames is not None
    assert comparison.frames.agreement is None
    assert not meets(comparison, 0.0)


def test_a_subset_is_compared_over_its_reads_only(tmp_path: Path) -> None:
    part = [("r1_chunk_1F1", 0.9), ("r1_chunk_1R2", 0.2)]
    small, full_run = run_dir(tmp_path / "small", part), run_dir(tmp_path / "whole", ROWS)
    comparison = compare(small, full_run, subset_of_a=True)
    assert comparison.subset_reads == 1
    assert comparison.frames is not None
    assert (comparison.frames.total, comparison.frames.agreement) == (2, 1.0)
    assert comparison.consensus is not None
    assert comparison.consensus.total == 1


def test_a_subset_that_was_staged_apart_is_compared_all_the_same(tmp_path: Path) -> None:
    other_record = {**RECORD, "fingerprints": {"head": "h" * 64, "reads": "y" * 64}}
    small, full_run = (
        run_dir(tmp_path / "small", ROWS[:2], **other_record),
        run_dir(tmp_path / "whole", ROWS, **RECORD),
    )
    comparison = compare(small, full_run, subset_of_a=True).frames
    assert comparison is not None
    assert (comparison.total, comparison.agreement) == (2, 1.0)


def test_a_row_missing_within_the_subset_still_counts(tmp_path: Path) -> None:
    small, full_run = run_dir(tmp_path / "small", ROWS[:1]), run_dir(tmp_path / "whole", ROWS)
    comparison = compare(small, full_run, subset_of_a=True).frames
    assert comparison is not None
    assert (comparison.only_in_b, comparison.agreement) == (1, 0.5)


def test_the_reads_table_says_what_the_subset_is(tmp_path: Path) -> None:
    small, full_run = run_dir(tmp_path / "small", ROWS[:2]), run_dir(tmp_path / "whole", ROWS)
    (small / "reads.tsv").write_text("id\tlength\nr1\t100\nr3\t100\n", encoding="utf-8")
    comparison = compare(small, full_run, subset_of_a=True).frames
    assert comparison is not None
    assert comparison.only_in_b == 1, "r3 was to be done and has no row"


RECORD = {"model_length": 500, "fingerprints": {"head": "h" * 64, "reads": "r" * 64}}


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({**RECORD, "model_length": 300}, "model length"),
        ({**RECORD, "fingerprints": {"head": "x" * 64, "reads": "r" * 64}}, "head"),
        ({**RECORD, "fingerprints": {"head": "h" * 64, "reads": "y" * 64}}, "reads"),
    ],
)
def test_unlike_runs_are_refused_naming_what_differs(
    tmp_path: Path, other: dict, word: str
) -> None:
    a, b = run_dir(tmp_path / "a", ROWS, **RECORD), run_dir(tmp_path / "b", ROWS, **other)
    with pytest.raises(RunMismatchError, match=f"different {word}"):
        compare(a, b)
    with pytest.raises(RunMismatchError, match=f"different {word}"):
        compare(a / "prediction_results.txt", b)


def test_a_run_can_be_compared_with_a_file_of_unknown_origin(tmp_path: Path) -> None:
    a = run_dir(tmp_path / "a", ROWS, **RECORD)
    assert compare(a, frames(tmp_path / "b.txt", ROWS)).frames is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "neither Sequence_ID nor Modified_ID"),
        ("a,b\n1,2\n", "neither Sequence_ID nor Modified_ID"),
        ("Sequence_ID,Prediction,score1,score2\n", "neither"),
        ("Sequence_ID\tPrediction\n", "no column score1, score2"),
        (FRAMES_HEAD + "x\tvirus\tabc\t0.1\n", "not a table of results"),
        (FRAMES_HEAD + "x\tmaybe\t0.9\t0.1\n", "Prediction is 'maybe'"),
        ("Modified_ID\tIs_Virus\nx\tyes\n", "Is_Virus is 'yes'"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        compare(path, path)


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        compare(tmp_path / "none.txt", tmp_path / "none.txt")
    with pytest.raises(InputError, match="neither prediction_results"):
        compare(tmp_path, tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> OrfStore:
    """Two reads with open frames."""
    (tmp_path / "reads.fa").write_text(
        ">r1\n" + "ATGAAACCC" * 12 + "\n>r2\n" + "GCACATGGG" * 12 + "\n"
    )
    return OrfStore.open(
        stage(StageSpec(reads=(str(tmp_path / "reads.fa"),)), tmp_path / "orfs.h5").store
    )


def test_results_of_an_earlier_baseline_are_taken_and_those_of_other_reads_refused(
    tmp_path: Path, store: OrfStore
) -> None:
    ids, run = store.row_ids(0, store.n_rows), RunDir(tmp_path / "baseline")
    record = {"fingerprints": {"reads": store.fingerprint, "head": "h"}, "model_length": 500}
    given_run = run_dir(tmp_path / "given", [(name, 0.9) for name in reversed(ids)], **record)
    for _ in range(2):  # the second time from the place it is in
        take_results(given_run, run, store)
        assert run.predictions.read_bytes() == (given_run / run.predictions.name).read_bytes()
        given_run = run.root
    take_results(
        consensus2(tmp_path / "v1.csv", [("r1_chunk_1", True), ("r2_chunk_1", False)]), run, store
    )
    assert sorted(path.name for path in run.root.iterdir()) == [run.consensus.name], (
        "of the one before nothing stays"
    )
    for rows, message in (
        (ROWS, "1 of its 4 ids are not among"),
        ([(ids[0], 0.9)], "0 of its 1 ids .* ids of these"),
    ):
        with pytest.raises(InputError, match=f"results of other reads: {message}"):
            take_results(frames(tmp_path / "other.txt", rows), run, store)
    for other_record in (RECORD, {**record, "model_length": 300}):
        with pytest.raises(RunMismatchError, match="results of other"):
            take_results(run_dir(tmp_path / "given", ROWS, **other_record), run, store)
    assert run.consensus.is_file()


def test_nothing_in_common_is_said(tmp_path: Path) -> None:
    two = consensus2(tmp_path / "two.csv", [("r1_chunk_1", True)])
    with pytest.raises(InputError, match="no kind of result in common"):
        compare(two, frames(tmp_path / "a.txt", ROWS), mode="frame")


def test_a_score_that_is_no_number_is_near_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(FRAMES_HEAD + "x_chunk_1F1\tothers\tnan\tnan\n", encoding="utf-8")
    labels = compare(path, path).frames
    assert labels is not None
    assert labels.score is None


def test_consensus_scores_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(
        "Modified_ID\tIs_Virus\tmax_score_0\tmax_score_1\nx\tTrue\t0.25\t0.75\n", encoding="utf-8"
    )
    assert load_results(path)["score2"].tolist() == [0.75]


# --- A part of the reads, and the command's output for programs -----------------------------------


def subset_baseline(folder: Path, rows: list[Row]) -> Path:
    """Write the results of a baseline that was run on one of three reads."""
    run_dir(folder, rows, **RECORD)
    summary = BaselineSummary(
        name="v1", subset=BaselineSubset(reads=1, tokens=1, total_tokens=3), n_reads=3
    )
    write(folder / "summary.json", summary)
    return folder


def test_a_baseline_of_a_part_of_the_reads_is_compared_with_subset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = subset_baseline(tmp_path / "baseline", ROWS[:2])
    whole = run_dir(tmp_path / "whole", ROWS, **RECORD)
    for words in (
        (str(baseline), str(whole)),
        (str(baseline / "prediction_results.txt"), str(whole)),
    ):
        assert main(["compare", *words]) == 2
        error = capsys.readouterr().err
        assert "is a baseline of 1 of 3 reads; compare these with whole by --subset" in error
        assert main(["compare", *words, "--subset"]) == 0
        assert "In both:            2" in capsys.readouterr().out


def test_other_reads_are_refused_with_the_option_for_a_part_of_them(tmp_path: Path) -> None:
    other = {**RECORD, "fingerprints": {"head": "h" * 64, "reads": "y" * 64}}
    a, b = run_dir(tmp_path / "a", ROWS[:2], **other), run_dir(tmp_path / "b", ROWS, **RECORD)
    with pytest.raises(RunMismatchError, match="compare that part with --subset"):
        compare(a, b)
    other_head = {**RECORD, "fingerprints": {"head": "x" * 64, "reads": "y" * 64}}
    c = run_dir(tmp_path / "c", ROWS[:2], **other_head)
    with pytest.raises(RunMismatchError) as refusal:
        compare(c, b)
    assert "--subset" not in str(refusal.value), "it would not help"


def test_files_that_have_a_part_of_the_ids_are_compared_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part, whole = frames(tmp_path / "part.txt", ROWS[:2]), frames(tmp_path / "whole.txt", ROWS)
    assert main(["compare", str(part), str(whole)]) == 5
    assert "A has 2 of the 4 ids of B" in capsys.readouterr().err
    assert main(["compare", str(part), str(whole), "--subset"]) == 0
    assert capsys.readouterr().err == ""


def test_the_json_has_the_names_of_compare_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The expected values are those of `compare_predictions` in VirNucPro's plan for phase 6."""
    head = FRAMES_HEAD
    (tmp_path / "a.txt").write_text(head + "r_chunk_1F1\tvirus\t0.10\t0.90\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text(head + "r_chunk_1F1\tvirus\t0.15\t0.9001\n", encoding="utf-8")
    words = ["compare", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--mode", "frame"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["max_diff_score1"] == pytest.approx(0.05)
    assert values["max_diff_score2"] == pytest.approx(0.0001)
    names = ("match", "predictions_match", "score1_match", "score2_match", "num_sequences")
    assert [values[name] for name in names] == [False, True, False, True, 1]
    assert values["frames"]["score"]["max_diff_score1"] == values["max_diff_score1"]


def test_the_output_folder_of_virnucpro_is_taken_as_it_is(tmp_path: Path) -> None:
    """VirNucPro writes into `NAME_merged`; a second such folder with results is not guessed away."""
    merged = tmp_path / "sample_merged"
    merged.mkdir()
    (tmp_path / "other_merged").mkdir()  # an empty one is no choice
    with pytest.raises(InputError, match="neither prediction_results"):
        result_files(tmp_path)
    (merged / "prediction_results.txt").write_text("Sequence_ID\tPrediction\tscore1\tscore2\n")
    (merged / "prediction_results_highestscore.csv").write_text("Modified_ID\tIs_Virus\n")
    assert result_files(tmp_path) == {
        "frames": merged / "prediction_results.txt",
        "consensus": merged / "prediction_results_highestscore.csv",
    }
    (tmp_path / "other_merged" / "prediction_results.txt").write_text("x\n")
    with pytest.raises(InputError, match="other_merged, sample_merged all have results"):
        result_files(tmp_path)
