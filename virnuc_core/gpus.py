"""Ask NVIDIA's management library (NVML) about the GPUs of this machine.

No other module imports nvitop or pynvml. Both are imported only when a question is asked, so that
importing this module costs nothing. Callers ask `NVML`, which tests replace by a fake:

    from virnuc_core import gpus
    gpus.NVML.visible()
"""

import ctypes
import errno
import functools
import importlib.util
import math
import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

LIBRARY: Final = "libnvidia-ml.so.1"  # the file of NVML that the driver installs
UUID_PREFIXES: Final = ("GPU-", "MIG-")  # of whole GPUs and of their slices
VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
# The kernel has this file as long as NVIDIA's module is loaded, also inside containers.
KERNEL_DRIVER: Final = Path("/proc/driver/nvidia/version")

# Ways out, each a clause that can be followed by ", or compute without GPUs".
_REINSTALL: Final = "have the driver installed again"
_RESET: Final = "have the GPU reset (nvidia-smi --gpu-reset), or the machine restarted"
_KERNEL_LOG: Final = "look for NVRM in the messages of the kernel (dmesg)"
_LIBRARY_PATH: Final = (
    f"remove another {LIBRARY} from LD_LIBRARY_PATH, or have the driver installed again"
)
_CUDA_LIBRARY: Final = (
    "have a CUDA library (libcuda.so.1) of the driver's version installed, and remove others from "
    "LD_LIBRARY_PATH"
)
_PERMISSION: Final = (
    "have this user given access to /dev/nvidia*; in a container or batch job ask for a GPU "
    "(--gpus all, --gres=gpu:1)"
)
_VERSIONS_DIFFER: Final = (
    "restart the machine, or have the kernel module of the driver loaded again: the driver was "
    "updated since the module was loaded"
)
_MODULE_MISSING: Final = (
    "have the kernel module of the driver loaded (modprobe nvidia), or built for this kernel"
)


