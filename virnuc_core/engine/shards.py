"""Shards: the pieces into which a run is divided.

A shard is a range of the distinct sequences in the store (`orfs.h5`). A worker computes one shard
at a time and then commits the result, which means that the shard's file appears in `shards/` by a
rename. The content of the file depends only on the sequences, the weights and the settings, and
the file holds a fingerprint of all three and a checksum. A run that is started again computes only
the shards without a file: there is no other record of progress.
"""

import base64
import fnmatch
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from virnuc_core.checked_files import (
    SEAL_BYTES,
    Seal,
    open_checked,
    open_checked_hdf5,
    read_checked_json,
    with_own_digest,
)
from virnuc_core.config import DEFAULT_THRESHOLD, RESULT_FIELDS, EngineSpec, Spec
from virnuc_core.encoder_names import DNA, PROTEIN, RANDOM_ORIGIN
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.engine.process import Message
from virnuc_core.errors import ConfigError, DamagedFileError, ShardError, UnsafeFileError
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import NESTED_RUNS, RunDir, atomic_hdf5, write_text_atomically
from virnuc_core.runfiles import RunRecord, keeps_shards
from virnuc_core.safe_files import (
    change_folder,
    make_folder,
    open_hdf5,
    read_dataset,
    rename_file,
)
from virnuc_core.system_errors import list_folder, path_exists, read_with_retries
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
SHARD_SEAL: Final = Seal(f"shard {SCHEMA_VERSION}")
# Of `embeddings.h5` in the folder of sequences that were embedded in fp32. Older versions wrote it
# without a seal. That of a run has none either: the summary of the run has its digest.
EXACT_SEAL: Final = Seal("fp32 embeddings 1", is_optional=True)
# The last shards shrink to a quarter of the usual size, so that a slow device ends soon after a
# fast one.
SMALLEST_SHARD_DIVISOR: Final = 4
# Near the end of a run, a shard gets an eighth of the tokens that are left, so that the sizes fall
# slowly.
TOKENS_LEFT_DIVISOR: Final = 8
# Programs that read embeddings.h5 open the files of all shards, and most systems let a process open
# 1,024 files.
MAX_SHARDS: Final = 800
# How many shards there are more than tokens ÷ shard_tokens, because the last ones are smaller.
N_SMALL_SHARDS: Final = 30
# Tokens of a shard at most. Its embeddings take about a gigabyte, which a worker holds in memory
# until the commit.
MAX_SHARD_TOKENS: Final = 4_194_304
# Threads that check the checksums of shards. Hashing releases Python's global lock, so they run in
# parallel.
N_CHECK_THREADS: Final = 8
# Share of a batch's token slots that sequences of mixed lengths fill. Measured; the rest is padding
# at the ends of batches.
FILLED_SHARE: Final = 0.997


def result_settings(engine: EngineSpec, repeat_threshold: float | None = None) -> dict[str, Any]:
    """Return the settings on which the bytes of the results depend.

    They are part of the fingerprint of a run. Runs with different values must not share shards.

    Args:
        engine: The settings of the engine.
        repeat_threshold: Sequences whose score is near this value are embedded a second time, in
            fp16. None if no sequence is.

    Returns:
        Values by the name of the setting.
    """
    # Settings of earlier versions that are fixed today. Without them, runs that an earlier version
    # began would have another fingerprint.
    settings: dict[str, Any] = {"compile": False, "dedup": True}
    for name in RESULT_FIELDS:
        settings[name] = getattr(engine, name)
    if engine.gelu == "exact":  # so it was before the setting existed
        del settings["gelu"]
    if repeat_threshold is not None:
        settings["threshold"] = repeat_threshold
    # Earlier versions had no other kernels than Triton's, and did not record them.
    if engine.precision == "int8" and engine.int8_kernels == "hopper":
        settings["int8_kernels"] = engine.int8_kernels
    return settings


