"""The whole method without Prefect: reads in, a run directory out.

`predict` does everything. It calls `stage_reads` (reads → store), which runs once for any number of
runs over the store, and `classify` (store → verdicts), which is one run. `classify` prepares a
`Job`, embeds the shards that are not committed yet, writes the result files, and records what was
measured.
"""

import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from virnuc_core import runfiles
from virnuc_core.command_time import note_finished_run
from virnuc_core.config import INPUT_FIELDS, ClassifySpec, EngineSpec, Precision, ReadsSpec, RunSpec
from virnuc_core.encoder_names import Molecule
from virnuc_core.encoders.checkpoint import part_folder, shape_of, weight_facts
from virnuc_core.encoders.composition import (
    compare_with_training,
    read_composition,
    write_composition,
)
from virnuc_core.encoders.digests import accept_older_digest, fingerprint
from virnuc_core.encoders.head_card import (
    domain_note,
    require_domain,
    score_thresholds,
    training_mismatches,
)
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.registry import ENCODERS, HEAD, count_protein_tokens
from virnuc_core.engine import shards
from virnuc_core.engine.devices import auto_remark, resolve, resolve_engine
from virnuc_core.engine.embedding import Embedding, Job, RunMonitor
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import WORKER, local_workers, worker_specs
from virnuc_core.errors import (
    ConfigError,
    InputError,
    RunMismatchError,
    ShardError,
    UnsafeFileError,
    missing_package_error,
)
from virnuc_core.input_names import is_remote
from virnuc_core.lease import require_lease
from virnuc_core.reads.mate_files import refuse_one_file_as_both_mates
from virnuc_core.reads.sources import local_files, redact_url
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_results
from virnuc_core.run_costs import embedding_bytes
from virnuc_core.rundir import RUN_FILES, RunDir, check_output, check_room, discard, run_lock
from virnuc_core.runfiles import (
    Attempt,
    Device,
    FileDigest,
    ModelFlops,
    RunSummary,
    digest,
    is_as_recorded,
    read,
    read_or_set_aside,
    read_record,
    write,
)
from virnuc_core.safe_files import read_file, remove_file
from virnuc_core.system_errors import list_folder, path_exists
from virnuc_core.telemetry.tables import StageClock

if TYPE_CHECKING:
    from virnuc_core.engine.cluster import Cluster

LINE_BYTES: Final = 40  # of a line in the result files, without the id
MAX_LOG_BYTES: Final = 1 << 30  # of the log of a worker, which is usually a few kilobytes
MAX_SHOWN_LINE: Final = 200  # characters of a log line that a warning quotes
ERROR_WORDS: Final = re.compile(
    r"error\b|\b(critical|fatal|traceback|segmentation fault|core dumped)\b", re.IGNORECASE
)
MIXED_DEVICES: Final = (
    "nodes of other GPU models or versions of torch were allowed: not reproducible to the last bit"
)
NO_CHECKPOINTS: Final = (
    "checkpoints were disabled: the run has no embeddings, and starting it again computes all of it"
)
log = logging.getLogger(__name__)


def read_summary(run: RunDir, *, set_aside: bool = True) -> RunSummary | None:
    """Return the summary of a run if the run is complete, otherwise None.

    Args:
        run: The run directory.
        set_aside: Rename a summary file that is damaged, with a warning. It counts as missing then.
            If false, nothing is changed.

    Raises:
        ConfigError: The file is damaged, and `set_aside` is false.
        UnsafeFileError: It is no regular file.
        UnreadableError: The system cannot read it.
    """
    # While result files are written again, the summary has another name.
    path = run.summary if path_exists(run.summary) else run.former_summary
    if set_aside:
        summary = read_or_set_aside(path, RunSummary)
    elif path_exists(path):
        summary = read(path, RunSummary)
    else:
        summary = None
    if summary is None or summary.stopped_at_limit:
        return None
    # Only a run that reached its end has these fields.
    required_fields = (summary.total_s, summary.n_reads, summary.threshold, summary.shards)
    if None in required_fields:
        return None
    return summary


def predict(spec: RunSpec, monitor: RunMonitor | None = None) -> RunSummary:
    """Decide which reads are viral.

    Reads are staged while the workers load the weights. A complete run is not computed again, and
    an interrupted one continues with its unfinished shards.

    Args:
        spec: Reads, models, devices and settings. The directory `spec.out` is held until the end.
        monitor: Receives the progress of the run. Without it, nothing is reported.

    Returns:
        The summary: counts of reads by fate, and times in seconds. As a side effect, `spec.out`
        contains the tables described in docs/results.md, with scores from 0 to 1, and
        `embeddings.h5` with the dataset `embeddings`, float32 [distinct sequences, DNA width +
        protein width].

    Raises:
        InputError: Reads cannot be used.
        WeightsError: The models cannot be used.
        DeviceError: A device cannot be used.
        ConfigError: Settings or the output directory cannot be used.
        RunMismatchError: The directory has another run.
        WorkerError: The workers failed for good.
        StorageError: The disk refuses.
    """
    run = RunDir(spec.out)
    # The signature of a signed address is a secret, and the settings are written to run.json.
    redacted = {name: tuple(map(redact_url, getattr(spec, name))) for name in INPUT_FIELDS}
    spec = spec.model_copy(update=redacted)
    refuse_one_file_as_both_mates(spec)
    check_output(spec.out, models=spec.models, reads=local_files(spec.all_inputs), force=spec.force)
    with ExitStack() as resources:
        resources.enter_context(run_lock(run.root))
        pool = None
        # A complete run needs no workers. (If it is started over, `classify` starts some.)
        if read_summary(run) is None:
            # The workers load the weights while this process stages the reads.
            pool = resources.enter_context(workers_for(spec, spec.out, warm=True))
        staging = stage_reads(stage_spec(spec, spec.models), run.store, force=spec.force)
        return classify(run, staging, spec, monitor=monitor, pool=pool)


