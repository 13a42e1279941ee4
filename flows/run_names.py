"""Names of flow runs: made of a run's parameters, so that people find it in the UI."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from prefect import runtime
from prefect.context import FlowRunContext

from virnuc_core.config import INPUT_FIELDS
from virnuc_core.errors import printable
from virnuc_core.machine_name import HOST, is_container, machine_name
from virnuc_core.reads.sources import sample_name

PATHS_SHOWN_BY_NAME: Final = ("inbox", "out", "profile", "samples")


def named_by(*keys: str) -> Callable[[], str]:
    """Return a function that names the current flow run by some of its parameters.

    The name is like `lung · ci-smoke · cpu:2`. A deployment runs again and again with the same
    parameters, so the names of its runs also have the planned date and the name of the machine.

    Args:
        keys: Names of the parameters to show, in this order.
    """

    def name() -> str:
        """Return the name of the current flow run. Prefect calls this when the run begins."""
        text = run_name(runtime.flow_run.parameters or {}, *keys)
        is_of_deployment = runtime.deployment.id is not None
        if not is_of_deployment:
            return text
        planned = runtime.flow_run.scheduled_start_time
        # Prefect asks for the name of a run before the flow begins, which names the machine, too.
        name_machine_by_pool()
        return f"{text} · {planned:%Y-%m-%d %H:%M} · {machine_name()}"

    return name


def name_machine_by_pool() -> None:
    """Name this machine by the work pool of the current flow run, if it is a container.

    Without effect outside a flow run, in a run of no work pool, and if the user has named the
    machine. The name is written to the environment of this process (`VIRNUC_HOST`), where
    `machine_name` reads it.

    Runs of one pool are on machines of one kind. So their figures are compared, and their artifacts
    have the same keys every night.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not is_container():
        return
    pool = context.flow_run.work_pool_name
    is_named = bool(os.environ.get(HOST, "").strip())  # a blank name counts as none
    if pool and not is_named:
        os.environ[HOST] = pool


def run_name(parameters: Mapping[str, Any], *keys: str) -> str:
    """Return a name for a run that consists of some of its parameters.

    Args:
        parameters: Parameters of a flow by name.
        keys: Names of the parameters to show, in this order. Parameters that are not set are left
            out. Of a path the last part is shown. In place of `reads`, the name of the sample is
            shown, which is made of all parameters that name files of reads.
    """
    texts = {key: str(parameters[key]) for key in keys if parameters.get(key)}
    for key in PATHS_SHOWN_BY_NAME:
        if key in texts:
            texts[key] = Path(texts[key]).name.removesuffix(".toml")
    if parameters.get("samples"):
        texts.pop("reads", None)  # the sheet of samples is shown, and it names the reads
    else:
        texts["reads"] = sample_name(_reads_in(parameters))  # shown only if `keys` has `reads`
    shown_texts = [texts[key] for key in keys if texts.get(key)]
    return printable(" · ".join(shown_texts))


def _reads_in(parameters: Mapping[str, Any]) -> list[str]:
    """Return the files of reads that the parameters of a flow name, also those of mates."""
    names = []
    for field in INPUT_FIELDS:
        for read_name in parameters.get(field) or ():
            names.append(str(read_name))
    return names
