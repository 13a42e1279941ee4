"""The sampler against a stand-in for NVML: every device, every interval, and never a number that was not read."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
import psutil
import pytest

from tests.fake_gpus import FakeGpus
from virnuc_core import gpus
from virnuc_core.gpus import Driver, Reading
from virnuc_core.runfiles import versions
from virnuc_core.telemetry.sampler import Sampler, gpu_reader
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import DeviceSample, HostSample

DEVICES = ("GPU-aaaa", "GPU-bbbb")


class FakeNvml:
    """Answers from a table; a device that is not in it fails like a driver does."""

    def __init__(self, **readings: tuple[float | None, ...]) -> None:
        self.readings = {name.replace("_", "-"): reading for name, reading in readings.items()}
        self.asked: list[str] = []

    def read(self, device: str, time_s: float) -> DeviceSample:
        self.asked.append(device)
        return DeviceSample(time_s, device, *self.readings[device])


class Keeping(Sampler):
    """A sampler that keeps what it hears."""

    def __init__(self, devices: Sequence[str], **options: Any) -> None:
        self.kept: list[DeviceSample | HostSample] = []
        super().__init__(devices, on_samples=self.keep, **options)

    def keep(self, *samples: DeviceSample | HostSample) -> None:
        self.kept.extend(samples)

    def samples(self) -> pd.DataFrame:
        samples = [sample for sample in self.kept if isinstance(sample, DeviceSample)]
        return record_table(DeviceSample, samples)

    def host_samples(self) -> pd.DataFrame:
        samples = [sample for sample in self.kept if isinstance(sample, HostSample)]
        return record_table(HostSample, samples)


def test_each_device_is_read_by_its_own_name() -> None:
    nvml = FakeNvml(GPU_aaaa=(97.0, 5, 300.0, 61.0), GPU_bbbb=(12.0, 7, 90.0, 40.0))
    sampler = Keeping(DEVICES, read=nvml.read)
    sampler.sample_once()
    table = sampler.samples()
    assert table.utilisation[table.device == "GPU-aaaa"].tolist() == [97.0]
    assert table.utilisation[table.device == "GPU-bbbb"].tolist() == [12.0]
    assert table.time_s.tolist() == 2 * sampler.host_samples().time_s.tolist(), (
        "the host is read on the same clock"
    )


def test_the_thread_samples_until_stopped_and_leaves_nothing() -> None:
    nvml = FakeNvml(GPU_aaaa=(50.0,))
    began = time.monotonic()
    with Keeping(DEVICES[:1], every_s=0.01, read=nvml.read) as sampler:
        while len(sampler.samples()) < 3:
            time.sleep(0.01)
    num_samples = len(sampler.samples())
    assert 3 <= num_samples <= (time.monotonic() - began) / 0.01 + 2, (
        "at most one an interval, and the last"
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "virnuc-sampler"]
    time.sleep(0.03)
    assert len(sampler.samples()) == num_samples


def test_a_short_run_has_a_sample() -> None:
    with Keeping(DEVICES[:1], every_s=60, read=FakeNvml(GPU_aaaa=(50.0,)).read) as s:
        pass
    assert len(s.samples()) >= 1


def test_a_reading_that_fails_is_unknown_and_sampling_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = Keeping(DEVICES, read=FakeNvml(GPU_aaaa=(80.0,)).read)
    with caplog.at_level(logging.WARNING):
        sampler.sample_once()
        sampler.sample_once()
    assert sampler.latest["GPU-aaaa"].utilisation == 80.0
    assert sampler.latest["GPU-bbbb"].utilisation is None
    assert ["GPU-bbbb" in record.message for record in caplog.records] == [True], (
        "said once, not each time"
    )


def test_without_nvml_the_host_is_sampled_and_utilisation_is_not_there() -> None:
    sampler = Keeping(("cpu-core-0", "cpu-core-1"))
    sampler.sample_once()
    assert len(sampler.samples()) == 0
    host = sampler.host_samples()
    assert host.rss_bytes[0] > 1_000_000
    assert 0 <= host.cpu_percent[0] <= 100
    assert host.cpu_percent[0] <= host.busiest_core_percent[0] <= 100
    disks = psutil.disk_io_counters()
    if disks is not None:
        assert 0 <= host.disk_read_bytes[0] <= disks.read_bytes
        assert 0 <= host.disk_written_bytes[0] <= disks.write_bytes
    assert not sampler.latest


def test_a_gpu_asked_for_where_there_is_no_driver_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpus, "NVML", FakeGpus(driver=None))
    with caplog.at_level(logging.WARNING):
        assert gpu_reader(["GPU-aaaa"]) is None
    assert "utilisation is not measured" in caplog.text


def test_no_gpu_no_word() -> None:
    assert gpu_reader(["cpu-core-0"]) is None


def test_the_driver_is_named_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML", FakeGpus(driver=None))
    assert not {"driver", "cuda_driver"} & set(versions())
    monkeypatch.setattr(gpus, "NVML", FakeGpus(driver=Driver("570.86.15", "12.8")))
    assert {"driver": "570.86.15", "cuda_driver": "12.8"}.items() <= versions().items()


def test_a_sample_has_every_number_of_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"GPU-aaaa": Reading(11.0), "GPU-bbbb": Reading(88.0, 1 << 30, 345.0, None)}
    monkeypatch.setattr(gpus, "NVML", FakeGpus(readings=readings))
    sample_gpus = gpu_reader(DEVICES)
    assert sample_gpus is not None
    assert sample_gpus("GPU-bbbb", 2.0) == DeviceSample(2.0, "GPU-bbbb", 88.0, 1 << 30, 345.0, None)
    assert sample_gpus("GPU-aaaa", 2.0).utilisation == 11.0


def test_a_sample_has_the_energy_and_the_power_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {
        "GPU-aaaa": Reading(energy_j=12.5, is_power_limited=True),
        "GPU-bbbb": Reading(is_power_limited=False),
    }
    monkeypatch.setattr(gpus, "NVML", FakeGpus(readings=readings))
    sample_gpus = gpu_reader(DEVICES)
    assert sample_gpus is not None
    limited, free = sample_gpus("GPU-aaaa", 2.0), sample_gpus("GPU-bbbb", 2.0)
    assert (limited.energy_j, limited.power_limited) == (12.5, 1.0)
    assert (free.energy_j, free.power_limited) == (None, 0.0)


def test_memory_of_children_is_counted() -> None:
    import subprocess
    import sys

    own_bytes = Sampler(()).host(0.0).rss_bytes
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; data = bytearray(60_000_000); print(len(data), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        both_bytes = Sampler(()).host(0.0).rss_bytes
    finally:
        child.communicate(b"\n")
    assert own_bytes is not None
    assert both_bytes is not None
    assert both_bytes > own_bytes + 50_000_000


@pytest.mark.gpu
def test_known_load_is_seen_on_a_real_gpu() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    uuid = gpus.NVML.visible()[0].uuid
    side = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    with Keeping((uuid,), every_s=0.1) as idle:
        torch.cuda.synchronize()
        time.sleep(2.0)
    with Keeping((uuid,), every_s=0.1) as busy:
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            for _ in range(20):
                side @ side
            torch.cuda.synchronize()
    quiet, busy_values = idle.samples().utilisation[5:], busy.samples().utilisation[15:]
    assert quiet.mean() < 30
    assert busy_values.mean() > 90
    assert busy.samples().power_w[15:].mean() > idle.samples().power_w[5:].mean()
