"""What the report shows, once: sections of prose and tables. Page, Markdown and UI only decide how it looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from virnuc_core.profiles import Target
from virnuc_core.report.formatting import (
    NOT_RUN,
    Mark,
    Number,
    Section,
    Table,
    answered_text,
    cell,
    measured,
    number,
    one_line,
    overhead_text,
    percent,
    shown,
    stage_text,
    table,
    target_text,
)
from virnuc_core.report.metrics import BASELINE_TITLES
from virnuc_core.report.model import ApprovalState, Criterion, Report, TelemetryMetrics, Verdict
from virnuc_core.telemetry.tables import Encoder
from virnuc_core.validation import Comparison, LabelAgreement

GIB: Final = 1 << 30
ENCODER_TITLES: Final[Mapping[Encoder, str]] = {"esm2": "ESM-2", "dnabert_s": "DNABERT-S"}
APPROVAL_VERDICTS: Final[Mapping[str, Verdict]] = {"approved": "pass", "rejected": "fail", "pending": "not run"}
VERDICTS: Final[tuple[Verdict, ...]] = ("pass", "fail", "projected", "not run")
TOO_OLD: Final = "The approval was given before these figures were measured: it speaks of an earlier run."


def sections(report: Report) -> list[Section]:
    """The report from top to bottom."""
    found = (
        Section("Warnings", warnings_of(report)),
        Section("What to know before reading the figures", report.notes),
        _approval(report.approval),
        Section("Criteria", (), criteria(report)),
        Section("Runs", (), (_runs(report),)),
        Section("Stages", (), (_stages(report),)),
        Section("GPU Scaling", (), (scaling(report),)),
        _devices(report),
        _packing(report),
        Section("Efficiency and cost", (), (economy(report),)),
        _correctness(report),
        _bottleneck(report),
        _regression(report),
        Section("Every read has a fate", (), (accounts(report),)),
        Section("How each is measured", (), (_definitions(report),)),
        Section("Provenance", (), (_provenance(report),)),
        _evidence(report),
    )
    return [section for section in found if section.prose or any(table.rows for table in section.tables)]


# --- what several forms ask of a report ------------------------------------------------------------------------------


def criterion(report: Report, name: str) -> Criterion:
    """A criterion of the seven by its id."""
    return next(c for c in report.criteria if c.id == name)


def overall(report: Report) -> str:
    """`ALL CRITERIA MET` or `3 of 7 CRITERIA MET`."""
    return "ALL CRITERIA MET" if report.all_met else f"{report.met} of {len(report.criteria)} CRITERIA MET"


def counts(report: Report) -> str:
    """`6 pass · 1 fail · 0 projected · 0 not run · 2 warnings`."""
    found = [f"{sum(c.verdict == verdict for c in report.criteria)} {verdict}" for verdict in VERDICTS]
    return " · ".join([*found, f"{len(warnings_of(report)) or 'no'} warnings"])


def warnings_of(report: Report) -> tuple[str, ...]:
    """The report's warnings, and one on an answer that is older than the figures it stands beside."""
    return (*report.warnings, *([TOO_OLD] if report.approval and report.approval.of_earlier_run else []))


def baseline_title(report: Report) -> str:
    """`v1.0` or `vanilla`."""
    name = report.baseline.name if report.baseline else report.profile.baseline.name
    return BASELINE_TITLES.get(name, name)


def alone_s(report: Report) -> float | None:
    """Seconds of one device, where it ran from beginning to end: what several are held against."""
    return report.single.total_s or None if report.single and not report.single.resumed else None


def share_of(target: Target | None, devices: int) -> Target | None:
    """The target of a speed-up as efficiency: percent of the devices."""
    return None if target is None else Target(op=target.op, value=100.0 * target.value / devices)


def telemetry_of(report: Report) -> TelemetryMetrics | None:
    """The telemetry of the run that is judged."""
    return report.run.telemetry if report.run else None


# --- the sections ----------------------------------------------------------------------------------------------------


def _approval(found: ApprovalState | None) -> Section:
    if found is None:
        return Section("Approval")
    answers = table(found.answers, {"Question": lambda a: a.question, "Answer": lambda a: a.answer})
    prose = (one_line(answered_text(found)).removeprefix(": "), *found.note.splitlines())
    return Section("Approval", prose, (answers,), Mark(APPROVAL_VERDICTS[found.verdict], found.verdict))


