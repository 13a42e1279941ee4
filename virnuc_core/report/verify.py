"""Does a report say what its raw files say? Every number is computed again, and every difference is named.

Three things are held against each other: the report's forms against the report's data, the data against what the raw
files give now, and the raw files against what is rawer still (scores, reads, samples and batches).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import VirnucError
from virnuc_core.profiles import Profile, load_profile, profile_names
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.approval import answered, without_answer
from virnuc_core.report.build import REGRESSION, build_report, read_comparisons
from virnuc_core.report.charts import generator
from virnuc_core.report.compare import (
    Mode,
    agreement,
    bitwise,
    compare,
    cosines,
    derive_consensus,
    load_results,
)
from virnuc_core.report.files import BASELINE, RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.model import Report
from virnuc_core.report.regression import RegressionFile, entry_of
from virnuc_core.report.render import REPORT_JSON, read_report, render
from virnuc_core.report.stored import baseline_tokens, count_store, staging_tally
from virnuc_core.results import read_reads_table
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile, RunRecord, RunSummary, differing, made_from, read
from virnuc_core.telemetry.log import Telemetry, TelemetryFile, telemetry_file
from virnuc_core.telemetry.statistics import committed_tokens_per_s
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import OVERHEAD, BaselineSummary, Comparison, OverheadFile, OverheadPair, ValidationRecord

RELATIVE: Final = 1e-9  # the last digits of a sum may depend on the machine
CLOCK_S: Final = 1e-3
UNCOMMITTED_S: Final = 0.01  # a shard that is not written takes less than this where a commit would be
GENERATOR: Final = re.compile(r'<meta name="generator"[^>]*>')
IMAGE: Final = re.compile(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+")
ABSENT: Final = "nothing"


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
        if isinstance(said, RunFile) and isinstance(found, RunFile):
            self.same(where, said.model_dump(mode="json"), found.model_dump(mode="json"))
        elif isinstance(said, dict) and isinstance(found, dict):
            for key in dict.fromkeys((*said, *found)):
                self.same(f"{where}.{key}" if where else str(key), said.get(key, ABSENT), found.get(key, ABSENT))
        elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
            for place, (left, right) in enumerate(zip(said, found, strict=True)):
                self.same(f"{where}[{place}]", left, right)
        else:
            self.figures += 1
            if not _equal(said, found):
                self.differences.append(f"{where}: says {_brief(said)}, the raw files give {_brief(found)}")

    def as_told(self, where: str, said: RunFile, counted: Mapping[str, object]) -> None:
        """Compare the fields of a file that it tells with what was counted."""
        for key, value in counted.items():
            if (told := getattr(said, key)) is not None:
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


def _equal(a: object, b: object) -> bool:
    numbers = (int, float)
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, numbers) or not isinstance(b, numbers):
        return a == b
    return a == b or math.isclose(a, b, rel_tol=RELATIVE)


def _brief(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 90 else f"{text[:87]}…"


def verify_report(out: Path) -> Verification:
    """Compute every number of `out/report/` again. Raises `InputError` when there is no report to verify."""
    folder = RunDir(out).report
    found, raw = Verification(), RawFolder(out)
    report = read_report(folder / REPORT_JSON)
    _profile(found, raw, report.profile)
    again = _as_answered(found, report, build_report(out, report.profile))
    found.same("", report, again)
    _forms(found, folder, again)
    if (out / REGRESSION).is_file() and (entry := entry_of(again)) is not None:
        with found.noting():
            found.same(f"{REGRESSION}: entry", read(out / REGRESSION, RegressionFile).entry, entry)
    for name in run_names(out):
        with found.noting():
            _run(found, raw, name)
    with found.noting():
        _store(found, raw)
    _baseline(found, raw, report.profile.baseline.reads)
    _comparisons(found, raw)
    _one_job(found, raw)
    for line in (*contradictions(out), *raw.remarks()):
        found.wrong(line)
    return found


def _as_answered(found: Verification, report: Report, again: Report) -> Report:
    """What the raw files give, less an answer that came after the report was made: that changes no number."""
    if answered(report) or not answered(again):
        return again
    found.remarks.append("a reviewer has answered since this report was made; virnuc report DIR shows the answer")
    return Report.model_validate(without_answer(again) | {"approval": report.approval})


def _profile(found: Verification, raw: RawFolder, profile: Profile) -> None:
    """The thresholds are those the validation was started with, or those that come with virnuc."""
    record = raw.read(ValidationRecord, RECORD)
    recorded = None if record is None else record.profile
    if recorded is None or recorded.name != profile.name:
        recorded = load_profile(profile.name) if profile.name in profile_names() else None
    if recorded is None:
        found.wrong(f"profile {profile.name}: the validation was not started with it, and it is none of virnuc's own")
    else:
        found.same("profile", profile.model_dump(mode="json"), recorded.model_dump(mode="json"))


def _forms(found: Verification, folder: Path, again: Report) -> None:
    """Every form on disk is what the data renders to."""
    for name, content in render(again).items():
        path = folder / name
        if not path.is_file():
            found.wrong(f"report/{name}: missing")
            continue
        said = path.read_text(encoding="utf-8", errors="replace")
        found.figures += 1
        other_version = name.endswith(".html") and f'content="{generator()}"' not in said  # may draw in other bytes
        left, right = (GENERATOR.sub("", IMAGE.sub("", page)) if other_version else page for page in (said, content))
        if left != right:
            found.differences.append(f"report/{name}: {_first_difference(left, right)}")


def _first_difference(said: str, content: str) -> str:
    left, right = said.splitlines(), content.splitlines()
    for line, (a, b) in enumerate(zip(left, right, strict=False), start=1):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            begin = max(0, at - 30)
            return f"line {line} says {_brief(a[begin:])}, the raw files give {_brief(b[begin:])}"
    return f"has {len(left)} lines, the raw files give {len(right)}"


def _run(found: Verification, raw: RawFolder, name: str) -> None:
    """One run's summary against its result files and its telemetry, and its telemetry summary against the samples."""
    summary, run, where = raw.read(RunSummary, name, SUMMARY), RunDir(raw.root / name), f"{name}/{SUMMARY}"
    if summary is None:
        return
    if summary.staging_s is not None and summary.wall_s is not None:
        found.as_told(where, summary, {"total_s": summary.staging_s + summary.wall_s})
    measured = raw.telemetry(name, summary.telemetry)
    if measured is not None:
        _telemetry(found, raw.root / measured[0], measured[0], measured[1], summary)
    if run.reads_table.is_file():
        table = read_reads_table(run, {"chunks": "int64", "open_frames": "int64", "fate": "str"})
        chunks, rows = (int(table[column].sum()) for column in ("chunks", "open_frames"))
        found.as_told(where, summary, {"n_reads": len(table), "n_chunks": chunks, "n_rows": rows})
        said = {fate: n for fate, n in summary.fates.items() if n}
        if said:
            found.same(f"{where}: fates", said, {str(k): int(n) for k, n in table["fate"].value_counts().items()})
    if run.predictions.is_file():
        _results(found, run, name, summary)


