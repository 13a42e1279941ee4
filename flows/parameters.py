"""What flows take: one flat model a flow, here those of predictions. From it come UI form, options and checks.

Prefect replaces a model-typed parameter as a whole when one of its fields is given, so that a deployment's other
settings would silently fall back to the model's defaults. A flow therefore has its model's fields as parameters of its
own, and so has the command that starts it."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from virnuc_core import config
from virnuc_core.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")
WITHOUT = "virnuc predict --no-prefect, which needs no server"
ROOTS = "VIRNUC_ROOTS"  # folders, as PATH has them, in one of which every path of a flow must lie


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


def set_signature(
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
    set_signature(called, like, [own[name] for name in fields])
    lines = [f"    {name}: {field.description}" for name, field in fields.items()]
    called.__doc__ = "\n".join([inspect.getdoc(like) or "", "", "Args:", *lines])
    return called
