"""Small random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from virnuc_core.encoders.convert import init_random


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing by more, and beside busy processes threads wait for each other."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads_before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models directory with tiny random models. Not to be written to."""
    out_dir = tmp_path_factory.mktemp("encoders") / "models"
    init_random(out_dir, seed=7)
    return out_dir
