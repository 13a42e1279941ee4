"""Show what a classifier was tested on, kind by kind: tables and pictures for its pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from virnuc_core.encoders.model_config import DomainRow, Estimate, TrainingDomain
from virnuc_core.reads.simulate import LABELS
from virnuc_core.report.filling import fill_template
from virnuc_core.report.text import cell, percent

FEW_GENOMES: Final = 5  # fewer say little of further genomes of a kind
LABEL_LETTERS: Final = 26  # of a name beside a picture
ROW_HEIGHT: Final = 16  # in a picture
COLOURS: Final = {"virus": "#bc4c00", "others": "#0969da"}
CLASS_NAMES: Final = {"virus": "viruses", "others": "others"}


@dataclass(frozen=True, slots=True)
class DomainCells:
    """The cells of a row: some reads of a class, and how many of them were called viral."""

    name: str
    label: str
    genomes: str
    reads: str
    with_frame: str
    called: str
    called_of_all: str


@dataclass(frozen=True, slots=True)
class DomainTable:
    """How the reads of each kind, GC content or length were judged."""

    title: str
    heading: str  # of the first column
    rows: list[DomainCells]


@dataclass(frozen=True, slots=True)
class DomainView:
    """What the pages say of the reads that a classifier was tested on."""

    sentences: list[str]
    tables: list[DomainTable]


@dataclass(frozen=True, slots=True)
class DomainChart:
    """A picture of one of the tables."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A row of a picture: a share with its interval, in coordinates of the drawing."""

    label: str
    y: int
    x: float
    low: float
    high: float
    colour: str
    text: str


def domain_view(domain: TrainingDomain | None) -> DomainView | None:
    """Return the tables of a card, and sentences on its ranges; None for an older card."""
    if domain is None:
        return None
    tables = [
        DomainTable("By kind", "kind", _cells(domain.kinds)),
        DomainTable("By GC content", "G and C", _cells(domain.gc)),
        DomainTable("By read length", "length", _cells(domain.lengths)),
    ]
    return DomainView(_sentences(domain), tables)


def _sentences(domain: TrainingDomain) -> list[str]:
    """Return sentences on what the classifier has seen, and on the figures over all reads."""
    sentences = []
    for label, (low, high) in domain.gc_ranges.items():
        shortest, longest = domain.length_ranges[label]
        lengths = f"{shortest} to {longest} bases"
        if shortest == longest:
            lengths = f"{shortest} bases"
        sentences.append(
            f"Nine in ten reads of {CLASS_NAMES[label]} have {100 * low:.0f} to {100 * high:.0f} % "
            f"of G and C, and {lengths}."
        )
    if domain.recall_of_all is not None:
        sentences.append(
            f"Recall over all viral reads, those without an open frame included: "
            f"{domain.recall_of_all}."
        )
    precision = "not defined, because no read was called viral"
    if domain.precision_of_all is not None:
        precision = str(domain.precision_of_all)
    sentences.append(
        f"Precision at {percent(domain.prevalence)} of viral reads, reads of both classes without "
        f"an open frame included: {precision}."
    )
    return sentences


def _cells(rows: Sequence[DomainRow]) -> list[DomainCells]:
    """Return the rows of a table as text."""
    return [
        DomainCells(
            name=cell(row.name),
            label=CLASS_NAMES[row.label],
            genomes=_genomes(row.genomes),
            reads=cell(row.reads),
            with_frame=_with_frame(row.share_with_frame),
            called=_share(row.called),
            called_of_all=_share(row.called_of_all),
        )
        for row in rows
    ]


def _genomes(n_genomes: int) -> str:
    """Return the number of genomes, and whether they are too few to tell."""
    if n_genomes < FEW_GENOMES:
        return f"{n_genomes}, too few to tell"
    return cell(n_genomes)


def _with_frame(share: float | None) -> str:
    """Return the share of reads with an open frame as text."""
    if share is None:
        return "–"
    return f"{100 * share:.0f} %"


def _share(estimate: Estimate | None) -> str:
    """Return a share with its interval as text."""
    if estimate is None:
        return "–"
    return str(estimate)


def domain_charts(domain: TrainingDomain | None) -> list[DomainChart]:
    """Return pictures of the tables: the share of reads that was called viral, with intervals."""
    if domain is None:
        return []
    pictures = {
        "Called viral, by kind": domain.kinds,
        "Called viral, by GC content": domain.gc,
        "Called viral, by read length": domain.lengths,
    }
    charts = []
    for title, rows in pictures.items():
        dots = _dots(rows)
        if dots:
            svg = fill_template("domain_chart.svg.j2", dots=dots, row_height=ROW_HEIGHT)
            charts.append(DomainChart(title, svg))
    return charts


def _dots(rows: Sequence[DomainRow]) -> list[Dot]:
    """Return the rows of a picture: those that have reads with a frame."""
    dots: list[Dot] = []
    for row in rows:
        if row.called is None:
            continue
        name = cell(row.name)
        if len(name) > LABEL_LETTERS:
            name = f"{name[: LABEL_LETTERS - 1]}…"
        dots.append(
            Dot(
                label=name,
                y=30 + ROW_HEIGHT * len(dots),
                x=_place(row.called.value),
                low=_place(row.called.low),
                high=_place(row.called.high),
                colour=COLOURS[row.label],
                text=f"{100 * row.called.value:.0f} %",
            )
        )
    return dots


def _place(share: float) -> float:
    """Return where a share lies on the axis of a picture, which is 180 wide and begins at 150."""
    return round(150 + 180 * share, 1)


def one_kind_notes(domain: TrainingDomain | None) -> list[str]:
    """Return a warning for each class whose reads are all of one kind."""
    notes = []
    for label, kinds in _kinds_by_class(domain).items():
        if len(kinds) == 1 and kinds != [label]:
            notes.append(
                f"All {CLASS_NAMES[label]} are of one kind ({kinds[0]}): how the head judges "
                f"{CLASS_NAMES[label]} of other kinds is not measured."
            )
    return notes


def unstated_kind_notes(domain: TrainingDomain | None) -> list[str]:
    """Return a sentence for each class whose kinds were not stated."""
    notes = []
    for label, kinds in _kinds_by_class(domain).items():
        if kinds == [label]:  # an unstated kind is called like the class
            notes.append(
                f"The kinds of the {CLASS_NAMES[label]} are not stated (column kind): whether some "
                "kind is judged badly is not measured."
            )
    return notes


def _kinds_by_class(domain: TrainingDomain | None) -> dict[str, list[str]]:
    """Return the kinds of each class, viruses first; nothing for an older card."""
    kinds: dict[str, list[str]] = {}
    if domain is not None:
        for label in reversed(LABELS):
            kinds[label] = [row.name for row in domain.kinds if row.label == label]
    return kinds
