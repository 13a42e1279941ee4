"""Runs of every night side by side: each in a directory of its date, a link to the newest, the oldest removed."""

import logging
import os
from pathlib import Path
from typing import Final

from virnuc_core.errors import ConfigError
from virnuc_core.rundir import ALL_FILES, MARK, RUNS_WITHIN, discard, is_ours, run_lock

# of the moment, UTC, for which a run was planned: a run tried again goes on where it was
DATED: Final = "%Y-%m-%dT%H%M"
SHAPE: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9][0-9][0-9]"
LATEST: Final = "latest"
log = logging.getLogger(__name__)


def keep_newest(night: Path, keep: int) -> None:
    """Let `latest` beside a night's directory point to it, and remove all but the `keep` newest beside it.

    Only directories that a date names and that are ours are removed, by the names of our files; one that somebody works
    in is left until the next time. Errors: `OSError`.
    """
    root = night.parent
    latest, aside = root / LATEST, root / f".{LATEST}.{os.getpid()}.part"
    if latest.is_symlink() or not latest.exists():
        aside.unlink(missing_ok=True)
        aside.symlink_to(night.name)
        os.replace(aside, latest)
    else:
        log.warning("%s is no link and stays as it is; the newest run is %s", latest, night.name)
    dated = sorted(path for path in root.glob(SHAPE) if path.is_dir() and not path.is_symlink() and is_ours(path))
    for old in set(dated[:-keep]) - {night}:
        try:
            with run_lock(old):
                discard(old, *ALL_FILES, MARK, *(f"{run}/{MARK}" for run in RUNS_WITHIN))
        except ConfigError as error:
            log.warning("%s; it is kept", error)
