"""The prebuilt library for Hopper GPUs: it is what its sources give, and its absence is told."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.damage import flip_bit
from virnuc_core.config import EngineSpec
from virnuc_core.encoders import hopper
from virnuc_core.engine.devices import resolve_engine
from virnuc_core.errors import IncapableError
from virnuc_core.runfiles import Device
from virnuc_core.tools import build_kernels

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch report a Hopper GPU, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    hopper._load.cache_clear()
    hopper.open_library.cache_clear()
    yield
    hopper._load.cache_clear()
    hopper.open_library.cache_clear()


def outdated_parts() -> list[str]:
    """Return the entries of the record that do not describe the files of the package."""
    record = json.loads(hopper.RECORD.read_bytes())
    actual = {
        "sources": build_kernels.source_digests(),
        "library": hashlib.sha256(hopper.LIBRARY.read_bytes()).hexdigest(),
        "gpu_code": build_kernels.gpu_code_digest(hopper.LIBRARY),
        "flags": list(build_kernels.FLAGS),
        "built_with": build_kernels.required_versions(),
    }
    return [name for name, value in actual.items() if record[name] != value]


@pytest.fixture
def copied_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sources, the library and its record, and let the modules use the copies."""
    folder = tmp_path / "cuda"
    shutil.copytree(build_kernels.FOLDER, folder)
    monkeypatch.setattr(build_kernels, "FOLDER", folder)
    monkeypatch.setattr(build_kernels, "REQUIREMENTS", folder / "requirements.txt")
    for module in (hopper, build_kernels):
        monkeypatch.setattr(module, "LIBRARY", folder / "hopper.so")
        monkeypatch.setattr(module, "RECORD", folder / "hopper.json")
    return folder


