"""Does a report say what its raw files say? Every number is computed again, and every difference is named.

Three things are held against each other: the report's forms against the report's data, the data against what the raw
files give now, and the raw files against what is rawer still (scores, reads, samples and batches).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from virnuc_core.errors import InputError, StorageError, VirnucError
from virnuc_core.profiles import load_profile, profile_names
from virnuc_core.reads.parse import BLOCK_BYTES
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import COLUMNS, OrfStore
from virnuc_core.reads.subsets import read_reads_table
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL
from virnuc_core.report.build import APPROVAL, REGRESSION, build_report
from virnuc_core.report.charts import GENERATOR
from virnuc_core.report.compare import agreement, compare, derive_consensus, load_results
from virnuc_core.report.files import BASELINE, COMPARISON, RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.model import Report
from virnuc_core.report.regression import RegressionFile, entry_of
from virnuc_core.report.render import REPORT_JSON, read_report, render
from virnuc_core.rundir import EXACT, RunDir
from virnuc_core.runfiles import RunFile, RunRecord, RunSummary, made_from, read
from virnuc_core.telemetry.log import Telemetry, TelemetryFile, telemetry_file
from virnuc_core.telemetry.statistics import committed_tokens_per_s
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import (
    OVERHEAD,
    BaselineSummary,
    ComparisonFile,
    OverheadFile,
    ValidationRecord,
    choose_reads,
)

RELATIVE: Final = 1e-9  # the last digits of a sum may depend on the machine
CLOCK_S: Final = 1e-3
UNCOMMITTED_S: Final = 0.01  # a shard that is not written takes less than this where a commit would be
DRAWN: Final = re.compile(r'<meta name="generator"[^>]*>|data:image/svg\+xml;base64,[A-Za-z0-9+/=]+')
ABSENT: Final = "nothing"
ROWS_A_BLOCK: Final = 1 << 16
ENDS: Final = 2  # start and end tokens of a row


@dataclass
class Verification:
    """What was compared, and what differs."""

    figures: int = 0
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # worth a word, but no difference

    @property
    def ok(self) -> bool:
        """Whether numbers were compared and none differs."""
        return self.figures > 0 and not self.differences

    def same(self, where: str, said: object, found: object) -> None:
        """Compare one value or a whole tree of them; each leaf counts."""
        if isinstance(said, BaseModel) and isinstance(found, BaseModel):
            self.same(where, said.model_dump(mode="json"), found.model_dump(mode="json"))
        elif isinstance(said, dict) and isinstance(found, dict):
            for key in dict.fromkeys((*said, *found)):
                self.same(f"{where}.{key}" if where else str(key), said.get(key, ABSENT), found.get(key, ABSENT))
        elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
            for place, (left, right) in enumerate(zip(said, found, strict=True)):
                self.same(f"{where}[{place}]", left, right)
        else:
            self.figures += 1
            numbers = [one for one in (said, found) if isinstance(one, (int, float)) and not isinstance(one, bool)]
            if said != found and not (len(numbers) == 2 and math.isclose(*numbers, rel_tol=RELATIVE)):
                self.differences.append(f"{where}: says {_brief(said)}, the raw files give {_brief(found)}")

    def as_told(self, where: str, said: RunFile, counted: Mapping[str, object]) -> None:
        """Compare what a file tells with what was counted; what it does not tell is passed over."""
        for key, value in counted.items():
            if (told := getattr(said, key, None)) is not None:
                self.same(f"{where}: {key}", told, value)

    def wrong(self, what: str) -> None:
        """Note a difference that is not between two values."""
        self.figures += 1
        self.differences.append(what)

    @contextmanager
    def noting(self, where: str = "") -> Iterator[None]:
        """Note what the body could not read."""
        try:
            yield
        except VirnucError as error:
            self.wrong(f"{where}{error}")


def _brief(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 90 else f"{text[:87]}…"


def verify_report(out: Path) -> Verification:
    """Compute every number of `out/report/` again. Raises `InputError` when there is no report to verify."""
    folder = RunDir(out).report
    found, raw = Verification(), RawFolder(out)
    report = read_report(folder / REPORT_JSON)
    record, name = raw.read(ValidationRecord, RECORD), report.profile.name
    recorded = None if record is None else record.profile
    if recorded is None or recorded.name != name:
        recorded = load_profile(name) if name in profile_names() else None
    if recorded is None:
        found.wrong(f"profile {name}: the validation was not started with it, and it is none of virnuc's own")
    else:
        found.same("profile", report.profile, recorded)
    fresh = build_report(out, report.profile)
    if fresh.approval and fresh.approval.reviewer and not (report.approval and report.approval.reviewer):
        found.remarks.append("a reviewer has answered since this report was made; virnuc report DIR shows the answer")
        evidence = tuple(file for file in fresh.evidence if Path(file.path).name != APPROVAL)
        fresh = fresh.model_copy(update={"approval": report.approval, "evidence": evidence})  # changes no number
    found.same("", report, fresh)
    _forms(found, folder, fresh)
    if (out / REGRESSION).is_file() and (entry := entry_of(fresh)) is not None:
        with found.noting():
            found.same(f"{REGRESSION}: entry", read(out / REGRESSION, RegressionFile).entry, entry)
    names = run_names(out)
    for name in (*names, *(again for one in names for again in run_names(out, f"{one}."))):
        with found.noting():
            _run(found, raw, name)
    with found.noting():
        _store(found, raw)
    _baseline(found, raw, report.profile.baseline.reads)
    compared = raw.read(ComparisonFile, COMPARISON) or ComparisonFile(comparisons=())
    for said in compared.comparisons:
        where = f"{COMPARISON}: {said.a} and {said.b}"
        subset, bits = said.subset_reads is not None, said.bitwise is not None
        with found.noting(f"{where} cannot be compared again: "):
            again = compare(
                out / said.a,
                out / said.b,
                tolerance=said.tolerance,
                subset_of_a=subset,
                bits=bits,
                embeddings=said.a == EXACT,
            )
            found.same(where, said, again)
    records = {name: raw.read(RunRecord, name, RECORD) for name in (*run_names(out), BASELINE)}
    made = {name: made_from(record) for name, record in records.items() if record is not None}
    first = next(iter(made.values()), {})  # all are of the same reads and weights
    for name, own in made.items():
        for part in sorted(own.keys() & first.keys()):
            found.same(f"{name}/{RECORD}: {part}", own[part], first[part])
    verify_overhead(found, raw)
    for line in raw.remarks():
        found.wrong(line)
    return found


def _forms(found: Verification, folder: Path, again: Report) -> None:
    """Every form on disk is what the data renders to."""
    for name, content in render(again).items():
        path = folder / name
        if not path.is_file():
            found.wrong(f"report/{name}: missing")
            continue
        pages = [path.read_text(encoding="utf-8", errors="replace"), content]
        if name.endswith(".html") and f'content="{GENERATOR}"' not in pages[0]:  # another version may draw otherwise
            pages = [DRAWN.sub("", page) for page in pages]
        found.figures += 1
        if pages[0] != pages[1]:
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pages, strict=False)))
            begin = max(at - 30, pages[1].rfind("\n", 0, at) + 1)
            left, right = (_brief(page[begin:].partition("\n")[0]) for page in pages)
            line = pages[1].count("\n", 0, at) + 1
            found.differences.append(f"report/{name}: line {line} says {left}, the raw files give {right}")


def _run(found: Verification, raw: RawFolder, name: str) -> None:
    """One run's summary against its result files and its telemetry, and its telemetry summary against the samples."""
    summary, run, where = raw.read(RunSummary, name, SUMMARY), RunDir(raw.root / name), f"{name}/{SUMMARY}"
    if summary is None:
        return
    if summary.staging_s is not None and summary.wall_s is not None:
        found.as_told(where, summary, {"total_s": summary.staging_s + summary.wall_s})
    if (measured := raw.telemetry(name, summary.telemetry)) is not None:
        _telemetry(found, raw.root, *measured, summary)
    if run.reads_table.is_file():
        table = read_reads_table(run, {"chunks": "int64", "open_frames": "int64", "fate": "str"})
        sums = {name: int(table[column].sum()) for name, column in (("n_chunks", "chunks"), ("n_rows", "open_frames"))}
        found.as_told(where, summary, {"n_reads": len(table), **sums})
        if said := {fate: n for fate, n in summary.fates.items() if n}:
            found.same(f"{where}: fates", said, {str(k): int(n) for k, n in table["fate"].value_counts().items()})
    if not run.predictions.is_file():
        return
    frames = load_results(run.predictions)
    failed = len(run.failed_rows.read_bytes().splitlines()) - 1 if run.failed_rows.is_file() else 0
    found.as_told(where, summary, {"n_rows": len(frames) + failed, "rows_virus": int(frames["virus"].sum())})
    wrong = int(((frames["score2"] > frames["score1"]) != frames["virus"]).sum())
    found.same(f"{name}/{run.predictions.name}: labels that are not of the larger score", wrong, 0)
    if run.consensus.is_file():
        chunks, of_chunks = load_results(run.consensus), f"{name}/{run.consensus.name}"
        found.as_told(where, summary, {"chunks_scored": len(chunks), "chunks_virus": int(chunks["virus"].sum())})
        votes = agreement(chunks, derive_consensus(frames), tolerance=0.0)
        found.same(f"{of_chunks}: chunks that the frames do not give", votes.total - votes.agreeing, 0)
        largest = 0.0 if votes.score is None else votes.score.max
        found.same(f"{of_chunks}: largest difference from the frames' scores", largest, 0.0)


