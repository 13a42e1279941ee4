"""Where the time goes, and what can be done about it.

Two rules point at stages: over 30 % of the time, or a GPU stage under 80 % utilisation. ESM-2 is always over 30 %;
while its GPU is busy that is expected, and only the rest is worth a person's time. The verdict names one class: the
largest loss that something can be done about, else the encoders doing their work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from virnuc_core.report.model import Bottleneck, RunMetrics, StageFinding

TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
STARVED_SHARE: Final = 0.20
WAIT_SHARE: Final = 0.05
PACKING: Final = 0.90
COMMIT_SHARE: Final = 0.10
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
        if starved > STARVED_SHARE or waited / telemetry.span_s > WAIT_SHARE:
            share = min(1.0, waited / total_s)
            detail = f"{100 * starved:.0f} % of batches starved; {100 * share:.0f} % of the time spent waiting"
            advice = "raise num_workers or prefetch_factor, or give the loaders more cores"
            yield Bottleneck(kind="loader", share=share, detail=detail, advice=advice)
    if telemetry is not None and telemetry.packing_efficiency is not None and telemetry.packing_efficiency <= PACKING:
        packing = telemetry.packing_efficiency
        detail = f"packing efficiency {100 * packing:.1f} %: the rest of the slots is computed in vain"
        advice = "raise token_budget or shard_tokens: fewer half-empty last batches"
        yield Bottleneck(kind="packing", share=encoders * (1.0 - packing), detail=detail, advice=advice)
    if telemetry is not None and telemetry.busy and telemetry.span_s:
        # commits run beside the next shard's compute: they can have cost no more than the time devices stood still
        idle = telemetry.span_s - sum(b.busy_s for b in telemetry.busy) / len(telemetry.busy)
        commit = sum(b.commit_s for b in telemetry.busy) / len(telemetry.busy)
        share = min(1.0, min(idle, commit) / total_s)
        if share > COMMIT_SHARE:
            detail = f"a device stands still for {idle:.0f} s of the embedding, and its commits take {commit:.0f} s"
            advice = "put the run directory on a faster disk, or raise shard_tokens"
            yield Bottleneck(kind="commit I/O", share=share, detail=detail, advice=advice)
    slow = {stage: share for stage, share in run.stage_shares.items() if stage not in GPU_STAGES}
    if (share := sum(slow.values())) > TIME_SHARE:
        worst = max(slow, key=slow.__getitem__)
        detail = f"stages off the GPU take {100 * share:.0f} % of the time, {worst} most"
        yield Bottleneck(kind="CPU stage", stage=worst, share=share, detail=detail, advice=STAGE_ADVICE[worst])
