"""What `virnuc doctor` asks of a machine: versions, driver, GPUs, locks, disk, shared memory, server, weights.

Each check is a function to one or more `Finding`s. None raises: what cannot be found out is a finding, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from virnuc_core.errors import VirnucError
from virnuc_core.rundir import device_lock_path

Verdict = Literal["ok", "warn", "fail", "not run"]

GIB: Final = 1 << 30
DISK_FAIL, DISK_WARN = GIB, 20 * GIB  # a million reads of 150 bases leave some 13 GiB of embeddings
SHM_WARN: Final = GIB  # loader processes hand batches over through /dev/shm
HASHED_BYTES: Final = 2 * GIB  # more is hashed only when asked: it would take longer than all else
MEMORY_NEEDED: Final = 16 * GIB  # ESM-2 3B in half precision, DNABERT-S, and batches of the stock budget
FSYNC_WARN_S: Final = 0.5
PREFECT_WAIT_S: Final = 3.0
IMPORTANT: Final = ("torch", "prefect", "fastapi", "numpy", "h5py", "pydantic", "nvitop", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    check: str
    verdict: Verdict
    detail: str


def bound_of_python() -> str:
    """The Pythons that the installed package takes, as `>=3.11,<3.13`; any where it is not installed."""
    try:
        return metadata.metadata("virnuc")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return ""


def python_version(required: str) -> Finding:
    """Is this Python one that virnuc is tested on? `required` is as `bound_of_python` gives it."""
    import platform
    import sys

    from packaging.specifiers import SpecifierSet

    here = platform.python_version()
    fits = SpecifierSet(required).contains(here)
    return Finding("Python", "ok" if fits else "fail", f"{here} ({sys.executable}); wanted {required or 'not told'}")


def packages() -> Iterator[Finding]:
    """Bounds of the package that must hold, and the versions that were tested together."""
    from packaging.requirements import Requirement

    broken, seen = [], 0
    for text in requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        seen += 1
        here = _version(wanted.name)
        if here is None or not wanted.specifier.contains(here, prereleases=True):
            broken.append(f"{wanted.name} {here or 'is absent'} (wanted {wanted.specifier})")
    if seen:
        yield Finding("packages", "fail" if broken else "ok", "; ".join(broken) or f"{seen} requirements hold")
    else:
        yield Finding("packages", "warn", "virnuc is not installed here, so nothing says what it needs; pip install it")
    yield tested_versions(constraints_file())


def requirements() -> list[str]:
    """What the installed package asks for; nothing where virnuc runs from its source without being installed."""
    try:
        return metadata.requires("virnuc") or []
    except metadata.PackageNotFoundError:
        return []


def constraints_file() -> Path | None:
    """constraints.txt of the checkout this runs from; None for an installed copy."""
    path = Path(__file__).resolve().parents[1] / "constraints.txt"
    return path if path.is_file() else None


def tested_versions(constraints: Path | None) -> Finding:
    """The packages that matter most, against the versions that were tested together."""
    here = {name: _version(name) for name in IMPORTANT}
    listed = ", ".join(f"{name} {version or 'absent'}" for name, version in here.items())
    if constraints is None:
        return Finding("tested versions", "not run", f"no constraints.txt beside this copy; {listed}")
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", constraints.read_text(encoding="utf-8"), re.MULTILINE))
    other = [
        f"{name} {version} (tested: {pins[name]})"
        for name, version in here.items()
        if name in pins and (version or "absent").split("+")[0] != pins[name]
    ]
    return Finding("tested versions", "warn" if other else "ok", "; ".join(other) or listed)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> tuple[Finding, bool]:
    """NVML, the driver, and the CUDA that torch was built for; whether there are GPUs to look at."""
    import pynvml
    import torch

    built = torch.version.cuda
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        count = int(pynvml.nvmlDeviceGetCount())
        supported = int(pynvml.nvmlSystemGetCudaDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        word = f"no NVIDIA driver is visible ({error}); virnuc computes on CPU cores"
        return Finding("driver", "warn" if built else "ok", word), False
    text = f"driver {version}, CUDA {supported // 1000}.{supported % 1000 // 10}, {count} GPUs; torch is for {built}"
    if built is None:
        return Finding("driver", "fail", f"{text}: a torch without CUDA; install one that has it"), False
    major = int(built.split(".")[0])
    if supported // 1000 < major:
        return Finding("driver", "fail", f"{text}: the driver is too old for CUDA {built}"), False
    if not torch.cuda.is_available():
        return Finding("driver", "fail", f"{text}: torch cannot start CUDA here"), False
    return Finding("driver", "ok", text), count > 0


def gpus() -> Iterator[Finding]:
    """Each visible GPU: its memory, who else computes on it, and whether a virnuc run holds it."""
    import nvitop

    for number, gpu in enumerate(nvitop.Device.cuda.all()):
        yield gpu_finding(f"cuda:{number}", gpu, device_lock_path(gpu.uuid()))


def gpu_finding(name: str, gpu: Any, lock: Path) -> Finding:
    """One GPU, as nvitop tells of it."""
    total, free = int(gpu.memory_total()), int(gpu.memory_free())
    others = [process for process in gpu.processes().values() if process.pid != os.getpid()]
    text = f"{gpu.name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, utilisation {gpu.gpu_utilization()} %"
    holder = lock_holder(lock)
    if holder is not None:
        return Finding(name, "warn", f"{text}; a virnuc run holds it (process {holder})")
    if others:
        pids = ", ".join(str(process.pid) for process in others[:5])
        return Finding(name, "warn", f"{text}; {len(others)} other processes compute here ({pids})")
    if free < MEMORY_NEEDED:
        return Finding(name, "warn", f"{text}; ESM-2 3B at the stock token budget wants {MEMORY_NEEDED / GIB:.0f} GiB")
    return Finding(name, "ok", text)


def lock_holder(path: Path) -> str | None:
    """The process that holds a device's lock; None when nobody does."""
    if not path.exists():
        return None
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "of unknown number"
    else:
        return None
    finally:
        os.close(handle)


