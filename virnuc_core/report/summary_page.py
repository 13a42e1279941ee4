"""The page for people after every prediction: `summary.html`, and the same as `summary.md`.

The pages follow from the files of the run alone: the same run gives the same bytes, up to the times
of the run. They load no other files. Names of reads, files and samples are shown as plain text.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import numpy as np
import pandas as pd

import virnuc_core
from virnuc_core.answer import PART_TITLES, UNJUDGED_REASONS, Answer
from virnuc_core.checked_files import with_page_digest
from virnuc_core.confidential import redact
from virnuc_core.encoder_names import NAMES
from virnuc_core.errors import join_first
from virnuc_core.reads.samples import SampleRow
from virnuc_core.reads.subsets import read_columns
from virnuc_core.report.filling import (
    SECTIONS_TEMPLATE,
    Tile,
    environment,
    fill_template,
    sections_markdown,
)
from virnuc_core.report.histogram import draw_histogram
from virnuc_core.report.sections import Chart, Row, Section, Table
from virnuc_core.report.text import Link, Number, cell
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.runfiles import (
    FileDigest,
    RunRecord,
    RunSummary,
    now,
    read_record,
    redact_credentials,
)
from virnuc_core.system_errors import path_exists

if TYPE_CHECKING:
    from virnuc_core.tools.rescore import RescoreSummary

PAGE: Final = "summary.html"
TEXT_PAGE: Final = "summary.md"
PAGE_TEMPLATE: Final = "summary.html.j2"
GENERATOR: Final = "virnuc"
PIECE_READS: Final = 65_536  # reads that are held in memory together
MAX_CONTIGS: Final = 20
MIN_CONTIG_BASES: Final = 1000  # shorter sequences are called reads, not contigs
MAX_LENGTH_BINS: Final = 60
SCORE_BINS: Final = 20
READ_COLUMNS: Final = {
    "id": "str",
    "length": "int64",
    "fate": "str",
    "viral_score": "str",
    "flags": "str",
}
CITATIONS: Final = (
    "VirNucPro: Li et al., Briefings in Bioinformatics 2025, doi 10.1093/bib/bbaf224",
    *(f"{names.title}: {names.citation}" for names in NAMES),
)
# The title and authors of CITATION.cff, which an installed program does not have.
OWN_TITLE: Final = (
    "virnuc: VirNucPro's method for viral reads, at the speed of the hardware and with a "
    "validation that proves each run"
)
OWN_AUTHORS: Final = "The virnuc authors"
PAIRS_NOTE: Final = (
    "Report pairs: both mates are of one fragment and get one verdict together. The table of reads "
    "counts each mate by itself."
)
# What the remarks on the reads of a sample mean, behind their count.
SAMPLE_FLAGS: Final = {
    "short_for_model": "too short for the classifier",
    "ambiguous": "with letters other than A, C, G and T",
    "duplicate_ids": "with the id of an earlier read",
    "skipped": "broken records left out",
    "failed": "set aside",
    "orphans": "without a mate",
}
NO_FRAME_NOTE: Final = (
    "No open reading frame: there is a stop codon in each of the six ways to translate the read, "
    "or in each chunk of a long read. The method looks at frames without a stop codon only."
)
# The program of a notebook, whose words tell nothing about a run
NOTEBOOK_KERNEL: Final = "ipykernel_launcher.py"
FLAG_MEANINGS: Final = {
    "short_for_model": "shorter than half of the classifier's length",
    "ambiguous": "has letters other than A, C, G and T",
    "duplicate_of": "has the id of an earlier read",
    "unfamiliar": "unlike all that the classifier was trained on",
}


@dataclass
class _ReadFigures:
    """What the page needs of `reads.tsv`.

    Attributes:
        lengths: Number of reads by length in bases.
        scores: Number of reads by bin of the viral score.
        flags: Number of reads by flag.
        contigs: The longest viral sequences, the longest first.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    scores: np.ndarray = field(default_factory=lambda: np.zeros(SCORE_BINS, np.int64))
    flags: dict[str, int] = field(default_factory=dict)
    contigs: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SummaryPage:
    """The texts for the template `summary.html.j2`."""

    generator: str
    title: str
    headline: str
    subtitle: str
    is_unsafe: bool
    tiles: list[Tile]
    first_sections: list[Section]  # before the charts
    charts: list[Chart]
    further_sections: list[Section]


