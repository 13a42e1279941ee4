"""The files that a validation leaves beside its runs, a model for each, and how it is begun."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from virnuc_core import runfiles
from virnuc_core.config import BaselineName, ClassifySpec, Switch
from virnuc_core.encoders.digests import accept_older_digest, fingerprint
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.profiles import Profile, Review
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Count, Device, File, FileDigest, RunFile, RunRecord, Seconds


def read_usable(path: Path, kind: type[File]) -> File | None:
    """Return the content of a file, or `None` if it is missing or cannot be used.

    Args:
        path: The file.
        kind: The model of its content.

    Raises:
        UnreadableError: The system cannot read the file, so that nothing is known about it.
    """
    with suppress(ConfigError):
        return runfiles.read(path, kind)
    return None


class StagingTally(RunFile, extra="allow"):
    """What staging counted of the input. Further counts are those of `StageSummary.tally`."""

    __pydantic_extra__: dict[str, Count] = Field(init=False)
    skipped: Count | None = None  # broken records left out
    files: tuple[str, ...] = ()  # that were read, by their whole paths
    ignored_files: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()


class ValidationRecord(RunRecord):
    """The content of a validation's `run.json`."""

    profile: Profile | None = None
    staging: StagingTally | None = None
    # What every validation of these settings leaves: the files of its measurements, relative to
    # its directory. Records of older versions name none.
    expected_files: tuple[str, ...] = ()


def record_validation(
    out: Path,
    spec: ClassifySpec,
    profile: Profile,
    staging: StageSummary,
    devices: tuple[Device, ...],
    *remarks: str,
    expected_files: Sequence[str] = (),
) -> None:
    """Write the validation's `run.json`: what it was started with, and when it first was.

    Args:
        out: The validation's directory.
        spec: Its settings.
        profile: The thresholds that it is judged by.
        staging: What staging made of its reads.
        devices: Its devices.
        remarks: Sentences that are kept before the warnings of the staging.
        expected_files: The files with measurements that the validation is going to write, relative
            to its directory.

    Raises:
        RunMismatchError: The directory holds a validation of other weights or reads. The message
            names what differs.
    """
    record = _new_record(out, spec, profile, staging, devices, remarks)
    record = record.model_copy(update={"expected_files": tuple(expected_files)})
    path = RunDir(out).record
    previous = runfiles.read_or_set_aside(path, ValidationRecord)
    if previous is not None and not spec.force:
        # Older versions of virnuc recorded another digest of the same int8 calibration.
        # Then that digest is kept, so that it does not count as a difference.
        fingerprints = accept_older_digest(spec.models, record.fingerprints, previous.fingerprints)
        record = record.model_copy(update={"fingerprints": fingerprints})
        _require_same_inputs(out, previous, record)
        if _is_same_validation(previous, record):
            record = record.model_copy(update={"created": previous.created})
    runfiles.write(path, record)


def _new_record(
    out: Path,
    spec: ClassifySpec,
    profile: Profile,
    staging: StageSummary,
    devices: tuple[Device, ...],
    remarks: tuple[str, ...],
) -> ValidationRecord:
    """Return the record of a validation that starts now. Nothing is written.

    Args:
        out: The validation's directory.
        spec: Its settings.
        profile: The thresholds that it is judged by.
        staging: What staging made of its reads.
        devices: Its devices.
        remarks: Sentences that are kept before the warnings of the staging.
    """
    import torch  # takes seconds, and commands that only check do not need it

    fingerprints = {"reads": staging.fingerprint}
    fingerprints |= fingerprint(spec.models, spec.engine.precision)
    versions = runfiles.versions()
    if torch.version.cuda:  # the CUDA that torch was built for, if it was built for one
        versions = versions | {"cuda": torch.version.cuda}
    tally = staging.tally | {
        "files": [_absolute(name) for name in staging.files],
        "ignored_files": staging.ignored_files,
        "warnings": (*remarks, *staging.warnings()),
    }
    return runfiles.new_record(
        ValidationRecord,
        devices,
        spec=spec.parameters | {"engine": spec.engine.model_dump(mode="json")},
        model_length=staging.model_length,
        fingerprints=fingerprints,
        store=RunDir(out).store.name,
        inputs=staging.by_file,
        pairs=[[_absolute(first), _absolute(second)] for first, second in staging.pairs],
        versions=versions,
        profile=profile,
        staging=tally,
    )


def _absolute(name: str) -> str:
    """Return the whole path of a file."""
    return str(Path(name).absolute())


def _require_same_inputs(out: Path, previous: ValidationRecord, record: ValidationRecord) -> None:
    """Raise an error if an earlier validation in the directory had other weights or reads."""
    mismatches = runfiles.find_mismatches(previous.fingerprints, record.fingerprints, strict=True)
    if mismatches:
        changes = [
            f"{name} {old[:SHOWN_CHARACTERS]}… → {new[:SHOWN_CHARACTERS]}…"
            for name, (old, new) in mismatches.items()
        ]
        raise RunMismatchError(
            f"{out} holds another validation ({'; '.join(changes)}); "
            "choose another directory or --force"
        )


