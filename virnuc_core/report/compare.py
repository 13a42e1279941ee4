"""Compare two results: labels and scores by id, embeddings by cosine, files byte for byte.

Results of different classifiers, model lengths or reads are refused if their run records say so.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pandas as pd

from virnuc_core.checked_files import has_own_digest
from virnuc_core.errors import InputError, RunMismatchError
from virnuc_core.reads.subsets import iterate_table
from virnuc_core.report.agreement import RowPair, agreement
from virnuc_core.report.cosines import cosines
from virnuc_core.report.model import BASELINE
from virnuc_core.report.raw_files import COMPARISON, SUMMARY, run_names
from virnuc_core.report.result_tables import (
    FORMATS,
    Part,
    derive_consensus,
    has_read_tables,
    iterate_results,
    result_files,
)
from virnuc_core.report.row_names import RowNames, find_row_names, rename_rows
from virnuc_core.rundir import EXACT_FILES, RunDir
from virnuc_core.runfiles import (
    MODEL_LENGTH,
    FileDigest,
    RunRecord,
    digest,
    find_mismatches,
    identity,
    listed_digest,
    read,
    write,
)
from virnuc_core.safe_files import have_same_content, regular_file_exists
from virnuc_core.system_errors import is_folder, list_folder, path_exists, read_with_retries
from virnuc_core.validation import (
    BaselineSummary,
    BitwiseEquality,
    Comparison,
    ComparisonFile,
    LabelAgreement,
    read_usable,
)

log = logging.getLogger(__name__)

MAX_NAMED_FILES: Final = 8  # that differ; of more, only their number is given
MUST_MATCH: Final = ("head", MODEL_LENGTH, "reads")
SUBSET: Final = "--subset"  # the option of `virnuc compare`
SHOWN_CHARACTERS: Final = 12  # of a fingerprint

Tables = Iterator[pd.DataFrame]


@dataclass(frozen=True, slots=True)
class Sides:
    """The names of two results that a validation compares."""

    a: str
    b: str


def compare_runs(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool
) -> tuple[Comparison, ...]:
    """Compare the runs of a validation, and write `comparison.json`.

    Each run is compared with the first run and, if the baseline has results, with the baseline.
    The last run is also compared with the sequences that were embedded in fp32.

    Args:
        out: The validation's directory.
        names: The folders of its runs.
        tolerance: Score differences up to this are within tolerance.
        subset: The baseline covers only a part of the reads.

    Raises:
        InputError: See `compare`.
        RunMismatchError: See `compare`.
    """
    comparisons = []
    for sides in compared_sides(out, names):
        is_exact = sides.a == EXACT_FILES
        is_baseline = sides.a == BASELINE
        comparison = compare(
            out / sides.a,
            out / sides.b,
            tolerance=tolerance,
            subset_of_a=is_exact or (is_baseline and subset),
            bits=not is_exact and not is_baseline,
            embeddings=is_exact,
        )
        comparisons.append(comparison)
    file = ComparisonFile(
        comparisons=tuple(comparisons), measurements=_measurement_digests(out, names)
    )
    write(out / COMPARISON, file)
    return tuple(comparisons)


def _measurement_digests(out: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Return size and SHA-256 of the summaries of everything that a validation has measured.

    The comparison is made last. So a summary that is edited or removed later is noticed. The cost
    of commits is not listed, because `virnuc overhead` may measure it again at any time.

    Args:
        out: The validation's directory.
        names: The folders of its runs.

    Returns:
        The digests of the summaries of the baseline, the runs and their repetitions, by their paths
        below the directory. A summary of an older version, without its own digest, is left out.
    """
    folders = [BASELINE]
    for name in names:
        folders += [name, *run_names(out, f"{name}.")]
    digests = {}
    for name in [f"{folder}/{SUMMARY}" for folder in folders]:
        if not path_exists(out / name) or not has_own_digest(out / name, out):
            continue
        content = digest(out / name, out)
        if content is not None:
            digests[name] = content
    return digests


def compared_sides(out: Path, names: Sequence[str]) -> list[Sides]:
    """Return the pairs of results that a validation compares, in the order of `comparison.json`."""
    sides = []
    baseline = RunDir(out / BASELINE)
    if regular_file_exists(baseline.predictions) or regular_file_exists(baseline.consensus):
        sides += [Sides(BASELINE, name) for name in names]
    sides += [Sides(names[0], name) for name in names[1:]]
    if names and regular_file_exists(RunDir(out / EXACT_FILES).embeddings):
        sides.append(Sides(EXACT_FILES, names[-1]))
    return sides


