"""Verify that a report says what its raw files say.

Every number is computed again, and every difference is named. Three things are compared: the forms
of the report with its data, the data with what the raw files give now, and the raw files with what
is rawer still: shards, reads, samples and batches.

Each part is looked at by itself, several at a time where there is much to read. Rows are compared
piece by piece, however many there are.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from virnuc_core.checked_files import OWN_DIGEST_FIELD, without_own_digest
from virnuc_core.config import OnShare
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.errors import ConfigError, StorageError, UnreadableError, VirnucError
from virnuc_core.profiles import Profile, load_profile, profile_names
from virnuc_core.reads.workers import Workers
from virnuc_core.report.approvals import APPROVAL, verify_approvals
from virnuc_core.report.build import build_report, read_report
from virnuc_core.report.charts import GENERATOR
from virnuc_core.report.compare import compare, compared_sides
from virnuc_core.report.evidence import unfinished_parts
from virnuc_core.report.model import BASELINE, Report
from virnuc_core.report.raw_files import COMPARISON, RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.regression import (
    REGRESSION,
    SERIES_FIELDS,
    RegressionFile,
    entry_of,
    history_gaps,
    history_path,
    read_history,
    recorded_comparison,
)
from virnuc_core.report.render import REPORT_JSON, render
from virnuc_core.report.verification import ABSENT, Verification
from virnuc_core.report.verify_runs import (
    verify_baseline,
    verify_measurements,
    verify_overhead,
    verify_results,
    verify_run,
    verify_weights,
)
from virnuc_core.report.verify_store import count_processes, verify_store
from virnuc_core.report.verify_times import verify_times
from virnuc_core.rundir import EXACT_FILES, RunDir
from virnuc_core.runfiles import RunRecord, RunSummary, identity, read
from virnuc_core.safe_files import read_file
from virnuc_core.system_errors import is_regular_file, path_exists
from virnuc_core.validation import (
    Comparison,
    ComparisonFile,
    LabelAgreement,
    ValidationRecord,
)

# What another version of matplotlib may draw otherwise: the charts of a page, and its name
DRAWN: Final = re.compile(
    r'<meta name="generator"[^>]*>|data:image/svg\+xml;base64,[A-Za-z0-9+/=]+'
)
# of result rows; fewer are looked at before a second process has started
MAX_PAGE_BYTES: Final = 256 << 20  # of a page of a report, with its charts
MIN_BYTES_FOR_PROCESSES: Final = 16_000_000
# of a comparison; files of older versions do not have them
SCORE_FIELDS: Final = ("max_diff_score1", "max_diff_score2", "score1_match", "score2_match")

# Of each record: the reads and all weights.
REQUIRED_DIGESTS: Final = ("reads", PROTEIN.name, DNA.name, "head")

Check = Callable[[Verification, RawFolder], None]


def verify_report(
    out: Path, profile: str | None = None, on_part: OnShare = lambda _: None
) -> Verification:
    """Compute every number of a report again from the raw files, and compare.

    Args:
        out: The validation's directory.
        profile: The profile that must have been used. It is needed only for a profile of the user
            that differs from the one in the validation's record.
        on_part: Is called with the share of the work that is done, 0 to 1.

    Returns:
        The number of compared figures, and all differences.

    Raises:
        InputError: There is no report.
        WorkerError: A process ended before it had answered.
    """
    read_report(RunDir(out).report / REPORT_JSON, check=False)
    checks = _checks(out, profile)
    runs = _runs_and_repetitions(out)
    predictions = [RunDir(out / name).predictions for name in runs]
    n_bytes = sum(path.stat().st_size for path in predictions if is_regular_file(path))
    n_processes = count_processes() if n_bytes > MIN_BYTES_FOR_PROCESSES else 1
    verification = Verification()
    with Workers(n_processes) as workers:
        parts = workers.map(partial(_run_check, out), checks)
        for n_done, part in enumerate(parts, start=1):
            verification.figures += part.figures
            for difference in part.differences:
                if difference not in verification.differences:
                    verification.differences.append(difference)
            verification.remarks += part.remarks
            on_part(n_done / len(checks))
    return verification


def _runs_and_repetitions(out: Path) -> list[str]:
    """Return the folders of all runs, followed by those of all repetitions of a run."""
    runs = run_names(out)
    repetitions = []
    for name in runs:
        repetitions += run_names(out, f"{name}.")
    return [*runs, *repetitions]


def _checks(out: Path, profile: str | None) -> list[Check]:
    """Return the checks of a verification. They are independent, so processes can share them."""
    comparison_file = RawFolder(out).read(ComparisonFile, COMPARISON)
    comparisons = () if comparison_file is None else comparison_file.comparisons
    checks: list[Check] = [
        _verify_identities,
        partial(_verify_report, profile_name=profile),
        verify_store,
    ]
    # A repetition of a run has telemetry but no result files.
    checks += [partial(verify_results, name=name) for name in run_names(out)]
    checks += [partial(verify_run, name=name) for name in _runs_and_repetitions(out)]
    checks += [partial(_verify_comparison, claimed=comparison) for comparison in comparisons]
    checks += [verify_measurements, verify_weights, verify_baseline, verify_overhead, verify_times]
    return checks


def _run_check(out: Path, check: Check) -> Verification:
    """Run one check and return its result. An error of the check becomes a difference.

    Raises:
        UnreadableError: The system cannot read a file, so that it is not known what the file holds.
    """
    verification = Verification()
    raw = RawFolder(out)
    try:
        check(verification, raw)
    except UnreadableError:
        # Neither a difference nor an agreement has been found.
        raise
    except StorageError as error:  # the disk failed: that says nothing about the report
        verification.remarks.append(f"not everything was made again: {error}")
    except VirnucError as error:
        verification.add_difference(str(error))
    for problem in raw.problems.values():
        verification.add_difference(problem)
    return verification


def _verify_identities(verification: Verification, raw: RawFolder) -> None:
    """Check that all runs had the same reads and weights, and used the devices in their records."""
    records = {}
    for name in (*_runs_and_repetitions(raw.root), BASELINE):
        record = raw.read(RunRecord, name, RECORD)
        if record is not None:
            records[name] = record
    identities = {name: identity(record) for name, record in records.items()}
    validation_record = raw.read(ValidationRecord, RECORD)
    # The validation's own record decides. The first run does so if it cannot be read.
    expected = next(iter(identities.values()), {})
    if validation_record is not None:
        expected = identity(validation_record)
    for name, record in records.items():
        run_identity = identities[name]
        # Records of older versions lack the model length, and a run has further digests, such as
        # that of its int8 calibration. Only what both have can be compared then.
        parts = run_identity.keys() & expected.keys()
        parts |= {part for part in REQUIRED_DIGESTS if part in run_identity or part in expected}
        for part in sorted(parts):
            verification.compare(
                f"{name}/{RECORD}: {part}",
                run_identity.get(part, ABSENT),
                expected.get(part, ABSENT),
            )
        verification.compare(
            f"{name}/{RECORD}: resolved", record.resolved, _settings(records, name)
        )
        summary = raw.read(RunSummary, name, SUMMARY)
        if summary is not None and summary.devices:
            recorded = [device.model_dump() for device in record.devices]
            used = [device.model_dump() for device in summary.devices]
            verification.compare(f"{name}/{RECORD}: devices", recorded, used)


def _settings(records: Mapping[str, RunRecord], name: str) -> dict[str, Any]:
    """Return the settings that decide results, as the run with the fewest devices recorded them.

    Args:
        records: The records of all runs, fewest devices first, and of the baseline.
        name: The folder of the run to be compared. That of the baseline has no such settings.
    """
    if name == BASELINE:
        return records[BASELINE].resolved
    return next(record.resolved for run, record in records.items() if run != BASELINE)


def _verify_report(
    verification: Verification, raw: RawFolder, profile_name: str | None = None
) -> None:
    """Compute the report again, and compare its numbers, its pages and its history.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        profile_name: The profile that must have been used, if the user names one.
    """
    out = raw.root
    # All of the report is computed again here, and each difference is named.
    report = read_report(RunDir(out).report / REPORT_JSON, check=False)
    record = raw.read(ValidationRecord, RECORD)
    # There may be four profiles: that of the report, that with which the validation began, the one
    # that the user names now, and a file of the user's that was named at the beginning.
    began_with = None if record is None else record.profile
    named_file = "" if record is None else str(record.spec.get("profile", ""))
    _verify_profile(verification, report.profile, began_with, profile_name, named_file)

    new_report = build_report(out, report.profile)
    if _has_reviewer(new_report) and not _has_reviewer(report):
        verification.remarks.append(
            "a reviewer has answered since this report was made; virnuc report DIR shows the answer"
        )
        new_report = _with_approval_of(report, new_report)  # the answer does not change numbers
    verification.compare("", report, new_report)
    for sentence in new_report.missing_evidence.values():
        verification.add_difference(sentence)
    if not new_report.missing_evidence and record is not None:
        for name in unfinished_parts(raw, record):
            verification.add_difference(f"{name} is missing, which {RECORD} names")
    tolerance = (began_with or report.profile).score_tolerance
    _verify_compared_pairs(verification, raw, new_report, tolerance)
    _verify_forms(verification, out, new_report)
    if began_with not in (None, report.profile):
        assert began_with is not None
        # The history was written with the profile at the start of the validation.
        new_report = build_report(out, began_with)
    _verify_history(verification, out, new_report, record)


def _verify_profile(
    verification: Verification,
    profile: Profile,
    began_with: Profile | None,
    profile_name: str | None,
    named_file: str,
) -> None:
    """Check that a report was judged by the right profile.

    Args:
        verification: Collects the differences.
        profile: The profile in the report.
        began_with: The profile that the validation began with.
        profile_name: The profile that the user names.
        named_file: The profile as the validation's settings name it: a name or a file.
    """
    name = profile.name
    shipped_profile = load_profile(name) if name in profile_names() else None
    expected_profile = shipped_profile
    if profile_name:
        expected_profile = load_profile(profile_name)
    elif began_with is not None and began_with.name == name:
        expected_profile = began_with
    if expected_profile is None:
        verification.add_difference(
            f"profile {name}: neither what the validation began with nor virnuc's own; "
            "name it: --profile FILE"
        )
    else:
        verification.compare("profile", profile, expected_profile)
    _remark_on_changed_file(verification, began_with, named_file)
    if shipped_profile not in (None, expected_profile):
        verification.remarks.append(f"profile {name}: not virnuc's own of this name")


def _remark_on_changed_file(
    verification: Verification, began_with: Profile | None, named_file: str
) -> None:
    """Add a remark if the file of the profile has other thresholds than when the validation began.

    A validation with the same profile file would be judged otherwise today.

    Args:
        verification: Collects the remark.
        began_with: The profile that the validation began with.
        named_file: The profile as its settings name it. Only files can have been changed.
    """
    if began_with is None or not named_file.endswith(".toml"):
        return
    try:
        current = load_profile(named_file)
    except ConfigError as error:
        verification.remarks.append(f"the profile of the validation cannot be read now: {error}")
        return
    # The baseline may have been given on the command line in place of the file's.
    begun = began_with.model_copy(update={"baseline": current.baseline})
    if current != begun:
        verification.remarks.append(
            f"{named_file} has other thresholds now than when the validation began"
        )


def _has_reviewer(report: Report) -> bool:
    """Return whether a reviewer has answered."""
    return report.approval is not None and bool(report.approval.reviewer)


def _with_approval_of(report: Report, new_report: Report) -> Report:
    """Return the new report with the reviewer's answer of the old report."""
    evidence = {}
    for name, file_digest in new_report.evidence.items():
        if Path(name).name != APPROVAL:
            evidence[name] = file_digest
    return new_report.model_copy(update={"approval": report.approval, "evidence": evidence})


