"""The validation, which proves a release or a machine.

`run_steps` takes the steps. Each is a module in `tasks/` (in brackets):

1. draw or simulate reads, if that is asked for (`drawing`), and stage the reads (`staging`)
2. run the baseline (`baseline`)
3. measure the ceilings of the GPUs (`ceiling`), then run on one device, on two and on all
   (`embedding`)
4. embed a sample in fp32 (`precision`) and measure the cost of commits (`overhead`)
5. compare the runs and the baseline (`comparison`), judge, and write the report (`report`)

Steps 3 to 5 are shared with the scaling curve; their functions are in `flows/measured_runs.py`.
If it was asked for, rounds of tuning follow (`flows/tuning_rounds.py`), and then a reviewer
approves (`flows/approval.py`).

A new step that writes a file also names it in `rundir.VALIDATION_FILES`, and in `record_work` if
every validation of these settings must have it.
"""

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
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.flows.shared_steps import stage_reads_of
from virnuc.flows.tuning_rounds import tune_round
from virnuc.tasks.baseline import measure_baseline
from virnuc.tasks.outcome import Outcome
from virnuc.tasks.report import emit_outcome
from virnuc.tasks.running_mark import announce
from virnuc_core.profiles import load_profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.report import messages
from virnuc_core.report.build import write_report
from virnuc_core.report.model import BASELINE
from virnuc_core.rundir import RunDir


def validate(settings: ValidateSettings) -> Outcome[ValidationResult]:
    """Prove this machine, or a release: run the steps of a validation and judge them by a profile.

    A validation that stopped goes on where it was. One that is complete is judged again without
    computing anything. If the settings ask for it, missed speeds are tuned, and a reviewer is
    waited for.

    Returns:
        The outcome of the flow, with the judgement; a missed criterion is no error here.

    Raises:
        VirnucError: The settings cannot be used, or a step failed.
    """
    settings = with_made_reads(settings)
    judgement = run_steps(settings)
    judgement = tune_and_run_again(settings, judgement)
    report = judgement.report
    emit_outcome(report, settings.out)
    summary = messages.criteria_message(report) + judgement.note
    if not settings.approval:
        return judged_outcome(settings, report, summary)

    from virnuc.flows.approval import ask_reviewer  # it needs Prefect and its server

    approval = ask_reviewer(settings, report)
    summary = f"{summary}; {approval.verdict} by {approval.reviewer}"
    if approval.contradictions:
        summary += f" (contradicts the figures: {'; '.join(approval.contradictions)})"
    return judged_outcome(settings, report, summary, approval.verdict)


def run_steps(settings: ValidateSettings) -> Judgement:
    """Run the steps of a validation, and judge them.

    Finished steps of an earlier attempt are not run again. If there was nothing to compute at all,
    the judgement says that it is about earlier runs (`reused`).
    """
    profile = load_profile(settings.profile)
    label = sample_name(settings.all_inputs)
    preflight(settings)
    finished_before = finished_runs(settings.out)
    with connected_machines(settings) as (spec, machines):
        announce(label, profile.name, machines.local.kind)

        staging = stage_reads_of(settings, label)
        profile = settings.with_baseline(profile)
        work = MeasuredWork(settings.out, label, profile, spec, machines, staging)
        device_counts = machines.device_counts()  # one device, two, all
        record_work(work, device_counts, with_baseline=has_baseline(work))

        is_subset = run_baseline(work)
        names = run_on_each(work, device_counts)
        measure_precision_and_costs(work)
    report = compare_and_report(work, names, settings.history_file, is_subset=is_subset)
    # The summaries of all runs are those of before: no run was computed.
    reused = bool(finished_before) and finished_runs(settings.out) == finished_before
    return Judgement(report, reused)


def has_baseline(work: MeasuredWork) -> bool:
    """Return whether there is a baseline: its results are recorded, or it can be run here."""
    return work.machines.has_local_devices or work.profile.baseline.source == "recorded"


def run_baseline(work: MeasuredWork) -> bool:
    """Run v1.0, or take its recorded results. Without a device to run it on, it is left out.

    Returns:
        Whether the baseline covers only a part of the reads.
    """
    spec = work.profile.baseline
    if not has_baseline(work):
        return False
    run = RunDir(work.out / BASELINE)
    summary = measure_baseline(
        run, work.bench, spec, label=work.label, force=work.spec.force
    ).result()
    return summary.subset is not None


def tune_and_run_again(settings: ValidateSettings, judgement: Judgement) -> Judgement:
    """Tune the settings that a missed speed depends on, and run the steps again with better ones.

    This is repeated as often as the settings ask for, as long as a criterion of speed is missed and
    a round finds something better.

    Args:
        settings: The settings of the validation.
        judgement: The judgement of the runs so far.

    Returns:
        The last judgement. It is the given one if there was no round.
    """
    # `force` has done its work: it would remove the results of the first runs again.
    resuming_settings = settings.model_copy(update={"force": False})
    while True:
        tuning_round = tune_round(resuming_settings, judgement.report)
        if tuning_round is None:  # no round is needed or left
            return judgement
        if tuning_round.engine is None:
            # No setting helps. The report is written again, because it shows the rounds. The next
            # call of `tune_round` returns None.
            report = write_report(settings.out, judgement.report.profile)
            judgement = Judgement(report, judgement.reused)
        else:
            judgement = run_steps(resuming_settings)
