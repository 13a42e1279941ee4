"""What the environment of a Prefect worker does for the runs of its deployments: names, the mail address, proxies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read_record

from .deployment_runs import deploy_predict, ended_run, start, worker_of
from .processes import ROOT, files_with
from .recording_proxy import READS, Proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the sum of all waits on a busy machine
]
POOL = "lab-pool"
DEPLOYMENT = "predict/predict"
MAILBOX = "ada.distinctive"  # the part that no program writes in another form
MAIL = f"{MAILBOX}@lab.example"
# The process of a flow run executes this at its start: its downloads come from another address.
OTHER_NCBI = """
import os
if "PREFECT__FLOW_RUN_ID" in os.environ:
    from virnuc_core.reads import remote
    remote.NCBI_ADDRESS = os.environ["ADDRESS_OF_NCBI"]
"""


@pytest.fixture(scope="module")
def environment(server: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a worker for our deployment `predict`."""
    deploy_predict(server, POOL)
    return server


def artifact_keys(flow_run_id: object) -> list[str]:
    """Return the keys of the artifacts of a flow run."""
    run_filter = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=run_filter)
    return [artifact.key for artifact in artifacts if artifact.key is not None]


@pytest.mark.parametrize(("given_name", "expected_name"), [(None, POOL), ("gauss", "gauss")])
def test_in_a_container_a_run_its_artifacts_and_its_record_have_one_name_of_the_machine(
    given_name: str | None,
    expected_name: str,
    tmp_path: Path,
    environment: dict[str, str],
    few_reads: Path,
    models: Path,
) -> None:
    out = tmp_path / "run"
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}  # this is how a container is recognised
    if given_name is not None:
        variables["VIRNUC_HOST"] = given_name
    parameters = {"reads": [str(few_reads)], "out": str(out), "models": str(models)}
    log = tmp_path / "log"
    with worker_of(POOL, environment | variables, log):
        run = ended_run(start(DEPLOYMENT, {**parameters, "devices": "cpu:1"}))
    assert run.state is not None
    assert run.state.name == "Completed", log.read_text()
    assert run.name.endswith(f" · {expected_name}")
    keys = artifact_keys(run.id)
    assert f"stages-few-cpu-1-{expected_name}" in keys
    assert read_record(RunDir(out)).host == expected_name


def test_the_mail_address_of_a_worker_goes_to_ncbi_and_nowhere_else(
    tmp_path: Path, environment: dict[str, str], models: Path, ncbi: tuple[str, list[str]]
) -> None:
    ncbi_address, received_addresses = ncbi
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(OTHER_NCBI)
    out = tmp_path / "run"
    variables = {
        "VIRNUC_EMAIL": MAIL,
        "VIRNUC_PRIVATE_ADDRESSES": "allow",
        "ADDRESS_OF_NCBI": ncbi_address,
        "PYTHONPATH": str(packages),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
    }
    parameters = {"reads": ["ncbi:NC_000001.1"], "out": str(out), "models": str(models)}
    log = tmp_path / "log"
    with worker_of(POOL, environment | variables, log):
        run = ended_run(start(DEPLOYMENT, {**parameters, "devices": "cpu:1"}))
    assert run.state is not None
    assert run.state.name == "Completed", log.read_text()
    assert (out / "prediction_results.txt").is_file()
    assert received_addresses == [MAIL]
    # The server keeps its database, with the log lines and parameters of the run, in its home.
    server_home = Path(environment["PREFECT_HOME"])
    assert files_with("NC_000001.1", server_home), "the parameters are found there"
    assert files_with(MAILBOX, tmp_path, server_home) == []


def variables_of_the_unit_file() -> dict[str, str]:
    """Return the variables for proxies that our systemd unit sets for a worker."""
    text = (ROOT / "deployments" / "virnuc-worker@.service").read_text(encoding="utf-8")
    variables = {}
    for line in text.splitlines():
        setting, _, assignment = line.partition("=")
        name, _, value = assignment.partition("=")
        if setting == "Environment" and name.lower() == "no_proxy":
            variables[name] = value
    return variables


def test_a_worker_behind_a_proxy_reaches_the_server_of_its_machine_and_fetches_reads(
    tmp_path: Path, environment: dict[str, str], models: Path, proxy: Proxy
) -> None:
    """Prefect's worker reads the variables before any code of ours runs."""
    out = tmp_path / "run"
    parameters = {"reads": [READS], "out": str(out), "models": str(models), "devices": "cpu:1"}
    log = tmp_path / "log"
    variables = proxy.variables | variables_of_the_unit_file()
    with worker_of(POOL, environment | variables, log):
        run = ended_run(start(DEPLOYMENT, parameters))
    assert run.state is not None
    assert run.state.name == "Completed", log.read_text()
    assert proxy.requests == [f"GET {READS} HTTP/1.1"]
    assert (out / "reads.tsv").read_text().count("read1") == 1