def stage_spec(spec: ReadsSpec, models: Path) -> StageSpec:
    """Return the staging settings for these reads and the classifier of a models directory.

    The classifier decides the length of the chunks into which reads are cut.

    Args:
        spec: Which reads are read, and how.
        models: The models directory.

    Raises:
        WeightsError: The models directory cannot be used.
    """
    fields = {name: getattr(spec, name) for name in ReadsSpec.model_fields}
    return StageSpec(model_length=shape_of(models, HeadShape).model_length, **fields)


def stage_reads(spec: StageSpec, out: Path, *, force: bool = False) -> StageSummary:
    """Stage reads into a store of open reading frames.

    If `out` is an undamaged store of the same reads and settings, it is used again. Remote reads
    are downloaded into the folder `downloads` beside the store.

    Args:
        spec: The reads, and how they are parsed and cut.
        out: Path of the store.
        force: Stage again even if the store could be used.

    Returns:
        Counts and times of staging, and the path and fingerprint of the store.

    Raises:
        InputError: Reads cannot be used.
        ConfigError: Another run is at work beside the store.
        RunMismatchError: A run of other reads was recorded there; its shards refer to its store.
    """
    run = RunDir(out.parent)
    if any(map(is_remote, spec.all_inputs)):
        from virnuc_core.reads.remote import fetch_all  # imported late: few runs need it

        downloads = run.root / "downloads"
        local_inputs = {}
        for name in INPUT_FIELDS:
            local_inputs[name] = fetch_all(getattr(spec, name), downloads, email=spec.email)
        spec = spec.model_copy(update=local_inputs)
    with run_lock(run.root):
        recorded_run = None if force else _recorded_run(run)
        return stage(spec, out, rebuild=force, recorded_run=recorded_run)


def _recorded_run(run: RunDir) -> runfiles.RunRecord | None:
    """Return the record of the run in this directory, or None if there is no run.

    If run.json is missing but shards were planned, the record has only the fingerprint of the
    store. That is enough to refuse other reads.
    """
    record = runfiles.read_or_set_aside(run.record, runfiles.RunRecord)
    if record is None and path_exists(run.plan) and path_exists(run.store):
        with suppress(InputError):  # a damaged store proves nothing
            return runfiles.RunRecord(fingerprints={"reads": OrfStore.open(run.store).fingerprint})
    return record


def workers_for(spec: ClassifySpec, out: Path, *, keep: bool = False, warm: bool = False) -> Pool:
    """Start worker processes, one per device, before the reads are staged.

    Args:
        spec: Models, devices and settings.
        out: The run directory. Nodes of a cluster must see it, or the folder that will contain it.
        keep: Do not end the workers after a run, so that the next run can use them.
        warm: Load the weights immediately. Otherwise a worker loads them with its first shard.

    Returns:
        The pool of workers. The caller closes it.

    Raises:
        DeviceError: A device or a cluster cannot be used.
        ConfigError: The cluster's settings cannot be used.
    """
    if spec.cluster is not None:
        return nodes_of(spec, out).pool(keep=keep, warm=warm)
    devices = resolve(spec.devices)
    engine = resolve_engine(spec.engine, devices)
    specs = worker_specs(spec.models, devices, engine)  # what each worker process is started with
    return Pool(specs, local_workers(WORKER, specs), keep=keep, warm=warm)


def nodes_of(spec: ClassifySpec, out: Path) -> "Cluster":
    """Connect to the cluster that the settings name.

    Args:
        spec: Models, devices and settings; `spec.cluster` is set.
        out: The run directory.

    Returns:
        The cluster. Its method `pool` starts the workers.

    Raises:
        DeviceError: The cluster cannot be used.
        ConfigError: Its settings cannot be used, or a package is missing.
    """
    try:
        from virnuc_core.engine.cluster import Cluster  # imported late: few runs need it
    except ModuleNotFoundError as error:
        raise missing_package_error(error.name, "cluster", f"cluster {spec.cluster}") from error
    return Cluster(spec, spec.models, spec.devices, spec.engine, out)


