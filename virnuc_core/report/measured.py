"""What was measured for each criterion: a number, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from virnuc_core.profiles import Profile
from virnuc_core.report.files import BASELINE
from virnuc_core.report.metrics import short_name
from virnuc_core.report.model import BaselineMetrics, OverheadMetrics, RunMetrics, ScalingMetrics, TelemetryMetrics
from virnuc_core.validation import Comparison

MIN_SAMPLES: Final = 10  # utilisation samples of a device; fewer say nothing


@dataclass(frozen=True, slots=True)
class Measured:
    """What the criteria judge."""

    profile: Profile
    single: RunMetrics | None
    many: RunMetrics | None  # the run with more than one device, if there is one
    baseline: BaselineMetrics | None
    scaling: ScalingMetrics | None
    comparisons: tuple[Comparison, ...]
    overhead: OverheadMetrics | None = None

    @property
    def judged(self) -> RunMetrics | None:
        """The run the verdict is about: most devices first."""
        return self.many or self.single

    @property
    def telemetry(self) -> TelemetryMetrics | None:
        """Of the run the verdict is about."""
        return None if self.judged is None else self.judged.telemetry


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured for one criterion."""

    value: float | None = None
    samples: int | None = None
    absent: str = ""  # why it cannot be judged, whatever the run was on
    problem: str = ""  # why it cannot be judged although the run is good evidence
    note: str = ""  # on a number that is judged
    if_missed: str = ""  # the way out
    failed: bool = False  # whatever the number says
    projected: float | None = None  # what the number would be on the reads that the target speaks of


def time(measured: Measured, *, devices: int) -> Finding:
    """Seconds of the whole pipeline on one device or two."""
    run, profile = (measured.single, measured.many)[devices - 1], measured.profile
    target = (profile.targets.one_device_seconds, profile.targets.two_device_seconds)[devices - 1]
    if run is None:
        return Finding(absent=f"there was no run on {devices} device{'s'[: devices - 1]}")
    if len(run.devices) != devices:
        return Finding(absent=f"the run was on {len(run.devices)} devices, not {devices}")
    if run.stopped_at_limit:
        why = f"ended at the profile's limit of {profile.time_limit_s or 0:g} s: slower than it may be"
        return Finding(run.total_s, run.n_reads, note=why, failed=True)
    wanted, problem = None if target is None else profile.target_reads, run.untimed
    if problem or not wanted or not run.n_reads or run.n_reads >= wanted or run.total_s is None:
        return Finding(run.total_s, run.n_reads, problem=problem)
    why = f"projected from {run.n_reads:,} to {wanted:,} reads: no measurement"
    return Finding(run.total_s, run.n_reads, note=why, projected=run.total_s * wanted / run.n_reads)


def scaling(measured: Measured) -> Finding:
    """Time on one device over time on N."""
    single, many, found = measured.single, measured.many, measured.scaling
    if many is None or single is None:
        return Finding(absent=f"there was no run on {'more than one' if many is None else 'one'} device")
    problem = single.untimed or many.untimed
    if found is None:
        return Finding(samples=many.n_reads, problem=problem or "the two runs did not do the same work")
    note = "super-linear: check the one-device run" if found.super_linear else ""
    return Finding(found.speedup, many.n_reads, problem=problem, note=note)


def speedup(measured: Measured) -> Finding:
    """Time of the baseline over time of the run."""
    run, baseline = measured.judged, measured.baseline
    if run is None or baseline is None:
        return Finding(absent="there was no run" if run is None else "the baseline was not run")
    value = baseline.seconds / run.total_s if baseline.seconds and run.total_s else None
    problem = run.untimed
    # on fewer devices of that kind it may run: a handicap of its own algorithm
    same_kind = bool(run.devices) and set(baseline.models) == {short_name(device) for device in run.devices}
    if not problem and baseline.source != "recorded" and not same_kind:
        problem = f"the baseline ran on {baseline.label}, the run on {run.label}"
    if not problem and value is None:
        problem = "the baseline's time was not recorded"
    samples = run.n_reads if baseline.subset_reads is None else baseline.subset_reads
    return Finding(value, samples, absent=baseline.problem or "", problem=problem, note=baseline_note(baseline))


