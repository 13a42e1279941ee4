"""Write files of a run that other tools read.

These are sections for MultiQC, Kraken's two tables, and verdicts on contigs.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.errors import ConfigError
from virnuc_core.pipeline import read_summary
from virnuc_core.reads.subsets import WRITE_AGAIN
from virnuc_core.report.contigs import write_contigs
from virnuc_core.report.kraken import (
    ORPHAN_END,
    SCORE_BINS,
    FragmentCounts,
    ResultTables,
    find_id_problem,
    write_kraken_reads,
    write_kraken_report,
)
from virnuc_core.report.multiqc_names import (
    GENERAL_FILE,
    export_name,
    exported_samples,
    name_warnings,
    samples_beside,
)
from virnuc_core.report.text import one_line
from virnuc_core.rundir import RunDir, require_absent, write_text_atomically
from virnuc_core.runfiles import FileDigest, RunSummary, read_record
from virnuc_core.safe_files import remove_file
from virnuc_core.system_errors import is_real_folder, path_exists

log = logging.getLogger(__name__)

# The names that nf-core gives to Kraken's two tables, behind the name of the sample
KRAKEN_ENDINGS: Final = (".kraken2.classifiedreads.txt", ".kraken2.report.txt")
OWN_FOLDER: Final = "export"  # of a run; all files in it are those of its export
MULTIQC_SECTIONS: Final = Path(__file__).with_name("templates") / "multiqc.json"


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """The files that an export writes."""

    contigs: Path
    kraken_reads: Path
    kraken_report: Path
    multiqc: dict[str, Path]  # by the name of the section

    @property
    def all(self) -> tuple[Path, ...]:
        """Return every file."""
        return (self.contigs, self.kraken_reads, self.kraken_report, *self.multiqc.values())


def export(
    run: RunDir, out: Path, sample: str, *, force: bool = True, framed_only: bool = False
) -> tuple[Path, ...]:
    """Write the results of a finished run in formats of other tools.

    The files are `virnuc_*_mqc.json` for MultiQC, the two tables of Kraken with the names that
    nf-core uses, and `contigs.tsv`.

    Args:
        run: The run directory.
        out: The folder to write to.
        sample: The name of the sample. All files use it as `export_name` writes it.
        force: Write over existing files.
        framed_only: In `contigs.tsv`, weigh the chunks as if those without an open frame did not
            exist (see `contigs`).

    Returns:
        The files.

    Raises:
        ConfigError: The run is not complete, or a file exists and `force` is not set.
        DamagedFileError: `reads.tsv`, `pairs.tsv` or a record is not as the run left it.
        InputError: The run's store cannot be read, or its tables are not of the same reads.
        ShardError: The run's shards cannot be read.
    """
    summary = require_complete(run)
    tables = result_tables(run, summary)
    tables.require_intact()  # nothing is written if a table is not as the run left it
    sections = multiqc_sections(unit_of(summary))
    name = export_name(sample)
    files = _export_files(out, name, sections)
    for warning in name_warnings(sample, samples_beside(run.root, out, sample)):
        log.warning("%s", warning)
    is_own_folder = out.absolute() == (run.root / OWN_FOLDER).absolute()
    if not is_own_folder:
        _warn_of_replaced_sample(out, sample)
    require_absent(*files.all, force=force)
    if is_own_folder and is_real_folder(out):
        _remove_former_names(out, files)

    counts = write_kraken_tables(run, tables, files.kraken_reads, files.kraken_report)
    data = multiqc_data(summary, counts)
    for section_name, section in sections.items():
        content = section | {"data": {name: data[section_name]}}
        write_text_atomically(files.multiqc[section_name], json.dumps(content, indent=1) + "\n")
    write_contigs(run, files.contigs, threshold_of(summary), framed_only=framed_only)
    return files.all


def require_complete(run: RunDir) -> RunSummary:
    """Return the summary of a run, or raise an error if the run is not complete.

    Args:
        run: The run directory.

    Raises:
        ConfigError: The run is not complete, or a table of it is missing.
    """
    summary = read_summary(run, set_aside=False)
    if summary is None or not path_exists(run.reads_table):
        raise ConfigError(f"{run.root}: holds no complete run; finish it first")
    if summary.pairs and not path_exists(run.pairs_table):
        raise ConfigError(f"{run.pairs_table}: is missing; {WRITE_AGAIN}")
    return summary


def threshold_of(summary: RunSummary) -> float:
    """Return the score from which a read of a run is a virus."""
    return DEFAULT_THRESHOLD if summary.threshold is None else summary.threshold


def write_kraken_tables(
    run: RunDir, tables: ResultTables, kraken_reads: Path, kraken_report: Path
) -> FragmentCounts:
    """Write Kraken's two tables of a run, and log what tools cannot do with its ids.

    Args:
        run: The run directory.
        tables: The results of the run.
        kraken_reads: The table of reads to write.
        kraken_report: The table of taxa to write.

    Returns:
        The counts of fragments.

    Raises:
        InputError: See `write_kraken_reads`.
    """
    record = read_record(run)
    id_problem = find_id_problem(record)
    if id_problem:
        log.warning("%s", id_problem)
    counts = write_kraken_reads(kraken_reads, tables, record)
    write_kraken_report(kraken_report, counts)
    if counts.num_orphans:
        log.warning(
            "%s: %d reads without a mate have ids that end in %s, so that tools which extract "
            "reads by id leave them out and keep both files in step; predict --write-viral writes "
            "the viral ones",
            kraken_reads,
            counts.num_orphans,
            ORPHAN_END,
        )
    return counts


def result_tables(run: RunDir, summary: RunSummary) -> ResultTables:
    """Return the tables of a run's reads and pairs, with their recorded digests.

    Args:
        run: The run directory.
        summary: The summary of the run.
    """
    reads_digest = _recorded_digest(run.reads_table, summary)
    if not summary.pairs:
        return ResultTables(run.reads_table, reads_digest)
    return ResultTables(
        reads=run.reads_table,
        reads_digest=reads_digest,
        pairs=run.pairs_table,
        pairs_digest=_recorded_digest(run.pairs_table, summary),
    )


def _recorded_digest(table: Path, summary: RunSummary) -> FileDigest | None:
    """Return the digest of a result file in the run's summary.

    The counts of reads come from the summary, and the tables from the file. After a change of the
    file they would not agree. If an older version has recorded no digest, a warning says that the
    file is not checked.
    """
    recorded = (summary.files or {}).get(table.name)
    if recorded is None:
        log.warning(
            "%s: was written by an older version, which recorded no digest; it is not checked for "
            "damage",
            table,
        )
    return recorded


def _export_files(out: Path, name: str, sections: Iterable[str]) -> ExportFiles:
    """Return the paths of an export's files.

    Args:
        out: The folder of the export.
        name: The name of the sample, see `export_name`.
        sections: The names of the sections for MultiQC.
    """
    return ExportFiles(
        contigs=out / "contigs.tsv",
        kraken_reads=out / f"{name}{KRAKEN_ENDINGS[0]}",
        kraken_report=out / f"{name}{KRAKEN_ENDINGS[1]}",
        multiqc={section: out / f"virnuc_{section}_mqc.json" for section in sections},
    )


def _warn_of_replaced_sample(out: Path, sample: str) -> None:
    """Log a warning if a folder holds the export of another sample, whose files would be replaced.

    Args:
        out: The folder of the export.
        sample: The name of the sample.
    """
    for earlier_sample in exported_samples(out / GENERAL_FILE):
        if export_name(earlier_sample) != export_name(sample):
            log.warning(
                "%s: holds the export of sample %s; those of its files that have the same names "
                "are replaced with --force only; another folder (-o) keeps both samples",
                out,
                one_line(earlier_sample),
            )


def _remove_former_names(folder: Path, files: ExportFiles) -> None:
    """Remove the tables of Kraken that an earlier export of the run wrote under another name.

    Otherwise one run would be two samples in MultiQC.

    Args:
        folder: The run's own folder of exports.
        files: The files of this export.
    """
    for ending in KRAKEN_ENDINGS:
        for path in folder.glob(f"*{ending}"):
            if path not in files.all:
                remove_file(path, missing_ok=True)


# --- MultiQC --------------------------------------------------------------------------------------


def multiqc_data(summary: RunSummary, counts: FragmentCounts) -> dict[str, Mapping[Any, float]]:
    """Return the data of each of MultiQC's sections, by its name.

    Of a run of pairs, everything counts fragments: pairs, and reads without a mate.

    Args:
        summary: The summary of the run.
        counts: What was counted for Kraken's tables.
    """
    fates = summary.pairs or summary.fates
    unit = unit_of(summary)
    total = sum(fates.values())
    num_viral = fates.get("viral", 0)
    num_scored = int(counts.by_score.sum())
    general = {
        f"viral_{unit}": num_viral,
        unit: total,
        "viral_percent": 100 * num_viral / max(total, 1),
        "scored_percent": 100 * num_scored / max(total, 1),
    }
    by_score = {}
    for place, count in enumerate(counts.by_score.tolist()):
        middle_of_bin = (place + 0.5) / SCORE_BINS
        by_score[middle_of_bin] = count
    return {"general": general, "fates": fates, "scores": by_score}


def multiqc_sections(unit: str) -> dict[str, dict[str, Any]]:
    """Return MultiQC's sections without data, by their names.

    Runs of pairs have sections and columns of their own, so that MultiQC never shows reads of one
    sample beside fragments of another one.

    Args:
        unit: What is counted, see `unit_of`.
    """
    template = MULTIQC_SECTIONS.read_text(encoding="utf-8")
    sections: dict[str, dict[str, Any]] = json.loads(template.replace("UNIT", unit))
    return sections


def unit_of(summary: RunSummary) -> str:
    """Return what is counted: reads, or fragments if the run has pairs."""
    return "fragments" if summary.pairs else "reads"