def load_templates() -> None:
    """Compile the templates of the pages. This takes longer than filling them in."""
    for name in (PAGE_TEMPLATE, SECTIONS_TEMPLATE):
        environment().get_template(name)


def write_summary_pages(run: RunDir, label: str, summary: RunSummary) -> Path:
    """Write the two pages of a complete run, and return the path of the HTML page.

    A page that is there already with the same content stays as it is.

    Args:
        run: The run directory. This process holds its lease.
        label: The name of the sample.
        summary: The summary of the run.

    Raises:
        DamagedFileError: `reads.tsv` or a record is not as the run left it.
        StorageError: The disk refuses.
    """
    record = read_record(run)
    figures = _read_figures(run, summary.files)
    answer = summary.answer
    command = record.attempts[-1].command if record.attempts else ()
    facts = _origin_facts(command, record, summary.origins, summary.threshold)
    facts["devices"] = ", ".join(device.name for device in summary.devices)
    facts |= _version_facts(record.virnuc_version, record)
    page = SummaryPage(
        generator=GENERATOR,
        title=f"Prediction of {label}",
        headline=answer.headline,
        subtitle=f"in the folder {run.root.resolve().name} · made {_minute(record.created)}",
        is_unsafe=bool(answer.random_weights),
        tiles=_tiles(answer),
        first_sections=_first_sections(answer, summary.pairs),
        charts=_figure_charts(figures),
        further_sections=_further_sections(figures, answer, facts, record.virnuc_version),
    )
    return _write(run.root, page)


def write_rescore_pages(
    out: RunDir,
    run: RunDir,
    summary: "RescoreSummary",
    head: Path | None,
    command: Sequence[str] = (),
) -> Path:
    """Write the two pages of a run that was scored again, and return the path of the HTML page.

    Args:
        out: The directory with the new results. This process holds its lease.
        run: The run whose embeddings were scored.
        summary: The content of `rescore.json`.
        head: The classifier that the user named; None: the scores of the run were kept.
        command: The words of the command that was given, for the page; none in a script.

    Raises:
        DamagedFileError: `reads.tsv` or a record is not as it was left.
        StorageError: The disk refuses.
    """
    record = read_record(run)
    figures = _read_figures(out, summary.files)
    answer = summary.answer
    threshold = summary.results.threshold
    classifier = "the scores of that run" if head is None else f"the classifier in {head}"
    remark = (
        f"This is the run {run.root}, judged again by {classifier} with the threshold "
        f"{threshold:g}. Its own verdicts are in {run.root}."
    )
    command = [redact(redact_credentials(word)) for word in command]
    facts = {"run": summary.run, "classifier": classifier}
    facts |= _origin_facts(command, record, summary.origins, threshold)
    facts |= _version_facts(virnuc_core.__version__, record)
    page = SummaryPage(
        generator=GENERATOR,
        title=f"Run {run.root.resolve().name}, scored again",
        headline=answer.headline,
        subtitle=f"made {_minute(now())}",
        is_unsafe=bool(answer.random_weights),
        tiles=_tiles(answer),
        first_sections=_first_sections(answer, summary.pairs, remark),
        charts=_figure_charts(figures),
        further_sections=_further_sections(figures, answer, facts, virnuc_core.__version__),
    )
    return _write(out.root, page)


def _first_sections(answer: Answer, pairs: dict[str, int], own_remark: str = "") -> list[Section]:
    """Return what stands before the charts: what to know first, and the verdicts.

    Args:
        answer: The answer, with its remarks.
        pairs: The number of pairs by fate.
        own_remark: A further remark, which comes first.
    """
    sections = [_first_section(answer, own_remark), _verdict_section(answer, pairs)]
    return [section for section in sections if not section.is_empty]


