"""Find measurements that a validation names and that are not there any more.

A number that nobody measured is `not run`. A measurement that was made and then lost is another
matter: the report names it, and a criterion that stands on it fails, so that no failure can be
hidden by removing a file.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from virnuc_core.report.criteria import CriterionSpec
from virnuc_core.report.model import BASELINE, Report, RunMetrics
from virnuc_core.report.raw_files import (
    COMPARISON,
    RECORD,
    RUN_PREFIX,
    SINGLE_RUN,
    SUMMARY,
    RawFolder,
    run_names,
)
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary
from virnuc_core.system_errors import path_exists
from virnuc_core.validation import ComparisonFile, ValidationRecord

PAIR_RUN: Final = f"{RUN_PREFIX}2"


def missing_evidence(raw: RawFolder, record: ValidationRecord | None) -> dict[str, str]:
    """Return the files that other files of the validation name and that cannot be used.

    Args:
        raw: The validation's files, after everything else was read from them.
        record: The validation's record.

    Returns:
        A sentence for each file, by its name below the validation's directory.
    """
    missing: dict[str, str] = {}
    if record is not None and _has_ended(raw):
        for name in (*record.expected_files, *_measurements_before_comparison(raw)):
            if not path_exists(raw.root / name):
                missing[name] = f"{name} is missing, which the validation left"
        if record.expected_files and not path_exists(raw.root / COMPARISON):
            missing[COMPARISON] = f"{COMPARISON} is missing, which the validation left"
    for run in run_names(raw.root):
        for folder in (run, *run_names(raw.root, f"{run}.")):
            missing |= _missing_of_run(raw, folder)
    for name, problem in raw.problems.items():
        missing.setdefault(name, problem)
    return missing


def unfinished_parts(raw: RawFolder, record: ValidationRecord | None) -> list[str]:
    """Return the files that a validation has not written yet, because it did not come to its end.

    Returns:
        Names below the validation's directory. None if the validation has ended: what is absent
        then is missing evidence.
    """
    if record is None or _has_ended(raw):
        return []
    return [name for name in record.expected_files if not path_exists(raw.root / name)]


def _has_ended(raw: RawFolder) -> bool:
    """Return whether the validation once came to its end.

    The comparison and the report are made after all measurements.
    """
    return path_exists(raw.root / COMPARISON) or path_exists(raw.root / "report" / "report.json")


def _measurements_before_comparison(raw: RawFolder) -> list[str]:
    """Return the files of measurements that `comparison.json` lists or compares."""
    file = raw.read(ComparisonFile, COMPARISON)
    if file is None:
        return []
    names = list(file.measurements or {})
    for comparison in file.comparisons:
        for part in (comparison.a, comparison.b):
            if part == BASELINE or part.startswith(RUN_PREFIX):
                names.append(f"{part}/{SUMMARY}")
    return list(dict.fromkeys(names))


def _missing_of_run(raw: RawFolder, run: str) -> dict[str, str]:
    """Return the missing files that the summary of a run names: telemetry and result files."""
    summary = raw.read(RunSummary, run, SUMMARY)
    if summary is None:
        return {}
    telemetry_files = {attempt.telemetry for attempt in summary.attempts}
    telemetry_files.add(summary.telemetry)
    names = [RECORD, *(summary.files or {})]
    for file in telemetry_files - {None}:
        stem = Path(str(file)).stem
        names += [f"telemetry/{stem}.h5", f"telemetry/{stem}.json"]
    missing = {}
    is_repetition = "." in run  # such as devices-2.2
    for name in sorted(names):
        recorded_digest = (summary.files or {}).get(name, ...)
        if recorded_digest is None:  # the summary says that the run has no such file
            continue
        if is_repetition and name == RunDir(raw.root).embeddings.name:
            continue  # of a repetition only the measurements and the result tables are kept
        path = raw.root / run / name
        if not path_exists(path):
            missing[f"{run}/{name}"] = f"{run}/{name} is missing, which {run}/{SUMMARY} names"
    return missing


def missing_for(
    spec: CriterionSpec, report: Report, run: RunMetrics | None, last_run: str | None
) -> str:
    """Return which missing file a criterion stands on, or an empty string if it has all files.

    Args:
        spec: The criterion.
        report: The report so far, with the missing files.
        run: The run that is judged, or `None` if there is no such run.
        last_run: The folder of the run on the most devices that the validation made.
    """
    folder = {"single": SINGLE_RUN, "pair": PAIR_RUN}.get(spec.run, last_run or "")
    if run is not None and spec.run == "many":
        folder = run.name
    known_runs = [known_run.name for known_run in report.runs]
    for name, sentence in report.missing_evidence.items():
        if _stands_on(spec, name, folder, known_runs):
            return sentence
    return ""


def _stands_on(spec: CriterionSpec, name: str, folder: str, known_runs: Collection[str]) -> bool:
    """Return whether a criterion is computed from a file.

    Args:
        spec: The criterion.
        name: The name of the file.
        folder: The folder of the run that the criterion is about.
        known_runs: The folders of the runs of which at least the record is there.
    """
    run_files = {f"{folder}/{SUMMARY}", f"{folder}/{RECORD}"}
    file_folder, _, file_name = name.partition("/")
    is_of_lost_run = file_folder.startswith(RUN_PREFIX) and file_folder not in known_runs
    for part in spec.raw:
        if part in ("summary", "telemetry") and name in run_files:
            return True
        if part == "telemetry" and name.startswith(f"{folder}/telemetry/"):
            return True
        if part == "single" and name in (f"{SINGLE_RUN}/{SUMMARY}", f"{SINGLE_RUN}/{RECORD}"):
            return True
        # A comparison is over all runs: without one of them it says less than it did.
        if part == COMPARISON and file_name == SUMMARY and is_of_lost_run:
            return True
        if part == name:
            return True
    return False
