"""The nine stages composed, without Prefect: reads in, a run directory out.

`predict` is all of it. `stage_reads` (reads → store) runs once for any number of runs over the store; `classify` (store
→ verdicts) is one run: it prepares a `Job`, embeds what is not committed yet, writes the result files, and measures."""

import logging
import os
import re
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from virnuc_core import runfiles
from virnuc_core.config import INPUT_FIELDS, ClassifySpec, ReadsSpec, RunSpec
from virnuc_core.encoders.checkpoint import shape_of
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.head_card import score_thresholds, training_mismatches
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import ENCODERS
from virnuc_core.engine import shards
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import WORKER, local_workers, worker_specs
from virnuc_core.errors import ConfigError, InputError, RunMismatchError, ShardError
from virnuc_core.lease import require_lease
from virnuc_core.reads.sources import is_remote, local_files, redact_url
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_results
from virnuc_core.rundir import RUN_FILES, RunDir, check_output, check_room, discard, run_lock
from virnuc_core.runfiles import (
    Device,
    ModelFlops,
    RunSummary,
    digest,
    read_or_set_aside,
    read_record,
    write,
)
from virnuc_core.telemetry.live import pipeline_summary
from virnuc_core.telemetry.log import ended, read_journal, write_telemetry
from virnuc_core.telemetry.tables import StageClock

if TYPE_CHECKING:
    from virnuc_core.engine.cluster import Cluster

LINE_BYTES: Final = 40  # of a line in the result files, without the id
ERROR: Final = re.compile(
    r"error\b|\b(critical|fatal|traceback|segmentation fault|core dumped)\b", re.IGNORECASE
)
MIXED: Final = (
    "nodes of other GPU models or versions of torch were allowed: not reproducible to the last bit"
)
log = logging.getLogger(__name__)


def read_summary(run: RunDir) -> RunSummary | None:
    """The summary of a complete run; None when it is not complete. A damaged one is set aside."""
    summary = read_or_set_aside(
        run.summary if run.summary.exists() else run.former_summary, RunSummary
    )
    if summary is None:
        return None
    told = (summary.total_s, summary.n_reads, summary.threshold, summary.shards)
    return None if summary.stopped_at_limit or None in told else summary


def predict(spec: RunSpec, watch: RunMonitor | None = None) -> RunSummary:
    """Reads to result files in `spec.out`, which is held from before staging until the last file: stage and classify.

    Workers load the weights while the reads are staged. Returns counts of reads by fate and times in seconds. In
    `spec.out` are then the tables of docs/results.md, scores from 0 to 1, and `embeddings.h5` with `embeddings`,
    float32 [distinct sequences, DNA width + protein width]. A run that is complete is not computed again. `watch`
    hears of progress. Raises `InputError` for reads, `WeightsError`, `DeviceError`, `ConfigError` for settings and
    output, `RunMismatchError` where another run lies, `WorkerError`, `StorageError`; each says what to do."""
    run, spec = (
        RunDir(spec.out),
        spec.model_copy(update={n: tuple(map(redact_url, getattr(spec, n))) for n in INPUT_FIELDS}),
    )
    check_output(spec.out, models=spec.models, reads=local_files(spec.named), force=spec.force)
    with ExitStack() as held:
        held.enter_context(run_lock(run.root))
        pool = None
        if read_summary(run) is None:
            pool = held.enter_context(workers_for(spec, spec.out, warm=True))
        staging = stage_reads(stage_spec(spec, spec.models), run.store, force=spec.force)
        return classify(run, staging, spec, watch=watch, pool=pool)


def stage_spec(spec: ReadsSpec, models: Path) -> StageSpec:
    """What is staged of these inputs for the head of a models directory."""
    of = {name: getattr(spec, name) for name in ReadsSpec.model_fields}
    return StageSpec(model_length=shape_of(models, HeadShape).model_length, **of)