def locks() -> Finding:
    """Devices that virnuc runs of this user hold on this machine."""
    folder = device_lock_path("any").parent
    held = [f"{path.stem} (process {who})" for path in sorted(folder.glob("*.lock")) if (who := lock_holder(path))]
    return Finding("device locks", "warn" if held else "ok", ", ".join(held) or "no device is held by a run")


def disk(folder: Path) -> Finding:
    """Room where results would go."""
    usage = shutil.disk_usage(_nearest(folder))
    verdict: Verdict = "fail" if usage.free < DISK_FAIL else "warn" if usage.free < DISK_WARN else "ok"
    more = "" if verdict == "ok" else "; a million reads of 150 bases leave some 13 GiB"
    return Finding("disk", verdict, f"{usage.free / GIB:.1f} GiB free for {folder}{more}")


def shared_memory() -> Finding:
    """Loader processes hand their batches over through shared memory."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("shared memory", "warn", "no /dev/shm; leave num_workers at 0")
    free = shutil.disk_usage(place).free
    word = "" if free >= SHM_WARN else "; loader processes may fail, leave num_workers at 0 (docker: --shm-size)"
    return Finding("shared memory", "warn" if word else "ok", f"{free / GIB:.1f} GiB free in /dev/shm{word}")


def file_system(folder: Path) -> Iterator[Finding]:
    """Do locks exclude, and do renames and flushes work, where results would go?"""
    place = _nearest(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".virnuc-doctor-", dir=place) as scratch:
            yield _locking(Path(scratch) / "lock", place)
            yield _commit(Path(scratch), place)
    except OSError as error:
        yield Finding("file locks", "fail", f"{place} cannot be written: {error.strerror or error}")


def _locking(path: Path, place: Path) -> Finding:
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("file locks", "ok", f"locks exclude in {place}")
        return Finding("file locks", "fail", f"two holders of one lock in {place}; use a local folder for runs")
    except OSError as error:
        return Finding("file locks", "fail", f"no locks in {place} ({error.strerror}); use a local folder for runs")
    finally:
        os.close(first)
        os.close(second)


def _commit(scratch: Path, place: Path) -> Finding:
    """Write aside, flush, rename: what a shard's commit is made of."""
    started = time.perf_counter()
    aside, path = scratch / "aside", scratch / "whole"
    with aside.open("wb") as handle:
        handle.write(b"\0" * (1 << 20))
        handle.flush()
        os.fsync(handle.fileno())
    aside.replace(path)
    seconds = time.perf_counter() - started
    slow = seconds > FSYNC_WARN_S
    return Finding("commits", "warn" if slow else "ok", f"1 MiB flushed and renamed in {1e3 * seconds:.0f} ms")


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def prefect_server() -> Finding:
    """Which server runs would talk to, and whether it answers."""
    import httpx
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    url = PREFECT_API_URL.value()
    if url is None:
        if not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
            return Finding(
                "Prefect server", "fail", "none is named (PREFECT_API_URL) and the embedded one is forbidden"
            )
        return Finding(
            "Prefect server", "ok", f"none is named: the embedded one, with its data in {PREFECT_HOME.value()}"
        )
    try:
        answer = httpx.get(f"{url}/health", timeout=PREFECT_WAIT_S)
        answer.raise_for_status()
        theirs = httpx.get(f"{url}/admin/version", timeout=PREFECT_WAIT_S).json()
    except (httpx.HTTPError, ValueError) as error:
        return Finding(
            "Prefect server", "fail", f"{url} does not answer ({type(error).__name__}); start it, or unset it"
        )
    ours = _version("prefect")
    other = "" if theirs == ours else f"; this side is {ours}"
    return Finding("Prefect server", "warn" if other else "ok", f"{url} answers, version {theirs}{other}")


def weights(models: Path | None, *, hashed: bool) -> Iterator[Finding]:
    """Is the models directory whole, and what are the digests of its parts?"""
    if models is None:
        yield Finding("weights", "not run", "no models directory named (--models, VIRNUC_MODELS)")
        return
    from virnuc_core.encoders.checkpoint import check_models, fingerprint

    try:
        check_models(models)
    except VirnucError as error:
        yield Finding("weights", "fail", str(error))
        return
    size = sum(path.stat().st_size for path in models.glob("*/*.safetensors"))
    yield Finding("weights", "ok", f"{models}: esm2, dnabert_s and head are there and fit ({size / GIB:.2f} GiB)")
    if size > HASHED_BYTES and not hashed:
        yield Finding("weights sha256", "not run", f"{size / GIB:.1f} GiB take a while; --hash does it")
        return
    prints = fingerprint(models)
    text = f"esm2 {prints.esm2[:16]}, dnabert_s {prints.dnabert_s[:16]}, head {prints.head[:16]}"
    yield Finding("weights sha256", "ok", text)
