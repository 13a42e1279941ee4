"""The command `virnuc doctor`: is this machine sound?

It checks packages, room, locks, server, driver and weights, and whether each device computes.

To add a check, write a generator of `Check` results beside its like: `doctor_checks` has those of
the machine, `doctor_server` those of Prefect, `doctor_compute` the computation. Then list it in
`doctor` below, and name it in docs/operations.md.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from virnuc.flows.cli.doctor_checks import (
    check_disk,
    check_driver_and_gpus,
    check_file_system,
    check_packages,
    check_weights,
)
from virnuc.flows.cli.doctor_compute import check_compute
from virnuc.flows.cli.doctor_server import check_prefect_server, check_worker_proxy
from virnuc.flows.cli.options import ENVIRONMENT, Out
from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc_core.encoders.verify import Check, Verdict
from virnuc_core.errors import VirnucError

ERASE_LINE: Final = "\r\x1b[2K"  # of a terminal
MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "not run": "–   "}


def doctor(
    *,
    out: Annotated[Out, Parameter(help="where runs would be written")] = Path(),
    models: Annotated[
        Path | None, Parameter(env_var=ENVIRONMENT["models"], help="models directory")
    ] = None,
    devices: Annotated[
        str, Parameter(help="devices to compute on: cuda:0,cuda:1, cpu:2 or auto")
    ] = "auto",
    compute: Annotated[bool, Parameter(help="embed a tiny model on each device")] = True,
) -> int:
    """Print one line for each check of this machine.

    Returns:
        The exit code: 1 if a check failed. Warnings leave it at 0.
    """
    users_environment = dict(os.environ)  # before proxies are excepted for this command
    prepare_prefect()
    checks = {  # the cheap ones first
        "packages": check_packages(),
        "disk": check_disk(out),
        "file locks": check_file_system(out),
        "Prefect server": check_prefect_server(),
        "Prefect workers": check_worker_proxy(users_environment),
        "driver": check_driver_and_gpus(),
        "weights": check_weights(models),
    }
    if compute:
        checks["compute"] = check_compute(devices)
    started_s = time.perf_counter()
    counts = Counter[Verdict]()
    for check in run_checks(checks, on_start=_show_started):
        counts[check.verdict] += 1
        line = f"{MARKS[check.verdict]}  {check.name}: {check.detail}"
        print(f"{_erasure()}{line}", flush=True)
    print(_erasure(), end="")
    elapsed_s = time.perf_counter() - started_s
    soundness = "not sound" if counts["fail"] else "sound"
    warnings = "warning" if counts["warn"] == 1 else "warnings"
    summary = f"{counts['fail']} failed, {counts['warn']} {warnings}, {elapsed_s:.1f} s"
    print(f"\nThis machine is {soundness}: {summary}")
    return 1 if counts["fail"] else 0


def _show_started(name: str) -> None:
    """Show on a terminal which check runs now. Its result replaces the line."""
    if sys.stdout.isatty():
        print(f"{_erasure()}…     {name}: checking", end="", flush=True)


def _erasure() -> str:
    """Return what erases the present line of a terminal; nothing for a file or pipe."""
    return ERASE_LINE if sys.stdout.isatty() else ""


def run_checks(
    checks: Mapping[str, Iterator[Check]], on_start: Callable[[str], None] | None = None
) -> Iterator[Check]:
    """Yield the results of all checks, one after the other.

    A check is an iterator that yields its results. If it raises an error instead, a failed result
    with the name of the check is yielded, and the next check follows.

    Args:
        checks: The checks by name.
        on_start: Called with the name of a check before it runs, also before each further result.
    """
    notify = on_start or _ignore
    for name, results in checks.items():
        notify(name)
        try:
            for check in results:
                yield check
                notify(name)
        except (VirnucError, OSError) as error:
            yield Check(name, "fail", str(error))


def _ignore(_name: str) -> None:
    """Do nothing when a check starts."""
