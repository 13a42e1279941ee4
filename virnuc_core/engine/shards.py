"""Shards: the unit of work, of commit and of loss.

A shard is a range of the store's distinct sequences. Its file holds the result of a pure function
of sequences, weights and settings, with a fingerprint of all three and a checksum. The file
appears by a rename, is never computed again, and is the only record of progress.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from virnuc_core.config import DEFAULT_THRESHOLD, RESULT_FIELDS, EngineSpec, Spec
from virnuc_core.encoders.model_config import RANDOM_ORIGIN, HeadShape
from virnuc_core.engine.process import Message
from virnuc_core.errors import ConfigError, ShardError
from virnuc_core.reads.store import SEAL_BYTES, OrfStore, sealed
from virnuc_core.rundir import RunDir, atomic_hdf5, write_text_atomically
from virnuc_core.runfiles import RunRecord
from virnuc_core.telemetry.tables import ShardDone

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
SEALED_AS: Final = f"shard {SCHEMA_VERSION}"
# The last shards shrink to a quarter, so that unequal devices end together.
SMALLEST_SHARD_DIVISOR: Final = 4
# A reader of embeddings.h5 opens all shards: most systems let a process open 1,024 files.
MAX_SHARDS: Final = 800
# The last shards are smaller than the others, so a little room is left below `MAX_SHARDS`.
N_SMALL_SHARDS: Final = 30
# A gigabyte of embeddings, which a worker holds in memory until the commit.
MAX_SHARD_TOKENS: Final = 4_194_304
READ_BYTES: Final = 1 << 20
N_CHECK_THREADS: Final = 8  # to prove shards; the digest functions let other threads run
FILLED_SHARE: Final = 0.997  # of the slots of a whole number of batches, by rows of mixed lengths


def result_settings(engine: EngineSpec, repeat_threshold: float | None = None) -> dict[str, Any]:
    """Return the settings that may change result bytes.

    Args:
        engine: The settings of the engine.
        repeat_threshold: Score near which rows are embedded again; None if none are.
    """
    settings: dict[str, Any] = {"compile": False, "dedup": True}  # part of every fingerprint
    for name in RESULT_FIELDS:
        settings[name] = getattr(engine, name)
    if repeat_threshold is not None:
        settings["threshold"] = repeat_threshold
    return settings


def repeats_near_threshold(engine: EngineSpec, head: HeadShape) -> bool:
    """Return whether rows near the threshold are embedded again.

    A classifier of random weights, as training begins with, decides nothing: embeddings must not
    depend on it.
    """
    return engine.precision == "int8" and not head.origin.startswith(RANDOM_ORIGIN)


class ShardPlan(Spec):
    """The file `shards/plan.json`: which sequences each shard holds.

    Shard i holds the distinct sequences `bounds[i]` to `bounds[i + 1] - 1`.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    fingerprint: str
    bounds: tuple[int, ...] = Field(min_length=1)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def range(self, shard: int) -> tuple[int, int]:
        """Return the first sequence of a shard, and one past its last."""
        return self.bounds[shard], self.bounds[shard + 1]


class ShardTask(Message):
    """A shard for a worker to compute, or a part of one in the search for poison rows."""

    run: str
    store: str
    reads: str  # fingerprint of the store that the plan was made for
    # digests of the models that the run is made from
    weights: dict[str, str] = Field(default_factory=dict)
    max_not_finite: int = 0  # rows of the run that may be not finite; with more it stops
    shard: int
    lo: int  # first sequence
    hi: int  # one past the last
    divisor: int = 1  # of the token budgets
    skip: tuple[int, ...] = ()  # sequences left out
    threshold: float = DEFAULT_THRESHOLD  # of its run
    probe: bool = False  # compute and answer, commit nothing


class Computed(Message):
    """A worker's answer that a shard is on disk; for a probe, that the worker survived it."""

    done: ShardDone | None  # None for a probe
    n_repeated: int = 0  # rows near the threshold that were embedded again