def model_flops(models: Path) -> ModelFlops:
    """Return the FLOPs per token in the linear layers of each encoder.

    The measured ceilings of the devices, which `ModelFlops` can also hold, stay empty.

    Args:
        models: The models directory. Only the sizes of the models are read.

    Raises:
        WeightsError: The models directory cannot be used.
    """
    flops: dict[Molecule, float] = {}
    for encoder in ENCODERS:
        shape = shape_of(models, encoder.shape_type)
        # Each weight takes part in one multiplication and one addition.
        flops[encoder.molecule] = 2.0 * shape.linear_weights
    return ModelFlops(protein_per_token=flops["protein"], dna_per_token=flops["dna"])


def classify(
    run: RunDir,
    staging: StageSummary,
    spec: ClassifySpec,
    *,
    monitor: RunMonitor | None = None,
    pool: Pool | None = None,
    flops: ModelFlops | None = None,
) -> RunSummary:
    """Classify the reads of a store: embed, score, vote, and write all files of the run.

    Shards that are committed are not computed again. If the run is already complete, nothing is
    embedded. Its result files are written again from the shards if the threshold has changed, or
    if the digest of a result file differs from the digest in summary.json.

    Args:
        run: The run directory.
        staging: The staged reads.
        spec: Models, devices and settings.
        monitor: Receives the progress of the run.
        pool: Running workers. They are used if they have the same models and settings; otherwise
            new ones are started.
        flops: FLOPs per token with the devices' ceilings, if those were measured.

    Returns:
        The summary, as it is in summary.json.

    Raises:
        InputError: Viral or other reads are requested as files, and the input has changed since
            it was staged.
        VirnucError: Every error that `predict` lists. Committed shards are kept.
    """
    with run_lock(run.root), ExitStack() as resources:
        started_s = time.monotonic()
        summary = None if spec.force else read_summary(run)
        if spec.cluster and pool is None and summary is None:
            pool = resources.enter_context(workers_for(spec, run.root))
        head = shape_of(spec.models, HeadShape)
        threshold, uncertain = score_thresholds(head, spec)
        spec = spec.model_copy(update={"threshold": threshold})
        # `spec.cluster` names other machines, of which only their workers know the devices. Without
        # it the run uses devices of this machine, which `prepare` finds.
        devices = _cluster_devices(summary, pool) if spec.cluster else None
        job = prepare(run, staging.store, spec, staging=staging, devices=devices)
        job = replace(
            job,
            flops=flops or model_flops(spec.models),
            uncertain=uncertain,
            remarks=_remarks(job, head),
            device_remark=_device_remark(job, pool),
        )
        for warning in _verdict_warnings(job):
            log.warning("%s", warning)
        if summary is None or job.todo:
            # A summary marks a complete run, and this one is not complete now. The former summary
            # is what the summary is called while result files are written again.
            run.summary.unlink(missing_ok=True)
            run.former_summary.unlink(missing_ok=True)
            return _compute(job, staging, monitor or RunMonitor(), started_s, pool)
        log.info("%s is complete: %d shards committed, nothing to compute", run.root, len(job.plan))
        files = _check_files(job, summary)
        if not files.are_complete:
            # The summary keeps the times of the first writing, so these are not used.
            unused_clock = StageClock()
            scores = shards.read_scores(job.run)
            changes = _write_results(job, staging, scores, unused_clock, files.sound)
            summary = summary.model_copy(update=changes | _domain_facts(job))
            write(run.summary, summary)
        run.former_summary.unlink(missing_ok=True)
        if not summary.origins:
            # An older version made the run. Its weights are these, so this tells what they are.
            summary = summary.model_copy(update=_trust_facts(job))
        return summary


def _cluster_devices(summary: RunSummary | None, pool: Pool | None) -> tuple[Device, ...] | None:
    """Return the devices of a run on a cluster.

    A complete run has them in its summary. Otherwise they are the devices of the workers. None if
    neither is known.
    """
    if summary is not None:
        return summary.devices
    if pool is not None:
        return tuple(spec.device for spec in pool.specs)
    return None


def _device_remark(job: Job, pool: Pool | None) -> str:
    """Return why `auto` takes CPU cores, a sentence for the summary; empty if it does not.

    The sentence was logged when the devices were chosen.

    Args:
        job: The run.
        pool: Running workers, which know the choice on a cluster.
    """
    if job.spec.cluster:
        return pool.device_remark if pool is not None else ""
    if job.devices[0].kind == "cuda":
        return ""
    return auto_remark(job.spec.devices)


def _remarks(job: Job, head: HeadShape) -> tuple[str, ...]:
    """Return how the reads and encoders differ from those that the classifier was trained on.

    Each sentence stands in the answer of the run, before its figures are used.
    """
    digests = read_record(job.run).fingerprints
    return training_mismatches(head, np.asarray(job.store.read_length), digests)


def _verdict_warnings(job: Job) -> tuple[str, ...]:
    """Return warnings about the verdicts of a run: unlike reads, and mixed devices."""
    warnings = list(job.remarks)
    if job.compared.sample.is_outside:
        warnings.append(job.compared.sample.remark)
    if job.spec.mixed_devices:
        warnings.append(MIXED_DEVICES)
    return tuple(warnings)


