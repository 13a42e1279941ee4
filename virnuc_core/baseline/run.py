"""Run a baseline over an ORF store on this machine's devices, or take its time from a record."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnuc_core.baseline import batches, worker
from virnuc_core.config import Devices, EngineSpec, OnShare
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.registry import ENCODER_NAMES, ENCODERS, EncoderInfo
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.loader import slices
from virnuc_core.engine.process import (
    INTERRUPTED,
    Child,
    Closed,
    Failed,
    LocalWorkers,
    Message,
    Ready,
    worker_specs,
)
from virnuc_core.errors import ConfigError, InputError, WorkerError, error_from_name
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import choose_reads
from virnuc_core.results import write_covered
from virnuc_core.rundir import BASELINE_FILES, RunDir, discard, run_lock
from virnuc_core.runfiles import Device, RunRecord, digest, new_record, read_or_set_aside, write
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import BaselineSubset, BaselineSummary

log = logging.getLogger(__name__)

SILENCE_S: Final = 1_800.0  # loading 3 B weights from a slow disk is silent
DEVICE_WAIT_S: Final = 60.0  # for another run to finish with it
SEED: Final = 0
WORKER_MODULE: Final = "virnuc_core.baseline.worker"

# Stages by their names in reports. Rows come from the store, chunked and translated.
MEASURED_STAGES: Final = STAGES[2:]
SPLITTING: Final = {"dna": "Nucleotide Splitting", "protein": "Protein Splitting"}  # by molecule
MERGING: Final = "Feature Merging"
PREDICTION: Final = "Model Prediction"
CONSENSUS: Final = "Consensus Scoring"
OPERATIONS: Final[dict[worker.Operation, str]] = {  # in order, with their stages
    **{encoder.name: encoder.title for encoder in ENCODERS},
    "merge": MERGING,
    "predict": PREDICTION,
}

T = TypeVar("T")


def run_baseline(
    run: RunDir,
    store: Path,
    models: Path,
    devices: Devices,
    spec: BaselineSpec,
    on_progress: OnShare = lambda _: None,
) -> BaselineSummary:
    """Measure a baseline, or take its time from a record.

    A finished baseline of the same reads, weights, devices and settings is returned as it is,
    marked `reused`. Nothing that the baseline starts outlives the call.

    Args:
        run: Where its result files, `summary.json` and `run.json` are written.
        store: The open reading frames.
        models: Models directory.
        devices: Where it runs; vanilla takes the first of them.
        spec: Which baseline. With `spec.reads` it runs on that many reads and its time is scaled.
        on_progress: Called with the share of the embedding that is done.

    Raises:
        ConfigError: A recorded baseline has no numbers.
        WeightsError: The models cannot be used.
        DeviceError: A device cannot be used.
        InputError: The chosen reads have no open reading frame.
        WorkerError: A worker failed.
    """
    orfs = OrfStore.open(store)
    if spec.source == "recorded":
        summary = _recorded_summary(orfs, spec)
        run.record.unlink(missing_ok=True)  # it is not of these reads and weights
        write(run.summary, summary)
        return summary
    workers = LocalWorkers(WORKER_MODULE)
    used_devices = resolve(devices)
    if spec.name == "vanilla":
        used_devices = used_devices[:1]
    record = new_record(
        RunRecord,
        used_devices,
        # The two that are left out say nothing about a run.
        spec=spec.model_dump(mode="json", exclude={"recorded_reads", "results"}),
        model_length=orfs.model_length,
        fingerprints={"reads": orfs.fingerprint, **fingerprint(models)},
        seeds={"baseline": SEED},
        store=os.path.relpath(orfs.path, run.root),
    )
    inputs = record.model_dump_json(include={"spec", "fingerprints", "devices", "seeds"})
    identity = hashlib.sha256(inputs.encode()).hexdigest()
    with run_lock(run.root):
        previous = _reusable_summary(run, identity)
        if previous is not None:
            if read_or_set_aside(run.record, RunRecord) is None:
                write(run.record, record)
            return previous.model_copy(update={"reused": True})
        run.summary.unlink(missing_ok=True)
        measurement = _Measurement(run, orfs, models, used_devices, spec, workers, on_progress)
        summary = measurement.measure()
        discard(run.root, BASELINE_FILES)
        files = {path.name: digest(path) for path in (run.predictions, run.consensus)}
        summary = summary.model_copy(update={"fingerprint": identity, "files": files})
        write(run.record, record)
        write(run.summary, summary)
    return summary


def _reusable_summary(run: RunDir, identity: str) -> BaselineSummary | None:
    """Return the summary of a finished baseline of this identity with unchanged result files."""
    summary = read_or_set_aside(run.summary, BaselineSummary)
    if summary is None or summary.fingerprint != identity:
        return None
    changed_files = []
    for name, expected_digest in (summary.files or {}).items():
        if digest(run.root / name) != expected_digest:
            changed_files.append(name)
    if not changed_files:
        return summary
    names = ", ".join(changed_files)
    log.warning("%s: %s not as the baseline left it; it is measured again", run.root, names)
    return None


def _recorded_summary(store: OrfStore, spec: BaselineSpec) -> BaselineSummary:
    """Return the summary of a baseline whose time comes from a record."""
    name, count = spec.recorded_device, spec.recorded_devices or 1
    has_time = spec.recorded_seconds is not None and name is not None
    if spec.results is None and not has_time:
        raise ConfigError(
            "baseline: a recorded one needs recorded_seconds and recorded_device, or results"
        )
    devices = []
    if name:
        devices = [Device(id=f"recorded-{i}", kind="cuda", name=name) for i in range(count)]
    return BaselineSummary(
        name=spec.name,
        source="recorded",
        wall_s=spec.recorded_seconds,
        n_reads=store.n_reads,
        n_rows=store.n_rows,
        devices=tuple(devices),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The rows that a baseline is measured on, cut into files.

    Attributes:
        covered: Which reads of the store are chosen, bool [reads].
        rows: The rows of these reads.
        files: Range of `rows` of each file, [low, high).
        subset: Which part of the store this is; None if it is all.
    """

    covered: NDArray[np.bool_]
    rows: NDArray[np.int64]
    files: list[tuple[int, int]]
    subset: BaselineSubset | None