def compare(
    a: Path,
    b: Path,
    *,
    tolerance: float = 0.01,
    mode: Literal["both", "frame", "consensus"] = "both",
    subset_of_a: bool = False,
    bits: bool = False,
    embeddings: bool = False,
) -> Comparison:
    """Compare two results.

    Args:
        a: A run directory, a folder with the two result files, or one of the files.
        b: Another one.
        tolerance: Score differences up to this are within tolerance.
        mode: What to compare. The consensus is derived from the frames if a side has no consensus
            file.
        subset_of_a: Side a covers a subset of the reads only. The same reads of side b are
            selected first, and the fingerprints of the reads may differ.
        bits: Compare the bytes of all files, too.
        embeddings: Compare the embeddings of the sequences that both run directories have, too.

    Raises:
        InputError: A file cannot be read, or the two have nothing in common.
        RunMismatchError: They are of another classifier, model length, or other reads; or side a
            covers a part of the reads, and `subset_of_a` is false.
    """
    files_a = result_files(a)
    files_b = result_files(b)
    run_a = RunDir(a if is_folder(a) else a.parent)
    run_b = RunDir(b if is_folder(b) else b.parent)
    record_a = _record_of(run_a)
    record_b = _record_of(run_b)
    ignored = {"reads"} if subset_of_a else set()
    _require_same_job(a.name, record_a, b.name, record_b, ignored)
    if record_a.results_version != record_b.results_version:
        versions = f"{record_a.results_version} and {record_b.results_version}"
        log.warning(
            "%s and %s have results of the versions %s: the same reads may get other scores, "
            "see CHANGELOG.md",
            a.name,
            b.name,
            versions,
        )
    if not subset_of_a:
        _require_all_reads(a.name, run_a, b.name)

    names_a = None
    names_b = None
    # Reads of one id are numbered by their order, so their unique ids mean the same on both sides
    # only if both were made from the same reads.
    has_other_reads = "reads" in find_mismatches(identity(record_a), identity(record_b))
    by_unique_ids = _has_whole_tables(a) and _has_whole_tables(b) and not has_other_reads
    if by_unique_ids:
        names_a = find_row_names(run_a)
        names_b = find_row_names(run_b)
    subset = None
    if subset_of_a:
        subset = _reads_of_side(run_a, files_a, by_unique_ids=by_unique_ids)
    parts: dict[Part, LabelAgreement] = {}
    for part in FORMATS:
        if mode == "both" or part.startswith(mode):
            rows_a = _rows_of(files_a, part, names_a)
            rows_b = _rows_of(files_b, part, names_b)
            if rows_a is not None and rows_b is not None:
                if subset is not None:
                    rows_a, rows_b = _whole(rows_a), _of_reads(rows_b, subset)
                parts[part] = agreement(_pair_up(rows_a, rows_b), tolerance)
    if not parts:
        raise InputError(f"{a} and {b} have no kind of result in common; mode is '{mode}'")
    return Comparison(
        a=a.name,
        b=b.name,
        tolerance=tolerance,
        subset_reads=None if subset is None else len(subset),
        frames=parts.get("frames"),
        consensus=parts.get("consensus"),
        cosines=cosines(a, b, record_a.widths.get("dna")) if embeddings else (),
        bitwise=compare_bytes(a, b) if bits else None,
    )


def _record_of(run: RunDir) -> RunRecord:
    """Return the record of a run, or a record without fingerprints if the run has none."""
    if path_exists(run.record):
        return read(run.record, RunRecord)
    return RunRecord(fingerprints={})


def _require_same_job(
    a: str, record_a: RunRecord, b: str, record_b: RunRecord, ignored: set[str]
) -> None:
    """Raise an error if two results are of different classifiers, model lengths or reads.

    Args:
        a: The name of the first result.
        record_a: Its record.
        b: The name of the second result.
        record_b: Its record.
        ignored: Fingerprints that may differ.

    Raises:
        RunMismatchError: The message names what differs.
    """
    differences = {}
    for name, (value_a, value_b) in find_mismatches(identity(record_a), identity(record_b)).items():
        if name in MUST_MATCH and name not in ignored:
            shown_a = value_a[:SHOWN_CHARACTERS]
            shown_b = value_b[:SHOWN_CHARACTERS]
            differences[name] = f"{name} ({a}: {shown_a}, {b}: {shown_b})"
    if not differences:
        return
    details = "; different ".join(differences.values())
    message = f"{a} and {b} cannot be compared: different {details}"
    if list(differences) == ["reads"]:  # nothing else speaks against a comparison of a part
        message += f". If {a} covers a part of the reads of {b}, compare that part with {SUBSET}"
    raise RunMismatchError(message)


def _require_all_reads(a: str, run_a: RunDir, b: str) -> None:
    """Raise an error if a result is of a baseline that was run on a part of the reads.

    All other reads would count as disagreements.

    Args:
        a: The name of the result.
        run_a: Its directory.
        b: The name of the result that it is compared with.

    Raises:
        RunMismatchError: The message says how to compare the part.
    """
    summary = None
    if regular_file_exists(run_a.summary):
        # The summary of any other run has not the form of a baseline's, and is None here.
        summary = read_usable(run_a.summary, BaselineSummary)
    if summary is not None and summary.subset is not None:
        n_reads = f"{summary.subset.reads:,}"
        if summary.n_reads is not None:
            n_reads += f" of {summary.n_reads:,}"
        raise RunMismatchError(
            f"{a} is a baseline of {n_reads} reads; compare these with {b} by {SUBSET}"
        )


