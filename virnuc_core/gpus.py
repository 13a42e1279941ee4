"""Ask NVIDIA's management library (NVML) about the GPUs of this machine.

No other module imports nvitop or pynvml. Both are imported only when a question is asked, so that
importing this module costs nothing. Callers ask `NVML`, which tests replace by a fake:

    from virnuc_core import gpus
    gpus.NVML.visible()
"""

import ctypes
import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

LIBRARY: Final = "libnvidia-ml.so.1"  # the file of NVML that the driver installs
UUID_PREFIXES: Final = ("GPU-", "MIG-")  # of whole GPUs and of their slices


class NvmlError(Exception):
    """NVML, or a GPU asked for by UUID, cannot be used."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    uuid: str
    name: str  # its model, for example NVIDIA H100 80GB HBM3


@dataclass(frozen=True, slots=True)
class Driver:
    """The versions of the NVIDIA driver."""

    version: str
    cuda: str  # the newest CUDA version that the driver supports


@dataclass(frozen=True, slots=True)
class Reading:
    """What a GPU is doing at one moment. A number that the driver does not give is `None`."""

    utilisation_percent: float | None = None
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who uses a GPU, and how much of it is free. Memory that the driver does not give is 0."""

    memory_total_bytes: int
    memory_free_bytes: int
    utilisation_percent: float | None
    process_ids: tuple[int, ...]


class GpuLibrary(Protocol):
    """The questions that virnuc asks about GPUs."""

    def driver(self) -> Driver | None:
        """Return the versions of the driver, or `None` if there is no driver that works."""

    def visible(self) -> list[Gpu]:
        """Return the GPUs that this process may use, in CUDA's order, without starting CUDA.

        The list is empty if there is no driver.

        Raises:
            NvmlError: There is a driver, and it does not work.
        """
        ...

    def occupancy(self, uuid: str) -> Occupancy:
        """Return who uses a GPU, and how much of its memory is free.

        Args:
            uuid: The UUID of the GPU.

        Raises:
            NvmlError: The driver does not answer for this GPU.
        """
        ...

    def reader(self, uuids: Sequence[str]) -> Callable[[str], Reading]:
        """Return a function that reads one of these GPUs, given by its UUID.

        The function may raise any error of the driver.

        Args:
            uuids: UUIDs of the GPUs.

        Raises:
            NvmlError: NVML cannot be used, or it does not know one of the GPUs.
        """
        ...