@dataclass(frozen=True, slots=True)
class _WorkerTimes:
    """What the worker processes took.

    Attributes:
        files: The files that were done in each stage.
        start_s: Seconds to start the workers.
    """

    files: dict[str, list[worker.FileDone]]
    start_s: float


@dataclass(slots=True)
class _Measurement:
    """One measured run: the chosen rows through files, encoders and head to the result files."""

    run: RunDir
    store: OrfStore
    models: Path
    devices: Sequence[Device]
    spec: BaselineSpec
    workers: LocalWorkers
    on_progress: OnShare
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURED_STAGES, 0.0))
    rows_embedded: int = 0

    @property
    def folder(self) -> Path:
        """Return the folder of the intermediate files."""
        return self.run.root / "baseline_files"

    def measure(self) -> BaselineSummary:
        """Write the result files, and return the summary without its fingerprint."""
        work = self._choose_work()
        started_s = time.monotonic()
        self._write_fasta_files(work)
        times = self._embed_and_predict(work)
        voting_started_s = time.monotonic()
        write_covered(self.run, self.store, work.covered, self._read_scores(len(work.files)))
        self.seconds[CONSENSUS] = time.monotonic() - voting_started_s
        measured_s = time.monotonic() - started_s
        if work.subset is None:
            wall_s, stages = measured_s, self.seconds
        else:
            stages = self._scaled_stages(work.subset, len(work.rows), times)
            wall_s = sum(stages.values()) + times.start_s
        return BaselineSummary(
            name=self.spec.name,
            source="measured",
            wall_s=wall_s,
            stages=stages,
            subset=work.subset,
            measured_s=measured_s,
            measured_stages=self.seconds,
            n_reads=self.store.n_reads,
            n_rows=self.store.n_rows,
            measured_rows=len(work.rows),
            devices=tuple(self.devices),
        )

    def _choose_work(self) -> _Work:
        """Choose the reads that are measured, and cut their rows into files."""
        store = self.store
        reads = choose_reads(store.n_reads, self.spec.reads, SEED)
        is_covered = np.zeros(store.n_reads, dtype=bool)
        is_covered[reads] = True
        rows = np.flatnonzero(is_covered[np.asarray(store.row_read)])
        if len(rows) == 0 and store.n_rows > 0:
            raise InputError(
                f"none of the {len(reads)} reads drawn for the baseline has an open frame; "
                "draw more"
            )
        if len(rows) == 0 or len(reads) == store.n_reads:
            return _Work(is_covered, rows, batches.cut(len(rows), batches.FILE_ROWS), None)
        unique_tokens = np.diff(np.asarray(store.protein_offsets)) + 2
        row_tokens = unique_tokens[np.asarray(store.row_unique)]
        subset = BaselineSubset(
            reads=len(reads),
            seed=SEED,
            tokens=int(row_tokens[rows].sum()),
            total_tokens=int(row_tokens.sum()),
        )
        # Smaller files, so that every device has work, as it would have on the whole input.
        rows_per_device = math.ceil(len(rows) / len(self.devices))
        file_rows = max(1, min(batches.FILE_ROWS, rows_per_device))
        return _Work(is_covered, rows, batches.cut(len(rows), file_rows), subset)

    def _read_scores(self, n_files: int) -> NDArray[np.float32]:
        """Return the scores of all rows, [rows, 2]."""
        scores = [np.empty((0, 2), dtype=np.float32)]
        for number in range(1, n_files + 1):
            scores.append(np.load(worker.file_path(self.folder, "scores.npy", number)))
        return np.concatenate(scores)

    def _scaled_stages(
        self, subset: BaselineSubset, n_rows: int, times: _WorkerTimes
    ) -> dict[str, float]:
        """Return the seconds of each stage that the whole input would take."""
        total_rows = self.store.n_rows
        scaled = {stage: value * total_rows / n_rows for stage, value in self.seconds.items()}
        for encoder in ENCODERS:
            scaled[encoder.title] = scaled_seconds(
                times.files[encoder.title],
                subset.total_tokens / subset.tokens,
                total_rows=total_rows,
                devices=len(self.devices),
                load_each_file=(self.spec.name, encoder.name) not in worker.KEPT_LOADED,
            )
        return scaled

    def _write_fasta_files(self, work: _Work) -> None:
        """Write the rows as files of DNA and of proteins."""
        discard(self.run.root, BASELINE_FILES)
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, (low, high) in enumerate(work.files, start=1):
            started_s = time.monotonic()
            rows = work.rows[low:high]
            ids = fetch(self.store.row_ids, rows)
            uniques = np.asarray(self.store.row_unique)[rows]
            for encoder in ENCODERS:
                path = worker.file_path(self.folder, worker.fasta_kind(encoder), number)
                worker.write_fasta(path, ids, self._sequences(encoder, uniques))
                finished_s = time.monotonic()
                self.seconds[SPLITTING[encoder.molecule]] += finished_s - started_s
                started_s = finished_s

    def _sequences(self, encoder: EncoderInfo, uniques: NDArray[np.int64]) -> list[bytes]:
        """Return the sequences that an encoder reads of some distinct frames."""
        return fetch(lambda low, high: encoder.sequences(self.store, low, high), uniques)

    def _embed_and_predict(self, work: _Work) -> _WorkerTimes:
        """Do the stages of the worker processes on all files.

        Raises:
            WorkerError: A worker failed or died. That ends the baseline.
        """
        if not work.files:
            return _WorkerTimes({}, 0.0)
        sizes = [high - low for low, high in work.files]
        shares = batches.assign(sizes, len(self.devices))
        all_files = list(range(len(sizes)))
        done_files = {}
        started_s = time.monotonic()
        with self.workers as workers:
            children = self._start_children(workers)
            start_s = time.monotonic() - started_s
            for operation, stage in OPERATIONS.items():
                stage_started_s = time.monotonic()
                if operation in ENCODER_NAMES:
                    files_of_child = dict(zip(children, shares, strict=True))
                else:
                    files_of_child = {children[0]: all_files}
                self._send_tasks(operation, files_of_child)
                done_files[stage] = self._wait_for_files(workers, files_of_child, len(work.rows))
                self.seconds[stage] = time.monotonic() - stage_started_s
        return _WorkerTimes(done_files, start_s)

    def _start_children(self, workers: LocalWorkers) -> list[Child]:
        """Start a worker process on each device, and wait until all are ready."""
        engine = EngineSpec(device_wait_s=DEVICE_WAIT_S)
        children = []
        for spec in worker_specs(self.models, self.devices, engine):
            log_path = self.run.root / "logs" / f"baseline-{spec.device.id}.log"
            children.append(workers.start(spec, log_path))
        for _ in children:
            _, message = expect(workers, children)
            assert isinstance(message, Ready)
        return children

    def _send_tasks(
        self, operation: worker.Operation, files_of_child: dict[Child, list[int]]
    ) -> None:
        """Send each worker its files of one stage."""
        for child, files in files_of_child.items():
            for file in files:
                task = worker.FileTask(
                    op=operation,
                    algorithm=self.spec.name,
                    folder=str(self.folder),
                    file=file + 1,
                )
                child.send(task)

    def _wait_for_files(
        self, workers: LocalWorkers, files_of_child: dict[Child, list[int]], n_rows: int
    ) -> list[worker.FileDone]:
        """Wait until all files of a stage are done."""
        done = []
        remaining = {child: len(files) for child, files in files_of_child.items()}
        while any(remaining.values()):
            busy = [child for child, n_files in remaining.items() if n_files]
            child, message = expect(workers, busy)
            if isinstance(message, worker.RowsDone):
                self.rows_embedded += message.rows
                self.on_progress(self.rows_embedded / (len(ENCODERS) * n_rows))
            elif isinstance(message, worker.FileDone):
                done.append(message)
                remaining[child] -= 1
        return done


