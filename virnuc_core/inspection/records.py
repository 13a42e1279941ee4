"""The records of an inspection: what was found in files of reads, and what a run would cost."""

from typing import Literal

from pydantic import Field

from virnuc_core.run_costs import NOT_MEASURED_GPUS
from virnuc_core.runfiles import RunFile

Role = Literal["single reads", "first mates", "second mates", "both mates"]


class InspectedFile(RunFile):
    """What was found in one file."""

    file: str
    role: Role
    mates: str = ""  # the file with the mates of these reads
    size: int | None = None  # bytes on the disk; None for a pipe
    reads: int | None = None  # None if it is not known how many there are
    is_complete: bool = True  # all reads were read; otherwise `reads` is an estimate
    skipped: int = 0  # broken records that were left out (`on_error` is `skip`)
    problem: str = ""  # why the file cannot be used; the reads before are counted


class LengthBin(RunFile):
    """Reads whose lengths are in a range."""

    shortest: int
    longest: int
    share: float  # of all reads


class Lengths(RunFile):
    """The lengths of some reads in bases."""

    shortest: int
    median: int
    longest: int
    histogram: tuple[LengthBin, ...]


class ModelShares(RunFile):
    """Which reads a classifier of one model length can judge. Shares are of all reads."""

    model_length: int
    open_share: float  # reads with an open reading frame: only these get a verdict
    short_share: float  # reads of less than half of the model's length


class ReadStatistics(RunFile):
    """What some reads are like."""

    reads: int | None  # None if it is not known how many there are
    reads_read: int
    is_complete: bool  # all reads were read; otherwise numbers are estimates from the first reads
    lengths: Lengths | None  # None if there are no reads
    letters_not_acgt: float  # share of all letters that are not A, C, G, T
    reads_not_acgt: float  # share of all reads that have such a letter
    models: tuple[ModelShares, ...]


class GpuTime(RunFile):
    """The estimated time of a run on one GPU."""

    gpu: str
    precision: str
    seconds: float


class RunCosts(RunFile):
    """What a run with one model length would cost, with the public encoders."""

    model_length: int
    rows: int  # open reading frames
    repeated_share: float  # of the rows: those equal to an earlier row, which are embedded once
    tokens: int  # of the protein encoder, for distinct rows
    disk_bytes: int  # of embeddings and scores
    times: tuple[GpuTime, ...]


class InspectedGroup(RunFile):
    """A file, or two files of mates, with the statistics of its reads."""

    files: tuple[str, ...]
    statistics: ReadStatistics


class InspectedSample(RunFile):
    """One sample, as a prediction would form it."""

    sample: str
    read_group: str = ""
    files: tuple[InspectedFile, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    groups: tuple[InspectedGroup, ...] = ()
    ignored: dict[str, str] = Field(default_factory=dict)  # files left out, with the reason
    problem: str = ""  # why the files of this sample cannot be used


class Inspection(RunFile):
    """What a run would see in some files of reads."""

    samples: tuple[InspectedSample, ...]
    # The files of the samples that `--sample-from name` would form, if no samples were asked for
    samples_by_name: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    notes: tuple[str, ...]  # doubts about pairs and samples, as the log of a run has them
    statistics: ReadStatistics  # of all samples together
    duplicate_share: float  # of the reads that were read: those equal to an earlier one
    costs: tuple[RunCosts, ...]  # by model length; none if it is not known how many reads there are
    not_measured: tuple[str, ...] = NOT_MEASURED_GPUS  # GPU models for which no time is known

    @property
    def problems(self) -> list[str]:
        """Return one line for each file or sample that cannot be used."""
        problems: list[str] = []
        for sample in self.samples:
            problems += [file.problem for file in sample.files if file.problem]
            if sample.problem:
                problems.append(sample.problem)
        return problems
