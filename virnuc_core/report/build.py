"""From a finished validate directory to the report's data. What is missing is `None` and `not run`, never a crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from virnuc_core.config import Profile
from virnuc_core.report.accounting import accounting
from virnuc_core.report.approval import approval_state
from virnuc_core.report.bottleneck import bottleneck, findings
from virnuc_core.report.caveats import notes, warnings_of
from virnuc_core.report.chart_data import charts
from virnuc_core.report.comparability import unlike_parts
from virnuc_core.report.criteria import BASELINE, Measured, checks, scaling, seven
from virnuc_core.report.files import RECORD, SUMMARY, RawFolder, count, mapping, text
from virnuc_core.report.metrics import baseline_metrics, run_metrics, scaling_metrics
from virnuc_core.report.model import (
    Comparison,
    ComparisonFile,
    HistoryPoint,
    Provenance,
    Regression,
    Report,
    RunMetrics,
)
from virnuc_core.report.overhead import overhead_metrics
from virnuc_core.report.regression import RegressionFile, check, points
from virnuc_core.rundir import write_text_whole

RUN_PREFIX: Final = "devices-"
COMPARISON: Final = "comparison.json"
REGRESSION: Final = "regression.json"


def build_report(out: Path, profile: Profile) -> Report:
    """Read what a validation left in `out` and judge it by `profile`.

    Reads `run.json`, `comparison.json`, `baseline/`, each `devices-N/` and, where they are, `regression.json`,
    `checkpoint_overhead.json` and `report/approval.json`. Runs of N devices are judged by the largest N.
    """
    raw = RawFolder(out)
    record = raw.json(RECORD)
    runs = tuple(figure for name in run_names(out) if (figure := run_metrics(raw, name, profile)) is not None)
    single = next((run for run in runs if run.name == f"{RUN_PREFIX}1"), None)
    many = next((run for run in reversed(runs) if run is not single), None)
    judged = many or single
    parts = [run.name for run in runs]
    if profile.baseline.source == "measured" and (out / BASELINE / SUMMARY).is_file():
        parts.insert(0, BASELINE)
    unlike = unlike_parts(raw, parts)
    baseline = unlike.baseline(baseline_metrics(raw, profile, judged), _name(judged))
    comparisons = unlike.comparisons(read_comparisons(raw))
    overhead = overhead_metrics(raw)
    scaled = None if unlike.between(_name(single), _name(many)) else scaling_metrics(single, many)
    measured = Measured(profile, single, many, baseline, scaled, comparisons, overhead)
    each = [
        replace(measured, many=run, scaling=found_scaling)
        for run in runs
        if unlike.between(_name(single), run.name) is None
        and run is not single
        and (found_scaling := scaling_metrics(single, run)) is not None
    ]
    found = (
        None if judged is None else raw.telemetry(judged.name, raw.json(judged.name, "summary.json").get("telemetry"))
    )
    series = charts(raw, judged, None if found is None else found[1], profile)
    regression, history = _regression(raw)
    criteria, further = (
        unlike.criteria(verdicts, _name(single), _name(many)) for verdicts in (seven(measured), checks(measured))
    )
    accounts, approval = accounting(raw, judged), approval_state(raw, judged)
    provenance = _provenance(record, raw.json(judged.name, RECORD) if judged else {})
    return Report(
        profile=profile,
        provenance=provenance,
        run=judged,
        single=single,
        runs=runs,
        baseline=baseline,
        scaling=tuple(one.scaling for one in each if one.scaling is not None),
        scaling_criteria=tuple(scaling(one) for one in each),
        comparisons=comparisons,
        criteria=criteria,
        checks=further,
        bottleneck=bottleneck(judged),
        findings=findings(judged),
        regression=regression,
        history=history,
        charts=series,
        overhead=overhead,
        accounting=accounts,
        approval=approval,
        warnings=(
            *warnings_of(measured, accounts, regression, tuple(dict.fromkeys(raw.problems))),
            *(f"Not compared: {reason}." for reason in dict.fromkeys(unlike.reasons.values())),
        ),
        notes=notes(measured, series, provenance.model_length),
        evidence=raw.evidence(),
    )


def _name(run: RunMetrics | None) -> str | None:
    return None if run is None else run.name


def run_names(out: Path) -> list[str]:
    """The run directories, fewest devices first."""
    found = []
    for folder in out.glob(f"{RUN_PREFIX}*"):
        digits = folder.name.removeprefix(RUN_PREFIX)
        if folder.is_dir() and digits.isdigit():
            found.append((int(digits), folder.name))
    return [name for _, name in sorted(found)]


def read_comparisons(raw: RawFolder) -> tuple[Comparison, ...]:
    """The comparisons on record; none when the file is missing or is not ours (which is noted)."""
    body = raw.json(COMPARISON)
    if not body:
        return ()
    try:
        return ComparisonFile.model_validate(body).comparisons
    except ValidationError as error:
        raw.problems.append(f"{COMPARISON} is not a comparison file: {error.errors()[0]['msg']}")
        return ()


def _regression(raw: RawFolder) -> tuple[Regression | None, tuple[HistoryPoint, ...]]:
    body = raw.json(REGRESSION)
    if not body:
        return None, ()
    try:
        compared = RegressionFile.model_validate(body)
    except ValidationError as error:
        raw.problems.append(f"{REGRESSION} is not a regression file: {error.errors()[0]['msg']}")
        return None, ()
    return check(compared.history, compared.entry), points(compared.history, compared.entry)


def _provenance(record: dict[str, Any], run_record: dict[str, Any]) -> Provenance:
    """From the validation's own record; the run's where that says nothing."""

    def either(key: str) -> str | None:
        return text(record, key) or text(run_record, key)

    prints = {**mapping(run_record, "fingerprints"), **mapping(record, "fingerprints")}
    seeds = {**mapping(run_record, "seeds"), **mapping(record, "seeds")}
    versions = {**mapping(run_record, "versions"), **mapping(record, "versions")}
    model_length = count(record, "model_length")
    return Provenance(
        created=either("created") or "unknown",
        virnuc_version=either("virnuc_version"),
        git_commit=either("git_commit"),
        model_length=count(run_record, "model_length") if model_length is None else model_length,
        fingerprints={str(k): str(v) for k, v in prints.items() if v is not None},
        seeds={str(k): int(v) for k, v in seeds.items() if isinstance(v, int)},
        versions={str(k): str(v) for k, v in versions.items() if v is not None},
        settings={str(k): str(v) for k, v in mapping(run_record, "resolved").items()},
    )


def write_comparisons(out: Path, comparisons: tuple[Comparison, ...]) -> Path:
    """Write `comparison.json` whole."""
    path = out / COMPARISON
    write_text_whole(path, ComparisonFile(comparisons=comparisons).model_dump_json(indent=1) + "\n")
    return path
