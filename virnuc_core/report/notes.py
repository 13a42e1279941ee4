"""The limits of a report's figures that a reader should know, a sentence each."""

from collections.abc import Iterator, Sequence
from typing import Final

from virnuc_core.answer import weight_remarks
from virnuc_core.encoder_names import DNA
from virnuc_core.profiles import Profile
from virnuc_core.report.model import BaselineMetrics, Report, RunMetrics
from virnuc_core.report.text import cell, number, one_line, percent
from virnuc_core.rundir import EXACT_FILES
from virnuc_core.validation import Comparison, TuningRound

MIN_READS_OF_SEVERAL_DEVICES: Final = 1000  # with fewer reads, starting the devices costs more
SHORT_READ_SHARE: Final = 0.6  # of the model's length; shorter reads are scored badly
HIGH_PACKING: Final = 0.95  # share of a batch's token slots that hold tokens, not padding
NOT_OF_SPEED: Final = frozenset(
    {
        "consensus_agreement",
        "starved_share",
        "checkpoint_overhead",
        "device_time_spread",
        "centred_worst",
        "centred_mean",
        "verdicts_held",
    }
)  # targets that say nothing of the speed


def notes(report: Report, tuning: Sequence[TuningRound]) -> tuple[str, ...]:
    """Return sentences on the limits of a report's figures, such as too few reads.

    Args:
        report: The report with everything but its warnings and notes.
        tuning: The rounds in which the validation tuned itself.
    """
    sentences: list[str] = []
    profile = report.profile
    run = report.run
    if run is not None:
        # Runs of older versions did not record where the weights come from.
        if run.origins:
            sentences += weight_remarks(run.origins, run.has_card)
        sentences += _size_notes(run, profile)
    if _asks_no_performance(profile):
        scope = "it proves correctness and plumbing only"
        sentences.append(f"Profile {profile.name} asks for no performance: {scope}.")
    if run is not None:
        sentences += _silent_reads_notes(run)
    if report.baseline is not None:
        sentences += _baseline_notes(run, report.baseline)
    for comparison in report.comparisons:
        if comparison.a == EXACT_FILES and comparison.cosines:
            sentences.append(_precision_note(comparison))
    if run is not None:
        if run.rows_repeated:
            sentences.append(_repeated_in_fp16_note(run.rows_repeated))
        sentences += _read_length_notes(report, run)
    for number_of_round, tuning_round in enumerate(tuning, start=1):
        criteria = ", ".join(tuning_round.missed)
        result = tuning_round.outcome
        sentences.append(f"Tuning round {number_of_round}, {criteria} missed: {result}.")
    return tuple(sentences)


def _size_notes(run: RunMetrics, profile: Profile) -> Iterator[str]:
    """Yield sentences on conclusions for which the run has too few reads."""
    if run.n_reads is None:
        return
    reads = cell(run.n_reads)
    if run.n_reads < profile.min_reads:
        limit = f"the {profile.min_reads:,} that profile {profile.name} asks for"
        yield f"Not evidence: {reads} reads are fewer than {limit}."
    num_devices = len(run.devices)
    if run.n_reads < MIN_READS_OF_SEVERAL_DEVICES and num_devices > 1:
        yield f"Overhead-dominated: {reads} reads are too few for {num_devices} devices to help."
    if run.hours_projected is not None and run.n_reads < profile.projection_reads:
        rate = number(run.reads_per_s or 0.0, 0)
        yield (
            f"Projection, not a measurement: {profile.projection_reads:,} reads would take "
            f"{run.hours_projected:.2f} h at this run's {rate} reads/s."
        )


def _asks_no_performance(profile: Profile) -> bool:
    """Return whether a profile has no target of the speed."""
    return not profile.scaling_bands and NOT_OF_SPEED.issuperset(profile.targets)


def _silent_reads_notes(run: RunMetrics) -> Iterator[str]:
    """Yield a sentence on the number of reads without an open frame, which get no score."""
    silent_reads = run.fates.get("no_open_frame", 0)
    if run.n_reads and silent_reads:
        percent_of_reads = 100 * silent_reads / run.n_reads
        yield (
            f"{silent_reads:,} of {run.n_reads:,} reads ({percent_of_reads:.1f} %) "
            "have no open frame and get no score."
        )


def _baseline_notes(run: RunMetrics | None, baseline: BaselineMetrics) -> Iterator[str]:
    """Yield sentences on how the baseline's time was obtained, and on repeated frames.

    virnuc embeds equal frames only once. The baseline embeds each of them, which is a part of the
    speed-up.
    """
    origin = one_line(baseline.origin)
    if origin:
        yield f"Speed-up: {origin}."
    if run is None or not run.n_rows or not run.n_uniques or not baseline.seconds:
        return
    if run.repeated_rows:
        percent_of_rows = 100 * run.repeated_rows / run.n_rows
        speedup = run.n_rows / run.n_uniques
        yield (
            f"Repeats: {run.repeated_rows:,} of {run.n_rows:,} open frames "
            f"({percent_of_rows:.1f} %) equal others and are embedded once; the baseline embeds "
            f"all. That alone is {speedup:.2f}x of the speed-up."
        )


def _precision_note(comparison: Comparison) -> str:
    """Return a sentence on how close the run's embeddings and labels are to those in fp32."""
    frames = consensus = None
    if comparison.frames is not None:
        frames = percent(comparison.frames.agreement)
    if comparison.consensus is not None:
        consensus = percent(comparison.consensus.agreement)
    cosine = comparison.cosines[-1]  # the last is that of both encoders' embeddings together
    similarity = f"{cosine.minimum:.4f} at worst, {cosine.mean:.5f} in the mean"
    return (
        f"Precision: {comparison.b} against fp32 by plain torch: centred cosine of {cosine.part} "
        f"{similarity}, over {cell(cosine.n)} sequences; labels agree to {cell(frames)} per frame, "
        f"{cell(consensus)} of the consensus."
    )


def _repeated_in_fp16_note(sequences: int) -> str:
    """Return a sentence on the effect of sequences that int8 runs compute again in fp16."""
    return (
        f"Repeated in fp16: {cell(sequences)} sequences, whose score is near the threshold, beside "
        f"other batches. The time of those, {DNA.title}'s most of all, is longer by it; their "
        "tokens/s and MFU are lower."
    )


def _read_length_notes(report: Report, run: RunMetrics) -> Iterator[str]:
    """Yield sentences on short reads, which are scored badly, and on reads of equal length."""
    lengths = report.charts.read_lengths
    num_reads = 0 if lengths is None else sum(lengths.counts)
    if lengths is None or num_reads == 0:
        return
    model_length = report.provenance.model_length
    if model_length:
        short_length = SHORT_READ_SHARE * model_length
        # The report has no single lengths, only a histogram. A bin with the limit inside holds
        # shorter and longer reads, and is not counted. So the count is a lower bound: "at least".
        short_reads = lengths.below(short_length)
        if short_reads:
            share = f"at least {100 * short_reads / num_reads:.0f} %"
            part = "all" if short_reads == num_reads else share
            yield (
                f"Short reads: {part} are under {short_length:.0f} bases, well below the head's "
                f"{model_length}; such scores are little better than chance unless the head was "
                "trained on them."
            )
    packing = None if run.telemetry is None else run.telemetry.packing_efficiency
    # Reads of one length fill batches almost without padding. If these did, say that the speed
    # measured here may be too high for other reads.
    if len(lengths.counts) == 1 and (packing or 0.0) > HIGH_PACKING:
        yield (
            "All reads have one length: packing and speed on reads of mixed lengths may be lower."
        )
