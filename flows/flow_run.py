"""What surrounds every flow's work: a name, staged reads; by hand a tidy terminal, and a cancel button that works."""

import logging
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext, SyncClientContext
from prefect.flows import Flow
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.states import Cancelled, Failed

from virnuc.flows.exit_deadline import exit_deadline
from virnuc.flows.outcome import NotMetError
from virnuc.flows.own_outcome import current_outcome, recorded_outcome
from virnuc.flows.parameters import WITHOUT, build, require_within_roots, with_flow_signature
from virnuc.flows.settings.shared import FlowSettings, RunSettings
from virnuc.tasks.artifacts import publish_table
from virnuc.tasks.background import background_thread
from virnuc.tasks.events import emit
from virnuc.tasks.run_tables import fate_rows
from virnuc.tasks.server_connection import (
    REPORTING_ERRORS,
    ServerLostError,
    connection,
    route_through_connection,
    without_server,
)
from virnuc.tasks.staging import stage
from virnuc.tasks.task import core_logs
from virnuc_core.config import INPUT_FIELDS
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import VirnucError, printable
from virnuc_core.pipeline import stage_spec
from virnuc_core.reads.sources import redact_url, sample_name
from virnuc_core.reads.stage import StageSummary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry import live

if TYPE_CHECKING:
    from virnuc.flows.cli.options import OnTerminal

Settings = TypeVar("Settings", bound=FlowSettings)
T = TypeVar("T")
WATCH_S: Final = 2.0
QUEUES: Final = (
    "APILogWorker",
    "EventsWorker",
)  # of Prefect; they count what is still to be told at the end
_cancelled: ContextVar[list[UUID] | None] = ContextVar(
    "of the run by hand: what somebody cancelled", default=None
)
logger = logging.getLogger(__name__)


class CancelledError(VirnucError):
    """Somebody cancelled the flow run, in the UI or with `prefect flow-run cancel`."""

    exit_code = 130


def with_parameters(
    model: type[Settings],
) -> Callable[[Callable[[Settings], State[T]]], Callable[..., State[T]]]:
    """Turn a function of one settings model into a flow's: parameters one by one, and all that surrounds its work."""

    def decorate(function: Callable[[Settings], State[T]]) -> Callable[..., State[T]]:
        def body(**values: Any) -> State[T]:
            settings = build(model, values)
            require_within_roots(settings)
            if (client := SyncClientContext.get()) is not None:
                route_through_connection(client.client)
            settings = settings.for_start_time(
                (runtime.flow_run.scheduled_start_time or datetime.now(UTC)).astimezone(UTC)
            )
            with (
                exit_deadline(final="PREFECT__FLOW_RUN_ID" in os.environ),  # a worker's child
                core_logs(),
                _ended_when_cancelled(),
                settings.locked_output(),
            ):
                try:
                    return function(_without_queries(settings))
                finally:  # not in a task: signals reach the main thread only
                    end_all_children()

        def called(**values: Any) -> State[T]:
            for name in (
                "prefect.flow_runs",
                "prefect.engine",
            ):  # once: a filter that is there is not added again
                logging.getLogger(name).addFilter(_is_news)
            outcome = current_outcome()
            try:
                state = body(**values)
            except VirnucError as error:  # its sentence is all that the failed state says
                state = Failed(message=str(error), data=error)
            except BaseException as error:
                outcome.error = error
                raise
            outcome.keep(state)
            return state

        return with_flow_signature(called, function, model)

    return decorate


def _is_news(record: logging.LogRecord) -> bool:
    """False of the traceback that Prefect logs of an error of ours: the run's state has said it in a sentence."""
    return record.exc_info is None or not isinstance(record.exc_info[1], VirnucError)


def _without_queries(settings: Settings) -> Settings:
    """The settings with what may be recorded of addresses; whoever made the run on a server gave them whole."""
    named = {name: getattr(settings, name, ()) for name in INPUT_FIELDS}
    shown, context = (
        {name: tuple(map(redact_url, some)) for name, some in named.items()},
        FlowRunContext.get(),
    )
    if shown == named or context is None or context.flow_run is None:
        return settings
    with (
        connection.reporting("addresses without their queries"),
        get_client(sync_client=True) as client,
    ):
        kept = {name: list(some) for name, some in shown.items()}
        client.update_flow_run(context.flow_run.id, parameters=context.flow_run.parameters | kept)
    return settings.model_copy(update=shown)


def named(*keys: str) -> Callable[[], str]:
    """Names a flow's run by these of its parameters, `lung · ci-smoke · cpu:2`; when deployed by date and host."""

    def name() -> str:
        told = run_name(runtime.flow_run.parameters or {}, *keys)
        planned = runtime.flow_run.scheduled_start_time
        return (
            told
            if runtime.deployment.id is None
            else f"{told} · {planned:%Y-%m-%d %H:%M} · {platform.node()}"
        )

    return name