def _verify_compared_pairs(
    verification: Verification, raw: RawFolder, report: Report, tolerance: float
) -> None:
    """Check that every pair of runs was compared, with the right tolerance."""
    compared_pairs = []
    file = raw.read(ComparisonFile, COMPARISON)
    if file is not None:
        for comparison in file.comparisons:
            compared_pairs.append([comparison.a, comparison.b, comparison.tolerance])
    expected_pairs = []
    whole_runs = [run.name for run in report.runs if not run.stopped_at_limit]
    for sides in compared_sides(raw.root, whole_runs):
        expected_pairs.append([sides.a, sides.b, tolerance])
    verification.compare(f"{COMPARISON}: pairs", compared_pairs, expected_pairs)


def _verify_forms(verification: Verification, out: Path, report: Report) -> None:
    """Compare every page of a report with the page that is rendered again from its data."""
    for name, new_page in render(report).items():
        path = RunDir(out).report / name
        if not path_exists(path):
            verification.add_difference(f"report/{name}: missing")
            continue
        page = read_file(path, out, MAX_PAGE_BYTES).decode("utf-8", "replace")
        pages = [page, new_page]
        if name == REPORT_JSON and OWN_DIGEST_FIELD not in page:  # of an older version
            pages = [page, without_own_digest(new_page.encode()).decode()]
        # Another version of matplotlib draws the same chart with other bytes. If the page names
        # another version than the installed one, charts are left out of the comparison.
        if name.endswith(".html") and f'content="{GENERATOR}"' not in pages[0]:
            pages = [DRAWN.sub("", page) for page in pages]
        lines, new_lines = [page.encode().splitlines() for page in pages]
        verification.compare_lines(f"report/{name}", lines, new_lines, "the raw files")