def _is_same_validation(previous: ValidationRecord, record: ValidationRecord) -> bool:
    """Return whether a validation goes on: same inputs, devices, profile and engine settings."""
    return (
        previous.fingerprints == record.fingerprints
        and previous.devices == record.devices
        and previous.profile == record.profile
        and previous.spec.get("engine") == record.spec.get("engine")
    )


class BaselineSubset(RunFile):
    """The part of the input that a baseline was measured on."""

    reads: Count
    tokens: Count  # protein tokens of its rows, start and end tokens included
    total_tokens: Count  # of all rows
    seed: int = 0  # of the random choice of its reads


class BaselineSummary(RunFile):
    """The content of a baseline's `summary.json`: its time and what that stands on.

    Chunking and translation are not among its stages. The rows are taken from the store, which
    favours the baseline.
    """

    schema_version: int = 1
    name: BaselineName
    source: Literal["measured", "recorded"] = "measured"
    # For the whole input, scaled if a subset was measured: what a run is compared with
    wall_s: Seconds | None = None
    # Time of each stage, scaled in the same way; empty if the time is a recorded one
    stages: dict[str, Seconds] = Field(default_factory=dict)
    subset: BaselineSubset | None = None  # what was measured; None: everything, or nothing
    measured_s: Seconds | None = None  # seconds that really passed; None when recorded
    measured_stages: dict[str, Seconds] = Field(default_factory=dict)
    n_reads: Count | None = None  # of the whole input
    # Of a recorded time: how many reads were processed in it. None if it is not known.
    recorded_reads: Count | None = None
    n_rows: Count | None = None
    measured_rows: Count | None = None
    # Of the measured rows: without a finite score, and therefore in `failed.tsv`. None: recorded,
    # or an older version
    failed_rows: Count | None = None
    devices: tuple[Device, ...] = ()
    fingerprint: str = ""  # of reads, weights, algorithm, devices and subset
    # The result files, by name; None: there are none, or an older version wrote this summary
    files: dict[str, FileDigest] | None = None
    # The digest of its `run.json`; None if the time is a recorded one, or in older versions
    measurements: dict[str, FileDigest] | None = None
    reused: bool = Field(False, exclude=True)


OVERHEAD: Final = "checkpoint_overhead.json"
TUNING: Final = "tuning.json"
MIN_PAIRS: Final = 3  # fewer say nothing: two runs of the same work differ by themselves
# Shortest run that times commits. The rate of a shorter one depends on chance (its scheduling).
MIN_SECONDS: Final = 10.0
NO_COMMIT_PAIRS: Final = "no pair of runs with and without commits"
SHOWN_CHARACTERS: Final = 12  # of a fingerprint


class OverheadPair(RunFile):
    """Two runs over the same shards, one after the other, with what is switched and without."""

    switch: Annotated[Switch, Field(alias="of")] = "commits"  # the feature that is switched
    with_run: str  # run directory, relative to the validation's
    without_run: str
    # Tokens per second from the first batch launched to the last shard committed. If `switch` is
    # "models", in the whole time of the run, because loading them is what is measured.
    with_tokens_per_s: float
    without_tokens_per_s: float
    seconds: float  # of the shorter run
    restarts: int  # of workers in either run; more than none spoils the pair

    @property
    def overhead(self) -> float | None:
        """Return 1 − tokens/s of the costly run ÷ tokens/s of the cheap run.

        For commits and the sampler, the costly run is the one with the feature. For `models`, the
        feature (workers keep their models) saves time, so the costly run is the one without it.

        Returns:
            `None` if the pair says nothing: a worker was restarted, or the cheap run has no rate.
        """
        costly, cheap = self.with_tokens_per_s, self.without_tokens_per_s
        if self.switch == "models":
            costly, cheap = cheap, costly
        if cheap <= 0 or self.restarts:
            return None
        return 1.0 - costly / cheap


