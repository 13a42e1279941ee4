"""Draw a random sample of the input reads that has the same distribution of lengths.

Mates stay together: a pair is drawn as a whole, or not at all. The input is read twice, first for
the lengths, then to copy the drawn reads unchanged. Single reads are sorted by length and divided
into equal groups, and one read is drawn from each group. Pairs are drawn in the same way, sorted by
the lengths of both mates. This takes about 30 bytes of memory per read, for reads of any length.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import ConfigError, InputError, VirnucError
from virnuc_core.input_names import is_remote
from virnuc_core.reads.fast_parser import Format, ParseLog, ReadBatch
from virnuc_core.reads.file_names import NamedPair, add_word, find_mates
from virnuc_core.reads.mate_files import detect_pairs, find_problem_of_pair
from virnuc_core.reads.pairs import begins_with_pair, pair_batches
from virnuc_core.reads.parse import parse
from virnuc_core.reads.sources import Inputs, create_reads_file, find_inputs, redact_url
from virnuc_core.reads.subsets import choose_reads, require_rereadable
from virnuc_core.rundir import MATE_SUFFIXES, require_absent
from virnuc_core.system_errors import list_folder

_MAX_BINS: Final = 50  # rows of the table that compares the lengths before and after
_FORMAT_BY_ENDING: Final[dict[str, Format]] = {
    "fq": "fastq",
    "fastq": "fastq",
    "fa": "fasta",
    "fna": "fasta",
    "fasta": "fasta",
}
_FIRST_MATE: Final = 0  # indices of MATE_SUFFIXES
_SECOND_MATE: Final = 1
_UNPAIRED: Final = 2
_log = logging.getLogger(__name__)


class SampleSummary(NamedTuple):
    """The size of a sample, how well its lengths represent the whole, and where it is."""

    reads_before: int
    reads_after: int
    # a row for each bin: `shortest` and `longest` length, reads `before` and `after`
    bins: pd.DataFrame
    # largest difference of the two cumulative length distributions (Kolmogorov–Smirnov), 0 to 1
    distance: float
    pairs_before: int
    pairs_after: int
    files: tuple[Path, ...]  # that were written
    reads: ReadsSpec  # the sample as an input: its files, and which of them hold mates

    def lines(self) -> list[str]:
        """Return a table that compares the lengths before and after sampling, as lines of text."""
        lines = [f"{'length':>15} {'before':>12} {'share':>8} {'after':>12} {'share':>8}"]
        for shortest, longest, n_before, n_after in self.bins.to_numpy().tolist():
            span = str(shortest) if shortest == longest else f"{shortest}-{longest}"
            share_before = n_before / max(self.reads_before, 1)  # 1: there are no reads
            share_after = n_after / max(self.reads_after, 1)
            lines.append(
                f"{span:>15} {n_before:>12,} {share_before:>8.2%} "
                f"{n_after:>12,} {share_after:>8.2%}"
            )
        lines.append(f"{self.counts()}; distance of lengths {self.distance:.4f}")
        return lines

    def counts(self) -> str:
        """Return how many reads, and pairs, were drawn: `50 of 400 reads (25 of 200 pairs)`."""
        text = f"{self.reads_after:,} of {self.reads_before:,} reads"
        if self.pairs_before:
            text += f" ({self.pairs_after:,} of {self.pairs_before:,} pairs)"
        return text


def sample(
    spec: ReadsSpec,
    n: int,
    out: Path,
    seed: int = 0,
    *,
    force: bool = False,
) -> SampleSummary:
    """Draw a random sample of reads with the same distribution of lengths, and write it to files.

    The records are copied unchanged, in the order of the input. Files that are mates by their names
    are pairs.

    Args:
        spec: The reads, and which of them are mates.
        n: The number of reads to draw; each mate counts. If there are fewer, all are taken. Pairs
            are drawn whole, so of an odd number of mates one is left out.
        out: The file for the sample. It is gzipped if its name ends in `.gz`. Of pairs in two
            files, first mates are written to `OUT_R1`, second mates to `OUT_R2` in the same order,
            and reads without a mate to `OUT_orphans`. Interleaved pairs are written to `out`.
        seed: Equal seeds draw equal reads.
        force: Replace files that exist.

    Returns:
        The lengths of the sample compared with those of all reads, and its files.

    Raises:
        InputError: The reads cannot be used or cannot be read twice, mates are out of step, or
            FASTA is mixed with FASTQ.
        ConfigError: `n` is too small, a file exists, or `out` is named like another format.
    """
    if n < 1:
        raise ConfigError(f"{n} reads were requested; request 1 or more")
    _require_local(spec.all_inputs)
    require_rereadable(spec.all_inputs)
    inputs = _find_pairs(spec)
    paths = _name_files(out, inputs, spec)
    _require_free(paths, inputs, force=force)
    reads = _survey(inputs, spec, out)
    is_drawn = _draw(reads, n, seed)
    _copy_reads(inputs, spec, is_drawn, paths)
    return _summarize(reads, is_drawn, paths, inputs)


def _require_local(names: tuple[str, ...]) -> None:
    """Raise an `InputError` for an address or accessions: a sample downloads nothing."""
    for name in names:
        if is_remote(name):
            raise InputError(
                f"{redact_url(name)}: a sample is drawn of files on this machine",
                hint="download the reads first, and name the file",
            )


def _find_pairs(spec: ReadsSpec) -> Inputs:
    """Find the input files, and detect pairs among them.

    Args:
        spec: The inputs.
    """
    paired_inputs = detect_pairs(spec, find_inputs(spec.all_inputs))
    if spec.pairs:
        _warn_of_mates_left_behind(paired_inputs, spec.reads)
    return paired_inputs


def _warn_of_mates_left_behind(inputs: Inputs, named_files: tuple[str, ...]) -> None:
    """Log a warning for each named file whose mates lie in a file beside it that was not named.

    Samples of the two files by themselves hold different reads, also with equal seeds.

    Args:
        inputs: The input files.
        named_files: Files and folders that the user named.
    """
    left_singles = [Path(name) for name in inputs.singles if name in named_files]
    for folder in dict.fromkeys(path.parent for path in left_singles):
        for pair in _find_pairs_in(folder):
            for file, mates in ((pair.first, pair.second), (pair.second, pair.first)):
                is_left_behind = Path(file) in left_singles and mates not in inputs.files
                if is_left_behind and not _is_doubtful(pair):
                    _log.warning(
                        "%s: its mates are in %s; -1 and -2 draw both files together", file, mates
                    )


def _find_pairs_in(folder: Path) -> tuple[NamedPair, ...]:
    """Return the files of a folder that are mates by their names; none if it cannot be listed."""
    try:
        names = [str(path) for path in list_folder(folder) if path.is_file()]
    except (VirnucError, OSError):  # a user may read a file whose folder may not be listed
        return ()
    return find_mates(names).pairs


def _is_doubtful(pair: NamedPair) -> bool:
    """Return True if the reads of two files do not agree with their names, or cannot be read."""
    try:
        return bool(find_problem_of_pair(pair))
    except VirnucError:  # such as a file that may not be read here; no command has named it
        return True


def _name_files(out: Path, inputs: Inputs, spec: ReadsSpec) -> tuple[Path, ...]:
    """Return the file for first mates, for second mates, and for reads without a mate.

    All three are `out` if there are no pairs, or if the mates of a pair follow each other in the
    input as well.
    """
    is_interleaved = spec.interleaved and all(first == second for first, second in inputs.pairs)
    if is_interleaved or not inputs.pairs:
        return (out,) * len(MATE_SUFFIXES)
    return tuple(add_word(out, suffix) for suffix in MATE_SUFFIXES)


def _require_free(paths: tuple[Path, ...], inputs: Inputs, *, force: bool) -> None:
    """Raise a `ConfigError` if the sample would replace its own input, or another file."""
    for path in paths:
        if any(path.resolve() == Path(name).resolve() for name in inputs.files):
            raise ConfigError(f"{path}: the reads are drawn from this file; choose another name")
    require_absent(*dict.fromkeys(paths), force=force)


def _read_all(inputs: Inputs, spec: ReadsSpec) -> Iterator[tuple[str, ReadBatch]]:
    """Read all inputs, first the pairs, then the other files.

    Yields:
        The name of a file (of a pair the first one), and a batch of its reads.
    """
    log = ParseLog(spec.on_error, read_group=spec.read_group)
    for pair in inputs.pairs:
        for batch in pair_batches(inputs._replace(pairs=(pair,)), log):
            yield pair[0], batch
    for batch in parse(inputs.singles, log):
        yield inputs.singles[batch.file_index], batch


@dataclass(frozen=True)
class _Reads:
    """What is known of all input reads, in the order in which they are read.

    Attributes:
        lengths: The number of bases: uint32 [reads].
        mates: First mate (0), second mate (1) or neither (2), as in `MATE_SUFFIXES`: uint8 [reads].
            A second mate directly follows its first mate.
    """

    lengths: NDArray[np.uint32]
    mates: NDArray[np.uint8]

    @property
    def first_mates(self) -> NDArray[np.int64]:
        """Return the positions of the first mates, one for each pair: int64 [pairs]."""
        return np.flatnonzero(self.mates == _FIRST_MATE)

    @property
    def unpaired(self) -> NDArray[np.int64]:
        """Return the positions of the reads without a mate: int64 [unpaired reads]."""
        return np.flatnonzero(self.mates == _UNPAIRED)


def _survey(inputs: Inputs, spec: ReadsSpec, out: Path) -> _Reads:
    """Read all files, and return the length of each read and which mate it is.

    A warning is logged if a file that is read as single reads seems to hold both mates of pairs.

    Args:
        inputs: The files.
        spec: How they are read.
        out: The file that will be written later. Its name is checked against the format here,
            because the format is known now.

    Raises:
        InputError: FASTA is mixed with FASTQ, or see `parse` and `pair_batches`.
        ConfigError: `out` has a FASTA ending for FASTQ reads, or the other way round.
    """
    lengths = [np.zeros(0, np.uint32)]
    mates = [np.zeros(0, np.uint8)]
    format_: Format | None = None
    last_file = None
    for file, batch in _read_all(inputs, spec):
        if format_ not in (None, batch.format):
            raise InputError(
                "FASTA and FASTQ are mixed", file=file, hint="sample each format by itself"
            )
        format_ = batch.format
        is_first_batch_of_file = file != last_file
        last_file = file
        if is_first_batch_of_file and spec.pairs and begins_with_pair(batch):
            _log.warning(
                "%s: mates seem to follow each other; each read is drawn by itself, --interleaved "
                "keeps mates together",
                file,
            )
        if batch.part is None:
            lengths.append(batch.bases.lengths.astype(np.uint32))
            mates.append(_find_mates(batch))
        elif batch.part.is_last:
            n_bases = batch.part.n_bases_before + len(batch.bases.data)
            lengths.append(np.array([n_bases], np.uint32))
            mates.append(_find_mates(batch))
    ending = out.name.removesuffix(".gz").rpartition(".")[2].lower()
    claimed_format = _FORMAT_BY_ENDING.get(ending)
    if format_ is not None and claimed_format not in (None, format_):
        raise ConfigError(
            f"{out}: the reads are {format_.upper()}; name the file .{format_} or .{format_}.gz"
        )
    return _Reads(np.concatenate(lengths), np.concatenate(mates))


def _find_mates(batch: ReadBatch) -> NDArray[np.uint8]:
    """Return for each read of a batch which mate it is, see `_Reads`: uint8 [n]."""
    mates = np.full(len(batch), _UNPAIRED, np.uint8)
    if batch.follows_mate is not None:  # a pair is never divided between two batches
        second_mates = np.flatnonzero(batch.follows_mate)
        mates[second_mates] = _SECOND_MATE
        mates[second_mates - 1] = _FIRST_MATE
    return mates


def _draw(reads: _Reads, n: int, seed: int) -> NDArray[np.bool_]:
    """Draw about `n` reads, and never more: whole pairs, and reads without a mate.

    Args:
        reads: All reads.
        n: The number of reads to draw.
        seed: Equal seeds draw equal reads.

    Returns:
        Whether each read is drawn: bool [reads].

    Raises:
        ConfigError: `n` is 1, and there are only pairs.
    """
    first_mates, unpaired = reads.first_mates, reads.unpaired
    n_drawn_pairs, n_drawn_unpaired = _divide(n, len(first_mates), len(unpaired))
    if len(reads.lengths) and not n_drawn_pairs + n_drawn_unpaired:
        raise ConfigError(f"{n} read was requested, but a pair has two; request 2 or more")
    is_drawn = np.zeros(len(reads.lengths), bool)

    # Drawing from equal ranges of the reads in order of length gives the same distribution.
    unpaired_by_length = unpaired[np.argsort(reads.lengths[unpaired], kind="stable")]
    is_drawn[unpaired_by_length[choose_reads(len(unpaired), n_drawn_unpaired, seed)]] = True

    pairs_by_length = first_mates[
        _order_pairs(reads.lengths[first_mates], reads.lengths[first_mates + 1], n_drawn_pairs)
    ]
    drawn_pairs = pairs_by_length[choose_reads(len(first_mates), n_drawn_pairs, seed)]
    is_drawn[drawn_pairs] = True
    is_drawn[drawn_pairs + 1] = True
    return is_drawn


def _divide(n: int, n_pairs: int, n_unpaired: int) -> tuple[int, int]:
    """Divide the number of wanted reads between pairs and reads without a mate.

    Both are drawn in proportion to their numbers. Where a pair is one read too many, a read without
    a mate is drawn in its place, if there is one.

    Args:
        n: The number of wanted reads, at least 1.
        n_pairs: The number of pairs there are.
        n_unpaired: The number of reads without a mate there are.

    Returns:
        The number of pairs to draw, and the number of reads without a mate. Together they have `n`
        reads, or fewer if `n` is odd or larger than the number of all reads.
    """
    n_reads = 2 * n_pairs + n_unpaired
    if n >= n_reads:
        return n_pairs, n_unpaired
    nearest_n_pairs = (2 * n * n_pairs + n_reads) // (2 * n_reads)  # n * n_pairs / n_reads, rounded
    n_drawn_pairs = min(nearest_n_pairs, n // 2)
    return n_drawn_pairs, min(n_unpaired, n - 2 * n_drawn_pairs)


def _order_pairs(
    first_lengths: NDArray[np.uint32], second_lengths: NDArray[np.uint32], n_drawn: int
) -> NDArray[np.int64]:
    """Order pairs so that neighbours have similar lengths of both mates.

    The pairs are divided into strips of similar lengths of the first mate. Within a strip they are
    sorted by the length of the second mate, in every other strip downwards, so that the lengths do
    not jump from strip to strip. With as many strips as pairs that will be drawn from each, the
    lengths of both mates are represented about equally well.

    Args:
        first_lengths: The bases of the first mates: uint32 [pairs].
        second_lengths: The bases of the second mates: uint32 [pairs].
        n_drawn: The number of pairs that will be drawn.

    Returns:
        The indices of the pairs in this order: int64 [pairs].
    """
    n_pairs = len(first_lengths)
    n_strips = max(1, math.isqrt(n_drawn))
    strip = np.empty(n_pairs, np.int64)
    strip[np.argsort(first_lengths, kind="stable")] = np.arange(n_pairs) * n_strips // n_pairs
    signed_lengths = second_lengths.astype(np.int64)
    signed_lengths[strip % 2 == 1] *= -1
    return np.lexsort((signed_lengths, strip))  # by the strip, then by the signed length


def _copy_reads(
    inputs: Inputs, spec: ReadsSpec, is_drawn: NDArray[np.bool_], paths: tuple[Path, ...]
) -> None:
    """Copy the drawn reads to their files, unchanged and in order.

    The file for reads without a mate is only written if such a read was drawn, or if it is the only
    file. The others are empty if nothing was drawn.

    Args:
        inputs: The input files.
        spec: How they are read.
        is_drawn: Which reads of the input are drawn: bool [reads].
        paths: The file for first mates, second mates and reads without a mate. They appear when
            they are complete.
    """
    n_passed = 0
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for path in dict.fromkeys((paths[_FIRST_MATE], paths[_SECOND_MATE])):
            files[path] = stack.enter_context(create_reads_file(path))
        for _, batch in _read_all(inputs, spec):
            is_drawn_in_batch = is_drawn[n_passed : n_passed + len(batch)]
            mates = _find_mates(batch)
            for index in np.flatnonzero(is_drawn_in_batch).tolist():
                path = paths[mates[index]]
                if path not in files:
                    files[path] = stack.enter_context(create_reads_file(path))
                files[path].write(batch.records[index])
            # A long read comes in several parts, which all are the same read.
            if batch.part is None or batch.part.is_last:
                n_passed += len(batch)
    for path in paths:
        if path not in files:
            path.unlink(missing_ok=True)  # written by an earlier command with other reads


def _summarize(
    reads: _Reads, is_drawn: NDArray[np.bool_], paths: tuple[Path, ...], inputs: Inputs
) -> SampleSummary:
    """Describe a sample: its numbers, its lengths compared with those of all reads, and its files.

    Args:
        reads: All reads.
        is_drawn: Which of them are drawn: bool [reads].
        paths: The files for first mates, second mates and reads without a mate.
        inputs: The input files.
    """
    drawn_mates = reads.mates[is_drawn]
    first, second, unpaired = paths
    files = [first, second]
    if (drawn_mates == _UNPAIRED).any():
        files.append(unpaired)
    files = list(dict.fromkeys(files))
    if first == second:
        sampled = ReadsSpec(reads=(str(first),), interleaved=bool(inputs.pairs))
    else:
        sampled = ReadsSpec(
            reads=tuple(str(path) for path in files[2:]),
            mates_1=(str(first),),
            mates_2=(str(second),),
        )
    comparison = _compare_lengths(reads.lengths, reads.lengths[is_drawn])
    return SampleSummary(
        reads_before=len(reads.lengths),
        reads_after=int(is_drawn.sum()),
        bins=comparison.bins,
        distance=comparison.distance,
        pairs_before=len(reads.first_mates),
        pairs_after=int((drawn_mates == _FIRST_MATE).sum()),
        files=tuple(files),
        reads=sampled,
    )


class _Comparison(NamedTuple):
    """The lengths of all reads and of a sample, see `SampleSummary`."""

    bins: pd.DataFrame
    distance: float


def _compare_lengths(lengths: NDArray[np.uint32], drawn_lengths: NDArray[np.uint32]) -> _Comparison:
    """Compare the lengths of all reads with the lengths of a sample.

    Args:
        lengths: The bases of each read.
        drawn_lengths: The bases of each read of the sample.

    Returns:
        A table with bins of lengths, and the largest difference of the cumulative distributions.
    """
    # The distance of the two distributions.
    distinct_lengths, n_before = np.unique(lengths, return_counts=True)
    index_of_drawn = np.searchsorted(distinct_lengths, drawn_lengths)
    n_after = np.bincount(index_of_drawn, minlength=len(distinct_lengths))
    # Without reads there is nothing to divide; 1 avoids a division by zero.
    cumulative_before = n_before.cumsum() / max(1, len(lengths))
    cumulative_after = n_after.cumsum() / max(1, len(drawn_lengths))
    distance = np.abs(cumulative_before - cumulative_after).max(initial=0.0)

    # Divide the lengths into bins with about equal numbers of reads.
    n_shorter = n_before.cumsum() - n_before
    bin_of_length = n_shorter * _MAX_BINS // max(1, len(lengths))
    bin_starts = np.flatnonzero(np.diff(bin_of_length, prepend=-1))
    bins = pd.DataFrame(
        {
            "shortest": distinct_lengths[bin_starts],
            "longest": np.maximum.reduceat(distinct_lengths, bin_starts),
            "before": np.add.reduceat(n_before, bin_starts),
            "after": np.add.reduceat(n_after, bin_starts),
        }
    )
    return _Comparison(bins, float(distance))
