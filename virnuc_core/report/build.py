"""From a finished validate directory to the report's data and files. What is missing is `None` and `not run`, never a
crash.

Where the time goes is told by two rules: stages of over 30 % of it, and GPU stages under 80 % utilisation. ESM-2 is
always over 30 %; while its GPU is busy that is expected, and only the rest is worth a person's time. The bottleneck is
the largest avoidable loss of time, by class, with what removing it would save at most."""

import tomllib
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Final

from virnuc_core import validation
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.profiles import Profile
from virnuc_core.reads.subsets import read_table
from virnuc_core.report import metrics
from virnuc_core.report.charts import charts
from virnuc_core.report.criteria import CHECKS, CRITERIA, SAME_BYTES, SCALING, baseline_note, judge
from virnuc_core.report.metrics import BASELINE, COMPARISON, RECORD, RUN_PREFIX, RawFolder, run_names
from virnuc_core.report.model import Accounting, ApprovalState, Bottleneck, Report, RunMetrics
from virnuc_core.report.regression import RegressionFile, append_history, check, earlier, entry_of, points, read_history
from virnuc_core.report.render import REPORT_JSON, render, told
from virnuc_core.results import FATES
from virnuc_core.rundir import EXACT, RunDir, write_text_whole
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, differing, made_from, read, write
from virnuc_core.telemetry.tables import GPU_STAGES, OVERLAPPED, STAGES

REGRESSION: Final = "regression.json"
APPROVAL: Final = "approval.json"
MADE_FROM: Final = ("reads", "esm2", "dnabert_s", "head", MODEL_LENGTH)
SHOWN: Final = 8  # characters of a fingerprint
TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
WORTH: Final = 0.05  # of the whole time: a smaller loss is not worth a person's
LONG_S: Final = 600.0
ADVICE: Final = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))
STAGE_ADVICE: Final = {
    **{stage: loss["advice"] for loss in ADVICE["losses"].values() for stage in loss["stages"]},
    **ADVICE["stages"],
}
FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")

Unlike = Mapping[tuple[str | None, str | None], str]  # names of two parts → why they may not be compared


def build_report(out: Path, profile: Profile) -> Report:
    """Read what a validation left in `out` and judge it by `profile`.

    Reads `run.json`, `comparison.json`, `baseline/`, each `devices-N/` and, where they are, `regression.json`,
    `checkpoint_overhead.json` and `report/approval.json`. Runs of N devices are judged by the largest N."""
    raw = RawFolder(out)
    record = raw.read(validation.ValidationRecord, RECORD)
    runs = tuple(filter(None, (metrics.run_metrics(raw, name, profile) for name in run_names(out))))
    judged, single = runs[-1] if runs else None, next((run for run in runs if run.name == f"{RUN_PREFIX}1"), None)
    measured_here = profile.baseline.source == "measured" and RunDir(out / BASELINE).summary.is_file()
    unlike = _unlike(raw, [*([BASELINE] if measured_here else []), *(run.name for run in runs)])
    baseline = metrics.baseline_metrics(raw, profile, judged)
    if baseline is not None and judged is not None and (reason := unlike.get((BASELINE, judged.name))):
        baseline = baseline.model_copy(update={"problem": reason})
    scaled = [metrics.scaling_metrics(single, run) for run in runs if (f"{RUN_PREFIX}1", run.name) not in unlike]
    file = None if judged is None or judged.telemetry is None else raw.telemetry(judged.name, judged.telemetry.file)
    compared, comparisons = raw.read(RegressionFile, REGRESSION), raw.read(validation.ComparisonFile, COMPARISON)
    report = Report(
        profile=profile,
        provenance=_provenance(record, None if judged is None else raw.read(RunRecord, judged.name, RECORD)),
        run=judged,
        single=single,
        runs=runs,
        baseline=baseline,
        scaling=tuple(figure for figure in scaled if figure is not None),
        comparisons=tuple(c for c in (comparisons.comparisons if comparisons else ()) if (c.a, c.b) not in unlike),
        criteria=(),
        checks=(),
        losses=losses(judged),
        findings=findings(judged),
        regression=None if compared is None else check(compared.history, compared.entry),
        history=() if compared is None else points(compared.history, compared.entry),
        charts=charts(raw, judged, None if file is None else file[1], profile),
        overhead=raw.read(validation.OverheadFile, validation.OVERHEAD),
        accounting=_accounting(raw, judged, record),
        approval=approval_state(raw, judged),
        warnings=(),
        notes=(),
        evidence={},
    )
    tuning = raw.read(validation.TuningFile, validation.TUNING) or validation.TuningFile()
    judgement = _verdicts(report, unlike)
    known = {"tuning": tuning.rounds, "baseline_note": baseline_note, "exact": EXACT, "problems": raw.remarks()}
    for what in ("warnings", "notes"):
        parts = told(f"{what}.j2", report, not_compared=dict.fromkeys(unlike.values()), **known)
        judgement[what] = tuple(line for part in parts for line in part.prose)
    return report.model_copy(update=judgement | {"evidence": raw.evidence()})


