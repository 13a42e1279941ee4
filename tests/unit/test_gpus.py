"""What virnuc asks of NVIDIA's management library, with a stand-in for nvitop and pynvml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nvitop
import pynvml
import pytest

from tests.fake_gpus import FakeGpus
from virnuc_core.gpus import LIBRARY, Driver, Gpu, Nvml, NvmlError, Occupancy, Reading

UUIDS = ("GPU-aaaa", "GPU-bbbb")
FAKE_NVML = Path(__file__).parents[1] / "data" / "fake_nvml.c"
FIRST_FAKE_GPU = "GPU-11111111-2222-3333-4444-555555555551"
LIST_GPUS = """
from virnuc_core.gpus import Nvml, NvmlError
try:
    print("visible:", *[gpu.uuid for gpu in Nvml().visible()])
except NvmlError as error:
    print("error:", error)
"""
ALL_CODES = sorted(
    {
        code
        for name, code in vars(pynvml).items()
        if name.startswith("NVML_ERROR_") and isinstance(code, int)
    }
)


def no_driver() -> None:
    """Fail as NVML does on a machine without a driver."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture
def working_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "570.86.15")
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 12080)


def test_neither_library_is_imported_before_a_question_is_asked() -> None:
    program = (
        "import sys; import virnuc_core.gpus; print({'nvitop', 'pynvml'}.intersection(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "set()"


@pytest.mark.usefixtures("working_driver")
def test_the_driver_tells_its_version_and_its_newest_cuda() -> None:
    assert Nvml().driver() == Driver("570.86.15", "12.8")


def test_without_a_driver_there_is_no_version_no_gpu_and_no_reading(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(nvitop.Device, "count", staticmethod(no_driver))
    assert Nvml().driver() is None
    assert Nvml().visible() == []
    with pytest.raises(NvmlError, match="Not Found"):
        Nvml().reader(UUIDS)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("working_driver")
@pytest.mark.parametrize(
    ("count", "has_slices", "cuda_visible_devices", "asks_cuda"),
    [
        (1, False, None, False),
        (1, False, "0", True),
        (1, False, "", True),
        (1, True, None, True),
        (2, False, None, True),
    ],
)
def test_cuda_is_asked_which_gpus_it_has_unless_there_is_but_one(
    count: int,
    has_slices: bool,
    cuda_visible_devices: str | None,
    asks_cuda: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gpu(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            uuid=lambda: f"GPU-{name}", name=lambda: name, is_mig_mode_enabled=lambda: has_slices
        )

    physical = [gpu(f"physical {number}") for number in range(count)]
    in_cuda_order = SimpleNamespace(all=lambda: [gpu("as CUDA has it")])
    device = SimpleNamespace(all=lambda: physical, cuda=in_cuda_order)
    monkeypatch.setattr(nvitop, "Device", device)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if cuda_visible_devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda_visible_devices)
    name = "as CUDA has it" if asks_cuda else "physical 0"
    assert Nvml().visible() == [Gpu(f"GPU-{name}", name)]


class Device:
    """A device of nvitop's. One of its processes holds memory, and it does not tell temperatures."""

    def __init__(self, uuid: str) -> None:
        if uuid not in UUIDS:
            raise RuntimeError(f"no such device: {uuid}")
        self.uuid = uuid

    @staticmethod
    def count() -> int:
        return 2

    def gpu_utilization(self) -> int | str:
        return {"GPU-aaaa": 11, "GPU-bbbb": nvitop.NA}[self.uuid]

    def memory_used(self) -> int:
        return 1 << 30

    def memory_free(self) -> int:
        return 79 << 30

    def memory_total(self) -> int | str:
        return {"GPU-aaaa": 80 << 30, "GPU-bbbb": nvitop.NA}[self.uuid]

    def power_usage(self) -> int:
        return 345_000  # milliwatts

    def temperature(self) -> str:
        return nvitop.NA

    def processes(self) -> dict[int, SimpleNamespace]:
        return {4711: SimpleNamespace(pid=4711)}


def test_a_gpu_is_read_by_its_uuid_and_what_it_does_not_tell_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvitop, "Device", Device)
    sample_gpus = Nvml().reader(UUIDS)
    assert sample_gpus("GPU-aaaa") == Reading(11.0, float(1 << 30), 345.0, None)
    assert sample_gpus("GPU-bbbb") == Reading(None, float(1 << 30), 345.0, None)


def test_a_gpu_that_nvml_does_not_know_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvitop, "Device", Device)
    with pytest.raises(NvmlError, match="GPU-cccc"):
        Nvml().reader(["GPU-cccc"])


def test_who_uses_a_gpu_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvitop, "Device", Device)
    assert Nvml().occupancy("GPU-aaaa") == Occupancy(80 << 30, 79 << 30, 11.0, (4711,))
    assert Nvml().occupancy("GPU-bbbb") == Occupancy(0, 79 << 30, None, (4711,))


def test_the_fake_of_other_tests_answers_every_question() -> None:
    questions = {name for name in vars(Nvml) if not name.startswith("_")}
    assert questions == {name for name in vars(FakeGpus) if not name.startswith("_")}


def list_gpus(library_folder: Path, **environment: str | int) -> str:
    """Return what a child process says that loads its NVML from a folder, or finds none there."""
    settings = {name: str(value) for name, value in environment.items()}
    clean = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    answer = subprocess.run(
        [sys.executable, "-c", LIST_GPUS],
        env=clean | {"LD_LIBRARY_PATH": str(library_folder)} | settings,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return answer.stdout.strip()


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a library that answers in place of the driver's."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / LIBRARY, FAKE_NVML], check=True)
    return folder


def test_a_driver_without_a_fault_gives_its_gpu_or_none(library_folder: Path) -> None:
    assert list_gpus(library_folder, FAKE_GPUS=1) == f"visible: {FIRST_FAKE_GPU}"
    assert list_gpus(library_folder, FAKE_GPUS=0) == "visible:"
    for hidden in ("", "-1", "abc", "7"):
        answer = list_gpus(library_folder, FAKE_GPUS=1, CUDA_VISIBLE_DEVICES=hidden)
        assert answer == "visible:", hidden


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        ("FAKE_INIT", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
        ("FAKE_COUNT", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
        ("FAKE_COUNT", pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
        ("FAKE_HANDLE", pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        ("FAKE_HANDLE", pynvml.NVML_ERROR_GPU_IS_LOST, "does not answer"),
        ("FAKE_UUID", pynvml.NVML_ERROR_GPU_IS_LOST, "does not answer"),
    ],
)
def test_a_fault_of_a_loaded_driver_is_an_error_with_its_words(
    step: str, code: int, message: str, library_folder: Path
) -> None:
    answer = list_gpus(library_folder, FAKE_GPUS=1, **{step: code})
    assert answer.startswith("error: ")
    assert message in answer


def test_gpus_that_cuda_does_not_find_are_an_error(library_folder: Path) -> None:
    answer = list_gpus(library_folder, FAKE_GPUS=2)
    assert answer == "error: the driver lists GPUs (2), and CUDA finds none of them"


@pytest.mark.parametrize("code", ALL_CODES)
def test_only_a_missing_library_means_no_gpu(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        assert Nvml().visible() == []
        return
    with pytest.raises(NvmlError):
        Nvml().visible()


def test_a_library_that_cannot_be_loaded_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"")
    answer = list_gpus(tmp_path)
    assert answer.startswith("error: ")
    assert "too short" in answer
