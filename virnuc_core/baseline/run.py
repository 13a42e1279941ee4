"""Run a baseline over an ORF store, on the machine's own devices, or take its time from a record."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from virnuc_core.baseline.crew import Crew, Operation, Phase
from virnuc_core.baseline.files import FILE_ROWS, Folder, assign, choose_reads, cut, write_fasta
from virnuc_core.baseline.scaling import Growth, scale_phase, scale_stage
from virnuc_core.baseline.worker import WorkerSpec
from virnuc_core.config import BaselineSpec, Devices
from virnuc_core.encoders.checkpoint import fingerprint
from virnuc_core.engine.devices import Device, resolve
from virnuc_core.engine.process import cancel_token
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.store import OrfStore
from virnuc_core.results import write_covered
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import BaselineSubset, BaselineSummary, DeviceRecord, device_records, read, write
from virnuc_core.telemetry.records import STAGES

_CHUNKING, _TRANSLATION, SPLIT_DNA, SPLIT_PROTEIN, DNABERT_S, ESM2, MERGING, PREDICTION, CONSENSUS = STAGES
OWN_STAGES: Final = STAGES[2:]  # rows come from the store, chunked and translated

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BaselineProgress:
    """How far a baseline is: rows that have gone through an encoder, of all that will, twice each."""

    stage: str
    rows: int
    total_rows: int


def run_baseline(
    run: RunDir,
    store: Path,
    models: Path,
    devices: Devices,
    spec: BaselineSpec,
    *,
    seed: int = 0,
    on_progress: Callable[[BaselineProgress], None] = lambda _: None,
) -> BaselineSummary:
    """Measure a baseline on `store` and write its result files and `summary.json` into `run`.

    With `spec.reads` it runs on that many reads, drawn by `seed`, and its time is scaled. A finished baseline of the
    same reads, weights, devices and settings is returned as it is, marked `reused`. Nothing it started outlives the
    call. Errors: `ConfigError` for a recorded baseline without its numbers; `WeightsError`, `DeviceError`,
    `InputError`; `WorkerError` with the worker's traceback for a worker that failed.
    """
    opened = OrfStore.open(store)
    if spec.source == "recorded":
        summary = _recorded(opened, spec)
        write(run.summary, summary)
        return summary
    token = cancel_token()
    chosen = resolve(devices)
    if spec.name == "vanilla":
        chosen = chosen[:1]
    identity = _identity(opened, models, chosen, spec, seed)
    with run_lock(run.root):
        if run.summary.exists() and run.predictions.exists() and run.consensus.exists():
            before = read(run.summary, BaselineSummary)
            if before.fingerprint == identity:
                return before.model_copy(update={"reused": True})
        run.summary.unlink(missing_ok=True)
        measurement = _Measurement(run, opened, models, chosen, spec, token, on_progress)
        summary = measurement.measure(seed, identity)
        shutil.rmtree(measurement.folder.root)
        write(run.summary, summary)
    return summary


def _recorded(store: OrfStore, spec: BaselineSpec) -> BaselineSummary:
    if spec.recorded_seconds is None or spec.recorded_device is None:
        raise ConfigError("baseline: a recorded one needs recorded_seconds and recorded_device")
    count = spec.recorded_devices or 1
    return BaselineSummary(
        name=spec.name,
        source="recorded",
        wall_s=spec.recorded_seconds,
        stages={},
        subset=None,
        measured_s=None,
        measured_stages={},
        scaled_s=None,
        n_reads=store.n_reads,
        n_rows=store.n_rows,
        measured_rows=0,
        file_rows=0,
        devices=tuple(DeviceRecord(id=f"recorded-{i}", kind="cuda", name=spec.recorded_device) for i in range(count)),
        fingerprint="recorded",
    )


def _identity(store: OrfStore, models: Path, devices: tuple[Device, ...], spec: BaselineSpec, seed: int) -> str:
    body = {
        "reads": store.fingerprint,
        "weights": asdict(fingerprint(models)),
        "devices": [device.record() for device in devices],
        "spec": spec.model_dump(mode="json"),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class _Measurement:
    """One measured run: the chosen rows through files, encoders and head to the result files."""

    run: RunDir
    store: OrfStore
    models: Path
    devices: tuple[Device, ...]
    spec: BaselineSpec
    token: threading.Event
    on_progress: Callable[[BaselineProgress], None]
    rows_embedded: int = 0

    @property
    def folder(self) -> Folder:
        return Folder(self.run.root / "baseline_files")

    def measure(self, seed: int, identity: str) -> BaselineSummary:
        """Everything but the summary file."""
        reads = choose_reads(self.store.n_reads, self.spec.reads, seed)
        covered = np.zeros(self.store.n_reads, dtype=bool)
        covered[reads] = True
        rows = np.flatnonzero(covered[np.asarray(self.store.row_read)])
        if len(rows) == 0 and self.store.n_rows > 0:
            raise InputError(f"none of the {len(reads)} reads drawn for the baseline has an open frame; draw more")
        subset = self._subset(reads, rows, seed)
        file_rows = FILE_ROWS
        if subset is not None:  # so that every device has work, as it would have on the whole input
            file_rows = max(1, min(FILE_ROWS, -(-len(rows) // len(self.devices))))
        began = time.monotonic()
        files = list(cut(len(rows), file_rows))
        seconds = dict.fromkeys(OWN_STAGES, 0.0)
        self._split(rows, files, seconds)
        phases, start_s = self._embed_and_predict([high - low for low, high in files], len(rows))
        seconds |= {name: phase.wall_s for name, phase in phases.items()}
        voting = time.monotonic()
        scores = [np.load(self.folder.scores(number)) for number in range(1, len(files) + 1)]
        write_covered(self.run, self.store, covered, np.concatenate([np.empty((0, 2), dtype=np.float32), *scores]))
        seconds[CONSENSUS] = time.monotonic() - voting
        measured_s = time.monotonic() - began
        scaled = None if subset is None else self._scaled(seconds, phases, subset, len(rows))
        scaled_s = None if scaled is None else sum(scaled.values()) + start_s
        return BaselineSummary(
            name=self.spec.name,
            source="measured",
            wall_s=measured_s if scaled_s is None else scaled_s,
            stages=scaled or seconds,
            subset=subset,
            measured_s=measured_s,
            measured_stages=seconds,
            scaled_s=scaled_s,
            n_reads=self.store.n_reads,
            n_rows=self.store.n_rows,
            measured_rows=len(rows),
            file_rows=file_rows,
            devices=device_records(device.record() for device in self.devices),
            fingerprint=identity,
        )

    def _subset(self, reads: NDArray[np.int64], rows: NDArray[np.int64], seed: int) -> BaselineSubset | None:
        if len(reads) == self.store.n_reads:
            return None
        tokens = np.diff(np.asarray(self.store.protein_offsets)) + 2
        unique = np.asarray(self.store.row_unique)
        return BaselineSubset(
            reads=len(reads),
            tokens=int(tokens[unique[rows]].sum()),
            total_tokens=int(tokens[unique].sum()),
            seed=seed,
        )

    def _split(self, rows: NDArray[np.int64], files: list[tuple[int, int]], seconds: dict[str, float]) -> None:
        """Write the rows as files of both kinds."""
        if self.folder.root.exists():
            shutil.rmtree(self.folder.root)
        self.folder.root.mkdir(parents=True)
        for number, (low, high) in enumerate(files, start=1):
            started = time.monotonic()
            ids = fetch(self.store.row_ids, rows[low:high])
            unique = np.asarray(self.store.row_unique)[rows[low:high]]
            write_fasta(self.folder.nucleotide(number), ids, fetch(self.store.dna, unique))
            middle = time.monotonic()
            write_fasta(self.folder.protein(number), ids, fetch(self.store.protein, unique))
            seconds[SPLIT_DNA] += middle - started
            seconds[SPLIT_PROTEIN] += time.monotonic() - middle

    def _embed_and_predict(self, sizes: list[int], rows: int) -> tuple[dict[str, Phase], float]:
        """The four stages of the worker processes, and the seconds it took to start these."""
        if not sizes:
            return {}, 0.0
        shares = [[i + 1 for i in share] for share in assign(sizes, len(self.devices))]
        one_worker = [list(range(1, len(sizes) + 1))]
        steps: tuple[tuple[str, Operation, list[list[int]]], ...] = (
            (DNABERT_S, "dnabert_s", shares),
            (ESM2, "esm2", shares),
            (MERGING, "merge", one_worker),
            (PREDICTION, "predict", one_worker),
        )
        root, models = str(self.folder.root), str(self.models)
        workers = [WorkerSpec(root, models, self.spec.name, device) for device in self.devices]
        started = time.monotonic()
        with Crew(workers, self.run.root / "logs", self.token) as crew:
            start_s = time.monotonic() - started
            phases = {}
            for stage, operation, plan in steps:
                phases[stage] = crew.phase(operation, plan, self._teller(stage, rows))
        return phases, start_s

    def _teller(self, stage: str, rows: int) -> Callable[[int], None]:
        def tell(more: int) -> None:
            self.rows_embedded += more
            self.on_progress(BaselineProgress(stage, self.rows_embedded, 2 * rows))

        return tell

    def _scaled(
        self, seconds: dict[str, float], phases: dict[str, Phase], subset: BaselineSubset, rows: int
    ) -> dict[str, float]:
        """The stages' seconds on the whole input."""
        growth = Growth(
            tokens=subset.total_tokens / subset.tokens,
            rows=self.store.n_rows / rows,
            total_rows=self.store.n_rows,
            devices=len(self.devices),
        )
        scaled = {name: scale_stage(value, growth) for name, value in seconds.items()}
        keeps_dnabert_s = self.spec.name == "v1"
        scaled[DNABERT_S] = scale_phase(phases[DNABERT_S], growth, load_each_file=not keeps_dnabert_s)
        scaled[ESM2] = scale_phase(phases[ESM2], growth, load_each_file=True)
        return scaled


def fetch(read: Callable[[int, int], list[T]], at: NDArray[np.int64]) -> list[T]:
    """What `read(lo, hi)` gives at each of the places `at`, asked for in as few stretches as they form.

    >>> fetch(lambda lo, hi: list(range(lo, hi)), np.array([3, 4, 5, 9, 9]))
    [3, 4, 5, 9, 9]
    """
    if len(at) == 0:
        return []
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    found: list[T] = []
    for stretch in np.split(at, breaks):
        found += read(int(stretch[0]), int(stretch[-1]) + 1)
    return found