def _further_sections(
    figures: _ReadFigures, answer: Answer, facts: Mapping[str, str], version: str | None
) -> list[Section]:
    """Return what stands behind the charts: flags, contigs, origin and citations.

    Args:
        figures: The figures of the table of reads.
        answer: The answer.
        facts: How the results were made, by name.
        version: The version of virnuc that made the results; None if it is not known.
    """
    sections = [
        _flag_section(figures, answer),
        _contig_section(figures),
        _origin_section(facts),
        _citation_section(version),
    ]
    return [section for section in sections if not section.is_empty]


def _figure_charts(figures: _ReadFigures) -> list[Chart]:
    """Draw the lengths and the viral scores of the reads."""
    lengths, length_counts = _length_bins(figures.lengths)
    return read_charts(lengths, length_counts, figures.scores.tolist())


def read_charts(
    length_edges: Sequence[float], length_counts: Sequence[int], score_counts: Sequence[int]
) -> list[Chart]:
    """Draw the lengths and the viral scores of the reads of a run. Empty charts are left out.

    Args:
        length_edges: Edges of the bins of lengths, in bases.
        length_counts: Reads in each bin.
        score_counts: Reads in equal bins of the viral score from 0 to 1.
    """
    charts = []
    if length_counts:
        drawing = draw_histogram(
            length_edges, length_counts, "read length (bases)", "reads", is_whole=True
        )
        charts.append(Chart("Read lengths", "Number of reads by length", drawing))
    if any(score_counts):
        n_bins = len(score_counts)
        edges = [edge / n_bins for edge in range(n_bins + 1)]
        drawing = draw_histogram(edges, score_counts, "viral score of the read", "reads")
        charts.append(Chart("Viral scores", "Number of reads by viral score", drawing))
    return charts


def write_samples_page(
    folder: Path,
    label: str,
    rows: Sequence[SampleRow],
    summary: RunSummary,
    samples_folder: Path | None = None,
) -> Path:
    """Write one page over all samples, and return the path of the HTML page.

    Args:
        folder: The folder for the page.
        label: The name of the set of samples.
        rows: The lines of `samples.tsv`.
        summary: The sum of all predicted samples.
        samples_folder: The folder with `samples.tsv` and the runs. None: the folder of the page.
    """
    answer = summary.answer
    runs = _runs_of_samples(samples_folder or folder, rows)
    records = [read_record(run) for run in runs.values()]
    newest_record = max(records, key=lambda record: record.created, default=None)
    facts: dict[str, str] = {}
    subtitle = _describe_samples(rows)
    if newest_record is not None:
        subtitle += f" · made {_minute(newest_record.created)}"
        facts = _samples_facts(newest_record, summary)
    table: list[Row] = []
    for row in rows:
        share = None if row.share is None else Number(f"{100 * row.share:.2f} %")
        table.append(
            {
                "Sample": _link_to_page(row.sample, runs, folder),
                "Result": row.fate,
                "Reads": row.reads,
                "With a score": row.scored,
                "Viral": row.viral,
                "Viral share": share,
                "Remarks": _flags_in_words(row.flags),
                "Note": row.note,
            }
        )
    sections = [
        _first_section(answer, _failed_remark(rows)),
        Section(
            "Samples",
            sentences=["Each sample has a page of its own, summary.html in the sample's folder."],
            tables=[Table(table)],
        ),
        _verdict_section(answer, summary.pairs),
    ]
    further_sections = [_origin_section(facts), _citation_section(virnuc_core.__version__)]
    page = SummaryPage(
        generator=GENERATOR,
        title=f"Samples of {label}",
        headline=answer.headline,
        subtitle=subtitle,
        is_unsafe=bool(answer.random_weights),
        tiles=_tiles(answer),
        first_sections=[section for section in sections if not section.is_empty],
        charts=[],
        further_sections=[section for section in further_sections if not section.is_empty],
    )
    return _write(folder, page)


