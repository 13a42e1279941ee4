"""Where the time of a run goes, and what would help.

Two rules point at stages: those that take over 30 % of the time, and GPU stages that keep a GPU
less than 80 % busy. The protein encoder always takes over 30 %. While its GPU is busy that is
expected, and only the rest is worth a person's time.

The bottleneck is the largest avoidable loss of time, by class. Each loss says what removing all of
it would save at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from virnuc_core.encoder_names import DNA, NAMES, PROTEIN
from virnuc_core.report.model import Bottleneck, EncoderMetrics, RunMetrics
from virnuc_core.telemetry.tables import GPU_STAGES, OVERLAPPED, STAGES, START_UP

UNKNOWN_LOSS: Final = "unknown"  # nothing was measured that tells where the time went
# Kinds of loss that settings may lessen: those with values to try in `flows/settings/tune.py`
TUNABLE_LOSSES: Final = frozenset({"loader", "packing", "GPU compute", "commits"})
TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
MIN_RELEVANT_SHARE: Final = 0.05  # of the whole time; a smaller loss is not worth a person's time
LONG_RUN_S: Final = 600.0
DEVICE_IDLE: Final = "Device idle"

# What helps where the encoders do their work well: in a run too short to judge its devices by, and
# in any other; and what helps where a GPU idles.
SHORT_RUN_ADVICE: Final = (
    "the encoders are at work, and a run this short says little of the devices"
)
LONG_RUN_ADVICE: Final = (
    "the encoders are at work: more or faster GPUs, or a lower precision that validation has passed"
)
IDLE_GPU_ADVICE: Final = (
    "the GPU idles while this stage runs: look at waits, batch sizes and the host's cores"
)
CPU_BOUND_ADVICE: Final = (
    "the GPU idles while the CPU is at its limit: give the run more cores, or raise num_workers"
)
PACKING_ADVICE: Final = "raise token_budget or shard_tokens"


@dataclass(frozen=True, slots=True)
class LossClass:
    """A class of lost time: the rows of the stage table that it is made of, and what helps."""

    kind: str
    rows: tuple[str, ...]
    advice: str


LOSS_CLASSES: Final = (
    LossClass(
        "start-up",
        ("Preparation", *START_UP, "Shutdown"),
        "give one run more reads; weights on a local disk",
    ),
    LossClass(
        "staging",
        (
            "Sequence Chunking",
            "Six-Frame Translation",
            "Nucleotide Splitting",
            "Protein Splitting",
            "Rest of staging",
        ),
        "raise the staging workers; reads on a local disk or decompressed",
    ),
    LossClass(
        "loader",
        ("Waiting for batches",),
        "raise num_workers or prefetch_factor, or give the loaders more cores",
    ),
    LossClass(
        "commits",
        ("Commits",),
        "put the run directory on a faster disk, or raise shard_tokens",
    ),
    LossClass(
        "results",
        ("Model Prediction", "Consensus Scoring", "Result files"),
        "result files on a local disk",
    ),
    LossClass(
        "retries",
        ("Restarts", "Earlier attempts: lost"),
        "the deaths in summary.json and the workers' logs say why",
    ),
)
# The time of these passes while the reads are staged, or the other way round
OVERLAPPING_CLASSES: Final = ("start-up", "staging")

STAGE_ADVICE: Final = {
    row: loss_class.advice for loss_class in LOSS_CLASSES for row in loss_class.rows
} | {
    DNA.title: "raise dna_token_budget; check that it runs on every GPU",
    PROTEIN.title: "raise token_budget; check precision and attention backend",
    "Feature Merging": "merging should be fused with embedding: check the engine's version",
}


@dataclass(frozen=True, slots=True, order=True)
class Loss:
    """Time that is lost. Losses are ordered by what removing them would save."""

    saves_s: float
    kind: str
    detail: str
    advice: str
    is_expected: bool = False  # the encoders do their work well


@dataclass(frozen=True, slots=True)
class StageBottleneck:
    """A stage that takes much time or leaves a GPU idle, and what helps."""

    stage: str
    share: float  # of the whole time, 0 to 1
    gpu_percent: float | None  # utilisation of the least used GPU; None for stages without one
    is_expected: bool  # the protein encoder at work, which is no reason to act
    advice: str

    @property
    def sentence(self) -> str:
        """Return the bottleneck as a sentence."""
        busy = ""
        if self.gpu_percent is not None:
            busy = f", the lowest GPU {self.gpu_percent:.1f} % busy"
        word = "expected" if self.is_expected else "actionable"
        share = f"{100 * self.share:.1f} %"
        return f"{self.stage} takes {share} of the time{busy} ({word}): {self.advice}."


def stage_bottlenecks(run: RunMetrics | None) -> tuple[StageBottleneck, ...]:
    """Return the stages that take much time or leave a GPU idle.

    Two rules choose the stages: more than 30 % of the time (`TIME_SHARE`), or a GPU that is less
    than 80 % busy (`BUSY_PERCENT`). The protein encoder always takes much time. That is called
    expected as long as it keeps its GPU busy. All others are called actionable.

    Returns:
        The stages, that with the largest share of the time first. Nothing without a run, or without
        its total time.
    """
    if run is None:
        return ()
    bottlenecks = []
    for stage in STAGES:
        share = run.stage_shares.get(stage, 0.0)
        gpu_percent = stage_gpu_percent(run, stage)
        is_idle = gpu_percent is not None and gpu_percent < BUSY_PERCENT
        if share <= TIME_SHARE and not is_idle:
            continue
        is_expected = stage == PROTEIN.title and not is_idle
        if is_expected:
            advice = _advice_for_busy_encoders(run)
        elif is_idle:
            advice = _advice_for_idle_gpus(run)
        else:
            advice = STAGE_ADVICE[stage]
        bottlenecks.append(StageBottleneck(stage, share, gpu_percent, is_expected, advice))
    bottlenecks.sort(key=lambda bottleneck: bottleneck.share, reverse=True)
    return tuple(bottlenecks)


def stage_findings(run: RunMetrics | None) -> tuple[str, ...]:
    """Return a sentence on each stage that `stage_bottlenecks` names, in its order."""
    return tuple(bottleneck.sentence for bottleneck in stage_bottlenecks(run))


def stage_gpu_percent(run: RunMetrics, stage: str) -> float | None:
    """Return the utilisation of the least used GPU in a GPU stage, or `None` for other stages."""
    if run.telemetry is None:
        return None
    for encoder in NAMES:
        if encoder.title == stage:
            return run.telemetry.lowest_percent(encoder.molecule)
    return None


def _advice_for_busy_encoders(run: RunMetrics) -> str:
    """Return the advice for a run whose encoders keep the GPUs busy."""
    if (run.total_s or 0.0) >= LONG_RUN_S:
        return LONG_RUN_ADVICE
    return SHORT_RUN_ADVICE


def _advice_for_idle_gpus(run: RunMetrics) -> str:
    """Return the advice for a run whose GPUs idle. It depends on what the CPU did meanwhile."""
    starvation = None if run.telemetry is None else run.telemetry.starvation
    if starvation is not None and starvation.verdict == "CPU is the bottleneck":
        return CPU_BOUND_ADVICE
    return IDLE_GPU_ADVICE


def rank_losses(run: RunMetrics | None) -> tuple[Bottleneck, ...]:
    """Return the avoidable losses of time of a run, the largest first.

    A loss is time that a change could save at most, such as time in which a device waits. A loss is
    marked as expected if no change is advised: it is too small to be worth a person's time, or the
    encoders keep their devices busy.

    Returns:
        The losses above 0. If there is nothing to rank, one entry of the kind "unknown" that says
        why.
    """
    if run is None or not run.total_s:
        return (Bottleneck(kind=UNKNOWN_LOSS, detail="no run was timed", advice="run validate"),)
    seconds_of_row = {row: seconds for row, seconds in run.stages.items() if seconds}
    losses = list(_losses_of_computing(run, seconds_of_row))
    losses += [_loss_of_class(loss_class, seconds_of_row) for loss_class in LOSS_CLASSES]

    ranked = []
    for loss in sorted(losses, reverse=True):  # by the seconds that each would save
        share = loss.saves_s / run.total_s
        if share > 0:
            bottleneck = Bottleneck(
                kind=loss.kind,
                detail=loss.detail,
                advice=loss.advice,
                saves_s=loss.saves_s,
                share=share,
                expected=loss.is_expected or share < MIN_RELEVANT_SHARE,
            )
            ranked.append(bottleneck)
    if not ranked:
        advice = "look at the log of the run"
        return (Bottleneck(kind=UNKNOWN_LOSS, detail="no stage was measured", advice=advice),)
    return tuple(ranked)


def _loss_of_class(loss_class: LossClass, seconds_of_row: Mapping[str, float]) -> Loss:
    """Return the loss of one class: the sum of the rows of the stage table that belong to it.

    The rows with a noticeable share of the sum are named in the detail, the longest first.

    Args:
        loss_class: Names the rows, and says what helps.
        seconds_of_row: The seconds of each row of the stage table that was measured.
    """
    rows = [(seconds_of_row[row], row) for row in loss_class.rows if row in seconds_of_row]
    rows.sort(reverse=True)
    total_s = sum(seconds for seconds, _ in rows)
    parts = []
    for seconds, row in rows:
        if seconds > MIN_RELEVANT_SHARE * total_s:
            parts.append(f"{row} {seconds:.1f} s")
    # Staging and start-up run at the same time. Removing one of them alone does not save the time
    # in which both run.
    hidden_s = 0.0
    if loss_class.kind in OVERLAPPING_CLASSES:
        hidden_s = seconds_of_row.get(OVERLAPPED, 0.0)
    return Loss(total_s - hidden_s, loss_class.kind, ", ".join(parts), loss_class.advice)


def _losses_of_computing(run: RunMetrics, seconds_of_row: Mapping[str, float]) -> tuple[Loss, Loss]:
    """Return two losses of time while devices compute: slow computing, and empty token slots.

    A batch has a fixed number of token slots. Slots without a token (bad packing) are computed for
    nothing. The speed on the other slots is compared with the ceiling, the measured speed of the
    linear layers alone. If no ceiling was measured, it is compared with a utilisation of 100 %.

    Args:
        run: The run.
        seconds_of_row: The seconds of each row of the stage table that was measured.
    """
    idle_s = seconds_of_row.get(DEVICE_IDLE, 0.0)
    slow_s = idle_s
    empty_s = 0.0
    is_any_gpu_idle = False
    details = [f"a device stands still for {idle_s:.1f} s"]
    encoders: tuple[EncoderMetrics, ...] = run.telemetry.encoders if run.telemetry else ()
    for encoder in encoders:
        stage = GPU_STAGES[encoder.encoder]
        stage_s = seconds_of_row.get(stage, 0.0)
        packing = encoder.packing_efficiency or 1.0  # share of the slots with a token
        speed = 1.0  # as a share of the possible speed
        gpu_percent = stage_gpu_percent(run, stage)
        if gpu_percent is not None:
            speed = gpu_percent / 100.0
            is_any_gpu_idle = is_any_gpu_idle or gpu_percent < BUSY_PERCENT
            details.append(f"{stage} keeps the lowest GPU {gpu_percent:.1f} % busy")
        if encoder.mfu_of_ceiling is not None:
            # The ceiling was measured without empty slots. They are counted as a loss of their own,
            # so they are taken out of the speed here.
            speed = encoder.mfu_of_ceiling / packing
            sustained = "of what its linear layers alone sustain"
            details.append(f"{stage} runs at {100 * speed:.0f} % {sustained}")
        empty_s += stage_s * (1.0 - packing)
        slow_s += stage_s * packing * max(0.0, 1.0 - speed)

    # Slow computing is expected unless the larger part of the loss is a device that waits.
    are_encoders_busy = not is_any_gpu_idle and idle_s <= slow_s / 2
    advice = _advice_for_idle_gpus(run)
    if are_encoders_busy:
        advice = _advice_for_busy_encoders(run)
    slow = Loss(slow_s, "GPU compute", "; ".join(details), advice, is_expected=are_encoders_busy)
    empty = Loss(empty_s, "packing", "slots without a token", PACKING_ADVICE)
    return slow, empty
