"""Device lists as people write them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace

import nvitop
import pynvml
import pytest

from virnuc_core.config import Devices
from virnuc_core.engine.devices import environment, open_context, resolve, visible_gpus
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.runfiles import Device


@pytest.mark.parametrize(
    ("text", "kind", "ids"),
    [
        ("cpu", "cpu", ("0",)),
        ("cpu:2", "cpu", ("0", "1")),
        ("cuda:0", "cuda", ("0",)),
        ("cuda:2, cuda:3", "cuda", ("2", "3")),
        ("cuda:GPU-12ab-34", "cuda", ("GPU-12ab-34",)),
        ("auto", "auto", ()),
    ],
)
def test_device_lists_are_read(text: str, kind: str, ids: tuple[str, ...]) -> None:
    devices = Devices.parse(text)
    assert (devices.kind, devices.ids) == (kind, ids)


@pytest.mark.parametrize(
    "text", ["cpu:0", "gpu:1", "cuda", "cuda:0,cuda:0", "cuda:0,cpu:1", "", "cuda:-1"]
)
def test_what_is_no_device_list_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="devices"):
        Devices.parse(text)


def test_cores_are_distinct_and_allowed_ones() -> None:
    count = min(2, len(os.sched_getaffinity(0)))
    cores = [device.core for device in resolve(Devices.parse(f"cpu:{count}"))]
    assert len(set(cores)) == count
    assert set(cores) <= os.sched_getaffinity(0)


def test_more_cores_than_there_are_is_an_error() -> None:
    with pytest.raises(DeviceError, match="may use"):
        resolve(Devices.parse(f"cpu:{len(os.sched_getaffinity(0)) + 1}"))


def test_a_gpu_worker_sees_its_gpu_alone_by_uuid() -> None:
    assert environment(Device(id="GPU-12", kind="cuda", name="x")) == {
        "CUDA_VISIBLE_DEVICES": "GPU-12"
    }
    assert (
        environment(Device(id="cpu-core-1", kind="cpu", name="x", core=1))["CUDA_VISIBLE_DEVICES"]
        == ""
    )


@pytest.mark.parametrize(
    ("count", "mig", "chosen", "asked"),
    [
        (1, False, None, False),
        (1, False, "0", True),
        (1, False, "", True),
        (1, True, None, True),
        (2, False, None, True),
    ],
)
def test_cuda_is_asked_which_gpus_it_has_unless_there_is_but_one(
    count: int, mig: bool, chosen: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            uuid=lambda: f"GPU-{name}", name=lambda: name, is_mig_mode_enabled=lambda: mig
        )

    physical = [gpu(f"physical {number}") for number in range(count)]
    device = SimpleNamespace(
        all=lambda: physical, cuda=SimpleNamespace(all=lambda: [gpu("as CUDA has it")])
    )
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(nvitop, "Device", device)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.name for gpu in visible_gpus()] == ["as CUDA has it" if asked else "physical 0"]


@pytest.mark.parametrize(
    ("codes", "called"),
    [
        ({}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ({"cuInit": 100}, ["cuInit"]),
        ({"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
        (None, []),
    ],
)
def test_the_first_gpu_has_its_context_made_or_is_left_to_torch(
    codes: dict[str, int] | None, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the driver's functions as CUDA documents them; without a driver, or with one that fails, nothing is raised."""
    asked = list[str]()

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_: (asked.append(name), (codes or {}).get(name, 0))[1]

    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if codes is None:
            raise OSError("no such file")
        return Driver()

    monkeypatch.setattr(ctypes, "CDLL", load)
    open_context()
    assert asked == called