def _runs_of_samples(folder: Path, rows: Sequence[SampleRow]) -> dict[str, RunDir]:
    """Return the runs of the predicted samples by their names.

    Args:
        folder: The folder in which each sample has a folder of its own.
        rows: The lines of `samples.tsv`.
    """
    runs = {}
    for row in rows:
        run = RunDir(folder / row.sample)
        if row.fate == "predicted" and path_exists(run.record):
            runs[row.sample] = run
    return runs


def _link_to_page(sample: str, runs: Mapping[str, RunDir], folder: Path) -> Link | str:
    """Return the name of a sample, with a link to its page if it has a run.

    Args:
        sample: The name of the sample.
        runs: The runs by the names of their samples.
        folder: The folder of the page with the link.
    """
    if sample not in runs:
        return sample
    page = os.path.relpath(runs[sample].root / PAGE, folder)
    # "./" before it: a browser would take a name such as `data:x` for an address of its own.
    return Link(sample, f"./{quote(page)}")


def _flags_in_words(flags: str) -> str:
    """Return the remarks on the reads of a sample in words.

    Args:
        flags: The remarks as in `samples.tsv`, `name=count` joined by commas.

    >>> _flags_in_words("short_for_model=9698,skipped=2")
    '9,698 too short for the classifier; 2 broken records left out'
    """
    parts = []
    for flag in filter(None, flags.split(",")):
        name, _, count = flag.partition("=")
        words = SAMPLE_FLAGS.get(name, name)
        parts.append(f"{int(count):,} {words}" if count.isdecimal() else words)
    return "; ".join(parts)


def _samples_facts(record: RunRecord, summary: RunSummary) -> dict[str, str]:
    """Return how the results of several samples were made, by name, without their files.

    Args:
        record: The newest record of a sample.
        summary: The sum of all samples.
    """
    command = record.attempts[-1].command if record.attempts else ()
    without_files = record.model_copy(update={"inputs": ()})
    facts = _origin_facts(command, without_files, summary.origins, summary.threshold)
    return facts | _version_facts(record.virnuc_version, record)


def _origin_section(facts: Mapping[str, str]) -> Section:
    """Return the section on how the results were made.

    Args:
        facts: What to say, by name.
    """
    rows: list[Row] = [{"What": name, "Value": value} for name, value in facts.items()]
    return Section("How it was made", tables=[Table(rows)])


def _write(folder: Path, page: SummaryPage) -> Path:
    """Write the two forms of a page, and return the path of the HTML page."""
    sections = [*page.first_sections, *page.further_sections]
    headline = Section(page.title, sentences=[f"{page.headline}."])
    forms = {
        PAGE: fill_template(PAGE_TEMPLATE, page=page),
        TEXT_PAGE: sections_markdown([headline, *sections]).lstrip("\n"),
    }
    for name, form in forms.items():
        text = with_page_digest(form)
        path = folder / name
        # A complete run that is started again changes no file.
        if not path_exists(path) or path.is_symlink() or path.read_bytes() != text.encode():
            write_text_atomically(path, text)
    return folder / PAGE


def _tiles(answer: Answer) -> list[Tile]:
    """Return the large numbers at the top of the page."""
    tiles = [
        Tile("reads", cell(answer.reads)),
        Tile("viral", cell(answer.viral)),
        Tile("not viral", cell(answer.others)),
        Tile("without a verdict", cell(answer.without_verdict)),
    ]
    if answer.pairs:
        tiles.append(Tile("viral pairs", f"{cell(answer.viral_pairs)} of {cell(answer.pairs)}"))
    return tiles


def _minute(time: str) -> str:
    """Return a time of a record for people: `2026-11-28 06:46 UTC`."""
    day, _, clock = time.partition("T")
    return f"{day} {clock[:5]} UTC" if time.endswith("+00:00") else time


