"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real genomes, reads and broken files; tests that want it skip where it is absent."""
    named = os.environ.get("VIRNUC_TEST_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "manifest.tsv").is_file():
        pytest.skip("real sequence data is not here; name its folder in VIRNUC_TEST_DATA")
    return folder


settings.register_profile("virnuc", deadline=None)  # shared machines stall; pytest-timeout catches what hangs
settings.load_profile("virnuc")
