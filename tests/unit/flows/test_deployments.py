"""prefect.yaml against the flows it names."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
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
from prefect.settings import PREFECT_API_URL, PREFECT_DEFAULT_WORK_POOL_NAME, temporary_settings
from prefect.utilities.importtools import import_object
from prefect.utilities.templating import apply_values, find_placeholders

from virnuc.deployments import alerts

ROOT = Path(__file__).resolve().parents[3]
FILE = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
PATHS = {
    "VIRNUC_MODELS": "/srv/models",
    "VIRNUC_READS": "/srv/proof.fastq.gz",
    "VIRNUC_INBOX": "/srv/inbox",
    "VIRNUC_OUT": "/srv/results",
}


def deployed(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Return the deployments as Prefect fills them in: the environment first, then its build step."""
    (step,) = FILE["build"]
    ((function, keywords),) = step.items()
    variables = {name: value for name, value in environment.items() if value}
    with pytest.MonkeyPatch.context() as patch:
        for name in (*PATHS, "VIRNUC_PROFILE"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        outputs = {keywords["id"]: import_object(function)()}
        with_environment = apply_values(FILE["deployments"], dict(os.environ), remove_notset=False)
    filled_in: list[dict[str, Any]] = apply_values(with_environment, outputs)
    return filled_in


DEPLOYMENTS = deployed(PATHS)


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


def test_nothing_is_left_to_fill_in_whatever_is_set() -> None:
    for environment in (PATHS, {}, {"VIRNUC_MODELS": " "}):
        for deployment in deployed(environment):
            assert find_placeholders(deployment) == set()
            assert deployment["description"].strip()


def test_with_all_paths_set_the_schedules_are_on_and_use_them() -> None:
    by_name = {deployment["name"]: deployment for deployment in deployed(PATHS)}
    nightly = by_name["nightly-gpu"]
    assert nightly["schedules"][0]["active"] is True
    assert nightly["parameters"]["reads"] == ["/srv/proof.fastq.gz"]
    assert nightly["parameters"]["out"] == "/srv/results/nights"
    assert nightly["parameters"]["profile"] == "phase10-1m"
    assert by_name["inbox"]["schedules"][0]["active"] is True
    assert by_name["inbox"]["parameters"]["inbox"] == "/srv/inbox"
    assert not any("**" in deployment["description"] for deployment in by_name.values())


@pytest.mark.parametrize(
    ("name", "needed_variables"),
    [
        ("nightly-gpu", ("VIRNUC_MODELS", "VIRNUC_READS", "VIRNUC_OUT")),
        ("inbox", ("VIRNUC_MODELS", "VIRNUC_INBOX", "VIRNUC_OUT")),
    ],
)
def test_a_schedule_is_off_without_any_one_of_its_paths_and_says_which_is_missing(
    name: str, needed_variables: tuple[str, ...]
) -> None:
    for missing in needed_variables:
        deployments = deployed(PATHS | {missing: ""})
        deployment = next(item for item in deployments if item["name"] == name)
        assert deployment["schedules"][0]["active"] is False
        note = f"**Off until you set {missing} and deploy again.** "
        assert deployment["description"].startswith(note)
    nothing_set = next(item for item in deployed({}) if item["name"] == name)
    assert ", ".join(needed_variables) in nothing_set["description"]


def test_a_deployment_without_models_says_so_first() -> None:
    for deployment in deployed(PATHS | {"VIRNUC_MODELS": ""}):
        assert deployment["parameters"]["models"] == "not set: VIRNUC_MODELS"
        assert "VIRNUC_MODELS" in deployment["description"].partition("** ")[0]


def test_the_nightly_of_another_class_of_machines_has_its_name_and_profile() -> None:
    with temporary_settings({PREFECT_DEFAULT_WORK_POOL_NAME: "h200"}):
        nightly = deployed(PATHS | {"VIRNUC_PROFILE": "h200-1m"})[0]
    assert nightly["name"] == "nightly-h200"
    assert nightly["parameters"]["profile"] == "h200-1m"
    # The pool itself is the setting's, too, if no deployment names one.
    assert not any("name" in deployment["work_pool"] for deployment in FILE["deployments"])


def test_tools_are_tagged_and_listed_after_the_daily_work() -> None:
    names_by_tag: dict[bool, list[str]] = {True: [], False: []}
    for deployment in DEPLOYMENTS:
        names_by_tag["workbench" in deployment["tags"]].append(deployment["name"])
    tools, daily_names = names_by_tag[True], names_by_tag[False]
    assert tools == ["workbench-overhead", "workbench-profile", "workbench-tune"]
    # The UI sorts deployments by name.
    assert sorted([*tools, *daily_names])[-len(tools) :] == tools
    assert all("virnuc" in deployment["tags"] for deployment in DEPLOYMENTS)


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
