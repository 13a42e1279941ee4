"""Settings models as parameters: of a flow, whose form the UI shows, and of the command that starts
it.

Prefect replaces a model-typed parameter as a whole when one of its fields is given, so that a
deployment's other settings would silently fall back to the model's defaults. A flow therefore has
its model's fields as parameters of its own, and so has the command that starts it.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
# What a form begins with: what every run needs, then other ways to name the reads.
FIRST_IN_FORM: Final = (
    *("inbox", "reads", "truth", "out", "models"),
    *("samples", "sample_from", "mates_1", "mates_2", "devices"),
)
_OPTION: Final = re.compile(r"--([a-z][a-z0-9-]*)")
_CAPITALS: Final = re.compile(r"\b(OUT|READS)\b")  # as the help of a command names its arguments
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


def form_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a form in their order, without those in `PRIVATE_FIELDS`.

    The reads and the required fields come first. The order within them, and of what follows, is
    that of `FIRST_IN_FORM`, then that of `fields_of`.
    """
    fields = {name: field for name, field in fields_of(model).items() if name not in PRIVATE_FIELDS}
    in_order = [name for name in dict.fromkeys([*FIRST_IN_FORM, *fields]) if name in fields]
    needed = [name for name in in_order if name == "reads" or fields[name].is_required()]
    return {name: fields[name] for name in dict.fromkeys([*needed, *in_order])}


def form_description(model: type[BaseModel], name: str) -> str:
    """Return what a form says of a field.

    A class of settings may have other words for a form than for the help of the command
    (`form_descriptions`). A class that defines the field anew does not inherit them. Without such
    words, options in the text are named as the fields of the form are.

    Args:
        model: The settings model.
        name: The name of the field.
    """
    for base in model.__mro__:
        form_descriptions: Mapping[str, str] = vars(base).get("form_descriptions", {})
        if name in form_descriptions:
            return form_descriptions[name]
        if name in inspect.get_annotations(base):
            break
    text = model.model_fields[name].description or ""
    text = _OPTION.sub(lambda match: match[1].replace("-", "_"), text)
    return _CAPITALS.sub(lambda match: match[1].lower(), text)


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

    Prefect makes the form of the UI from the signature and from the list in the docstring.

    Args:
        function: The function to describe; it takes the fields as keyword arguments.
        like: The function whose name and docstring it gets.
        model: The settings model.
    """
    names = list(form_fields(model))
    parameters_of_model = inspect.signature(model).parameters
    set_signature(function, like, [parameters_of_model[name] for name in names])
    lines = [inspect.getdoc(like) or "", "", "Args:"]
    for name in names:
        lines.append(f"    {name}: {form_description(model, name)}")
    function.__doc__ = "\n".join(lines)
    return function