class ShardResult(NamedTuple):
    """What a shard's computation gave."""

    embeddings: NDArray[np.float32]  # [n, dna_width + protein_width], DNA first
    scores: NDArray[np.float32]  # [n, 2]: P(others), P(virus)


def make_plan(
    protein_offsets: NDArray[np.int64], shard_tokens: int, token_budget: int, fingerprint: str
) -> ShardPlan:
    """Cut the distinct sequences into shards, smaller towards the end.

    The cuts do not depend on the devices. A shard is a whole number of batches, nearly full, where
    that is possible.

    Args:
        protein_offsets: Where each protein starts, in residues, and their total.
        shard_tokens: ESM-2 tokens of a shard at most; a single longer sequence is a shard, too.
        token_budget: ESM-2 tokens of a batch.
        fingerprint: Of all that decides a result.
    """
    n_sequences = len(protein_offsets) - 1
    offsets = np.asarray(protein_offsets, dtype=np.int64)
    token_offsets = offsets + 2 * np.arange(n_sequences + 1)  # start and end token each
    n_tokens = int(token_offsets[-1])
    bounds = [0]
    while bounds[-1] < n_sequences:
        first_sequence = bounds[-1]
        start = int(token_offsets[first_sequence])
        size = _shard_size(n_tokens - start, shard_tokens, token_budget)
        end = int(np.searchsorted(token_offsets, start + size, side="right")) - 1
        end = max(end, first_sequence + 1)
        bounds.append(min(n_sequences, end))
    return ShardPlan(bounds=tuple(bounds), fingerprint=fingerprint)


def _shard_size(tokens_left: int, shard_tokens: int, token_budget: int) -> int:
    """Return the tokens of the next shard, when so many tokens are left to cut."""
    smallest = shard_tokens // SMALLEST_SHARD_DIVISOR
    share = tokens_left // (2 * SMALLEST_SHARD_DIVISOR)
    size = min(shard_tokens, max(smallest, share))
    if size >= token_budget:
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
    """Plan the shards of a run.

    The plan's fingerprint covers all that decides a result: reads, weights, result settings and
    kind of device.

    Args:
        protein_offsets: Where each protein starts, in residues, and their total.
        engine: Settings. `shard_tokens` is raised if there would be more than `MAX_SHARDS`.
        digests: Fingerprints of the reads and the weights.
        kind: Kind of the devices.
        repeat_threshold: Score near which rows are embedded again; None if none are.

    Returns:
        The settings, with the `shard_tokens` that were used, and the plan.
    """
    requested_tokens = engine.shard_tokens
    while True:
        fingerprint = _plan_fingerprint(engine, digests, kind, repeat_threshold)
        plan = make_plan(protein_offsets, engine.shard_tokens, engine.token_budget, fingerprint)
        if len(plan) <= MAX_SHARDS or engine.shard_tokens >= MAX_SHARD_TOKENS:
            break
        larger = engine.shard_tokens * len(plan) // (MAX_SHARDS - N_SMALL_SHARDS) + 1
        engine = engine.model_copy(update={"shard_tokens": min(larger, MAX_SHARD_TOKENS)})
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
    """Return the SHA-256 digest of all that decides a result."""
    settings = result_settings(engine, repeat_threshold)
    contents = {"prints": digests, "settings": settings, "kind": kind}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def write_plan(run: RunDir, plan: ShardPlan) -> None:
    """Write `shards/plan.json`, unless the same plan is there already."""
    with suppress(ShardError):
        if read_plan(run) == plan:
            return
    write_text_atomically(run.plan, json.dumps(plan.model_dump()) + "\n")


def read_plan(run: RunDir) -> ShardPlan:
    """Read `shards/plan.json`.

    Raises:
        ShardError: The file is missing, or it is not one of ours.
    """
    try:
        return ShardPlan.model_validate_json(run.plan.read_bytes())
    except (OSError, ValueError) as error:
        problem = f"{run.plan}: not a readable shard plan ({error}); run again to write it anew"
        raise ShardError(problem) from error