def stage_reads(spec: StageSpec, out: Path, *, force: bool = False) -> StageSummary:
    """Reads to the ORF store at `out`; reused, unless by `force`, when it already holds the same content, undamaged.
    Remote reads are fetched into `downloads` beside it.

    Errors: those of `stage`; `ConfigError` when a run is at work beside the store, `RunMismatchError` when a run of
    other reads was recorded there: its shards refer to its store."""
    beside = RunDir(out.parent)
    if any(map(is_remote, spec.named)):
        from virnuc_core.reads.remote import fetch_all  # few runs need it

        to = beside.root / "downloads"
        local = {
            name: fetch_all(getattr(spec, name), to, email=spec.email) for name in INPUT_FIELDS
        }
        spec = spec.model_copy(update=local)
    with run_lock(beside.root):
        return stage(spec, out, anew=force, expected=None if force else _recorded(beside))


def _recorded(run: RunDir) -> runfiles.RunRecord | None:
    """What a run was made from, as its record or else its store tells; None where nothing does."""
    record = runfiles.read_or_set_aside(run.record, runfiles.RunRecord)
    if record is None and run.plan.exists() and run.store.exists():
        with suppress(InputError):  # a damaged one, which proves nothing
            return runfiles.RunRecord(fingerprints={"reads": OrfStore.open(run.store).fingerprint})
    return record


def workers_for(spec: ClassifySpec, out: Path, *, keep: bool = False, warm: bool = False) -> Pool:
    """Workers for runs that are not staged yet, `warm` or not; `keep`: for several of them. Those of a cluster must see
    the folder `out`, or what is to hold it. Errors: `DeviceError`, `ConfigError`."""
    if spec.cluster is not None:
        return nodes_of(spec, out).pool(keep=keep, warm=warm)
    found = resolve(spec.devices)
    specs = worker_specs(spec.models, found, resolve_engine(spec.engine, found[0].kind))
    return Pool(specs, local_workers(WORKER, specs), keep=keep, warm=warm)


def nodes_of(spec: ClassifySpec, out: Path) -> "Cluster":
    """The nodes of the cluster of runs. Errors: `DeviceError`, `ConfigError`."""
    try:
        from virnuc_core.engine.cluster import Cluster  # few runs need it
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster {spec.cluster} needs {error.name}; install virnuc[cluster]"
        ) from error
    return Cluster(spec, (spec.models, spec.devices, spec.engine), out)


def model_flops(models: Path) -> ModelFlops:
    """Return the operations that a token takes in each encoder's linear layers; no ceilings.

    Raises:
        WeightsError: The models directory cannot be used.
    """
    flops = {}
    for encoder in ENCODERS:
        shape = shape_of(models, encoder.shape_type)
        flops[encoder.flops_field] = 2.0 * shape.linear_weights
    return ModelFlops.model_validate(flops)


def classify(
    run: RunDir,
    staging: StageSummary,
    spec: ClassifySpec,
    *,
    watch: RunMonitor | None = None,
    pool: Pool | None = None,
    flops: ModelFlops | None = None,
) -> RunSummary:
    """One run over a staged store: embed what is not committed, write the result files, telemetry and summary.json.

    A run that is complete is not computed again: its summary comes back. Its result files are written again from the
    shards when the threshold is another, or one of them is not as the summary lists it. Workers of `pool` are used if
    they fit; `flops` has the devices' ceilings where they were measured. Errors: those of `predict`; `InputError` also
    when reads are to be written and the input is not what was staged. Whatever was committed stays."""
    with run_lock(run.root), ExitStack() as held:
        started_s, before = time.monotonic(), None if spec.force else read_summary(run)
        if spec.cluster and pool is None and before is None:
            pool = held.enter_context(workers_for(spec, run.root))
        devices = (
            before.devices if before else tuple(one.device for one in pool.specs) if pool else None
        )
        head = shape_of(spec.models, HeadShape)
        threshold, uncertain = score_thresholds(head, spec)
        spec = spec.model_copy(update={"threshold": threshold})
        job = prepare(
            run, staging.store, spec, staging=staging, devices=devices if spec.cluster else None
        )
        digests = read_record(run).fingerprints
        said = (
            *training_mismatches(head, np.asarray(job.store.read_length), digests),
            *[MIXED] * spec.mixed_devices,
        )
        job = replace(
            job, flops=flops or model_flops(spec.models), uncertain=uncertain, remarks=said
        )
        for remark in said:
            log.warning("%s", remark)
        if before is None or job.todo:
            run.summary.unlink(missing_ok=True)
            run.former_summary.unlink(missing_ok=True)
            return _compute(job, staging, watch or RunMonitor(), started_s, pool)
        log.info("%s is complete: %d shards committed, nothing to compute", run.root, len(job.plan))
        sound, as_asked = _sound_files(job, before)
        if not as_asked:
            before = before.model_copy(update=_write_results(job, staging, StageClock(), sound))
            write(run.summary, before)
        run.former_summary.unlink(missing_ok=True)
        return before


