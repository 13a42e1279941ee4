"""Rounds of tuning within a validation: when a speed was missed, the settings that it depends on
are swept.
"""

from pathlib import Path
from typing import Final

from virnuc.flows.settings.tune import KNOBS
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.flows.sweep import sweep_all
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.reads.sources import sample_name
from virnuc_core.report.criteria import CORRECTNESS
from virnuc_core.report.model import Report
from virnuc_core.report.raw_files import run_names
from virnuc_core.rundir import RUN_FILES, RunDir, discard
from virnuc_core.runfiles import RunRecord, write
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.tune import Recommendation, Sweep, make_candidates
from virnuc_core.validation import TUNING, TuningFile, TuningRound, read_usable

TUNED_TOKENS: Final = 4_000_000  # of each trial; a minute or so on a GPU
TUNED_REPEATS: Final = 2


def tuned_engine(out: Path, engine: EngineSpec) -> EngineSpec:
    """Return the engine settings with which a validation goes on.

    They are those that the last successful round of tuning has recommended. Runs that were made
    with other settings are removed, so that they are made again with these.

    Args:
        out: The directory of the validation.
        engine: The settings that the user asked for.

    Returns:
        The settings. If no round was successful, it is `engine`, and nothing is removed.
    """
    recommended_engine = None
    for tuning_round in _earlier_rounds(out):
        if tuning_round.engine:
            recommended_engine = tuning_round.engine
    if recommended_engine is None:
        return engine
    for name in run_names(out):
        record = read_usable(RunDir(out / name).record, RunRecord)
        if record is not None and record.spec.get("engine") != recommended_engine:
            discard(out / name, *RUN_FILES)
    return EngineSpec.model_validate(recommended_engine)


def tune_round(settings: ValidateSettings, report: Report) -> TuningRound | None:
    """Try out engine settings that may lessen the largest loss of time, on a part of the reads.

    The report names kinds of lost time, such as waiting for the loader, with the largest first. For
    some kinds there are settings (knobs) that may lessen them. The round is added to `tuning.json`.

    Args:
        settings: The settings of the validation.
        report: The report on the runs so far.

    Returns:
        The round. None if no criterion of speed was missed, if the round before found nothing
        better, or if all rounds that were asked for are done.
    """
    out = settings.out
    earlier = _earlier_rounds(out)
    # No setting that is swept changes what is correct.
    missed_criteria = [
        criterion for criterion in report.failed_criteria if criterion.perf_id != CORRECTNESS
    ]
    if not missed_criteria or len(earlier) >= settings.tune_rounds:
        return None
    if earlier and earlier[-1].engine is None:
        # The last round found nothing better, and another one would find the same.
        return None

    remarks = []
    engine = None  # better settings, if any are found
    # The largest loss that settings may lessen.
    loss = next((loss for loss in report.losses if loss.kind in KNOBS), None)
    if loss is not None:
        recommendation = _sweep_knobs(settings, report, loss.kind)
        knobs = ", ".join(KNOBS[loss.kind])
        remarks.append(f"against {loss.kind}, {knobs} were swept: {recommendation.reason}")
        if recommendation.candidate.number:  # number 0 are the present settings
            engine = recommendation.candidate.engine.model_dump(mode="json")
    for other_loss in report.losses:
        if other_loss.kind not in KNOBS:
            remarks.append(f"no setting mends {other_loss.kind} ({other_loss.advice})")

    titles = tuple(criterion.title for criterion in missed_criteria)
    tuning_round = TuningRound(missed=titles, outcome="; ".join(remarks), engine=engine)
    write(out / TUNING, TuningFile(rounds=(*earlier, tuning_round)))
    return tuning_round


def _earlier_rounds(out: Path) -> tuple[TuningRound, ...]:
    """Return the rounds that `tuning.json` holds. Without a usable file there are none."""
    file = read_usable(out / TUNING, TuningFile)
    if file is None:
        return ()
    return file.rounds


def _sweep_knobs(settings: ValidateSettings, report: Report, loss_kind: str) -> Recommendation:
    """Measure the settings that may reduce one kind of lost time, and recommend the fastest.

    Args:
        settings: The settings of the validation.
        report: The report, whose profile says how exact the results must stay.
        loss_kind: The kind of lost time, a key of `KNOBS`.
    """
    out = settings.out
    devices = Devices.parse(settings.devices)
    base = resolve_engine(tuned_engine(out, settings.engine()), resolve(devices))
    bench = Bench(RunDir(out).store, settings.models, devices, report.profile.sample_s)
    sweep = Sweep(out, bench, base, report.profile, TUNED_REPEATS, "halving", tokens=TUNED_TOKENS)
    candidates = make_candidates(base, KNOBS[loss_kind])
    return sweep_all(sweep, candidates, sample_name(settings.all_inputs))
