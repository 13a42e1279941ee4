"""One pydantic model describes what a flow takes; from it come the UI's form, the checks and the command's options.

Prefect replaces a model-typed parameter as a whole when one of its fields is given, so that a deployment's other
settings would silently fall back to the model's defaults. A flow therefore shows its model's fields as parameters of
its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from virnuc_core.config import explain
from virnuc_core.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)
Result = TypeVar("Result")


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The model's fields, its own before those it inherits: what a flow is about comes first in its form.

    Those that must be given stand before all others.
    """

    def rank(name: str) -> tuple[bool, int]:
        depth = next(i for i, base in enumerate(model.__mro__) if name in inspect.get_annotations(base))
        return not model.model_fields[name].is_required(), depth

    return {name: model.model_fields[name] for name in sorted(model.model_fields, key=rank)}


def build(model: type[Settings], values: dict[str, Any]) -> Settings:
    """The model made of `values`; `ConfigError` says in one line what is wrong with which."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    annotation: Any = field.annotation
    for bound in field.metadata:
        annotation = Annotated[annotation, bound]
    default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def takes(model: type[Settings]) -> Callable[[Callable[[Settings], Result]], Callable[..., Result]]:
    """Turn a function of one settings model into one whose keyword parameters are the model's fields.

    Types, bounds and defaults stand in its signature; the descriptions in its docstring, where Prefect looks for them.
    """
    parameters = [_parameter(name, field) for name, field in fields_of(model).items()]

    def decorate(function: Callable[[Settings], Result]) -> Callable[..., Result]:
        def called(**values: Any) -> Result:
            return function(build(model, values))

        called.__name__, called.__qualname__ = function.__name__, function.__qualname__
        called.__module__ = function.__module__
        lines = [f"    {name}: {field.description}" for name, field in fields_of(model).items()]
        called.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Args:", *lines])
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
