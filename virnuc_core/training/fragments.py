"""Cut the test genomes into fragments of several lengths, as further test sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from virnuc_core.reads.simulate import LABELS
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir, write_text_atomically
from virnuc_core.training.features import Features, load_features
from virnuc_core.training.genomes import read_genomes
from virnuc_core.training.splits import Examples
from virnuc_core.training.truth import KIND, SIDES, TEST_SIDE

LENGTHS: Final = (150, 300, 500)  # bases of a fragment
MAX_FRAGMENTS: Final = 40  # of a genome and length
NO_GENOMES: Final = "the genomes' sequences were not given (--genomes)"
NO_FRAGMENTS: Final = "no fragment of this length of a class has an open frame"


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Rows that trained methods are tested on."""

    name: str
    features: Features


def fragments_name(length: int) -> str:
    """Return the name of the test set of fragments of `length` bases."""
    return f"{length} bases"


def write_fragments(examples: Examples, genomes: Path, out: Path) -> str | None:
    """Write fragments of the test genomes to a FASTA file, as reads for a further test.

    For each length, the fragments of a genome begin at evenly spaced bases. A fragment is named
    `<number of the genome>_<length>_<first base>`, with the first base counted from 0.

    Args:
        examples: The split, which names the genomes of the test set.
        genomes: The sequences of the genomes, a FASTA file.
        out: The file to write.

    Returns:
        None, or the reason why no fragments were written: some genomes of the test have no
        sequence.
    """
    sequences = read_genomes(genomes)
    is_tested = examples.genomes["side"] == SIDES[TEST_SIDE]
    name_of_genome = examples.genomes.loc[is_tested, "genome"]
    n_absent = sum(name not in sequences for name in name_of_genome)
    if n_absent:
        n_genomes = len(name_of_genome)
        return f"{n_absent} of the test's {n_genomes} genomes have no sequence in {genomes.name}"
    records = []
    for number, name in name_of_genome.items():  # the number is the row in `examples.genomes`
        sequence = sequences[name]
        for length in LENGTHS:
            for start in _fragment_starts(len(sequence), length):
                fragment = sequence[start : start + length]
                records.append(f">{number}_{length}_{start}\n{fragment}\n")
    write_text_atomically(out, "".join(records))
    return None


def _fragment_starts(n_bases: int, length: int) -> list[int]:
    """Return the first bases of a genome's fragments: evenly spaced from its start to its end.

    There are at most `MAX_FRAGMENTS`, and no more than fit side by side. A genome that is shorter
    than a fragment has none.
    """
    last_start = n_bases - length
    if last_start < 0:
        return []
    n_fragments = min(MAX_FRAGMENTS, last_start // length + 1)
    starts = np.linspace(0, last_start, n_fragments).astype(int)
    return sorted(set(starts.tolist()))


def read_fragments(run: RunDir, examples: Examples) -> Iterator[EvaluationSet]:
    """Yield a test set for each length of fragments.

    A length is left out if one of the classes has no fragment with an open frame.

    Args:
        run: The run that embedded the file of `write_fragments`.
        examples: The split that the fragments were cut for.
    """
    store = OrfStore.open(run.store)
    rows = _fragment_rows(store, examples.genomes)
    features = load_features(run, store, rows)
    for length in LENGTHS:
        has_length = features.rows["bases"] == length
        fragments = features.select(has_length.to_numpy())
        if fragments.rows["label"].nunique() == len(LABELS):
            yield EvaluationSet(fragments_name(length), fragments)


def _fragment_rows(store: OrfStore, genomes: pd.DataFrame) -> pd.DataFrame:
    """Return the translated frames of the fragments, with what is known of their genome.

    The id of a fragment tells its genome: `<row in genomes>_<length>_<first base>`.

    Args:
        store: The staged fragments.
        genomes: The genomes of the split, by number.

    Returns:
        The columns read, chunk, unique, genome, bases (length of the fragment), label, cluster and
        kind.
    """
    rows = pd.DataFrame(
        {"read": store.row_read[:], "chunk": store.row_chunk[:], "unique": store.row_unique[:]}
    )
    fragments = _read_fragment_names(store)
    for column in ("genome", "bases"):
        rows[column] = fragments[column].to_numpy()[rows["read"]]
    for column in ("label", "cluster", KIND):
        rows[column] = genomes[column].to_numpy()[rows["genome"]]
    return rows


def closed_fragments(run: RunDir, genomes: pd.DataFrame, length: int) -> pd.DataFrame:
    """Return the fragments of a length without an open frame.

    Args:
        run: The run over the fragments.
        genomes: The genomes of the split, by number.
        length: Bases of a fragment.

    Returns:
        The columns read, label, genome, bases and weight, which is 1.
    """
    store = OrfStore.open(run.store)
    fragments = _read_fragment_names(store)
    fragments["read"] = np.arange(store.n_reads)
    fragments["label"] = genomes["label"].to_numpy()[fragments["genome"]]
    fragments["weight"] = 1.0
    is_open = fragments["read"].isin(np.unique(store.row_read[:]))
    has_length = fragments["bases"] == length
    return fragments[has_length & ~is_open]


def _read_fragment_names(store: OrfStore) -> pd.DataFrame:
    """Return what the ids of fragments say: the columns genome, bases and start, by read."""
    names = pd.Series(store.read_ids(0, store.n_reads))
    numbers = names.str.split("_", expand=True).astype(np.int64)
    numbers.columns = pd.Index(["genome", "bases", "start"])
    return numbers
