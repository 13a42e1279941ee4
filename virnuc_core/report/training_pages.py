"""The pages on a new head: `train.html`, and the model card beside its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.encoders.model_config import Estimate, HeadCard
from virnuc_core.report.domain_tables import (
    DomainView,
    domain_charts,
    domain_view,
    one_kind_notes,
    unstated_kind_notes,
)
from virnuc_core.report.filling import fill_template
from virnuc_core.report.text import cell, percent
from virnuc_core.training.evaluation import Figures, Points
from virnuc_core.training.thresholds import MAX_RATE_RATIO
from virnuc_core.training.train_file import TrainFile

MIN_CLUSTERS: Final = 10  # of genomes of a class; fewer say little of a head
MAX_GENOMES: Final = 500  # that the page lists
DIGEST_LENGTH: Final = 16  # characters that the card shows
METRICS: Final = ("auroc", "auprc", "precision", "recall", "f1", "brier", "ece")
BLUE: Final = "#0969da"
ORANGE: Final = "#bc4c00"


# --- Notes ----------------------------------------------------------------------------------------


def training_notes(training: TrainFile) -> list[str]:
    """Return sentences on the limits of a training's figures, such as too few genomes.

    Genomes are clustered by similarity, and whole clusters are assigned to the training, the
    validation and the test, so the number of clusters is the size of a sample.
    """
    notes = []
    random_encoders = training.random_encoders
    if len(random_encoders) > 1:
        notes.append(
            f"The encoders are stand-ins with random weights ({training.encoders}): "
            "no figure here is an accuracy on real reads."
        )
    elif random_encoders:
        notes.append(
            f"{random_encoders[0]} is a stand-in with random weights ({training.encoders}): "
            "no figure here says how good this method is with both."
        )
    test_clusters = min(training.clusters["test"].values())  # of the class that has fewer
    if test_clusters < MIN_CLUSTERS:
        notes.append(
            f"The test has only {test_clusters} clusters of genomes of a class: too few to tell "
            "how good this very head is. The cross-validation asks about all of them."
        )
    sides = training.clusters.values()  # training, validation and test
    all_others = sum(side["others"] for side in sides)
    all_viruses = sum(side["virus"] for side in sides)
    all_clusters = min(all_others, all_viruses)
    if all_clusters < MIN_CLUSTERS:
        notes.append(
            f"All genomes together make {all_clusters} clusters of a class: too few to tell how "
            "good such heads are."
        )
    notes += one_kind_notes(training.card.domain)
    notes += unstated_kind_notes(training.card.domain)
    notes += _baseline_notes(training.figures)
    notes += [f"Not run: {what}, {reason}." for what, reason in training.not_run.items()]
    notes += [f"Left out: {count:,} {what}." for what, count in training.left_out.items()]
    return notes


def _baseline_notes(figures: Sequence[Figures]) -> list[str]:
    """Return a sentence for each baseline that is as good as the head on the first test set.

    A baseline is a simpler method, such as one that only counts words of four letters.

    Args:
        figures: The results of all methods. The head's come before those of the baselines.
    """
    test_set = figures[0].test_set
    # `is_natural` leaves out figures at an assumed share of viral reads.
    figures_of_reads = [
        line
        for line in figures
        if line.level == "read" and line.is_natural and line.test_set == test_set
    ]
    notes = []
    for baseline in figures_of_reads[1:]:
        head_auroc = figures_of_reads[0].metrics["auroc"]
        baseline_auroc = baseline.metrics["auroc"]
        if head_auroc is None or baseline_auroc is None:
            continue
        if baseline_auroc.value >= head_auroc.value:
            notes.append(
                f"The head does no better than {baseline.method} "
                f"(AUROC {head_auroc} against {baseline_auroc})."
            )
    return notes


# --- Charts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line of a chart."""

    label: str
    label_x: int
    colour: str
    points: str  # as SVG has them


@dataclass(frozen=True, slots=True)
class TrainingChart:
    """A chart of scores."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes of a chart show."""

    x: str
    y: str
    has_diagonal: bool = False


AXES: Final = {
    "ROC": Axes("reads of others called viral", "viral reads found", has_diagonal=True),
    "precision and recall": Axes("viral reads found", "of those called viral, right"),
    "reliability": Axes("score of virus", "share that is viral", has_diagonal=True),
}


