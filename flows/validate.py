"""The proof: stage, baseline, one device, all devices, comparison, report, and if wanted a reviewer's word.

And the scaling curve: the same without a baseline, on one, two, four, … devices.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.flow_runs import pause_flow_run

from flows import start
from flows.flow_commands import MeasureSettings, ScaleSettings, ValidateSettings
from flows.flow_run import named, sample_of, stage_input, with_parameters
from tasks.predict import embed
from tasks.server import UNTOLD, announce, connection
from tasks.step import REJECTED, TimeLimitError, done, not_met, publish_markdown
from tasks.tools import ceiling, overhead
from tasks.validate import (
    TIMED_OUT,
    Approval,
    approval_form,
    baseline,
    compare,
    emit_outcome,
    met_sentence,
    publish,
    record_answer,
    report,
)
from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.pool import Watch
from virnuc_core.measure.bench import Bench
from virnuc_core.pipeline import read_summary
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.reads.stage import StageSummary
from virnuc_core.report.files import BASELINE, RUN_PREFIX
from virnuc_core.report.formatting import number, percent
from virnuc_core.report.model import Report
from virnuc_core.report.render import fill, rerender
from virnuc_core.rundir import RunDir
from virnuc_core.validation import ApprovalRecord, record_validation

HISTORY: Final = "virnuc-history.jsonl"
GRACE_S: Final = 600  # the server keeps the pause open longer than we wait, so that our answer is still taken
POLL_S: Final = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a flow's state keeps of a report; the whole is in its directory."""

    folder: Path
    met: int
    failed: tuple[str, ...]  # titles of the criteria that were missed
    approval: str | None = None  # the reviewer's verdict


@flow(name="validate", flow_run_name=named("reads", "profile", "devices"))
@with_parameters(ValidateSettings)
def validate(settings: ValidateSettings) -> State[Judged]:
    """Proves a machine: the same reads by the baseline, on one device and on all, compared and judged by a profile.

    A validation that stopped goes on where it was; one that is complete is judged again without computing anything.
    """
    judged, message = measure(settings, lambda devices: sorted({1, devices}), with_baseline=True)
    emit_outcome(judged, settings.out)
    approval = _approval(settings, judged) if settings.approval else None
    result = in_short(settings.out, judged, approval)
    message = f"{met_sentence(judged)}{message}"
    if approval is not None:
        message += f"; {approval.verdict} by {approval.reviewer}"
    if approval is not None and approval.verdict == "rejected":
        return not_met(result, message, fails=settings.fail_on_criteria, name=REJECTED)
    if judged.failed:
        return not_met(result, message, fails=settings.fail_on_criteria)
    return done(result, message)


@flow(name="scale", flow_run_name=named("reads", "profile", "devices"))
@with_parameters(ScaleSettings)
def scale(settings: ScaleSettings) -> State[Judged]:
    """Measures time against number of devices; results must be equal bit for bit on all of them."""
    judged, message = measure(settings, steps, with_baseline=False)
    curve = [
        f"{row.num_gpus} devices: {number(row.speedup, 2, 'x')} ({percent(row.efficiency)})" for row in judged.scaling
    ]
    told = "; ".join(curve) or "one device only: there is no curve"
    return done(in_short(settings.out, judged), told + message)


def steps(devices: int) -> list[int]:
    """Numbers of devices to run on: doubled from one, and all of them.

    >>> steps(1), steps(2), steps(6), steps(8)
    ([1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8])
    """
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power <= devices]
    return sorted({*doubled, devices})


def in_short(out: Path, judged: Report, approval: ApprovalRecord | None = None) -> Judged:
    failed = tuple(criterion.title for criterion in judged.failed)
    return Judged(RunDir(out).report, judged.met, failed, None if approval is None else approval.verdict)