def _describe_samples(rows: Sequence[SampleRow]) -> str:
    """Return how many samples there are, and what became of those that are not predicted."""
    noun = "sample" if len(rows) == 1 else "samples"
    parts = [f"{len(rows):,} {noun}"]
    for fate in ("failed", "waiting"):
        count = sum(row.fate == fate for row in rows)
        if count:
            parts.append(f"{count:,} {fate}")
    return " · ".join(parts)


def _failed_remark(rows: Sequence[SampleRow]) -> str:
    """Return which samples are in no figure of the page; empty if all are predicted."""
    missing = [row.sample for row in rows if row.fate != "predicted"]
    if not missing:
        return ""
    return f"In no figure of this page, because they were not predicted: {join_first(missing)}."


def _first_section(answer: Answer, own_remark: str = "") -> Section:
    """Return what to know before using the figures.

    Args:
        answer: The answer, with its remarks.
        own_remark: A further remark, which comes first.
    """
    remarks = [remark for remark in (own_remark, *answer.remarks) if remark]
    return Section(
        "What to know first", sentences=remarks or ["Nothing speaks against these figures."]
    )


def _verdict_section(answer: Answer, pairs: dict[str, int]) -> Section:
    """Return the table of verdicts, with the reads that have none and why, and of pairs.

    Args:
        answer: The answer.
        pairs: The number of pairs by fate.
    """
    counts = {"viral": answer.viral, "not viral": answer.others}
    for reason, count in answer.why_without_verdict.items():
        counts[f"no verdict: {reason}"] = count
    counts["all reads"] = answer.reads
    tables = [Table(_share_rows(counts, answer.reads))]
    if answer.pairs:
        pair_counts = _pair_counts(pairs)
        pair_counts["all pairs"] = answer.pairs
        tables.append(Table(_share_rows(pair_counts, answer.pairs), "Pairs"))
    sentences = ["A read without a verdict is unknown. It does not count as not viral."]
    if answer.pairs:
        sentences.insert(0, PAIRS_NOTE)
    if UNJUDGED_REASONS["no_open_frame"] in answer.why_without_verdict:
        sentences.append(NO_FRAME_NOTE)
    return Section("Verdicts", sentences=sentences, tables=tables)


def _pair_counts(pairs: dict[str, int]) -> dict[str, int]:
    """Return the counts of pairs by the words of the page, without fates that do not occur.

    Args:
        pairs: The counts by fate, as in the summary of a run.
    """
    counts = {}
    for fate, count in pairs.items():
        if fate == "others":
            counts["not viral"] = count
        elif fate in UNJUDGED_REASONS and count:
            counts[f"no verdict: {UNJUDGED_REASONS[fate]}"] = count
        elif count or fate == "viral":
            counts[fate] = count
    return counts


def _share_rows(counts: dict[str, int], whole: int) -> list[Row]:
    """Return a row for each count, with its share of the whole."""
    rows: list[Row] = []
    for title, count in counts.items():
        share = Number(f"{100 * count / whole:.1f} %") if whole else None
        rows.append({"What": title, "Count": count, "Share": share})
    return rows


def _flag_section(figures: _ReadFigures, answer: Answer) -> Section:
    """Return the table of flags, with what each means."""
    counts = {}
    for flag, count in figures.flags.items():
        label = flag
        if flag in FLAG_MEANINGS:
            label = f"{FLAG_MEANINGS[flag]} ({flag})"
        counts[label] = count
    return Section("Flags of reads", tables=[Table(_share_rows(counts, answer.reads))])


def _contig_section(figures: _ReadFigures) -> Section:
    """Return the longest sequences that are called viral."""
    return Section(
        f"Longest viral sequences, from {MIN_CONTIG_BASES:,} bases on",
        tables=[Table(figures.contigs)],
    )


