"""Run a baseline: measure how long an original program takes, or use a recorded time.

A baseline imitates one of the original programs ("vanilla" or "v1") on the same open reading
frames as a run of the engine. Its time and its verdicts are compared with those of the run.
"""

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
from virnuc_core.encoder_names import ENCODER_NAMES
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.registry import (
    ENCODERS,
    PROTEIN_ENCODER,
    EncoderInfo,
    encoder_named,
)
from virnuc_core.engine.devices import resolve
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
from virnuc_core.engine.slices import slices
from virnuc_core.errors import ConfigError, InputError, WorkerError, error_from_name
from virnuc_core.lease import make_folder
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.store import OrfStore
from virnuc_core.reads.subsets import choose_reads
from virnuc_core.results import write_covered, write_covered_reads
from virnuc_core.rundir import BASELINE_FILES, RunDir, discard, run_lock
from virnuc_core.runfiles import (
    Device,
    FileDigest,
    RunRecord,
    changed_files,
    digest,
    measurement_digests,
    new_record,
    read_or_set_aside,
    write,
)
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import BaselineSubset, BaselineSummary

log = logging.getLogger(__name__)

# A worker without progress for so long has failed. While a worker loads 3 billion weights from a
# slow disk, it reports nothing.
SILENCE_S: Final = 1_800.0
DEVICE_WAIT_S: Final = 60.0  # how long to wait for a device that another run uses
SEED: Final = 0  # of the random choice of reads
WORKER_MODULE: Final = "virnuc_core.baseline.worker"

# Stages by their names in reports. The first two, chunking and translation, are not measured here:
# the open reading frames come from the store.
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
    """Measure the time of a baseline, or use a recorded time, and write its summary.

    A baseline imitates one of the original programs on the same open reading frames as a run of
    the engine, so that the two can be compared. A measured baseline also writes result files.

    If the folder already has a finished baseline of the same reads, weights, devices and settings,
    its summary is returned, marked `reused`. All processes that the baseline starts have ended when
    the call returns.

    Args:
        run: Folder for its result files, `summary.json` and `run.json`.
        store: File with the open reading frames.
        models: Models directory.
        devices: Where it runs. Vanilla uses only the first device, like the original program.
        spec: Settings of the baseline. If they give a number of reads, only so many reads are
            embedded, and the times are scaled to the whole input.
        on_progress: Called with the share of the embedding that is done, from 0 to 1.

    Raises:
        ConfigError: The settings of a recorded baseline have no numbers.
        WeightsError: The models cannot be used.
        DeviceError: A device cannot be used.
        InputError: The chosen reads have no open reading frame.
        WorkerError: A worker failed.
    """
    orfs = OrfStore.open(store)
    if spec.source == "recorded":
        summary = _recorded_summary(orfs, spec)
        # A `run.json` of an earlier measurement does not belong to a recorded time.
        run.record.unlink(missing_ok=True)
        summary = summary.model_copy(update={"files": _result_digests(run)})
        write(run.summary, summary)
        return summary

    workers = LocalWorkers(WORKER_MODULE)  # their processes are started later
    used_devices = resolve(devices)
    if spec.name == "vanilla":
        used_devices = used_devices[:1]
    record = new_record(
        RunRecord,
        used_devices,
        # These two settings belong to recorded baselines and do not affect a measurement.
        spec=spec.model_dump(mode="json", exclude={"recorded_reads", "results"}),
        model_length=orfs.model_length,
        fingerprints={"reads": orfs.fingerprint, **fingerprint(models)},
        seeds={"baseline": SEED},
        store=os.path.relpath(orfs.path, run.root),
    )

    # The identity is a digest of everything that decides about the results. A finished baseline
    # with the same identity is used again.
    identity_json = record.model_dump_json(include={"spec", "fingerprints", "devices", "seeds"})
    identity = hashlib.sha256(identity_json.encode()).hexdigest()
    with run_lock(run.root):
        previous = _reusable_summary(run, identity)
        if previous is not None:
            return previous.model_copy(update={"reused": True})

        # The summary is written last. While it is missing, the baseline counts as unfinished.
        run.summary.unlink(missing_ok=True)
        measurement = _Measurement(run, orfs, models, used_devices, spec, workers, on_progress)
        summary = measurement.measure()
        discard(run.root, BASELINE_FILES)
        files = _result_digests(run)
        summary = summary.model_copy(update={"fingerprint": identity, "files": files})
        write(run.record, record)
        measurements = measurement_digests(run, ())
        summary = summary.model_copy(update={"measurements": measurements})
        write(run.summary, summary)
    return summary


