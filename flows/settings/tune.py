"""What `tune` takes, and what sweeps try."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from virnuc.flows.settings.measured import PROFILE_HELP
from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import (
    Attention,
    Precision,
)

Slots = Annotated[int, Field(ge=64, le=1 << 20)]


Loaders = Annotated[int, Field(ge=0, le=64)]


Batches = Annotated[int, Field(ge=1, le=64)]


_SWEEPS: Final = tomllib.loads(Path(__file__).with_name("sweeps.toml").read_text(encoding="utf-8"))


SWEPT: Final[dict[str, str]] = _SWEEPS["settings"]


KNOBS: Final[dict[str, dict[str, list[Any]]]] = _SWEEPS["knobs"]


class TuneSettings(RunSettings):
    """Which settings are fastest here? Lists left empty are not swept."""

    out: Path = Field(
        description="directory of the sweep: tune.json, settings.toml and every trial"
    )
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    grid: Literal["lists", "quick", "full"] = Field(
        "lists",
        description="quick: 3 x 3 loader workers and batches kept ready; full: 4 x 3 x 3, budgets too",
    )
    search: Literal["halving", "grid"] = Field(
        "halving", description="halving drops the slower half after each round"
    )
    repeats: int = Field(
        3, ge=1, le=20, description="measurements of each candidate that stays in the running"
    )
    token_budgets: tuple[Slots, ...] = Field(
        (8_192, 16_384, 32_768), description="slots of one ESM-2 batch to try"
    )
    dna_token_budgets: tuple[Slots, ...] = Field(
        (), description="slots of one DNABERT-S batch to try"
    )
    attentions: tuple[Attention, ...] = Field((), description="attention backends to try")
    precisions: tuple[Precision, ...] = Field((), description="precisions to try")
    loader_workers: tuple[Loaders, ...] = Field(
        (0, 2, 4), description="loader processes of one device to try"
    )
    prefetch_factors: tuple[Batches, ...] = Field(
        (2, 4), description="batches kept ready for each loader to try"
    )
    shard_sizes: tuple[Annotated[int, Field(ge=64)], ...] = Field(
        (), description="ESM-2 tokens of one shard to try"
    )

    def swept(self) -> Mapping[str, Sequence[Any]]:
        """Engine settings and the values to try, without those that are not swept; a named grid goes first."""
        lists = _SWEEPS["grids"].get(self.grid) or {
            engine: getattr(self, own) for own, engine in SWEPT.items()
        }
        return {name: values for name, values in lists.items() if values}
