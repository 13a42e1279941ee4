"""The fingerprint depends on the reads and their order, and on nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.reads.fast_parser import ReadBatch, Strings
from virnuc_core.reads.fingerprint import Fingerprint, digests, hash_leaves

Pairs = list[tuple[bytes, bytes]]


def batch_of(reads: Pairs) -> ReadBatch:
    ids, bases = (Strings.from_strings([record[column] for record in reads]) for column in (0, 1))
    return ReadBatch(
        0, "fasta", ids, bases, np.zeros(len(reads), np.int64), Strings.from_strings([])
    )


def fingerprint(reads: Pairs, cuts: list[int]) -> str:
    hasher = Fingerprint("settings")
    edges = [0, *sorted(cut % (len(reads) + 1) for cut in cuts), len(reads)]
    for low, high in pairwise(edges):
        batch = batch_of(reads[low:high])
        hasher.add(hash_leaves(batch))
    return hasher.hexdigest()


def numbered(n: int) -> Pairs:
    return [(b"r%d" % i, b"ACGT" * (i % 5)) for i in range(n)]


@given(st.integers(0, 1500), st.lists(st.integers(0, 2000), max_size=6))
def test_the_fingerprint_does_not_depend_on_batches(n: int, cuts: list[int]) -> None:
    assert fingerprint(numbered(n), cuts) == fingerprint(numbered(n), [])


@given(st.integers(1, 600), st.data())
def test_any_change_of_the_reads_changes_the_fingerprint(n: int, data: st.DataObject) -> None:
    reads = numbered(n)
    i = data.draw(st.integers(0, n - 1))
    name, bases = reads[i]
    moved_to_end = [*reads[:i], *reads[i + 1 :], reads[i]]
    variants = [
        [*reads[:i], (name + b"x", bases), *reads[i + 1 :]],
        [*reads[:i], (name, bases + b"A"), *reads[i + 1 :]],
        [*reads[:i], *reads[i + 1 :]],
        [*reads, (name, bases)],
        *([moved_to_end] if moved_to_end != reads else []),
    ]
    prints = {fingerprint(variant, []) for variant in variants}
    assert len(prints | {fingerprint(reads, [])}) == len(variants) + 1


def test_moving_a_letter_to_the_next_read_changes_the_fingerprint() -> None:
    fingerprints = {
        fingerprint(reads, [])
        for reads in (
            [(b"a", b"AC"), (b"b", b"GT")],
            [(b"a", b"ACG"), (b"b", b"T")],
            [(b"ab", b"AC"), (b"", b"GT")],
            [(b"a", b"ACGT"), (b"b", b"")],
        )
    }
    assert len(fingerprints) == 4


def test_leaves_may_end_at_every_read_or_at_none() -> None:
    names = [b"id%d" % i for i in range(2000)]
    ends = digests(names)[:, 0] % np.uint64(64) == 0
    assert 10 < np.count_nonzero(ends) < 60
    for name in (names[int(np.argmax(ends))], names[int(np.argmin(ends))]):
        reads = [(name, b"A" * i) for i in range(50)]
        assert fingerprint(reads, [3, 20]) == fingerprint(reads, []) != fingerprint(reads[::-1], [])