def _reusable_summary(run: RunDir, identity: str) -> BaselineSummary | None:
    """Return the summary of an earlier baseline in this folder if it can be used again.

    It can if it has the same identity, its result files still have their recorded digests, and its
    `run.json` still names the machine that it was measured on. If a file was changed or is missing,
    a warning is logged.

    Args:
        run: Folder of the baseline.
        identity: Digest of everything that decides about the results.

    Returns:
        The summary; None if there is none that can be used.
    """
    summary = read_or_set_aside(run.summary, BaselineSummary)
    if summary is None or summary.fingerprint != identity:
        return None
    changed_names = changed_files(run.root, summary.files)
    if read_or_set_aside(run.record, RunRecord) is None:  # missing or damaged
        changed_names.append(run.record.name)
    if not changed_names:
        return summary
    names = ", ".join(changed_names)
    log.warning("%s: %s not as the baseline left it; it is measured again", run.root, names)
    return None


def _result_digests(run: RunDir) -> dict[str, FileDigest]:
    """Return size and digest of the result files of a baseline, by name, if they exist."""
    digests = {}
    for path in (run.predictions, run.consensus, run.reads_table, run.failed_rows):
        content = digest(path, run.root)
        if content is not None:
            digests[path.name] = content
    return digests


def _recorded_summary(store: OrfStore, spec: BaselineSpec) -> BaselineSummary:
    """Return the summary of a baseline that is not run: its time comes from the settings.

    Args:
        store: The open reading frames.
        spec: Settings of the baseline, with the recorded seconds and devices, or with the results
            of an earlier run of the original program.

    Raises:
        ConfigError: The settings have neither a time and a device nor results.
    """
    device_name = spec.recorded_device
    n_devices = spec.recorded_devices or 1
    has_time = spec.recorded_seconds is not None and device_name is not None
    if spec.results is None and not has_time:
        raise ConfigError(
            "baseline: a recorded one needs recorded_seconds and recorded_device, or results"
        )
    devices = []
    if device_name:
        for i in range(n_devices):
            devices.append(Device(id=f"recorded-{i}", kind="cuda", name=device_name))
    return BaselineSummary(
        name=spec.name,
        source="recorded",
        wall_s=spec.recorded_seconds,
        n_reads=store.n_reads,
        recorded_reads=spec.recorded_reads,
        n_rows=store.n_rows,
        devices=tuple(devices),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The rows that a baseline is measured on, cut into files.

    Attributes:
        covered: Whether each read of the store is chosen, bool [reads].
        rows: Indexes of the open reading frames of the chosen reads.
        files: For each intermediate file, the range of `rows` that it holds: first index and index
            after the last one.
        subset: How large a part of the store was chosen; None if all reads were chosen.
    """

    covered: NDArray[np.bool_]
    rows: NDArray[np.int64]
    files: list[tuple[int, int]]
    subset: BaselineSubset | None


@dataclass(frozen=True, slots=True)
class _WorkerTimes:
    """How long the worker processes took.

    Attributes:
        files: For each stage, one message for each file that was processed.
        start_s: Seconds until all workers had started.
    """

    files: dict[str, list[worker.FileDone]]
    start_s: float


@dataclass(slots=True)
class _Measurement:
    """One measured run of a baseline, from the choice of reads to the result files.

    Attributes:
        run: Folder of the baseline.
        store: The open reading frames.
        models: Models directory.
        devices: Where the workers run.
        spec: Settings of the baseline.
        workers: The worker processes.
        on_progress: Called with the share of the embedding that is done.
        seconds: Seconds of each stage so far.
        rows_embedded: Sequences that were embedded so far, counted once for each encoder.
        fasta_digests: SHA-256 of each FASTA file that was written, by its path.
    """

    run: RunDir
    store: OrfStore
    models: Path
    devices: Sequence[Device]
    spec: BaselineSpec
    workers: LocalWorkers
    on_progress: OnShare
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURED_STAGES, 0.0))
    rows_embedded: int = 0
    fasta_digests: dict[Path, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the folder of the intermediate files."""
        return self.run.root / "baseline_files"

    def measure(self) -> BaselineSummary:
        """Run all stages, write the result files, and return the summary.

        The summary has no fingerprint and no digests of the result files yet. The caller adds
        them.
        """
        work = self._choose_work()
        started_s = time.monotonic()
        self._write_fasta_files(work)
        times = self._embed_and_predict(work)

        # The vote of the frames, which writes the result files
        voting_started_s = time.monotonic()
        scores = self._read_scores(len(work.files))
        n_failed = write_covered(self.run, self.store, work.covered, scores)
        self.seconds[CONSENSUS] = time.monotonic() - voting_started_s
        measured_s = time.monotonic() - started_s

        # The original programs write no such tables, so they are no part of the measured time.
        write_covered_reads(self.run, self.store, work.covered, scores)
        if n_failed:
            log.warning(
                "%s: %d of %d rows are not finite; they are in %s",
                self.run.root,
                n_failed,
                len(work.rows),
                self.run.failed_rows.name,
            )

        # If only some of the reads were measured, scale the times to all reads.
        if work.subset is None:
            wall_s = measured_s
            stages = self.seconds
        else:
            stages = self._scaled_stages(work.subset, len(work.rows), times)
            # The time to start the workers does not grow with the input.
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
            failed_rows=n_failed,
            devices=tuple(self.devices),
        )

    def _choose_work(self) -> _Work:
        """Choose the reads that are measured, and cut their open reading frames into files.

        Raises:
            InputError: The chosen reads have no open reading frame, but other reads have.
        """
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
            # All reads were chosen, or no read has an open frame: there is nothing to scale.
            files = batches.file_ranges(len(rows), batches.FILE_ROWS)
            return _Work(is_covered, rows, files, subset=None)

        # Count the protein tokens of the chosen rows and of all rows. Times are scaled by them.
        special_tokens = PROTEIN_ENCODER.n_special_tokens
        unique_tokens = np.diff(np.asarray(store.protein_offsets)) + special_tokens
        row_tokens = unique_tokens[np.asarray(store.row_unique)]
        subset = BaselineSubset(
            reads=len(reads),
            seed=SEED,
            tokens=int(row_tokens[rows].sum()),
            total_tokens=int(row_tokens.sum()),
        )

        # A few reads would fill a single file, and all devices but one would have no work. On the
        # whole input all devices have work, so the files are made smaller here.
        rows_per_device = math.ceil(len(rows) / len(self.devices))
        file_rows = max(1, min(batches.FILE_ROWS, rows_per_device))
        return _Work(is_covered, rows, batches.file_ranges(len(rows), file_rows), subset)

    def _read_scores(self, n_files: int) -> NDArray[np.float32]:
        """Read the scores of all measured rows from the intermediate files.

        Returns:
            P(others) and P(virus) of each row, float32 [rows, 2].
        """
        scores = [np.empty((0, 2), dtype=np.float32)]  # `concatenate` needs at least one array
        for number in range(1, n_files + 1):
            path = worker.file_path(self.folder, "scores.npy", number)
            scores.append(worker.load(path))
        return np.concatenate(scores)

    def _scaled_stages(
        self, subset: BaselineSubset, n_rows: int, times: _WorkerTimes
    ) -> dict[str, float]:
        """Estimate how many seconds each stage would take on the whole input.

        The stages of the encoders grow with the number of tokens, all others with the number of
        rows.

        Args:
            subset: How large a part of the input was measured.
            n_rows: Number of rows that were measured.
            times: What the worker processes reported.
        """
        total_rows = self.store.n_rows
        estimates_s = {}
        for stage, measured_s in self.seconds.items():
            estimates_s[stage] = measured_s * total_rows / n_rows
        for encoder in ENCODERS:
            # v1.0 loads one of its encoders only once. All others are loaded again for each file.
            is_kept_loaded = (self.spec.name, encoder.name) in worker.KEPT_LOADED
            estimates_s[encoder.title] = scaled_seconds(
                times.files[encoder.title],  # one entry for each file that was measured
                growth=subset.total_tokens / subset.tokens,
                total_rows=total_rows,
                devices=len(self.devices),
                load_each_file=not is_kept_loaded,
            )
        return estimates_s

    def _write_fasta_files(self, work: _Work) -> None:
        """Write the chosen frames as FASTA files, one of DNA and one of proteins for each range.

        Intermediate files of an earlier baseline are deleted first. The time is added to the stages
        of splitting.
        """
        discard(self.run.root, BASELINE_FILES)
        make_folder(self.folder)
        for number, (low, high) in enumerate(work.files, start=1):
            started_s = time.monotonic()
            rows = work.rows[low:high]
            ids = load_rows(self.store.row_ids, rows)
            frames = np.asarray(self.store.row_unique)[rows]
            for encoder in ENCODERS:
                path = worker.file_path(self.folder, worker.fasta_kind(encoder), number)
                sha256 = worker.write_fasta(path, ids, self._sequences(encoder, frames))
                self.fasta_digests[path] = sha256
                finished_s = time.monotonic()
                self.seconds[SPLITTING[encoder.molecule]] += finished_s - started_s
                started_s = finished_s

    def _sequences(self, encoder: EncoderInfo, frames: NDArray[np.int64]) -> list[bytes]:
        """Return the sequences of some frames that an encoder embeds: their DNA or proteins.

        Args:
            encoder: The encoder's entry in the registry.
            frames: Sorted indexes of distinct frames in the store. An index may be repeated.
        """

        def load_range(low: int, high: int) -> list[bytes]:
            """Load the sequences of the frames from `low` to before `high`."""
            return encoder.sequences(self.store, low, high)

        # The store reads ranges only. This calls `load_range` for each run of neighbouring frames.
        return load_rows(load_range, frames)

    def _embed_and_predict(self, work: _Work) -> _WorkerTimes:
        """Run the stages of the worker processes, one after the other, on all files.

        The files of an encoder's stage are distributed to all devices. Merging and scoring are done
        by the first worker alone, like in the original programs. All workers have ended when the
        call returns.

        Args:
            work: The chosen rows and files.

        Returns:
            How long the workers took.

        Raises:
            WorkerError: A worker failed or died. This ends the baseline.
        """
        if not work.files:
            return _WorkerTimes({}, 0.0)
        file_sizes = [high - low for low, high in work.files]
        files_by_device = batches.assign_to_devices(file_sizes, len(self.devices))
        all_files = list(range(len(file_sizes)))
        done_files = {}  # by stage
        started_s = time.monotonic()
        with self.workers as workers:
            children = self._start_children(workers)
            start_s = time.monotonic() - started_s
            for operation, stage in OPERATIONS.items():
                stage_started_s = time.monotonic()
                if operation in ENCODER_NAMES:
                    files_of_child = dict(zip(children, files_by_device, strict=True))
                else:
                    files_of_child = {children[0]: all_files}
                self._send_tasks(operation, files_of_child)
                done_files[stage] = self._wait_for_files(workers, files_of_child, len(work.rows))
                self.seconds[stage] = time.monotonic() - stage_started_s
        return _WorkerTimes(done_files, start_s)

    def _start_children(self, workers: LocalWorkers) -> list[Child]:
        """Start a worker process on each device, and wait until all of them are ready.

        Raises:
            WorkerError: A worker failed to start.
        """
        engine = EngineSpec(device_wait_s=DEVICE_WAIT_S)
        children = []
        for spec in worker_specs(self.models, self.devices, engine):
            log_path = self.run.root / "logs" / f"baseline-{spec.device.id}.log"
            children.append(workers.start(spec, log_path))
        for _ in children:  # each sends one message
            _, message = next_message(workers, children)
            assert isinstance(message, Ready)  # a failure was raised
        return children

    def _send_tasks(
        self, operation: worker.Operation, files_of_child: dict[Child, list[int]]
    ) -> None:
        """Send each worker the tasks for its files.

        Args:
            operation: What is to be done with the files.
            files_of_child: The files of each worker, counted from 0.
        """
        for child, files in files_of_child.items():
            for file in files:
                number = file + 1  # file names count from 1
                sha256 = ""
                if operation in ENCODER_NAMES:
                    kind = worker.fasta_kind(encoder_named(operation))
                    sha256 = self.fasta_digests[worker.file_path(self.folder, kind, number)]
                task = worker.FileTask(
                    operation=operation,
                    algorithm=self.spec.name,
                    folder=str(self.folder),
                    file=number,
                    sha256=sha256,
                )
                child.send(task)

    def _wait_for_files(
        self, workers: LocalWorkers, files_of_child: dict[Child, list[int]], n_rows: int
    ) -> list[worker.FileDone]:
        """Wait until the workers have processed all files of a stage, and report progress.

        Progress is the share of the sequences that are embedded, each counted once for each
        encoder.

        Args:
            workers: The worker processes.
            files_of_child: The files that each worker was given.
            n_rows: Number of sequences in all files together.

        Returns:
            The message of each file.

        Raises:
            WorkerError: A worker failed or died.
        """
        done_files = []
        n_left_of_child = {child: len(files) for child, files in files_of_child.items()}
        while any(n_left_of_child.values()):
            busy_children = [child for child, n_left in n_left_of_child.items() if n_left]
            child, message = next_message(workers, busy_children)
            if isinstance(message, worker.RowsDone):
                self.rows_embedded += message.rows
                self.on_progress(self.rows_embedded / (len(ENCODERS) * n_rows))
            elif isinstance(message, worker.FileDone):
                done_files.append(message)
                n_left_of_child[child] -= 1
        return done_files


