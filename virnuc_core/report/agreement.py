"""Count how far two results agree. Rows are joined by id, never by position.

An id that only one side has is a disagreement.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.validation import ClassAgreement, Comparison, LabelAgreement, ScoreDifference

STRICT_TOLERANCE: Final = 1e-3  # relative and absolute, of the strict score test
NEAR_THRESHOLD: Final = 0.1  # the two scores of a row near the threshold are at most so far apart
MAX_EXAMPLES: Final = 5
SCORES: Final = ["score1", "score2"]


@dataclass(frozen=True, slots=True)
class RowPair:
    """Rows of one result and of another, as `result_tables.load_results` reads them."""

    a: pd.DataFrame
    b: pd.DataFrame


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The rows of a pair, joined by id."""

    a: pd.DataFrame  # rows of side a that have a partner
    b: pd.DataFrame  # their partners, in the same order
    only_in_a: pd.DataFrame
    only_in_b: pd.DataFrame


@dataclass(slots=True)
class Tally:
    """Counts of agreeing and differing rows. Two tallies can be added."""

    in_both: int = 0
    only_in_a: int = 0
    only_in_b: int = 0
    agreeing: int = 0
    ids_of_class: Counter[str] = field(default_factory=Counter)
    agreeing_of_class: Counter[str] = field(default_factory=Counter)
    differing_examples: list[str] = field(default_factory=list)
    unpaired_examples: list[str] = field(default_factory=list)
    # Of the joined rows with scores: the differences of `score2`, each [rows], and the largest one
    # of `score1`, which is NaN as soon as one of them is.
    score2_differences: list[NDArray[np.float64]] = field(default_factory=list)
    max_score1_difference: float = 0.0
    # For each score, `score1` and `score2`: whether it passed the strict test in all rows
    are_close: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(SCORES, True))

    def __add__(self, other: "Tally") -> "Tally":
        """Return the counts over the rows of both tallies."""
        return Tally(
            in_both=self.in_both + other.in_both,
            only_in_a=self.only_in_a + other.only_in_a,
            only_in_b=self.only_in_b + other.only_in_b,
            agreeing=self.agreeing + other.agreeing,
            ids_of_class=_add_counts(self.ids_of_class, other.ids_of_class),
            agreeing_of_class=_add_counts(self.agreeing_of_class, other.agreeing_of_class),
            differing_examples=self.differing_examples + other.differing_examples,
            unpaired_examples=self.unpaired_examples + other.unpaired_examples,
            score2_differences=self.score2_differences + other.score2_differences,
            max_score1_difference=float(
                np.maximum(self.max_score1_difference, other.max_score1_difference)
            ),
            are_close={name: self.are_close[name] and other.are_close[name] for name in SCORES},
        )


def _add_counts(a: Counter[str], b: Counter[str]) -> Counter[str]:
    """Return the sums of two counters. Unlike `a + b`, classes with a count of 0 are kept."""
    total = a.copy()
    total.update(b)
    return total


def agreement(pairs: Iterable[RowPair], tolerance: float) -> LabelAgreement:
    """Join the rows of two results by id, and count how many labels and scores agree.

    Args:
        pairs: The two results in pieces. Rows with the same id are in the same piece.
        tolerance: Differences of `score2` up to this number count as within tolerance.

    Returns:
        The counts. `score` is None if a side has no scores.
    """
    tally = Tally()
    for pair in pairs:
        tally += count_pair(join_rows(pair))
    n_ids = tally.in_both + tally.only_in_a + tally.only_in_b
    classes = {}
    for name, count in tally.ids_of_class.items():
        classes[name] = ClassAgreement(ids=count, agreeing=tally.agreeing_of_class[name])
    score = None
    if tally.score2_differences:
        score = _score_difference(tally, tolerance)
    examples = [*tally.differing_examples, *tally.unpaired_examples][:MAX_EXAMPLES]
    # An id may have bytes that are not UTF-8. They are held as surrogates, which JSON cannot have.
    printable_examples = [text.encode("utf-8", "replace").decode() for text in examples]
    return LabelAgreement(
        in_both=tally.in_both,
        only_in_a=tally.only_in_a,
        only_in_b=tally.only_in_b,
        agreeing=tally.agreeing,
        agreement=tally.agreeing / n_ids if n_ids else None,
        score=score,
        classes=classes,
        examples=tuple(printable_examples),
    )


