"""The JSON files that a run writes and reads again: one model each, and one pair of functions that write and read them.

A file of an older run may lack keys or hold others: what is absent is `None` or empty, what is unknown is passed over.
`read` refuses a file with a value of the wrong kind; `read_usable`, for whoever must go on, leaves such values out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from virnuc_core.config import BaselineName, Profile, explain
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import write_text_whole

LARGEST: Final = 10**18  # nothing of ours is more; sums and ratios of such numbers stay finite

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
Seconds = Annotated[float, Field(ge=0, le=LARGEST)]  # a clock that ran backwards measured nothing
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]


class RunFile(BaseModel):
    """Base of all that such files hold: frozen, no NaN or infinity; a key that is not known here is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


File = TypeVar("File", bound=RunFile)


def write(path: Path, content: RunFile) -> Path:
    """Write a file whole; returns `path`."""
    write_text_whole(path, content.model_dump_json(indent=1) + "\n")
    return path


def read(path: Path, kind: type[File]) -> File:
    """The content of a file; `ConfigError` names the file, and the key that is wrong."""
    try:
        return kind.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error


def read_usable(path: Path, kind: type[File]) -> tuple[File | None, tuple[str, ...]]:
    """What can be used of a file that may hold anything, and a sentence on each thing that cannot.

    A value of the wrong kind is left out, as if it were absent; a list with one such value is left out whole. The
    content is `None` for a file that is missing (without a sentence) or that lacks what makes it such a file.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError, RecursionError) as error:
        return None, (f"cannot be read: {error}",)
    if not isinstance(body, dict):
        return None, ("holds no JSON object",)
    said: list[str] = []
    while True:
        try:
            return kind.model_validate_json(json.dumps(body), strict=True), tuple(said)
        except ValidationError as error:
            first = error.errors()[0]
            said.append(f"holds {explain(error, 1)}")
            if not _leave_out(body, first["loc"]):
                return None, tuple(said)


def _leave_out(body: dict[str, Any], place: tuple[int | str, ...]) -> bool:
    """Remove the innermost named value that `place` leads to; false when there is none."""
    here: Any = body
    holder: dict[str, Any] | None = None
    name = ""
    for step in place:
        if not isinstance(here, dict) or step not in here:
            break
        holder, name, here = here, str(step), here[str(step)]
    if holder is None:
        return False
    del holder[name]
    return True


# --- run.json ---------------------------------------------------------------------------------------------------------


class DeviceRecord(RunFile):
    """One device of a run."""

    id: str = Field(min_length=1)
    kind: Literal["cuda", "cpu"]
    name: str
    core: int | None = None  # CPU only: the core its worker is pinned to


def device_records(bodies: Iterable[Mapping[str, Any]]) -> tuple[DeviceRecord, ...]:
    """Devices as they are written."""
    return tuple(DeviceRecord.model_validate(body) for body in bodies)


class Attempt(RunFile):
    """One start of a run: the first, or a resume."""

    started: str
    devices: tuple[DeviceRecord, ...]


class RunRecord(RunFile):
    """`run.json`: what a run was made of, so that nothing foreign is ever mixed into it."""

    schema_version: int = 1
    virnuc_version: str | None = None
    git_commit: str | None = None
    versions: dict[str, str] = {}
    created: str = "unknown"
    host: str = ""
    spec: dict[str, Any] = {}  # the settings as they were given
    model_length: Count | None = None
    widths: dict[str, Count] = {}  # of an embedding's two parts: dna, protein
    fingerprints: dict[str, str]  # reads, esm2, dnabert_s, head
    resolved: dict[str, Any] = {}  # the settings that decide result bytes, `auto` replaced; and the kind of device
    devices: tuple[DeviceRecord, ...] = ()  # of the newest attempt
    seeds: dict[str, int] = {}
    store: str = ""  # relative to the run directory
    attempts: tuple[Attempt, ...] = ()


class StagingTally(RunFile):
    """What staging counted of the input."""

    reads: Count | None = None
    empty: Count | None = None
    skipped: Count | None = None  # broken records left out
    duplicate_ids: Count | None = None
    duplicates: Count | None = None  # rows whose sequences an earlier row has
    ambiguous: Count | None = None
    short_for_model: Count | None = None
    no_open_frame: Count | None = None
    ignored_files: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()


class ValidationRecord(RunRecord):
    """`run.json` of a validation."""

    profile: Profile | None = None
    staging: StagingTally | None = None


# --- summary.json -----------------------------------------------------------------------------------------------------


class ModelFlops(RunFile):
    """FLOPs of a token in the linear layers of each encoder, and by device the tokens/s those layers alone sustain
    there. A device without an entry was not measured."""

    esm2_per_token: Positive | None = None
    dnabert_s_per_token: Positive | None = None
    esm2_ceiling_tokens_s: dict[str, Positive] = {}
    dnabert_s_ceiling_tokens_s: dict[str, Positive] = {}

    def per_token(self, encoder: Literal["dnabert_s", "esm2"]) -> float | None:
        """FLOPs of one token."""
        return self.esm2_per_token if encoder == "esm2" else self.dnabert_s_per_token

    def ceilings(self, encoder: Literal["dnabert_s", "esm2"]) -> dict[str, float]:
        """Tokens/s by device."""
        return self.esm2_ceiling_tokens_s if encoder == "esm2" else self.dnabert_s_ceiling_tokens_s


class RunSummary(RunFile):
    """`summary.json`: what a run did and how long it took. It is written last: with it a run is complete, unless it
    says that it was ended at a time limit. `None`: the file does not tell."""

    schema_version: int = 1
    stopped_at_limit: Annotated[bool, BeforeValidator(bool)] = False
    wall_s: Seconds | None = None  # this run, without staging
    staging_s: Seconds | None = None
    total_s: Seconds | None = None
    stages: dict[str, Seconds | None] = {}  # the nine; None: fused
    n_reads: Count | None = None
    n_chunks: Count | None = None
    n_rows: Count | None = None
    n_uniques: Count | None = None
    protein_tokens: Count | None = None  # of the uniques, specials included
    fates: dict[str, Count] = {}
    threshold: Share | None = None  # viral score from which a read is called viral
    rows_virus: Count | None = None
    chunks_virus: Count | None = None
    chunks_scored: Count | None = None
    telemetry: str | None = None  # file name within telemetry/; None when nothing had to be computed
    devices: tuple[DeviceRecord, ...] = ()
    workers: tuple[dict[str, Any], ...] = ()
    resumed: Annotated[bool, BeforeValidator(bool)] = False  # whatever stands there: only a plain no is a no
    shards: Count | None = None
    shards_computed: Count | None = None
    shards_reused: Count | None = None
    restarts: Count | None = None
    deaths: tuple[str, ...] | None = None
    damaged: tuple[str, ...] = ()
    rows_set_aside: Count | None = None  # uniques that ended every worker
    reduced_budgets: dict[str, Count] = {}  # shard → what its token budgets were divided by, for want of memory
    flops: ModelFlops | None = None

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return not self.stopped_at_limit and None not in (self.total_s, self.n_reads, self.threshold, self.shards)


class BaselineSubset(RunFile):
    """The part of the input that a baseline was measured on."""

    reads: Count
    tokens: Count  # ESM-2 tokens of its rows, start and end tokens included
    total_tokens: Count  # of all rows
    seed: int = 0  # its reads were drawn by


class BaselineSummary(RunFile):
    """`summary.json` of a baseline: its time and what that stands on.

    `stages` are seconds on the whole input, scaled where a subset was measured, and empty for a recorded baseline.
    Chunking and translation are not among them: the rows are taken from the store, which favours the baseline.
    """

    schema_version: int = 1
    name: BaselineName
    source: Literal["measured", "recorded"] = "measured"
    wall_s: Seconds | None = None  # seconds for the whole input: what a run is compared with
    stages: dict[str, Seconds] = {}
    subset: BaselineSubset | None = None  # what was measured; None: everything, or nothing
    measured_s: Seconds | None = None  # seconds that really passed; None when recorded
    measured_stages: dict[str, Seconds] = {}
    scaled_s: Seconds | None = None  # `measured_s` scaled to the whole input; None unless a subset was measured
    n_reads: Count | None = None  # of the whole input
    n_rows: Count | None = None
    measured_rows: Count | None = None
    file_rows: Count | None = None  # rows of the files that were measured
    devices: tuple[DeviceRecord, ...] = ()
    fingerprint: str = ""  # of reads, weights, algorithm, devices and subset
    reused: bool = Field(False, exclude=True)


# --- checkpoint_overhead.json -----------------------------------------------------------------------------------------

OVERHEAD: Final = "checkpoint_overhead.json"
MIN_PAIRS: Final = 3  # fewer say nothing: two runs of the same work differ by themselves


class OverheadPair(RunFile):
    """Two runs over the same shards, one after the other."""

    with_run: str  # run directory, relative to the validation's
    without_run: str
    with_tokens_per_s: float  # from the first batch launched to the last shard committed
    without_tokens_per_s: float
    seconds: float  # of the shorter run
    restarts: int  # of workers in either run; more than none spoils the pair

    @property
    def overhead(self) -> float | None:
        """1 − tokens/s with commits ÷ tokens/s without; `None` for a pair that says nothing."""
        if self.without_tokens_per_s <= 0 or self.restarts:
            return None
        return 1.0 - self.with_tokens_per_s / self.without_tokens_per_s


class OverheadFile(RunFile):
    """`checkpoint_overhead.json`: pairs of runs with commits and without. Their telemetry stays, so that every rate can
    be computed again."""

    schema_version: int = 1
    job: str  # digest of reads, weights and settings
    devices: tuple[str, ...]
    shards: int  # computed in each run
    shard_tokens: int
    pairs: tuple[OverheadPair, ...]


# --- beside the report --------------------------------------------------------------------------


class ApprovalRecord(RunFile):
    """`report/approval.json`: what the reviewer of a validation said."""

    schema_version: int = 1
    when: str | None = None
    flow_run: str = ""
    all_criteria_met: str = "not answered"
    target_realistic: str = "not answered"
    tuning_could_help: str = "not answered"
    code_fix_needed: str = "not answered"
    esm2_still_bottleneck: str = "not answered"
    verdict: Literal["approved", "rejected", "pending"]
    reviewer: str | None = None
    note: str = ""


# --- comparison.json --------------------------------------------------------------------------------------------------


class ScoreDifference(RunFile):
    """Absolute differences of a score over the ids both sides have."""

    n: int
    mean: float
    median: float
    p99: float
    max: float
    tolerance: float
    share_within_tolerance: float  # 0 to 1
    allclose: bool  # both scores, rtol = atol = 1e-3


class LabelAgreement(RunFile):
    """Labels of two results joined by id. Ids of one side only count as disagreements."""

    in_both: int
    only_in_a: int
    only_in_b: int
    agreeing: int
    agreement: float | None  # agreeing / all ids, 0 to 1; None when there is no id at all
    score: ScoreDifference | None  # None when a side has no scores, or no id is in both
    examples: tuple[str, ...]  # a few ids that disagree, with what each side says

    @property
    def total(self) -> int:
        """Ids of either side."""
        return self.in_both + self.only_in_a + self.only_in_b


class CosineStats(RunFile):
    """Cosine of pooled embeddings, row by row."""

    part: str  # "joined", "DNABERT-S" or "ESM-2"
    n: int
    minimum: float
    p1: float
    mean: float


class BitwiseEquality(RunFile):
    """Whether two run directories hold the same bytes."""

    identical: bool  # true only when something was compared and nothing differs
    files_compared: int
    shards_compared: int
    differing: tuple[str, ...]  # a few names of what differs, or why nothing could be compared


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