def _trust_facts(job: Job) -> dict[str, Any]:
    """Return the fields of the summary from which `answer` tells whether to trust the verdicts."""
    weights = weight_facts(job.spec.models)
    return {
        "n_short": job.store.counts.n_short,
        "model_length": job.store.model_length,
        "origins": weights.origins,
        "has_card": weights.has_card,
        **_domain_facts(job),
    }


def _domain_facts(job: Job) -> dict[str, Any]:
    """Return the fields of the summary that say how the reads compare with the training."""
    remarks = job.remarks
    if job.domain_note:
        remarks = (*remarks, job.domain_note)
    return {"familiarity": job.compared.sample, "remarks": remarks}


@dataclass(frozen=True, slots=True)
class _ResultFiles:
    """Comparison of the result files of a complete run with their digests in the summary."""

    sound: set[Path]  # files whose digest is the recorded one
    are_complete: bool  # all requested files exist and are sound: nothing has to be written


def _check_files(job: Job, summary: RunSummary) -> _ResultFiles:
    """Compare the digests of a complete run's result files with those in its summary.

    Files that were changed or are missing are named in a warning.
    """
    run = job.run
    spec = job.spec
    recorded_rule = (summary.threshold, summary.uncertain)
    # Another threshold changes the verdicts, so all files have to be written again.
    if summary.files is None or recorded_rule != (spec.threshold, job.uncertain):
        return _ResultFiles(set(), are_complete=False)
    sound = set()
    wrong_names = []
    for path in run.listed:
        recorded_digest = summary.files.get(path.name)
        # A run of single reads has no table of pairs. Then both digests are None.
        # Nor has a run whose classifier says nothing of its training a copy of that.
        may_be_absent = path in (run.pairs_table, run.composition)
        is_sound = is_as_recorded(path, recorded_digest, run.root)
        if is_sound and (recorded_digest or may_be_absent):
            sound.add(path)
            continue
        is_read_file = path in run.reads_of()
        is_requested = path in run.reads_of(spec.written_verdicts)
        # The user may move viral.fasta and the like elsewhere. A missing one is wrong only if this
        # command requests it; a changed one is wrong in any case.
        is_changed = not is_sound and path_exists(path)
        if not is_read_file or (recorded_digest and (is_changed or is_requested)):
            wrong_names.append(path.name)
    if wrong_names:
        log.warning(
            "%s: %s not as the run left it; the result files are written again from its shards",
            run.root,
            ", ".join(wrong_names),
        )
    # Reads with a verdict are in some of several files, by format and mates. At least one of these
    # must be there.
    has_requested = all(
        any(path in sound for path in run.reads_of((verdict,))) for verdict in spec.written_verdicts
    )
    return _ResultFiles(sound, are_complete=not wrong_names and has_requested)


