"""The report as data: every figure is typed and frozen, and names the raw file that it comes from.

Numbers that were not measured are `None`. Nothing is zero, passed or agreed for want of data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field

from virnuc_core.answer import random_parts
from virnuc_core.encoder_names import DNA, PROTEIN, EncoderName, Molecule
from virnuc_core.profiles import Profile, Target
from virnuc_core.runfiles import Device, FileDigest, ProductRate, RunCounts, RunFile, RunRecord
from virnuc_core.telemetry.starvation import Starvation
from virnuc_core.telemetry.statistics import (
    BatchMetrics,
    DeviceBusy,
    DeviceUsage,
    HostUsage,
    Window,
)
from virnuc_core.telemetry.tables import GPU_STAGES, STAGES
from virnuc_core.validation import (
    ApprovalRecord,
    BaselineSubset,
    Comparison,
    OverheadFile,
    StagingTally,
)

SCHEMA_VERSION = 5
NEEDS_BASELINE: Final = frozenset({"speedup", "consensus"})  # criteria that hold a run against v1.0
BASELINE: Final = "baseline"  # the folder of the baseline, and its name in comparisons

Verdict = Literal["pass", "fail", "projected", "not run", "not asked"]
ReportOutcome = Literal["passed", "failed", "not judged"]


class Record(RunFile, extra="forbid"):
    """Base of the report's records.

    They are like those of the files that it is made from, but have no unknown keys.
    """


class DeviceMetrics(DeviceUsage):
    """One device while it embedded, and while each encoder ran on it.

    It embeds from its first batch launched to its last batch finished.
    """

    protein_percent: Annotated[float | None, Field(alias=PROTEIN.percent_field)]
    protein_samples: Annotated[int, Field(alias=PROTEIN.samples_field)]
    dna_percent: Annotated[float | None, Field(alias=DNA.percent_field)]

    def encoder_percent(self, molecule: Molecule) -> float | None:
        """Return the utilisation while the encoder of this molecule ran, in percent."""
        return self.dna_percent if molecule == "dna" else self.protein_percent


class EncoderMetrics(BatchMetrics):
    """One encoder's batches added up, and what share of the devices' arithmetic they used."""

    encoder: EncoderName
    ceiling_tokens_per_s: float | None  # of the linear layers alone, mean over the devices
    mfu_of_ceiling: float | None  # 0 to 1; None when the ceiling was not measured
    mfu_of_datasheet: float | None

    @property
    def device_tokens_per_s(self) -> float | None:
        """Return the tokens per second of computing time, which is the speed of one device."""
        if not self.device_s:
            return None
        return self.tokens / self.device_s


class TelemetryMetrics(BatchMetrics):
    """What the telemetry file of a run says: of its batches, and of the rest."""

    file: str
    encoders: tuple[EncoderMetrics, ...]
    devices: tuple[DeviceMetrics, ...]
    busy: tuple[DeviceBusy, ...]
    device_time_spread: float | None
    energy_kwh: float | None  # all devices
    host: HostUsage
    alarms: tuple[str, ...]
    starvation: Starvation | None  # None: of a CPU or a cluster, or too short to tell
    # The run in stretches of about equal length, at most `MAX_WINDOWS`; a stall is one stretch
    windows: tuple[Window, ...]
    # All that the devices took while embedding, by the tokens of the protein encoder
    joules_per_million_tokens: float | None = None

    def encoder(self, name: EncoderName) -> EncoderMetrics | None:
        """Return the metrics of an encoder, or `None` if it had no batch."""
        for encoder in self.encoders:
            if encoder.encoder == name:
                return encoder
        return None

    def lowest_percent(self, molecule: Molecule) -> float | None:
        """Return the utilisation of the least used device while an encoder ran, in percent.

        It is `None` unless every device has samples of that time.
        """
        percents = []
        for device in self.devices:
            percent = device.encoder_percent(molecule)
            if percent is None:
                return None
            percents.append(percent)
        return min(percents, default=None)


@dataclass(frozen=True, slots=True)
class StageThroughput:
    """How fast a stage went through its sequences."""

    stage: str
    sequences: int
    seconds: float

    @property
    def sequences_per_s(self) -> float | None:
        """Return the sequences per second, or `None` if the stage took no time."""
        if not self.seconds:
            return None
        return self.sequences / self.seconds

    @property
    def ms_per_sequence(self) -> float:
        """Return the mean time of a sequence in milliseconds."""
        return 1000.0 * self.seconds / self.sequences


class RunMetrics(RunCounts):
    """One run of the validation: what it counted, and what follows from its other files."""

    name: str
    devices: tuple[Device, ...]
    label: str  # "2x RTX 4090"
    times_s: tuple[float, ...]  # total of this run and of each that repeats it, where it is whole
    precision: str | None
    missing_files: tuple[str, ...]
    telemetry: TelemetryMetrics | None
    # for the profile's projection_reads; a projection, never a measurement
    hours_projected: float | None
    device_hours_per_million: float | None
    kwh_per_million: float | None
    price_per_million: float | None
    products: tuple[ProductRate, ...] = ()  # measured just before the run

    @property
    def reads_per_s(self) -> float | None:
        """Return the reads per second of the whole time, staging included."""
        if self.sequences_per_hour is None:
            return None
        return self.sequences_per_hour / 3600.0

    def share_of_time(self, seconds: float | None) -> float | None:
        """Return this time as a share of the total time, 0 to 1, or `None` without a total."""
        if seconds is None or not self.total_s:
            return None
        return seconds / self.total_s

    @property
    def stage_shares(self) -> dict[str, float]:
        """Return the share of the total time, 0 to 1, of each stage that was measured.

        It is empty without a total.
        """
        shares = {name: self.share_of_time(seconds) for name, seconds in self.stages.items()}
        return {name: share for name, share in shares.items() if share is not None}

    @property
    def other_work_share(self) -> float:
        """Return the share of the total time that was not spent in one of the encoders, 0 to 1."""
        shares = self.stage_shares
        protein_share = shares.get(PROTEIN.title, 0.0)
        dna_share = shares.get(DNA.title, 0.0)
        return max(0.0, 1.0 - protein_share - dna_share)

    @property
    def stage_throughput(self) -> tuple[StageThroughput, ...]:
        """Return the speed of each stage that was measured and counts its sequences.

        Chunking and translation count reads. Later stages count rows, except the encoders, which
        count the rows that they embedded.
        """
        sequences: dict[str, int | None] = dict.fromkeys(STAGES, self.n_rows)
        sequences |= dict.fromkeys(STAGES[:2], self.n_reads)  # chunking and translation
        if self.telemetry is not None:
            sequences |= {GPU_STAGES[part.encoder]: part.rows for part in self.telemetry.encoders}
        speeds = []
        for stage, seconds in self.stages.items():
            count = sequences.get(stage)
            if seconds is not None and count:
                speeds.append(StageThroughput(stage, count, seconds))
        return tuple(speeds)

    @property
    def repeated_rows(self) -> int:
        """Return how many rows equal an earlier one and so were not embedded again."""
        if not self.n_rows or not self.n_uniques:
            return 0
        return self.n_rows - self.n_uniques

    @property
    def least_s(self) -> float | None:
        """Return a time in seconds that the run takes at least, however undisturbed it is.

        It is the time of staging and of the work that was committed, over all attempts: time that
        was lost when an attempt ended does not count. `None` if staging was not timed, or if
        workers died: nobody knows how much of their time was lost.
        """
        if self.staging_s is None or self.restarts:
            return None
        return self.staging_s + sum(attempt.worked_s for attempt in self.attempts)

    @property
    def untimed(self) -> str:
        """Return why the time of the run cannot be judged, or an empty text if it can."""
        if self.resumed:
            reused = f"{self.shards_reused or 0} shards are of an earlier run"
            return f"{self.name} was resumed ({reused}): its time is not whole"
        if self.stopped_at_limit:
            return f"{self.name} was ended at the time limit"
        if not self.total_s:
            return f"the time of {self.name} was not recorded"
        if self.restarts:
            restarts = f"{self.restarts} workers were started again"
            return f"{self.name} was disturbed ({restarts}): its time is no measurement"
        return ""


class BaselineMetrics(Record):
    """What the run is compared with, and how its time is known."""

    name: str
    label: str
    models: tuple[str, ...]  # distinct names of its devices
    source: Literal["measured", "scaled", "recorded"]
    seconds: float | None
    subset: BaselineSubset | None = None  # what was measured; None: all
    problem: str | None = None  # why it cannot be used
    failed_rows: int = 0  # without a finite score, in its failed.tsv

    @property
    def origin(self) -> str:
        """Return how the time was obtained, or an empty string if all reads were measured."""
        if self.source == "recorded":
            return f"the baseline's time was not measured here but recorded, on {self.label}"
        if self.subset is not None:
            tokens = f"{self.subset.tokens:,} of {self.subset.total_tokens:,}"
            measured = f"baseline measured on {self.subset.reads:,} reads"
            return f"{measured} and scaled by tokens ({tokens})"
        return ""


class Accounting(Record):
    """What became of the reads of the run that is judged, as counted in its reads.tsv."""

    reads: int
    fates: dict[str, int]
    flags: dict[str, int]  # remarks on reads; a read may bear several
    adds_up: bool  # fates of the table = its reads = the reads that came in = what the run says
    staging: StagingTally  # what was met in the input before that

    def share(self, count: int | None) -> float | None:
        """Return this number of reads as a share of all reads, 0 to 1."""
        if count is None or not self.reads:
            return None
        return count / self.reads


class ApprovalState(ApprovalRecord):
    """The answer of the reviewer. Without a reviewer nobody has answered yet."""

    of_earlier_run: bool = False  # the answer is older than the figures


class Criterion(Record):
    """One verdict with everything it stands on."""

    id: str
    perf_id: str
    title: str
    definition: str
    unit: Literal["s", "x", "%", ""]
    value: float | None
    target: Target | None
    verdict: Verdict
    reason: str  # empty only for a plain pass or fail
    samples: int | None
    samples_of: str
    device: str
    profile_line: str
    raw: tuple[str, ...]


class ScalingMetrics(Record):
    """N devices against one on the same work; and one by itself."""

    num_gpus: int
    time_seconds: float  # the median of `times_s`
    times_s: tuple[float, ...]
    speedup: float
    efficiency: float  # speedup / num_gpus
    protein_scaling: Annotated[float | None, Field(alias=PROTEIN.scaling_field)]
    dna_scaling: Annotated[float | None, Field(alias=DNA.scaling_field)]
    judged: Criterion | None = None  # by the target or band of so many devices


def efficiency_target(speedup_target: Target | None, num_gpus: int) -> Target | None:
    """Return the target of the efficiency, in percent, that equals a target of the speed-up."""
    if speedup_target is None:
        return None
    percent = 100 * speedup_target.value / num_gpus
    return speedup_target.model_copy(update={"value": percent})


class Bottleneck(Record):
    """Time that is lost, by class."""

    kind: str
    detail: str
    advice: str
    saves_s: float = 0.0  # what removing all of it would save, at most
    share: float | None = None  # of the whole time
    expected: bool = (
        False  # not worth a person's time, or the encoders doing their work well; else actionable
    )


class RegressionMetric(Record):
    """One metric against the last comparable run."""

    name: str
    before: float | None
    now: float | None
    change: float | None  # (now - before) / before
    verdict: Verdict


class Regression(Record):
    """This run against the last one of the same profile, devices, reads and weights."""

    verdict: Verdict
    reason: str
    against_commit: str | None = None
    against_created: str | None = None
    stale: bool
    metrics: tuple[RegressionMetric, ...] = ()


class HistoryEntry(Record):
    """One finished validation."""

    schema_version: int = 1
    created: str
    commit: str
    profile: str
    devices: str  # "2x NVIDIA H200", of a cluster "2x NVIDIA H200 (nodes: 2)"
    precision: str
    reads: str  # fingerprint
    weights: str
    n_reads: int
    total_s: float | None
    tokens_per_s: float | None
    gpu_utilisation: float | None
    packing_efficiency: float | None
    criteria_met: int
    regression_percent: float = 10.0  # the profile's limit
    host: str = ""

    def same(self, other: Self, fields: Sequence[str]) -> bool:
        """Return whether these fields are equal in both entries."""
        return all(getattr(self, field) == getattr(other, field) for field in fields)


class Line(Record):
    """One line of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]


