"""What flows take: one flat model a flow, here those of predictions. From it come UI form, options and checks.

Prefect replaces a model-typed parameter as a whole when one of its fields is given, so that a deployment's other
settings would silently fall back to the model's defaults. A flow therefore has its model's fields as parameters of its
own, and so has the command that starts it."""

import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from cyclopts import Parameter
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from virnuc_core import config
from virnuc_core.config import (
    ClassifySpec,
    ClusterSpec,
    Devices,
    EngineSpec,
    ReadingSpec,
    ReadsSpec,
    Spec,
    VerdictSpec,
)
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import SAMPLES, RunDir, check_output, run_lock

Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Json = Annotated[Flag, Parameter(name="--json", help="the outcome as JSON")]
# one list of words each, so that the UI shows a choice; an optional type would show as a switch between types
PrecisionChoice = Literal["default", "auto", "fp32", "fp16", "bf16", "int8"]
AttentionChoice = Literal["default", "auto", "fused", "reference"]
SHORT_OPTIONS = {"out": "-o", "mates_1": "-1", "mates_2": "-2"}
WITHOUT = "virnuc predict --no-prefect, which needs no server"
ROOTS = "VIRNUC_ROOTS"  # folders, as PATH has them, in one of which every path of a flow must lie
ENVIRONMENT = {
    "models": "VIRNUC_MODELS",
    "no_prefect": "VIRNUC_NO_PREFECT",
}  # for what a command was not given


def build(model: type[Settings], values: dict[str, Any], *, quoted: bool = True) -> Settings:
    """The model made of `values`; `ConfigError` says in one line what is wrong with which; `quoted`: and its value."""
    for name, text in _texts(values.items()):
        if "\0" in text or text.encode("utf-8", "replace").decode() != text:
            raise ConfigError(
                f"{name}: {repr(text) if quoted else 'this'} is no text (UTF-8); rename the file"
            )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(config.explain(error, quoted=quoted, model=model)) from error


