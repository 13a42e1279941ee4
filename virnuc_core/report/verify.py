"""Does a report say what its raw files say? Every number is computed again, and every difference is named.

Three things are held against each other: the report's forms against the report's data, the data against what the raw
files give now, and the raw files against what is rawer still (`verify_runs`). Each part is looked at by itself, several
at a time where there is much to read."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from virnuc_core.errors import StorageError, VirnucError
from virnuc_core.profiles import load_profile, profile_names
from virnuc_core.reads.workers import Workers
from virnuc_core.report import build, verify_runs
from virnuc_core.report.charts import GENERATOR
from virnuc_core.report.compare import compare
from virnuc_core.report.metrics import BASELINE, COMPARISON, RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.render import REPORT_JSON, render
from virnuc_core.report.verify_runs import ABSENT, Verification
from virnuc_core.rundir import EXACT, RunDir
from virnuc_core.runfiles import RunRecord, RunSummary, made_from, read
from virnuc_core.validation import Comparison, ComparisonFile, ValidationRecord

DRAWN: Final = re.compile(r'<meta name="generator"[^>]*>|data:image/svg\+xml;base64,[A-Za-z0-9+/=]+')
MANY_BYTES: Final = 16_000_000  # of result rows: less is looked at before another process has started


def verify_report(
    out: Path, profile: str | None = None, on_part: Callable[[float], None] = lambda share: None
) -> Verification:
    """Compute every number of `out/report/` again, as judged by `profile` where that is neither the validation's nor
    virnuc's own; `on_part` hears the share of the work done. Errors: `InputError` without a report, `WorkerError`."""
    build.read_report(RunDir(out).report / REPORT_JSON)
    once, compared = run_names(out), RawFolder(out).read(ComparisonFile, COMPARISON)
    names = (*once, *(again for name in once for again in run_names(out, f"{name}.")))
    parts = [
        _made_of,
        partial(_report, asked=profile),
        verify_runs.verify_store,
        *(partial(verify_runs.verify_results, name=name) for name in once),  # of a repeat the measurements stay
        *(partial(verify_runs.verify_run, name=name) for name in names),
        *(partial(_comparison, said=said) for said in (compared.comparisons if compared else ())),
        verify_runs.verify_baseline,
        verify_runs.verify_overhead,
    ]
    rows = sum(path.stat().st_size for name in names if (path := RunDir(out / name).predictions).is_file())
    whole = Verification()
    with Workers(len(os.sched_getaffinity(0)) if rows > MANY_BYTES else 1) as workers:
        for done, found in enumerate(workers.map(partial(_verified, out), parts), start=1):
            whole.figures += found.figures
            whole.differences += [line for line in found.differences if line not in whole.differences]
            whole.remarks += found.remarks
            on_part(done / len(parts))
    return whole


def _verified(out: Path, check: Callable[..., None]) -> Verification:
    """What one part of the verification finds."""
    found, raw = Verification(), RawFolder(out)
    try:
        check(found, raw)
    except StorageError as error:  # it proves nothing
        found.remarks.append(f"not everything was made again: {error}")
    except VirnucError as error:
        found.wrong(str(error))
    for line in raw.problems.values():
        found.wrong(line)
    return found


def _made_of(found: Verification, raw: RawFolder) -> None:
    """What all runs have in common: reads, weights, and devices that the validation had."""
    records = {name: raw.read(RunRecord, name, RECORD) for name in (*run_names(raw.root), BASELINE)}
    made = {name: made_from(record) for name, record in records.items() if record is not None}
    first = next(iter(made.values()), {})  # all are of the same reads and weights
    for name, own in made.items():
        for part in sorted(own.keys() & first.keys()):
            found.same(f"{name}/{RECORD}: {part}", own[part], first[part])
    for name, record in records.items():
        summary = raw.read(RunSummary, name, SUMMARY)
        if record is not None and summary is not None and summary.devices:
            used, said = ([one.model_dump() for one in side.devices] for side in (summary, record))
            found.same(f"{name}/{RECORD}: devices", said, used)


def _report(found: Verification, raw: RawFolder, asked: str | None = None) -> None:
    """The report against one that is made anew, and every form on disk against what the data renders to."""
    folder, out = RunDir(raw.root).report, raw.root
    report, record = build.read_report(folder / REPORT_JSON), raw.read(ValidationRecord, RECORD)
    name, began = report.profile.name, None if record is None else record.profile
    shipped = load_profile(name) if name in profile_names() else None
    wanted = load_profile(asked) if asked else began if began and began.name == name else shipped
    if wanted is None:
        found.wrong(
            f"profile {name}: the validation was not started with it, and it is none of virnuc's own; if it is "
            "a file of yours, name it: --profile FILE"
        )
    else:
        found.same("profile", report.profile, wanted)
    if shipped not in (None, wanted):
        found.remarks.append(f"profile {name}: not virnuc's own of this name")
    fresh = build.build_report(out, report.profile)
    if fresh.approval and fresh.approval.reviewer and not (report.approval and report.approval.reviewer):
        found.remarks.append("a reviewer has answered since this report was made; virnuc report DIR shows the answer")
        evidence = {name: file for name, file in fresh.evidence.items() if Path(name).name != build.APPROVAL}
        fresh = fresh.model_copy(update={"approval": report.approval, "evidence": evidence})  # changes no number
    found.same("", report, fresh)
    for form, content in render(fresh).items():
        path = folder / form
        if not path.is_file():
            found.wrong(f"report/{form}: missing")
            continue
        pages = [path.read_text(encoding="utf-8", errors="replace"), content]
        if form.endswith(".html") and f'content="{GENERATOR}"' not in pages[0]:  # another version may draw otherwise
            pages = [DRAWN.sub("", page) for page in pages]
        said, true = (page.encode().splitlines() for page in pages)
        found.same_lines(f"report/{form}", said, true, "the raw files")
    if began not in (None, report.profile):
        fresh = build.build_report(out, began)  # as the history was written
    if (out / build.REGRESSION).is_file() and (entry := build.entry_of(fresh)) is not None:
        kept = read(out / build.REGRESSION, build.RegressionFile)
        found.same(f"{build.REGRESSION}: entry", kept.entry, entry)
        _history(found, kept, Path((record and record.spec.get("history")) or out.absolute().parent / build.HISTORY))


def _history(found: Verification, kept: build.RegressionFile, path: Path) -> None:
    """The runs that this one was held against, and itself, as the history has them."""
    if not path.is_file():
        found.remarks.append(f"{build.REGRESSION} was not held against the history: {path} is not there")
        return
    lines = build.read_history(path)
    for entry in (*kept.history, kept.entry):
        same = [line for line in lines if line.created == entry.created and line.same(entry, build.SERIES)]
        if entry not in same:
            where = f"{build.REGRESSION}: the run of {entry.created} against {path.name}"
            found.same(where, entry, same[0] if same else ABSENT)


def _comparison(found: Verification, raw: RawFolder, said: Comparison) -> None:
    """Two results, held against each other again."""
    subset, bits, embeddings = said.subset_reads is not None, said.bitwise is not None, said.a == EXACT
    a, b = raw.root / said.a, raw.root / said.b
    again = compare(a, b, tolerance=said.tolerance, subset_of_a=subset, bits=bits, embeddings=embeddings)
    found.same(f"{COMPARISON}: {said.a} and {said.b}", said, again)
