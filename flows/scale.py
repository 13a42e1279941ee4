"""The scaling curve: the same reads on one, two, four and more devices, without a baseline."""

from virnuc.flows.made_reads import with_made_reads
from virnuc.flows.measured_runs import (
    Judgement,
    MeasuredWork,
    compare_and_report,
    connected_machines,
    finished_runs,
    measure_precision_and_costs,
    record_work,
    run_on_each,
)
from virnuc.flows.outcome import ValidationResult, judged_outcome
from virnuc.flows.preflight import preflight
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.shared_steps import stage_reads_of
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.running_mark import announce
from virnuc_core.profiles import load_profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.report import messages


def scale(settings: ScaleSettings) -> Outcome[ValidationResult]:
    """Measure the time of the same reads on more and more devices, and judge it by a profile.

    The results must be equal bit for bit on all numbers of devices, and each measured number of
    devices must lie in its band. Without a baseline, targets about it do not count.

    Returns:
        The outcome of the flow, with the judgement; a missed criterion is no error here.

    Raises:
        VirnucError: The settings cannot be used, or a run failed.
    """
    settings = with_made_reads(settings)
    judgement = run_steps(settings)
    report = judgement.report
    message = messages.scaling_message(report) + judgement.note
    return judged_outcome(settings, report, message, outcome=report.scaling_outcome)


def run_steps(settings: ScaleSettings) -> Judgement:
    """Stage the reads, run them on each number of devices, compare the runs and judge them.

    Runs that are complete already are not repeated. If all are, the judgement says that it is about
    earlier runs (`reused`).
    """
    profile = load_profile(settings.profile)
    label = sample_name(settings.all_inputs)
    preflight(settings)
    finished_before = finished_runs(settings.out)
    with connected_machines(settings) as (spec, machines):
        announce(label, profile.name, machines.local.kind)
        staging = stage_reads_of(settings, label)
        work = MeasuredWork(
            settings.out,
            label,
            profile,
            spec,
            machines,
            staging,
            with_model_loading=settings.persistent_models,
        )
        device_counts = machines.scaling_counts(profile, settings.repeats)
        record_work(work, device_counts)
        names = run_on_each(work, device_counts)
        measure_precision_and_costs(work)
    report = compare_and_report(work, names, settings.history_file)
    # The summaries of all runs are those of before: no run was computed.
    reused = bool(finished_before) and finished_runs(settings.out) == finished_before
    return Judgement(report, reused)
