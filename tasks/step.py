"""What every task of ours is: tried again where that can help, heard in its run's log; and what Prefect shows of it.

Prefect renders table cells as Markdown, so that `>= 0.9` would appear as a quotation that reads "= 0.9"; one infinite
number empties a whole table; and the list of artifacts loads every body. Hence the rules of `cell` and the limits."""

import contextvars
import logging
import math
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from prefect import Task, artifacts, runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed, Failed
from prefect.tasks import exponential_backoff

from virnuc.tasks.server import REQUEST_TIMEOUT_S, connection, with_server
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import (
    DeviceError,
    IncapableError,
    ShardError,
    VirnucError,
    WorkerError,
    printable,
    storage_error,
)

P = ParamSpec("P")
T = TypeVar("T")
PERMANENT_ERRORS: Final = (FileNotFoundError, PermissionError, IsADirectoryError, IncapableError)
RETRYABLE_ERRORS: Final = (WorkerError, ShardError, DeviceError, OSError, MemoryError)
MAX_BYTES: Final = 100 * 1024
_MARKDOWN: Final = re.compile(r"([\\`*~|<>\[\]]|^[#+-](?=\s)|^\d+\.(?=\s))")
RETRIES: Final = 3
BACKOFF_S: Final = 10  # 10 s, 20 s, 40 s
_attempt: contextvars.ContextVar[int] = contextvars.ContextVar(
    "attempt of a task without Prefect", default=1
)
logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, object]]  # of equal keys


class NotMetError(VirnucError):
    """A run that ended well, but not as was asked: a criterion was missed, or a reviewer said no."""

    exit_code = 5


def step(name: str, run_name: str) -> Callable[[Callable[P, State[T]]], "Step[P, State[T]]"]:
    """Makes a function a task; an error of ours that no retry can help becomes the sentence of its failed state."""

    def decorate(function: Callable[P, State[T]]) -> "Step[P, State[T]]":
        @wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> State[T]:
            try:
                with core_logs():
                    return function(*args, **kwargs)
            except VirnucError as error:
                if is_retryable(error):
                    raise
                return Failed(message=str(error), data=error)

        return Step(
            body,
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=RETRIES,
            retry_delay_seconds=exponential_backoff(backoff_factor=BACKOFF_S),
            retry_jitter_factor=0.2,  # tasks felled together do not come back together
            retry_condition_fn=lambda _task, _run, state: is_retryable(
                state.result(raise_on_failure=False)
            ),
        )

    return decorate


class Step(Task[P, T]):
    """A task that does the same without Prefect where there is no server to tell."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        if with_server():
            return super().__call__(*args, **kwargs)
        for attempt in range(1, RETRIES + 1):
            _attempt.set(attempt)
            try:
                return self.fn(*args, **kwargs)
            except RETRYABLE_ERRORS as error:
                if not is_retryable(error):
                    raise
                delay_s = BACKOFF_S << (attempt - 1)
                logger.warning("%s: %s; tried again in %d s", self.name, error, delay_s)
                time.sleep(delay_s)
        return self.fn(*args, **kwargs)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later: a dead worker or a busy disk may, a wrong setting or bad input never."""
    return (
        isinstance(error, RETRYABLE_ERRORS)
        and not isinstance(error, PERMANENT_ERRORS)
        and storage_error(error) is None
    )


def first_attempt() -> bool:
    """Whether this is not a retry; a retry must go on from what the attempt before it committed."""
    return _attempt.get() <= 1 if not with_server() else (runtime.task_run.run_count or 1) <= 1


def done(data: T, message: str, *, reused: bool = False) -> State[T]:
    """Completed, with a message; named `Reused` when no work had to be done."""
    return Completed(name="Reused" if reused else None, message=message, data=data)


@contextmanager
def core_logs() -> Iterator[None]:
    """Hear the core's records from INFO up while the body runs; those of a run are sent to its server, too."""
    core = logging.getLogger("virnuc_core")
    with ExitStack() as undone:
        undone.callback(core.setLevel, core.level)
        core.setLevel(min(core.getEffectiveLevel(), logging.INFO))
        if FlowRunContext.get() is None:
            yield
            return
        ids = {"flow_run_id": runtime.flow_run.id, "task_run_id": runtime.task_run.id}

        def named(
            record: logging.LogRecord,
        ) -> bool:  # threads of the core know no run, those of other tasks their own
            if (own := TaskRunContext.get()) is None or str(own.task_run.id) == ids["task_run_id"]:
                vars(record).update(ids)
            return True

        handler = next((one for one in core.handlers if isinstance(one, APILogHandler)), None)
        if handler is None:
            core.addHandler(handler := APILogHandler())
            undone.callback(core.removeHandler, handler)
        undone.callback(handler.removeFilter, named)
        handler.addFilter(named)
        yield


