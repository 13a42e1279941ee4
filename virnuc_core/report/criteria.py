"""The criteria and the further checks: what was measured for each, rows of one table, and one judge for all rows.

A criterion passes or fails on a measured number only. A number that was not measured, or measured on too little or on
other hardware than the target is meant for, is `not run`; one that was stretched from fewer reads is `projected`."""

from collections.abc import Callable
from functools import partial
from math import ceil, sqrt
from typing import Final, Literal, NamedTuple

from virnuc_core.profiles import CRITERIA_TOML, Profile, Target
from virnuc_core.report import model
from virnuc_core.report.metrics import BASELINE, RUN_PREFIX, short_name
from virnuc_core.report.render import message
from virnuc_core.rundir import EXACT_FILES

CORRECTNESS: Final = "correctness"
Z2: Final = 1.959964**2  # squared standard deviations to either side that hold 95 %
MIN_SAMPLES: Final = 10  # utilisation samples of a device; fewer say nothing
NO_EXACT: Final = "no part was embedded in fp32, or the runs are in fp32 themselves"
Run = model.RunMetrics | None


class Finding(NamedTuple):
    """What was measured for one criterion."""

    value: float | None = None
    samples: int | None = None
    absent: str = ""  # why it cannot be judged, whatever the run was on
    problem: str = ""  # why it cannot be judged although the run is good evidence
    note: str = ""  # on a number that is judged
    if_missed: str = ""  # the way out
    failed: bool = False  # whatever the number says
    projected: float | None = (
        None  # what the number would be on the reads that the target speaks of
    )


# What was measured for each criterion: functions that bear its name.


def _time(report: model.Report, run: Run, devices: int) -> Finding:
    profile = report.profile
    if run is None:
        return Finding(absent=f"there was no run on {devices} device{'s'[: devices - 1]}")
    if len(run.devices) != devices:
        return Finding(absent=f"the run was on {len(run.devices)} devices, not {devices}")
    if run.stopped_at_limit:
        why = f"ended at the profile's limit of {profile.time_limit_s or 0:g} s: slower than it may be"
        return Finding(run.total_s, run.n_reads, note=why, failed=True)
    wanted, problem = profile.target_reads, run.untimed
    if problem or not wanted or not run.n_reads or run.n_reads >= wanted or run.total_s is None:
        return Finding(run.total_s, run.n_reads, problem=problem)
    why = f"projected from {run.n_reads:,} to {wanted:,} reads: no measurement"
    return Finding(run.total_s, run.n_reads, note=why, projected=run.total_s * wanted / run.n_reads)


one_device_time, two_device_time = (partial(_time, devices=devices) for devices in (1, 2))


def scaling(report: model.Report, run: Run) -> Finding:
    if run is None or report.single is None:
        return Finding(
            absent=f"there was no run on {'more than one' if run is None else 'one'} device"
        )
    problem = report.single.untimed or run.untimed
    found = report.figure_of(run)
    if found is None:
        return Finding(
            samples=run.n_reads, problem=problem or "the two runs did not do the same work"
        )
    note = "super-linear: check the one-device run" if found.speedup > found.num_gpus else ""
    return Finding(found.speedup, run.n_reads, problem=problem, note=note)


def speedup(report: model.Report, run: Run) -> Finding:
    baseline = report.baseline
    if run is None or baseline is None:
        return Finding(absent="there was no run" if run is None else "the baseline was not run")
    known = baseline.seconds and run.total_s and not run.stopped_at_limit
    value = (baseline.seconds or 0.0) / (run.total_s or 1.0) if known else None
    # on fewer devices of that kind it may run: a handicap of its own algorithm
    same_kind = bool(run.devices) and set(baseline.models) == {
        short_name(device) for device in run.devices
    }
    other = baseline.source != "recorded" and not same_kind
    problem = run.untimed or (
        f"the baseline ran on {baseline.label}, the run on {run.label}" if other else ""
    )
    problem = problem or ("the baseline's time was not recorded" if value is None else "")
    samples = run.n_reads if baseline.subset is None else baseline.subset.reads
    return Finding(
        value,
        samples,
        absent=baseline.problem or "",
        problem=problem,
        note=message("baseline_known", baseline),
    )


def consensus(report: model.Report, run: Run) -> Finding:
    if run is None:
        return Finding(absent="there was no run")
    names, least = [one.name for one in report.runs], report.profile.min_compared_chunks
    against = [c for c in report.comparisons if c.a == BASELINE]
    parts = {c.b: c.consensus for c in against if c.b in names and c.consensus is not None}
    values = [part.agreement for part in parts.values() if part.agreement is not None]
    samples = min((part.total for part in parts.values()), default=0)
    absent = ""
    if run.name not in parts:
        absent = f"{run.name} was not compared with the baseline"
    elif len(values) < len(parts):
        absent = "there was no chunk to compare"
    elif samples < least:
        absent = f"{samples:,} chunks compared; the profile needs {least:,}"
    subset = next((c.subset_reads for c in against if c.subset_reads is not None), None)
    note = (
        f"over the {subset:,} reads that the baseline ran on and that have a row" if subset else ""
    )
    return Finding(
        100.0 * min(values) if values else None,
        samples if parts else None,
        absent=absent,
        note=note,
    )


