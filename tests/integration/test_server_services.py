"""Each background service of the server at work once, and each alert sent: a real server, a real webhook."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling, Crashed, Pending, Running, Scheduled

from virnuc.flows.prefect_flows.inbox import predict_inbox
from virnuc.tasks.events import emit

from .processes import PREFECT, ROOT, ask_server, wait_for

pytestmark = pytest.mark.slow


@flow(name="watched")
def watched() -> None:
    """Never runs: its runs are what the server's services look after."""


@pytest.fixture
def client(server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    EventsWorker.drain_all()  # one that an earlier test left would go on sending to that test's server
    with get_client(sync_client=True) as prefect_client:
        yield prefect_client
    EventsWorker.drain_all()


@pytest.fixture
def webhook() -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a server that keeps what is sent to it: the bodies of messages by their subjects."""
    body_of_subject: dict[str, str] = {}

    class Kept(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body_of_subject[message["subject"]] = message["body"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not on the screen."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Kept) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", body_of_subject
        listening.shutdown()


def deployment(client: SyncPrefectClient, name: str, *, every: timedelta | None = None) -> UUID:
    """A deployment as ours are: tagged, in a pool of processes; planned by the server if `every` is given."""
    if not any(pool.name == "gpu" for pool in client.read_work_pools()):
        client.create_work_pool(WorkPoolCreate(name="gpu", type="process"))
    schedules = (
        []
        if every is None
        else [DeploymentScheduleCreate(schedule=IntervalSchedule(interval=every))]
    )
    flow_id = client.create_flow(watched)
    return client.create_deployment(
        flow_id, name, schedules=schedules, work_pool_name="gpu", tags=["virnuc"]
    )


def fail_in_an_inbox(folder: Path, models: Path) -> None:
    """Run the flow of an inbox, one of whose files contains no reads."""
    inbox = folder / "inbox"
    inbox.mkdir()
    (inbox / "lung.fastq").write_text("nothing of a sequencer\n")
    predict_inbox(inbox=inbox, out=folder / "out", models=models, devices="cpu:1", settle_s=0)


def test_every_alert_is_sent_and_none_pauses_a_deployment_unless_asked(
    client: SyncPrefectClient,
    server: dict[str, str],
    webhook: tuple[str, dict[str, str]],
    tmp_path: Path,
    models: Path,
) -> None:
    url, body_of_subject = webhook
    message = {"subject": "{{subject}}", "body": "{{body}}"}
    block = CustomWebhookNotificationBlock(name="oncall", url=url, method="POST", json_data=message)
    block.save("oncall", overwrite=True)
    words = [sys.executable, "-m", "virnuc.deployments.alerts"]
    missing = subprocess.run(
        [*words, "slack-webhook/nobody"],
        env=server,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 1
    assert "slack-webhook/nobody is no block" in missing.stderr
    for _ in range(2):  # given again, it replaces
        subprocess.run(
            [*words, "custom-webhook/oncall"], env=server, cwd=ROOT, check=True, capture_output=True
        )
    assert (
        len(
            [
                automation
                for automation in client.read_automations()
                if automation.name.startswith("virnuc: ")
            ]
        )
        == 5
    )

    late = deployment(client, "late")
    client.create_flow_run_from_deployment(
        late,
        state=Scheduled(scheduled_time=datetime.now(UTC) - timedelta(minutes=10)),
        name="nobody-came",
    )
    crashed_run = client.create_flow_run_from_deployment(
        deployment(client, "crashed"), name="went-down"
    )
    client.set_flow_run_state(crashed_run.id, Running(), force=True)
    client.set_flow_run_state(crashed_run.id, Crashed(message="no word"), force=True)
    facts = {"profile": "ci", "report": "/srv/report"}
    judged = {"value": 3.0, "target": ">= 4 x", **facts}
    emit("criterion.fail", "criterion.speedup", "Speedup", judged)
    emit("regression.fail", "regression.ci", "CI", {"reason": "12 % worse.", **facts})
    fail_in_an_inbox(tmp_path, models)
    expected_texts = {
        "virnuc: Speedup not met": "3.0 instead of ›= 4 x (profile ci). Report: /srv/report",
        "virnuc: slower than before (CI)": "Reason: 12 % worse. Report: /srv/report",
        "virnuc: went-down crashed": "Prefect says: no word",
        "virnuc: nobody-came is late": "Is a worker of its pool running?",
        "virnuc: lung.fastq failed": "neither FASTA nor FASTQ",
    }
    wait_for(
        lambda: expected_texts.keys() <= body_of_subject.keys(),
        f"all of {[*expected_texts]}; {body_of_subject} came",
    )
    for subject, text in expected_texts.items():
        assert text in body_of_subject[subject]
    assert not client.read_deployment(late).paused


def test_the_scheduler_plans_late_runs_are_marked_and_a_pool_without_workers_is_not_ready(
    client: SyncPrefectClient,
) -> None:
    deployment_id = deployment(client, "planned", every=timedelta(hours=1))
    wait_for(
        lambda: any(
            run.deployment_id == deployment_id and run.auto_scheduled
            for run in client.read_flow_runs()
        ),
        "a plan",
    )
    overdue = client.create_flow_run_from_deployment(
        deployment(client, "overdue"),
        state=Scheduled(scheduled_time=datetime.now(UTC) - timedelta(minutes=10)),
    )
    wait_for(lambda: state(client, overdue.id) == "Late", "the run to be late")
    wait_for(
        lambda: client.read_work_pool("gpu").status.value == "NOT_READY",
        "the foreman to see no worker",
    )


def test_events_are_kept_and_can_be_asked_for(client: SyncPrefectClient) -> None:
    run = client.create_flow_run_from_deployment(deployment(client, "seen"))

    def kept() -> bool:
        event_filter = {"event": {"prefix": ["prefect.flow-run."]}}
        address = f"{PREFECT_API_URL.value()}/events/filter"
        answer = ask_server("POST", address, json={"filter": event_filter, "limit": 50})["events"]
        return any(
            event["resource"]["prefect.resource.id"] == f"prefect.flow-run.{run.id}"
            for event in answer
        )

    wait_for(kept, "an event of the run")


def test_what_a_cancelled_run_had_begun_is_cancelled_with_it(client: SyncPrefectClient) -> None:
    parent = client.create_flow_run_from_deployment(deployment(client, "parent"), state=Running())
    task = client._client.post(
        "/task_runs/",
        json={"flow_run_id": str(parent.id), "task_key": "t", "dynamic_key": "0", "name": "t"},
    ).json()
    child = client.create_flow_run_from_deployment(
        deployment(client, "child"), state=Pending(), parent_task_run_id=UUID(task["id"])
    )
    client.set_flow_run_state(parent.id, Cancelling(), force=True)
    client.set_flow_run_state(parent.id, Cancelled(), force=True)
    wait_for(
        lambda: state(client, child.id) in ("Cancelled", "Cancelling"), "the child to be cancelled"
    )


def state(client: SyncPrefectClient, run: UUID) -> str:
    run_state = client.read_flow_run(run).state
    assert run_state is not None
    return run_state.name or ""


@pytest.mark.timeout(900)  # each command of Prefect takes a minute on a busy machine
def test_plain_prefect_deploy_works_and_make_deploy_switches_on_what_it_was_given_paths_for(
    client: SyncPrefectClient, server: dict[str, str], tmp_path: Path
) -> None:
    def deploy(*words: str) -> dict[str, DeploymentResponse]:
        process = subprocess.run(
            words, env=server, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return {
            deployment_info.name: deployment_info for deployment_info in client.read_deployments()
        }

    # What Prefect's users type first; nothing of ours is set.
    deploy(*PREFECT, "work-pool", "create", "gpu", "--type", "process", "--overwrite")
    default_deployments = deploy(*PREFECT, "deploy", "--all")
    names = ("inbox", "validate", "predict", "scale", "train")
    tools = ("workbench-overhead", "workbench-profile", "workbench-tune")
    for name in ("nightly-gpu", *names, *tools):
        deployment_info = default_deployments[name]
        assert deployment_info.work_pool_name == "gpu"
        assert not any(schedule.active for schedule in deployment_info.schedules)
    nightly = default_deployments["nightly-gpu"]
    assert nightly.parameters["models"] == "not set: VIRNUC_MODELS"
    assert (nightly.description or "").startswith(
        "**Off until you set VIRNUC_MODELS, VIRNUC_READS, VIRNUC_OUT and deploy again.**"
    )

    given = ("POOL=h200", "MODELS=/m", "READS=/r.fastq", f"OUT={tmp_path}")
    full_deployments = deploy("make", "deploy", *given)
    assert full_deployments["nightly-h200"].schedules[0].active
    assert full_deployments["nightly-h200"].parameters["reads"] == ["/r.fastq"]
    assert (full_deployments["nightly-h200"].description or "").startswith("Proves")
    assert not full_deployments["inbox"].schedules[0].active, "INBOX was not given"
    assert full_deployments["predict"].work_pool_name == "h200"