def run_name(parameters: Mapping[str, Any], *keys: str) -> str:
    """A run's name of its parameters; `reads` becomes the sample's name, a path its last part."""
    reads = [str(read) for name in INPUT_FIELDS for read in parameters.get(name) or ()]
    said = {**parameters, "reads": "" if parameters.get("samples") else sample_name(reads)}
    for key in ("inbox", "out", "profile", "samples"):
        said[key] = Path(said.get(key) or "").name.removesuffix(".toml")
    return printable(" · ".join(str(said[key]) for key in keys if said.get(key)))


def stage_input(settings: RunSettings, label: str) -> StageSummary:
    """The flow's reads in the store of its directory. Errors: those of the stage task."""
    spec, store = stage_spec(settings, settings.models), RunDir(settings.out).store
    return stage(spec, store, label=label, force=settings.force).result()


def publish_prediction(run: RunDir, label: str, summary: RunSummary, staging: StageSummary) -> None:
    """Show what became of a run's reads, and say that it is done."""
    fates = fate_rows(summary, staging.tally)
    publish_table(f"reads-{label}", fates, f"What became of the reads of {label}: {run.root}")
    payload = {
        "reads": summary.n_reads,
        "viral": summary.fates.get("viral", 0),
        "run": str(run.root.absolute()),
    }
    emit("prediction.done", f"prediction.{label}", label, payload)


def run_flow(
    flow: Flow[..., Any],
    parameters: Mapping[str, Any],
    seen: "OnTerminal",
    ready: Callable[[], object] | None,
) -> State[Any]:
    """The final state of `flow`, run in this process; a failed one where criteria were not met. Bars, the core's log
    lines and Prefect's warnings share one console. `ready` waits for the server; without it there is none. Errors: what
    the flow raised; `CancelledError`; `VirnucError` where no server answers."""
    logging.raiseExceptions = seen.debug  # a lost server is said once, not once a line of the log
    console = live.shared_console()
    console.is_interactive &= not (seen.quiet or seen.no_progress)
    shown = logging.WARNING if seen.quiet else logging.INFO

    def is_shown(record: logging.LogRecord) -> bool:
        core = record.name.startswith("virnuc_core") and record.levelno >= shown
        return core or (record.levelno == logging.WARNING and record.name not in QUEUES)

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.console = console
            if not seen.debug:
                handler.addFilter(is_shown)
                handler.setFormatter(_Printable("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    if ready is not None:
        ready()
        with recorded_outcome() as outcome:
            recorded = _told(flow, parameters)
        state = outcome.final_state(recorded)
    else:  # the flow's function as it is
        state = without_server(flow.fn, **parameters)
    found = None if state.is_completed() else state.result(raise_on_failure=False)
    if isinstance(found, BaseException) and not isinstance(found, NotMetError):
        raise found
    return state


def _told(flow: Flow[..., Any], parameters: Mapping[str, Any]) -> State[Any]:
    """The flow as a run of the server's."""
    cancelled: list[UUID] = []
    by_hand = _cancelled.set(cancelled)
    try:
        context = SyncClientContext()
        route_through_connection(context.client)
        with context:
            return cast(State[Any], flow(**parameters, return_state=True))
    except (
        ServerLostError,
        RuntimeError,
    ) as error:  # the latter from Prefect's question for the version
        if not isinstance(error, ServerLostError) and not isinstance(
            error.__cause__, ServerLostError
        ):
            raise
        raise VirnucError(
            f"no Prefect server answers at {context.client.api_url}; or use {WITHOUT}"
        ) from error
    except KeyboardInterrupt:
        if not cancelled:
            raise
        with connection.reporting("that it was cancelled"), get_client(sync_client=True) as client:
            client.set_flow_run_state(
                cancelled[0], Cancelled(message="cancelled; children ended"), force=True
            )
        raise CancelledError(
            "cancelled; what was committed stays, the same command goes on from there"
        ) from None
    finally:
        _cancelled.reset(by_hand)


class _Printable(logging.Formatter):
    """Lines in which nothing that a file calls itself moves the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def _ended_when_cancelled() -> Iterator[None]:
    """Interrupt the body of a flow started by hand when its run is cancelled, as a worker or `serve` would."""
    cancelled, context = _cancelled.get(), FlowRunContext.get()
    if cancelled is None or context is None or context.flow_run is None:
        yield
        return
    flow_run_id = context.flow_run.id

    def watch(stop: threading.Event) -> None:
        with get_client(sync_client=True) as client:
            while not cancelled and not stop.wait(WATCH_S):
                with suppress(*REPORTING_ERRORS):
                    state = client.read_flow_run(flow_run_id).state
                    if state is not None and state.type in (
                        StateType.CANCELLING,
                        StateType.CANCELLED,
                    ):
                        cancelled.extend([flow_run_id] * (not stop.is_set()))
        if cancelled:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with background_thread(watch):
        yield
