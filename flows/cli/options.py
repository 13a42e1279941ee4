"""Makes options of the command line from settings: each field of a model is one."""

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from virnuc.flows.parameters import Result, Settings, build, fields_of, set_signature
from virnuc_core import config
from virnuc_core.confidential import EMAIL_VARIABLE
from virnuc_core.config import EngineSpec, Spec

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Json = Annotated[Flag, Parameter(name="--json", help="the outcome as JSON")]
Out = Annotated[Path, Parameter(name=("--out", "-o"))]
# files of mates, for commands without a settings model
# `-1 a.fq b.fq`
_SEVERAL: Final = Parameter(consume_multiple=True, negative_iterable=(), show_default=False)
Mates1 = Annotated[tuple[str | Path, ...], Parameter(name=("--mates-1", "-1")), _SEVERAL]
Mates2 = Annotated[tuple[str | Path, ...], Parameter(name=("--mates-2", "-2")), _SEVERAL]

SHORT_OPTIONS: Final = {"out": "-o", "mates_1": "-1", "mates_2": "-2"}
# the variables that are used for what a command was not given
ENVIRONMENT: Final = {
    "models": "VIRNUC_MODELS",
    "no_prefect": "VIRNUC_NO_PREFECT",
    "serve": "VIRNUC_SERVE",
    "email": EMAIL_VARIABLE,
    "disable_checkpointing": "VIRNUC_DISABLE_CHECKPOINTING",
}
# names of VirNucPro that are used as well
OTHER_VARIABLES: Final = {"disable_checkpointing": "VIRNUCPRO_DISABLE_CHECKPOINTING"}


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that stand together in the help text, under a title.

    Attributes:
        title: The title.
        names: The fields of settings that belong to it.
    """

    title: str
    names: tuple[str, ...]


# In the order of the help text. An option that no group names stands under "Further options".
OPTION_GROUPS: Final = (
    OptionGroup(
        "Input",
        (
            *("reads", "inbox", "mates_1", "mates_2", "interleaved", "pairs", "samples"),
            *(
                "sample_from",
                "read_group",
                "subset",
                "simulate",
                "simulate_pairs",
                "reads_seed",
                "on_error",
            ),
            *("strict", "email", "truth", "pattern"),
        ),
    ),
    OptionGroup(
        "Output",
        (
            *("out", "force", "write_viral", "write_nonviral", "quiet", "no_progress", "verbose"),
            *("as_json", "metrics_file"),
        ),
    ),
    OptionGroup(
        "Models and verdicts",
        ("models", "head", "threshold", "fdr", "abstain", "fdr_outside_domain"),
    ),
    OptionGroup(
        "Devices and machines",
        (
            *("devices", "cluster", "nodes", "node_wait_s", "mixed_devices", "models_local"),
            *("transfer", "serve"),
        ),
    ),
    OptionGroup(
        "Speed",
        (
            *("precision", "attention", "gelu", "int8_kernels", "token_budget"),
            *(
                "dna_token_budget",
                "shard_tokens",
                "num_workers",
                "prefetch_factor",
                "stage_workers",
                "settings",
            ),
            "disable_checkpointing",
        ),
    ),
    OptionGroup("Prefect", ("no_prefect",)),
)
FURTHER_OPTIONS: Final = "Further options"


def option_group(name: str) -> Group:
    """Return the group of the help text in which the option of a field stands."""
    for position, group in enumerate(OPTION_GROUPS):
        if name in group.names:
            return Group(group.title, sort_key=position)
    return Group(FURTHER_OPTIONS, sort_key=len(OPTION_GROUPS))


def shown_default(name: str, field: FieldInfo, *, has_profile: bool) -> str | None:
    """Return the value that is used if an option is not given; None if there is none to show.

    A field of the engine that is not set has the profile's value or, in commands that take no
    profile, the engine's own default.

    Args:
        name: The name of the field.
        field: The field.
        has_profile: Whether the command takes a profile.
    """
    if name in EngineSpec.model_fields and field.default in (None, "default"):
        return "the profile's" if has_profile else str(EngineSpec.model_fields[name].default)
    if field.is_required() or field.default in (None, False, (), ""):
        return None
    if field.default is True:
        return "yes"
    if isinstance(field.default, tuple):
        return " ".join(map(str, field.default))
    return str(field.default)


class OnTerminal(Spec):
    """What is seen of a flow that is started from a terminal."""

    quiet: Flag = Field(False, description="warnings and the outcome only")
    no_progress: Flag = Field(
        False, description="plain lines in the place of live bars, as in a pipe"
    )
    verbose: Flag = Field(False, description="the nine stages and their times, before the result")
    as_json: Json = False
    debug: Annotated[bool, Parameter(parse=False)] = False


def command(
    model: type[Settings], *positional: str
) -> Callable[[Callable[[Settings], Result]], Callable[..., Result]]:
    """Turn a function of settings into a command with an option for each field of the model.

    Args:
        model: The settings. What is typed is checked by it.
        positional: Names of the fields that may be given without their option's name, in order.

    Returns:
        A decorator. The command that it returns raises `ConfigError` for settings that are not fit.
    """
    parameters = _command_parameters(model, positional)

    def decorate(function: Callable[[Settings], Result]) -> Callable[..., Result]:
        """Return the command for a function."""

        def run(*values: Any, **options: Any) -> Result:
            """Check the values, and call the function with the settings."""
            # Not strict: the user may leave out positional arguments that have a default.
            positional_values = dict(zip(positional, values, strict=False))
            return function(build(model, positional_values | options))

        # cyclopts makes the options and the help text from the signature and the docstring.
        set_signature(run, function, parameters)
        return run

    return decorate


def _command_parameters(
    model: type[Settings], positional: Sequence[str]
) -> list[inspect.Parameter]:
    """Return the parameters of a command, positional ones first, as cyclopts reads them.

    Args:
        model: The settings. Each of their fields becomes a parameter.
        positional: Names of the fields that may be given without their option's name, in order.
    """
    fields = fields_of(model)
    own_parameters = inspect.signature(model).parameters
    parameters = []
    for name in positional:
        parameters.append(
            own_parameters[name].replace(
                kind=inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=_option_type(name, fields[name], is_positional=True),
            )
        )
    for name, field in fields.items():
        if name not in positional:
            annotation = _option_type(
                name, field, is_positional=False, has_profile="profile" in fields
            )
            parameters.append(own_parameters[name].replace(annotation=annotation))
    return parameters


def _option_type(
    name: str, field: FieldInfo, *, is_positional: bool, has_profile: bool = False
) -> Any:
    """Return the type of a field, annotated with the name and help text of its option.

    Bounds of numbers are not part of the type, because the settings model checks them.

    Args:
        name: The name of the field.
        field: The field.
        is_positional: The value may be given without the option's name.
        has_profile: Whether the command takes a profile.
    """
    parsed_type = _parsed_type(name, field)
    names = [f"--{name.replace('_', '-')}"]
    if name in SHORT_OPTIONS:
        names.append(SHORT_OPTIONS[name])
    default_text = shown_default(name, field, has_profile=has_profile)
    variables = [table[name] for table in (ENVIRONMENT, OTHER_VARIABLES) if name in table]
    parameter = Parameter(
        name=names,
        help=field.description,
        negative_iterable=(),  # no option `--empty-...` for lists
        consume_multiple=typing.get_origin(parsed_type) is tuple,  # `--reads a.fq b.fq`
        env_var=variables,
        # cyclopts calls the function with the default and shows what it returns.
        show_default=default_text is not None and not is_positional and (lambda _: default_text),
        group=option_group(name),
    )
    own_hints = [hint for hint in field.metadata if isinstance(hint, Parameter)]
    return Annotated[(parsed_type, parameter, *own_hints)]


def _parsed_type(name: str, field: FieldInfo) -> Any:
    """Return the type to which cyclopts converts the words given for a field.

    Args:
        name: The name of the field.
        field: The field, whose own type may have checks that only the settings model knows.
    """
    annotation: Any = field.annotation
    if any(isinstance(hint, BeforeValidator) for hint in field.metadata):
        # The settings model converts the text itself, so a text is accepted. The field's own type
        # stays in the union, because the default value has it.
        return str | annotation
    if typing.get_origin(annotation) is not tuple:
        return annotation
    if name in config.INPUT_FIELDS:
        # Each word stays a text, because it may be a URL. `Path` is in the union only for the
        # completion of file names in the shell.
        return tuple[str | Path, ...]
    item_type: Any = typing.get_args(annotation)[0]
    if typing.get_origin(item_type) is Annotated:
        item_type = item_type.__origin__  # the type without its bounds
    return tuple[item_type, ...]
