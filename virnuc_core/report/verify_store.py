"""Verify the store of a validation: what it holds, and that its reads give it again."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.errors import InputError
from virnuc_core.reads.parse import BLOCK_BYTES
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import COLUMNS, OrfStore
from virnuc_core.reads.subsets import choose_reads
from virnuc_core.reads.translate import AMBIGUOUS, DUPLICATE_ID, EMPTY, SHORT_FOR_MODEL
from virnuc_core.report.model import BASELINE
from virnuc_core.report.raw_files import RECORD, SUMMARY, RawFolder, run_names
from virnuc_core.report.result_tables import load_results
from virnuc_core.report.verification import Verification
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunFile, RunSummary, digest
from virnuc_core.system_errors import is_regular_file, path_exists
from virnuc_core.validation import BaselineSummary, StagingTally, ValidationRecord

SPECIAL_TOKENS: Final = PROTEIN_ENCODER.n_special_tokens
# Each process holds about 100 MB, and more of them would save seconds only.
MAX_PROCESSES: Final = 8


def verify_store(verification: Verification, raw: RawFolder) -> None:
    """Check the counts in records and summaries against the store, and stage the reads again.

    If the validation's store was removed, nothing is checked.
    """
    path = RunDir(raw.root).store
    if not path_exists(path):
        return
    store = OrfStore.open(path)
    counts = count_store(store)
    record = raw.read(ValidationRecord, RECORD)
    baseline = raw.read(BaselineSummary, BASELINE, SUMMARY)
    if record is not None and "reads" in record.fingerprints:
        label = f"{RECORD}: fingerprint of the reads"
        verification.compare(label, record.fingerprints["reads"], store.fingerprint)

        _verify_input_files(verification, record, counts)

    files: dict[str, RunFile | None] = {}
    for name in run_names(raw.root):
        files[f"{name}/{SUMMARY}"] = raw.read(RunSummary, name, SUMMARY)
    files[f"{RECORD}: staging"] = None if record is None else record.staging
    files[f"{BASELINE}/{SUMMARY}"] = baseline
    for label, file in files.items():
        if file is not None:
            verification.compare_fields(label, file, counts)

    predictions = RunDir(raw.root / BASELINE).predictions
    if baseline is not None and baseline.subset is not None and path_exists(predictions):
        subset = baseline.subset
        tokens = {
            "tokens": baseline_tokens(store, predictions, subset.reads, subset.seed),
            "total_tokens": counts["row_tokens"],
        }
        verification.compare_fields(f"{BASELINE}/{SUMMARY}: subset", subset, tokens)
    _stage_again(verification, store, record)


def _verify_input_files(
    verification: Verification, record: ValidationRecord, counts: Mapping[str, int]
) -> None:
    """Check that the input files in a record have the reads of the store, and their content.

    Args:
        verification: Collects the differences.
        record: The validation's record.
        counts: The counts of the store; see `count_store`.
    """
    if not record.inputs:  # of an older version
        return
    for name in ("reads", "empty", "duplicate_ids"):
        total = sum(getattr(file, name) for file in record.inputs)
        verification.compare(f"{RECORD}: inputs: {name} of all files", total, counts[name])
    staging = record.staging or StagingTally()
    if staging.skipped is not None:
        skipped = sum(file.skipped for file in record.inputs)
        verification.compare(f"{RECORD}: inputs: skipped of all files", skipped, staging.skipped)
    # Their whole paths are in the record of the staging. A file that was moved is not looked for.
    path_of = {Path(name).name: Path(name) for name in staging.files}
    for file in record.inputs:
        path = path_of.get(Path(file.file).name)
        if file.content is not None and path is not None and is_regular_file(path):
            verification.compare(f"{RECORD}: inputs: {file.file}", file.content, digest(path))


def count_store(store: OrfStore) -> dict[str, int]:
    """Return the counts of reads, chunks, rows and tokens in a store.

    Returns:
        The counts, by the names of the fields in summaries and records. Tokens are those of the
        protein encoder, including start and end tokens.
    """
    flags = np.asarray(store.read_flags)

    def count_flag(flag: int) -> int:
        """Return the number of reads with this flag."""
        return int(((flags & flag) > 0).sum())

    lengths = np.diff(store.protein_offsets)
    return {
        "reads": len(flags),
        "empty": count_flag(EMPTY),
        "duplicate_ids": count_flag(DUPLICATE_ID),
        "ambiguous": count_flag(AMBIGUOUS),
        "short_for_model": count_flag(SHORT_FOR_MODEL),
        "n_reads": len(store.read_length),
        "n_chunks": int(np.asarray(store.read_chunks).sum(dtype=np.int64)),
        "n_rows": len(store.row_read),
        "n_uniques": len(lengths),
        "protein_tokens": int(lengths.sum()) + SPECIAL_TOKENS * len(lengths),
        "row_tokens": int(lengths[store.row_unique].sum()) + SPECIAL_TOKENS * len(store.row_read),
    }


def baseline_tokens(store: OrfStore, predictions: Path, n_reads: int, seed: int) -> int:
    """Return the number of protein tokens in the rows on which a baseline was measured.

    Args:
        store: The store.
        predictions: The baseline's result file.
        n_reads: The number of reads that were drawn for the baseline.
        seed: The random seed with which they were drawn.

    Raises:
        InputError: The rows of the result file are not those of the reads that the seed gives.
    """
    # The reads are drawn again. They cannot be found by their ids, because two mates may have the
    # same id.
    drawn_reads = choose_reads(store.n_reads, n_reads, seed)
    is_drawn = np.zeros(store.n_reads, dtype=np.bool_)
    is_drawn[drawn_reads] = True
    read_of_row = np.asarray(store.row_read)
    rows = np.flatnonzero(is_drawn[read_of_row])
    expected_ids = []
    for row in rows.tolist():
        expected_ids += store.row_ids(row, row + 1, original=True)
    ids = load_results(predictions)["id"].tolist()
    if ids != expected_ids:
        raise InputError("its rows are not those of the reads the baseline drew", file=predictions)
    uniques = np.asarray(store.row_unique)[rows]
    lengths = np.diff(store.protein_offsets)[uniques]
    return int(lengths.sum()) + SPECIAL_TOKENS * len(uniques)


def _stage_again(
    verification: Verification, store: OrfStore, record: ValidationRecord | None
) -> None:
    """Stage the reads again, and compare the new store with the validation's store.

    If the reads are no longer available, a remark says so.
    """
    reason = _why_not_staged_again(record)
    if reason:
        verification.remarks.append(f"orfs.h5 was not made again from its reads: {reason}")
        return
    assert record is not None
    with TemporaryDirectory(prefix="virnuc-verify-") as folder:
        summary = stage(_staging_settings(record, store), Path(folder, "orfs.h5"))
        new_store = OrfStore.open(summary.store, check=False)
        label = "orfs.h5: fingerprint of its reads"
        verification.compare(label, store.fingerprint, new_store.fingerprint)
        if store.fingerprint == new_store.fingerprint:
            unequal = []
            for name in COLUMNS:
                if not _are_equal(getattr(store, name), getattr(new_store, name)):
                    unequal.append(name)
            verification.compare("orfs.h5: columns that its reads do not give", unequal, [])


def _why_not_staged_again(record: ValidationRecord | None) -> str:
    """Return why the reads cannot be staged again, or an empty string if they can."""
    files = () if record is None or record.staging is None else record.staging.files
    for name in files:
        if not is_regular_file(Path(name)):
            return f"{name} is not there"
    if not files:
        return "run.json does not tell where they are"
    return ""


def _staging_settings(record: ValidationRecord, store: OrfStore) -> StageSpec:
    """Return the settings that a store was staged with.

    Args:
        record: The validation's record, with the files of its reads.
        store: Gives the model's length.
    """
    files = () if record.staging is None else record.staging.files
    pairs = record.pairs or ()
    pairs_of_files = [pair for pair in pairs if pair[0] != pair[1]]  # others are in one file
    paired_files = {name for pair in pairs_of_files for name in pair}
    single_files = tuple(name for name in files if name not in paired_files)
    # If every file that is no mate's is a pair by itself, the mates alternate in it. If not, flags
    # of alignments tell the mates again.
    is_interleaved = len(pairs_of_files) + len(single_files) == len(pairs)
    return StageSpec(
        reads=single_files,
        mates_1=tuple(first for first, _ in pairs_of_files),
        mates_2=tuple(second for _, second in pairs_of_files),
        interleaved=is_interleaved,
        pairs=bool(pairs),
        model_length=store.model_length,
        read_group=str(record.spec.get("read_group", "")),
        on_error="skip" if record.spec.get("on_error") == "skip" else "stop",
        stage_workers=count_processes(),
    )


def count_processes() -> int:
    """Return how many processes share the work: one for each core, `MAX_PROCESSES` at most."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def _are_equal(a: NDArray[np.generic], b: NDArray[np.generic]) -> bool:
    """Return whether two columns are equal. They are read in blocks to save memory."""
    if len(a) != len(b):
        return False
    for start in range(0, len(a), BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        if not np.array_equal(a[block], b[block]):
            return False
    return True
