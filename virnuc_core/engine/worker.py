"""The worker process: one device, pinned; tasks in, committed shards out.

`python -m virnuc_core.engine.worker PARENT_PID`; JSON lines on standard input and output. In: a WorkerSpec, a JobSpec
(`"op": "begin"`, which may come much later: the weights are loaded meanwhile), any number of Orders
(`"op": "compute"`), then `{"op": "stop"}`. Out: `ready`, `alive`, `committed`, `probed`, `oom`, `error`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from virnuc_core.engine.messages import JobSpec, ShardTask, WorkerSpec
from virnuc_core.engine.process import Parent

if TYPE_CHECKING:
    from virnuc_core.engine.runner import Runner

COMMITS_AHEAD = 2  # results that may wait for the disk before the launch loop does
TERM_GRACE_S = 5.0
SAMPLED_ROWS = 10_000  # of the store, to warm up with rows of its usual length
BEGIN_SOON_S = 0.2  # a job that is there already comes within this; its first batches are then packed first


class Worker:
    """Everything between the parent's messages and the device."""

    def __init__(self, parent: Parent, spec: WorkerSpec) -> None:
        self.parent, self.spec = parent, spec
        self.started_s = self._idle_s = time.monotonic()
        self.loaded: dict[str, Any] = {}  # what the parent is told of the encoders
        self.waited_s = 0.0  # loaded, and without a job
        self.runner: Runner | None = None
        self.stopping = threading.Event()
        self.device_lock: int | None = None  # kept open for as long as this process lives
        self._writes: queue.Queue[Any] = queue.Queue(maxsize=COMMITS_AHEAD)

    def beat(self) -> None:
        """From now on tell the parent regularly that this process moves."""
        self.parent.beat(self.spec.engine.heartbeat_s, self._progress_s)

    def run(self) -> None:
        """Load, then compute tasks until told to stop.

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
        if job is not None and not self.stopping.is_set():
            self._work(job, runner)

    def _job(self, timeout_s: float | None) -> JobSpec | None:
        """The job, if it comes within `timeout_s` (None: whenever it comes); None also when told to stop."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.stopping.is_set() and (deadline is None or time.monotonic() < deadline):
            with contextlib.suppress(queue.Empty):
                message = self.parent.messages.get(timeout=min(0.2, timeout_s or 0.2))
                if message is None or message["op"] == "stop":
                    self.stopping.set()
                    return None
                return JobSpec.from_json(message)
        return None

    def _work(self, job: JobSpec, runner: Runner | None) -> None:
        from virnuc_core.engine.loader import Feeder, Loader, open_store
        from virnuc_core.engine.shards import read_plan
        from virnuc_core.rundir import RunDir

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
        ready_s = time.monotonic() - self.started_s - self.waited_s
        self.parent.send(
            {"event": "ready", "pid": os.getpid(), **self.loaded, "ready_s": ready_s, "waited_s": self.waited_s}
        )
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        if spec.trace is None:
            self.runner.run(feeder, self._hand_over)
        else:
            from virnuc_core.engine.tracing import Traced

            with Traced(feeder, spec.trace, spec.device) as traced:
                self.runner.run(traced, self._hand_over)
        self._writes.put(None)
        writer.join()

    def _load(self) -> Runner:
        """Both encoders and the head on the device."""
        import torch

        from virnuc_core.encoders.checkpoint import load_all
        from virnuc_core.engine.runner import Runner

        device = torch.device("cuda:0" if self.spec.device.kind == "cuda" else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)
        esm2, dnabert_s, head = load_all(Path(self.spec.models), device, self.spec.engine)
        runner = Runner(esm2, dnabert_s, head, device)
        self.loaded = {
            "load_s": time.monotonic() - self.started_s,
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
        from virnuc_core.encoders.checkpoint import open_head

        return open_head(Path(self.spec.models))[0].model_length // 3 + 2

    def _typical_length(self) -> int:
        """Tokens of the store's middle row."""
        import numpy as np

        return int(np.median(np.diff(self.store.protein_offsets[:SAMPLED_ROWS]))) + 2

    def _progress_s(self) -> float:
        """When the worker last did something; loading, and waiting for tasks, is doing something."""
        return time.monotonic() if self.runner is None else max(self._idle_s, self.runner.progress_s)

    def _next_task(self) -> ShardTask | None:
        while not self.stopping.is_set():
            try:
                message = self.parent.messages.get(timeout=0.2)
            except queue.Empty:
                self._idle_s = time.monotonic()
                continue
            if message is None or message["op"] == "stop":
                return None
            return ShardTask.from_json(message)
        return None

    def _hand_over(self, pending: Any) -> None:
        self._writes.put(pending)

    def _write(self) -> None:
        try:
            while (pending := self._writes.get()) is not None:
                self._commit(pending)
        except Exception as error:  # noqa: BLE001 - said at once: the launch loop may be waiting for tasks that never come
            give_up(self.parent, error)

    def _commit(self, pending: Any) -> None:
        from virnuc_core.engine.runner import not_finite
        from virnuc_core.engine.shards import commit
        from virnuc_core.errors import ShardError

        result = pending.wait()
        finished = time.monotonic()
        task: ShardTask = pending.task
        if task.probe:
            self.parent.send({"event": "probed", "shard": task.shard, "lo": task.lo, "hi": task.hi})
            return
        bad = not_finite(result, task)
        if bad:
            rows = self.store.unique_row[bad[:5]].tolist()
            names = ", ".join(self.store.row_ids(row, row + 1)[0] for row in rows)
            raise ShardError(
                f"{len(bad)} embeddings are not finite (first: {names}); do not trust these weights at this precision",
                shard=task.shard,
            )
        if self.spec.engine.commit:
            commit(self.run_dir, self.plan, task.shard, result)
        committed = time.monotonic()
        batches = pending.batches(self.spec.device.id)
        seconds = {
            name: sum(b.device_ms or 0.0 for b in batches if b.encoder == name) / 1e3 for name in ("dnabert_s", "esm2")
        }
        self.parent.send(
            {
                "event": "committed",
                "device": self.spec.device.id,
                "shard": task.shard,
                "rows": pending.rows,
                "budget_divisor": task.divisor,
                "skipped": len(task.skip),
                "protein_tokens": pending.protein_tokens,
                "dna_tokens": pending.dna_tokens,
                "started_s": pending.started_s,
                "finished_s": finished,
                "dnabert_s": seconds["dnabert_s"],
                "esm2_s": seconds["esm2"],
                "head_s": pending.head.milliseconds() / 1e3,
                "commit_s": committed - finished,
                "merge_s": 0.0,
                "batches": [asdict(batch) for batch in batches],
            }
        )


def give_up(parent: Parent, error: Exception) -> NoReturn:
    """Tell the parent what went wrong, in whichever thread it did, and end the process."""
    event = "oom" if type(error).__name__ == "OutOfMemoryError" else "error"
    trace = "".join(traceback.format_exception(error))
    parent.send({"event": event, "kind": type(error).__name__, "message": str(error), "traceback": trace})
    os._exit(1)


def write_errors_to(log: Path) -> None:
    """From now on standard error, this process's and its children's, goes to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 2)
    os.close(handle)


def main() -> None:
    """Run one worker until its parent says stop, closes its input or dies."""
    parent = Parent()
    spec = WorkerSpec.from_json(parent.spec)
    worker = Worker(parent, spec)

    def terminate(*_: object) -> None:
        worker.stopping.set()
        threading.Timer(TERM_GRACE_S, os._exit, (143,)).start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, terminate)
    if spec.device.core is not None:
        from virnuc_core.engine.devices import pin_to_core

        pin_to_core(spec.device.core)
    parent.listen()
    worker.beat()
    try:
        if spec.device.kind == "cuda":
            from virnuc_core.rundir import lock_device

            worker.device_lock = lock_device(spec.device.id, spec.engine.device_wait_s)
        worker.run()
    except Exception as error:  # noqa: BLE001 - a worker's failure reaches the pool with its traceback
        give_up(parent, error)
    os._exit(0)  # skip interpreter shutdown: everything is committed, and threads or CUDA may linger


if __name__ == "__main__":
    main()
