"""The texts in fixed layouts: the published report to the byte, what stands beside it, the summary, the benchmark."""

from __future__ import annotations

import json
from typing import Any, Final

from virnuc_core.profiles import Target
from virnuc_core.report.files import BASELINE
from virnuc_core.report.formatting import NOT_RUN, approval_text, cell, fill, near
from virnuc_core.report.model import Report
from virnuc_core.report.views import (
    baseline_title,
    criterion,
    economy,
    overall,
    telemetry_of,
    warnings_of,
)
from virnuc_core.telemetry.live import clock_text

BENCHMARK_SCHEMA: Final = 1
GPU_STATS: Final = ["gpu_util_avg", "gpu_util_min", "gpu_util_max", "mem_used_avg", "mem_used_peak", "sample_count"]
SCALING: Final = {"num_gpus", "time_seconds", "speedup", "efficiency"}


def printed(report: Report) -> str:
    """`report.txt` whole."""
    return printed_block(report) + beside_the_criteria(report)


def printed_block(report: Report) -> str:
    """The block in its fixed layout; every line of it is there, whatever was measured."""
    run, single, baseline = report.run, report.single, report.baseline
    scaled = report.scaling[-1] if report.scaling else None
    criteria = {found.id: found for found in report.criteria}
    target, devices = criteria["scaling"].target, scaled.num_gpus if scaled else 2
    share = Target(op=target.op, value=100.0 * target.value / devices) if target else None
    frames = [c.frames.agreement for c in report.comparisons if c.a == BASELINE and c.frames is not None]
    one_label = single.label if single else "1x device"
    many = run is not None and run is not single and len(run.devices) > 1
    return fill(
        "report.txt.j2",
        run=run,
        criteria=criteria,
        one_label=one_label,
        two_label=run.label if run and many else f"2x {one_label.split('x ', 1)[-1]}",
        efficiency=None if scaled is None else f"{near(100.0 * scaled.efficiency, 1, share)}%",
        efficiency_target=share,
        esm2_scaling=scaled.esm2_scaling if scaled else None,
        dnabert_scaling=scaled.dnabert_scaling if scaled else None,
        baseline_title=baseline_title(report),
        baseline_label=_model_only(baseline.label if baseline else None),
        baseline_time=_time(baseline.seconds if baseline else None),
        how_known=_how_known(report),
        run_label=_model_only(run.label if run else None),
        run_time=_time(run.total_s if run else None),
        frames_agreement=min((value for value in frames if value is not None), default=None),
        score_tolerance=f"{report.profile.score_tolerance:g}",
        overall=overall(report),
    )


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else clock_text(seconds)


def _model_only(label: str | None) -> str:
    """`2x RTX 4090` as `2x 4090`."""
    return "none" if label is None else label.replace("RTX ", "").replace("GTX ", "")


def _how_known(report: Report) -> str:
    baseline = report.baseline
    if baseline is None:
        return NOT_RUN
    if baseline.source == "scaled":
        return f"scaled by tokens from {cell(baseline.subset_reads)} reads"
    known = "known" if baseline.problem is None else "known elsewhere, not used"
    return known if baseline.source == "recorded" else "measured"


def beside_the_criteria(report: Report) -> str:
    """The lines below the block: efficiency, cost, commits, reads, software, approval and warnings."""
    accounts, versions = report.accounting, report.provenance.versions
    reads = NOT_RUN
    if accounts is not None:
        parts = " + ".join(f"{n:,} {name}" for name, n in accounts.fates.items())
        reads = f"{accounts.reads:,} = {parts}{'' if accounts.adds_up else ' (does NOT add up with the run)'}"
    cuda = versions.get("cuda") or versions.get("cuda_driver") or "none"
    software = ", ".join((versions.get("driver") or "none", cuda, versions.get("torch") or "unknown"))
    facts = (("Reads", reads), ("Driver, CUDA, torch", software), ("Approval", approval_text(report.approval)))
    warnings = warnings_of(report)
    return fill("beside.txt.j2", run=report.run, facts=(*economy(report).rows, *facts), warnings=warnings)


