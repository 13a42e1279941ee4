"""Shards: the unit of work, of commit and of loss.

A shard is a range of the store's unique sequences. Its file holds what `f(sequences, weights, settings)` gave, under a
fingerprint of all three and a checksum; it appears by rename, is never computed again, and alone remembers progress."""

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
SMALLEST_SHARE = 4  # the last shards shrink to 1/4, so that unequal devices end together
MOST_SHARDS: Final = 800  # a reader of embeddings.h5 opens them all: most systems let a process have 1,024 files open
LARGEST_SHARD: Final = (
    4_194_304  # tokens: a gigabyte of embeddings, held in memory until the commit
)
READ_BYTES: Final = 1 << 20
READERS: Final = 8  # threads that prove shards: digests let others run
FILL = 0.997  # of a whole number of batches: what rows of mixed lengths fill


def result_settings(engine: EngineSpec, near: float | None = None) -> dict[str, Any]:
    """The settings that may change result bytes; `near`: the threshold near which rows are embedded again, if any."""
    # the first two are always so; every fingerprint holds them
    settings = {"compile": False, "dedup": True} | {
        name: getattr(engine, name) for name in RESULT_FIELDS
    }
    return settings if near is None else settings | {"threshold": near}


def repeats(engine: EngineSpec, head: HeadShape) -> bool:
    """Whether rows near the threshold are embedded again. A head of random weights, as training begins with, decides
    nothing: embeddings must not depend on it."""
    return engine.precision == "int8" and not head.origin.startswith(RANDOM_ORIGIN)


class ShardPlan(Spec):
    """`shards/plan.json`: which uniques each shard holds. Shard i is `bounds[i]` … `bounds[i + 1]`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    fingerprint: str
    bounds: tuple[int, ...] = Field(min_length=1)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def range(self, shard: int) -> tuple[int, int]:
        """First unique and one past the last."""
        return self.bounds[shard], self.bounds[shard + 1]


class ShardTask(Message):
    """A shard for a worker to compute, or, looking for a row that ends workers, a part of one."""

    run: str
    store: str
    reads: str  # fingerprint of the store the plan was made for
    weights: dict[str, str] = Field(
        default_factory=dict
    )  # digests of the models that its run is made from
    max_not_finite: int = (
        0  # rows of the run that may turn out not to be finite; with more it stops
    )
    shard: int
    lo: int  # first unique, and one past the last
    hi: int
    divisor: int = 1  # of the token budgets
    skip: tuple[int, ...] = ()  # uniques left out
    threshold: float = DEFAULT_THRESHOLD  # of its run
    probe: bool = False  # compute and say so, commit nothing


class Computed(Message):
    """A worker's word that a shard is on disk; of a probe, that it was computed and the worker lives."""

    done: ShardDone | None  # None for a probe
    n_repeated: int = 0  # rows near the threshold that were embedded again


class ShardResult(NamedTuple):
    """What a shard's computation gave."""

    embeddings: NDArray[np.float32]  # [n, dna_width + protein_width], DNA first
    scores: NDArray[np.float32]  # [n, 2]: P(others), P(virus)


