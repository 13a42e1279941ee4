"""What can be known before any work: are the reads, the weights, the devices and the output there and fit?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flows.parameters import ComputeSettings
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.weights import open_dnabert, open_esm2, open_head
from virnuc_core.engine.devices import Device, resolve
from virnuc_core.engine.spec import resolve_engine
from virnuc_core.errors import ConfigError
from virnuc_core.reads.remote import is_remote
from virnuc_core.reads.sources import find_inputs


def check(settings: ComputeSettings, *, reads: Sequence[str], models: Path, out: Path, base: EngineSpec) -> None:
    """Refuse at once what could only fail later.

    Errors: `InputError` for reads that are not there, `WeightsError`, `DeviceError`, `ConfigError` for settings that
    cannot run on these devices or an output that cannot be written.
    """
    local = tuple(name for name in reads if not is_remote(name))
    if local:
        find_inputs(local)
    for part in (open_esm2, open_dnabert, open_head):
        part(models)
    devices(settings, base)
    writable(out)


def devices(settings: ComputeSettings, base: EngineSpec) -> tuple[Device, ...]:
    """The devices a run will use, with settings they can run."""
    found = resolve(settings.parsed_devices())
    resolve_engine(settings.engine(base), found[0].kind)
    return found


def named(found: tuple[Device, ...]) -> Devices:
    """Devices by name, where `auto` was asked for too."""
    if found[0].kind == "cpu":
        return Devices.parse(f"cpu:{len(found)}")
    return Devices(kind="cuda", ids=tuple(device.id for device in found))


def writable(out: Path) -> None:
    """Check, without creating anything, that `out` is or can become a directory to write in."""
    nearest = out.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{out}: {nearest} is a file; choose another directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{out}: no permission to write in {nearest}; choose another directory")
