"""A flow that is served goes to the process of its run as bytes."""

import importlib
import re
from pathlib import Path

import pytest

cloudpickle = pytest.importorskip("cloudpickle")
DEPLOYMENTS = Path(__file__).resolve().parents[3] / "prefect.yaml"


def test_every_deployed_flow_can_be_served() -> None:
    entrypoints = re.findall(
        r"entrypoint: ([\w.]+)\.(\w+)", DEPLOYMENTS.read_text(encoding="utf-8")
    )
    assert len({*entrypoints}) > 5
    for module, flow in {*entrypoints}:
        assert cloudpickle.dumps(getattr(importlib.import_module(module), flow))
