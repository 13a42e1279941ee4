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
    wanted = None if target is None else profile.target_reads
    problem = _no_time(run)
    if problem or not wanted or not run.n_reads or run.n_reads >= wanted or run.total_s is None:
        return Finding(run.total_s, run.n_reads, problem=problem)
    why = f"projected from {run.n_reads:,} to {wanted:,} reads: no measurement"
    return Finding(run.total_s, run.n_reads, note=why, projected=run.total_s * wanted / run.n_reads)


def scaling(measured: Measured) -> Finding:
    """Time on one device over time on N."""
    single, many, found = measured.single, measured.many, measured.scaling
    if many is None:
        return Finding(absent="there was no run on more than one device")
    if single is None:
        return Finding(absent="there was no run on one device")
    problem = _no_time(single) or _no_time(many)
    if found is None:
        return Finding(samples=many.n_reads, problem=problem or "the two runs did not do the same work")
    note = "super-linear: check the one-device run" if found.super_linear else ""
    return Finding(found.speedup, many.n_reads, problem=problem, note=note)


def speedup(measured: Measured) -> Finding:
    """Time of the baseline over time of the run."""
    run, baseline = measured.judged, measured.baseline
    if run is None:
        return Finding(absent="there was no run")
    if baseline is None:
        return Finding(absent="the baseline was not run")
    value = baseline.seconds / run.total_s if baseline.seconds and run.total_s else None
    problem = _no_time(run)
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
    against = [c for c in measured.comparisons if c.a == BASELINE]
    names = [one.name for one in (measured.single, measured.many) if one is not None]
    parts = {c.b: c.consensus for c in against if c.b in names and c.consensus is not None}
    values = [part.agreement for part in parts.values() if part.agreement is not None]
    samples = min((part.total for part in parts.values()), default=None)
    value = 100.0 * min(values) if values else None
    if run is None:
        return Finding(value, samples, absent="there was no run")
    if run.name not in parts:
        return Finding(value, samples, absent=f"{run.name} was not compared with the baseline")
    if value is None or len(values) < len(parts):
        return Finding(value, samples, absent="there was no chunk to compare")
    if samples is not None and samples < least:
        return Finding(value, samples, absent=f"{samples:,} chunks compared; the profile needs {least:,}")
    subset = next((c.subset_reads for c in against if c.subset_reads is not None), None)
    note = f"over the {subset:,} reads that the baseline ran on and that have a row" if subset else ""
    return Finding(value, samples, note=note)


def utilisation(measured: Measured) -> Finding:
    """Percent of the lowest device while ESM-2 ran."""
    telemetry = _telemetry(measured.judged)
    if telemetry is None:
        return Finding(absent="there is no telemetry")
    unseen = [one.device for one in telemetry.devices if one.esm2_percent is None]
    if unseen or not telemetry.devices:
        return Finding(absent=f"no NVML sample of {', '.join(unseen) or 'any device'} while ESM-2 ran")
    lowest = min(telemetry.devices, key=lambda one: one.esm2_percent or 0.0)
    fewest = min(one.esm2_samples for one in telemetry.devices)
    problem = "" if fewest >= MIN_SAMPLES else f"{fewest} samples of a device; {MIN_SAMPLES} are needed"
    return Finding(lowest.esm2_percent, lowest.esm2_samples, problem=problem)


def packing(measured: Measured) -> Finding:
    """Percent of the token slots launched that real tokens filled."""
    telemetry = _telemetry(measured.judged)
    if telemetry is None or telemetry.packing_efficiency is None:
        return Finding(absent="there is no telemetry" if telemetry is None else "no batch was launched")
    if telemetry.tokens > telemetry.slots:
        return Finding(None, telemetry.batches, absent="more tokens than slots: the telemetry is wrong")
    return Finding(100.0 * telemetry.packing_efficiency, telemetry.batches)


def starved(measured: Measured) -> Finding:
    """Percent of batches that the launch loop waited long for."""
    telemetry = _telemetry(measured.judged)
    if telemetry is None or telemetry.queue is None:
        return Finding(absent="there is no telemetry of batches")
    return Finding(100.0 * telemetry.queue.starved, telemetry.batches)


def checkpoint_overhead(measured: Measured) -> Finding:
    """Percent of speed that commits cost; the median over the pairs."""
    found = measured.overhead
    if found is None or found.median is None:
        why = None if found is None else found.problem
        return Finding(absent="no pair of runs with and without commits" if found is None else why or "")
    way_out = f"try shard_tokens above {found.shard_tokens:,}, or a faster disk"
    return Finding(100.0 * found.median, found.pairs, absent=found.problem or "", if_missed=way_out)


def spread(measured: Measured) -> Finding:
    """Percent by which the least busy device was below the most busy."""
    run, telemetry = measured.many, _telemetry(measured.many)
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
    if len(runs) > 1 and len({device.name for run in runs for device in run.devices}) > 1:
        return Finding(None, samples, absent="devices of different models need not agree bit for bit")
    if not samples:
        return Finding(absent=said)
    return Finding(1.0 if found.identical else 0.0, samples, note=said)


def _telemetry(run: RunMetrics | None) -> TelemetryMetrics | None:
    return None if run is None else run.telemetry


def _no_time(run: RunMetrics) -> str:
    if run.resumed:
        return f"{run.name} was resumed ({run.shards_reused or 0} shards are of an earlier run): its time is not whole"
    if run.stopped_at_limit:
        return f"{run.name} was ended at the time limit"
    return "" if run.total_s else f"the time of {run.name} was not recorded"
