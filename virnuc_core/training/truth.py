"""Read the table of origins (the truth): what each training read is known to be.

The file is TAB-separated with the columns `read`, `label` (`virus` or `others`) and `genome`. An
optional column `kind` says in free words what the genome is, such as `phage`, `bacteria` or
`plant`. The table of groups may have this column instead.
"""

import csv
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from virnuc_core.config import refuse_unreadable
from virnuc_core.errors import InputError, join_first
from virnuc_core.reads.pairs import OTHER_MARKS
from virnuc_core.reads.simulate import LABELS, TRUTH_HEADER
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import find_second_mates

# The three sets that genomes are split into. Columns named `side` hold the index.
SIDES: Final = ("train", "validation", "test")
TRAIN_SIDE, VALIDATION_SIDE, TEST_SIDE = range(len(SIDES))
OTHERS: Final = LABELS.index("others")
VIRUS: Final = LABELS.index("virus")  # columns named `label` hold the index into LABELS
KIND: Final = "kind"  # the optional column of both tables
_MATE_END: Final = "/([12])$"  # of the ids of mates in a store
FIRST_LINE: Final = 2  # of a table, below the names of the columns


def read_truth(path: Path) -> pd.DataFrame:
    """Read the table of origins.

    Returns:
        The columns read, label (index into LABELS), genome and kind ("" where none is stated),
        indexed by line of the file.

    Raises:
        InputError: A column is missing or unknown, a label is neither `virus` nor `others`, two
            lines contradict each other, or a class has too few genomes.
    """
    truth = read_table(path, ("read", "label", "genome"), ignored=TRUTH_HEADER, blank=(KIND,))
    has_bad_label = ~truth["label"].isin(LABELS)
    if has_bad_label.any():
        line = truth.index[has_bad_label][0]
        raise InputError("wanted a label virus or others", file=path, line=int(line))
    truth["label"] = (truth["label"] == LABELS[VIRUS]).astype(np.int64)
    # A genome must have the same label and kind on all its lines.
    genomes = _drop_repeats(truth[["genome", "label", KIND]], path)
    require_classes(genomes["label"].value_counts(), file=path)
    return truth


def read_groups(path: Path) -> pd.DataFrame:
    """Read the table of groups of genomes.

    Returns:
        The columns genome, group and kind ("" where none is stated), indexed by line of the file.

    Raises:
        InputError: A column is missing or unknown, or two lines contradict each other.
    """
    return read_table(path, ("genome", "group"), blank=(KIND,))


def genome_kinds(genomes: pd.DataFrame, groups: Path | None) -> list[str]:
    """Return the kind of each genome, such as `phage` or `plant`.

    It is what the table of origins says, else what the table of groups says, else the name of the
    genome's label.

    Args:
        genomes: The genomes in the table of origins, with the columns genome, label and kind.
        groups: The table of groups. It may have the column kind, too.

    Raises:
        InputError: Both tables state a kind for a genome, and not the same one.
    """
    kinds_in_groups: dict[str, str] = {}
    if groups is not None:
        table = read_groups(groups)
        kinds_in_groups = dict(zip(table["genome"], table[KIND], strict=True))
        _require_same_kinds(genomes, table, groups)
    kinds = []
    for name, label, kind in genomes[["genome", "label", KIND]].itertuples(index=False):
        kinds.append(kind or kinds_in_groups.get(name) or LABELS[label])
    return kinds


def _require_same_kinds(genomes: pd.DataFrame, table: pd.DataFrame, groups: Path) -> None:
    """Raise an `InputError` if the table of groups states another kind than that of origins.

    Args:
        genomes: The genomes in the table of origins, with the columns genome and kind.
        table: The table of groups, with the same columns, indexed by line of the file.
        groups: The file of groups, for the message.
    """
    kind_of_genome = dict(zip(genomes["genome"], genomes[KIND], strict=True))
    for line, name, kind in table[["genome", KIND]].itertuples():
        expected_kind = kind_of_genome.get(name)
        if kind and expected_kind and kind != expected_kind:
            raise InputError(
                f"genome {name!r} is of the kind {kind!r} here, and of the kind "
                f"{expected_kind!r} in the table of origins",
                file=groups,
                line=line,
            )