def expect(
    workers: LocalWorkers, busy: Iterable[Child], silence_s: float = SILENCE_S
) -> tuple[Child, Message]:
    """Return the next message of workers none of which may fail.

    Args:
        workers: The worker processes.
        busy: Those that have work.
        silence_s: Seconds after which a busy worker without progress has failed.

    Returns:
        The worker and its message.

    Raises:
        WorkerError: A worker failed, died, or made no progress; or the run was interrupted. Our own
            errors are raised as the worker raised them.
    """
    while True:
        for child in busy:
            idle_s = time.monotonic() - child.progress_s
            if idle_s > silence_s or child.silent:
                raise WorkerError(
                    f"worker on {child.device} has not moved for {idle_s:.0f} s; see {child.log}"
                )
        received = workers.receive(1.0)
        if received is None:
            continue
        child, message = received
        if isinstance(message, Failed):
            raise _failure(child, message)
        if not isinstance(message, Closed):
            return child, message
        status = child.end(0.5)
        if workers.cancelled:
            raise WorkerError(INTERRUPTED)
        raise WorkerError(
            f"worker on {child.device} ended (status {status}); last words: {child.last_words}; "
            f"see {child.log}"
        )


def _failure(child: Child, message: Failed) -> Exception:
    """Return the error that a worker reports: our own kind, or a `WorkerError`."""
    own_error = error_from_name(message.kind, message.message)
    if own_error is not None:
        return own_error
    return WorkerError(
        f"worker on {child.device}: {message.kind}: {message.message}; see {child.log}",
        worker_traceback=message.traceback,
    )


