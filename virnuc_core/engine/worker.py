"""The engine's worker process: one device, pinned; shard tasks in, committed shards out.

Messages in: a WorkerSpec, a JobSpec (which may come much later: the weights are loaded meanwhile), any number of
ShardTasks, then Stop. Out: Ready, Computed, Failed.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from virnuc_core.encoders.checkpoint import load_all, open_head
from virnuc_core.engine.loader import Feeder, Loader, Take, open_store
from virnuc_core.engine.messages import Computed, JobSpec, Ready, ShardTask, WorkerSpec
from virnuc_core.engine.process import Parent
from virnuc_core.engine.runner import Pending, Runner, milliseconds, not_finite
from virnuc_core.engine.shards import commit, read_plan
from virnuc_core.errors import ShardError
from virnuc_core.rundir import RunDir
from virnuc_core.telemetry.tables import ShardDone

COMMITS_AHEAD = 2  # results that may wait for the disk before the launch loop does
TERM_GRACE_S = 5.0
SAMPLED_ROWS = 10_000  # of the store, to warm up with rows of its usual length
BEGIN_SOON_S = 0.2  # a job that is there already comes within this; its first batches are then packed first
POLL_S = 0.2  # how soon SIGTERM is noticed by who waits for a message


class Worker:
    """Everything between the parent's messages and the device."""

    def __init__(
        self,
        parent: Parent,
        spec: WorkerSpec,
        recording: Callable[[Take], AbstractContextManager[Take]] = nullcontext,
    ) -> None:
        self.parent, self.spec, self._recording = parent, spec, recording
        self._idle_s = time.monotonic()
        self.waited_s = 0.0  # loaded, and without a job
        self.runner: Runner | None = None
        self.stopping = threading.Event()
        self._writes: queue.Queue[Pending | None] = queue.Queue(maxsize=COMMITS_AHEAD)
        parent.progress = self._progress_s
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        """On SIGTERM: what has been launched is committed, if that takes no longer than a few seconds."""
        self.stopping.set()
        threading.Timer(TERM_GRACE_S, os._exit, (143,)).start()

    def run(self) -> None:
        """Load, then compute shards until told to stop.

        With a job at hand the first batches are packed while the weights are read; without one they are read first.
        """
        job = self._job(BEGIN_SOON_S)
        runner = None
        if job is None and not self.stopping.is_set():
            runner = self._load()
            self._warm_up(runner, self._usual_length())
            loaded_s = time.monotonic()
            job = self._job(None)
            self.waited_s = time.monotonic() - loaded_s
        if job is not None:
            self._work(job, runner)

    def _job(self, timeout_s: float | None) -> JobSpec | None:
        """The job, if it comes within `timeout_s` (None: whenever it comes); None also when told to stop."""
        while not self.stopping.is_set():
            message = self.parent.receive(timeout_s or POLL_S)
            if isinstance(message, JobSpec):
                return message
            if message is not None:
                self.stopping.set()
            if timeout_s is not None:
                break
        return None

    def _work(self, job: JobSpec, runner: Runner | None) -> None:
        spec, engine = self.spec, self.spec.engine
        write_errors_to(Path(job.logs) / f"worker-{spec.device.id}.log")
        self.run_dir = RunDir(Path(job.run))
        self.plan = read_plan(self.run_dir)
        self.store = open_store(Path(job.store), job.reads)
        pin = engine.pin_memory and spec.device.kind == "cuda"
        loader = Loader(Path(job.store), job.reads, Path(spec.models), engine, pin=pin)
        feeder = Feeder(loader, self._next_task, engine.prefetch_factor * max(1, engine.num_workers))
        self.runner = runner or self._load()
        self._warm_up(self.runner, self._typical_length())
        self.said["ready_s"] = time.monotonic() - self.parent.started_s - self.waited_s
        self.parent.send(Ready(record={**self.said, "waited_s": self.waited_s}))
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        with self._recording(feeder.take) as take:
            self.runner.run(take, self._writes.put)
        self._writes.put(None)
        writer.join()

    def _load(self) -> Runner:
        """Both encoders and the head on the device."""
        device = torch.device("cuda:0" if self.spec.device.kind == "cuda" else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)
        esm2, dnabert_s, head = load_all(Path(self.spec.models), device, self.spec.engine)
        runner = Runner(esm2, dnabert_s, head, device)
        self.said = {
            "device": self.spec.device.id,
            "pid": os.getpid(),
            "load_s": time.monotonic() - self.parent.started_s,
            "torch": torch.__version__,
            "attention": {"esm2": esm2.attention, "dnabert_s": dnabert_s.attention},
            "precision": {"esm2": esm2.precision, "dnabert_s": dnabert_s.precision},
        }
        return runner

    def _warm_up(self, runner: Runner, length: int) -> None:
        """On a GPU: kernels compiled for rows of `length` tokens, and proof that the budgets fit."""
        if self.spec.device.kind == "cuda":
            budgets = {"dnabert_s": self.spec.engine.dna_token_budget, "esm2": self.spec.engine.token_budget}
            runner.warm_up({name: n // self.spec.divisor for name, n in budgets.items()}, length)

    def _usual_length(self) -> int:
        """Tokens of a full chunk's row, for as long as the reads are not known."""
        return open_head(Path(self.spec.models))[0].model_length // 3 + 2

    def _typical_length(self) -> int:
        """Tokens of the store's middle row."""
        return int(np.median(np.diff(self.store.protein_offsets[:SAMPLED_ROWS]))) + 2

    def _progress_s(self) -> float:
        """When the worker last did something; loading, and waiting for tasks, is doing something."""
        return time.monotonic() if self.runner is None else max(self._idle_s, self.runner.progress_s)

    def _next_task(self) -> ShardTask | None:
        while not self.stopping.is_set():
            message = self.parent.receive(POLL_S)
            if isinstance(message, ShardTask):
                return message
            if message is not None:
                return None
            self._idle_s = time.monotonic()
        return None

    def _write(self) -> None:
        try:
            while (pending := self._writes.get()) is not None:
                self._commit(pending)
        except Exception as error:  # noqa: BLE001 - said at once: the launch loop may be waiting for tasks that never come
            self.parent.give_up(error)

    def _commit(self, pending: Pending) -> None:
        result, task = pending.wait(), pending.task
        finished_s = time.monotonic()
        if task.probe:
            self.parent.send(Computed(done=None))
            return
        if bad := not_finite(result, task):
            rows = self.store.unique_row[bad[:5]].tolist()
            names = ", ".join(self.store.row_ids(row, row + 1)[0] for row in rows)
            raise ShardError(
                f"{len(bad)} embeddings are not finite (first: {names}); do not trust these weights at this precision",
                shard=task.shard,
            )
        if self.spec.engine.commit:
            commit(self.run_dir, self.plan, task.shard, result)
        commit_s = time.monotonic() - finished_s
        self.parent.send(Computed(done=self._done(pending, finished_s, commit_s)))

    def _done(self, pending: Pending, finished_s: float, commit_s: float) -> ShardDone:
        """What the parent is told of a shard on disk."""
        batches, task = pending.batches(self.spec.device.id), pending.task
        assert pending.head is not None
        return ShardDone(
            device=self.spec.device.id,
            shard=task.shard,
            rows=pending.rows,
            protein_tokens=pending.protein_tokens,
            dna_tokens=pending.dna_tokens,
            started_s=pending.started_s,
            finished_s=finished_s,
            dnabert_s=sum(b.device_ms or 0.0 for b in batches if b.encoder == "dnabert_s") / 1e3,
            esm2_s=sum(b.device_ms or 0.0 for b in batches if b.encoder == "esm2") / 1e3,
            head_s=milliseconds(pending.head) / 1e3,
            commit_s=commit_s,
            merge_s=0.0,
            batches=batches,
            budget_divisor=task.divisor,
            skipped=len(task.skip),
        )


def write_errors_to(log: Path) -> None:
    """From now on standard error, this process's and its children's, goes to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 2)
    os.close(handle)


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Compute shards until the parent says stop, closes its input or dies."""
    Worker(parent, spec).run()
