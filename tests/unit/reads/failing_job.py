"""A job for staging's workers that fails; in a file of its own, so that a worker process can import it."""

from __future__ import annotations


class Fails:
    """A job that fails as it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, draft: object) -> None:
        raise self.error