def shard_path(run: RunDir, shard: int) -> Path:
    """Return the path of a committed shard."""
    return run.shards / f"{shard:05d}.h5"


def _checksum(array: NDArray[np.float32], lo: int, hi: int, fingerprint: str) -> str:
    """Return a digest of one dataset, its place and its run.

    Each dataset has its own, so that scores can be proven without reading the embeddings.
    """
    place = f"{lo}:{hi}:{fingerprint}:{array.dtype.str}{array.shape}"
    digest = hashlib.blake2b(place.encode(), digest_size=32)
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def commit(run: RunDir, plan: ShardPlan, shard: int, result: ShardResult) -> Path:
    """Make a shard's result permanent: write a temporary file, flush it, seal it, rename it.

    The same result gives the same bytes.

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

    def seal(body: bytes) -> bytes:
        return sealed(SEALED_AS, [body])

    with atomic_hdf5(path, seal, libver="latest", userblock_size=SEAL_BYTES) as file:
        for name, array in result._asdict().items():
            dataset = file.create_dataset(name, data=array)
            dataset.attrs["checksum"] = _checksum(array, lo, hi, plan.fingerprint)
        file.attrs.update(
            schema_version=SCHEMA_VERSION, shard=shard, range=[lo, hi], fingerprint=plan.fingerprint
        )
    return path


def is_sealed(path: Path) -> bool:
    """Return whether a shard's file, in whatever folder, is what was committed, to the last bit.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        seal = file.read(SEAL_BYTES)
        blocks = iter(partial(file.read, READ_BYTES), b"")
        return seal == sealed(SEALED_AS, blocks)


def read_shard(run: RunDir, plan: ShardPlan, shard: int) -> ShardResult:
    """Read a committed shard, and prove it to the last bit.

    Raises:
        ShardError: The file is damaged, unreadable, or belongs to another run.
    """
    return ShardResult(**_read(run, plan, shard, ShardResult._fields, check_whole_file=True))


def refresh_folder(folder: Path) -> None:
    """Make visible here what other machines did in a folder.

    A network file system shows what it knew before, for a minute or so, until this machine changes
    something in the folder itself.
    """
    with suppress(OSError):  # where nothing may be written nothing is being written
        (folder / ".look").touch()
        (folder / ".look").unlink()


