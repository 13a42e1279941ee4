"""Settings models as parameters: of a flow, whose form the UI shows, and of the command that starts
it.

Prefect replaces a model-typed parameter as a whole when one of its fields is given, so that a
deployment's other settings would silently fall back to the model's defaults. A flow therefore has
its model's fields as parameters of its own, and so has the command that starts it.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from virnuc_core import config
from virnuc_core.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")
# Settings that a flow has no parameter for, because a server keeps the parameters of a run.
PRIVATE_FIELDS: Final = ("email",)
WITHOUT: Final = "virnuc predict --no-prefect, which needs no server"


def build(model: type[Settings], values: dict[str, Any], *, quoted: bool = True) -> Settings:
    """Return a settings object with these values.

    Args:
        model: The settings model.
        values: Values by name of the setting.
        quoted: Whether messages may quote a value.

    Raises:
        ConfigError: A value cannot be used. The message is one line and names the setting.
    """
    for name, text in _texts_of(values.items()):
        if not _is_utf8(text):
            shown_value = repr(text) if quoted else "this"
            raise ConfigError(f"{name}: {shown_value} {_reason_not_utf8(text)}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(config.explain(error, show_values=quoted, model=model)) from error


def _is_utf8(text: str) -> bool:
    """Tell if a text can be written to a file and passed to other programs.

    Python represents bytes that it cannot decode by special characters (surrogates), which UTF-8
    does not have. Encoding replaces them, so that the text changes.
    """
    return "\0" not in text and text.encode("utf-8", "replace").decode() == text


def _reason_not_utf8(text: str) -> str:
    """Return why a text is not UTF-8, and what the user can do.

    Python decodes the words of a command line by the user's locale. If the locale is not UTF-8, a
    word that is UTF-8 cannot be decoded. Then the locale is to blame, and not the name of a file.
    """
    is_utf8_in_shell = "\0" not in text
    try:
        os.fsencode(text).decode("utf-8")  # `fsencode` gives back the bytes of the command line
    except UnicodeError:
        is_utf8_in_shell = False
    if is_utf8_in_shell:
        return "has letters that your locale does not have; set LC_ALL=C.UTF-8 and run again"
    return "is no text (UTF-8); rename the file"


def _texts_of(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting with each text or path in it, also of those in lists."""
    for name, value in settings:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for part in parts:
            if isinstance(part, (str, Path)):
                yield name, str(part)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model in the order in which forms show them.

    The reads and the required fields come first. Then a model's own fields come before those that
    it inherits.
    """
    # A dict keeps the order of its keys. A name that occurs again keeps its first place.
    names: dict[str, None] = {}
    for base in model.__mro__:
        names |= dict.fromkeys(inspect.get_annotations(base))
    fields = {name: model.model_fields[name] for name in names if name in model.model_fields}
    first_fields = {}
    other_fields = {}
    for name, field in fields.items():
        if name == "reads" or field.is_required():
            first_fields[name] = field
        else:
            other_fields[name] = field
    return first_fields | other_fields


def set_signature(
    function: Callable[..., Result], like: Callable[..., Any], parameters: list[inspect.Parameter]
) -> None:
    """Give a function the name and docstring of another one, and the parameters that tools see.

    Prefect and cyclopts make forms and options from the parameters that `inspect` finds.

    Args:
        function: The function to change.
        like: The function whose name and docstring are used.
        parameters: The parameters that `inspect.signature` shows.
    """
    functools.update_wrapper(function, like)
    signature = inspect.Signature(parameters)
    function.__signature__ = signature  # type: ignore[attr-defined] # `inspect` reads it
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def with_flow_signature(
    function: Callable[..., Result], like: Callable[..., Any], model: type[BaseModel]
) -> Callable[..., Result]:
    """Describe a function as a flow with the fields of a model as its parameters.

    Prefect makes the form of the UI from the signature and from the list in the docstring. Fields
    in `PRIVATE_FIELDS` are left out.

    Args:
        function: The function to describe; it takes the fields as keyword arguments.
        like: The function whose name and docstring it gets.
        model: The settings model.
    """
    fields = {name: field for name, field in fields_of(model).items() if name not in PRIVATE_FIELDS}
    parameters_of_model = inspect.signature(model).parameters
    set_signature(function, like, [parameters_of_model[name] for name in fields])
    lines = [inspect.getdoc(like) or "", "", "Args:"]
    for name, field in fields.items():
        lines.append(f"    {name}: {field.description}")
    function.__doc__ = "\n".join(lines)
    return function