def gpu_utilisation(_: model.Report, run: Run) -> Finding:
    if run is None or run.telemetry is None:
        return Finding(absent="there is no telemetry")
    devices, percent = run.telemetry.devices, run.telemetry.lowest_percent("esm2")
    if percent is None:
        unseen = [one.device for one in devices if one.esm2_percent is None]
        return Finding(
            absent=f"no NVML sample of {', '.join(unseen) or 'any device'} while ESM-2 ran"
        )
    fewest = min(one.esm2_samples for one in devices)
    problem = (
        "" if fewest >= MIN_SAMPLES else f"{fewest} samples of a device; {MIN_SAMPLES} are needed"
    )
    samples = next(one.esm2_samples for one in devices if one.esm2_percent == percent)
    return Finding(percent, samples, problem=problem)


def packing(_: model.Report, run: Run) -> Finding:
    telemetry = None if run is None else run.telemetry
    if telemetry is None or telemetry.packing_efficiency is None:
        return Finding(
            absent="there is no telemetry" if telemetry is None else "no batch was launched"
        )
    if telemetry.tokens > telemetry.slots:
        return Finding(
            None, telemetry.batches, absent="more tokens than slots: the telemetry is wrong"
        )
    return Finding(100.0 * telemetry.packing_efficiency, telemetry.batches)


def starved_share(_: model.Report, run: Run) -> Finding:
    telemetry = None if run is None else run.telemetry
    if telemetry is None or telemetry.queue is None:
        return Finding(absent="there is no telemetry of batches")
    return Finding(100.0 * telemetry.queue.starved, telemetry.batches)


def checkpoint_overhead(report: model.Report, _: Run) -> Finding:
    found = report.overhead
    if found is None or found.median is None:
        return Finding(
            absent="no pair of runs with and without commits" if found is None else found.problem
        )
    way_out = f"try shard_tokens above {found.shard_tokens:,}, or a faster disk"
    return Finding(100.0 * found.median, len(found.shares), absent=found.problem, if_missed=way_out)


def device_time_spread(_: model.Report, run: Run) -> Finding:
    telemetry = None if run is None else run.telemetry
    if run is None or telemetry is None or telemetry.device_time_spread is None:
        return Finding(
            absent="there was no run on more than one device, or its telemetry is missing"
        )
    idle = "a device did no shard" if len(telemetry.busy) < len(run.devices) else ""
    return Finding(100.0 * telemetry.device_time_spread, len(telemetry.busy), absent=idle)


def _centred(report: model.Report, _: Run, which: str) -> Finding:
    found = [
        one
        for comparison in report.comparisons
        if comparison.a == EXACT_FILES
        for one in comparison.cosines
    ]
    least = min((getattr(one, which) for one in found), default=None)
    return Finding(
        least, min((one.n for one in found), default=None), absent="" if found else NO_EXACT
    )


centred_worst, centred_mean = (partial(_centred, which=which) for which in ("minimum", "mean"))


def verdicts_held(report: model.Report, _: Run) -> Finding:
    found = next((one.consensus for one in report.comparisons if one.a == EXACT_FILES), None)
    if found is None or found.agreement is None:
        return Finding(absent=NO_EXACT)
    asked, n = (
        report.profile.targets.get("verdicts_held") or Target(op=">=", value=0.0),
        found.total,
    )
    room = sqrt(
        Z2 * (found.agreement * (1.0 - found.agreement) + Z2 / (4 * n)) / n
    )  # Wilson's interval
    low, high = (
        100.0 * (found.agreement + Z2 / (2 * n) + side) / (1.0 + Z2 / n) for side in (-room, room)
    )
    note = f"95 % interval {low:.3f} to {high:.3f} %"
    most = min(asked.value / 100.0, 0.999999)  # no sample shows more
    enough = ceil(
        Z2 * most / (1.0 - most)
    )  # the interval of so many without a change begins at what is asked
    few = f"{n:,} chunks, {note}; {enough:,} are needed" if n < enough else ""
    return Finding(
        100.0 * found.agreement,
        n,
        absent=few,
        note=note,
        failed=not (asked.met(low) or asked.met(high)),
    )