class Histogram(Record):
    """Counts between edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def below(self, limit: float) -> int:
        """Return the number of values in bins that end at or before `limit`."""
        bins = zip(self.counts, self.edges[1:], strict=True)
        return sum(count for count, end in bins if end <= limit)


class Bar(Record):
    """One bar of the Gantt chart, in seconds since the run's start."""

    label: str
    start_s: float
    end_s: float


class Charts(Record):
    """What the charts show, thinned so that the report stays small."""

    utilisation: tuple[Line, ...] = ()  # of each GPU, then of the CPU
    gantt: tuple[Bar, ...] = ()
    read_lengths: Histogram | None = None
    scores: Histogram | None = None
    throughput: Line | None = None


class Report(Record):
    """Everything the report says; every form of it is rendered from this alone."""

    schema_version: int = SCHEMA_VERSION
    profile: Profile
    provenance: RunRecord  # the validation's own; the run's where that says nothing
    run: RunMetrics | None  # the run with most devices: the one judged
    single: RunMetrics | None  # the one-device run
    runs: tuple[RunMetrics, ...]
    baseline: BaselineMetrics | None
    scaling: tuple[ScalingMetrics, ...]  # one device first
    comparisons: tuple[Comparison, ...]
    criteria: tuple[Criterion, ...] = ()  # the seven
    checks: tuple[Criterion, ...] = ()  # further targets of the profile
    losses: tuple[Bottleneck, ...]  # avoidable ones, the largest first
    # on stages over 30 % of the time, or GPU stages under 80 % utilisation
    findings: tuple[str, ...]
    regression: Regression | None
    history: tuple[HistoryEntry, ...]  # of the runs like this one, itself included
    charts: Charts
    overhead: OverheadFile | None
    accounting: Accounting | None
    approval: ApprovalState | None  # None: none was asked for
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: dict[str, FileDigest]  # the files it was made from, by name
    # A sentence for each file that the validation left and that is not usable any more, by name
    missing_evidence: dict[str, str] = Field(default_factory=dict)

    @property
    def many(self) -> RunMetrics | None:
        """Return the run on several devices that is judged.

        It is `None` if the judged run, which is the one on the most devices, was on one device.
        """
        if self.run == self.single:
            return None
        return self.run

    def criterion(self, name: str) -> Criterion:
        """Return the criterion with this id.

        Raises:
            KeyError: The report has no such criterion.
        """
        return {criterion.id: criterion for criterion in self.criteria}[name]

    @property
    def random_weights(self) -> tuple[str, ...]:
        """Return the titles of the models whose weights were random in a run of the validation.

        Runs of older versions did not record where the weights come from.
        """
        titles: dict[str, None] = {}  # each once, in order
        for run in self.runs:
            titles |= dict.fromkeys(random_parts(run.origins) or ())
        return tuple(titles)

    @property
    def baseline_title(self) -> str:
        """Return what people call the baseline: `v1.0` or `vanilla`."""
        name = self.profile.baseline.name if self.baseline is None else self.baseline.name
        return "v1.0" if name == "v1" else name

    @property
    def lowest_frame_agreement(self) -> float | None:
        """Return the lowest agreement of frame labels with the baseline over the runs, 0 to 1."""
        agreements = []
        for comparison in self.comparisons:
            if comparison.a == BASELINE and comparison.frames is not None:
                agreements.append(comparison.frames.agreement)
        return min((share for share in agreements if share is not None), default=None)

    def figure_of(self, run: RunMetrics) -> ScalingMetrics | None:
        """Return the scaling of a run, or `None` if it could not be computed.

        A figure of scaling has no name of a run. It belongs to the run with the same number of
        devices and the same times.
        """
        for figure in self.scaling:
            if figure.num_gpus == len(run.devices) and figure.times_s == run.times_s:
                return figure
        return None

    @property
    def requested(self) -> tuple[Criterion, ...]:
        """Return the criteria and checks for which the profile has a target.

        `same_bytes` is not among them: it is required in any case and has no target in profiles.
        """
        requested = []
        for criterion in (*self.criteria, *self.checks):
            if criterion.target is not None and criterion.id != "same_bytes":
                requested.append(criterion)
        return tuple(requested)

    @property
    def same_bytes(self) -> Criterion | None:
        """Return the check that the results are equal on all numbers of devices.

        It is `None` if there was one number of devices only.
        """
        return next((check for check in self.checks if check.id == "same_bytes"), None)

    @property
    def num_met(self) -> int:
        """Return the number of requested criteria that passed."""
        return sum(criterion.verdict == "pass" for criterion in self.requested)

    @property
    def further_verdicts(self) -> tuple[Criterion, ...]:
        """Return the verdicts besides the criteria: the checks, and further scaling figures."""
        verdicts = [*self.checks]
        for figure in self.scaling:
            if figure.judged is not None and figure.judged not in self.criteria:
                verdicts.append(figure.judged)
        return tuple(verdicts)

    @property
    def failed_criteria(self) -> tuple[Criterion, ...]:
        """Return the criteria, checks and scaling figures that were measured and failed."""
        all_verdicts = (*self.criteria, *self.further_verdicts)
        return tuple(criterion for criterion in all_verdicts if criterion.verdict == "fail")

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the reasons why the validation failed. Empty if it did not.

        These are the titles of failed criteria, runs stopped at the time limit, and a regression.
        """
        titles = [criterion.title for criterion in self.failed_criteria]
        for run in self.runs:
            if run.stopped_at_limit:
                titles.append(f"time limit on {run.label}")
        if self.regression is not None and self.regression.verdict == "fail":
            titles.append(f"regression ({self.regression.reason})")
        return tuple(titles)

    @property
    def outcome(self) -> ReportOutcome:
        """Return whether the validation passed.

        It passed if nothing failed and every requested criterion was met. A profile without any
        target cannot be passed.
        """
        if self.failures:
            return "failed"
        if self.requested and self.num_met == len(self.requested):
            return "passed"
        return "not judged"

    @property
    def scaling_outcome(self) -> ReportOutcome:
        """Return whether a scaling curve passed, which has no baseline.

        It passed if nothing failed, the results are equal on all numbers of devices, and every
        measured number of devices lies in its band. Targets about the baseline do not count. A run
        on one device only is no curve, so it is not judged.
        """
        if self.failures:
            return "failed"
        verdicts = [figure.judged for figure in self.scaling if figure.judged is not None]
        verdicts += [item for item in self.requested if item.id not in NEEDS_BASELINE]
        judged = {criterion.verdict for criterion in verdicts if criterion.target is not None}
        if self.same_bytes is None or self.same_bytes.verdict != "pass" or judged - {"pass"}:
            return "not judged"
        return "passed"