def make_plan(
    protein_offsets: NDArray[np.int64], shard_tokens: int, token_budget: int, fingerprint: str
) -> ShardPlan:
    """Cut the uniques into shards of at most `shard_tokens` ESM-2 tokens, smaller towards the end, never by device. A
    shard is a whole number of batches, nearly full, where it can be."""
    uniques = len(protein_offsets) - 1
    ends = np.asarray(protein_offsets, dtype=np.int64) + 2 * np.arange(
        uniques + 1
    )  # start and end token each
    bounds = [0]
    while bounds[-1] < uniques:
        done, total = int(ends[bounds[-1]]), int(ends[-1])
        size = min(
            shard_tokens,
            max(shard_tokens // SMALLEST_SHARE, (total - done) // (2 * SMALLEST_SHARE)),
        )
        if size >= token_budget:
            size = int(size // token_budget * token_budget * FILL)
        bounds.append(
            min(
                uniques,
                max(int(np.searchsorted(ends, done + size, side="right")) - 1, bounds[-1] + 1),
            )
        )
    return ShardPlan(bounds=tuple(bounds), fingerprint=fingerprint)


def plan_run(
    protein_offsets: NDArray[np.int64],
    engine: EngineSpec,
    prints: dict[str, str],
    kind: str,
    near: float | None = None,
) -> tuple[EngineSpec, ShardPlan]:
    """The plan of a run, and its settings: `shard_tokens` is raised to give at most `MOST_SHARDS`. Its fingerprint is
    of all that decides a result: reads and weights (their `prints`), result settings and kind of device."""
    asked = engine.shard_tokens
    while True:
        body = json.dumps(
            {"prints": prints, "settings": result_settings(engine, near), "kind": kind},
            sort_keys=True,
        )
        fingerprint = hashlib.sha256(body.encode()).hexdigest()
        plan = make_plan(protein_offsets, engine.shard_tokens, engine.token_budget, fingerprint)
        if len(plan) <= MOST_SHARDS or engine.shard_tokens >= LARGEST_SHARD:
            break
        larger = (
            engine.shard_tokens * len(plan) // (MOST_SHARDS - 30) + 1
        )  # the last shards are smaller
        engine = engine.model_copy(update={"shard_tokens": min(larger, LARGEST_SHARD)})
    if engine.shard_tokens != asked:
        log.info("shard_tokens %d → %d: %d shards", asked, engine.shard_tokens, len(plan))
    if len(plan) > MOST_SHARDS:
        log.warning(
            "%d shards: to read embeddings.h5, a process must open as many files (ulimit -n)",
            len(plan),
        )
    return engine, plan


def write_plan(run: RunDir, plan: ShardPlan) -> None:
    """Write `shards/plan.json`, where that does not stand there."""
    with suppress(ShardError):
        if read_plan(run) == plan:
            return
    write_text_atomically(run.plan, json.dumps(plan.model_dump()) + "\n")


def read_plan(run: RunDir) -> ShardPlan:
    """Read `shards/plan.json`; `ShardError` when it is missing or not one of ours."""
    try:
        return ShardPlan.model_validate_json(run.plan.read_bytes())
    except (OSError, ValueError) as error:
        raise ShardError(
            f"{run.plan}: not a readable shard plan ({error}); run again to write it anew"
        ) from error


def shard_path(run: RunDir, shard: int) -> Path:
    """Where a committed shard lies."""
    return run.shards / f"{shard:05d}.h5"


def _checksum(array: NDArray[np.float32], lo: int, hi: int, fingerprint: str) -> str:
    """Of one dataset, its place and its run: scores can be proven without reading the embeddings."""
    digest = hashlib.blake2b(
        f"{lo}:{hi}:{fingerprint}:{array.dtype.str}{array.shape}".encode(), digest_size=32
    )
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def commit(run: RunDir, plan: ShardPlan, shard: int, result: ShardResult) -> Path:
    """Make a shard's result permanent, the same one by the same bytes: write aside, flush, checksum, rename. Errors:
    `ShardError` when the result has not one row per unique; `StorageError` of the disk."""
    lo, hi = plan.range(shard)
    if len(result.embeddings) != hi - lo or len(result.scores) != hi - lo:
        raise ShardError(f"{len(result.embeddings)} rows for {hi - lo} sequences", shard=shard)
    path = shard_path(run, shard)
    with atomic_hdf5(
        path, lambda body: sealed(SEALED_AS, [body]), libver="latest", userblock_size=SEAL_BYTES
    ) as file:
        for name, array in (("embeddings", result.embeddings), ("scores", result.scores)):
            file.create_dataset(name, data=array).attrs["checksum"] = _checksum(
                array, lo, hi, plan.fingerprint
            )
        file.attrs.update(
            schema_version=SCHEMA_VERSION, shard=shard, range=[lo, hi], fingerprint=plan.fingerprint
        )
    return path


def is_sealed(path: Path) -> bool:
    """Whether a shard's file, wherever it lies, is what was committed, to the last bit. Errors: `OSError`."""
    with path.open("rb") as file:
        return file.read(SEAL_BYTES) == sealed(SEALED_AS, iter(partial(file.read, READ_BYTES), b""))


def read_shard(run: RunDir, plan: ShardPlan, shard: int) -> ShardResult:
    """A committed shard, proven to the last bit; `ShardError` says what is wrong with the file."""
    return ShardResult(*_read(run, plan, shard, ("embeddings", "scores"), whole=True))


def look_anew(folder: Path) -> None:
    """Let what other machines did in a folder be seen here: a network file system shows what it knew before, for a
    minute or so, until this machine changes something there itself."""
    with suppress(OSError):  # where nothing may be written nothing is being written
        (folder / ".look").touch()
        (folder / ".look").unlink()


def _read(
    run: RunDir, plan: ShardPlan, shard: int, names: Sequence[str], whole: bool = False
) -> list[Any]:
    """Some datasets of a shard, float32, each proven by its own checksum, or the `whole` file proven."""
    path = shard_path(run, shard)
    lo, hi = plan.range(shard)
    try:
        if whole and not is_sealed(path):
            raise ShardError(f"{path} is not what was committed (checksum)", shard=shard)
        with h5py.File(path, "r") as file:
            if file.attrs["fingerprint"] != plan.fingerprint:
                raise ShardError(f"{path} belongs to another run", shard=shard)
            arrays: list[NDArray[np.float32]] = [file[name][:] for name in names]
            kept = [file[name].attrs["checksum"] for name in names]
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise ShardError(f"{path} cannot be read ({error})", shard=shard) from error
    if kept != [_checksum(array, lo, hi, plan.fingerprint) for array in arrays]:
        raise ShardError(f"{path} is not what was committed (checksum)", shard=shard)
    return arrays


def committed(run: RunDir, plan: ShardPlan) -> tuple[list[int], list[str]]:
    """Shards that are proven committed, and a word on each damaged file, which has been moved to `shards/damaged/`."""
    good, moved = [], []
    look_anew(run.shards)
    there = [shard for shard in range(len(plan)) if shard_path(run, shard).exists()]
    with ThreadPoolExecutor(
        READERS
    ) as threads:  # the seal, of the whole file, speaks for the embeddings, too
        looks = {
            shard: threads.submit(_read, run, plan, shard, ("scores",), whole=True)
            for shard in there
        }
    for shard, look in looks.items():
        try:
            look.result()
            good.append(shard)
        except ShardError as problem:
            source, folder = shard_path(run, shard), run.shards / "damaged"
            folder.mkdir(exist_ok=True)
            number = sum(1 for _ in folder.glob(f"{source.stem}.*"))
            moved.append(
                f"{problem}; moved to {source.rename(folder / f'{source.stem}.{number}.h5')}"
            )
    return good, moved


def read_scores(
    run: RunDir, only: Sequence[int] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Scores of all uniques, or those of some shards, float32 [n_uniques, 2], and which failed, bool [n_uniques]: those
    with NaN, which the engine writes only for rows it has set aside and named."""
    plan = read_plan(run)
    look_anew(run.shards)
    parts = [
        _read(run, plan, shard, ("scores",))[0]
        for shard in (range(len(plan)) if only is None else only)
    ]
    scores = np.concatenate([np.empty((0, 2), np.float32), *parts])
    return scores, np.isnan(scores).any(axis=1)


def store_of(run: RunDir, record: RunRecord) -> OrfStore:
    """The store that the run's shards refer to. Errors: `InputError`; `ConfigError` when it holds other reads now."""
    store = OrfStore.open(run.root / record.store)
    if store.fingerprint != record.fingerprints["reads"]:
        raise ConfigError(
            f"{store.path} holds other reads than the run was made from; give it back its store"
        )
    return store


def write_virtual_embeddings(run: RunDir) -> Path:
    """Write `embeddings.h5`: a virtual dataset over the shards' own data, no copy; the run can be moved. NaN marks what
    failed; HDF5 shows infinity for rows of a shard's file that is gone or cannot be opened."""
    plan = read_plan(run)
    with atomic_hdf5(run.embeddings, libver="latest") as file:
        width = 0  # where no read has an open frame
        if len(plan):
            with h5py.File(shard_path(run, 0), "r") as first:
                width = first["embeddings"].shape[1]
        for name, columns in (("embeddings", width), ("scores", 2)):
            layout = h5py.VirtualLayout((plan.bounds[-1], columns), np.float32)
            layout.dcpl.set_obj_track_times(False)  # the same shards, the same bytes
            for shard in range(len(plan)):
                lo, hi = plan.range(shard)
                path = f"{run.shards.name}/{shard_path(run, shard).name}"
                layout[lo:hi] = h5py.VirtualSource(path, name, (hi - lo, columns))
            file.create_virtual_dataset(name, layout, fillvalue=np.float32(np.inf))
        file.attrs["fingerprint"] = plan.fingerprint
        file.attrs["about"] = (
            "a row for each distinct sequence: DNABERT-S, then ESM-2; orfs.h5 row_unique tells whose"
        )
    return run.embeddings
