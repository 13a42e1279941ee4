"""What virnuc asks of NVIDIA's management library, with a stand-in for nvitop and pynvml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import nvitop
import pynvml
import pytest
import torch

from tests.fake_gpus import FakeGpus, build_fake_nvml
from virnuc_core import gpu_order, gpus
from virnuc_core.gpus import (
    LIBRARY,
    Driver,
    Gpu,
    GpuSearch,
    Nvml,
    NvmlError,
    Occupancy,
    Reading,
)

UUIDS = ("GPU-aaaa", "GPU-bbbb")
FIRST_FAKE_GPU = "GPU-11111111-2222-3333-4444-555555555551"
# Lists the GPUs for each line of its input, which holds environment variables, in a process that
# has loaded no library of a driver yet: a fork of this one. The imports take half a second.
LIST_GPUS = """
import json, os, sys
import nvitop, pynvml
from virnuc_core.gpus import Nvml, NvmlError

def list_gpus():
    try:
        print("visible:", *[gpu.uuid for gpu in Nvml().visible()])
        print(Nvml().search().absence)
    except NvmlError as error:
        print("error:", error)
        print(error.advice)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.environ.update(json.loads(line))
        list_gpus()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit("a process that lists GPUs failed")
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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory in which no order of GPUs is remembered."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


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
    physical = [named_gpu(f"GPU-physical {number}", has_slices) for number in range(count)]
    in_cuda_order = SimpleNamespace(all=lambda: [named_gpu("GPU-as CUDA has it", has_slices)])
    device = SimpleNamespace(all=lambda: physical, cuda=in_cuda_order)
    monkeypatch.setattr(nvitop, "Device", device)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if cuda_visible_devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda_visible_devices)
    uuid = "GPU-as CUDA has it" if asks_cuda else "GPU-physical 0"
    capability = None if has_slices else (9, 0)
    assert Nvml().visible() == [Gpu(uuid, f"name of {uuid}", capability)]


class AskedCuda:
    """Stands in for `nvitop.Device`: lists two GPUs, and counts how often CUDA was asked."""

    def __init__(self, order: Sequence[str]) -> None:
        """Keep the order in which CUDA has the GPUs."""
        self.count = 0
        self.order = order
        self.has_slices = False
        self.uuids = list(UUIDS)  # of the driver
        self.cuda = SimpleNamespace(all=self.in_cuda_order)

    def all(self) -> list[SimpleNamespace]:
        """Return the GPUs as the driver lists them."""
        return [named_gpu(uuid, self.has_slices) for uuid in self.uuids]

    def in_cuda_order(self) -> list[SimpleNamespace]:
        """Return the GPUs as CUDA lists them."""
        self.count += 1
        return [named_gpu(uuid, self.has_slices) for uuid in self.order]


