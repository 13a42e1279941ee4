"""Reading the raw files of a validation without ever failing on what is missing: what is not there is `None`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import VirnucError
from virnuc_core.report.model import RawFile
from virnuc_core.runfiles import File, read_usable
from virnuc_core.telemetry.log import Telemetry, read_telemetry

SUMMARY: Final = "summary.json"
RECORD: Final = "run.json"
BLOCK: Final = 1 << 20
LARGEST: Final = 1e18  # nothing of ours is more; sums and ratios of such stay finite


@dataclass
class RawFolder:
    """The files of one validate directory; remembers which were used and which could not be read."""

    root: Path
    used: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def json(self, *parts: str) -> dict[str, Any]:
        """A JSON object; empty when the file is missing, not JSON or not an object (the latter two are noted)."""
        path = self.root.joinpath(*parts)
        if not path.is_file():
            return {}
        self.use(path)
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.problems.append(f"{self._relative(path)} cannot be read: {error}")
            return {}
        if not isinstance(body, dict):
            self.problems.append(f"{self._relative(path)} holds no JSON object")
            return {}
        return body

    def read(self, kind: type[File], *parts: str) -> File | None:
        """What can be used of a file; `None` when it is missing or useless. What cannot be used is noted."""
        path = self.root.joinpath(*parts)
        if not path.is_file():
            return None
        self.use(path)
        found, said = read_usable(path, kind)
        self.problems += [f"{self._relative(path)} {one}" for one in said]
        return found

    def telemetry(self, run: str, named: object) -> tuple[str, Telemetry] | None:
        """The telemetry of a run: the file its summary names, else the newest; `None` when there is none."""
        folder = self.root / run / "telemetry"
        path = folder / f"{Path(str(named)).stem}.h5" if isinstance(named, str) else None
        if path is None:
            path = max(folder.glob("telemetry_*.h5"), default=None)
        if path is None or not path.is_file():
            return None
        self.use(path)
        try:
            return self._relative(path), read_telemetry(path)
        except VirnucError as error:
            self.problems.append(str(error).replace(str(self.root), "."))
            return None

    def use(self, path: Path) -> None:
        """Note that `path` was read."""
        self.used[self._relative(path)] = path

    def evidence(self) -> tuple[RawFile, ...]:
        """Size and digest of every file that was read, by name."""
        return tuple(
            RawFile(path=name, bytes=path.stat().st_size, sha256=digest(path))
            for name, path in sorted(self.used.items())
        )

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(BLOCK):
            sha.update(block)
    return sha.hexdigest()


def number(body: dict[str, Any], *keys: str) -> float | None:
    """A number at `keys` that something may have measured, or `None`."""
    value: Any = body
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # neither NaN nor infinite


def seconds(body: dict[str, Any], *keys: str) -> float | None:
    """A number of seconds, not negative, or `None`: a clock that ran backwards measured nothing."""
    value = number(body, *keys)
    return None if value is None or value < 0 else value


def count(body: dict[str, Any], *keys: str) -> int | None:
    """A whole number, not negative, or `None`."""
    value = number(body, *keys)
    return None if value is None or value < 0 or value != int(value) else int(value)


def text(body: dict[str, Any], *keys: str) -> str | None:
    """A text at `keys`, or `None`."""
    value: Any = body
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value if isinstance(value, str) and value else None


def mapping(body: dict[str, Any], key: str) -> dict[str, Any]:
    """An object at `key`, or an empty one."""
    value = body.get(key)
    return value if isinstance(value, dict) else {}


def texts(body: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts at `key`; other things in it are left out."""
    value = body.get(key)
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
