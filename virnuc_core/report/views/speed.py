"""Views of how fast a run was: scaling, stages, throughput, efficiency and cost."""

from collections.abc import Sequence
from typing import Final

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.report.model import (
    EncoderMetrics,
    Report,
    RunMetrics,
    ScalingMetrics,
    Verdict,
    efficiency_target,
)
from virnuc_core.report.sections import Row, Section, Table, with_columns_of_first
from virnuc_core.report.text import (
    NOT_MEASURED,
    Mark,
    Number,
    number,
    percent,
    round_beside_target,
    stage_text,
    target_text,
)
from virnuc_core.telemetry.tables import (
    GPU_STAGES,
    OVERLAPPED,
    OVERLAPPED_TITLE,
    ROWS,
    STAGES,
)
from virnuc_core.validation import OverheadFile

NOT_RUN: Final[Verdict] = "not run"


# --- Scaling --------------------------------------------------------------------------------------


def scaling_rows(report: Report) -> list[Row]:
    """Return time, speed-up and verdict by number of devices.

    Numbers of devices for which nothing can be said have a row with the reason.
    """
    rows: list[Row] = []
    for figure in report.scaling:
        criterion = figure.judged
        row: Row = {
            "GPUs": figure.num_gpus,
            "Time": number(figure.time_seconds, 1, " s"),
            "Runs": measured_runs(figure.times_s),
            "Speedup": speedup_text(figure),
            "Efficiency": efficiency_text(figure),
            PROTEIN.title: number(figure.protein_scaling, 2, "x"),
            DNA.title: number(figure.dna_scaling, 2, "x"),
            "Required": None,
            "Verdict": None,
            "Why": "",
        }
        if criterion is not None:
            row["Required"] = Number(target_text(criterion.target, criterion.unit))
            row["Verdict"] = Mark(criterion.verdict)
            row["Why"] = criterion.reason
        rows.append(row)
    for num_devices, reason in unmeasured_device_counts(report).items():
        rows.append({"GPUs": num_devices, "Verdict": Mark(NOT_RUN), "Why": f"skipped: {reason}"})
    return with_columns_of_first(rows)


def speedup_text(figure: ScalingMetrics) -> str:
    """Return the speed-up on a number of devices as every form of the report shows it: `1.58x`."""
    target = None if figure.judged is None else figure.judged.target
    return Number(f"{round_beside_target(figure.speedup, 2, target)}x")


def efficiency_text(figure: ScalingMetrics) -> str:
    """Return the scaling efficiency as every form of the report shows it: `79.0%`."""
    target = None if figure.judged is None else figure.judged.target
    limit_percent = efficiency_target(target, figure.num_gpus)
    efficiency_percent = round_beside_target(100 * figure.efficiency, 1, limit_percent)
    return Number(f"{efficiency_percent}%")


def measured_runs(times_s: Sequence[float]) -> str:
    """Return a text on the runs behind a time: `one run`, or `median of 3 runs, 9.9 to 10.2 s`."""
    if len(times_s) == 1:
        return "one run"
    shortest = number(min(times_s))
    longest = number(max(times_s))
    return f"median of {len(times_s)} runs, {shortest} to {longest} s"


def unmeasured_device_counts(report: Report) -> dict[int, str]:
    """Return the device counts for which no scaling can be given, with the reasons.

    Either the run had no valid time, or the profile asks for more devices than any run had.
    """
    reasons = {}
    for run in report.runs:
        if run.untimed:
            reasons[len(run.devices)] = run.untimed
    most_devices = max((len(run.devices) for run in report.runs), default=0)
    for num_devices in sorted(int(count) for count in report.profile.scaling_bands):
        if most_devices > 0 and num_devices > most_devices:
            reasons[num_devices] = f"there were {most_devices} devices"
    return reasons


# --- Runs and stages ------------------------------------------------------------------------------


def runs_section(report: Report) -> Section:
    """Return the section on times, counts and attempts of the runs."""
    attempts = Table(attempt_rows(report.runs), "Attempts")
    return Section("Runs", tables=[Table(run_rows(report)), attempts])


def run_rows(report: Report) -> list[Row]:
    """Return times and counts of each run."""
    projection_column = f"Projected {report.profile.projection_reads:,}"
    return [
        {
            "Run": run.name,
            "Devices": run.label,
            "Total": number(run.total_s, 2, " s"),
            "Staging": number(run.staging_s, 2, " s"),
            "Rest": number(run.wall_s, 2, " s"),
            "Reads": run.n_reads,
            "Rows": run.n_rows,
            "Distinct": run.n_uniques,
            "Reads/s": number(run.reads_per_s),
            projection_column: number(run.hours_projected, 2, " h"),
            "Precision": run.precision,
            "Resumed": "yes" if run.resumed else "no",
            "Restarts": run.restarts,
            "Errors in logs": run.log_errors,
        }
        for run in report.runs
    ]


def attempt_rows(runs: Sequence[RunMetrics]) -> list[Row]:
    """Return a table row for each attempt of the runs that were interrupted and started again.

    As in the table of the runs, "Rest" is the time without staging.
    """
    rows: list[Row] = []
    for run in runs:
        if len(run.attempts) < 2:
            continue
        for attempt in run.attempts:
            rows.append(
                {
                    "Run": run.name,
                    "Started": attempt.started,
                    "Rest": number(attempt.wall_s, 2, " s"),
                    "First batch to last commit": number(attempt.worked_s, 2, " s"),
                    "Shards": attempt.shards,
                    "Deaths": "; ".join(attempt.deaths) or "none",
                    "Telemetry": attempt.telemetry or "none",
                }
            )
    return rows


