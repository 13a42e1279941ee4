"""Sentences that must not be missing from a report: what limits its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from virnuc_core.config import Profile
from virnuc_core.validation.criteria import Measured, baseline_note
from virnuc_core.validation.records import Charts, RunFigure

OVERHEAD_DOMINATED: Final = 1_000  # reads; below, several devices are slower than one
SHORT_SHARE: Final = 0.6  # of the model's length
PACKING_GAP: Final = 0.95


def notes(measured: Measured, charts: Charts, model_length: int | None, problems: Sequence[str]) -> tuple[str, ...]:
    """Every limit of the figures that a reader should know, in plain sentences."""
    run, profile = measured.judged, measured.profile
    found = [*_size(run, profile), *_targets(measured), *_fates(run)]
    if measured.baseline is not None and (note := baseline_note(measured.baseline)):
        found.append(f"Speed-up: {note}.")
    if measured.scaling is not None and measured.scaling.super_linear:
        found.append("Scaling is super-linear (more than the number of devices): check the one-device run.")
    found += _lengths(run, charts, model_length)
    if run is not None:
        found += [f"{run.name}: {warning}" for warning in run.warnings]
        found += [f"{run.name}: {name} is missing." for name in run.missing_files]
        if run.telemetry is not None:
            found += [f"Alarm: {alarm}." for alarm in run.telemetry.alarms]
    found += [f"Raw file problem: {problem}." for problem in problems]
    return tuple(found)


def _size(run: RunFigure | None, profile: Profile) -> list[str]:
    if run is None or run.n_reads is None:
        return []
    found = []
    if run.n_reads < profile.min_reads:
        found.append(
            f"Not evidence: {run.n_reads:,} reads are fewer than the {profile.min_reads:,} that profile "
            f"{profile.name} asks for."
        )
    if run.n_reads < OVERHEAD_DOMINATED and len(run.devices) > 1:
        found.append(f"Overhead-dominated: {run.n_reads:,} reads are too few for {len(run.devices)} devices to help.")
    if run.hours_projected is not None and run.n_reads < profile.projection_reads:
        found.append(
            f"Projection, not a measurement: {profile.projection_reads:,} reads would take "
            f"{run.hours_projected:.2f} h at this run's {run.reads_per_s or 0:,.0f} reads/s."
        )
    return found


def _targets(measured: Measured) -> list[str]:
    targets = measured.profile.targets
    asked = (
        targets.one_device_seconds,
        targets.two_device_seconds,
        targets.scaling,
        targets.speedup,
        targets.gpu_utilisation,
        targets.packing_efficiency,
    )
    if any(target is not None for target in asked) or measured.profile.scaling_bands:
        return []
    return [f"Profile {measured.profile.name} asks for no performance: it proves correctness and plumbing only."]


def _fates(run: RunFigure | None) -> list[str]:
    if run is None or not run.fates or run.n_reads is None:
        return []
    total = sum(run.fates.values())
    found = []
    if total != run.n_reads:
        found.append(f"Reads are not all accounted for: fates add up to {total:,}, the input has {run.n_reads:,}.")
    silent = run.fates.get("no_open_frame", 0)
    if silent and run.n_reads:
        share = 100 * silent / run.n_reads
        found.append(f"{silent:,} of {run.n_reads:,} reads ({share:.1f} %) have no open frame and get no score.")
    failed = run.fates.get("failed", 0)
    if failed:
        found.append(f"{failed:,} reads failed; their rows are in failed.tsv.")
    return found


def _lengths(run: RunFigure | None, charts: Charts, model_length: int | None) -> list[str]:
    histogram = charts.read_lengths
    if run is None or histogram is None or not sum(histogram.counts):
        return []
    found = []
    if model_length:
        bins = zip(histogram.counts, histogram.edges[1:], strict=True)
        short = sum(count for count, edge in bins if edge <= SHORT_SHARE * model_length)
        if short:
            share = 100 * short / sum(histogram.counts)
            part = "all" if short == sum(histogram.counts) else f"at least {share:.0f} %"
            found.append(
                f"Short reads: {part} are under {SHORT_SHARE * model_length:.0f} bases, well below the "
                f"head's {model_length}; such scores are little better than chance unless the head was trained on them."
            )
    packing = None if run.telemetry is None else run.telemetry.packing_efficiency
    if len(histogram.counts) == 1 and packing is not None and packing > PACKING_GAP:
        found.append("All reads have one length: packing and speed on reads of mixed lengths may be lower.")
    return found
