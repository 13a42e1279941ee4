"""From a finished validate directory to the report's data and files, and to what it says beside the last run like it.
What is missing is `None` and `not run`, never a crash.

The history has a JSON line for each run. Like is compared with like: same profile, host, devices, precision, reads and
weights. Worse in a metric's own direction by more than the profile allows (10 %) fails. When the newest run of the
profile on these devices was made with other reads or weights, the earlier figures are stale and say nothing."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from virnuc_core import validation
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.lease import lease
from virnuc_core.profiles import Profile
from virnuc_core.reads.subsets import read_table
from virnuc_core.report import metrics, model
from virnuc_core.report.charts import charts
from virnuc_core.report.criteria import CHECKS, CRITERIA, SAME_BYTES, SCALING, judge
from virnuc_core.report.metrics import (
    BASELINE,
    COMPARISON,
    RECORD,
    RUN_PREFIX,
    RawFolder,
    run_names,
)
from virnuc_core.report.render import REPORT_JSON, render, render_rows, render_sections
from virnuc_core.results import FATES
from virnuc_core.rundir import (
    EXACT_FILES,
    RunDir,
    atomic_file,
    storage_errors,
    write_text_atomically,
)
from virnuc_core.runfiles import MODEL_LENGTH, RunRecord, find_mismatches, identity, read, write

log = logging.getLogger(__name__)

REGRESSION: Final = "regression.json"
APPROVAL: Final = "approval.json"
MADE_FROM: Final = ("reads", "esm2", "dnabert_s", "head", MODEL_LENGTH)
SHOWN: Final = 8  # characters of a fingerprint
FLAGS: Final = ("short_for_model", "ambiguous", "duplicate_of")
HISTORY: Final = "virnuc-history.jsonl"  # beside a validation's directory, unless told otherwise
SERIES: Final = ("profile", "devices", "precision", "host")
LIKE: Final = (*SERIES, "reads", "weights")  # only such runs may be compared
# whether more is better
METRICS: Final = {
    "tokens_per_s": True,
    "gpu_utilisation": True,
    "packing_efficiency": True,
    "total_s": False,
}

Entries = Sequence[model.HistoryEntry]
Unlike = Mapping[
    tuple[str | None, str | None], str
]  # names of two parts → why they may not be compared


def build_report(out: Path, profile: Profile) -> model.Report:
    """Read what a validation left in `out` and judge it by `profile`: `run.json`, `comparison.json`, `baseline/`, each
    `devices-N/` and, where they are, `regression.json`, `checkpoint_overhead.json` and `report/approval.json`. Runs of
    N devices are judged by the largest N."""
    raw = RawFolder(out)
    record = raw.read(validation.ValidationRecord, RECORD)
    names = run_names(
        out, most=len(record.devices) if record else 0
    )  # of more devices are those of an earlier start
    runs = tuple(filter(None, (metrics.run_metrics(raw, name, profile) for name in names)))
    judged, single = (
        runs[-1] if runs else None,
        next((run for run in runs if run.name == f"{RUN_PREFIX}1"), None),
    )
    measured_here = (
        profile.baseline.source == "measured" and RunDir(out / BASELINE).summary.is_file()
    )
    unlike = _unlike(raw, [*([BASELINE] if measured_here else []), *(run.name for run in runs)])
    baseline = metrics.baseline_metrics(raw, profile, judged)
    if (
        baseline is not None
        and judged is not None
        and (reason := unlike.get((BASELINE, judged.name)))
    ):
        baseline = baseline.model_copy(update={"problem": reason})
    scaled = [
        metrics.scaling_metrics(single, run)
        for run in runs
        if (f"{RUN_PREFIX}1", run.name) not in unlike
    ]
    file = (
        None
        if judged is None or judged.telemetry is None
        else raw.telemetry(judged.name, judged.telemetry.file)
    )
    compared, comparisons = (
        raw.read(RegressionFile, REGRESSION),
        raw.read(validation.ComparisonFile, COMPARISON),
    )
    records = record, None if judged is None else raw.read(RunRecord, judged.name, RECORD)
    own, other = (one.model_dump(exclude_defaults=True) if one else {} for one in records)
    made = {
        part: other.get(part, {}) | own.get(part, {})
        for part in ("fingerprints", "seeds", "versions")
    }
    # of the settings the sample's name alone: addresses among them may be signed, and a report is passed on
    made["spec"] = {"sample": str((own.get("spec") or other.get("spec", {})).get("sample", ""))}
    report = model.Report(
        profile=profile,
        provenance=RunRecord.model_validate(other | own | made | {"attempts": ()}),
        run=judged,
        single=single,
        runs=runs,
        baseline=baseline,
        scaling=tuple(figure for figure in scaled if figure is not None),
        comparisons=tuple(
            c for c in (comparisons.comparisons if comparisons else ()) if (c.a, c.b) not in unlike
        ),
        losses=metrics.losses(judged),
        findings=metrics.findings(judged),
        regression=None if compared is None else regression(compared.history, compared.entry),
        history=(*earlier(compared.history, compared.entry, LIKE), compared.entry)
        if compared
        else (),
        charts=charts(raw, judged, None if file is None else file[1], profile),
        overhead=raw.read(validation.OverheadFile, validation.OVERHEAD),
        accounting=_accounting(raw, judged, record),
        approval=approval_state(raw, judged),
        evidence={},
    )
    tuning = raw.read(validation.TuningFile, validation.TUNING) or validation.TuningFile()
    judgement = _verdicts(report, unlike)
    known = {"tuning": tuning.rounds, "exact": EXACT_FILES, "problems": raw.problems.values()}
    for what in ("warnings", "notes"):
        parts = render_sections(
            f"{what}.j2", report, not_compared=dict.fromkeys(unlike.values()), **known
        )
        judgement[what] = tuple(line for part in parts for line in part.prose)
    return report.model_copy(update=judgement | {"evidence": raw.evidence()})


def _verdicts(report: model.Report, unlike: Unlike) -> dict[str, object]:
    """The criteria, the checks, and each figure of scaling with its own verdict. Of scaling the criterion is on two
    devices where the profile says so, else on most of those with a band."""
    several = [run for run in report.runs if run is not report.single]
    profile = report.profile
    wanted = {2} if "scaling" in profile.targets else set(map(int, profile.scaling_bands))
    asked = next((run for run in reversed(several) if len(run.devices) in wanted), report.many)

    def refusal(a: str, *others: model.RunMetrics | None) -> str:
        return next(
            (unlike[a, run.name] for run in others if run is not None and (a, run.name) in unlike),
            "",
        )

    one = f"{RUN_PREFIX}1"
    refused = {"scaling": refusal(one, asked), "same_bytes": refusal(one, *report.runs)}
    refused |= {
        "speedup": refusal(BASELINE, report.run),
        "consensus": refusal(BASELINE, *report.runs),
    }
    further = [row for row in CHECKS if row.target in profile.targets]
    criteria, checks = (
        tuple(
            judge(row, report, refused.get(row.id, ""), asked if row is SCALING else None)
            for row in rows
        )
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
    made = {part: {} if record is None else identity(record) for part, record in records.items()}
    silent = {part: [name for name in MADE_FROM if name not in own] for part, own in made.items()}
    reasons: dict[tuple[str | None, str | None], str] = {}
    for a, b in combinations(parts, 2):
        others = find_mismatches(made[a], made[b])
        said = [
            f"{name} ({x[:SHOWN]} and {y[:SHOWN]})"
            for name, (x, y) in others.items()
            if name in MADE_FROM
        ]
        absent = [
            f"{part}/{RECORD} does not tell {', '.join(silent[part])}"
            for part in (a, b)
            if silent[part]
        ]
        if said or absent:
            reasons[a, b] = reasons[b, a] = (
                f"{a} and {b} differ in {', '.join(said)}" if said else absent[0]
            )
    return reasons


def _accounting(
    raw: RawFolder, run: model.RunMetrics | None, record: validation.ValidationRecord | None
) -> model.Accounting | None:
    """Count the reads of a run by fate and by remark; `None` when its reads.tsv is missing or cannot be read."""
    if run is None:
        return None
    columns = {"fate": "str", "flags": "str"}
    table = raw.attempt(
        RunDir(raw.root / run.name).reads_table, lambda path: read_table(path, columns)
    )
    if table is None:
        return None
    fates = dict.fromkeys(FATES, 0) | table["fate"].value_counts(sort=False).to_dict()
    # the id that `duplicate_of=` names stands last and may hold commas
    remarks = table["flags"][table["flags"] != ""].str.replace(
        r"duplicate_of=.*$", "duplicate_of", regex=True
    )
    flags = (
        dict.fromkeys(FLAGS, 0)
        | remarks.str.split(",").explode().value_counts(sort=False).to_dict()
    )
    said, counted = ({fate: n for fate, n in one.items() if n} for one in (run.fates, fates))
    return model.Accounting(
        reads=len(table),
        fates=fates,
        flags=flags,
        adds_up=len(table) == run.n_reads and said == counted,
        staging=(record and record.staging) or validation.StagingTally(),
    )


def approval_state(raw: RawFolder, run: model.RunMetrics | None) -> model.ApprovalState | None:
    """What was answered; pending where an answer was asked for and none is there; `None` where none was asked for."""
    path = RunDir(raw.root).report / APPROVAL
    if not path.is_file():
        record = raw.read(validation.ValidationRecord, RECORD)
        asked = record is not None and record.spec.get("approval") is True
        return model.ApprovalState(verdict="pending") if asked else None
    said = raw.read(validation.ApprovalRecord, path.parent.name, APPROVAL)
    if said is None:
        return None
    file = (
        None
        if run is None or run.telemetry is None
        else raw.telemetry(run.name, run.telemetry.file)
    )
    older = said.when is not None and file is not None and said.when < file[1].started
    return model.ApprovalState(**said.model_dump(), of_earlier_run=older)


def read_report(path: Path) -> model.Report:
    """Read `report.json`; `InputError` says what is wrong with it."""
    try:
        return read(path, model.Report)
    except ConfigError as error:
        why = f"not a report of this version ({str(error).removeprefix(f'{path}: ')})"
        raise InputError(
            why, file=path, hint="virnuc report DIR --profile NAME judges the raw files anew"
        ) from error


def write_report(out: Path, profile: Profile, history: Path | None = None) -> model.Report:
    """Judge a finished validate directory and write every form of the report to `out/report/`. With `history`, the run
    is first held against the earlier runs in that file, and added to it."""
    report = build_report(out, profile)
    if history is not None:
        (out / REGRESSION).unlink(missing_ok=True)  # of an earlier run
        if (entry := entry_of(report)) is not None:
            append_history(
                history, entry
            )  # first: what is broken there is set aside, and told once
            last = tuple(earlier(read_history(history), entry)[-100:])
            write(out / REGRESSION, RegressionFile(entry=entry, history=last))
        report = build_report(out, profile)
    return _written(out, report)


def rerender(out: Path) -> model.Report:
    """Render `out/report/report.json` again, from nothing but that file and a reviewer's answer beside it."""
    report, raw, path = (
        read_report(RunDir(out).report / REPORT_JSON),
        RawFolder(out),
        RunDir(out).report / APPROVAL,
    )
    if path.is_file():
        answer, name = approval_state(raw, report.run), path.relative_to(out).as_posix()
        files = sorted((report.evidence | {name: raw.evidence()[name]}).items())
        report = report.model_copy(update={"approval": answer, "evidence": dict(files)})
    return _written(out, report)