def training_charts(training: TrainFile) -> list[TrainingChart]:
    """Return the shares by kind, GC content and length, the curves, and histograms of scores."""
    charts = [
        TrainingChart(chart.title, chart.svg) for chart in domain_charts(training.card.domain)
    ]
    for name, points in training.curves.items():
        line = _polyline("head", 0, BLUE, points)
        title = f"{name}, {training.figures[0].test_set}"
        charts.append(TrainingChart(title, _draw(AXES[name], [line])))
    for test_set, counts in training.histograms.items():
        charts.append(TrainingChart(f"Scores of reads, {test_set}", _draw_histogram(*counts)))
    return charts


def _polyline(label: str, place: int, colour: str, points: Points) -> Polyline:
    """Return a line in the coordinates of the chart.

    Args:
        label: The label of the line.
        place: Number of the label in the legend, from 0.
        colour: The colour.
        points: The x and y values, 0 to 1.
    """
    # The drawing is 300 wide. The axes begin at (40, 210) and are 240 and 190 long. y grows
    # downwards in a drawing.
    positions = ""
    for x, y in zip(*points, strict=True):
        positions += f"{40 + 240 * x:.1f},{210 - 190 * y:.1f} "
    return Polyline(label, 44 + 60 * place, colour, positions)


def _draw_histogram(others: Sequence[int], virus: Sequence[int]) -> str:
    """Return a chart with the numbers of reads by score, one line per class."""
    highest = max(*others, *virus, 1)  # at least 1, since it is divided by
    lines = [
        _polyline("others", 0, BLUE, _outline(others, highest)),
        _polyline("virus", 1, ORANGE, _outline(virus, highest)),
    ]
    return _draw(Axes("score of virus", f"reads, of {highest}"), lines)


def _outline(counts: Sequence[int], highest: int) -> Points:
    """Return the outline of a histogram over scores of 0 to 1, as shares of the highest bin."""
    x: list[float] = []
    y: list[float] = []
    for place, count in enumerate(counts):
        # Both ends of a bin have the same height, which makes a step.
        x += [place / len(counts), (place + 1) / len(counts)]
        y += [count / highest, count / highest]
    return tuple(x), tuple(y)


def _draw(axes: Axes, lines: list[Polyline]) -> str:
    """Return a chart as SVG."""
    return fill_template("training_chart.svg.j2", axes=axes, lines=lines)


