"""Options of the command line made of settings: each field of a model is one."""

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from virnuc.flows.parameters import Result, Settings, build, fields_of, set_signature
from virnuc_core import config
from virnuc_core.config import (
    Spec,
)

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


Json = Annotated[Flag, Parameter(name="--json", help="the outcome as JSON")]


SHORT_OPTIONS = {"out": "-o", "mates_1": "-1", "mates_2": "-2"}


ENVIRONMENT = {
    "models": "VIRNUC_MODELS",
    "no_prefect": "VIRNUC_NO_PREFECT",
}  # for what a command was not given


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

        set_signature(called, function, shown)
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
