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
import pynvml
import pytest
import torch
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from tests.fake_gpus import USUAL_DRIVER, FakeGpus
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
from virnuc.flows.cli.doctor_server import (
    check_access,
    check_prefect_server,
    check_scheduler,
    check_worker_proxy,
)
from virnuc_core import gpus
from virnuc_core.answer import RANDOM_NOTE
from virnuc_core.config import Devices
from virnuc_core.encoders.verify import Check
from virnuc_core.engine.devices import auto_remark
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
    *lines, _, last_line = capsys.readouterr().out.splitlines()
    details = {}
    for line in lines:
        verdict, _, check = line.partition("  ")
        if verdict == "ok":
            name, _, detail = check.strip().partition(": ")
            details[name] = detail
    assert {"file locks", "commits", "Prefect server", "weights"} <= set(details)
    (compute,) = [name for name in details if name.startswith("compute cpu-core-")]
    assert "equals the float32 reference" in details[compute]
    assert [line for line in lines if line.startswith("warn  trust: ") and RANDOM_NOTE in line]
    assert last_line.startswith("This machine is sound: 0 failed")


def test_what_is_wrong_is_named_one_line_a_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert doctor(out=tmp_path, models=tmp_path / "absent", compute=False) == 1
    output = capsys.readouterr()
    lines = output.out.splitlines()
    server, weights = [line for line in lines if line.startswith("FAIL")]
    assert server.startswith("FAIL  Prefect server: nothing answers at http://127.0.0.1:9/api: ")
    assert weights.startswith("FAIL  weights: ")
    assert "absent" in weights
    assert lines[-1].startswith("This machine is not sound: 2 failed")
    assert output.err == ""


def test_packages_that_are_compiled_at_each_start_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "torch.pyc"
    monkeypatch.setattr("torch.__spec__.cached", str(compiled))
    _, bytecode = check_packages()
    assert bytecode.verdict == "warn"
    folder = Path(torch.__file__).parent.parent
    assert f"python -m compileall -q {folder}" in bytecode.detail
    compiled.touch()
    _, bytecode = check_packages()
    assert bytecode.verdict == "ok"


class Server(BaseHTTPRequestHandler):
    """What the doctor asks of a Prefect server; with a password when `secret` is one."""

    secret = ""

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        password = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        is_accepted = not self.secret or password == self.secret
        self.send_response(200 if is_accepted else 401)
        self.end_headers()
        self.wfile.write(json.dumps(metadata.version("prefect")).encode())

    def do_POST(self) -> None:
        n_bytes = int(self.headers["Content-Length"])
        request = json.loads(self.rfile.read(n_bytes))
        answer = self.runs if "flow_runs" in request else self.deployed
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    deployed: ClassVar[list[dict[str, Any]]] = []
    runs = 0  # planned, and late

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve(host: str = "127.0.0.1", **attributes: Any) -> Iterator[str]:
    """Yield the address of a `Server` with these attributes."""
    with HTTPServer((host, 0), type("Handler", (Server,), attributes)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("active", "runs", "verdict", "detail"),
    [
        (True, 0, "fail", "no run of nightly is planned"),
        (True, 3, "warn", "3 runs are late"),
        (False, 0, "ok", "0 active schedules"),
    ],
)
def test_a_scheduler_that_plans_nothing_fails_and_late_runs_are_a_warning(
    active: bool, runs: int, verdict: str, detail: str
) -> None:
    nightly = {"id": "1", "name": "nightly", "paused": False, "schedules": [{"active": active}]}
    with (
        serve(deployed=[nightly], runs=runs) as address,
        httpx.Client(base_url=address) as client,
    ):
        check = check_scheduler(client)
    assert check.verdict == verdict
    assert detail in check.detail


@pytest.mark.parametrize(
    ("host", "secret", "own_secret", "roots", "verdict", "detail"),
    [
        ("0.0.0.0", "", None, "/srv", "warn", "anybody who reaches 0.0.0.0 port"),
        ("127.0.0.1", "", None, "/srv", "ok", "open to this machine only, no password"),
        ("0.0.0.0", "a:b", "a:b", "/srv", "ok", "open to this machine only, a password"),
        ("127.0.0.1", "", None, "", "warn", "set VIRNUC_ROOTS"),
        ("127.0.0.1", "a:b", "a:c", "/srv", "fail", "wants another PREFECT_API_AUTH_STRING"),
    ],
)
def test_a_server_that_others_can_use_is_a_warning(
    host: str,
    secret: str,
    own_secret: str | None,
    roots: str,
    verdict: str,
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VIRNUC_ROOTS", roots)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with (
        serve(host, secret=secret) as address,
        temporary_settings(updates={PREFECT_API_URL: address, PREFECT_API_AUTH_STRING: own_secret}),
    ):
        *_, access = run_checks({"Prefect server": check_prefect_server()})
    assert access.verdict == verdict
    assert detail in access.detail


@pytest.mark.parametrize(
    ("url", "no_proxy", "expected"),
    [
        ("http://127.0.0.1:4200/api", "", ["warn"]),
        ("http://127.0.0.1:4200/api", "127.0.0.1", ["ok"]),
        ("http://prefect.example.org/api", "", []),
        (None, "", []),
    ],
)
def test_a_proxy_that_workers_would_ask_for_the_server_of_this_machine_is_a_warning(
    url: str | None, no_proxy: str, expected: list[str]
) -> None:
    environment = {"http_proxy": "http://127.0.0.1:9", "no_proxy": no_proxy}
    with temporary_settings(updates={PREFECT_API_URL: url}):
        checks = list(check_worker_proxy(environment))
    assert [check.verdict for check in checks] == expected
    if expected == ["warn"]:
        assert "set no_proxy=127.0.0.1,localhost,::1" in checks[0].detail
        assert "http_proxy" in checks[0].detail


