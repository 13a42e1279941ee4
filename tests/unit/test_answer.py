"""What a run answers: the counts behind the figure, and what makes it safe or unsafe."""

from __future__ import annotations

import json
from typing import Any

import pytest

from virnuc.flows.cli.answer_text import answer_lines, warning_lines
from virnuc_core.answer import (
    RANDOM_NOTE,
    RANDOM_WEIGHTS,
    UNKNOWN_WEIGHTS_NOTE,
    UNTESTED_NOTE,
    weight_remarks,
)
from virnuc_core.reads.samples import add_summaries
from virnuc_core.runfiles import RunSummary
from virnuc_core.sample_familiarity import SampleFamiliarity, Verdict

PUBLIC = {"esm2": "facebook/esm2", "dnabert_s": "zhihan1996/DNABERT-S", "head": "500_model.pth"}
RANDOM = dict.fromkeys(PUBLIC, "random, seed 7")
FATES = {
    "viral": 12,
    "others": 788,
    "no_open_frame": 150,
    "empty": 30,
    "failed": 2,
    "uncertain": 18,
}


def summary(**changes: Any) -> RunSummary:
    """A run of 1,000 reads by public weights whose classifier was tested."""
    fields: dict[str, Any] = {
        "n_reads": 1000,
        "fates": FATES,
        "n_short": 250,
        "model_length": 500,
        "origins": PUBLIC,
        "has_card": True,
    }
    return RunSummary(**(fields | changes))


def test_reads_with_and_without_a_verdict_add_up_to_all_reads() -> None:
    answer = summary().answer
    assert (answer.reads, answer.viral, answer.scored) == (1000, 12, 12 + 788 + 18)
    assert answer.without_verdict == 150 + 30 + 2 + 18
    assert answer.viral + answer.others + answer.without_verdict == answer.reads
    assert sum(answer.why_without_verdict.values()) == answer.without_verdict
    assert answer.too_short == 250


def test_the_message_begins_with_the_result_and_says_what_has_no_verdict() -> None:
    message = summary().answer.message
    assert message.startswith("12 of 1,000 reads are viral; 818 have a score; 200 have no verdict")
    assert 'not "not viral"' in message
    assert "150 no open reading frame" in message
    assert "250 are too short for the classifier" in message
    assert "RANDOM" not in message


def test_a_run_whose_reads_all_have_a_verdict_has_no_remarks() -> None:
    answer = summary(fates={"viral": 1, "others": 999}, n_short=0).answer
    assert answer.message == "1 of 1,000 reads are viral; 1,000 have a score"
    assert answer.remarks == ()


@pytest.mark.parametrize(
    ("random_part", "title"),
    [("esm2", "ESM-2"), ("dnabert_s", "DNABERT-S"), ("head", "the classifier")],
)
def test_one_random_part_is_enough_to_make_verdicts_meaningless(
    random_part: str, title: str
) -> None:
    answer = summary(origins=PUBLIC | {random_part: "random, for training"}).answer
    assert answer.random_weights == (title,)
    assert answer.message.endswith(RANDOM_WEIGHTS)
    assert answer.remarks[0] == f"The weights of {title} are random. {RANDOM_NOTE}"


def test_several_random_parts_are_named_together() -> None:
    remark, *_ = weight_remarks(RANDOM, has_card=True)
    assert remark.startswith("The weights of ESM-2, DNABERT-S and the classifier are random.")


def test_a_classifier_without_a_card_is_untested() -> None:
    answer = summary(has_card=False).answer
    assert answer.tested is False
    assert UNTESTED_NOTE in answer.remarks
    assert "untested" in answer.message


def test_a_run_that_did_not_record_its_weights_says_so_and_is_not_taken_for_safe() -> None:
    answer = summary(origins={}, has_card=None).answer
    assert answer.random_weights is None
    assert answer.remarks[0] == UNKNOWN_WEIGHTS_NOTE


def test_remarks_of_the_run_stand_between_those_on_weights_and_those_on_counts() -> None:
    remarks = summary(origins=RANDOM, remarks=("the reads are unlike the training",)).answer.remarks
    assert remarks[0].endswith(RANDOM_NOTE)
    assert remarks[1] == "The reads are unlike the training."
    assert "have no verdict" in remarks[2]
    assert "shorter than half of the classifier's 500 bases" in remarks[3]


@pytest.mark.parametrize("origins", [PUBLIC, PUBLIC | {"dnabert_s": "random, seed 7"}, RANDOM])
@pytest.mark.parametrize("verdict", ["unfamiliar", "partly unfamiliar"])
def test_reads_unlike_the_training_are_told_last_whatever_the_weights(
    verdict: Verdict, origins: dict[str, str]
) -> None:
    familiarity = SampleFamiliarity(verdict=verdict, compared=200, far=80)
    answer = summary(familiarity=familiarity, origins=origins).answer
    assert answer.message.endswith(f"; {answer.domain_warning}")
    assert familiarity.remark in answer.remarks
    [line] = warning_lines(answer)
    assert line.startswith(f"{verdict.upper()} SAMPLE")
    assert line.endswith("unlike all that the classifier was trained on.")


@pytest.mark.parametrize("verdict", ["familiar", "too few reads", "unknown"])
def test_other_samples_have_no_last_line_and_nothing_beside_random_weights(
    verdict: Verdict,
) -> None:
    familiarity = SampleFamiliarity(verdict=verdict, compared=200)
    answer = summary(familiarity=familiarity).answer
    assert answer.message.endswith(familiarity.headline)
    assert warning_lines(answer) == []
    random_answer = summary(familiarity=familiarity, origins=RANDOM).answer
    assert random_answer.message.endswith(RANDOM_WEIGHTS)
    assert familiarity.remark not in random_answer.remarks


def test_without_reads_nothing_is_said_of_shares() -> None:
    answer = summary(n_reads=0, fates=dict.fromkeys(FATES, 0), n_short=0).answer
    assert answer.message == "the input holds no reads; the tables have no lines"
    assert answer_lines(answer, 80) == ["the input holds no reads; the tables have no lines"]


def test_summary_json_holds_the_answer_and_recomputes_it_when_read() -> None:
    stored = json.loads(summary(origins=RANDOM).model_dump_json())
    assert stored["answer"]["message"].endswith(RANDOM_WEIGHTS)
    forged = stored | {"answer": {"viral": 0, "remarks": []}}
    assert RunSummary.model_validate_json(json.dumps(forged)).answer.viral == 12


def test_samples_add_up_and_keep_each_remark_once() -> None:
    first = summary(pairs={"viral": 1, "others": 4}, remarks=("unlike the training",))
    second = summary(pairs={"viral": 2, "others": 3}, remarks=("unlike the training", "mixed"))
    total = add_summaries([first, second]).answer
    assert (total.reads, total.viral, total.pairs, total.viral_pairs) == (2000, 24, 10, 3)
    assert total.too_short == 500
    assert [remark for remark in total.remarks if "nlike" in remark] == ["Unlike the training."]


def test_one_sample_of_an_older_version_makes_the_number_of_short_reads_unknown() -> None:
    assert add_summaries([summary(), summary(n_short=None)]).answer.too_short is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_the_result_first_within_its_width(width: int) -> None:
    lines = answer_lines(summary(origins=RANDOM, has_card=False).answer, width)
    assert lines[0].startswith("12 of 1,000 reads are viral")
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "without a verdict 200 20.0 %" in text
    assert "no open reading frame 150 15.0 %" in text
    assert "They do not count as not viral" in text
    assert "are random" in text
