"""Settings that several flows share: devices and engine, reads and directories."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator

from virnuc.flows.parameters import build
from virnuc_core import config
from virnuc_core.config import (
    Attention,
    ClassifySpec,
    Devices,
    EngineSpec,
    Gelu,
    Int8Kernels,
    LiveSpec,
    Precision,
    ReadingSpec,
    ReadsSpec,
    Spec,
)
from virnuc_core.encoder_names import DNA, MODEL_FOLDERS, PROTEIN
from virnuc_core.rundir import check_output, run_lock

# lists of words, so that the UI shows a choice; an optional type would be a switch between types
PrecisionChoice = Literal["default", Precision]
AttentionChoice = Literal["default", Attention]
GeluChoice = Literal["default", Gelu]
Int8KernelsChoice = Literal["default", Int8Kernels]


class ComputeSettings(Spec):
    """Where and how to compute. A setting left at `default`, or empty, is the profile's, or the
    engine's own.
    """

    devices: str = Field(
        "auto",
        description="cuda:0,cuda:1 or cuda:GPU-UUID, cpu:2 (cores), "
        "or auto: all GPUs, else one core",
        # no asterisk: the UI shows the pattern of a refused value as Markdown
        pattern=r"^(auto|cpu|cpu:[1-9][0-9]{0,3}|cuda:[^, ]+(, ?cuda:[^, ]+){0,63})$",
    )
    precision: PrecisionChoice = Field(
        "default", description="arithmetic; auto: fp16 on CUDA, fp32 on CPU"
    )
    attention: AttentionChoice = Field(
        "default", description="attention backend; auto chooses once per device"
    )
    gelu: GeluChoice = Field(
        "default",
        description=f"GELU of {PROTEIN.title}; tanh: an approximation, faster in fp16 and bf16",
    )
    int8_kernels: Int8KernelsChoice = Field(
        "default",
        description="what rounds rows to int8; auto: the library for H100 and H200 if all devices "
        "are such, else Triton",
    )
    token_budget: int | None = Field(
        None, ge=64, le=1 << 20, description=f"token slots of one packed {PROTEIN.title} batch"
    )
    dna_token_budget: int | None = Field(
        None, ge=64, le=1 << 20, description=f"token slots of one {DNA.title} batch"
    )
    shard_tokens: int | None = Field(
        None, ge=64, description=f"{PROTEIN.title} tokens of one shard, the unit of commit"
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
        """Return the value as it is, or raise an error that says which part of it is wrong.

        The field also has a pattern. It lets the form of the UI refuse a value, but does not say
        what is wrong with it.
        """
        if isinstance(value, str):
            Devices.parse(value)  # raises the error
        return value

    def engine(self) -> EngineSpec:
        """Return the settings of the engine.

        Settings given here win over those of the settings file, which win over the profile's. What
        nobody sets is the engine's own default.

        Raises:
            ConfigError: The profile or the settings file cannot be used.
        """
        defaults = self._default_engine().model_dump()
        from_file = {}
        if self.settings is not None:
            from_file = config.read_settings(self.settings)
        given = {}
        for name, value in self:
            # None and "default" mean that the user has not set this setting.
            if name in EngineSpec.model_fields and value not in (None, "default"):
                given[name] = value
        # Whoever reads an error may not be allowed to read the file: its values are not quoted.
        return build(EngineSpec, defaults | from_file | given, quoted=not from_file)

    def _default_engine(self) -> EngineSpec:
        """Return the profile's engine settings, or the engine's own where there is no profile."""
        profile = getattr(self, "profile", None)  # a name, or the profile of a finished validation
        if isinstance(profile, str):
            from virnuc_core.profiles import load_profile  # few runs need it

            profile = load_profile(profile)
        if profile is None:
            return EngineSpec()
        engine: EngineSpec = profile.engine
        return engine


class LiveSettings(LiveSpec):
    """The file of live figures that a flow keeps up to date."""

    def check_metrics_file(self) -> None:
        """Refuse a file of live figures that no collector would read, or that is not ours.

        Raises:
            ConfigError: The file cannot be used.
        """
        if self.metrics_file is not None:
            from virnuc_core.telemetry.metrics_file import require_metrics_file  # few runs need it

            require_metrics_file(self.metrics_file)


class FlowSettings(ComputeSettings, ReadingSpec):
    """What every flow takes.

    Attributes:
        form_descriptions: What the form of the UI says of some fields, where the help of the
            command has no room for it, or where a worker reads the path.
    """

    form_descriptions: ClassVar[Mapping[str, str]] = {
        "out": "Folder for the results, as the worker's machine sees it. Each run needs a folder "
        "of its own. If you name the folder of a run that stopped, the run goes on where it was.",
        "models": "Folder of the models, as the worker's machine sees it. "
        f"It contains {MODEL_FOLDERS}.",
    }

    out: Path = Field(description="run directory; a run that stopped goes on where it was")
    models: Path = Field(description=f"models directory: {MODEL_FOLDERS}")

    def check_flow_files(self) -> None:
        """Refuse files that only this flow takes and that it cannot use. Most flows take none."""

    def spec(self, sample: str = "") -> ClassifySpec:
        """Return the settings of a run.

        Args:
            sample: The name of the sample, which the record of the run holds.
        """
        fields = self.model_dump(include={*ClassifySpec.model_fields})
        # All parameters of the flow as the user gave them, for the record of the run.
        parameters = self.model_dump(mode="json") | {"sample": sample}
        return ClassifySpec(**fields, engine=self.engine(), parameters=parameters)

    def inputs(self) -> tuple[str, ...]:
        """Return the local files that are read, which nothing may be written over.

        These settings name no such files. Settings of flows that read files override this method.

        Raises:
            InputError: A file does not exist.
        """
        return ()

    def for_start_time(self, moment: datetime) -> Self:
        """Return the settings of a run that was planned for this moment."""
        return self

    def is_done(self) -> bool:
        """Tell, at a glance at the output directory, if there is nothing left to compute."""
        return False

    def check_output_folder(self) -> None:
        """Refuse an output directory in which something of others could be lost.

        Raises:
            ConfigError: The directory cannot be used; see `check_output`.
        """
        force = getattr(self, "force", False)  # not every flow has this option
        check_output(self.out, models=self.models, reads=self.inputs(), force=force)

    def locked_output(self) -> AbstractContextManager[None]:
        """Check the output directory, and return a context manager that holds its lock.

        Here it locks nothing. Settings of flows that need a lock override this method.
        """
        self.check_output_folder()
        return nullcontext()


class RunSettings(ReadsSpec, FlowSettings):
    """What every flow over one directory takes."""

    form_descriptions: ClassVar[Mapping[str, str]] = {
        "reads": "Files or folders of reads, as the worker's machine sees them, one for each item: "
        "FASTA, FASTQ or BAM, plain or compressed. Files that are mates by their names are taken "
        "together; mates with other names belong in mates_1 and mates_2. Addresses (https://…) "
        "and ncbi:ACCESSIONS work, too.",
    }

    force: bool = Field(
        False, description="start over: results of an earlier run in the directory are removed"
    )

    def inputs(self) -> tuple[str, ...]:
        """Return the files of local reads.

        Raises:
            InputError: A file does not exist.
        """
        from virnuc_core.reads.sources import local_files

        return local_files(self.all_inputs)

    def locked_output(self) -> AbstractContextManager[None]:
        """Check the output directory, and lock it for the body of a `with` statement.

        Raises:
            ConfigError: Another process is working in the directory.
        """
        self.check_output_folder()
        return run_lock(self.out)
