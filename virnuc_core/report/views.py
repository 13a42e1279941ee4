"""What the report shows, once: sections of prose and tables. Page, Markdown and UI only decide how it looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from virnuc_core.profiles import Target
from virnuc_core.report.formatting import (
    NOT_RUN,
    TOTAL,
    Mark,
    Number,
    Section,
    Table,
    answered_text,
    cell,
    number,
    overhead_text,
    percent,
    runs_text,
    shown,
    stage_text,
    target_text,
)
from virnuc_core.report.metrics import BASELINE_TITLES
from virnuc_core.report.model import Criterion, Report, ScalingMetrics, Verdict
from virnuc_core.runfiles import FileDigest
from virnuc_core.telemetry.tables import ROWS, STAGES, Encoder
from virnuc_core.validation import QUESTIONS, Comparison

GIB: Final = 1 / (1 << 30)
COSTS: Final = {"device_hours": 3, "kwh": 3, "price": 2}  # of a million reads, with digits
ENCODER_TITLES: Final[Mapping[Encoder, str]] = {"esm2": "ESM-2", "dnabert_s": "DNABERT-S"}


def sections(report: Report) -> list[Section]:
    """The report from top to bottom."""

    def definition(c: Criterion) -> dict[str, object]:
        files = ", ".join(c.raw)
        return {"Criterion": c.title, "Definition": c.definition, "Profile": c.profile_line, "Raw files": files}

    def seconds(row: str) -> dict[str, str]:
        alike = len({run.label for run in report.runs}) < len(report.runs)
        return {"Stage": row} | {r.name if alike else r.label: Number(stage_text(r, row)) for r in report.runs}

    told = {row for run in report.runs for row in run.stages}
    rows = [row for row in ROWS if row in STAGES or row in told] + [TOTAL] if report.runs else []

    files = Table({"File": f.path, "Bytes": f.bytes, "SHA-256": f.sha256} for f in report.evidence)
    said = "Every figure above is computed from these files; virnuc verify computes them again."
    found = (
        Section("Warnings", warnings(report)),
        Section("What to know before reading the figures", report.notes),
        _approval(report),
        Section("Criteria", (), criteria(report)),
        Section("Runs", (), (_runs(report), _attempts(report))),
        Section("Stages", (), (Table(map(seconds, rows)),)),
        Section("GPU Scaling", (), (scaling(report),)),
        *_telemetry(report),
        Section("Efficiency and cost", (), (economy(report),)),
        _correctness(report),
        _bottleneck(report),
        _regression(report),
        Section("Every read has a fate", (), (accounts(report),)),
        Section("How each is measured", (), (Table(map(definition, (*report.criteria, *report.checks))),)),
        Section("Provenance", (), (_provenance(report),)),
        Section("Raw files", (said,) if report.evidence else (), (files,)),
    )
    return [section for section in found if section.prose or any(table.rows for table in section.tables)]


def warnings(report: Report) -> tuple[str, ...]:
    """The report's warnings, and one on an answer that is older than the figures it stands beside."""
    too_old = "The approval was given before these figures were measured: it speaks of an earlier run."
    return (*report.warnings, *([too_old] if report.approval and report.approval.of_earlier_run else []))


def met_sentence(report: Report) -> str:
    """`6 of 7 asked criteria met`, what was missed, and what could not be judged: that first where nothing failed."""
    left = ", ".join(c.title for c in report.asked if c.verdict in ("not run", "projected"))
    said = [f"{report.met} of {len(report.asked)} asked criteria met", f"not met: {', '.join(report.missed)}"]
    said = [*said[: 2 if report.missed else 1], *([f"not judged here: {left}"] if left or not report.asked else [])]
    return "; ".join(reversed(said) if report.outcome == "not judged" else said)


def baseline_title(report: Report) -> str:
    """`v1.0` or `vanilla`."""
    name = report.baseline.name if report.baseline else report.profile.baseline.name
    return BASELINE_TITLES.get(name, name)


def skipped(report: Report) -> dict[int, str]:
    """Numbers of devices of which there is no figure: those that were not here for a band, and runs without a time."""
    here = max((len(run.devices) for run in report.runs), default=0)
    bands = sorted(map(int, report.profile.scaling_bands))
    why = {len(run.devices): run.untimed for run in report.runs if run.untimed}
    return why | {count: f"there were {here} devices" for count in bands if count > here > 0}


def share_of(target: Target | None, devices: int) -> Target | None:
    """The target of a speed-up as efficiency: percent of the devices."""
    return None if target is None else Target(op=target.op, value=100.0 * target.value / devices)


