"""Embed a sample of the sequences in fp32, for comparison with runs in lower precision."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core.checked_files import SEAL_BYTES, open_checked_hdf5
from virnuc_core.config import EngineSpec
from virnuc_core.encoders.registry import count_protein_tokens
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.engine.shards import EXACT_SEAL, ShardPlan, make_plan, read_shard, write_plan
from virnuc_core.errors import DamagedFileError
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_covered, write_covered_reads
from virnuc_core.rundir import EXACT_FILES, SHARD_FILES, RunDir, atomic_hdf5, discard, run_lock
from virnuc_core.runfiles import ListedFiles, changed_files, digest, listed_digests, write
from virnuc_core.system_errors import path_exists, read_with_retries
from virnuc_core.tools.bench import Bench

# Tokens of a batch in fp32, whose activations are large. A shard has at least as many.
EXACT_TOKENS: Final = 4_096
log = logging.getLogger(__name__)
# The sample is taken from so many places, so that no part of the reads dominates. Each place
# gives a stretch of neighbouring sequences, which are a shard.
STRETCHES: Final = 64


def measure_precision(out: Path, bench: Bench, engine: EngineSpec, sequences: int) -> bool:
    """Embed some sequences in fp32 by plain torch on one device, unless they are already there.

    Writes two kinds of files to `out/fp32`: `embeddings.h5` with the embeddings and the numbers of
    the sequences (`uniques`), and the result files of the reads whose sequences were all embedded.
    Embeddings of an earlier call are removed if the runs compute in fp32 themselves or if there
    are no sequences.

    Args:
        out: The directory of the validation.
        bench: The reads, models and devices; the first device is used.
        engine: Settings of the runs that are compared.
        sequences: About how many sequences to embed.

    Returns:
        Whether there are embeddings in fp32.

    Raises:
        VirnucError: The device or its worker failed.
    """
    run = RunDir(out / EXACT_FILES)
    devices = resolve(bench.devices)
    is_fp32 = resolve_engine(engine, devices).precision == "fp32"
    if is_fp32 or not OrfStore.open(bench.store).n_uniques:
        run.embeddings.unlink(missing_ok=True)  # it was made for runs of another precision
        return False
    first_device = bench.devices.model_copy(update={"ids": bench.devices.ids[:1]})
    exact_bench = replace(bench, devices=first_device)
    exact_engine = engine.model_copy(
        update={
            "precision": "fp32",
            "attention": "reference",
            "gelu": "exact",
            "token_budget": EXACT_TOKENS,
            "dna_token_budget": EXACT_TOKENS,
            "shard_tokens": EXACT_TOKENS,
        }
    )
    identity = exact_bench.fingerprint(exact_engine, sequences, by_model=True)
    with run_lock(run.root):
        if _embeddings_identity(run) != identity:
            embed_sample(run, exact_bench.job(run, exact_engine), sequences, identity)
    return True


def _embeddings_identity(run: RunDir) -> str | None:
    """Return the digest of what the stored embeddings were made of.

    Returns:
        None if there are none, or if a file is not as it was written. A warning names the file.
    """
    if not path_exists(run.embeddings):
        return None

    def read_fingerprint() -> str:
        """Read the digest from the file. It is called again if the system fails to read it."""
        with open_checked_hdf5(run.embeddings, EXACT_SEAL) as file:
            return str(file.attrs["fingerprint"])

    try:
        fingerprint = read_with_retries(run.embeddings, read_fingerprint)
    except DamagedFileError as error:
        log.warning("%s; it is computed again", error)
        return None
    changed = changed_files(run.root, listed_digests(run))
    if changed:
        names = ", ".join(changed)
        log.warning("%s: %s not as they were written; they are computed again", run.root, names)
        return None
    return fingerprint


def embed_sample(run: RunDir, job: Job, sequences: int, identity: str) -> None:
    """Embed a sample of the sequences, and write the embeddings and the result files.

    Whole shards are embedded: the sequences are cut into small shards, and evenly spaced ones are
    computed. The files of the shards are removed at the end.

    Args:
        run: The run directory to write.
        job: The inputs, settings and devices. Its plan, that is, how the sequences are cut into
            shards, is replaced.
        sequences: About how many sequences to embed.
        identity: Digest of what the embeddings are made of, which is written beside them.
    """
    store = job.store
    plan = _plan_stretches(store, sequences, job.plan.fingerprint)
    write_plan(run, plan)
    n_wanted = -(-sequences * len(plan) // store.n_uniques)  # shards, rounded up
    chosen_shards = _spread_shards(len(plan), n_wanted)
    sample_job = replace(job, plan=plan, todo=chosen_shards)
    Embedding(sample_job, RunMonitor(), time.monotonic()).run()

    results = [read_shard(run, plan, shard) for shard in chosen_shards]
    uniques = np.concatenate([np.arange(*plan.range(shard)) for shard in chosen_shards])
    scores = np.full((store.n_uniques, 2), np.nan, dtype=np.float32)
    scores[uniques] = np.concatenate([result.scores for result in results])
    is_embedded = np.zeros(store.n_uniques, dtype=bool)
    is_embedded[uniques] = True
    write_embedded_reads(run, store, scores, is_embedded)
    with atomic_hdf5(run.embeddings, EXACT_SEAL.seal_of, userblock_size=SEAL_BYTES) as file:
        file["embeddings"] = np.concatenate([result.embeddings for result in results])
        file["uniques"] = uniques
        file.attrs["fingerprint"] = identity
    discard(run.root, *SHARD_FILES)


def _plan_stretches(store: OrfStore, sequences: int, fingerprint: str) -> ShardPlan:
    """Return a plan, that is, how the sequences are cut into shards, with small shards.

    About `STRETCHES` shards hold `sequences` sequences. A shard fills at least one batch.
    """
    n_tokens = count_protein_tokens(store)
    tokens_to_embed = n_tokens * sequences // store.n_uniques
    shard_tokens = max(EXACT_TOKENS, tokens_to_embed // STRETCHES)
    return make_plan(
        store.protein_offsets, shard_tokens, token_budget=EXACT_TOKENS, fingerprint=fingerprint
    )


def _spread_shards(n_shards: int, n_wanted: int) -> tuple[int, ...]:
    """Return the numbers of shards to compute: evenly spaced, and at least two if there are two."""
    n_chosen = min(n_shards, max(2, n_wanted))
    shard_numbers = np.linspace(0, n_shards - 1, n_chosen).astype(int)
    return tuple(np.unique(shard_numbers).tolist())


def write_embedded_reads(
    run: RunDir, store: OrfStore, scores: NDArray[np.float32], is_embedded: NDArray[np.bool_]
) -> None:
    """Write the result files of those reads whose sequences all belong to the sample.

    A read has a row for each of its translated frames, and a row has a sequence. Reads without a
    row are left out. A row whose scores are not finite is named in `failed.tsv`; its read is not
    left out, so that a comparison counts the row as missing.

    Args:
        run: The run directory to write.
        store: The store of the reads.
        scores: Scores of the distinct sequences, [uniques, 2].
        is_embedded: Marks the distinct sequences of the sample, [uniques].
    """
    row_uniques = np.asarray(store.row_unique)
    is_row_embedded = is_embedded[row_uniques]
    n_embedded_rows = np.bincount(store.row_read, is_row_embedded, store.n_reads)  # of each read
    is_covered = (n_embedded_rows == store.read_rows) & (n_embedded_rows > 0)
    is_row_covered = is_covered[np.asarray(store.row_read)]
    scores_of_rows = scores[row_uniques[is_row_covered]]
    n_set_aside = write_covered(run, store, is_covered, scores_of_rows)
    write_covered_reads(run, store, is_covered, scores_of_rows)
    if n_set_aside:
        log.warning(
            "%s: %d rows are not finite in fp32; they are in %s",
            run.root,
            n_set_aside,
            run.failed_rows.name,
        )
    tables = (run.predictions, run.consensus, run.reads_table, run.failed_rows)
    digests = {path.name: digest(path, run.root) for path in tables}
    write(run.digests, ListedFiles.model_validate({"files": digests}))
