"""Labelled genomes and reads out of nothing: to try virnuc, to train a first head, to measure at any size.

The two kinds of genome differ as a classifier can learn it: viral ones are rich in A and T and nearly all coding, with
a codon usage of their own; the others are rich in G and C, with genes far between. No real organism is imitated."""

import re
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

import numpy as np
from Bio.Data import CodonTable
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from virnuc_core.config import Share, Spec
from virnuc_core.errors import ConfigError
from virnuc_core.reads.sources import create_reads_file
from virnuc_core.rundir import atomic_file, require_absent

PRESETS: Final = {
    "tiny": 10,
    "small": 100,
    "medium": 1000,
    "large": 10000,
    "100k": 10**5,
    "1m": 10**6,
    "6m": 6 * 10**6,
}
LABELS: Final = ("others", "virus")
TRUTH_HEADER: Final = ("read", "label", "genome", "start", "strand", "copy_of")

_BATCH: Final = 20_000  # reads made at a time
_LETTERS: Final = np.frombuffer(b"ACGTN", np.uint8)
_SUFFIX: Final = re.compile(r"\.(fastq|fq|fasta|fa|fna)(\.gz)?$")
_GC: Final = (0.58, 0.38)  # mean of a kind of genome: others, virus
_CODING: Final = (0.35, 0.95)  # share of the genome within genes


class SimulateSpec(Spec):
    """How many reads, of what, and how faulty."""

    reads: Annotated[int, BeforeValidator(lambda given: PRESETS.get(given, given))] = Field(
        1000, ge=0, description=f"how many, or {', '.join(PRESETS)}"
    )
    read_length: int = Field(150, ge=1, le=100_000, description="bases of a read")
    viral_share: Share = Field(0.5, description="share of viral reads")
    viral_genomes: int = Field(20, ge=1)
    other_genomes: int = Field(20, ge=1)
    genome_length: int = Field(30_000, ge=100, description="mean bases of a genome")
    error_rate: Share = Field(0.002, description="substituted bases")
    n_rate: Share = Field(0.0001, description="bases read as N")
    duplicate_share: Share = Field(0.02, description="reads that are exact copies of another")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _reads_fit(self) -> Self:
        if self.read_length > self.genome_length // 2:
            raise ValueError(
                f"read_length {self.read_length} needs a genome_length of {2 * self.read_length} or more"
            )
        return self


class SimulateSummary(NamedTuple):
    """What was written, and where."""

    viral_reads: int
    reads_file: Path
    truth_file: Path
    genomes_file: Path


class _Genomes(NamedTuple):
    """All genomes end to end, in codes 0..3 of ACGT; others first."""

    codes: NDArray[np.uint8]
    starts: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n]
    kinds: NDArray[np.int64]  # [n], places in LABELS
    names: list[str]


def simulate(spec: SimulateSpec, out: Path, *, force: bool = True) -> SimulateSummary:
    """Write reads to `out` (.fastq, .fasta, either with .gz), and beside it `….truth.tsv` and `….genomes.fasta.gz`: the
    same bytes for the same spec. Errors: `ConfigError` for another suffix and, without `force`, for files there."""
    match = _SUFFIX.search(out.name)
    if match is None:
        raise ConfigError(f"{out}: the name must end in .fastq, .fastq.gz, .fasta or .fasta.gz")
    stem, fastq = out.name[: match.start()], match[1] in ("fastq", "fq")
    truth_file, genomes_file = (
        out.with_name(f"{stem}.truth.tsv"),
        out.with_name(f"{stem}.genomes.fasta.gz"),
    )
    require_absent(out, truth_file, genomes_file, force=force)
    quality = b"+\n%b\n" % (b"I" * spec.read_length) if fastq else b""
    rng = np.random.default_rng(spec.seed)
    genomes, viral_reads = _make_genomes(spec, rng), 0
    with ExitStack() as files:
        reads_out, genomes_out = (
            files.enter_context(create_reads_file(path)) for path in (out, genomes_file)
        )
        truth_out = files.enter_context(
            files.enter_context(atomic_file(truth_file)).open("w", encoding="utf-8")
        )
        letters = _LETTERS[genomes.codes].tobytes()
        for name, start, length in zip(
            genomes.names, genomes.starts.tolist(), genomes.lengths.tolist(), strict=True
        ):
            genomes_out.write(b">%b\n%b\n" % (name.encode(), letters[start : start + length]))
        truth_out.write("\t".join(TRUTH_HEADER) + "\n")
        for made in range(0, spec.reads, _BATCH):
            size = min(_BATCH, spec.reads - made)
            rng.random(size)  # once for their lengths; a seed goes on giving what it gave
            rows, genome_of, *places = _make_reads(spec, genomes, size, rng)
            ids = [f"sim_{number:07d}" for number in range(made + 1, made + size + 1)]
            pieces, mark = [], b"@" if fastq else b">"
            columns = (column.tolist() for column in (genome_of, *places))
            for name, row, genome, start, reverse, source in zip(ids, rows, *columns, strict=True):
                pieces.append(b"%b%b\n%b\n%b" % (mark, name.encode(), row.tobytes(), quality))
                strand, copied = "-" if reverse else "+", ids[source] if ids[source] != name else ""
                label, of = LABELS[genomes.kinds[genome]], genomes.names[genome]
                truth_out.write(f"{name}\t{label}\t{of}\t{start}\t{strand}\t{copied}\n")
            reads_out.write(b"".join(pieces))
            viral_reads += int(genomes.kinds[genome_of].sum())
    return SimulateSummary(viral_reads, out, truth_file, genomes_file)