def scaled_seconds(
    done: Sequence[worker.FileDone],
    growth: float,
    *,
    total_rows: int,
    devices: int,
    load_each_file: bool,
) -> float:
    """Return the seconds that a stage would take on all rows.

    The whole input is cut into files of 10,000 rows, which are assigned to devices as the algorithm
    does. The measured seconds of computing grow with the tokens and are shared out over those files
    by their rows. Loading costs the mean measured time.

    Args:
        done: The files that were measured.
        growth: Tokens of the whole input divided by those that were measured.
        total_rows: Rows of the whole input.
        devices: Number of devices.
        load_each_file: Whether the model is loaded for each file, or once on each device.
    """
    compute_s = sum(file.compute_s for file in done) * growth
    loads_s = [file.load_s for file in done if file.load_s > 0]
    mean_load_s = sum(loads_s) / max(1, len(loads_s))
    file_sizes = [high - low for low, high in batches.cut(total_rows, batches.FILE_ROWS)]
    costs_s = []
    for n_rows in file_sizes:
        cost_s = compute_s * n_rows / total_rows
        if load_each_file:
            cost_s += mean_load_s
        costs_s.append(cost_s)
    shares = batches.assign(file_sizes, devices)
    busiest_s = max(sum(costs_s[file] for file in share) for share in shares)
    if load_each_file:
        return busiest_s
    return busiest_s + mean_load_s


def fetch(read: Callable[[int, int], list[T]], positions: NDArray[np.int64]) -> list[T]:
    """Return what `read(low, high)` gives at sorted positions, in as few calls as possible.

    >>> fetch(lambda low, high: list(range(low, high)), np.array([3, 4, 5, 9, 9]))
    [3, 4, 5, 9, 9]
    """
    values: list[T] = []
    for low, high in slices(positions):
        values += read(low, high)
    return values
