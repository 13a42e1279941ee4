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
        description="the baseline's result files of an earlier run over these reads, "
        "or their directory",
    )
    baseline_seconds: float | None = Field(
        None, gt=0, description="that run's time, with --baseline-device"
    )
    baseline_device: str | None = Field(
        None, description="what that run was on: 2x RTX 4090", pattern=r"^[1-9]\d*x \S"
    )
    baseline_reads: int | None = Field(
        None, ge=1, description="how many reads that run had, with --baseline-seconds"
    )
    tune_rounds: int = Field(
        0,
        ge=0,
        le=10,
        description="if a speed target is missed, tune the settings behind it and re-run, "
        "at most N times",
    )
    approval: bool = Field(
        False, description="pause after the report until a reviewer has answered"
    )
    approval_timeout_s: int = Field(
        86_400, ge=1, description="without an answer by then the approval is pending"
    )

    def inputs(self) -> tuple[str, ...]:
        """Return the files of local reads, and the result files of an earlier baseline.

        Raises:
            InputError: A file does not exist, or holds no results.
        """
        from virnuc_core.report.result_tables import result_files

        files = super().inputs()
        if self.baseline_results is not None:
            result_paths = result_files(self.baseline_results).values()
            files += tuple(str(path) for path in result_paths)
        return files

    def check_flow_files(self) -> None:
        """Refuse settings that do not fit each other, and a history that cannot be written.

        Raises:
            ConfigError: A time is given without its device and number of reads, rounds of tuning
                are asked for on a cluster, or the history cannot be written.
        """
        super().check_flow_files()
        if self.tune_rounds and self.cluster:
            raise ConfigError(
                "tune_rounds: a cluster's settings are not swept; "
                "run virnuc tune on one of its machines"
            )
        facts = {
            "--baseline-seconds": self.baseline_seconds,
            "--baseline-device": self.baseline_device,
            "--baseline-reads": self.baseline_reads,
        }
        missing = [option for option, value in facts.items() if value is None]
        if 0 < len(missing) < len(facts):  # some are given, but not all
            raise ConfigError(
                "baseline: a time, the device it was measured on and its number of reads "
                f"belong together; {' and '.join(missing)} is missing"
            )

    def with_baseline(self, profile: Profile) -> Profile:
        """Return the profile with the earlier baseline in place of its own, if one was given.

        The earlier baseline was run outside of this validation. Its results, or its time, or both
        may be given.
        """
        if self.baseline_results is None and self.baseline_device is None:
            return profile
        recorded: dict[str, Any] = {"source": "recorded", "results": self.baseline_results}
        if self.baseline_device is not None:
            # Such as "2x RTX 4090", which the pattern of the field demands.
            count, _, device = self.baseline_device.partition("x ")
            recorded["recorded_seconds"] = self.baseline_seconds
            recorded["recorded_device"] = device
            recorded["recorded_devices"] = int(count)
            recorded["recorded_reads"] = self.baseline_reads
        baseline = profile.baseline.model_copy(update=recorded)
        return profile.model_copy(update={"baseline": baseline})