class TimeLimitError(VirnucError):
    """A run that took longer than its profile allows."""


@contextmanager
def time_limit(
    what: object, limit_s: float | None, on_reached: Callable[[float], object]
) -> Iterator[None]:
    """End all child processes after `limit_s`. Errors: `TimeLimitError` then, once `on_reached` knows the seconds."""
    started_s, reached = time.monotonic(), threading.Event()

    def end(stop: threading.Event) -> None:
        if not stop.wait(limit_s):
            reached.set()
            end_all_children()

    try:
        with background_thread(end):
            yield
    except WorkerError as error:
        if not reached.is_set():
            raise
        on_reached(time.monotonic() - started_s)
        raise TimeLimitError(f"{what}: ended at the limit of {limit_s or 0:,.0f} s") from error


class Markdown(str):
    """Text that is Markdown already; all other text in a table is shown as it stands."""


def key(name: str) -> str:
    """A name as an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:100].strip("-")


def on_host(name: str) -> str:
    """The key of an artifact whose figures depend on this machine."""
    return key(f"{name}-{platform.node()}")


def cell(value: object) -> str:
    """One value as a table cell's text: comparison signs as signs, no infinite number, nothing read as Markdown."""
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
    text = (
        printable(str(value).replace("\r", " ").replace("\n", " "))
        .replace("<=", "≤")
        .replace(">=", "≥")
    )
    return _MARKDOWN.sub(r"\\\1", text)


def bounded_rows(rows: Rows) -> list[dict[str, str]]:
    """The cells of the first rows that stay below `MAX_BYTES`, and a last row that says how many were left out."""
    kept: list[dict[str, str]] = []
    used = 0
    for row in rows:
        texts = {name: cell(value) for name, value in row.items()}
        used += sum(len(name.encode()) + len(text.encode()) + 8 for name, text in texts.items())
        if used > MAX_BYTES:
            note = f"… {len(rows) - len(kept):,} more rows: see the files of the run"
            return [*kept, dict.fromkeys(row, "") | {next(iter(row)): note}]
        kept.append(texts)
    return kept


def publish_table(name: str, rows: Rows, description: str) -> None:
    """Record a table under `name`, inside a run; a description that is not `Markdown` is shown as it stands."""
    if inside_a_run():
        with connection.reporting(f"table {name}"):
            artifacts.create_table_artifact(
                bounded_rows(rows), key=key(name), description=cell(description)
            )


def publish_markdown(name: str, text: str, description: str, full_text: Path | str) -> None:
    """Record a text under `name`, cut at a line's end below `MAX_BYTES` with a word on where the whole stands."""
    if not inside_a_run():
        return
    if len(text.encode()) > MAX_BYTES:
        note = f"\n\n… cut here; the whole text is `{full_text}`\n"
        head = text.encode()[: MAX_BYTES - len(note.encode())].decode("utf-8", "ignore")
        text = head[: head.rfind("\n")] + note
    with connection.reporting(f"text {name}"):
        artifacts.create_markdown_artifact(text, key=key(name), description=cell(description))


def inside_a_run() -> bool:
    """Whether this code runs inside a Prefect flow or task."""
    return with_server() and (FlowRunContext.get() is not None or TaskRunContext.get() is not None)


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send `virnuc.<event>` about `virnuc.<resource>`; Prefect adds the flow run as a related resource."""
    if with_server():
        with connection.reporting(f"event {event}"):
            about = {"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name}
            emit_event(event=f"virnuc.{event}", resource=about, payload=dict(payload))


@contextmanager
def progress_artifact(
    name: str, description: str, *, every_s: float = 5.0
) -> Iterator[Callable[[float], None]]:
    """Gives what takes a share of work done, 0 to 1; in a run the newest is sent every `every_s` s, and at the end."""
    if not inside_a_run():
        yield lambda share: None
        return
    newest = 0.0

    def show(share: float) -> None:
        nonlocal newest
        newest = round(100 * min(max(share, 0.0), 1.0), 1)

    def publish(stop: threading.Event) -> None:
        shown, ended = -1.0, False
        made: Any = None  # Prefect's id of the artifact
        while not ended:
            ended = stop.wait(every_s)
            if (percent := newest) != shown:
                with connection.reporting(f"progress {name}"):
                    if made is None:
                        made = artifacts.create_progress_artifact(
                            percent, key=key(name), description=description
                        )
                    else:
                        artifacts.update_progress_artifact(made, progress=percent)
                    shown = percent

    with background_thread(publish):
        yield show


@contextmanager
def background_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Another thread does `work` for the current run while the body lasts; the event tells it of the body's end."""
    stop, here = threading.Event(), contextvars.copy_context()
    thread = threading.Thread(target=here.run, args=(work, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=REQUEST_TIMEOUT_S)
