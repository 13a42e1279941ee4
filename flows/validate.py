"""The proof: stage, baseline, one device, two, all devices, comparison, report, and if wanted a reviewer's word.

And the scaling curve: the same without a baseline, on one, two, four, … devices."""

import logging
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.states import Completed, Failed

from virnuc.flows.flow_run import named, stage_input, with_parameters
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.measured import NOT_MET, REJECTED, MeasureSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.tune import KNOBS
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.flows.tools import sweep_all
from virnuc.tasks import baseline, ceiling, comparison, overhead, precision, report
from virnuc.tasks.approval import TIME_OUT_ANSWER, approval_form
from virnuc.tasks.artifacts import host_key, publish_markdown
from virnuc.tasks.background import background_thread
from virnuc.tasks.embedding import embed
from virnuc.tasks.server_connection import REPORTING_ERRORS, announce, connection
from virnuc.tasks.task import NotMetError, completed
from virnuc.tasks.time_limit import TimeLimitError
from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import DeviceError
from virnuc_core.pipeline import nodes_of, read_summary
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.report import messages
from virnuc_core.report.build import APPROVAL, rerender, write_report
from virnuc_core.report.model import BASELINE, Report
from virnuc_core.report.raw_files import RUN_PREFIX, SUMMARY, run_names
from virnuc_core.report.render import answer_markdown
from virnuc_core.rundir import RUN_FILES, SHARD_FILES, RunDir, discard
from virnuc_core.runfiles import Device, RunRecord, write
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.tune import Sweep, candidates
from virnuc_core.validation import (
    TUNING,
    ApprovalRecord,
    TuningFile,
    TuningRound,
    read_usable,
    record_validation,
)

if TYPE_CHECKING:
    from virnuc_core.engine.cluster import Cluster

ALONE: Final = (
    "baseline, fp32 sample, ceilings and the cost of commits"  # which one machine measures
)
NOT_HERE: Final = f"this machine has no device as the nodes have: {ALONE} were not run"
GRACE_S: Final = (
    600  # the server keeps the pause open longer than we wait, so that our answer is still taken
)
POLL_S: Final = 5
TUNED_TOKENS: Final = 4_000_000  # a minute or so on a GPU
TUNED_REPEATS: Final = 2
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a flow's state keeps of a report; the whole is in its directory."""

    folder: Path
    met: int
    failed: tuple[str, ...]  # what was missed
    outcome: str  # passed, failed or not judged
    approval: str | None = None  # the reviewer's verdict


class Machines:
    """The devices that runs are computed on: a cluster's, one node's after the other's, or this machine's own."""

    def __init__(self, spec: ClassifySpec, cluster: "Cluster | None") -> None:
        self._cluster, own = cluster, list[Device]()
        nodes = (
            [node.devices for node in cluster.used]
            if cluster
            else [(one,) for one in resolve(spec.devices)]
        )
        self.devices, self._ends = tuple(chain(*nodes)), tuple(accumulate(map(len, nodes)))
        with suppress(DeviceError):
            own = [one for one in resolve(spec.devices) if one.kind == self.devices[0].kind]
        # of this machine, for what is measured here only; maybe none
        self.here = Devices(kind=self.devices[0].kind, ids=tuple(one.id for one in own))

    def counts(self, settings: MeasureSettings, profile: Profile) -> list[int]:
        """Numbers of devices to run on."""
        most, ends = len(self.devices), self._ends
        if not isinstance(settings, ScaleSettings):
            return sorted({1, min(2, most), most})
        whole_nodes = (
            ends[(1 << power) - 1] for power in range(len(ends).bit_length())
        )  # 1, 2, 4, …
        wanted = {1, most, *whole_nodes, *map(int, profile.scaling_bands)}
        return sorted(count for count in wanted if count <= most) * settings.repeats

    def first(self, count: int) -> tuple[Devices, AbstractContextManager[Pool | None]]:
        """The first devices, and workers on them where they are a cluster's."""
        devices = self.devices[:count]
        named = Devices(kind=self.here.kind, ids=tuple(one.id for one in devices))
        return named, self._cluster.pool(devices) if self._cluster else nullcontext()


@flow(name="validate", flow_run_name=named("reads", "profile", "devices", "cluster"))
@with_parameters(ValidateSettings)
def validate(settings: ValidateSettings) -> State[Judged]:
    """Proves a machine: the same reads by the baseline, on one device, two and all, compared and judged by a profile.

    A validation that stopped goes on where it was; one that is complete is judged again without computing anything."""
    judged, told = measure(settings)
    again = settings.model_copy(update={"force": False})
    while (tried := tune_round(again, judged)) is not None:
        if tried.engine is None:
            judged = write_report(settings.out, judged.profile)  # it says what no setting mends
        else:
            judged, told = measure(again)
    report.emit_outcome(judged, settings.out)
    told = messages.met(judged) + told
    if not settings.approval:
        return ended(settings, judged, told)
    folder = RunDir(settings.out).report
    approval = ask(folder, approval_form(judged), timeout_s=settings.approval_timeout_s)
    answered = rerender(settings.out)  # from now on the answer stands in every form of the report
    said = f"{approval.verdict} by {approval.reviewer}"
    text = answer_markdown(answered)
    publish_markdown(host_key(f"approval-{judged.profile.name}"), text, said, folder)
    return ended(settings, judged, f"{told}; {said}", approval.verdict)


