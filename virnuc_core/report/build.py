"""From a finished validate directory to the report's data. What is missing is `None` and `not run`, never a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final

import pandas as pd

from virnuc_core.profiles import Profile
from virnuc_core.report.approval import approval_state
from virnuc_core.report.bottleneck import bottleneck, findings
from virnuc_core.report.caveats import notes, warnings_of
from virnuc_core.report.charts import charts
from virnuc_core.report.criteria import checks, scaling, seven
from virnuc_core.report.files import BASELINE, RECORD, RUN_PREFIX, SUMMARY, RawFolder, run_names
from virnuc_core.report.measured import Measured
from virnuc_core.report.metrics import baseline_metrics, overhead_metrics, run_metrics, scaling_metrics
from virnuc_core.report.model import Accounting, Criterion, HistoryPoint, Provenance, Regression, Report, RunMetrics
from virnuc_core.report.regression import RegressionFile, check, points
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, RunSummary, differing, made_from, write
from virnuc_core.validation import Comparison, ComparisonFile, ValidationRecord

COMPARISON: Final = "comparison.json"
REGRESSION: Final = "regression.json"
MADE_FROM: Final = ("reads", "esm2", "dnabert_s", "head", MODEL_LENGTH)
SHOWN: Final = 8  # characters of a fingerprint
FATES: Final = ("viral", "others", "no_open_frame", "empty", "failed")
FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")
SKIPPED_LIST: Final = "skipped.tsv"

Reasons = Mapping[frozenset[str], str]


def build_report(out: Path, profile: Profile) -> Report:
    """Read what a validation left in `out` and judge it by `profile`.

    Reads `run.json`, `comparison.json`, `baseline/`, each `devices-N/` and, where they are, `regression.json`,
    `checkpoint_overhead.json` and `report/approval.json`. Runs of N devices are judged by the largest N.
    """
    raw = RawFolder(out)
    record = raw.read(ValidationRecord, RECORD)
    measured, runs, unlike = _measure(raw, profile)
    judged = measured.judged
    regression, history = _regression(raw)
    each = [
        replace(measured, many=run, scaling=scaled)
        for run in runs
        if run is not measured.single
        and not _reason(unlike, _name(measured.single), run.name)
        and (scaled := scaling_metrics(measured.single, run)) is not None
    ]
    summary = None if judged is None else raw.read(RunSummary, judged.name, SUMMARY)
    found = None if judged is None or summary is None else raw.telemetry(judged.name, summary.telemetry)
    series = charts(raw, judged, None if found is None else found[1], profile)
    accounts, approval = accounting(raw, judged), approval_state(raw, judged)
    provenance = _provenance(record, None if judged is None else raw.read(RunRecord, judged.name, RECORD))
    criteria, further = (
        tuple(_unless_unlike(one, measured, unlike) for one in verdicts)
        for verdicts in (seven(measured), checks(measured))
    )
    return Report(
        profile=profile,
        provenance=provenance,
        run=judged,
        single=measured.single,
        runs=runs,
        baseline=measured.baseline,
        scaling=tuple(one.scaling for one in each if one.scaling is not None),
        scaling_criteria=tuple(scaling(one) for one in each),
        comparisons=measured.comparisons,
        criteria=criteria,
        checks=further,
        bottleneck=bottleneck(judged),
        findings=findings(judged),
        regression=regression,
        history=history,
        charts=series,
        overhead=measured.overhead,
        accounting=accounts,
        approval=approval,
        warnings=(
            *warnings_of(measured, accounts, regression, raw.remarks()),
            *(f"Not compared: {reason}." for reason in dict.fromkeys(unlike.values())),
        ),
        notes=tuple(notes(measured, series, provenance.model_length)),
        evidence=raw.evidence(),
    )


def _measure(raw: RawFolder, profile: Profile) -> tuple[Measured, tuple[RunMetrics, ...], Reasons]:
    """What is judged, all runs, and why pairs of parts may not be compared."""
    names = run_names(raw.root)
    runs = tuple(metrics for name in names if (metrics := run_metrics(raw, name, profile)) is not None)
    single = next((run for run in runs if run.name == f"{RUN_PREFIX}1"), None)
    many = next((run for run in reversed(runs) if run is not single), None)
    judged = many or single
    parts = [run.name for run in runs]
    if profile.baseline.source == "measured" and (raw.root / BASELINE / SUMMARY).is_file():
        parts.insert(0, BASELINE)
    unlike = unlike_parts(raw, parts)
    baseline = baseline_metrics(raw, profile, judged)
    if baseline is not None and (reason := _reason(unlike, BASELINE, _name(judged))):
        baseline = baseline.model_copy(update={"problem": reason})
    scaled = None if _reason(unlike, _name(single), _name(many)) else scaling_metrics(single, many)
    like = tuple(one for one in read_comparisons(raw) if not _reason(unlike, one.a, one.b))
    return Measured(profile, single, many, baseline, scaled, like, overhead_metrics(raw)), runs, unlike


def _name(run: RunMetrics | None) -> str | None:
    return None if run is None else run.name


# --- parts that were not made from the same ---------------------------------------------------------------------------


def unlike_parts(raw: RawFolder, parts: list[str]) -> Reasons:
    """Why pairs of `parts` may not be compared, by what their `run.json` say; a pair that may be is not in it."""
    records = {part: raw.read(RunRecord, part, RECORD) for part in parts}
    made = {part: {} if record is None else made_from(record) for part, record in records.items()}
    reasons = {frozenset((a, b)): _unlike(a, made[a], b, made[b]) for a, b in combinations(parts, 2)}
    return {pair: reason for pair, reason in reasons.items() if reason}


def _unlike(a: str, left: Mapping[str, str], b: str, right: Mapping[str, str]) -> str:
    others = differing(left, right)
    said = ", ".join(f"{name} ({x[:SHOWN]} and {y[:SHOWN]})" for name, (x, y) in others.items() if name in MADE_FROM)
    if said:
        return f"{a} and {b} differ in {said}"
    for part, known in ((a, left), (b, right)):
        absent = [name for name in MADE_FROM if name not in known]
        if absent:
            return f"{part}/{RECORD} does not tell {', '.join(absent)}"
    return ""


def _reason(unlike: Reasons, a: str | None, b: str | None) -> str | None:
    return None if a is None or b is None else unlike.get(frozenset((a, b)))


def _unless_unlike(criterion: Criterion, measured: Measured, unlike: Reasons) -> Criterion:
    """A verdict, `not run` where it would stand on parts that were not made from the same."""
    single, many = _name(measured.single), _name(measured.many)
    runs = _reason(unlike, single, many)
    truth = _reason(unlike, BASELINE, many) or _reason(unlike, BASELINE, single)
    speed = _reason(unlike, BASELINE, many or single)
    reason = {"scaling": runs, "same_bytes": runs, "consensus": truth, "speedup": speed}.get(criterion.id)
    if reason is None or criterion.target is None:
        return criterion
    return criterion.model_copy(update={"verdict": "not run", "value": None, "samples": None, "reason": reason})


# --- the other files --------------------------------------------------------------------------------------------------


def read_comparisons(raw: RawFolder) -> tuple[Comparison, ...]:
    """The comparisons on record; none when the file is missing or is not ours (which is noted)."""
    found = raw.read(ComparisonFile, COMPARISON)
    return () if found is None else found.comparisons


def write_comparisons(out: Path, comparisons: tuple[Comparison, ...]) -> Path:
    """Write `comparison.json` whole."""
    return write(out / COMPARISON, ComparisonFile(comparisons=comparisons))


def _regression(raw: RawFolder) -> tuple[Regression | None, tuple[HistoryPoint, ...]]:
    found = raw.read(RegressionFile, REGRESSION)
    if found is None:
        return None, ()
    return check(found.history, found.entry), points(found.history, found.entry)


def _provenance(validation: ValidationRecord | None, run: RunRecord | None) -> Provenance:
    """From the validation's own record; the run's where that says nothing."""
    own, other = (record or RunRecord(fingerprints={}) for record in (validation, run))
    return Provenance(
        created=(own if validation else other).created,
        virnuc_version=own.virnuc_version or other.virnuc_version,
        git_commit=own.git_commit or other.git_commit,
        model_length=other.model_length if own.model_length is None else own.model_length,
        fingerprints=other.fingerprints | own.fingerprints,
        seeds=other.seeds | own.seeds,
        versions=other.versions | own.versions,
        settings={name: str(value) for name, value in other.resolved.items()},
    )


def accounting(raw: RawFolder, run: RunMetrics | None) -> Accounting | None:
    """Count the reads of a run by fate and by remark; `None` when its reads.tsv is missing or cannot be read."""
    path = None if run is None else RunDir(raw.root / run.name).reads_table
    if run is None or path is None or not path.is_file():
        return None
    name = raw.use(path)
    try:
        table = pd.read_csv(
            path,
            sep="\t",
            usecols=["fate", "flags"],
            dtype="str",
            quoting=3,
            keep_default_na=False,
            encoding_errors="surrogateescape",
        )
    except (ValueError, pd.errors.ParserError) as error:
        raw.problems[name] = (f"cannot be read: {error}",)
        return None
    fates = dict.fromkeys(FATES, 0) | {str(fate): int(n) for fate, n in table["fate"].value_counts(sort=False).items()}
    said = {fate: n for fate, n in run.fates.items() if n}
    record = raw.read(ValidationRecord, RECORD)
    staging = None if record is None else record.staging
    return Accounting(
        reads=len(table),
        fates=fates,
        flags=_flags(table["flags"]),
        adds_up=len(table) == run.n_reads and said == {fate: n for fate, n in fates.items() if n},
        skipped_records=_skipped(raw, record),
        ignored_files=None if staging is None or staging.ignored_files is None else len(staging.ignored_files),
        input_warnings=() if staging is None else staging.warnings,
    )


def _flags(column: pd.Series[str]) -> dict[str, int]:
    """Reads by remark; the id that `duplicate_of=` names stands last and may hold commas."""
    found = dict.fromkeys(FLAGS, 0)
    kinds = column.str.replace(r"duplicate_of=.*$", "duplicate_of", regex=True).value_counts(sort=False)
    for remarks, n in kinds.items():
        for name in filter(None, str(remarks).split(",")):
            found[name] = found.get(name, 0) + int(n)
    return found


def _skipped(raw: RawFolder, record: ValidationRecord | None) -> int | None:
    """Broken records left out: as recorded, else as listed; none where the first would have stopped the run."""
    if record is not None and record.staging is not None and record.staging.skipped is not None:
        return record.staging.skipped
    listing = raw.root / SKIPPED_LIST
    if listing.is_file():
        raw.use(listing)
        return max(0, len(listing.read_bytes().splitlines()) - 1)
    return 0 if record is not None and record.spec.get("on_error") == "stop" else None