def prepare(
    run: RunDir,
    store_path: Path,
    spec: ClassifySpec,
    *,
    staging: StageSummary | None = None,
    devices: tuple[Device, ...] | None = None,
) -> Job:
    """Fix everything that a run depends on, and find the shards that are still to be computed.

    Writes run.json and the plan of shards. Shards that are damaged are moved to a folder of their
    own and computed again. With `spec.force`, an earlier run in the directory is removed first.

    Args:
        run: The run directory.
        store_path: The staged reads.
        spec: Models, devices and settings.
        staging: Result of staging, if known. The store must still have the same content.
        devices: Devices of a cluster. If absent, those of this machine that `spec` names.

    Returns:
        The job: settings, plan, and the numbers of the shards to compute (`todo`).

    Raises:
        ConfigError: The store was staged for another classifier.
        RunMismatchError: The directory has another run, or the store was replaced.
        StorageError: There is no room for the results.
    """
    head = shape_of(spec.models, HeadShape)
    store = _open_staged_store(store_path, staging, head, spec.models)
    # A refusal comes before anything is computed, and before `force` removes an earlier run.
    compared = compare_with_training(store, part_folder(spec.models, HEAD))
    require_domain(head, spec, np.asarray(store.read_length), compared.sample)
    if devices is None:
        devices = resolve(spec.devices)
    kind = devices[0].kind
    engine = resolve_engine(_with_recorded_kernels(run, spec), devices)
    fingerprints = {"reads": store.fingerprint, **_model_digests(run, spec, engine.precision)}
    widths = {"dna": head.dna_width, "protein": head.protein_width}
    if spec.force:
        if path_exists(run.record):
            log.warning("%s: the earlier run in this directory is removed, as you asked", run.root)
        # Removing fails if any file cannot be removed. Otherwise an old file could later be
        # mistaken for a file of the new run.
        discard(run.root, *RUN_FILES)
    # int8 computes rows whose score is near the threshold a second time, more precisely. Then the
    # threshold is part of the plan.
    repeat_threshold = None
    if shards.repeats_near_threshold(engine, head):
        repeat_threshold = spec.threshold
    # `plan_run` may choose larger shards than the settings ask for.
    engine, plan = shards.plan_run(
        store.protein_offsets, engine, fingerprints, kind, repeat_threshold
    )
    new_record = runfiles.new_record(
        runfiles.RunRecord,
        devices,
        spec=spec.parameters | spec.model_dump(mode="json", exclude={"parameters"}),
        inputs=() if staging is None else staging.by_file,
        pairs=None if staging is None else staging.pairs,
        model_length=head.model_length,
        widths=widths,
        fingerprints=fingerprints,
        # What decides the bytes of results: the settings with `auto` replaced, the kind of device.
        resolved={**shards.result_settings(engine, repeat_threshold), "kind": kind},
        store=os.path.relpath(store_path, run.root),
    )
    record = _record_killed_attempt(run, runfiles.resume_or_refuse(run, new_record), store)
    _require_same_plan(run, plan)
    shards.write_plan(run, plan)
    found = _find_committed_work(run, plan)
    if not engine.commit and len(found.todo) < len(plan):
        raise ConfigError(
            f"{run.root} has shards of this run, so that it can go on without computing them "
            "again; leave out --disable-checkpointing, or start over with --force"
        )
    is_complete = not found.todo and path_exists(run.record) and path_exists(run.summary)
    n_committed = len(plan) - len(found.todo)
    if not is_complete and n_committed:
        log.info(
            "%s: continues the run that was begun here; %d of %d shards are there",
            run.root,
            n_committed,
            len(plan),
        )
    if not is_complete:
        # The record lists this start as a new attempt. A start that only finds a complete run is
        # not an attempt, and changes no file.
        write(run.record, record)
        # The content of the journal was added to the record above.
        remove_file(run.journal, run.root, missing_ok=True)
    job = Job(
        run=run,
        store=store,
        devices=devices,
        engine=engine,
        plan=plan,
        todo=found.todo,
        damaged=found.damaged_lines,
        n_lost=found.n_lost,
        spec=spec,
        bytes_per_sequence=embedding_bytes(1, sum(widths.values())),
        compared=compared,
        domain_note=domain_note(head, spec, compared),
    )
    if found.todo and engine.commit:
        _check_room_for_results(job)
    return job


def _with_recorded_kernels(run: RunDir, spec: ClassifySpec) -> EngineSpec:
    """Return the settings of a run, with the kernels for int8 with which the run began.

    A run that began with one kind of kernels goes on with it, also on other GPUs. Otherwise its
    results would be a mixture. This concerns the choice `auto` only.

    Args:
        run: The run directory.
        spec: The settings of the command.
    """
    engine = spec.engine
    if spec.force or engine.int8_kernels != "auto":
        return engine
    recorded_run = runfiles.read_or_set_aside(run.record, runfiles.RunRecord)
    if recorded_run is None or recorded_run.resolved.get("precision") != "int8":
        return engine
    recorded_kernels = recorded_run.resolved.get("int8_kernels", "triton")
    return engine.model_copy(update={"int8_kernels": recorded_kernels})


def _open_staged_store(
    store_path: Path, staging: StageSummary | None, head: HeadShape, models: Path
) -> OrfStore:
    """Open the store of staged reads, if it is still the one of this run and fits the classifier.

    Args:
        store_path: The store.
        staging: Result of staging, if known.
        head: The sizes of the classifier.
        models: The models directory, for the message.

    Raises:
        RunMismatchError: Other reads are in the store now than were staged.
        ConfigError: The reads were cut for a classifier of another length.
    """
    store = OrfStore.open(store_path)
    if staging is not None and staging.fingerprint != store.fingerprint:
        raise RunMismatchError(
            f"{store_path} no longer holds the reads that were staged for this run; run it again"
        )
    if head.model_length != store.model_length:
        raise ConfigError(
            f"the head in {models} is for length {head.model_length}, "
            f"but {store_path} was cut at {store.model_length}; stage again"
        )
    return store


def _model_digests(run: RunDir, spec: ClassifySpec, precision: Precision) -> dict[str, str]:
    """Return the digests of the models, by name, as the run in this directory recorded them.

    Older versions of virnuc recorded another digest of the same int8 calibration. If the run in the
    directory has such a digest, it is returned, so that it does not count as a difference.
    """
    digests = fingerprint(spec.models, precision)
    if spec.force:  # an earlier run in the directory will be removed
        return digests
    recorded_run = runfiles.read_or_set_aside(run.record, runfiles.RunRecord)
    if recorded_run is None:
        return digests
    return accept_older_digest(spec.models, digests, recorded_run.fingerprints)


@dataclass(frozen=True, slots=True)
class _CommittedWork:
    """What earlier attempts of a run left in its directory."""

    todo: tuple[int, ...]  # numbers of the shards that are still to be computed, ascending
    damaged_lines: tuple[str, ...]  # one sentence for each damaged shard
    n_lost: int  # sequences of committed shards that have no embedding


