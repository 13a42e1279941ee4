"""The messages of tasks and flows, and the hints beside the questions to a reviewer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from virnuc_core.answer import RANDOM_WEIGHTS
from virnuc_core.config import Switch
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.bottlenecks import TUNABLE_LOSSES, UNKNOWN_LOSS
from virnuc_core.report.domain_tables import one_kind_notes
from virnuc_core.report.model import Bottleneck, Criterion, Report, RunMetrics
from virnuc_core.report.text import cell, format_value, markdown_cell, number, percent, target_text
from virnuc_core.report.training_pages import MIN_CLUSTERS
from virnuc_core.report.views.speed import (
    efficiency_text,
    measured_runs,
    speedup_text,
    unmeasured_device_counts,
)
from virnuc_core.report.views.tools import memory_history_lines
from virnuc_core.runfiles import ModelFlops
from virnuc_core.tools.trace import TraceTable
from virnuc_core.tools.tune import Trial
from virnuc_core.training.splits import Examples
from virnuc_core.training.train_file import TrainFile
from virnuc_core.validation import BaselineSummary, Comparison, OverheadPair

MEBIBYTE: Final = 1 << 20
OVERHEAD_WORDS: Final[Mapping[Switch, str]] = {
    "commits": "commits cost",
    "sampler": "the sampler costs",
    "models": "loading the models twice costs",
}


# --- Verdicts -------------------------------------------------------------------------------------


def criteria_message(report: Report) -> str:
    """Return a message: how many criteria were met, which were missed, and which were not judged.

    If none was missed but some could not be judged, these come first.
    """
    parts = [f"{report.num_met} of {len(report.requested)} asked criteria met"]
    if report.failures:
        parts.append(f"not met: {', '.join(report.failures)}")
    unjudged_titles = []
    for criterion in report.requested:
        if criterion.verdict in ("not run", "projected"):
            unjudged_titles.append(criterion.title)
    if unjudged_titles or not report.requested:
        parts.append(f"not judged here: {', '.join(unjudged_titles)}")
    if report.outcome == "not judged":
        parts.reverse()
    if report.random_weights:
        parts.append(RANDOM_WEIGHTS)
    return _in_one_line("; ".join(parts))


def scaling_message(report: Report) -> str:
    """Return a message: speed-up, efficiency and verdict by number of devices, and the equality of
    the results.

    Numbers of devices that were left out are named with the reason.
    """
    parts = []
    for figure in report.scaling[1:]:  # the first one is the run on one device itself
        speedup = f"{speedup_text(figure)} ({efficiency_text(figure)})"
        repeats = measured_runs(figure.times_s)
        part = f"{figure.num_gpus} devices: {speedup}, {repeats}"
        if figure.judged is not None and figure.judged.target is not None:
            part += f": {_verdict_text(figure.judged)}"
        parts.append(part)
    if not parts:
        parts.append("one device only: there is no curve")
    for num_devices, reason in unmeasured_device_counts(report).items():
        parts.append(f"{num_devices} devices: skipped, {reason}")
    equality = report.same_bytes
    if equality is not None:
        parts.append(f"same bytes on all devices: {_verdict_text(equality)}")
    if report.failures:
        parts.append(f"not met: {', '.join(report.failures)}")
    return _in_one_line("; ".join(parts))


def _verdict_text(criterion: Criterion) -> str:
    """Return a verdict with its target and, if there is no `pass`, its reason."""
    text = criterion.verdict.upper()
    if criterion.target is not None and criterion.unit:
        text += f" (required {target_text(criterion.target, criterion.unit)})"
    if criterion.verdict != "pass" and criterion.reason:
        text += f", {criterion.reason}"
    return text


def comparison_message(comparisons: Sequence[Comparison]) -> str:
    """Return a message on how far the compared runs agree.

    For two of our runs, it says whether their files are equal byte for byte. For a comparison with
    the baseline, it has the share of equal labels.
    """
    parts = []
    for pair in comparisons:
        equality = pair.bitwise
        # Neither identical nor differing: there were no files to compare.
        if equality is not None and (equality.identical or equality.differing):
            word = "equal" if equality.identical else "NOT equal"
            parts.append(f"{pair.a} and {pair.b} {word} bit for bit")
        elif pair.consensus is not None:
            agreement = percent(pair.consensus.agreement) or "–"
            parts.append(f"{pair.b} agrees with {pair.a} to {agreement}")
    return _in_one_line("; ".join(parts)) or "nothing to compare"


# --- Measurements ---------------------------------------------------------------------------------


def baseline_message(summary: BaselineSummary, results: Path | None) -> str:
    """Return a message: the time of the baseline, and how it was measured.

    Args:
        summary: The baseline's summary.
        results: Folder of result files that were given instead of running the baseline, or None.
    """
    if summary.source == "recorded":
        message = f"{number(summary.wall_s or 0)} s, recorded"
        if results is not None:
            message += f"; results taken from {results}"
    elif summary.subset is None:
        message = f"{number(summary.wall_s)} s measured on all reads"
    else:
        reads = cell(summary.subset.reads)
        message = f"{number(summary.measured_s)} s measured on {reads} reads"
        message += f", {number(summary.wall_s)} s scaled by tokens"
    if summary.failed_rows:
        message += f"; {cell(summary.failed_rows)} rows are not finite (failed.tsv)"
    return _in_one_line(f"{summary.name}: {message}")


def ceiling_message(flops: ModelFlops) -> str:
    """Return a message: the highest possible tokens/s of the protein encoder on each device.

    Args:
        flops: The ceilings and the products that were measured. The fastest ones are named.
    """
    tokens_per_s = flops.protein_ceilings
    if not tokens_per_s:
        return "no GPU, no ceiling"
    rates = ", ".join(str(number(rate, 0)) for rate in tokens_per_s.values())
    message = f"linear layers of {PROTEIN.title} alone: {rates} tokens/s"
    fastest = ModelFlops.fastest(flops.products)
    names = {rate.product: None for rate in fastest if rate.encoder == PROTEIN.name}
    if names:
        message += f" ({', '.join(names)})"
    return message


def overhead_message(pairs: Sequence[OverheadPair]) -> str:
    """Return a message: the share of the speed that commits, the sampler and loading cost.

    In a pair of runs, one of these three (`switch`) was on in one run and off in the other.
    """
    parts = []
    for switch, words in OVERHEAD_WORDS.items():
        shares = [pair.overhead for pair in pairs if pair.switch == switch]
        known_shares = [share for share in shares if share is not None]
        if known_shares:
            parts.append(f"{words} {percent(median(known_shares))}")
    if not parts:
        return "nothing could be timed"
    return f"of the tokens/s, {', '.join(parts)}"


def trial_message(measurement: Trial) -> str:
    """Return a message on one measurement of a sweep: its speed, and how far scores differ."""
    rate = number(measurement.tokens_per_s, 0)
    message = f"{rate} tokens/s in {number(measurement.span_s)} s"
    if measurement.score_difference:
        message += f", scores differ by up to {measurement.score_difference:.2g}"
    return message


def trace_extent(tables: Sequence[TraceTable]) -> str:
    """Return a text on how much of a run was recorded by torch's profiler."""
    num_batches = sum(table.batches for table in tables)
    num_shards = sum(table.shards for table in tables)
    num_devices = len(tables)  # each device has a table
    shards = "shard" if num_shards == 1 else "shards"
    devices = "device" if num_devices == 1 else "devices"
    extent = f"{num_batches} batches of {cell(num_shards)} {shards}"
    numbers = sorted({number for table in tables for number in table.shard_numbers})
    if numbers:
        extent += f" (number {', '.join(str(number) for number in numbers)})"
    return f"{extent} on {num_devices} {devices} recorded"


