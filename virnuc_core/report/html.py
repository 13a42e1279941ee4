"""`report.html`: one page that needs nothing else, for a screen, a phone and paper.

No script, no font, no image from elsewhere. Everything that came from a file or a user is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from typing import Final

from virnuc_core.report.charts import all_charts
from virnuc_core.report.markdown import GIB, MFU_HEADER, number, scaling_results
from virnuc_core.report.model import Criterion, Report
from virnuc_core.report.sections import (
    ENCODER_TITLES,
    approval_text,
    cost,
    efficiency,
    fate_lines,
    measured,
    overhead_text,
    remark_lines,
    render_extras,
    warnings_of,
)
from virnuc_core.report.text import (
    UNKNOWN,
    baseline_title,
    criterion,
    overall,
    overview_runs,
    render_text,
    shown,
    stage_text,
    target_text,
)
from virnuc_core.telemetry.clock import clock_text

SIGNS: Final = {"pass": "✓", "fail": "✗", "projected": "≈", "not run": "–"}
CLASSES: Final = {"pass": "pass", "fail": "fail", "projected": "proj", "not run": "none"}

CSS: Final = """
:root { --ink:#24292f; --soft:#57606a; --line:#d0d7de; --back:#f6f8fa; --card:#fff;
  --pass:#1a7f37; --fail:#cf222e; --proj:#9a6700; --none:#57606a; }
* { box-sizing:border-box; }
body { margin:0; color:var(--ink); background:var(--back); font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
  "Noto Sans","DejaVu Sans",sans-serif; overflow-wrap:break-word; }
main { max-width:1080px; margin:0 auto; padding:20px 16px 48px; }
h1 { font-size:1.55rem; line-height:1.2; margin:0 0 4px; }
h2 { font-size:1.15rem; margin:0 0 12px; }
h3 { font-size:1rem; margin:18px 0 8px; }
p { margin:0 0 10px; }
.meta { color:var(--soft); margin:0 0 16px; font-size:.92rem; }
section { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:16px; margin:0 0 16px; }
.verdict { display:flex; flex-wrap:wrap; align-items:baseline; gap:4px 16px; border-left:6px solid var(--none); }
.verdict strong { font-size:1.5rem; }
.verdict.pass { border-left-color:var(--pass); } .verdict.fail { border-left-color:var(--fail); }
.warn { border-left:6px solid var(--proj); }
blockquote { margin:0 0 10px; padding:2px 0 2px 12px; border-left:3px solid var(--line); }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr)); gap:8px 32px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px; margin:0 0 16px; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 12px; }
.tile b { display:block; font-size:1.25rem; line-height:1.3; }
.tile span { color:var(--soft); font-size:.85rem; }
.scroll { overflow-x:auto; margin:0 0 10px; } section > .scroll:last-child { margin:0; }
table { border-collapse:collapse; width:100%; font-size:.92rem; }
th, td { text-align:left; vertical-align:top; padding:6px 10px 6px 0; border-bottom:1px solid var(--line); }
th { color:var(--soft); font-weight:600; white-space:nowrap; }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; padding-right:20px; }
td:last-child, th:last-child { padding-right:0; } .scroll td:first-child { min-width:7.2em; }
tr:last-child td { border-bottom:0; }
.badge { display:inline-block; white-space:nowrap; font-weight:600; font-size:.82rem; padding:1px 8px;
  border-radius:10px; color:#fff; background:var(--none); }
.badge.pass { background:var(--pass); } .badge.fail { background:var(--fail); } .badge.proj { background:var(--proj); }
.why { color:var(--soft); font-size:.88rem; display:block; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr)); gap:20px 24px; }
figure { margin:0; } figcaption { font-weight:600; margin:0 0 4px; }
figure img { width:100%; height:auto; display:block; }
pre { font:13px/1.35 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace; overflow-x:auto; margin:0;
  overflow-wrap:normal; }
