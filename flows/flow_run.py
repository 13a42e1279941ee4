"""How every flow begins: its parameters checked, its run named and tagged, its reads staged, and who works for it.

Prefect learns of a process that is killed from nobody: its run stays "Running" for ever. Every run of ours therefore
bears its process in its labels, and each new run on the same machine first looks for those whose process is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import psutil
from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.states import Crashed, Failed
from pydantic import BaseModel

from flows.local_run import ended_when_cancelled
from flows.parameters import RunSettings, flow_parameters
from tasks.predict import stage
from tasks.step import core_logs, no_orphans
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import model_length
from virnuc_core.reads.stage import StageSpec, StageSummary
from virnuc_core.rundir import RunDir

Settings = TypeVar("Settings", bound=BaseModel)
T = TypeVar("T")
TAG: Final = "virnuc"
PLACE, PROCESS, BEGAN = "virnuc.place", "virnuc.process", "virnuc.began"
SAME_START_S: Final = 1.0
PACKED: Final = (".gz", ".bz2", ".xz", ".zst", ".bgz")
READS: Final = (".fastq", ".fq", ".fasta", ".fa", ".fna", ".ffn")
MAX_NAME: Final = 60
logger = logging.getLogger(__name__)


def with_parameters(model: type[Settings]) -> Callable[[Callable[[Settings], State[T]]], Callable[..., State[T]]]:
    """Turn a function of one settings model into a flow's: parameters one by one, and all that surrounds its work.

    Its child processes end with it, the core's log lines reach the run, a cancelled run ends, and an error of ours is
    one sentence: the run's failed state, whose data is the error.
    """

    def decorate(function: Callable[[Settings], State[T]]) -> Callable[..., State[T]]:
        @wraps(function)
        def body(settings: Settings) -> State[T]:
            try:
                with no_orphans(), core_logs(), ended_when_cancelled():
                    return function(settings)
            except VirnucError as error:
                return Failed(message=str(error), data=error)

        return flow_parameters(model)(body)

    return decorate


def sample_of(reads: Sequence[str]) -> str:
    """A short name of the input: the first file without its endings, and how many more there are.

    >>> sample_of(["/data/lung_R1.fastq.gz"]), sample_of(["a.fa", "b.fa", "c.fa"]), sample_of(["-"])
    ('lung_R1', 'a+2', 'stdin')
    """
    if not reads:
        return "no-reads"
    name = "stdin" if reads[0] == "-" else Path(reads[0]).name
    for endings in (PACKED, READS):
        for ending in endings:
            if name.lower().endswith(ending) and len(name) > len(ending):
                name = name[: -len(ending)]
                break
    more = f"+{len(reads) - 1}" if len(reads) > 1 else ""
    return (name[:MAX_NAME] or "reads") + more


def named(*keys: str) -> Callable[[], str]:
    """What names a flow's run by these of its parameters: `lung_R1 · ci-smoke · cpu:2`."""
    return lambda: run_name(runtime.flow_run.parameters or {}, *keys)


def run_name(parameters: Mapping[str, Any], *keys: str) -> str:
    """A run's name of its parameters; `reads` becomes the sample's name, a path its last part."""
    parts = []
    for key in keys:
        value = parameters.get(key)
        if key == "reads":
            parts.append(sample_of([str(read) for read in value or ()]))
        elif isinstance(value, Path) or (isinstance(value, str) and key in ("inbox", "profile")):
            parts.append(Path(value).name.removesuffix(".toml"))
        elif value is not None:
            parts.append(str(value))
    return " · ".join(part for part in parts if part)


def place() -> str:
    """Where a process number means something: this boot of this machine, and this namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/pid').readlink()}"


def announce(*tags: str) -> None:
    """Write on the current flow run who works for it, and its tags; then end the runs of dead processes."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    own = psutil.Process()
    labels: dict[str, str | int | float | bool] = {PLACE: place(), PROCESS: own.pid, BEGAN: own.create_time()}
    with get_client(sync_client=True) as client:
        flow_run_id = context.flow_run.id
        client.update_flow_run_labels(flow_run_id, labels)
        client.update_flow_run(flow_run_id, tags=sorted({*context.flow_run.tags, TAG, *tags}))
        try:
            _end_dead(client)
        except (httpx.HTTPError, PrefectException) as error:
            logger.warning("runs of dead processes could not be looked for: %s", error)


def _end_dead(client: SyncPrefectClient) -> None:
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG]), state=running)
    for flow_run in client.read_flow_runs(flow_run_filter=wanted):
        if _is_dead(flow_run):
            logger.warning("flow run %s: its process is gone; it is called crashed", flow_run.name)
            client.set_flow_run_state(flow_run.id, Crashed(message="its process was killed"), force=True)


def _is_dead(flow_run: FlowRun) -> bool:
    """Whether the run's process is known to be gone; never true of a run of another machine, or of unknown origin."""
    labels = flow_run.labels
    number, began = labels.get(PROCESS), labels.get(BEGAN)
    if labels.get(PLACE) != place() or not isinstance(number, int) or not isinstance(began, (int, float)):
        return False
    try:
        return bool(abs(psutil.Process(number).create_time() - began) > SAME_START_S)
    except psutil.NoSuchProcess:
        return True


def stage_input(settings: RunSettings, label: str) -> StageSummary:
    """The flow's reads in the store of its directory. Errors: those of the stage task."""
    spec = StageSpec(
        reads=settings.reads,
        model_length=model_length(settings.models),
        workers=settings.staging_processes,
        on_error=settings.on_error,
        strict=settings.strict,
    )
    store = RunDir(settings.out).store
    return stage(spec, store, label=label, email=settings.email, force=settings.force).result()