def _texts(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each text and path among settings, lists of them opened up, with its setting's name."""
    for name, value in settings:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        yield from ((name, str(part)) for part in parts if isinstance(part, (str, Path)))


def within_roots(settings: BaseModel) -> None:
    """Refuse a path among the settings that lies in no folder of `VIRNUC_ROOTS`, where that is set; links followed."""
    if not (
        roots := [
            Path(root).resolve() for root in os.environ.get(ROOTS, "").split(os.pathsep) if root
        ]
    ):
        return
    from virnuc_core.reads.sources import STDIN, is_remote

    of_paths = {name for name, value in settings if isinstance(value, Path)}
    named = [(name, Path(text)) for name, text in _texts(settings) if name in of_paths]
    named += [
        ("profile", Path(text))
        for name, text in _texts(settings)
        if name == "profile" and text[-5:] == ".toml"
    ]
    reads = [
        Path(text)
        for text in getattr(settings, "named", ())
        if text != STDIN and not is_remote(text)
    ]
    named += [("reads", path) for path in reads]
    named += [("reads", entry) for path in filter(os.path.isdir, reads) for entry in path.iterdir()]
    if getattr(settings, "history", ...) is None:
        named += [("history", path.absolute().parent) for name, path in named if name == "out"]
    for name, path in named:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise ConfigError(
                f"{name}: {path} lies in none of the folders that {ROOTS} names; choose one that does"
            )


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The model's fields: those that must be given first, then its own before those it inherits."""
    own_first = {name: None for base in model.__mro__ for name in inspect.get_annotations(base)}
    fields = {name: model.model_fields[name] for name in own_first if name in model.model_fields}
    return dict(
        sorted(fields.items(), key=lambda item: item[0] != "reads" and not item[1].is_required())
    )


def _signed(
    called: Callable[..., Result], like: Callable[..., Any], parameters: list[inspect.Parameter]
) -> None:
    """Give `called` the name of `like` and this signature, where whoever inspects it looks."""
    functools.update_wrapper(called, like)
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def described(
    called: Callable[..., Result], like: Callable[..., Any], model: type[BaseModel]
) -> Callable[..., Result]:
    """`called` by the name of `like`, with the model's fields as parameters and in its text, where Prefect looks."""
    fields, own = fields_of(model), inspect.signature(model).parameters
    _signed(called, like, [own[name] for name in fields])
    lines = [f"    {name}: {field.description}" for name, field in fields.items()]
    called.__doc__ = "\n".join([inspect.getdoc(like) or "", "", "Args:", *lines])
    return called


def command(
    model: type[Settings], *positional: str
) -> Callable[[Callable[[Settings], Result]], Callable[..., Result]]:
    """Turn a function of settings into a command with the model's fields as options, the `positional` ones bare."""
    fields, own = fields_of(model), inspect.signature(model).parameters
    parameters = [
        own[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional
    ]
    parameters += [own[name] for name in fields if name not in positional]
    shown = [
        one.replace(annotation=_option(one.name, fields[one.name], one.name in positional))
        for one in parameters
    ]

    def decorate(function: Callable[[Settings], Result]) -> Callable[..., Result]:
        def called(*values: Any, **options: Any) -> Result:
            return function(build(model, dict(zip(positional, values, strict=False)) | options))

        _signed(called, function, shown)
        return called

    return decorate


def _option(name: str, field: FieldInfo, positional: bool) -> Any:
    """A field's type with how the command line shows it, and without its bounds: those are the model's affair."""
    flag = "--" + name.replace("_", "-")
    annotation: Any = field.annotation
    if any(isinstance(fact, BeforeValidator) for fact in field.metadata):
        annotation = str | annotation  # a text, which the model makes something of, or the default
    many = typing.get_origin(annotation) is tuple
    if many:
        part: Any = typing.get_args(annotation)[0]
        part = (
            str | Path if name in config.INPUT_FIELDS else part
        )  # a text, of which a shell completes files
        annotation = tuple[part.__origin__ if typing.get_origin(part) is Annotated else part, ...]  # type: ignore[misc]
    shown = Parameter(
        name=(flag, SHORT_OPTIONS[name]) if name in SHORT_OPTIONS else flag,
        help=field.description,
        negative_iterable=(),
        consume_multiple=many,
        env_var=ENVIRONMENT.get(name),
        show_default=not positional and field.default not in (None, False, ()),
    )
    return Annotated[
        (annotation, shown, *(fact for fact in field.metadata if isinstance(fact, Parameter)))
    ]


class OnTerminal(Spec):
    """What is seen of a flow that is started by hand."""

    quiet: Flag = Field(False, description="warnings and the outcome only")
    no_progress: Flag = Field(
        False, description="plain lines in the place of live bars, as in a pipe"
    )
    as_json: Json = False
    debug: Annotated[bool, Parameter(parse=False)] = False


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


class PredictSettings(VerdictSpec, ClusterSpec, RunSettings):
    """Which reads are viral."""

    samples: Path | None = Field(
        None,
        description="sample sheet (columns sample, fastq_1, fastq_2): a run for each sample, in OUT/sample",
    )
    sample_from: Literal["none", "name", "read-group"] = Field(
        "none",
        description="each file, or pair, is a sample by its name, or each SM, else ID, of a BAM: runs OUT/sample",
    )

    @property
    def many(self) -> bool:
        """Whether these are samples, each with a run of its own."""
        return self.samples is not None or self.sample_from != "none"

    def check_own_files(self) -> None:
        """Refuse samples that cannot be told apart, and a place for them that is a run's own."""
        other = (
            RunDir(self.out).record if self.many else self.out / SAMPLES
        )  # each would stop the other's resuming
        if other.exists():
            raise ConfigError(
                f"{self.out} holds {'a single run' if self.many else 'samples'}; choose another directory"
            )
        if self.many:
            self.by_sample()

    def by_sample(self) -> dict[str, Self]:
        """The settings of each sample's own run. Errors: those of `read_sheet` and `by_name`; `ConfigError`."""
        from virnuc_core.reads.samples import by_name, by_read_group, read_sheet  # few runs need it

        if self.samples is not None and (self.named or self.sample_from != "none"):
            raise ConfigError("samples: the sheet names all reads; give none beside it")
        if self.read_group:
            raise ConfigError("read_group: one is named; several samples have their own")
        told_by = {"name": by_name, "read-group": by_read_group}
        found = (
            told_by[self.sample_from](self) if self.samples is None else read_sheet(self.samples)
        )
        runs = {}
        for name, reads in found.items():
            own = {"samples": None, "sample_from": "none", "out": self.out / name}
            runs[name] = self.model_copy(
                update=reads.model_dump(include={*config.INPUT_FIELDS, "read_group"}) | own
            )
            within_roots(runs[name])
        return runs

    def is_done(self) -> bool:
        """Whether the directory holds a complete run, which is not to be made anew."""
        run = RunDir(self.out)
        if self.force or self.many or not os.access(run.summary, os.R_OK):
            return False
        from virnuc_core.pipeline import read_summary  # it brings the engine along

        summary = read_summary(run)
        return summary is not None and len(list(run.shards.glob("0*.h5"))) == summary.shards
