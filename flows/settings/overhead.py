"""What `overhead` takes."""

from pathlib import Path

from pydantic import Field

from virnuc.flows.settings.shared import FlowSettings
from virnuc_core.config import SWITCHES, Switch
from virnuc_core.errors import ConfigError
from virnuc_core.profiles import Profile
from virnuc_core.rundir import RunDir


class OverheadSettings(FlowSettings):
    """What do commits, the sampler and loading the models anew cost?"""

    out: Path = Field(description="directory of a finished validation")
    switches: tuple[Switch, ...] = Field(
        SWITCHES, min_length=1, description="what is switched on and off"
    )
    pairs: int = Field(3, ge=1, description="pairs of runs for each; fewer than 3 say nothing")
    shards: int = Field(16, ge=1, description="shards of each run, for each device")
    force: bool = Field(False, description="measure again what was measured before")

    @property
    def profile(self) -> Profile:
        """Return the profile that the validation was started with, from its record.

        Raises:
            ConfigError: The directory holds no validation.
        """
        from virnuc_core.validation import ValidationRecord, read_usable  # it brings torch along

        record = read_usable(RunDir(self.out).record, ValidationRecord)
        if record is None or record.profile is None:
            raise ConfigError(
                f"{self.out}: no validation (its run.json names no profile); "
                "run virnuc validate first"
            )
        return record.profile

    def check_output_folder(self) -> None:
        """Refuse an output directory that is not the directory of a validation.

        Raises:
            ConfigError: The directory holds no validation.
        """
        _ = self.profile  # this property raises the error
