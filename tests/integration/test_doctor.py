"""`virnuc doctor`: what it says of a sound machine, and of one that is not."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import torch
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from tests.fake_gpus import FakeGpus
from virnuc.flows.cli import doctor_checks
from virnuc.flows.cli.doctor import doctor, run_checks
from virnuc.flows.cli.doctor_checks import (
    GIB,
    check_disk,
    check_driver_and_gpus,
    check_file_system,
    check_gpu,
    check_packages,
)
from virnuc.flows.cli.doctor_compute import check_agreement, check_scores
from virnuc.flows.cli.doctor_server import check_access, check_prefect_server, check_scheduler
from virnuc_core import gpus
from virnuc_core.gpus import Gpu, Occupancy
from virnuc_core.runfiles import Device

CORE = Device(id="cpu-core-0", kind="cpu", name="a core", core=0)
OTHER = Device(id="cpu-core-1", kind="cpu", name="a core", core=1)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs would use the embedded server, and the settings of this process stay as they are."""
    monkeypatch.setattr("virnuc.flows.cli.doctor.prepare_prefect", lambda: None)
    with temporary_settings(
        updates={PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}
    ):
        yield


def test_a_sound_machine_is_said_to_be(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(out=tmp_path, models=models, devices="cpu:1") == 0
    *lines, _, last = capsys.readouterr().out.splitlines()
    found = {
        name: detail
        for verdict, _, rest in (line.partition("  ") for line in lines)
        if verdict == "ok"
        for name, _, detail in [rest.strip().partition(": ")]
    }
    assert {"file locks", "commits", "Prefect server", "weights"} <= set(found)
    computed = next(
        detail for name, detail in found.items() if name.startswith("compute cpu-core-")
    )
    assert "equals the float32 reference" in computed
    assert last.startswith("This machine is sound: 0 failed")


def test_what_is_wrong_is_named_one_line_a_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert doctor(out=tmp_path, models=tmp_path / "absent", compute=False) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert any(
        line.startswith("FAIL  Prefect server: http://127.0.0.1:9/api does not answer")
        for line in lines
    )
    assert any(line.startswith("FAIL  weights: ") and "absent" in line for line in lines)
    assert lines[-1].startswith("This machine is not sound: 2 failed")
    assert said.err == ""


def test_packages_that_are_compiled_at_each_start_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(kept: Path) -> tuple[str, str]:
        monkeypatch.setattr("torch.__spec__.cached", str(kept))
        found = [*check_packages()][1]
        return found.verdict, found.detail

    kept = tmp_path / "torch.pyc"
    said, how = verdict(kept)
    assert said == "warn"
    assert f"python -m compileall -q {Path(torch.__file__).parent.parent}" in how
    kept.touch()
    assert verdict(kept)[0] == "ok"


class Server(BaseHTTPRequestHandler):
    """What the doctor asks of a Prefect server; with a password when `secret` is one."""

    secret = ""

    def do_GET(self) -> None:
        told = base64.b64decode(
            self.headers.get("Authorization", "").removeprefix("Basic ")
        ).decode()
        self.send_response(200 if told == self.secret or not self.secret else 401)
        self.end_headers()
        self.wfile.write(json.dumps(metadata.version("prefect")).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(self.runs if "flow_runs" in asked else self.deployed)

    def answer(self, told: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    deployed: ClassVar[list[dict[str, Any]]] = []
    runs = 0  # planned, and late

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def a_server(bound: str = "127.0.0.1", **kind: Any) -> Iterator[str]:
    """The address of a server that answers so."""
    with HTTPServer((bound, 0), type("Kind", (Server,), kind)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("active", "runs", "verdict", "said"),
    [
        (True, 0, "fail", "no run of nightly is planned"),
        (True, 3, "warn", "3 runs are late"),
        (False, 0, "ok", "0 active schedules"),
    ],
)
def test_a_scheduler_that_plans_nothing_fails_and_late_runs_are_a_warning(
    active: bool, runs: int, verdict: str, said: str
) -> None:
    nightly = {"id": "1", "name": "nightly", "paused": False, "schedules": [{"active": active}]}
    with (
        a_server(deployed=[nightly], runs=runs) as address,
        httpx.Client(base_url=address) as client,
    ):
        found = check_scheduler(client)
    assert (found.verdict, said in found.detail) == (verdict, True)


@pytest.mark.parametrize(
    ("bound", "secret", "own", "roots", "said"),
    [
        ("0.0.0.0", "", None, "/srv", "anybody who reaches 0.0.0.0 port"),
        ("127.0.0.1", "", None, "/srv", "open to this machine only, no password"),
        ("0.0.0.0", "a:b", "a:b", "/srv", "open to this machine only, a password"),
        ("127.0.0.1", "", None, "", "set VIRNUC_ROOTS"),
        ("127.0.0.1", "a:b", "a:c", "/srv", "wants another PREFECT_API_AUTH_STRING"),
    ],
)
def test_an_open_door_is_a_warning(
    bound: str, secret: str, own: str | None, roots: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRNUC_ROOTS", roots)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with (
        a_server(bound, secret=secret) as address,
        temporary_settings(updates={PREFECT_API_URL: address, PREFECT_API_AUTH_STRING: own}),
    ):
        *_, found = run_checks({"Prefect server": check_prefect_server()})
    assert said in found.detail
    assert found.verdict == {"run": "warn", "any": "warn", "ope": "ok"}.get(
        found.detail[:3], "fail"
    )
    if own == secret:
        monkeypatch.setattr("os.geteuid", lambda: 0)
        root = check_access(httpx.URL("http://127.0.0.1:9/api"), answers_anybody=False)
        far = check_access(httpx.URL("http://10.0.0.1:4200/api"), answers_anybody=True)
        assert "run as root" in root.detail
        assert "10.0.0.1 port 4200" in far.detail
        assert "TLS" in far.detail


GPU = Gpu("GPU-of-no-run", "a GPU")


def occupancy(free_gib: int, process_ids: tuple[int, ...] = ()) -> Occupancy:
    """An idle GPU of 80 GiB."""
    return Occupancy(80 * GIB, free_gib * GIB, 0.0, process_ids)


@pytest.mark.parametrize(
    ("seen", "verdict", "detail"),
    [
        (occupancy(79), "ok", "a GPU, 79.0 of 80.0 GiB free, utilisation 0 %"),
        (occupancy(79, (4711,)), "warn", "1 other processes compute here (4711)"),
        (occupancy(79, (os.getpid(),)), "ok", "79.0 of 80.0 GiB free"),
        (occupancy(3), "warn", "wants 16 GiB"),
        (
            replace(occupancy(79), utilisation_percent=None),
            "ok",
            "utilisation N/A %",
        ),
    ],
)
def test_a_gpu_that_is_busy_or_full_is_a_warning(
    seen: Occupancy, verdict: str, detail: str
) -> None:
    check = check_gpu("cuda:0", GPU, seen)
    assert check.verdict == verdict
    assert detail in check.detail


def test_a_full_disk_and_a_folder_nobody_may_write_in_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=GIB // 2))
    assert next(check_disk(tmp_path)).verdict == "fail"
    [found] = run_checks({"file locks": check_file_system(Path("/proc/nowhere"))})
    assert (found.name, found.verdict) == ("file locks", "fail")
    assert "/proc" in found.detail


def test_locks_that_do_not_exclude_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("virnuc_core.lease.Lease.take", lambda *_, **__: "")
    monkeypatch.setattr("virnuc_core.lease.Lease.held", lambda _: True)
    locks, commits = check_file_system(tmp_path)
    assert (locks.verdict, commits.verdict) == ("fail", "ok")


def test_a_device_that_computes_something_else_fails() -> None:
    reference = np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)
    assert check_scores(CORE, reference, reference.copy()).verdict == "ok"
    assert "bit for bit" in check_scores(CORE, reference, reference.copy()).detail
    near, far, lost = reference + 1e-6, reference + 1e-3, np.full_like(reference, np.nan)
    assert check_scores(CORE, reference, near.astype(np.float32)).verdict == "ok"
    assert check_scores(CORE, reference, far.astype(np.float32)).verdict == "fail"
    assert check_scores(CORE, reference, lost).verdict == "fail"
    assert [f.verdict for f in check_agreement({CORE: reference, OTHER: far})] == ["fail"]
    assert [f.verdict for f in check_agreement({CORE: reference, OTHER: reference})] == ["ok"]
    assert list(check_agreement({CORE: reference})) == []


@pytest.mark.parametrize(
    ("starts", "missing", "said"),
    [
        (True, "", [("ok", "driver"), ("ok", "kernels"), ("ok", "cuda:0")]),
        (
            True,
            "which cannot start (no gcc)",
            [("ok", "driver"), ("fail", "kernels"), ("ok", "cuda:0")],
        ),
        (False, "which cannot start (no driver)", [("fail", "driver"), ("ok", "cuda:0")]),
    ],
)
def test_a_gpu_on_which_our_kernels_cannot_run_is_not_sound(
    starts: bool, missing: str, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stops the driver is told once, and no compiler is blamed for it."""
    library = FakeGpus([GPU], occupancies={GPU.uuid: occupancy(79)})
    monkeypatch.setattr(gpus, "NVML", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: starts)
    monkeypatch.setattr(doctor_checks, "triton_problem", lambda: missing)
    found = [*check_driver_and_gpus()]
    assert "driver 570.86.15, which knows CUDA up to 12.8" in found[0].detail
    assert [(check.verdict, check.name) for check in found] == said
    assert (
        not missing
        or not starts
        or "they need Triton, which cannot start (no gcc)" in found[1].detail
    )
