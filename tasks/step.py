"""What every task of ours is: tried again where that can help, heard in its run's log, brief about wrong input; what
a flow holds while it works; and what Prefect shows of it.

Two guards stand before a device. Prefect's concurrency slots make runs of one server queue, visibly. The lock of the
operating system, taken by the worker process itself (`virnuc_core.rundir`), is what makes sharing impossible.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "= 0.9"; one infinite
number empties a whole table; and the list of artifacts loads every body. Hence the rules of `cell` and the limits.
"""

from __future__ import annotations

import contextvars
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import httpx
from prefect import Task, runtime, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event
from prefect.exceptions import ObjectAlreadyExists
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed
from prefect.tasks import exponential_backoff

from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import DeviceError, ShardError, VirnucError, WorkerError, printable, storage_error
from virnuc_core.runfiles import Device

P = ParamSpec("P")
T = TypeVar("T")
NOT_MET: Final = "Criteria not met"
REJECTED: Final = "Rejected"
HOPELESS: Final = (FileNotFoundError, PermissionError, IsADirectoryError)
WORTH_A_RETRY: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
MAX_BYTES: Final = 100 * 1024
_MARKDOWN: Final = re.compile(r"([\\`*~|<>\[\]]|^[#+-](?=\s)|^\d+\.(?=\s))")
LEASE_S: Final = 60.0  # a killed holder's slot is free again after this
_held: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("slots this flow run holds", default=frozenset())
logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, object]]  # of equal keys


class NotMetError(VirnucError):
    """A run that ended well, but not as was asked: a criterion was missed, or a reviewer said no."""

    exit_code = 5


def step(name: str, run_name: str) -> Callable[[Callable[P, State[T]]], Task[P, State[T]]]:
    """A decorator that makes a function a task. An error of ours that no retry can help becomes its failed state.

    Such a state holds the error and says it in a sentence; `.result()` of what the task returns raises it.
    """

    def decorate(function: Callable[P, State[T]]) -> Task[P, State[T]]:
        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if can_help(error):
                    raise
                return Failed(message=str(error), data=error)

        # 10 s, 20 s, 40 s; each stretched by up to a fifth, so that tasks felled together do not come back together
        return task(
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=3,
            retry_delay_seconds=exponential_backoff(backoff_factor=10),
            retry_jitter_factor=0.2,
            retry_condition_fn=_retry_condition,
        )(body)

    return decorate


