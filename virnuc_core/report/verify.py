"""Does a report say what its raw files say? Every figure is computed again, and every difference is named.

Three things are held against each other: the report's forms against the report's data, the data against what the raw
files give now, and the raw files against what is rawer still (scores, reads, samples and batches).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from virnuc_core.config import Profile, load_profile, profile_names
from virnuc_core.errors import VirnucError
from virnuc_core.report.approval import answered, without_answer
from virnuc_core.report.build import REGRESSION, build_report, read_comparisons, run_names
from virnuc_core.report.charts import generator
from virnuc_core.report.compare import (
    Mode,
    agreement,
    bitwise,
    compare,
    cosines,
    derive_consensus,
    load_consensus,
    load_frames,
)
from virnuc_core.report.files import RECORD, SUMMARY, RawFolder, count, mapping, number, seconds, text
from virnuc_core.report.model import Comparison, Report
from virnuc_core.report.overhead import contradictions
from virnuc_core.report.regression import RegressionFile, entry_of
from virnuc_core.report.render import REPORT_JSON, read_report, render
from virnuc_core.report.stored import baseline_tokens, count_store, open_beside, staging_tally
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.batches import windows
from virnuc_core.telemetry.log import Telemetry, batches_for_json, summary_of
from virnuc_core.telemetry.records import STAGES

RELATIVE: Final = 1e-9  # the last digits of a sum may depend on the machine
CLOCK_S: Final = 1e-3
SAME_WEIGHTS: Final = ("reads", "esm2", "dnabert_s", "head")
GENERATOR: Final = re.compile(r'<meta name="generator"[^>]*>')
IMAGE: Final = re.compile(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+")


@dataclass
class Verification:
    """What was compared, and what differs."""

    figures: int = 0
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # worth a word, but no difference

    @property
    def ok(self) -> bool:
        """Whether figures were compared and none differs."""
        return self.figures > 0 and not self.differences

    def same(self, where: str, said: object, found: object) -> None:
        """Compare one value or a whole tree of them; each leaf counts."""
        if isinstance(said, dict) and isinstance(found, dict):
            for key in (*said, *(k for k in found if k not in said)):
                self.same(f"{where}.{key}" if where else str(key), said.get(key, ABSENT), found.get(key, ABSENT))
        elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
            for place, (left, right) in enumerate(zip(said, found, strict=True)):
                self.same(f"{where}[{place}]", left, right)
        else:
            self.figures += 1
            if not _equal(said, found):
                self.differences.append(f"{where}: says {_brief(said)}, the raw files give {_brief(found)}")

    def wrong(self, what: str) -> None:
        """Note a difference that is not between two values."""
        self.figures += 1
        self.differences.append(what)


ABSENT: Final = "nothing"


def _equal(a: object, b: object) -> bool:
    numbers = (int, float)
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, numbers) or not isinstance(b, numbers):
        return a == b
    return a == b or math.isclose(a, b, rel_tol=RELATIVE)


def _brief(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 90 else f"{text[:87]}…"


def verify_report(out: Path) -> Verification:
    """Compute every figure of `out/report/` again. Raises `InputError` when there is no report to verify."""
    folder = RunDir(out).report
    found = Verification()
    report = read_report(folder / REPORT_JSON)
    _profile(found, out, report.profile)
    again = _as_answered(found, report, build_report(out, report.profile))
    found.same("", report.model_dump(mode="json"), again.model_dump(mode="json"))
    _forms(found, folder, again)
    _regression(found, out, again)
    for name in run_names(out):
        _raw_run(found, out, name)
    _baseline(found, out, report.profile.baseline.reads)
    _store(found, out)
    for line in contradictions(out):
        found.wrong(line)
    _comparisons(found, out)
    _one_job(found, out)
    return found


def _as_answered(found: Verification, report: Report, again: Report) -> Report:
    """What the raw files give, less an answer that came after the report was made: that changes no figure."""
    if answered(report) or not answered(again):
        return again
    found.remarks.append("a reviewer has answered since this report was made; virnuc report DIR shows the answer")
    return Report.model_validate(without_answer(again) | {"approval": report.approval})


def _profile(found: Verification, out: Path, profile: Profile) -> None:
    """The thresholds are those the validation was started with, or those that come with virnuc."""
    said = profile.model_dump(mode="json")
    recorded = RawFolder(out).json(RECORD).get("profile")
    if isinstance(recorded, dict) and recorded.get("name") == profile.name:
        found.same("profile", said, recorded)
    elif profile.name in profile_names():
        found.same("profile", said, load_profile(profile.name).model_dump(mode="json"))
    else:
        found.wrong(f"profile {profile.name}: the validation was not started with it, and it is none of virnuc's own")


def _forms(found: Verification, folder: Path, again: Report) -> None:
    """Every form on disk is what the data renders to."""
    for name, content in render(again).items():
        path = folder / name
        if not path.is_file():
            found.wrong(f"report/{name}: missing")
            continue
        said = path.read_text(encoding="utf-8", errors="replace")
        other_version = name.endswith(".html") and f'content="{generator()}"' not in said
        left, right = (_without_charts(page) if other_version else page for page in (said, content))
        found.figures += 1
        if left != right:
            found.differences.append(f"report/{name}: {_first_difference(left, right)}")


def _without_charts(page: str) -> str:
    """A page without what another version of the drawing library may draw in other bytes."""
    return GENERATOR.sub("", IMAGE.sub("", page))


def _first_difference(said: str, content: str) -> str:
    left, right = said.splitlines(), content.splitlines()
    for line, (a, b) in enumerate(zip(left, right, strict=False), start=1):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            begin = max(0, at - 30)
            return f"line {line} says {_brief(a[begin:])}, the raw files give {_brief(b[begin:])}"
    return f"has {len(left)} lines, the raw files give {len(right)}"


def _regression(found: Verification, out: Path, again: Report) -> None:
    path = out / REGRESSION
    if not path.is_file():
        return
    entry = entry_of(again)
    said = RegressionFile.model_validate_json(path.read_bytes()).entry.model_dump(mode="json")
    found.same(f"{REGRESSION}: entry", said, None if entry is None else entry.model_dump(mode="json"))


def _raw_run(found: Verification, out: Path, name: str) -> None:
    """One run's summary against its result files and its telemetry, and its telemetry summary against the samples."""
    raw = RawFolder(out)
    summary = raw.json(name, SUMMARY)
    if not summary:
        return
    staging_s, wall_s, total_s = (seconds(summary, key) for key in ("staging_s", "wall_s", "total_s"))
    if staging_s is not None and wall_s is not None and total_s is not None:
        found.same(f"{name}/summary.json: total_s", total_s, staging_s + wall_s)
    try:
        _counts(found, RunDir(out / name), name, summary)
    except VirnucError as error:
        found.wrong(str(error))
    measured = raw.telemetry(name, summary.get("telemetry"))
    if measured is not None:
        _course(found, name, measured[1], summary)
        _telemetry(found, out, measured, summary)
    for problem in raw.problems:
        found.wrong(problem)


