"""What a validation leaves beside its runs: one model for each file, and how it is begun."""

from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from pydantic import Field

from virnuc_core import runfiles
from virnuc_core.config import BaselineName, ClassifySpec, Switch
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.profiles import Profile, Review
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Count, Device, File, FileDigest, RunFile, RunRecord, Seconds


def read_usable(path: Path, kind: type[File]) -> File | None:
    """The content of a file; None where there is none, or one that `read` refuses."""
    with suppress(ConfigError):
        return runfiles.read(path, kind)
    return None


class StagingTally(RunFile, extra="allow"):
    """What staging counted of the input: further counts as of `StageSummary.tally`."""

    __pydantic_extra__: dict[str, Count] = Field(init=False)
    skipped: Count | None = None  # broken records left out
    files: tuple[str, ...] = ()  # that were read, by their whole paths
    ignored_files: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()


class ValidationRecord(RunRecord):
    """`run.json` of a validation."""

    profile: Profile | None = None
    staging: StagingTally | None = None


def record_validation(
    out: Path,
    spec: ClassifySpec,
    profile: Profile,
    staging: StageSummary,
    devices: tuple[Device, ...],
    *remarks: str,
) -> None:
    """`run.json` of the validation: what it was started with, and when it first was. Errors: `RunMismatchError` names
    the weights or reads that differ from those of the validation that lies there."""
    import torch  # takes seconds, and commands that only check do not need it

    read = {
        "files": [str(Path(name).absolute()) for name in staging.files],
        "ignored_files": staging.ignored_files,
    }
    record = runfiles.new_record(
        ValidationRecord,
        devices,
        spec=spec.parameters | {"engine": spec.engine.model_dump(mode="json")},
        model_length=staging.model_length,
        fingerprints={
            "reads": staging.fingerprint,
            **fingerprint(spec.models, spec.engine.precision),
        },
        store=RunDir(out).store.name,
        inputs=staging.by_file,
        pairs=[[str(Path(name).absolute()) for name in pair] for pair in staging.pairs],
        # the CUDA that torch was built for; a torch without names none
        versions=runfiles.versions() | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        profile=profile,
        staging=staging.tally | read | {"warnings": (*remarks, *staging.warnings())},
    )
    path = RunDir(out).record
    before = runfiles.read_or_set_aside(path, ValidationRecord)
    if before is not None:
        others = runfiles.find_mismatches(before.fingerprints, record.fingerprints, strict=True)
        if others and not spec.force:
            said = "; ".join(
                f"{name} {was[:12]}… → {now[:12]}…" for name, (was, now) in others.items()
            )
            raise RunMismatchError(
                f"{out} holds another validation ({said}); choose another directory or --force"
            )
        same = all(
            getattr(before, name) == getattr(record, name)
            for name in ("fingerprints", "devices", "profile")
        )
        if same and not spec.force and before.spec.get("engine") == record.spec.get("engine"):
            record = record.model_copy(update={"created": before.created})
    runfiles.write(path, record)


class BaselineSubset(RunFile):
    """The part of the input that a baseline was measured on."""

    reads: Count
    tokens: Count  # ESM-2 tokens of its rows, start and end tokens included
    total_tokens: Count  # of all rows
    seed: int = 0  # its reads were drawn by


class BaselineSummary(RunFile):
    """`summary.json` of a baseline: its time and what that stands on. Chunking and translation are not among its
    stages: the rows are taken from the store, which favours the baseline."""

    schema_version: int = 1
    name: BaselineName
    source: Literal["measured", "recorded"] = "measured"
    wall_s: Seconds | None = (
        None  # for the whole input, of a subset scaled: what a run is compared with
    )
    stages: dict[str, Seconds] = Field(
        default_factory=dict
    )  # on the whole input, scaled; none of a recorded one
    subset: BaselineSubset | None = None  # what was measured; None: everything, or nothing
    measured_s: Seconds | None = None  # seconds that really passed; None when recorded
    measured_stages: dict[str, Seconds] = Field(default_factory=dict)
    n_reads: Count | None = None  # of the whole input
    n_rows: Count | None = None
    measured_rows: Count | None = None
    devices: tuple[Device, ...] = ()
    fingerprint: str = ""  # of reads, weights, algorithm, devices and subset
    files: dict[str, FileDigest] | None = (
        None  # the result files, by name; None: none, or an older version wrote them
    )
    reused: bool = Field(False, exclude=True)


OVERHEAD: Final = "checkpoint_overhead.json"
TUNING: Final = "tuning.json"
MIN_PAIRS: Final = 3  # fewer say nothing: two runs of the same work differ by themselves
MIN_SECONDS: Final = (
    10.0  # of a run that times commits; the rate of a shorter one is the luck of its scheduling
)


