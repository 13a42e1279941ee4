"""Scenes of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from . import injected
from .scene import Scene, prepared


@pytest.fixture(scope="session")
def core_scene(tmp_path_factory: pytest.TempPathFactory) -> injected.Scene:
    """Prepare reads, a store, models and an undisturbed run of the core."""
    return injected.prepare(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Prepare what rounds of the real command share."""
    with prepared(tmp_path_factory.mktemp("rounds") / "scene") as prepared_scene:
        yield prepared_scene


@pytest.fixture(scope="module")
def quick_scene() -> Iterator[Scene]:
    """Prepare what rounds without Prefect share, in seconds.

    Unlike pytest's own folders, the folder is open to the plain users of some rounds.
    """
    with TemporaryDirectory(prefix="virnuc-rounds-") as folder:
        Path(folder).chmod(0o711)
        with prepared(Path(folder) / "scene", with_server=False) as prepared_scene:
            yield prepared_scene