def join_rows(pair: RowPair) -> JoinedRows:
    """Match the rows of both sides that have the same id.

    Two runs over the same reads have the same ids in the same order. This usual case is checked
    first, because it needs no search.
    """
    row_numbers = np.arange(len(pair.a))
    # For each row of b, the number of the row of a with the same id; -1 if there is none.
    if np.array_equal(pair.a["id"].to_numpy(), pair.b["id"].to_numpy()):
        row_in_a = row_numbers
    else:
        keys_a, keys_b = _join_keys(pair.a["id"], pair.b["id"])
        row_in_a = keys_a.get_indexer(keys_b)
    has_partner = row_in_a >= 0
    return JoinedRows(
        a=pair.a.iloc[row_in_a[has_partner]],
        b=pair.b[has_partner],
        only_in_a=pair.a[~np.isin(row_numbers, row_in_a)],
        only_in_b=pair.b[~has_partner],
    )


def _join_keys(
    ids_a: "pd.Series[str]", ids_b: "pd.Series[str]"
) -> tuple["pd.Index[str]", "pd.Index[str]"]:
    """Return a key for each row of two results, by which the rows are joined. Each key is unique.

    Several reads may share an id. If both sides have an id equally often, their n-th rows with it
    belong together. If one side lacks a row, nobody can tell which read it was of. Then no row with
    this id has a partner: a row that is joined with that of another read would say more than is
    known.

    Args:
        ids_a: The ids of the first result.
        ids_b: The ids of the second result.
    """
    if not ids_a.duplicated().any() and not ids_b.duplicated().any():
        return pd.Index(ids_a), pd.Index(ids_b)
    counts_a = ids_a.value_counts()
    counts_b = ids_b.value_counts()
    is_repeated = pd.concat((counts_a, counts_b), axis=1).max(axis=1) > 1
    repeated_ids = is_repeated.index[is_repeated]
    n_in_a = counts_a.reindex(repeated_ids, fill_value=0)
    n_in_b = counts_b.reindex(repeated_ids, fill_value=0)
    unclear_ids = repeated_ids[n_in_a != n_in_b]
    return _numbered(ids_a, unclear_ids, "a"), _numbered(ids_b, unclear_ids, "b")


def _numbered(ids: "pd.Series[str]", unclear_ids: "pd.Index[str]", side: str) -> "pd.Index[str]":
    """Return unique keys for the ids of one side.

    The second row with an id gets `id\\0` + "1", and so on. A row with an unclear id also gets the
    name of the side, which the other side has nowhere.
    """
    repetition = ids.groupby(ids, sort=False).cumcount()  # 0 for the first row of an id
    numbered_ids = ids + "\x00" + repetition.astype(str)
    keys = ids.where(repetition == 0, numbered_ids)
    return pd.Index(keys.where(~ids.isin(unclear_ids), numbered_ids + side))