@flow(name="scale", flow_run_name=named("reads", "profile", "devices", "cluster"))
@with_parameters(ScaleSettings)
def scale(settings: ScaleSettings) -> State[Judged]:
    """Measures time against number of devices; results must be equal bit for bit on all of them."""
    judged, computed = measure(settings)
    return ended(settings, judged, messages.scaling(judged) + computed)


def tuned(out: Path, engine: EngineSpec) -> EngineSpec:
    """The settings that rounds of tuning left a validation with, else `engine`. Its runs with others are removed."""
    rounds = (read_usable(out / TUNING, TuningFile) or TuningFile()).rounds
    found = next((one.engine for one in reversed(rounds) if one.engine), None)
    if found is None:
        return engine
    for name in run_names(out):
        record = read_usable(RunDir(out / name).record, RunRecord)
        if record is not None and record.spec.get("engine") != found:
            discard(out / name, *RUN_FILES)
    return EngineSpec.model_validate(found)


def tune_round(settings: ValidateSettings, judged: Report) -> TuningRound | None:
    """What came of sweeping the settings that may lessen the largest loss, on a part of the reads; `tuning.json` keeps
    it. None where nothing of speed was missed, an earlier round found nothing, or it was the last round."""
    out, devices = settings.out, Devices.parse(settings.devices)
    before = (read_usable(out / TUNING, TuningFile) or TuningFile()).rounds
    missed = tuple(c.title for c in judged.failed if c.id not in ("consensus", "same_bytes"))
    if not missed or len(before) >= settings.tune_rounds or (before and before[-1].engine is None):
        return None
    base = resolve_engine(tuned(out, settings.engine()), resolve(devices)[0].kind)
    loss = next((one for one in judged.losses if one.kind in KNOBS), None)
    beyond = [
        f"no setting mends {one.kind} ({one.advice})"
        for one in judged.losses
        if one.kind not in KNOBS
    ]
    chosen = None
    if loss is not None:
        bench, knobs = (
            Bench(RunDir(out).store, settings.models, devices, judged.profile.sample_s),
            KNOBS[loss.kind],
        )
        sweep = Sweep(
            out, bench, base, judged.profile, TUNED_REPEATS, "halving", tokens=TUNED_TOKENS
        )
        chosen = sweep_all(sweep, candidates(base, knobs), sample_name(settings.named))
        beyond.insert(0, f"against {loss.kind}, {', '.join(knobs)} were swept: {chosen.reason}")
    found = (
        chosen.candidate.engine.model_dump(mode="json")
        if chosen and chosen.candidate.number
        else None
    )
    this = TuningRound(missed=missed, said="; ".join(beyond), engine=found)
    write(out / TUNING, TuningFile(rounds=(*before, this)))
    return this


def ended(
    settings: MeasureSettings, judged: Report, told: str, verdict: str | None = None
) -> State[Judged]:
    """How a flow ends whose figures were judged; where they or a reviewer say no, it fails or its name says so."""
    result = Judged(RunDir(settings.out).report, judged.met, judged.missed, judged.outcome, verdict)
    if verdict != "rejected" and judged.outcome != "failed":
        return completed(result, told)
    name = REJECTED if verdict == "rejected" else NOT_MET
    if settings.fail_on_criteria:
        return Failed(name=name, message=told, data=NotMetError(told))
    return Completed(name=name, message=told, data=result)


