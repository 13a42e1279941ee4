"""What several flows take: devices and engine settings, reads and directories."""

from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator

from virnuc.flows.parameters import build
from virnuc_core import config
from virnuc_core.config import (
    ClassifySpec,
    Devices,
    EngineSpec,
    ReadingSpec,
    ReadsSpec,
    Spec,
)
from virnuc_core.rundir import check_output, run_lock

# one list of words each, so that the UI shows a choice; an optional type would show as a switch between types
PrecisionChoice = Literal["default", "auto", "fp32", "fp16", "bf16", "int8"]


AttentionChoice = Literal["default", "auto", "fused", "reference"]


class ComputeSettings(Spec):
    """Where and how to compute. A setting left at `default`, or empty, is the profile's, or the engine's own."""

    devices: str = Field(
        "auto",
        description="cuda:0,cuda:1 or cuda:GPU-UUID, cpu:2 (cores), or auto: all GPUs, else one core",
        # no asterisk: the UI shows the pattern of a refused value as Markdown
        pattern=r"^(auto|cpu|cpu:[1-9][0-9]{0,3}|cuda:[^, ]+(, ?cuda:[^, ]+){0,63})$",
    )
    precision: PrecisionChoice = Field(
        "default", description="arithmetic; auto: fp16 on CUDA, fp32 on CPU"
    )
    attention: AttentionChoice = Field(
        "default", description="attention backend; auto chooses once per device"
    )
    token_budget: int | None = Field(
        None, ge=64, le=1 << 20, description="token slots of one packed ESM-2 batch"
    )
    dna_token_budget: int | None = Field(
        None, ge=64, le=1 << 20, description="token slots of one DNABERT-S batch"
    )
    shard_tokens: int | None = Field(
        None, ge=64, description="ESM-2 tokens of one shard, the unit of commit"
    )
    num_workers: int | None = Field(
        None, ge=0, le=64, description="loader processes of one device; 0: a thread"
    )
    prefetch_factor: int | None = Field(
        None, ge=1, le=64, description="packed batches kept ready for each loader"
    )
    settings: Path | None = Field(
        None, description="file of such settings, as `virnuc tune` writes it; others win"
    )

    @field_validator("devices", mode="before")
    @classmethod
    def _devices_readable(cls, value: object) -> object:
        if isinstance(value, str):
            Devices.parse(
                value
            )  # says which part is wrong; the pattern is what the UI's form can check
        return value

    def engine(self) -> EngineSpec:
        """The profile's settings, or the engine's own, with what the file of settings says, and what was set here.
        Errors: those of `load_profile` and `read_settings`."""
        profile = getattr(self, "profile", None)
        if isinstance(profile, str):
            from virnuc_core.profiles import load_profile  # few runs need it

            profile = load_profile(profile)
        stock = EngineSpec() if profile is None else profile.engine
        from_file = {} if self.settings is None else config.read_settings(self.settings)
        own = {name: value for name, value in self if name in EngineSpec.model_fields}
        given = {name: value for name, value in own.items() if value not in (None, "default")}
        return build(EngineSpec, stock.model_dump() | from_file | given, quoted=not from_file)


class FlowSettings(ComputeSettings, ReadingSpec):
    """What every flow takes."""

    out: Path = Field(description="run directory; a run that stopped goes on where it was")
    models: Path = Field(description="models directory: esm2/, dnabert_s/, head/")

    def check_own_files(self) -> None:
        """Refuse files that this flow alone takes and that are not fit; most flows take none."""

    def spec(self, sample: str = "") -> ClassifySpec:
        """A run with these settings, of what the sample's name says."""
        own = self.model_dump(include={*ClassifySpec.model_fields})
        return ClassifySpec(
            **own,
            engine=self.engine(),
            parameters=self.model_dump(mode="json") | {"sample": sample},
        )

    def inputs(self) -> tuple[str, ...]:
        """Local files that are read, and must not be written over. Errors: `InputError` for those not there."""
        return ()

    def placed(self, moment: datetime) -> Self:
        """The settings of a run that starts at this moment."""
        return self

    def is_done(self) -> bool:
        """Whether, at a glance at the output directory, there is nothing left to compute."""
        return False

    def check_place(self) -> None:
        """Refuse an output directory in which something of others could be lost. Errors: those of `check_output`."""
        check_output(
            self.out, models=self.models, reads=self.inputs(), force=getattr(self, "force", False)
        )

    def hold(self) -> AbstractContextManager[None]:
        """Hold the output directory, checked; flows that share it with others hold parts of it themselves."""
        self.check_place()
        return nullcontext()


class RunSettings(ReadsSpec, FlowSettings):
    """What every flow over one directory takes."""

    force: bool = Field(
        False, description="start over: results of an earlier run in the directory are removed"
    )

    def inputs(self) -> tuple[str, ...]:
        """The files of local reads. Errors: `InputError`."""
        from virnuc_core.reads.sources import local_files

        return local_files(self.named)

    def hold(self) -> AbstractContextManager[None]:
        """Hold the output directory, checked and locked. Errors: those of `run_lock`, too."""
        self.check_place()
        return run_lock(self.out)
