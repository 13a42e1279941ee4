"""Write one export over all samples of a prediction: a page, one set for MultiQC, Kraken's tables.

`export` does the same for a single run. Here all samples share the sections for MultiQC.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import ConfigError
from virnuc_core.reads.samples import add_summaries, read_samples
from virnuc_core.report.contigs import write_contigs
from virnuc_core.report.exports import (
    KRAKEN_ENDINGS,
    log,
    multiqc_data,
    multiqc_sections,
    require_complete,
    result_tables,
    threshold_of,
    unit_of,
    write_kraken_tables,
)
from virnuc_core.report.multiqc_names import export_name, find_merged_samples
from virnuc_core.report.summary_page import PAGE, TEXT_PAGE, write_samples_page
from virnuc_core.rundir import SAMPLES, RunDir, require_absent, write_text_atomically
from virnuc_core.runfiles import RunSummary

CONTIGS_ENDING: Final = ".contigs.tsv"


def export_samples(
    folder: Path, out: Path, *, force: bool = True, framed_only: bool = False
) -> tuple[Path, ...]:
    """Write the results of all samples of a prediction in formats of other tools.

    Samples that failed or wait are on the page, and in no other file.

    Args:
        folder: The folder of the prediction, with `samples.tsv`.
        out: The folder to write to.
        force: Write over existing files.
        framed_only: As in `export`.

    Returns:
        The files. The first one is the page.

    Raises:
        ConfigError: A sample has no complete run, two samples would have the same files, or a file
            exists and `force` is not set.
        InputError: `samples.tsv` cannot be used; or see `export`.
        DamagedFileError: See `export`.
        ShardError: See `export`.
    """
    rows = read_samples(folder / SAMPLES)
    samples = [row.sample for row in rows if row.fate == "predicted"]
    _require_names(samples)
    runs = {sample: RunDir(folder / sample) for sample in samples}
    summaries = {sample: require_complete(run) for sample, run in runs.items()}
    pages = (out / PAGE, out / TEXT_PAGE)
    multiqc_files = _multiqc_files(out, summaries)
    require_absent(*pages, *multiqc_files.values(), force=force)
    for sample in samples:
        result_tables(runs[sample], summaries[sample]).require_intact()
        require_absent(*_files_of_sample(out, sample), force=force)

    files: list[Path] = []
    data: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)  # by unit and section
    for sample in samples:
        run = runs[sample]
        summary = summaries[sample]
        kraken_reads, kraken_report, contigs = _files_of_sample(out, sample)
        counts = write_kraken_tables(run, result_tables(run, summary), kraken_reads, kraken_report)
        write_contigs(run, contigs, threshold_of(summary), framed_only=framed_only)
        files += [kraken_reads, kraken_report, contigs]
        for section, section_data in multiqc_data(summary, counts).items():
            data[unit_of(summary), section][export_name(sample)] = section_data
    for (unit, section), path in multiqc_files.items():
        content = multiqc_sections(unit)[section] | {"data": data[unit, section]}
        write_text_atomically(path, json.dumps(content, indent=1) + "\n")
    total = add_summaries(list(summaries.values()))
    write_samples_page(out, folder.resolve().name, rows, total, samples_folder=folder)
    return (*pages, *multiqc_files.values(), *files)


def is_folder_of_samples(folder: Path) -> bool:
    """Return True for the folder of a prediction of several samples, which is no run itself."""
    return (folder / SAMPLES).is_file() and not RunDir(folder).record.exists()


def _require_names(samples: list[str]) -> None:
    """Raise a `ConfigError` if two samples would have the same files; warn of what MultiQC merges.

    Args:
        samples: The names of the samples.
    """
    sample_of_name: dict[str, str] = {}
    for sample in samples:
        name = export_name(sample)
        other = sample_of_name.setdefault(name, sample)
        if other != sample:
            raise ConfigError(
                f"samples '{other}' and '{sample}' would both be exported as '{name}'; export "
                "their folders one by one, with --sample"
            )
    for name, merged_samples in find_merged_samples(samples).items():
        log.warning("MultiQC would show samples %s as '%s'", ", ".join(merged_samples), name)


def _multiqc_files(out: Path, summaries: dict[str, RunSummary]) -> dict[tuple[str, str], Path]:
    """Return the files for MultiQC by what they count (`unit_of`) and by section."""
    files: dict[tuple[str, str], Path] = {}
    for unit in sorted({unit_of(summary) for summary in summaries.values()}):
        for section in multiqc_sections(unit):
            files[unit, section] = out / f"virnuc_{section}_{unit}_mqc.json"
    return files


def _files_of_sample(out: Path, sample: str) -> tuple[Path, Path, Path]:
    """Return a sample's two tables of Kraken and its table of contigs."""
    name = export_name(sample)
    kraken_reads, kraken_report = (out / f"{name}{ending}" for ending in KRAKEN_ENDINGS)
    return kraken_reads, kraken_report, out / f"{name}{CONTIGS_ENDING}"
