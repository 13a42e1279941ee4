"""What a run is made of, so that nothing foreign is ever mixed into it."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import virnuc_core
from virnuc_core.errors import ConfigError, RunMismatchError
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Attempt, RunRecord, device_records, read
from virnuc_core.telemetry.sampler import driver_versions

MODEL_LENGTH: Final = "model length"
PACKAGES: Final = ("torch", "numpy", "h5py", "tokenizers", "safetensors", "prefect")


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
    devices: Iterable[Mapping[str, Any]],
    store: str,
    widths: dict[str, int] | None = None,
) -> RunRecord:
    """A record of a run that starts now."""
    started, found = now(), device_records(devices)
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
        devices=found,
        store=store,
        attempts=(Attempt(started=started, devices=found),),
    )


def read_record(run: RunDir) -> RunRecord:
    """The record of a run; `ConfigError` when it is absent or not readable."""
    if not run.record.is_file():
        raise ConfigError(f"{run.root}: not a run directory (no readable run.json)")
    return read(run.record, RunRecord)


def made_from(record: RunRecord) -> dict[str, str]:
    """What can be told of any run or baseline: the fingerprints of reads and weights, and the model's length."""
    length = {} if record.model_length is None else {MODEL_LENGTH: str(record.model_length)}
    return {name: record.fingerprints[name] for name in sorted(record.fingerprints)} | length


def decided_by(record: RunRecord) -> dict[str, str]:
    """All that decides the bytes of a run's results: what it was made from, and its settings."""
    return made_from(record) | {name: str(record.resolved[name]) for name in sorted(record.resolved)}


def differing(a: Mapping[str, str], b: Mapping[str, str], *, strict: bool = False) -> dict[str, tuple[str, str]]:
    """Whether two jobs are the same: the names of what differs, with what each side says; empty for the same job.

    What only one side tells differs when `strict`, else it says nothing.
    """
    names = [name for name in dict.fromkeys((*a, *b)) if strict or (name in a and name in b)]
    return {name: (a.get(name, "nothing"), b.get(name, "nothing")) for name in names if a.get(name) != b.get(name)}


def resume_or_refuse(run: RunDir, fresh: RunRecord) -> RunRecord:
    """The record to go on with: `fresh` for a new directory, the old one plus an attempt for the same run.

    Errors: `RunMismatchError` names every field that differs.
    """
    if not run.record.exists():
        return fresh
    before = read_record(run)
    others = differing(decided_by(before), decided_by(fresh), strict=True)
    if others:
        said = "; ".join(f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in others.items())
        raise RunMismatchError(f"{run.root} holds another run ({said}); choose another directory or --force")
    return before.model_copy(update={"devices": fresh.devices, "attempts": (*before.attempts, *fresh.attempts)})


def _short(text: str) -> str:
    return text if len(text) <= 20 else text[:12] + "…"
