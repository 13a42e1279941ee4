"""The files that a sweep of settings writes: `tune.json` and `settings.toml`."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, Self

from virnuc_core.config import EngineSpec
from virnuc_core.runfiles import Device, RunFile, now, versions
from virnuc_core.tools.tune import Candidate, Recommendation, Sweep, Trial, Verdict


class CandidateResult(RunFile):
    """What was measured of one set of settings."""

    number: int
    changes: dict[str, Any]  # against the base
    # The next four have the names of VirNucPro's parameter sweep.
    config: dict[str, Any]  # all settings that this sweep changes, with their values
    elapsed_sec: float | None  # of the last trial, as the next one
    throughput_tokens_per_sec: float | None  # median
    gpu_utilization: float | None  # percent, of the least used device; None on a CPU
    queue_depth: int  # batches that may be ready in advance
    tokens_per_s: tuple[float, ...]  # of each trial
    median_tokens_per_s: float | None
    spread: float | None  # of the trials, as a share of the median
    verdict: Verdict
    dropped: bool  # slower than half of the others after a round
    reason: str  # why these settings cannot run here
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, candidate: Candidate, tolerance: float, swept: Collection[str]) -> Self:
        """Return what was measured of a candidate, as it is written to the file.

        Args:
            candidate: One set of settings, with its trials.
            tolerance: How much its scores may differ from those of the base settings.
            swept: Names of the settings that differ between the candidates of the sweep.
        """
        last_trial = candidate.trials[-1] if candidate.trials else None
        spread = None  # a single trial does not tell it
        if len(candidate.rates) > 1:
            spread = candidate.spread
        return cls(
            number=candidate.number,
            changes=candidate.changes,
            config=candidate.engine.model_dump(mode="json", include=set(swept)),
            elapsed_sec=None if last_trial is None else last_trial.span_s,
            throughput_tokens_per_sec=candidate.rate or None,
            gpu_utilization=None if last_trial is None else last_trial.utilisation,
            queue_depth=candidate.queue_depth,
            tokens_per_s=candidate.rates,
            median_tokens_per_s=candidate.rate or None,  # it is 0 without a trial
            spread=spread,
            verdict=candidate.verdict(tolerance),
            dropped=candidate.is_dropped,
            reason=candidate.refusal_reason,
            trials=tuple(candidate.trials),
        )


class RecommendedSettings(RunFile):
    """The settings to use, and what speaks for them."""

    number: int  # of the candidate
    engine: EngineSpec
    gain: float  # over the base, as a share
    reason: str


class TuneFile(RunFile):
    """`tune.json`: every trial of a sweep, what they were made on, and how they were judged."""

    schema_version: int = 1
    created: str
    profile: str
    score_tolerance: float
    search: Literal["halving", "grid"]
    devices: tuple[Device, ...]
    cores: int
    versions: dict[str, str]
    base: EngineSpec
    candidates: tuple[CandidateResult, ...]
    recommended: RecommendedSettings


def tune_file(
    sweep: Sweep,
    candidates: Sequence[Candidate],
    recommendation: Recommendation,
    *,
    devices: Sequence[Device],
    cores: int,
) -> TuneFile:
    """Return the content of `tune.json`, the record of a sweep.

    A sweep measures several sets of engine settings, its candidates, and recommends one.

    Args:
        sweep: How the candidates were measured.
        candidates: All candidates with their trials.
        recommendation: The candidate that was recommended, and why.
        devices: The devices that the candidates were measured on.
        cores: The cores that this process may use.
    """
    best = recommendation.candidate
    tolerance = sweep.profile.score_tolerance
    swept = {name for candidate in candidates for name in candidate.changes}
    return TuneFile(
        created=now(),
        profile=sweep.profile.name,
        score_tolerance=tolerance,
        search=sweep.search,
        devices=tuple(devices),
        cores=cores,
        versions=versions(),
        base=sweep.base,
        candidates=tuple(
            CandidateResult.of(candidate, tolerance, swept) for candidate in candidates
        ),
        recommended=RecommendedSettings(
            number=best.number,
            engine=best.engine,
            gain=recommendation.gain,
            reason=recommendation.reason,
        ),
    )


def tune_json(content: TuneFile) -> str:
    """Return the text of `tune.json`."""
    return json.dumps(content.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"


def settings_toml(recommendation: Recommendation, names: Iterable[str]) -> str:
    """Return the text of `settings.toml`, which `--settings` of any flow reads.

    Args:
        recommendation: The recommended settings, and why.
        names: The settings to write, which are those that a sweep may change.
    """
    settings = recommendation.candidate.engine.model_dump(mode="json")
    reason = recommendation.reason.replace("\n", " ")
    lines = [
        f"# {reason}; see tune.json",
        "# Use with --settings of any flow. A setting given beside it wins; "
        "one left out is the profile's.",
    ]
    # Texts, numbers and true and false are written alike in JSON and in TOML.
    lines += [f"{name} = {json.dumps(settings[name])}" for name in names]
    return "\n".join(lines) + "\n"