ul { margin:0; padding-left:1.2em; } li { margin:0 0 6px; }
.mono { font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace; font-size:.82rem; }
.files td { word-break:break-all; min-width:9em; }
@media (max-width:640px) {
  main { padding:12px 10px 32px; } section { padding:12px; }
  .cards thead { display:none; } .cards tr { display:grid; grid-template-columns:1fr auto; gap:2px 10px;
    padding:10px 0; border-bottom:1px solid var(--line); }
  .cards tr:last-child { border-bottom:0; } .cards td { border:0; padding:0; text-align:left; white-space:normal; }
  .cards td.name { grid-column:1; } .cards td.mark { grid-column:2; grid-row:1; }
  .cards td.wide { grid-column:1 / -1; } .cards td.wide:empty { display:none; }
  .cards td[data-name]::before { content:attr(data-name) ": "; color:var(--soft); }
  .prose thead { display:none; } .prose tr { display:block; padding:8px 0; border-bottom:1px solid var(--line); }
  .prose tr:last-child { border-bottom:0; } .prose td:first-child { font-weight:600; }
  .prose td, .prose td.n { display:block; border:0; padding:0; text-align:left; white-space:normal; }
  .prose td { overflow-wrap:anywhere; } .prose td[data-name]::before { content:attr(data-name) ": ";
    color:var(--soft); font-weight:400; }
  pre { font-size:10.5px; }
}
@media print {
  body { background:#fff; font-size:10.5pt; } main { max-width:none; padding:0; }
  section, .tile { border-color:#999; } figure, tr, .tile, li { break-inside:avoid; }
  .scroll { overflow:visible; } h2, h3, figcaption, thead { break-after:avoid; }
  table { font-size:8.5pt; } th { white-space:normal; } td.n, th.n { padding-right:10px; white-space:normal; }
  .tiles { grid-template-columns:repeat(4,1fr); } .charts { grid-template-columns:1fr 1fr; }
  .badge, .badge.pass, .badge.fail, .badge.proj { color:#000; background:none; border:1px solid #000; }
  pre { font-size:7.5pt; white-space:pre-wrap; }
}
"""


def render_html(report: Report) -> str:
    """The whole report as one HTML page."""
    title = f"{report.profile.title}: {overall(report)}"
    body = [
        _head(report),
        _tiles(report),
        _warnings(report),
        _notes(report),
        _approval(report),
        _criteria(report),
        _charts(report),
        _runs(report),
        _stages(report),
        _scaling(report),
        _devices(report),
        _packing(report),
        _efficiency(report),
        _correctness(report),
        _bottleneck(report),
        _regression(report),
        _fates(report),
        _printed(report),
        _definitions(report),
        _provenance(report),
        _evidence(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">\n"
        f'<meta name="generator" content="{safe(generator())}">\n'
        f"<title>{safe(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def generator() -> str:
    """What draws the charts: other versions draw the same figures in other bytes."""
    return f"virnuc, matplotlib {version('matplotlib')}"


def safe(value: object) -> str:
    """Text that cannot become markup; control characters are shown as �."""
    text = "".join(c if c in "\t\n" or c.isprintable() else "�" for c in str(value))
    return escape(text, quote=True)


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{safe(title)}</h2>\n{content}\n</section>" if content else ""


def _table(
    header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = (), *, prose: bool = False
) -> str:
    """A table; columns in `numbers` are set to the right. One of `prose` becomes a list on a narrow screen."""
    right = set(numbers)

    def line(cells: Sequence[object], tag: str) -> str:
        parts = []
        for place, content in enumerate(cells):
            named = f' data-name="{safe(header[place])}"' if prose and len(header) > 2 and place and tag == "td" else ""
            parts.append(f"<{tag}{' class=n' if place in right else ''}{named}>{safe(content)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    lines = [line(row, "td") for row in rows]
    if not lines:
        return ""
    return (
        f'<div class="scroll"><table{" class=prose" if prose else ""}><thead>{line(header, "th")}</thead><tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def badge(verdict: str) -> str:
    """A verdict as a coloured word with a sign."""
    return f'<span class="badge {CLASSES[verdict]}">{SIGNS[verdict]} {verdict.upper()}</span>'


def _head(report: Report) -> str:
    made, run = report.provenance, report.run
    meta = [
        f"profile {report.profile.name}",
        f"made {made.created}",
        f"commit {(made.git_commit or 'unknown')[:12]}",
        run.label if run else "no run",
    ]
    kind = "pass" if report.all_met else "fail" if report.failed else "none"
    counts = [
        f"{sum(c.verdict == verdict for c in report.criteria)} {verdict}"
        for verdict in ("pass", "fail", "projected", "not run")
    ]
    return (
        f"<h1>{safe(report.profile.title)}</h1>\n<p class=meta>{safe(' · '.join(meta))}</p>\n"
        f'<section class="verdict {kind}"><strong>{safe(overall(report))}</strong>'
        f"<span>{safe(' · '.join(counts))}</span></section>"
    )


def _tiles(report: Report) -> str:
    run = report.run
    telemetry = run.telemetry if run else None
    tiles = [
        (f"total time, {r.label}", UNKNOWN if r.total_s is None else clock_text(r.total_s))
        for r in overview_runs(report)
    ]
    names = {
        "scaling": "scaling",
        "speedup": f"speed-up over {baseline_title(report)}",
        "consensus": "consensus agreement",
        "gpu_utilisation": "GPU utilisation, lowest",
        "packing": "packing efficiency",
    }
    tiles += [(words, shown(criterion(report, name))) for name, words in names.items()]
    tiles.append(("reads", number(run.n_reads, 0) if run else UNKNOWN))
    tiles.append(("tokens/s", number(telemetry.tokens_per_s, 0) if telemetry else UNKNOWN))
    cells = "".join(f"<div class=tile><b>{safe(value)}</b><span>{safe(words)}</span></div>" for words, value in tiles)
    return f"<div class=tiles>{cells}</div>"


def _warnings(report: Report) -> str:
    items = "".join(f"<li>{safe(warning)}</li>" for warning in warnings_of(report))
    if not items:
        return ""
    return f'<section class="warn">\n<h2>Warnings</h2>\n<ul>{items}</ul>\n</section>'


def _approval(report: Report) -> str:
    found = report.approval
    if found is None:
        return ""
    word = {"approved": "pass", "rejected": "fail", "pending": "not run"}[found.verdict]
    who = approval_text(found).removeprefix(found.verdict)
    mark = f'<span class="badge {CLASSES[word]}">{SIGNS[word]} {found.verdict.upper()}</span>'
    note = "".join(f"<p>{safe(line)}</p>" for line in found.note.splitlines() if line.strip())
    answers = _table(["Question", "Answer"], [[a.question, a.answer] for a in found.answers])
    return _section(
        "Approval", f"<p>{mark}{safe(who)}</p>{f'<blockquote>{note}</blockquote>' if note else ''}{answers}"
    )


def _efficiency(report: Report) -> str:
    rows = [*efficiency(report.run), *cost(report), ("Checkpoint overhead", overhead_text(report.overhead))]
    return _section("Efficiency and cost", _table(["What", "Value"], rows, prose=True))


def _notes(report: Report) -> str:
    items = "".join(f"<li>{safe(note)}</li>" for note in report.notes)
    return _section("What to know before reading the figures", f"<ul>{items}</ul>" if items else "")


def _criteria(report: Report) -> str:
    content = _criteria_table(report.criteria)
    if report.checks:
        content += "<h3>Further checks</h3>" + _criteria_table(report.checks)
    return _section("Criteria", content)


def _criteria_table(criteria: Sequence[Criterion]) -> str:
    rows = []
    for c in criteria:
        samples = UNKNOWN if c.samples is None else f"{c.samples:,} {c.samples_of}"
        why = f"<span class=why>{safe(c.reason)}</span>" if c.reason else ""
        rows.append(
            f'<tr><td class="name"><b>{safe(c.title)}</b> <span class=why>{safe(c.perf_id)}</span></td>'
            f'<td class="n wide" data-name="measured">{safe(shown(c))}</td>'
            f'<td class="n wide" data-name="required">{safe(target_text(c))}</td>'
            f'<td class="mark">{badge(c.verdict)}</td>'
            f'<td class="wide">{safe(samples)}{why}</td></tr>'
        )
    return (
        '<table class="cards"><thead><tr><th>Criterion</th><th class=n>Measured</th><th class=n>Required</th>'
        "<th>Verdict</th><th>Samples</th></tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"
    )


def _charts(report: Report) -> str:
    found = []
    for title, what, svg in all_charts(report):
        data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
        image = f'<img alt="{safe(what)}" src="data:image/svg+xml;base64,{data}">'
        found.append(f"<figure><figcaption>{safe(title)}</figcaption>{image}</figure>")
    return _section("Charts", f"<div class=charts>{''.join(found)}</div>" if found else "")


def _runs(report: Report) -> str:
    rows = [
        [
            run.name,
            run.label,
            number(run.total_s, 2, " s"),
            number(run.staging_s, 2, " s"),
            number(run.n_reads, 0),
            number(run.n_rows, 0),
            number(run.n_uniques, 0),
            number(run.reads_per_s, 1),
            run.precision or UNKNOWN,
            "yes" if run.resumed else "no",
            number(run.restarts, 0),
        ]
        for run in overview_runs(report)
    ]
    header = ["Run", "Devices", "Total", "Staging", "Reads", "Rows", "Distinct", "Reads/s", "Precision", "Resumed"]
    return _section("Runs", _table([*header, "Restarts"], rows, numbers=(2, 3, 4, 5, 6, 7, 10)))


def _stages(report: Report) -> str:
    runs = overview_runs(report)
    if not runs:
        return ""
    rows = [[stage.name, *(stage_text(run.stages[i]) for run in runs)] for i, stage in enumerate(runs[0].stages)]
    return _section("Stages", _table(["Stage", *(r.label for r in runs)], rows, numbers=range(1, len(runs) + 1)))


def _scaling(report: Report) -> str:
    verdicts = {f.num_gpus: c for f, c in zip(report.scaling, report.scaling_criteria, strict=True)}
    rows = []
    for r in scaling_results(report):
        found = verdicts.get(r["num_gpus"])
        rows.append(
            [
                r["num_gpus"],
                number(r["time_seconds"], 1, " s"),
                number(r["speedup"], 2, "x"),
                number(r["efficiency"], 1, "%", 100),
                UNKNOWN if found is None else target_text(found),
                UNKNOWN if found is None else found.verdict,
            ]
        )
    header = ["Devices", "Time", "Speed-up", "Efficiency", "Required", "Verdict"]
    return _section("Scaling", _table(header, rows, numbers=range(1, 5)))


def _devices(report: Report) -> str:
    telemetry = report.run.telemetry if report.run else None
    if telemetry is None:
        return ""
    rows = [
        [
            d.device,
            number(d.esm2_percent, 1, " %"),
            number(d.dnabert_s_percent, 1, " %"),
            number(d.embedding_percent, 1, " %"),
            f"{number(d.embedding_min_percent, 0)} to {number(d.embedding_max_percent, 0)} %",
            number(d.memory_peak_bytes, 2, " GiB", 1 / GIB),
            number(d.power_mean_w, 0, " W"),
            number(d.energy_kwh, 4, " kWh"),
            d.embedding_samples,
        ]
        for d in telemetry.devices
    ]
    header = ["Device", "ESM-2", "DNABERT-S", "Embedding", "Min to max", "Peak memory", "Power", "Energy", "Samples"]
    return _section("Devices", _table(header, rows, numbers=range(1, 9)))


def _packing(report: Report) -> str:
    telemetry = report.run.telemetry if report.run else None
    if telemetry is None:
        return ""
    rows = [
        [
            ENCODER_TITLES[e.encoder],
            number(e.batches, 0),
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
    content = _table(header, rows, numbers=range(1, 9))
    if telemetry.queue is not None:
        q = telemetry.queue
        content += (
            f"<p>Waits: mean {q.mean_wait_ms:.2f} ms, p95 {q.p95_wait_ms:.2f} ms, max {q.max_wait_ms:.2f} ms; "
            f"waited over 1 ms: {100 * q.waiting_over_1ms:.1f} %.</p>"
        )
    return _section("Packing and loader", content)


def _correctness(report: Report) -> str:
    rows = []
    for c in report.comparisons:
        for kind, part in (("frames", c.frames), ("consensus", c.consensus)):
            if part is None:
                continue
            score = part.score
            rows.append(
                [
                    f"{c.a} / {c.b}",
                    kind,
                    number(part.in_both, 0),
                    f"{part.only_in_a:,} / {part.only_in_b:,}",
                    number(part.agreement, 3, " %", 100),
                    UNKNOWN if score is None else f"{score.mean:.1e}",
                    UNKNOWN if score is None else f"{score.max:.1e}",
                    UNKNOWN if score is None else number(score.share_within_tolerance, 2, " %", 100),
                ]
            )
    header = ["Pair", "What", "In both", "Only one", "Agreement", "Mean Δ", "Max Δ", "Within tolerance"]
    content = _table(header, rows, numbers=range(2, 8))
    for c in report.comparisons:
        if c.bitwise is not None:
            word = "the same bytes" if c.bitwise.identical else "different bytes: " + "; ".join(c.bitwise.differing)
            counted = f"{c.bitwise.files_compared} files, {c.bitwise.shards_compared} shards"
            content += f"<p>{safe(c.a)} and {safe(c.b)}: {safe(word)} ({counted}).</p>"
    return _section("Correctness", content)


def _bottleneck(report: Report) -> str:
    found = report.bottleneck
    expected = "expected" if found.expected else "actionable"
    content = (
        f"<p><b>{safe(found.kind)}</b> ({expected}): {safe(found.detail)}.<br>Advice: {safe(found.advice)}.</p>"
        + _table(
            ["Stage", "Share of time", "GPU utilisation", "Verdict", "Advice"],
            [
                [
                    f.stage,
                    number(f.share, 1, " %", 100),
                    number(f.utilisation, 1, " %"),
                    "expected" if f.expected else "actionable",
                    f.advice,
                ]
                for f in report.findings
            ],
            numbers=(1, 2),
            prose=True,
        )
    )
    return _section("Bottleneck", content)


def _regression(report: Report) -> str:
    found = report.regression
    if found is None:
        return ""
    against = f" against {found.against_commit} of {found.against_created}" if found.against_commit else ""
    content = f"<p>{badge(found.verdict)}{safe(against)} {safe(found.reason)}</p>" + _table(
        ["Metric", "Before", "Now", "Change", "Verdict"],
        [
            [m.name, number(m.before, 2), number(m.now, 2), number(m.change, 1, " %", 100), m.verdict]
            for m in found.metrics
        ],
        numbers=(1, 2, 3),
    )
    return _section("Regression", content)


def _fates(report: Report) -> str:
    run, found = report.run, report.accounting
    if run is None or found is None:
        return ""
    fates = _table(["Fate", "Reads"], [[name, number(n, 0)] for name, n in fate_lines(found, run.n_reads)], (1,))
    remarks = _table(["Remark", "Count"], remark_lines(found), (1,))
    return _section("Every read has a fate", f'<div class="pair">{fates}{remarks}</div>')


def _printed(report: Report) -> str:
    return _section("As printed", f"<pre>{safe(render_text(report) + render_extras(report))}</pre>")


def _definitions(report: Report) -> str:
    rows = [
        [c.title, c.definition, c.device, c.profile_line, ", ".join(c.raw)] for c in (*report.criteria, *report.checks)
    ]
    return _section(
        "How each is measured", _table(["Criterion", "Definition", "Device", "Profile", "Raw"], rows, prose=True)
    )


def _provenance(report: Report) -> str:
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
    return _section("Provenance", _table(["What", "Value"], rows, prose=True))


def _evidence(report: Report) -> str:
    rows = [[f.path, f"{f.bytes:,}", f.sha256] for f in report.evidence]
    table = _table(["File", "Bytes", "SHA-256"], rows, numbers=(1,), prose=True)
    intro = "<p>Every figure above is computed from these files; <b>virnuc verify</b> computes them again.</p>"
    return _section("Raw files", f'{intro}<div class="files mono">{table}</div>' if table else "")
