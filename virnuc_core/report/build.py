"""Make a report from the files that a validation left behind, and write it in all its forms.

What is missing is `None` and `not run`, never a crash.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from virnuc_core import validation
from virnuc_core.consensus import FATES
from virnuc_core.errors import (
    ConfigError,
    DamagedFileError,
    InputError,
    UnsafeFileError,
    join_first,
)
from virnuc_core.profiles import Profile
from virnuc_core.report.approvals import APPROVAL
from virnuc_core.report.benchmark import former_benchmark_name
from virnuc_core.report.bottlenecks import rank_losses, stage_findings
from virnuc_core.report.charts import charts
from virnuc_core.report.comparability import Comparability, check_comparability
from virnuc_core.report.evidence import missing_evidence, unfinished_parts
from virnuc_core.report.judging import judge_report
from virnuc_core.report.metrics import baseline_metrics, run_metrics, scaling_metrics
from virnuc_core.report.model import (
    BASELINE,
    Accounting,
    ApprovalState,
    BaselineMetrics,
    HistoryEntry,
    Report,
    RunMetrics,
    ScalingMetrics,
)
from virnuc_core.report.notes import notes
from virnuc_core.report.raw_files import (
    COMPARISON,
    RECORD,
    RUN_PREFIX,
    SINGLE_RUN,
    SUMMARY,
    NamedTelemetry,
    RawFolder,
    find_unchecked_files,
    run_names,
)
from virnuc_core.report.regression import (
    COMPARABLE_FIELDS,
    REGRESSION,
    RegressionFile,
    append_history,
    earlier_runs,
    entry_of,
    history_path,
    recorded_comparison,
    regression,
)
from virnuc_core.report.render import REPORT_JSON, render
from virnuc_core.report.warnings import warnings
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.runfiles import RunRecord, read, write
from virnuc_core.safe_files import output_directory, remove_file
from virnuc_core.system_errors import path_exists

log = logging.getLogger(__name__)

FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")
# the id that `duplicate_of=` names stands last in the column and may hold commas
DUPLICATE_ID: Final = re.compile(r"duplicate_of=.*$")


def build_report(out: Path, profile: Profile) -> Report:
    """Compute the report of a validation from its files. No file is written.

    The files are `run.json`, `comparison.json`, `baseline/`, each `devices-N/` and, if they exist,
    `regression.json`, `checkpoint_overhead.json`, `tuning.json` and `report/approval.json`. The
    judged run, whose numbers must meet the thresholds, is the one on the most devices.

    Args:
        out: The validation's directory.
        profile: The thresholds.

    Returns:
        The report. A number whose file is missing is None, and its criterion is `not run`.
    """
    raw = RawFolder(out)
    record = raw.read(validation.ValidationRecord, RECORD)
    # Runs on more devices than the record names were left by an earlier start. They are ignored.
    # Without a record the number is not known: 0 stands for any.
    max_devices = len(record.devices) if record is not None else 0
    runs = []
    for name in run_names(out, max_devices=max_devices):
        metrics = run_metrics(raw, name, profile)
        if metrics is not None:
            runs.append(metrics)
    judged_run = runs[-1] if runs else None  # `run_names` puts the most devices last
    single_run = next((run for run in runs if run.name == SINGLE_RUN), None)

    comparability = _comparability(raw, profile, runs)
    baseline = _comparable_baseline(raw, profile, judged_run, comparability)
    telemetry = _telemetry_of(raw, judged_run)
    regression_file = raw.read(RegressionFile, REGRESSION)
    comparison_file = raw.read(validation.ComparisonFile, COMPARISON)
    comparisons = () if comparison_file is None else comparison_file.comparisons
    regression_metrics = None
    comparable_history: tuple[HistoryEntry, ...] = ()
    if regression_file is not None:
        regression_metrics = regression(regression_file.history, regression_file.entry)
        comparable_history = _comparable_history(regression_file)
    report = Report(
        profile=profile,
        provenance=_provenance(raw, record, judged_run),
        run=judged_run,
        single=single_run,
        runs=tuple(runs),
        baseline=baseline,
        scaling=_scaling(single_run, runs, comparability),
        comparisons=tuple(pair for pair in comparisons if comparability.allows(pair.a, pair.b)),
        losses=rank_losses(judged_run),
        findings=stage_findings(judged_run),
        regression=regression_metrics,
        history=comparable_history,
        charts=charts(raw, judged_run, None if telemetry is None else telemetry.content, profile),
        overhead=raw.read(validation.OverheadFile, validation.OVERHEAD),
        accounting=_account_for_reads(raw, judged_run, record),
        approval=approval_state(raw, judged_run),
        evidence={},  # digests of the files that it is made of; added at the end
    )
    tuning = raw.read(validation.TuningFile, validation.TUNING) or validation.TuningFile()
    # Files that a record names and that are gone. A criterion that stands on one is not met.
    missing = missing_evidence(raw, record)
    report = report.model_copy(update={"missing_evidence": missing})
    # The criteria, the warnings and the notes are made from the numbers in the report. So they are
    # added to a report that has all the numbers.
    verdicts = judge_report(report, comparability, _last_run(record))
    remarks = _remarks(report, tuning, comparability)
    unfinished = ", ".join(unfinished_parts(raw, record))
    if unfinished:
        sentence = f"The validation did not come to its end: {unfinished} was not written."
        remarks["warnings"] = (*remarks["warnings"], sentence)
    return report.model_copy(
        update={
            "criteria": verdicts.criteria,
            "checks": verdicts.checks,
            "scaling": verdicts.scaling,
            **remarks,
            "evidence": raw.evidence(),
        }
    )


def _last_run(record: validation.ValidationRecord | None) -> str | None:
    """Return the folder of the run on the most devices that the validation was to make.

    Returns:
        `None` if the record names no runs, as records of older versions do.
    """
    if record is None:
        return None
    runs = []
    for name in record.expected_files:
        folder = name.partition("/")[0]
        if folder.removeprefix(RUN_PREFIX).isdecimal():
            runs.append(folder)
    return max(runs, key=lambda folder: int(folder.removeprefix(RUN_PREFIX)), default=None)


def _comparability(raw: RawFolder, profile: Profile, runs: Sequence[RunMetrics]) -> Comparability:
    """Find out which runs may be compared with each other, and with a baseline measured here.

    A baseline whose time was recorded elsewhere is left out, because it has no `run.json` with a
    machine. The profile or the user names its devices.
    """
    parts = [run.name for run in runs]
    summary = raw.read(validation.BaselineSummary, BASELINE, SUMMARY)
    is_measured = summary is not None and summary.source == "measured"
    if profile.baseline.source == "measured" and is_measured:
        parts.insert(0, BASELINE)
    return check_comparability(raw, parts)


def _comparable_baseline(
    raw: RawFolder, profile: Profile, run: RunMetrics | None, comparability: Comparability
) -> BaselineMetrics | None:
    """Return the baseline. If the run may not be compared with it, `problem` says why."""
    baseline = baseline_metrics(raw, profile, run)
    if baseline is None or run is None:
        return baseline
    reason = comparability.timing_refusal(BASELINE, [run.name])
    if reason:
        return baseline.model_copy(update={"problem": reason})
    return baseline


def _scaling(
    single: RunMetrics | None, runs: Sequence[RunMetrics], comparability: Comparability
) -> tuple[ScalingMetrics, ...]:
    """Return the scaling of each run that may be compared with the run on one device."""
    figures = []
    for run in runs:
        if not comparability.timing_refusal(SINGLE_RUN, [run.name]):
            figure = scaling_metrics(single, run)
            if figure is not None:
                figures.append(figure)
    return tuple(figures)


def _telemetry_of(raw: RawFolder, run: RunMetrics | None) -> NamedTelemetry | None:
    """Return the telemetry that the metrics of a run were computed from."""
    if run is None or run.telemetry is None:
        return None
    return raw.telemetry(run.name, run.telemetry.file)


def _comparable_history(file: RegressionFile) -> tuple[HistoryEntry, ...]:
    """Return the comparable earlier runs, oldest first, followed by the run of this report."""
    return (*earlier_runs(file.history, file.entry, COMPARABLE_FIELDS), file.entry)


def _provenance(
    raw: RawFolder, record: validation.ValidationRecord | None, run: RunMetrics | None
) -> RunRecord:
    """Return the record of the validation, completed with fields of the run's record, and with the
    seeds of the baseline's.
    """
    run_record = None if run is None else raw.read(RunRecord, run.name, RECORD)
    own_fields = _set_fields(record)
    run_fields = _set_fields(run_record)
    fields = run_fields | own_fields
    for name in ("fingerprints", "seeds", "versions"):  # these are merged key by key
        fields[name] = run_fields.get(name, {}) | own_fields.get(name, {})
    # The only choice by chance in a validation: which reads the baseline runs on, if not on all.
    baseline_record = raw.read(RunRecord, BASELINE, RECORD)
    if baseline_record is not None:
        fields["seeds"] = fields["seeds"] | baseline_record.seeds
    # Reports are shared, and settings and commands of attempts may contain secrets, such as signed
    # addresses. So of them only the sample's name is kept.
    settings = own_fields.get("spec") or run_fields.get("spec", {})
    fields["spec"] = {"sample": str(settings.get("sample", ""))}
    fields["attempts"] = ()
    return RunRecord.model_validate(fields)


def _set_fields(record: RunRecord | None) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults. None has no fields."""
    if record is None:
        return {}
    return record.model_dump(exclude_defaults=True)