class NvmlError(Exception):
    """NVML, or a GPU asked for by UUID, cannot be used. The text has the words of the driver.

    Attributes:
        advice: What the user can do about it, a clause.
    """

    def __init__(self, problem: str, advice: str = _KERNEL_LOG) -> None:
        super().__init__(problem)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    uuid: str
    name: str  # its model, for example NVIDIA H100 80GB HBM3
    capability: tuple[int, int] | None = None  # compute capability, (9, 0) for an H100


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
    energy_j: float | None = None  # all that the GPU has taken since the driver was loaded
    is_power_limited: bool | None = None  # it clocks down, because it takes as much as it may


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who uses a GPU, and how much of it is free. Memory that the driver does not give is 0."""

    memory_total_bytes: int
    memory_free_bytes: int
    utilisation_percent: float | None
    process_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuSearch:
    """The GPUs that this process may use, or the reason why there is none.

    Attributes:
        gpus: The GPUs, in CUDA's order.
        absence: A clause that says why there is no GPU; empty if there is one.
    """

    gpus: tuple[Gpu, ...] = ()
    absence: str = ""


class GpuLibrary(Protocol):
    """The questions that virnuc asks about GPUs and about the software that uses them."""

    def driver(self) -> Driver | None:
        """Return the versions of the driver, or `None` if there is no driver that works."""

    def torch_cuda(self) -> str | None:
        """Return the CUDA version for which torch was built, or `None` if it has no CUDA."""

    def search(self) -> GpuSearch:
        """Return the GPUs that this process may use, or why there is none, without starting CUDA.

        Raises:
            NvmlError: There is a driver, and it does not work.
        """
        ...

    def visible(self) -> list[Gpu]:
        """Return the GPUs that this process may use, in CUDA's order; see `search`."""
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

    def torch_cuda(self) -> str | None:
        """Return the CUDA version for which torch was built, or `None` if it has no CUDA.

        torch is not imported, which would take seconds: the answer is in one of its files.
        """
        return _torch_cuda()

    def search(self) -> GpuSearch:
        """Return the GPUs that this process may use, or why there is none, without starting CUDA.

        There is none if there is no driver, which only a missing library proves, if the driver has
        no GPU, or if `CUDA_VISIBLE_DEVICES` hides all GPUs.

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
                raise NvmlError(problem, _LIBRARY_PATH) from error
            return GpuSearch(absence=_describe_missing_library())
        except pynvml.NVMLError as error:
            raise _nvml_error(error) from error
        if count == 0:
            return GpuSearch(absence=self._describe_empty_driver())
        try:
            visible = self._gpus_in_cuda_order(count)
        except pynvml.NVMLError as error:
            raise _nvml_error(error) from error
        for gpu in visible:
            # nvitop returns the text N/A in place of the error of a GPU that is lost
            if not gpu.uuid.startswith(UUID_PREFIXES):
                raise NvmlError(f"a GPU does not answer (its UUID is {gpu.uuid})", _RESET)
        if not visible:
            return GpuSearch(absence=_describe_hidden_gpus(count))
        return GpuSearch(tuple(visible))

    def _gpus_in_cuda_order(self, count: int) -> list[Gpu]:
        """Return the GPUs that CUDA lets this process use, in CUDA's order.

        Args:
            count: The number of GPUs that the driver lists, at least 1.

        Returns:
            The GPUs. None of them if `CUDA_VISIBLE_DEVICES` hides them all.

        Raises:
            NVMLError: The driver refuses a question about a GPU.
            NvmlError: CUDA finds no GPU, although no setting hides the GPUs. An example is a CUDA
                library of another version than the driver.
        """
        import nvitop

        setting = os.environ.get(VISIBLE_VARIABLE)
        device_of_uuid = {device.uuid(): device for device in nvitop.Device.all()}
        physical = list(device_of_uuid.values())
        # CUDA may see the slices of a GPU (MIG) in its place, and they can change at any time.
        has_slices = any(device.is_mig_mode_enabled() for device in physical)
        if count == 1 and setting is None and not has_slices:
            devices = physical  # a single GPU needs no order
        elif has_slices:
            devices = nvitop.Device.cuda.all()
        else:
            devices = self._devices_in_cuda_order(device_of_uuid)
        if not devices and setting is None:
            problem = f"the driver lists GPUs ({count}), and CUDA finds none of them"
            raise NvmlError(problem, _CUDA_LIBRARY)
        if not devices and _names_a_gpu(setting or "", count):
            problem = (
                f"{VISIBLE_VARIABLE}={setting!r} names GPUs of the driver, and CUDA finds none"
            )
            raise NvmlError(problem, _CUDA_LIBRARY)
        return [Gpu(device.uuid(), device.name(), _capability(device)) for device in devices]

    def _devices_in_cuda_order(self, device_of_uuid: Mapping[str, Any]) -> list[Any]:
        """Return the devices that CUDA shows, in its order, and ask CUDA only if it must be asked.

        Args:
            device_of_uuid: The devices of nvitop's by their UUIDs, in the order of the driver.
        """
        import nvitop

        from virnuc_core.gpu_order import recall_order, remember_order

        uuids = list(device_of_uuid)
        driver = self.driver()
        version = "" if driver is None else driver.version
        order = recall_order(uuids, version)
        if order is not None:
            return [device_of_uuid[uuid] for uuid in order]
        devices: list[Any] = nvitop.Device.cuda.all()
        remember_order([device.uuid() for device in devices], uuids, version)
        return devices

    def _describe_empty_driver(self) -> str:
        """Return a clause for a driver that works and lists no GPU."""
        driver = self.driver()
        version = "" if driver is None else f" {driver.version}"
        return (
            f"the NVIDIA driver{version} works and reports 0 GPUs (in a container or batch job, "
            "ask for a GPU: --gpus all, --gres=gpu:1)"
        )

    def visible(self) -> list[Gpu]:
        """Return the GPUs that this process may use, in CUDA's order; see `search`.

        Raises:
            NvmlError: There is a driver, and the driver or a GPU does not work.
        """
        return list(self.search().gpus)

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
                power_w=_number(milliwatts / 1000),  # nvitop's NA, divided, is still no number
                temperature_c=_number(device.temperature()),
                energy_j=_energy_j(device.handle),
                is_power_limited=_is_power_limited(device.handle),
            )

        return read


def _energy_j(handle: Any) -> float | None:
    """Return the joules that a GPU has taken since the driver was loaded, if the driver tells.

    Args:
        handle: The GPU, as pynvml knows it.
    """
    import pynvml

    try:
        millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # an older GPU or driver, or a slice of a GPU (MIG)
        return None
    return float(millijoules) / 1000


def _is_power_limited(handle: Any) -> bool | None:
    """Return whether a GPU is clocked down now because of its power limit, if the driver tells.

    Args:
        handle: The GPU, as pynvml knows it.
    """
    import pynvml

    # Drivers before 535 know the question by its second name only.
    for question in (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        ask = getattr(pynvml, question, None)
        if ask is None:
            continue
        try:
            reasons = ask(handle)
        except pynvml.NVMLError_FunctionNotFound:
            continue
        except pynvml.NVMLError:
            return None
        return bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap)
    return None


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


@functools.cache  # the torch that is installed does not change while we run
def _torch_cuda() -> str | None:
    """Return the CUDA version for which torch was built, from its file `version.py`.

    Returns:
        A version such as "12.8"; None if torch was built without CUDA, or is not installed.
    """
    torch_package = importlib.util.find_spec("torch")
    if torch_package is None or not torch_package.submodule_search_locations:
        return None
    folder = Path(torch_package.submodule_search_locations[0])
    version: str | None = runpy.run_path(str(folder / "version.py")).get("cuda")
    return version


def _nvml_error(error: Exception) -> NvmlError:
    """Return the error to raise for an error of pynvml's, with the advice that fits its code."""
    import pynvml

    advice_of_code = {
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _VERSIONS_DIFFER,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: _LIBRARY_PATH,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: _LIBRARY_PATH,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: _MODULE_MISSING,
        pynvml.NVML_ERROR_UNINITIALIZED: _MODULE_MISSING,
        pynvml.NVML_ERROR_NO_PERMISSION: _PERMISSION,
        pynvml.NVML_ERROR_OPERATING_SYSTEM: _PERMISSION,
        pynvml.NVML_ERROR_GPU_IS_LOST: _RESET,
        pynvml.NVML_ERROR_RESET_REQUIRED: _RESET,
        pynvml.NVML_ERROR_TIMEOUT: _RESET,
        pynvml.NVML_ERROR_IRQ_ISSUE: _RESET,
        pynvml.NVML_ERROR_IN_USE: "wait until the other program no longer uses it",
        pynvml.NVML_ERROR_INSUFFICIENT_POWER: "have the power cables of the GPUs looked at",
        pynvml.NVML_ERROR_CORRUPTED_INFOROM: "have the GPU looked at or replaced",
        pynvml.NVML_ERROR_MEMORY: "close other programs, or have the limit on memory raised",
        pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (
            "close other programs, or have the limit on memory raised"
        ),
    }
    code = getattr(error, "value", None)
    return NvmlError(str(error), advice_of_code.get(code, _KERNEL_LOG))


