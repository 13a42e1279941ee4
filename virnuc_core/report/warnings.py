"""The warnings of a report: what went otherwise than it should, a sentence each, worst first."""

from collections.abc import Iterator, Sequence
from typing import Final

from virnuc_core.report.model import Accounting, Report, RunMetrics, TelemetryMetrics
from virnuc_core.report.text import cell, number
from virnuc_core.validation import NO_COMMIT_PAIRS

# A little above the ceiling is the clock of the device; more is a wrong ceiling.
MAX_SHARE_OF_CEILING: Final = 1.02
MAX_DEVICE_TIME_SPREAD: Final = 0.10  # 1 − least ÷ most busy time of a device
LONG_RUN_S: Final = 600.0


def warnings(
    report: Report, *, problems: Sequence[str], not_compared: Sequence[str]
) -> tuple[str, ...]:
    """Return the warnings of a report.

    Args:
        report: The report with everything but its warnings and notes.
        problems: What is wrong with the raw files.
        not_compared: Why parts of the validation were not compared.
    """
    sentences = [f"Raw file problem: {problem}." for problem in problems]
    run = report.run
    if run is not None:
        sentences += _reads_warnings(run, report.accounting)
        sentences += _run_warnings(run)
        # What disturbed a run that the judged run is compared with spoils the comparison, too.
        for other_run in report.runs:
            if other_run.name != run.name:
                sentences += _run_warnings(other_run)
        sentences += _scaling_warnings(report, run)
        if run.telemetry is not None:
            sentences += _telemetry_warnings(run.telemetry)
            sentences += _imbalance_warnings(run.telemetry)
    if report.baseline is not None and report.baseline.failed_rows:
        problem = f"rows that are not finite: {cell(report.baseline.failed_rows)}"
        sentences.append(f"Baseline: {problem}; they are in baseline/failed.tsv.")
    if report.overhead is not None and report.overhead.problem not in ("", NO_COMMIT_PAIRS):
        sentences.append(f"Checkpoint overhead: {report.overhead.problem}.")
    if report.regression is not None and report.regression.stale:
        made_from = "earlier runs of this profile here were made with other reads or weights"
        sentences.append(f"Stale baseline: {made_from}.")
    if report.accounting is not None:
        sentences += _input_warnings(report.accounting)
    sentences += [f"Not compared: {reason}." for reason in not_compared]
    return tuple(sentences)


def _reads_warnings(run: RunMetrics, accounting: Accounting | None) -> Iterator[str]:
    """Yield warnings about reads that are missing from the counts, and about failed reads."""
    if run.n_reads is None or not run.fates:
        return
    num_fates = sum(run.fates.values())
    is_whole = accounting is None or accounting.adds_up
    if num_fates != run.n_reads or not is_whole:
        counts = f"fates add up to {cell(num_fates)}, the input has {cell(run.n_reads)}"
        if accounting is not None:
            counts += f", reads.tsv lists {cell(accounting.reads)}"
        yield f"Reads are not all accounted for: {counts}."
    failed_reads = run.fates.get("failed")
    if failed_reads:
        yield f"{cell(failed_reads)} reads failed; their rows are in failed.tsv."


def _run_warnings(run: RunMetrics) -> Iterator[str]:
    """Yield warnings about events of the run, such as restarts, and about missing files."""
    counts = {
        "rows set aside: they ended every worker, or were not finite (failed.tsv)": (
            run.rows_set_aside
        ),
        "workers that died and were started again": run.restarts,
        "shards of an earlier run that were found damaged and computed again": len(run.damaged),
        "shards that ran on a part of the token budget, for want of device memory": (
            len(run.reduced_budgets)
        ),
    }
    for words, count in counts.items():
        if count:
            yield f"{run.name}: {words}: {cell(count)}."
    for warning in run.warnings:
        yield f"{run.name}: {warning}."
    if run.stopped_at_limit:
        yield f"{run.name}: ended at the time limit."
    for file in run.missing_files:
        yield f"{run.name}: {file} is missing."


def _scaling_warnings(report: Report, run: RunMetrics) -> Iterator[str]:
    """Yield a warning if a speed-up is larger than the number of devices."""
    for figure in report.scaling:
        if figure.num_gpus == len(run.devices) and figure.speedup > figure.num_gpus:
            yield (
                "Scaling is super-linear (more than the number of devices): "
                "check the one-device run."
            )


def _imbalance_warnings(telemetry: TelemetryMetrics) -> Iterator[str]:
    """Yield a warning if the devices were busy for unlike times, so that one waited for the others.

    In a short run the last shard alone makes such a difference, so that nothing is said of it.
    """
    busy_s = [device.busy_s for device in telemetry.busy]
    spread = telemetry.device_time_spread
    if spread is None or spread <= MAX_DEVICE_TIME_SPREAD or max(busy_s) < LONG_RUN_S:
        return
    hours = ", ".join(
        f"{device.device} {number(device.busy_s / 3600.0, 2)} h" for device in telemetry.busy
    )
    yield (
        f"Imbalance: the devices worked for unlike times ({hours}). "
        "Lower shard_tokens, and check that the devices are of one model."
    )


def _telemetry_warnings(telemetry: TelemetryMetrics) -> Iterator[str]:
    """Yield warnings about alarms, and about encoders faster than their measured ceiling."""
    for alarm in telemetry.alarms:
        yield f"Alarm: {alarm}."
    for encoder in telemetry.encoders:
        share = encoder.mfu_of_ceiling or 0.0
        if share > MAX_SHARE_OF_CEILING:
            speed = f"{encoder.encoder} ran at {100 * share:.0f} % of the ceiling"
            yield f"{speed} measured just before: the ceiling is too low."


def _input_warnings(accounting: Accounting) -> Iterator[str]:
    """Yield warnings about the input: those of staging by file or, without them, the totals."""
    staging = accounting.staging
    if staging.warnings:
        for warning in staging.warnings:
            yield f"Input: {warning}."
        return
    counts = {
        "broken records that were skipped (skipped.tsv)": staging.skipped,
        "files left out because they are neither FASTA nor FASTQ": len(staging.ignored_files or ()),
        "reads with the id of an earlier read (told apart by a number)": (
            accounting.flags.get("duplicate_of")
        ),
        "empty reads": accounting.fates.get("empty"),
    }
    for words, count in counts.items():
        if count:
            yield f"Input: {words}: {cell(count)}."