def _verdicts(report: Report, unlike: Unlike) -> dict[str, object]:
    """The criteria, the checks, and each figure of scaling with its own verdict. Of scaling the criterion is on two
    devices where the profile says so, else on most of those with a band."""
    several = [run for run in report.runs if run is not report.single]
    profile = report.profile
    wanted = {2} if profile.targets.scaling else set(map(int, profile.scaling_bands))
    asked = next((run for run in reversed(several) if len(run.devices) in wanted), report.many)

    def refusal(a: str, *others: RunMetrics | None) -> str:
        return next((unlike[a, run.name] for run in others if run is not None and (a, run.name) in unlike), "")

    one = f"{RUN_PREFIX}1"
    refused = {"scaling": refusal(one, asked), "same_bytes": refusal(one, *report.runs)}
    refused |= {"speedup": refusal(BASELINE, report.run), "consensus": refusal(BASELINE, *report.runs)}
    further = [row for row in CHECKS if getattr(profile.targets, row.target) is not None]
    criteria, checks = (
        tuple(judge(row, report, refused.get(row.id, ""), asked if row is SCALING else None) for row in rows)
        for rows in (CRITERIA, (*further, *([SAME_BYTES] if report.many else [])))
    )
    figures = [*report.scaling]
    for run in several:
        if (figure := report.figure_of(run)) is not None:
            title = {} if run is asked else {"title": f"Scaling on {figure.num_gpus} devices"}
            judged = judge(SCALING.model_copy(update=title), report, scaled=run)
            figures[figures.index(figure)] = figure.model_copy(update={"judged": judged})
    return {"criteria": criteria, "checks": checks, "scaling": tuple(figures)}


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


def _provenance(whole: validation.ValidationRecord | None, run: RunRecord | None) -> RunRecord:
    """The validation's own record, the run's where that says nothing; of its settings the sample's name alone, for
    addresses among them may be signed, and a report is passed on."""
    own, other = (record.model_dump(exclude_defaults=True) if record else {} for record in (whole, run))
    parts = {part: other.get(part, {}) | own.get(part, {}) for part in ("fingerprints", "seeds", "versions")}
    parts["spec"] = {"sample": str((own.get("spec") or other.get("spec", {})).get("sample", ""))}
    return RunRecord.model_validate(other | own | parts | {"attempts": ()})


def _accounting(
    raw: RawFolder, run: RunMetrics | None, record: validation.ValidationRecord | None
) -> Accounting | None:
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
    return Accounting(
        reads=len(table),
        fates=fates,
        flags=flags,
        adds_up=len(table) == run.n_reads and said == counted,
        staging=(record and record.staging) or validation.StagingTally(),
    )


def approval_state(raw: RawFolder, run: RunMetrics | None) -> ApprovalState | None:
    """What was answered; pending where an answer was asked for and none is there; `None` where none was asked for."""
    path = RunDir(raw.root).report / APPROVAL
    if not path.is_file():
        record = raw.read(validation.ValidationRecord, RECORD)
        asked = record is not None and record.spec.get("approval") is True
        return ApprovalState(verdict="pending") if asked else None
    said = raw.read(validation.ApprovalRecord, path.parent.name, APPROVAL)
    if said is None:
        return None
    file = None if run is None or run.telemetry is None else raw.telemetry(run.name, run.telemetry.file)
    older = said.when is not None and file is not None and said.when < file[1].started
    return ApprovalState(**said.model_dump(), of_earlier_run=older)


def read_report(path: Path) -> Report:
    """Read `report.json`; `InputError` says what is wrong with it."""
    try:
        return read(path, Report)
    except ConfigError as error:
        why = f"not a report of this version ({str(error).removeprefix(f'{path}: ')})"
        raise InputError(why, file=path, hint="virnuc report DIR --profile NAME judges the raw files anew") from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> Report:
    """Judge a finished validate directory and write every form of the report to `out/report/`.

    With `history`, the run is first held against the earlier runs in that file, and added to it."""
    report = build_report(out, profile)
    if history is not None:
        (out / REGRESSION).unlink(missing_ok=True)  # of an earlier run
        if (entry := entry_of(report)) is not None:
            append_history(history, entry)  # first: what is broken there is set aside, and told once
            last = tuple(earlier(read_history(history), entry)[-100:])
            write(out / REGRESSION, RegressionFile(entry=entry, history=last))
        report = build_report(out, profile)
    _write(out, render(report))
    return report