def _results(found: Verification, run: RunDir, name: str, summary: RunSummary) -> None:
    """Rows and labels of the result files: against each other, and against the summary."""
    frames = load_results(run.predictions)
    failed = len(run.failed_rows.read_bytes().splitlines()) - 1 if run.failed_rows.is_file() else 0
    virus = {"n_rows": len(frames) + failed, "rows_virus": int(frames["virus"].sum())}
    found.as_told(f"{name}/{SUMMARY}", summary, virus)
    wrong = int(((frames["score2"] > frames["score1"]) != frames["virus"]).sum())
    found.same(f"{name}/{run.predictions.name}: labels that are not of the larger score", wrong, 0)
    if run.consensus.is_file():
        chunks, where = load_results(run.consensus), f"{name}/{run.consensus.name}"
        counted = {"chunks_scored": len(chunks), "chunks_virus": int(chunks["virus"].sum())}
        found.as_told(f"{name}/{SUMMARY}", summary, counted)
        votes = agreement(chunks, derive_consensus(frames), tolerance=0.0)
        found.same(f"{where}: chunks that the frames do not give", votes.total - votes.agreeing, 0)
        largest = 0.0 if votes.score is None else votes.score.max
        found.same(f"{where}: largest difference from the frames' scores", largest, 0.0)


def _telemetry(found: Verification, path: Path, name: str, telemetry: Telemetry, summary: RunSummary) -> None:
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
    impossible = {
        "batches with more tokens than slots": (batches.tokens > batches.slots).sum(),
        "batches with a negative wait": (batches.wait_ms < 0).sum(),
        "utilisation samples outside 0 to 100": ((used < 0) | (used > 100)).sum(),
    }
    for what, wrong in impossible.items():
        found.same(f"{name}: {what}", int(wrong), 0)
    if len(shards) and not shards.skipped.any():
        for words, encoder, told_by in (
            ("ESM-2", "esm2", shards.protein_tokens),
            ("DNABERT-S", "dnabert_s", shards.dna_tokens),
        ):
            tokens = int(batches.tokens[batches.encoder == encoder].sum())
            found.same(f"{name}: tokens of {words}", tokens, int(told_by.sum()))
    said = read(path.with_suffix(".json"), TelemetryFile)
    reads, wall_s = said.summary.total_sequences, said.summary.wall_s
    again = telemetry_file(telemetry, n_reads=reads, wall_s=wall_s, window_s=said.window_s)
    found.same(Path(name).with_suffix(".json").as_posix(), said, again)
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
    path = RunDir(raw.root).store
    if not path.is_file():
        return
    store = OrfStore.open(path)
    counted = count_store(store)
    in_runs = {name: counted[name] for name in ("n_reads", "n_chunks", "n_rows", "n_uniques", "protein_tokens")}
    for name in run_names(raw.root):
        if (summary := raw.read(RunSummary, name, SUMMARY)) is not None:
            found.as_told(f"{name}/{SUMMARY}", summary, in_runs)
    record = raw.read(ValidationRecord, RECORD)
    if record is not None and "reads" in record.fingerprints:
        found.same(f"{RECORD}: fingerprint of the reads", record.fingerprints["reads"], store.fingerprint)
    if record is not None and record.staging is not None:
        found.as_told(f"{RECORD}: staging", record.staging, staging_tally(store))
    baseline, predictions = raw.read(BaselineSummary, BASELINE, SUMMARY), RunDir(raw.root / BASELINE).predictions
    if baseline is not None:
        found.as_told(f"{BASELINE}/{SUMMARY}", baseline, {name: counted[name] for name in ("n_reads", "n_rows")})
    if baseline is not None and baseline.subset is not None and predictions.is_file():
        drawn = baseline_tokens(store, predictions, baseline.subset.reads, baseline.subset.seed)
        tokens = {"tokens": drawn, "total_tokens": counted["row_tokens"]}
        found.as_told(f"{BASELINE}/{SUMMARY}: subset", baseline.subset, tokens)


