"""Small helpers of the tests of the reads room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
