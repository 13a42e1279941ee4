"""A baseline's worker processes, and the files they are given. A worker that dies ends the baseline: no restarts."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self

from virnuc_core import errors
from virnuc_core.baseline.worker import WorkerSpec
from virnuc_core.engine.process import Child, end_children, spawn
from virnuc_core.errors import VirnucError, WorkerError

Operation = Literal["dnabert_s", "esm2", "merge", "predict"]

TICK_S: Final = 1.0
SILENCE_S: Final = 1_800.0  # loading 3 B weights from a slow disk is silent too


@dataclass(frozen=True, slots=True)
class FileDone:
    """One operation on one file."""

    device: str
    file: int
    rows: int
    load_s: float  # getting the model ready
    compute_s: float  # the rest


@dataclass(frozen=True, slots=True)
class Phase:
    """One operation over all files."""

    wall_s: float
    done: tuple[FileDone, ...]


class Crew:
    """One worker process a device, for as long as the `with` block lasts; they are gone when it ends."""

    def __init__(self, specs: Sequence[WorkerSpec], logs: Path, token: threading.Event) -> None:
        self._specs, self._logs, self._token = specs, logs, token
        self._inbox: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        self._children: list[Child] = []
        self._progress: dict[Child, float] = {}
        self._busy: set[Child] = set()

    def __enter__(self) -> Self:
        try:
            for spec in self._specs:
                name = f"baseline-{spec.device.id}"
                child = spawn(
                    "virnuc_core.baseline.worker",
                    spec.to_json(),
                    name=name,
                    inbox=self._inbox,
                    log=self._logs / f"{name}.log",
                    token=self._token,
                    environment=spec.device.environment(),
                )
                self._children.append(child)
                self._progress[child] = time.monotonic()
            waiting = set(self._children)
            while waiting:
                child, message = self._next()
                if message["event"] == "ready":
                    waiting.discard(child)
        except BaseException:
            end_children(self._children)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_children(self._children)

    def phase(self, operation: Operation, plan: Sequence[Sequence[int]], on_rows: Callable[[int], None]) -> Phase:
        """Do `operation` on all files; `plan` gives each device's files. Returns when the last one is done.

        Errors: those of weights, devices and input as the worker raised them; `WorkerError` for a worker that died.
        """
        started = time.monotonic()
        todo = {child: deque(files) for child, files in zip(self._children, plan, strict=False)}
        for child, files in todo.items():
            self._give(child, operation, files)
        done: list[FileDone] = []
        while len(done) < sum(map(len, plan)):
            child, message = self._next()
            if message["event"] == "rows":
                on_rows(int(message["rows"]))
            elif message["event"] == "done":
                self._busy.discard(child)
                facts = {key: value for key, value in message.items() if key != "event"}
                done.append(FileDone(device=child.name.removeprefix("baseline-"), **facts))
                self._give(child, operation, todo[child])
        return Phase(time.monotonic() - started, tuple(done))

    def _give(self, child: Child, operation: Operation, files: deque[int]) -> None:
        if files:
            child.send({"op": operation, "file": files.popleft()})
            self._busy.add(child)
            self._progress[child] = time.monotonic()

    def _next(self) -> tuple[Child, dict[str, Any]]:
        """The next message that is neither a heartbeat nor a failure."""
        while True:
            try:
                child, message = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                self._check_silence()
                continue
            match message["event"]:
                case "alive":
                    self._progress[child] = max(self._progress[child], float(message["progress_s"]))
                    self._check_silence()
                case "error":
                    _raise(child, message)
                case "closed":
                    _mourn(child, self._token)
                case _:
                    self._progress[child] = time.monotonic()
                    return child, message

    def _check_silence(self) -> None:
        for child in self._busy:
            if time.monotonic() - self._progress[child] > SILENCE_S:
                raise WorkerError(f"{child.name} has not moved for {SILENCE_S:.0f} s; see {child.log}")


def _raise(child: Child, message: dict[str, Any]) -> NoReturn:
    """A worker's own error, of its own type where it is one of ours."""
    known = getattr(errors, message["kind"], None)
    if isinstance(known, type) and issubclass(known, VirnucError):
        raise known(message["message"])
    raise WorkerError(
        f"{child.name}: {message['kind']}: {message['message']}; see {child.log}", worker_traceback=message["traceback"]
    )


def _mourn(child: Child, token: threading.Event) -> NoReturn:
    """A worker that went without a word."""
    if token.is_set():
        raise WorkerError("the baseline was interrupted; run it again")
    status = child.end(0.5)
    words = child.last_words().splitlines()
    raise WorkerError(
        f"{child.name} ended (status {status}); last words: {words[-1] if words else 'none'}; see {child.log}"
    )
