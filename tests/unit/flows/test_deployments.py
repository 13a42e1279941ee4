"""deployments/prefect.yaml against the flows it names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILE = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS: list[dict[str, Any]] = FILE["deployments"]


def flow_of(entrypoint: str) -> Any:
    path, _, name = entrypoint.partition(":")
    return getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{d['entrypoint']}-{d['name']}")
def test_a_deployment_names_a_flow_and_gives_it_parameters_it_takes(deployment: dict[str, Any]) -> None:
    flow = flow_of(deployment["entrypoint"])
    known = flow.parameters.properties
    assert set(deployment["parameters"]) <= set(known)
    assert all(properties.get("description") for properties in known.values())
    if deployment.get("schedules"):
        assert set(flow.parameters.required or ()) <= set(deployment["parameters"])
        flow.validate_parameters(deployment["parameters"])


def test_every_flow_is_deployed_and_named_where_people_look() -> None:
    flows = {path.stem for path in (ROOT / "flows").glob("*.py") if "@flow(" in path.read_text(encoding="utf-8")}
    deployed = {re.sub(r"^flows/(\w+)\.py:.*", r"\1", d["entrypoint"]) for d in DEPLOYMENTS}
    assert deployed == flows
    guide = (ROOT / "deployments" / "README.md").read_text(encoding="utf-8")
    for deployment in DEPLOYMENTS:
        assert f"`{flow_of(deployment['entrypoint']).name}/{deployment['name']}`" in guide


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{d['entrypoint']}-{d['name']}")
def test_a_name_that_is_no_parameter_is_refused_when_a_run_is_created(deployment: dict[str, Any]) -> None:
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import ValidationError, validate

    schema = parameter_schema(flow_of(deployment["entrypoint"])).model_dump(exclude_unset=True)  # as it is deployed
    validate(deployment["parameters"], schema, raise_on_error=True, ignore_required=True)
    with pytest.raises(ValidationError, match="unknown"):
        validate(deployment["parameters"] | {"unknown": 1}, schema, raise_on_error=True, ignore_required=True)


def test_a_value_the_form_must_refuse_is_refused() -> None:
    from prefect.exceptions import ParameterTypeError

    flow = flow_of("flows/predict.py:predict")
    good = {"reads": ["a.fa"], "out": "o", "models": "m"}
    flow.validate_parameters(good)
    for wrong in ({"stage_workers": -1}, {"precision": "fp7"}, {"devices": "gpu9"}, {"reads": []}):
        with pytest.raises(ParameterTypeError, match=next(iter(wrong))):
            flow.validate_parameters(good | wrong)
