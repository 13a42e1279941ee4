"""GPUs for tests on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from virnuc_core.gpus import Driver, Gpu, NvmlError, Occupancy, Reading

USUAL_DRIVER = Driver("570.86.15", "12.8")


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
    ) -> None:
        """`occupancies` and `readings` are those of the GPUs with these UUIDs."""
        self._visible = list(visible)
        self._driver = driver
        self._occupancies = dict(occupancies or {})
        self._readings = dict(readings or {})

    def driver(self) -> Driver | None:
        return self._driver

    def visible(self) -> list[Gpu]:
        return self._visible if self._driver is not None else []

    def occupancy(self, uuid: str) -> Occupancy:
        return self._occupancies[uuid]

    def reader(self, uuids: Sequence[str]) -> Callable[[str], Reading]:
        """Return a function that fails, as a driver may, for a GPU without a reading."""
        if self._driver is None:
            raise NvmlError("NVML Shared Library Not Found")
        return self._readings.__getitem__
