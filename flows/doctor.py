"""`virnuc doctor`: is this machine sound, and what virnuc is installed with? One line a check, and an exit code."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from flows.parameters import ROOTS
from flows.start import prepare_prefect
from virnuc_core.measure import doctor as checks
from virnuc_core.measure.doctor import Finding

if TYPE_CHECKING:
    import httpx

NOT_SOUND: Final = 1
MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "not run": "–   "}
PREFECT_WAIT_S: Final = 3.0
SERVER: Final = "Prefect server"
IMPORTANT: Final = ("torch", "prefect", "fastapi", "numpy", "h5py", "pydantic", "nvitop", "tokenizers", "safetensors")
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
        requirements,
        partial(tested_versions, CONSTRAINTS),
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


def requirements() -> Iterator[Finding]:
    """Do the bounds of virnuc hold for this Python and the packages?

    Nothing says what they are where virnuc runs from its source without being installed.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    installed, python = _version("virnuc") is not None, platform.python_version()
    required = metadata.metadata("virnuc")["Requires-Python"] if installed else ""
    said = f"{python} ({sys.executable}); wanted {required or 'not told'}"
    yield Finding("Python", "ok" if SpecifierSet(required).contains(python) else "fail", said)
    if not installed:
        yield Finding("packages", "warn", "virnuc is not installed here, so nothing says what it needs; pip install it")
        return
    wanted = [Requirement(text) for text in metadata.requires("virnuc") or []]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    here = {one.name: _version(one.name) for one in wanted}
    broken = [
        f"{one.name} {here[one.name] or 'is absent'} (wanted {one.specifier})"
        for one in wanted
        if (found := here[one.name]) is None or not one.specifier.contains(found, prereleases=True)
    ]
    yield Finding("packages", "fail" if broken else "ok", "; ".join(broken) or f"{len(wanted)} requirements hold")


def tested_versions(constraints: Path) -> Iterator[Finding]:
    """The packages that matter most, against the versions that were tested together."""
    here = {name: _version(name) or "absent" for name in IMPORTANT}
    listed = ", ".join(f"{name} {version}" for name, version in here.items())
    if not constraints.is_file():
        yield Finding("tested versions", "not run", f"no constraints.txt beside this copy; {listed}")
        return
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", constraints.read_text(encoding="utf-8"), re.MULTILINE))
    other = [
        f"{name} {version} (tested: {pins[name]})"
        for name, version in here.items()
        if name in pins and pins[name] != version.split("+")[0]
    ]
    yield Finding("tested versions", "warn" if other else "ok", "; ".join(other) or listed)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def prefect_server() -> Iterator[Finding]:
    """Which server runs would talk to, and whether it answers."""
    import httpx
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    )

    url = PREFECT_API_URL.value()
    if url is None:
        if PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
            yield Finding(SERVER, "ok", f"none is named: the embedded one, with its data in {PREFECT_HOME.value()}")
        else:
            yield Finding(SERVER, "fail", "none is named (PREFECT_API_URL) and the embedded one is forbidden")
        return
    secret = PREFECT_API_AUTH_STRING.value() or ""
    user, _, password = secret.partition(":")
    ask = partial(httpx.get, f"{url}/admin/version", timeout=PREFECT_WAIT_S)
    try:
        answers_anybody = ask().status_code != httpx.codes.UNAUTHORIZED
        answer = ask(auth=(user, password) if secret else None)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            yield Finding(SERVER, "fail", f"{url} wants another PREFECT_API_AUTH_STRING than is set here")
            return
        theirs = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        yield Finding(SERVER, "fail", f"{url} does not answer ({type(error).__name__}); start it, or unset it")
        return
    ours = metadata.version("prefect")
    other = "" if theirs == ours else f"; this side is {ours}"
    yield Finding(SERVER, "warn" if other else "ok", f"{url} answers, version {theirs}{other}")
    yield from doors(httpx.URL(url), answers_anybody=answers_anybody)


def doors(url: httpx.URL, *, answers_anybody: bool) -> Iterator[Finding]:
    """Who may have workers do what: a server that answers anybody lets anybody run commands as their account."""
    import psutil

    try:
        seen = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        seen = []
    port = url.port or (443 if url.scheme == "https" else 80)
    listening = {one.laddr.ip for one in seen if one.status == psutil.CONN_LISTEN and one.laddr.port == port}
    here = _is_loopback(url.host)
    abroad = [ip for ip in sorted(listening) if not _is_loopback(ip)] if here else [url.host]
    said = []
    if answers_anybody and abroad:
        said.append(
            f"anybody who reaches {', '.join(abroad)} port {port} can run commands as the workers: bind 127.0.0.1 and "
            "set PREFECT_SERVER_API_AUTH_STRING"
        )
    if not here and url.scheme == "http":
        said.append("what goes to and fro can be read on the way: put TLS before it")
    if os.geteuid() == 0:
        said.append("workers started here run as root: give them an account with few rights")
    if not os.environ.get(ROOTS):
        said.append(f"runs may name any path this account can open: set {ROOTS}")
    fine = f"{'open to this machine only' if here else 'TLS'}, {'no password' if answers_anybody else 'a password'}"
    yield Finding("Prefect doors", "warn" if said else "ok", "; ".join(said) or fine)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