def _telemetry(found: Verification, out: Path, name: str, telemetry: Telemetry, summary: RunSummary) -> None:
    """The telemetry's own JSON, and stages, shards and restarts of the summary, against samples, batches and shards."""
    batches, shards, used = telemetry.batches, telemetry.shards, telemetry.samples.utilisation
    if telemetry.stages:
        found.same(f"{name}: stages of {SUMMARY}", summary.stages, {one.name: one.seconds for one in telemetry.stages})
    told = {"shards_computed": len(shards), "rows_set_aside": int(shards.skipped.sum())}
    if summary.deaths is not None:
        told["restarts"] = len(summary.deaths)
    if summary.shards_computed is not None:
        told["shards"] = summary.shards_computed + (summary.shards_reused or 0)
    found.as_told(f"{name}: {SUMMARY}", summary, told)
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
    said = read(out / beside, TelemetryFile)
    reads, wall_s = said.summary.total_sequences, said.summary.wall_s
    hourly = summary.sequences_per_hour
    again = telemetry_file(telemetry, n_reads=reads, wall_s=wall_s, window_s=said.window_s, sequences_per_hour=hourly)
    found.same(beside, said, again)
    found.as_told(f"{name}: {SUMMARY}", summary, {"n_reads": reads, "wall_s": wall_s})


