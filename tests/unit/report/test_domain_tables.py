"""The pages on a head show how it judges reads of each kind, and warn of kinds it never met."""

from __future__ import annotations

import re
from typing import Any

import pytest

from virnuc_core.encoders.model_config import DomainRow, Estimate, TrainingDomain
from virnuc_core.report.domain_tables import domain_charts, domain_view
from virnuc_core.report.messages import training_message
from virnuc_core.report.training_pages import model_card, training_notes, training_page

from ..markdown_pages import HOSTILE_TEXTS, HtmlPage, structure
from .small_trainings import card, training

RECALL = Estimate(value=0.75, low=0.5, high=0.875)


def row(name: str, label: str, **changes: Any) -> DomainRow:
    """Return a row of twelve genomes and 100 reads, of which three in four were called viral."""
    base = DomainRow(
        name=name,
        label=label,  # type: ignore[arg-type]  # pydantic refuses any other label
        genomes=12,
        reads=100,
        share_with_frame=0.8,
        called=RECALL,
        called_of_all=Estimate(value=0.6, low=0.4, high=0.7),
    )
    return base.model_copy(update=changes)


def domain(**changes: Any) -> TrainingDomain:
    """Return the tables of a head that was tested on two kinds of each class."""
    base = TrainingDomain(
        kinds=(
            row("RNA virus", "virus"),
            row("phage", "virus", genomes=4),
            row("plant", "others"),
            row("bacteria", "others"),
        ),
        gc=(row("below 30 %", "virus"),),
        lengths=(row("150 to 199 bases", "others"),),
        gc_ranges={"virus": (0.31, 0.58), "others": (0.34, 0.69)},
        length_ranges={"virus": (100, 150), "others": (150, 150)},
        prevalence=0.01,
        recall_of_all=Estimate(value=0.7, low=0.6, high=0.8),
        precision_of_all=Estimate(value=0.06, low=0.03, high=0.11),
    )
    return base.model_copy(update=changes)


def test_the_card_and_the_page_have_the_same_tables_and_sentences() -> None:
    record = training(card=card(domain=domain()))
    text = model_card(record, with_charts=False)
    assert "| RNA virus | viruses | 12 | 100 | 80 % | 0.750 (0.500 to 0.875) | 0.600" in text
    assert "| phage | viruses | 4, too few to tell | 100 |" in text
    page = HtmlPage(training_page(record))
    for sentence in (
        "Nine in ten reads of viruses have 31 to 58 % of G and C, and 100 to 150 bases.",
        "Nine in ten reads of others have 34 to 69 % of G and C, and 150 bases.",
        "Recall over all viral reads, those without an open frame included: 0.700 (0.600 to 0.800).",
        "Precision at 1.0 % of viral reads, reads of both classes without an open frame included: "
        "0.060 (0.030 to 0.110).",
    ):
        assert f"- {sentence}" in text
        assert sentence in page.texts
    for heading in ("By kind", "By GC content", "By read length"):
        assert f"### {heading}" in text
        assert heading in page.texts
    assert "4, too few to tell" in page.texts


def test_an_older_card_has_no_tables_and_no_warning() -> None:
    record = training()
    assert domain_view(record.card.domain) is None
    assert domain_charts(record.card.domain) == []
    assert "tested on" not in training_page(record)
    assert "tested on" not in model_card(record, with_charts=True)
    assert training_notes(record) == []


def test_shares_are_drawn_to_scale_with_their_intervals() -> None:
    charts = {chart.title: chart.svg for chart in domain_charts(domain())}
    by_kind = charts["Called viral, by kind"]
    # The axis begins at 150 and is 180 long: 0.75 is at 285, the interval from 240 to 307.5.
    assert by_kind.count('<circle cx="285.0"') == 4
    assert by_kind.count('d="M240.0 ') == 4
    assert by_kind.count("H307.5") == 4
    rows_of_dots = [int(y) for y in re.findall(r'cy="(\d+)"', by_kind)]
    assert len(set(rows_of_dots)) == 4, "no dot hides another"
    assert len(charts) == 3


def test_a_row_without_a_scored_read_has_a_dash_and_no_dot() -> None:
    closed = row("viroid", "virus", reads=0, genomes=0, called=None, share_with_frame=0)
    view = domain_view(domain(kinds=(closed,)))
    assert view is not None
    assert view.tables[0].rows[0].called == "–"
    titles = [chart.title for chart in domain_charts(domain(kinds=(closed,)))]
    assert titles == ["Called viral, by GC content", "Called viral, by read length"]


@pytest.mark.parametrize(
    ("others", "note", "is_in_outcome"),
    [
        (["vertebrate"], "All others are of one kind (vertebrate): how the head judges", True),
        (["others"], "The kinds of the others are not stated (column kind)", False),
        (["plant", "bacteria"], None, False),
    ],
)
def test_a_class_of_one_kind_is_warned_of(
    others: list[str], note: str | None, is_in_outcome: bool
) -> None:
    viruses = [row("RNA virus", "virus"), row("phage", "virus")]
    kinds = (*viruses, *(row(kind, "others") for kind in others))
    record = training(card=card(domain=domain(kinds=kinds)))
    notes = training_notes(record)
    if note is None:
        assert notes == []
    else:
        assert [text.startswith(note) for text in notes] == [True]
    assert ("of one kind" in training_message(record)) == is_in_outcome


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_kinds_are_shown_as_they_are(name: str) -> None:
    pages = []
    for kind in ("kind", name):
        kinds = (row(kind, "virus"), row(kind, "others"))
        record = training(card=card(domain=domain(kinds=kinds)))
        pages.append((HtmlPage(training_page(record)), model_card(record, with_charts=True)))
    (plain_page, plain_card), (page, card_text) = pages
    assert page.tags == plain_page.tags
    assert structure(card_text) == structure(plain_card)
