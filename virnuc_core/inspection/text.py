"""Describe an inspection in lines of text."""

from collections.abc import Iterator
from typing import Final

from virnuc_core.encoder_names import PROTEIN
from virnuc_core.errors import format_bytes, printable
from virnuc_core.inspection.records import (
    InspectedFile,
    InspectedSample,
    Inspection,
    ReadStatistics,
)

_BAR_LETTERS: Final = 40  # of the longest bar of the histogram
_LABEL_WIDTH: Final = 38
_CELL_WIDTH: Final = 16


def describe(inspection: Inspection) -> list[str]:
    """Return an inspection as lines of text for a terminal.

    Control characters in names of files are escaped.
    """
    lines: list[str] = []
    for sample in inspection.samples:
        lines += _describe_sample(sample)
    if len(inspection.samples_by_name) > 1:
        n_samples = len(inspection.samples_by_name)
        lines += ["", f"One run. --sample-from name would make {n_samples:,} samples of it:"]
        for name, files in inspection.samples_by_name.items():
            lines.append(f"  {name}: {', '.join(files)}")
    if inspection.notes:
        lines += ["", "Notes:", *(f"  {note}" for note in inspection.notes)]
    lines += ["", *_describe_statistics(inspection)]
    lines += ["", *_describe_models(inspection)]
    lines += _describe_groups(inspection)
    return [printable(line) for line in lines]


