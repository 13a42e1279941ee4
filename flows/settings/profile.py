"""What `profile` takes."""

from pathlib import Path

from pydantic import Field

from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import (
    TraceOptions,
)


class ProfileSettings(TraceOptions, RunSettings):
    """Where does the time of a run go, down to the kernels?"""

    out: Path = Field(
        description="run directory; traces and tables are written to its telemetry/traces/"
    )
