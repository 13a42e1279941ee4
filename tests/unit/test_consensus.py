"""The vote: one rule for results, exports, comparison and training.

Expected values come from a slow vote over exact fractions, written here from the rule in words.
"""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from virnuc_core import consensus
from virnuc_core.report.contigs import _chunk_votes, _contig_votes
from virnuc_core.report.result_tables import derive_consensus
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.training.evaluation import by_level

from .scored_reads import Frame, Read, make

STEPS = (
    256  # P(virus) in steps that float32 holds exactly, so that P(others) is exactly 1 - P(virus)
)
Scores = tuple[tuple[Fraction, ...], ...]  # of a read: P(virus) of the frames of each chunk

chunk_scores = st.lists(st.integers(0, STEPS), min_size=1, max_size=6)
read_scores = st.lists(chunk_scores, min_size=1, max_size=4)
all_scores = st.lists(read_scores, min_size=1, max_size=6).map(
    lambda reads: [
        tuple(tuple(Fraction(step, STEPS) for step in chunk) for chunk in read) for read in reads
    ]
)


def slow_margins(read: Scores) -> list[Fraction]:
    """Margin of each chunk: its largest P(virus) minus its largest P(others)."""
    return [max(chunk) - max(1 - score for score in chunk) for chunk in read]


def slow_score(read: Scores) -> Fraction:
    margins = slow_margins(read)
    return Fraction(1, 2) + sum(margins, Fraction(0)) / len(margins) / 2


def as_reads(all_reads: list[Scores]) -> list[Read]:
    """Reads of a store, with P(others) and P(virus) of each frame."""
    reads = []
    for number, scored_read in enumerate(all_reads):
        frames = []
        for chunk, scores in enumerate(scored_read):
            for frame, score in enumerate(scores):
                frames.append(Frame(chunk, frame, (float(1 - score), float(score))))
        reads.append(Read(f"r{number}", 100 * len(scored_read), len(scored_read), tuple(frames)))
    return reads


def frame_table(all_reads: list[Scores]) -> pd.DataFrame:
    """One row per frame: read, chunk, frame and both scores."""
    rows = []
    for number, scored_read in enumerate(all_reads):
        for chunk, scores in enumerate(scored_read):
            for frame, score in enumerate(scores):
                rows.append((number, chunk, frame, float(1 - score), float(score)))
    return pd.DataFrame(rows, columns=["read", "chunk", "frame", "others", "virus"])


def results_table(folder: Path, all_reads: list[Scores], name: str) -> list[dict[str, str]]:
    scored_store = make(as_reads(all_reads))
    run = RunDir(folder)
    write_results(run, scored_store.store, scored_store.scores, scored_store.failed)
    path = folder / name
    delimiter = "\t"
    with path.open() as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def contig_votes(frames: pd.DataFrame, num_reads: int, bases: int = 1) -> pd.DataFrame:
    chunks = _chunk_votes(frames.assign(has_failed=False))
    return _contig_votes(chunks.assign(bases=bases), num_reads, threshold=0.5)


def training_scores(frames: pd.DataFrame, level: str) -> NDArray[np.float64]:
    rows = frames.assign(label=0, cluster=0)
    return by_level(rows, frames["virus"].to_numpy())[level]["score"].to_numpy()