def next_message(
    workers: LocalWorkers, busy: Iterable[Child], silence_s: float = SILENCE_S
) -> tuple[Child, Message]:
    """Wait for the next message of a worker, and return the worker and the message.

    Args:
        workers: The worker processes.
        busy: The workers that have work.
        silence_s: A busy worker without progress for so many seconds is regarded as failed.

    Raises:
        WorkerError: A worker failed, died or made no progress, or the run was interrupted. If a
            worker reports an error of our own classes, this error is raised instead.
    """
    while True:
        # Look for workers that hang, at least once in a second. A silent child does not even send
        # its sign of life.
        for child in busy:
            idle_s = time.monotonic() - child.last_progress_s  # since it last made progress
            if idle_s > silence_s or child.is_silent:
                raise WorkerError(
                    f"worker on {child.device} has not moved for {idle_s:.0f} s; see {child.log}"
                )
        child_and_message = workers.receive(1.0)
        if child_and_message is None:
            continue
        child, message = child_and_message
        if isinstance(message, Failed):
            raise _failure(child, message)
        if not isinstance(message, Closed):
            return child, message

        # The connection is closed, so the process has ended or is ending.
        status = child.end(0.5)
        if workers.cancelled:
            raise WorkerError(INTERRUPTED)
        raise WorkerError(
            f"worker on {child.device} ended (status {status}); last words: {child.last_words}; "
            f"see {child.log}"
        )