def criteria(report: Report) -> tuple[Table, Table]:
    """The seven criteria, and the profile's further checks; the verdict stands first so that it is seen first."""
    columns: dict[str, Callable[[Criterion], object]] = {
        "Verdict": lambda c: Mark(c.verdict),
        "Criterion": lambda c: c.title,
        "Measured": lambda c: None if c.value is None else Number(shown(c)),
        "Required": lambda c: Number(target_text(c.target, c.unit)),
        "Samples": lambda c: None if c.samples is None else f"{c.samples:,} {c.samples_of}",
        "Why": lambda c: c.reason,
        "Device": lambda c: c.device,
        "ID": lambda c: c.perf_id,
    }
    return table(report.criteria, columns), table(report.checks, columns, "Further checks")


def _definitions(report: Report) -> Table:
    return table(
        (*report.criteria, *report.checks),
        {
            "Criterion": lambda c: c.title,
            "Definition": lambda c: c.definition,
            "Profile": lambda c: c.profile_line,
            "Raw files": lambda c: ", ".join(c.raw),
        },
    )


def _runs(report: Report) -> Table:
    return table(
        report.runs,
        {
            "Run": lambda r: r.name,
            "Devices": lambda r: r.label,
            "Total": lambda r: number(r.total_s, 2, " s"),
            "Staging": lambda r: number(r.staging_s, 2, " s"),
            "Rest": lambda r: number(r.wall_s, 2, " s"),
            "Reads": lambda r: r.n_reads,
            "Rows": lambda r: r.n_rows,
            "Distinct": lambda r: r.n_uniques,
            "Reads/s": lambda r: number(r.reads_per_s),
            f"Projected {report.profile.projection_reads:,}": lambda r: number(r.hours_projected, 2, " h"),
            "Precision": lambda r: r.precision,
            "Resumed": lambda r: "yes" if r.resumed else "no",
            "Restarts": lambda r: r.restarts,
        },
    )


def _stages(report: Report) -> Table:
    rows = zip(*(run.stages for run in report.runs), strict=True)
    body = tuple((same[0].name, *(Number(stage_text(stage)) for stage in same)) for same in rows)
    return Table(("Stage", *(run.label for run in report.runs)), body)


def scaling(report: Report) -> Table:
    """Time, speed-up and verdict by number of devices."""
    header = ("GPUs", "Time", "Speedup", "Efficiency", "ESM-2", "DNABERT-S", "Required", "Verdict", "Why")
    rows: list[tuple[object, ...]] = []
    if (alone := number(alone_s(report), 1, " s")) is not None:
        rows.append((1, alone, Number("1.00x"), Number("100.0%"), None, None, None, None, ""))
    for figure, found in zip(report.scaling, report.scaling_criteria, strict=True):
        n, target = figure.num_gpus, found.target
        row = (
            number(figure.time_seconds, 1, " s"),
            number(figure.speedup, 2, "x", target=target),
            number(figure.efficiency, 1, "%", 100, share_of(target, n)),
            number(figure.esm2_scaling, 2, "x"),
            number(figure.dnabert_scaling, 2, "x"),
            Number(target_text(target, found.unit)),
        )
        rows.append((n, *row, Mark(found.verdict), found.reason))
    return Table(header, tuple(rows))


def _devices(report: Report) -> Section:
    telemetry, found = telemetry_of(report), criterion(report, "gpu_utilisation")
    if telemetry is None:
        return Section("GPU Utilization")
    devices = table(
        telemetry.devices,
        {
            "GPU": lambda d: d.device,
            "Avg Util %": lambda d: number(d.gpu_util_avg),
            "Min to max %": lambda d: Number(f"{cell(number(d.gpu_util_min, 0))} to {cell(number(d.gpu_util_max, 0))}"),
            "ESM-2 %": lambda d: number(d.esm2_percent),
            "DNABERT-S %": lambda d: number(d.dnabert_s_percent),
            "Peak Mem (GB)": lambda d: number(d.mem_used_peak, 2, scale=1 / GIB),
            "Power (W)": lambda d: number(d.power_avg_w, 0),
            "Max °C": lambda d: number(d.temperature_max_c, 0),
            "kWh": lambda d: number(d.energy_kwh, 4),
            "Samples": lambda d: d.sample_count,
        },
    )
    required = target_text(found.target, found.unit)
    line = f"{found.perf_id}: lowest device {shown(found)}, required {required}: {Mark(found.verdict)} {found.reason}"
    return Section("GPU Utilization", (line.strip(),), (devices,))


