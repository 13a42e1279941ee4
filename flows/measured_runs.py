"""The steps that a validation and a scaling curve share: runs on several numbers of devices, and
their report.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc.flows.machines import Machines, find_machines
from virnuc.flows.settings.measured import MeasureSettings
from virnuc.flows.tuning_rounds import tuned_engine
from virnuc.tasks.ceiling import measure_ceiling
from virnuc.tasks.comparison import compare_results
from virnuc.tasks.embedding import embed
from virnuc.tasks.overhead import measure_costs
from virnuc.tasks.precision import embed_in_fp32
from virnuc.tasks.report import publish_report, report_validation
from virnuc.tasks.time_limit import TimeLimitError
from virnuc_core.config import ClassifySpec, Switch
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.pipeline import nodes_of, read_summary
from virnuc_core.profiles import Profile
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.report.model import BASELINE, Report
from virnuc_core.report.raw_files import RUN_PREFIX, SUMMARY, run_names
from virnuc_core.rundir import RUN_FILES, SHARD_FILES, RunDir, discard
from virnuc_core.runfiles import ModelFlops
from virnuc_core.system_errors import list_folder, path_exists
from virnuc_core.tools.bench import Bench
from virnuc_core.validation import OVERHEAD, TUNING, record_validation

LOCAL_MEASUREMENTS: Final = "baseline, fp32 sample, ceilings and the cost of commits"
NO_LOCAL_DEVICE: Final = (
    f"this machine has no device as the nodes have: {LOCAL_MEASUREMENTS} were not run"
)


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What the steps of one validation, or of one scaling curve, have in common.

    Attributes:
        out: The directory of the runs and of the report.
        label: The name of the sample, for names in the UI.
        profile: Sizes, thresholds and time limits.
        spec: Settings of the runs. Their `force` drops the results of earlier runs.
        machines: The devices to run on.
        staging: What was staged.
        with_model_loading: Whether it is also measured what workers save by keeping their models.
    """

    out: Path
    label: str
    profile: Profile
    spec: ClassifySpec
    machines: Machines
    staging: StageSummary
    with_model_loading: bool = False

    @property
    def bench(self) -> Bench:
        """Return the same reads and models on this machine's devices.

        Some measurements are never made on a cluster. They use this.
        """
        return Bench(RunDir(self.out).store, self.spec.models, self.machines.local)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A report, and whether all of it was there before: then nothing had to be computed."""

    report: Report
    reused: bool

    @property
    def note(self) -> str:
        """Return words that keep readers from taking old figures for new ones.

        The text is empty if something was computed.
        """
        return "; nothing had to be computed" if self.reused else ""


@contextmanager
def connected_machines(settings: MeasureSettings) -> Iterator[tuple[ClassifySpec, Machines]]:
    """Yield the settings of the runs and their devices.

    If earlier rounds of tuning have recommended other engine settings, the runs use those. A
    cluster stays connected until the body of the `with` statement ends.
    """
    out = settings.out
    if settings.force:
        # Start over: forget what earlier rounds of tuning have recommended.
        (out / TUNING).unlink(missing_ok=True)
    spec = settings.spec(sample_name(settings.all_inputs))
    spec = spec.model_copy(update={"engine": tuned_engine(out, spec.engine)})
    with nodes_of(spec, out) if spec.cluster else nullcontext() as cluster:
        yield spec, find_machines(spec, cluster)


def record_work(
    work: MeasuredWork, device_counts: Sequence[int], *, with_baseline: bool = False
) -> None:
    """Write the record of the validation (`run.json`).

    Some measurements are made on this machine only. If it has no device of the kind that the runs
    use, they are left out, and a remark in the record says so.

    Args:
        work: What is going to be run.
        device_counts: Numbers of devices; one that occurs again is a repetition.
        with_baseline: Whether the baseline is run, or its recorded results are taken.
    """
    remarks = []
    if not work.machines.has_local_devices:
        remarks.append(NO_LOCAL_DEVICE)
    summaries = [f"{name}/{SUMMARY}" for name in _names_of_runs(device_counts)]
    if with_baseline:
        summaries.append(f"{BASELINE}/{SUMMARY}")
    costs = [OVERHEAD] if measured_switches(work) else []
    record_validation(
        work.out,
        work.spec,
        work.profile,
        work.staging,
        work.machines.devices,
        *remarks,
        expected_files=[*summaries, *costs],
    )


def _names_of_runs(device_counts: Sequence[int]) -> list[str]:
    """Return the folder of each run: `devices-2`, and `devices-2.2` for its first repetition."""
    names = []
    times_run: dict[int, int] = {}
    for count in device_counts:
        times_run[count] = times_run.get(count, 0) + 1
        name = f"{RUN_PREFIX}{count}"
        if times_run[count] > 1:
            name += f".{times_run[count]}"
        names.append(name)
    return names


def measured_switches(work: MeasuredWork) -> tuple[Switch, ...]:
    """Return the features whose cost is measured, by runs with and without each of them.

    The cost of commits is measured if the profile has a criterion about it, and that of loading the
    models if the user asks for it. Nothing is measured if this machine cannot do so, or if no read
    has an open reading frame.
    """
    if not work.machines.has_local_devices or not work.staging.counts.n_rows:
        return ()
    switches: list[Switch] = []
    if "checkpoint_overhead" in work.profile.targets:
        switches.append("commits")
    if work.with_model_loading:
        switches.append("models")
    return tuple(switches)


def run_on_each(work: MeasuredWork, device_counts: Sequence[int]) -> tuple[str, ...]:
    """Run the reads on each number of devices.

    The ceilings of the GPUs (how many operations a second they reach at most) are measured first,
    unless all runs are complete.

    Args:
        work: What is run.
        device_counts: Numbers of devices. A number that occurs again is a repetition, of which only
            the measurements are kept.

    Returns:
        Names of the runs that came to an end.
    """
    ceilings = _measure_ceilings(work, device_counts)
    if work.spec.force:
        _discard_runs(work.out)
    for name, count in zip(_names_of_runs(device_counts), device_counts, strict=True):
        run_on_devices(work, name, count, ceilings)
    # The folder may also hold runs on more devices than this machine or cluster has now.
    names = run_names(work.out, max_devices=len(work.machines.devices))
    return tuple(name for name in names if _is_finished(work.out / name))


def run_on_devices(work: MeasuredWork, name: str, count: int, ceilings: ModelFlops | None) -> None:
    """Run the reads on the first `count` devices.

    A run that takes longer than the profile's time limit is ended, and no error is raised here: its
    summary says so, and the report counts it as a failure.

    Args:
        work: What is run.
        name: The folder of the run, such as `devices-2`. A repetition has a further number; of it
            only the measurements are kept.
        count: Number of devices.
        ceilings: The measured ceilings of the GPUs: how many operations a second they reach at
            most. None if there are none.
    """
    is_repetition = "." in name  # the first repetition of devices-2 is devices-2.2
    # A finished repetition has no embeddings any more (see below), so `embed` would compute it
    # again. Any other run keeps its embeddings, and `embed` reuses them itself.
    if is_repetition and _is_finished(work.out / name):
        return
    profile = work.profile
    spec = work.spec.model_copy(update={"devices": work.machines.subset(count)})
    with suppress(TimeLimitError), work.machines.workers(count) as pool:
        embed(
            RunDir(work.out / name),
            work.staging,
            spec,
            label=work.label,
            monitor=RunMonitor(sample_s=profile.sample_s, window_s=profile.window_s),
            time_limit_s=profile.time_limit_s,
            pool=pool,
            flops=ceilings,
        ).result()
        if is_repetition:
            # Only its times are needed. Its embeddings would take much room.
            discard(work.out / name, *SHARD_FILES, "embeddings.h5")


def measure_precision_and_costs(work: MeasuredWork) -> None:
    """Embed a sample in fp32, and measure the cost of commits, where this machine can do so.

    A cluster's own devices are not used for this. The results are written to the directory of the
    validation. `measured_switches` says which costs are measured.
    """
    machines = work.machines
    engine = work.spec.engine
    if machines.has_local_gpus:  # runs on cores are in fp32, so there is nothing to compare
        n_sequences = work.profile.fp32_sequences
        embed_in_fp32(work.out, work.bench, engine, n_sequences, label=work.label).result()

    switches = measured_switches(work)
    if switches:
        force = work.spec.force
        measure_costs(
            work.out, work.bench, engine, label=work.label, force=force, switches=switches
        ).result()


def compare_and_report(
    work: MeasuredWork, names: tuple[str, ...], history: Path, *, is_subset: bool = False
) -> Report:
    """Compare the runs with each other and with the baseline, judge them, and publish the report.

    Args:
        work: What was run.
        names: Names of the runs.
        history: The file to which the line of this validation is added.
        is_subset: Whether the baseline covers only a part of the reads.

    Returns:
        The report, which is also written to the directory of the validation and shown in the UI.
    """
    tolerance = work.profile.score_tolerance
    compare_results(
        work.out, names, tolerance=tolerance, subset=is_subset, label=work.label
    ).result()
    report = report_validation(work.out, work.profile, history=history, label=work.label).result()
    publish_report(report, work.out, work.label)
    return report


def finished_runs(out: Path) -> dict[str, int]:
    """Return the modification time of each run's summary in ns, by the path of the summary.

    A run that is used again keeps its summary. So equal results of this function before and after
    the runs mean that nothing was computed.
    """
    summaries = [run / SUMMARY for run in list_folder(out, f"{RUN_PREFIX}*")]
    return {str(path): path.stat().st_mtime_ns for path in summaries if path_exists(path)}


def _measure_ceilings(work: MeasuredWork, device_counts: Sequence[int]) -> ModelFlops | None:
    """Measure how many operations a second this machine's GPUs reach at most (their ceilings).

    Return None without such GPUs, or if all runs are complete, so that nothing is to be run.
    """
    names = [f"{RUN_PREFIX}{count}" for count in device_counts]
    is_complete = all(_is_finished(work.out / name) for name in names)
    if not work.machines.has_local_gpus or (is_complete and not work.spec.force):
        return None
    bench = Bench(work.staging.store, work.spec.models, work.machines.local)
    return measure_ceiling(work.out, bench, work.spec.engine).result()


def _discard_runs(out: Path) -> None:
    """Remove the results of all earlier runs, also of those that no new run will replace."""
    for name in run_names(out):
        repetitions = run_names(out, f"{name}.")  # such as devices-2.2
        for run in (name, *repetitions):
            discard(out / run, *RUN_FILES)


def _is_finished(run: Path) -> bool:
    """Tell whether a run came to an end, so that it has written its summary."""
    return read_summary(RunDir(run)) is not None