def _remarks(
    report: Report, tuning: validation.TuningFile, comparability: Comparability
) -> dict[str, tuple[str, ...]]:
    """Return the fields `warnings` and `notes` of a report, each a tuple of sentences."""
    return {
        "warnings": warnings(
            report,
            problems=tuple(report.missing_evidence.values()),
            not_compared=comparability.distinct_reasons,
        ),
        "notes": notes(report, tuning.rounds),
    }


def _account_for_reads(
    raw: RawFolder, run: RunMetrics | None, record: validation.ValidationRecord | None
) -> Accounting | None:
    """Count the lines of a run's reads.tsv by the fate of the read and by remark.

    The fate says what became of a read, such as "viral" or "empty". A remark, from the column
    `flags`, is for example "ambiguous" or "duplicate_of=ID". A read may have several.

    Returns:
        The counts, and whether they equal the counts in the run's summary. None if reads.tsv is
        missing or cannot be read.
    """
    if run is None:
        return None
    # Few texts occur in these columns, so a table of millions of reads needs little memory.
    columns = {"fate": "category", "flags": "category"}
    path = RunDir(raw.root / run.name).reads_table
    table = raw.table(path, columns)
    if table is None:
        return None
    fates = dict.fromkeys(FATES, 0) | table["fate"].value_counts(sort=False).to_dict()
    flag_counts: Counter[str] = Counter()
    for text, count in table["flags"].value_counts(sort=False).items():
        if text:
            # The id of the first read is cut off, so that all duplicates count as one remark.
            for flag in DUPLICATE_ID.sub("duplicate_of", str(text)).split(","):
                flag_counts[flag] += int(count)
    is_same_as_run = _without_zeros(run.fates) == _without_zeros(fates)
    staging = None if record is None else record.staging
    return Accounting(
        reads=len(table),
        fates=fates,
        flags=dict.fromkeys(FLAGS, 0) | flag_counts,
        adds_up=len(table) == run.n_reads and is_same_as_run,
        staging=staging or validation.StagingTally(),
    )