@pytest.fixture
def cuda(working_driver: None, monkeypatch: pytest.MonkeyPatch) -> AskedCuda:
    """Two GPUs. CUDA lists them in the other order than the driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    device = AskedCuda(["GPU-bbbb", "GPU-aaaa"])
    monkeypatch.setattr(nvitop, "Device", device)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(device.uuids))
    return device


def visible_uuids() -> list[str]:
    return [gpu.uuid for gpu in Nvml().visible()]


def test_cuda_is_asked_once_for_its_order(cuda: AskedCuda) -> None:
    for _ in range(3):
        assert visible_uuids() == ["GPU-bbbb", "GPU-aaaa"]
    assert cuda.count == 1


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_cuda_is_asked_again_if_another_variable_may_change_the_order(
    variable: str, cuda: AskedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible_uuids()
    monkeypatch.setenv(variable, "1")
    cuda.order = ["GPU-aaaa"]
    assert visible_uuids() == ["GPU-aaaa"]
    monkeypatch.delenv(variable)
    assert visible_uuids() == ["GPU-bbbb", "GPU-aaaa"]
    assert cuda.count == 2


def test_cuda_is_asked_again_after_a_restart_of_the_machine(
    cuda: AskedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible_uuids()
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another\n")
    monkeypatch.setattr(gpu_order, "BOOT_ID", boot_id)
    cuda.order = UUIDS
    assert visible_uuids() == list(UUIDS)
    assert cuda.count == 2


def test_cuda_is_asked_again_if_the_gpus_or_the_driver_are_others(
    cuda: AskedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible_uuids()
    cuda.uuids = ["GPU-aaaa", "GPU-cccc"]
    cuda.order = ["GPU-cccc", "GPU-aaaa"]
    assert visible_uuids() == ["GPU-cccc", "GPU-aaaa"]
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    visible_uuids()
    assert cuda.count == 3


def test_slices_of_gpus_are_never_remembered(cuda: AskedCuda) -> None:
    """The administrator may divide a GPU while the machine runs."""
    visible_uuids()
    cuda.has_slices = True
    cuda.order = ["MIG-1", "MIG-2"]
    for _ in range(2):
        assert visible_uuids() == ["MIG-1", "MIG-2"]
    assert cuda.count == 3


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "\udc80",
        '{"order": null}',
        "null",
    ],
)
def test_a_damaged_file_of_the_order_means_that_cuda_is_asked(
    damage: str, cuda: AskedCuda, home: Path
) -> None:
    visible_uuids()
    [file] = home.glob(".cache/virnuc/gpu-order/*.json")
    file.write_text(damage, errors="surrogateescape")
    assert visible_uuids() == ["GPU-bbbb", "GPU-aaaa"]
    assert cuda.count == 2


@pytest.mark.parametrize(
    "order",
    [
        ["GPU-bbbb", "GPU-cccc"],  # no GPU of the driver
        ["GPU-bbbb", "GPU-bbbb"],  # one GPU twice
        [],
        [["GPU-bbbb"], ["GPU-aaaa"]],
        {"GPU-bbbb": 0, "GPU-aaaa": 1},
        None,
    ],
    ids=str,
)
def test_an_order_that_no_cuda_gives_means_that_cuda_is_asked(
    order: object, cuda: AskedCuda, home: Path
) -> None:
    visible_uuids()
    [file] = home.glob(".cache/virnuc/gpu-order/*.json")
    content = json.loads(file.read_text())
    content["order"] = order
    file.write_text(json.dumps(content))
    assert visible_uuids() == ["GPU-bbbb", "GPU-aaaa"]
    assert cuda.count == 2


def test_without_a_place_for_the_order_cuda_is_asked_each_time(cuda: AskedCuda, home: Path) -> None:
    (home / ".cache").write_text("a file in the place of the folder")
    for _ in range(2):
        assert visible_uuids() == ["GPU-bbbb", "GPU-aaaa"]
    assert cuda.count == 2


def named_gpu(uuid: str, has_slices: bool = False) -> SimpleNamespace:
    """A device of nvitop's."""
    return SimpleNamespace(
        uuid=lambda: uuid,
        name=lambda: f"name of {uuid}",
        is_mig_mode_enabled=lambda: has_slices,
        cuda_compute_capability=lambda: nvitop.NA if has_slices else (9, 0),
    )


class Device:
    """A device of nvitop's. One of its processes holds memory, and it does not tell temperatures."""

    def __init__(self, uuid: str) -> None:
        if uuid not in UUIDS:
            raise RuntimeError(f"no such device: {uuid}")
        self.uuid = uuid
        self.handle = uuid

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


def fail_with(code: int) -> Callable[[str], int]:
    """Return a question to which NVML answers with an error."""

    def ask(_handle: str) -> int:
        raise pynvml.NVMLError(code)

    return ask