def _packing(report: Report) -> Section:
    telemetry = telemetry_of(report)
    if telemetry is None:
        return Section("Packing and loader")
    encoders = table(
        telemetry.encoders,
        {
            "Encoder": lambda e: ENCODER_TITLES[e.encoder],
            "Batches": lambda e: e.batches,
            "Tokens": lambda e: e.tokens,
            "Slots": lambda e: e.slots,
            "Packing": lambda e: percent(e.packing_efficiency),
            "Tokens/s": lambda e: number(e.tokens_per_s, 0),
            "Ceiling (tokens/s)": lambda e: measured(e.ceiling_tokens_per_s, 0),
            "MFU of ceiling": lambda e: measured(e.mfu_of_ceiling, 1, " %", 100),
            "MFU of datasheet": lambda e: measured(e.mfu_of_datasheet, 1, " %", 100),
        },
    )
    queue = telemetry.queue
    prose = queue and (
        f"Waits: mean {telemetry.avg_wait_ms:.2f} ms, p95 {telemetry.p95_wait_ms:.2f} ms, "
        f"max {telemetry.max_wait_ms:.2f} ms. "
        f"Queue: full {percent(queue.full)}, normal {percent(queue.normal)}, starved {percent(queue.starved)} "
        f"(waited over 1 ms: {percent(telemetry.waiting_share)}). "
        f"Batches packed under 80 %: {telemetry.batches_below_threshold:,} of {telemetry.batches:,}. "
        f"Windows: {telemetry.windows:,}, without a batch {telemetry.windows_without_batch:,}."
    )
    return Section("Packing and loader", (prose,) if prose else (), (encoders,))


def economy(report: Report) -> Table:
    """MFU of each encoder against its ceiling and its data sheet, what a million reads take, and what commits cost."""
    run, telemetry = report.run, telemetry_of(report)
    shares = {e.encoder: (e.mfu_of_ceiling, e.mfu_of_datasheet) for e in (telemetry.encoders if telemetry else ())}
    rows: list[tuple[str, object]] = []
    for name, title in ENCODER_TITLES.items():
        ceiling, sheet = (measured(share, 1, "%", 100) for share in shares.get(name, (None, None)))
        both = NOT_RUN if ceiling == sheet == NOT_RUN else f"measured ceiling {ceiling}, datasheet {sheet}"
        rows.append((f"MFU of {title}", both))

    def per_million(what: str, digits: int) -> str:
        return str(measured(getattr(run, f"{what}_per_million", None), digits))

    unit = "Core" if run is not None and run.devices and run.devices[0].kind == "cpu" else "GPU"
    priced = report.profile.price_per_device_hour is not None
    rows += [
        (f"{unit}-hours per million reads", per_million("device_hours", 3)),
        ("kWh per million reads", per_million("kwh", 3)),
        ("Price per million reads", per_million("price", 2) if priced else f"{NOT_RUN} (the profile gives no price)"),
        ("Checkpoint overhead", overhead_text(report.overhead)),
    ]
    return Table(("What", "Value"), tuple(rows))


def _correctness(report: Report) -> Section:
    prose = []
    for c in report.comparisons:
        if (e := c.bitwise) is not None:
            word = "the same bytes" if e.identical else f"DIFFERENT bytes: {'; '.join(e.differing)}"
            prose.append(f"{c.a} and {c.b}: {word} ({e.files_compared} files, {e.shards_compared} shards)")
        for part in (c.frames, c.consensus):
            prose += [f"{c.a} / {c.b}: {example}" for example in (part.examples if part else ())]
    cosines = table(
        [(c, cosine) for c in report.comparisons for cosine in c.cosines],
        {
            "Pair": lambda row: f"{row[0].a} / {row[0].b}",
            "Part": lambda row: row[1].part,
            "Rows": lambda row: row[1].n,
            "Minimum": lambda row: number(row[1].minimum, 7),
            "p1": lambda row: number(row[1].p1, 7),
            "Mean": lambda row: number(row[1].mean, 7),
        },
        "Cosine of pooled embeddings",
    )
    return Section("Correctness", prose, (agreements(report.comparisons), cosines))


