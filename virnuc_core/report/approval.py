"""The reviewer's answer as the report shows it: from `report/approval.json`, which stands beside the figures."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from virnuc_core.report.files import RECORD, RawFolder
from virnuc_core.report.formatting import one_line
from virnuc_core.report.model import ApprovalAnswer, ApprovalState, Report, RunMetrics
from virnuc_core.rundir import RunDir
from virnuc_core.validation import ApprovalRecord, ValidationRecord

APPROVAL: Final = "approval.json"
QUESTIONS: Final = {
    "all_criteria_met": "Are all criteria met?",
    "target_realistic": "If not: was the target realistic?",
    "tuning_could_help": "If not: could tuning help?",
    "code_fix_needed": "If not: is a code fix needed?",
    "esm2_still_bottleneck": "Is ESM-2 still the bottleneck?",
}
WAITING: Final = ApprovalState(
    verdict="pending", reviewer=None, when=None, note="", answers=(), of_earlier_run=False
)  # asked for, not answered


def approval_state(raw: RawFolder, run: RunMetrics | None) -> ApprovalState | None:
    """What was answered; pending where an answer was asked for and none is there; `None` where none was asked for."""
    folder = RunDir(raw.root).report.name
    said = raw.read(ApprovalRecord, folder, APPROVAL)
    if said is None:
        record = raw.read(ValidationRecord, RECORD)
        asked = record is not None and record.spec.get("approval") is True
        return WAITING if asked and f"{folder}/{APPROVAL}" not in raw.used else None
    answers = said.model_dump()
    return ApprovalState(
        verdict=said.verdict,
        reviewer=said.reviewer,
        when=said.when,
        note=said.note,
        answers=tuple(
            ApprovalAnswer(question=question, answer=answers[name] or "not answered")
            for name, question in QUESTIONS.items()
        ),
        of_earlier_run=_answered_before(said.when, raw, run),
    )


def _answered_before(when: str | None, raw: RawFolder, run: RunMetrics | None) -> bool:
    """Whether an answer is older than the figures, as their telemetry says; false where nothing tells."""
    if when is None or run is None or run.telemetry is None:
        return False
    found = raw.telemetry(run.name, Path(run.telemetry.file).name)
    try:
        return found is not None and _moment(when) < _moment(found[1].started)
    except ValueError:
        return False


def _moment(written: str) -> datetime:
    moment = datetime.fromisoformat(written)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def answered(report: Report) -> bool:
    """Whether the report shows a reviewer's answer."""
    return report.approval is not None and report.approval.reviewer is not None


def approval_text(found: ApprovalState | None) -> str:
    """`approved by R. Reviewer, 2026-03-01 12:00:00 UTC`."""
    return "not asked for" if found is None else one_line(found.verdict + answered_text(found))


def answered_text(found: ApprovalState) -> str:
    """Who has answered and when."""
    if found.reviewer is None:
        return ": nobody has answered yet"
    when = "" if found.when is None else f", {found.when.replace('T', ' ').replace('+00:00', ' UTC')}"
    return f" by {found.reviewer}{when}{'; the answer is older than these figures' if found.of_earlier_run else ''}"


def with_answer(out: Path, report: Report) -> Report:
    """The report with the answer that lies beside it now, and nothing else changed; as it is when there is none."""
    raw = RawFolder(out)
    if not (RunDir(out).report / APPROVAL).is_file():
        return report
    approval = approval_state(raw, report.run)
    name = f"{RunDir(out).report.name}/{APPROVAL}"
    others = [file for file in report.evidence if file.path != name]
    own = [file for file in raw.evidence() if file.path == name]
    evidence = tuple(sorted([*others, *own], key=lambda file: file.path))
    return report.model_copy(update={"approval": approval, "evidence": evidence})


def without_answer(report: Report) -> dict[str, Any]:
    """A report's data as they were before anybody answered."""
    body = report.model_dump(mode="json")
    body["evidence"] = [file for file in body["evidence"] if Path(file["path"]).name != APPROVAL]
    return body | {"approval": None if report.approval is None else WAITING.model_dump(mode="json")}
