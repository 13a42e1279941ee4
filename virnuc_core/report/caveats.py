"""Sentences that must not be missing from a report: what limits its figures, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from virnuc_core.config import Profile
from virnuc_core.report.criteria import Measured, baseline_note
from virnuc_core.report.model import (
    Accounting,
    Charts,
    Regression,
    RunMetrics,
    TelemetryMetrics,
)

OVERHEAD_DOMINATED: Final = 1_000  # reads; below, several devices are slower than one
SHORT_SHARE: Final = 0.6  # of the model's length
PACKING_GAP: Final = 0.95
MOST_MFU: Final = 1.02  # a little above 1 is the clock of the device; more is a wrong ceiling


def notes(measured: Measured, charts: Charts, model_length: int | None) -> tuple[str, ...]:
    """Every limit of the figures that a reader should know, in plain sentences."""
    run, profile = measured.judged, measured.profile
    found = [*_size(run, profile), *_targets(measured), *_silent(run)]
    if measured.baseline is not None and (note := baseline_note(measured.baseline)):
        found.append(f"Speed-up: {note}.")
    if measured.baseline is not None and measured.baseline.seconds:
        found += _repeats(run)
    return (*found, *_lengths(run, charts, model_length))


def warnings_of(
    measured: Measured,
    accounts: Accounting | None,
    regression: Regression | None,
    problems: Sequence[str],
) -> tuple[str, ...]:
    """What went otherwise than it should, in plain sentences, worst first."""
    run = measured.judged
    found = [f"Raw file problem: {problem}." for problem in problems]
    found += _fates(run, accounts)
    if run is not None:
        found += _course(run)
    if measured.scaling is not None and measured.scaling.super_linear:
        found.append("Scaling is super-linear (more than the number of devices): check the one-device run.")
    if run is not None and run.telemetry is not None:
        found += [f"Alarm: {alarm}." for alarm in run.telemetry.alarms]
        found += _impossible(run.telemetry)
    if measured.overhead is not None and measured.overhead.problem:
        found.append(f"Checkpoint overhead: {measured.overhead.problem}.")
    if regression is not None and regression.stale:
        found.append("Stale baseline: earlier runs of this profile here were made with other reads or weights.")
    return (*found, *_input(accounts))


def _course(run: RunMetrics) -> list[str]:
    """How the run went."""
    facts = (
        (run.rows_set_aside, "rows set aside because they ended every worker (failed.tsv)"),
        (run.restarts, "workers that died and were started again"),
        (run.shards_damaged, "shards of an earlier run that were found damaged and computed again"),
        (run.shards_on_less_memory, "shards that ran on a part of the token budget, for want of device memory"),
    )
    found = [f"{run.name}: {words}: {number:,}." for number, words in facts if number]
    if run.stopped_at_limit:
        found.append(f"{run.name}: ended at the time limit.")
    found += [f"{run.name}: {warning}" for warning in run.warnings]
    return found + [f"{run.name}: {name} is missing." for name in run.missing_files]


def _impossible(telemetry: TelemetryMetrics) -> list[str]:
    return [
        f"{encoder.encoder} ran at {100 * share:.0f} % of the ceiling measured just before: the ceiling is too low."
        for encoder in telemetry.encoders
        if (share := encoder.mfu_of_ceiling) is not None and share > MOST_MFU
    ]


def _fates(run: RunMetrics | None, accounts: Accounting | None) -> list[str]:
    if run is None or run.n_reads is None or not run.fates:
        return []
    found = []
    total = sum(run.fates.values())
    if total != run.n_reads or (accounts is not None and not accounts.adds_up):
        listed = "" if accounts is None else f", reads.tsv lists {accounts.reads:,}"
        found.append(
            f"Reads are not all accounted for: fates add up to {total:,}, the input has {run.n_reads:,}{listed}."
        )
    failed = run.fates.get("failed", 0)
    if failed:
        found.append(f"{failed:,} reads failed; their rows are in failed.tsv.")
    return found


def _input(accounts: Accounting | None) -> list[str]:
    """What was odd in the input: file by file where staging has said it, else in sum."""
    if accounts is None:
        return []
    if accounts.input_warnings:
        return [f"Input: {warning}." for warning in accounts.input_warnings]
    facts = (
        (accounts.skipped_records, "broken records that were skipped (skipped.tsv)"),
        (accounts.ignored_files, "files left out because they are neither FASTA nor FASTQ"),
        (accounts.flags.get("duplicate_of"), "reads with the id of an earlier read (told apart by a number)"),
        (accounts.fates.get("empty"), "empty reads"),
    )
    return [f"Input: {words}: {number:,}." for number, words in facts if number]


def _size(run: RunMetrics | None, profile: Profile) -> list[str]:
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


def _silent(run: RunMetrics | None) -> list[str]:
    silent = 0 if run is None else run.fates.get("no_open_frame", 0)
    if run is None or not run.n_reads or not silent:
        return []
    share = 100 * silent / run.n_reads
    return [f"{silent:,} of {run.n_reads:,} reads ({share:.1f} %) have no open frame and get no score."]


def _repeats(run: RunMetrics | None) -> list[str]:
    """How much of the speed-up is the input's: equal frames are embedded once, but not by a baseline."""
    if run is None or not run.n_rows or not run.n_uniques or run.n_uniques == run.n_rows:
        return []
    repeats = run.n_rows - run.n_uniques
    share = 100 * repeats / run.n_rows
    return [
        f"Repeats: {repeats:,} of {run.n_rows:,} open frames ({share:.1f} %) equal others and are embedded once; "
        f"the baseline embeds all. That alone is {run.n_rows / run.n_uniques:.2f}x of the speed-up."
    ]


def _lengths(run: RunMetrics | None, charts: Charts, model_length: int | None) -> list[str]:
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