def repeats_near_threshold(engine: EngineSpec, head: HeadShape) -> bool:
    """Return true if a run embeds sequences with a score near the threshold again in fp16.

    This is done for int8, whose rounding could change their verdict. It is not done for a
    classifier with random weights, such as training uses before a classifier exists: its scores
    mean nothing, and the embeddings must not depend on them.
    """
    return engine.precision == "int8" and not head.origin.startswith(RANDOM_ORIGIN)


class ShardPlan(Spec):
    """The content of `shards/plan.json`: which sequences each shard holds.

    Shard i holds the distinct sequences `bounds[i]` to `bounds[i + 1] - 1`. `fingerprint` is the
    digest of everything that decides the results of the run.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    fingerprint: str
    bounds: tuple[int, ...] = Field(min_length=1)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def range(self, shard: int) -> tuple[int, int]:
        """Return the index of a shard's first sequence, and the index after its last sequence."""
        return self.bounds[shard], self.bounds[shard + 1]


class ShardTask(Message):
    """A message that tells a worker to compute a shard.

    In the search for a row that kills workers, it names a part of a shard (`is_probe`).
    """

    run: str  # path of the run directory
    store: str  # path of the store
    reads_fingerprint: str  # fingerprint of the store for which the plan was made
    plan_fingerprint: str = ""  # fingerprint of the plan; empty for a plan that nobody can replace
    # Digest of each model with which the run began.
    model_digests: dict[str, str] = Field(default_factory=dict)
    # The run stops if the results of more rows than this are NaN or infinite.
    max_not_finite: int = 0
    shard: int  # number of the shard
    lo: int  # index of the first sequence
    hi: int  # index after the last sequence
    budget_divisor: int = 1  # the token budgets are divided by this, on a device with little memory
    skipped_rows: tuple[int, ...] = ()  # indexes of sequences that are left out
    threshold: float = DEFAULT_THRESHOLD  # score from which a sequence counts as viral
    is_probe: bool = False  # compute and answer, but commit nothing


class Waiting(Message):
    """A worker says that one more of its shards is computed, but cannot be committed yet.

    Sequences of the shard wait until sequences of later shards fill a batch. The worker can take
    another task meanwhile. The oldest of its unanswered tasks are those that wait.
    """


class Computed(Message):
    """A worker's answer to a `ShardTask`: the shard is on disk.

    To a probe, it says only that the worker is still alive after the computation. In a run without
    commits nothing is on disk, and the answer holds the scores.
    """

    done: ShardDone | None  # times and counts of the shard; None for a probe
    n_repeated: int = 0  # sequences near the threshold that were embedded again in fp16
    scores: str | None = None  # of a run without commits, see `scores_as_text`


class MissingShardError(ShardError):
    """A shard without a file: it is not computed yet, or its file was removed."""


class ShardResult(NamedTuple):
    """The results of a shard, one row for each of its sequences."""

    embeddings: NDArray[np.float32]  # [n, dna_width + protein_width], DNA first
    scores: NDArray[np.float32]  # [n, 2]: P(others), P(virus)


def make_plan(
    protein_offsets: NDArray[np.int64], shard_tokens: int, token_budget: int, fingerprint: str
) -> ShardPlan:
    """Divide the distinct sequences into shards of consecutive sequences.

    Shards become smaller towards the end, so that a slow device ends soon after a fast one. Their
    size does not depend on the devices, so that a run on other devices can use the same plan. Where
    possible, a shard fills a whole number of batches.

    Args:
        protein_offsets: Position of the first residue of each protein, then the total, int64
            [n_sequences + 1].
        shard_tokens: Protein tokens of a shard at most. A single sequence with more tokens is a
            shard of its own.
        token_budget: Protein tokens of a batch.
        fingerprint: Digest of everything that decides the results.
    """
    n_sequences = len(protein_offsets) - 1
    offsets = np.asarray(protein_offsets, dtype=np.int64)
    # Each residue is a token, and each sequence has a start token and an end token besides.
    token_offsets = offsets + PROTEIN_ENCODER.n_special_tokens * np.arange(n_sequences + 1)
    n_tokens = int(token_offsets[-1])
    bounds = [0]
    while bounds[-1] < n_sequences:
        first_sequence = bounds[-1]
        start = int(token_offsets[first_sequence])
        size = _shard_size(n_tokens - start, shard_tokens, token_budget)
        # As many sequences as fit into the size.
        end = int(np.searchsorted(token_offsets, start + size, side="right")) - 1
        # At least one sequence, even if it has more tokens than the size.
        end = max(end, first_sequence + 1)
        bounds.append(min(n_sequences, end))
    return ShardPlan(bounds=tuple(bounds), fingerprint=fingerprint)