def _comparisons(found: Verification, raw: RawFolder) -> None:
    """Every comparison on record, done again from the results it speaks of."""
    for said in read_comparisons(raw):
        where = f"comparison.json: {said.a} and {said.b}"
        with found.noting(f"{where} cannot be compared again: "):
            found.same(where, said, repeat(raw.root, said))


def repeat(out: Path, said: Comparison) -> Comparison:
    """The comparison `said`, made anew from the run directories it names."""
    a, b = out / said.a, out / said.b
    mode: Mode = "both" if said.frames and said.consensus else "frame" if said.frames else "consensus"
    again = compare(
        a, b, tolerance=said.tolerance, mode=mode, subset_of_a=said.subset_reads is not None, names=(said.a, said.b)
    )
    update: dict[str, Any] = {}
    if said.cosines:
        update["cosines"] = cosines(a, b, dna_width(a))
    if said.bitwise is not None:
        update["bitwise"] = bitwise(a, b)
    return again.model_copy(update=update)


def dna_width(run: Path) -> int | None:
    """Width of the DNA part of a run's embeddings, as its record says."""
    record = RawFolder(run).read(RunRecord, RECORD)
    return None if record is None else record.widths.get("dna")


def _one_job(found: Verification, raw: RawFolder) -> None:
    """All runs are of the same reads and weights."""
    records = {name: raw.read(RunRecord, name, RECORD) for name in (*run_names(raw.root), BASELINE)}
    made = {name: made_from(record) for name, record in records.items() if record is not None}
    first = next(iter(made.values()), {})
    for name, own in made.items():
        found.figures += len(own)
        for part, (said, wanted) in differing(own, first).items():
            found.wrong(f"{name}/{RECORD}: {part} {said}, that of the first run is {wanted}")


def contradictions(out: Path) -> list[str]:
    """What in `checkpoint_overhead.json` its runs' telemetry and records do not bear out."""
    raw = RawFolder(out)
    found = raw.read(OverheadFile, OVERHEAD)
    said = [] if found is None else [line for pair in found.pairs for line in _of_pair(raw, found, pair)]
    return [f"{OVERHEAD}: {line}" for line in (*said, *raw.problems.get(OVERHEAD, ()))]


def _of_pair(raw: RawFolder, found: OverheadFile, pair: OverheadPair) -> Iterator[str]:
    spans = []
    for run, rate, commits in (
        (pair.with_run, pair.with_tokens_per_s, True),
        (pair.without_run, pair.without_tokens_per_s, False),
    ):
        measured = raw.telemetry(run, None)
        again = None if measured is None else committed_tokens_per_s(measured[1].batches, measured[1].shards)
        if again is None or not math.isclose(rate, again, rel_tol=RELATIVE):
            yield f"{run} says {rate} tokens/s, its telemetry gives {again}"
        record = raw.read(RunRecord, run, RECORD)
        if record is None or record.spec.get("engine", record.spec).get("commit") is not commits:
            yield f"{run} was not made with commits {'on' if commits else 'off'}"
        if measured is None:
            continue
        shards = measured[1].shards
        spans += [float(measured[1].batches.tokens.sum()) / again] if again else []
        if len(shards) != found.shards:
            yield f"{run} computed {len(shards)} shards, not {found.shards}"
        if not commits and (spent := float(shards.commit_s.sum())) > UNCOMMITTED_S * len(shards):
            yield f"{run} spent {spent:.3f} s on commits although they were off"
    if not math.isclose(pair.seconds, min(spans, default=0.0), rel_tol=RELATIVE):
        yield f"{pair.with_run} and its pair say {pair.seconds} s, telemetry gives {min(spans, default=0.0)}"


def report_lines(found: Verification) -> Iterator[str]:
    """What a person reads: one line a difference, and a last line that sums up."""
    yield from found.differences
    yield from found.remarks
    if found.ok:
        yield f"{found.figures:,} figures computed again, all as reported"
    else:
        yield f"{len(found.differences):,} of {found.figures:,} figures are not what the raw files give"
