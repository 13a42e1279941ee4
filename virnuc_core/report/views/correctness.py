"""View of how results agree: labels, scores, bytes, embeddings, and a few ids that disagree."""

from collections.abc import Sequence

from virnuc_core.report.sections import Row, Section, Table, with_columns_of_first
from virnuc_core.report.text import Cell, Number, number, percent
from virnuc_core.validation import (
    BitwiseEquality,
    Comparison,
    LabelAgreement,
    ScoreDifference,
)


def correctness_section(comparisons: Sequence[Comparison]) -> Section:
    """Return the section on the agreement of each compared pair."""
    sentences = []
    for comparison in comparisons:
        sentences += _sentences(comparison)
    tables = [
        Table(agreement_rows(comparisons)),
        Table(cosine_rows(comparisons), "Centred cosine of pooled embeddings"),
    ]
    return Section("Correctness", sentences=sentences, tables=tables)


def _sentences(comparison: Comparison) -> list[str]:
    """Return sentences on the bytes of a compared pair, and on a few ids that disagree.

    Bytes are compared only for two of our runs (`bitwise` is None for other pairs).
    """
    a, b = comparison.a, comparison.b
    sentences = []
    equality = comparison.bitwise
    if equality is not None:
        if equality.identical:
            verdict = "the same bytes"
        elif equality.differing:
            verdict = f"DIFFERENT bytes: {'; '.join(equality.differing)}"
        else:
            verdict = "not all there to compare"
        counts = f"{equality.files_compared} files, {equality.shards_compared} shards"
        sentences.append(f"{a} and {b}: {verdict} ({counts})")
    for agreement in (comparison.frames, comparison.consensus):
        if agreement is not None:
            sentences += [f"{a} / {b}: {example}" for example in agreement.examples]
    return sentences


def agreement_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return the agreement of labels and scores, by frames and by consensus of each pair."""
    rows: list[Row] = []
    for comparison in comparisons:
        parts = {"frames": comparison.frames, "consensus": comparison.consensus}
        for kind, agreement in parts.items():
            if agreement is not None:
                pair: Row = {"Pair": f"{comparison.a} / {comparison.b}", "What": kind}
                labels = _label_cells(agreement)
                scores = _score_cells(agreement.score)
                same_bytes: Row = {"Same bytes": _same_bytes(comparison.bitwise)}
                rows.append(pair | labels | scores | same_bytes)
    # A pair without scores has no column "Of near threshold", and a table has the same in each row.
    return with_columns_of_first(rows)


def _label_cells(agreement: LabelAgreement) -> Row:
    """Return the cells on labels: the share of ids with the same label, in total and by class."""
    only_one = f"{agreement.only_in_a:,} / {agreement.only_in_b:,}"
    cells: Row = {
        "In both": agreement.in_both,
        "Only A / B": Number(only_one),
        "Agreement": percent(agreement.agreement, 3),
    }
    for name, label_class in agreement.classes.items():
        cells[f"Of {name}"] = Number(f"{label_class.agreeing:,} of {label_class.ids:,}")
    return cells


def _score_cells(score: ScoreDifference | None) -> Row:
    """Return the cells on scores: statistics of their differences. None without scores."""
    columns = ("Mean Δ", "Median Δ", "p99 Δ", "Max Δ", "Within tolerance", "allclose 1e-3")
    if score is None:
        return dict.fromkeys(columns)
    values: tuple[Cell, ...] = (
        Number(f"{score.mean:.2e}"),
        Number(f"{score.median:.2e}"),
        Number(f"{score.p99:.2e}"),
        Number(f"{score.max:.2e}"),
        percent(score.share_within_tolerance, 2),
        "yes" if score.allclose else "no",
    )
    return dict(zip(columns, values, strict=True))


def _same_bytes(equality: BitwiseEquality | None) -> str | None:
    """Return `yes` or `no`, or `None` if not all files could be compared."""
    if equality is None:
        return None
    if equality.identical:
        return "yes"
    return "no" if equality.differing else None


def cosine_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return the similarity of the embeddings of each pair."""
    rows: list[Row] = []
    for comparison in comparisons:
        for cosine in comparison.cosines:
            rows.append(
                {
                    "Pair": f"{comparison.a} / {comparison.b}",
                    "Part": cosine.part,
                    "Rows": cosine.n,
                    "Minimum": number(cosine.minimum, 7),
                    "p1": number(cosine.p1, 7),
                    "Mean": number(cosine.mean, 7),
                }
            )
    return rows