def _shard_size(tokens_left: int, shard_tokens: int, token_budget: int) -> int:
    """Return how many tokens the next shard gets.

    It is `shard_tokens` for most of the run. Towards the end it falls slowly, to a quarter of that.

    Args:
        tokens_left: Tokens of the sequences that are in no shard yet.
        shard_tokens: Tokens of a shard at most.
        token_budget: Tokens of a batch.
    """
    smallest = shard_tokens // SMALLEST_SHARD_DIVISOR
    share_of_rest = tokens_left // TOKENS_LEFT_DIVISOR
    size = min(shard_tokens, max(smallest, share_of_rest))
    if size >= token_budget:
        # Round down to whole batches, so that the shard does not end with a nearly empty batch.
        # Sequences do not fill a batch completely, so the share that they fill is taken.
        n_batches = size // token_budget
        size = int(n_batches * token_budget * FILLED_SHARE)
    return size


def plan_run(
    protein_offsets: NDArray[np.int64],
    engine: EngineSpec,
    digests: dict[str, str],
    kind: str,
    repeat_threshold: float | None = None,
) -> tuple[EngineSpec, ShardPlan]:
    """Divide the sequences of a run into shards. Nothing is written.

    The fingerprint of the plan covers everything that decides the results: reads, weights, result
    settings and kind of device.

    Args:
        protein_offsets: Position of the first residue of each protein, then the total, int64
            [n_sequences + 1].
        engine: Settings of the engine. Their `shard_tokens` is raised if there would be more than
            `MAX_SHARDS` shards.
        digests: Fingerprints of the reads and of each model.
        kind: Kind of the devices, "cuda" or "cpu".
        repeat_threshold: Sequences whose score is near this value are embedded again in fp16. None
            if no sequence is.

    Returns:
        The settings with the `shard_tokens` that was used, and the plan.
    """
    requested_tokens = engine.shard_tokens
    while True:
        fingerprint = _plan_fingerprint(engine, digests, kind, repeat_threshold)
        plan = make_plan(protein_offsets, engine.shard_tokens, engine.token_budget, fingerprint)
        if len(plan) <= MAX_SHARDS or engine.shard_tokens >= MAX_SHARD_TOKENS:
            break
        # There are too many shards. Make them larger in the same proportion, and try again. A few
        # shards less than the maximum are aimed at, because the last ones are smaller.
        larger_tokens = engine.shard_tokens * len(plan) // (MAX_SHARDS - N_SMALL_SHARDS) + 1
        shard_tokens = min(larger_tokens, MAX_SHARD_TOKENS)
        engine = engine.model_copy(update={"shard_tokens": shard_tokens})
    if engine.shard_tokens != requested_tokens:
        text = "shard_tokens %d → %d: %d shards"
        log.info(text, requested_tokens, engine.shard_tokens, len(plan))
    if len(plan) > MAX_SHARDS:
        text = "%d shards: to read embeddings.h5, a process must open as many files (ulimit -n)"
        log.warning(text, len(plan))
    return engine, plan