def agreements(comparisons: Iterable[Comparison]) -> Table:
    """Who was held against whom, and how well they agree: a row for frames, a row for the consensus."""

    def score(name: str) -> Callable[[tuple[Comparison, str, LabelAgreement]], object]:
        return lambda row: None if row[2].score is None else Number(f"{getattr(row[2].score, name):.2e}")

    parts = ((c, kind, part) for c in comparisons for kind, part in (("frames", c.frames), ("consensus", c.consensus)))
    said = {True: "yes", False: "no"}
    return table(
        ((c, kind, part) for c, kind, part in parts if part is not None),
        {
            "Pair": lambda row: f"{row[0].a} / {row[0].b}",
            "What": lambda row: row[1],
            "In both": lambda row: row[2].in_both,
            "Only A / B": lambda row: Number(f"{row[2].only_in_a:,} / {row[2].only_in_b:,}"),
            "Agreement": lambda row: percent(row[2].agreement, 3),
            "Mean Δ": score("mean"),
            "Median Δ": score("median"),
            "p99 Δ": score("p99"),
            "Max Δ": score("max"),
            "Within tolerance": lambda row: row[2].score and percent(row[2].score.share_within_tolerance, 2),
            "allclose 1e-3": lambda row: row[2].score and said[row[2].score.allclose],
            "Same bytes": lambda row: row[0].bitwise and said[row[0].bitwise.identical],
        },
    )


def _bottleneck(report: Report) -> Section:
    b, word = report.bottleneck, {True: "expected", False: "actionable"}
    findings = table(
        report.findings,
        {
            "Stage": lambda f: f.stage,
            "Share of time": lambda f: percent(f.share),
            "GPU utilisation": lambda f: number(f.utilisation, 1, " %"),
            "Verdict": lambda f: word[f.expected],
            "Advice": lambda f: f.advice,
        },
    )
    return Section("Bottleneck", (f"({word[b.expected]}): {b.detail}. Advice: {b.advice}.",), (findings,), b.kind)


def _regression(report: Report) -> Section:
    found = report.regression
    if found is None:
        return Section("Regression")
    against = f"against {found.against_commit} of {found.against_created}" if found.against_commit else ""
    metrics = table(
        found.metrics,
        {
            "Metric": lambda m: m.name,
            "Before": lambda m: number(m.before, 2),
            "Now": lambda m: number(m.now, 2),
            "Change": lambda m: percent(m.change),
            "Verdict": lambda m: Mark(m.verdict),
        },
    )
    return Section("Regression", (": ".join(filter(None, (against, found.reason))),), (metrics,), Mark(found.verdict))


def accounts(report: Report) -> Table:
    """What became of the reads of the run that is judged, the remarks on them, and what never became a read."""
    header, found = ("What", "Count", "Share"), report.accounting
    if found is None:
        return Table(header, ())

    def row(what: str, n: int | None) -> tuple[object, ...]:
        return what, n, percent(n / found.reads if found.reads and n is not None else None)

    whole = "sum of the fates" if found.adds_up else "sum of the fates: does NOT add up"
    left = (("records skipped", found.skipped_records), ("files ignored", found.ignored_files))
    rows = (
        *(row(name, n) for name, n in found.fates.items()),
        row(whole, sum(found.fates.values())),
        row("reads that came in", report.run.n_reads if report.run else None),
        *(row(f"reads: {name}", n) for name, n in found.flags.items()),
        *((name, "not recorded" if n is None else n, None) for name, n in left),
    )
    return Table(header, rows)


def _provenance(report: Report) -> Table:
    made = report.provenance
    rows = [
        ("created", made.created),
        ("virnuc", made.virnuc_version),
        ("commit", made.git_commit),
        ("model length", made.model_length and str(made.model_length)),
        *((f"fingerprint of {part}", print_) for part, print_ in made.fingerprints.items()),
        *((f"seed of {part}", str(seed)) for part, seed in made.seeds.items()),
        *made.versions.items(),
        *made.settings.items(),
    ]
    return Table(("What", "Value"), tuple(rows))


def _evidence(report: Report) -> Section:
    files = Table(("File", "Bytes", "SHA-256"), tuple((f.path, f.bytes, f.sha256) for f in report.evidence))
    said = "Every figure above is computed from these files; virnuc verify computes them again."
    return Section("Raw files", (said,) if report.evidence else (), (files,))