class Nvml:
    """NVML through nvitop, and through pynvml where nvitop would be slow or too talkative."""

    def driver(self) -> Driver | None:
        """Return the versions of the driver, or `None` if there is no driver that works."""
        import pynvml  # nvitop takes much longer to import, and every run records its driver

        try:
            pynvml.nvmlInit()
            version = pynvml.nvmlSystemGetDriverVersion()
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 is CUDA 12.8
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None
        return Driver(version, cuda=f"{cuda // 1000}.{cuda % 1000 // 10}")

    def visible(self) -> list[Gpu]:
        """Return the GPUs that this process may use, in CUDA's order, without starting CUDA.

        The list is empty if there is no driver, which only a missing library proves, if the driver
        has no GPU, or if `CUDA_VISIBLE_DEVICES` hides all GPUs.

        Raises:
            NvmlError: There is a driver, and the driver or a GPU does not work. An example is a
                driver that was updated while the kernel still has the modules of the former
                version.
        """
        import pynvml

        # Asked first: without a driver, nvitop prints several lines of its own. nvitop also takes
        # a driver that cannot count its GPUs for a machine without any.
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            pynvml.nvmlShutdown()
        except pynvml.NVMLError_LibraryNotFound as error:
            problem = _library_problem()
            if problem:
                raise NvmlError(problem) from error
            return []
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        if count == 0:
            return []
        try:
            visible = _gpus_in_cuda_order(count)
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        for gpu in visible:
            # nvitop returns the text N/A in place of the error of a GPU that is lost
            if not gpu.uuid.startswith(UUID_PREFIXES):
                raise NvmlError(f"a GPU does not answer (its UUID is {gpu.uuid})")
        return visible

    def occupancy(self, uuid: str) -> Occupancy:
        """Return who uses a GPU, and how much of its memory is free.

        Args:
            uuid: The UUID of the GPU.

        Raises:
            NvmlError: The driver does not answer for this GPU.
        """
        import nvitop

        try:
            return self._occupancy(nvitop.Device(uuid=uuid))
        except (nvitop.NVMLError, RuntimeError, OSError) as error:
            raise NvmlError(str(error)) from error

    def _occupancy(self, device: Any) -> Occupancy:
        """Return who uses a device of nvitop's, and how much of its memory is free."""
        return Occupancy(
            memory_total_bytes=int(device.memory_total()),
            memory_free_bytes=int(device.memory_free()),
            utilisation_percent=_number(device.gpu_utilization()),
            process_ids=tuple(process.pid for process in device.processes().values()),
        )

    def reader(self, uuids: Sequence[str]) -> Callable[[str], Reading]:
        """Return a function that reads one of these GPUs, given by its UUID.

        The function may raise any error of the driver.

        Args:
            uuids: UUIDs of the GPUs.

        Raises:
            NvmlError: NVML cannot be used, or it does not know one of the GPUs.
        """
        import nvitop

        try:
            nvitop.Device.count()  # fails if there is no driver
            devices = {uuid: nvitop.Device(uuid=uuid) for uuid in uuids}
        except (nvitop.NVMLError, RuntimeError, OSError) as error:
            raise NvmlError(str(error)) from error

        def read(uuid: str) -> Reading:
            """Ask the driver what one of the GPUs is doing now."""
            device = devices[uuid]
            milliwatts = device.power_usage()
            return Reading(
                utilisation_percent=_number(device.gpu_utilization()),
                memory_used_bytes=_number(device.memory_used()),
                power_w=_number(milliwatts / 1000),
                temperature_c=_number(device.temperature()),
            )

        return read


def _library_problem() -> str:
    """Return why NVML's library cannot be loaded, or an empty text if there is no such library.

    pynvml gives the same error for a library that is missing and for a library that is damaged,
    unreadable or made for another processor. Only the words of the system's loader tell the cases
    apart.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        problem = str(error)
        is_missing = problem.startswith(f"{LIBRARY}:") and problem.endswith(
            os.strerror(errno.ENOENT)
        )
        return "" if is_missing else problem
    return ""


def _gpus_in_cuda_order(count: int) -> list[Gpu]:
    """Return the GPUs that CUDA lets this process use, in CUDA's order.

    Args:
        count: The number of GPUs that the driver lists, at least 1.

    Raises:
        NVMLError: The driver refuses a question about a GPU.
        NvmlError: CUDA finds no GPU, although no setting hides the GPUs. An example is a CUDA
            library of another version than the driver.
    """
    import nvitop

    is_restricted = "CUDA_VISIBLE_DEVICES" in os.environ
    # nvitop starts two processes to learn CUDA's order, which takes a second. A single GPU
    # needs no order, unless CUDA may hide it or see its slices (MIG) in its place.
    devices = [] if is_restricted or count > 1 else nvitop.Device.all()
    if not devices or devices[0].is_mig_mode_enabled():
        devices = nvitop.Device.cuda.all()
    if not devices and not is_restricted:
        raise NvmlError(f"the driver lists GPUs ({count}), and CUDA finds none of them")
    return [Gpu(device.uuid(), device.name()) for device in devices]


def _number(value: Any) -> float | None:
    """Return a number of nvitop's, or `None` for its `NA`, which becomes NaN as a float."""
    number = float(value)
    if math.isnan(number):
        return None
    return number


NVML: GpuLibrary = Nvml()