def can_help(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return isinstance(error, WORTH_A_RETRY) and not isinstance(error, HOPELESS) and storage_error(error) is None


def _retry_condition(_task: Any, _task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's question after a failed attempt."""
    try:
        state.result()
    except Exception as error:  # noqa: BLE001 - whatever the task raised is what has to be judged
        return can_help(error)
    return False


def first_attempt() -> bool:
    """Whether this is not a retry; a retry must go on from what the attempt before it committed."""
    return (runtime.task_run.run_count or 1) <= 1


def done(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name="Reused" if reused else None, message=message, data=data)


def not_met(data: T, message: str, *, fails: bool, name: str = NOT_MET) -> State[T]:
    """Criteria that were not met, or a reviewer's no: a failed run, or a completed one whose name says so."""
    if fails:
        return Failed(name=name, message=message, data=NotMetError(message))
    return Completed(name=name, message=message, data=data)


@contextmanager
def core_logs() -> Iterator[None]:
    """Send the core's records from INFO up to the current run while the body runs; outside a run do nothing."""
    task_run, flow_run, ids = TaskRunContext.get(), FlowRunContext.get(), {}
    if task_run is not None and task_run.task_run.flow_run_id is not None:
        ids = {"flow_run_id": str(task_run.task_run.flow_run_id), "task_run_id": str(task_run.task_run.id)}
    elif flow_run is not None and flow_run.flow_run is not None:
        ids = {"flow_run_id": str(flow_run.flow_run.id)}
    else:
        yield
        return

    def named(record: logging.LogRecord) -> bool:  # threads of the core know of no run
        vars(record).update(ids)
        return True

    logger = logging.getLogger("virnuc_core")
    outer = next((h for h in logger.handlers if isinstance(h, APILogHandler)), None)
    handler, level = outer or APILogHandler(), logger.level
    if outer is None:
        logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    handler.addFilter(named)
    try:
        yield
    finally:
        handler.removeFilter(named)
        logger.setLevel(level)
        if outer is None:
            logger.removeHandler(handler)


@contextmanager
def no_orphans() -> Iterator[None]:
    """End every child process of this process when the body ends, however it ends.

    It belongs around a flow's body: signals reach the main thread only, so that a guard inside a task which runs in
    another thread would never be asked.
    """
    try:
        yield
    finally:
        end_all_children()


@contextmanager
def device_slots(devices: Sequence[Device], *, wait_s: float | None = None) -> Iterator[None]:
    """Hold one slot of the server for each GPU of `devices`, waiting until all are free.

    CPU cores are shared by the machine's scheduler and want no slot. Without a server (the temporary one of an ad hoc
    run is seen by nobody else) the worker's own lock does the work. Slots that the flow holds around this are held
    once. Errors: `TimeoutError` after `wait_s` seconds.
    """
    # a GPU's UUID names it on every machine
    names = sorted({f"virnuc-{gpu.id}".lower() for gpu in devices if gpu.kind == "cuda"} - _held.get())
    if not names or PREFECT_API_URL.value() is None:
        yield
        return
    with get_client(sync_client=True) as client:
        for name in names:
            with suppress(ObjectAlreadyExists):  # another run made it just now
                client.upsert_global_concurrency_limit_by_name(name, limit=1)
    logger.info("waiting for %s", ", ".join(names))
    # strict: a limit that is missing is an error, never a free pass
    # a server that is away for a while must not end a run: the lock of the operating system still guards the device
    with concurrency(
        names,
        occupy=1,
        strict=True,
        timeout_seconds=wait_s,
        lease_duration=LEASE_S,
        raise_on_lease_renewal_failure=False,
    ):
        before = _held.set(_held.get() | set(names))
        try:
            yield
        finally:
            _held.reset(before)


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


@contextmanager
def time_limit(what: object, limit_s: float | None, on_reached: Callable[[float], object]) -> Iterator[None]:
    """End all child processes when the body takes longer than `limit_s`, which makes its work fail.

    Errors: `TimeLimitError` then, after `on_reached` was told the seconds that had passed.
    """
    if limit_s is None:
        yield
        return
    started_s, reached = time.monotonic(), threading.Event()

    def end() -> None:
        reached.set()
        end_all_children()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except WorkerError as error:
        if not reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{what}: ended at the limit of {limit_s:,.0f} s") from error
    finally:
        timer.cancel()
        timer.join()


class Markdown(str):
    """Text that is Markdown already; all other text in a table is shown as it stands."""

    __slots__ = ()


def key(*parts: object) -> str:
    """An artifact key: lower-case letters, digits and dashes; `ValueError` when nothing is left of `parts`."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower()).strip("-")[:100].strip("-")
    if not cleaned:
        raise ValueError(f"no artifact key can be made of {parts!r}")
    return cleaned


def cell(value: object) -> str:
    """One value as the text of a table cell: comparison signs as signs, no infinite number, nothing read as Markdown.

    >>> cell(">= 0.9"), cell(float("inf")), cell(None), cell(0.12345678), cell("a*b*")
    ('≥ 0.9', '∞', '–', '0.1235', 'a\\\\*b\\\\*')
    """
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if math.isfinite(value):
            return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
        case float():
            return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
        case Markdown():
            return value
    text = printable(str(value).replace("\r", " ").replace("\n", " ")).replace("<=", "≤").replace(">=", "≥")
    return _MARKDOWN.sub(r"\\\1", text)


def bounded_rows(rows: Rows, limit: int = MAX_BYTES) -> list[dict[str, str]]:
    """The cells of the first rows that stay below `limit` bytes, and a last row that says how many were left out."""
    kept: list[dict[str, str]] = []
    used = 0
    for row in rows:
        texts = {name: cell(value) for name, value in row.items()}
        used += sum(len(name.encode()) + len(text.encode()) + 8 for name, text in texts.items())
        if used > limit:
            note = f"… {len(rows) - len(kept):,} more rows: see the files of the run"
            return [*kept, dict.fromkeys(row, "") | {next(iter(row)): note}]
        kept.append(texts)
    return kept


def bounded_markdown(text: str, full_text: Path | str, limit: int = MAX_BYTES) -> str:
    """The text, cut at a line's end below `limit` bytes with a word on where the whole stands."""
    if len(text.encode()) <= limit:
        return text
    note = f"\n\n… cut here; the whole text is `{full_text}`\n"
    head = text.encode()[: limit - len(note.encode())].decode("utf-8", "ignore")
    return head[: head.rfind("\n")] + note


def markdown_table(rows: Rows) -> str:
    """Rows as a Markdown table; empty text for no rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def publish_table(name: str, rows: Rows, description: str) -> None:
    """Record a table under `name`; outside a run, where Prefect has nothing to hang it on, do nothing.

    A description that is not `Markdown` is shown as it stands, like a cell.
    """
    if inside_a_run():
        create_table_artifact(bounded_rows(rows), key=key(name), description=cell(description))


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut to size."""
    if inside_a_run():
        create_markdown_artifact(bounded_markdown(text, full_text), key=key(name), description=cell(description))


def inside_a_run() -> bool:
    """Whether this code runs inside a Prefect flow or task."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send `virnuc.<event>` about `virnuc.<resource>`; Prefect adds the flow run as a related resource."""
    emit_event(
        event=f"virnuc.{event}",
        resource={"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name},
        payload=dict(payload),
    )


@contextmanager
def progress_artifact(name: str, description: str, *, every_s: float = 5.0) -> Iterator[Callable[[float], None]]:
    """Gives what takes a share of work done, 0 to 1; the newest is sent every `every_s` seconds, and at the end.

    Outside a run nothing is sent. A server that is away is noted in the log and never stops the work.
    """
    if not inside_a_run():
        yield lambda share: None
        return
    stop, newest = threading.Event(), 0.0
    made: Any = None  # Prefect's id of the artifact

    def show(share: float) -> None:
        nonlocal newest
        newest = round(100 * min(max(share, 0.0), 1.0), 1)

    def publish(percent: float) -> None:
        nonlocal made
        if made is None:
            made = create_progress_artifact(percent, key=key(name), description=description)
        else:
            update_progress_artifact(made, progress=percent)

    def loop() -> None:
        shown, ended = -1.0, False
        while not ended:
            ended = stop.wait(every_s)
            if (percent := newest) != shown:
                try:
                    publish(percent)
                    shown = percent
                except (httpx.HTTPError, OSError) as error:
                    logger.warning("progress not shown: %s", error)

    context = contextvars.copy_context()  # the run this thread belongs to
    thread = threading.Thread(target=context.run, args=(loop,), name="progress artifact", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        stop.set()
        thread.join(timeout=2 * every_s)
