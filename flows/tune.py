"""The sweep over engine settings: which are fastest here, with these weights and reads."""

from virnuc.flows.preflight import preflight
from virnuc.flows.settings.tune import TuneSettings
from virnuc.flows.shared_steps import stage_reads_of
from virnuc.flows.sweep import sweep_all
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.running_mark import announce
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.profiles import load_profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.rundir import RunDir, discard
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.tune import Recommendation, Sweep, make_candidates, require_enough_reads


def tune(settings: TuneSettings) -> Outcome[Recommendation]:
    """Find the fastest engine settings that do not change the results.

    They are measured for this machine, these weights and these reads.

    Measurements that the output directory holds are used again, unless `force` is set.

    Returns:
        An outcome with the recommendation, named `Reused` if nothing had to be measured.

    Raises:
        VirnucError: The settings cannot be used, or no candidate can run.
    """
    profile = load_profile(settings.profile)
    devices = preflight(settings)
    # The present settings are the first candidate, with which all others are compared.
    base = resolve_engine(settings.engine(), resolve(devices))
    candidates = make_candidates(base, settings.swept())
    label = sample_name(settings.all_inputs)
    announce(label, profile.name, devices.kind)
    staging = stage_reads_of(settings, label)
    require_enough_reads(staging.counts.n_reads, profile)

    bench = Bench(RunDir(settings.out).store, settings.models, devices, profile.sample_s)
    sweep = Sweep(settings.out, bench, base, profile, settings.repeats, settings.search)
    if settings.force:
        # Earlier measurements: the scores and the record of each trial.
        discard(settings.out, "trials/*.npy", "trials/*-[0-9]*/trial.json")
    recommendation = sweep_all(sweep, candidates, label)

    trials = [trial for candidate in candidates for trial in candidate.trials]
    all_reused = all(trial.reused for trial in trials)
    summary = recommendation.reason
    if all_reused:
        summary += "; nothing had to be measured"
    return completed(recommendation, summary, reused=all_reused)
