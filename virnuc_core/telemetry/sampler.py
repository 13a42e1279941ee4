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
from typing import Final, Self

import psutil

from virnuc_core.telemetry.tables import DeviceSample, HostSample, HostTable, SampleTable

log = logging.getLogger(__name__)

CHILDREN_EVERY: Final = 10  # samples between two looks for new child processes: the look reads every process


Reader = Callable[[str, float], DeviceSample]  # reads a device now, stamped with a time; may raise


def nvml_reader(devices: Sequence[str]) -> Reader | None:
    """What reads the GPUs among `devices`, each by its UUID, whatever order CUDA gives them.

    `None` when there is none; and, with a word in the log, where NVML cannot be used.
    """
    uuids = [device for device in devices if device.startswith(("GPU-", "MIG-"))]
    if not uuids:
        return None
    import nvitop

    try:
        nvitop.Device.count()
        opened = {uuid: nvitop.Device(uuid=uuid) for uuid in uuids}
    except (nvitop.NVMLError, RuntimeError, OSError) as error:
        log.warning("NVML cannot be used (%s): gpu utilisation is not measured", error)
        return None

    def read(device: str, time_s: float) -> DeviceSample:
        gpu = opened[device]
        power_mw, memory = _number(gpu.power_usage()), _number(gpu.memory_used())
        return DeviceSample(
            time_s,
            device,
            utilisation=_number(gpu.gpu_utilization()),
            memory_used_bytes=None if memory is None else int(memory),
            power_w=None if power_mw is None else power_mw / 1000.0,
            temperature_c=_number(gpu.temperature()),
        )

    return read


def _number(value: object) -> float | None:
    """nvitop answers `NA`, a string, where the driver does not tell."""
    return float(value) if isinstance(value, (int, float)) else None


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
    """Background thread that reads devices and host every `interval_s` while the `with` block lasts.

    A reading that fails leaves its numbers unknown, which is said once in the log; sampling goes on.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        interval_s: float = 0.5,
        read: Reader | None = None,
        host: Callable[[float], HostSample] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` reads a device: NVML, when not given."""
        self.devices = tuple(devices)
        self.interval_s = interval_s
        self._read_device = read or nvml_reader(devices)
        self._failed = False
        self._host = host or HostProbe().read
        self._clock = clock
        self._device_samples: list[DeviceSample] = []
        self._host_samples: list[HostSample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="virnuc-sampler", daemon=True)

    def sample_once(self) -> None:
        """Take one reading of everything now."""
        now = self._clock()
        if self._read_device is not None:
            self._device_samples += [self._read(self._read_device, device, now) for device in self.devices]
        self._host_samples.append(self._host(now))

    def _read(self, read: Reader, device: str, time_s: float) -> DeviceSample:
        try:
            return read(device, time_s)
        except Exception as error:  # noqa: BLE001  a driver may fail in any way; the run must not
            if not self._failed:
                log.warning("reading %s failed (%s): its numbers are unknown at that moment", device, error)
            self._failed = True
            return DeviceSample(time_s, device)

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self.sample_once()
            due = max(due + self.interval_s, time.monotonic())  # after a stall: no burst to catch up
            self._stop.wait(due - time.monotonic())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample_once()  # so that even a short run has one

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
