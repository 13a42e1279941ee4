"""Commands on reports of validations: `report`, `verify`, `history` and `profiles`."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from virnuc.flows.cli.options import Flag
from virnuc.flows.cli.output import show_table
from virnuc_core.errors import InputError
from virnuc_core.profiles import Profile, load_profile, profile_names
from virnuc_core.rundir import RunDir

if TYPE_CHECKING:
    from virnuc_core.report.model import Regression, Report

# exit codes
DIFFERS: Final = 1
REGRESSION: Final = 5
NOT_JUDGED: Final = 7

Directory = Annotated[Path, Parameter(name="DIR", help="directory of the validation")]


def report(out: Directory, /, *, profile: str | None = None, serve: Flag = False) -> None:
    """Render a validation's report again from its report.json, and print it.

    Args:
        profile: judge the raw files by this profile, instead of rendering earlier verdicts
        serve: show report.html to a browser on this machine until Ctrl-C
    """
    from virnuc_core.report.build import rerender, write_report
    from virnuc_core.report.raw_files import run_names

    if profile is None:
        finished_report = rerender(out)
    elif not run_names(out):
        # There are no raw files that the profile could judge.
        raise InputError(
            "holds no runs of a validation",
            file=out,
            hint="name the directory that one was written to",
        )
    else:
        finished_report = write_report(out, load_profile(profile))
    text = (RunDir(out).report / "report.txt").read_text(encoding="utf-8")
    print(text, end="")
    if serve:
        _serve_report(finished_report)


def _serve_report(finished_report: "Report") -> None:
    """Show the pages of a report to a browser on this machine, until Ctrl-C."""
    from virnuc.flows.cli.report_server import report_server
    from virnuc_core.report.render import render

    pages = render(finished_report)
    with report_server(pages) as server, suppress(KeyboardInterrupt):
        print(f"{server.address_of('report.html')} (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def verify(out: Directory, /, *, profile: str | None = None) -> int:
    """Recompute every number of a report from raw files, and name what differs; 1 when any does.

    Args:
        profile: the .toml file that was given to virnuc report, if it was a file of your own
    """
    from rich.console import Console
    from rich.progress import Progress

    from virnuc_core.report.verify import verify_report

    is_hidden = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=is_hidden) as bar:
        task = bar.add_task("Computing again", total=1.0)

        def show_progress(share: float) -> None:
            """Move the bar to a share of the work, 0 to 1."""
            bar.update(task, completed=share)

        verification = verify_report(out, profile, show_progress)
    for line in (*verification.differences, *verification.remarks):
        print(line)
    figures = verification.figures
    if verification.ok:
        print(f"{figures:,} figures computed again, all as reported")
        return 0
    n_differences = len(verification.differences)
    print(f"{n_differences:,} of {figures:,} figures are not what the raw files give")
    return DIFFERS


def history(file: Path, /, *, profile: str | None = None, check: Flag = False) -> int:
    """List past validations and answers of reviewers; exit code 5 when the newest is a regression.

    Args:
        file: virnuc-history.jsonl, beside a validation's directory
        profile: only runs of this profile
        check: for CI: compare the newest run only; exit code 7 when it cannot be judged, and 2 when
            a line was edited or removed
    """
    from virnuc_core.report.regression import (
        read_history,
        regression,
        require_whole_history,
        trend,
    )
    from virnuc_core.report.text import cell
    from virnuc_core.system_errors import is_regular_file

    entries = list(read_history(file))
    if profile is not None:
        entries = [entry for entry in entries if entry.profile == profile]
    entries.sort(key=lambda entry: entry.created)
    if not entries:
        problem = "no run of that kind is in it" if is_regular_file(file) else "no such file"
        raise InputError(problem, file=file, hint="a validation writes it beside its directory")
    if check:
        require_whole_history(file)
        return _check_newest(regression(entries, entries[-1]))
    rows = trend(entries)
    header = list(rows[0])
    cells = [[cell(value) for value in row.values()] for row in rows]
    show_table(header, cells)
    _show_answers(file, profile)
    newest = regression(entries, entries[-1])
    return REGRESSION if newest.verdict == "fail" else 0


def _show_answers(file: Path, profile: str | None) -> None:
    """Print a table of all answers of reviewers in a history, oldest first. Without any, nothing.

    Args:
        file: The history.
        profile: Only answers on runs of this profile. None: all.
    """
    from virnuc_core.report.regression import read_approvals
    from virnuc_core.report.text import cell

    rows = []
    for line in read_approvals(file):
        if profile is not None and line.profile != profile:
            continue
        answer = line.approval
        remarks = [*answer.note.splitlines(), *answer.contradictions]
        row = (line.created, line.profile, answer.when, answer.verdict, answer.reviewer)
        rows.append([*map(cell, row), "; ".join(remarks)])
    if rows:
        header = ("run", "profile", "answered", "verdict", "reviewer", "note, contradictions")
        show_table(header, rows, title="Answers of reviewers")


def _check_newest(newest: "Regression") -> int:
    """Print how the newest run compares with the one before it, and return the exit code for CI.

    Args:
        newest: The comparison of the newest run with the last run like it.

    Returns:
        0 if no metric is worse by more than the profile allows, 5 if one is, and 7 if there was no
        run to compare with, or no metric that both have.
    """
    from virnuc_core.report.text import cell
    from virnuc_core.report.views.criteria import regression_rows

    rows = regression_rows(newest)
    if rows:
        header = list(rows[0])
        show_table(header, [[cell(value) for value in row.values()] for row in rows])
    against = f"the run of {newest.against_created}" if newest.against_created else "no run"
    reason = f": {newest.reason}" if newest.reason else ""
    print(f"regression, against {against}: {newest.verdict}{reason}")
    exit_codes = {"pass": 0, "fail": REGRESSION}
    return exit_codes.get(newest.verdict, NOT_JUDGED)


def profiles(name: str | None = None, /) -> None:
    """List the profiles of `virnuc validate`. A .toml file of your own works as well.

    Args:
        name: show the thresholds of this profile, or of this .toml file
    """
    if name is None:
        _list_profiles()
    else:
        _show_thresholds(load_profile(name))


def _list_profiles() -> None:
    """Print a table of the profiles that come with virnuc."""
    rows = []
    for name in profile_names():
        profile = load_profile(name)
        devices = ", ".join(profile.device_names) or "any device"
        rows.append((profile.name, profile.title, f"≥ {profile.min_reads:,}", devices))
    show_table(("profile", "what it asks", "reads", "meant for"), rows)


def _show_thresholds(profile: Profile) -> None:
    """Print a table of what a profile asks of each criterion."""
    rows = []
    for name, target in profile.targets.items():
        criterion = name.replace("_", " ")
        threshold = f"{target.op} {target.value:g}"
        rows.append((criterion, threshold))
    # A band is the lowest and the highest expected scaling. Only the lowest is a threshold.
    for n_devices, (lowest_scaling, _) in profile.scaling_bands.items():
        # If there is a criterion `scaling`, it is about two devices, and is in the table already.
        is_target = n_devices == "2" and "scaling" in profile.targets
        if not is_target:
            rows.append((f"scaling on {n_devices} devices", f">= {lowest_scaling:g}"))
    show_table(("criterion", "threshold"), rows, f"{profile.name}: {profile.title}")