def _without_zeros(counts: Mapping[Any, int]) -> dict[Any, int]:
    """Return the counts that are not 0."""
    return {name: count for name, count in counts.items() if count}


def approval_state(raw: RawFolder, run: RunMetrics | None) -> ApprovalState | None:
    """Return the reviewer's answer on this validation.

    Returns:
        The answer, with a mark if it is older than the judged run. `pending` if an answer is
        required but was not given yet. None if no answer is required.
    """
    path = RunDir(raw.root).report / APPROVAL
    if not path_exists(path):
        record = raw.read(validation.ValidationRecord, RECORD)
        if record is not None and record.spec.get("approval") is True:
            return ApprovalState(verdict="pending")
        return None
    answer = raw.read(validation.ApprovalRecord, path.parent.name, APPROVAL)
    if answer is None:  # the file is damaged, which `raw.problems` now says
        return None
    telemetry = _telemetry_of(raw, run)
    is_older = (
        answer.when is not None
        and telemetry is not None
        and answer.when < telemetry.content.started
    )
    return ApprovalState(**answer.model_dump(), of_earlier_run=is_older)


def read_report(path: Path, *, check: bool = True) -> Report:
    """Read a `report.json`.

    Args:
        path: The file.
        check: Compare it with the digest that it carries; see `runfiles.read`.

    Raises:
        DamagedFileError: It is not as it was written.
        InputError: It is not a report of this version. The message says what is wrong.
        UnsafeFileError: It is no regular file.
    """
    try:
        return read(path, Report, check=check)
    except (UnsafeFileError, DamagedFileError):
        raise
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InputError(
            f"not a report of this version ({reason})",
            file=path,
            hint="virnuc report DIR --profile NAME judges the raw files anew",
        ) from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> Report:
    """Judge a finished validation and write every form of the report to `out/report/`.

    Args:
        out: The validation's directory.
        profile: The thresholds.
        history: If given, the run is compared with the earlier runs in this file, and added to it.
            `regression.json` then holds what it was compared with. Without it, the history that the
            validation names is read only: it decides what the run was compared with, whatever
            became of `regression.json`.
    """
    report = build_report(out, profile)
    entry = entry_of(report)
    if history is not None:
        (out / REGRESSION).unlink(missing_ok=True)  # it belongs to an earlier run
        if entry is not None:
            append_history(history, entry)
    else:
        record = RawFolder(out).read(validation.ValidationRecord, RECORD)
        history = history_path(out, record)
    comparison = None if entry is None else recorded_comparison(history, entry)
    if comparison is not None:
        write(out / REGRESSION, comparison)
    # The line for the history was made from the first report. The second one also has the
    # comparison with earlier runs.
    report = build_report(out, profile)
    _warn_of_unchecked_files(out, report.evidence)
    return _write_forms(out, report)