def baseline_note(baseline: BaselineMetrics) -> str:
    """How the baseline's time is known, when it was not measured over all the reads."""
    if baseline.source == "recorded":
        return f"the baseline's time is recorded in the profile, for {baseline.label}"
    if baseline.source == "scaled":
        return (
            f"baseline measured on {baseline.subset_reads or 0:,} reads and scaled by tokens "
            f"({baseline.subset_tokens or 0:,} of {baseline.total_tokens or 0:,})"
        )
    return ""


def consensus(measured: Measured) -> Finding:
    """Percent of chunks whose consensus equals the baseline's; the lowest over the runs."""
    run, least = measured.judged, measured.profile.min_compared_chunks
    if run is None:
        return Finding(absent="there was no run")
    names = [one.name for one in (measured.single, measured.many) if one is not None]
    against = [c for c in measured.comparisons if c.a == BASELINE]
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
    note = f"over the {subset:,} reads that the baseline ran on and that have a row" if subset else ""
    return Finding(100.0 * min(values) if values else None, samples if parts else None, absent=absent, note=note)


def utilisation(measured: Measured) -> Finding:
    """Percent of the lowest device while ESM-2 ran."""
    if measured.telemetry is None:
        return Finding(absent="there is no telemetry")
    devices, percent = measured.telemetry.devices, measured.telemetry.lowest_percent("esm2")
    if percent is None:
        unseen = [one.device for one in devices if one.esm2_percent is None]
        return Finding(absent=f"no NVML sample of {', '.join(unseen) or 'any device'} while ESM-2 ran")
    fewest = min(one.esm2_samples for one in devices)
    problem = "" if fewest >= MIN_SAMPLES else f"{fewest} samples of a device; {MIN_SAMPLES} are needed"
    samples = next(one.esm2_samples for one in devices if one.esm2_percent == percent)
    return Finding(percent, samples, problem=problem)


def packing(measured: Measured) -> Finding:
    """Percent of the token slots launched that real tokens filled."""
    telemetry = measured.telemetry
    if telemetry is None or telemetry.packing_efficiency is None:
        return Finding(absent="there is no telemetry" if telemetry is None else "no batch was launched")
    if telemetry.tokens > telemetry.slots:
        return Finding(None, telemetry.batches, absent="more tokens than slots: the telemetry is wrong")
    return Finding(100.0 * telemetry.packing_efficiency, telemetry.batches)


def starved(measured: Measured) -> Finding:
    """Percent of batches that the launch loop waited long for."""
    telemetry = measured.telemetry
    if telemetry is None or telemetry.queue is None:
        return Finding(absent="there is no telemetry of batches")
    return Finding(100.0 * telemetry.queue.starved, telemetry.batches)


def checkpoint_overhead(measured: Measured) -> Finding:
    """Percent of speed that commits cost; the median over the pairs."""
    found = measured.overhead
    if found is None or found.median is None:
        return Finding(absent="no pair of runs with and without commits" if found is None else found.problem or "")
    way_out = f"try shard_tokens above {found.shard_tokens:,}, or a faster disk"
    return Finding(100.0 * found.median, found.pairs, absent=found.problem or "", if_missed=way_out)


def spread(measured: Measured) -> Finding:
    """Percent by which the least busy device was below the most busy."""
    run, telemetry = measured.many, measured.telemetry
    if run is None or telemetry is None or telemetry.device_time_spread is None:
        return Finding(absent="there was no run on more than one device, or its telemetry is missing")
    idle = "a device did no shard" if len(telemetry.busy) < len(run.devices) else ""
    return Finding(100.0 * telemetry.device_time_spread, len(telemetry.busy), absent=idle)


def same_bytes(measured: Measured) -> Finding:
    """1 when one device and N devices left the same bytes, else 0."""
    runs = [run for run in (measured.many, measured.single) if run is not None]
    names = {run.name for run in runs}
    found = next((c.bitwise for c in measured.comparisons if {c.a, c.b} == names and c.bitwise is not None), None)
    if found is None:
        return Finding(absent="the two runs were not compared bit for bit")
    samples, said = found.files_compared + found.shards_compared, "; ".join(found.differing)
    if len({device.name for run in runs for device in run.devices}) > 1:
        return Finding(None, samples, absent="devices of different models need not agree bit for bit")
    if not samples:
        return Finding(absent=said)
    return Finding(1.0 if found.identical else 0.0, samples, note=said)
