"""GPUs for tests on a machine that has none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from virnuc_core.gpus import LIBRARY, Driver, Gpu, GpuSearch, NvmlError, Occupancy, Reading

USUAL_DRIVER = Driver("570.86.15", "12.8")
FAKE_NVML = Path(__file__).with_name("data") / "fake_nvml.c"


def build_fake_nvml(folder: Path) -> None:
    """Compile a library into a folder that answers in place of the driver's.

    Child processes load it if `LD_LIBRARY_PATH` is the folder. The source tells which environment
    variables decide its answers.
    """
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / LIBRARY, FAKE_NVML], check=True)


class FakeGpus:
    """A stand-in for `gpus.NVML` that answers from tables.

    Set it with `monkeypatch.setattr(gpus, "NVML", FakeGpus(...))`. Without GPUs and driver it is
    a machine on which NVML cannot be used.
    """

    def __init__(
        self,
        visible: Sequence[Gpu] = (),
        *,
        driver: Driver | None = USUAL_DRIVER,
        occupancies: Mapping[str, Occupancy] | None = None,
        readings: Mapping[str, Reading] | None = None,
        absence: str = "no GPU was faked",
        fault: NvmlError | None = None,
        torch_cuda: str | None = "12.8",
    ) -> None:
        """Set the answers.

        Args:
            visible: The GPUs.
            driver: The versions of the driver; None on a machine without one.
            occupancies: Who uses the GPUs with these UUIDs.
            readings: What the GPUs with these UUIDs are doing.
            absence: Why there is no GPU, if there is none.
            fault: The error of a driver that does not work.
            torch_cuda: The CUDA version for which torch was built; None without CUDA.
        """
        self._visible = list(visible)
        self._driver = driver
        self._occupancies = dict(occupancies or {})
        self._readings = dict(readings or {})
        self._absence = absence
        self._fault = fault
        self._torch_cuda = torch_cuda

    def driver(self) -> Driver | None:
        return self._driver

    def torch_cuda(self) -> str | None:
        return self._torch_cuda

    def search(self) -> GpuSearch:
        if self._fault is not None:
            raise self._fault
        if self._driver is None or not self._visible:
            return GpuSearch(absence=self._absence)
        return GpuSearch(tuple(self._visible))

    def visible(self) -> list[Gpu]:
        return list(self.search().gpus)

    def occupancy(self, uuid: str) -> Occupancy:
        return self._occupancies[uuid]

    def reader(self, uuids: Sequence[str]) -> Callable[[str], Reading]:
        """Return a function that fails, as a driver may, for a GPU without a reading."""
        if self._driver is None:
            raise NvmlError("NVML Shared Library Not Found")
        return self._readings.__getitem__
