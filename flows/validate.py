"""The proof: stage, baseline, one device, all devices, comparison, report, and if wanted a reviewer's word."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow, runtime
from prefect.client.schemas.objects import State

from flows import preflight
from flows.finished import finished_runs, unless_computed
from flows.forms import takes
from flows.gate import ask
from flows.measure import measure
from flows.names import from_parameters, sample_of
from flows.parameters import ValidateSettings
from flows.running import watch_for_cancellation
from tasks.approval import Approval, as_markdown
from tasks.artifacts import publish_markdown
from tasks.guard import no_orphans
from tasks.logs import core_logs
from tasks.report import approval_form, emit_outcome
from tasks.states import REJECTED, done, not_met
from tasks.tables import met_sentence
from virnuc_core.config import load_profile
from virnuc_core.report.model import Report
from virnuc_core.report.render import rerender
from virnuc_core.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a validation came to."""

    report: Report
    approval: Approval | None = None


def _run_name() -> str:
    return from_parameters(runtime.flow_run.parameters or {}, "reads", "profile", "devices")


@flow(name="validate", flow_run_name=_run_name)
@takes(ValidateSettings)
def validate(settings: ValidateSettings) -> State[Outcome]:
    """Proves a machine: the same reads by the baseline, on one device and on all, compared and judged by a profile.

    A validation that stopped goes on where it was; one that is complete is judged again without computing anything.
    """
    profile = load_profile(settings.profile)
    with no_orphans(), core_logs():
        watch_for_cancellation()
        preflight.check(settings, reads=settings.reads, models=settings.models, out=settings.out, base=profile.engine)
        counts = sorted({1, len(preflight.devices(settings, profile.engine))})
        before = finished_runs(settings.out)
        judged = measure(settings, profile, sample_of(settings.reads), counts, with_baseline=True)
        emit_outcome(judged, settings.out)
        approval = _approval(settings, judged) if settings.approval else None
    message = met_sentence(judged) + unless_computed(settings.out, before)
    if approval is not None:
        message += f"; {approval.verdict} by {approval.reviewer}"
    outcome = Outcome(judged, approval)
    if approval is not None and approval.verdict == "rejected":
        return not_met(outcome, message, fails=settings.fail_on_criteria, name=REJECTED)
    if judged.failed:
        return not_met(outcome, message, fails=settings.fail_on_criteria)
    return done(outcome, message)


def _approval(settings: ValidateSettings, judged: Report) -> Approval:
    """The reviewer's answer, which from then on stands in every form of the report."""
    folder = RunDir(settings.out).report
    approval = ask(folder, approval_form(judged, settings.out), timeout_s=settings.approval_timeout_s)
    rerender(settings.out)
    publish_markdown(
        f"approval-{judged.profile.name}", as_markdown(approval), f"{approval.verdict} by {approval.reviewer}", folder
    )
    return approval