def read_table(
    path: Path,
    columns: tuple[str, ...],
    *,
    ignored: tuple[str, ...] = (),
    blank: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Read columns of a TAB-separated file as text.

    Args:
        path: The file. Its first line names the columns.
        columns: The columns to return, all filled in. The first one is the key: no two different
            lines may have the same value in it.
        ignored: Names of further columns that the file may have. They are not returned.
        blank: Names of columns that are returned, too. Their fields may be empty, and the file
            need not have them; the text is then "".

    Returns:
        The columns, indexed by line of the file, without empty and repeated lines.

    Raises:
        InputError: The file is no such table. The message names the line.
    """
    with refuse_unreadable(path, "table with columns between TABs", InputError):
        # Everything is text, blank lines count, and "NA" or a quote mean themselves.
        table = pd.read_csv(
            path,
            sep="\t",
            quoting=csv.QUOTE_NONE,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
        )
    _require_columns(table, path, columns, optional=(*ignored, *blank))
    lines = np.arange(FIRST_LINE, FIRST_LINE + len(table))
    for name in blank:
        if name not in table:
            table[name] = ""
    # Fields that a short line lacks are empty.
    table = table[[*columns, *blank]].fillna("").set_axis(lines)
    # A line whose fields are all empty is left out.
    table = table[(table != "").any(axis=1)]
    is_incomplete = (table[list(columns)] == "").any(axis=1)
    if is_incomplete.any():
        line = table.index[is_incomplete][0]
        raise InputError(f"wanted {', '.join(columns)}", file=path, line=int(line))
    return _drop_repeats(table, path)


def _require_columns(
    table: pd.DataFrame, path: Path, columns: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Raise an `InputError` if a table lacks a required column or has an unknown one."""
    hint = f"wanted {', '.join(columns)}"
    if not isinstance(table.index, pd.RangeIndex):
        # If lines have more fields than the header, pandas uses the first fields as row labels.
        problem = "more fields than the header names"
        raise InputError(problem, file=path, line=FIRST_LINE, hint=hint)
    missing = [name for name in columns if name not in table]
    if missing:
        raise InputError(f"no column {', '.join(missing)}", file=path, line=1)
    unknown = [name for name in table if name not in columns and name not in optional]
    if unknown:
        raise InputError(f"unknown column {join_first(unknown)}", file=path, line=1, hint=hint)


def _drop_repeats(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return the table without repeated lines. Of equal lines, the first stays.

    Args:
        table: The lines, indexed by their numbers in the file. The first column is the key.
        path: The file, for the message.

    Raises:
        InputError: Two different lines have the same value in the first column.
    """
    table = table.drop_duplicates()
    key = table.columns[0]
    is_repeated = table[key].duplicated()
    if is_repeated.any():
        line = table.index[is_repeated][0]
        value = table.at[line, key]
        first_line = table.index[table[key] == value][0]
        problem = f"{key} {value!r} stands on line {first_line} with other words"
        raise InputError(problem, file=path, line=int(line))
    return table


def require_classes(counts: Any, file: Path | str = "", what: str = "") -> None:
    """Raise an error if a class (virus, others) has too few genomes for the three sets.

    The sets are those for training, validation and test. Each needs a genome of each class.

    Args:
        counts: Number of genomes, or of clusters of genomes, by label (index into LABELS).
        file: The file that names the genomes, for the message.
        what: What was counted, for the message. It follows "3 genomes labelled virus".

    Raises:
        InputError: A class has fewer than one genome for each set.
    """
    for label, name in enumerate(LABELS):
        count = counts.get(label, 0)
        if count < len(SIDES):
            problem = f"{count} genomes labelled {name}{what}; {len(SIDES)} are needed"
            raise InputError(f"{problem}: to learn from, to stop by, to test with", file=file)


def require_same_origin_of_mates(
    truth: pd.DataFrame, line_of_read: NDArray[np.int64], store: OrfStore
) -> None:
    """Raise an error if the two reads of a pair are of different genomes.

    Both are the ends of one fragment of DNA. A genome has one label, so the label is equal, too.

    Args:
        truth: The table of origins.
        line_of_read: The row of each read in `truth`, [reads].
        store: The staged reads.

    Raises:
        InputError: Names both reads and their genomes.
    """
    genome_of_read = truth["genome"].to_numpy()[line_of_read]
    second_mates = np.flatnonzero(find_second_mates(store))
    is_different = genome_of_read[second_mates] != genome_of_read[second_mates - 1]
    if not is_different.any():
        return
    second = int(second_mates[is_different][0])
    first_id, second_id = store.read_ids(second - 1, second + 1)
    first_genome, second_genome = genome_of_read[second - 1 : second + 1]
    raise InputError(
        f"the mates {first_id!r} and {second_id!r} are of one fragment, but the truth file has "
        f"them of {first_genome!r} and {second_genome!r}, as {int(is_different.sum()) - 1} more "
        "pairs",
        hint="correct the truth, or give --no-pairs if these files hold no mates",
    )


def truth_lines(truth: pd.DataFrame, store: OrfStore) -> NDArray[np.int64]:
    """Find each read in the table of origins.

    A read is looked up by its id in the store (`r7.2`, where a number makes equal ids distinct),
    else by its id in the file (`r7`), else by the id of its pair (`r7` for `r7/1`). The ids of
    mates in a file may end in `.1`, `_1` or `:1`, while the store has `/1`.

    Returns:
        The row of each read in `truth`, counted from 0, [reads].

    Raises:
        InputError: The table does not have all reads.
    """
    known_reads = pd.Index(truth["read"])
    store_ids = pd.Series(store.read_ids(0, store.n_reads), dtype=object)
    file_ids = pd.Series(store.original_ids(0, store.n_reads), dtype=object)
    pair_ids = file_ids.str.replace(_MATE_END, "", regex=True)
    other_ids = []
    if store.paired:
        for mark in OTHER_MARKS:
            other_ids.append(file_ids.str.replace(_MATE_END, rf"{mark.decode()}\1", regex=True))
    line_of_read = np.full(store.n_reads, -1)  # -1: not found
    for ids in (store_ids, file_ids, pair_ids, *other_ids):
        line_of_read = np.where(line_of_read < 0, known_reads.get_indexer(ids), line_of_read)
    unknown_ids = store_ids[line_of_read < 0]
    if len(unknown_ids):
        raise InputError(
            f"{len(unknown_ids)} reads have no line in the truth file, "
            f"among them {join_first(unknown_ids)}"
        )
    return line_of_read
