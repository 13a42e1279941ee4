"""Find out which reads belong to which sample, and write the table with the result of each sample.

A sample is all files of one specimen. Samples are given by a sample sheet (see `sample_sheet`), by
the names of files, or by the read groups of alignments.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from virnuc_core.config import ReadsSpec, SamplesSpec
from virnuc_core.errors import MAX_SHOWN_NAMES, ConfigError, InputError, UnsafeFileError
from virnuc_core.reads.decision_log import decision_logger
from virnuc_core.reads.file_names import ENDINGS, group_samples
from virnuc_core.reads.mate_files import detect_pairs
from virnuc_core.reads.sample_sheet import find_name_problem, find_unusable_files, read_sheet
from virnuc_core.reads.sources import (
    Inputs,
    find_alignment_format_of_file,
    find_inputs,
    sample_name,
)
from virnuc_core.reads.stage import REMARKS, StageSummary
from virnuc_core.rundir import write_text_atomically
from virnuc_core.runfiles import RunFile, RunSummary
from virnuc_core.safe_files import read_file
from virnuc_core.sample_familiarity import UNKNOWN_DOMAIN, SampleFamiliarity
from virnuc_core.spreadsheets import escape_formula, restore_formula

_SCORED_FATES: Final = ("viral", "others", "uncertain")
NO_READS_NOTE: Final = "holds no reads"
log = decision_logger(__name__)


class SampleRow(RunFile):
    """One line of samples.tsv."""

    sample: str  # also the name of its run directory
    fate: Literal["predicted", "failed", "waiting"] = "waiting"
    reads: int | None = None
    scored: int | None = None  # reads with a viral score
    viral: int | None = None
    share: float | None = None  # of all reads, those that are viral
    flags: str = ""  # remarks on the reads: `name=count`, joined by commas
    note: str = ""  # why the sample failed, or that it has no reads


def summarize_sample(sample: str, summary: RunSummary, staging: StageSummary) -> SampleRow:
    """Return the line of samples.tsv for a sample that was predicted.

    Args:
        sample: The name of the sample.
        summary: The summary of its run. It counts the reads by their fate (viral, others, …).
        staging: The summary of reading its files.
    """
    fates = summary.fates
    n_reads = staging.counts.n_reads
    remarks = {name: staging.tally[name] for name in REMARKS}
    remarks["failed"] = fates.get("failed", 0)
    remarks["orphans"] = sum(file.orphans for file in staging.by_file)
    return SampleRow(
        sample=sample,
        fate="predicted",
        reads=n_reads,
        scored=sum(fates.get(fate, 0) for fate in _SCORED_FATES),
        viral=fates["viral"],
        share=round(fates["viral"] / max(1, n_reads), 6),  # 0 if there are no reads
        flags=",".join(f"{name}={count}" for name, count in remarks.items() if count),
        note="" if n_reads else NO_READS_NOTE,
    )


def add_summaries(summaries: Sequence[RunSummary]) -> RunSummary:
    """Return the sum of several predictions by the same models, for the answer over all of them.

    Args:
        summaries: The summaries of the samples. A remark that several have is kept once.
    """
    if not summaries:
        return RunSummary(n_reads=0)
    fates = Counter[str]()
    pairs = Counter[str]()
    remarks: dict[str, None] = {}  # each once, in order
    for summary in summaries:
        fates.update(summary.fates)
        pairs.update(summary.pairs)
        remarks |= dict.fromkeys(summary.remarks)
    outside = [summary.familiarity for summary in summaries if _is_outside(summary)]
    if outside:
        remarks[
            f"{len(outside)} of {len(summaries)} samples are farther from the classifier's "
            "training than genomes of known kinds are; the answer of each says more"
        ] = None
    short_counts = [summary.n_short for summary in summaries]
    known_short_counts = [count for count in short_counts if count is not None]
    is_known = len(known_short_counts) == len(summaries)
    first = summaries[0]
    return RunSummary(
        n_reads=fates.total(),
        fates=dict(fates),
        pairs=dict(pairs),
        n_short=sum(known_short_counts) if is_known else None,
        model_length=first.model_length,
        origins=first.origins,
        has_card=first.has_card,
        familiarity=_common_familiarity(summaries),
        remarks=tuple(remarks),
    )


def _is_outside(summary: RunSummary) -> bool:
    """Return whether the reads of a sample are unlike those of the classifier's training."""
    return summary.familiarity is not None and summary.familiarity.is_outside


def _common_familiarity(summaries: Sequence[RunSummary]) -> SampleFamiliarity | None:
    """Return that the classifier's training is unknown, if it is; else each sample has its own."""
    if all(summary.familiarity == UNKNOWN_DOMAIN for summary in summaries):
        return UNKNOWN_DOMAIN
    return None


