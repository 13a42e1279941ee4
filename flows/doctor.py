"""`virnuc doctor`: is this machine sound? One line a check, and an exit code."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from flows.start import prepare_prefect
from virnuc_core.measure import doctor as checks
from virnuc_core.measure.doctor import Finding

NOT_SOUND: Final = 1
MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "not run": "–   "}
PREFECT_WAIT_S: Final = 3.0
SERVER: Final = "Prefect server"
CONSTRAINTS: Final = Path(__file__).resolve().parents[1] / "constraints.txt"


def doctor(
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path(),
    models: Annotated[Path | None, Parameter(env_var="VIRNUC_MODELS")] = None,
    devices: str = "auto",
    hashed: Annotated[bool, Parameter(name="--hash", negative=())] = False,
    compute: bool = True,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Is this machine sound? One line a check; exit code 1 when one failed. Warnings leave it at 0.

    Args:
        out: where runs would be written
        models: models directory
        devices: devices to compute on: cuda:0,cuda:1, cpu:2 or auto
        hashed: hash weights of any size
        compute: embed a tiny model on each device
        as_json: as JSON
    """
    prepare_prefect()
    asked: list[Callable[[], Iterable[Finding]]] = [  # cheap ones first
        checks.requirements,
        partial(checks.tested_versions, CONSTRAINTS),
        partial(checks.room, out),
        partial(checks.file_system, out),
        checks.locks,
        prefect_server,
        checks.driver_and_gpus,
        partial(checks.weights, models, hashed=hashed),
        *([partial(checks.compute, devices)] if compute else []),
    ]
    started, found = time.perf_counter(), []
    for finding in itertools.chain.from_iterable(check() for check in asked):
        found.append(finding)
        if not as_json:
            print(f"{MARKS[finding.verdict]}  {finding.check}: {finding.detail}", flush=True)
    seconds, counts = time.perf_counter() - started, Counter(finding.verdict for finding in found)
    sound = not counts["fail"]
    if as_json:
        body = {"sound": sound, "seconds": round(seconds, 2), "checks": [asdict(finding) for finding in found]}
        print(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        word = "sound" if sound else "not sound"
        print(f"\nThis machine is {word}: {counts['fail']} failed, {counts['warn']} warnings, {seconds:.1f} s")
    return 0 if sound else NOT_SOUND


def prefect_server() -> Iterator[Finding]:
    """Which server runs would talk to, and whether it answers."""
    import httpx
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    url = PREFECT_API_URL.value()
    if url is None:
        if PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
            yield Finding(SERVER, "ok", f"none is named: the embedded one, with its data in {PREFECT_HOME.value()}")
        else:
            yield Finding(SERVER, "fail", "none is named (PREFECT_API_URL) and the embedded one is forbidden")
        return
    try:
        answer = httpx.get(f"{url}/health", timeout=PREFECT_WAIT_S)
        answer.raise_for_status()
        theirs = httpx.get(f"{url}/admin/version", timeout=PREFECT_WAIT_S).json()
    except (httpx.HTTPError, ValueError) as error:
        yield Finding(SERVER, "fail", f"{url} does not answer ({type(error).__name__}); start it, or unset it")
        return
    ours = metadata.version("prefect")
    other = "" if theirs == ours else f"; this side is {ours}"
    yield Finding(SERVER, "warn" if other else "ok", f"{url} answers, version {theirs}{other}")