def _sound_files(job: Job, summary: RunSummary) -> tuple[set[Path], bool]:
    """The result files that are what a summary lists, and whether they are all that is asked for."""
    run, spec = job.run, job.spec
    if summary.files is None or (summary.threshold, summary.uncertain) != (
        spec.threshold,
        job.uncertain,
    ):
        return set(), False
    sound, wrong = set(), []
    for path in run.listed:
        told, found = summary.files.get(path.name), digest(path)
        if found == told and (
            told or path == run.pairs_table
        ):  # which is not there where reads are single
            sound.add(path)
        elif path not in run.reads_of() or (told and (found or path in run.reads_of(spec.written))):
            # reads that were listed may have been taken elsewhere
            wrong.append(path.name)
    if wrong:
        said = "%s: %s not as the run left it; the result files are written again from its shards"
        log.warning(said, run.root, ", ".join(wrong))
    return sound, not wrong and not any(
        sound.isdisjoint(run.reads_of((verdict,))) for verdict in spec.written
    )


def prepare(
    run: RunDir,
    store: Path,
    spec: ClassifySpec,
    *,
    staging: StageSummary | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Job:
    """Decide all that a run depends on, write run.json and the plan, find out what is left to do. `staging`, if that
    is known: what the store was made of, and must still be. `devices`: of a cluster."""
    models, orfs = spec.models, OrfStore.open(store)
    if staging is not None and staging.fingerprint != orfs.fingerprint:
        raise RunMismatchError(
            f"{store} no longer holds the reads that were staged for this run; run it again"
        )
    head = shape_of(models, HeadShape)
    if (length := head.model_length) != orfs.model_length:
        cut = f"{store} was cut at {orfs.model_length}; stage again"
        raise ConfigError(f"the head in {models} is for length {length}, but {cut}")
    found = devices or resolve(spec.devices)
    resolved = resolve_engine(spec.engine, found[0].kind)
    fingerprints = {"reads": orfs.fingerprint, **fingerprint(models, resolved.precision)}
    widths = {"dna": head.dna_width, "protein": head.protein_width}
    if spec.force:
        discard(
            run.root, *RUN_FILES
        )  # what cannot be removed must not be mistaken for the new run's
    near = spec.threshold if shards.repeats_near_threshold(resolved, head) else None
    resolved, plan = shards.plan_run(
        orfs.protein_offsets, resolved, fingerprints, found[0].kind, near
    )
    fresh = runfiles.new_record(
        runfiles.RunRecord,
        found,
        spec=spec.parameters | spec.model_dump(mode="json", exclude={"parameters"}),
        inputs=() if staging is None else staging.by_file,
        pairs=None if staging is None else staging.pairs,
        model_length=length,
        widths=widths,
        fingerprints=fingerprints,
        resolved={**shards.result_settings(resolved, near), "kind": found[0].kind},
        store=os.path.relpath(store, run.root),
    )
    record = runfiles.resume_or_refuse(run, fresh)
    if (
        len(record.attempts) > 1 and (noted := read_journal(run.journal)) is not None
    ):  # of one that was killed
        written = write_telemetry(run.telemetry, noted[0], n_reads=orfs.n_reads, wall_s=noted[1])
        before, now = ended(record.attempts[-2], *noted, written), record.attempts[-1]
        record = record.model_copy(update={"attempts": (*record.attempts[:-2], before, now)})
    with suppress(ShardError):  # there is no plan, or a damaged one
        if not run.record.exists() and shards.read_plan(run).fingerprint != plan.fingerprint:
            problem = "has no readable run.json, and its plan is of another run; choose another directory or --force"
            raise RunMismatchError(f"{run.root} {problem}")
    shards.write_plan(run, plan)
    done, damaged = shards.committed(run, plan)
    for line in damaged:
        log.warning("%s; it will be computed again", line)
    left = tuple(sorted(set(range(len(plan))) - set(done)))
    if left or not (
        run.record.exists() and run.summary.exists()
    ):  # to look at what is complete is no attempt
        write(run.record, record)
        run.journal.unlink(missing_ok=True)  # the record has what it told
    lost = int(shards.read_scores(run, done)[1].sum())
    job = Job(
        run,
        orfs,
        found,
        resolved,
        plan,
        left,
        tuple(damaged),
        lost,
        spec,
        4 * (sum(widths.values()) + 2),
    )
    if left and resolved.commit:  # refused now rather than at the last shard
        lines = (2 * orfs.n_rows + orfs.n_reads) * (
            len(orfs.read_id_bytes) // max(1, orfs.n_reads) + LINE_BYTES
        )
        check_room(
            run.root, job.shard_bytes(left) + lines, f"{len(left)} shards and the result files"
        )
    return job


def _compute(
    job: Job, staging: StageSummary, watch: RunMonitor, started_s: float, pool: Pool | None
) -> RunSummary:
    """Embed, judge, write: the rest of a run that is not complete."""
    clock, span = StageClock(), None if staging.reused else (started_s - staging.total_s, started_s)
    clock.add("Sequence Chunking", staging.chunk_s, span)
    clock.add("Six-Frame Translation", staging.translate_s, span)
    clock.add("Rest of staging", max(0.0, staging.total_s - staging.chunk_s - staging.translate_s))
    clock.fuse("Nucleotide Splitting", "Six-Frame Translation")
    clock.fuse("Protein Splitting", "Six-Frame Translation")
    embedding = Embedding(job, watch, started_s)
    computed = embedding.run(pool)
    embedding.record_times(clock, computed)
    errors, orfs, said = (
        _log_errors(job.run),
        job.store,
        "lines of the workers' logs tell of errors; the first",
    )
    verdicts = _write_results(job, staging, clock, since_s=embedding.ended_s)
    own_s, record = time.monotonic() - started_s, runfiles.read_record(job.run)
    earlier = [attempt for attempt in record.attempts[:-1] if attempt.wall_s is not None]
    for attempt in earlier:
        clock.add("Earlier attempts: committed", attempt.worked_s)
        clock.add("Earlier attempts: lost", (attempt.wall_s or 0.0) - attempt.worked_s)
    wall_s = own_s + sum(attempt.wall_s or 0.0 for attempt in earlier)
    deaths = (*(line for attempt in earlier for line in attempt.deaths), *computed.deaths)
    summary = RunSummary(
        wall_s=wall_s,
        staging_s=staging.total_s,
        total_s=staging.total_s + wall_s,
        stages={stage.name: stage.seconds for stage in clock.times()},
        **asdict(orfs.counts),  # of which it tells some
        protein_tokens=int(orfs.protein_offsets[-1]) + 2 * orfs.n_uniques,
        **verdicts,
        devices=job.devices,
        workers=tuple(computed.records.values()),
        resumed=len(job.todo) < len(job.plan) or bool(earlier),
        shards=len(job.plan),
        shards_computed=len(job.todo),
        shards_reused=len(job.plan) - len(job.todo),
        rows_repeated=computed.n_repeated,
        restarts=len(deaths),
        deaths=deaths,
        telemetry=next((one.telemetry for one in reversed(earlier) if one.telemetry), None),
        damaged=job.damaged,
        log_errors=len(errors),
        warnings=(*job.remarks, *(f"{len(errors)} {said}: {error}" for error in errors[:1])),
        reduced_budgets={
            str(shard): divisor for shard, divisor in computed.reduced_budgets.items()
        },
        flops=job.flops,
    )
    written = (
        embedding.write(clock.times(), own_s, summary.sequences_per_hour) if job.todo else None
    )
    own = ended(record.attempts[-1], embedding.measured, own_s, computed.deaths, written)
    write(job.run.record, record.model_copy(update={"attempts": (*record.attempts[:-1], own)}))
    newest = own.telemetry or summary.telemetry
    summary = summary.model_copy(update={"telemetry": newest, "attempts": (*earlier, own)})
    job.run.journal.unlink(missing_ok=True)
    write(job.run.summary, summary)
    for line in (
        pipeline_summary(clock.times(), staging.total_s + wall_s).splitlines()
        if watch.alone
        else ()
    ):
        log.info("%s", line)
    return summary


def _log_errors(run: RunDir) -> list[str]:
    """Lines of the workers' logs that tell of errors, each with its file."""
    logs = {
        path.name: path.read_text("utf-8", "replace")
        for path in sorted((run.root / "logs").glob("worker-*.log"))
    }
    lines = (
        (name, line)
        for name, text in logs.items()
        for line in text.splitlines()
        if ERROR.search(line)
    )
    return [f"{name}: {' '.join(line.split())[:200]}" for name, line in lines]


def _write_results(
    job: Job,
    staging: StageSummary,
    clock: StageClock,
    kept: Collection[Path] = (),
    since_s: float = 0.0,
) -> dict[str, Any]:
    """Write the result files; returns what a summary says of them: another threshold changes nothing else.

    There is no summary.json meanwhile. Files of reads in `kept` stay. `since_s`: when the embedding ended."""
    run, spec = job.run, job.spec
    if not job.engine.commit:
        raise ConfigError(
            "commits are off, so there are no results; this setting is for measuring what commits cost"
        )
    scores, failed = shards.read_scores(run)
    began_s = time.monotonic()
    require_lease(run.root)
    if run.summary.exists():
        run.summary.replace(run.former_summary)
    for path in {*run.reads_of()} - {*kept}:
        if path.exists() and path not in run.reads_of(spec.written):
            said = "%s is of an earlier judgement and is removed; --write-viral, --write-nonviral write such anew"
            log.warning(said, path)
        path.unlink(missing_ok=True)
    results = write_results(
        run, job.store, scores, failed, spec.threshold, job.uncertain, spec.workers
    )
    shards.write_virtual_embeddings(run)
    if spec.written:
        from virnuc_core.reads.subsets import write_reads  # few runs need it

        write_reads(run, job.store, staging, spec.written)
    judged_s = began_s + results.predict_s
    clock.add("Model Prediction", results.predict_s, (began_s, judged_s))
    clock.add("Consensus Scoring", results.consensus_s, (judged_s, judged_s + results.consensus_s))
    names = ("fates", "pairs", "threshold", "rows_virus", "chunks_virus", "chunks_scored")
    files = {path.name: found for path in run.listed if (found := digest(path)) is not None}
    clock.add("Result files", time.monotonic() - since_s - results.predict_s - results.consensus_s)
    counted = {"files": files, "rows_set_aside": int(failed.sum()), "uncertain": job.uncertain}
    return {name: getattr(results, name) for name in names} | counted
