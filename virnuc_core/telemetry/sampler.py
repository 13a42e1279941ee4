"""Read devices and host at regular times while a run goes on.

GPUs are read through NVML, by UUID. Without it only the host is read, and utilisation is `None`,
never zero.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psutil

from virnuc_core import gpus
from virnuc_core.telemetry.tables import DeviceSample, HostSample

log = logging.getLogger(__name__)

# New child processes are searched for with every tenth sample only, because the search reads
# every process of the machine.
SAMPLES_PER_LOOK: Final = 10

OnSamples = Callable[..., None]  # gets samples as they are taken
Reader = Callable[[str, float], DeviceSample]  # reads a device now, stamped with a time; may raise


def gpu_reader(devices: Sequence[str]) -> Reader | None:
    """Return a function that reads the GPUs among `devices`, each by its UUID.

    Returns:
        `None` if no device is a GPU, or if NVML cannot be used, which is logged.
    """
    uuids = [device for device in devices if device.startswith(gpus.UUID_PREFIXES)]
    if not uuids:
        return None
    try:
        read_gpu = gpus.NVML.reader(uuids)
    except gpus.NvmlError as error:
        log.warning("NVML cannot be used (%s): gpu utilisation is not measured", error)
        return None

    def read(device: str, time_s: float) -> DeviceSample:
        """Read a GPU now. An error of NVML is not caught here."""
        reading = read_gpu(device)
        power_limited = None
        if reading.is_power_limited is not None:
            power_limited = float(reading.is_power_limited)
        return DeviceSample(
            time_s,
            device,
            utilisation=reading.utilisation_percent,
            memory_used_bytes=reading.memory_used_bytes,
            power_w=reading.power_w,
            temperature_c=reading.temperature_c,
            energy_j=reading.energy_j,
            power_limited=power_limited,
        )

    return read


class Sampler:
    """A background thread that reads devices and host while the `with` block lasts."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        every_s: float = 0.5,
        on_samples: OnSamples = lambda *_: None,
        read: Reader | None = None,
    ) -> None:
        """Prepare to sample.

        Args:
            devices: The devices.
            every_s: The time between two samples.
            on_samples: Is called with the samples of all devices and of the host each time they
                are taken.
            read: Reads a device. Without it the GPUs of this machine are read through NVML, so
                it is needed for devices of other machines.
        """
        self.devices = tuple(devices)
        self.latest: dict[str, DeviceSample] = {}  # the newest reading of each device
        self._every_s = every_s
        self._on_samples = on_samples
        self._read = read or gpu_reader(devices)
        self._has_failed = False
        self._samples_taken = itertools.count()
        self._processes: list[psutil.Process] = []  # this one and its children
        _core_percents()  # the next call tells the load since this one
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="virnuc-sampler", daemon=True)

    def sample_once(self) -> None:
        """Read all devices and the host once now, and give the samples to `on_samples`."""
        now_s = time.monotonic()
        if self._read is not None:
            for device in self.devices:
                self.latest[device] = self._sample_device(self._read, device, now_s)
        self._on_samples(*self.latest.values(), self.host(now_s))

    def _sample_device(self, read: Reader, device: str, now_s: float) -> DeviceSample:
        """Read a device. If that fails, return a sample without numbers.

        Only the first failure of the run is logged, because the next samples may all fail, too.
        """
        try:
            return read(device, now_s)
        except Exception as error:  # noqa: BLE001  a driver may fail in any way; the run must not
            if not self._has_failed:
                log.warning(
                    "reading %s failed (%s): its numbers are unknown at that moment", device, error
                )
            self._has_failed = True
            return DeviceSample(now_s, device)

    def host(self, time_s: float) -> HostSample:
        """Read the CPU and the disks of this machine, and the memory of this process and its
        children. The time is that of the devices' samples, so that both can be held side by side.
        """
        if next(self._samples_taken) % SAMPLES_PER_LOOK == 0:
            own_process = psutil.Process()
            self._processes = [own_process, *own_process.children(recursive=True)]
        rss_bytes = 0
        for process in self._processes:
            with suppress(psutil.Error):  # it has ended
                rss_bytes += process.memory_info().rss
        core_percents = _core_percents()
        disks = _disk_counters()
        return HostSample(
            time_s,
            cpu_percent=sum(core_percents) / len(core_percents) if core_percents else None,
            rss_bytes=rss_bytes,
            busiest_core_percent=max(core_percents, default=None),
            disk_read_bytes=None if disks is None else disks.read_bytes,
            disk_written_bytes=None if disks is None else disks.write_bytes,
        )

    def _loop(self) -> None:
        """Take samples in the background thread until the `with` block ends."""
        self.sample_once()
        while not self._stop.wait(self._every_s):
            self.sample_once()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample_once()  # so that even a short run has one


def _core_percents() -> list[float]:
    """Return how busy each core of this process was since the last call, in percent.

    These are the cores that the process may use. If their numbers do not fit the system's list of
    cores, because some are switched off, all cores of the machine are returned.
    """
    percents: list[float] = psutil.cpu_percent(interval=None, percpu=True)
    own_cores = os.sched_getaffinity(0)
    if max(own_cores) >= len(percents):
        return percents
    return [percents[core] for core in own_cores]


def _disk_counters() -> Any:
    """Return the counters of all disks together, or `None` if the system shows no disk."""
    with suppress(OSError, RuntimeError, ValueError):  # a container may hide the disks
        return psutil.disk_io_counters()
    return None
