"""Where the time goes, and what can be done about it.

Two rules point at stages: over 30 % of the time, or a GPU stage under 80 % utilisation. ESM-2 is always over 30 %;
while its GPU is busy that is expected, and only the rest is worth a person's time. The verdict names one class: the
largest loss that something can be done about, else the encoders doing their work.
"""

from __future__ import annotations

from typing import Final

from virnuc_core.report.model import Bottleneck, RunMetrics, StageFinding, TelemetryMetrics

TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
STARVED_SHARE: Final = 0.20
WAIT_SHARE: Final = 0.05
PACKING: Final = 0.90
COMMIT_SHARE: Final = 0.10
GPU_STAGES: Final = ("DNABERT-S", "ESM-2")

LOADER_ADVICE: Final = "raise num_workers or prefetch_factor, or give the loaders more cores"
PACKING_ADVICE: Final = "raise token_budget or shard_tokens: fewer half-empty last batches"
COMMIT_ADVICE: Final = "put the run directory on a faster disk, or raise shard_tokens"
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


def findings(run: RunMetrics | None) -> tuple[StageFinding, ...]:
    """The stages the two rules point at, largest share first; no time or no total gives none."""
    found = []
    for stage in () if run is None else run.stages:
        if stage.share is None or run is None:
            continue
        used = _utilisation(run.telemetry, stage.name)
        idle = used is not None and used < BUSY_PERCENT
        if stage.share <= TIME_SHARE and not idle:
            continue
        expected = stage.name == "ESM-2" and not idle
        advice = GPU_ADVICE if expected else (BUSY_ADVICE if idle else STAGE_ADVICE[stage.name])
        found.append(
            StageFinding(stage=stage.name, share=stage.share, utilisation=used, expected=expected, advice=advice)
        )
    return tuple(sorted(found, key=lambda finding: -finding.share))


def _utilisation(telemetry: TelemetryMetrics | None, stage: str) -> float | None:
    """Lowest device's utilisation while a GPU stage ran."""
    if telemetry is None or stage not in GPU_STAGES:
        return None
    values = [d.esm2_percent if stage == "ESM-2" else d.dnabert_s_percent for d in telemetry.devices]
    known = [value for value in values if value is not None]
    return min(known) if known and len(known) == len(values) else None


def bottleneck(run: RunMetrics | None) -> Bottleneck:
    """The one class that costs most."""
    if run is None or not run.total_s:
        return Bottleneck(kind="unknown", detail="no run was timed", advice="run validate")
    losses = [loss for loss in (_loader(run), _packing(run), _commit(run), _cpu_stage(run)) if loss is not None]
    if losses:
        return max(losses, key=lambda loss: loss.share or 0.0)
    share = sum(run.stage_seconds.get(stage, 0.0) for stage in GPU_STAGES) / run.total_s
    if not share:
        detail, advice = "the encoders' time was not measured", "look at the log of the run"
        return Bottleneck(kind="unknown", detail=detail, advice=advice)
    idle = [s for s in GPU_STAGES if (u := _utilisation(run.telemetry, s)) is not None and u < BUSY_PERCENT]
    detail = f"the encoders take {100 * share:.0f} % of the time"
    if idle:
        detail += f"; the GPU is under {BUSY_PERCENT:g} % busy in {', '.join(idle)}"
    return Bottleneck(
        kind="GPU compute",
        expected=not idle,
        stage=idle[0] if idle else "ESM-2",
        share=share,
        detail=detail,
        advice=BUSY_ADVICE if idle else GPU_ADVICE,
    )


def _loader(run: RunMetrics) -> Bottleneck | None:
    telemetry = run.telemetry
    if telemetry is None or telemetry.queue is None or not run.total_s or not telemetry.span_s:
        return None
    loops = max(1, len(telemetry.busy) or len(run.devices))
    waited = (telemetry.avg_wait_ms or 0.0) / 1000.0 * telemetry.batches / loops
    share = min(1.0, waited / run.total_s)
    if telemetry.queue.starved <= STARVED_SHARE and waited / telemetry.span_s <= WAIT_SHARE:
        return None
    detail = f"{100 * telemetry.queue.starved:.0f} % of batches starved; {100 * share:.0f} % of the time spent waiting"
    return Bottleneck(kind="loader", share=share, detail=detail, advice=LOADER_ADVICE)


def _packing(run: RunMetrics) -> Bottleneck | None:
    telemetry = run.telemetry
    if telemetry is None or telemetry.packing_efficiency is None or telemetry.packing_efficiency > PACKING:
        return None
    encoders = sum(run.stage_seconds.get(stage, 0.0) for stage in GPU_STAGES)
    share = min(1.0, encoders / (run.total_s or 1.0)) * (1.0 - telemetry.packing_efficiency)
    detail = f"packing efficiency {100 * telemetry.packing_efficiency:.1f} %: the rest of the slots is computed in vain"
    return Bottleneck(kind="packing", share=share, detail=detail, advice=PACKING_ADVICE)


def _commit(run: RunMetrics) -> Bottleneck | None:
    """Commits run beside the next shard's compute: they can have cost no more than the time devices stood still."""
    telemetry = run.telemetry
    if telemetry is None or not telemetry.busy or not telemetry.span_s:
        return None
    devices = len(telemetry.busy)
    idle = telemetry.span_s - sum(b.busy_s for b in telemetry.busy) / devices
    commit = sum(b.commit_s for b in telemetry.busy) / devices
    share = min(1.0, max(0.0, min(idle, commit)) / (run.total_s or 1.0))
    if share <= COMMIT_SHARE:
        return None
    detail = f"a device stands still for {idle:.0f} s of the embedding, and its commits take {commit:.0f} s"
    return Bottleneck(kind="commit I/O", share=share, detail=detail, advice=COMMIT_ADVICE)


def _cpu_stage(run: RunMetrics) -> Bottleneck | None:
    slow = [stage for stage in run.stages if stage.name not in GPU_STAGES and stage.share]
    share = sum(stage.share or 0.0 for stage in slow)
    if share <= TIME_SHARE:
        return None
    worst = max(slow, key=lambda stage: stage.share or 0.0)
    detail = f"stages off the GPU take {100 * share:.0f} % of the time, {worst.name} most"
    return Bottleneck(kind="CPU stage", stage=worst.name, share=share, detail=detail, advice=STAGE_ADVICE[worst.name])