def test_workers_that_run_as_root_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    check = check_access(httpx.URL("http://127.0.0.1:9/api"), answers_anybody=False)
    assert check.verdict == "warn"
    assert "run as root" in check.detail


def test_a_server_on_another_machine_without_password_and_encryption_is_a_warning() -> None:
    check = check_access(httpx.URL("http://10.0.0.1:4200/api"), answers_anybody=True)
    assert check.verdict == "warn"
    assert "10.0.0.1 port 4200" in check.detail
    assert "TLS" in check.detail


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
    [check] = run_checks({"file locks": check_file_system(Path("/proc/nowhere"))})
    assert (check.name, check.verdict) == ("file locks", "fail")
    assert "/proc" in check.detail


def test_locks_that_do_not_exclude_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("virnuc_core.lease.Lease.take", lambda *_, **__: "")
    monkeypatch.setattr("virnuc_core.lease.Lease.check_held", lambda _: True)
    # A busy machine may take longer than usual to write a file.
    monkeypatch.setattr(doctor_checks, "FSYNC_WARN_S", 60.0)
    locks, commits = check_file_system(tmp_path)
    assert (locks.verdict, commits.verdict) == ("fail", "ok")


REFERENCE = np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.0, "ok"), (1e-6, "ok"), (1e-3, "fail"), (np.nan, "fail")]
)
def test_a_device_that_computes_other_scores_fails(error: float, verdict: str) -> None:
    scores = (REFERENCE + error).astype(np.float32)
    check = check_scores(CORE, REFERENCE, scores)
    assert check.verdict == verdict
    assert ("bit for bit" in check.detail) is (error == 0.0)


def test_devices_of_one_model_must_give_equal_bytes() -> None:
    other_scores = REFERENCE + np.float32(1e-3)
    [check] = check_agreement({CORE: REFERENCE, OTHER: other_scores})
    assert check.verdict == "fail"
    [check] = check_agreement({CORE: REFERENCE, OTHER: REFERENCE})
    assert check.verdict == "ok"
    assert list(check_agreement({CORE: REFERENCE})) == []


def test_a_driver_that_does_not_work_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    (check,) = check_driver_and_gpus()
    assert (check.name, check.verdict) == ("driver", "fail")
    assert "restart the machine" in check.detail


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "verdict"),
    [(None, None, "ok"), (None, "12.8", "warn"), (USUAL_DRIVER, None, "warn")],
)
def test_the_reason_why_there_is_no_gpu_is_told_as_runs_tell_it(
    driver: gpus.Driver | None,
    torch_cuda: str | None,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absence = "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this machine"
    fake = FakeGpus(driver=driver, torch_cuda=torch_cuda, absence=absence)
    monkeypatch.setattr(gpus, "NVML", fake)
    (check,) = check_driver_and_gpus()
    assert (check.name, check.verdict) == ("driver", verdict)
    assert check.detail == f"{absence}; virnuc computes on CPU cores"
    assert absence in auto_remark(Devices.parse("auto"))


def test_a_torch_without_cuda_beside_a_gpu_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpus([GPU], occupancies={GPU.uuid: occupancy(79)}, torch_cuda=None)
    monkeypatch.setattr(gpus, "NVML", fake)
    driver, _ = check_driver_and_gpus()
    assert (driver.name, driver.verdict) == ("driver", "fail")
    assert "built without CUDA" in driver.detail
    assert "install a torch with CUDA" in driver.detail


class SilentGpus(FakeGpus):
    """GPUs that are listed by a driver that answers no further question about them."""

    def occupancy(self, uuid: str) -> gpus.Occupancy:
        raise gpus.NvmlError(f"{uuid}: GPU is lost")


def test_a_gpu_that_does_not_answer_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVML", SilentGpus([GPU]))
    *_, check = check_driver_and_gpus()
    assert (check.name, check.verdict) == ("cuda:0", "fail")
    assert "GPU is lost" in check.detail


def test_a_driver_with_gpus_that_does_not_tell_its_version_is_a_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeGpus([GPU])
    monkeypatch.setattr(library, "driver", lambda: None)
    monkeypatch.setattr(gpus, "NVML", library)
    (check,) = check_driver_and_gpus()
    assert (check.name, check.verdict) == ("driver", "fail")


@pytest.mark.parametrize(
    ("cuda_starts", "triton_problem", "expected"),
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
    cuda_starts: bool,
    triton_problem: str,
    expected: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stops the driver is reported once, and no compiler is blamed for it."""
    library = FakeGpus([GPU], occupancies={GPU.uuid: occupancy(79)})
    monkeypatch.setattr(gpus, "NVML", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_starts)
    monkeypatch.setattr(doctor_checks, "triton_problem", lambda: triton_problem)
    checks = list(check_driver_and_gpus())
    assert "driver 570.86.15, which knows CUDA up to 12.8" in checks[0].detail
    assert [(check.verdict, check.name) for check in checks] == expected
    for check in checks:
        if check.verdict == "fail" and check.name == "kernels":
            assert check.detail == f"they need Triton, {triton_problem}"


def test_each_check_is_named_before_it_runs() -> None:
    events = []

    def slow_check() -> Iterator[Check]:
        events.append("runs")
        yield Check("disk", "ok", "there is room")

    for check in run_checks({"disk": slow_check()}, on_start=events.append):
        events.append(check.detail)
    assert events[:3] == ["disk", "runs", "there is room"]
