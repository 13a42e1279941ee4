"""Run a baseline over an ORF store, on the machine's own devices, or take its time from a record."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from virnuc_core.baseline import worker
from virnuc_core.config import Devices, EngineSpec, OnShare
from virnuc_core.encoders.digests import fingerprint
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
from virnuc_core.telemetry.tables import ENCODERS, STAGES
from virnuc_core.validation import BaselineSubset, BaselineSummary

log = logging.getLogger(__name__)

SILENCE_S: Final = 1_800.0  # loading 3 B weights from a slow disk is silent
DEVICE_WAIT_S: Final = 60.0  # for another run to finish with it
SEED: Final = 0
_, _, SPLIT_DNA, SPLIT_PROTEIN, DNABERT_S, ESM2, MERGING, PREDICTION, CONSENSUS = STAGES

T = TypeVar("T")


def run_baseline(
    run: RunDir,
    store: Path,
    models: Path,
    devices: Devices,
    spec: BaselineSpec,
    on_progress: OnShare = lambda _: None,
) -> BaselineSummary:
    """Measure a baseline on `store` and write its result files, `summary.json` and `run.json` into `run`. With
    `spec.reads` it runs on that many reads, drawn by `SEED`, and its time is scaled. A finished baseline of the same
    reads, weights, devices and settings is returned as it is, marked `reused`. Nothing it started outlives the call.
    `on_progress` hears the share of the embedding that is done. Errors: `ConfigError` for a recorded baseline without
    its numbers; `WeightsError`, `DeviceError`, `InputError`; `WorkerError` with a failed worker's traceback."""
    orfs = OrfStore.open(store)
    if spec.source == "recorded":
        summary = _recorded(orfs, spec)
        run.record.unlink(missing_ok=True)  # it is not of these reads and weights
        write(run.summary, summary)
        return summary
    workers = LocalWorkers("virnuc_core.baseline.worker")
    chosen = resolve(devices)[: 1 if spec.name == "vanilla" else None]
    record = new_record(
        RunRecord,
        chosen,
        spec=spec.model_dump(
            mode="json", exclude={"recorded_reads", "results"}
        ),  # which say nothing of a run
        model_length=orfs.model_length,
        fingerprints={"reads": orfs.fingerprint, **fingerprint(models)},
        seeds={"baseline": SEED},
        store=os.path.relpath(orfs.path, run.root),
    )
    made_of = record.model_dump_json(include={"spec", "fingerprints", "devices", "seeds"})
    identity = hashlib.sha256(made_of.encode()).hexdigest()
    with run_lock(run.root):
        before = read_or_set_aside(run.summary, BaselineSummary)
        if before is not None and before.fingerprint == identity:
            wrong = [
                name
                for name, left in (before.files or {}).items()
                if digest(run.root / name) != left
            ]
            if not wrong:
                if read_or_set_aside(run.record, RunRecord) is None:
                    write(run.record, record)
                return before.model_copy(update={"reused": True})
            log.warning(
                "%s: %s not as the baseline left it; it is measured again",
                run.root,
                ", ".join(wrong),
            )
        run.summary.unlink(missing_ok=True)
        summary = _Measurement(run, orfs, models, chosen, spec, workers, on_progress).measure()
        discard(run.root, BASELINE_FILES)
        files = {path.name: digest(path) for path in (run.predictions, run.consensus)}
        summary = summary.model_copy(update={"fingerprint": identity, "files": files})
        write(run.record, record)
        write(run.summary, summary)
    return summary