def same_bytes(report: model.Report, _: Run) -> Finding:
    names = {run.name for run in report.runs}
    found = {
        c.b: c.bitwise for c in report.comparisons if {c.a, c.b} <= names and c.bitwise is not None
    }
    left = [run.name for run in report.runs if run is not report.single and run.name not in found]
    if left or report.single is None:
        return Finding(
            absent=f"{', '.join(left)} not compared bit for bit with a run on one device"
        )
    samples = sum(one.files_compared + one.shards_compared for one in found.values())
    said = "; ".join(f"{name}: {file}" for name, one in found.items() for file in one.differing)
    if len({device.name for run in report.runs for device in run.devices}) > 1:
        return Finding(
            None, samples, absent="devices of different models need not agree bit for bit"
        )
    if not said and not all(one.identical for one in found.values()):
        return Finding(absent="there were no shards, or no result files, to compare")
    return Finding(0.0 if said else 1.0, samples, note=said)


class Row(model.Record):
    """One criterion of `criteria.toml`. The function of its name finds what was measured."""

    id: str
    perf_id: str
    title: str
    definition: str
    unit: Literal["s", "x", "%", ""]
    target: str  # the profile's, by name
    samples_of: str
    run: Literal["single", "pair", "many", "judged"]  # whose figures they are
    # what a run must be to say something of performance: large enough (reads), and on the devices meant (speed)
    evidence: Literal["speed", "reads"]
    raw: tuple[str, ...]  # files; or "summary", "single" and "telemetry" of the run


def _rows(kind: str) -> tuple[Row, ...]:
    usual, rows = CRITERIA_TOML["usual"], CRITERIA_TOML[kind]
    return tuple(
        Row.model_validate(usual | {"id": name, "target": name} | row) for name, row in rows.items()
    )


CRITERIA, CHECKS, (SAME_BYTES,) = map(_rows, ("criteria", "checks", "always"))
FIND: Final[dict[str, Callable[[model.Report, Run], Finding]]] = {
    row.id: globals()[row.id] for row in (*CRITERIA, *CHECKS, SAME_BYTES)
}
SCALING: Final = next(row for row in CRITERIA if row.id == "scaling")


def judge(row: Row, report: model.Report, refused: str = "", scaled: Run = None) -> model.Criterion:
    """The verdict on one row of the table, with all it stands on; `refused`: why its parts may not be compared. That of
    scaling is on the run `scaled`."""
    pair = next((run for run in report.runs if run.name == f"{RUN_PREFIX}2"), None)
    run = (
        scaled
        or {"single": report.single, "pair": pair, "many": report.many, "judged": report.run}[
            row.run
        ]
    )
    (target, field), profile = _target(row, report.profile, run), report.profile
    found = Finding(absent=refused) if refused and target is not None else FIND[row.id](report, run)
    value, reason = found.value, found.note
    verdict: model.Verdict = "not run"
    if target is None:
        verdict = "not run" if value is None else "not asked"
        reason = (
            found.absent or found.problem or found.note
            if value is None
            else "the profile does not ask for it"
        )
    elif found.failed:
        verdict = "fail"
    elif problem := found.absent or _no_evidence(row, run, profile) or found.problem:
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
        "single": report.single and f"{report.single.name}/summary.json",
        "summary": run and f"{run.name}/summary.json",
        "telemetry": run and run.telemetry and run.telemetry.file,
    }
    return model.Criterion(
        **row.model_dump(include={"id", "perf_id", "definition", "unit", "samples_of"}),
        title=row.title.format(baseline=message("baseline_title", report)),
        value=value,
        target=target,
        verdict=verdict,
        reason=reason,
        samples=found.samples,
        device="" if run is None else run.label,
        profile_line=f"{field}: {'not set' if target is None else f'{target.op} {target.value:g}'}",
        raw=tuple(path for part in row.raw if (path := files.get(part, part))),
    )


def _target(row: Row, profile: Profile, run: Run) -> tuple[Target | None, str]:
    """What is asked of a row, and where. For scaling it depends on the number of devices: a band for any number."""
    if row is SAME_BYTES:
        return Target(op=">=", value=1.0), "every profile asks"
    asked = profile.targets.get(row.target)
    devices = 2 if run is None else len(run.devices)
    if row.id != SCALING.id or (devices == 2 and asked is not None):
        return asked, row.target
    band = profile.scaling_bands.get(str(devices))
    return (None if band is None else Target(op=">=", value=band[0])), f"scaling_bands.{devices}"


def _no_evidence(row: Row, run: Run, profile: Profile) -> str:
    """Why a run says nothing about a target of the profile: it was too small, or not on the devices that are meant."""
    if row.perf_id == CORRECTNESS:
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
        if not any(
            part.lower() in f"{device.name} {short_name(device)}".lower()
            for part in profile.device_names
        ):
            meant = " or ".join(profile.device_names)
            return (
                f"the target is meant for {meant}; on {short_name(device)} it is for reference only"
            )
    return ""
