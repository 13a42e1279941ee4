"""The name of a machine lasts, also where the host name changes every night."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from virnuc.flows import run_names
from virnuc.tasks.artifacts import host_key
from virnuc_core import machine_name as naming
from virnuc_core.runfiles import RunRecord, new_record


def test_the_given_name_stands_in_records_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(naming.HOST, raising=False)
    assert new_record(RunRecord, [], fingerprints={}).host == platform.node()
    monkeypatch.setenv(naming.HOST, "Gauss 7")
    assert new_record(RunRecord, [], fingerprints={}).host == "Gauss 7"
    assert host_key("report-ci") == "report-ci-gauss-7"
    monkeypatch.setenv(naming.HOST, " ")
    assert new_record(RunRecord, [], fingerprints={}).host == platform.node()


@pytest.mark.parametrize(
    ("in_container", "pool", "given", "expected"),
    [
        (True, "gpu-pool", None, "gpu-pool"),
        (True, "gpu-pool", "gauss", "gauss"),
        (True, "gpu-pool", " ", "gpu-pool"),
        (False, "gpu-pool", None, None),
        (True, None, None, None),
    ],
    ids=[
        "container",
        "container with a name",
        "container with a blank name",
        "no container",
        "no pool",
    ],
)
def test_a_container_is_named_by_its_work_pool(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    in_container: bool,
    pool: str | None,
    given: str | None,
    expected: str | None,
) -> None:
    marker = tmp_path / ".dockerenv"
    if in_container:
        marker.touch()
    monkeypatch.setattr(naming, "CONTAINER_FILES", (marker,))
    monkeypatch.delenv(naming.KUBERNETES, raising=False)
    environment = {} if given is None else {naming.HOST: given}
    monkeypatch.setattr(run_names, "os", SimpleNamespace(environ=environment))
    context = SimpleNamespace(flow_run=SimpleNamespace(work_pool_name=pool))
    monkeypatch.setattr(run_names, "FlowRunContext", SimpleNamespace(get=lambda: context))
    run_names.name_machine_by_pool()
    assert environment.get(naming.HOST) == expected


def test_kubernetes_is_a_container() -> None:
    assert naming.is_container({naming.KUBERNETES: "10.0.0.1"})