def _written(out: Path, report: model.Report) -> model.Report:
    for name, content in render(report).items():
        write_text_atomically(RunDir(out).report / name, content)
    return report


class RegressionFile(model.Record):
    """`regression.json`: what was compared, so that the verdict can be computed again."""

    schema_version: int = 1
    entry: model.HistoryEntry
    history: tuple[model.HistoryEntry, ...]


def entry_of(report: model.Report) -> model.HistoryEntry | None:
    """The history line of a report; `None` when there was no run, or one that was resumed, cut off or without a row."""
    run, made = report.run, report.provenance
    if run is None or run.resumed or run.stopped_at_limit or run.n_reads is None or run.n_rows == 0:
        return None
    names, values = (
        sorted(device.name for device in run.devices),
        {one.id: one.value for one in report.criteria},
    )
    nodes = {device.id.partition("@")[2] for device in run.devices} - {""}  # of a cluster
    return model.HistoryEntry(
        created=run.attempts[0].started
        if run.attempts
        else made.created,  # whenever it is judged, it is one run
        commit=made.git_commit or "unknown",
        profile=report.profile.name,
        devices=f"{len(names)}x {' + '.join(dict.fromkeys(names))}"
        + f" (nodes: {len(nodes)})" * bool(nodes),
        precision=run.precision or "unknown",
        reads=made.fingerprints.get("reads", "unknown"),
        weights="+".join(
            made.fingerprints.get(part, "unknown") for part in ("esm2", "dnabert_s", "head")
        ),
        n_reads=run.n_reads,
        tokens_per_s=run.telemetry.tokens_per_s if run.telemetry else None,
        gpu_utilisation=values.get("gpu_utilisation"),
        packing_efficiency=values.get("packing"),
        total_s=run.total_s,
        criteria_met=report.met,
        regression_percent=report.profile.regression_percent,
        host=made.host,
    )