def _verify_history(
    verification: Verification, out: Path, report: Report, record: ValidationRecord | None
) -> None:
    """Compare `regression.json` and the answers of reviewers with the history, their source.

    Args:
        verification: Collects the differences.
        out: The validation's directory.
        report: The report as it was when the history was written.
        record: The validation's record, which may name the history.
    """
    path = history_path(out, record)
    verify_approvals(verification, out, report, path if path_exists(path) else None)
    entry = entry_of(report)
    if entry is None:
        return
    file = None
    if path_exists(out / REGRESSION):
        file = read(out / REGRESSION, RegressionFile)
        verification.compare(f"{REGRESSION}: entry", file.entry, entry)
    if not path_exists(path):
        if file is not None:
            verification.remarks.append(
                f"{REGRESSION} was not held against the history: {path} is not there"
            )
        return
    for gap in history_gaps(path):
        verification.add_difference(gap)
    recorded = recorded_comparison(path, entry)
    if recorded is not None:
        listed = [old.created for old in recorded.history]
        copied = [] if file is None else [old.created for old in file.history]
        verification.compare(f"{REGRESSION}: the earlier runs in {path.name}", copied, listed)
    if file is None:
        return
    history = read_history(path)
    for compared in (*file.history, file.entry):
        lines = [line for line in history if line.same(compared, ("created", *SERIES_FIELDS))]
        if compared is file.entry:
            # A run that is judged again keeps its old line in the history, with the old verdict and
            # the commit of then, which is that of the run itself. The report has the newest one.
            verdict = compared.model_dump(include={"criteria_met", "regression_percent"})
            lines = [
                line.model_copy(update=verdict | _newer_commit(out, report, line.commit))
                for line in lines
            ]
        if compared not in lines:
            label = f"{REGRESSION}: the run of {compared.created} against {path.name}"
            verification.compare(label, compared, lines[0] if lines else ABSENT)