def _origin_facts(
    command: Sequence[str],
    record: RunRecord,
    origins: Mapping[str, str],
    threshold: float | None,
) -> dict[str, str]:
    """Return what the results were made from, by name.

    Args:
        command: The command that made them; empty if it is not known.
        record: The record of the run that read the files.
        origins: Where the weights of each model come from.
        threshold: The score from which a read is viral.
    """
    facts: dict[str, str] = {}
    if command and Path(command[0]).name == NOTEBOOK_KERNEL:
        facts["command"] = "in a notebook"
    elif command:
        facts["command"] = " ".join(command)
    for file in record.inputs:
        facts[f"reads: {file.file}"] = f"{file.reads:,} reads"
    for part, origin in origins.items():
        facts[f"weights of {PART_TITLES.get(part, part)}"] = origin
    if threshold is not None:
        facts["threshold"] = f"{threshold}"
    return facts


def _version_facts(version: str | None, record: RunRecord) -> dict[str, str]:
    """Return the versions of virnuc, and of the packages that the run used, by name."""
    return {"virnuc": str(version), **record.versions}


def _citation_section(version: str | None) -> Section:
    """Return the papers to cite, and this program.

    Args:
        version: The version of virnuc that made the results; None if it is not known.
    """
    own_line = f"{OWN_TITLE}. {OWN_AUTHORS}"
    if version:
        own_line += f", version {version}"
    return Section("What to cite", sentences=(*CITATIONS, own_line))


def _read_figures(run: RunDir, files: Mapping[str, FileDigest] | None) -> _ReadFigures:
    """Read lengths, scores, flags and the longest viral sequences from `reads.tsv`, in pieces.

    Args:
        run: The directory with the table.
        files: The recorded digests of its files, by name.
    """
    figures = _ReadFigures()
    recorded = (files or {}).get(run.reads_table.name)
    pieces = read_columns(run.reads_table, READ_COLUMNS, recorded=recorded, chunksize=PIECE_READS)
    for piece in pieces:
        _add_piece(figures, piece)
    return figures


def _add_piece(figures: _ReadFigures, piece: pd.DataFrame) -> None:
    """Add some lines of `reads.tsv` to the figures."""
    for length, count in piece["length"].value_counts().items():
        bases = int(str(length))
        figures.lengths[bases] = figures.lengths.get(bases, 0) + int(count)

    # A read without a score has an empty field, which becomes NaN.
    scores = pd.to_numeric(piece["viral_score"], errors="coerce").dropna()
    score_edges = np.linspace(0.0, 1.0, SCORE_BINS + 1)
    score_counts, _ = np.histogram(scores, score_edges)
    figures.scores += score_counts

    for flags, count in piece["flags"].value_counts().items():
        for flag in filter(None, str(flags).split(",")):
            name = flag.partition("=")[0]
            figures.flags[name] = figures.flags.get(name, 0) + int(count)

    is_contig = (piece["fate"] == "viral") & (piece["length"] >= MIN_CONTIG_BASES)
    longest = piece[is_contig].nlargest(MAX_CONTIGS, "length")
    for row in longest.itertuples():
        contig: Row = {
            "Id": str(row.id),
            "Bases": int(str(row.length)),
            "Viral score": Number(str(row.viral_score)),
        }
        figures.contigs.append(contig)
    figures.contigs.sort(key=lambda row: -int(str(row["Bases"])))
    del figures.contigs[MAX_CONTIGS:]


def _length_bins(lengths: dict[int, int]) -> tuple[list[float], list[int]]:
    """Return the edges and counts of a histogram of lengths; empty without reads."""
    if not lengths:
        return [], []
    shortest = min(lengths)
    longest = max(lengths)
    n_lengths = longest - shortest + 1
    width = math.ceil(n_lengths / MAX_LENGTH_BINS)
    edges = np.arange(shortest, longest + width + 1, width)
    n_reads = list(lengths.values())
    counts, _ = np.histogram(list(lengths), edges, weights=n_reads)
    return edges.astype(float).tolist(), counts.astype(int).tolist()
