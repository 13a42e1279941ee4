"""Fixtures every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real genomes, reads and broken files: `../shared/data` beside the checkout, or `VIRNUC_TEST_DATA`."""
    named = os.environ.get("VIRNUC_TEST_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "manifest.tsv").is_file():
        pytest.skip(
            "real sequences (manifest.tsv) are not in ../shared/data; put them there or set VIRNUC_TEST_DATA"
        )
    return folder


# a shell starts background jobs deaf to Ctrl-C, and they hand that on to their children, which tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "virnuc", deadline=None
)  # shared machines stall; pytest-timeout catches what hangs
settings.load_profile("virnuc")
