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

from pydantic import Field, model_validator

from virnuc.flows.output_folder import require_writable
from virnuc.flows.settings.shared import LiveSettings, RunSettings
from virnuc_core.config import SIMULATED_SIZES, ClusterSpec
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import (
    ALL_FILES,
    DRAWN_FOLDER,
    MARKER_FILE,
    NESTED_RUNS,
    discard,
    is_ours,
    run_lock,
)
from virnuc_core.system_errors import is_folder, is_regular_file, list_folder, path_exists

# Names of dated directories: the moment, in UTC, for which a run was planned. A run that is tried
# again has the same one, so it goes on where it was.
DATE_FORMAT: Final = "%Y-%m-%dT%H%M"
DATE_PATTERN: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9][0-9][0-9]"
LATEST: Final = "latest"
PROFILE_HELP: Final = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"
log = logging.getLogger(__name__)


class MeasureSettings(ClusterSpec, LiveSettings, RunSettings):
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

    subset: int | None = Field(
        None,
        ge=1,
        description="first draw this many reads, with the lengths of all; mates stay together",
    )
    simulate: str | None = Field(
        None,
        description="first make synthetic reads, and use these: "
        f"a number, or {', '.join(SIMULATED_SIZES)}",
        pattern=rf"^([1-9]\d{{0,9}}|{'|'.join(SIMULATED_SIZES)})$",
    )
    simulate_pairs: bool = Field(False, description="make --simulate pairs of mates, in two files")
    reads_seed: int = Field(0, ge=0, description="of --subset and --simulate: equal seeds, reads")

    @model_validator(mode="after")
    def _makes_reads_of_one_kind(self) -> Self:
        """Refuse settings that say two things of where the reads come from."""
        if self.simulate is not None and (self.subset is not None or self.all_inputs):
            raise ConfigError("simulate: synthetic reads take the place of all reads; give none")
        if self.simulate_pairs and self.simulate is None:
            raise ConfigError("simulate_pairs: goes with --simulate, which says how many reads")
        return self

    def inputs(self) -> tuple[str, ...]:
        """Return the user's files of reads. Reads that the flow itself has made are none of them.

        Raises:
            InputError: A file does not exist.
        """
        folder = (self.out / DRAWN_FOLDER).resolve()
        return tuple(name for name in super().inputs() if Path(name).resolve().parent != folder)

    @property
    def newest(self) -> Path:
        """Return the directory of the newest run.

        If several runs are kept apart, each in a dated directory, it is the link to the newest one.
        """
        if self.keep is None:
            return self.out
        return self.out / LATEST

    def for_start_time(self, moment: datetime) -> Self:
        """Return the settings of a run that was planned for this moment.

        If several runs are kept apart (`keep`), the output directory becomes a directory in it that
        has this date as its name.
        """
        if self.keep is None:
            return self
        return self.model_copy(update={"out": self.out / f"{moment:{DATE_FORMAT}}"})

    @contextmanager
    def locked_output(self) -> Iterator[None]:
        """Check the output directory, and lock it for the body of a `with` statement.

        With `keep`, each run has a dated directory. After the body, if it raised no error, the
        oldest directories are removed, so that `keep` remain.
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
        """Refuse a history to which no line can be added, and a wrong file of live figures.

        The line is added at the end of the runs, which may take hours.

        Raises:
            ConfigError: The history is no file, or cannot be written, or the file of live figures
                cannot be used.
        """
        self.check_metrics_file()
        path = self.history_file
        is_writable_file = is_regular_file(path) and os.access(path, os.W_OK)
        if path_exists(path) and not is_writable_file:
            raise ConfigError(
                f"history {path}: no file that can be written; choose another with --history"
            )
        # With `keep` and without `history`, the file lies in the directory of all dated runs, which
        # is made and checked anyway.
        if self.history or self.keep is None:
            require_writable(path.parent)


def keep_newest(newest: Path, keep: int) -> None:
    """Point the link `latest` to a dated directory, and remove the oldest ones beside it.

    Removed are only directories with a date as their name that hold nothing but our files and that
    no process works in.

    Args:
        newest: The newest dated directory.
        keep: How many dated directories are kept.
    """
    _link_latest(newest)
    dated_runs = []
    for path in list_folder(newest.parent, DATE_PATTERN):
        if is_folder(path) and not path.is_symlink() and is_ours(path):
            dated_runs.append(path)
    # A directory of ours holds a marker file. So do the runs inside a validation.
    nested_markers = [f"{run}/{MARKER_FILE}*" for run in NESTED_RUNS]
    for old_run in sorted(dated_runs)[:-keep]:  # sorted by date
        # A run that was planned long ago and is tried again now may have an old date.
        if old_run == newest:
            continue
        try:
            with run_lock(old_run):
                discard(old_run, *ALL_FILES, MARKER_FILE, *nested_markers)
        except ConfigError as error:  # a process works in it
            log.warning("%s; it is kept", error)


def _link_latest(newest: Path) -> None:
    """Let the link `latest` beside a dated directory point to it.

    If `latest` is something else than a link, it stays, and a warning is logged.
    """
    latest = newest.parent / LATEST
    if path_exists(latest) and not latest.is_symlink():
        log.warning("%s is no link and stays as it is; the newest run is %s", latest, newest.name)
        return
    # Replace the old link by a rename, so that there is a link at all times.
    temp_link = newest.parent / f".{LATEST}.{os.getpid()}.part"
    temp_link.unlink(missing_ok=True)
    temp_link.symlink_to(newest.name)
    os.replace(temp_link, latest)