def read_history(path: Path) -> tuple[model.HistoryEntry, ...]:
    """All entries, oldest first; none when there is no file. A line that cannot be read is named in a warning."""
    return tuple(_lines(path, "passed over")[0].values())


def _lines(path: Path, fate: str) -> tuple[dict[bytes, model.HistoryEntry], list[bytes]]:
    """The lines of a file that are entries, and those that are none: a warning names the first, and their `fate`."""
    found, broken, said = dict[bytes, model.HistoryEntry](), list[bytes](), ""
    for place, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            found |= {line: model.HistoryEntry.model_validate_json(line)} if line.strip() else {}
        except ValidationError as error:
            broken.append(line)
            said = said or f"{path}:{place}: not a history entry ({error.errors()[0]['msg']})"
    if broken:
        log.warning("%s%s; %s", said, f" and {len(broken) - 1} more" * (len(broken) > 1), fate)
    return found, broken


def append_history(path: Path, entry: model.HistoryEntry) -> bool:
    """Whether an entry was added, under a lease: one made at the same moment is not added again. Lines that are no
    entries go to `….damaged` first, with a warning."""
    path, aside = path.resolve(), path.with_name(f"{path.name}.damaged")
    with lease(path.with_name(f".{path.name}.lease"), path, wait=True):
        found, broken = _lines(path, f"kept in {aside.name}")
        if any(old.created == entry.created and old.same(entry, LIKE) for old in found.values()):
            return False
        line = json.dumps(entry.model_dump(mode="json"), sort_keys=True).encode() + b"\n"
        if broken:
            with storage_errors(aside), aside.open("ab") as kept:
                kept.writelines(bad + b"\n" for bad in broken)
                os.fsync(kept.fileno())
        with atomic_file(path) as anew:
            anew.write_bytes(b"\n".join([*found, line]))
    return True