def measure(settings: ValidateSettings | ScaleSettings) -> tuple[Report, str]:
    """The report on runs on several numbers of devices, a validation's after the baseline; and, that nobody takes old
    for new, `; nothing had to be computed` where that is so."""
    profile, label, out = load_profile(settings.profile), sample_name(settings.named), settings.out
    preflight(settings)
    spec, subset, force = settings.spec(label), False, settings.force
    if force:
        (out / TUNING).unlink(missing_ok=True)
    spec = spec.model_copy(update={"engine": tuned(out, spec.engine)})
    before = _finished_runs(out)
    with nodes_of(spec, out) if spec.cluster else nullcontext() as cluster:
        on = Machines(spec, cluster)
        announce(label, profile.name, on.here.kind)
        staging = stage_input(settings, label)
        if isinstance(settings, ValidateSettings):
            profile = settings.with_baseline(profile, staging.counts.n_reads)
        record_validation(out, spec, profile, staging, on.devices, *[NOT_HERE] * (not on.here.ids))
        bench, base = Bench(RunDir(out).store, spec.models, on.here), profile.baseline
        if isinstance(settings, ValidateSettings) and (on.here.ids or base.source == "recorded"):
            found = baseline.measure_baseline(
                RunDir(out / BASELINE), bench, base, label=label, force=force
            ).result()
            subset = found.subset is not None
        names = _runs(settings, spec, profile, staging, on, label)
        if on.here.ids and on.here.kind == "cuda":  # cores compute in fp32
            precision.embed_in_fp32(
                out, bench, spec.engine, profile.fp32_sequences, label=label
            ).result()
        if on.here.ids and "checkpoint_overhead" in profile.targets and staging.counts.n_rows:
            overhead.measure_costs(out, bench, spec.engine, label=label, force=force).result()
    comparison.compare_results(
        out, names, tolerance=profile.score_tolerance, subset=subset, label=label
    ).result()
    judged = report.report_validation(
        out, profile, history=settings.history_file, label=label
    ).result()
    report.publish_report(judged, out, label)
    return judged, "; nothing had to be computed" if before and _finished_runs(
        out
    ) == before else ""


def _finished_runs(out: Path) -> dict[str, int]:
    """When each complete run in `out` ended; a run that is used as it is keeps its time."""
    return {str(path): path.stat().st_mtime_ns for path in out.glob(f"{RUN_PREFIX}*/{SUMMARY}")}


def _runs(
    settings: MeasureSettings,
    spec: ClassifySpec,
    profile: Profile,
    staging: StageSummary,
    on: Machines,
    label: str,
) -> tuple[str, ...]:
    """Names of the runs on these devices that came to an end, one for each number. Of a number that stands in `counts`
    again only measurements stay. The GPUs' ceilings are measured first, unless nothing is to be computed."""
    out, counts = settings.out, on.counts(settings, profile)
    more: dict[str, Any] = {
        "watch": RunMonitor(sample_s=profile.sample_s, window_s=profile.window_s),
        "label": label,
    }
    complete = all(
        read_summary(RunDir(out / f"{RUN_PREFIX}{count}")) is not None for count in counts
    )
    if on.here.ids and on.here.kind == "cuda" and (spec.force or not complete):
        more["flops"] = ceiling.measure_ceiling(
            out, Bench(staging.store, spec.models, on.here), spec.engine
        ).result()
    for name in run_names(out) if spec.force else ():  # also what none of these will replace
        for folder in (name, *run_names(out, f"{name}.")):
            discard(out / folder, *RUN_FILES)
    for place, count in enumerate(counts):
        name, again = f"{RUN_PREFIX}{count}", counts[:place].count(count)
        if again:
            name = f"{name}.{again + 1}"
            if read_summary(RunDir(out / name)) is not None:
                continue
        devices, workers = on.first(count)
        own = spec.model_copy(update={"devices": devices})
        with (
            suppress(TimeLimitError),
            workers as pool,
        ):  # the run's summary says so: to the report it is a failure
            embed(
                RunDir(out / name),
                staging,
                own,
                time_limit_s=profile.time_limit_s,
                pool=pool,
                **more,
            ).result()
            if again:
                discard(out / name, *SHARD_FILES, "embeddings.h5")
    found = run_names(out, max_devices=len(on.devices))
    return tuple(name for name in found if read_summary(RunDir(out / name)) is not None)


def ask(
    report_dir: Path, form: type[RunInput], *, timeout_s: int, poll_s: int = POLL_S
) -> ApprovalRecord:
    """The answer of the reviewer for whom this flow run pauses, kept in the report's directory. A time-out answers
    `pending` by the door a person would use: a run nobody looked at is not a failed one."""
    flow_run_id = UUID(runtime.flow_run.id)

    def answer_for_nobody(stop: threading.Event) -> None:
        if not stop.wait(timeout_s):
            with (
                connection.reporting("the time-out of the approval"),
                get_client(sync_client=True) as client,
            ):
                client.resume_flow_run(flow_run_id, run_input=TIME_OUT_ANSWER)

    connection.patient_until_s = time.monotonic() + timeout_s
    try:
        with background_thread(answer_for_nobody):
            answer = pause_flow_run(
                wait_for_input=form, timeout=timeout_s + GRACE_S, poll_interval=poll_s
            )
    except REPORTING_ERRORS as error:
        logger.warning("nobody could be asked: the Prefect server is lost (%s)", error)
        answer = form.model_validate(TIME_OUT_ANSWER)
    finally:
        connection.patient_until_s = 0.0
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    kept = ApprovalRecord(when=moment, flow_run=str(flow_run_id), **answer.model_dump(mode="json"))
    write(report_dir / APPROVAL, kept)
    return kept