def _find_committed_work(run: RunDir, plan: shards.ShardPlan) -> _CommittedWork:
    """Find out which shards of a plan are committed.

    Damaged shards are named in warnings and moved to a folder of their own.
    """
    committed_shards, damaged_lines = shards.committed(run, plan)
    for line in damaged_lines:
        log.warning("%s; it will be computed again", line)
    todo = sorted(set(range(len(plan))) - set(committed_shards))
    # A run may lose a limited number of sequences. Those of committed shards count, too.
    _scores, failed_rows = shards.read_scores(run, committed_shards)
    return _CommittedWork(tuple(todo), tuple(damaged_lines), int(failed_rows.sum()))


def _record_killed_attempt(
    run: RunDir, record: runfiles.RunRecord, store: OrfStore
) -> runfiles.RunRecord:
    """Add the measurements of an attempt that was killed to the run's record.

    A worker's measurements are appended to a journal while a run computes, and the journal is
    removed at its end. A journal that exists therefore belongs to an attempt that was killed.
    Its measurements are written as a telemetry file of their own.

    Args:
        run: The run directory.
        record: The record, whose last attempt is the one that starts now.
        store: The staged reads.

    Returns:
        The completed record, or the same record if no attempt was killed.
    """
    if len(record.attempts) < 2:  # no attempt before the one that starts now
        return record
    from virnuc_core.telemetry.log import finished_attempt, read_journal, write_telemetry

    journal = read_journal(run.journal, run.root)
    if journal is None:
        return record
    path = write_telemetry(
        run.telemetry, journal.telemetry, n_reads=store.n_reads, wall_s=journal.lived_s
    )
    *earlier, killed, current = record.attempts
    killed = finished_attempt(killed, journal.telemetry, journal.lived_s, journal.deaths, path)
    return record.model_copy(update={"attempts": (*earlier, killed, current)})


def _require_same_plan(run: RunDir, plan: shards.ShardPlan) -> None:
    """Raise a `RunMismatchError` if shards of another run are here and run.json is missing.

    With a run.json, the caller has already compared the two runs.
    """
    if path_exists(run.record):
        return
    with suppress(ShardError):  # there is no plan, or a damaged one
        if shards.read_plan(run).fingerprint != plan.fingerprint:
            raise RunMismatchError(
                f"{run.root} has no readable run.json, and its plan is of another run; "
                "choose another directory or --force"
            )


def _check_room_for_results(job: Job) -> None:
    """Raise a `StorageError` if the disk has no room for the remaining shards and the tables.

    Without this check a run could compute for hours and fail at its last shard.
    """
    store = job.store
    mean_id_bytes = len(store.read_id_bytes) // max(1, store.n_reads)  # 1: a store without reads
    # The two tables of VirNucPro have at most one line per row, and reads.tsv one per read.
    n_lines = 2 * store.n_rows + store.n_reads
    table_bytes = n_lines * (mean_id_bytes + LINE_BYTES)
    check_room(
        job.run.root,
        job.shard_bytes(job.todo) + table_bytes,
        f"{len(job.todo)} shards and the result files",
    )


def _staging_clock(staging: StageSummary, started_s: float) -> StageClock:
    """Return a clock that already has the times of staging.

    Args:
        staging: Result of staging.
        started_s: When the classification started (`time.monotonic`). Staging ended then.

    Returns:
        A clock with one entry per stage of VirNucPro that is part of our staging. A stage that we
        do not time on its own is marked as fused with the one that contains it.
    """
    clock = StageClock()
    # A store that was used again was staged by an earlier command: it has a duration, but no
    # position on the time axis of this run.
    span = None if staging.reused else (started_s - staging.total_s, started_s)
    # Not below 0: the two times are of processes that work side by side, and may exceed the total.
    rest_s = max(0.0, staging.total_s - staging.chunk_s - staging.translate_s)
    clock.add("Sequence Chunking", staging.chunk_s, span)
    clock.add("Six-Frame Translation", staging.translate_s, span)
    clock.add("Rest of staging", rest_s)
    clock.fuse("Nucleotide Splitting", "Six-Frame Translation")
    clock.fuse("Protein Splitting", "Six-Frame Translation")
    return clock


