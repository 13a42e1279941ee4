"""Makes options of the command line from settings: each field of a model is one."""

import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from virnuc.flows.parameters import Result, Settings, build, fields_of, set_signature
from virnuc_core import config
from virnuc_core.confidential import EMAIL_VARIABLE
from virnuc_core.config import Spec

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
    "email": EMAIL_VARIABLE,
    "disable_checkpointing": "VIRNUC_DISABLE_CHECKPOINTING",
}
# names of VirNucPro that are used as well
OTHER_VARIABLES: Final = {"disable_checkpointing": "VIRNUCPRO_DISABLE_CHECKPOINTING"}


class OnTerminal(Spec):
    """What is seen of a flow that is started from a terminal."""

    quiet: Flag = Field(False, description="warnings and the outcome only")
    no_progress: Flag = Field(
        False, description="plain lines in the place of live bars, as in a pipe"
    )
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
            annotation = _option_type(name, field, is_positional=False)
            parameters.append(own_parameters[name].replace(annotation=annotation))
    return parameters


def _option_type(name: str, field: FieldInfo, *, is_positional: bool) -> Any:
    """Return the type of a field, annotated with the name and help text of its option.

    Bounds of numbers are not part of the type, because the settings model checks them.

    Args:
        name: The name of the field.
        field: The field.
        is_positional: The value may be given without the option's name.
    """
    parsed_type = _parsed_type(name, field)
    names = [f"--{name.replace('_', '-')}"]
    if name in SHORT_OPTIONS:
        names.append(SHORT_OPTIONS[name])
    # Such a default means "not given". Showing it would tell the user nothing.
    variables = [table[name] for table in (ENVIRONMENT, OTHER_VARIABLES) if name in table]
    is_without_default = field.default in (None, False, ())
    parameter = Parameter(
        name=names,
        help=field.description,
        negative_iterable=(),  # no option `--empty-...` for lists
        consume_multiple=typing.get_origin(parsed_type) is tuple,  # `--reads a.fq b.fq`
        env_var=variables,
        show_default=not (is_positional or is_without_default),
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
