"""What flows take whose figures are judged by a profile: where their runs lie, and how many are
kept.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, Self

from pydantic import Field

from virnuc.flows.output_folder import require_writable
from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import ClusterSpec
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import (
    ALL_FILES,
    MARKER_FILE,
    NESTED_RUNS,
    discard,
    is_ours,
    run_lock,
)

# Names of dated directories: the moment, in UTC, for which a run was planned. A run that is tried
# again has the same one, so it goes on where it was.
DATE_FORMAT: Final = "%Y-%m-%dT%H%M"
DATE_PATTERN: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9][0-9][0-9]"
LATEST: Final = "latest"
PROFILE_HELP: Final = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"
log = logging.getLogger(__name__)


class MeasureSettings(ClusterSpec, RunSettings):
    """Runs whose figures are judged."""

    out: Path = Field(description="directory of the runs and the report")
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    history: Path | None = Field(
        None, description="file of past runs; else virnuc-history.jsonl beside the output"
    )
    fail_on_criteria: bool = Field(
        True, description="a criterion missed, or a reviewer's no, fails the flow run"
    )
    keep: int | None = Field(
        None,
        ge=1,
        description="write each run to OUT/date (OUT/latest links to the newest), "
        "keep only the newest N",
    )

    @property
    def newest(self) -> Path:
        """The directory of the newest run."""
        if self.keep is None:
            return self.out
        return self.out / LATEST

    def for_start_time(self, moment: datetime) -> Self:
        """Return the settings of a run that was planned for this moment.

        If runs are kept apart, the output directory is one with this date.
        """
        if self.keep is None:
            return self
        return self.model_copy(update={"out": self.out / f"{moment:{DATE_FORMAT}}"})

    @contextmanager
    def locked_output(self) -> Iterator[None]:
        """Check and lock the output directory.

        With `keep`, each run has a dated directory. After this run, the oldest directories are
        removed, so that `keep` remain.
        """
        with super().locked_output():
            yield
        if self.keep is not None:
            keep_newest(self.out, self.keep)

    @property
    def history_file(self) -> Path:
        """The file to which the run's line is added."""
        return self.history or self.out.absolute().parent / "virnuc-history.jsonl"

    def check_flow_files(self) -> None:
        """Refuse a history to which no line can be added; the runs before it may take hours.

        Raises:
            ConfigError: The history is no file, or cannot be written.
        """
        path = self.history_file
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ConfigError(
                f"history {path}: no file that can be written; choose another with --history"
            )
        if self.history or self.keep is None:  # else it is inside OUT, which is checked anyway
            require_writable(path.parent)


def keep_newest(night: Path, keep: int) -> None:
    """Point the link `latest` to a dated directory, and remove the oldest ones beside it.

    Removed are only directories with a date as their name that hold nothing but our files and that
    no process works in.

    Args:
        night: The newest dated directory.
        keep: How many dated directories are kept.
    """
    _link_latest(night)
    dated_runs = []
    for path in night.parent.glob(DATE_PATTERN):
        if path.is_dir() and not path.is_symlink() and is_ours(path):
            dated_runs.append(path)
    markers_of_nested = [f"{run}/{MARKER_FILE}*" for run in NESTED_RUNS]
    for old in sorted(dated_runs)[:-keep]:
        if old == night:
            continue
        try:
            with run_lock(old):
                discard(old, *ALL_FILES, MARKER_FILE, *markers_of_nested)
        except ConfigError as error:
            log.warning("%s; it is kept", error)


def _link_latest(night: Path) -> None:
    """Let the link `latest` beside a dated directory point to it. A file of that name stays."""
    latest = night.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        log.warning("%s is no link and stays as it is; the newest run is %s", latest, night.name)
        return
    temp_link = night.parent / f".{LATEST}.{os.getpid()}.part"
    temp_link.unlink(missing_ok=True)
    temp_link.symlink_to(night.name)
    os.replace(temp_link, latest)