def _plan_fingerprint(
    engine: EngineSpec, digests: dict[str, str], kind: str, repeat_threshold: float | None
) -> str:
    """Return the SHA-256 digest of everything that decides the results of a run.

    The parameters are those of `plan_run`.
    """
    settings = result_settings(engine, repeat_threshold)
    # Other keys would change the fingerprint, and runs of earlier versions could not be resumed.
    contents = {"prints": digests, "settings": settings, "kind": kind}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def write_plan(run: RunDir, plan: ShardPlan) -> None:
    """Write `shards/plan.json`. If the file holds the same plan already, it stays untouched.

    A file that is damaged or holds another plan is replaced.
    """
    with suppress(ShardError):  # the file is missing or damaged
        if read_plan(run) == plan:
            return
    write_text_atomically(run.plan, with_own_digest(json.dumps(plan.model_dump())))


def read_plan(run: RunDir) -> ShardPlan:
    """Read `shards/plan.json`.

    Raises:
        ShardError: The file is missing, or it is not a shard plan.
        UnreadableError: The system cannot read the file.
    """
    try:
        content = read_with_retries(run.plan, lambda: read_checked_json(run.plan, run.root))
        return ShardPlan.model_validate_json(content)
    except (OSError, ValueError, DamagedFileError) as error:
        problem = f"{run.plan}: not a readable shard plan ({error}); run again to write it anew"
        raise ShardError(problem) from error


def shard_path(run: RunDir, shard: int) -> Path:
    """Return the path of a committed shard."""
    return run.shards / f"{shard:05d}.h5"


def _checksum(array: NDArray[np.float32], lo: int, hi: int, fingerprint: str) -> str:
    """Return the checksum of one dataset of a shard.

    It covers the values, the range of sequences (`lo` to `hi`), the fingerprint of the run, and
    the type and shape of the array. Each dataset has its own checksum, so that the scores can be
    checked without reading the embeddings.
    """
    identity = f"{lo}:{hi}:{fingerprint}:{array.dtype.str}{array.shape}"
    digest = hashlib.blake2b(identity.encode(), digest_size=32)
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def commit(
    run: RunDir, plan: ShardPlan, shard: int, result: ShardResult, *, make_folders: bool = True
) -> Path:
    """Write the file of a shard. It appears whole or not at all.

    The file begins with a seal: a digest of all bytes that follow. The same result gives the same
    bytes.

    Args:
        run: The run directory.
        plan: The plan of the run.
        shard: Number of the shard.
        result: One row for each sequence of the shard.
        make_folders: Make the folder of the file if it is not there.

    Returns:
        The path of the file.

    Raises:
        ShardError: The result does not have one row per sequence.
        StorageError: The disk is full, or fails.
    """
    lo, hi = plan.range(shard)
    if len(result.embeddings) != hi - lo or len(result.scores) != hi - lo:
        raise ShardError(f"{len(result.embeddings)} rows for {hi - lo} sequences", shard=shard)
    path = shard_path(run, shard)
    # HDF5 leaves the first `userblock_size` bytes of a file to its user. The seal is written there.
    with atomic_hdf5(
        path,
        SHARD_SEAL.seal_of,
        root=run.root,
        make_folders=make_folders,
        libver="latest",
        userblock_size=SEAL_BYTES,
    ) as file:
        for name, array in result._asdict().items():
            dataset = file.create_dataset(name, data=array)
            dataset.attrs["checksum"] = _checksum(array, lo, hi, plan.fingerprint)
        file.attrs.update(
            schema_version=SCHEMA_VERSION, shard=shard, range=[lo, hi], fingerprint=plan.fingerprint
        )
    return path


def is_sealed(path: Path) -> bool:
    """Return true if the file of a shard has exactly the bytes that were committed.

    The seal at its beginning is compared with the digest of all further bytes. The file may lie in
    any folder.

    Raises:
        OSError: The file cannot be read.
        UnsafeFileError: It is no regular file.
    """
    try:
        open_checked(path, SHARD_SEAL).close()
    except DamagedFileError:
        return False
    return True


