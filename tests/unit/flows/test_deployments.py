"""deployments/prefect.yaml against the flows it names."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import uuid4

import pytest
import yaml
from prefect.events.actions import SendNotification
from prefect.server.utilities.user_templates import (
    render_user_template_sync,
    validate_user_template,
)
from prefect.settings import PREFECT_API_URL, temporary_settings

from virnuc.deployments import alerts

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
FILE = yaml.safe_load(
    TEXT.replace("{{ $VIRNUC_POOL }}", "gpu").replace("{{ $VIRNUC_PROFILE }}", "phase10-1m")
)
DEPLOYMENTS: list[dict[str, Any]] = FILE["deployments"]


def flow_of(entrypoint: str) -> Any:
    module, _, name = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{d['entrypoint']}-{d['name']}")
def test_a_deployment_names_a_flow_and_gives_it_parameters_it_takes(
    deployment: dict[str, Any],
) -> None:
    flow = flow_of(deployment["entrypoint"])
    known_parameters = flow.parameters.properties
    assert set(deployment["parameters"]) <= set(known_parameters)
    assert all(properties.get("description") for properties in known_parameters.values())
    if deployment.get("schedules"):
        assert set(flow.parameters.required or ()) <= set(deployment["parameters"])
        flow.validate_parameters(deployment["parameters"])


def test_every_flow_is_deployed_and_named_where_people_look() -> None:
    flows = {
        path.stem
        for path in (ROOT / "flows" / "prefect_flows").glob("*.py")
        if "@flow(" in path.read_text(encoding="utf-8")
    }
    deployed_flows = {d["entrypoint"].split(".")[3] for d in DEPLOYMENTS}
    assert deployed_flows == flows
    guide = (ROOT / "deployments" / "README.md").read_text(encoding="utf-8")
    for deployment in DEPLOYMENTS:
        assert f"`{flow_of(deployment['entrypoint']).name}/{deployment['name']}`" in guide


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: f"{d['entrypoint']}-{d['name']}")
def test_a_name_that_is_no_parameter_is_refused_when_a_run_is_created(
    deployment: dict[str, Any],
) -> None:
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import ValidationError, validate

    schema = parameter_schema(flow_of(deployment["entrypoint"])).model_dump(
        exclude_unset=True
    )  # as it is deployed
    validate(deployment["parameters"], schema, raise_on_error=True, ignore_required=True)
    with pytest.raises(ValidationError, match="unknown"):
        validate(
            deployment["parameters"] | {"unknown": 1},
            schema,
            raise_on_error=True,
            ignore_required=True,
        )


def test_a_value_the_form_must_refuse_is_refused() -> None:
    from prefect.exceptions import ParameterTypeError

    flow = flow_of("virnuc.flows.prefect_flows.predict.predict")
    good = {"reads": ["a.fa"], "out": "o", "models": "m"}
    flow.validate_parameters(good)
    for wrong in ({"stage_workers": -1}, {"precision": "fp7"}, {"devices": "gpu9"}):
        with pytest.raises(ParameterTypeError, match=next(iter(wrong))):
            flow.validate_parameters(good | wrong)


@pytest.mark.parametrize("kind", ["kubernetes", "docker"])
def test_a_job_template_uses_the_variables_it_declares_and_no_other(kind: str) -> None:
    template = json.loads((ROOT / "deployments" / f"{kind}-job.json").read_text(encoding="utf-8"))
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


async def _dry_run(kind: str, given: dict[str, Any]) -> Any:
    """The job that Prefect's own worker would ask for."""
    worker = pytest.importorskip(f"prefect_{kind}.worker", reason=f"pip install prefect-{kind}")
    template = json.loads((ROOT / "deployments" / f"{kind}-job.json").read_text(encoding="utf-8"))
    configuration = getattr(worker, f"{kind.title()}WorkerJobConfiguration")
    return await configuration.from_template_and_values(
        template, given, client=AsyncMock()
    )  # no blocks: nobody is asked


def test_kubernetes_gives_the_pod_its_gpus_and_its_volume() -> None:
    manifest = asyncio.run(_dry_run("kubernetes", {"claim": "reads", "gpus": 2}))
    pod = manifest.job_manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "reads"


def test_docker_gives_the_container_its_gpus() -> None:
    settings = asyncio.run(_dry_run("docker", {"gpus": 2}))
    assert settings.container_create_kwargs["device_requests"][0]["count"] == 2
    assert settings.volumes == ["/srv/virnuc:/srv/virnuc"]


def test_alerts_are_refused_if_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect would start a server of its own, which answers every user of the machine."""
    monkeypatch.setattr("sys.argv", ["alerts", "slack-webhook/oncall"])
    monkeypatch.setattr("virnuc.deployments.alerts.get_client", None)
    no_server = temporary_settings(restore_defaults={PREFECT_API_URL})
    with no_server, pytest.raises(SystemExit, match="name it with PREFECT_API_URL"):
        alerts.main()


# What another user of an inbox, or whoever named a sample, may put into a name.
MARKUP = (
    "<https://evil.example|your report>",  # a link of Slack
    "<!channel> <@U1>",  # mentions of Slack
    "[report](https://evil.example)",  # a link of Teams
    "![](https://evil.example/seen.png)",
    "<a href='https://evil.example'>report</a> &lt;",
    "https://evil.example www.evil.example WWW.evil.example mailto:a@evil.example",
    "*bold* ~struck~ `code` {{ secrets.x }}",
    "two\nlines\r\\",
)


@pytest.mark.parametrize("name", MARKUP)
def test_a_name_in_a_notification_is_plain_text(name: str) -> None:
    event = SimpleNamespace(resource=SimpleNamespace(name=name), payload=defaultdict(lambda: name))
    run = SimpleNamespace(name=name, state=SimpleNamespace(message=name), expected_start_time=name)
    for automation in alerts._automations(uuid4(), pause=False):
        action = automation.actions[0]
        assert isinstance(action, SendNotification)
        for template in (action.subject, action.body):
            validate_user_template(template)
            text = render_user_template_sync(template, {"event": event, "flow_run": run})
            assert not text.startswith("Failed to render"), text
            for markup in ("<", ">", "&", "[", "]", "{", "}", "@", "*", "~", "`", "//", "\n", "\\"):
                assert markup not in text
            assert "www." not in text.lower()


def test_an_ordinary_name_stays_as_it_is_in_a_notification() -> None:
    template = alerts.with_plain_values("virnuc: {{ event.resource.name }} failed")
    event = SimpleNamespace(resource=SimpleNamespace(name="run_7/sample-1_R1.fastq.gz (new)"))
    text = render_user_template_sync(template, {"event": event})
    assert text == "virnuc: run_7/sample-1_R1.fastq.gz (new) failed"
