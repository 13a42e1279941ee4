"""What each flow takes: one flat model a flow. From it come the UI's form, the `virnuc` options and the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from virnuc_core.config import Devices, EngineSpec, Spec

Reads = Annotated[tuple[str, ...], Field(min_length=1)]
# one list of words each, so that the UI shows a choice; an optional type would show as a switch between types
PrecisionChoice = Literal["default", "auto", "fp32", "fp16", "bf16", "fp8"]
AttentionChoice = Literal["default", "auto", "varlen", "fused", "reference"]
PROFILE_HELP = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"
READS_HELP = "FASTA or FASTQ files or folders, plain or compressed; https:// addresses; ncbi:ACCESSIONS"
DEVICES_PATTERN = r"^(auto|cpu(:[1-9][0-9]*)?|cuda:[^, ]+(, *cuda:[^, ]+)*)$"
DEVICES_HELP = "cuda:0,cuda:1 or cuda:GPU-UUID, cpu:2 (cores), or auto: all GPUs, else one core"


class ComputeSettings(Spec):
    """Where and how to compute. A setting left at `default`, or empty, is the profile's, or the engine's own."""

    devices: str = Field("auto", description=DEVICES_HELP, pattern=DEVICES_PATTERN)
    precision: PrecisionChoice = Field("default", description="arithmetic; auto: fp16 on CUDA, fp32 on CPU")
    attention: AttentionChoice = Field("default", description="attention backend; auto chooses once per device")
    token_budget: int | None = Field(None, ge=64, le=1 << 20, description="token slots of one packed ESM-2 batch")
    dna_token_budget: int | None = Field(None, ge=64, le=1 << 20, description="token slots of one DNABERT-S batch")
    shard_tokens: int | None = Field(None, ge=64, description="ESM-2 tokens of one shard, the unit of commit")
    num_workers: int | None = Field(None, ge=0, le=64, description="loader processes of one device; 0: a thread")
    prefetch_factor: int | None = Field(None, ge=1, le=64, description="packed batches kept ready for each loader")

    @field_validator("devices", mode="before")
    @classmethod
    def _devices_readable(cls, value: object) -> object:
        if isinstance(value, str):
            Devices.parse(value)  # says which part is wrong; the pattern is what the UI's form can check
        return value

    def parsed_devices(self) -> Devices:
        """The devices asked for."""
        return Devices.parse(self.devices)

    def engine(self, base: EngineSpec) -> EngineSpec:
        """`base` with what was set here."""
        given = {name: getattr(self, name) for name in ENGINE_SETTINGS if getattr(self, name) not in (None, "default")}
        return EngineSpec.model_validate(base.model_dump() | given)


ENGINE_SETTINGS = (
    "precision",
    "attention",
    "token_budget",
    "dna_token_budget",
    "shard_tokens",
    "num_workers",
    "prefetch_factor",
)


class ReadingSettings(Spec):
    """How input is read."""

    stage_workers: int = Field(1, ge=1, le=256, description="processes that translate reads")
    on_error: Literal["stop", "skip"] = Field("stop", description="a broken record: stop, or skip it and count it")
    strict: bool = Field(False, description="refuse duplicate read ids instead of keeping them apart")
    email: str | None = Field(None, description="mail address that NCBI asks for, when reads are ncbi: accessions")


class VerdictSettings(Spec):
    """What is called viral, and whether those reads are written out."""

    threshold: float = Field(0.5, ge=0, le=1, description="viral score from which a read is called viral")
    write_viral: bool = Field(False, description="also write the viral reads in the input's own format, gzipped")


class PredictSettings(VerdictSettings, ComputeSettings, ReadingSettings):
    """Which reads are viral."""

    reads: Reads = Field(description=READS_HELP)
    out: Path = Field(description="run directory; a run that stopped goes on where it was")
    models: Path = Field(description="models directory: esm2/, dnabert_s/, head/")
    threshold: float = Field(0.5, ge=0, le=1, description="viral score from which a read is called viral")
    write_viral: bool = Field(False, description="also write the viral reads in the input's own format, gzipped")
    force: bool = Field(False, description="start over: results of an earlier run in the directory are removed")


class MeasureSettings(ComputeSettings, ReadingSettings):
    """Runs whose figures are judged."""

    reads: Reads = Field(description=READS_HELP)
    out: Path = Field(description="directory of the runs and the report")
    models: Path = Field(description="models directory: esm2/, dnabert_s/, head/")
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    force: bool = Field(False, description="start over: results of earlier runs in the directory are removed")
    history: Path | None = Field(
        None, description="file of past runs (default: virnuc-history.jsonl beside the output)"
    )


class ValidateSettings(MeasureSettings):
    """Does this machine, with these weights, meet the profile?"""

    fail_on_criteria: bool = Field(True, description="a criterion that is not met fails the flow run")
    approval: bool = Field(False, description="pause after the report until a reviewer has answered")
    approval_timeout_s: int = Field(86_400, ge=1, description="without an answer by then the approval is pending")


class ScaleSettings(MeasureSettings):
    """How does the time fall with the number of devices?"""

    profile: str = Field("phase6-scaling", min_length=1, description="sizes and bands: a name, or a .toml file")


class InboxSettings(VerdictSettings, ComputeSettings, ReadingSettings):
    """Predict each new file of a folder, once."""

    inbox: Path = Field(description="folder that is watched; files are told apart by their content")
    out: Path = Field(description="results: one run directory per content, and inbox.tsv with each file's fate")
    models: Path = Field(description="models directory: esm2/, dnabert_s/, head/")
    settle_s: float = Field(60.0, ge=0, description="a file changed within this many seconds may still be arriving")
    max_files: int = Field(100, ge=1, description="files predicted by one run at most; the next run goes on")
    retry_failed: bool = Field(False, description="predict again what failed before")


class TrainSettings(ComputeSettings, ReadingSettings):
    """Fit the head on labelled reads."""

    reads: Reads = Field(description="labelled reads")
    truth: Path = Field(description="table of read id, label (virus or others) and genome")
    models: Path = Field(description="models directory whose encoders the head is for")
    out: Path = Field(description="run directory of the training embeddings; the head is written to OUT/head")
    install: bool = Field(False, description="put the head into the models directory; the old one becomes head.before")
    epochs: int = Field(200, ge=1, description="passes over the training rows at most")
    seed: int = Field(0, ge=0, description="of the genome-level split and of the first weights")
    force: bool = Field(False, description="start over: results of an earlier run in the directory are removed")
