"""What the report says in sentences: the limits of its figures, what went wrong, and where the time goes.

Two rules point at stages: over 30 % of the time, or a GPU stage under 80 % utilisation. ESM-2 is always over 30 %;
while its GPU is busy that is expected, and only the rest is worth a person's time. The bottleneck is the largest
avoidable loss of time, by class, with what removing it would save at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from virnuc_core.report.criteria import Measured, baseline_note
from virnuc_core.report.formatting import cell, percent
from virnuc_core.report.model import Accounting, Bottleneck, Charts, LossKind, Regression, RunMetrics
from virnuc_core.rundir import EXACT
from virnuc_core.telemetry.tables import ENCODERS, OVERLAPPED, STAGES, START_UP

NOT_OF_SPEED: Final = {"consensus_agreement", "starved_share", "checkpoint_overhead", "device_time_spread"}
TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
GPU_STAGES: Final = ("DNABERT-S", "ESM-2")
WORTH: Final = 0.05  # of the whole time: a smaller loss is not worth a person's
LONG_S: Final = 600.0
WORK_ADVICE: Final = "the encoders are at work, and a run this short says little of the devices"
GPU_ADVICE: Final = "the encoders are at work: more or faster GPUs, or a lower precision that validation has passed"
BUSY_ADVICE: Final = "the GPU idles while this stage runs: look at waits, batch sizes and the host's cores"
LOSSES: Final[dict[LossKind, tuple[tuple[str, ...], str]]] = {  # rows of the stage table, and the way out
    "start-up": (("Preparation", *START_UP, "Shutdown"), "give one run more reads; weights on a local disk"),
    "staging": ((*STAGES[:4], "Rest of staging"), "raise the staging workers; reads on a local disk or decompressed"),
    "loader": (("Waiting for batches",), "raise num_workers or prefetch_factor, or give the loaders more cores"),
    "commits": (("Commits",), "put the run directory on a faster disk, or raise shard_tokens"),
    "results": ((*STAGES[7:], "Result files"), "result files on a local disk"),
    "retries": (("Restarts", "Earlier attempts: lost"), "the deaths in summary.json and the workers' logs say why"),
}
STAGE_ADVICE: Final = {
    **{row: advice for rows, advice in LOSSES.values() for row in rows},
    "DNABERT-S": "raise dna_token_budget; check that it runs on every GPU",
    "ESM-2": "raise token_budget; check precision and attention backend",
    "Feature Merging": "merging should be fused with embedding: check the engine's version",
}


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
                f"{run.hours_projected:.2f} h at this run's {(run.sequences_per_hour or 0) / 3600:,.0f} reads/s."
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
    for one in (c for c in measured.comparisons if c.a == EXACT and c.cosines):
        frames, chunks = (percent(part.agreement) if part else None for part in (one.frames, one.consensus))
        least = f"least cosine {one.cosines[0].minimum:.5f} over {one.cosines[0].n:,} sequences"
        labels = f"labels agree to {cell(frames)} per frame, {cell(chunks)} of the consensus"
        yield f"Precision: {one.b} against fp32 by plain torch: {least}; {labels}."
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
        (run.rows_set_aside, "rows set aside: they ended every worker, or were not finite (failed.tsv)"),
        (run.restarts, "workers that died and were started again"),
        (run.shards_damaged, "shards of an earlier run that were found damaged and computed again"),
        (run.shards_on_less_memory, "shards that ran on a part of the token budget, for want of device memory"),
    )
    yield from (f"{run.name}: {words}: {number:,}." for number, words in facts if number)
    yield from (f"{run.name}: {warning}." for warning in run.warnings)
    if run.stopped_at_limit:
        yield f"{run.name}: ended at the time limit."
    yield from (f"{run.name}: {name} is missing." for name in run.missing_files)


def _utilisation(run: RunMetrics, stage: str) -> float | None:
    """Lowest device's utilisation while a GPU stage ran."""
    if run.telemetry is None or stage not in GPU_STAGES:
        return None
    return run.telemetry.lowest_percent("esm2" if stage == "ESM-2" else "dnabert_s")