def _counts(found: Verification, run: RunDir, name: str, summary: dict[str, Any]) -> None:
    """Rows, reads, chunks and fates as counted in the result files."""
    if run.reads_table.is_file():
        table = pd.read_csv(run.reads_table, sep="\t", usecols=["chunks", "open_frames", "fate"], quoting=3)
        counted = {
            "n_reads": len(table),
            "n_chunks": int(table["chunks"].sum()),
            "n_rows": int(table["open_frames"].sum()),
        }
        for key, value in counted.items():
            if (said := count(summary, key)) is not None:
                found.same(f"{name}/summary.json: {key}", said, value)
        fates = {str(fate): int(n) for fate, n in table["fate"].value_counts().items()}
        said_fates = {fate: n for fate, n in mapping(summary, "fates").items() if n}
        if said_fates:
            found.same(f"{name}/summary.json: fates", said_fates, fates)
    if not run.predictions.is_file():
        return
    frames = load_frames(run.predictions)
    failed = len(run.failed_rows.read_bytes().splitlines()) - 1 if run.failed_rows.is_file() else 0
    if (rows := count(summary, "n_rows")) is not None:
        found.same(f"{name}/prediction_results.txt: rows and failed rows", len(frames) + failed, rows)
    if (virus := count(summary, "rows_virus")) is not None:
        found.same(f"{name}/summary.json: rows_virus", virus, int(frames["virus"].sum()))
    argmax = (frames["score2"] > frames["score1"]).to_numpy()
    wrong = int((argmax != frames["virus"].to_numpy()).sum())
    found.same(f"{name}/prediction_results.txt: labels that are not of the larger score", wrong, 0)
    if run.consensus.is_file():
        chunks = load_consensus(run.consensus)
        for key, value in (("chunks_scored", len(chunks)), ("chunks_virus", int(chunks["virus"].sum()))):
            if (said_chunks := count(summary, key)) is not None:
                found.same(f"{name}/summary.json: {key}", said_chunks, value)
        votes = agreement(chunks, derive_consensus(frames), tolerance=0.0)
        found.same(f"{name}/{run.consensus.name}: chunks that the frames do not give", votes.total - votes.agreeing, 0)
        largest = 0.0 if votes.score is None else votes.score.max
        found.same(f"{name}/{run.consensus.name}: largest difference from the frames' scores", largest, 0.0)


