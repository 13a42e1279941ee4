"""What the report says in sentences: the limits of its figures, what went wrong, and where the time goes.

Two rules point at stages: over 30 % of the time, or a GPU stage under 80 % utilisation. ESM-2 is always over 30 %;
while its GPU is busy that is expected, and only the rest is worth a person's time. The bottleneck names one class: the
largest loss that something can be done about, else the encoders doing their work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from virnuc_core.report.criteria import Measured, baseline_note
from virnuc_core.report.model import Accounting, Bottleneck, Charts, Regression, RunMetrics, StageFinding

NOT_OF_SPEED: Final = {"consensus_agreement", "starved_share", "checkpoint_overhead", "device_time_spread"}
TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
GPU_STAGES: Final = ("DNABERT-S", "ESM-2")
GPU_ADVICE: Final = "the encoders are at work: more or faster GPUs, or a lower precision that validation has passed"
BUSY_ADVICE: Final = "the GPU idles while this stage runs: look at waits, batch sizes and the host's cores"
STAGE_ADVICE: Final = {
    "Sequence Chunking": "staging workers, and reads on a local disk or decompressed",
    "Six-Frame Translation": "raise the staging workers",
    "Nucleotide Splitting": "a faster disk for the ORF store",
    "Protein Splitting": "a faster disk for the ORF store",
    "DNABERT-S": "raise dna_token_budget; check that it runs on every GPU",
    "ESM-2": "raise token_budget; check precision and attention backend",
    "Feature Merging": "merging should be fused with embedding: check the engine's version",
    "Model Prediction": "the head is small: a long time here is disk or start-up",
    "Consensus Scoring": "result files on a local disk",
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
    yield from (f"{run.name}: {warning}." for warning in run.warnings)
    if run.stopped_at_limit:
        yield f"{run.name}: ended at the time limit."
    yield from (f"{run.name}: {name} is missing." for name in run.missing_files)


def _utilisation(run: RunMetrics, stage: str) -> float | None:
    """Lowest device's utilisation while a GPU stage ran."""
    if run.telemetry is None or stage not in GPU_STAGES:
        return None
    return run.telemetry.lowest_percent("esm2" if stage == "ESM-2" else "dnabert_s")


def findings(run: RunMetrics | None) -> tuple[StageFinding, ...]:
    """The stages the two rules point at, largest share first; no time or no total gives none."""
    if run is None:
        return ()
    found = []
    for name, share in run.stage_shares.items():
        used = _utilisation(run, name)
        idle = used is not None and used < BUSY_PERCENT
        if share > TIME_SHARE or idle:
            expected = name == "ESM-2" and not idle
            advice = GPU_ADVICE if expected else BUSY_ADVICE if idle else STAGE_ADVICE[name]
            found.append(StageFinding(stage=name, share=share, utilisation=used, expected=expected, advice=advice))
    return tuple(sorted(found, key=lambda finding: -finding.share))


def bottleneck(run: RunMetrics | None) -> Bottleneck:
    """The one class that costs most."""
    if run is None or not run.total_s:
        return Bottleneck(kind="unknown", detail="no run was timed", advice="run validate")
    encoders = min(1.0, sum(run.stage_shares.get(stage, 0.0) for stage in GPU_STAGES))
    losses = list(_losses(run, run.total_s, encoders))
    if losses:
        return max(losses, key=lambda loss: loss.share or 0.0)
    if not encoders:
        detail, advice = "the encoders' time was not measured", "look at the log of the run"
        return Bottleneck(kind="unknown", detail=detail, advice=advice)
    idle = [s for s in GPU_STAGES if (used := _utilisation(run, s)) is not None and used < BUSY_PERCENT]
    detail = f"the encoders take {100 * encoders:.0f} % of the time"
    if idle:
        detail += f"; the GPU is under {BUSY_PERCENT:g} % busy in {', '.join(idle)}"
    return Bottleneck(
        kind="GPU compute",
        expected=not idle,
        stage=idle[0] if idle else "ESM-2",
        share=encoders,
        detail=detail,
        advice=BUSY_ADVICE if idle else GPU_ADVICE,
    )


def _losses(run: RunMetrics, total_s: float, encoders: float) -> Iterator[Bottleneck]:
    """What costs time and can be mended; `encoders` is the share of the time that they take."""
    telemetry = run.telemetry
    if telemetry is not None and telemetry.queue is not None and telemetry.span_s:
        starved, loops = telemetry.queue.starved, max(1, len(telemetry.busy) or len(run.devices))
        waited = (telemetry.avg_wait_ms or 0.0) / 1000.0 * telemetry.batches / loops
        if starved > 0.20 or waited / telemetry.span_s > 0.05:
            share = min(1.0, waited / total_s)
            detail = f"{100 * starved:.0f} % of batches starved; {100 * share:.0f} % of the time spent waiting"
            advice = "raise num_workers or prefetch_factor, or give the loaders more cores"
            yield Bottleneck(kind="loader", share=share, detail=detail, advice=advice)
    if telemetry is not None and telemetry.packing_efficiency is not None and telemetry.packing_efficiency <= 0.90:
        packing = telemetry.packing_efficiency
        detail = f"packing efficiency {100 * packing:.1f} %: the rest of the slots is computed in vain"
        advice = "raise token_budget or shard_tokens: fewer half-empty last batches"
        yield Bottleneck(kind="packing", share=encoders * (1.0 - packing), detail=detail, advice=advice)
    if telemetry is not None and telemetry.busy and telemetry.span_s:
        # commits run beside the next shard's compute: they can have cost no more than the time devices stood still
        idle = telemetry.span_s - sum(b.busy_s for b in telemetry.busy) / len(telemetry.busy)
        commit = sum(b.commit_s for b in telemetry.busy) / len(telemetry.busy)
        share = min(1.0, min(idle, commit) / total_s)
        if share > 0.10:
            detail = f"a device stands still for {idle:.0f} s of the embedding, and its commits take {commit:.0f} s"
            advice = "put the run directory on a faster disk, or raise shard_tokens"
            yield Bottleneck(kind="commit I/O", share=share, detail=detail, advice=advice)
    slow = {stage: share for stage, share in run.stage_shares.items() if stage not in GPU_STAGES}
    if (share := sum(slow.values())) > TIME_SHARE:
        worst = max(slow, key=slow.__getitem__)
        detail = f"stages off the GPU take {100 * share:.0f} % of the time, {worst} most"
        yield Bottleneck(kind="CPU stage", stage=worst, share=share, detail=detail, advice=STAGE_ADVICE[worst])
