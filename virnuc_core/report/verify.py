"""Does a report say what its raw files say? Every number is computed again, and every difference is named.

Three things are held against each other: the report's forms against the report's data, the data against what the raw
files give now, and the raw files against what is rawer still: shards, reads, samples and batches. Each part is looked
at by itself, several at a time where there is much to read. Rows are held a piece at a time, however many there are."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.config import DEFAULT_THRESHOLD, OnShare
from virnuc_core.engine.shards import read_plan, read_scores
from virnuc_core.errors import InputError, StorageError, VirnucError
from virnuc_core.profiles import load_profile, profile_names
from virnuc_core.reads.parse import BLOCK_BYTES
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import COLUMNS, OrfStore
from virnuc_core.reads.subsets import choose_reads
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL
from virnuc_core.reads.workers import Workers
from virnuc_core.report import build, regression
from virnuc_core.report.charts import GENERATOR
from virnuc_core.report.compare import compare, compared_sides
from virnuc_core.report.model import ABSENT, BASELINE, Verification
from virnuc_core.report.raw_files import (
    COMPARISON,
    RECORD,
    SUMMARY,
    NamedTelemetry,
    RawFolder,
    run_names,
)
from virnuc_core.report.render import REPORT_JSON, render
from virnuc_core.report.result_tables import iterate_results, load_results
from virnuc_core.results import write_results
from virnuc_core.rundir import EXACT_FILES, RunDir
from virnuc_core.runfiles import Attempt, FileDigest, RunRecord, RunSummary, digest, identity, read
from virnuc_core.telemetry.log import TelemetryFile, telemetry_file
from virnuc_core.telemetry.statistics import committed_span_s
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import (
    OVERHEAD,
    BaselineSummary,
    Comparison,
    ComparisonFile,
    OverheadFile,
    ValidationRecord,
)

DRAWN: Final = re.compile(
    r'<meta name="generator"[^>]*>|data:image/svg\+xml;base64,[A-Za-z0-9+/=]+'
)
MANY_BYTES: Final = (
    16_000_000  # of result rows: less is looked at before another process has started
)
CLOCK_S: Final = 1e-3
UNCOMMITTED_S: Final = (
    0.01  # a shard that is not written takes less than this where a commit would be
)
ENDS: Final = 2  # start and end tokens of a row


def verify_report(
    out: Path, profile: str | None = None, on_part: OnShare = lambda _: None
) -> Verification:
    """Compute every number of `out/report/` again, as judged by `profile` where that is neither the validation's nor
    virnuc's own; `on_part` hears the share of the work done. Errors: `InputError` without a report, `WorkerError`."""
    build.read_report(RunDir(out).report / REPORT_JSON)
    once, compared = run_names(out), RawFolder(out).read(ComparisonFile, COMPARISON)
    names = (*once, *(again for name in once for again in run_names(out, f"{name}.")))
    parts = [
        _made_of,
        partial(_report, asked=profile),
        verify_store,
        *(partial(verify_results, name=name) for name in once),  # of a repeat the measurements stay
        *(partial(verify_run, name=name) for name in names),
        *(partial(_comparison, said=said) for said in (compared.comparisons if compared else ())),
        verify_baseline,
        verify_overhead,
    ]
    rows = sum(
        path.stat().st_size for name in names if (path := RunDir(out / name).predictions).is_file()
    )
    whole = Verification()
    with Workers(len(os.sched_getaffinity(0)) if rows > MANY_BYTES else 1) as workers:
        for done, found in enumerate(workers.map(partial(_verified, out), parts), start=1):
            whole.figures += found.figures
            whole.differences += [
                line for line in found.differences if line not in whole.differences
            ]
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
    names = (*run_names(raw.root), BASELINE)
    records = {
        name: record for name in names if (record := raw.read(RunRecord, name, RECORD)) is not None
    }
    first = next(map(identity, records.values()), {})  # all are of the same reads and weights
    for name, record in records.items():
        own, summary = identity(record), raw.read(RunSummary, name, SUMMARY)
        for part in sorted(own.keys() & first.keys()):
            found.same(f"{name}/{RECORD}: {part}", own[part], first[part])
        if summary is not None and summary.devices:
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
            f"profile {name}: neither what the validation began with nor virnuc's own; name it: --profile FILE"
        )
    else:
        found.same("profile", report.profile, wanted)
    if shipped not in (None, wanted):
        found.remarks.append(f"profile {name}: not virnuc's own of this name")
    fresh = build.build_report(out, report.profile)
    if (
        fresh.approval
        and fresh.approval.reviewer
        and not (report.approval and report.approval.reviewer)
    ):
        found.remarks.append(
            "a reviewer has answered since this report was made; virnuc report DIR shows the answer"
        )
        evidence = {
            name: file for name, file in fresh.evidence.items() if Path(name).name != build.APPROVAL
        }
        fresh = fresh.model_copy(
            update={"approval": report.approval, "evidence": evidence}
        )  # changes no number
    found.same("", report, fresh)
    told, whole = (
        raw.read(ComparisonFile, COMPARISON),
        [run.name for run in fresh.runs if not run.stopped_at_limit],
    )
    compared = [[one.a, one.b, one.tolerance] for one in told.comparisons] if told else []
    tolerance = (began or report.profile).score_tolerance
    found.same(
        f"{COMPARISON}: pairs",
        compared,
        [[pair.a, pair.b, tolerance] for pair in compared_sides(out, whole)],
    )
    for form, content in render(fresh).items():
        path = folder / form
        if not path.is_file():
            found.wrong(f"report/{form}: missing")
            continue
        pages = [path.read_text(encoding="utf-8", errors="replace"), content]
        if (
            form.endswith(".html") and f'content="{GENERATOR}"' not in pages[0]
        ):  # another version may draw otherwise
            pages = [DRAWN.sub("", page) for page in pages]
        said, true = (page.encode().splitlines() for page in pages)
        found.same_lines(f"report/{form}", said, true, "the raw files")
    if began not in (None, report.profile):
        fresh = build.build_report(out, began)  # as the history was written
    if (out / regression.REGRESSION).is_file() and (
        entry := regression.entry_of(fresh)
    ) is not None:
        kept = read(out / regression.REGRESSION, regression.RegressionFile)
        found.same(f"{regression.REGRESSION}: entry", kept.entry, entry)
        _history(
            found,
            kept,
            Path(
                (record and record.spec.get("history"))
                or out.absolute().parent / regression.HISTORY
            ),
        )


