"""The pages on a new head: how far its figures may be believed, and nothing becomes markup."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

from virnuc_core.encoders.model_config import Estimate
from virnuc_core.report.messages import training_message
from virnuc_core.report.training_pages import (
    model_card,
    training_charts,
    training_notes,
    training_page,
)
from virnuc_core.training.training import TrainFile

from ..markdown_pages import HOSTILE_TEXTS, HtmlPage, shown_texts, structure
from .small_trainings import CHANCE, card, figures, training

FEW = {"train": {"others": 1, "virus": 2}, "test": {"others": 3, "virus": 20}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoders": "esm2: random; dnabert_s: random"}, "The encoders are stand-ins"),
        ({"encoders": "esm2: random; dnabert_s: real"}, "ESM-2 is a stand-in"),
        ({"encoders": "esm2: real; dnabert_s: random, seed 0"}, "DNABERT-S is a stand-in"),
        ({"clusters": FEW}, "The test has only 3 clusters"),
        ({"clusters": FEW}, "All genomes together make 4 clusters"),
        (
            {"figures": (figures("head", CHANCE), figures("4-mers"))},
            "The head does no better than 4-mers "
            "(AUROC 0.500 (0.400 to 0.600) against 0.980 (0.950 to 0.990)).",
        ),
        ({"not_run": {"1000 bases": "no genomes"}}, "Not run: 1000 bases, no genomes."),
        ({"left_out": {"short frames": 1_234}}, "Left out: 1,234 short frames."),
    ],
)
def test_limits_of_the_figures_are_named(changes: dict[str, Any], words: str) -> None:
    assert training_notes(training()) == []
    notes = training_notes(training(**changes))
    assert any(note.startswith(words) for note in notes), notes


@pytest.mark.parametrize(
    ("encoders", "words"),
    [
        ("esm2: facebook/esm2_t6_8M; dnabert_s: zhihan1996/DNABERT-S", None),
        ("esm2: a folder called: random; dnabert_s: real", None),
        ("esm2: converted; dnabert_s: random, seed 0", "; DNABERT-S is a stand-in"),
        ("esm2: random, seed 0; dnabert_s: converted", "; ESM-2 is a stand-in"),
        ("esm2: random; dnabert_s: random", "; ESM-2 and DNABERT-S are stand-ins"),
    ],
)
def test_the_outcome_names_only_the_encoders_that_are_random(
    encoders: str, words: str | None
) -> None:
    message = training_message(training(encoders=encoders))
    if words is None:
        assert "random" not in message
    else:
        assert f"{words} with random weights: this is not how good the method is" in message


def test_quotation_marks_on_the_card_are_quotation_marks() -> None:
    notes = {"a 'quoted' \"reason\"": "the test's genomes"}
    text = model_card(training(not_run=notes), with_charts=False)
    assert "Not run: a 'quoted' \"reason\", the test's genomes." in text
    assert "&#" not in text


def test_the_page_shows_each_metric_with_its_interval() -> None:
    page = training_page(training())
    assert '<td class="n" data-name="AUROC">0.980<br><small>0.950 to 0.990</small></td>' in page
    assert "<td>0.01</td>" in page
    assert "Uncertain: scores from 0.400 to below 0.600." in page


def test_a_metric_that_is_not_defined_is_a_dash() -> None:
    page = training_page(training(figures=(figures("head", None),)))
    assert '<td class="n" data-name="AUROC">–</td>' in page


def test_names_of_genomes_never_become_markup() -> None:
    page = training_page(training())
    assert "g&lt;1&gt;" in page
    assert "g<1>" not in page


def training_on(name: str) -> TrainFile:
    """Return a training in which everything that comes from files has this name."""
    genome = {"label": "virus", "cluster": 1, "side": "test", "frames": 10}
    return training(
        created=name,
        virnuc_version=name,
        encoders=f"esm2: {name}; dnabert_s: random",
        settings={"similarity": 0.05, "truth": name},
        genomes={name: genome},
        figures=(figures("head", asked=name), figures(name, asked=name)),
        histograms={name: ((4, 0), (1, 2))},
        not_run={name: name},
        left_out={name: 7},
    )


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_names_are_shown_as_they_are_on_the_card_and_the_page(name: str) -> None:
    plain, hostile = training_on("name"), training_on(name)
    for with_charts in (False, True):
        card_text = model_card(hostile, with_charts=with_charts)
        assert structure(card_text) == structure(model_card(plain, with_charts=with_charts))
    one_line = " ".join(name.split())
    assert f"Not run: {one_line}, {one_line}." in shown_texts(card_text)
    page = HtmlPage(training_page(hostile))
    assert page.tags == HtmlPage(training_page(plain)).tags
    assert name in page.texts


def test_a_long_list_of_genomes_is_cut_and_says_so() -> None:
    genome = {"label": "virus", "cluster": 1, "side": "", "frames": 0}
    page = training_page(training(genomes={f"g{number}": genome for number in range(501)}))
    assert page.count('<td data-name="side">not used</td>') == 500
    assert "All 501 are in train.json." in page


def test_the_card_tells_thresholds_sides_and_digests() -> None:
    text = model_card(training(), with_charts=False)
    assert "from reads of 100 to 500 bases (half of them up to 250)." in text
    assert "| 0.01 | 0.9877 | 0.9 % | 0.2 % to 2.8 % | 1.23 % |" in text
    assert "| test | 10 | 11 | 15 |" in text
    assert f"head {'3' * 16}." in text
    assert "data:image" not in text


def test_reads_of_one_length_and_a_head_without_thresholds() -> None:
    one_length = card(lengths=(150, 150, 150), thresholds={}, expected_fdr={}, uncertain=(0.5, 0.5))
    text = model_card(training(card=one_length), with_charts=False)
    assert "from reads of 150 bases." in text
    assert "no threshold keeps any false discovery rate." in text
    assert "No score is uncertain." in text


def test_a_refused_threshold_is_shown_with_its_interval() -> None:
    wide = {0.05: Estimate(value=0.05, low=0, high=0.31)}
    refused = training(card=card(thresholds={}, expected_fdr=wide), realised_fdr={})
    row = "| 0.05 | refused | 5.0 % | 0.0 % to 31.0 % | n/a |"
    assert row in model_card(refused, with_charts=False)
    page = HtmlPage(training_page(refused))
    for text in ("refused", "0.0 % to 31.0 %"):
        assert text in page.texts


def test_a_card_of_an_older_version_says_that_the_scatter_of_new_samples_is_unknown() -> None:
    older = training(card=card(expected_fdr={}))
    text = model_card(older, with_charts=False)
    assert "| 0.01 | 0.9877 | unknown | unknown | 1.23 % |" in text
    words = "how far the rates scatter between new samples is unknown"
    assert words in text
    assert words in training_page(older)


def test_curves_and_histograms_are_drawn_to_scale() -> None:
    roc, scores = training_charts(training())
    assert roc.title == "ROC, cross-validation"
    assert 'points="40.0,210.0 160.0,20.0 280.0,20.0 "' in roc.svg
    assert scores.title == "Scores of reads, test"
    assert 'points="40.0,20.0 160.0,20.0 160.0,210.0 280.0,210.0 "' in scores.svg
    assert "reads, of 4" in scores.svg


def test_the_card_in_the_ui_holds_its_charts() -> None:
    text = model_card(training(), with_charts=True)
    drawings = re.findall(r"base64,([A-Za-z0-9+/=]+)", text)
    assert [base64.b64decode(drawing)[:4] for drawing in drawings] == [b"<svg", b"<svg"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Method: a network, whose training ended after"),
        ({"method": "linear", "penalty": 0.01}, "Method: a logistic regression with penalty 0.01."),
        (
            {"method": "mean", "penalty": 0.1},
            "Method: the mean of a logistic regression with penalty 0.1 and of a network, whose",
        ),
    ],
)
def test_both_pages_tell_by_which_method_the_head_was_fitted(
    changes: dict[str, Any], words: str
) -> None:
    record = training(**changes)
    assert words in training_page(record)
    assert words in model_card(record, with_charts=False)