def _approval(report: Report) -> Section:
    if (found := report.approval) is None:
        return Section("Approval")
    asked = {} if found.reviewer is None else QUESTIONS
    answers = Table({"Question": asked[name], "Answer": getattr(found, name) or "not answered"} for name in asked)
    prose = (cell(answered_text(found)).removeprefix(":").strip(), *found.note.splitlines())
    verdicts: dict[str, Verdict] = {"approved": "pass", "rejected": "fail", "pending": "not run"}
    return Section("Approval", prose, (answers,), Mark(verdicts[found.verdict], found.verdict))


def criteria(report: Report) -> tuple[Table, Table]:
    """The seven criteria, and the profile's further checks; the verdict stands first so that it is seen first."""

    def row(c: Criterion) -> dict[str, object]:
        return {
            "Verdict": Mark(c.verdict),
            "Criterion": c.title,
            "Measured": None if c.value is None else Number(shown(c)),
            "Required": Number(target_text(c.target, c.unit)),
            "Samples": None if c.samples is None else f"{c.samples:,} {c.samples_of}",
            "Why": c.reason,
            "Device": c.device,
            "ID": c.perf_id,
        }

    return Table(map(row, report.criteria)), Table(map(row, report.checks), "Further checks")


def _runs(report: Report) -> Table:
    return Table(
        {
            "Run": run.name,
            "Devices": run.label,
            "Total": number(run.total_s, 2, " s"),
            "Staging": number(run.staging_s, 2, " s"),
            "Rest": number(run.wall_s, 2, " s"),
            "Reads": run.n_reads,
            "Rows": run.n_rows,
            "Distinct": run.n_uniques,
            "Reads/s": number(run.sequences_per_hour, scale=1 / 3600),
            f"Projected {report.profile.projection_reads:,}": number(run.hours_projected, 2, " h"),
            "Precision": run.precision,
            "Resumed": "yes" if run.resumed else "no",
            "Restarts": run.restarts,
            "Errors in logs": run.log_errors,
        }
        for run in report.runs
    )


def scaling(report: Report) -> Table:
    """Time, speed-up and verdict by number of devices."""

    def row(figure: ScalingMetrics) -> dict[str, object]:
        found, n = figure.judged, figure.num_gpus
        target = found.target if found else None
        return {
            "GPUs": n,
            "Time": number(figure.time_seconds, 1, " s"),
            "Runs": runs_text(figure),
            "Speedup": number(figure.speedup, 2, "x", target=target),
            "Efficiency": number(figure.efficiency, 1, "%", 100, share_of(target, n)),
            "ESM-2": number(figure.esm2_scaling, 2, "x"),
            "DNABERT-S": number(figure.dnabert_scaling, 2, "x"),
            "Required": Number(target_text(target, found.unit)) if found else None,
            "Verdict": Mark(found.verdict) if found else None,
            "Why": found.reason if found else "",
        }

    rows = [row(figure) for figure in report.scaling]
    rows += [{"GPUs": n, "Verdict": Mark("not run"), "Why": f"skipped: {why}"} for n, why in skipped(report).items()]
    return Table(dict.fromkeys(rows[0]) | one for one in rows)


