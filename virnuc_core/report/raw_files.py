"""The raw files of a validation: where they lie, and how they are read without ever failing.

A file that is missing is `None`. One that cannot be read is `None`, too, and its problem is noted.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import pandas as pd

from virnuc_core.checked_files import Match, has_own_digest
from virnuc_core.errors import UnreadableError, UnsafeFileError, VirnucError
from virnuc_core.reads.subsets import read_table
from virnuc_core.runfiles import Device, File, FileDigest, digest, listed_digest, read
from virnuc_core.safe_files import open_file, regular_file_exists
from virnuc_core.system_errors import is_folder, list_folder, path_exists
from virnuc_core.telemetry.log import TELEMETRY_SEAL, Telemetry, read_telemetry

RUN_PREFIX: Final = "devices-"  # devices-2 is the folder of the run on two devices
SINGLE_RUN: Final = f"{RUN_PREFIX}1"
SUMMARY: Final = "summary.json"
RECORD: Final = "run.json"
COMPARISON: Final = "comparison.json"
VENDOR_WORDS: Final = re.compile("NVIDIA|GeForce|Tesla|Graphics Device")

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class NamedTelemetry:
    """A telemetry file that was read."""

    name: str  # its path below the validation's directory
    content: Telemetry


@dataclass
class RawFolder:
    """Reads the files of one validation's directory.

    Attributes:
        root: The directory.
        used: The names of all files that were read.
        problems: Why files could not be used, by name.
    """

    root: Path
    used: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)  # by file, a sentence each
    # The telemetry that was read last, by its path. It is large, so that no other one is kept.
    _last_telemetry: dict[Path, NamedTelemetry] = field(default_factory=dict)

    def read(self, kind: type[File], *parts: str) -> File | None:
        """Return the content of a JSON file. The file becomes a part of the evidence.

        Args:
            kind: The model of the file.
            parts: The path of the file below the validation's directory, folder by folder.

        Returns:
            The content, or `None` if the file is missing or has a wrong value. A wrong value is
            added to `problems`.
        """
        path = self.root.joinpath(*parts)
        return self.attempt(path, lambda path: read(path, kind, self.root))

    def telemetry(self, run: str, recorded_name: str | None) -> NamedTelemetry | None:
        """Return the telemetry of a run.

        Args:
            run: The folder of the run.
            recorded_name: The file that the run's summary names. If it names none (None), the
                newest file of the run is read.

        Returns:
            The telemetry, or `None` if there is none or it cannot be read. The latter is added to
            `problems`.
        """
        folder = self.root / run / "telemetry"
        if recorded_name is not None:
            # Only the last part of the name: a summary may not lead out of the folder.
            path = folder / f"{Path(recorded_name).stem}.h5"
        else:
            try:
                files = list_folder(folder, "telemetry_*.h5")
            except UnreadableError as error:
                self.problems[self._name_of(folder)] = f"{self._name_of(folder)}: {error}"
                return None
            if not files:
                return None
            path = files[-1]  # names have the time, so the newest is the last
        if path not in self._last_telemetry:
            self._last_telemetry.clear()
            content = self.attempt(path, lambda path: read_telemetry(path, self.root))
            if content is None:
                return None
            self._last_telemetry[path] = NamedTelemetry(self._name_of(path), content)
        return self._last_telemetry[path]

    def table(self, path: Path, columns: Mapping[str, str]) -> pd.DataFrame | None:
        """Return columns of `reads.tsv` or of another result file of a run.

        Args:
            path: The table.
            columns: The types of the columns, by name.

        Returns:
            The table, or `None` if it is missing, cannot be read, or is not as the run left it.
            The last two are added to `problems`.
        """
        return self.attempt(
            path, lambda path: read_table(path, columns, recorded=listed_digest(path))
        )

    def has_file(self, path: Path) -> bool:
        """Return whether something has this path.

        If it is no regular file, such as a named pipe, this is added to `problems`.
        """
        try:
            return regular_file_exists(path)
        except UnsafeFileError as error:
            name = self._name_of(path)
            reason = str(error).removeprefix(f"{path}: ")
            self.problems[name] = f"{name}: {reason}"
            return True

    def attempt(self, path: Path, load: Callable[[Path], Content]) -> Content | None:
        """Call `load` with a file, and return the result. The file becomes a part of the evidence.

        Returns:
            The result, or `None` if the file is missing or `load` raises one of our errors. The
            error is added to `problems`.
        """
        name = self._name_of(path)
        try:
            if not path_exists(path):
                return None
            self.used.add(name)
            return load(path)
        except VirnucError as error:
            reason = str(error).removeprefix(f"{path}: ")
            self.problems[name] = f"{name}: {reason}"
            return None

    def evidence(self) -> dict[str, FileDigest]:
        """Return size and digest of every file that was read, by name."""
        digests = {}
        for name in sorted(self.used):
            # What is no regular file was not read either: `problems` says so.
            file_digest = None
            with suppress(UnsafeFileError):
                file_digest = digest(self.root / name, self.root)
            if file_digest is not None:
                digests[name] = file_digest
        return digests

    def _name_of(self, path: Path) -> str:
        """Return the path of a file below the validation's directory."""
        return path.relative_to(self.root).as_posix()


def find_unchecked_files(out: Path, names: Iterable[str]) -> list[str]:
    """Return the files of a validation for which an older version has recorded no digest.

    Args:
        out: The validation's directory.
        names: Files that were read, by their paths below the directory.
    """
    unchecked_names = []
    for name in names:
        path = out / name
        if path.suffix == ".json":
            is_checked = has_own_digest(path, out)
        elif path.suffix == ".h5":
            with open_file(path, out) as file:
                is_checked = TELEMETRY_SEAL.compare(file) is not Match.NOT_RECORDED
        else:
            is_checked = listed_digest(path) is not None
        if not is_checked:
            unchecked_names.append(name)
    return unchecked_names


def run_names(out: Path, prefix: str = RUN_PREFIX, max_devices: int = 0) -> list[str]:
    """Return the names of the run folders of a validation, fewest devices first.

    Args:
        out: The validation's directory.
        prefix: The part of the name before the number. With `devices-2.`, the repetitions of the
            run on two devices are returned: `devices-2.1`, `devices-2.2`, ...
        max_devices: Leave out runs on more devices than this number. 0 leaves out none.
    """
    numbers = []
    for folder in list_folder(out, f"{prefix}*"):
        number = folder.name.removeprefix(prefix)
        if number.isdecimal() and is_folder(folder):
            numbers.append(number)
    numbers.sort(key=int)
    return [
        f"{prefix}{number}" for number in numbers if not max_devices or int(number) <= max_devices
    ]


def short_name(device: Device) -> str:
    """Return a device's name as the report prints it.

    `NVIDIA GeForce RTX 4090` is `RTX 4090`.
    """
    if device.kind == "cpu":
        return "CPU core"
    words = VENDOR_WORDS.sub("", device.name).split()
    return " ".join(words) or "GPU"


def device_label(devices: Sequence[Device]) -> str:
    """Return the devices as the report prints them: `2x RTX 4090`, or `1x H100 + 1x H200`."""
    names = [short_name(device) for device in devices]
    counts = [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]
    return " + ".join(counts) or "0x device"