def _make_genomes(spec: SimulateSpec, rng: np.random.Generator) -> _Genomes:
    counts, mean = (spec.other_genomes, spec.viral_genomes), spec.genome_length
    names = [
        f"{name}_{i + 1:04d}"
        for name, count in zip(LABELS, counts, strict=True)
        for i in range(count)
    ]
    kinds = np.repeat([0, 1], counts)
    pieces = [
        _genome(kind, max(int(mean * rng.uniform(0.5, 1.5)), spec.read_length), rng)
        for kind in kinds.tolist()
    ]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return _Genomes(np.concatenate(pieces), np.cumsum(lengths) - lengths, lengths, kinds, names)


def _genome(kind: int, length: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Genes of a codon usage of the genome's own, on either strand, with random bases between. Codes 0..3."""
    gc = float(np.clip(rng.normal(_GC[kind], 0.02), 0.1, 0.9))
    base_shares = np.array([1 - gc, gc, gc, 1 - gc]) / 2
    stops = CodonTable.unambiguous_dna_by_id[1].stop_codons
    words = [
        codon for codon in map("".join, product("ACGT", repeat=3)) if codon not in stops
    ]  # the 61
    codons = np.array([[*map("ACGT".index, word)] for word in words], np.uint8)
    usage = base_shares[codons].prod(axis=1) * rng.gamma(8, 1 / 8, len(codons))
    usage /= usage.sum()
    pieces, size = list[NDArray[np.uint8]](), 0
    while size < length:
        gene = int(rng.integers(100, 600))  # codons
        coding = codons[rng.choice(len(codons), gene, p=usage)].reshape(-1)
        pieces.append(coding if rng.random() < 0.5 else (3 - coding)[::-1])
        pieces.append(
            rng.choice(4, int(3 * gene * (1 / _CODING[kind] - 1)), p=base_shares).astype(np.uint8)
        )
        size += len(pieces[-2]) + len(pieces[-1])
    return np.concatenate(pieces)[:length]


def _make_reads(
    spec: SimulateSpec, genomes: _Genomes, n: int, rng: np.random.Generator
) -> tuple[NDArray[Any], ...]:
    """Letters [n, read_length] of some reads, and of each [n] its genome, start, strand and the read that it copies, or
    itself. A copy has all of another read but its place."""
    length = spec.read_length
    # a kind by the viral share, within it a genome by length; both kinds occur if there are two reads
    viral = rng.random(n) < spec.viral_share
    if n >= 2 and 0 < spec.viral_share < 1 and viral.all() | ~viral.any():
        viral[0] = ~viral[0]
    genome = np.empty(n, np.int64)
    for kind in (0, 1):
        members = np.flatnonzero(genomes.kinds == kind)
        weights = genomes.lengths[members] / genomes.lengths[members].sum()
        genome[viral == kind] = rng.choice(members, int(np.count_nonzero(viral == kind)), p=weights)
    start = (rng.random(n) * (genomes.lengths[genome] - length + 1)).astype(np.int64)
    reverse = rng.random(n) < 0.5
    # a read of the other strand is a window of the reversed complement of everything
    at, back = genomes.starts[genome] + start, 3 - genomes.codes[::-1]
    codes = np.empty((n, length), np.uint8)
    codes[~reverse] = sliding_window_view(genomes.codes, length)[at[~reverse]]
    codes[reverse] = sliding_window_view(back, length)[(len(genomes.codes) - at - length)[reverse]]
    flat = codes.reshape(-1)
    wrong = rng.integers(0, flat.size, rng.binomial(flat.size, spec.error_rate))
    flat[wrong] = (flat[wrong] + rng.integers(1, 4, len(wrong))) % 4
    flat[rng.integers(0, flat.size, rng.binomial(flat.size, spec.n_rate))] = 4
    # a copy repeats a read before it that is none itself
    source = np.arange(n)
    copies = np.flatnonzero(rng.random(n) < spec.duplicate_share)
    copies = copies[copies > 0]
    originals = (rng.random(len(copies)) * copies).astype(np.int64)
    fine = ~np.isin(originals, copies)
    source[copies[fine]] = originals[fine]
    return _LETTERS[codes[source]], genome[source], start[source], reverse[source], source
