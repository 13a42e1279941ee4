"""What can be known before any work: are the reads, the weights, the devices and the output there and fit?"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Final

from flows.parameters import ComputeSettings, InboxSettings, PredictSettings, RunSettings
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.parse import OnError, ParseLog, parse
from virnuc_core.reads.sources import find_inputs, is_remote
from virnuc_core.results import readable_twice
from virnuc_core.runfiles import Device

LOOKED_AT_BYTES: Final = 1 << 16  # unpacked bytes of a batch, about; a longer first record is read whole
LOOKED_AT: Final = 2  # batches of a file: what is wrong in a small one shows after its good reads only


def check(settings: RunSettings | InboxSettings, base: EngineSpec) -> None:
    """Refuse at once what could only fail later; nothing is written. `base`: the profile's engine settings.

    Errors: `InputError` for reads that are not there, are no reads, hold none, or are wanted twice from a pipe, for an
    inbox that is no folder and for files that one flow alone takes; `WeightsError` for what the headers of the weights
    tell; `DeviceError`; `ConfigError` for settings that cannot run on these devices or an output that cannot be
    written.
    """
    if isinstance(settings, InboxSettings):
        from virnuc_core.measure.inbox import Ledger

        Ledger(settings.inbox, settings.out)
    else:
        local = tuple(name for name in settings.reads if not is_remote(name))
        if local:
            readable(local, settings.on_error, alone=len(local) == len(settings.reads))
        if local and isinstance(settings, PredictSettings) and settings.write_viral:
            readable_twice(local)
        settings.check_own_files()
    check_models(settings.models)
    devices(settings, base)
    writable(settings.out)


def readable(reads: tuple[str, ...], on_error: OnError, *, alone: bool = True) -> None:
    """Parse the beginning of every file; `alone`: there are no other reads than these.

    Pipes and standard input are left for staging, which alone may draw from them. An empty file among others is
    counted by staging; `InputError` when all of them are empty.
    """
    files = find_inputs(reads).files
    regular = [name for name in files if Path(name).is_file()]
    empty = [name for name in regular if _is_empty(name, on_error)]
    if alone and empty and len(empty) == len(files):
        raise InputError("holds no reads", file=empty[0], hint="was it written to the end? name a file with reads")


def _is_empty(name: str, on_error: OnError) -> bool:
    log = ParseLog(on_error)
    for _ in islice(parse((name,), log, block_bytes=LOOKED_AT_BYTES), LOOKED_AT):
        pass
    return log.empty_files > 0


def devices(settings: ComputeSettings, base: EngineSpec) -> tuple[Device, ...]:
    """The devices a run will use, with settings they can run."""
    found = resolve(settings.parsed_devices())
    resolve_engine(settings.engine(base), found[0].kind)
    return found


def by_name(found: tuple[Device, ...]) -> Devices:
    """Devices by name, where `auto` was asked for too."""
    if found[0].kind == "cpu":
        return Devices.parse(f"cpu:{len(found)}")
    return Devices(kind="cuda", ids=tuple(device.id for device in found))


def writable(out: Path) -> None:
    """Check that `out` is or can become a directory to write in; leaves nothing behind.

    A file is really made, and gone at once: permission bits know nothing of full, frozen or read-only disks.
    """
    nearest = out.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{out}: {nearest} is a file; choose another directory")
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"virnuc")
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot write in {nearest}: {error.strerror or error}; make room or choose another directory"
        ) from error
