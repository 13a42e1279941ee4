"""Fixtures of the tests of reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.reads import fingerprint

WriteReads = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> WriteReads:
    """Return a function that writes bytes or text to a file of the test's folder, and its path."""

    def make(content: bytes | str, name: str = "reads.fa") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


def shrink(patch: pytest.MonkeyPatch, block_bytes: int = 300) -> None:
    """Shrink all sizes so that small tests cross the borders of blocks, segments and buckets."""
    patch.setattr(fingerprint, "BUCKET", 63)
    patch.setattr("virnuc_core.reads.sources._PIECE_BYTES", 100)
    patch.setattr("virnuc_core.reads.stage.BLOCK_BYTES", block_bytes)


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all sizes small, see `shrink`."""
    shrink(monkeypatch)