def _compute(
    job: Job, staging: StageSummary, monitor: RunMonitor, started_s: float, pool: Pool | None
) -> RunSummary:
    """Compute the missing shards and write results, telemetry, record and summary.

    Args:
        job: The run, with the numbers of the missing shards.
        staging: Result of staging.
        monitor: Receives the progress.
        started_s: When the classification started (`time.monotonic`).
        pool: Running workers, or None to start some.

    Returns:
        The summary, as it is in summary.json. Its times include earlier attempts of the same run.
    """
    clock = _staging_clock(staging, started_s)
    embedding = Embedding(job, monitor, started_s)
    pooled_job = embedding.run(pool)

    from virnuc_core.telemetry.log import finished_attempt  # loaded while the workers computed

    embedding.record_times(clock, pooled_job)
    log_errors = _log_errors(job.run)
    if job.engine.commit:
        scores = shards.read_scores(job.run)
    else:
        scores = shards.scores_from_texts(job.plan, pooled_job.scores)
    verdicts = _write_results(job, staging, scores, clock, since_s=embedding.ended_s)
    own_s = time.monotonic() - started_s

    record = runfiles.read_record(job.run)
    # An attempt that was killed before it measured anything has no time.
    earlier = [attempt for attempt in record.attempts[:-1] if attempt.wall_s is not None]
    wall_s = own_s + _add_earlier_times(clock, earlier)
    deaths = [death for attempt in earlier for death in attempt.deaths] + pooled_job.deaths

    store = job.store
    summary = RunSummary(
        wall_s=wall_s,
        staging_s=staging.total_s,
        total_s=staging.total_s + wall_s,
        stages={stage.name: stage.seconds for stage in clock.times()},
        # RunSummary ignores the counts that it has no field for.
        **asdict(store.counts) | _trust_facts(job),
        protein_tokens=count_protein_tokens(store),
        **verdicts,
        devices=job.devices,
        workers=tuple(pooled_job.ready_records.values()),
        resumed=len(job.todo) < len(job.plan) or bool(earlier),
        shards=len(job.plan),
        checkpoints=job.engine.commit,
        shards_computed=len(job.todo),
        shards_reused=len(job.plan) - len(job.todo),
        rows_repeated=pooled_job.n_repeated,
        restarts=len(deaths),
        deaths=tuple(deaths),
        telemetry=_newest_telemetry(earlier),  # replaced below if this attempt has a file, too
        damaged=job.damaged,
        log_errors=len(log_errors),
        warnings=_run_warnings(job, log_errors),
        reduced_budgets={str(shard): n for shard, n in pooled_job.reduced_budgets.items()},
        flops=job.flops,
    )

    # The telemetry file needs the rate from the summary, and the summary the name of that file.
    telemetry_path = None
    if job.todo:
        telemetry_path = embedding.write(clock.times(), own_s, summary.sequences_per_hour)
    current = finished_attempt(
        record.attempts[-1], embedding.measured, own_s, pooled_job.deaths, telemetry_path
    )
    attempts = (*record.attempts[:-1], current)
    write(job.run.record, record.model_copy(update={"attempts": attempts}))
    summary = summary.model_copy(
        update={
            "telemetry": current.telemetry or summary.telemetry,
            "attempts": (*earlier, current),
        }
    )
    measurements = runfiles.measurement_digests(job.run, summary.attempts)
    summary = summary.model_copy(update={"measurements": measurements})
    # The summary is written last: a run is complete if summary.json exists.
    remove_file(job.run.journal, job.run.root, missing_ok=True)
    write(job.run.summary, summary)
    note_finished_run(job.run.root)
    return summary


def _add_earlier_times(clock: StageClock, earlier: Sequence[Attempt]) -> float:
    """Add the times of interrupted attempts to the clock of a run, and return their sum in seconds.

    The time of an attempt's committed shards counts as work; the rest of its time was lost.
    """
    sum_s = 0.0
    for attempt in earlier:
        attempt_s = attempt.wall_s or 0.0
        clock.add("Earlier attempts: committed", attempt.worked_s)
        clock.add("Earlier attempts: lost", attempt_s - attempt.worked_s)
        sum_s += attempt_s
    return sum_s


