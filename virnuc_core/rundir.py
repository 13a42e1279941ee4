"""Where things lie in a run directory, and how a file appears there: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Files are the truth; nothing else remembers a run."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def store(self) -> Path:
        return self.root / "orfs.h5"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def plan(self) -> Path:
        return self.shards / "plan.json"

    @property
    def embeddings(self) -> Path:
        return self.root / "embeddings.h5"

    @property
    def predictions(self) -> Path:
        return self.root / "prediction_results.txt"

    @property
    def consensus(self) -> Path:
        return self.root / "prediction_results_highestscore.csv"

    @property
    def reads_table(self) -> Path:
        return self.root / "reads.tsv"

    @property
    def failed_rows(self) -> Path:
        return self.root / "failed.tsv"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it and rename it into place, else remove it.

    Errors: whatever the body raises; `OSError` of the flush or the rename. A reader never sees half a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        with aside.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(aside, path)
        fsync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")
