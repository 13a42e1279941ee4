"""What flows take whose figures are judged: where their runs lie, and the profile."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, Self

from pydantic import Field

from virnuc.flows.preflight import writable
from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import (
    ClusterSpec,
)
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import (
    ALL_FILES,
    MARKER_FILE,
    NESTED_RUNS,
    discard,
    is_ours,
    run_lock,
)

# of the moment, UTC, for which a run was planned: a run tried again goes on where it was
DATED: Final = "%Y-%m-%dT%H%M"


SHAPE: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9][0-9][0-9]"


LATEST: Final = "latest"


PROFILE_HELP: Final = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"


log = logging.getLogger(__name__)


def keep_newest(night: Path, keep: int) -> None:
    """Let `latest` beside a night's directory point to it, and remove all but the `keep` newest beside it: only those
    that a date names and that are ours, by the names of our files, and that nobody works in. Errors: `OSError`."""
    root = night.parent
    latest, aside = root / LATEST, root / f".{LATEST}.{os.getpid()}.part"
    if latest.is_symlink() or not latest.exists():
        aside.unlink(missing_ok=True)
        aside.symlink_to(night.name)
        os.replace(aside, latest)
    else:
        log.warning("%s is no link and stays as it is; the newest run is %s", latest, night.name)
    dated = sorted(
        path
        for path in root.glob(SHAPE)
        if path.is_dir() and not path.is_symlink() and is_ours(path)
    )
    for old in set(dated[:-keep]) - {night}:
        try:
            with run_lock(old):
                discard(
                    old, *ALL_FILES, MARKER_FILE, *(f"{run}/{MARKER_FILE}*" for run in NESTED_RUNS)
                )
        except ConfigError as error:
            log.warning("%s; it is kept", error)


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
        description="each run in a dated directory in OUT, the newest also as OUT/latest; so many are kept",
    )

    @property
    def newest(self) -> Path:
        """Where the newest run lies."""
        return self.out if self.keep is None else self.out / LATEST

    def placed(self, moment: datetime) -> Self:
        """The settings of a run that starts at this moment: in a directory of that date, if runs are kept apart."""
        return (
            self
            if self.keep is None
            else self.model_copy(update={"out": self.out / f"{moment:{DATED}}"})
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the output directory; of dated ones the oldest go once this one has a verdict."""
        with super().hold():
            yield
        if self.keep is not None:
            keep_newest(self.out, self.keep)

    @property
    def history_file(self) -> Path:
        """Where the run's line goes."""
        return self.history or self.out.absolute().parent / "virnuc-history.jsonl"

    def check_own_files(self) -> None:
        """Refuse a history to which no line can be added; the runs before it may take hours."""
        path = self.history_file
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ConfigError(
                f"history {path}: no file that can be written; choose another with --history"
            )
        if self.history or self.keep is None:  # else it is in OUT
            writable(path.parent)