def _newer_commit(out: Path, report: Report, commit: str) -> dict[str, str]:
    """Return the commit of a report, if the history has that of its run for a good reason.

    Args:
        out: The validation's directory.
        report: The report.
        commit: The commit of virnuc in the line of the history.

    Returns:
        The field `commit` for the line, or nothing if the line must have the commit that it has.
    """
    if report.run is None or not path_exists(RunDir(out / report.run.name).record):
        return {}
    run_record = read(RunDir(out / report.run.name).record, RunRecord)
    if (run_record.git_commit or "unknown") != commit:
        return {}
    return {"commit": report.provenance.git_commit or "unknown"}


def _verify_comparison(verification: Verification, raw: RawFolder, claimed: Comparison) -> None:
    """Compare two results again, and check that `comparison.json` says the same.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        claimed: One entry of `comparison.json`.
    """
    is_exact = claimed.a == EXACT_FILES
    is_baseline = claimed.a == BASELINE
    computed = compare(
        raw.root / claimed.a,
        raw.root / claimed.b,
        tolerance=claimed.tolerance,
        subset_of_a=claimed.subset_reads is not None,
        bits=not is_exact and not is_baseline,
        embeddings=is_exact,
    )
    label = f"{COMPARISON}: {claimed.a} and {claimed.b}"
    verification.compare(label, claimed, _without_new_fields(computed, claimed))


def _without_new_fields(computed: Comparison, claimed: Comparison) -> Comparison:
    """Return a comparison without the fields of scores that an older version did not write.

    Args:
        computed: The comparison.
        claimed: The comparison in the file. Its fields that are None were not written.
    """
    parts = {}
    for name in ("frames", "consensus"):
        part: LabelAgreement | None = getattr(computed, name)
        claimed_part: LabelAgreement | None = getattr(claimed, name)
        if part is None or part.score is None or claimed_part is None:
            continue
        if claimed_part.score is not None and claimed_part.score.max_diff_score1 is None:
            score = part.score.model_copy(update=dict.fromkeys(SCORE_FIELDS))
            parts[name] = part.model_copy(update={"score": score})
    return computed.model_copy(update=parts)