def _history(found: Verification, kept: regression.RegressionFile, path: Path) -> None:
    """The runs that this one was held against, and itself, as the history has them."""
    if not path.is_file():
        found.remarks.append(
            f"{regression.REGRESSION} was not held against the history: {path} is not there"
        )
        return
    lines = regression.read_history(path)
    for entry in (*kept.history, kept.entry):
        # judged anew, a run keeps its line
        again = (
            entry.model_dump(include={"criteria_met", "regression_percent"})
            if entry is kept.entry
            else {}
        )
        same = [
            line.model_copy(update=again)
            for line in lines
            if line.same(entry, ("created", *regression.SERIES_FIELDS))
        ]
        if entry not in same:
            where = f"{regression.REGRESSION}: the run of {entry.created} against {path.name}"
            found.same(where, entry, same[0] if same else ABSENT)


def _comparison(found: Verification, raw: RawFolder, said: Comparison) -> None:
    """Two results, held against each other again."""
    subset, bits, embeddings = (
        said.subset_reads is not None,
        said.a not in (BASELINE, EXACT_FILES),
        said.a == EXACT_FILES,
    )
    a, b = raw.root / said.a, raw.root / said.b
    again = compare(
        a, b, tolerance=said.tolerance, subset_of_a=subset, bits=bits, embeddings=embeddings
    )
    found.same(f"{COMPARISON}: {said.a} and {said.b}", said, again)


def verify_results(found: Verification, raw: RawFolder, name: str) -> None:
    """One run's result files: as its summary lists them, and as the shards give them."""
    summary, run, where = (
        raw.read(RunSummary, name, SUMMARY),
        RunDir(raw.root / name),
        f"{name}/{SUMMARY}",
    )
    if summary is None:
        return
    _digests(found, run, summary.files)
    if not (run.plan.is_file() and RunDir(raw.root).store.is_file()):
        found.remarks.append(
            f"{name}: its result files were not made again: its shards or orfs.h5 are not there"
        )
        return
    store, plan = OrfStore.open(RunDir(raw.root).store), read_plan(run)
    scores, failed = read_scores(run)
    counted = {
        "shards": len(plan),
        "n_uniques": plan.bounds[-1],
        "rows_set_aside": int(failed.sum()),
    }
    found.as_told(where, summary, counted)
    threshold = DEFAULT_THRESHOLD if summary.threshold is None else summary.threshold
    with TemporaryDirectory(prefix="virnuc-verify-") as folder:
        again = RunDir(Path(folder))
        made = write_results(
            again, store, scores, failed, threshold=threshold, uncertain=summary.uncertain
        )
        for path, fresh in zip(run.tables, again.tables, strict=True):
            if fresh.is_file() and not path.is_file():
                found.wrong(f"{name}/{path.name}: missing")
            elif fresh.is_file():
                with path.open("rb") as said, fresh.open("rb") as true:
                    found.same_lines(f"{name}/{path.name}", said, true, "its shards")
        told = ("fates", "rows_virus", "chunks_virus", "chunks_scored")
        found.as_told(where, summary, {key: getattr(made, key) for key in told})