def read_shard(run: RunDir, plan: ShardPlan, shard: int) -> ShardResult:
    """Read embeddings and scores of a committed shard, and check every byte of its file.

    Raises:
        ShardError: The file is missing, damaged, or belongs to another run.
        UnreadableError: The system cannot read the file.
    """
    # The file has a dataset for each field of the result, with the same name.
    dataset_names = ShardResult._fields
    return ShardResult(**_read(run, plan, shard, dataset_names, check_whole_file=True))


def refresh_folder(run: RunDir) -> None:
    """Make visible on this machine what other machines have written into the folder `shards`.

    A network file system may show an old list of files for about a minute. It asks the file server
    again after this machine has changed something in the folder. So an empty file is made and
    removed. Without permission to write, or if the folder is a link, nothing is done.
    """
    with suppress(OSError, UnsafeFileError):
        change_folder(run.shards, run.root)


def _read(
    run: RunDir,
    plan: ShardPlan,
    shard: int,
    names: Sequence[str],
    *,
    check_whole_file: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Read some datasets of a shard, and compare each with its own checksum.

    Args:
        run: The run directory.
        plan: The plan of the run.
        shard: Number of the shard.
        names: Names of the datasets, such as "scores".
        check_whole_file: Also check the seal, which covers every byte of the file.

    Returns:
        The arrays by the name of the dataset.

    Raises:
        MissingShardError: There is no file.
        ShardError: The file was read, and it is damaged or belongs to another run.
        UnreadableError: The system cannot read the file, so that nothing is known about it.
        UnsafeFileError: It is no regular file in the run directory, or leads to other files.
    """
    path = shard_path(run, shard)
    lo, hi = plan.range(shard)

    def load() -> _ShardData:
        """Read the datasets from the shard's file, after checking its seal if that is wanted."""
        return _load_datasets(run, shard, names, n_rows=hi - lo, check_whole_file=check_whole_file)

    with _shard_errors(path, shard):
        data = read_with_retries(path, load)
    if data.fingerprint != plan.fingerprint:
        raise ShardError(f"{path} belongs to another run", shard=shard)
    for name in names:
        if data.checksums[name] != _checksum(data.arrays[name], lo, hi, plan.fingerprint):
            raise _changed_shard_error(path, shard)
    return data.arrays


@contextmanager
def _shard_errors(path: Path, shard: int) -> Iterator[None]:
    """Turn an error of the `with` block, which reads the file of a shard, into a `ShardError`.

    The block must read by `read_with_retries`. If the system cannot read the file, that raises an
    `UnreadableError`, which passes. So any other error tells that HDF5 or our checks refuse the
    content.

    Args:
        path: The file.
        shard: Number of the shard.

    Raises:
        MissingShardError: There is no file.
        ShardError: The file is no file of a shard, or is not as it was committed.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingShardError(f"{path} is missing; run again", shard=shard) from error
    except DamagedFileError as error:
        raise _changed_shard_error(path, shard) from error
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise ShardError(f"{path} is no file of a shard ({error})", shard=shard) from error


def _changed_shard_error(path: Path, shard: int) -> ShardError:
    """Return the error that the file of a shard has another content than was committed."""
    return ShardError(f"{path} is not what was committed (checksum)", shard=shard)


@dataclass(frozen=True, slots=True)
class _ShardData:
    """What the file of a shard holds, before it is checked."""

    fingerprint: str
    arrays: dict[str, NDArray[np.float32]]  # by name of the dataset
    checksums: dict[str, str]  # by name of the dataset


def _load_datasets(
    run: RunDir, shard: int, names: Sequence[str], *, n_rows: int, check_whole_file: bool
) -> _ShardData:
    """Read some datasets from the file of a shard, with their checksums and the fingerprint.

    Args:
        run: The run directory.
        shard: Number of the shard.
        names: Names of the datasets.
        n_rows: Number of rows that each dataset must have.
        check_whole_file: Compare the seal first, which covers every byte of the file.

    Raises:
        DamagedFileError: The seal does not belong to the other bytes.
        OSError: The file cannot be read, or is no HDF5 file.
        KeyError: It lacks a dataset or an attribute.
        ValueError: A dataset has another shape or type than those of a shard.
        UnsafeFileError: It is no regular file in the run directory, or leads to other files.
    """
    arrays = {}
    checksums = {}
    path = shard_path(run, shard)
    if check_whole_file:
        opened = open_checked_hdf5(path, SHARD_SEAL, run.root)
    else:
        opened = open_hdf5(path, run.root)
    with opened as file:
        fingerprint = str(file.attrs["fingerprint"])
        for name in names:
            _require_rows(file[name], n_rows)
            arrays[name] = read_dataset(file[name])
            checksums[name] = str(file[name].attrs["checksum"])
    return _ShardData(fingerprint, arrays, checksums)


def _require_rows(dataset: h5py.Dataset, n_rows: int) -> None:
    """Raise a `ValueError` if a dataset has no table of float32 with this number of rows."""
    if dataset.dtype != np.float32 or dataset.ndim != 2 or len(dataset) != n_rows:
        shape = " x ".join(map(str, dataset.shape))
        raise ValueError(
            f"{dataset.name} has {shape} values of type {dataset.dtype}, not {n_rows} rows of "
            "float32"
        )


def committed(run: RunDir, plan: ShardPlan) -> tuple[list[int], list[str]]:
    """Find the shards of a run that are computed already, and check every byte of their files.

    Damaged files, and files of another run, are moved to `shards/damaged/`. Their shards will be
    computed again. If the system cannot read a file, nothing is known about the shard, and no file
    is moved.

    Returns:
        The numbers of the shards whose files are intact, and a line of text for each file that was
        moved.

    Raises:
        UnreadableError: The system cannot read a file.
    """
    refresh_folder(run)
    existing_shards = [shard for shard in range(len(plan)) if path_exists(shard_path(run, shard))]

    def check(shard: int) -> ShardError | None:
        """Return what is wrong with the file of a shard, or None if it is intact.

        Only the scores are decoded, because the seal of the whole file covers the embeddings.
        """
        try:
            _read(run, plan, shard, ("scores",), check_whole_file=True)
        except ShardError as problem:
            return problem
        return None

    with ThreadPoolExecutor(N_CHECK_THREADS) as threads:
        # All files are checked before the first one is moved. An `UnreadableError` is raised here,
        # and cancels the checks that have not begun.
        problems = list(threads.map(check, existing_shards))
    proven_shards = []
    damage_reports = []
    for shard, problem in zip(existing_shards, problems, strict=True):
        if problem is None:
            proven_shards.append(shard)
        elif not isinstance(problem, MissingShardError):
            # A file that has disappeared since the list was made cannot be moved.
            new_path = _move_damaged(run, shard)
            damage_reports.append(f"{problem}; moved to {new_path}")
    return proven_shards, damage_reports


def _move_damaged(run: RunDir, shard: int) -> Path:
    """Move the file of a damaged shard to `shards/damaged/`, and return the new path.

    The file gets a number, because the same shard may be damaged more than once. It never replaces
    an earlier file.
    """
    path = shard_path(run, shard)
    folder = run.shards / "damaged"
    make_folder(folder, run.root)
    used_names = {used_path.name for used_path in list_folder(folder, f"{path.stem}.*")}
    # The first free number. To count the files is not enough, because somebody may have removed
    # one of them.
    names = (f"{path.stem}.{number}.h5" for number in itertools.count())
    new_path = folder / next(name for name in names if name not in used_names)
    rename_file(path, new_path, run.root)
    return new_path


def read_scores(
    run: RunDir, only: Sequence[int] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Read the scores of all distinct sequences, or of the sequences of some shards.

    Args:
        run: The run directory.
        only: Numbers of the shards to read. None reads all shards.

    Returns:
        The scores, float32 [n, 2], and which sequences failed, bool [n]. The engine writes NaN as
        the scores of a sequence that it has left out, and only then.

    Raises:
        ShardError: The plan or a shard is missing or damaged.
        UnreadableError: The system cannot read a file.
    """
    plan = read_plan(run)
    refresh_folder(run)
    shard_numbers = range(len(plan)) if only is None else only
    # The empty array stands for a run without any shard.
    parts: list[NDArray[np.float32]] = [np.empty((0, 2), np.float32)]
    for shard in shard_numbers:
        arrays = _read(run, plan, shard, ("scores",))
        parts.append(arrays["scores"])
    scores = np.concatenate(parts)
    # True for each row in which any value is NaN.
    has_failed: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(scores), axis=1)
    return scores, has_failed


