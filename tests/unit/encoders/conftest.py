"""Small random models."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.encoders.checkpoint import init_random


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory with tiny random models. Not to be written to."""
    out = tmp_path_factory.mktemp("encoders") / "models"
    init_random(out, seed=7)
    return out
