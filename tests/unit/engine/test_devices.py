"""Device lists as people write them."""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pynvml
import pytest

from tests.fake_gpus import FakeGpus
from virnuc_core import gpus
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.engine import devices, kernel_cache
from virnuc_core.engine.devices import (
    auto_remark,
    environment,
    open_context,
    resolve,
    resolve_engine,
    visible_gpus,
)
from virnuc_core.engine.shards import result_settings
from virnuc_core.errors import ConfigError, DeviceError
from virnuc_core.gpus import Gpu, NvmlError
from virnuc_core.runfiles import Device, version_of

NOBODY = 65534
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME")


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
def test_an_invalid_device_list_is_quoted_in_the_error(text: str) -> None:
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


def no_account(_uid: int) -> None:
    raise KeyError("getpwuid(): uid not found")


def test_a_gpu_worker_of_a_user_without_a_home_keeps_its_kernels_in_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Device(id="GPU-12", kind="cuda", name="x")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_account)
    folder = Path(environment(gpu)["TRITON_CACHE_DIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment(gpu)["TRITON_CACHE_DIR"] == str(folder)  # one for all workers
    a_file = tmp_path / "file"
    a_file.write_text("")
    monkeypatch.setenv("HOME", str(a_file))
    assert environment(gpu)["TRITON_CACHE_DIR"] == str(folder)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    assert "TRITON_CACHE_DIR" not in environment(gpu)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "TRITON_CACHE_DIR" not in environment(gpu)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home directory of a user who is not root, and may not pass over permissions.

    Nothing was kept elsewhere yet.
    """
    make_folder = cache(kernel_cache._temporary_folder.__wrapped__)
    make_fresh_folder = cache(kernel_cache._fresh_folder.__wrapped__)
    monkeypatch.setattr(kernel_cache, "_temporary_folder", make_folder)
    monkeypatch.setattr(kernel_cache, "_fresh_folder", make_fresh_folder)
    with tempfile.TemporaryDirectory(prefix="virnuc-test-") as name:
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder
    make_folder().cleanup()
    make_fresh_folder().cleanup()


def needs_another_cache(home: str) -> bool:
    """Return whether a user who is not root keeps kernels elsewhere than in a home directory."""
    variables = {name: os.environ.pop(name) for name in CACHE_VARIABLES if name in os.environ}
    is_root = os.geteuid() == 0
    try:
        os.environ["HOME"] = home
        if is_root:
            os.setresuid(NOBODY, NOBODY, 0)
        return "TRITON_CACHE_DIR" in environment(Device(id="GPU-12", kind="cuda", name="x"))
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        os.environ.update(variables)


def test_a_gpu_worker_keeps_its_kernels_elsewhere_if_the_home_is_no_usable_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    hidden = home / "hidden"
    hidden.mkdir(mode=0o000)
    for unusable in ("", "relative", str(hidden), str(hidden / "home")):
        assert needs_another_cache(unusable), unusable


@pytest.mark.parametrize("obstacle", ["file", "dead link", "link to what is hidden", "of root"])
def test_a_gpu_worker_keeps_its_kernels_elsewhere_if_tritons_folder_is_unusable(
    home: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not needs_another_cache(str(home))
    folder = home / ".triton"
    if obstacle == "file":
        folder.write_text("")
    elif obstacle == "dead link":
        folder.symlink_to(home / "nothing")
    elif obstacle == "link to what is hidden":
        (home / "hidden").mkdir(mode=0o000)
        folder.symlink_to(home / "hidden" / "triton")
    else:
        folder.mkdir(mode=0o555)  # also not this user's, if root runs the test
    assert needs_another_cache(str(home))
    assert needs_another_cache(str(home))
    assert caplog.text.count("name a folder for them with TRITON_CACHE_DIR") == 1


def test_a_gpu_worker_with_fresh_kernels_never_uses_kept_ones(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Device(id="GPU-12", kind="cuda", name="x")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "kernels that are damaged"))
    folder = Path(environment(gpu, fresh_kernels=True)["TRITON_CACHE_DIR"])
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "TRITON_CACHE_DIR" not in environment(gpu), "the user's own folder is used"


def test_gpus_are_chosen_by_number_or_by_uuid_and_all_of_them_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visible = [Gpu("GPU-aa", "H100"), Gpu("GPU-bb", "L40S")]
    monkeypatch.setattr(gpus, "NVML", FakeGpus(visible))
    first_gpu = Device(id="GPU-aa", kind="cuda", name="H100")
    second = Device(id="GPU-bb", kind="cuda", name="L40S")
    assert visible_gpus() == [first_gpu, second]
    assert resolve(Devices.parse("auto")) == (first_gpu, second)
    assert resolve(Devices.parse("cuda:1")) == (second,)
    assert resolve(Devices.parse("cuda:GPU-aa")) == (first_gpu,)
    with pytest.raises(DeviceError, match=r"cuda:2 is not here; visible: cuda:0 \(H100\), cuda:1"):
        resolve(Devices.parse("cuda:2"))


def test_without_a_gpu_auto_is_one_core_with_the_reason_and_a_named_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    absence = "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this machine"
    monkeypatch.setattr(gpus, "NVML", FakeGpus(absence=absence))
    devices._warn_once.cache_clear()
    requested = Devices.parse("auto")
    for _ in range(2):
        assert [device.kind for device in resolve(requested)] == ["cpu"]
    (record,) = caplog.records
    remark = f"--devices auto takes one CPU core, which is far slower than a GPU: {absence}"
    assert record.getMessage() == remark
    assert auto_remark(requested) == remark
    assert auto_remark(Devices.parse("cpu:1")) == ""
    with pytest.raises(DeviceError) as raised:
        resolve(Devices.parse("cuda:0"))
    assert absence in str(raised.value)
    assert "--devices cpu:1" in str(raised.value)


def test_a_torch_without_cuda_computes_on_a_core_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "NVML", FakeGpus([Gpu("GPU-aa", "H100")], torch_cuda=None))
    assert [device.kind for device in resolve(Devices.parse("auto"))] == ["cpu"]
    assert visible_gpus() == []
    remark = auto_remark(Devices.parse("auto"))
    assert "is built without CUDA" in remark
    assert version_of("torch") in remark
    with pytest.raises(DeviceError, match=r"cuda:0 asked for.*built without CUDA"):
        resolve(Devices.parse("cuda:0"))


def test_nothing_is_remarked_where_auto_takes_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpus, "NVML", FakeGpus([Gpu("GPU-aa", "H100")]))
    resolve(Devices.parse("auto"))
    assert auto_remark(Devices.parse("auto")) == ""
    assert not caplog.records


def test_a_fault_of_the_driver_is_told_with_its_own_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = NvmlError("Driver Not Loaded", "load it")
    monkeypatch.setattr(gpus, "NVML", FakeGpus(fault=fault))
    for text in ("auto", "cuda:0"):
        with pytest.raises(DeviceError) as raised:
            resolve(Devices.parse(text))
        assert str(raised.value) == (
            "the NVIDIA driver of this machine does not work: Driver Not Loaded; load it, "
            "or compute without GPUs: --devices cpu:1"
        )


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,  # updated, and not restarted
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_UNKNOWN,
    ],
)
def test_a_driver_that_does_not_work_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    for text in ("auto", "cuda:0"):
        with pytest.raises(DeviceError, match=r"does not work: .*--devices cpu:1"):
            resolve(Devices.parse(text))
    assert [device.kind for device in resolve(Devices.parse("cpu:1"))] == ["cpu"]


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
    requests = list[str]()

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_: (requests.append(name), (codes or {}).get(name, 0))[1]

    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if codes is None:
            raise OSError("no such file")
        return Driver()

    monkeypatch.setattr(ctypes, "CDLL", load)
    open_context()
    assert requests == called


def _device(kind: Literal["cpu", "cuda"]) -> Device:
    return Device(id="a device", kind=kind, name="a device")


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("cpu", {}, "gelu 'tanh' needs a CUDA device, this is cpu; use exact"),
        ("cuda", {"precision": "int8"}, "wants precision fp16 or bf16, not int8"),
        ("cuda", {"precision": "fp32"}, "wants precision fp16 or bf16, not fp32"),
        ("cuda", {"attention": "reference"}, "wants attention fused, not reference"),
    ],
)
def test_gelu_by_tanh_is_refused_in_one_line_where_it_cannot_run(
    kind: Literal["cpu", "cuda"], changes: dict[str, str], problem: str
) -> None:
    engine = EngineSpec.model_validate({"gelu": "tanh"} | changes)
    with pytest.raises(ConfigError) as error_info:
        resolve_engine(engine, [_device(kind)])
    assert problem in str(error_info.value)
    assert "\n" not in str(error_info.value)
    exact = EngineSpec.model_validate(changes) if kind == "cuda" else EngineSpec()
    assert resolve_engine(exact, [_device(kind)]).gelu == "exact"


def test_gelu_by_tanh_runs_in_16_bits_on_a_gpu() -> None:
    for precision in ("auto", "fp16", "bf16"):
        engine = EngineSpec.model_validate({"gelu": "tanh", "precision": precision})
        assert resolve_engine(engine, [_device("cuda")]).gelu == "tanh"


def _cards(*capabilities: tuple[int, int] | None) -> list[Device]:
    return [
        Device(id=f"GPU-{i}", kind="cuda", name="a card", capability=capability)
        for i, capability in enumerate(capabilities)
    ]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is built for x86_64")
@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([(9, 0)], "hopper"),
        ([(9, 0), (9, 0)], "hopper"),
        ([(9, 0), (8, 0)], "triton"),
        ([(10, 0)], "triton"),
        ([None], "triton"),
    ],
)
def test_kernels_for_int8_are_one_choice_for_all_devices_of_a_run(
    capabilities: list[tuple[int, int] | None], expected: str
) -> None:
    cards = _cards(*capabilities)
    resolved = resolve_engine(EngineSpec(precision="int8"), cards)
    assert resolved.int8_kernels == expected
    asked = EngineSpec(precision="int8", int8_kernels="triton")
    assert resolve_engine(asked, cards).int8_kernels == "triton"
    assert resolve_engine(EngineSpec(precision="fp16"), cards).int8_kernels == "auto"


def test_kernels_for_int8_are_part_of_what_decides_results_and_triton_as_before() -> None:
    hopper = result_settings(EngineSpec(precision="int8", int8_kernels="hopper"))
    triton = result_settings(EngineSpec(precision="int8", int8_kernels="triton"))
    half = result_settings(EngineSpec(precision="fp16", int8_kernels="hopper"))
    assert hopper["int8_kernels"] == "hopper"
    assert "int8_kernels" not in triton
    assert "int8_kernels" not in half