def _baseline(found: Verification, raw: RawFolder, asked_reads: int | None) -> None:
    """The baseline's scaled time against its stages, its rows against its file, its reads against the profile's."""
    summary, where = raw.read(BaselineSummary, BASELINE, SUMMARY), f"{BASELINE}/{SUMMARY}"
    if summary is None or summary.measured_s is None:
        return
    whole = summary.measured_s if summary.scaled_s is None else summary.scaled_s
    found.as_told(where, summary, {"wall_s": whole})
    spent, spent_measured = sum(summary.stages.values()), sum(summary.measured_stages.values())
    started_s = max(0.0, summary.measured_s - spent_measured)  # starting processes is paid once, however many the reads
    if spent and spent_measured and not spent - CLOCK_S <= whole <= spent + started_s + CLOCK_S:
        found.wrong(f"{where}: {whole:.3f} s is not what its stages add up to ({spent:.3f} s and the start)")
    if summary.scaled_s is not None and summary.measured_rows and summary.n_rows is not None:
        growth = summary.n_rows / summary.measured_rows
        for stage in (*STAGES[:4], *STAGES[6:]):  # those without a model grow with the rows
            if stage in summary.measured_stages and stage in summary.stages:
                found.same(f"{where}: stages.{stage}", summary.stages[stage], summary.measured_stages[stage] * growth)
    if summary.subset is not None and asked_reads is not None and summary.n_reads is not None:
        found.same(f"{where}: subset.reads", summary.subset.reads, min(asked_reads, summary.n_reads))
    predictions = RunDir(raw.root / BASELINE).predictions
    if predictions.is_file():
        found.as_told(where, summary, {"measured_rows": len(load_results(predictions))})


def _store(found: Verification, raw: RawFolder) -> None:
    """Reads, rows, uniques and tokens as the store counts them, where the validation still has its store."""
    if not RunDir(raw.root).store.is_file():
        return
    store = OrfStore.open(RunDir(raw.root).store)
    counted = count_store(store)
    record, baseline = raw.read(ValidationRecord, RECORD), raw.read(BaselineSummary, BASELINE, SUMMARY)
    if record is not None and "reads" in record.fingerprints:
        found.same(f"{RECORD}: fingerprint of the reads", record.fingerprints["reads"], store.fingerprint)
    told = {f"{name}/{SUMMARY}": raw.read(RunSummary, name, SUMMARY) for name in run_names(raw.root)}
    staging = None if record is None else record.staging
    for where, said in {**told, f"{RECORD}: staging": staging, f"{BASELINE}/{SUMMARY}": baseline}.items():
        if said is not None:
            found.as_told(where, said, counted)
    _make_again(found, store, record)
    predictions = RunDir(raw.root / BASELINE).predictions
    if baseline is not None and baseline.subset is not None and predictions.is_file():
        drawn = baseline_tokens(store, predictions, baseline.subset.reads, baseline.subset.seed)
        tokens = {"tokens": drawn, "total_tokens": counted["row_tokens"]}
        found.as_told(f"{BASELINE}/{SUMMARY}: subset", baseline.subset, tokens)


