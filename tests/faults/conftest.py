"""One scene for all fault tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_harness() -> ModuleType:
    """The harness as a module; it is a program too, so it lies beside the tests and not in a package."""
    if "virnuc_faults" not in sys.modules:
        spec = importlib.util.spec_from_file_location("virnuc_faults", Path(__file__).with_name("harness.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["virnuc_faults"] = module
        spec.loader.exec_module(module)
    return sys.modules["virnuc_faults"]


@pytest.fixture(scope="session")
def harness() -> ModuleType:
    return load_harness()


@pytest.fixture(scope="session")
def scene(harness: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    return harness.prepare(tmp_path_factory.mktemp("faults"))