@settings(max_examples=40, deadline=None)
@given(all_reads=all_scores)
def test_results_exports_comparison_and_training_agree_with_the_rule(
    tmp_path_factory: pytest.TempPathFactory, all_reads: list[Scores]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    expected_scores = [float(slow_score(scored_read)) for scored_read in all_reads]
    expected_labels = [
        "virus" if slow_score(scored_read) >= 0.5 else "others" for scored_read in all_reads
    ]
    expected_chunks = [
        margin >= 0 for scored_read in all_reads for margin in slow_margins(scored_read)
    ]
    frames = frame_table(all_reads)

    reads = results_table(folder, all_reads, "reads.tsv")
    assert [row["label"] for row in reads] == expected_labels
    assert [float(row["viral_score"]) for row in reads] == pytest.approx(expected_scores, abs=1e-6)

    chunks = results_table(folder, all_reads, "prediction_results_highestscore.csv")
    assert [row["Is_Virus"] == "True" for row in chunks] == expected_chunks

    contigs = contig_votes(frames, len(all_reads))  # chunks of equal size: the vote of a read
    assert contigs["label"].tolist() == expected_labels
    assert contigs["viral_score"].tolist() == pytest.approx(expected_scores, abs=1e-6)

    ids = frames.apply(lambda row: f"r{row['read']:.0f}_chunk_{row['chunk']:.0f}F1", axis=1)
    frame_rows = pd.DataFrame({"id": ids, "score1": frames["others"], "score2": frames["virus"]})
    assert derive_consensus(frame_rows)["virus"].tolist() == expected_chunks

    assert training_scores(frames, "read") == pytest.approx(expected_scores, abs=1e-12)
    assert (training_scores(frames, "chunk") >= 0.5).tolist() == expected_chunks


TIE = [((Fraction(1, 4), Fraction(3, 4)),)]  # largest P(virus) = largest P(others)


def test_another_rule_for_chunks_changes_every_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie is viral. If that is changed in `consensus`, nobody keeps the old rule."""

    def verdicts(folder: Path) -> list[bool]:
        frames = frame_table(TIE)
        [chunk] = results_table(folder, TIE, "prediction_results_highestscore.csv")
        [contig] = contig_votes(frames, 1)["viral_chunks"]
        frame_rows = pd.DataFrame(
            {"id": ["r_chunk_1F1", "r_chunk_1F2"], "score1": [0.75, 0.25], "score2": [0.25, 0.75]}
        )
        [compared_score] = derive_consensus(frame_rows)["virus"]
        return [chunk["Is_Virus"] == "True", bool(contig), bool(compared_score)]

    assert verdicts(tmp_path / "tie is viral") == [True, True, True]
    monkeypatch.setattr(consensus, "is_viral_chunk", lambda others, virus: virus > others)
    assert verdicts(tmp_path / "tie is not viral") == [False, False, False]


def test_another_rule_for_reads_changes_every_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the chunks decides. If that becomes the maximum, nobody keeps the mean."""
    reads: list[Scores] = [((Fraction(0),), (Fraction(1, 8),), (Fraction(3, 4),))]
    frames = frame_table(reads)

    def scores(folder: Path) -> list[float]:
        [read_row] = results_table(folder, reads, "reads.tsv")
        [contig] = contig_votes(frames, 1)["viral_score"]
        [training_score] = training_scores(frames, "read")
        return [float(read_row["viral_score"]), float(contig), float(training_score)]

    def largest(
        margins: NDArray[np.float64],
        groups: NDArray[np.int64],
        n_groups: int,
        weights: object = None,
    ) -> NDArray[np.float64]:
        result = np.full(n_groups, -np.inf)
        np.maximum.at(result, groups, margins)
        return result

    mean = float(slow_score(reads[0]))
    assert scores(tmp_path / "mean") == pytest.approx([mean, mean, mean])
    monkeypatch.setattr(consensus, "mean_margins", largest)
    assert scores(tmp_path / "maximum") == pytest.approx([0.75, 0.75, 0.75])


def test_another_vote_of_frames_changes_every_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest scores of the frames vote. If the first frame decides, all users follow."""
    reads: list[Scores] = [((Fraction(1, 8), Fraction(5, 8), Fraction(3, 4)),)]

    def scores(folder: Path) -> list[float]:
        frames = frame_table(reads)
        [read_row] = results_table(folder, reads, "reads.tsv")
        [contig] = contig_votes(frames, 1)["viral_score"]
        ids = [f"r_chunk_1F{frame}" for frame in frames["frame"]]
        frame_rows = pd.DataFrame(
            {"id": ids, "score1": frames["others"], "score2": frames["virus"]}
        )
        [largest] = derive_consensus(frame_rows)["score2"]
        [training_score] = training_scores(frames, "chunk")
        return [
            float(read_row["viral_score"]),
            float(contig),
            float(largest),
            float(training_score),
        ]

    # by hand: largest P(virus) 6/8, largest P(others) 7/8, margin -1/8
    assert scores(tmp_path / "largest") == pytest.approx([0.4375, 0.4375, 0.75, 0.4375])
    monkeypatch.setattr(consensus, "top_scores", lambda scores, first: scores[first])
    # the first frame: P(virus) 1/8, P(others) 7/8, margin -6/8
    assert scores(tmp_path / "first") == pytest.approx([0.125, 0.125, 0.125, 0.125])


def test_a_contig_weights_its_chunks_by_their_bases() -> None:
    frames = frame_table([((Fraction(1),), (Fraction(0),))])
    chunks = frames[["read", "chunk", "others", "virus"]].assign(bases=[30, 10], has_failed=False)
    votes = _contig_votes(chunks, 1, threshold=0.5)
    # by hand: margins +1 and -1, (30 - 10) / 40 = 0.5, 0.5 + 0.5 / 2
    assert votes["viral_score"].tolist() == [0.75]
    assert votes["viral_bases"].tolist() == [30]


@pytest.mark.parametrize(
    ("mean_margin", "is_at_least_half"),
    [(0.0, True), (-0.0, True), (1e-12, True), (-1e-12, False), (1e-300, True), (-1e-300, False)],
)
def test_rounding_moves_no_score_across_one_half(
    mean_margin: float, is_at_least_half: bool
) -> None:
    [score] = consensus.viral_scores(np.array([mean_margin]))
    assert bool(score >= 0.5) is is_at_least_half


def test_a_group_with_one_frame_keeps_the_digits_of_its_score() -> None:
    single = np.array([np.float32(0.8234567), np.nan], np.float32)
    scores = consensus.viral_scores(np.array([0.6, 0.2]), single)
    assert scores[0] == np.float32(0.8234567)
    assert scores[1] == np.float32(0.6)


def test_a_group_without_a_frame_has_no_score_and_no_verdict() -> None:
    means = consensus.mean_margins(np.array([0.5]), np.array([1]), 3)
    scores = consensus.viral_scores(means)
    assert np.isnan(scores).tolist() == [True, False, True]
    assert consensus.is_viral(scores, 0.5).tolist() == [False, True, False]


def test_a_pair_without_a_score_is_as_far_as_its_better_mate_and_fails_with_either() -> None:
    fates = {name: number for number, name in enumerate(consensus.FATE_NAMES)}
    pairs = [  # joint score, fates of both mates, and the fate of the pair
        (np.nan, "empty", "no_open_frame", "no_open_frame"),
        (np.nan, "no_open_frame", "empty", "no_open_frame"),
        (np.nan, "empty", "empty", "empty"),
        (0.9, "viral", "no_open_frame", "viral"),
        (0.2, "empty", "others", "others"),
        (0.9, "viral", "failed", "failed"),
        (0.9, "failed", "viral", "failed"),
    ]
    verdicts = consensus.pair_fates(
        np.array([score for score, *_ in pairs], np.float32),
        np.array([fates[first] for _, first, _, _ in pairs]),
        np.array([fates[second] for _, _, second, _ in pairs]),
        threshold=0.5,
        uncertain=(0.0, 0.0),
    )
    assert [consensus.FATE_NAMES[fate] for fate in verdicts] == [fate for *_, fate in pairs]
