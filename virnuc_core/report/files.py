"""The raw files of a validation, read without ever failing: what is not there is `None`, what is wrong is noted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from virnuc_core.errors import VirnucError
from virnuc_core.report.model import RawFile
from virnuc_core.runfiles import File
from virnuc_core.telemetry.log import Telemetry
from virnuc_core.telemetry.reader import read_telemetry
from virnuc_core.validation import read_usable

RUN_PREFIX: Final = "devices-"
BASELINE: Final = "baseline"
SUMMARY: Final = "summary.json"
RECORD: Final = "run.json"
COMPARISON: Final = "comparison.json"

Content = TypeVar("Content")


@dataclass
class RawFolder:
    """The files of one validate directory; remembers which were used and what could not be read."""

    root: Path
    used: dict[str, Path] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by file
    _kept: dict[tuple[str, Any], Any] = field(default_factory=dict)

    def read(self, kind: type[File], *parts: str) -> File | None:
        """What can be used of a file; `None` when it is missing or useless. What cannot be used is noted."""
        path = self.root.joinpath(*parts)
        if not path.is_file():
            return None
        name = self.use(path)
        if (name, kind) not in self._kept:
            self._kept[name, kind], said = read_usable(path, kind)
            if said:
                self.problems[name] = said
        found: File | None = self._kept[name, kind]
        return found

    def telemetry(self, run: str, named: str | None) -> tuple[str, Telemetry] | None:
        """The telemetry of a run: the file its summary names, else the newest; `None` when there is none."""
        folder = self.root / run / "telemetry"
        path = max(folder.glob("telemetry_*.h5"), default=None) if named is None else folder / f"{Path(named).stem}.h5"
        if path is None or (found := self.attempt(path, read_telemetry)) is None:
            return None
        return path.relative_to(self.root).as_posix(), found

    def attempt(self, path: Path, load: Callable[[Path], Content]) -> Content | None:
        """What `load` makes of a file; `None` when it is missing, or cannot be read, which is noted."""
        if not path.is_file():
            return None
        name = self.use(path)
        try:
            return load(path)
        except VirnucError as error:
            self.problems[name] = (str(error).removeprefix(f"{path}: "),)
            return None

    def use(self, path: Path) -> str:
        """Note that `path` was read; returns its name within the folder."""
        name = path.relative_to(self.root).as_posix()
        self.used[name] = path
        return name

    def remarks(self) -> tuple[str, ...]:
        """A sentence on each thing that could not be read."""
        return tuple(f"{name} {one}" for name, said in self.problems.items() for one in said)

    def evidence(self) -> tuple[RawFile, ...]:
        """Size and digest of every file that was read, by name."""
        found = []
        for name, path in sorted(self.used.items()):
            with path.open("rb") as handle:
                sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
            found.append(RawFile(path=name, bytes=path.stat().st_size, sha256=sha256))
        return tuple(found)


def run_names(out: Path, prefix: str = RUN_PREFIX) -> list[str]:
    """The run directories of a validation, fewest devices first; with `devices-N.` those that repeat the run on N."""
    folders = [folder.name.removeprefix(prefix) for folder in out.glob(f"{prefix}*") if folder.is_dir()]
    return [f"{prefix}{number}" for number in sorted(filter(str.isdecimal, folders), key=int)]
