"""Add up what was counted in files of which only a part was read, and estimate the whole."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.inspection.records import (
    GpuTime,
    LengthBin,
    Lengths,
    ModelShares,
    ReadStatistics,
    RunCosts,
)
from virnuc_core.reads.read_counts import ReadTotals, Repeats
from virnuc_core.run_costs import (
    MEASURED_SPEEDS,
    embedding_bytes,
    estimate_seconds,
    public_width,
)

# The shortest lengths of the bins of the histogram. The model lengths are the longest of a bin.
_BIN_STARTS: Final = (
    *(0, 1, 51, 76, 101, 151, 201, 251, 301, 401, 501, 751, 1_001, 2_001, 5_001, 10_001),
    *(20_001, 50_001, 100_001, 1_000_001, 10_000_001, 1 << 62),
)


@dataclass
class ModelSums:
    """The sums of one model length: of all reads, as far as they can be estimated."""

    n_open_reads: float = 0.0
    n_short: float = 0.0
    n_rows: float = 0.0
    n_tokens: float = 0.0  # of the protein encoder, for all rows
    n_distinct_rows: float = 0.0
    n_distinct_tokens: float = 0.0

    def add(self, other: "ModelSums") -> None:
        """Add other sums."""
        self.n_open_reads += other.n_open_reads
        self.n_short += other.n_short
        self.n_rows += other.n_rows
        self.n_tokens += other.n_tokens
        self.n_distinct_rows += other.n_distinct_rows
        self.n_distinct_tokens += other.n_distinct_tokens


@dataclass
class Sums:
    """The sums over some files. What was counted in a part of a file stands for the whole file.

    Attributes:
        n_reads_read: Reads that were read.
        n_duplicates: Of these, reads that are equal to an earlier one.
        is_complete: All reads were read.
        is_known: It is known, or can be estimated, how many reads there are.
        n_of_length: Number of reads by length.
        n_ambiguous_letters: Letters other than A, C, G, T.
        n_ambiguous_reads: Reads with such letters.
        models: The sums that depend on the model length, by model length.
    """

    n_reads_read: int = 0
    n_duplicates: int = 0
    is_complete: bool = True
    is_known: bool = True
    n_of_length: Counter[int] = field(default_factory=Counter)
    n_ambiguous_letters: float = 0.0
    n_ambiguous_reads: float = 0.0
    models: dict[int, ModelSums] = field(default_factory=dict)

    @classmethod
    def of_group(cls, totals: ReadTotals, n_reads: int | None, *, is_complete: bool) -> "Sums":
        """Return the sums of a group of files.

        Args:
            totals: What was counted in the reads that were read.
            n_reads: How many reads the files have; None if it is not known.
            is_complete: All of them were read.
        """
        weight = 1.0  # of a read that was read
        if n_reads is not None and totals.n_reads > 0:
            weight = n_reads / totals.n_reads
        sums = cls(
            n_reads_read=totals.n_reads,
            is_complete=is_complete,
            is_known=n_reads is not None,
            n_ambiguous_letters=weight * totals.n_ambiguous_letters,
            n_ambiguous_reads=weight * totals.n_ambiguous_reads,
        )
        for length, count in totals.n_of_length.items():
            sums.n_of_length[length] = weight * count  # type: ignore[assignment]
        for size, frames in totals.frames.items():
            n_special_tokens = PROTEIN_ENCODER.n_special_tokens * frames.n_rows
            sums.models[size] = ModelSums(
                n_open_reads=weight * frames.n_open_reads,
                n_short=weight * frames.n_short,
                n_rows=weight * frames.n_rows,
                n_tokens=weight * (frames.n_residues + n_special_tokens),
            )
        return sums

    def add(self, other: "Sums") -> None:
        """Add the sums of other files."""
        self.n_reads_read += other.n_reads_read
        self.n_duplicates += other.n_duplicates
        self.is_complete &= other.is_complete
        self.is_known &= other.is_known
        self.n_of_length.update(other.n_of_length)
        self.n_ambiguous_letters += other.n_ambiguous_letters
        self.n_ambiguous_reads += other.n_ambiguous_reads
        for size, model in other.models.items():
            self.models.setdefault(size, ModelSums()).add(model)

    def use_repeats(self, repeats: Repeats) -> None:
        """Take the numbers of distinct reads and rows from those that were read.

        The share of repeats among all rows may be larger, if only a part was read.

        Args:
            repeats: The distinct reads and rows of the sample.
        """
        self.n_duplicates = repeats.reads.n_values - repeats.reads.count()
        for size, model in self.models.items():
            rows = repeats.rows[size]
            distinct_share = rows.count() / max(1, rows.n_values)  # 1: there are no rows
            model.n_distinct_rows = model.n_rows * distinct_share
            model.n_distinct_tokens = model.n_tokens * distinct_share

    def duplicate_share(self) -> float:
        """Return the share of the reads that were read that are equal to an earlier one."""
        return _share(self.n_duplicates, self.n_reads_read)

    def statistics(self) -> ReadStatistics:
        """Return what the reads are like."""
        n_reads = self.n_of_length.total()
        n_letters = sum(length * count for length, count in self.n_of_length.items())
        models: list[ModelShares] = []
        for size, model in sorted(self.models.items()):
            shares = ModelShares(
                model_length=size,
                open_share=_share(model.n_open_reads, n_reads),
                short_share=_share(model.n_short, n_reads),
            )
            models.append(shares)
        return ReadStatistics(
            reads=round(n_reads) if self.is_known else None,
            reads_read=self.n_reads_read,
            is_complete=self.is_complete,
            lengths=_describe_lengths(self.n_of_length) if n_reads > 0 else None,
            letters_not_acgt=_share(self.n_ambiguous_letters, n_letters),
            reads_not_acgt=_share(self.n_ambiguous_reads, n_reads),
            models=tuple(models),
        )

    def costs(self) -> tuple[RunCosts, ...]:
        """Return what a run costs, by model length; nothing if the number of reads is not known."""
        if not self.is_known:
            return ()
        costs: list[RunCosts] = []
        for size, model in sorted(self.models.items()):
            times: list[GpuTime] = []
            for speed in MEASURED_SPEEDS:
                seconds = estimate_seconds(model.n_distinct_tokens, speed)
                times.append(
                    GpuTime(gpu=speed.gpu, precision=speed.precision, seconds=round(seconds, 1))
                )
            n_distinct_rows = round(model.n_distinct_rows)
            cost = RunCosts(
                model_length=size,
                rows=round(model.n_rows),
                repeated_share=_share(model.n_rows - model.n_distinct_rows, model.n_rows),
                tokens=round(model.n_distinct_tokens),
                disk_bytes=embedding_bytes(n_distinct_rows, public_width()),
                times=tuple(times),
            )
            costs.append(cost)
        return tuple(costs)


def _share(part: float, whole: float) -> float:
    """Return a part of a whole, 0 to 1; 0 if there is nothing."""
    return part / whole if whole > 0 else 0.0


def _describe_lengths(n_of_length: Mapping[int, float]) -> Lengths:
    """Return the shortest, median and longest length of some reads, and a histogram.

    Args:
        n_of_length: The number of reads by length, at least one read.
    """
    lengths = sorted(n_of_length)
    n_reads = sum(n_of_length.values())
    n_up_to = 0.0  # reads up to this length
    median = lengths[-1]
    for length in lengths:
        n_up_to += n_of_length[length]
        if 2 * n_up_to >= n_reads:
            median = length
            break
    bins: list[LengthBin] = []
    for start, next_start in pairwise(_BIN_STARTS):
        members = [length for length in lengths if start <= length < next_start]
        if members:
            count = sum(n_of_length[length] for length in members)
            bins.append(LengthBin(shortest=members[0], longest=members[-1], share=count / n_reads))
    return Lengths(shortest=lengths[0], median=median, longest=lengths[-1], histogram=tuple(bins))