class OverheadPair(RunFile):
    """Two runs over the same shards, one after the other, with what is switched and without."""

    of: Switch = "commits"
    with_run: str  # run directory, relative to the validation's
    without_run: str
    with_tokens_per_s: float  # from the first batch launched to the last shard committed; models: of the whole time
    without_tokens_per_s: float
    seconds: float  # of the shorter run
    restarts: int  # of workers in either run; more than none spoils the pair

    @property
    def overhead(self) -> float | None:
        """1 − tokens/s with what costs ÷ tokens/s without (models: loading anew); `None`: the pair says nothing."""
        rates = self.with_tokens_per_s, self.without_tokens_per_s
        slow, fast = reversed(rates) if self.of == "models" else rates
        return None if fast <= 0 or self.restarts else 1.0 - slow / fast


class OverheadFile(RunFile):
    """`checkpoint_overhead.json`: pairs of runs, whose telemetry stays, so that every rate can be computed again."""

    schema_version: int = 1
    job: str  # digest of reads, weights and settings
    devices: tuple[str, ...]
    shards: int  # computed in each run
    shard_tokens: int
    pairs: tuple[OverheadPair, ...]

    @property
    def shares(self) -> list[float]:
        """What commits cost in each undisturbed pair, the least first; shares of 1, below 0 is noise."""
        found = (pair.overhead for pair in self.pairs if pair.of == "commits")
        return sorted(share for share in found if share is not None)

    @property
    def median(self) -> float | None:
        """What commits cost; `None` without a pair."""
        return median(self.shares) if self.shares else None

    @property
    def problem(self) -> str:
        """Why the pairs say nothing of commits; empty where they do."""
        shortest_s = min((pair.seconds for pair in self.pairs if pair.of == "commits"), default=0.0)
        if len(self.shares) < MIN_PAIRS:
            return f"{len(self.shares)} undisturbed pairs of runs; {MIN_PAIRS} are needed"
        short = f"a run took {shortest_s:.1f} s; {MIN_SECONDS:g} s are needed, more shards or more reads"
        return short if shortest_s < MIN_SECONDS else ""


class TuningRound(RunFile):
    """What a validation missed in speed, what was tried against that, and the settings it went on with."""

    missed: tuple[str, ...]
    said: str
    engine: dict[str, Any] | None = None  # None: nothing better was found


class TuningFile(RunFile):
    """`tuning.json`: the rounds of a validation that tunes itself."""

    schema_version: int = 1
    rounds: tuple[TuningRound, ...] = ()


class ApprovalRecord(Review, RunFile):
    """`report/approval.json`: what the reviewer of a validation said."""

    schema_version: int = 1
    when: str | None = None
    flow_run: str = ""
    verdict: Literal["approved", "rejected", "pending"]
    reviewer: str | None = None


QUESTIONS: Final = {
    name: said.description for name, said in Review.model_fields.items() if name != "note"
}


class ScoreDifference(RunFile):
    """Absolute differences of a score over the ids both sides have."""

    n: int
    mean: float
    median: float
    p99: float
    max: float
    share_within_tolerance: float  # 0 to 1
    allclose: bool  # both scores, rtol = atol = 1e-3


class ClassAgreement(RunFile):
    """Ids of one class by side a: how many there are, and how many of them have the same label on both sides."""

    ids: int
    agreeing: int


class LabelAgreement(RunFile):
    """Labels of two results joined by id. Ids of one side only count as disagreements."""

    in_both: int
    only_in_a: int
    only_in_b: int
    agreeing: int
    agreement: float | None  # agreeing / all ids, 0 to 1; None when there is no id at all
    score: ScoreDifference | None  # None when a side has no scores, or no id is in both
    examples: tuple[str, ...]  # a few ids that disagree, with what each side says
    classes: dict[str, ClassAgreement] = Field(
        default_factory=dict
    )  # viral, non-viral, near threshold; or none

    @property
    def total(self) -> int:
        """Ids of either side."""
        return self.in_both + self.only_in_a + self.only_in_b


class CosineStats(RunFile):
    """Cosine of pooled embeddings less their mean, row by row."""

    part: str  # "DNABERT-S" and "ESM-2", or "joined"
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
    """One result held against another."""

    a: str
    b: str
    tolerance: float
    subset_reads: int | None = None  # side a covers this many reads only; b was cut to them
    frames: LabelAgreement | None = None
    consensus: LabelAgreement | None = None
    cosines: tuple[CosineStats, ...] = ()
    bitwise: BitwiseEquality | None = None


class ComparisonFile(RunFile):
    """`comparison.json`."""

    schema_version: int = 1
    comparisons: tuple[Comparison, ...]
