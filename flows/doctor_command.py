"""`virnuc doctor`: is this machine sound? One line a check, and an exit code."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flows import settings
from flows.options import command_parser

if TYPE_CHECKING:
    from flows.doctor_checks import Finding

NOT_SOUND: Final = 1
MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "not run": "–   "}


def doctor(words: Sequence[str]) -> int:
    """Ask everything; 1 when a check failed. Warnings leave the exit code at 0."""
    arguments = _parser().parse_args(words)
    settings.prepare()
    started = time.perf_counter()
    found = []
    for finding in examine(arguments):
        found.append(finding)
        if not arguments.json:
            sys.stdout.write(f"{MARKS[finding.verdict]}  {finding.check}: {finding.detail}\n")
            sys.stdout.flush()
    failed = sum(finding.verdict == "fail" for finding in found)
    warned = sum(finding.verdict == "warn" for finding in found)
    seconds = time.perf_counter() - started
    if arguments.json:
        body = {"sound": not failed, "seconds": round(seconds, 2), "checks": [asdict(finding) for finding in found]}
        sys.stdout.write(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    else:
        word = "not sound" if failed else "sound"
        sys.stdout.write(f"\nThis machine is {word}: {failed} failed, {warned} warnings, {seconds:.1f} s\n")
    return NOT_SOUND if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", "Is this machine sound? One line a check; exit code 1 when one failed.")
    parser.add_argument("-o", "--out", type=Path, default=Path(), metavar="PATH", help="where runs would be written")
    parser.add_argument(
        "--models", type=Path, default=settings.models_folder(), metavar="PATH", help="models directory"
    )
    parser.add_argument("--devices", default="auto", help="devices to compute on: cuda:0,cuda:1, cpu:2 or auto")
    parser.add_argument("--hash", action="store_true", help="hash weights of any size")
    parser.add_argument("--no-compute", action="store_true", help="leave out the embedding on each device")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Every check, cheap ones first."""
    from flows import doctor_checks as checks

    yield checks.python_version(checks.bound_of_python())
    yield from checks.packages()
    yield checks.disk(arguments.out)
    yield checks.shared_memory()
    yield from checks.file_system(arguments.out)
    yield checks.locks()
    yield checks.prefect_server()
    finding, has_gpus = checks.driver()
    yield finding
    if has_gpus:
        yield from checks.gpus()
    yield from checks.weights(arguments.models, hashed=arguments.hash)
    if not arguments.no_compute:
        yield from _compute(arguments.devices)


def _compute(text: str) -> Iterator[Finding]:
    from flows.doctor_checks import Finding
    from flows.doctor_compute import compute
    from virnuc_core.config import Devices
    from virnuc_core.engine.devices import resolve
    from virnuc_core.errors import VirnucError

    logging.getLogger("virnuc_core").setLevel(logging.CRITICAL)  # what matters is in the findings
    try:
        yield from compute(resolve(Devices.parse(text)))
    except VirnucError as error:
        yield Finding("compute", "fail", str(error))
