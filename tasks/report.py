"""Report: verdicts from raw files, in every form, in the UI and as events."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from tasks.approval import Approval, form
from tasks.artifacts import (
    file_link,
    key,
    markdown_table,
    publish_link,
    publish_markdown,
    publish_table,
    without_front_matter,
)
from tasks.events import emit
from tasks.step import done, step
from tasks.tables import met_sentence, rows_of
from virnuc_core import provenance
from virnuc_core.config import Profile
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine.devices import Device
from virnuc_core.errors import RunMismatchError
from virnuc_core.reads.stage import StageSummary
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.render import write_report
from virnuc_core.report.views import accounts, criteria, scaling
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import StagingTally, ValidationRecord, read, write


@step("report", "report {label}")
def report(out: Path, profile: Profile, *, history: Path, label: str) -> State[Report]:
    """Every form of the report in `out/report/`, and one event for each verdict."""
    judged = write_report(out, profile, history)
    for criterion in (*judged.criteria, *judged.checks):
        emit_verdict(criterion, judged, out)
    return done(judged, met_sentence(judged))


def record_validation(
    out: Path,
    *,
    spec: dict[str, Any],
    profile: Profile,
    models: Path,
    staging: StageSummary,
    model_length: int,
    devices: tuple[Device, ...],
    force: bool,
) -> None:
    """`run.json` of the validation: what it was started with. A repeated start of the same keeps its time.

    Errors: `RunMismatchError` names the weights or reads that differ from those of the validation that lies there.
    """
    weights = fingerprint(models)
    fresh = provenance.new_record(
        spec=spec,
        model_length=model_length,
        fingerprints={"reads": staging.fingerprint, **asdict(weights)},
        resolved={},
        devices=[device.record() for device in devices],
        store=RunDir(out).store.name,
    )
    tally = {**staging.tally, "ignored_files": staging.ignored_files, "warnings": staging.warnings()}
    record = ValidationRecord(
        **dict(fresh) | {"versions": fresh.versions | cuda_version()},
        profile=profile,
        staging=StagingTally.model_validate(tally),
    )
    path = RunDir(out).record
    if path.is_file():
        before = read(path, ValidationRecord)
        others = [name for name, own in record.fingerprints.items() if before.fingerprints.get(name) != own]
        if others and not force:
            raise RunMismatchError(
                f"{out} holds a validation of other {', '.join(others)}; choose another directory or --force"
            )
        if all(getattr(before, name) == getattr(record, name) for name in ("fingerprints", "devices", "profile")):
            record = record.model_copy(update={"created": before.created})
    write(path, record)


def cuda_version() -> dict[str, str]:
    """The CUDA that torch was built for; empty for a torch without."""
    import torch

    return {} if torch.version.cuda is None else {"cuda": torch.version.cuda}


def publish(judged: Report, out: Path, label: str) -> None:
    """The verdicts in the UI; the same keys each time, so that each key's page is a history.

    Called by the flow itself, whose artifacts its page shows before those of its tasks.
    """
    name, folder = judged.profile.name, RunDir(out).report
    publish_table(f"criteria-{name}", rows_of(*criteria(judged)), f"**{met_sentence(judged)}** — {label}, {name}")
    if judged.accounting is not None:
        publish_table(f"reads-{name}", rows_of(accounts(judged)), f"What became of the reads of {label}")
    if judged.scaling:
        publish_table(f"scaling-{name}", rows_of(scaling(judged)), f"Scaling of {label}")
    text = without_front_matter((folder / "report.md").read_text(encoding="utf-8"))
    publish_markdown(f"report-{name}", text, met_sentence(judged), folder / "report.md")
    publish_link(f"report-html-{name}", folder / "report.html", "report.html", "The report with its charts")


def emit_verdict(criterion: Criterion, judged: Report, out: Path) -> None:
    """One event for one verdict."""
    target = criterion.target
    emit(
        f"criterion.{key(criterion.verdict)}",
        f"criterion.{key(criterion.id)}",
        criterion.title,
        {
            "value": criterion.value,
            "target": None if target is None else f"{target.op} {target.value:g} {criterion.unit}",
            "reason": criterion.reason,
            "profile": judged.profile.name,
            "report": str(RunDir(out).report.absolute()),
        },
    )


def emit_outcome(judged: Report, out: Path) -> None:
    """One event for the validation as a whole."""
    passed = not judged.failed
    emit(
        "validation.passed" if passed else "validation.failed",
        f"validation.{key(judged.profile.name)}",
        judged.profile.title,
        {
            "met": judged.met,
            "asked": len(judged.criteria),
            "failed": [criterion.title for criterion in judged.failed],
            "report": str(RunDir(out).report.absolute()),
        },
    )


def approval_form(judged: Report, out: Path) -> type[Approval]:
    """What the reviewer is asked, with the figures of this validation beside the questions."""
    rows = rows_of(*criteria(judged))
    missed = [f"{row['Criterion']} {row['Measured']} ({row['Required']})" for row in rows if "FAIL" in row["Verdict"]]
    wanted = ("Verdict", "Criterion", "Measured", "Required")
    table = markdown_table([{name: row[name] for name in wanted} for row in rows])
    link = file_link(RunDir(out).report / "report.html")
    return form(
        {
            "all_criteria_met": f"**{met_sentence(judged)}**",
            "target_realistic": f"Not met: {', '.join(missed)}" if missed else "",
            "esm2_still_bottleneck": shares_of_time(judged),
        },
        f"{table}\nBottleneck: {judged.bottleneck.kind}. {judged.bottleneck.advice} [The whole report]({link})\n",
    )


def shares_of_time(judged: Report) -> str:
    """Where the time went: the two encoders, and everything else.

    What a stage that is fused takes is part of the stage it is fused with.
    """
    stages = () if judged.run is None else judged.run.stages
    shares = {stage.name: stage.share for stage in stages if stage.share is not None}
    if not shares:
        return "Stage times are not known."
    encoders = [(name, shares.get(name, 0.0)) for name in ("ESM-2", "DNABERT-S")]
    rest = max(0.0, 1.0 - sum(share for _, share in encoders))
    parts = [f"{name} {100 * share:.1f} %" for name, share in [*encoders, ("other work", rest)]]
    return f"**{', '.join(parts)}**"
