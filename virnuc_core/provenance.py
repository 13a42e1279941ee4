"""run.json: what a run was made of, so that nothing foreign is ever mixed into it."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

import virnuc_core
from virnuc_core.config import Spec, explain
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.rundir import RunDir, write_text_whole
from virnuc_core.telemetry.sampler import driver_versions

SCHEMA_VERSION = 1
PACKAGES = ("torch", "numpy", "h5py", "tokenizers", "safetensors", "prefect")


class Attempt(Spec):
    """One start of the run: the first, or a resume."""

    started: str
    devices: tuple[dict[str, Any], ...]


class RunRecord(Spec):
    """The content of run.json."""

    schema_version: int = SCHEMA_VERSION
    virnuc_version: str
    git_commit: str | None
    versions: dict[str, str]
    created: str
    host: str
    spec: dict[str, Any]
    model_length: int
    widths: dict[str, int] = Field(default_factory=dict, description="of an embedding's two parts: dna, protein")
    fingerprints: dict[str, str]  # reads, esm2, dnabert_s, head
    resolved: dict[str, Any]  # the settings that decide result bytes, `auto` replaced; and the kind of device
    devices: tuple[dict[str, Any], ...]  # of the newest attempt
    seeds: dict[str, int]
    store: str  # relative to the run directory
    attempts: tuple[Attempt, ...] = Field(default=())


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of the checkout virnuc runs from, with `+` when files differ from it; None outside a checkout."""
    here = Path(virnuc_core.__file__).resolve().parents[1]
    if not (here / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Versions of what computes, without importing it, and of the driver where there is one."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found | driver_versions()


def new_record(
    *,
    spec: dict[str, Any],
    model_length: int,
    fingerprints: dict[str, str],
    resolved: dict[str, Any],
    devices: tuple[dict[str, Any], ...],
    store: str,
    seeds: dict[str, int] | None = None,
    widths: dict[str, int] | None = None,
) -> RunRecord:
    """A record of a run that starts now."""
    started = now()
    return RunRecord(
        virnuc_version=virnuc_core.__version__,
        git_commit=git_commit(),
        versions=versions(),
        created=started,
        host=platform.node(),
        spec=spec,
        model_length=model_length,
        widths=widths or {},
        fingerprints=fingerprints,
        resolved=resolved,
        devices=devices,
        seeds=seeds or {},
        store=store,
        attempts=(Attempt(started=started, devices=devices),),
    )


def read_record(run: RunDir) -> RunRecord:
    """Read run.json; `ConfigError` when it is absent or not readable."""
    try:
        return RunRecord.model_validate_json(run.record.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{run.root}: not a run directory (no readable run.json)") from error
    except ValidationError as error:
        raise ConfigError(f"{run.record}: {explain(error)}") from error


def write_record(run: RunDir, record: RunRecord) -> None:
    """Write run.json whole."""
    write_text_whole(run.record, record.model_dump_json(indent=2) + "\n")


def differences(before: RunRecord, after: RunRecord) -> list[str]:
    """What decides results and differs, one phrase each."""
    said = []
    if before.model_length != after.model_length:
        said.append(f"model_length {before.model_length} → {after.model_length}")
    for group in ("fingerprints", "resolved"):
        old, new = getattr(before, group), getattr(after, group)
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                said.append(f"{key} {_short(old.get(key))} → {_short(new.get(key))}")
    return said


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "…"


def resume_or_refuse(run: RunDir, fresh: RunRecord) -> RunRecord:
    """The record to go on with: `fresh` for a new directory, the old one plus an attempt for the same run.

    Errors: `RunMismatchError` names every field that differs.
    """
    if not run.record.exists():
        return fresh
    before = read_record(run)
    said = differences(before, fresh)
    if said:
        raise RunMismatchError(f"{run.root} holds another run ({'; '.join(said)}); choose another directory or --force")
    return before.model_copy(update={"devices": fresh.devices, "attempts": (*before.attempts, *fresh.attempts)})
