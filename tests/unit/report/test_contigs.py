"""The roll-up of chunks to contigs: which chunks vote, with which weight, and what is shown.

Expected values are calculated by hand, or by a slow twin that counts single bases.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from virnuc_core.report.contigs import CONTIG_COLUMNS, roll_up_chunks

MODEL_LENGTH = 10
# The chunks of a contig of 25 bases, by the rule of VirNucPro: 3 chunks that overlap by 5 bases.
#   bases 0 to 10, 8 to 18, 16 to 25
CONTIG_LENGTH = 25


@dataclass(frozen=True)
class Frame:
    """An open frame of a read: its chunk and its P(virus). It has failed without a score."""

    read: int
    chunk: int
    virus: float | None


def roll_up(
    frames: Sequence[Frame],
    lengths: Sequence[int] = (CONTIG_LENGTH,),
    *,
    framed_only: bool = False,
    threshold: float = 0.5,
) -> pd.DataFrame:
    """Return the verdicts on reads with these frames."""
    virus = [math.nan if frame.virus is None else frame.virus for frame in frames]
    table = pd.DataFrame(
        {
            "read": np.array([frame.read for frame in frames], np.int64),
            "chunk": np.array([frame.chunk for frame in frames], np.int64),
            "others": 1 - np.array(virus, np.float64),
            "virus": np.array(virus, np.float64),
            "has_failed": [frame.virus is None for frame in frames],
        }
    ).astype({"has_failed": bool})
    return roll_up_chunks(
        table, np.array(lengths, np.int64), MODEL_LENGTH, threshold, framed_only=framed_only
    )


def test_by_default_a_chunk_without_a_frame_has_no_vote_but_keeps_the_bases_it_shares() -> None:
    # Chunk 1 has no frame. Chunk 0 adds bases 0 to 8, because chunk 1 has the others of its own.
    frames = [Frame(0, 0, 0.8), Frame(0, 2, 0.4)]
    row = roll_up(frames, threshold=0.6).iloc[0]
    assert (row.chunks, row.scored_chunks, row.viral_chunks) == (3, 2, 1)
    assert (row.scored_bases, row.viral_bases) == (8 + 9, 8)
    assert row.viral_score == pytest.approx(0.5 + (8 * 0.6 - 9 * 0.2) / 17 / 2)  # 0.588
    assert (row.label, row.framed_share, row.weights) == ("others", 0.6667, "all_chunks")


def test_framed_only_gives_the_shared_bases_to_the_chunk_that_has_a_frame() -> None:
    frames = [Frame(0, 0, 0.8), Frame(0, 2, 0.4)]
    row = roll_up(frames, framed_only=True, threshold=0.6).iloc[0]
    assert (row.chunks, row.scored_chunks, row.viral_chunks) == (3, 2, 1)
    assert (row.scored_bases, row.viral_bases) == (10 + 9, 10)
    assert row.viral_score == pytest.approx(0.5 + (10 * 0.6 - 9 * 0.2) / 19 / 2)  # 0.611
    assert (row.label, row.framed_share, row.weights) == ("virus", 0.6667, "framed_chunks")


@pytest.mark.parametrize("framed_only", [False, True])
def test_one_framed_chunk_decides_alone_however_small_its_share(framed_only: bool) -> None:
    """A long read of 1 framed chunk in 20 gets the verdict of that chunk; the share says so."""
    row = roll_up([Frame(0, 7, 0.9)], [200], framed_only=framed_only).iloc[0]
    assert (row.chunks, row.scored_chunks, row.framed_share) == (20, 1, 0.05)
    assert (row.viral_score, row.label) == (pytest.approx(0.9), "virus")


@pytest.mark.parametrize("framed_only", [False, True])
def test_reads_without_a_frame_have_no_verdict(framed_only: bool) -> None:
    frames = [Frame(1, 0, 0.9), Frame(1, 1, 0.1)]
    rows = roll_up(frames, [CONTIG_LENGTH, 20, 0], framed_only=framed_only)
    assert rows.framed_share.tolist() == [0, 1, 0]
    assert rows.label.tolist() == ["", "virus", ""]  # a margin of 0 is viral
    assert rows.viral_score.isna().tolist() == [True, False, True]
    assert rows.scored_bases.tolist() == [0, 20, 0]
    assert rows.chunks.tolist() == [3, 2, 0]


@pytest.mark.parametrize("framed_only", [False, True])
def test_a_read_with_a_failed_frame_has_no_verdict_but_its_share(framed_only: bool) -> None:
    frames = [Frame(0, 0, 0.8), Frame(0, 1, None), Frame(0, 1, 0.3), Frame(0, 2, None)]
    row = roll_up(frames, framed_only=framed_only).iloc[0]
    assert (row.scored_chunks, row.framed_share, row.label) == (2, 1, "")
    assert math.isnan(row.viral_score)


def test_both_weights_agree_where_every_chunk_has_a_frame() -> None:
    frames = [Frame(0, 0, 0.8), Frame(0, 1, 0.1), Frame(0, 1, 0.7), Frame(0, 2, 0.4)]
    by_all = roll_up(frames).drop(columns="weights")
    by_framed = roll_up(frames, framed_only=True).drop(columns="weights")
    pd.testing.assert_frame_equal(by_all, by_framed)
    # The margin of chunk 1 is max P(virus) - max P(others) = 0.7 - 0.9.
    expected_margin = (8 * 0.6 + 8 * -0.2 + 9 * -0.2) / 25
    assert by_all.viral_score[0] == pytest.approx(0.5 + expected_margin / 2)


def test_no_frame_at_all_gives_rows_without_verdicts() -> None:
    rows = roll_up([], [25, 5])
    assert set(rows.columns) == set(CONTIG_COLUMNS) - {"id"}
    assert (rows.label.tolist(), rows.scored_bases.tolist()) == (["", ""], [0, 0])


# --- The slow twin --------------------------------------------------------------------------------


def chunk_bases(length: int) -> list[set[int]]:
    """Return the bases of each chunk, after the formula of VirNucPro (chunks of `MODEL_LENGTH`)."""
    if length == 0:
        return []
    count = -(-length // MODEL_LENGTH)
    overlap = count * MODEL_LENGTH - length
    lower, rest = divmod(overlap, count)
    chunks = []
    for number in range(count):
        start = number * MODEL_LENGTH - (lower * number + min(number, lower + rest))
        chunks.append(set(range(start, min(start + MODEL_LENGTH, length))))
    return chunks


@dataclass(frozen=True)
class TwinVote:
    """What the slow twin says of a contig."""

    scored_bases: int
    viral_bases: int
    viral_score: float | None
    framed_share: float


def slow_vote(length: int, frames: Sequence[Frame], *, framed_only: bool) -> TwinVote:
    """Let the chunks of one contig vote, base by base."""
    chunks = chunk_bases(length)
    scores_of_chunk: dict[int, list[float]] = {}
    for frame in frames:
        assert frame.virus is not None
        scores_of_chunk.setdefault(frame.chunk, []).append(frame.virus)
    bases_of_margin = []
    for number, scores in sorted(scores_of_chunk.items()):
        later = range(number + 1, len(chunks))
        if framed_only:
            later_with_a_vote = [other for other in later if other in scores_of_chunk]
        else:
            later_with_a_vote = list(later)
        next_bases = chunks[later_with_a_vote[0]] if later_with_a_vote else set()
        margin = max(scores) - max(1 - score for score in scores)
        bases_of_margin.append((margin, len(chunks[number] - next_bases)))
    scored_bases = sum(bases for _, bases in bases_of_margin)
    total = sum(margin * bases for margin, bases in bases_of_margin)
    return TwinVote(
        scored_bases=scored_bases,
        viral_bases=sum(bases for margin, bases in bases_of_margin if margin >= 0),
        viral_score=0.5 + total / scored_bases / 2 if scored_bases else None,
        framed_share=len(scores_of_chunk) / len(chunks) if chunks else 0,
    )


@pytest.mark.parametrize("framed_only", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_contigs_vote_as_the_slow_twin_counts(seed: int, framed_only: bool) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 5, 10, 11, 25, rng.randint(1, 200)]) for _ in range(30)]
    frame_rate = rng.choice([0.05, 0.3, 0.9])
    frames_of_read: list[list[Frame]] = []
    for read, length in enumerate(lengths):
        frames = []
        for number in range(len(chunk_bases(length))):
            count = rng.choice([1, 1, 2, 6]) if rng.random() < frame_rate else 0
            # Sixteenths are exact, so that ties are ties.
            frames += [Frame(read, number, rng.randint(0, 16) / 16) for _ in range(count)]
        frames_of_read.append(frames)
    all_frames = [frame for frames in frames_of_read for frame in frames]
    rng.shuffle(all_frames)
    rows = roll_up(all_frames, lengths, framed_only=framed_only)
    for read, (length, frames) in enumerate(zip(lengths, frames_of_read, strict=True)):
        row = rows.iloc[read]
        vote = slow_vote(length, frames, framed_only=framed_only)
        assert (row.scored_bases, row.viral_bases) == (vote.scored_bases, vote.viral_bases)
        assert row.framed_share == pytest.approx(vote.framed_share, abs=0.00005)
        if vote.viral_score is None:
            assert math.isnan(row.viral_score)
            assert row.label == ""
        else:
            assert row.viral_score == pytest.approx(vote.viral_score, abs=1e-6)
        if framed_only:
            framed_bases = set[int]().union(*(chunk_bases(length)[frame.chunk] for frame in frames))
            assert row.scored_bases == len(framed_bases), "each base of a framed chunk counts once"
