"""Readings of the devices and the host, taken by a background thread of the parent process.

Devices are read through nvitop's Python interface to NVML, by UUID. On a machine without NVML only the host is read,
and utilisation stays unknown: whoever asks for it gets `None`, never zero.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import psutil

from virnuc_core.telemetry.tables import DeviceSample, HostSample, HostTable, SampleTable

log = logging.getLogger(__name__)

CHILDREN_EVERY: Final = 10  # samples between two looks for new child processes: the look reads every process


class DeviceProvider(Protocol):
    """Where device readings come from: NVML, or a stand-in."""

    def read(self, device: str, time_s: float) -> DeviceSample:
        """Read one device now, stamped `time_s`; may raise, which counts as a reading that failed."""
        ...


class NvmlProvider:
    """NVML through nvitop, each device by its UUID, whatever order CUDA gives them."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Open the devices; raises `nvitop.NVMLError` when there is no driver or no such device."""
        import nvitop

        nvitop.Device.count()
        self._devices = {uuid: nvitop.Device(uuid=uuid) for uuid in uuids}

    def read(self, device: str, time_s: float) -> DeviceSample:
        gpu = self._devices[device]
        power_mw = _number(gpu.power_usage())
        memory = _number(gpu.memory_used())
        return DeviceSample(
            time_s,
            device,
            utilisation=_number(gpu.gpu_utilization()),
            memory_used_bytes=None if memory is None else int(memory),
            power_w=None if power_mw is None else power_mw / 1000.0,
            temperature_c=_number(gpu.temperature()),
        )


def _number(value: object) -> float | None:
    """nvitop answers `NA`, a string, where the driver does not tell."""
    return float(value) if isinstance(value, (int, float)) else None


def open_nvml(devices: Sequence[str]) -> NvmlProvider | None:
    """The provider for the GPUs among `devices`; `None`, with a word in the log, when there is none or no NVML."""
    uuids = [device for device in devices if device.startswith(("GPU-", "MIG-"))]
    if not uuids:
        return None
    import nvitop

    try:
        return NvmlProvider(uuids)
    except (nvitop.NVMLError, RuntimeError, OSError) as error:
        log.warning("NVML cannot be used (%s): gpu utilisation is not measured", error)
        return None


class HostProbe:
    """Reads CPU, memory and disk of this process's machine."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._children: list[psutil.Process] = []
        self._reads = 0
        psutil.cpu_percent(interval=None)  # the first call has no interval to speak of

    def read(self, time_s: float) -> HostSample:
        """One sample, stamped `time_s`."""
        if self._reads % CHILDREN_EVERY == 0:
            self._children = self._process.children(recursive=True)
        self._reads += 1
        disk = psutil.disk_io_counters()
        return HostSample(
            time_s=time_s,
            cpu_percent=psutil.cpu_percent(interval=None),
            rss_bytes=sum(_rss(process) for process in (self._process, *self._children)),
            disk_read_bytes=None if disk is None else disk.read_bytes,
            disk_write_bytes=None if disk is None else disk.write_bytes,
        )


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class Sampler:
    """Background thread that reads devices and host every `interval_s`, from `start` (or `with`) to `stop`.

    A reading that fails leaves its numbers unknown and is counted in `failed_readings`; sampling goes on.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        interval_s: float = 0.5,
        provider: DeviceProvider | Literal["nvml"] | None = "nvml",
        host: Callable[[float], HostSample] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"sampling interval must be above 0 s (given {interval_s})")
        self.devices = tuple(devices)
        self.interval_s = interval_s
        self.failed_readings = 0
        self._provider: DeviceProvider | None = open_nvml(devices) if provider == "nvml" else provider
        self._host = HostProbe().read if host is None else host
        self._clock = clock
        self._device_samples: list[DeviceSample] = []
        self._host_samples: list[HostSample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample_once(self) -> None:
        """Take one reading of everything now."""
        now = self._clock()
        if self._provider is not None:
            self._device_samples += [self._read(self._provider, device, now) for device in self.devices]
        self._host_samples.append(self._host(now))

    def _read(self, provider: DeviceProvider, device: str, time_s: float) -> DeviceSample:
        try:
            return provider.read(device, time_s)
        except Exception as error:  # noqa: BLE001  a driver may fail in any way; the run must not
            if self.failed_readings == 0:
                log.warning("reading %s failed (%s): its numbers are unknown at that moment", device, error)
            self.failed_readings += 1
            return DeviceSample(time_s, device)

    def start(self) -> Self:
        """Begin sampling."""
        if self._thread is not None:
            raise RuntimeError("the sampler runs already")
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, name="virnuc-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End sampling, with one last reading, so that even a short run has one. Does nothing when not running."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self.sample_once()

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.sample_once()
            due = max(due + self.interval_s, time.monotonic())  # after a stall: no burst to catch up
            self._stop.wait(due - time.monotonic())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def samples(self) -> SampleTable:
        """Device readings so far."""
        return SampleTable.of(list(self._device_samples), self.devices)

    def host_samples(self) -> HostTable:
        """Host readings so far."""
        return HostTable.of(list(self._host_samples))

    def latest(self, device: str) -> DeviceSample | None:
        """The newest reading of a device; `None` before the first."""
        for sample in reversed(self._device_samples[-2 * max(1, len(self.devices)) :]):
            if sample.device == device:
                return sample
        return None