def profile_message(
    tables: Sequence[TraceTable], folder: str, losses: Sequence[Bottleneck] = ()
) -> str:
    """Return a message: how much of a run was recorded, and what the run loses most time by.

    Args:
        tables: What was recorded on each device.
        folder: The folder of the traces.
        losses: What the run lost time by, the largest loss first.
    """
    kept_bytes = sum(table.trace_bytes for table in tables if table.trace is not None)
    size = number(kept_bytes / MEBIBYTE)
    message = f"{trace_extent(tables)}, {size} MiB of traces in {folder}"
    if losses:
        largest = losses[0]
        message += f"; bottleneck: {largest.kind}"
        if largest.share is not None:
            message += f", at most {percent(largest.share)} of the time"
    for line in memory_history_lines(tables):
        message += f"; memory history of {line}"
    return _in_one_line(message)


# --- Training -------------------------------------------------------------------------------------


def split_message(examples: Examples) -> str:
    """Return a message: the number of frames, genomes and clusters of a training, and what was
    left out.
    """
    num_frames = cell(len(examples.rows))
    num_genomes = len(examples.genomes)
    num_clusters = examples.genomes["cluster"].nunique()
    message = f"{num_frames} frames of {num_genomes} genomes in {num_clusters} clusters"
    for reason, count in examples.left_out.items():
        message += f"; left out: {cell(count)} {reason}"
    return _in_one_line(message)


