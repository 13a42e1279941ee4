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


def sweep_all(sweep: Sweep, tried: Sequence[Candidate], label: str) -> Recommendation:
    """Measure all candidates and recommend one.

    Writes `tune.json` and `settings.toml` to the directory of the sweep, and shows a table.

    Args:
        sweep: How the candidates are measured.
        tried: The candidates; their measurements are added to them.
        label: The name of the sample, for names in the UI.
    """
    halving = sweep.search == "halving"
    for candidate, repeat, name in schedule_trials(tried, sweep.repeats, halving=halving):
        trial = run_trial(sweep, candidate, repeat, name=name).result()
        candidate.add(trial)
    recommendation = recommend(tried, tolerance=sweep.profile.score_tolerance)
    _publish_trials(sweep, tried, recommendation, label)
    _write_files(sweep, tried, recommendation)
    return recommendation


def _publish_trials(
    sweep: Sweep, tried: Sequence[Candidate], recommendation: Recommendation, label: str
) -> None:
    """Show the candidates as a table, the fastest first. Those that cannot run stand last."""
    rows = candidate_rows(
        sorted(tried, key=lambda candidate: candidate.rate, reverse=True),
        chosen=recommendation.candidate,
        recommended=Markdown("**recommended**"),
        tolerance=sweep.profile.score_tolerance,
    )
    devices = sweep.bench.devices
    reason = table_cell(recommendation.reason)
    description = Markdown(f"**{reason}** — {table_cell(label)} on {table_cell(devices)}")
    publish_table(host_key(f"tune-{label}-{devices}"), rows, description)


def _write_files(sweep: Sweep, tried: Sequence[Candidate], recommendation: Recommendation) -> None:
    """Write all measurements to `tune.json`, and the recommended settings to `settings.toml`."""
    devices = resolve(sweep.bench.devices)
    n_cores = len(os.sched_getaffinity(0))
    results = tune_file(sweep, tried, recommendation, devices=devices, cores=n_cores)
    write_text_atomically(sweep.out / "tune.json", tune_json(results))
    settings = settings_toml(recommendation, sorted(SWEPT.values()))
    write_text_atomically(sweep.out / "settings.toml", settings)