def findings(run: RunMetrics | None) -> tuple[str, ...]:
    """A sentence on each stage the two rules point at, largest share first; no time or no total gives none."""
    if run is None:
        return ()
    found = []
    for name in STAGES:
        share, used = run.stage_shares.get(name, 0.0), _utilisation(run, name)
        idle = used is not None and used < BUSY_PERCENT
        if share > TIME_SHARE or idle:
            expected = name == "ESM-2" and not idle
            advice = _further(run) if expected else BUSY_ADVICE if idle else STAGE_ADVICE[name]
            busy = "" if used is None else f", the lowest GPU {used:.1f} % busy"
            word = "expected" if expected else "actionable"
            found.append((-share, f"{name} takes {100 * share:.1f} % of the time{busy} ({word}): {advice}."))
    return tuple(text for _, text in sorted(found))


def _further(run: RunMetrics) -> str:
    """What helps where the encoders do their work well."""
    return GPU_ADVICE if (run.total_s or 0.0) >= LONG_S else WORK_ADVICE


def losses(run: RunMetrics | None) -> tuple[Bottleneck, ...]:
    """Every avoidable loss of time, the largest first; never empty."""
    if run is None or not run.total_s:
        return (Bottleneck(kind="unknown", detail="no run was timed", advice="run validate"),)
    spent = {row: seconds for row, seconds in run.stages.items() if seconds}
    found = [*_computing(run, spent)]
    for kind, (rows, advice) in LOSSES.items():
        own = sorted(((spent[row], row) for row in rows if row in spent), reverse=True)
        # what passed while the reads were staged saves nothing, whichever of the two is removed
        hidden_s = spent.get(OVERLAPPED, 0.0) if kind in ("start-up", "staging") else 0.0
        whole_s = sum(seconds for seconds, _ in own)
        detail = ", ".join(f"{row} {seconds:.1f} s" for seconds, row in own if seconds > WORTH * whole_s)
        found.append((whole_s - hidden_s, kind, detail, advice, False))
    ranked = tuple(
        Bottleneck(
            kind=kind, detail=detail, advice=advice, saves_s=saves_s, share=share, expected=good or share < WORTH
        )
        for saves_s, kind, detail, advice, good in sorted(found, reverse=True)
        if (share := saves_s / run.total_s) > 0
    )
    return ranked or (Bottleneck(kind="unknown", detail="no stage was measured", advice="look at the log of the run"),)


def _computing(run: RunMetrics, spent: Mapping[str, float]) -> Iterator[tuple[float, LossKind, str, str, bool]]:
    """What devices at work lose, by slots without a token and by speed below the measured ceiling, else below full
    utilisation: seconds, class, detail, the way out, and whether they do their work well."""
    still_s = spent.get("Device idle", 0.0)
    empty_s, slow_s, said, idle = 0.0, still_s, [f"a device stands still for {still_s:.1f} s"], False
    for found in run.telemetry.encoders if run.telemetry else ():
        stage, packing, share = GPU_STAGES[ENCODERS.index(found.encoder)], found.packing_efficiency or 1.0, 1.0
        if (used := _utilisation(run, stage)) is not None:
            idle, share = idle or used < BUSY_PERCENT, used / 100.0
            said.append(f"{stage} keeps the lowest GPU {used:.1f} % busy")
        if found.mfu_of_ceiling is not None:
            share = found.mfu_of_ceiling / packing
            said.append(f"{stage} runs at {100 * share:.0f} % of what its linear layers alone sustain")
        empty_s += spent.get(stage, 0.0) * (1.0 - packing)
        slow_s += spent.get(stage, 0.0) * packing * max(0.0, 1.0 - share)
    good = not idle and still_s <= slow_s / 2
    yield slow_s, "GPU compute", "; ".join(said), _further(run) if good else BUSY_ADVICE, good
    yield empty_s, "packing", "slots without a token", "raise token_budget or shard_tokens", False