def write_samples(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write samples.tsv, with one line per sample. The file appears only when it is complete.

    A name or note that begins like a formula gets a leading apostrophe.

    Args:
        path: The file.
        rows: The lines, in their order in the file.
    """
    lines = ["\t".join(SampleRow.model_fields)]
    for row in rows:
        cells: list[str] = []
        for _, value in row:
            text = "" if value is None else str(value)
            text = " ".join(text.split())  # without line ends and TABs
            if isinstance(value, str):  # numbers come from us
                text = escape_formula(text)
            cells.append(text)
        lines.append("\t".join(cells))
    write_text_atomically(path, "".join(line + "\n" for line in lines))


def read_samples(path: Path) -> list[SampleRow]:
    """Read `samples.tsv`, see `write_samples`.

    Args:
        path: The file.

    Raises:
        InputError: It is missing, or not a table of samples.
    """
    try:
        header, *lines = read_file(path).decode().splitlines()
        rows = []
        for line in lines:
            cells = dict(zip(header.split("\t"), line.split("\t"), strict=True))
            values = {name: restore_formula(cell) for name, cell in cells.items() if cell}
            rows.append(SampleRow.model_validate(values, strict=False))
    except (OSError, ValueError, UnsafeFileError) as error:
        raise InputError(
            "is no table of samples", file=path, hint="repeat the prediction, which writes it"
        ) from error
    return rows


def reads_by_sample(spec: SamplesSpec) -> dict[str, ReadsSpec]:
    """Return the reads of each sample: from the sheet, the names of files, or the read groups.

    Args:
        spec: The inputs, and how they name samples.

    Returns:
        The reads of each sample, by its name. They have the inputs and the read group, and none of
        the other settings.

    Raises:
        ConfigError: Samples are named in two ways, or a read group is given beside them.
        InputError: The sample sheet or the names of the files cannot be used.
    """
    if spec.samples is not None and (spec.all_inputs or spec.sample_from != "none"):
        raise ConfigError("samples: the sheet names all reads; give none beside it")
    if spec.read_group:
        raise ConfigError(
            "read_group: can be given for one sample only; of several samples, each has its own"
        )
    if spec.samples is not None:
        return read_sheet(spec.samples)
    if spec.sample_from == "name":
        return samples_by_file_name(spec)
    return samples_by_read_group(spec)


def check_sheet_files(sheet: Path) -> None:
    """Look for all files of a sample sheet before any of them is read, and log what is wrong.

    A sample whose files are not there fails alone, because those of the others can be predicted.

    Args:
        sheet: The sample sheet.

    Raises:
        InputError: No sample can be predicted. The message names the lines.
    """
    problems, has_usable_sample = find_unusable_files(sheet)
    if problems and not has_usable_sample:
        text = "; ".join(problems[:MAX_SHOWN_NAMES])
        n_hidden = len(problems) - MAX_SHOWN_NAMES
        if n_hidden > 0:
            text += f"; and {n_hidden} more"
        raise InputError(text)
    for problem in problems:
        log.error("%s; this sample will fail, the others are predicted", problem)


def samples_by_read_group(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """Divide the reads of BAM, CRAM and SAM files into samples, according to their read groups.

    Reads without a read group belong to a sample with the name of their file.

    Args:
        spec: The inputs.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: A file has another format; or see `find_inputs` and `find_samples`.
        ConfigError: The name of a sample cannot be used as a directory name.
    """
    from virnuc_core.reads.alignments import find_samples  # imported only if needed

    files_by_sample = defaultdict[str, list[str]](list)
    for file in find_inputs(spec.all_inputs).files:
        format_ = find_alignment_format_of_file(file)
        if not format_:
            raise InputError("only BAM, CRAM and SAM have read groups; this is none", file=file)
        changed_ns = Path(file).stat().st_mtime_ns
        for sample in find_samples(file, format_, sample_name((file,)), changed_ns):
            problem = find_name_problem(sample)
            if problem:
                raise ConfigError(
                    f"{file}: read groups of '{sample}': {problem} in their SM "
                    "(samtools addreplacerg)"
                )
            files_by_sample[sample].append(file)
    return {
        sample: ReadsSpec(reads=tuple(files), read_group=sample)
        for sample, files in files_by_sample.items()
    }


def samples_by_file_name(spec: ReadsSpec) -> dict[str, ReadsSpec]:
    """Divide files into samples by their names.

    Each file, or pair of files, is a sample. Files whose names differ only by the lane (`_L001`)
    are lanes of one sample. `file_names` has the rule.

    Args:
        spec: The inputs.

    Returns:
        The reads of each sample, by its name.

    Raises:
        InputError: See `find_inputs`.
        ConfigError: A name cannot be used as a directory name, or two samples have the same name.
    """
    inputs = _find_named_reads(spec)
    samples, clashes = group_samples(inputs.files, inputs.pairs)
    for file, earlier_file in clashes:
        raise ConfigError(
            f"{file}: named as {earlier_file} is; rename one, or write a sample sheet"
        )
    reads_by_sample: dict[str, ReadsSpec] = {}
    for sample in samples:
        first_file = sample.pairs[0][0] if sample.pairs else sample.singles[0]
        problem = find_name_problem(sample.name)
        if sample.name in reads_by_sample:
            problem = "its sample is named as another one is; rename one"
        if problem:
            raise ConfigError(f"{first_file}: {problem}, or write a sample sheet")
        n_groups = len(sample.pairs) + len(sample.singles)
        if n_groups > 1:
            log.info(
                "sample %s: %d files or pairs are joined by their names, beginning with %s",
                sample.name,
                n_groups,
                first_file,
            )
        reads_by_sample[sample.name] = ReadsSpec(
            reads=tuple(sample.singles),
            mates_1=tuple(first for first, _ in sample.pairs),
            mates_2=tuple(second for _, second in sample.pairs),
        )
    return reads_by_sample


def _find_named_reads(spec: ReadsSpec) -> Inputs:
    """Find the input files and detect pairs among them by their names.

    Files in a folder that have the name of a reads file (such as `.fastq`) but hold no reads are
    included. They are mostly empty, and their sample is reported as failed instead of missing.
    """
    inputs = find_inputs(spec.all_inputs)
    files = list(inputs.files)
    for name in inputs.ignored:
        match = ENDINGS.search(Path(name).name)
        is_special = name in inputs.left_out  # such as a named pipe, which is not read
        if (
            match is not None and match[1] and not is_special
        ):  # the ending of a format, such as `.fastq`
            files.append(name)
    return detect_pairs(spec, inputs._replace(files=tuple(files)))
