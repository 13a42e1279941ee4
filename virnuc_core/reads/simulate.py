"""Simulate labelled genomes and reads: to try virnuc, train a first head, or measure at any size.

The two kinds of genome differ in ways that a classifier can learn. Viral genomes are rich in A and
T and nearly all coding, with a codon usage of their own. The others are rich in G and C, with genes
far apart. No real organism is imitated.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, BinaryIO, Final, NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from virnuc_core.config import SIMULATED_SIZES, ReadsSpec, Share, Spec
from virnuc_core.errors import ConfigError
from virnuc_core.reads.file_names import add_word
from virnuc_core.reads.sources import create_reads_file
from virnuc_core.reads.translate import STANDARD_CODE
from virnuc_core.rundir import MATE_SUFFIXES, atomic_file, require_absent

LABELS: Final = ("others", "virus")
TRUTH_HEADER: Final = ("read", "label", "genome", "start", "strand", "copy_of")

_BATCH: Final = 20_000  # reads that are made at a time
_LETTERS: Final = np.frombuffer(b"ACGTN", np.uint8)  # by code
_N_CODE: Final = 4
_SUFFIX: Final = re.compile(r"\.(fastq|fq|fasta|fa|fna)(\.gz)?$")
_MEAN_GC: Final = (0.58, 0.38)  # of genomes: others, virus
_FRAGMENT_SPREAD: Final = 0.15  # standard deviation of the lengths of fragments, of their mean
_CODING_SHARE: Final = (0.35, 0.95)  # of the genome: others, virus


class SimulateSpec(Spec):
    """The number of reads, and what they are like."""

    reads: Annotated[int, BeforeValidator(lambda given: SIMULATED_SIZES.get(given, given))] = Field(
        1000, ge=0, description=f"how many, or {', '.join(SIMULATED_SIZES)}"
    )
    read_length: int = Field(150, ge=1, le=100_000, description="bases of a read")
    viral_share: Share = Field(0.5, description="share of viral reads")
    viral_genomes: int = Field(20, ge=1)
    other_genomes: int = Field(20, ge=1)
    genome_length: int = Field(30_000, ge=100, description="mean bases of a genome")
    error_rate: Share = Field(0.002, description="substituted bases")
    n_rate: Share = Field(0.0001, description="bases read as N")
    duplicate_share: Share = Field(0.02, description="reads that are exact copies of another")
    pairs: bool = Field(
        False,
        description="make pairs of mates, in OUT_R1 and OUT_R2; each mate counts as a read",
    )
    fragment_length: int = Field(
        350,
        ge=1,
        le=100_000,
        description="of pairs: mean bases of a fragment, whose two ends are read",
    )
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _reads_fit(self) -> Self:
        """Refuse reads that are longer than the shortest genome."""
        if self.read_length > self.genome_length // 2:  # the shortest genome has half the mean
            raise ValueError(
                f"read_length {self.read_length} needs a genome_length of "
                f"{2 * self.read_length} or more"
            )
        return self

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        """Refuse fragments that are shorter than a read or longer than the shortest genome."""
        if not self.pairs:
            return self
        if self.reads == 1:
            raise ConfigError("reads: 1 is half a pair; ask for 2 or more")
        if not self.read_length <= self.fragment_length <= self.genome_length // 2:
            raise ConfigError(
                f"fragment_length: {self.fragment_length} is not between the read_length, "
                f"{self.read_length}, and half of the genome_length, {self.genome_length // 2}"
            )
        return self


class SimulateSummary(NamedTuple):
    """The files that were written."""

    viral_reads: int
    reads_file: Path  # of pairs, the first mates
    truth_file: Path
    genomes_file: Path
    n_reads: int
    mates_file: Path | None = None  # of pairs, the second mates

    @property
    def reads(self) -> ReadsSpec:
        """Return the reads as an input."""
        if self.mates_file is None:
            return ReadsSpec(reads=(str(self.reads_file),))
        return ReadsSpec(mates_1=(str(self.reads_file),), mates_2=(str(self.mates_file),))


class _Genomes(NamedTuple):
    """All genomes end to end, others first."""

    codes: NDArray[np.uint8]  # [bases] 0..3 of ACGT
    starts: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n]
    kinds: NDArray[np.int64]  # [n], places in LABELS
    names: list[str]

    def fasta_records(self) -> Iterator[bytes]:
        """Yield each genome as a record of FASTA."""
        letters = _LETTERS[self.codes].tobytes()
        for name, start, length in zip(
            self.names, self.starts.tolist(), self.lengths.tolist(), strict=True
        ):
            yield b">%b\n%b\n" % (name.encode(), letters[start : start + length])


@dataclass(frozen=True)
class _Reads:
    """Simulated reads, as columns."""

    letters: NDArray[np.uint8]  # [n, read_length]
    genome: NDArray[np.int64]  # [n] index of the genome
    start: NDArray[np.int64]  # [n] first base within the genome
    is_reverse: NDArray[np.bool_]  # [n] on the reverse strand
    source: NDArray[np.int64]  # [n] the read that it copies, or itself


def simulate(spec: SimulateSpec, out: Path, *, force: bool = True) -> SimulateSummary:
    """Write simulated reads, their truth and their genomes; equal settings give equal bytes.

    Args:
        spec: The reads to make. Of an odd number of mates, one is left out.
        out: The file for the reads: .fastq or .fasta, either with .gz. `<name>.truth.tsv` and
            `<name>.genomes.fasta.gz` are written beside it. Pairs are written to `<name>_R1` and
            `<name>_R2`, with ids that end in `/1` and `/2`.
        force: Replace files that exist.

    Returns:
        The paths of the files, and the numbers of reads and of viral reads.

    Raises:
        ConfigError: `out` has another suffix, or a file exists and `force` is false.
    """
    match = _SUFFIX.search(out.name)
    if match is None:
        raise ConfigError(f"{out}: the name must end in .fastq, .fastq.gz, .fasta or .fasta.gz")
    stem = out.name[: match.start()]
    is_fastq = match[1] in ("fastq", "fq")
    truth_file = out.with_name(f"{stem}.truth.tsv")
    genomes_file = out.with_name(f"{stem}.genomes.fasta.gz")
    if spec.pairs:
        reads_files = [add_word(out, suffix) for suffix in MATE_SUFFIXES[:2]]
        id_ends: tuple[str, ...] = ("/1", "/2")
    else:
        reads_files = [out]
        id_ends = ("",)
    require_absent(*reads_files, truth_file, genomes_file, force=force)
    n_fragments = spec.reads // len(reads_files)
    rng = np.random.default_rng(spec.seed)
    genomes = _make_genomes(spec, rng)
    viral_reads = 0
    with ExitStack() as stack:
        reads_out = [stack.enter_context(create_reads_file(path)) for path in reads_files]
        genomes_out = stack.enter_context(create_reads_file(genomes_file))
        truth_path = stack.enter_context(atomic_file(truth_file))
        truth_out = stack.enter_context(truth_path.open("w", encoding="utf-8"))
        for record in genomes.fasta_records():
            genomes_out.write(record)
        truth_out.write("\t".join(TRUTH_HEADER) + "\n")
        for n_written in range(0, n_fragments, _BATCH):
            n = min(_BATCH, n_fragments - n_written)
            # An earlier version drew random lengths here. Drawing the same amount of random
            # numbers keeps the reads of each seed unchanged.
            rng.random(n)
            mates: tuple[_Reads, ...]
            if spec.pairs:
                mates = _make_pairs(spec, genomes, n, rng)
            else:
                mates = (_make_reads(spec, genomes, n, rng),)
            numbers = range(n_written + 1, n_written + n + 1)
            lines_of_mates: list[list[str]] = []
            for file, reads, end in zip(reads_out, mates, id_ends, strict=True):
                ids = [f"sim_{number:07d}{end}" for number in numbers]
                _write_reads(file, ids, reads, is_fastq=is_fastq)
                lines_of_mates.append(_truth_lines(ids, reads, genomes))
                viral_reads += int(genomes.kinds[reads.genome].sum())
            for lines in zip(*lines_of_mates, strict=True):  # both mates of a pair
                truth_out.writelines(lines)
    mates_file = reads_files[1] if spec.pairs else None
    n_reads = n_fragments * len(reads_files)
    return SimulateSummary(
        viral_reads, reads_files[0], truth_file, genomes_file, n_reads, mates_file
    )


def _write_reads(file: BinaryIO, ids: list[str], reads: _Reads, *, is_fastq: bool) -> None:
    """Write reads as FASTQ, with the same quality for all bases, or as FASTA."""
    read_length = reads.letters.shape[1]
    mark = b"@" if is_fastq else b">"
    quality = b"+\n%b\n" % (b"I" * read_length) if is_fastq else b""
    records: list[bytes] = []
    for read_id, letters in zip(ids, reads.letters, strict=True):
        records.append(b"%b%b\n%b\n%b" % (mark, read_id.encode(), letters.tobytes(), quality))
    file.write(b"".join(records))


def _truth_lines(ids: list[str], reads: _Reads, genomes: _Genomes) -> list[str]:
    """Return a line per read: label, genome, position, strand, and the read that it copies."""
    lines: list[str] = []
    for read_id, genome, start, is_reverse, source in zip(
        ids,
        reads.genome.tolist(),
        reads.start.tolist(),
        reads.is_reverse.tolist(),
        reads.source.tolist(),
        strict=True,
    ):
        label = LABELS[genomes.kinds[genome]]
        strand = "-" if is_reverse else "+"
        copy_of = ids[source] if ids[source] != read_id else ""
        cells = (read_id, label, genomes.names[genome], str(start), strand, copy_of)
        lines.append("\t".join(cells) + "\n")
    return lines


def _make_genomes(spec: SimulateSpec, rng: np.random.Generator) -> _Genomes:
    """Make the genomes of both kinds, with random lengths.

    The lengths are between 0.5 and 1.5 times the mean length. No genome is shorter than a read.
    """
    names: list[str] = []
    counts = (spec.other_genomes, spec.viral_genomes)
    for label, count in zip(LABELS, counts, strict=True):
        for number in range(1, count + 1):
            names.append(f"{label}_{number:04d}")
    kinds = np.repeat([0, 1], counts)
    genomes: list[NDArray[np.uint8]] = []
    for kind in kinds.tolist():
        length = int(spec.genome_length * rng.uniform(0.5, 1.5))
        genomes.append(_make_genome(kind, max(length, spec.read_length), rng))
    lengths = np.array([len(genome) for genome in genomes], np.int64)
    starts = np.cumsum(lengths) - lengths
    return _Genomes(np.concatenate(genomes), starts, lengths, kinds, names)


def _make_genome(kind: int, length: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make a genome: genes on either strand, with random bases between them.

    Args:
        kind: Index of the genome's label in `LABELS`.
        length: Length of the genome in bases.
        rng: The random generator.

    Returns:
        Codes 0..3 of ACGT: uint8 [length].
    """
    gc = float(np.clip(rng.normal(_MEAN_GC[kind], 0.02), 0.1, 0.9))
    base_shares = np.array([1 - gc, gc, gc, 1 - gc]) / 2
    codons = _coding_codons()
    # The genome prefers some codons: their frequencies vary around those of its base composition,
    # by random factors with a mean of 1.
    usage = base_shares[codons].prod(axis=1) * rng.gamma(8, 1 / 8, len(codons))
    usage /= usage.sum()
    noncoding_per_coding = 1 / _CODING_SHARE[kind] - 1
    pieces: list[NDArray[np.uint8]] = []
    n_bases = 0
    while n_bases < length:
        n_codons = int(rng.integers(100, 600))
        gene = codons[rng.choice(len(codons), n_codons, p=usage)].reshape(-1)
        is_forward = rng.random() < 0.5
        n_spacer_bases = int(3 * n_codons * noncoding_per_coding)
        spacer = rng.choice(4, n_spacer_bases, p=base_shares).astype(np.uint8)
        pieces.append(gene if is_forward else _reverse_complement(gene))
        pieces.append(spacer)
        n_bases += len(gene) + len(spacer)
    return np.concatenate(pieces)[:length]