class OverheadFile(RunFile):
    """The content of `checkpoint_overhead.json`.

    The telemetry of the pairs of runs stays, so that every rate can be computed again.
    """

    schema_version: int = 1
    job: str  # digest of reads, weights and settings
    devices: tuple[str, ...]
    shards: int  # computed in each run
    shard_tokens: int
    pairs: tuple[OverheadPair, ...]

    def overheads_of(self, switch: Switch) -> list[float]:
        """Return the overhead of each valid pair of one feature as a fraction, ascending.

        Negative values are noise.
        """
        overheads = [pair.overhead for pair in self.pairs if pair.switch == switch]
        return sorted(overhead for overhead in overheads if overhead is not None)

    @property
    def commit_overheads(self) -> list[float]:
        """Return the commit overhead of each valid pair as a fraction, ascending."""
        return self.overheads_of("commits")

    @property
    def persistent_models_speedups(self) -> list[float]:
        """Return for each valid pair, ascending, how many times faster workers are that keep their
        models, than those that load them once more halfway.
        """
        shares = self.overheads_of("models")
        return [1.0 / (1.0 - share) for share in shares if share < 1.0]

    @property
    def persistent_models_speedup(self) -> float | None:
        """Return the median of these speed-ups, or `None` without a valid pair."""
        if not self.persistent_models_speedups:
            return None
        return median(self.persistent_models_speedups)

    @property
    def median(self) -> float | None:
        """Return the median of the commit overheads, or `None` without a valid pair."""
        if not self.commit_overheads:
            return None
        return median(self.commit_overheads)

    @property
    def problem(self) -> str:
        """Return why the pairs tell nothing about commits; an empty text if they do."""
        if not any(pair.switch == "commits" for pair in self.pairs):
            return NO_COMMIT_PAIRS
        n_pairs = len(self.commit_overheads)
        if n_pairs < MIN_PAIRS:
            return f"{n_pairs} undisturbed pairs of runs; {MIN_PAIRS} are needed"
        seconds = [pair.seconds for pair in self.pairs if pair.switch == "commits"]
        shortest_s = min(seconds, default=0.0)
        if shortest_s < MIN_SECONDS:
            needed = f"{MIN_SECONDS:g} s are needed, more shards or more reads"
            return f"a run took {shortest_s:.1f} s; {needed}"
        return ""


class TuningRound(RunFile):
    """A round of tuning: what was missed, what was tried against it, and what was found."""

    missed: tuple[str, ...]  # titles of the criteria that were missed
    outcome: Annotated[str, Field(alias="said")]  # what was tried and found, in sentences
    engine: dict[str, Any] | None = None  # the better settings; None: nothing better was found


class TuningFile(RunFile):
    """The content of `tuning.json`: the rounds of a validation that tunes itself."""

    schema_version: int = 1
    rounds: tuple[TuningRound, ...] = ()


class ApprovalRecord(Review, RunFile):
    """The content of `report/approval.json`: what the reviewer of a validation said."""

    schema_version: int = 1
    when: str | None = None
    flow_run: str = ""
    verdict: Literal["approved", "rejected", "pending"]
    reviewer: str | None = None
    # A sentence for each point in which the answer contradicts the figures that it is about
    contradictions: tuple[str, ...] = ()


class ScoreDifference(RunFile):
    """The absolute differences of the scores over the ids that both sides have.

    The statistics are those of `score2`, the score for virus. The last four fields are of each
    score, with the names of VirNucPro's plans. Files of older versions do not have them.
    """

    n: int
    mean: float
    median: float
    p99: float
    max: float
    share_within_tolerance: float  # 0 to 1
    allclose: bool  # both scores, rtol = atol = 1e-3
    max_diff_score1: float | None = None
    max_diff_score2: float | None = None
    score1_match: bool | None = None  # rtol = atol = 1e-3
    score2_match: bool | None = None


class ClassAgreement(RunFile):
    """The ids of one class, and how many of them have the same label on both sides.

    Side a decides the class. An id that only side b has is of the class that it has there.
    """

    ids: int
    agreeing: int


class LabelAgreement(RunFile):
    """The labels of two results, joined by id. An id of one side only is a disagreement."""

    in_both: int
    only_in_a: int
    only_in_b: int
    agreeing: int
    agreement: float | None  # agreeing / all ids, 0 to 1; None when there is no id at all
    score: ScoreDifference | None  # None when a side has no scores, or no id is in both
    examples: tuple[str, ...]  # a few ids that disagree, with what each side says
    # viral, non-viral, near threshold; or none
    classes: dict[str, ClassAgreement] = Field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return how many ids there are on either side."""
        return self.in_both + self.only_in_a + self.only_in_b


class CosineStats(RunFile):
    """The cosines of pooled embeddings, less their mean, row by row."""

    part: str  # the title of an encoder, or "joined"
    n: int
    minimum: float
    p1: float
    mean: float


class BitwiseEquality(RunFile):
    """Whether two run directories hold the same bytes."""

    identical: bool  # true only when files and shards were compared and nothing differs
    files_compared: int
    shards_compared: int
    differing: tuple[str, ...]  # a few names of what differs


class Comparison(RunFile):
    """One result compared with another."""

    a: str
    b: str
    tolerance: float
    subset_reads: int | None = None  # side a covers this many reads only; b was cut to them
    frames: LabelAgreement | None = None
    consensus: LabelAgreement | None = None
    cosines: tuple[CosineStats, ...] = ()
    bitwise: BitwiseEquality | None = None


class ComparisonFile(RunFile):
    """The content of `comparison.json`."""

    schema_version: int = 1
    comparisons: tuple[Comparison, ...]
    # The summaries of the baseline, the runs and their repetitions, by their paths in the
    # validation's directory. None: an older version
    measurements: dict[str, FileDigest] | None = None