def summary(report: Report) -> str:
    """The judged run in words and columns; what was not measured is `n/a`, and what is projected says so."""
    asked = (("two_device_time", "time"), ("gpu_utilisation", "GPU"), ("packing", "packing"))
    requirements = [(criterion(report, name), words) for name, words in asked]
    reads = f"{report.profile.projection_reads:,}"
    return fill("summary.txt.j2", run=report.run, reads=reads, requirements=requirements)


# --- benchmark files, for other tools --------------------------------------------------------------------------------


def benchmark_markdown(report: Report) -> str:
    """The three tables of a benchmark report, and what it took."""
    telemetry = telemetry_of(report)
    return fill(
        "benchmark.md.j2",
        created=report.provenance.created,
        scaling=scaling_results(report),
        devices=telemetry.devices if telemetry else (),
        stages=stage_results(report),
        economy=economy(report).rows,
    )


def scaling_results(report: Report) -> list[dict[str, float]]:
    """One entry a number of devices: `num_gpus`, `time_seconds`, `speedup`, `efficiency`."""
    one = report.single
    alone = one is not None and one.total_s and not one.resumed
    first = {"num_gpus": 1, "time_seconds": one.total_s, "speedup": 1.0, "efficiency": 1.0} if one and alone else {}
    return [*([first] if first else []), *(found.model_dump(include=SCALING) for found in report.scaling)]


def stage_results(report: Report) -> list[dict[str, Any]]:
    """Throughput of each measured stage: reads for chunking and translation, rows after that."""
    found, run = [], report.run
    for place, stage in enumerate(run.stages if run else ()):
        sequences = None if run is None else run.n_reads if place < 2 else run.n_rows
        if stage.seconds is not None and sequences:
            found.append(
                {
                    "stage": stage.name,
                    "total_sequences": sequences,
                    "total_time_seconds": stage.seconds,
                    "throughput_seq_per_sec": sequences / stage.seconds if stage.seconds else None,
                    "avg_time_per_sequence_ms": 1000.0 * stage.seconds / sequences,
                }
            )
    return found


def benchmark_json(report: Report) -> str:
    """The same results for machines, with metadata; null where something was not measured."""
    telemetry, run, made = telemetry_of(report), report.run, report.provenance
    devices = telemetry.devices if telemetry else ()
    mfu = {
        e.encoder: {
            "tokens_per_sec": e.tokens_per_s,
            "ceiling_tokens_per_sec": e.ceiling_tokens_per_s,
            "of_ceiling": e.mfu_of_ceiling,
            "of_datasheet": e.mfu_of_datasheet,
        }
        for e in (telemetry.encoders if telemetry else ())
    }
    results = {
        "scaling": scaling_results(report),
        "gpu_stats": {d.device: {name: getattr(d, name) for name in GPU_STATS} for d in devices},
        "throughput": {r["stage"]: r for r in stage_results(report)},
        "efficiency": {
            "mfu": mfu,
            "device_hours_per_million_reads": run.device_hours_per_million if run else None,
            "kwh_per_million_reads": run.kwh_per_million if run else None,
            "price_per_million_reads": run.price_per_million if run else None,
            "checkpoint_overhead": report.overhead.median if report.overhead else None,
        },
        "findings": [f.model_dump(mode="json") for f in report.findings],
    }
    versions, ran_on = made.versions, run.devices if run else ()
    metadata = {
        "pytorch_version": versions.get("torch"),
        "cuda_version": versions.get("cuda"),
        "driver_version": versions.get("driver"),
        "cuda_driver_version": versions.get("cuda_driver"),
        "gpu_count": sum(d.kind == "cuda" for d in ran_on),
        "devices": [d.name for d in ran_on],
        "git_commit": made.git_commit,
        "weights": made.fingerprints,
        "profile": report.profile.name,
        "seeds": made.seeds,
    }
    body = {"schema_version": BENCHMARK_SCHEMA, "timestamp": made.created, "results": results, "metadata": metadata}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
