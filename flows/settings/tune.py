"""What `tune` takes, and the values that sweeps try."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from virnuc.flows.settings.measured import PROFILE_HELP
from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import Attention, Gelu, Precision
from virnuc_core.encoder_names import DNA, PROTEIN

Slots = Annotated[int, Field(ge=64, le=1 << 20)]
Loaders = Annotated[int, Field(ge=0, le=64)]
Batches = Annotated[int, Field(ge=1, le=64)]
ShardSize = Annotated[int, Field(ge=64)]

# settings of `tune`, each a list of values, and the engine's settings that the values are for
SWEPT: Final = {
    "token_budgets": "token_budget",
    "dna_token_budgets": "dna_token_budget",
    "attentions": "attention",
    "gelus": "gelu",
    "precisions": "precision",
    "loader_workers": "num_workers",
    "prefetch_factors": "prefetch_factor",
    "shard_sizes": "shard_tokens",
}
# values of a named grid; each is tried with every other
GRIDS: Final[dict[str, dict[str, list[int]]]] = {
    "quick": {
        "num_workers": [4, 8, 12],
        "prefetch_factor": [2, 4, 8],
    },
    "full": {
        "num_workers": [4, 8, 12, 16],
        "prefetch_factor": [2, 4, 8],
        "token_budget": [4096, 8192, 12288],
    },
}
# kinds of loss in a report, and the values to try that may lessen them
KNOBS: Final[dict[str, dict[str, list[int]]]] = {
    "loader": {
        "num_workers": [4, 8, 12],
        "prefetch_factor": [2, 4, 8],
    },
    "packing": {
        "token_budget": [8192, 16384, 32768],
        "dna_token_budget": [8192, 16384, 32768],
    },
    "GPU compute": {
        "token_budget": [8192, 16384, 32768],
        "dna_token_budget": [8192, 16384, 32768],
    },
    "commits": {
        "shard_tokens": [262144, 524288, 1048576],
    },
}


class TuneSettings(RunSettings):
    """Which settings are fastest here? Lists left empty are not swept."""

    out: Path = Field(
        description="directory of the sweep: tune.json, settings.toml and every trial"
    )
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    grid: Literal["lists", "quick", "full"] = Field(
        "lists",
        description="quick: 3 x 3 loader workers and batches kept ready; "
        "full: 4 x 3 x 3, budgets too",
    )
    search: Literal["halving", "grid"] = Field(
        "halving", description="halving drops the slower half after each round"
    )
    repeats: int = Field(
        3, ge=1, le=20, description="measurements of each candidate that stays in the running"
    )
    token_budgets: tuple[Slots, ...] = Field(
        (8_192, 16_384, 32_768), description=f"slots of one {PROTEIN.title} batch to try"
    )
    dna_token_budgets: tuple[Slots, ...] = Field(
        (), description=f"slots of one {DNA.title} batch to try"
    )
    attentions: tuple[Attention, ...] = Field((), description="attention backends to try")
    gelus: tuple[Gelu, ...] = Field((), description="forms of GELU to try")
    precisions: tuple[Precision, ...] = Field((), description="precisions to try")
    loader_workers: tuple[Loaders, ...] = Field(
        (0, 2, 4), description="loader processes of one device to try"
    )
    prefetch_factors: tuple[Batches, ...] = Field(
        (2, 4), description="batches kept ready for each loader to try"
    )
    shard_sizes: tuple[ShardSize, ...] = Field(
        (), description=f"{PROTEIN.title} tokens of one shard to try"
    )

    def swept(self) -> Mapping[str, Sequence[Any]]:
        """Return the values to try, by the name of the engine setting.

        A named grid has its own values. Otherwise they are those of the lists that the user gave,
        such as `token_budgets`. Empty lists are left out.
        """
        if self.grid != "lists":
            return GRIDS[self.grid]
        values = {}
        for option, engine_setting in SWEPT.items():
            if getattr(self, option):
                values[engine_setting] = getattr(self, option)
        return values
