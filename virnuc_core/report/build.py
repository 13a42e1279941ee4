"""From a finished validate directory to the report's data. What is missing is `None` and `not run`, never a crash."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from virnuc_core.profiles import Profile
from virnuc_core.reads.subsets import read_table
from virnuc_core.report.advice import findings, losses
from virnuc_core.report.charts import charts
from virnuc_core.report.criteria import CHECKS, CRITERIA, SAME_BYTES, SCALING, Measured, baseline_note, judge
from virnuc_core.report.files import BASELINE, COMPARISON, RECORD, RUN_PREFIX, RawFolder, run_names
from virnuc_core.report.formatting import sentences
from virnuc_core.report.metrics import baseline_metrics, overhead_metrics, run_metrics, scaling_metrics
from virnuc_core.report.model import Accounting, ApprovalState, Provenance, Report, RunMetrics, ScalingMetrics
from virnuc_core.report.regression import RegressionFile, check, points
from virnuc_core.results import FATES
from virnuc_core.rundir import EXACT, RunDir
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, differing, made_from
from virnuc_core.validation import TUNING, ApprovalRecord, ComparisonFile, StagingTally, TuningFile, ValidationRecord

REGRESSION: Final = "regression.json"
APPROVAL: Final = "approval.json"
MADE_FROM: Final = ("reads", "esm2", "dnabert_s", "head", MODEL_LENGTH)
SHOWN: Final = 8  # characters of a fingerprint
FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")

Unlike = Mapping[tuple[str | None, str | None], str]  # names of two parts → why they may not be compared


def build_report(out: Path, profile: Profile) -> Report:
    """Read what a validation left in `out` and judge it by `profile`.

    Reads `run.json`, `comparison.json`, `baseline/`, each `devices-N/` and, where they are, `regression.json`,
    `checkpoint_overhead.json` and `report/approval.json`. Runs of N devices are judged by the largest N.
    """
    raw = RawFolder(out)
    record = raw.read(ValidationRecord, RECORD)
    cases, unlike = _cases(raw, profile)
    measured, judged, asked = cases[-1], cases[-1].judged, _scaled(cases, profile)

    def refusal(a: str, *others: RunMetrics | None) -> str:
        return next((unlike[a, run.name] for run in others if run is not None and (a, run.name) in unlike), "")

    single = f"{RUN_PREFIX}1"
    refused = {"scaling": refusal(single, asked.many), "same_bytes": refusal(single, *measured.runs)}
    refused |= {"speedup": refusal(BASELINE, judged), "consensus": refusal(BASELINE, *measured.runs)}
    further = [row for row in CHECKS if getattr(profile.targets, row.target) is not None]
    criteria, checks = (
        tuple(judge(row, asked if row is SCALING else measured, refused.get(row.id, "")) for row in rows)
        for rows in (CRITERIA, (*further, *([SAME_BYTES] if measured.many else [])))
    )
    found = None if judged is None or judged.telemetry is None else raw.telemetry(judged.name, judged.telemetry.file)
    series = charts(raw, judged, None if found is None else found[1], profile)
    compared = raw.read(RegressionFile, REGRESSION)
    regression = None if compared is None else check(compared.history, compared.entry)
    tuning = raw.read(TuningFile, TUNING) or TuningFile()
    accounts, approval = _accounting(raw, judged, record), approval_state(raw, judged)
    provenance = _provenance(record, None if judged is None else raw.read(RunRecord, judged.name, RECORD))
    known: dict[str, Any] = {"measured": measured, "accounts": accounts, "regression": regression, "charts": series}
    known |= {"model_length": provenance.model_length, "baseline_note": baseline_note, "exact": EXACT}
    return Report(
        profile=profile,
        provenance=provenance,
        run=judged,
        single=measured.single,
        runs=measured.runs,
        baseline=measured.baseline,
        scaling=tuple(_scaling(cases, asked)),
        comparisons=measured.comparisons,
        criteria=criteria,
        checks=checks,
        losses=losses(judged),
        findings=findings(judged),
        regression=regression,
        history=() if compared is None else points(compared.history, compared.entry),
        charts=series,
        overhead=measured.overhead,
        accounting=accounts,
        approval=approval,
        warnings=sentences("warnings.j2", **known, problems=raw.remarks(), not_compared=dict.fromkeys(unlike.values())),
        notes=sentences("notes.j2", **known, tuning=tuning.rounds),
        evidence=raw.evidence(),
    )


def _cases(raw: RawFolder, profile: Profile) -> tuple[list[Measured], Unlike]:
    """What is judged, once for each run on N devices, the largest last; and what may not be compared."""
    found = (run_metrics(raw, name, profile) for name in run_names(raw.root))
    runs = tuple(run for run in found if run is not None)
    single = next((run for run in runs if run.name == f"{RUN_PREFIX}1"), None)
    on_many: list[RunMetrics | None] = [run for run in runs if run is not single] or [None]
    judged = on_many[-1] or single
    baseline = baseline_metrics(raw, profile, judged)
    measured_here = profile.baseline.source == "measured" and RunDir(raw.root / BASELINE).summary.is_file()
    unlike = _unlike(raw, [*([BASELINE] if measured_here else []), *(run.name for run in runs)])
    if baseline is not None and judged is not None and (reason := unlike.get((BASELINE, judged.name))):
        baseline = baseline.model_copy(update={"problem": reason})
    compared = raw.read(ComparisonFile, COMPARISON) or ComparisonFile(comparisons=())
    like = tuple(one for one in compared.comparisons if not unlike.get((one.a, one.b)))
    overhead, cases = overhead_metrics(raw), []
    for many in on_many:
        apart = single is not None and many is not None and unlike.get((single.name, many.name))
        scaled = None if apart else scaling_metrics(single, many)
        cases.append(Measured(profile, single, many, baseline, scaled, like, overhead, runs))
    return cases, unlike


def _scaling(cases: Sequence[Measured], asked: Measured) -> Iterator[ScalingMetrics]:
    """One device, then several; the figure of `asked` has the criterion's verdict."""
    if alone := scaling_metrics(cases[0].single, cases[0].single):
        yield alone
    for case in cases:
        if (found := case.scaling) is not None:
            update = {} if case is asked else {"title": f"Scaling on {found.num_gpus} devices"}
            yield found.model_copy(update={"judged": judge(SCALING.model_copy(update=update), case)})


