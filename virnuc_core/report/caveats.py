"""Sentences that must not be missing from a report: what limits its figures, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from virnuc_core.report.measured import Measured, baseline_note
from virnuc_core.report.model import Accounting, Charts, Regression, RunMetrics

NOT_OF_SPEED: Final = {"consensus_agreement", "starved_share", "checkpoint_overhead", "device_time_spread"}


def notes(measured: Measured, charts: Charts, model_length: int | None) -> Iterator[str]:
    """Every limit of the figures that a reader should know, in plain sentences."""
    run, profile, baseline = measured.judged, measured.profile, measured.baseline
    reads = None if run is None else run.n_reads
    if run is not None and reads is not None:
        if reads < profile.min_reads:
            asked = f"the {profile.min_reads:,} that profile {profile.name} asks for"
            yield f"Not evidence: {reads:,} reads are fewer than {asked}."
        if reads < 1_000 and len(run.devices) > 1:
            yield f"Overhead-dominated: {reads:,} reads are too few for {len(run.devices)} devices to help."
        if run.hours_projected is not None and reads < profile.projection_reads:
            yield (
                f"Projection, not a measurement: {profile.projection_reads:,} reads would take "
                f"{run.hours_projected:.2f} h at this run's {run.reads_per_s or 0:,.0f} reads/s."
            )
    if not profile.scaling_bands and not profile.targets.model_dump(exclude=NOT_OF_SPEED, exclude_none=True):
        yield f"Profile {profile.name} asks for no performance: it proves correctness and plumbing only."
    if run is not None and reads and (silent := run.fates.get("no_open_frame", 0)):
        yield f"{silent:,} of {reads:,} reads ({100 * silent / reads:.1f} %) have no open frame and get no score."
    if baseline is not None and (note := baseline_note(baseline)):
        yield f"Speed-up: {note}."
    if run is not None and baseline is not None and baseline.seconds and run.n_rows and run.n_uniques:
        repeats = run.n_rows - run.n_uniques  # equal frames are embedded once, but not by a baseline
        if repeats:
            yield (
                f"Repeats: {repeats:,} of {run.n_rows:,} open frames ({100 * repeats / run.n_rows:.1f} %) equal others "
                "and are embedded once; the baseline embeds all. "
                f"That alone is {run.n_rows / run.n_uniques:.2f}x of the speed-up."
            )
    if run is not None:
        yield from _lengths(run, charts, model_length)


def _lengths(run: RunMetrics, charts: Charts, model_length: int | None) -> Iterator[str]:
    histogram = charts.read_lengths
    if histogram is None or not (total := sum(histogram.counts)):
        return
    if model_length:
        limit = 0.6 * model_length
        short = sum(n for n, edge in zip(histogram.counts, histogram.edges[1:], strict=True) if edge <= limit)
        if short:
            part = "all" if short == total else f"at least {100 * short / total:.0f} %"
            yield (
                f"Short reads: {part} are under {limit:.0f} bases, well below the head's {model_length}; such scores "
                "are little better than chance unless the head was trained on them."
            )
    packing = None if run.telemetry is None else run.telemetry.packing_efficiency
    if len(histogram.counts) == 1 and packing is not None and packing > 0.95:
        yield "All reads have one length: packing and speed on reads of mixed lengths may be lower."


def warnings_of(
    measured: Measured, accounts: Accounting | None, regression: Regression | None, problems: Sequence[str]
) -> Iterator[str]:
    """What went otherwise than it should, in plain sentences, worst first."""
    run = measured.judged
    yield from (f"Raw file problem: {problem}." for problem in problems)
    if run is not None:
        yield from _course(run, accounts)
    if measured.scaling is not None and measured.scaling.super_linear:
        yield "Scaling is super-linear (more than the number of devices): check the one-device run."
    if run is not None and run.telemetry is not None:
        yield from (f"Alarm: {alarm}." for alarm in run.telemetry.alarms)
        for encoder in run.telemetry.encoders:
            if (share := encoder.mfu_of_ceiling) is not None and share > 1.02:
                # a little above 1 is the clock of the device; more is a wrong ceiling
                at = f"{encoder.encoder} ran at {100 * share:.0f} % of the ceiling measured just before"
                yield f"{at}: the ceiling is too low."
    if measured.overhead is not None and measured.overhead.problem:
        yield f"Checkpoint overhead: {measured.overhead.problem}."
    if regression is not None and regression.stale:
        yield "Stale baseline: earlier runs of this profile here were made with other reads or weights."
    if accounts is not None:  # what was odd in the input: file by file where staging has said it, else in sum
        facts = (
            (accounts.skipped_records, "broken records that were skipped (skipped.tsv)"),
            (accounts.ignored_files, "files left out because they are neither FASTA nor FASTQ"),
            (accounts.flags.get("duplicate_of"), "reads with the id of an earlier read (told apart by a number)"),
            (accounts.fates.get("empty"), "empty reads"),
        )
        summed = [f"{words}: {number:,}" for number, words in facts if number]
        yield from (f"Input: {warning}." for warning in accounts.input_warnings or summed)


def _course(run: RunMetrics, accounts: Accounting | None) -> Iterator[str]:
    """What became of the reads of a run, and how it went."""
    total = sum(run.fates.values())
    if run.n_reads is not None and run.fates:
        if total != run.n_reads or (accounts is not None and not accounts.adds_up):
            listed = "" if accounts is None else f", reads.tsv lists {accounts.reads:,}"
            yield f"Reads are not all accounted for: fates add up to {total:,}, the input has {run.n_reads:,}{listed}."
        if failed := run.fates.get("failed", 0):
            yield f"{failed:,} reads failed; their rows are in failed.tsv."
    facts = (
        (run.rows_set_aside, "rows set aside because they ended every worker (failed.tsv)"),
        (run.restarts, "workers that died and were started again"),
        (run.shards_damaged, "shards of an earlier run that were found damaged and computed again"),
        (run.shards_on_less_memory, "shards that ran on a part of the token budget, for want of device memory"),
    )
    yield from (f"{run.name}: {words}: {number:,}." for number, words in facts if number)
    if run.stopped_at_limit:
        yield f"{run.name}: ended at the time limit."
    yield from (f"{run.name}: {name} is missing." for name in run.missing_files)
