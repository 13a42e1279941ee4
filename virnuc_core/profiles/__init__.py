"""Profiles: what a validation runs, and the thresholds that it is judged by.

A profile is a TOML file in this folder, or a file of the user's own. This module also has the
questions that a reviewer answers.
"""

import tomllib
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from virnuc_core.config import BaselineName, EngineSpec, Spec, read_small_text, refuse_unreadable
from virnuc_core.encoder_names import PROTEIN
from virnuc_core.errors import ConfigError

FOLDER: Final = Path(__file__).parent

# What a profile may set targets for; `report/criteria.py` measures each of them.
TargetName = Literal[
    "one_device_seconds",
    "two_device_seconds",
    "scaling",
    "speedup",
    "consensus_agreement",
    "gpu_utilisation",
    "packing_efficiency",
    "starved_share",
    "checkpoint_overhead",
    "device_time_spread",
    "centred_worst",
    "centred_mean",
    "verdicts_held",
]
TARGET_NAMES: Final[tuple[TargetName, ...]] = get_args(TargetName)
# A key of a table in a user's file. A pattern names a wrong key in one line, a Literal in many.
TargetKey = Annotated[str, Field(pattern=f"^({'|'.join(TARGET_NAMES)})$")]
DeviceCount = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}$")]

Answer = Literal["yes", "no", "not answered"]
NOT_ANSWERED: Final = "not answered"

_COMPARISONS: Final = {"<": lt, "<=": le, ">": gt, ">=": ge}


class Target(Spec):
    """A threshold: the measured value must stand in this relation to `value`."""

    op: Literal["<", "<=", ">", ">="]
    value: float

    def met(self, measured: float) -> bool:
        """Return whether a measured value reaches the target: whether `measured op value` holds.

        Args:
            measured: The value, in the unit of `value`.
        """
        is_met = _COMPARISONS[self.op](measured, self.value)
        return bool(is_met)


class BaselineSpec(Spec):
    """What the run is compared with, and how its time is known."""

    name: BaselineName = "v1"
    source: Literal["measured", "recorded"] = "measured"
    reads: int | None = Field(
        None, ge=1, description="measure on this many reads and scale by tokens; unset: all"
    )
    recorded_seconds: float | None = Field(None, gt=0)
    recorded_device: str | None = Field(
        None, description="device name the recorded time belongs to"
    )
    recorded_devices: int | None = Field(None, ge=1)
    recorded_reads: int | None = Field(
        None, ge=1, description="reads it was of; unset: the profile's target_reads"
    )
    results: Path | None = Field(
        None, description="result files of an earlier run of it, taken in place of a run"
    )


class Profile(Spec):
    """Sizes and thresholds of a validation, read from `profiles/*.toml` or a user's own file."""

    name: str
    title: str
    device_names: tuple[str, ...] = Field(
        (), description="substrings of device names the thresholds are meant for"
    )
    min_reads: int = Field(1, ge=1, description="fewer reads than this: no evidence")
    target_reads: int | None = Field(
        None, ge=1, description="what time targets speak of; fewer are projected, no pass"
    )
    min_compared_chunks: int = Field(
        1, ge=1, description="agreement over fewer chunks than this: no evidence"
    )
    fp32_sequences: int = Field(
        1_000, ge=1, description="embedded in fp32, too, on a GPU: what a run is held against"
    )
    price_per_device_hour: float | None = Field(
        None, gt=0, description="for the cost line; in any currency"
    )
    time_limit_s: float | None = Field(
        None, gt=0, description="a run over this is ended and reported as failed"
    )
    score_tolerance: float = Field(0.01, gt=0)
    window_s: float = Field(30.0, gt=0, description="length of a telemetry window")
    sample_s: float = Field(0.5, gt=0, description="interval of GPU and CPU samples")
    projection_reads: int = Field(6_000_000, ge=1)
    baseline: BaselineSpec = BaselineSpec()
    engine: EngineSpec = EngineSpec()
    targets: dict[TargetKey, Target] = Field(
        {}, description="thresholds; a criterion without one is not asked"
    )
    scaling_bands: dict[DeviceCount, tuple[float, float]] = Field(
        {}, description="devices -> expected low, high"
    )
    regression_percent: float = Field(
        10.0, gt=0, description="a metric worse by more than the last like run's fails"
    )


class Review(Spec):
    """What a reviewer says about a validation."""

    all_criteria_met: Answer = Field("not answered", description="Are all criteria met?")
    target_realistic: Answer = Field("not answered", description="Is the target realistic?")
    tuning_could_help: Answer = Field("not answered", description="Could tuning help?")
    code_fix_needed: Answer = Field("not answered", description="Is a code fix needed?")
    # Whatever the encoder is, the answer has this name in the files of all approvals.
    esm2_still_bottleneck: Answer = Field(
        "not answered", description=f"Is {PROTEIN.title} still the bottleneck?"
    )
    note: str = Field("", max_length=10_000, description="Issues, adjustments, follow-up work")


# What a reviewer is asked, by the name of the answer
QUESTIONS: Final = {
    name: answer.description for name, answer in Review.model_fields.items() if name != "note"
}


def profile_names() -> list[str]:
    """Return the names of the profiles that come with virnuc."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """Read a profile.

    Args:
        name_or_path: The name of a profile that comes with virnuc, or the path of a `.toml` file.

    Returns:
        The profile. Keys that the file does not set have the defaults of `Profile`.

    Raises:
        ConfigError: There is no such profile, or it is not valid. The message names the key.
    """
    path = Path(name_or_path)
    if not name_or_path.endswith(".toml"):
        known_names = profile_names()
        if name_or_path not in known_names:
            names = ", ".join(known_names)
            raise ConfigError(
                f"profile '{name_or_path}' is not known; choose {names} or a .toml file"
            )
        path = FOLDER / f"{name_or_path}.toml"
    with refuse_unreadable(f"profile {name_or_path}", "TOML"):
        content = tomllib.loads(read_small_text(path))
        return Profile.model_validate(content)
