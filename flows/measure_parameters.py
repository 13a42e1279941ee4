"""What the flows that measure or train take: one flat model each, as in `flows.parameters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from flows.parameters import Reads, RunSettings
from virnuc_core.config import Attention, Precision

Slots = Annotated[int, Field(ge=64, le=1 << 20)]
Tokens = Annotated[int, Field(ge=64)]
Loaders = Annotated[int, Field(ge=0, le=64)]
Batches = Annotated[int, Field(ge=1, le=64)]
PROFILE_HELP = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"


class MeasureSettings(RunSettings):
    """Runs whose figures are judged."""

    out: Path = Field(description="directory of the runs and the report")
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    history: Path | None = Field(None, description="file of past runs; else virnuc-history.jsonl beside the output")


class ValidateSettings(MeasureSettings):
    """Does this machine, with these weights, meet the profile?"""

    fail_on_criteria: bool = Field(True, description="a criterion missed, or a reviewer's no, fails the flow run")
    approval: bool = Field(False, description="pause after the report until a reviewer has answered")
    approval_timeout_s: int = Field(86_400, ge=1, description="without an answer by then the approval is pending")


class ScaleSettings(MeasureSettings):
    """How does the time fall with the number of devices?"""

    profile: str = Field("phase6-scaling", min_length=1, description="sizes and bands: a name, or a .toml file")


class TrainSettings(RunSettings):
    """Fit the head on labelled reads."""

    reads: Reads = Field(description="labelled reads")
    truth: Path = Field(description="table of read id, label (virus or others) and genome")
    out: Path = Field(description="run directory of the training embeddings; the head is written to OUT/head")
    install: bool = Field(False, description="put the head into the models directory; the old one becomes head.before")
    epochs: int = Field(200, ge=1, description="passes over the training rows at most")
    seed: int = Field(0, ge=0, description="of the genome-level split and of the first weights")

    def check_own_files(self) -> None:
        """Refuse a table of origins that is not fit. Errors: those of `read_truth`."""
        from virnuc_core.measure.train import read_truth  # it brings torch along

        read_truth(self.truth)


class TuneSettings(RunSettings):
    """Which settings are fastest here? Lists left empty are not swept."""

    out: Path = Field(description="directory of the sweep: tune.json, settings.toml and every trial")
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    search: Literal["halving", "grid"] = Field("halving", description="halving drops the slower half after each round")
    repeats: int = Field(3, ge=1, le=20, description="measurements of each candidate that stays in the running")
    allow_changed_results: bool = Field(False, description="may recommend what changes scores beyond the tolerance")
    token_budgets: tuple[Slots, ...] = Field(
        (8_192, 16_384, 32_768), description="token slots of one ESM-2 batch to try"
    )
    dna_token_budgets: tuple[Slots, ...] = Field((), description="slots of one DNABERT-S batch to try")
    attentions: tuple[Attention, ...] = Field((), description="attention backends to try")
    precisions: tuple[Precision, ...] = Field((), description="precisions to try")
    loader_workers: tuple[Loaders, ...] = Field((0, 2, 4), description="loader processes of one device to try")
    prefetch_factors: tuple[Batches, ...] = Field((2, 4), description="batches kept ready for each loader to try")
    shard_sizes: tuple[Tokens, ...] = Field((), description="ESM-2 tokens of one shard to try")

    def swept(self) -> dict[str, tuple[Any, ...]]:
        """Engine settings and the values to try, without those that are not swept."""
        lists = {engine: getattr(self, own) for own, engine in SWEPT.items()}
        return {name: values for name, values in lists.items() if values}


SWEPT = {
    "token_budgets": "token_budget",
    "dna_token_budgets": "dna_token_budget",
    "attentions": "attention",
    "precisions": "precision",
    "loader_workers": "num_workers",
    "prefetch_factors": "prefetch_factor",
    "shard_sizes": "shard_tokens",
}


class ProfileSettings(RunSettings):
    """Where does the time of a run go, down to the kernels?"""

    out: Path = Field(description="run directory; traces and tables are written to its telemetry/traces/")
    traced_shards: int = Field(1, ge=1, le=8, description="shards recorded on each device, after one to warm up")
    operations: int = Field(20, ge=1, le=100, description="rows of the table of operations")
    shapes: bool = Field(False, description="tell operations apart by the shapes of their inputs")
    memory: bool = Field(False, description="record allocations as well")
    max_trace_mb: int = Field(200, ge=1, le=4096, description="a larger trace is removed, its tables stay")