def _course(found: Verification, name: str, telemetry: Telemetry, summary: dict[str, Any]) -> None:
    """Shards and rows set aside as the workers told them, and restarts by the deaths they followed."""
    shards = telemetry.shards
    told = {"shards_computed": len(shards), "rows_set_aside": int(shards.skipped.sum())}
    if isinstance(summary.get("deaths"), list):
        told["restarts"] = len(summary["deaths"])
    if (computed := count(summary, "shards_computed")) is not None:
        told["shards"] = computed + (count(summary, "shards_reused") or 0)
    for key, value in told.items():
        if (said := count(summary, key)) is not None:
            found.same(f"{name}/summary.json: {key}", said, value)


def _telemetry(found: Verification, out: Path, measured: tuple[str, Telemetry], summary: dict[str, Any]) -> None:
    """The telemetry's own summary and windows, and the stages of summary.json, against samples, batches and shards."""
    name, telemetry = measured
    stages = {stage.name: stage.seconds for stage in telemetry.stages}
    if stages:
        found.same(f"{name}: stages of summary.json", mapping(summary, "stages"), stages)
    _bounds(found, name, telemetry)
    path = (out / name).with_suffix(".json")
    if not path.is_file():
        found.wrong(f"{path.relative_to(out)}: missing")
        return
    body = RawFolder(out).json(*path.relative_to(out).parts)
    said = mapping(body, "summary")
    reads, wall_s = count(said, "total_sequences"), seconds(said, "wall_s")
    if reads is None or wall_s is None:
        found.wrong(f"{path.relative_to(out)}: no total_sequences or wall_s")
        return
    again = json.loads(json.dumps(summary_of(telemetry, n_reads=reads, wall_s=wall_s)))
    found.same(f"{path.relative_to(out)}: summary", said, again)
    for key, value in (("n_reads", reads), ("wall_s", wall_s)):
        if key in summary:
            found.same(f"{path.relative_to(out)}: {key} of summary.json", summary[key], value)
    if length := seconds(body, "window_s"):
        cut = [asdict(w) for w in windows(telemetry.batches, telemetry.samples, length, telemetry.origin_s)]
        found.same(f"{path.relative_to(out)}: windows", body.get("windows"), json.loads(json.dumps(cut)))
    batches = json.loads(json.dumps(batches_for_json(telemetry)))
    for key, value in batches.items():
        found.same(f"{path.relative_to(out)}: {key}", body.get(key), value)


def _bounds(found: Verification, name: str, telemetry: Telemetry) -> None:
    """What no measurement can be."""
    batches, samples = telemetry.batches, telemetry.samples
    used = samples.utilisation
    checks = {
        "batches with more tokens than slots": int((batches.tokens > batches.slots).sum()),
        "batches with a negative wait": int((batches.wait_ms < 0).sum()),
        "utilisation samples outside 0 to 100": int(((used < 0) | (used > 100)).sum()),
    }
    for what, wrong in checks.items():
        found.same(f"{name}: {what}", wrong, 0)
    shards = telemetry.shards
    if len(shards) and not shards.skipped.any():
        for encoder, counted in (("esm2", shards.protein_tokens), ("dnabert_s", shards.dna_tokens)):
            launched = int(batches.of_encoder(encoder).tokens.sum())
            found.same(f"{name}: {encoder} tokens of the batches", launched, int(counted.sum()))


