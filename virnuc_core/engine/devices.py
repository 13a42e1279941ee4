"""Which devices a run uses, how a worker is tied to exactly one, and what `auto` means there."""

import ctypes
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from virnuc_core import gpus
from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.runfiles import Device


def cpu_name() -> str:
    """Return the name of the processor's model."""
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name.*?:(.*)", cpu_info, re.MULTILINE)
    if match is not None:
        return match[1].strip()
    return platform.processor() or platform.machine()


def visible_gpus() -> list[Device]:
    """Return the GPUs that this process may use, in CUDA's order; none if there is no driver."""
    return [Device(id=gpu.uuid, kind="cuda", name=gpu.name) for gpu in gpus.NVML.visible()]


def resolve(devices: Devices) -> tuple[Device, ...]:
    """Return the devices that were asked for; for `auto`, all GPUs, or one core if there is none.

    Raises:
        DeviceError: A device is not there. Names the first one.
    """
    if devices.kind == "cpu":
        return _cores(len(devices.ids))
    visible = visible_gpus()
    if devices.kind == "auto":
        return tuple(visible) if visible else _cores(1)
    by_name = {str(index): gpu for index, gpu in enumerate(visible)}
    by_name |= {gpu.id: gpu for gpu in visible}
    for name in devices.ids:
        if not visible:
            problem = f"cuda:{name} asked for, but no NVIDIA driver or GPU is visible"
            raise DeviceError(f"{problem}; use --devices cpu:1")
        if name not in by_name:
            names = ", ".join(f"cuda:{index} ({gpu.name})" for index, gpu in enumerate(visible))
            raise DeviceError(f"cuda:{name} is not here; visible: {names}")
    return tuple(by_name[name] for name in devices.ids)


def resolve_here(spec: ClassifySpec) -> tuple[Device, ...]:
    """Return the devices of this machine that a run uses: none, if it runs on a cluster.

    Raises:
        DeviceError: A device is not there.
    """
    if spec.cluster:
        return ()
    return resolve(spec.devices)


def _cores(count: int) -> tuple[Device, ...]:
    """Return the first so many cores of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        problem = f"cpu:{count} asked for, but this process may use {len(cores)} cores"
        raise DeviceError(f"{problem}; use cpu:{len(cores)}")
    name = cpu_name()
    return tuple(
        Device(id=f"cpu-core-{core}", kind="cpu", name=name, core=core) for core in cores[:count]
    )


def environment(device: Device) -> dict[str, str]:
    """Return the environment variables by which a worker sees its device and no other."""
    if device.kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": device.local}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def open_context() -> None:
    """Have the driver create the CUDA context of the only GPU that this process sees.

    torch then works in it. Any failure is left for torch to report.
    """
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        if driver.cuInit(0) != 0:
            return
        if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
            return
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def resolve_engine(engine: EngineSpec, kind: Literal["cuda", "cpu"]) -> EngineSpec:
    """Replace a precision of `auto` by what it means on this kind of device.

    Raises:
        ConfigError: The precision cannot run there.
    """
    precision = engine.precision
    if precision == "auto":
        precision = "fp16" if kind == "cuda" else "fp32"
    if kind == "cpu" and precision != "fp32":
        raise ConfigError(f"precision {precision} needs a CUDA device; on CPU choose fp32 or auto")
    return engine.model_copy(update={"precision": precision})
