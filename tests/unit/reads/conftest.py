"""Small helpers of the tests of the reads room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.reads import parse as parse_module
from virnuc_core.reads import write as write_module

WriteReads = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> WriteReads:
    """Write bytes or text to a file of the test's folder; gives its path as text."""

    def make(content: bytes | str, name: str = "reads.fa") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes so small that every carry between stretches, buckets and blocks happens in a small test."""
    monkeypatch.setattr(write_module, "_STRETCH_BYTES", 900)
    monkeypatch.setattr("virnuc_core.reads.spool._HELD_BYTES", 200)
    monkeypatch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 100)
    monkeypatch.setattr(parse_module.in_order, "__kwdefaults__", {"block_bytes": 300})