def flip_bit_of_section(library: Path, section: str) -> None:
    """Change one bit in the middle of a section of a library."""
    listing = subprocess.run(
        ["readelf", "--section-headers", "--wide", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (fields,) = [
        line.split("]")[1].split() for line in listing.splitlines() if f" {section} " in line
    ]
    start, size = int(fields[3], 16), int(fields[4], 16)
    flip_bit(library, place=start + size // 2)


def test_sources_and_library_are_those_that_belong_together() -> None:
    assert outdated_parts() == [], "run make kernels"


@pytest.mark.parametrize("name", ["int8_product.cu", "int8_rows.cu"])
def test_changed_source_without_a_new_library_is_noticed(copied_package: Path, name: str) -> None:
    with (copied_package / name).open("a") as source:
        source.write("// a remark\n")
    assert outdated_parts() == ["sources"]


@pytest.mark.parametrize("package", ["nvidia-cuda-nvcc", "nvidia-cutlass", "nvidia-nvvm"])
def test_changed_compiler_without_a_new_library_is_noticed(
    copied_package: Path, package: str
) -> None:
    path = copied_package / "requirements.txt"
    text = path.read_text()
    assert f"{package}==" in text
    path.write_text(text.replace(f"{package}==", f"{package}==9"))
    assert outdated_parts() == ["built_with"]


def test_changed_flags_without_a_new_library_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_kernels, "FLAGS", (*build_kernels.FLAGS, "--use_fast_math"))
    assert outdated_parts() == ["flags"]


@pytest.mark.parametrize(
    ("section", "expected"), [(".text", ["library"]), (".nv_fatbin", ["library", "gpu_code"])]
)
def test_changed_library_is_noticed(
    copied_package: Path, section: str, expected: list[str]
) -> None:
    flip_bit_of_section(copied_package / "hopper.so", section)
    assert outdated_parts() == expected


def test_every_source_of_the_folder_is_compiled() -> None:
    assert sorted(path.name for path in build_kernels.FOLDER.glob("*.cu")) == sorted(
        build_kernels.SOURCES
    )


@pytest.mark.parametrize(
    ("section", "other_tools", "expected", "code"),
    [
        (None, False, "built again: all 1,146,656 bytes are the same", 0),
        (None, True, "built again: all 1,146,656 bytes are the same", 0),
        (".nv_fatbin", False, "the code for the GPU differs. Run make kernels.", 1),
        (".nv_fatbin", True, "the code for the GPU differs. Run make kernels.", 1),
        (".text", False, "the code for the CPU differs. Run make kernels.", 1),
        (".text", True, "The code for the CPU: not run, because here is g++ 99, not g++ (", 0),
    ],
)
def test_comparison_of_a_new_build_tells_what_differs(
    copied_package: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    section: str | None,
    other_tools: bool,
    expected: str,
    code: int,
) -> None:
    def build(library: Path) -> None:
        """Stand for the compiler, which takes a minute: give the same library, or a changed one."""
        shutil.copyfile(copied_package / "hopper.so", library)
        if section is not None:
            flip_bit_of_section(library, section)

    tools = json.loads(hopper.RECORD.read_bytes())["host_tools"]
    if other_tools:
        tools["g++"] = "g++ 99"
    monkeypatch.setattr(build_kernels, "build", build)
    monkeypatch.setattr(build_kernels, "host_tools", lambda: tools)
    assert build_kernels.main(["--check"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert expected in line


def test_comparison_without_a_host_compiler_is_not_run_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_kernels.main(["--check"]) == 0
    assert capsys.readouterr().out == "hopper.so built again: not run. g++ is not installed\n"


def test_library_has_no_path_of_the_machine_that_built_it() -> None:
    content = hopper.LIBRARY.read_bytes()
    for part in (b"site-packages", b"/home/", b"/root/", str(build_kernels.FOLDER).encode()):
        assert part not in content


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is built for x86_64")
def test_library_loads_without_a_gpu_and_has_its_functions() -> None:
    library = ctypes.CDLL(str(hopper.LIBRARY))
    assert library.virnuc_int8_store
    assert library.virnuc_int8_add
    assert library.virnuc_int8_rows


def test_other_devices_have_no_library_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hopper.find_library(torch.device("cpu")) is None
    assert not caplog.records


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("capability", "problem"),
    [
        ((7, 5), "compute capability 7.5, not 9.0"),
        ((8, 0), "compute capability 8.0, not 9.0"),
        ((8, 9), "compute capability 8.9, not 9.0"),
        ((10, 0), "compute capability 10.0, not 9.0"),
        ((12, 0), "compute capability 12.0, not 9.0"),
    ],
)
def test_older_and_newer_gpus_take_triton_unless_the_library_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    problem: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert hopper.choose_library("auto", GPU) is None
    assert hopper.library_problem(GPU) == problem
    assert not caplog.records
    with pytest.raises(IncapableError) as error_info:
        hopper.choose_library("hopper", GPU)
    assert str(error_info.value) == (
        f"int8 kernels 'hopper' cannot run on cuda:0: {problem}; use --int8-kernels triton"
    )


def remove_library(folder: Path) -> None:
    (folder / "hopper.so").unlink()


def empty_library(folder: Path) -> None:
    (folder / "hopper.so").write_bytes(b"")


def change_gpu_code(folder: Path) -> None:
    flip_bit_of_section(folder / "hopper.so", ".nv_fatbin")


def change_cpu_code(folder: Path) -> None:
    flip_bit_of_section(folder / "hopper.so", ".text")


def remove_record(folder: Path) -> None:
    (folder / "hopper.json").unlink()


def empty_record(folder: Path) -> None:
    (folder / "hopper.json").write_bytes(b"")


def take_record_without_digest(folder: Path) -> None:
    (folder / "hopper.json").write_text("{}")


def take_record_of_another_kind(folder: Path) -> None:
    (folder / "hopper.json").write_text("[]")


OTHER_DIGEST = "its SHA-256 is not the one in hopper.json; install virnuc again"
DAMAGED_RECORD = "hopper.json is damaged; install virnuc again"


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove_library, "No such file or directory"),
        (empty_library, OTHER_DIGEST),
        (change_gpu_code, OTHER_DIGEST),
        (change_cpu_code, OTHER_DIGEST),
        (remove_record, "No such file or directory"),
        (empty_record, DAMAGED_RECORD),
        (take_record_without_digest, DAMAGED_RECORD),
        (take_record_of_another_kind, DAMAGED_RECORD),
    ],
)
def test_library_that_is_missing_or_changed_is_told_once_and_not_used(
    copied_package: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    problem: str,
) -> None:
    damage(copied_package)
    card = Device(id="GPU-0", kind="cuda", name="a card", capability=(9, 0))
    with caplog.at_level(logging.WARNING):
        # The record of a run says triton.
        resolved = resolve_engine(EngineSpec(precision="int8"), [card])
        assert resolved.int8_kernels == "triton"
        assert hopper.choose_library("auto", GPU) is None
        assert hopper.choose_library("triton", GPU) is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("hopper.so cannot be loaded: ")
    assert warning.endswith("; int8 runs slower")
    assert problem in warning
    assert "\n" not in warning
    # What a worker reports, for `summary.json`
    assert hopper.library_problem(GPU).startswith("cannot be loaded: ")
    with pytest.raises(IncapableError, match=r"cannot be loaded: .*use --int8-kernels triton"):
        hopper.choose_library("hopper", GPU)


@pytest.mark.usefixtures("hopper_gpu")
def test_file_with_the_recorded_digest_that_is_no_library_is_told(
    copied_package: Path,
) -> None:
    content = b"no library"
    (copied_package / "hopper.so").write_bytes(content)
    record = {"library": hashlib.sha256(content).hexdigest()}
    (copied_package / "hopper.json").write_text(json.dumps(record))
    assert hopper.library_problem(GPU).startswith("cannot be loaded: ")


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(7680, 2560, True), (960, 320, True), (12, 64, False), (64, 40, False)],
)
def test_sizes_that_the_library_takes(rows: int, width: int, expected: bool) -> None:
    assert hopper.fits(torch.empty(rows, width, dtype=torch.int8)) is expected


@pytest.mark.parametrize(
    ("width", "has_norm", "gelu", "expected"),
    [
        (2560, True, False, True),
        (1280, False, False, True),
        (10240, False, True, True),
        (2560, False, True, False),
        (320, True, False, False),
    ],
)
def test_rows_that_the_library_rounds(
    width: int, has_norm: bool, gelu: bool, expected: bool
) -> None:
    assert hopper.rounds(width, has_norm=has_norm, gelu=gelu) is expected


def test_module_is_asked_about_the_library_without_torch() -> None:
    code = (
        "import sys\nfrom virnuc_core.encoders import hopper\n"
        "hopper.open_library()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
