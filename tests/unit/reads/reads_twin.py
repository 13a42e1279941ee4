"""The slow twin: chunking and translation one base at a time, as the method is written down."""

from __future__ import annotations

from dataclasses import dataclass

from Bio.Data import CodonTable

CODONS = dict.fromkeys(CodonTable.unambiguous_dna_by_id[1].stop_codons, "*")
CODONS.update(CodonTable.unambiguous_dna_by_id[1].forward_table)
FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")


@dataclass(frozen=True)
class Row:
    id: str
    dna: str
    protein: str


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Return start and end of each chunk; each step goes back by a share of the surplus."""
    if length == 0:
        return []
    count = -(-length // size)
    lower, extra = divmod(count * size - length, count)
    spans = []
    for k in range(count):
        start = k * size - (lower * k + min(k, lower + extra))
        spans.append((start, min(start + size, length)))
    return spans


def opposite_strand(dna: str) -> str:
    partner = {"A": "T", "C": "G", "G": "C", "T": "A"}
    return "".join(partner.get(letter, letter) for letter in reversed(dna))


def open_frames(sequence: str) -> list[tuple[str, str, str]]:
    """Return (frame, dna, protein) of the frames without a stop."""
    frames = []
    forward = sequence.upper()
    for strand, dna in (("F", forward), ("R", opposite_strand(forward))):
        for offset in range(3):
            protein = ""
            position = offset
            while position < len(dna) - 2:
                protein += CODONS.get(dna[position : position + 3], "")
                position += 3
            if protein and "*" not in protein:
                frames.append(
                    (f"{strand}{offset + 1}", dna[offset : offset + 3 * len(protein) + 1], protein)
                )
    return frames


def rows(reads: list[tuple[str, str]], size: int) -> list[Row]:
    """Return all rows of reads, which are given as (id, bases), in output order."""
    return [
        Row(f"{name}_chunk_{k + 1}{frame}", dna, protein)
        for name, bases in reads
        for k, (start, end) in enumerate(chunks(len(bases), size))
        for frame, dna, protein in open_frames(bases[start:end])
    ]
