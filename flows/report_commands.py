"""`virnuc compare`, `report`, `verify`, `history`: what finished runs say, without computing on a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from flows.machine_commands import console
from flows.options import command_parser
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.rundir import RunDir

if TYPE_CHECKING:
    from virnuc_core.report.model import LabelAgreement
    from virnuc_core.report.regression import HistoryEntry


def compare(words: Sequence[str]) -> int:
    """Hold B against A; 0 when they agree to the wanted share."""
    parser = command_parser(
        "compare",
        "Agreement of two results: run directories, folders with VirNucPro's two files, or one file each.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="the reference")
    parser.add_argument("b", metavar="B", type=Path, help="what is held against it")
    parser.add_argument("--mode", choices=("both", "frame", "consensus"), default="both", help="what is compared")
    parser.add_argument("--tolerance", type=float, default=0.01, help="score difference that counts as equal")
    parser.add_argument("--minimum", type=float, default=0.99, help="agreement that is enough (0 to 1)")
    parser.add_argument("--subset", action="store_true", help="A covers a part of B's reads: compare those only")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(words)
    if arguments.tolerance < 0 or not 0 <= arguments.minimum <= 1:
        raise ConfigError("--tolerance must not be negative, --minimum lies between 0 and 1")
    from virnuc_core.report.compare import compare as hold
    from virnuc_core.report.compare import meets

    found = hold(
        arguments.a, arguments.b, tolerance=arguments.tolerance, mode=arguments.mode, subset_of_a=arguments.subset
    )
    if arguments.json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        sys.stdout.write(f"{found.a} with {found.b}\n")
        for title, part in (("per frame", found.frames), ("consensus", found.consensus)):
            if part is not None:
                sys.stdout.write("\n".join(_lines(title, part)) + "\n")
    return 0 if meets(found, arguments.minimum) else 5


def _lines(title: str, part: LabelAgreement) -> list[str]:
    agreement = "nothing to compare" if part.agreement is None else f"{100 * part.agreement:.2f} %"
    lines = [f"  {title + ':':<12}{agreement} ({part.agreeing:,} of {part.total:,} ids)"]
    if part.only_in_a or part.only_in_b:
        lines.append(f"    only in A {part.only_in_a:,}, only in B {part.only_in_b:,}: counted as disagreements")
    if part.score is not None:
        score = part.score
        lines.append(
            f"    score difference: mean {score.mean:.2e}, median {score.median:.2e}, p99 {score.p99:.2e}, "
            f"max {score.max:.2e}; {100 * score.share_within_tolerance:.2f} % within {score.tolerance:g}"
        )
    return lines + [f"    {example}" for example in part.examples]


def report(words: Sequence[str]) -> int:
    """Render the report of a validate directory again and print it."""
    parser = command_parser("report", "Render a validation's report again from its report.json, and print it.")
    parser.add_argument("dir", metavar="DIR", type=Path, help="directory of the validation")
    parser.add_argument(
        "--profile", help="judge the raw files anew by this profile, instead of rendering what was judged before"
    )
    arguments = parser.parse_args(words)
    from virnuc_core.config import load_profile
    from virnuc_core.report.render import rerender, write_report

    if arguments.profile is None:
        rerender(arguments.dir)
    else:
        write_report(arguments.dir, load_profile(arguments.profile))
    sys.stdout.write((RunDir(arguments.dir).report / "report.txt").read_text(encoding="utf-8"))
    return 0


def verify(words: Sequence[str]) -> int:
    """Recompute every figure of a report from raw files; 1 when any differs."""
    parser = command_parser("verify", "Recompute every number of a report from raw files, and name what differs.")
    parser.add_argument("dir", metavar="DIR", type=Path, help="directory of the validation")
    arguments = parser.parse_args(words)
    from virnuc_core.report.verify import report_lines, verify_report

    found = verify_report(arguments.dir)
    sys.stdout.write("\n".join(report_lines(found)) + "\n")
    return 0 if found.ok else 1


def overhead(words: Sequence[str]) -> int:
    """Time what commits cost, in the directory of a validation, and say it in the report."""
    parser = command_parser(
        "overhead",
        "Time what commits cost: pairs of runs over the first shards of a validation, with them and without.",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="directory of the validation")
    parser.add_argument("--models", metavar="PATH", type=Path, help="models directory (default: the validation's)")
    parser.add_argument("--devices", help="cuda:0,cuda:1 or cpu:2 (default: the validation's)")
    parser.add_argument("--pairs", metavar="N", type=int, default=3, help="pairs of runs; fewer than 3 say nothing")
    parser.add_argument("--shards", metavar="N", type=int, default=16, help="shards of each run, for each device")
    parser.add_argument("--force", action="store_true", help="measure again what was measured before")
    arguments = parser.parse_args(words)
    if arguments.pairs < 1 or arguments.shards < 1:
        raise ConfigError("--pairs and --shards are 1 or more")
    from virnuc_core.measure.overhead import measure_again
    from virnuc_core.report.render import write_report
    from virnuc_core.report.views import overhead_text

    profile = measure_again(
        arguments.dir,
        models=arguments.models,
        devices=arguments.devices,
        pairs=arguments.pairs,
        shards_a_device=arguments.shards,
        force=arguments.force,
    )
    report = write_report(arguments.dir, profile)
    sys.stdout.write(f"Commits cost {overhead_text(report.overhead)} of the tokens/s\n")
    return 0


def rescore(words: Sequence[str]) -> int:
    """Score stored embeddings with another head or threshold."""
    parser = command_parser("rescore", "Score a finished run's embeddings again: another head or threshold, no GPU.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("-o", "--out", metavar="PATH", type=Path, required=True, help="directory of the new results")
    parser.add_argument(
        "--head", metavar="PATH", type=Path, help="the new head: its folder, or a models directory it is in"
    )
    parser.add_argument("--threshold", type=float, default=0.5, help="viral score from which a read is viral")
    arguments = parser.parse_args(words)
    if not 0 <= arguments.threshold <= 1:
        raise ConfigError("--threshold lies between 0 and 1")
    from virnuc_core.measure.rescore import rescore as score

    summary = score(RunDir(arguments.run), arguments.head, RunDir(arguments.out), threshold=arguments.threshold)
    results = summary.results
    sys.stdout.write(f"{results.viral:,} of {results.reads:,} reads are viral\nResults: {arguments.out}\n")
    return 0


def history(words: Sequence[str]) -> int:
    """Show past validations, oldest first."""
    parser = command_parser("history", "Past validations, oldest first, as kept in a history file.")
    parser.add_argument("file", metavar="FILE", type=Path, help="virnuc-history.jsonl, beside a validation's directory")
    parser.add_argument("--profile", help="only runs of this profile")
    parser.add_argument("--chart", metavar="PATH", type=Path, help="also draw the newest series of like runs, as SVG")
    arguments = parser.parse_args(words)
    from virnuc_core.report.regression import check, read_history

    if not arguments.file.is_file():
        raise InputError("no such file", file=arguments.file, hint="a validation writes it beside its directory")
    kept = [e for e in read_history(arguments.file) if arguments.profile in (None, e.profile)]
    kept.sort(key=lambda e: e.created)
    table = Table("when", "commit", "profile", "devices", "reads", "total s", "tokens/s", "change", "met", "regression")
    for entry in kept:
        found = check(kept, entry)
        change = {metric.name: metric.change for metric in found.metrics}.get("tokens_per_s")
        table.add_row(
            entry.created,
            entry.commit[:12],
            entry.profile,
            f"{entry.devices} {entry.precision}",
            f"{entry.n_reads:,}",
            _figure(entry.total_s),
            _figure(entry.tokens_per_s),
            "–" if change is None else f"{100 * change:+.1f} %",
            str(entry.criteria_met),
            f"{found.verdict}{': ' if found.reason else ''}{found.reason}",
        )
    console().print(table)
    return 0 if arguments.chart is None else _draw(kept, arguments.chart)


def _draw(kept: Sequence[HistoryEntry], path: Path) -> int:
    """The trend of the newest run and those like it; 1 when there are not two of them."""
    from virnuc_core.report.charts import history as chart
    from virnuc_core.report.regression import points
    from virnuc_core.rundir import write_text_whole

    drawing = chart(points(kept, kept[-1])) if kept else None
    if drawing is None:
        sys.stderr.write("virnuc: fewer than two runs like the newest one: there is no trend to draw\n")
        return 1
    write_text_whole(path, drawing)
    sys.stdout.write(f"Chart: {path}\n")
    return 0


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
