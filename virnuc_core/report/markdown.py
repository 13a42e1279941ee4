"""`report.md` and `benchmark_<time>.md/.json`: the report as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from virnuc_core.report.model import Comparison, Criterion, LabelAgreement, Report, RunMetrics
from virnuc_core.report.sections import (
    ENCODER_TITLES,
    approval_text,
    cost,
    efficiency,
    fate_lines,
    measured,
    overhead_text,
    remark_lines,
    warnings_of,
)
from virnuc_core.report.summary import render_summary
from virnuc_core.report.text import (
    UNKNOWN,
    criterion,
    mark,
    overall,
    overview_runs,
    render_text,
    shown,
    stage_text,
    target_text,
)

GIB: Final = 1 << 30
MFU_HEADER: Final = ("Ceiling (tokens/s)", "MFU of ceiling", "MFU of datasheet")
BENCHMARK_SCHEMA: Final = 1


def cell(text: object) -> str:
    """A value that cannot break a Markdown table or become markup."""
    plain = str(text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return " ".join(plain.replace("<", "&lt;").replace(">", "&gt;").split())


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table, with an empty line after it."""
    lines = ["| " + " | ".join(cell(name) for name in header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return [*lines, ""]


def number(value: float | None, digits: int = 1, unit: str = "", scale: float = 1.0) -> str:
    """A figure with its unit; `n/a` where it was not measured."""
    return UNKNOWN if value is None else f"{value * scale:,.{digits}f}{unit}"


def render_markdown(report: Report) -> str:
    """The whole report as Markdown, with front matter."""
    parts = (
        _front_matter(report),
        ["# " + cell(report.profile.title), "", f"**{overall(report)}**", ""],
        ["```", render_text(report).rstrip("\n"), "```", ""],
        _warnings(report),
        _notes(report),
        _approval(report),
        ["## Performance summary", "", "```", render_summary(report).rstrip("\n"), "```", ""],
        _criteria(report),
        _runs(report),
        _stages(report),
        _scaling(report),
        _devices(report),
        _loader(report),
        _efficiency(report),
        _correctness(report),
        _bottleneck(report),
        _regression(report),
        _fates(report),
        _provenance(report),
        _evidence(report),
    )
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"


def _front_matter(report: Report) -> list[str]:
    facts = {
        "schema_version": report.schema_version,
        "profile": report.profile.name,
        "created": report.provenance.created,
        "commit": report.provenance.git_commit or "unknown",
        "devices": report.run.label if report.run else "none",
        "criteria_met": report.met,
        "criteria": len(report.criteria),
    }
    return ["---", *(f"{key}: {_quoted(value)}" for key, value in facts.items()), "---", ""]


def _quoted(value: object) -> str:
    """A value in quotes that no reader of Markdown takes for markup."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e")


def _notes(report: Report) -> list[str]:
    return ["## Notes", "", *(f"- {cell(note)}" for note in report.notes), ""] if report.notes else []


def _warnings(report: Report) -> list[str]:
    found = [f"- {cell(warning)}" for warning in warnings_of(report)] or ["None."]
    return ["## Warnings", "", *found, ""]


def _approval(report: Report) -> list[str]:
    found = report.approval
    if found is None:
        return []
    lines = ["## Approval", "", f"**{cell(approval_text(found))}**", ""]
    if found.answers:
        lines += table(["Question", "Answer"], [[a.question, a.answer] for a in found.answers])
    return [*lines, *(f"> {cell(line)}" for line in found.note.splitlines()), *([""] if found.note else [])]


def _efficiency(report: Report) -> list[str]:
    rows = [*efficiency(report.run), *cost(report), ("Checkpoint overhead", overhead_text(report.overhead))]
    return ["## Efficiency and cost", "", *table(["What", "Value"], rows)]


def criteria_rows(criteria: Sequence[Criterion]) -> list[dict[str, str]]:
    """Criteria as plain rows: for tables in reports and elsewhere."""
    return [
        {
            "criterion": c.title,
            "id": c.perf_id,
            "measured": shown(c),
            "required": target_text(c),
            "verdict": mark(c),
            "samples": UNKNOWN if c.samples is None else f"{c.samples:,} {c.samples_of}",
            "device": c.device,
            "profile line": c.profile_line,
            "definition": c.definition,
            "reason": c.reason,
            "raw": ", ".join(c.raw),
        }
        for c in criteria
    ]


def _criteria(report: Report) -> list[str]:
    header = ["Criterion", "ID", "Measured", "Required", "Verdict", "Samples", "Why"]

    def rows(criteria: Sequence[Criterion]) -> list[list[str]]:
        keys = ("criterion", "id", "measured", "required", "verdict", "samples", "reason")
        return [[row[key] for key in keys] for row in criteria_rows(criteria)]

    lines = ["## Criteria", "", *table(header, rows(report.criteria))]
    if report.checks:
        lines += ["### Further checks", "", *table(header, rows(report.checks))]
    details = [
        [c.title, c.definition, c.device, f"`{c.profile_line}`".replace("`", ""), ", ".join(c.raw)]
        for c in (*report.criteria, *report.checks)
    ]
    return [
        *lines,
        "### How each is measured",
        "",
        *table(["Criterion", "Definition", "Device", "Profile", "Raw files"], details),
    ]


def _runs(report: Report) -> list[str]:
    rows = [
        [
            run.name,
            run.label,
            number(run.total_s, 2, " s"),
            number(run.staging_s, 2, " s"),
            number(run.wall_s, 2, " s"),
            number(run.n_reads, 0),
            number(run.n_rows, 0),
            number(run.reads_per_s, 1),
            number(run.hours_projected, 2, " h"),
            run.precision or UNKNOWN,
            "yes" if run.resumed else "no",
            number(run.restarts, 0),
        ]
        for run in overview_runs(report)
    ]
    header = ["Run", "Devices", "Total", "Staging", "Rest", "Reads", "Rows", "Reads/s"]
    header += [f"Projected {report.profile.projection_reads:,}", "Precision", "Resumed", "Restarts"]
    return ["## Runs", "", *table(header, rows)]


def _stages(report: Report) -> list[str]:
    runs = overview_runs(report)
    if not runs:
        return []
    names = [stage.name for stage in runs[0].stages]
    rows = [[name, *(stage_text(run.stages[place]) for run in runs)] for place, name in enumerate(names)]
    return ["## Stages", "", *table(["Stage", *(run.label for run in runs)], rows)]


def _scaling(report: Report) -> list[str]:
    return ["## GPU Scaling", "", *_scaling_table(report)]


def _scaling_table(report: Report) -> list[str]:
    single = report.single
    rows: list[list[object]] = []
    if single is not None:
        rows.append([len(single.devices), number(single.total_s, 1), "1.00x", "100.0%", *[UNKNOWN] * 4])
    for figure, verdict in zip(report.scaling, report.scaling_criteria, strict=True):
        rows.append(
            [
                figure.num_gpus,
                number(figure.time_seconds, 1),
                number(figure.speedup, 2, "x"),
                number(figure.efficiency, 1, "%", 100),
                number(figure.esm2_scaling, 2, "x"),
                number(figure.dnabert_scaling, 2, "x"),
                target_text(verdict),
                mark(verdict),
            ]
        )
    header = ["GPUs", "Time (s)", "Speedup", "Efficiency", "ESM-2", "DNABERT-S", "Required", "Verdict"]
    return table(header, rows)


def _devices(report: Report) -> list[str]:
    telemetry = report.run.telemetry if report.run else None
    if telemetry is None:
        return []
    rows = [
        [
            d.device,
            number(d.embedding_percent, 1),
            number(d.memory_peak_bytes, 2, scale=1 / GIB),
            f"{number(d.embedding_min_percent, 0)} to {number(d.embedding_max_percent, 0)}",
            number(d.esm2_percent, 1),
            number(d.dnabert_s_percent, 1),
            number(d.power_mean_w, 0),
            number(d.temperature_max_c, 0),
            number(d.energy_kwh, 4),
            d.embedding_samples,
        ]
        for d in telemetry.devices
    ]
    header = [
        "GPU",
        "Avg Util %",
        "Peak Mem (GB)",
        "Min to max %",
        "ESM-2 %",
        "DNABERT-S %",
        "Power (W)",
        "Max °C",
        "kWh",
    ]
    found = criterion(report, "gpu_utilisation")
    line = f"{found.perf_id}: lowest device {shown(found)}, required {target_text(found)}: {mark(found)} {found.reason}"
    return ["## GPU Utilization", "", *table([*header, "Samples"], rows), cell(line), ""]


def _loader(report: Report) -> list[str]:
    telemetry = report.run.telemetry if report.run else None
    if telemetry is None:
        return []
    rows = [
        [
            ENCODER_TITLES[e.encoder],
            e.batches,
            number(e.tokens, 0),
            number(e.slots, 0),
            number(e.packing_efficiency, 1, " %", 100),
            number(e.tokens_per_s, 0),
            measured(e.ceiling_tokens_per_s, 0),
            measured(e.mfu_of_ceiling, 1, " %", 100),
            measured(e.mfu_of_datasheet, 1, " %", 100),
        ]
        for e in telemetry.encoders
    ]
    header = ["Encoder", "Batches", "Tokens", "Slots", "Packing", "Tokens/s", *MFU_HEADER]
    lines = ["## Packing and loader", "", *table(header, rows)]
    queue = telemetry.queue
    if queue is not None:
        lines += [
            f"Waits: mean {queue.mean_wait_ms:.2f} ms, p95 {queue.p95_wait_ms:.2f} ms, max {queue.max_wait_ms:.2f} ms. "
            f"Queue: full {100 * queue.full:.1f} %, normal {100 * queue.normal:.1f} %, "
            f"starved {100 * queue.starved:.1f} % (waited over 1 ms: {100 * queue.waiting_over_1ms:.1f} %). "
            f"Batches packed under 80 %: {telemetry.batches_below_80:,} of {telemetry.batches:,}. "
            f"Windows: {telemetry.windows:,}, without a batch {telemetry.windows_without_batch:,}.",
            "",
        ]
    return lines


def _correctness(report: Report) -> list[str]:
    rows = []
    for comparison in report.comparisons:
        for kind, part in (("frames", comparison.frames), ("consensus", comparison.consensus)):
            if part is not None:
                rows.append(_agreement_row(comparison, kind, part))
    header = ["A", "B", "What", "In both", "Only A", "Only B", "Agreement", "Mean Δ", "Median Δ", "p99 Δ", "Max Δ"]
    lines = ["## Correctness", "", *table([*header, "Within tolerance", "allclose 1e-3"], rows)]
    cosines = [
        [c.a, c.b, s.part, s.n, f"{s.minimum:.7f}", f"{s.p1:.7f}", f"{s.mean:.7f}"]
        for c in report.comparisons
        for s in c.cosines
    ]
    if cosines:
        lines += [
            "### Cosine of pooled embeddings",
            "",
            *table(["A", "B", "Part", "Rows", "Minimum", "p1", "Mean"], cosines),
        ]
    for comparison in report.comparisons:
        if (equality := comparison.bitwise) is not None:
            word = (
                "the same bytes"
                if equality.identical
                else "**different bytes**: " + cell("; ".join(equality.differing))
            )
            lines += [
                f"- {cell(comparison.a)} and {cell(comparison.b)}: {word} "
                f"({equality.files_compared} files, {equality.shards_compared} shards)"
            ]
        examples = [part.examples for part in (comparison.frames, comparison.consensus) if part is not None]
        lines += [f"- {cell(comparison.a)} / {cell(comparison.b)}: {cell(e)}" for group in examples for e in group]
    return [*lines, ""]


def _agreement_row(comparison: Comparison, kind: str, part: LabelAgreement) -> list[object]:
    score = part.score
    differences = [UNKNOWN] * 6
    if score is not None:
        differences = [f"{value:.2e}" for value in (score.mean, score.median, score.p99, score.max)]
        differences += [f"{100 * score.share_within_tolerance:.2f} %", "yes" if score.allclose else "no"]
    agreement = number(part.agreement, 3, " %", 100)
    return [comparison.a, comparison.b, kind, part.in_both, part.only_in_a, part.only_in_b, agreement, *differences]


def _bottleneck(report: Report) -> list[str]:
    verdict = report.bottleneck
    expected = "expected" if verdict.expected else "actionable"
    rows = [
        [
            f.stage,
            number(f.share, 1, " %", 100),
            number(f.utilisation, 1, " %"),
            "expected" if f.expected else "actionable",
            f.advice,
        ]
        for f in report.findings
    ]
    return [
        "## Bottleneck",
        "",
        f"**{verdict.kind}** ({expected}): {cell(verdict.detail)}. Advice: {cell(verdict.advice)}.",
        "",
        *(table(["Stage", "Share of time", "GPU utilisation", "Verdict", "Advice"], rows) if rows else []),
    ]


def _regression(report: Report) -> list[str]:
    found = report.regression
    if found is None:
        return []
    rows = [
        [m.name, number(m.before, 2), number(m.now, 2), number(m.change, 1, " %", 100), f"[{m.verdict.upper()}]"]
        for m in found.metrics
    ]
    against = f" against {cell(found.against_commit)} of {cell(found.against_created)}" if found.against_commit else ""
    reason = f": {cell(found.reason)}" if found.reason else ""
    lines = ["## Regression", "", f"**[{found.verdict.upper()}]**{against}{reason}", ""]
    return [*lines, *(table(["Metric", "Before", "Now", "Change", "Verdict"], rows) if rows else [])]


def _fates(report: Report) -> list[str]:
    run, found = report.run, report.accounting
    if run is None or found is None:
        return []
    fates = table(["Fate", "Reads"], [[name, number(n, 0)] for name, n in fate_lines(found, run.n_reads)])
    remarks = table(["Remark", "Count"], [[name, n] for name, n in remark_lines(found)])
    return ["## Every read has a fate", "", *fates, *remarks]


def _provenance(report: Report) -> list[str]:
    made = report.provenance
    rows = [
        ["created", made.created],
        ["virnuc", made.virnuc_version or UNKNOWN],
        ["commit", made.git_commit or UNKNOWN],
        ["model length", str(made.model_length or UNKNOWN)],
        *([f"fingerprint of {k}", v] for k, v in made.fingerprints.items()),
        *([f"seed of {k}", str(v)] for k, v in made.seeds.items()),
        *([k, v] for k, v in made.versions.items()),
        *([k, v] for k, v in made.settings.items()),
    ]
    return ["## Provenance", "", *table(["What", "Value"], rows)]


def _evidence(report: Report) -> list[str]:
    rows = [[file.path, f"{file.bytes:,}", file.sha256] for file in report.evidence]
    intro = "Every figure above is computed from these files; `virnuc verify` computes them again."
    return ["## Raw files", "", intro, "", *table(["File", "Bytes", "SHA-256"], rows)]


def render_benchmark_markdown(report: Report) -> str:
    """The three tables of a benchmark report."""
    telemetry = report.run.telemetry if report.run else None
    gpus = [
        [d.device, number(d.embedding_percent, 1, "%"), number(d.memory_peak_bytes, 2, scale=1 / GIB)]
        for d in (telemetry.devices if telemetry else ())
    ]
    scaling = [
        [
            r["num_gpus"],
            number(r["time_seconds"], 1),
            number(r["speedup"], 2, "x"),
            number(r["efficiency"], 1, "%", 100),
        ]
        for r in scaling_results(report)
    ]
    stages = [
        [r["stage"], number(r["throughput_seq_per_sec"], 1), number(r["total_time_seconds"], 1)]
        for r in stage_results(report.run)
    ]
    lines = [
        f"# Benchmark Report - {cell(report.provenance.created)}",
        "",
        "## GPU Scaling",
        "",
        *table(["GPUs", "Time (s)", "Speedup", "Efficiency"], scaling),
        "## GPU Utilization",
        "",
        *table(["GPU", "Avg Util %", "Peak Mem (GB)"], gpus),
        "## Throughput by Stage",
        "",
        *table(["Stage", "Seq/sec", "Time (s)"], stages),
        *_efficiency(report),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def scaling_results(report: Report) -> list[dict[str, Any]]:
    """One entry a number of devices: `num_gpus`, `time_seconds`, `speedup`, `efficiency`."""
    found = []
    single = report.single
    if single is not None and single.total_s and not single.resumed:
        found.append({"num_gpus": 1, "time_seconds": single.total_s, "speedup": 1.0, "efficiency": 1.0})
    for figure in report.scaling:
        found.append(
            {
                "num_gpus": figure.num_gpus,
                "time_seconds": figure.time_seconds,
                "speedup": figure.speedup,
                "efficiency": figure.efficiency,
            }
        )
    return found


def stage_results(run: RunMetrics | None) -> list[dict[str, Any]]:
    """Throughput of each measured stage: reads for chunking and translation, rows after that."""
    found = []
    for stage in () if run is None else run.stages:
        sequences = None if run is None else run.n_reads if stage.name.startswith(("Seq", "Six")) else run.n_rows
        if stage.seconds is None or not sequences:
            continue
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


def _efficiency_results(report: Report) -> dict[str, Any]:
    """MFU by encoder and what a million reads take; null where it was not measured."""
    run = report.run
    telemetry = run.telemetry if run else None
    return {
        "mfu": {
            e.encoder: {
                "tokens_per_sec": e.tokens_per_s,
                "ceiling_tokens_per_sec": e.ceiling_tokens_per_s,
                "of_ceiling": e.mfu_of_ceiling,
                "of_datasheet": e.mfu_of_datasheet,
            }
            for e in (telemetry.encoders if telemetry else ())
        },
        "device_hours_per_million_reads": run.device_hours_per_million if run else None,
        "kwh_per_million_reads": run.kwh_per_million if run else None,
        "price_per_million_reads": run.price_per_million if run else None,
        "checkpoint_overhead": report.overhead.median if report.overhead else None,
    }


def render_benchmark_json(report: Report) -> str:
    """The same results for machines, with metadata."""
    telemetry = report.run.telemetry if report.run else None
    made = report.provenance
    body = {
        "schema_version": BENCHMARK_SCHEMA,
        "timestamp": made.created,
        "results": {
            "scaling": scaling_results(report),
            "gpu_stats": {
                d.device: {
                    "gpu_util_avg": d.embedding_percent,
                    "gpu_util_min": d.embedding_min_percent,
                    "gpu_util_max": d.embedding_max_percent,
                    "mem_used_avg": d.memory_mean_bytes,
                    "mem_used_peak": d.memory_peak_bytes,
                    "sample_count": d.embedding_samples,
                }
                for d in (telemetry.devices if telemetry else ())
            },
            "throughput": {r["stage"]: r for r in stage_results(report.run)},
            "efficiency": _efficiency_results(report),
            "findings": [f.model_dump(mode="json") for f in report.findings],
        },
        "metadata": {
            "pytorch_version": made.versions.get("torch"),
            "cuda_version": made.versions.get("cuda"),
            "driver_version": made.versions.get("driver"),
            "cuda_driver_version": made.versions.get("cuda_driver"),
            "gpu_count": sum(d.kind == "cuda" for d in (report.run.devices if report.run else ())),
            "devices": [d.name for d in (report.run.devices if report.run else ())],
            "git_commit": made.git_commit,
            "weights": made.fingerprints,
            "profile": report.profile.name,
            "seeds": made.seeds,
        },
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"