def _read(
    run: RunDir,
    plan: ShardPlan,
    shard: int,
    names: Sequence[str],
    *,
    check_whole_file: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Read some datasets of a shard, each proven by its own checksum.

    Args:
        run: The run.
        plan: Its plan.
        shard: The shard.
        names: The datasets.
        check_whole_file: Prove the rest of the file, too.

    Raises:
        ShardError: The file is damaged, unreadable, or belongs to another run.
    """
    path = shard_path(run, shard)
    lo, hi = plan.range(shard)
    not_as_committed = ShardError(f"{path} is not what was committed (checksum)", shard=shard)
    arrays: dict[str, NDArray[np.float32]] = {}
    checksums: dict[str, str] = {}
    try:
        if check_whole_file and not is_sealed(path):
            raise not_as_committed
        with h5py.File(path, "r") as file:
            if file.attrs["fingerprint"] != plan.fingerprint:
                raise ShardError(f"{path} belongs to another run", shard=shard)
            for name in names:
                arrays[name] = file[name][:]
                checksums[name] = file[name].attrs["checksum"]
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise ShardError(f"{path} cannot be read ({error})", shard=shard) from error
    for name in names:
        if checksums[name] != _checksum(arrays[name], lo, hi, plan.fingerprint):
            raise not_as_committed
    return arrays


def committed(run: RunDir, plan: ShardPlan) -> tuple[list[int], list[str]]:
    """Find the shards that are committed, and move damaged files to `shards/damaged/`.

    Returns:
        The shards that are proven, and a line of text for each damaged file.
    """
    refresh_folder(run.shards)
    existing_shards = [shard for shard in range(len(plan)) if shard_path(run, shard).exists()]

    def check(shard: int) -> ShardError | None:
        """Return what is wrong with a shard. The seal of the whole file covers the embeddings."""
        try:
            _read(run, plan, shard, ("scores",), check_whole_file=True)
        except ShardError as problem:
            return problem
        return None

    with ThreadPoolExecutor(N_CHECK_THREADS) as threads:
        problems = list(threads.map(check, existing_shards))
    proven_shards = []
    damage_reports = []
    for shard, problem in zip(existing_shards, problems, strict=True):
        if problem is None:
            proven_shards.append(shard)
        else:
            new_path = _move_damaged(run, shard)
            damage_reports.append(f"{problem}; moved to {new_path}")
    return proven_shards, damage_reports


def _move_damaged(run: RunDir, shard: int) -> Path:
    """Move a damaged shard to `shards/damaged/`, and return its new path."""
    path = shard_path(run, shard)
    folder = run.shards / "damaged"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob(f"{path.stem}.*")))
    return path.rename(folder / f"{path.stem}.{number}.h5")


def read_scores(
    run: RunDir, only: Sequence[int] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Read the scores of all distinct sequences, or those of some shards.

    Returns:
        Scores, float32 [n, 2], and which rows failed, bool [n]. The scores of those are NaN, which
        the engine writes only for rows that it has set aside and named.
    """
    plan = read_plan(run)
    refresh_folder(run.shards)
    shard_numbers = range(len(plan)) if only is None else only
    parts: list[NDArray[np.float32]] = [np.empty((0, 2), np.float32)]
    for shard in shard_numbers:
        arrays = _read(run, plan, shard, ("scores",))
        parts.append(arrays["scores"])
    scores = np.concatenate(parts)
    has_failed: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(scores), axis=1)
    return scores, has_failed


def store_of(run: RunDir, record: RunRecord) -> OrfStore:
    """Open the store that the run's shards refer to.

    Raises:
        InputError: The store cannot be read.
        ConfigError: The store holds other reads now.
    """
    store = OrfStore.open(run.root / record.store)
    if store.fingerprint != record.fingerprints["reads"]:
        problem = f"{store.path} holds other reads than the run was made from"
        raise ConfigError(f"{problem}; give it back its store")
    return store


def write_virtual_embeddings(run: RunDir) -> Path:
    """Write `embeddings.h5`: virtual datasets over the shards' own data, without a copy.

    The run directory can be moved. NaN marks rows that failed; HDF5 shows infinity for rows of a
    shard whose file is gone or cannot be opened.

    Returns:
        The path of the file.
    """
    plan = read_plan(run)
    widths = {"embeddings": _embedding_width(run, plan), "scores": 2}
    with atomic_hdf5(run.embeddings, libver="latest") as file:
        for name, width in widths.items():
            layout = h5py.VirtualLayout((plan.bounds[-1], width), np.float32)
            layout.dcpl.set_obj_track_times(False)  # the same shards give the same bytes
            for shard in range(len(plan)):
                lo, hi = plan.range(shard)
                path = f"{run.shards.name}/{shard_path(run, shard).name}"
                layout[lo:hi] = h5py.VirtualSource(path, name, (hi - lo, width))
            file.create_virtual_dataset(name, layout, fillvalue=np.float32(np.inf))
        file.attrs["fingerprint"] = plan.fingerprint
        file.attrs["about"] = (
            "a row for each distinct sequence: DNABERT-S, then ESM-2; "
            "orfs.h5 row_unique tells whose"
        )
    return run.embeddings


def _embedding_width(run: RunDir, plan: ShardPlan) -> int:
    """Return the width of the embeddings; 0 if no read has an open reading frame."""
    if len(plan) == 0:
        return 0
    with h5py.File(shard_path(run, 0), "r") as file:
        return int(file["embeddings"].shape[1])
