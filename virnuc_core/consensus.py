"""The vote: frame → chunk → read → pair → contig. The only module that knows the rule.

The classifier gives each open reading frame two numbers, P(others) and P(virus), called `score1`
and `score2` in VirNucPro's files. They add up to one, except for their last digit.

- A *frame* is viral if P(virus) is larger than P(others). A tie is not viral.
- A *chunk* is viral if the largest P(virus) of its frames is at least the largest P(others). A tie
  is viral. The difference of the two is the chunk's *margin*.
- A *read* or *pair* has the score 0.5 + m / 2, where m is the mean margin of its chunks. A *contig*
  (a read of several chunks) weights each chunk by the bases that the next chunk does not contain.
  It is viral if the score is at least the threshold.

The first two rules are VirNucPro's (its `prediction.py`). It judges no reads; the third rule is
ours, and docs/results.md explains it.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]  # [frames, 2] P(others) and P(virus)
ViralScores = NDArray[np.float32]  # [groups] 0 to 1, NaN without a scored frame
Margins = NDArray[np.float64]  # -1 to 1
IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]
ScoreRange = tuple[float, float]  # from, to below

# What became of a read, in the order of the counts in `summary.json`. The last is used only where
# the user asked for it.
FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
VIRAL, OTHERS, NO_OPEN_FRAME, EMPTY, FAILED, UNCERTAIN = range(len(FATES) + 1)
FATE_NAMES: Final = (*FATES, "uncertain")
FATES_BY_SCORE: Final = (VIRAL, OTHERS, UNCERTAIN)

_HALF: Final = np.float32(0.5)
_BELOW_HALF: Final = np.nextafter(_HALF, np.float32(0))


def is_viral_frame(scores: Scores) -> Mask:
    """Return the verdict on each frame, [frames]."""
    return scores[:, 1] > scores[:, 0]


def is_viral_chunk(max_others: NDArray[Any], max_virus: NDArray[Any]) -> NDArray[Any]:
    """Return the verdict on each chunk, from the largest scores of its frames, [chunks]."""
    return max_virus >= max_others


def is_viral(scores: NDArray[Any], threshold: float) -> Mask:
    """Return which scores of reads, pairs or contigs are called viral. NaN is not."""
    return np.asarray(scores >= threshold)


def top_scores(scores: NDArray[Any], first_frames: IntArray) -> NDArray[Any]:
    """Return the scores with which each chunk votes: the largest of each class over its frames.

    Args:
        scores: Scores of all frames, those of a chunk together; NaN for failed ones, [frames, 2].
        first_frames: The first frame of each chunk, [chunks].

    Returns:
        [chunks, 2]; NaN for a chunk of which every frame failed.
    """
    if len(first_frames) == 0:  # `reduceat` needs at least one chunk
        return scores[:0]
    tops: NDArray[Any] = np.fmax.reduceat(scores, first_frames)  # ignores NaN
    return tops


def top_scores_by_chunk(scores: NDArray[Any], chunks: IntArray) -> NDArray[Any]:
    """Return `top_scores` of frames that are in any order.

    Args:
        scores: Scores of all frames, [frames, 2].
        chunks: The chunk of each frame; each number from 0 on occurs, [frames].

    Returns:
        The largest score of each class over the frames of a chunk, [chunks, 2].
    """
    order = np.argsort(chunks, kind="stable")
    # A chunk begins where the sorted numbers change. The -1 makes the very first frame a change.
    first_frames = np.flatnonzero(np.diff(chunks[order], prepend=-1))
    return top_scores(scores[order], first_frames)


@dataclass(frozen=True, slots=True)
class ChunkVotes:
    """The votes of consecutive chunks, each over its scored frames."""

    first_frames: IntArray  # [chunks] the first frame of each chunk
    top_others_frames: IntArray  # [chunks] the first frame with the largest P(others) of its chunk
    top_virus_frames: IntArray  # [chunks] the first frame with the largest P(virus) of its chunk
    margins: Margins  # [chunks]
    is_viral: Mask  # [chunks]


def vote_chunks(scores: Scores, is_first: Mask) -> ChunkVotes:
    """Let the frames of each chunk vote.

    Args:
        scores: Scores of all frames, those of a chunk together, [frames, 2]. Frames that have no
            score must have been left out.
        is_first: Marks the first frame of each chunk, [frames].

    Returns:
        The votes of the chunks, in the order of their frames.

    Raises:
        ValueError: A score is NaN or infinite.
    """
    if not np.isfinite(scores).all():
        # No frame has a largest score that is NaN, so the search below would find a frame of the
        # next chunk, and this chunk would get the scores of another.
        raise ValueError("a frame without a finite score cannot vote")
    first_frames = np.flatnonzero(is_first)
    tops = top_scores(scores, first_frames)  # [chunks, 2]
    chunk_of_frame = np.cumsum(is_first) - 1
    is_top = scores == tops[chunk_of_frame]  # [frames, 2]
    others_frames = np.flatnonzero(is_top[:, 0])
    virus_frames = np.flatnonzero(is_top[:, 1])
    # The difference of two float32 numbers has the right sign in float64.
    max_others = tops[:, 0].astype(np.float64)
    max_virus = tops[:, 1].astype(np.float64)
    # Each chunk has a frame with its largest score. So the next such frame from the chunk's first
    # frame on, which `searchsorted` finds, belongs to the same chunk.
    return ChunkVotes(
        first_frames=first_frames,
        top_others_frames=others_frames[np.searchsorted(others_frames, first_frames)],
        top_virus_frames=virus_frames[np.searchsorted(virus_frames, first_frames)],
        margins=max_virus - max_others,
        is_viral=is_viral_chunk(max_others, max_virus),
    )


def mean_margins(
    margins: Margins, groups: IntArray, n_groups: int, weights: NDArray[Any] | None = None
) -> Margins:
    """Return the mean margin of each group of chunks.

    Args:
        margins: Margins of the chunks, [chunks].
        groups: The read, pair or contig of each chunk, [chunks].
        n_groups: Number of reads, pairs or contigs.
        weights: Weight of each chunk, [chunks]. If absent, all count the same.

    Returns:
        Mean margins, [n_groups]; NaN for groups without a chunk.
    """
    if weights is None:
        weights = np.ones(len(margins))
    totals = np.bincount(groups, weights=weights * margins, minlength=n_groups)
    total_weights = np.bincount(groups, weights=weights, minlength=n_groups)
    means = np.full(n_groups, np.nan)
    np.divide(totals, total_weights, out=means, where=total_weights > 0)
    return means


def viral_scores(means: Margins, single_frame_scores: ViralScores | None = None) -> ViralScores:
    """Return the score of each read, pair or contig.

    A score is at least 0.5 exactly if the mean margin is at least 0, however small it is: rounding
    to float32 never moves a score across 0.5.

    Args:
        means: Mean margins, [groups].
        single_frame_scores: For a group with one scored frame, P(virus) of this frame; NaN for
            all other groups, [groups]. The score of such a group is this number itself. Computed
            from the margin, it could be rounded to 0.9871235 where the table of frames says
            0.9871234.

    Returns:
        Scores from 0 to 1, [groups]; NaN for groups whose mean margin is NaN.
    """
    scores: ViralScores = (0.5 + means / 2).astype(np.float32)
    if single_frame_scores is not None:
        has_single_frame = ~np.isnan(single_frame_scores)
        scores[has_single_frame] = single_frame_scores[has_single_frame]
    is_negative = means < 0
    is_positive = means >= 0  # neither for NaN
    scores[is_negative] = np.minimum(scores[is_negative], _BELOW_HALF)
    scores[is_positive] = np.maximum(scores[is_positive], _HALF)
    return scores


def chunk_scores(virus_scores: NDArray[Any], chunks: IntArray) -> NDArray[Any]:
    """Return the score of each chunk from P(virus) of its frames alone, as in training.

    It is (max + min) / 2 over the frames of the chunk. This equals the usual score
    0.5 + (max P(virus) − max P(others)) / 2, because P(others) is 1 − P(virus), so that its maximum
    is 1 − min P(virus).

    Args:
        virus_scores: P(virus) of all frames, [frames].
        chunks: The chunk of each frame; each number from 0 on occurs, [frames].

    Returns:
        Scores from 0 to 1, [chunks].
    """
    both_signs = np.stack((-virus_scores, virus_scores), axis=1)
    tops = top_scores_by_chunk(both_signs, chunks)  # [chunks, 2]: -min, max
    scores: NDArray[Any] = (tops[:, 1] - tops[:, 0]) / 2
    return scores


def fates_of_scores(scores: ViralScores, threshold: float, uncertain: ScoreRange) -> IntArray:
    """Return the fate that each score gives a read or pair: VIRAL, OTHERS or UNCERTAIN.

    Args:
        scores: Viral scores, [groups].
        threshold: Score from which a read is called viral.
        uncertain: Scores in this range get no verdict. An empty range is (0, 0).
    """
    fates = np.where(is_viral(scores, threshold), VIRAL, OTHERS)
    lowest, upper = uncertain
    fates[(scores >= lowest) & (scores < upper)] = UNCERTAIN
    return fates


def pair_fates(
    scores: ViralScores,
    fates_1: IntArray,
    fates_2: IntArray,
    threshold: float,
    uncertain: ScoreRange,
) -> IntArray:
    """Return the fate of each pair, from its joint score and the fates of its mates.

    A pair with a failed mate has failed. A pair without a score has the fate of the mate that was
    further on the way to a verdict.

    Args:
        scores: Joint scores over the chunks of both mates, [pairs].
        fates_1: Fates of the first mates, [pairs].
        fates_2: Fates of the second mates, [pairs]. For a read without a mate, its own fate.
        threshold: Score from which a pair is called viral.
        uncertain: Scores in this range get no verdict. An empty range is (0, 0).

    Returns:
        A number of `FATE_NAMES` for each pair, [pairs].
    """
    by_score = fates_of_scores(scores, threshold, uncertain)
    # Mates without a score have NO_OPEN_FRAME or EMPTY. The smaller number is further on.
    fates = np.where(np.isnan(scores), np.minimum(fates_1, fates_2), by_score)
    fates[(fates_1 == FAILED) | (fates_2 == FAILED)] = FAILED
    return fates