def _scaled(cases: Sequence[Measured], profile: Profile) -> Measured:
    """The case whose scaling is the criterion: two devices where the profile says so, else most with a band."""
    wanted = {2} if profile.targets.scaling else set(map(int, profile.scaling_bands))
    found = (case for case in reversed(cases) if case.many is not None and len(case.many.devices) in wanted)
    return next(found, cases[-1])


def _unlike(raw: RawFolder, parts: list[str]) -> Unlike:
    """Why pairs of `parts` may not be compared, by what their `run.json` say; in both orders."""
    records = {part: raw.read(RunRecord, part, RECORD) for part in parts}
    made = {part: {} if record is None else made_from(record) for part, record in records.items()}
    silent = {part: [name for name in MADE_FROM if name not in own] for part, own in made.items()}
    reasons: dict[tuple[str | None, str | None], str] = {}
    for a, b in combinations(parts, 2):
        others = differing(made[a], made[b])
        said = [f"{name} ({x[:SHOWN]} and {y[:SHOWN]})" for name, (x, y) in others.items() if name in MADE_FROM]
        absent = [f"{part}/{RECORD} does not tell {', '.join(silent[part])}" for part in (a, b) if silent[part]]
        if said or absent:
            reasons[a, b] = reasons[b, a] = f"{a} and {b} differ in {', '.join(said)}" if said else absent[0]
    return reasons


def _provenance(validation: ValidationRecord | None, run: RunRecord | None) -> Provenance:
    """From the validation's own record; the run's where that says nothing."""
    own, other = (record.model_dump(exclude_defaults=True) if record else {} for record in (validation, run))
    told = {"virnuc_version": None, "git_commit": None, "model_length": None, **other, **own}
    told |= {part: other.get(part, {}) | own.get(part, {}) for part in ("fingerprints", "seeds", "versions")}
    return Provenance(
        **{name: value for name, value in told.items() if name in Provenance.model_fields and name != "created"},
        created=(validation or run or RunRecord(fingerprints={})).created,
        sample=str((own.get("spec") or other.get("spec", {})).get("sample", "")),
        settings={name: str(value) for name, value in other.get("resolved", {}).items()},
    )


def _accounting(raw: RawFolder, run: RunMetrics | None, record: ValidationRecord | None) -> Accounting | None:
    """Count the reads of a run by fate and by remark; `None` when its reads.tsv is missing or cannot be read."""
    if run is None:
        return None
    columns = {"fate": "str", "flags": "str"}
    table = raw.attempt(RunDir(raw.root / run.name).reads_table, lambda path: read_table(path, columns))
    if table is None:
        return None
    fates = dict.fromkeys(FATES, 0) | table["fate"].value_counts(sort=False).to_dict()
    # the id that `duplicate_of=` names stands last and may hold commas
    remarks = table["flags"][table["flags"] != ""].str.replace(r"duplicate_of=.*$", "duplicate_of", regex=True)
    flags = dict.fromkeys(FLAGS, 0) | remarks.str.split(",").explode().value_counts(sort=False).to_dict()
    said, counted = ({fate: n for fate, n in one.items() if n} for one in (run.fates, fates))
    staging = (record and record.staging) or StagingTally()
    return Accounting(
        reads=len(table),
        fates=fates,
        flags=flags,
        adds_up=len(table) == run.n_reads and said == counted,
        skipped_records=staging.skipped,
        ignored_files=None if staging.ignored_files is None else len(staging.ignored_files),
        input_warnings=staging.warnings,
    )


def approval_state(raw: RawFolder, run: RunMetrics | None) -> ApprovalState | None:
    """What was answered; pending where an answer was asked for and none is there; `None` where none was asked for."""
    path = RunDir(raw.root).report / APPROVAL
    if not path.is_file():
        record = raw.read(ValidationRecord, RECORD)
        asked = record is not None and record.spec.get("approval") is True
        return ApprovalState(verdict="pending") if asked else None
    said = raw.read(ApprovalRecord, path.parent.name, APPROVAL)
    if said is None:
        return None
    told = None if run is None or run.telemetry is None else raw.telemetry(run.name, run.telemetry.file)
    older = said.when is not None and told is not None and said.when < told[1].started
    return ApprovalState(**said.model_dump(), of_earlier_run=older)


def with_answer(out: Path, report: Report) -> Report:
    """The report with the answer that lies beside it now, and nothing else changed; as it is when there is none."""
    raw, path = RawFolder(out), RunDir(out).report / APPROVAL
    if not path.is_file():
        return report
    approval, name = approval_state(raw, report.run), raw.use(path)
    files = {file.path: file for file in report.evidence} | {f.path: f for f in raw.evidence() if f.path == name}
    evidence = tuple(files[path] for path in sorted(files))
    return report.model_copy(update={"approval": approval, "evidence": evidence})