def _run_warnings(job: Job, log_errors: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings for the summary of a run.

    Args:
        job: The run.
        log_errors: Lines of the workers' logs that tell of errors.
    """
    warnings = list(_verdict_warnings(job))
    if not job.engine.commit:
        warnings.append(NO_CHECKPOINTS)
    if job.device_remark:
        warnings.append(job.device_remark)
    if log_errors:
        warnings.append(
            f"{len(log_errors)} lines of the workers' logs tell of errors; "
            f"the first: {log_errors[0]}"
        )
    return tuple(warnings)


def write_stopped_summary(
    run: RunDir, staging: StageSummary, devices: Sequence[Device], wall_s: float
) -> None:
    """Write the summary of a run that was ended at its time limit, with the time of every attempt.

    The run has no results. Its shards and the journal of its measurements stay, so that the next
    start goes on from them.

    Args:
        run: The run directory.
        staging: Result of staging.
        devices: The devices of the attempt that was ended.
        wall_s: How long that attempt took, without staging.
    """
    attempts: list[Attempt] = []
    if path_exists(run.record):
        *earlier, ended = runfiles.read_record(run).attempts
        attempts = [attempt for attempt in earlier if attempt.wall_s is not None]
        attempts.append(ended.model_copy(update={"wall_s": wall_s}))
    total_wall_s = sum(attempt.wall_s or 0.0 for attempt in attempts) or wall_s
    summary = RunSummary(
        stopped_at_limit=True,
        staging_s=staging.total_s,
        wall_s=total_wall_s,
        total_s=staging.total_s + total_wall_s,
        n_reads=staging.counts.n_reads,
        devices=tuple(devices),
        attempts=tuple(attempts),
        measurements=runfiles.measurement_digests(run, attempts),
    )
    write(run.summary, summary)


def _newest_telemetry(attempts: Sequence[Attempt]) -> str | None:
    """Return the telemetry file of the newest attempt that has one."""
    for attempt in reversed(attempts):
        if attempt.telemetry:
            return attempt.telemetry
    return None


def _log_errors(run: RunDir) -> list[str]:
    """Return the lines of the workers' logs that report errors, as `worker-0.log: text`.

    Long lines are shortened, and each run of white space becomes one space.
    """
    lines = []
    for path in list_folder(run.root / "logs", "worker-*.log"):
        try:
            content = read_file(path, run.root, MAX_LOG_BYTES)
        except UnsafeFileError as error:
            log.warning("%s; it is not searched for errors", error)
            continue
        for line in content.decode("utf-8", "replace").splitlines():
            if ERROR_WORDS.search(line):
                text = " ".join(line.split())[:MAX_SHOWN_LINE]
                lines.append(f"{path.name}: {text}")
    return lines


def _write_results(
    job: Job,
    staging: StageSummary,
    sequence_scores: tuple[NDArray[np.float32], NDArray[np.bool_]],
    clock: StageClock,
    kept: Collection[Path] = (),
    since_s: float = 0.0,
) -> dict[str, Any]:
    """Write the result files of a run whose sequences all have scores.

    summary.json is renamed before the first file is written, so that a process that is killed here
    does not leave a run that looks complete.

    Args:
        job: The run.
        staging: The staged reads.
        sequence_scores: The scores of all distinct sequences, float32 [n, 2], and which of these
            failed, bool [n].
        clock: Receives the time that writing took, by stage.
        kept: Files of viral or other reads that are already correct. They are not removed.
        since_s: When the embedding ended (`time.monotonic`). The time from then on that belongs to
            no other stage is added to the clock as "Result files".

    Returns:
        The fields of the summary that depend on the verdicts: counts, threshold and digests.
    """
    run = job.run
    spec = job.spec
    scores, failed = sequence_scores
    started_s = time.monotonic()
    require_lease(run.root)
    if path_exists(run.summary):
        run.summary.replace(run.former_summary)
    _remove_read_files(job, kept)
    results = write_results(
        run,
        job.store,
        scores,
        failed,
        spec.threshold,
        job.uncertain,
        spec.workers,
        job.compared.is_far,
    )
    _keep_composition(job)
    if job.engine.commit:
        shards.write_virtual_embeddings(run)
    else:
        run.embeddings.unlink(missing_ok=True)  # of an earlier run, whose shards are gone
    table_digests = _digests_of(run, run.tables)
    if spec.written_verdicts:
        from virnuc_core.reads.subsets import write_reads  # imported late: few runs need it

        write_reads(run, job.store, staging, spec.written_verdicts, table_digests)
    predicted_s = started_s + results.predict_s
    judged_s = predicted_s + results.consensus_s
    clock.add("Model Prediction", results.predict_s, (started_s, predicted_s))
    clock.add("Consensus Scoring", results.consensus_s, (predicted_s, judged_s))
    other_files = set(run.listed) - set(run.tables)
    digests = table_digests | _digests_of(run, other_files)
    listed_files = {path.name: digests[path.name] for path in run.listed if path.name in digests}
    rest_s = time.monotonic() - since_s - results.predict_s - results.consensus_s
    clock.add("Result files", rest_s)
    return {
        "fates": results.fates,
        "pairs": results.pairs,
        "threshold": results.threshold,
        "rows_virus": results.rows_virus,
        "chunks_virus": results.chunks_virus,
        "chunks_scored": results.chunks_scored,
        "files": listed_files,
        "rows_set_aside": int(failed.sum()),
        "uncertain": job.uncertain,
    }


def _keep_composition(job: Job) -> None:
    """Copy the composition of the classifier's training to the run, from which flags were made."""
    composition = read_composition(part_folder(job.spec.models, HEAD))
    if composition is None:
        job.run.composition.unlink(missing_ok=True)
    else:
        write_composition(composition, job.run.root)


def _digests_of(run: RunDir, paths: Iterable[Path]) -> dict[str, FileDigest]:
    """Return size and digest of the files of a run that exist, by their names."""
    digests = {}
    for path in paths:
        content = digest(path, run.root)
        if content is not None:
            digests[path.name] = content
    return digests


def _remove_read_files(job: Job, kept: Collection[Path]) -> None:
    """Remove the files of viral and other reads that an earlier command has written.

    They may follow from another threshold. Files that this command requests are removed without a
    warning, because they are written again.

    Args:
        job: The run.
        kept: Files that are already correct and stay.
    """
    for path in set(job.run.reads_of()) - set(kept):
        if path_exists(path) and path not in job.run.reads_of(job.spec.written_verdicts):
            log.warning(
                "%s was written by an earlier command and is removed; "
                "use --write-viral or --write-nonviral to write it again",
                path,
            )
        path.unlink(missing_ok=True)
