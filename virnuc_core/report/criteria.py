"""The criteria and the further checks: rows of one table, and one function that judges a row.

A criterion passes or fails on a measured number only. A number that was not measured, or measured on too little or on
other hardware than the target is meant for, is `not run`; one that was stretched from fewer reads is `projected`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from virnuc_core.profiles import Profile, Target
from virnuc_core.report import measured
from virnuc_core.report.measured import Finding, Measured
from virnuc_core.report.metrics import BASELINE_TITLES, short_name
from virnuc_core.report.model import Criterion, RunMetrics, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One criterion."""

    id: str
    perf_id: str
    title: str
    definition: str
    find: Callable[[Measured], Finding]
    target: str = ""  # the profile's, by name, where that is not the row's id
    unit: Literal["s", "x", "%", ""] = "%"
    samples_of: str = "reads"
    run: Literal["single", "many", "judged"] = "judged"  # whose figures they are
    # what a run must be to say something: large enough (reads), and on the devices that are meant (speed)
    evidence: Literal["speed", "reads", ""] = "speed"
    raw: tuple[str, ...] = ("telemetry",)  # files; or "summary", "single" and "telemetry" of the run


SCALING: Final = Row(
    id="scaling",
    perf_id="PERF-03",
    title="Scaling",
    definition="time on one device ÷ time on N devices, same reads, whole pipeline; efficiency is that ÷ N",
    find=measured.scaling,
    unit="x",
    run="many",
    raw=("single", "summary"),
)
CRITERIA: Final = (
    Row(
        id="one_device_time",
        perf_id="PERF-01",
        title="Time on one device",
        definition="wall time of the whole pipeline on one device, staging included",
        find=partial(measured.time, devices=1),
        target="one_device_seconds",
        unit="s",
        run="single",
        raw=("summary",),
    ),
    Row(
        id="two_device_time",
        perf_id="PERF-01",
        title="Time on two devices",
        definition="wall time of the whole pipeline on two devices, staging included",
        find=partial(measured.time, devices=2),
        target="two_device_seconds",
        unit="s",
        run="many",
        raw=("summary",),
    ),
    SCALING,
    Row(
        id="speedup",
        perf_id="PERF-01",
        title="Speed-up over {baseline}",
        definition="time of the baseline ÷ time of the run, same machine, same reads",
        find=measured.speedup,
        unit="x",
        samples_of="reads of the baseline",
        raw=("baseline/summary.json", "summary"),
    ),
    Row(
        id="consensus",
        perf_id="correctness",
        title="Consensus label agreement",
        definition="chunks whose consensus equals the baseline's ÷ all chunks of either side; the lowest over the runs",
        find=measured.consensus,
        target="consensus_agreement",
        samples_of="chunks",
        evidence="",
        raw=("comparison.json",),
    ),
    Row(
        id="gpu_utilisation",
        perf_id="PERF-02",
        title="GPU utilisation (ESM-2)",
        definition="mean of NVML samples from the first ESM-2 batch launched to the last finished; "
        "the lowest device counts",
        find=measured.utilisation,
        samples_of="NVML samples of that device",
    ),
    Row(
        id="packing",
        perf_id="PERF-05",
        title="Packing efficiency",
        definition="real tokens ÷ token slots launched, both encoders, tails included",
        find=measured.packing,
        target="packing_efficiency",
        samples_of="batches",
        evidence="reads",
    ),
)
CHECKS: Final = (
    Row(
        id="starved_share",
        perf_id="PERF-05",
        title="Starved batches",
        definition="batches the launch loop waited over 50 ms for ÷ all batches",
        find=measured.starved,
        samples_of="batches",
    ),
    Row(
        id="checkpoint_overhead",
        perf_id="PERF-05",
        title="Checkpoint overhead",
        definition="1 − tokens/s with commits ÷ tokens/s without, first launch to last commit; "
        "the median over the pairs",
        find=measured.checkpoint_overhead,
        samples_of="pairs of runs",
        raw=("checkpoint_overhead.json",),
    ),
    Row(
        id="device_time_spread",
        perf_id="PERF-03",
        title="Spread of device times",
        definition="1 − least ÷ most busy seconds over the devices",
        find=measured.spread,
        samples_of="devices",
        run="many",
    ),
)
SAME_BYTES: Final = Row(
    id="same_bytes",
    perf_id="correctness",
    title="One device and N devices agree bit for bit",
    definition="result files and shards of the one-device run and the N-device run hold the same bytes (1 yes, 0 no)",
    find=measured.same_bytes,
    unit="",
    samples_of="files and shards",
    run="many",
    evidence="",
    raw=("comparison.json",),
)


