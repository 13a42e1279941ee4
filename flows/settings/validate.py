"""What `validate` takes."""

from pathlib import Path
from typing import Any

from pydantic import Field

from virnuc.flows.settings.measured import MeasureSettings
from virnuc_core.errors import ConfigError
from virnuc_core.profiles import Profile


class ValidateSettings(MeasureSettings):
    """Does this machine, with these weights, meet the profile?"""

    baseline_results: Path | None = Field(
        None,
        description="the baseline's result files of an earlier run over these reads, or their directory",
    )
    baseline_seconds: float | None = Field(
        None, gt=0, description="that run's time, with --baseline-device"
    )
    baseline_device: str | None = Field(
        None, description="what that run was on: 2x RTX 4090", pattern=r"^[1-9]\d*x \S"
    )
    tune_rounds: int = Field(
        0, ge=0, le=10, description="times to tune what a missed speed hangs on, and judge again"
    )
    approval: bool = Field(
        False, description="pause after the report until a reviewer has answered"
    )
    approval_timeout_s: int = Field(
        86_400, ge=1, description="without an answer by then the approval is pending"
    )

    def inputs(self) -> tuple[str, ...]:
        """The files of local reads and of an earlier baseline. Errors: `InputError`, too for results that are none."""
        from virnuc_core.report.result_tables import result_files

        given = {} if self.baseline_results is None else result_files(self.baseline_results)
        return (*super().inputs(), *map(str, given.values()))

    def check_own_files(self) -> None:
        """Refuse a time without a device, rounds of tuning on a cluster, and a history of no use."""
        super().check_own_files()
        if self.tune_rounds and self.cluster:
            raise ConfigError(
                "tune_rounds: a cluster's settings are not swept; run virnuc tune on one of its machines"
            )
        if (self.baseline_seconds is None) != (self.baseline_device is None):
            raise ConfigError(
                "baseline: a time needs the device it was measured on, and a device needs a time"
            )

    def with_baseline(self, profile: Profile, reads: int) -> Profile:
        """The profile with the earlier baseline over these `reads` in place of its own, where one was given."""
        given: dict[str, Any] = {"source": "recorded", "results": self.baseline_results}
        if self.baseline_device is not None:
            count, _, device = self.baseline_device.partition("x ")
            given |= {"recorded_seconds": self.baseline_seconds, "recorded_device": device}
            given |= {"recorded_devices": int(count), "recorded_reads": reads}
        elif self.baseline_results is None:
            return profile
        return profile.model_copy(update={"baseline": profile.baseline.model_copy(update=given)})