def _coding_codons() -> NDArray[np.uint8]:
    """Return the 61 codons that are no stops, as codes 0..3 of ACGT: uint8 [61, 3]."""
    codons: list[tuple[int, ...]] = []
    for residue, bases in zip(STANDARD_CODE, product(range(4), repeat=3), strict=True):
        if residue != "*":
            codons.append(bases)
    return np.array(codons, np.uint8)


def _reverse_complement(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the reverse complement. The codes of a base and its complement add up to 3."""
    return (3 - codes)[::-1]


def _make_reads(spec: SimulateSpec, genomes: _Genomes, n: int, rng: np.random.Generator) -> _Reads:
    """Return `n` simulated reads. Some are exact copies of another read of the same batch."""
    genome = _draw_genomes(spec, genomes, n, rng)
    n_starts = genomes.lengths[genome] - spec.read_length + 1
    start = (rng.random(n) * n_starts).astype(np.int64)
    is_reverse = rng.random(n) < 0.5
    codes = _cut_windows(genomes, genomes.starts[genome] + start, is_reverse, spec.read_length)
    _add_errors(spec, codes, rng)
    source = _draw_sources(spec, n, rng)
    # A copy takes everything from its source; any other read is its own source.
    return _Reads(
        letters=_LETTERS[codes[source]],
        genome=genome[source],
        start=start[source],
        is_reverse=is_reverse[source],
        source=source,
    )


def _make_pairs(
    spec: SimulateSpec, genomes: _Genomes, n: int, rng: np.random.Generator
) -> tuple[_Reads, _Reads]:
    """Return `n` first mates and their second mates: the two ends of fragments of the genomes.

    The first mate begins at one end of its fragment, the second one at the other end, on the
    opposite strand. Some pairs are exact copies of another pair of the same batch.
    """
    genome = _draw_genomes(spec, genomes, n, rng)
    lengths = rng.normal(spec.fragment_length, _FRAGMENT_SPREAD * spec.fragment_length, n)
    lengths = np.clip(lengths.astype(np.int64), spec.read_length, genomes.lengths[genome])
    n_starts = genomes.lengths[genome] - lengths + 1
    left_end = (rng.random(n) * n_starts).astype(np.int64)
    right_end = left_end + lengths - spec.read_length  # the first base of a read at this end
    is_fragment_reverse = rng.random(n) < 0.5
    source = _draw_sources(spec, n, rng)
    mates: list[_Reads] = []
    for is_reverse in (is_fragment_reverse, ~is_fragment_reverse):
        start = np.where(is_reverse, right_end, left_end)
        codes = _cut_windows(genomes, genomes.starts[genome] + start, is_reverse, spec.read_length)
        _add_errors(spec, codes, rng)
        mates.append(
            _Reads(
                letters=_LETTERS[codes[source]],
                genome=genome[source],
                start=start[source],
                is_reverse=is_reverse[source],
                source=source,
            )
        )
    return mates[0], mates[1]


def _draw_genomes(
    spec: SimulateSpec, genomes: _Genomes, n: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the genome of each read.

    The kind (viral or other) is drawn with the viral share, and the genome of that kind in
    proportion to its length. If there are two reads or more, both kinds occur, unless the viral
    share is 0 or 1.

    Returns:
        Index of the genome of each read, [n].
    """
    is_viral = rng.random(n) < spec.viral_share
    is_mixed = 0 < spec.viral_share < 1
    has_one_kind = bool(is_viral.all() or not is_viral.any())
    if n >= 2 and is_mixed and has_one_kind:
        is_viral[0] = ~is_viral[0]
    genome = np.empty(n, np.int64)
    for kind in range(len(LABELS)):  # 0: others, 1: virus, so it can be compared with `is_viral`
        members = np.flatnonzero(genomes.kinds == kind)
        weights = genomes.lengths[members] / genomes.lengths[members].sum()
        is_of_kind = is_viral == kind
        genome[is_of_kind] = rng.choice(members, int(np.count_nonzero(is_of_kind)), p=weights)
    return genome


def _cut_windows(
    genomes: _Genomes, start: NDArray[np.int64], is_reverse: NDArray[np.bool_], length: int
) -> NDArray[np.uint8]:
    """Cut reads out of the genomes.

    Args:
        genomes: All genomes end to end.
        start: Position of the first base of each read in `genomes.codes`: int64 [n].
        is_reverse: The read is on the reverse strand: bool [n].
        length: Length of all reads in bases.

    Returns:
        Codes 0..3 of ACGT: uint8 [n, length].
    """
    codes = np.empty((len(start), length), np.uint8)
    forward_windows = sliding_window_view(genomes.codes, length)
    codes[~is_reverse] = forward_windows[start[~is_reverse]]
    # A read of the reverse strand is a window of the reverse complement of all genomes together.
    reverse_windows = sliding_window_view(_reverse_complement(genomes.codes), length)
    reverse_start = len(genomes.codes) - start - length
    codes[is_reverse] = reverse_windows[reverse_start[is_reverse]]
    return codes


def _add_errors(spec: SimulateSpec, codes: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Substitute random bases in `codes`, and replace others by N. The array is changed."""
    flat_codes = codes.reshape(-1)  # the same numbers: what changes here changes in `codes`
    n_substituted = rng.binomial(flat_codes.size, spec.error_rate)
    substituted_places = rng.integers(0, flat_codes.size, n_substituted)
    # Adding 1, 2 or 3 modulo 4 gives one of the three other bases.
    shifts = rng.integers(1, 4, len(substituted_places))
    flat_codes[substituted_places] = (flat_codes[substituted_places] + shifts) % 4
    n_unknown = rng.binomial(flat_codes.size, spec.n_rate)
    flat_codes[rng.integers(0, flat_codes.size, n_unknown)] = _N_CODE


def _draw_sources(spec: SimulateSpec, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the reads that are copies of an earlier read. A copy is never copied again.

    Returns:
        For each read, the index of the read that it copies, or its own index: int64 [n].
    """
    source = np.arange(n)
    copies = np.flatnonzero(rng.random(n) < spec.duplicate_share)
    copies = copies[copies > 0]  # the first read has no earlier read
    # An earlier read for each copy: an index from 0 to its own index less 1.
    originals = (rng.random(len(copies)) * copies).astype(np.int64)
    is_original = ~np.isin(originals, copies)
    source[copies[is_original]] = originals[is_original]
    return source