# --- The page -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricCell:
    """A metric, and the interval that holds 95 % of the resampled figures."""

    value: str
    interval: str = ""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Who scored which rows, and how well."""

    method: str
    level: str
    rows: int
    prevalence: str
    metrics: list[MetricCell]


@dataclass(frozen=True, slots=True)
class FigureTable:
    """The figures of one test set."""

    title: str
    rows: list[FigureRow]


@dataclass(frozen=True, slots=True)
class Auroc:
    """The AUROC of reads of one test set."""

    value: str
    test_set: str
    clusters: int


@dataclass(frozen=True, slots=True)
class Threshold:
    """The score for a false discovery rate, and the rate that it gives."""

    rate: float
    score: str  # or that it is refused
    expected: str  # the rate in new samples
    interval: str  # that holds 95 % of new samples
    realised: str  # the rate in the test of this very head


@dataclass(frozen=True, slots=True)
class Genome:
    """A genome of the training, and the side of the split that it is on."""

    name: str
    label: str
    side: str
    cluster: int
    frames: int


@dataclass(frozen=True, slots=True)
class TrainingPage:
    """What stands in `train.html`."""

    created: str
    virnuc_version: str
    model_length: int
    head_digest: str
    aurocs: list[Auroc]
    shared_sequences: int
    method: str
    notes: list[str]
    tables: list[FigureTable]
    domain: DomainView | None
    charts: list[TrainingChart]
    prevalence: str
    uncertain: str
    threshold_note: str
    thresholds: list[Threshold]
    genomes: list[Genome]
    num_genomes: int
    settings: dict[str, str]
    digests: dict[str, str]


def training_page(training: TrainFile) -> str:
    """Return the content of `train.html`: how well a head classifies reads of unseen genomes."""
    card = training.card
    names_of_genomes = list(training.genomes)
    digests = training.digests | {"reads": card.reads, "truth": card.truth}
    page = TrainingPage(
        created=training.created,
        virnuc_version=training.virnuc_version,
        model_length=training.model_length,
        head_digest=training.digests["head"][:12],
        aurocs=_aurocs(training.figures),
        shared_sequences=training.shared_sequences,
        method=_method_text(training),
        notes=training_notes(training),
        tables=_figure_tables(training.figures),
        domain=domain_view(card.domain),
        charts=training_charts(training),
        prevalence=str(percent(card.prevalence)),
        uncertain=_uncertain_scores(card, "Uncertain: scores from {low} to below {high}."),
        threshold_note=_threshold_note(card),
        thresholds=_thresholds(training),
        genomes=[_genome(training, name) for name in names_of_genomes[:MAX_GENOMES]],
        num_genomes=len(names_of_genomes),
        settings={name: cell(value) for name, value in training.settings.items()},
        digests=digests,
    )
    return fill_template("train.html.j2", page=page)


def _aurocs(figures: Sequence[Figures]) -> list[Auroc]:
    """Return the AUROC of the head over the reads of each test set.

    `is_natural` leaves out figures at an assumed share of viral reads.
    """
    return [
        Auroc(str(line.metrics["auroc"]), line.test_set, line.clusters)
        for line in figures
        if line.method == "head" and line.level == "read" and line.is_natural
    ]


def _figure_tables(figures: Sequence[Figures]) -> list[FigureTable]:
    """Return a table for each test set.

    Figures of reads come before those of frames, and figures at the prevalence of the test set
    before those at another prevalence.
    """
    tables = []
    for test_set in dict.fromkeys(line.test_set for line in figures):
        lines = [line for line in figures if line.test_set == test_set]
        # reverse: "read" then comes before "frame" and "chunk", and true before false.
        lines.sort(key=lambda line: (line.level, line.is_natural), reverse=True)
        title = test_set[0].upper() + test_set[1:]
        tables.append(FigureTable(title, [_figure_row(line) for line in lines]))
    return tables


def _figure_row(figures: Figures) -> FigureRow:
    """Return the table row on one method and level."""
    return FigureRow(
        method=figures.method,
        level=figures.level,
        rows=figures.rows,
        prevalence=str(percent(figures.prevalence)),
        metrics=[_metric_cell(figures.metrics[name]) for name in METRICS],
    )


def _metric_cell(estimate: Estimate | None) -> MetricCell:
    """Return the cell with a metric and its confidence interval."""
    if estimate is None:
        return MetricCell("–")
    interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
    return MetricCell(f"{estimate.value:.3f}", interval)


def _uncertain_scores(card: HeadCard, words: str) -> str:
    """Return a sentence on the scores that are uncertain, or an empty text if that is not known.

    Args:
        card: The card of the head.
        words: The sentence, with the placeholders `{low}` and `{high}`.
    """
    if card.uncertain is None:
        return ""
    low, high = card.uncertain
    if low == high:
        return "No score is uncertain."
    return words.format(low=f"{low:.3f}", high=f"{high:.3f}")


def _threshold_note(card: HeadCard) -> str:
    """Return what the columns of the table of thresholds mean."""
    share = f"At {percent(card.prevalence)} of viral reads."
    if card.thresholds and not card.expected_fdr:
        return (
            f"{share} The card is of an older version: how far the rates scatter between new "
            "samples is unknown."
        )
    return (
        f"{share} A new sample has other genomes of the same kinds: as many as the head was "
        "tested with, and the same share of reads of each kind. The limits are meant to hold the "
        "rate of 95 of 100 such samples. A threshold is refused if the upper limit is more than "
        f"{MAX_RATE_RATIO:g} times the wanted rate, or as high as if every read was called viral."
    )


def _thresholds(training: TrainFile) -> list[Threshold]:
    """Return the thresholds of the head, with the false discovery rates that they give.

    A threshold was chosen for a wanted rate. In new samples, and in the head's own test, the rate
    may be another. Rates whose threshold was refused are in the table, too.
    """
    card = training.card
    thresholds = []
    for rate in sorted(card.thresholds | card.expected_fdr):
        score = "refused"
        realised_rate = cell(None)
        if rate in card.thresholds:
            score = f"{card.thresholds[rate]:.4f}"
            realised_rate = cell(percent(training.realised_fdr[rate], 2))
        expected, interval = "unknown", "unknown"
        estimate = card.expected_fdr.get(rate)
        if estimate is not None:
            expected = str(percent(estimate.value, 1))
            interval = f"{percent(estimate.low, 1)} to {percent(estimate.high, 1)}"
        thresholds.append(Threshold(rate, score, expected, interval, realised_rate))
    return thresholds


def _genome(training: TrainFile, name: str) -> Genome:
    """Return the table row on one genome of the training."""
    genome = training.genomes[name]
    return Genome(
        name=cell(name),
        label=str(genome["label"]),
        side=str(genome["side"] or "not used"),
        cluster=int(genome["cluster"]),
        frames=int(genome["frames"]),
    )


# --- The card -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardRow:
    """Who scored which reads, and how well."""

    method: str
    test_set: str
    clusters: int
    prevalence: str
    metrics: list[str]


@dataclass(frozen=True, slots=True)
class CardSide:
    """A side of the split: how many frames and clusters of genomes are on it."""

    name: str
    frames: int
    others: int
    virus: int


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What stands in the model card."""

    created: str
    virnuc_version: str
    model_length: int
    read_lengths: str
    notes: list[str]
    rows: list[CardRow]
    domain: DomainView | None
    prevalence: str
    threshold_note: str
    thresholds: list[Threshold]
    uncertain: str
    charts: list[TrainingChart]
    sides: list[CardSide]
    shared_sequences: int
    similarity: str
    learnt_from: int
    method: str
    encoders: str
    digests: str


