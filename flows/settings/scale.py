"""What `scale` takes."""

from pydantic import Field

from virnuc.flows.settings.measured import MeasureSettings


class ScaleSettings(MeasureSettings):
    """How does the time fall with the number of devices?"""

    profile: str = Field(
        "phase6-scaling", min_length=1, description="sizes and bands: a name, or a .toml file"
    )
    repeats: int = Field(
        1, ge=1, le=20, description="runs on each number of devices; their median counts"
    )
    persistent_models: bool = Field(
        False,
        description="also measure what workers save by keeping their models: pairs of runs with "
        "and without",
    )