def _warn_of_unchecked_files(out: Path, names: Iterable[str]) -> None:
    """Warn, in one line, of files of a validation that could not be checked for damage.

    Args:
        out: The validation's directory.
        names: The files that a report was made from.
    """
    unchecked_names = find_unchecked_files(out, names)
    if unchecked_names:
        log.warning(
            "%s: an older version wrote %s without digests; they could not be checked for damage",
            out,
            join_first(unchecked_names),
        )


def rerender(out: Path) -> Report:
    """Write all forms of a report again, from its `report.json` and the reviewer's answer only.

    Nothing is judged again. The report lists the digest of each file that it was made from (its
    evidence). That of the answer is brought up to date.

    Args:
        out: The validation's directory.

    Returns:
        The report, with the current answer of the reviewer.

    Raises:
        InputError: `report.json` cannot be read.
    """
    with output_directory(out):
        report = read_report(RunDir(out).report / REPORT_JSON)
    approval_path = RunDir(out).report / APPROVAL
    if path_exists(approval_path):
        raw = RawFolder(out)
        approval = approval_state(raw, report.run)
        name = approval_path.relative_to(out).as_posix()
        evidence = dict(report.evidence)
        read_files = raw.evidence()
        if name in read_files:  # the answer is missing there if it is no regular file
            evidence[name] = read_files[name]
        update = {"approval": approval, "evidence": dict(sorted(evidence.items()))}
        report = report.model_copy(update=update)
    return _write_forms(out, report)


def _write_forms(out: Path, report: Report) -> Report:
    """Write every form of a report, and return the report.

    The benchmark files that an older version wrote for the same validation, under another name, are
    removed. Benchmark files of earlier validations are kept.
    """
    pages = render(report)
    folder = RunDir(out).report
    with output_directory(out):
        for name, content in pages.items():
            write_text_atomically(folder / name, content)
        for suffix in (".md", ".json"):
            former_name = former_benchmark_name(report.provenance.created) + suffix
            if former_name not in pages:
                remove_file(folder / former_name, out, missing_ok=True)
    return report