def _make_again(found: Verification, store: OrfStore, record: ValidationRecord | None) -> None:
    """The store against one that is staged again from its reads, or a remark that says why it is not."""
    files = () if record is None or record.staging is None else record.staging.files
    if record is None or not files:
        found.remarks.append("orfs.h5 was not made again from its reads: run.json does not tell where they are")
        return
    if gone := [name for name in files if not Path(name).is_file()]:
        found.remarks.append(f"orfs.h5 was not made again from its reads: {gone[0]} is not there")
        return
    spec = StageSpec(
        reads=files,
        model_length=store.model_length,
        on_error="skip" if record.spec.get("on_error") == "skip" else "stop",
        workers=len(os.sched_getaffinity(0)),
    )
    with TemporaryDirectory(prefix="virnuc-verify-") as folder:
        try:
            again = OrfStore.open(stage(spec, Path(folder, "orfs.h5")).store, check=False)
        except StorageError as error:  # of the folder for temporary files, which proves nothing
            found.remarks.append(f"orfs.h5 was not made again from its reads: {error}")
            return
        found.same("orfs.h5: fingerprint of its reads", store.fingerprint, again.fingerprint)
        if store.fingerprint == again.fingerprint:
            other = [name for name in COLUMNS if not _equal(getattr(store, name), getattr(again, name))]
            found.same("orfs.h5: columns that its reads do not give", other, [])


def _equal(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    blocks = (slice(low, low + BLOCK_BYTES) for low in range(0, len(one), BLOCK_BYTES))
    return len(one) == len(other) and all(np.array_equal(one[block], other[block]) for block in blocks)


def count_store(store: OrfStore) -> dict[str, int]:
    """What a store holds, under the names that summaries and staging give it.

    Reads by flag, chunks, rows, uniques, and ESM-2 tokens of the uniques and of all rows, start and end included.
    """
    lengths, flags = np.diff(store.protein_offsets), np.asarray(store.read_flags)
    bits = {"empty": EMPTY, "duplicate_ids": DUPLICATE_ID, "ambiguous": AMBIGUOUS, "short_for_model": SHORT_FOR_MODEL}
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
    """ESM-2 tokens of the rows of the `reads` reads that a baseline drew by `seed`.

    Raises `InputError` when its predictions are of other rows.
    """
    drawn = np.zeros(store.n_reads, dtype=np.bool_)
    drawn[choose_reads(store.n_reads, reads, seed)] = True  # drawn again: ids may stand twice, as those of mates do
    chosen = drawn[np.asarray(store.row_read)]
    ids = (
        name
        for lo in range(0, len(chosen), ROWS_A_BLOCK)
        for name in compress(store.row_ids(lo, min(lo + ROWS_A_BLOCK, len(chosen)), original=True), chosen[lo:])
    )
    if load_results(predictions)["id"].tolist() != list(ids):
        raise InputError("its rows are not those of the reads the baseline drew", file=predictions)
    rows = np.asarray(store.row_unique)[chosen]
    return int(np.diff(store.protein_offsets)[rows].sum()) + ENDS * len(rows)


def verify_overhead(found: Verification, raw: RawFolder) -> None:
    """The pairs of runs with commits and without, against the telemetry and the records of both."""
    told = raw.read(OverheadFile, OVERHEAD)
    if told is None:
        return
    for pair in told.pairs:
        spans = []
        with_commits, without = (pair.with_run, pair.with_tokens_per_s), (pair.without_run, pair.without_tokens_per_s)
        for commits, (run, rate) in ((True, with_commits), (False, without)):
            where, measured, record = f"{OVERHEAD}: {run}", raw.telemetry(run, None), raw.read(RunRecord, run, RECORD)
            spec = {} if record is None else record.spec
            found.same(f"{where}: commits", commits, spec.get("engine", spec).get("commit"))
            if measured is None:
                found.wrong(f"{where} has no telemetry")
                continue
            batches, shards = measured[1].batches, measured[1].shards
            again = committed_tokens_per_s(batches, shards)
            found.same(f"{where}: tokens/s", rate, again)
            found.same(f"{where}: shards", told.shards, len(shards))
            spans += [float(batches.tokens.sum()) / again] if again else []
            if not commits and (spent := float(shards.commit_s.sum())) > UNCOMMITTED_S * len(shards):
                found.wrong(f"{where} spent {spent:.3f} s on commits although they were off")
        found.same(f"{OVERHEAD}: {pair.with_run} and its pair: seconds", pair.seconds, min(spans, default=0.0))