def _digests(found: Verification, run: RunDir, files: dict[str, FileDigest] | None) -> None:
    for file, told in (files or {}).items():
        found.same(f"{run.root.name}/{file}, which {SUMMARY} lists", told, digest(run.root / file))


def verify_run(found: Verification, raw: RawFolder, name: str) -> None:
    """One run's summary against its telemetry, and its telemetry summary against the samples."""
    summary, where = raw.read(RunSummary, name, SUMMARY), f"{name}/{SUMMARY}"
    if summary is None:
        return
    only = Attempt(started="", devices=(), wall_s=summary.wall_s, telemetry=summary.telemetry)
    attempts, parts_s = summary.attempts or (only,), (summary.staging_s, summary.wall_s)
    counted = {
        "total_s": None if None in parts_s else sum(spent_s or 0.0 for spent_s in parts_s),
        "n_reads": sum(summary.fates.values()) if summary.fates else None,
        "restarts": None if summary.deaths is None else len(summary.deaths),
        "wall_s": sum(one.wall_s or 0.0 for one in attempts),
    }
    found.as_told(where, summary, counted)
    for one in attempts:
        if (one.telemetry or one is only) and (
            measured := raw.telemetry(name, one.telemetry)
        ) is not None:
            _telemetry(found, raw, measured, summary, one, newest=one is attempts[-1])


def _telemetry(
    found: Verification,
    raw: RawFolder,
    file: NamedTelemetry,
    summary: RunSummary,
    one: Attempt,
    *,
    newest: bool,
) -> None:
    """What an attempt's JSON, and of the newest the summary, tell of stages and shards, against what was measured."""
    name, telemetry, spent_s = file.name, file.content, one.wall_s
    batches, shards, used = telemetry.batches, telemetry.shards, telemetry.samples.utilisation
    ends = (
        *(stage.finished_s or 0.0 for stage in telemetry.stages),
        float(shards.finished_s.max()),
    )
    if spent_s is not None and (last_s := max(ends) - telemetry.origin_s) > spent_s + CLOCK_S:
        found.wrong(
            f"{name}: {SUMMARY}: wall_s says {spent_s:.3f}, the last stage ended after {last_s:.3f} s"
        )
    if newest and telemetry.stages:
        found.same(
            f"{name}: stages of {SUMMARY}",
            summary.stages,
            {one.name: one.seconds for one in telemetry.stages},
        )
    done = summary.shards_computed
    counted = {
        "shards_computed": len(shards) if newest else None,
        "rows_set_aside": int(shards.skipped.sum()) if len(summary.attempts) < 2 else None,
        "shards": None if done is None else done + (summary.shards_reused or 0),
    }
    found.as_told(f"{name}: {SUMMARY}", summary, counted)
    for what, wrong in (
        ("batches with more tokens than slots", batches.tokens > batches.slots),
        ("batches with a negative wait", batches.wait_ms < 0),
        ("utilisation samples outside 0 to 100", (used < 0) | (used > 100)),
    ):
        found.same(f"{name}: {what}", int(wrong.sum()), 0)
    if len(shards) and not shards.skipped.any():
        for encoder, told_by in (("esm2", shards.protein_tokens), ("dnabert_s", shards.dna_tokens)):
            tokens = int(batches.tokens[batches.encoder == encoder].sum())
            found.same(f"{name}: tokens of {encoder}", tokens, int(told_by.sum()))
    beside = Path(name).with_suffix(".json").as_posix()
    said = read(raw.root / beside, TelemetryFile)
    reads, wall_s = said.summary.total_sequences, said.summary.wall_s
    hourly = (
        summary if newest else said.summary
    ).sequences_per_hour  # it may have been whole until a shard was lost
    again = telemetry_file(
        telemetry, n_reads=reads, wall_s=wall_s, window_s=said.window_s, sequences_per_hour=hourly
    )
    found.same(beside, said, again)
    found.as_told(f"{name}: {SUMMARY}", summary, {"n_reads": reads})
    if spent_s is not None:
        found.same(f"{name}: wall_s of {SUMMARY}", spent_s, wall_s)