def _telemetry(report: Report) -> tuple[Section, ...]:
    """The devices' utilisation; packing and the loader."""
    if report.run is None or (telemetry := report.run.telemetry) is None:
        return ()
    judged = next(c for c in report.criteria if c.id == "gpu_utilisation")
    allocated, host = {b.device: b.allocated_peak_bytes for b in telemetry.busy}, telemetry.host
    devices = Table(
        {
            "GPU": d.device,
            "Avg Util %": number(d.gpu_util_avg),
            "Min to max %": Number(f"{cell(number(d.gpu_util_min, 0))} to {cell(number(d.gpu_util_max, 0))}"),
            "ESM-2 %": number(d.esm2_percent),
            "DNABERT-S %": number(d.dnabert_s_percent),
            "Peak Mem (GB)": number(d.mem_used_peak, 2, scale=GIB),
            "Allocated (GB)": number(allocated.get(d.device), 2, scale=GIB),
            "Power (W)": number(d.power_avg_w, 0),
            "Max °C": number(d.temperature_max_c, 0),
            "kWh": number(d.energy_kwh, 4),
            "Samples": d.sample_count,
        }
        for d in telemetry.devices
    )
    required = target_text(judged.target, judged.unit)
    lowest = f"{judged.perf_id}: lowest device {shown(judged)}, required {required}: {Mark(judged.verdict)}"
    encoders = Table(
        {
            "Encoder": ENCODER_TITLES[e.encoder],
            "Batches": e.batches,
            "Tokens": e.tokens,
            "Slots": e.slots,
            "Packing": percent(e.packing_efficiency),
            "Tokens/s of a device": number(e.tokens_per_device_s, 0),
            "Ceiling (tokens/s)": number(e.ceiling_tokens_per_s, 0) or NOT_RUN,
        }
        for e in telemetry.encoders
    )
    waits = (
        []
        if (queue := telemetry.queue) is None
        else [
            f"Waits: mean {telemetry.avg_wait_ms:.2f} ms, p95 {telemetry.p95_wait_ms:.2f} ms, "
            f"max {telemetry.max_wait_ms:.2f} ms. "
            f"Queue: full {percent(queue.full)}, normal {percent(queue.normal)}, starved {percent(queue.starved)} "
            f"(waited over 1 ms: {percent(telemetry.waiting_share)}). "
            f"Batches packed under 80 %: {telemetry.batches_below_threshold:,} of {telemetry.batches:,}. "
            f"Windows: {telemetry.windows:,}, without a batch {telemetry.windows_without_batch:,}.",
            f"Tokens/s, both encoders: {cell(number(telemetry.tokens_per_s, 0))} while embedding, "
            f"{cell(number(telemetry.steady_tokens_per_s, 0))} once warm (10 batches of each device left out). "
            f"Sequences/s: {cell(number(telemetry.rows_per_s))}, each counted once.",
            f"Host: CPU {cell(number(host.cpu_percent_avg, 0, ' %'))} on average, "
            f"{cell(number(host.cpu_percent_max, 0, ' %'))} at most; memory of all processes of the run "
            f"{cell(number(host.rss_peak_bytes, 2, ' GB', GIB))} at most.",
        ]
    )
    utilisation = Section("GPU Utilization", (f"{lowest} {judged.reason}".strip(),), (devices,))
    return utilisation, Section("Packing and loader", waits, (encoders,))


def economy(report: Report) -> Table:
    """MFU of each encoder against its ceiling and its data sheet, what a million reads take, and what commits cost."""
    run = report.run
    encoders = run.telemetry.encoders if run and run.telemetry else ()
    shares = {e.encoder: (e.mfu_of_ceiling, e.mfu_of_datasheet) for e in encoders}
    rows = []
    for name, title in ENCODER_TITLES.items():
        ceiling, sheet = (number(share, 1, "%", 100) or NOT_RUN for share in shares.get(name, (None, None)))
        both = NOT_RUN if ceiling == sheet == NOT_RUN else f"measured ceiling {ceiling}, datasheet {sheet}"
        rows.append((f"MFU of {title}", both))
    unit = "Core" if run is not None and run.devices and run.devices[0].kind == "cpu" else "GPU"
    hours, kwh, price = (
        number(getattr(run, f"{what}_per_million", None), digits) or NOT_RUN for what, digits in COSTS.items()
    )
    unpriced = f"{NOT_RUN} (the profile gives no price)"
    rows += [
        (f"{unit}-hours per million reads", str(hours)),
        ("kWh per million reads", str(kwh)),
        ("Price per million reads", unpriced if report.profile.price_per_device_hour is None else str(price)),
        ("Checkpoint overhead", overhead_text(report.overhead)),
    ]
    return Table({"What": what, "Value": value} for what, value in rows)


def _correctness(report: Report) -> Section:
    prose = []
    for c in report.comparisons:
        if (e := c.bitwise) is not None:
            word = "the same bytes" if e.identical else f"DIFFERENT bytes: {'; '.join(e.differing)}"
            prose.append(f"{c.a} and {c.b}: {word} ({e.files_compared} files, {e.shards_compared} shards)")
        for part in (c.frames, c.consensus):
            prose += [f"{c.a} / {c.b}: {example}" for example in (part.examples if part else ())]
    cosines = Table(
        (
            {
                "Pair": f"{c.a} / {c.b}",
                "Part": cosine.part,
                "Rows": cosine.n,
                "Minimum": number(cosine.minimum, 7),
                "p1": number(cosine.p1, 7),
                "Mean": number(cosine.mean, 7),
            }
            for c in report.comparisons
            for cosine in c.cosines
        ),
        "Cosine of pooled embeddings",
    )
    return Section("Correctness", prose, (agreements(report.comparisons), cosines))


