"""A head's card: which score is viral, which is uncertain, and whether it speaks of reads as long as these."""

from __future__ import annotations

import re

import numpy as np
import pytest

from virnuc_core.config import VerdictSpec
from virnuc_core.encoders.composition import UNKNOWN_TRAINING
from virnuc_core.encoders.head_card import domain_note, score_thresholds, training_mismatches
from virnuc_core.encoders.model_config import HeadCard, HeadShape
from virnuc_core.errors import ConfigError

from .head_cards import CARD

BARE = HeadShape(model_length=500, dna_width=64, protein_width=64)
HEAD = BARE.model_copy(update={"card": CARD})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (0.5, None)),
        ({"threshold": 0.8}, (0.8, None)),
        ({"fdr": 0.01}, (0.93, None)),
        ({"abstain": True}, (0.5, (0.4, 0.6))),
        ({"fdr": 0.1, "abstain": True}, (0.6, (0.4, 0.6))),
        ({"fdr": 0.01, "abstain": True}, (0.93, (0.4, 0.93))),
    ],
)
def test_the_card_gives_what_is_asked_and_nothing_else(
    asked: dict[str, float], expected: tuple[object, ...]
) -> None:
    assert score_thresholds(HEAD, VerdictSpec(**asked)) == expected


@pytest.mark.parametrize(
    ("head", "asked", "said"),
    [
        (BARE, {"fdr": 0.01}, "fdr, abstain: the head has no card"),
        (BARE, {"abstain": True}, "abstain: the head has no card"),
        (HEAD, {"fdr": 0.02}, r"fdr 0\.02: .* no threshold for this rate; use one of 0\.01, 0\.1"),
        (
            HEAD,
            {"fdr": 0.05},
            r"fdr 0\.05: .* refuses .* between 0\.0 and 40\.0 % .* for 0\.01, 0\.1;",
        ),
        (HEAD, {"fdr": 0.01, "threshold": 0.7}, r"fdr 0\.01 and threshold 0\.7 both say"),
    ],
)
def test_what_the_card_does_not_tell_is_one_line(
    head: HeadShape, asked: dict[str, float], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        score_thresholds(head, VerdictSpec(**asked))


def test_a_card_without_thresholds_or_uncertain_scores_says_so() -> None:
    empty = BARE.model_copy(
        update={
            "card": CARD.model_copy(
                update={"thresholds": {}, "expected_fdr": {}, "uncertain": None}
            )
        }
    )
    with pytest.raises(
        ConfigError, match=r"has no threshold for any false discovery rate, .*--threshold"
    ):
        score_thresholds(empty, VerdictSpec(fdr=0.01))
    with pytest.raises(ConfigError, match="names no uncertain scores"):
        score_thresholds(empty, VerdictSpec(abstain=True))


def test_a_card_that_refuses_every_rate_says_so() -> None:
    card = CARD.model_copy(update={"thresholds": {}})
    head = BARE.model_copy(update={"card": card})
    with pytest.raises(ConfigError, match="It has thresholds for no rate"):
        score_thresholds(head, VerdictSpec(fdr=0.1))


@pytest.mark.parametrize(
    ("card", "settings", "note"),
    [
        (CARD, {"fdr": 0.1}, r"10\.0 % .* expected to be wrong; .* between 5\.0 and 20\.0 %$"),
        (
            CARD.model_copy(update={"expected_fdr": {}}),
            {"fdr": 0.1},
            r"scatters between new samples is unknown: .* older version$",
        ),
        (CARD, {"abstain": True}, r"10 % of the reads are viral$"),
    ],
    ids=["with an interval", "an older card", "no threshold asked for"],
)
def test_the_answer_of_a_run_states_the_interval_for_new_samples(
    card: HeadCard, settings: dict[str, float], note: str
) -> None:
    head = BARE.model_copy(update={"card": card})
    compared = UNKNOWN_TRAINING
    assert re.search(note, domain_note(head, VerdictSpec(**settings), compared))


def test_a_card_of_an_older_version_can_be_read_and_its_thresholds_used() -> None:
    older = CARD.model_dump(mode="json")
    del older["expected_fdr"]
    card = HeadCard.model_validate(older)
    head = BARE.model_copy(update={"card": card})
    assert score_thresholds(head, VerdictSpec(fdr=0.01)).viral == 0.93


@pytest.mark.parametrize(
    ("lengths", "far"),
    [
        ([150] * 10, False),
        ([100, 225], False),
        ([59] + [150] * 9, False),
        ([59, 59] + [150] * 9, True),
        ([301, 301] + [150] * 9, True),
        ([99] * 10, True),
        ([230] * 10, True),
        ([], False),
    ],
)
def test_reads_far_from_those_of_training_are_remarked_in_one_line(
    lengths: list[int], far: bool
) -> None:
    mismatches = training_mismatches(HEAD, np.array(lengths, np.int64), {})
    assert (len(mismatches) == 1) == far
    assert all("60 to 300 bases" in line and "\n" not in line for line in mismatches)
    assert training_mismatches(BARE, np.array(lengths, np.int64), {}) == ()


@pytest.mark.parametrize(
    ("here", "others"),
    [
        ({"esm2": "e", "dnabert_s": "d", "head": "h"}, None),
        ({"esm2": "e", "dnabert_s": "x"}, "another dnabert_s:"),
        ({"esm2": "x", "dnabert_s": "x"}, "another esm2 and dnabert_s:"),
    ],
)
def test_encoders_that_are_not_those_of_training_are_remarked(
    here: dict[str, str], others: str | None
) -> None:
    card = CARD.model_copy(update={"encoders": {"esm2": "e", "dnabert_s": "d"}})
    mismatches = training_mismatches(BARE.model_copy(update={"card": card}), np.array([150]), here)
    assert len(mismatches) == (others is not None)
    assert all(others in line for line in mismatches if others)
