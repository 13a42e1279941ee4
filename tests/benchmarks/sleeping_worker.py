"""A worker that sleeps for as long as a GPU would compute, and commits real files of shards.

`bench_scale_simulated.py` runs it in the place of `virnuc_core.engine.worker`. It speaks the same
protocol over the same pipes, sends heartbeats, commits by the same function in a second thread, and
reports as many batches. Its embeddings are zeros.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.engine.process import Parent, Ready, WorkerSpec
from virnuc_core.engine.shards import Computed, ShardResult, ShardTask, commit, read_plan
from virnuc_core.lease import require_directory
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.tables import BatchRecord, ShardDone

RATE = "SIMULATED_TOKENS_PER_S"  # environment variables
WIDTH = "SIMULATED_WIDTH"
MAX_PENDING_COMMITS = 2  # as in the real worker
SPECIAL_TOKENS = 2  # of a protein: one at its start and one at its end
BATCH_TOKENS = 16_384
DNA_TOKENS_PER_PROTEIN_TOKEN = 0.68  # 35 tokens of DNABERT-S to 52 of ESM-2, for 150 bases
PROTEIN_SHARE = 0.97  # of the time of a shard


@dataclass(frozen=True, slots=True)
class Computation:
    """A shard that was computed, which means slept for, and is not committed yet."""

    task: ShardTask
    tokens: int
    started_s: float
    slept_s: float
    finished_s: float


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Sleep for each shard, until the parent says that no more will come."""
    tokens_per_s = float(os.environ[RATE])
    task = parent.receive()
    if not isinstance(task, ShardTask):
        return
    parent.send(Ready(record=_record(parent, spec)))
    computations: queue.Queue[Computation | None] = queue.Queue(MAX_PENDING_COMMITS)
    writer = threading.Thread(target=_commit_all, args=(parent, spec, computations))
    writer.start()
    while isinstance(task, ShardTask):
        started_s = time.monotonic()
        tokens = count_tokens(task)
        # Reading the store is no work of the device: the real worker does it ahead.
        slept_s = tokens / tokens_per_s
        time.sleep(max(0.0, started_s + slept_s - time.monotonic()))
        computations.put(Computation(task, tokens, started_s, slept_s, time.monotonic()))
        task = parent.receive()
    computations.put(None)
    writer.join()


def _record(parent: Parent, spec: WorkerSpec) -> dict[str, object]:
    """Return what the worker says about itself. Nothing was loaded."""
    ready_s = time.monotonic() - parent.started_s
    return {
        "device": spec.device.id,
        "pid": os.getpid(),
        "started_s": parent.started_s,
        "import_s": 0.0,
        "load_s": 0.0,
        "ready_s": ready_s,
        "waited_s": 0.0,
    }


@cache
def _protein_offsets(store: str) -> np.ndarray:
    """Return the positions of the proteins in a store."""
    return np.asarray(OrfStore.open(Path(store)).protein_offsets)


def count_tokens(task: ShardTask) -> int:
    """Return the ESM-2 tokens of a shard."""
    offsets = _protein_offsets(task.store)
    n_residues = int(offsets[task.hi] - offsets[task.lo])
    return n_residues + SPECIAL_TOKENS * (task.hi - task.lo)


def _commit_all(
    parent: Parent, spec: WorkerSpec, computations: queue.Queue[Computation | None]
) -> None:
    """Commit computed shards and answer their tasks. This is the function of a thread."""
    try:
        while (computation := computations.get()) is not None:
            task = computation.task
            began_s = time.monotonic()
            run = RunDir(Path(task.run))
            require_directory(run.root)
            commit(run, read_plan(run), task.shard, _result(task), make_folders=False)
            commit_s = time.monotonic() - began_s
            done = shard_done(
                task,
                spec.device.id,
                computation.tokens,
                started_s=computation.started_s,
                computed_s=computation.slept_s,
                finished_s=computation.finished_s,
                commit_s=commit_s,
            )
            parent.send(Computed(done=done))
    except Exception as error:  # noqa: BLE001 - the parent must learn of every error
        parent.give_up(error)


def _result(task: ShardTask) -> ShardResult:
    """Return embeddings of zeros, and scores that call every third sequence viral."""
    n_rows = task.hi - task.lo
    embeddings = np.zeros((n_rows, int(os.environ[WIDTH])), np.float32)
    is_viral = np.arange(task.lo, task.hi) % 3 == 0
    viral_scores = np.where(is_viral, 0.9, 0.1).astype(np.float32)
    return ShardResult(embeddings, np.stack([1 - viral_scores, viral_scores], axis=1))


def shard_done(
    task: ShardTask,
    device: str,
    tokens: int,
    *,
    started_s: float,
    computed_s: float,
    finished_s: float,
    commit_s: float,
) -> ShardDone:
    """Return what a worker reports of a shard, with as many batches as a real one would have.

    Args:
        task: The task.
        device: Id of the device.
        tokens: ESM-2 tokens of the shard.
        started_s: When its first batch was launched, `time.monotonic()`.
        computed_s: Seconds that the device computed.
        finished_s: When the last batch was computed.
        commit_s: Seconds that the commit took.
    """
    n_rows = task.hi - task.lo
    dna_tokens = int(tokens * DNA_TOKENS_PER_PROTEIN_TOKEN)
    shares = {PROTEIN.name: (tokens, PROTEIN_SHARE), DNA.name: (dna_tokens, 1 - PROTEIN_SHARE)}
    batches = []
    for encoder, (encoder_tokens, share) in shares.items():
        n_batches = max(1, -(-encoder_tokens // BATCH_TOKENS))  # rounded up
        for index in range(n_batches):
            batch = BatchRecord(
                device=device,
                encoder=encoder,
                shard=task.shard,
                index=index,
                rows=n_rows // n_batches,
                tokens=encoder_tokens // n_batches,
                slots=BATCH_TOKENS,
                wait_ms=0.1,
                arrived_s=started_s,
                launched_s=started_s + computed_s * index / n_batches,
                device_ms=1e3 * computed_s * share / n_batches,
            )
            batches.append(batch)
    return ShardDone(
        device=device,
        shard=task.shard,
        rows=n_rows,
        protein_tokens=tokens,
        dna_tokens=dna_tokens,
        started_s=started_s,
        finished_s=finished_s,
        dna_s=computed_s * (1 - PROTEIN_SHARE),
        protein_s=computed_s * PROTEIN_SHARE,
        head_s=0.0,
        commit_s=commit_s,
        batches=tuple(batches),
        viral=float(len(range(-task.lo % 3, n_rows, 3))),
    )
