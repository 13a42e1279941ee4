"""Checks that compare a whole store with the slow twin."""

from __future__ import annotations

from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.translate import AMBIGUOUS, EMPTY, SHORT_FOR_MODEL

from .made_up import Pairs
from .reads_twin import Row, chunks, rows


def rows_of(store: OrfStore) -> list[Row]:
    """Return all rows of a store with their sequences."""
    proteins = store.protein(0, store.n_uniques)
    dna = store.dna(0, store.n_uniques)
    names = store.row_ids(0, store.n_rows)
    return [
        Row(name, dna[unique].decode(), proteins[unique].decode())
        for name, unique in zip(names, store.row_unique, strict=True)
    ]


def check_equals_twin(store: OrfStore, reads: Pairs) -> None:
    """Compare rows, ids, bytes and counts of a store with the twin; ids of `reads` are distinct."""
    expected = rows(reads, store.model_length)
    assert rows_of(store) == expected
    assert store.read_ids(0, store.n_reads) == [name for name, _ in reads]
    assert store.read_length.tolist() == [len(bases) for _, bases in reads]
    n_chunks = [len(chunks(len(bases), store.model_length)) for _, bases in reads]
    assert store.read_chunks.tolist() == n_chunks
    n_rows_of_read = [len(rows([name_and_bases], store.model_length)) for name_and_bases in reads]
    assert store.read_rows.tolist() == n_rows_of_read
    first_rows: dict[tuple[str, str], int] = {}  # the first row of each distinct sequence
    for number, row in enumerate(expected):
        first_rows.setdefault((row.dna, row.protein), number)
    dna = [sequence.decode() for sequence in store.dna(0, store.n_uniques)]
    proteins = [sequence.decode() for sequence in store.protein(0, store.n_uniques)]
    assert list(zip(dna, proteins, strict=True)) == list(first_rows)
    assert store.unique_row.tolist() == list(first_rows.values())
    for i, (_, bases) in enumerate(reads):
        flags = int(store.read_flags[i])
        assert bool(flags & EMPTY) == (not bases)
        assert bool(flags & SHORT_FOR_MODEL) == (0 < len(bases) < store.model_length / 2)
        assert bool(flags & AMBIGUOUS) == bool(set(bases.upper()) - set("ACGT"))
    counts = store.counts
    assert counts.n_reads == len(reads)
    assert counts.n_rows == len(expected)
    assert counts.n_uniques == len(first_rows)
    assert counts.n_chunks == sum(n_chunks)
    assert counts.n_bases == sum(len(bases) for _, bases in reads)
    assert counts.n_open_reads == sum(n > 0 for n in n_rows_of_read)
    assert counts.n_empty == sum(not bases for _, bases in reads)