@pytest.mark.parametrize("is_old_driver", [False, True])
def test_energy_and_the_power_limit_are_read(
    monkeypatch: pytest.MonkeyPatch, is_old_driver: bool
) -> None:
    sw_power_cap, idle = 0x4, 0x1  # bits of nvml.h
    reasons = {"GPU-aaaa": sw_power_cap | idle, "GPU-bbbb": idle}
    monkeypatch.setattr(nvitop, "Device", Device)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetTotalEnergyConsumption",
        lambda handle: 5_250,  # millijoules
    )
    events = "nvmlDeviceGetCurrentClocksEventReasons"
    throttling = "nvmlDeviceGetCurrentClocksThrottleReasons"
    monkeypatch.setattr(pynvml, events, reasons.__getitem__)
    if is_old_driver:  # it knows the former name only
        monkeypatch.setattr(pynvml, events, fail_with(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
        monkeypatch.setattr(pynvml, throttling, reasons.__getitem__)
    read = Nvml().reader(UUIDS)
    assert (read("GPU-aaaa").energy_j, read("GPU-aaaa").is_power_limited) == (5.25, True)
    assert read("GPU-bbbb").is_power_limited is False


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND]
)
def test_energy_and_the_power_limit_are_unknown_where_the_driver_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(nvitop, "Device", Device)
    for question in (
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        monkeypatch.setattr(pynvml, question, fail_with(code))
    reading = Nvml().reader(UUIDS)("GPU-aaaa")
    assert (reading.energy_j, reading.is_power_limited) == (None, None)
    assert reading.power_w == 345.0


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


class ChildProcesses:
    """Processes that load their NVML from a folder, or find none there. Use it in a `with` statement."""

    def __init__(self, library_folder: Path) -> None:
        """Start the process that forks.

        Args:
            library_folder: The folder that the linker searches for the library.
        """
        environment = os.environ | {"LD_LIBRARY_PATH": str(library_folder)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._parent = subprocess.Popen(
            [sys.executable, "-c", LIST_GPUS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate(timeout=100)

    def ask(self, **environment: str | int) -> tuple[str, str]:
        """Return the two lines that a new process with these environment variables says.

        The first line has the GPUs or the error; the second why there is no GPU, or the advice.
        """
        settings = {name: str(value) for name, value in environment.items()}
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(settings) + "\n")
        self._parent.stdin.flush()
        first = self._parent.stdout.readline()
        second = self._parent.stdout.readline()
        return first.strip(), second.rstrip("\n")

    def list_gpus(self, **environment: str | int) -> str:
        """Return the GPUs, or the error, that a new process finds."""
        return self.ask(**environment)[0]


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcesses]:
    """Processes in which a library answers in place of the driver's."""
    folder = tmp_path_factory.mktemp("nvml")
    build_fake_nvml(folder)
    with ChildProcesses(folder) as child_processes:
        yield child_processes


def test_a_driver_without_a_fault_gives_its_gpu_or_none(children: ChildProcesses) -> None:
    assert children.list_gpus(FAKE_GPUS=1) == f"visible: {FIRST_FAKE_GPU}"
    assert children.list_gpus(FAKE_GPUS=0) == "visible:"
    for hidden in ("", "-1", "abc", "7"):
        answer = children.list_gpus(FAKE_GPUS=1, CUDA_VISIBLE_DEVICES=hidden)
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
    step: str, code: int, message: str, children: ChildProcesses
) -> None:
    answer = children.list_gpus(FAKE_GPUS=1, **{step: code})
    assert answer.startswith("error: ")
    assert message in answer


def test_gpus_that_cuda_does_not_find_are_an_error(children: ChildProcesses) -> None:
    answer = children.list_gpus(FAKE_GPUS=2)
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
    with ChildProcesses(tmp_path) as children:
        answer = children.list_gpus()
    assert answer.startswith("error: ")
    assert "too short" in answer


def test_a_missing_library_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(gpus, "KERNEL_DRIVER", tmp_path / "version")
    assert Nvml().search() == GpuSearch(
        absence="this machine has no NVIDIA driver (libnvidia-ml.so.1 is not installed)"
    )
    (tmp_path / "version").write_text("NVRM version")  # as in a container without the library
    absence = Nvml().search().absence
    assert "kernel module is loaded" in absence
    assert "--gpus all" in absence


def test_a_driver_that_reports_no_gpu_is_named_as_the_reason(children: ChildProcesses) -> None:
    absence = children.ask(FAKE_GPUS=0)[1]
    assert absence.startswith("the NVIDIA driver 570.86.15 works and reports 0 GPUs")
    absence = children.ask(FAKE_GPUS=0, CUDA_VISIBLE_DEVICES="")[1]
    assert "reports 0 GPUs" in absence


@pytest.mark.parametrize("hidden", ["", "-1", "abc", "7", "NoDevFiles", "GPU-ffff", "0,0"])
def test_a_variable_that_hides_the_gpus_is_named_with_its_value(
    children: ChildProcesses, hidden: str
) -> None:
    answer, absence = children.ask(FAKE_GPUS=1, CUDA_VISIBLE_DEVICES=hidden)
    assert answer == "visible:"
    assert absence == f"CUDA_VISIBLE_DEVICES={hidden!r} hides the only GPU of this machine"


def test_the_number_of_hidden_gpus_is_named(children: ChildProcesses) -> None:
    absence = children.ask(FAKE_GPUS=3, CUDA_VISIBLE_DEVICES="")[1]
    assert absence == "CUDA_VISIBLE_DEVICES='' hides all 3 GPUs of this machine"


@pytest.mark.usefixtures("working_driver")
@pytest.mark.parametrize(
    ("setting", "is_fault"),
    [
        ("0", True),
        (" 0 ", True),
        ("1,0", True),
        ("0,7", True),
        ("GPU-aaaa", True),
        ("GPU-aa", True),
        ("", False),
        ("2", False),
        ("7,0", False),
        ("0,0", False),
        ("-1,0", False),
        ("GPU-cccc", False),
        ("GPU-", False),
    ],
)
def test_cuda_that_finds_no_gpu_is_a_fault_unless_the_variable_hides_all(
    setting: str, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs. CUDA reads the entries up to the first one that it does not know."""
    physical = [named_gpu(uuid) for uuid in UUIDS]
    device = SimpleNamespace(all=lambda: physical, cuda=SimpleNamespace(all=list))
    monkeypatch.setattr(nvitop, "Device", device)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(physical))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    if is_fault:
        with pytest.raises(NvmlError) as raised:
            Nvml().search()
        assert repr(setting) in str(raised.value)
        assert "libcuda.so.1" in raised.value.advice
    else:
        absence = f"CUDA_VISIBLE_DEVICES={setting!r} hides all 2 GPUs of this machine"
        assert Nvml().search() == GpuSearch(absence=absence)


@pytest.mark.parametrize(
    ("step", "code", "advice"),
    [
        ("FAKE_INIT", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "restart the machine"),
        ("FAKE_INIT", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe nvidia"),
        ("FAKE_INIT", pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        ("FAKE_INIT", pynvml.NVML_ERROR_OPERATING_SYSTEM, "/dev/nvidia"),
        ("FAKE_INIT", pynvml.NVML_ERROR_INSUFFICIENT_POWER, "power cables"),
        ("FAKE_COUNT", pynvml.NVML_ERROR_UNKNOWN, "dmesg"),
        ("FAKE_COUNT", pynvml.NVML_ERROR_GPU_IS_LOST, "--gpu-reset"),
        ("FAKE_HANDLE", pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        ("FAKE_UUID", pynvml.NVML_ERROR_GPU_IS_LOST, "--gpu-reset"),
    ],
)
def test_the_advice_fits_the_fault(
    step: str, code: int, advice: str, children: ChildProcesses
) -> None:
    answer = children.ask(FAKE_GPUS=1, **{step: code})
    assert answer[0].startswith("error: ")
    assert advice in answer[1]
    updated = code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert ("updated" in answer[1]) is updated


def test_a_library_that_cannot_be_loaded_has_its_own_advice(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"")
    with ChildProcesses(tmp_path) as children:
        _, advice = children.ask()
    assert "LD_LIBRARY_PATH" in advice


def test_the_cuda_of_torch_is_known_without_importing_torch() -> None:
    program = (
        "import sys; from virnuc_core.gpus import Nvml; print(Nvml().torch_cuda());"
        "assert 'torch' not in sys.modules"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert child.stdout.strip() == str(torch.version.cuda)
