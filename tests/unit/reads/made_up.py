"""Make random reads, and write them as FASTA and FASTQ."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import zstandard

Pairs = list[tuple[str, str]]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fasta(reads: Pairs) -> str:
    return "".join(f">{name} word\n{bases}\n" for name, bases in reads)


def fastq(reads: Pairs) -> str:
    return "".join(f"@{name}\n{bases}\n+\n{'I' * len(bases)}\n" for name, bases in reads)


def made_up_reads(n: int, seed: int = 0) -> Pairs:
    rng = random.Random(seed)
    reads: Pairs = []
    for i in range(n):
        if reads and rng.random() < 0.2:  # exact copies, and the other strand of earlier reads
            bases = rng.choice(reads)[1]
        else:
            letters = rng.choice(["ACGT", "ACG", "acgtN", "ACGTRYN-", "GC"])
            bases = "".join(
                rng.choice(letters)
                for _ in range(rng.choice([0, 1, 2, 3, 5, 40, 99, 100, 101, 350]))
            )
        reads.append((f"read{i}", bases))
    return reads


def pack_with(packing: str, content: bytes) -> bytes:
    """Return one member of a compression format."""
    if packing == "zstd":
        return zstandard.ZstdCompressor().compress(content)
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lzma.compress,
    }
    return pack[packing](content)