def rerender(out: Path) -> Report:
    """Render `out/report/report.json` again, from nothing but that file and a reviewer's answer beside it."""
    report, raw, path = read_report(RunDir(out).report / REPORT_JSON), RawFolder(out), RunDir(out).report / APPROVAL
    if path.is_file():
        answer, name = approval_state(raw, report.run), path.relative_to(out).as_posix()
        files = sorted((report.evidence | {name: raw.evidence()[name]}).items())
        report = report.model_copy(update={"approval": answer, "evidence": dict(files)})
    _write(out, render(report))
    return report


def _write(out: Path, forms: dict[str, str]) -> None:
    for name, content in forms.items():
        write_text_whole(RunDir(out).report / name, content)


def findings(run: RunMetrics | None) -> tuple[str, ...]:
    """A sentence on each stage the two rules point at, largest share first; no time or no total gives none."""
    if run is None:
        return ()
    found, measured = [], run.telemetry
    busiest = {stage: measured.lowest_percent(encoder) for encoder, stage in GPU_STAGES.items()} if measured else {}
    for name in STAGES:
        share, used = run.stage_shares.get(name, 0.0), busiest.get(name)
        idle = used is not None and used < BUSY_PERCENT
        if share > TIME_SHARE or idle:
            expected = name == "ESM-2" and not idle
            advice = _further(run) if expected else ADVICE["busy"] if idle else STAGE_ADVICE[name]
            busy = "" if used is None else f", the lowest GPU {used:.1f} % busy"
            word = "expected" if expected else "actionable"
            found.append((-share, f"{name} takes {100 * share:.1f} % of the time{busy} ({word}): {advice}."))
    return tuple(text for _, text in sorted(found))


def _further(run: RunMetrics) -> str:
    """What helps where the encoders do their work well."""
    return str(ADVICE["gpu" if (run.total_s or 0.0) >= LONG_S else "work"])


def losses(run: RunMetrics | None) -> tuple[Bottleneck, ...]:
    """Every avoidable loss of time, the largest first; never empty."""
    if run is None or not run.total_s:
        return (Bottleneck(kind="unknown", detail="no run was timed", advice="run validate"),)
    spent = {row: seconds for row, seconds in run.stages.items() if seconds}
    found = [*_computing(run, spent)]
    for kind, loss in ADVICE["losses"].items():
        own = sorted(((spent[row], row) for row in loss["stages"] if row in spent), reverse=True)
        # what passed while the reads were staged saves nothing, whichever of the two is removed
        hidden_s = spent.get(OVERLAPPED, 0.0) if kind in ("start-up", "staging") else 0.0
        whole_s = sum(seconds for seconds, _ in own)
        detail = ", ".join(f"{row} {seconds:.1f} s" for seconds, row in own if seconds > WORTH * whole_s)
        found.append((whole_s - hidden_s, kind, detail, loss["advice"], False))
    ranked = tuple(
        Bottleneck(
            kind=kind, detail=detail, advice=advice, saves_s=saves_s, share=share, expected=good or share < WORTH
        )
        for saves_s, kind, detail, advice, good in sorted(found, reverse=True)
        if (share := saves_s / run.total_s) > 0
    )
    return ranked or (Bottleneck(kind="unknown", detail="no stage was measured", advice="look at the log of the run"),)


def _computing(run: RunMetrics, spent: Mapping[str, float]) -> Iterator[tuple[float, str, str, str, bool]]:
    """What devices at work lose, by slots without a token and by speed below the measured ceiling, else below full
    utilisation: seconds, class, detail, the way out, and whether they do their work well."""
    still_s = spent.get("Device idle", 0.0)
    empty_s, slow_s, said, idle = 0.0, still_s, [f"a device stands still for {still_s:.1f} s"], False
    measured = run.telemetry
    for found in measured.encoders if measured else ():
        stage, packing, share = GPU_STAGES[found.encoder], found.packing_efficiency or 1.0, 1.0
        if measured and (used := measured.lowest_percent(found.encoder)) is not None:
            idle, share = idle or used < BUSY_PERCENT, used / 100.0
            said.append(f"{stage} keeps the lowest GPU {used:.1f} % busy")
        if found.mfu_of_ceiling is not None:
            share = found.mfu_of_ceiling / packing
            said.append(f"{stage} runs at {100 * share:.0f} % of what its linear layers alone sustain")
        empty_s += spent.get(stage, 0.0) * (1.0 - packing)
        slow_s += spent.get(stage, 0.0) * packing * max(0.0, 1.0 - share)
    good = not idle and still_s <= slow_s / 2
    yield slow_s, "GPU compute", "; ".join(said), _further(run) if good else ADVICE["busy"], good
    yield empty_s, "packing", "slots without a token", "raise token_budget or shard_tokens", False
