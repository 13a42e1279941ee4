"""Fixtures of all unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine.forked_programs import ForkedPrograms


@pytest.fixture(scope="session")
def programs() -> Iterator[ForkedPrograms]:
    """Run functions, such as those of `engine/runs.py`, in processes of their own."""
    with ForkedPrograms() as forked_programs:
        yield forked_programs
