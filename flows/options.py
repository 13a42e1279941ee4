"""Command-line options made from a pydantic model, so that the command and the UI's form never disagree."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows import settings
from flows.forms import build, fields_of
from virnuc_core.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
SHORT = {"out": "-o", "count": "-n"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`; the command prints it and leaves with its exit code."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def command_parser(name: str, description: str) -> Parser:
    """The parser of `virnuc NAME`, with the options every command has."""
    parser = Parser(prog=f"virnuc {name}", description=description, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show tracebacks and Prefect's own log lines")
    return parser


def _choices(annotation: Any) -> tuple[str, ...] | None:
    """The words a `Literal`, or an optional one, admits."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    for part in typing.get_args(annotation):
        if typing.get_origin(part) is Literal:
            return typing.get_args(part)
    return None


def _many(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (tuple, list)


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.is_required() or field.default in (None, False, ()):
        return text
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{text} (default: {default})"


def add_options(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    *,
    positional: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Add one option for each field of `model`.

    Fields named in `positional` come without dashes, in that order; those in `optional` need not be given although the
    model asks for them.
    """
    for name in positional:
        field = model.model_fields[name]
        parser.add_argument(
            name, nargs="+" if _many(field.annotation) else None, metavar=name.upper(), help=_help(field)
        )
    for name, field in fields_of(model).items():
        if name not in positional:
            _add_option(parser, name, field, required=field.is_required() and name not in optional)


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo, *, required: bool) -> None:
    flags = [flag for flag in (SHORT.get(name), "--" + name.replace("_", "-")) if flag]
    common: dict[str, Any] = {"dest": name, "help": _help(field), "default": None}
    if field.annotation is bool:
        parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    if required:
        common |= {"required": True}
    choices = _choices(field.annotation)
    if _many(field.annotation):
        few = {"choices": choices} if choices is not None else {"metavar": _metavar(name, field)}
        parser.add_argument(*flags, nargs="+" if field.is_required() else "*", **few, **common)
    elif choices is not None:
        parser.add_argument(*flags, choices=choices, **common)
    else:
        parser.add_argument(*flags, metavar=_metavar(name, field), **common)


def _metavar(name: str, field: FieldInfo) -> str:
    parts = {field.annotation, *typing.get_args(field.annotation)}
    parts |= {inner for part in parts if typing.get_origin(part) is Annotated for inner in typing.get_args(part)[:1]}
    if Path in parts:
        return "PATH"
    return "N" if parts & {int, float} else name.upper()


def given(arguments: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """What the user set, and nothing else: the model's defaults stand for the rest."""
    values = {name: getattr(arguments, name, None) for name in model.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(
    words: Sequence[str], name: str, description: str, model: type[Settings], positional: Sequence[str] = ()
) -> tuple[Settings, argparse.Namespace]:
    """The settings of a command line; the models directory may come from VIRNUC_MODELS, the rest from the model."""
    parser = command_parser(name, description)
    folder = settings.models_folder()
    add_options(parser, model, positional=positional, optional=("models",) if folder else ())
    arguments = parser.parse_args(words)
    values = given(arguments, model)
    if folder is not None:
        values.setdefault("models", folder)
    return build(model, values), arguments


def parameters_of(spec: BaseModel) -> dict[str, Any]:
    """A flow's parameters from its settings."""
    return {name: getattr(spec, name) for name in type(spec).model_fields}