def verify_baseline(found: Verification, raw: RawFolder) -> None:
    """The baseline's scaled time against its stages, its rows against its file, its reads against the profile's."""
    summary, where = raw.read(BaselineSummary, BASELINE, SUMMARY), f"{BASELINE}/{SUMMARY}"
    record = raw.read(ValidationRecord, RECORD)
    asked_reads = record.profile.baseline.reads if record and record.profile else None
    if summary is None or summary.measured_s is None:
        return
    _digests(found, RunDir(raw.root / BASELINE), summary.files)
    whole = (
        summary.measured_s if summary.subset is None or summary.wall_s is None else summary.wall_s
    )
    found.as_told(where, summary, {"wall_s": whole})
    spent, spent_measured = sum(summary.stages.values()), sum(summary.measured_stages.values())
    started_s = max(
        0.0, summary.measured_s - spent_measured
    )  # starting processes is paid once, however many the reads
    if spent and spent_measured and not spent - CLOCK_S <= whole <= spent + started_s + CLOCK_S:
        found.wrong(
            f"{where}: {whole:.3f} s is not what its stages add up to ({spent:.3f} s and the start)"
        )
    if summary.subset is not None and summary.measured_rows and summary.n_rows is not None:
        growth = summary.n_rows / summary.measured_rows
        for stage in (*STAGES[:4], *STAGES[6:]):  # those without a model grow with the rows
            if stage in summary.measured_stages and stage in summary.stages:
                found.same(
                    f"{where}: stages.{stage}",
                    summary.stages[stage],
                    summary.measured_stages[stage] * growth,
                )
    if summary.subset is not None and asked_reads is not None and summary.n_reads is not None:
        found.same(
            f"{where}: subset.reads", summary.subset.reads, min(asked_reads, summary.n_reads)
        )
    if (predictions := RunDir(raw.root / BASELINE).predictions).is_file():
        found.as_told(
            where, summary, {"measured_rows": sum(map(len, iterate_results(predictions)))}
        )


def verify_store(found: Verification, raw: RawFolder) -> None:
    """Reads, rows, uniques and tokens as the store counts them, where the validation still has its store."""
    if not RunDir(raw.root).store.is_file():
        return
    store = OrfStore.open(RunDir(raw.root).store)
    counted = count_store(store)
    record, baseline = (
        raw.read(ValidationRecord, RECORD),
        raw.read(BaselineSummary, BASELINE, SUMMARY),
    )
    if record is not None and "reads" in record.fingerprints:
        found.same(
            f"{RECORD}: fingerprint of the reads", record.fingerprints["reads"], store.fingerprint
        )
    told = {
        f"{name}/{SUMMARY}": raw.read(RunSummary, name, SUMMARY) for name in run_names(raw.root)
    }
    staging = None if record is None else record.staging
    for where, said in {
        **told,
        f"{RECORD}: staging": staging,
        f"{BASELINE}/{SUMMARY}": baseline,
    }.items():
        if said is not None:
            found.as_told(where, said, counted)
    predictions = RunDir(raw.root / BASELINE).predictions
    if baseline is not None and baseline.subset is not None and predictions.is_file():
        drawn = baseline_tokens(store, predictions, baseline.subset.reads, baseline.subset.seed)
        tokens = {"tokens": drawn, "total_tokens": counted["row_tokens"]}
        found.as_told(f"{BASELINE}/{SUMMARY}: subset", baseline.subset, tokens)
    _make_again(found, store, record)


def _make_again(found: Verification, store: OrfStore, record: ValidationRecord | None) -> None:
    """The store against one that is staged again from its reads, or a remark that says why it is not."""
    files = () if record is None or record.staging is None else record.staging.files
    gone = next((f"{name} is not there" for name in files if not Path(name).is_file()), "")
    if record is None or not files or gone:
        why = gone or "run.json does not tell where they are"
        found.remarks.append(f"orfs.h5 was not made again from its reads: {why}")
        return
    two = [pair for pair in record.pairs or () if pair[0] != pair[1]]
    reads = tuple(name for name in files if not any(name in pair for pair in two))
    spec = StageSpec(
        reads=reads,
        mates_1=tuple(first for first, _ in two),
        mates_2=tuple(second for _, second in two),
        interleaved=len(two) + len(reads) == len(record.pairs or ()),  # else flags tell it again
        pairs=bool(record.pairs),
        model_length=store.model_length,
        read_group=str(record.spec.get("read_group", "")),
        on_error="skip" if record.spec.get("on_error") == "skip" else "stop",
        stage_workers=len(os.sched_getaffinity(0)),
    )
    with TemporaryDirectory(prefix="virnuc-verify-") as folder:
        again = OrfStore.open(stage(spec, Path(folder, "orfs.h5")).store, check=False)
        found.same("orfs.h5: fingerprint of its reads", store.fingerprint, again.fingerprint)
        if store.fingerprint == again.fingerprint:
            other = [
                name for name in COLUMNS if not _equal(getattr(store, name), getattr(again, name))
            ]
            found.same("orfs.h5: columns that its reads do not give", other, [])


