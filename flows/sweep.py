"""A sweep over engine settings, as `tune` and the rounds of tuning of a validation make it."""

import os
from collections.abc import Sequence

from virnuc.flows.settings.tune import SWEPT
from virnuc.tasks.artifacts import host_key, publish_table, table_cell
from virnuc.tasks.trial import run_trial
from virnuc_core.engine.devices import resolve
from virnuc_core.markdown import Markdown
from virnuc_core.report.views.tools import candidate_rows
from virnuc_core.rundir import write_text_atomically
from virnuc_core.tools.sweep_files import settings_toml, tune_file, tune_json
from virnuc_core.tools.tune import Candidate, Recommendation, Sweep, recommend, schedule_trials


def sweep_all(sweep: Sweep, candidates: Sequence[Candidate], label: str) -> Recommendation:
    """Measure all candidates (sets of engine settings) and recommend one.

    Writes `tune.json` and `settings.toml` to the directory of the sweep, and shows a table in the
    UI.

    Args:
        sweep: How the candidates are measured.
        candidates: The candidates; their measurements are added to them.
        label: The name of the sample, for names in the UI.
    """
    halving = sweep.search == "halving"
    # With halving, `schedule_trials` looks after each round which candidates are slow, and yields
    # those no more. So a measurement must be added before the next one is asked for.
    for candidate, repeat, name in schedule_trials(candidates, sweep.repeats, halving=halving):
        trial = run_trial(sweep, candidate, repeat, name=name).result()
        candidate.add(trial)
    recommendation = recommend(candidates, tolerance=sweep.profile.score_tolerance)
    _publish_trials(sweep, candidates, recommendation, label)
    _write_files(sweep, candidates, recommendation)
    return recommendation


def _publish_trials(
    sweep: Sweep, candidates: Sequence[Candidate], recommendation: Recommendation, label: str
) -> None:
    """Show the candidates as a table in the UI, the fastest first.

    Those that cannot run have the rate 0, so that they stand last.
    """
    rows = candidate_rows(
        sorted(candidates, key=lambda candidate: candidate.rate, reverse=True),
        chosen=recommendation.candidate,
        recommended=Markdown("**recommended**"),
        tolerance=sweep.profile.score_tolerance,
    )
    devices = sweep.bench.devices
    reason = table_cell(recommendation.reason)
    description = Markdown(f"**{reason}** — {table_cell(label)} on {table_cell(devices)}")
    publish_table(host_key(f"tune-{label}-{devices}"), rows, description)


def _write_files(
    sweep: Sweep, candidates: Sequence[Candidate], recommendation: Recommendation
) -> None:
    """Write all measurements to `tune.json`, and the recommended settings to `settings.toml`."""
    devices = resolve(sweep.bench.devices)
    n_cores = len(os.sched_getaffinity(0))  # cores that this process may use
    results = tune_file(sweep, candidates, recommendation, devices=devices, cores=n_cores)
    write_text_atomically(sweep.out / "tune.json", tune_json(results))
    swept_settings = sorted(SWEPT.values())  # names of all settings that a sweep can change
    settings = settings_toml(recommendation, swept_settings)
    write_text_atomically(sweep.out / "settings.toml", settings)
