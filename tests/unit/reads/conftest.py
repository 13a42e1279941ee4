"""Small helpers of the tests of the reads room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.reads import fingerprint

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


def shrink(patch: pytest.MonkeyPatch, block_bytes: int = 300) -> None:
    """Sizes so small that every carry between blocks, segments and buckets happens in a small test."""
    patch.setattr(fingerprint, "BUCKET", 63)
    patch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 100)
    patch.setattr("virnuc_core.reads.stage.BLOCK_BYTES", block_bytes)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes small, see `shrink`."""
    shrink(monkeypatch)
