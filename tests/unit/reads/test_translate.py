"""Six frames: worked examples, the method's oddities, and equality with the slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.reads import translate as module
from virnuc_core.reads.translate import FRAMES, translate

from .reads_twin import open_frames

Found = list[tuple[int, str, str, str]]


def found(sequences: list[str]) -> Found:
    """(chunk, frame, dna, protein) by the fast path."""
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = ends - [len(sequence) for sequence in sequences]
    orfs = translate("".join(sequences).encode(), starts, ends)
    proteins, dna = orfs.proteins.tobytes().decode(), b"".join(orfs.dna).decode()
    rows: Found = []
    p = d = 0
    for i in range(len(orfs.chunk)):
        p_end, d_end = p + int(orfs.protein_lengths[i]), d + int(orfs.dna_lengths[i])
        rows.append((int(orfs.chunk[i]), FRAMES[orfs.frame[i]], dna[d:d_end], proteins[p:p_end]))
        p, d = p_end, d_end
    assert (p, d) == (len(proteins), len(dna))
    return rows


def expected(sequences: list[str]) -> Found:
    return [(i, *row) for i, sequence in enumerate(sequences) for row in open_frames(sequence)]


def test_worked_example() -> None:
    # ATGGCC: M A | W | G ; reverse GGCCAT: G H | A | P — no stop anywhere
    assert found(["ATGGCC"]) == [
        (0, "F1", "ATGGCC", "MA"),
        (0, "F2", "TGGC", "W"),
        (0, "F3", "GGCC", "G"),
        (0, "R1", "GGCCAT", "GH"),
        (0, "R2", "GCCA", "A"),
        (0, "R3", "CCAT", "P"),
    ]


def test_a_stop_closes_the_frame() -> None:
    assert [row[1] for row in found(["ATGTAAGCA"])] == ["F2", "F3", "R1", "R2", "R3"]


def test_one_more_base_is_kept_if_the_strand_has_it() -> None:
    rows = {frame: dna for _, frame, dna, _ in found(["GCAGCAG"])}
    assert rows["F1"] == "GCAGCAG"  # two codons and one more base
    assert rows["F2"] == "CAGCAG"  # two codons, and the strand ends


def test_ambiguous_codons_vanish_and_the_dna_is_cut_short() -> None:
    rows = {frame: (dna, protein) for _, frame, dna, protein in found(["GCANNNGCTGCC"])}
    assert rows["F1"] == ("GCANNNGCTG", "AAA")


@pytest.mark.parametrize("letter", "URYSWKMBDHVNX-.")
def test_every_letter_but_acgt_drops_its_codon(letter: str) -> None:
    rows = {frame: protein for _, frame, _, protein in found([f"GCAG{letter}AGCC"])}
    assert rows["F1"] == "AA"


def test_lower_case_is_read_as_upper_case() -> None:
    assert found(["acgtnacgtacc"]) == found(["ACGTNACGTACC"])


@pytest.mark.parametrize("sequence", ["", "A", "AC", "NNNNNN", "N"])
def test_too_short_or_without_bases_gives_no_row(sequence: str) -> None:
    assert found([sequence]) == []


def test_all_codons_on_both_strands() -> None:
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
    assert found(codons) == expected(codons)


letters = st.text(alphabet="ACGTacgtACGTACGTNRYU-", max_size=160)


@given(st.lists(letters, max_size=12))
def test_equals_the_slow_twin(sequences: list[str]) -> None:
    assert found(sequences) == expected(sequences)


@given(st.lists(st.text(alphabet="ACG", min_size=1, max_size=60), min_size=1, max_size=12))
def test_equals_the_slow_twin_where_most_frames_are_open(sequences: list[str]) -> None:
    assert found(sequences) == expected(sequences)


@given(st.lists(letters, max_size=20), st.integers(1, 80))
def test_frames_do_not_depend_on_groups(sequences: list[str], group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROUP_BASES", group)
        assert found(sequences) == expected(sequences)


@given(st.text(alphabet="ACGTN", min_size=1, max_size=200), st.integers(1, 60), st.data())
def test_overlapping_chunks_of_one_read(sequence: str, size: int, data: st.DataObject) -> None:
    starts = np.array(
        sorted(data.draw(st.lists(st.integers(0, len(sequence) - 1), max_size=8))), np.int64
    )
    ends = np.minimum(starts + size, len(sequence))
    orfs = translate(sequence.encode(), starts, ends)
    want = [
        row
        for start, end in zip(starts, ends, strict=True)
        for row in open_frames(sequence[start:end])
    ]
    assert orfs.proteins.tobytes().decode() == "".join(protein for _, _, protein in want)
    assert b"".join(orfs.dna).decode() == "".join(dna for _, dna, _ in want)
    assert [FRAMES[frame] for frame in orfs.frame] == [frame for frame, _, _ in want]