def _equal(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    blocks = (slice(low, low + BLOCK_BYTES) for low in range(0, len(one), BLOCK_BYTES))
    return len(one) == len(other) and all(
        np.array_equal(one[block], other[block]) for block in blocks
    )


def count_store(store: OrfStore) -> dict[str, int]:
    """What a store holds, by the names of summaries and staging; tokens are ESM-2's, start and end included."""
    lengths, flags = np.diff(store.protein_offsets), np.asarray(store.read_flags)
    bits = {
        "empty": EMPTY,
        "duplicate_ids": DUPLICATE_ID,
        "ambiguous": AMBIGUOUS,
        "short_for_model": SHORT_FOR_MODEL,
    }
    return {
        "reads": len(flags),
        **{name: int(((flags & bit) > 0).sum()) for name, bit in bits.items()},
        "n_reads": len(store.read_length),
        "n_chunks": int(np.asarray(store.read_chunks).sum(dtype=np.int64)),
        "n_rows": len(store.row_read),
        "n_uniques": len(lengths),
        "protein_tokens": int(lengths.sum()) + ENDS * len(lengths),
        "row_tokens": int(lengths[store.row_unique].sum()) + ENDS * len(store.row_read),
    }


def baseline_tokens(store: OrfStore, predictions: Path, reads: int, seed: int) -> int:
    """ESM-2 tokens of the rows of so many reads, drawn by `seed`. Errors: `InputError` for `predictions` of others."""
    drawn = np.zeros(store.n_reads, dtype=np.bool_)
    drawn[choose_reads(store.n_reads, reads, seed)] = (
        True  # drawn again: ids may stand twice, as those of mates do
    )
    chosen = np.flatnonzero(drawn[np.asarray(store.row_read)])
    ids = [store.row_ids(row, row + 1, original=True)[0] for row in chosen.tolist()]
    if load_results(predictions)["id"].tolist() != ids:
        raise InputError("its rows are not those of the reads the baseline drew", file=predictions)
    rows = np.asarray(store.row_unique)[chosen]
    return int(np.diff(store.protein_offsets)[rows].sum()) + ENDS * len(rows)


def verify_overhead(found: Verification, raw: RawFolder) -> None:
    """The pairs of runs with what is switched and without, against the telemetry and the records of both."""
    told = raw.read(OverheadFile, OVERHEAD)
    if told is None:
        return
    for pair in told.pairs:
        spans = []
        for on, run, rate in (
            (True, pair.with_run, pair.with_tokens_per_s),
            (False, pair.without_run, pair.without_tokens_per_s),
        ):
            where, record = f"{OVERHEAD}: {run}", raw.read(RunRecord, run, RECORD)
            spec = {} if record is None else record.spec
            commits = on or pair.of != "commits"
            found.same(f"{where}: commits", commits, spec.get("engine", spec).get("commit"))
            files = sorted((raw.root / run).glob("telemetry/telemetry_*.h5"))
            named = (raw.telemetry(run, file.name) for file in files)
            parts = [(part.name, part.content) for part in named if part is not None]
            tokens = sum(float(part.batches.tokens.sum()) for _, part in parts)
            if pair.of == "models":
                told_s = (
                    read((raw.root / name).with_suffix(".json"), TelemetryFile) for name, _ in parts
                )
                spans.append(sum(one.summary.wall_s for one in told_s))
            else:
                spans.append(sum(committed_span_s(part.batches, part.shards) for _, part in parts))
            found.same(f"{where}: tokens/s", rate, tokens / spans[-1] if spans[-1] else None)
            found.same(f"{where}: shards", told.shards, sum(len(part.shards) for _, part in parts))
            spent = sum(float(part.shards.commit_s.sum()) for _, part in parts)
            if not commits and spent > UNCOMMITTED_S * told.shards:
                found.wrong(f"{where} spent {spent:.3f} s on commits although they were off")
        found.same(f"{OVERHEAD}: {pair.with_run} and its pair: seconds", pair.seconds, min(spans))