def earlier(
    history: Entries, entry: model.HistoryEntry, fields: Sequence[str] = SERIES
) -> list[model.HistoryEntry]:
    """The runs before `entry` that have these fields in common with it, oldest first."""
    found = (old for old in history if old.same(entry, fields) and old.created < entry.created)
    return sorted(found, key=lambda old: old.created)


def regression(history: Entries, entry: model.HistoryEntry) -> model.Regression:
    """Compare `entry` with the newest earlier one that is like it."""
    series, before = earlier(history, entry), next(reversed(earlier(history, entry, LIKE)), None)
    stale = bool(series) and not series[-1].same(entry, LIKE)
    if before is None:
        none = "stale baseline: earlier runs were made with other reads or weights"
        reason = none if stale else "no earlier run of this profile on these devices"
        return model.Regression(verdict="not run", reason=reason, stale=stale)
    metrics = []
    for name, higher in METRICS.items():
        was, now = getattr(before, name), getattr(entry, name)
        change = (now - was) / was if was is not None and now is not None and was > 0 else None
        verdict: model.Verdict = "not run"
        if change is not None:
            verdict = (
                "fail"
                if 100 * (-change if higher else change) > entry.regression_percent
                else "pass"
            )
        metrics.append(
            model.RegressionMetric(name=name, before=was, now=now, change=change, verdict=verdict)
        )
    worse = [metric.name for metric in metrics if metric.verdict == "fail"]
    judged = any(metric.verdict != "not run" for metric in metrics)
    reason = f"over {entry.regression_percent:g} % worse in {', '.join(worse)}" if worse else ""
    return model.Regression(
        verdict="fail" if worse else "pass" if judged else "not run",
        reason=reason if judged else "no metric was measured in both runs",
        against_commit=before.commit,
        against_created=before.created,
        stale=stale,
        metrics=tuple(metrics),
    )


def trend(history: Entries) -> list[dict[str, object]]:
    """A row for each run, as given: oldest first, each against the one before that is like it."""
    return render_rows(
        "trend.view.j2", runs=[(entry, regression(history, entry)) for entry in history]
    )
