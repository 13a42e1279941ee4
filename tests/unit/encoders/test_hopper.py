"""The prebuilt library for Hopper GPUs: it is what its sources give, and its absence is told."""

from __future__ import annotations

import ctypes
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from virnuc_core.encoders import hopper
from virnuc_core.errors import IncapableError
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


def test_sources_and_library_are_those_that_belong_together() -> None:
    record = json.loads(build_kernels.RECORD.read_text())
    assert record["sources"] == build_kernels.source_digests(), "run make kernels"
    assert record["gpu_code"] == build_kernels.gpu_code_digest(hopper.LIBRARY), "run make kernels"


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    hopper._load.cache_clear()
    assert hopper.library_problem(GPU) == "compute capability 8.0, not 9.0"
    hopper._load.cache_clear()
    assert not caplog.records


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("content", [None, b"", b"no library"], ids=["missing", "empty", "damaged"])
def test_library_that_cannot_be_loaded_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    path = tmp_path / "hopper.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(hopper, "LIBRARY", path)
    with caplog.at_level(logging.WARNING):
        assert hopper.find_library(GPU) is None
        assert hopper.find_library(GPU) is None
    assert hopper.library_problem(GPU).startswith("cannot be loaded: ")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "hopper.so cannot be loaded"
    ]


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


@pytest.mark.usefixtures("hopper_gpu")
def test_library_that_was_asked_for_and_cannot_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "LIBRARY", tmp_path / "missing.so")
    assert hopper.choose_library("auto", GPU) is None
    assert hopper.choose_library("triton", GPU) is None
    with pytest.raises(IncapableError, match=r"cannot be loaded: .*use --int8-kernels triton"):
        hopper.choose_library("hopper", GPU)


def test_module_is_asked_about_the_library_without_torch() -> None:
    code = (
        "import sys\nfrom virnuc_core.encoders import hopper\n"
        "hopper.open_library()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
