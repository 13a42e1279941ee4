"""What the report shows, once: sections of prose and tables. Page, Markdown and UI only decide how it looks."""

from __future__ import annotations

from collections.abc import Iterable

from virnuc_core.profiles import Target
from virnuc_core.report.formatting import (
    TOTAL,
    Mark,
    Number,
    Section,
    Table,
    answered_text,
    cell,
    number,
    percent,
    runs_text,
    shown,
    stage_text,
    target_text,
)
from virnuc_core.report.metrics import BASELINE_TITLES
from virnuc_core.report.model import Criterion, Report, ScalingMetrics, Verdict
from virnuc_core.report.speed import attempts, bottleneck, economy, runs, telemetry_sections
from virnuc_core.telemetry.tables import ROWS, STAGES
from virnuc_core.validation import QUESTIONS, Comparison


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
        Section("Runs", (), (runs(report), attempts(report))),
        Section("Stages", (), (Table(map(seconds, rows)),)),
        Section("GPU Scaling", (), (scaling(report),)),
        *telemetry_sections(report),
        Section("Efficiency and cost", (), (economy(report),)),
        correctness(report.comparisons),
        bottleneck(report),
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


def correctness(comparisons: Iterable[Comparison]) -> Section:
    """Who was held against whom: labels, scores, bytes, embeddings, and a few ids that disagree."""
    prose, found = [], tuple(comparisons)
    for c in found:
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
            for c in found
            for cosine in c.cosines
        ),
        "Cosine of pooled embeddings",
    )
    return Section("Correctness", prose, (agreements(found), cosines))


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
            **{f"Of {name}": Number(f"{one.agreeing:,} of {one.ids:,}") for name, one in part.classes.items()},
            **{title: part.score and Number(f"{getattr(part.score, name):.2e}") for title, name in differences},
            "Within tolerance": part.score and percent(part.score.share_within_tolerance, 2),
            "allclose 1e-3": part.score and said[part.score.allclose],
            "Same bytes": c.bitwise and said[c.bitwise.identical],
        }
        for c, kind, part in parts
        if part is not None
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


def _provenance(report: Report) -> Table:
    made = report.provenance
    rows = [
        ("created", made.created),
        ("host", made.host),
        ("sample", made.sample),
        *((f"reads: {f.file}", f"{f.reads:,}{f', {f.content}' if f.content else ''}") for f in made.inputs),
        ("virnuc", made.virnuc_version),
        ("commit", made.git_commit),
        ("model length", made.model_length and str(made.model_length)),
        *((f"fingerprint of {part}", digest) for part, digest in made.fingerprints.items()),
        *((f"seed of {part}", str(seed)) for part, seed in made.seeds.items()),
        *made.versions.items(),
        *made.settings.items(),
    ]
    return Table({"What": what, "Value": value} for what, value in rows)