def training_message(training: TrainFile) -> str:
    """Return a message: how well a new head separates reads, and doubts about that number."""
    scores = []
    for figures in training.figures:
        if figures.level == "read" and figures.is_natural and figures.method == "head":
            auroc = figures.metrics["auroc"]
            test_set = figures.test_set
            if test_set.endswith(" bases"):
                test_set = f"fragments of {test_set}"  # of the test genomes, with another length
            scores.append(f"{auroc} in {test_set} ({figures.clusters} clusters)")
    message = f"AUROC of reads: {', '.join(scores)}"
    if min(training.clusters["test"].values()) < MIN_CLUSTERS:
        message += "; the test has too few genomes to tell"
    for note in one_kind_notes(training.card.domain):
        message += f"; {note.removesuffix('.')}"
    random_encoders = training.random_encoders
    if len(random_encoders) > 1:
        message += (
            f"; {' and '.join(random_encoders)} are stand-ins with random weights: "
            "this is not how good the method is"
        )
    elif random_encoders:
        message += (
            f"; {random_encoders[0]} is a stand-in with random weights: "
            "this is not how good the method is with both encoders"
        )
    return _in_one_line(message)


# --- Hints beside the questions to a reviewer -----------------------------------------------------


def question_hints(report: Report) -> dict[str, str]:
    """Return a hint in Markdown for each question to the reviewer. A hint may be empty."""
    return {
        "all_criteria_met": f"**{markdown_cell(criteria_message(report))}**",
        "target_realistic": missed_targets(report),
        "tuning_could_help": f"Time that settings act on: {loss_shares(report, tunable=True)}",
        "code_fix_needed": f"Time that no setting mends: {loss_shares(report, tunable=False)}",
        "esm2_still_bottleneck": encoder_shares(report.run),
    }


def missed_targets(report: Report) -> str:
    """Return the criteria that were missed, with value and target, in Markdown."""
    criteria = []
    for criterion in report.failed_criteria:
        target = target_text(criterion.target, criterion.unit)
        criteria.append(markdown_cell(f"{criterion.title} {format_value(criterion)} ({target})"))
    if not criteria:
        return ""
    return f"Not met: {', '.join(criteria)}"


def loss_shares(report: Report, *, tunable: bool) -> str:
    """Return the kinds of lost time with their shares of the whole time, in Markdown.

    Args:
        report: The report, which has the losses.
        tunable: Return the kinds that a sweep of settings (loader workers, token budget, prefetch)
            may lessen. If false, return all others.

    Returns:
        The kinds, the largest first, or `none known`. A share that is not known is left out.
    """
    kinds = []
    for loss in report.losses or ():
        if (loss.kind in TUNABLE_LOSSES) != tunable or loss.kind == UNKNOWN_LOSS:
            continue
        share = "" if loss.share is None else f" {percent(loss.share)}"
        kinds.append(f"{loss.kind}{share}")
    return markdown_cell(", ".join(kinds) or "none known")


def encoder_shares(run: RunMetrics | None) -> str:
    """Return the shares of the time that the encoders and all other work took, in Markdown."""
    question = "How large is the share of non-GPU work?"
    if run is None or not run.stage_shares:
        return f"{question} Stage times are not known."
    protein_share = percent(run.stage_shares.get(PROTEIN.title, 0))  # 0: fused with another stage
    dna_share = percent(run.stage_shares.get(DNA.title, 0))
    other_work = percent(run.other_work_share)
    shares = f"{PROTEIN.title} {protein_share}, {DNA.title} {dna_share}, other work {other_work}"
    return f"{question} **{shares}**"


def _in_one_line(text: str) -> str:
    """Return the text with each run of white space as one blank."""
    return " ".join(text.split())
