"""Which devices a run uses, how a worker is tied to exactly one of them, and what `auto` settings mean there."""

import ctypes
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from virnuc_core import gpus
from virnuc_core.config import ClassifySpec, Devices, EngineSpec, Precision
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.runfiles import Device


def cpu_name() -> str:
    """The processor's own name."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^model name.*?:(.*)", told, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def visible_gpus() -> list[Device]:
    """Return the GPUs that this process may use, in CUDA's order; none if there is no driver."""
    return [Device(id=gpu.uuid, kind="cuda", name=gpu.name) for gpu in gpus.NVML.visible()]


def resolve(devices: Devices) -> tuple[Device, ...]:
    """The devices asked for; `DeviceError` names the first that is not here."""
    if devices.kind == "cpu":
        return _cores(len(devices.ids))
    visible = visible_gpus()
    if devices.kind == "auto":
        return tuple(visible) if visible else _cores(1)
    known = {str(index): gpu for index, gpu in enumerate(visible)}
    known |= {gpu.id: gpu for gpu in visible}
    for wanted in devices.ids:
        if not visible:
            raise DeviceError(
                f"cuda:{wanted} asked for, but no NVIDIA driver or GPU is visible; use --devices cpu:1"
            )
        if wanted not in known:
            here = ", ".join(f"cuda:{i} ({gpu.name})" for i, gpu in enumerate(visible))
            raise DeviceError(f"cuda:{wanted} is not here; visible: {here}")
    return tuple(known[wanted] for wanted in devices.ids)


def resolve_here(spec: ClassifySpec) -> tuple[Device, ...]:
    """The devices of this machine that a run uses: none, where it has a cluster. Errors: those of `resolve`."""
    return () if spec.cluster else resolve(spec.devices)


def _cores(count: int) -> tuple[Device, ...]:
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise DeviceError(
            f"cpu:{count} asked for, but this process may use {len(cores)} cores; use cpu:{len(cores)}"
        )
    name = cpu_name()
    return tuple(
        Device(id=f"cpu-core-{core}", kind="cpu", name=name, core=core) for core in cores[:count]
    )


def environment(device: Device) -> dict[str, str]:
    """What a worker's environment sets so that it sees its device and no other."""
    if device.kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": device.local}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"CUDA_VISIBLE_DEVICES": "", **threads}


def open_context() -> None:
    """Have the driver create the context of the only GPU that this process sees, the one in which torch then works."""
    with suppress(OSError, AttributeError):  # torch says what is wrong with the driver
        driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def resolve_engine(engine: EngineSpec, kind: Literal["cuda", "cpu"]) -> EngineSpec:
    """Replace every `auto` by what it means on this kind of device; `ConfigError` for what cannot run there."""
    usual: Precision = "fp16" if kind == "cuda" else "fp32"
    precision = usual if engine.precision == "auto" else engine.precision
    if kind == "cpu" and precision != "fp32":
        raise ConfigError(f"precision {precision} needs a CUDA device; on CPU choose fp32 or auto")
    return engine.model_copy(update={"precision": precision})
