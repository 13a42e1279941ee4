"""Jobs for staging's workers; in a file of their own, so that a worker process can import them."""

from __future__ import annotations

import os


class Fails:
    """A job that fails as it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, draft: object) -> None:
        raise self.error


class Pid:
    """A job that tells which process does it."""

    def run(self, draft: object) -> int:
        return os.getpid()