def stage_time_rows(runs: Sequence[RunMetrics]) -> list[Row]:
    """Return the time of each stage, with a column for each run.

    The nine stages and the total always have a row, other rows where a run has measured them.
    """
    if not runs:
        return []
    # A column is named by the devices or, if two runs had the same ones, by the folder of the run.
    labels = [run.label for run in runs]
    labels_are_unique = len(set(labels)) == len(labels)
    stages = {*STAGES, "Total"}
    for run in runs:
        stages.update(run.stages)
    rows: list[Row] = []
    for stage in (*ROWS, "Total"):
        if stage not in stages:
            continue
        title = OVERLAPPED_TITLE if stage == OVERLAPPED else stage
        row: Row = {"Stage": title}
        for run in runs:
            column = run.label if labels_are_unique else run.name
            row[column] = Number(stage_text(run, stage))
        rows.append(row)
    return rows


# --- Efficiency and cost --------------------------------------------------------------------------


def efficiency_rows(report: Report) -> list[Row]:
    """Return the facts of efficiency and cost as a table."""
    facts = efficiency_facts(report)
    return [{"What": title, "Value": str(value)} for title, value in facts.items()]


def efficiency_facts(report: Report) -> dict[str, str]:
    """Return facts on efficiency and cost: use of the devices, cost per million reads, overhead.

    MFU (model FLOPs utilisation) is the share of the possible speed that an encoder reached.

    Returns:
        The facts by their title. What was not measured is `not run`.
    """
    run = report.run
    facts: dict[str, str] = {}
    for encoder_id, title in reversed(GPU_STAGES.items()):  # begin with the protein encoder
        encoder = None
        if run is not None and run.telemetry is not None:
            encoder = run.telemetry.encoder(encoder_id)
        facts[f"MFU of {title}"] = _mfu_text(encoder)

    on_cpu = run is not None and run.devices and run.devices[0].kind == "cpu"
    device_hours = "Core-hours" if on_cpu else "GPU-hours"
    hours = energy = price = joules = None
    if run is not None:
        hours = number(run.device_hours_per_million, 3)
        energy = number(run.kwh_per_million, 3)
        price = number(run.price_per_million, 2)
        if run.telemetry is not None:
            joules = number(run.telemetry.joules_per_million_tokens, 0)
    facts[f"{device_hours} per million reads"] = hours or NOT_RUN
    facts["kWh per million reads"] = energy or NOT_RUN
    facts[f"J per million {PROTEIN.title} tokens"] = joules or NOT_MEASURED
    facts["Price per million reads"] = price or NOT_RUN
    if report.profile.price_per_device_hour is None:
        facts["Price per million reads"] = "not run (the profile gives no price)"
    facts["Checkpoint overhead"] = overhead_text(report.overhead)
    # Measured on request only, so that no report says "not run" of it.
    if report.overhead is not None and report.overhead.persistent_models_speedups:
        facts["Persistent models"] = persistent_models_text(report.overhead)
    return facts


def persistent_models_text(overhead: OverheadFile) -> str:
    """Return what it saves that workers keep their models, from pairs of runs that tell.

    The times as fast are against workers that load their models once more halfway: `1.31x as fast
    as loading once more halfway (median of 3 pairs of runs, 1.22 to 1.40x)`.
    """
    speedups = overhead.persistent_models_speedups  # ascending
    speedup = number(overhead.persistent_models_speedup, 2, "x")
    spread = f"{speedups[0]:.2f} to {speedups[-1]:.2f}x"
    pairs = f"median of {len(speedups)} pairs of runs, {spread}"
    return f"{speedup} as fast as loading once more halfway ({pairs})"


def _mfu_text(encoder: EncoderMetrics | None) -> str:
    """Return an encoder's speed as a share of the measured ceiling and of the data sheet."""
    if encoder is None:
        return NOT_RUN
    of_ceiling = percent(encoder.mfu_of_ceiling, unit="%")
    of_datasheet = percent(encoder.mfu_of_datasheet, unit="%")
    if of_ceiling is None and of_datasheet is None:
        return NOT_RUN
    return f"measured ceiling {of_ceiling or NOT_RUN}, datasheet {of_datasheet or NOT_RUN}"


def overhead_text(overhead: OverheadFile | None) -> str:
    """Return what commits cost: `1.2% (median of 3 pairs of runs, 0.9 to 1.4%)`."""
    if overhead is None:
        return NOT_RUN
    shares = overhead.commit_overheads  # sorted
    if overhead.median is None:
        return f"{NOT_RUN} ({overhead.problem})" if overhead.problem else NOT_RUN
    lowest = f"{100 * shares[0]:.1f}"
    highest = f"{100 * shares[-1]:.1f}%"
    spread = f"median of {len(shares)} pairs of runs, {lowest} to {highest}"
    if overhead.problem:
        spread += f"; {overhead.problem}"
    return f"{100 * overhead.median:.1f}% ({spread})"