def model_card(training: TrainFile, *, with_charts: bool) -> str:
    """Return the model card of a new head in Markdown."""
    card = training.card
    page = ModelCard(
        created=training.created,
        virnuc_version=training.virnuc_version,
        model_length=training.model_length,
        read_lengths=_read_lengths(card),
        notes=training_notes(training),
        rows=[_card_row(line) for line in training.figures if line.level == "read"],
        domain=domain_view(card.domain),
        prevalence=str(percent(card.prevalence)),
        threshold_note=_threshold_note(card),
        thresholds=_thresholds(training),
        uncertain=_uncertain_scores(card, "Scores from {low} to below {high} are uncertain."),
        charts=training_charts(training) if with_charts else [],
        sides=[_card_side(training, side) for side in training.clusters],
        shared_sequences=training.shared_sequences,
        similarity=str(percent(training.settings["similarity"])),
        learnt_from=training.learnt_from,
        method=_method_text(training),
        encoders=training.encoders,
        digests=_digests_text(training),
    )
    return fill_template("model_card.md.j2", page=page, with_charts=with_charts)


def _method_text(training: TrainFile) -> str:
    """Return in a sentence by which method a head was fitted."""
    network = (
        f"a network, whose training ended after {training.epochs} epochs; "
        f"the best was number {training.best_epoch}"
    )
    regression = "a logistic regression"
    if training.penalty is not None:
        regression = f"a logistic regression with penalty {training.penalty:g}"
    if training.method == "linear":
        method = regression
    elif training.method == "mean":
        method = f"the mean of {regression} and of {network}"
    else:
        method = network
    return f"Method: {method}."


def _digests_text(training: TrainFile) -> str:
    """Return the digests of a training's files and models, shortened, as one line."""
    digests = {"reads": training.card.reads, "truth": training.card.truth}
    for encoder in (PROTEIN, DNA):
        digests[encoder.title] = training.digests[encoder.name]
    digests["head"] = training.digests["head"]
    short_digests = []
    for title, digest in digests.items():
        short_digests.append(f"{title} {digest[:DIGEST_LENGTH]}")
    return ", ".join(short_digests)


def _read_lengths(card: HeadCard) -> str:
    """Return the lengths of the reads of the training as text."""
    shortest, median, longest = card.lengths
    if shortest == longest:
        return f"{shortest} bases"
    return f"{shortest} to {longest} bases (half of them up to {median})"


def _card_row(figures: Figures) -> CardRow:
    """Return the row of the model card on one method and test set."""
    return CardRow(
        method=figures.method,
        test_set=figures.test_set,
        clusters=figures.clusters,
        prevalence=str(percent(figures.prevalence)),
        metrics=[cell(figures.metrics[name]) for name in METRICS],
    )


def _card_side(training: TrainFile, side: str) -> CardSide:
    """Return the row of the model card on one side of the split, such as `test`."""
    genomes = [genome for genome in training.genomes.values() if genome["side"] == side]
    clusters = training.clusters[side]
    return CardSide(
        name=side,
        frames=sum(int(genome["frames"]) for genome in genomes),
        others=clusters["others"],
        virus=clusters["virus"],
    )
