"""Choose the devices of a run, and bind each worker process to one of them."""

import ctypes
import functools
import logging
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from virnuc_core import gpus
from virnuc_core.config import ClassifySpec, Devices, EngineSpec, gelu_problem
from virnuc_core.encoders import hopper
from virnuc_core.engine.kernel_cache import kernel_cache_variables
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.runfiles import Device, version_of

log = logging.getLogger(__name__)


def cpu_name() -> str:
    """Return the model name of this machine's processor, such as "AMD EPYC 9554".

    If Linux names no model, as on ARM, return what Python knows, such as "aarch64".
    """
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name.*?:(.*)", cpu_info, re.MULTILINE)
    if match is not None:
        return match[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The GPUs of this machine that a run can compute on, or the reason why there is none.

    Attributes:
        devices: The GPUs, in CUDA's order.
        absence: A clause that says why there is no GPU; empty if there is one.
    """

    devices: tuple[Device, ...] = ()
    absence: str = ""


def find_gpus() -> UsableGpus:
    """Return the GPUs that a run of this process can compute on, or why there is none.

    Raises:
        DeviceError: There is a driver, and it does not work. So nothing is known about GPUs.
    """
    try:
        search = gpus.NVML.search()
    except gpus.NvmlError as error:
        raise DeviceError(
            f"the NVIDIA driver of this machine does not work: {error}; {error.advice}, or compute "
            "without GPUs: --devices cpu:1"
        ) from error
    if search.gpus and gpus.NVML.torch_cuda() is None:
        count = len(search.gpus)
        return UsableGpus(
            absence=f"torch {version_of('torch')} is built without CUDA, so it cannot use the GPUs "
            f"of this machine ({count}); install a torch with CUDA"
        )
    devices = tuple(
        Device(id=gpu.uuid, kind="cuda", name=gpu.name, capability=gpu.capability)
        for gpu in search.gpus
    )
    return UsableGpus(devices, search.absence)


def visible_gpus() -> list[Device]:
    """Return the GPUs that a run of this process can compute on, in CUDA's order.

    The list is empty if there is none; `find_gpus` tells why.

    Raises:
        DeviceError: There is a driver, and it does not work. So nothing is known about GPUs.
    """
    return list(find_gpus().devices)


def resolve(devices: Devices) -> tuple[Device, ...]:
    """Return the devices of this machine that a setting of `--devices` stands for.

    `auto` stands for all GPUs, or for one core if there is no GPU. A warning then says why.

    Raises:
        DeviceError: A device is not there, or the driver does not work. The message names the first
            device that is not there.
    """
    if devices.kind == "cpu":
        return _cores(len(devices.ids))
    usable = find_gpus()
    if devices.kind == "auto":
        if usable.devices:
            return usable.devices
        _warn_once(_describe_core(usable.absence))
        return _cores(1)
    # The user may name a GPU by its number or by its UUID.
    by_name = {str(index): gpu for index, gpu in enumerate(usable.devices)}
    by_name |= {gpu.id: gpu for gpu in usable.devices}
    for name in devices.ids:
        if not usable.devices:
            problem = f"cuda:{name} asked for, but no GPU can be used: {usable.absence}"
            raise DeviceError(f"{problem}; use --devices cpu:1")
        if name not in by_name:
            names = ", ".join(
                f"cuda:{index} ({gpu.name})" for index, gpu in enumerate(usable.devices)
            )
            raise DeviceError(f"cuda:{name} is not here; visible: {names}")
    return tuple(by_name[name] for name in devices.ids)


def _describe_core(absence: str) -> str:
    """Return the sentence, without a full stop, that says what `auto` takes without a GPU.

    Args:
        absence: Why there is no GPU.
    """
    return f"--devices auto takes one CPU core, which is far slower than a GPU: {absence}"


@functools.cache
def _warn_once(sentence: str) -> None:
    """Log a warning, once in this process."""
    log.warning("%s", sentence)


def auto_remark(requested: Devices) -> str:
    """Return why `auto` takes a core of this machine, for the record of a run.

    Args:
        requested: The devices as the user asked for them, or as `auto` was decided before.

    Returns:
        A sentence without a full stop. Empty if the user named devices, or `auto` takes GPUs.

    Raises:
        DeviceError: The driver does not work.
    """
    if requested.kind != "auto":
        return requested.auto_remark
    usable = find_gpus()
    if usable.devices:
        return ""
    return _describe_core(usable.absence)


def resolve_here(spec: ClassifySpec) -> tuple[Device, ...]:
    """Return the devices of this machine that a run uses.

    For a run on a cluster the result is empty: only the nodes of the cluster compute.

    Raises:
        DeviceError: A device is not there.
    """
    if spec.cluster:
        return ()
    return resolve(spec.devices)


def _cores(count: int) -> tuple[Device, ...]:
    """Return the first `count` cores that this process may use, each as a device.

    Raises:
        DeviceError: The process may use fewer cores.
    """
    cores = sorted(os.sched_getaffinity(0))  # numbers of the cores; 0 stands for this process
    if count > len(cores):
        problem = f"cpu:{count} asked for, but this process may use {len(cores)} cores"
        raise DeviceError(f"{problem}; use cpu:{len(cores)}")
    name = cpu_name()
    return tuple(
        Device(id=f"cpu-core-{core}", kind="cpu", name=name, core=core) for core in cores[:count]
    )


def environment(device: Device, *, fresh_kernels: bool = False) -> dict[str, str]:
    """Return the environment variables for a worker, so that it can use only its own device.

    They are set in addition to those of this process. A worker on a core sees no GPU, and its
    libraries start no further threads.

    Args:
        device: The device.
        fresh_kernels: The worker compiles all kernels anew. Only for a GPU.
    """
    if device.kind == "cuda":
        cache_variables = kernel_cache_variables(fresh=fresh_kernels)
        return {"CUDA_VISIBLE_DEVICES": device.local} | cache_variables
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def open_context() -> None:
    """Make the CUDA driver open the GPU of this process, so that torch need not wait for it later.

    This takes seconds. torch then uses the context that was made here. If a step fails, this
    returns without an error: torch will meet the same error and report it.
    """
    # OSError: there is no driver. AttributeError: the driver lacks one of these functions.
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        # The driver's functions return 0 if they succeed.
        if driver.cuInit(0) != 0:
            return
        if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
            return
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def resolve_engine(engine: EngineSpec, devices: Sequence[Device]) -> EngineSpec:
    """Return the settings with `auto` replaced where the devices of the run decide.

    The precision becomes fp16 on a GPU and fp32 on a CPU. The kernels for int8 become those of the
    library for Hopper GPUs if all devices can run it. They round slightly differently, so all
    devices of a run must use the same.

    Args:
        engine: The settings.
        devices: The devices of the run, all of one kind; at least one.

    Raises:
        ConfigError: The requested precision needs a GPU, and the device is a CPU. Or the requested
            GELU cannot run with the other settings.
    """
    kind = devices[0].kind
    precision = engine.precision
    if precision == "auto":
        precision = "fp16" if kind == "cuda" else "fp32"
    if kind == "cpu" and precision != "fp32":
        raise ConfigError(f"precision {precision} needs a CUDA device; on CPU choose fp32 or auto")
    problem = gelu_problem(engine.gelu, precision, engine.attention, kind)
    if problem:
        raise ConfigError(problem)
    kernels = engine.int8_kernels
    if kernels == "auto" and precision == "int8":
        kernels = "triton" if _hopper_problem(devices) else "hopper"
    return engine.model_copy(update={"precision": precision, "int8_kernels": kernels})


def _hopper_problem(devices: Sequence[Device]) -> str:
    """Return why the library for Hopper GPUs cannot run on all devices; empty if it can."""
    for device in devices:
        problem = hopper.capability_problem(device.capability)
        if problem:
            return f"{device.name}: {problem}"
    return hopper.open_library().problem
