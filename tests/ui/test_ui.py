"""The Prefect UI in a real browser: a form started, a verdict read, a run approved, a run cancelled.

Screenshots are kept in `screenshots/`; look at them when something about the UI was changed. With
VIRNUC_PICTURES=docs/pictures those of the documentation are drawn anew. VIRNUC_PICTURES_OUT, a new
folder such as /srv/virnuc/results/lung, then takes the results, because the pictures show its path.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.integration.processes import PATIENCE_S, ask_server, committed, gone, reserved_port
from tests.process_lookup import family_of, kill_all, running_with
from virnuc.tasks.artifacts import host_key
from virnuc_core.encoders.convert import init_random
from virnuc_core.profiles import QUESTIONS
from virnuc_core.reads.simulate import SimulateSpec, simulate

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install -e '.[ui]', or make test-ui"
)

ROOT = Path(__file__).resolve().parents[2]
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
SHOTS = ROOT / "screenshots"
PICTURES = {
    "0-deployments": "deployments",
    "0-form-of-predict": "form",
    "1-form-refused": "refused",
    "3-approval-form": "approval",
    "4-completed": "run",
    "6-criteria": "criteria",
}
BLOCK = (
    "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block; "
    "Block(name='oncall', url='http://127.0.0.1:9/nobody').save('oncall')"
)
BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.ui,
    pytest.mark.timeout(900),  # the sum of all waits on a busy machine
    pytest.mark.skipif(BROWSER is None, reason="no chromium here; see make test-ui"),
]


@dataclass(frozen=True)
class Server:
    """A server with its UI, a worker and the deployments."""

    url: str
    host: psutil.Process  # the worker
    environment: dict[str, str]  # of commands that shall talk to it

    def ask(self, path: str, **body: Any) -> Any:
        """POST to the API."""
        return ask_server("POST", f"{self.url}/api/{path}", json=body)

    def deployment(self, name: str) -> str:
        """Id of a deployment."""
        ids = [d["id"] for d in self.ask("deployments/filter") if d["name"] == name]
        assert len(ids) == 1
        return str(ids[0])

    def artifact(self, key: str) -> str:
        """Id of the newest version of an artifact."""
        return str(
            self.ask("artifacts/filter", artifacts={"key": {"any_": [key]}}, sort="CREATED_DESC")[
                0
            ]["id"]
        )

    def run(self, deployment: str) -> dict[str, Any] | None:
        """The newest run of a deployment; None before there is one."""
        answer = self.ask(
            "flow_runs/filter",
            flow_runs={"deployment_id": {"any_": [deployment]}},
            sort="EXPECTED_START_TIME_DESC",
        )
        return dict(answer[0]) if answer else None

    def wait(self, deployment: str, *names: str) -> dict[str, Any]:
        """The newest run, once its state bears one of the names."""
        deadline = time.monotonic() + PATIENCE_S
        while (run := self.run(deployment)) is None or run["state_name"] not in names:
            assert time.monotonic() < deadline, (
                f"waited {PATIENCE_S} s for {names}; the run is {run and run['state']}"
            )
            time.sleep(0.5)
        return run


def wait_until(truth: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, server_port: int) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prefect")
    url = f"http://127.0.0.1:{server_port}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    } | {
        "PREFECT_HOME": str(folder),
        # In a container, the work pool would name the machine in keys of artifacts.
        "VIRNUC_HOST": platform.node(),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def background(*words: str) -> psutil.Process:
        with (folder / f"{words[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                [*PREFECT, *words], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        processes.append(process)
        return psutil.Process(process.pid)

    def healthy() -> bool:
        try:
            return httpx.get(f"{url}/api/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        background("server", "start", "--port", str(server_port))
        wait_until(healthy)
        subprocess.run(
            ["make", "deploy", "MODELS=/srv/virnuc/models"],
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        yield Server(url, background("worker", "start", "-p", "gpu", "--limit", "2"), environment)
    finally:
        for process in reversed(processes):
            kill_all(family_of(process.pid))
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    SHOTS.mkdir(exist_ok=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(120_000)  # milliseconds, on a busy machine
        yield page
        browser.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "models"
    init_random(folder, seed=1)
    return folder


def field(page: Any, name: str) -> Any:
    """The part of the form that belongs to a parameter."""
    return (
        page.locator(".schema-form-property")
        .filter(has=page.get_by_text(name, exact=False))
        .filter(has_text=name)
        .first
    )


def fill(page: Any, name: str, text: str) -> None:
    field(page, name).locator("textarea, input").first.fill(text)


def choose_first(page: Any, name: str, word: str) -> None:
    """Choose the first word of a list."""
    field(page, name).locator(".p-select-button__control").focus()
    page.keyboard.press("ArrowDown")  # opens the choice on its first word
    page.locator(".p-select-option--highlighted", has_text=word).first.wait_for()
    page.keyboard.press("Enter")


def shot(page: Any, name: str) -> None:
    page.wait_for_timeout(1500)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
    if name in PICTURES and (folder := os.environ.get("VIRNUC_PICTURES")):
        page.screenshot(path=SHOTS / "whole.png")
        small = Image.open(SHOTS / "whole.png").convert("RGB").quantize(64)
        small.save(Path(folder) / f"ui-{PICTURES[name]}.png", optimize=True)


def test_every_deployment_has_a_form_that_explains_its_fields(server: Server, page: Any) -> None:
    parameters = {
        d["entrypoint"]: d for d in server.ask("deployments/filter")
    }  # one deployment of each flow
    assert len(parameters) >= 7
    for deployment in parameters.values():
        properties = deployment["parameter_openapi_schema"]["properties"]
        page.goto(f"{server.url}/deployments/deployment/{deployment['id']}/run")
        page.get_by_role("button", name="Submit").wait_for()
        for description in properties.values():
            text = (
                description["description"].split("`")[0].split("https:")[0].strip()
            )  # Markdown and links are rendered
            page.get_by_text(text, exact=False).first.wait_for(state="attached")
    deployment = parameters["virnuc.flows.prefect_flows.tune.tune"]
    page.goto(f"{server.url}/deployments/deployment/{deployment['id']}/run")
    page.get_by_text("slots of one ESM-2 batch to try").first.wait_for()
    shot(page, "0-form-of-tune")
    deployment = parameters["virnuc.flows.prefect_flows.predict.predict"]
    page.goto(f"{server.url}/deployments/deployment/{deployment['id']}/run")
    page.get_by_text("Sample sheet, for several samples").first.wait_for()
    shot(page, "0-form-of-predict")


def test_the_deployments_of_the_daily_work_are_listed_before_the_tools(
    server: Server, page: Any
) -> None:
    page.goto(f"{server.url}/deployments")
    page.get_by_text("workbench-tune").first.wait_for()
    text = page.inner_text("body")
    # Below each name stands that of its flow, which may be part of another name.
    daily_names = ("inbox", "nightly-gpu", "predict", "scale", "train", "validate")
    assert max(text.rindex(name) for name in daily_names) < text.index("workbench-")
    shot(page, "0-deployments")


def look_at_artifacts(server: Server, page: Any) -> None:
    """What a validation leaves in the UI, from the page of its run on."""
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text(host_key("trend-ci-smoke")).last.wait_for()
    shot(page, "5-artifacts")
    page.goto(f"{server.url}/artifacts/artifact/{server.artifact(host_key('criteria-ci-smoke'))}")
    page.get_by_text("PASS").first.wait_for()
    shot(page, "6-criteria")
    page.get_by_text("≥99%").first.wait_for()
    page.goto(f"{server.url}/artifacts/artifact/{server.artifact(host_key('report-ci-smoke'))}")
    page.get_by_text("Consensus label agreement").first.wait_for()
    shot(page, "7-report")
    page.goto(f"{server.url}/artifacts/artifact/{server.artifact(host_key('charts-ci-smoke'))}")
    picture = page.get_by_alt_text("When each stage ran").first
    picture.wait_for()
    is_loaded = "image => image.complete && image.naturalWidth > 100"
    page.wait_for_function(is_loaded, arg=picture.element_handle())
    shot(page, "7-charts")
    page.goto(f"{server.url}/artifacts/artifact/{server.artifact(host_key('trend-ci-smoke'))}")
    page.get_by_text("no earlier run of this profile").first.wait_for()
    shot(page, "7-trend")


def test_a_validation_started_from_the_form_is_watched_approved_and_read(
    server: Server, page: Any, models: Path, tmp_path: Path
) -> None:
    reads = simulate(SimulateSpec(reads=300, seed=3), tmp_path / "lung.fastq.gz").reads_file
    deployment = server.deployment("validate")
    page.goto(f"{server.url}/deployments/deployment/{deployment}/run")
    field(page, "Files or folders of reads").get_by_role("button", name="Add item").click()
    fill(page, "Files or folders of reads", str(reads))
    out_dir = os.environ.get("VIRNUC_PICTURES_OUT", str(tmp_path / "out"))
    fill(page, "directory of the runs", out_dir)
    fill(page, "Folder of the models", str(models))
    fill(page, "sizes and thresholds", "ci-smoke")
    fill(page, "cuda:0,cuda:1", "gpu9")
    field(page, "pause after the report").locator(".p-toggle__control").click()
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("does not match").first.wait_for()  # a bad value is refused with a sentence
    shot(page, "1-form-refused")
    page.get_by_text("does not match").first.wait_for(
        state="detached"
    )  # the note lies over the button for a while
    fill(page, "cuda:0,cuda:1", "cpu:2")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("scheduled to start").first.wait_for()
    run = server.wait(deployment, "Running", "Paused")
    page.goto(f"{server.url}/runs/flow-run/{run['id']}")
    shot(page, "2-running")

    run = server.wait(deployment, "Paused")
    assert run["name"].startswith("lung · ci-smoke · cpu:2 · ")
    assert run["name"].endswith(platform.node())
    page.reload()
    page.get_by_role("button", name="Resume").first.click()
    shot(page, "3-approval-form")
    page.get_by_text("Are all criteria met").first.wait_for()
    page.get_by_text("1 of 1 asked criteria met").last.wait_for()
    choose_first(page, "The decision", "approved")
    fill(page, "Who decides", "Ada")
    page.get_by_role("button", name="Submit").last.click()
    page.wait_for_timeout(2000)  # an approval with open questions is refused
    assert server.wait(deployment, "Paused")["id"] == run["id"]
    for question in QUESTIONS.values():
        choose_first(page, str(question), "yes")
    page.get_by_role("button", name="Submit").last.click()
    run = server.wait(deployment, "Completed", "Failed")
    assert run["state"]["message"].startswith("1 of 1 asked criteria met")
    # With tiny models, starting takes longer than ESM-2, which contradicts one of the answers.
    assert "; approved by Ada (contradicts the figures: 'ESM-2 still" in run["state"]["message"]
    page.goto(f"{server.url}/runs/flow-run/{run['id']}")
    page.get_by_text("1 of 1 asked criteria met").first.wait_for()
    shot(page, "4-completed")

    look_at_artifacts(server, page)
    page.goto(f"{server.url}/runs")
    page.get_by_text("lung · ci-smoke · cpu:2").first.wait_for()
    shot(page, "8-runs")


def test_a_criterion_that_is_missed_pauses_the_deployment_where_that_is_asked_for(
    server: Server, page: Any, models: Path, tmp_path: Path
) -> None:
    for words in (
        ("-c", BLOCK),
        ("-m", "virnuc.deployments.alerts", "custom-webhook/oncall", "--pause"),
    ):
        subprocess.run(
            [sys.executable, *words],
            env=server.environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    profile = tmp_path / "impossible.toml"
    profile.write_text(
        'name = "impossible"\ntitle = "Nobody meets this"\ndevice_names = [""]\n'
        '[baseline]\nname = "vanilla"\nreads = 50\n'
        '[targets]\none_device_seconds = { op = "<", value = 0.001 }\n'
    )
    reads = simulate(SimulateSpec(reads=100, seed=3), tmp_path / "lung.fasta").reads_file
    deployment = server.deployment("nightly-gpu")
    arguments = {
        "reads": [str(reads)],
        "out": str(tmp_path / "out"),
        "models": str(models),
        "devices": "cpu:1",
    }
    server.ask(
        f"deployments/{deployment}/create_flow_run",
        parameters={**arguments, "profile": str(profile)},
    )
    run = server.wait(deployment, "Criteria not met")
    assert run["state_type"] == "FAILED"
    assert "not met: Time on one device" in run["state"]["message"]
    address = f"{server.url}/api/deployments/{deployment}"
    wait_until(lambda: ask_server("GET", address)["paused"])
    page.goto(f"{server.url}/runs")
    page.get_by_text("Criteria not met").first.wait_for()
    shot(page, "11-criteria-not-met")


def test_a_run_cancelled_in_the_ui_is_gone(
    server: Server, page: Any, models: Path, tmp_path: Path
) -> None:
    reads = simulate(SimulateSpec(reads=20_000, seed=4), tmp_path / "many.fastq.gz").reads_file
    deployment = server.deployment("predict")
    out_dir = tmp_path / "out"
    arguments = {
        "reads": [str(reads)],
        "out": str(out_dir),
        "models": str(models),
        "devices": "cpu:1",
        "shard_tokens": 8192,
    }
    server.ask(f"deployments/{deployment}/create_flow_run", parameters=arguments)
    wait_until(lambda: committed(out_dir) >= 3)
    run = server.wait(deployment, "Running")
    family = running_with("virnuc_core", server.host.children(recursive=True))
    assert family
    page.goto(f"{server.url}/runs/flow-run/{run['id']}")
    page.get_by_role("button", name="Cancel").first.click()
    shot(page, "9-cancel")
    page.locator("[role=dialog], .p-modal").last.get_by_role("button", name="Confirm").click()
    wait_until(lambda: gone(family), 25)  # Prefect's worker would kill them after 30 s
    server.wait(deployment, "Cancelled")
    page.reload()
    shot(page, "10-cancelled")