def _failure(child: Child, message: Failed) -> Exception:
    """Convert the failure that a worker reports to an exception.

    Returns:
        An error of the class that the worker raised, if it is one of virnuc's; else a
        `WorkerError` with the worker's traceback.
    """
    virnuc_error = error_from_name(message.kind, message.message)
    if virnuc_error is not None:
        return virnuc_error
    return WorkerError(
        f"worker on {child.device}: {message.kind}: {message.message}; see {child.log}",
        worker_traceback=message.traceback,
    )


def scaled_seconds(
    measured_files: Sequence[worker.FileDone],
    growth: float,
    *,
    total_rows: int,
    devices: int,
    load_each_file: bool,
) -> float:
    """Estimate the seconds that an encoder's stage would take on the whole input.

    The whole input would be cut into files of 10,000 rows, which are distributed to the devices.
    The stage takes as long as the device with the most work. The time to compute is proportional to
    the number of tokens, and is divided among the files by their rows. The time to load a model is
    the mean of the measured ones.

    Args:
        measured_files: Times of the files that were measured.
        growth: Tokens of the whole input divided by the measured tokens.
        total_rows: Rows of the whole input.
        devices: Number of devices.
        load_each_file: True if the program loads the model again for each file; false if it loads
            the model once on each device.
    """
    compute_s = sum(file.compute_s for file in measured_files) * growth
    # Mean time of loading, over the files that report one
    loads_s = [file.load_s for file in measured_files if file.load_s > 0]
    mean_load_s = 0.0
    if loads_s:
        mean_load_s = sum(loads_s) / len(loads_s)

    # Cost of each file of the whole input
    file_sizes = [high - low for low, high in batches.file_ranges(total_rows, batches.FILE_ROWS)]
    costs_s = []
    for n_rows in file_sizes:
        cost_s = compute_s * n_rows / total_rows
        if load_each_file:
            cost_s += mean_load_s
        costs_s.append(cost_s)

    # Time of the device with the most work
    files_by_device = batches.assign_to_devices(file_sizes, devices)
    busiest_s = max(sum(costs_s[file] for file in files) for files in files_by_device)
    if load_each_file:
        return busiest_s  # it includes the loads
    return busiest_s + mean_load_s


def load_rows(load_range: Callable[[int, int], list[T]], positions: NDArray[np.int64]) -> list[T]:
    """Load the items at some positions with a function that loads ranges.

    Neighbouring positions are loaded together, so that there are few calls.

    Args:
        load_range: Returns the items from its first argument to before its second.
        positions: Sorted positions; a position may occur several times.

    Returns:
        The items in the order of the positions.

    >>> load_rows(lambda low, high: list(range(low, high)), np.array([3, 4, 5, 9, 9]))
    [3, 4, 5, 9, 9]
    """
    values: list[T] = []
    for low, high in slices(positions):
        values += load_range(low, high)
    return values