def measure(settings: MeasureSettings, steps: Callable[[int], list[int]], *, with_baseline: bool) -> tuple[Report, str]:
    """Stage the reads once, run them on several numbers of devices, after the baseline if it is wanted, and judge.

    `steps` tells from the number of devices on how many to run. Beside the report comes `; nothing had to be computed`
    where that is so, that nobody takes old for new, and else nothing.
    """
    profile = load_profile(settings.profile)
    label = sample_of(settings.reads)
    spec = settings.spec(start.check(settings, profile.engine), profile.engine, label)
    out, devices, force = settings.out, spec.devices, spec.force
    store, before = RunDir(out).store, _finished_runs(out)
    announce(label, profile.name, devices.kind)
    staging = stage_input(settings, label)
    record_validation(
        out,
        spec=spec.parameters | {"engine": spec.engine.model_dump(mode="json")},
        profile=profile,
        models=spec.models,
        staging=staging,
        devices=resolve(devices),
        force=force,
    )
    subset = False
    if with_baseline:
        beside, asked = RunDir(out / BASELINE), profile.baseline
        slow = baseline(beside, store=store, models=spec.models, devices=devices, spec=asked, label=label, force=force)
        subset = slow.result().subset is not None
    names = _runs(out, staging, spec, profile, steps(len(devices.ids)), label)
    if profile.targets.checkpoint_overhead is not None:
        overhead(out, Bench(store, spec.models, devices), spec.engine, label=label, force=force).result()
    compare(out, names, tolerance=profile.score_tolerance, subset=subset, label=label).result()
    history = settings.history or out.absolute().parent / HISTORY
    judged = report(out, profile, history=history, label=label).result()
    publish(judged, out, label)
    nothing = before and _finished_runs(out) == before
    return judged, "; nothing had to be computed" if nothing else ""


def _finished_runs(out: Path) -> dict[str, int]:
    """When each complete run in `out` ended; a run that is used as it is keeps its time."""
    found = {folder.name: RunDir(folder).summary for folder in sorted(out.glob(f"{RUN_PREFIX}*"))}
    return {name: summary.stat().st_mtime_ns for name, summary in found.items() if summary.is_file()}


def _runs(
    out: Path, staging: StageSummary, spec: ClassifySpec, profile: Profile, counts: Sequence[int], label: str
) -> tuple[str, ...]:
    """Names of the runs that came to an end, one for each number of devices.

    The GPUs' ceilings are measured first, unless every run is there already and nothing is to be computed.
    """
    flops, names = None, []
    complete = all(read_summary(RunDir(out / f"{RUN_PREFIX}{count}")) is not None for count in counts)
    if spec.devices.kind == "cuda" and (spec.force or not complete):
        flops = ceiling(out, models=spec.models, devices=spec.devices, engine=spec.engine).result()
    for count in counts:
        name = f"{RUN_PREFIX}{count}"
        with suppress(TimeLimitError):  # the run's summary says so, and the report calls it a failure
            embed(
                RunDir(out / name),
                staging,
                spec.model_copy(update={"devices": Devices(kind=spec.devices.kind, ids=spec.devices.ids[:count])}),
                label=label,
                watch=Watch(sample_s=profile.sample_s, window_s=profile.window_s),
                time_limit_s=profile.time_limit_s,
                flops=flops,
            ).result()
            names.append(name)
    return tuple(names)


def _approval(settings: ValidateSettings, judged: Report) -> ApprovalRecord:
    """The reviewer's answer, which from then on stands in every form of the report."""
    folder = RunDir(settings.out).report
    approval = ask(folder, approval_form(judged, settings.out), timeout_s=settings.approval_timeout_s)
    text = fill("sections.md.j2", rerender(settings.out), only="Approval")
    said = f"{approval.verdict} by {approval.reviewer}"
    publish_markdown(f"approval-{judged.profile.name}", text, said, folder)
    return approval


def ask(report_dir: Path, form: type[Approval], *, timeout_s: int, poll_s: int = POLL_S) -> ApprovalRecord:
    """Pause the current flow run until a reviewer has answered; the answer is kept in the report's directory.

    `form` is an `Approval` with the figures the answer is about. No device is held meanwhile. The time-out answers
    `pending` by the same door a person would use, so that the run ends as it would have with an answer, and a run
    nobody looked at is not a failed one.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("the approval gate works inside a flow run only")
    here = contextvars.copy_context()  # the server this run talks to
    timer = threading.Timer(timeout_s, here.run, (_answer_for_nobody, context.flow_run.id))
    timer.daemon = True
    timer.start()
    try:
        with connection.patience(timeout_s):
            answer = pause_flow_run(wait_for_input=form, timeout=timeout_s + GRACE_S, poll_interval=poll_s)
    except UNTOLD as error:
        logger.warning("nobody could be asked: the Prefect server is lost (%s)", error)
        answer = form.model_validate(TIMED_OUT)
    finally:
        timer.cancel()
    return record_answer(report_dir, answer, flow_run=str(context.flow_run.id))


def _answer_for_nobody(flow_run_id: UUID) -> None:
    with connection.telling("the time-out of the approval"), get_client(sync_client=True) as client:
        client.resume_flow_run(flow_run_id, run_input=TIMED_OUT)