def judge(row: Row, case: Measured, refused: str = "") -> Criterion:
    """The verdict on one row of the table, with all it stands on; `refused`: why its parts may not be compared."""
    target, field = _target(row, case)
    found = Finding(absent=refused) if refused and target is not None else row.find(case)
    run: RunMetrics | None = getattr(case, row.run)
    value, reason = found.value, found.note
    verdict: Verdict = "not run"
    if target is None:
        reason = found.note if found.failed else "the profile does not ask for it"
    elif found.failed:
        verdict = "fail"
    elif problem := found.absent or _no_evidence(row, run, case.profile) or found.problem:
        reason = problem
    elif found.projected is not None:
        value, verdict = found.projected, "projected"
    elif value is None or not found.samples:
        reason = "" if value is None else "nothing was counted"
    elif target.met(value):
        verdict = "pass"
    else:
        verdict, reason = "fail", found.if_missed or reason
    files = {
        "single": case.single and f"{case.single.name}/summary.json",
        "summary": run and f"{run.name}/summary.json",
        "telemetry": run and run.telemetry and run.telemetry.file,
    }
    title = BASELINE_TITLES.get(case.profile.baseline.name, case.profile.baseline.name)
    return Criterion(
        id=row.id,
        perf_id=row.perf_id,
        title=row.title.format(baseline=title),
        definition=row.definition,
        unit=row.unit,
        value=value,
        target=target,
        verdict=verdict,
        reason=reason,
        samples=found.samples,
        samples_of=row.samples_of,
        device="" if run is None else run.label,
        profile_line=f"{field}: {'not set' if target is None else f'{target.op} {target.value:g}'}",
        raw=tuple(path for part in row.raw if (path := files.get(part, part))),
    )


def _target(row: Row, case: Measured) -> tuple[Target | None, str]:
    """What is asked of a row, and where. For scaling it depends on the number of devices: a band for any number."""
    if row is SAME_BYTES:
        return Target(op=">=", value=1.0), "every profile asks"
    name = row.target or row.id
    asked: Target | None = getattr(case.profile.targets, name)
    devices = 2 if case.many is None else len(case.many.devices)
    if row is not SCALING or (devices == 2 and asked is not None):
        return asked, name
    band = case.profile.scaling_bands.get(str(devices))
    return (None if band is None else Target(op=">=", value=band[0])), f"scaling_bands.{devices}"


def _no_evidence(row: Row, run: RunMetrics | None, profile: Profile) -> str:
    """Why a run says nothing about a target of the profile: it was too small, or not on the devices that are meant."""
    if not row.evidence:
        return ""
    if run is None or run.n_reads is None:
        return "the number of reads was not recorded"
    if run.n_reads < profile.min_reads:
        return f"{run.n_reads:,} reads; the profile needs {profile.min_reads:,}"
    if row.evidence == "reads":
        return ""
    if not run.devices:
        return "the devices were not recorded"
    if not profile.device_names:  # meant for any GPU
        return f"{run.label}: the target is meant for GPUs" if run.devices[0].kind == "cpu" else ""
    for device in run.devices:
        if not any(part.lower() in f"{device.name} {short_name(device)}".lower() for part in profile.device_names):
            meant = " or ".join(profile.device_names)
            return f"the target is meant for {meant}; on {short_name(device)} it is for reference only"
    return ""