def percent(share: float) -> str:
    """Return a share as a percentage. A small share that is not 0 is never shown as 0.

    >>> percent(0.4567), percent(0.00001), percent(0)
    ('45.7 %', '< 0.1 %', '0.0 %')
    """
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a duration in the unit that fits.

    >>> duration(12.4), duration(1234.0), duration(40_000)
    ('12 s', '21 min', '11 h')
    """
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _describe_sample(sample: InspectedSample) -> Iterator[str]:
    """Yield the files of a sample, and the files that are left out."""
    yield f"Sample {sample.sample}"
    files = {file.file: file for file in sample.files}
    in_pairs = {name for pair in sample.pairs for name in pair}
    for first, second in sample.pairs:
        if first == second:
            yield f"  pairs in one file: {_describe_file(files[first])}"
            yield from _describe_problem(files[first])
        else:
            yield f"  pair: {_describe_file(files[first])}"
            yield f"   and: {_describe_file(files[second])}"
            yield from _describe_problem(files[first])
            yield from _describe_problem(files[second])
    for file in sample.files:
        if file.file not in in_pairs:
            yield f"  single reads: {_describe_file(file)}"
            yield from _describe_problem(file)
    for name, reason in sample.ignored.items():
        yield f"  left out: {name}: {reason}"
    if sample.problem:
        yield f"  problem: {sample.problem}"


def _describe_file(file: InspectedFile) -> str:
    """Return a file with its number of reads and its size."""
    parts = [f"{file.file}: {_count(file.reads, is_exact=file.is_complete)} reads"]
    if file.problem:
        parts = [file.file]
    elif file.reads == 0:
        parts = [f"{file.file}: holds no reads"]
    if file.size is not None:
        parts.append(format_bytes(file.size))
    if file.skipped:
        parts.append(f"{file.skipped:,} broken records left out")
    return ", ".join(parts)


def _describe_problem(file: InspectedFile) -> Iterator[str]:
    """Yield the problem of a file in lines of its own, a line for each part of it."""
    if file.problem:
        problem, *hints = file.problem.split("; ")
        yield f"    PROBLEM: {problem}"
        for hint in hints:
            yield f"      {hint}"


def _count(number: int | None, *, is_exact: bool) -> str:
    """Return a number, or that it is an estimate, or not known."""
    if number is None:
        return "an unknown number of"
    if is_exact:
        return f"{number:,}"
    return f"about {number:,}"


def _describe_statistics(inspection: Inspection) -> Iterator[str]:
    """Yield what the reads of all samples are like."""
    statistics = inspection.statistics
    n_reads = _count(statistics.reads, is_exact=statistics.is_complete)
    if statistics.is_complete:
        yield f"{n_reads} reads, all of them read"
    else:
        yield (
            f"{n_reads} reads. All numbers are estimates from the first "
            f"{statistics.reads_read:,} reads of the files; --all reads everything."
        )
    lengths = statistics.lengths
    if lengths is None:
        return
    yield f"length: {lengths.shortest:,} to {lengths.longest:,} bases, median {lengths.median:,}"
    largest_share = max(length_bin.share for length_bin in lengths.histogram)
    for length_bin in lengths.histogram:
        span = f"{length_bin.shortest:,}-{length_bin.longest:,}"
        if length_bin.shortest == length_bin.longest:
            span = f"{length_bin.shortest:,}"
        bar = "#" * max(1, round(_BAR_LETTERS * length_bin.share / largest_share))
        yield f"  {span:>23} {percent(length_bin.share):>8} {bar}"
    yield (
        f"letters that are not A, C, G, T: {percent(statistics.letters_not_acgt)} "
        f"of the letters, in {percent(statistics.reads_not_acgt)} of the reads"
    )
    duplicates = percent(inspection.duplicate_share)
    if statistics.is_complete:
        yield f"duplicates: {duplicates} of the reads repeat an earlier read"
    else:
        yield f"duplicates: {duplicates} of these first reads; of all reads it may be more"


def _describe_models(inspection: Inspection) -> Iterator[str]:
    """Yield a table with a column for each model length: verdicts, size of the run, times."""
    statistics = inspection.statistics
    yield _row("for a model length of", [f"{m.model_length} bases" for m in statistics.models])
    yield _row(
        "reads with an open frame (a verdict)",
        [percent(model.open_share) for model in statistics.models],
    )
    yield _row(
        "reads too short for the model",
        [percent(model.short_share) for model in statistics.models],
    )
    costs = inspection.costs
    if not costs:
        yield "time and disk: unknown, because it is not known how many reads there are"
        return
    yield _row("open frames", [f"{cost.rows:,}" for cost in costs])
    yield _row("of these repeated", [percent(cost.repeated_share) for cost in costs])
    yield _row(f"{PROTEIN.title} tokens", [f"{cost.tokens:,}" for cost in costs])
    yield _row("disk for embeddings", [format_bytes(cost.disk_bytes) for cost in costs])
    for index, time in enumerate(costs[0].times):
        yield _row(
            f"time on one {time.gpu}, {time.precision}",
            [duration(cost.times[index].seconds) for cost in costs],
        )
    for gpu in inspection.not_measured:
        yield _row(f"time on one {gpu}", ["not measured" for _ in costs])


def _row(label: str, cells: list[str]) -> str:
    """Return a line of a table."""
    return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)


def _describe_groups(inspection: Inspection) -> Iterator[str]:
    """Yield a table with a line for each file or pair, if there are several."""
    groups = [group for sample in inspection.samples for group in sample.groups]
    files = [file for sample in inspection.samples for file in sample.files]
    problem_files = {file.file for file in files if file.problem}
    if len(groups) < 2:
        return
    model_lengths = [model.model_length for model in inspection.statistics.models]
    titles = ["reads", "median"]
    titles += [f"open at {length}" for length in model_lengths]
    titles += [f"short at {length}" for length in model_lengths]
    yield ""
    yield "".join(f"{title:>14}" for title in titles) + "  file or pair"
    for group in groups:
        has_problem = not problem_files.isdisjoint(group.files)
        cells = _cells(group.statistics, n_columns=len(titles), has_problem=has_problem)
        name = " + ".join(group.files)
        if has_problem:
            name += " (PROBLEM, see above)"
        yield "".join(f"{cell:>14}" for cell in cells) + f"  {name}"


def _cells(statistics: ReadStatistics, *, n_columns: int, has_problem: bool) -> list[str]:
    """Return the cells of a line of the table of files.

    Args:
        statistics: What the reads are like, up to the problem if there is one.
        n_columns: The number of cells. What is not known is `-`.
        has_problem: The file, or one of the pair, could not be read to its end.
    """
    n_reads = "unknown"
    if statistics.reads is not None and not has_problem:
        n_reads = f"{statistics.reads:,}"
    cells = [n_reads]
    if statistics.lengths is not None:
        cells.append(f"{statistics.lengths.median:,}")
        cells += [percent(model.open_share) for model in statistics.models]
        cells += [percent(model.short_share) for model in statistics.models]
    return cells + ["-"] * (n_columns - len(cells))