def agreements(comparisons: Iterable[Comparison]) -> Table:
    """Who was held against whom, and how well they agree: a row for frames, a row for the consensus."""
    said = {True: "yes", False: "no"}
    differences = (("Mean Δ", "mean"), ("Median Δ", "median"), ("p99 Δ", "p99"), ("Max Δ", "max"))
    parts = ((c, kind, part) for c in comparisons for kind, part in (("frames", c.frames), ("consensus", c.consensus)))
    return Table(
        {
            "Pair": f"{c.a} / {c.b}",
            "What": kind,
            "In both": part.in_both,
            "Only A / B": Number(f"{part.only_in_a:,} / {part.only_in_b:,}"),
            "Agreement": percent(part.agreement, 3),
            **{f"Of {name}": f"{percent(c.agreement, 2) or '–'} of {c.ids:,}" for name, c in part.classes.items()},
            **{title: part.score and Number(f"{getattr(part.score, name):.2e}") for title, name in differences},
            "Within tolerance": part.score and percent(part.score.share_within_tolerance, 2),
            "allclose 1e-3": part.score and said[part.score.allclose],
            "Same bytes": c.bitwise and said[c.bitwise.identical],
        }
        for c, kind, part in parts
        if part is not None
    )


def _bottleneck(report: Report) -> Section:
    b, word = report.bottleneck, {True: "expected", False: "actionable"}
    losses = Table(
        {
            "Loss": loss.kind,
            "Saves at most": number(loss.saves_s, 1, " s"),
            "Share of time": percent(loss.share),
            "Verdict": word[loss.expected],
            "What": loss.detail,
            "Advice": loss.advice,
        }
        for loss in report.losses
        if loss.share is not None
    )
    saves = f"; removing it would save {b.saves_s:.1f} s at most, {percent(b.share)} of the time" if losses.rows else ""
    prose = f"({word[b.expected]}): {b.detail}{saves}. Advice: {b.advice}."
    return Section("Bottleneck", (prose, *report.findings), (losses,), b.kind)


def _attempts(report: Report) -> Table:
    """Every attempt of the runs that took more than one; their sums are the runs' own figures."""
    return Table(
        (
            {
                "Run": run.name,
                "Started": one.started,
                "Rest": number(one.wall_s, 2, " s"),
                "First batch to last commit": number(one.worked_s, 2, " s"),
                "Shards": one.shards,
                "Deaths": "; ".join(one.deaths) or "none",
                "Telemetry": one.telemetry or "none",
            }
            for run in report.runs
            for one in run.attempts
            if len(run.attempts) > 1
        ),
        "Attempts",
    )


def _regression(report: Report) -> Section:
    if (found := report.regression) is None:
        return Section("Regression")
    against = f"against {found.against_commit} of {found.against_created}" if found.against_commit else ""
    metrics = Table(
        {
            "Metric": m.name,
            "Before": number(m.before, 2),
            "Now": number(m.now, 2),
            "Change": percent(m.change),
            "Verdict": Mark(m.verdict),
        }
        for m in found.metrics
    )
    return Section("Regression", (": ".join(filter(None, (against, found.reason))),), (metrics,), Mark(found.verdict))


def accounts(report: Report) -> Table:
    """What became of the reads of the run that is judged, the remarks on them, and what never became a read."""
    if (found := report.accounting) is None:
        return Table(())

    def row(what: str, n: int | None) -> dict[str, object]:
        return {"What": what, "Count": n, "Share": percent(n / found.reads if found.reads and n is not None else None)}

    whole = "sum of the fates" if found.adds_up else "sum of the fates: does NOT add up"
    left = (("records skipped", found.skipped_records), ("files ignored", found.ignored_files))
    return Table(
        (
            *(row(name, n) for name, n in found.fates.items()),
            row(whole, sum(found.fates.values())),
            row("reads that came in", report.run.n_reads if report.run else None),
            *(row(f"reads: {name}", n) for name, n in found.flags.items()),
            *({"What": name, "Count": "not recorded" if n is None else n, "Share": None} for name, n in left),
        )
    )


def _content(found: FileDigest | None) -> str:
    return ", through a pipe" if found is None else f", {found.size:,} bytes, SHA-256 {found.sha256}"


def _provenance(report: Report) -> Table:
    made = report.provenance
    rows = [
        ("created", made.created),
        ("host", made.host),
        ("sample", made.sample),
        *((f"reads: {f.file}", f"{f.reads:,}{_content(f.content)}") for f in made.inputs),
        ("virnuc", made.virnuc_version),
        ("commit", made.git_commit),
        ("model length", made.model_length and str(made.model_length)),
        *((f"fingerprint of {part}", digest) for part, digest in made.fingerprints.items()),
        *((f"seed of {part}", str(seed)) for part, seed in made.seeds.items()),
        *made.versions.items(),
        *made.settings.items(),
    ]
    return Table({"What": what, "Value": value} for what, value in rows)