def _recorded(store: OrfStore, spec: BaselineSpec) -> BaselineSummary:
    device, count = spec.recorded_device, spec.recorded_devices or 1
    if spec.results is None and (spec.recorded_seconds is None or device is None):
        raise ConfigError(
            "baseline: a recorded one needs recorded_seconds and recorded_device, or results"
        )
    return BaselineSummary(
        name=spec.name,
        source="recorded",
        wall_s=spec.recorded_seconds,
        n_reads=store.n_reads,
        n_rows=store.n_rows,
        devices=tuple(
            Device(id=f"recorded-{i}", kind="cuda", name=device) for i in range(count) if device
        ),
    )


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
    # by stage; rows come from the store, chunked and translated
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES[2:], 0.0))
    rows_embedded: int = 0

    @property
    def folder(self) -> Path:
        return self.run.root / "baseline_files"

    def measure(self) -> BaselineSummary:
        """The result files, and everything that the summary says but the fingerprint."""
        reads = choose_reads(self.store.n_reads, self.spec.reads, SEED)
        covered = np.zeros(self.store.n_reads, dtype=bool)
        covered[reads] = True
        rows = np.flatnonzero(covered[np.asarray(self.store.row_read)])
        if len(rows) == 0 and self.store.n_rows > 0:
            raise InputError(
                f"none of the {len(reads)} reads drawn for the baseline has an open frame; draw more"
            )
        file_rows, subset = worker.FILE_ROWS, None
        if len(rows) and len(reads) < self.store.n_reads:
            tokens = (np.diff(np.asarray(self.store.protein_offsets)) + 2)[
                np.asarray(self.store.row_unique)
            ]
            counts = {"tokens": int(tokens[rows].sum()), "total_tokens": int(tokens.sum())}
            subset = BaselineSubset(reads=len(reads), seed=SEED, **counts)
            # so that every device has work, as it would have on the whole input
            file_rows = max(1, min(worker.FILE_ROWS, -(-len(rows) // len(self.devices))))
        began = time.monotonic()
        files = worker.cut(len(rows), file_rows)
        self._split(rows, files)
        done, start_s = self._embed_and_predict([high - low for low, high in files], len(rows))
        voting = time.monotonic()
        scores = [
            np.load(worker.file_path(self.folder, "scores.npy", number))
            for number in range(1, len(files) + 1)
        ]
        write_covered(
            self.run,
            self.store,
            covered,
            np.concatenate([np.empty((0, 2), dtype=np.float32), *scores]),
        )
        self.seconds[CONSENSUS] = time.monotonic() - voting
        wall_s = measured_s = time.monotonic() - began
        scaled = self.seconds
        if subset:
            growth, total, devices = (
                subset.total_tokens / subset.tokens,
                self.store.n_rows,
                len(self.devices),
            )
            scaled = {name: value * total / len(rows) for name, value in self.seconds.items()}
            for stage, each in ((DNABERT_S, self.spec.name != "v1"), (ESM2, True)):
                scaled[stage] = scaled_seconds(
                    done[stage], growth, total_rows=total, devices=devices, load_each_file=each
                )
            wall_s = sum(scaled.values()) + start_s
        return BaselineSummary(
            name=self.spec.name,
            source="measured",
            wall_s=wall_s,
            stages=scaled,
            subset=subset,
            measured_s=measured_s,
            measured_stages=self.seconds,
            n_reads=self.store.n_reads,
            n_rows=self.store.n_rows,
            measured_rows=len(rows),
            devices=tuple(self.devices),
        )

    def _split(self, rows: NDArray[np.int64], files: list[tuple[int, int]]) -> None:
        """Write the rows as files of both kinds."""
        discard(self.run.root, BASELINE_FILES)
        self.folder.mkdir(parents=True, exist_ok=True)
        kinds = (
            ("nucleotide.fa", self.store.dna, SPLIT_DNA),
            ("protein.fa", self.store.protein, SPLIT_PROTEIN),
        )
        for number, (low, high) in enumerate(files, start=1):
            began = time.monotonic()
            ids = fetch(self.store.row_ids, rows[low:high])
            unique = np.asarray(self.store.row_unique)[rows[low:high]]
            for kind, sequences, stage in kinds:
                worker.write_fasta(
                    worker.file_path(self.folder, kind, number), ids, fetch(sequences, unique)
                )
                now = time.monotonic()
                self.seconds[stage] += now - began
                began = now

    def _embed_and_predict(
        self, sizes: list[int], rows: int
    ) -> tuple[dict[str, list[worker.FileDone]], float]:
        """The four stages of the worker processes on files of these sizes, each on the worker it is dealt to: the files
        done in each, and the seconds it took to start the workers. A worker that dies ends the baseline."""
        done: dict[str, list[worker.FileDone]] = {}
        if not sizes:
            return done, 0.0
        shares, one_worker = worker.assign(sizes, len(self.devices)), [list(range(len(sizes)))]
        started = time.monotonic()
        with self.workers as workers:
            specs = worker_specs(self.models, self.devices, EngineSpec(device_wait_s=DEVICE_WAIT_S))
            logs = self.run.root / "logs"
            children = [
                workers.start(spec, logs / f"baseline-{spec.device.id}.log") for spec in specs
            ]
            for _ in children:
                assert isinstance(expect(workers, children)[1], Ready)
            start_s = time.monotonic() - started
            for stage, op in zip(
                (DNABERT_S, ESM2, MERGING, PREDICTION), get_args(worker.Operation), strict=True
            ):
                began, done[stage] = time.monotonic(), []
                plan = dict(zip(children, shares if op in ENCODERS else one_worker, strict=False))
                todo = {child: len(files) for child, files in plan.items()}
                for child, files in plan.items():
                    for file in files:
                        name, folder = self.spec.name, str(self.folder)
                        child.send(
                            worker.FileTask(op=op, algorithm=name, folder=folder, file=file + 1)
                        )
                while busy := [child for child, files in todo.items() if files]:
                    child, event = expect(workers, busy)
                    if isinstance(event, worker.RowsDone):
                        self.rows_embedded += event.rows
                        self.on_progress(self.rows_embedded / (2 * rows))
                    elif isinstance(event, worker.FileDone):
                        done[stage].append(event)
                        todo[child] -= 1
                self.seconds[stage] = time.monotonic() - began
        return done, start_s


def expect(
    workers: LocalWorkers, busy: Iterable[Child], silence_s: float = SILENCE_S
) -> tuple[Child, Message]:
    """The next message of workers none of which may fail. Errors: our own as the worker raised them; `WorkerError` for
    one that failed otherwise, died, or is `busy` and silent or unmoved for `silence_s`; after `end_all_children`."""
    while True:
        for child in busy:
            if (rest_s := time.monotonic() - child.progress_s) > silence_s or child.silent:
                raise WorkerError(
                    f"worker on {child.device} has not moved for {rest_s:.0f} s; see {child.log}"
                )
        if (received := workers.receive(1.0)) is None:
            continue
        child, heard = received
        if isinstance(heard, Failed):
            problem = f"worker on {child.device}: {heard.kind}: {heard.message}; see {child.log}"
            raise error_from_name(heard.kind, heard.message) or WorkerError(
                problem, worker_traceback=heard.traceback
            )
        if not isinstance(heard, Closed):
            return received
        ended = f"ended (status {child.end(0.5)}); last words: {child.last_words}"
        raise WorkerError(
            INTERRUPTED
            if workers.cancelled
            else f"worker on {child.device} {ended}; see {child.log}"
        )


def scaled_seconds(
    done: Sequence[worker.FileDone],
    growth: float,
    *,
    total_rows: int,
    devices: int,
    load_each_file: bool,
) -> float:
    """Seconds a stage would take on all rows in files of 10,000, dealt to the devices as the algorithm does. The
    measured seconds of computing, which grow with the tokens, are shared out over those files by their rows; each file,
    or each device when the model stays loaded, costs the mean time of a load besides."""
    files = [high - low for low, high in worker.cut(total_rows, worker.FILE_ROWS)]
    compute_s = sum(one.compute_s for one in done) * growth
    loads = [one.load_s for one in done if one.load_s > 0]
    load_s = sum(loads) / max(1, len(loads))
    costs = [compute_s * rows / total_rows + load_s * load_each_file for rows in files]
    busiest = max(sum(costs[i] for i in share) for share in worker.assign(files, devices))
    return busiest if load_each_file else busiest + load_s


def fetch(read: Callable[[int, int], list[T]], at: NDArray[np.int64]) -> list[T]:
    """What `read(lo, hi)` gives at each of the places `at`, asked for in as few stretches as they form.

    >>> fetch(lambda lo, hi: list(range(lo, hi)), np.array([3, 4, 5, 9, 9]))
    [3, 4, 5, 9, 9]
    """
    return [one for span in slices(at) for one in read(*span)]