def _describe_missing_library() -> str:
    """Return a clause for a machine or container that has no library of the driver."""
    absence = f"this machine has no NVIDIA driver ({LIBRARY} is not installed)"
    if KERNEL_DRIVER.exists():
        absence = (
            f"NVIDIA's kernel module is loaded, but {LIBRARY} is not installed here (in a "
            "container, ask for the GPUs: --gpus all or --nv)"
        )
    return absence


def _describe_hidden_gpus(count: int) -> str:
    """Return a clause for GPUs that the environment hides.

    Args:
        count: The number of GPUs that the driver lists, at least 1.
    """
    hidden = "the only GPU" if count == 1 else f"all {count} GPUs"
    value = os.environ.get(VISIBLE_VARIABLE, "")
    return f"{VISIBLE_VARIABLE}={value!r} hides {hidden} of this machine"


def _capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of a device of nvitop's; None if the driver does not tell."""
    capability = device.cuda_compute_capability()
    if not isinstance(capability, tuple):  # nvitop's NA is a text
        return None
    major, minor = capability
    return major, minor


def _names_a_gpu(setting: str, count: int) -> bool:
    """Return whether a value of `CUDA_VISIBLE_DEVICES` makes at least one GPU visible.

    CUDA takes the entries up to the first one that names no GPU, so the first entry decides. It
    takes none if an entry is there twice. Slices of GPUs (MIG) are not looked at: false for them.

    Args:
        setting: The value of the variable.
        count: The number of GPUs that the driver lists.
    """
    import nvitop

    entries = [entry.strip() for entry in setting.split(",")]
    if len(set(entries)) != len(entries):
        return False
    first = entries[0]
    if first.isdecimal():
        return int(first) < count
    # A UUID may be shortened, as long as it has its prefix and one more character.
    is_uuid = first.startswith("GPU-") and first != "GPU-"
    return is_uuid and any(device.uuid().startswith(first) for device in nvitop.Device.all())


def _number(value: Any) -> float | None:
    """Return a number of nvitop's, or `None` for its `NA`, which becomes NaN as a float."""
    number = float(value)
    if math.isnan(number):
        return None
    return number


NVML: GpuLibrary = Nvml()
