"""Verify the runs of a validation: result files, summaries and telemetry against what is rawer."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from virnuc_core.checked_files import has_own_digest
from virnuc_core.config import DEFAULT_THRESHOLD
from virnuc_core.encoder_names import NAMES
from virnuc_core.encoders.checkpoint import weight_facts
from virnuc_core.encoders.composition import compare_with_training
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.registry import PARTS
from virnuc_core.engine.shards import is_sealed, read_plan, read_scores, shard_path
from virnuc_core.errors import WeightsError
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.model import BASELINE
from virnuc_core.report.raw_files import (
    COMPARISON,
    RECORD,
    SUMMARY,
    NamedTelemetry,
    RawFolder,
    run_names,
)
from virnuc_core.report.result_tables import iterate_results
from virnuc_core.report.verification import Verification
from virnuc_core.results import write_results
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Attempt, FileDigest, RunRecord, RunSummary, digest, read
from virnuc_core.safe_files import open_file
from virnuc_core.system_errors import is_regular_file, list_folder, path_exists, read_with_retries
from virnuc_core.telemetry.log import TelemetryFile, telemetry_file
from virnuc_core.telemetry.statistics import committed_span_s
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import (
    OVERHEAD,
    BaselineSummary,
    ComparisonFile,
    OverheadFile,
    OverheadPair,
    ValidationRecord,
)

CLOCK_S: Final = 1e-3  # by which times of two clocks may differ
# What is left of a commit where it is switched off takes less than this for a shard
MAX_UNCOMMITTED_S: Final = 0.01
# Stages without a model; their time grows with the rows
STAGES_OF_ROWS: Final = (*STAGES[:4], *STAGES[6:])
# What every summary of a run tells that came to its end, and that figures of the report stand on
REQUIRED_FIELDS: Final = (
    "wall_s",
    "staging_s",
    "total_s",
    "n_reads",
    "n_chunks",
    "n_rows",
    "n_uniques",
    "shards",
    "shards_computed",
    "shards_reused",
    "restarts",
    "rows_set_aside",
    "log_errors",
    "deaths",
    "files",
    "threshold",
    "rows_virus",
    "chunks_virus",
    "chunks_scored",
    "protein_tokens",
)
# What also the summary of a run tells that was ended at its time limit
REQUIRED_OF_STOPPED_RUNS: Final = REQUIRED_FIELDS[:4]
RESULT_COUNTS: Final = ("fates", "rows_virus", "chunks_virus", "chunks_scored")


def verify_results(verification: Verification, raw: RawFolder, name: str) -> None:
    """Check a run's result files: compare their digests, and write them again from the shards.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        name: The folder of the run.
    """
    summary = raw.read(RunSummary, name, SUMMARY)
    if summary is None:
        return
    run = RunDir(raw.root / name)
    _compare_digests(verification, run.root, summary.files, SUMMARY)
    store_path = RunDir(raw.root).store
    if not path_exists(run.plan) or not path_exists(store_path):
        verification.remarks.append(
            f"{name}: its result files were not made again: its shards or orfs.h5 are not there"
        )
        return
    plan = read_plan(run)
    _verify_seals(verification, run, len(plan))
    if summary.stopped_at_limit:
        return  # it ended with some of its shards and without result files
    store = OrfStore.open(store_path)
    scores, failed = read_scores(run)
    counts = {
        "shards": len(plan),
        "n_uniques": plan.bounds[-1],
        "n_short": store.counts.n_short,
        "rows_set_aside": int(failed.sum()),
    }
    summary_name = f"{name}/{SUMMARY}"
    verification.compare_fields(summary_name, summary, counts)
    threshold = DEFAULT_THRESHOLD if summary.threshold is None else summary.threshold
    with TemporaryDirectory(prefix="virnuc-verify-") as folder:
        new_run = RunDir(Path(folder))
        results = write_results(
            new_run,
            store,
            scores,
            failed,
            threshold=threshold,
            uncertain=summary.uncertain,
            is_unfamiliar=compare_with_training(store, run.root).is_far,
        )
        for path, new_path in zip(run.tables, new_run.tables, strict=True):
            _compare_table(verification, f"{name}/{path.name}", path, new_path)
        result_counts = {key: getattr(results, key) for key in RESULT_COUNTS}
        verification.compare_fields(summary_name, summary, result_counts)


def _verify_seals(verification: Verification, run: RunDir, num_shards: int) -> None:
    """Check that the file of each shard has exactly the bytes that were committed.

    The scores have checksums of their own. The seal covers the embeddings too.

    Args:
        verification: Collects the differences. A missing shard is reported where scores are read.
        run: The run directory.
        num_shards: The number of shards in the run's plan.
    """
    for shard in range(num_shards):
        path = shard_path(run, shard)
        if not path_exists(path):
            continue
        if read_with_retries(path, partial(is_sealed, path)):
            verification.figures += 1
        else:
            verification.add_difference(
                f"{run.root.name}/{path.relative_to(run.root)}: has other bytes than were committed"
            )


def verify_weights(verification: Verification, raw: RawFolder) -> None:
    """Compare what the runs say about their weights with the models, if these are still there.

    This is where the weights come from (they may be random), and whether the classifier was tested.
    Both are in the configuration files of the models, which the digests in the records cover.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
    """
    for name in run_names(raw.root):
        record = raw.read(RunRecord, name, RECORD)
        summary = raw.read(RunSummary, name, SUMMARY)
        # Summaries of older versions do not tell, which shows by the card.
        if record is None or summary is None or summary.has_card is None:
            continue
        models = Path(str(record.spec.get("models", "")))
        reason = ""
        try:
            digests = fingerprint(models)
            facts = weight_facts(models)
        except WeightsError as error:
            reason = f"cannot be read now: {error}"
        else:
            if any(record.fingerprints.get(part) != digests[part] for part in PARTS):
                reason = "has other weights now"
        if reason:
            remark = f"where the weights come from was not compared: {models} {reason}"
            if remark not in verification.remarks:
                verification.remarks.append(remark)
            continue
        where = f"{name}/{SUMMARY}"
        verification.compare(f"{where}: origins", summary.origins, facts.origins)
        verification.compare(f"{where}: has_card", summary.has_card, facts.has_card)


def _compare_table(verification: Verification, where: str, path: Path, new_path: Path) -> None:
    """Compare a result file with the file that was written again, if there is one."""
    if not is_regular_file(new_path):
        return
    if not path_exists(path):
        verification.add_difference(f"{where}: missing")
        return
    with open_file(path) as lines, new_path.open("rb") as new_lines:
        verification.compare_lines(where, lines, new_lines, "its shards")


def _compare_digests(
    verification: Verification,
    folder: Path,
    files: Mapping[str, FileDigest] | None,
    listed_in: str,
) -> None:
    """Compare files with the digests that were recorded for them.

    Args:
        verification: Collects the differences.
        folder: The folder of the files. Its name stands in the messages.
        files: The recorded digests, by the path below the folder. None if there are none.
        listed_in: The name of the file with these digests, for messages.
    """
    for name, file_digest in (files or {}).items():
        label = f"{folder.name}/{name}, which {listed_in} lists"
        verification.compare(label, file_digest, digest(folder / name, folder))


def _compare_measurements(
    verification: Verification, raw: RawFolder, name: str, files: Mapping[str, FileDigest] | None
) -> None:
    """Compare `run.json` and the telemetry of a run with the digests in its summary.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        name: The folder of the run or of the baseline.
        files: The recorded digests. None: an older version wrote the summary.
    """
    # A summary without its own digest counts as one of an older version, here as elsewhere. That
    # nobody has edited it is then seen from its digest in `comparison.json`.
    if has_own_digest(raw.root / name / SUMMARY, raw.root):
        _compare_digests(verification, raw.root / name, files, SUMMARY)


def verify_measurements(verification: Verification, raw: RawFolder) -> None:
    """Compare the files of all measurements with the digests in `comparison.json`.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
    """
    comparison = raw.read(ComparisonFile, COMPARISON)
    if comparison is None:
        return
    _compare_digests(verification, raw.root, comparison.measurements, COMPARISON)
    if comparison.measurements is not None:
        return
    # The comparison is made last. So if a run lists its measurements, the version that made the
    # comparison did so as well.
    for name in run_names(raw.root):
        summary = raw.read(RunSummary, name, SUMMARY)
        if summary is not None and summary.measurements is not None:
            verification.add_difference(
                f"{COMPARISON} does not list the files of measurements, but {name}/{SUMMARY} does"
            )
            return


def verify_run(verification: Verification, raw: RawFolder, name: str) -> None:
    """Compare a run's summary with its attempts, and each attempt with its telemetry.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        name: The folder of the run.
    """
    summary = raw.read(RunSummary, name, SUMMARY)
    if summary is None:
        return
    _compare_measurements(verification, raw, name, summary.measurements)
    _require_fields(verification, f"{name}/{SUMMARY}", summary)
    attempts = summary.attempts
    if not attempts:  # an older version did not list the only attempt of a run
        attempts = (
            Attempt(started="", devices=(), wall_s=summary.wall_s, telemetry=summary.telemetry),
        )
    _verify_attempts(verification, raw, name, summary)
    total_s = None
    if summary.staging_s is not None and summary.wall_s is not None:
        total_s = summary.staging_s + summary.wall_s
    counts = {
        "total_s": total_s,
        "n_reads": sum(summary.fates.values()) if summary.fates else None,
        "restarts": None if summary.deaths is None else len(summary.deaths),
        "wall_s": sum(attempt.wall_s or 0.0 for attempt in attempts),
    }
    verification.compare_fields(f"{name}/{SUMMARY}", summary, counts)
    for attempt in attempts:
        has_no_telemetry = bool(summary.attempts) and not attempt.telemetry
        if has_no_telemetry:
            continue
        # If the summary is of an older version, no file is named, and the newest one is read.
        telemetry = raw.telemetry(name, attempt.telemetry)
        if telemetry is None:
            continue
        is_newest = attempt is attempts[-1]
        _verify_telemetry(verification, raw, telemetry, summary, attempt, is_newest=is_newest)


def _verify_attempts(
    verification: Verification, raw: RawFolder, name: str, summary: RunSummary
) -> None:
    """Check that summary and record of a run list the same attempts and the same deaths.

    Attempts are compared with all that is recorded of them, such as times and error lines.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        name: The folder of the run.
        summary: The summary of the run.
    """
    where = f"{name}/{SUMMARY}"
    record = raw.read(RunRecord, name, RECORD)
    measured_attempts = () if record is None else _measured_attempts(record)
    # The record does not tell when an attempt was ended at its time limit. Older versions listed
    # no attempts.
    if measured_attempts and summary.attempts and not summary.stopped_at_limit:
        recorded = [attempt.model_dump(mode="json") for attempt in measured_attempts]
        listed = [attempt.model_dump(mode="json") for attempt in summary.attempts]
        verification.compare(f"{where}: attempts", listed, recorded)
    if summary.deaths is not None and summary.attempts:
        deaths = [death for attempt in summary.attempts for death in attempt.deaths]
        verification.compare(f"{where}: deaths", list(summary.deaths), deaths)


def _measured_attempts(record: RunRecord) -> list[Attempt]:
    """Return the attempts of a run without those that were killed before they measured anything."""
    return [attempt for attempt in record.attempts if attempt.wall_s is not None]


def _require_fields(verification: Verification, where: str, summary: RunSummary) -> None:
    """Add a difference for each figure that was removed from the summary of a run.

    Args:
        verification: Collects the differences.
        where: The name of the summary.
        summary: The summary. Those of older versions lacked some of the figures, so nothing is
            asked of them.
    """
    if summary.measurements is None:
        return
    names = REQUIRED_OF_STOPPED_RUNS if summary.stopped_at_limit else REQUIRED_FIELDS
    missing = [name for name in names if getattr(summary, name) is None]
    if not summary.attempts:
        missing.append("attempts")
    if not summary.devices:
        missing.append("devices")
    verification.compare(f"{where}: figures that are missing", missing, [])


def _verify_telemetry(
    verification: Verification,
    raw: RawFolder,
    file: NamedTelemetry,
    summary: RunSummary,
    attempt: Attempt,
    *,
    is_newest: bool,
) -> None:
    """Compare the times and counts of an attempt with its telemetry.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        file: The telemetry of the attempt.
        summary: The summary of the run.
        attempt: The attempt's entry in the summary.
        is_newest: This is the last attempt. The stages and shards in the summary belong to it.
    """
    name = file.name
    telemetry = file.content
    shards = telemetry.shards
    stage_ends_s = [stage.finished_s or 0.0 for stage in telemetry.stages]
    last_end_s = max([*stage_ends_s, float(shards.finished_s.max())]) - telemetry.origin_s
    if attempt.wall_s is not None and last_end_s > attempt.wall_s + CLOCK_S:
        verification.add_difference(
            f"{name}: {SUMMARY}: wall_s says {attempt.wall_s:.3f}, "
            f"the last stage ended after {last_end_s:.3f} s"
        )
    if is_newest and telemetry.stages:
        stages = {stage.name: stage.seconds for stage in telemetry.stages}
        verification.compare(f"{name}: stages of {SUMMARY}", summary.stages, stages)

    # A count that stays None is not compared.
    n_shards_computed = None
    n_rows_set_aside = None
    n_shards = None
    if is_newest:  # the summary has this count of the last attempt only
        n_shards_computed = len(shards)
    if len(summary.attempts) < 2:  # the summary counts the rows of all attempts, the telemetry one
        n_rows_set_aside = int(shards.skipped.sum())
    if summary.shards_computed is not None:
        n_shards = summary.shards_computed + (summary.shards_reused or 0)
    counts = {
        "shards_computed": n_shards_computed,
        "rows_set_aside": n_rows_set_aside,
        "shards": n_shards,
    }
    verification.compare_fields(f"{name}: {SUMMARY}", summary, counts)
    _verify_batches(verification, file)
    _verify_telemetry_summary(verification, raw, file, summary, attempt, is_newest=is_newest)


def _verify_batches(verification: Verification, file: NamedTelemetry) -> None:
    """Check that no batch or sample is impossible, and that tokens of batches and shards agree."""
    name = file.name
    batches = file.content.batches
    shards = file.content.shards
    utilisation = file.content.samples.utilisation
    impossible = {
        "batches with more tokens than slots": batches.tokens > batches.slots,
        "batches with a negative wait": batches.wait_ms < 0,
        "utilisation samples outside 0 to 100": (utilisation < 0) | (utilisation > 100),
    }
    for what, is_impossible in impossible.items():
        verification.compare(f"{name}: {what}", int(is_impossible.sum()), 0)
    # Each shard counts the tokens of its own batches. Runs that set rows aside are left out of this
    # check.
    if len(shards) and not shards.skipped.any():
        # The protein encoder comes first, as when a shard is computed. This decides only the order
        # in which differences are listed.
        for names in reversed(NAMES):
            encoder = names.name
            tokens = shards[names.tokens_column]
            batch_tokens = int(batches.tokens[batches.encoder == encoder].sum())
            verification.compare(f"{name}: tokens of {encoder}", batch_tokens, int(tokens.sum()))


def _verify_telemetry_summary(
    verification: Verification,
    raw: RawFolder,
    file: NamedTelemetry,
    summary: RunSummary,
    attempt: Attempt,
    *,
    is_newest: bool,
) -> None:
    """Compute the JSON file of a telemetry file again from its tables, and compare.

    The arguments are those of `_verify_telemetry`.
    """
    json_name = Path(file.name).with_suffix(".json").as_posix()
    content = read(raw.root / json_name, TelemetryFile, raw.root)
    n_reads = content.summary.total_sequences
    wall_s = content.summary.wall_s
    # The run's summary has the speed of the newest attempt. That of an earlier attempt is only in
    # the attempt's own file.
    sequences_per_hour = content.summary.sequences_per_hour
    if is_newest:
        sequences_per_hour = summary.sequences_per_hour
    computed = telemetry_file(
        file.content,
        n_reads=n_reads,
        wall_s=wall_s,
        window_s=content.window_s,
        sequences_per_hour=sequences_per_hour,
        schema_version=content.schema_version,
    )
    verification.compare(json_name, content, computed)
    verification.compare_fields(f"{file.name}: {SUMMARY}", summary, {"n_reads": n_reads})
    if attempt.wall_s is not None:
        verification.compare(f"{file.name}: wall_s of {SUMMARY}", attempt.wall_s, wall_s)


def verify_baseline(verification: Verification, raw: RawFolder) -> None:
    """Compare the summary of the baseline with its stages, result file and profile."""
    summary = raw.read(BaselineSummary, BASELINE, SUMMARY)
    record = raw.read(ValidationRecord, RECORD)
    if summary is None:
        return
    run = RunDir(raw.root / BASELINE)
    summary_name = f"{BASELINE}/{SUMMARY}"
    _compare_digests(verification, run.root, summary.files, SUMMARY)
    _compare_measurements(verification, raw, BASELINE, summary.measurements)
    if record is not None and record.profile is not None:
        expected = _expected_baseline(record.profile.baseline)
        verification.compare_fields(summary_name, summary, expected)
    if summary.source == "measured":
        for field in ("measured_s", "wall_s", "n_reads"):
            if getattr(summary, field) is None:
                verification.add_difference(f"{summary_name} does not tell {field}")
    if summary.measured_s is None:
        return
    _verify_baseline_time(verification, summary_name, summary, summary.measured_s)
    subset = summary.subset
    if subset is not None:
        _verify_scaled_stages(verification, summary_name, summary)
        profile = None if record is None else record.profile
        subset_size = None if profile is None else profile.baseline.reads
        if subset_size is not None and summary.n_reads is not None:
            expected_reads = min(subset_size, summary.n_reads)
            verification.compare(f"{summary_name}: subset.reads", subset.reads, expected_reads)
    if path_exists(run.predictions):
        n_rows = sum(len(rows) for rows in iterate_results(run.predictions))
        verification.compare_fields(summary_name, summary, {"measured_rows": n_rows})


def _expected_baseline(spec: BaselineSpec) -> dict[str, object]:
    """Return the fields of a baseline's summary that the settings of a validation decide.

    Args:
        spec: The settings, from the profile in the validation's record.

    Returns:
        Values by field. A value is `None` if the settings do not decide it.
    """
    fields: dict[str, object] = {"name": spec.name, "source": spec.source}
    if spec.source == "recorded":
        fields["wall_s"] = spec.recorded_seconds
        fields["recorded_reads"] = spec.recorded_reads
    return fields


def _verify_baseline_time(
    verification: Verification, where: str, summary: BaselineSummary, measured_s: float
) -> None:
    """Compare the baseline's time with the sum of its stages.

    Args:
        verification: Collects the differences.
        where: The name of the summary.
        summary: The baseline's summary.
        measured_s: The seconds that really passed.
    """
    total_s = measured_s
    if summary.subset is not None and summary.wall_s is not None:
        total_s = summary.wall_s
    verification.compare_fields(where, summary, {"wall_s": total_s})
    stages_s = sum(summary.stages.values())
    measured_stages_s = sum(summary.measured_stages.values())
    if not stages_s or not measured_stages_s:
        return
    # Processes are started only once, however many the reads are.
    start_s = max(0.0, measured_s - measured_stages_s)
    if not stages_s - CLOCK_S <= total_s <= stages_s + start_s + CLOCK_S:
        verification.add_difference(
            f"{where}: {total_s:.3f} s is not what its stages add up to "
            f"({stages_s:.3f} s and the start)"
        )


def _verify_scaled_stages(verification: Verification, where: str, summary: BaselineSummary) -> None:
    """Check the scaled times of stages without a model: they must grow with the number of rows."""
    if not summary.measured_rows or summary.n_rows is None:
        return
    growth = summary.n_rows / summary.measured_rows
    for stage in STAGES_OF_ROWS:
        if stage in summary.measured_stages and stage in summary.stages:
            expected_s = summary.measured_stages[stage] * growth
            verification.compare(f"{where}: stages.{stage}", summary.stages[stage], expected_s)


def verify_overhead(verification: Verification, raw: RawFolder) -> None:
    """Check `checkpoint_overhead.json`: pairs of runs with and without a feature, as commits."""
    file = raw.read(OverheadFile, OVERHEAD)
    if file is None:
        return
    for pair in file.pairs:
        with_s = _verify_overhead_run(verification, raw, file, pair, is_switched_on=True)
        without_s = _verify_overhead_run(verification, raw, file, pair, is_switched_on=False)
        label = f"{OVERHEAD}: {pair.with_run} and its pair: seconds"
        verification.compare(label, pair.seconds, min(with_s, without_s))


def _verify_overhead_run(
    verification: Verification,
    raw: RawFolder,
    file: OverheadFile,
    pair: OverheadPair,
    *,
    is_switched_on: bool,
) -> float:
    """Check the speed and settings of one run of a pair against its telemetry and record.

    Args:
        verification: Collects the differences.
        raw: The validation's files.
        file: The file of all pairs.
        pair: The pair.
        is_switched_on: Check the run with the feature; if false, the run without it.

    Returns:
        The seconds over which the speed of the run is computed.
    """
    name, tokens_per_s = pair.without_run, pair.without_tokens_per_s
    if is_switched_on:
        name, tokens_per_s = pair.with_run, pair.with_tokens_per_s
    run_label = f"{OVERHEAD}: {name}"
    record = raw.read(RunRecord, name, RECORD)
    spec = {} if record is None else record.spec
    has_commits = is_switched_on or pair.switch != "commits"
    recorded_commits = spec.get("engine", spec).get("commit")
    verification.compare(f"{run_label}: commits", has_commits, recorded_commits)

    telemetry = []
    for path in list_folder(raw.root / name / "telemetry", "telemetry_*.h5"):
        part = raw.telemetry(name, path.name)
        if part is not None:
            telemetry.append(part)
    if pair.switch == "models":
        span_s = sum(_wall_s(raw, part) for part in telemetry)
    else:
        span_s = sum(
            committed_span_s(part.content.batches, part.content.shards) for part in telemetry
        )
    tokens = sum(float(part.content.batches.tokens.sum()) for part in telemetry)
    rate = tokens / span_s if span_s else None
    verification.compare(f"{run_label}: tokens/s", tokens_per_s, rate)
    n_shards = sum(len(part.content.shards) for part in telemetry)
    verification.compare(f"{run_label}: shards", file.shards, n_shards)
    commit_s = sum(float(part.content.shards.commit_s.sum()) for part in telemetry)
    if not has_commits and commit_s > MAX_UNCOMMITTED_S * file.shards:
        verification.add_difference(
            f"{run_label} spent {commit_s:.3f} s on commits although they were off"
        )
    return span_s


def _wall_s(raw: RawFolder, telemetry: NamedTelemetry) -> float:
    """Return the total time of a run from the JSON file of its telemetry."""
    path = (raw.root / telemetry.name).with_suffix(".json")
    return read(path, TelemetryFile, raw.root).summary.wall_s