def _baseline(found: Verification, out: Path, asked_reads: int | None) -> None:
    """The baseline's scaled time against its stages, its rows against its file, its reads against the profile's."""
    summary = RawFolder(out).json("baseline", SUMMARY)
    wall_s, measured_s, scaled_s = (seconds(summary, key) for key in ("wall_s", "measured_s", "scaled_s"))
    if measured_s is None:
        return
    where = "baseline/summary.json"
    whole = measured_s if scaled_s is None else scaled_s
    if wall_s is not None:
        found.same(f"{where}: wall_s", wall_s, whole)
    stages, measured = mapping(summary, "stages"), mapping(summary, "measured_stages")
    spent, spent_measured = (sum(seconds(part, key) or 0.0 for key in part) for part in (stages, measured))
    started_s = max(0.0, measured_s - spent_measured)  # starting processes is paid once, however many the reads
    if stages and measured and not spent - CLOCK_S <= whole <= spent + started_s + CLOCK_S:
        found.wrong(f"{where}: {whole:.3f} s is not what its stages add up to ({spent:.3f} s and the start)")
    rows_in, rows_of_all = count(summary, "measured_rows"), count(summary, "n_rows")
    if scaled_s is not None and rows_in and rows_of_all is not None:
        for stage in (*STAGES[:4], *STAGES[6:]):  # those without a model grow with the rows
            if (spent_s := seconds(measured, stage)) is not None and stage in stages:
                found.same(f"{where}: stages.{stage}", stages[stage], spent_s * rows_of_all / rows_in)
    reads, input_reads = count(mapping(summary, "subset"), "reads"), count(summary, "n_reads")
    if reads is not None and asked_reads is not None and input_reads is not None:
        found.same(f"{where}: subset.reads", reads, min(asked_reads, input_reads))
    predictions = RunDir(out / "baseline").predictions
    if (rows := count(summary, "measured_rows")) is not None and predictions.is_file():
        found.same(f"{where}: measured_rows", rows, len(load_frames(predictions)))


def _store(found: Verification, out: Path) -> None:
    """Reads, rows, uniques and tokens as the store counts them, where the validation still has its store."""
    raw = RawFolder(out)
    try:
        store = open_beside(out)
        if store is None:
            return
        counted = count_store(store)
        for name in run_names(out):
            _as_stored(found, f"{name}/summary.json", raw.json(name, SUMMARY), asdict(counted))
        _as_stored(found, "run.json: fingerprints", {"fingerprint": _reads_print(raw)}, asdict(counted))
        _as_stored(found, "run.json: staging", mapping(raw.json(RECORD), "staging"), staging_tally(store))
        summary = raw.json("baseline", SUMMARY)
        _as_stored(found, "baseline/summary.json", summary, {"n_reads": counted.n_reads, "n_rows": counted.n_rows})
        subset, predictions = mapping(summary, "subset"), RunDir(out / "baseline").predictions
        if subset and predictions.is_file():
            reads, seed = (int(number(subset, name) or 0) for name in ("reads", "seed"))
            drawn = baseline_tokens(store, predictions, reads, seed)
            tokens = {"tokens": drawn, "total_tokens": counted.row_tokens}
            _as_stored(found, "baseline/summary.json: subset", subset, tokens)
    except VirnucError as error:
        found.wrong(str(error))


def _reads_print(raw: RawFolder) -> str | None:
    return text(mapping(raw.json(RECORD), "fingerprints"), "reads")


def _as_stored(found: Verification, where: str, said: dict[str, Any], counted: dict[str, Any]) -> None:
    for key, value in counted.items():
        if said.get(key) is not None:
            found.same(f"{where}: {key}", said[key], value)


def _comparisons(found: Verification, out: Path) -> None:
    """Every comparison on record, done again from the results it speaks of."""
    raw = RawFolder(out)
    for said in read_comparisons(raw):
        try:
            again = repeat(out, said)
        except VirnucError as error:
            found.wrong(f"comparison.json: {said.a} and {said.b} cannot be compared again: {error}")
            continue
        where = f"comparison.json: {said.a} and {said.b}"
        found.same(where, said.model_dump(mode="json"), again.model_dump(mode="json"))


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
    return count(RawFolder(run).json(RECORD), "widths", "dna")


def _one_job(found: Verification, out: Path) -> None:
    """All runs are of the same reads and weights."""
    raw = RawFolder(out)
    first: dict[str, Any] | None = None
    for name in (*run_names(out), "baseline"):
        prints = mapping(raw.json(name, RECORD), "fingerprints")
        if not prints:
            continue
        if first is None:
            first = prints
        for part in SAME_WEIGHTS:
            if part in prints and part in first:
                found.same(f"{name}/run.json: fingerprint of {part}", prints[part], first[part])


def report_lines(found: Verification) -> Iterator[str]:
    """What a person reads: one line a difference, and a last line that sums up."""
    yield from found.differences
    yield from found.remarks
    if found.ok:
        yield f"{found.figures:,} figures computed again, all as reported"
    else:
        yield f"{len(found.differences):,} of {found.figures:,} figures are not what the raw files give"
