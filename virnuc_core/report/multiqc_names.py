"""Find out under which name MultiQC shows a sample, and which samples it would merge.

An export uses one name for a sample: in the names of files, and in the content for MultiQC. MultiQC
then shortens names: it shows `P1_trimmed` as `P1`. Samples with the same short name become one row,
and only the last of them is shown. `multiqc_names.toml` has the default rules.
"""

import functools
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.errors import UnreadableError, UnsafeFileError, join_first
from virnuc_core.report.text import one_line
from virnuc_core.rundir import SAMPLES
from virnuc_core.safe_files import read_file
from virnuc_core.spreadsheets import restore_formula

GENERAL_FILE: Final = "virnuc_general_mqc.json"  # of an export; it has the name of the sample
_RULES: Final = Path(__file__).with_suffix(".toml")
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]")
# What can be wrong with a file that somebody else may have written.
_READING_ERRORS: Final = (OSError, UnsafeFileError, UnreadableError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Rules:
    """MultiQC's settings of these names.

    Attributes:
        ends: A name is cut off before each of these texts, wherever it stands.
        trims: These are removed where a name begins or ends with them.
    """

    ends: tuple[str, ...]
    trims: tuple[str, ...]


@functools.cache
def _load_rules() -> _Rules:
    """Return the default rules of MultiQC."""
    settings = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    return _Rules(tuple(settings["fn_clean_exts"]), tuple(settings["fn_clean_trim"]))


def export_name(sample: str) -> str:
    """Return the name of a sample in all files of an export, and in the names of files.

    Characters other than letters, digits, `.`, `_` and `-` become `_`: they could begin HTML in the
    page of MultiQC, or cannot be part of a file name.
    """
    return _NOT_IN_NAMES.sub("_", sample)


def multiqc_name(name: str) -> str:
    """Return the name under which MultiQC shows a sample, if its rules are the default ones.

    Empty if the rules leave nothing of it. MultiQC then shows whatever name it was given: for a
    table of Kraken, the name of the file.

    Args:
        name: The name in the files, see `export_name`.
    """
    rules = _load_rules()
    for end in rules.ends:
        name = name.split(end, 1)[0]
    for text in rules.trims:
        name = name.removesuffix(text)
        name = name.removeprefix(text)
    return name.strip()


def find_merged_samples(samples: Iterable[str]) -> dict[str, list[str]]:
    """Find samples that MultiQC would show as one.

    Args:
        samples: The names of all samples.

    Returns:
        The samples by the name under which they would be shown; only those that share it.
    """
    samples_by_name = defaultdict[str, list[str]](list)
    for sample in dict.fromkeys(samples):
        name = export_name(sample)
        shown_name = multiqc_name(name) or name
        samples_by_name[shown_name].append(sample)
    for shown_name, same_samples in list(samples_by_name.items()):
        if len(same_samples) == 1:
            del samples_by_name[shown_name]
    return dict(samples_by_name)


def name_warnings(sample: str, others: Iterable[str]) -> list[str]:
    """Return a sentence for each problem that MultiQC would have with the name of a sample.

    Args:
        sample: The name.
        others: The names of the samples that may be shown in the same report. One that is equal to
            `sample` is another sample, too.
    """
    warnings = []
    subject = f"sample {one_line(sample)}"
    remedy = "--sample gives it another name"
    name = export_name(sample)
    shown_name = multiqc_name(name)
    if not shown_name:
        warnings.append(
            f"{subject}: MultiQC cuts off its whole name, and shows the name of each file instead; "
            f"{remedy}"
        )
    merged_samples = []
    for other in others:
        other_name = export_name(other)
        if other_name == name or (shown_name and multiqc_name(other_name) == shown_name):
            merged_samples.append(one_line(other))
    if merged_samples:
        warnings.append(
            f"{subject}: MultiQC shows it as '{shown_name or name}', as it does "
            f"{join_first(merged_samples)}, and one hides the other; {remedy}"
        )
    return warnings


def samples_beside(run: Path, out: Path, sample: str) -> list[str]:
    """Return the names of the samples whose runs or exports lie beside those of a run.

    Of several samples, `samples.tsv` beside the run names the others. Without such a table, the
    exports beside this one tell, and those of the runs beside the run.

    Args:
        run: The run directory.
        out: The folder of the run's export.
        sample: The name of the run's sample. An export of this name beside `out` may be another
            copy of this one, so it is not listed.
    """
    run = run.resolve()
    listed_samples = _samples_of_table(run.parent / SAMPLES)
    if run.name in listed_samples:
        return [other for other in listed_samples if other != run.name]
    out = out.resolve()
    own_files = {out / GENERAL_FILE, run / "export" / GENERAL_FILE}
    files_of_runs = set(run.parent.glob(f"*/export/{GENERAL_FILE}")) - own_files
    files_of_exports = set(out.parent.glob(f"*/{GENERAL_FILE}")) - own_files
    samples = [other for file in sorted(files_of_runs) for other in exported_samples(file)]
    for file in sorted(files_of_exports):
        samples += [
            other for other in exported_samples(file) if export_name(other) != export_name(sample)
        ]
    return samples


def exported_samples(file: Path) -> list[str]:
    """Return the names of the samples in a file for MultiQC; none if it cannot be read.

    Args:
        file: A file `virnuc_general_mqc.json`.
    """
    try:
        content = json.loads(read_file(file))
        return [str(name) for name in content["data"]]
    except (*_READING_ERRORS, KeyError, TypeError):
        return []


def _samples_of_table(path: Path) -> list[str]:
    """Return the names in the first column of `samples.tsv`; none if there is no such table."""
    try:
        lines = read_file(path).decode().splitlines()
    except _READING_ERRORS:
        return []
    return [restore_formula(line.split("\t", 1)[0]) for line in lines[1:]]