def _has_whole_tables(path: Path) -> bool:
    """Return whether a path is a folder with rows and the tables that tell reads of one id apart.

    A single file that is compared may come from anywhere, whatever lies beside it.
    """
    return is_folder(path) and has_read_tables(RunDir(path))


def _reads_of_side(run: RunDir, files: dict[Part, Path], *, by_unique_ids: bool) -> set[str]:
    """Return the ids of the reads in a result, from its reads.tsv and from its rows.

    A read that has a line in reads.tsv and no row belongs to the result, too.

    Args:
        run: The folder of the result.
        files: The files of the result.
        by_unique_ids: Return the unique ids, which only reads.tsv has.
    """
    reads: set[str] = set()
    if regular_file_exists(run.reads_table):
        recorded = listed_digest(run.reads_table)
        for rows in iterate_table(run.reads_table, {"id": "str"}, recorded=recorded):
            reads.update(rows["id"])
    if by_unique_ids:
        return reads
    first_file = next(iter(files.values()))
    for rows in iterate_results(first_file):
        reads.update(_read_ids(rows))
    return reads


def _read_ids(rows: pd.DataFrame) -> "pd.Series[str]":
    """Return the id of the read of each row.

    A chunk of the read `r1` has the id `r1_chunk_2`, and a frame of this chunk `r1_chunk_2F1`.
    """
    return rows["id"].str.replace(r"_chunk_\d+(?:[FR]\d)?$", "", regex=True)


def _rows_of(files: dict[Part, Path], part: Part, names: RowNames | None) -> Tables | None:
    """Return an iterator over the rows of a result, or None if the result has no such rows.

    If there is no file with the consensus of the chunks, it is computed from the frames.

    Args:
        files: The files of the result.
        part: `frames` or `consensus`.
        names: How its rows are named. None if the ids in the files are used.
    """
    if part in files:
        rows = iterate_results(files[part])
        if names is not None:
            return rename_rows(rows, part, names)
        return rows
    frames = _rows_of(files, "frames", names) if "frames" in files else None
    if frames is not None:
        return iter([derive_consensus(pd.concat(frames, ignore_index=True))])
    return None


def _whole(pieces: Tables) -> Tables:
    """Return an iterator over one piece with the rows of all pieces."""
    return iter([pd.concat(pieces, ignore_index=True)])


def _of_reads(pieces: Tables, reads: set[str]) -> Tables:
    """Return an iterator over one piece with the rows of the given reads."""
    return _whole(rows[_read_ids(rows).isin(reads)] for rows in pieces)


def _pair_up(pieces_a: Tables, pieces_b: Tables) -> Iterator[RowPair]:
    """Yield pieces of two results such that rows with the same id are in the same piece.

    As long as both results have the same ids on the same lines, their pieces are yielded one by
    one. After the first difference, all remaining rows of both are yielded as one large piece.
    """
    rows_a = next(pieces_a)
    rows_b = next(pieces_b)
    while np.array_equal(rows_a["id"].to_numpy(), rows_b["id"].to_numpy()):
        yield RowPair(rows_a, rows_b)
        rows_a = next(pieces_a, rows_a[:0])
        rows_b = next(pieces_b, rows_b[:0])
        if rows_a.empty and rows_b.empty:
            return
    rest_a = pd.concat((rows_a, *pieces_a), ignore_index=True)
    rest_b = pd.concat((rows_b, *pieces_b), ignore_index=True)
    yield RowPair(rest_a, rest_b)


def compare_bytes(a: Path, b: Path) -> BitwiseEquality:
    """Compare the result files and the shards of two runs byte for byte.

    Returns:
        The number of compared files and the names of those that differ. `identical` is false if
        the runs have no result file or no shard in common.
    """
    run_a = RunDir(a)
    run_b = RunDir(b)
    files = []
    for path in run_a.tables:
        if path_exists(path) or path_exists(b / path.name):
            files.append(path.name)
    shard_paths = [*list_folder(run_a.shards, "*.h5"), *list_folder(run_b.shards, "*.h5")]
    shards = sorted({f"shards/{path.name}" for path in shard_paths})
    unequal = []
    incomparable = []
    for name in [*files, *shards]:
        if not regular_file_exists(a / name) or not regular_file_exists(b / name):
            incomparable.append(name)
        elif not read_with_retries(a / name, partial(have_same_content, a / name, b / name)):
            unequal.append(name)
    in_one_run = [f"{name} is in one run only" for name in incomparable]
    differing = sorted([*unequal, *in_one_run])
    shared_shards = [name for name in shards if name not in incomparable]

    named = differing[:MAX_NAMED_FILES]
    n_more = len(differing) - len(named)
    if n_more:
        named.append(f"and {n_more} more")
    return BitwiseEquality(
        identical=bool(files and shared_shards and not differing),
        files_compared=len(files),
        shards_compared=len(shared_shards),
        differing=tuple(named),
    )