def read_embeddings(run: RunDir, sequences: NDArray[np.int64]) -> NDArray[np.float32]:
    """Read the embeddings of some distinct sequences, shard by shard.

    Args:
        run: The run directory.
        sequences: Numbers of the distinct sequences, ascending.

    Returns:
        The embeddings, float32 [sequences, DNA width + protein width]. A sequence that the engine
        has left out has NaN.

    Raises:
        ShardError: The plan or a shard is missing or damaged.
        UnreadableError: The system cannot read a file.
    """
    plan = read_plan(run)
    embeddings = np.full((len(sequences), _embedding_width(run, plan)), np.nan, np.float32)
    for shard in range(len(plan)):
        start, end = plan.range(shard)
        first, last = np.searchsorted(sequences, (start, end)).tolist()
        if first == last:
            continue  # none of the sequences is in this shard
        rows_of_shard = sequences[first:last] - start
        embeddings[first:last] = read_shard(run, plan, shard).embeddings[rows_of_shard]
    return embeddings


def scores_as_text(scores: NDArray[np.float32]) -> str:
    """Return the scores of a shard, float32 [n, 2], as a text for a message to the parent."""
    return base64.b64encode(np.ascontiguousarray(scores, "<f4").tobytes()).decode("ascii")


def scores_from_texts(
    plan: ShardPlan, texts: dict[int, str]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Join the scores that the workers of a run without commits have sent.

    Args:
        plan: The plan of the run.
        texts: By shard: its scores, as `scores_as_text` returns them.

    Returns:
        What `read_scores` returns for a run with commits: the scores of all distinct sequences,
        float32 [n, 2], and which sequences failed, bool [n].

    Raises:
        ShardError: A shard has no scores, or not one pair of scores for each sequence.
    """
    parts: list[NDArray[np.float32]] = [np.empty((0, 2), np.float32)]
    for shard in range(len(plan)):
        lo, hi = plan.range(shard)
        values = np.frombuffer(base64.b64decode(texts.get(shard, "")), "<f4")
        if len(values) != 2 * (hi - lo):
            raise ShardError(f"{len(values) // 2} scores for {hi - lo} sequences", shard=shard)
        parts.append(values.reshape(-1, 2).astype(np.float32))
    scores = np.concatenate(parts)
    has_failed: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(scores), axis=1)
    return scores, has_failed


def store_path(run: RunDir, record: RunRecord) -> Path:
    """Return the path of the store that the record of a run names.

    The store lies in the run directory. A run inside a validation, such as `devices-2`, uses the
    store of the validation instead, which lies in a folder above. No other path is accepted, so
    that a record of unknown origin cannot make virnuc open any file of this machine.

    Args:
        run: The run directory.
        record: Its record (`run.json`), which may come from a stranger.

    Raises:
        UnsafeFileError: The record names a file elsewhere.
    """
    path = PurePath(record.store)
    if path == PurePath(run.store.name):
        return run.store
    # The path may consist of ".." and the name of the store. "../orfs.h5" lies in the folder that
    # holds the run directory.
    n_levels_up = len(path.parts) - 1
    levels_up = [".."] * n_levels_up
    real_root = run.root.resolve()
    if path == PurePath(*levels_up, run.store.name):
        outer_root = Path(*real_root.parts[: len(real_root.parts) - n_levels_up])
        inner_name = str(real_root.relative_to(outer_root))
        # The run directory must have one of the names that a validation gives to its inner runs.
        if any(fnmatch.fnmatchcase(inner_name, pattern) for pattern in NESTED_RUNS):
            return outer_root / run.store.name
    raise UnsafeFileError(
        f"{run.record}: names the file {record.store}, which is outside the run directory and is "
        f"not opened; put the store into {run.root} and its name, {run.store.name}, into the record"
    )


def require_kept_shards(run: RunDir, record: RunRecord) -> None:
    """Raise a `ConfigError` if a run was started without checkpoints, so that it has no shards."""
    if not keeps_shards(record):
        raise ConfigError(
            f"{run.root}: checkpoints were disabled, so this run keeps no embeddings and scores; "
            "repeat it without --disable-checkpointing"
        )


def store_of(run: RunDir, record: RunRecord) -> OrfStore:
    """Open the store (`orfs.h5`) that holds the sequences of a run's shards.

    Args:
        run: The run directory.
        record: The record of the run (`run.json`), which names the store and its fingerprint.

    Raises:
        InputError: The store cannot be read.
        ConfigError: The store holds other reads now.
        UnsafeFileError: The record names a file outside the run directory.
    """
    store = OrfStore.open(store_path(run, record))
    if store.fingerprint != record.fingerprints["reads"]:
        problem = f"{store.path} holds other reads than the run was made from"
        raise ConfigError(f"{problem}; give it back its store")
    return store


def write_virtual_embeddings(run: RunDir) -> Path:
    """Write `embeddings.h5`, which shows the data of all shards as one file without copying them.

    It uses virtual datasets of HDF5. Their paths are relative, so the run directory can be moved.
    A reader of the file sees NaN for sequences that failed, and infinity for sequences of a shard
    whose file is missing or cannot be opened.

    Returns:
        The path of the file.

    Raises:
        ShardError: The plan, or the first shard, is missing or damaged.
        UnreadableError: The system cannot read a file.
    """
    plan = read_plan(run)
    n_sequences = plan.bounds[-1]
    widths = {"embeddings": _embedding_width(run, plan), "scores": 2}
    with atomic_hdf5(run.embeddings, libver="latest") as file:  # virtual datasets are a new format
        for name, width in widths.items():
            layout = h5py.VirtualLayout((n_sequences, width), np.float32)
            layout.dcpl.set_obj_track_times(False)  # the same shards give the same bytes
            for shard in range(len(plan)):
                lo, hi = plan.range(shard)
                path = f"{run.shards.name}/{shard_path(run, shard).name}"
                layout[lo:hi] = h5py.VirtualSource(path, name, (hi - lo, width))
            file.create_virtual_dataset(name, layout, fillvalue=np.float32(np.inf))
        file.attrs["fingerprint"] = plan.fingerprint
        file.attrs["about"] = (
            f"a row for each distinct sequence: {DNA.title}, then {PROTEIN.title}; "
            "orfs.h5 row_unique tells whose"
        )
    return run.embeddings


def _embedding_width(run: RunDir, plan: ShardPlan) -> int:
    """Return the number of columns of the embeddings, taken from the first shard.

    It is 0 if the run has no shard, because no read has an open reading frame.

    Raises:
        ShardError: The file of the first shard is missing or damaged.
        UnreadableError: The system cannot read the file.
    """
    if len(plan) == 0:
        return 0
    path = shard_path(run, 0)
    first_sequence, end = plan.range(0)

    def read_width() -> int:
        """Read the width from the file of the first shard."""
        with open_hdf5(path, run.root) as file:
            dataset = file["embeddings"]
            _require_rows(dataset, end - first_sequence)
            return int(dataset.shape[1])

    with _shard_errors(path, shard=0):
        return read_with_retries(path, read_width)