def count_pair(joined: JoinedRows) -> Tally:
    """Count the equal labels and the score differences of the joined rows of a pair of results.

    The counts are also made for three classes of ids: viral, non-viral, and near the threshold. An
    id belongs to a class by its row in a. An id that only one side has counts as not agreeing.
    """
    is_same_label = joined.a["virus"].to_numpy() == joined.b["virus"].to_numpy()
    # The joined rows come first. An id that only b has belongs to the class that it has there.
    all_rows = pd.concat([joined.a, joined.only_in_a, joined.only_in_b])
    n_unpaired = len(all_rows) - len(joined.a)
    agrees = np.append(is_same_label, np.zeros(n_unpaired, dtype=bool))
    classes = {"viral": all_rows["virus"].eq(True), "non-viral": all_rows["virus"].eq(False)}
    if "score2" in all_rows:
        distance = (all_rows["score1"] - all_rows["score2"]).abs()
        classes["near threshold"] = distance <= NEAR_THRESHOLD

    tally = Tally(
        in_both=len(joined.a),
        only_in_a=len(joined.only_in_a),
        only_in_b=len(joined.only_in_b),
        agreeing=int(is_same_label.sum()),
        differing_examples=_differing_examples(joined.a[~is_same_label]),
        unpaired_examples=_unpaired_examples(joined),
    )
    for name, is_member in classes.items():
        tally.ids_of_class[name] = int(is_member.sum())
        tally.agreeing_of_class[name] = int(agrees[is_member].sum())
    if len(joined.a) and "score2" in joined.a and "score2" in joined.b:
        scores_a = joined.a[SCORES].to_numpy()
        scores_b = joined.b[SCORES].to_numpy()
        differences = np.abs(scores_a - scores_b)
        # A copy, so that the differences of `score1` do not stay in memory with them.
        tally.score2_differences.append(differences[:, 1].copy())
        tally.max_score1_difference = float(differences[:, 0].max())
        for column, name in enumerate(SCORES):
            tally.are_close[name] = np.allclose(
                scores_a[:, column],
                scores_b[:, column],
                rtol=STRICT_TOLERANCE,
                atol=STRICT_TOLERANCE,
            )
    return tally


def _differing_examples(rows_of_a: pd.DataFrame) -> list[str]:
    """Return a few ids whose labels differ, such as `r1_chunk_1: virus / others` for a / b."""
    examples = []
    for row in rows_of_a[:MAX_EXAMPLES].itertuples():
        labels = "virus / others" if row.virus else "others / virus"
        examples.append(f"{row.id}: {labels}")
    return examples


def _unpaired_examples(joined: JoinedRows) -> list[str]:
    """Return a few ids that only one side has, such as `r1_chunk_1: only in a`."""
    in_a = [f"{name}: only in a" for name in joined.only_in_a["id"][:MAX_EXAMPLES]]
    in_b = [f"{name}: only in b" for name in joined.only_in_b["id"][:MAX_EXAMPLES]]
    return in_a + in_b


def _score_difference(tally: Tally, tolerance: float) -> ScoreDifference | None:
    """Return statistics of the differences of `score2`, and the largest difference of each score.

    Beside the differences, this needs memory for a copy of those of `score2`, 8 bytes a row.

    Args:
        tally: The differences of all rows.
        tolerance: Differences up to this number count as within tolerance.

    Returns:
        The statistics, or None if any score is NaN.
    """
    differences = np.concatenate(tally.score2_differences)  # of the score for virus
    largest = differences.max()
    if np.isnan(largest) or np.isnan(tally.max_score1_difference):
        return None
    n_within_tolerance = np.count_nonzero(differences <= tolerance)
    mean = differences.mean()  # before the next two lines, which change the order of the rows
    median = np.median(differences, overwrite_input=True)
    p99 = np.percentile(differences, 99, overwrite_input=True)
    return ScoreDifference(
        n=len(differences),
        mean=mean,
        median=median,
        p99=p99,
        max=largest,
        share_within_tolerance=n_within_tolerance / len(differences),
        allclose=all(tally.are_close.values()),
        max_diff_score1=tally.max_score1_difference,
        max_diff_score2=largest,
        score1_match=tally.are_close["score1"],
        score2_match=tally.are_close["score2"],
    )


def meets(comparison: Comparison, minimum: float) -> bool:
    """Return whether the labels of frames and chunks agree often enough.

    Args:
        comparison: The comparison of two results.
        minimum: The share of labels that must agree, 0 to 1.

    Returns:
        True if every agreement that was computed is at least `minimum`. False if nothing was
        compared.
    """
    parts = [part for part in (comparison.frames, comparison.consensus) if part is not None]
    if not parts:
        return False
    return all(part.agreement is not None and part.agreement >= minimum for part in parts)
