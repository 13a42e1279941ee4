"""Measure which share of chunks and of reads has an open reading frame.

    python tests/benchmarks/measure_frames.py READS...               # files as they are
    python tests/benchmarks/measure_frames.py --indels GENOMES...    # reads simulated from genomes

The first form prints a line for each file. The second form cuts reads out of the genomes, at random
places of either strand, puts insertions and deletions of one base into them, and prints a line for
each rate. Every file of genomes gives the same number of reads, so that long genomes do not decide.
The last lines are of the same reads with their bases shuffled: they have frames by chance only.

Both forms use staging itself with model lengths of 300 and 500. No model is needed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from virnuc_core.reads.parse import parse
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore

MODEL_LENGTHS = (300, 500)
RATES = (0.0, 0.01, 0.03, 0.05, 0.10)  # insertions and deletions for each base
COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")
HEADER = (
    "| reads | number | median bases | model length | chunks with a frame "
    "| reads with a frame | reads with a frame in every chunk |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class FrameCounts:
    """How many chunks and reads have an open reading frame.

    Attributes:
        reads: All reads.
        median_length: Their median length in bases.
        framed_reads: Reads with a frame in at least one chunk.
        full_reads: Reads with a frame in every chunk.
        chunks: All chunks.
        framed_chunks: Chunks with a frame.
    """

    reads: int
    median_length: int
    framed_reads: int
    full_reads: int
    chunks: int
    framed_chunks: int

    def to_row(self, name: str, model_length: int) -> str:
        """Return a line of the table, for reads with this name."""
        shares = (
            self.framed_chunks / max(1, self.chunks),
            self.framed_reads / max(1, self.reads),
            self.full_reads / max(1, self.reads),
        )
        cells = [name, f"{self.reads:,}", f"{self.median_length:,}", str(model_length)]
        cells += [f"{100 * share:.1f} %" for share in shares]
        return f"| {' | '.join(cells)} |"


def count_frames(reads: Path, model_length: int) -> FrameCounts:
    """Stage a file, and count the chunks and reads with an open reading frame.

    Args:
        reads: A file of FASTA or FASTQ.
        model_length: The length of a chunk in bases.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = StageSpec(reads=(str(reads),), model_length=model_length, pairs=False)
        store = OrfStore.open(stage(spec, Path(folder) / "orfs.h5").store)
        chunks_of_read = np.asarray(store.read_chunks[:], np.int64)
        framed_chunks = set(
            zip(store.row_read[:].tolist(), store.row_chunk[:].tolist(), strict=True)
        )
        lengths = np.asarray(store.read_length[:])
        n_reads = store.n_reads
    framed_of_read = np.bincount([read for read, _ in framed_chunks], minlength=n_reads)
    return FrameCounts(
        reads=n_reads,
        median_length=int(np.median(lengths)) if n_reads else 0,
        framed_reads=int((framed_of_read > 0).sum()),
        full_reads=int(((framed_of_read == chunks_of_read) & (chunks_of_read > 0)).sum()),
        chunks=int(chunks_of_read.sum()),
        framed_chunks=len(framed_chunks),
    )


def add_indels(rng: random.Random, bases: bytes, rate: float) -> bytes:
    """Return bases with insertions and deletions of one base, as many of each.

    Args:
        rng: The source of random numbers.
        bases: The bases.
        rate: The probability of a change at each base.
    """
    changed = bytearray()
    for base in bases:
        is_changed = rng.random() < rate
        is_deletion = rng.random() < 0.5
        if is_changed and is_deletion:
            continue
        changed.append(base)
        if is_changed:
            changed.append(rng.choice(b"ACGT"))
    return bytes(changed)


def cut_reads(
    rng: random.Random, genome_files: Sequence[Path], count: int, length: int
) -> Iterator[bytes]:
    """Yield reads from random places and strands of genomes, `count` of each file.

    A sequence is chosen in proportion to its length. Sequences that are shorter than a read, and
    places with letters other than A, C, G and T, are passed over.
    """
    for file in genome_files:
        sequences = [bases.upper() for batch in parse((str(file),)) for bases in batch.bases]
        sequences = [bases for bases in sequences if len(bases) >= length]
        if not sequences:
            continue
        weights = [len(bases) for bases in sequences]
        n_found = 0
        while n_found < count:
            [sequence] = rng.choices(sequences, weights)
            start = rng.randrange(len(sequence) - length + 1)
            read = sequence[start : start + length]
            if set(read) - set(b"ACGT"):
                continue
            if rng.random() < 0.5:
                read = read.translate(COMPLEMENT)[::-1]
            n_found += 1
            yield read


def write_fasta(path: Path, reads: Sequence[bytes]) -> None:
    """Write reads to a file, with their numbers as ids."""
    with path.open("wb") as file:
        for number, bases in enumerate(reads):
            file.write(b">r%d\n%b\n" % (number, bases))


def simulated_reads(
    genome_files: Sequence[Path], count: int, length: int
) -> Iterator[tuple[str, list[bytes]]]:
    """Yield a name and the reads for each rate of insertions and deletions, and shuffled reads.

    All are made from the same reads of the genomes. Equal inputs give equal reads.
    """
    rng = random.Random(1)
    reads = list(cut_reads(rng, genome_files, count, length))
    for rate in RATES:
        yield f"{100 * rate:g} % indels", [add_indels(rng, read, rate) for read in reads]
    yield "shuffled bases", [bytes(rng.sample(read, len(read))) for read in reads]


def main() -> None:
    """Print the table for the files that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--indels", action="store_true", help="the files are genomes")
    parser.add_argument("--count", type=int, default=100, help="simulated reads of each file")
    parser.add_argument("--length", type=int, default=1000, help="bases of a simulated read")
    options = parser.parse_args()
    print(HEADER)
    if not options.indels:
        for file in options.files:
            for model_length in MODEL_LENGTHS:
                print(count_frames(file, model_length).to_row(file.name, model_length))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reads.fasta"
        for name, reads in simulated_reads(options.files, options.count, options.length):
            write_fasta(path, reads)
            for model_length in MODEL_LENGTHS:
                print(count_frames(path, model_length).to_row(name, model_length))


if __name__ == "__main__":
    main()
