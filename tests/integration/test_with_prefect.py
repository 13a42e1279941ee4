"""What only a real Prefect backend can tell: states, logs, artifacts, slots, the approval gate, events."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.flow_engine import run_flow as prefect_runs
from prefect.input import RunInput
from prefect.logging.loggers import flow_run_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)
from prefect.states import Cancelled, Paused, Running

from tests.changing_folders import content_of
from virnuc.flows.approval import wait_for_approval
from virnuc.flows.cli import main
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.prefect_flows.predict import predict
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.approval import Approval
from virnuc.tasks.artifacts import progress_artifact, publish_markdown, publish_table
from virnuc.tasks.core_logs import core_logs
from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.prefect_states import to_state
from virnuc.tasks.retries import first_attempt
from virnuc.tasks.running_mark import (
    MAX_SAMPLE_TAGS,
    NAMESPACE_LABEL,
    PROCESS_LABEL,
    START_LABEL,
    add_tags,
    announce,
)
from virnuc.tasks.task import retrying_task
from virnuc_core.errors import InputError, VirnucError, WorkerError
from virnuc_core.lease import process_namespace, process_start_ticks
from virnuc_core.markdown import Markdown
from virnuc_core.profiles import QUESTIONS, Review
from virnuc_core.runfiles import Device

from .flow_runs import message as message_of
from .flow_runs import task_runs
from .processes import PATIENCE_S, wait_for

pytestmark = pytest.mark.usefixtures("prefect_backend")
GPU = Device(id="GPU-aaaa", kind="cuda", name="a GPU")


def run_id() -> UUID:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run.id


def test_states_say_what_was_done() -> None:
    outcomes: list[Outcome[int]] = []

    @retrying_task("step", "step of {label}")
    def step(*, label: str) -> Outcome[int]:
        return completed(3, f"0 of 14 shards of {label} computed", reused=True)

    @flow
    def whole() -> State[int]:
        outcomes.append(step(label="lung"))
        return to_state(completed(outcomes[0].result(), "nothing to compute"))

    state = whole(return_state=True)
    assert (state.type.value, state.name, state.message) == (
        "COMPLETED",
        "Completed",
        "nothing to compute",
    )
    assert outcomes == [completed(3, "0 of 14 shards of lung computed", reused=True)]

    [(name, task_run)] = task_runs(state, "step of lung").items()
    assert (name, task_run.state_name, message_of(task_run)) == (
        "step of lung",
        "Reused",
        "0 of 14 shards of lung computed",
    )


def test_records_of_the_core_reach_the_run_also_from_its_threads() -> None:
    core = logging.getLogger("virnuc_core.engine.pool")

    @task(cache_policy=NO_CACHE)
    def step() -> None:
        with core_logs():
            core.info("from the task")
            thread = threading.Thread(target=core.info, args=("from a thread",))
            thread.start()
            thread.join()

    @flow
    def whole() -> UUID:
        with core_logs():
            core.info("from the flow")
            step()
        core.info("after the run")
        return run_id()

    flow_run = whole()
    log_filter = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))

    def logged() -> dict[str, bool]:
        with get_client(sync_client=True) as client:
            lines = client.read_logs(log_filter=log_filter)
        records = {
            line.message: line.task_run_id is not None
            for line in lines
            if line.name.startswith("virnuc_core")
        }
        return records if len(records) >= 3 else {}

    records = wait_for(logged, "the records")
    assert records == {"from the flow": False, "from the task": True, "from a thread": True}
    assert logging.getLogger("virnuc_core").handlers == []


@pytest.mark.parametrize(
    ("error", "attempts"), [(WorkerError("died"), 4), (InputError("truncated"), 1)]
)
def test_a_task_is_tried_again_only_where_that_can_help(
    error: VirnucError, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virnuc.tasks.prefect_task.BACKOFF_S", 0)
    firsts: list[bool] = []

    @retrying_task("felled", "felled")
    def felled() -> Outcome[None]:
        firsts.append(first_attempt())
        raise error

    @flow
    def whole() -> None:
        felled().result()

    state = whole(return_state=True)
    assert state.is_failed()
    assert firsts == [True, *[False] * (attempts - 1)]


def test_wrong_input_is_one_sentence_in_the_log_and_in_the_state(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    @retrying_task("broken", "broken")
    def broken() -> Outcome[None]:
        raise InputError("truncated", file="a.gz", line=3)

    @flow
    @with_parameters(FlowSettings)
    def whole(given: FlowSettings) -> Outcome[None]:
        return completed(broken().result(), "")

    with caplog.at_level(logging.INFO):
        state = whole(out=tmp_path / "run", models=tmp_path / "models", return_state=True)
    assert (state.type.value, state.message) == ("FAILED", "a.gz:3: truncated")
    with pytest.raises(InputError, match=r"a\.gz:3"):
        state.result()
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 2_000


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"devices": "cuda:0,cuda:0"}, "a device is named twice"),
        ({"reads": ["absent.fa"]}, "absent.fa: no such file"),
    ],
)
def test_a_workers_log_has_one_sentence_on_wrong_input_and_no_traceback(
    parameters: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    arguments = {
        "reads": ["a.fa"],
        "out": str(tmp_path / "run"),
        "models": str(tmp_path),
        **parameters,
    }
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(predict, parameters=arguments)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(VirnucError, match=said),
    ):  # as a worker's child does
        prefect_runs(predict, flow_run=flow_run, error_logger=flow_run_logger(flow_run))  # type: ignore[arg-type]
    (message,) = [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR or said in record.getMessage()
    ]
    assert message.getMessage().startswith("Finished in state Failed(")
    assert "Traceback" not in caplog.text


def test_artifacts_are_recorded_as_written() -> None:
    @flow
    def whole() -> None:
        publish_table(
            "criteria-x",
            [{"verdict": Markdown("✅ **PASS**"), "required": ">= 90 %"}],
            "7 criteria",
        )
        publish_markdown("report-x", "# Report", "the report", Path("/r"))
        with progress_artifact("progress-x", "", every_s=0.05) as show:
            show(0.5)
            time.sleep(0.2)
            show(1.0)

    whole()
    table = Artifact.get("criteria-x")
    assert table is not None
    assert json.loads(str(table.data)) == [{"verdict": "✅ **PASS**", "required": "≥ 90 %"}]
    progress = Artifact.get("progress-x")
    assert progress is not None
    assert progress.data == 100.0


def test_a_signed_address_is_kept_nowhere(models: Path, database: Path, tmp_path: Path) -> None:
    address = (
        "https://localhost:1/lung.fq.gz?X-Amz-Signature="  # refused: that is no public address
    )
    files = list(
        Path(str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition("///")[2]).parent.glob(
            "*.db*"
        )
    )
    assert (
        main(
            [
                "predict",
                f"{address}NeverKeepThis",
                "-o",
                str(tmp_path / "a"),
                "--models",
                str(models),
            ]
        )
        == 2
    )
    with get_client(sync_client=True) as client:
        (by_hand,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        assert (by_hand.name, by_hand.state_name) == ("lung · auto", "Failed")
        assert "private address" in str(by_hand.state)
        assert by_hand.parameters["reads"][0].startswith("https://localhost:1/lung.fq.gz#query-")
        assert files
        # The server may remove the files beside its database.
        assert not [file for file in files if b"NeverKeepThis" in content_of(file)]
        # one that was made on a server, as a form does: it stood there until the run began
        mates = {"mates_1": (f"{address}4ec4e7",), "mates_2": (f"{address}94ec4e7",)}
        assert predict(**mates, out=tmp_path / "b", models=models, return_state=True).is_failed()
        (flow_run,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        assert flow_run.id != by_hand.id
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
    assert "4ec4e7" not in f"{flow_run} {logs}"
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and b"ec4e7" in file.read_bytes()
    ]


def test_a_run_bears_its_tags() -> None:
    @flow
    def whole() -> UUID:
        announce("lung", "ci-smoke")
        return run_id()

    with get_client(sync_client=True) as client:
        assert sorted(client.read_flow_run(whole()).tags) == ["ci-smoke", "lung", "virnuc"]


def test_a_run_is_found_by_each_of_its_samples_and_keeps_its_other_tags() -> None:
    sample = "found-by-its-sample"  # runs of other tests have none of this name

    @flow
    def whole() -> UUID:
        announce("samples", "sheet")
        add_tags("lung", "")
        add_tags(sample, "lung")
        return run_id()

    flow_run_id = whole()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_id).tags == [
            *(sample, "lung", "samples", "sheet", "virnuc")
        ]
        by_sample = FlowRunFilter.model_validate({"tags": {"all_": [sample]}})
        assert [run.id for run in client.read_flow_runs(flow_run_filter=by_sample)] == [flow_run_id]


def test_a_sheet_of_thousands_of_samples_does_not_flood_the_page_of_its_run() -> None:
    @flow
    def whole() -> UUID:
        add_tags(*(f"s{number:04}" for number in range(3_000)))
        return run_id()

    with get_client(sync_client=True) as client:
        assert len(client.read_flow_run(whole()).tags) == MAX_SAMPLE_TAGS


def test_a_run_whose_process_is_gone_is_called_crashed() -> None:
    @flow
    def whole(dead: UUID | None) -> UUID:
        if dead is not None:
            announce()
        return run_id()

    with get_client(sync_client=True) as client:
        runs = {}
        for name, labels in {
            "killed": {NAMESPACE_LABEL: process_namespace(), PROCESS_LABEL: 1, START_LABEL: "1"},
            "elsewhere": {NAMESPACE_LABEL: "another machine", PROCESS_LABEL: 1, START_LABEL: "1"},
            "alive": {
                NAMESPACE_LABEL: process_namespace(),
                PROCESS_LABEL: os.getpid(),
                START_LABEL: process_start_ticks(os.getpid()),
            },
        }.items():
            flow_run = client.create_flow_run(
                whole, parameters={"dead": None}, name=name, tags=["virnuc"]
            )
            client.update_flow_run_labels(flow_run.id, labels)
            client.set_flow_run_state(flow_run.id, Running(), force=True)
            runs[name] = flow_run.id
        whole(runs["killed"])
        states = {name: client.read_flow_run(one).state for name, one in runs.items()}
        for name in ("elsewhere", "alive"):
            client.set_flow_run_state(runs[name], Cancelled(), force=True)
    assert {name: state.name for name, state in states.items() if state is not None} == {
        "killed": "Crashed",
        "elsewhere": "Running",
        "alive": "Running",
    }


def test_two_runs_never_hold_one_gpu() -> None:
    running_names: list[str] = []
    overlaps: list[str] = []

    def hold(name: str) -> None:
        with device_slots([GPU]):
            overlaps.extend(running_names)
            running_names.append(name)
            time.sleep(0.5)
            running_names.remove(name)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(hold, name))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    with get_client(sync_client=True) as client:
        limit = client.read_global_concurrency_limit_by_name("virnuc-gpu-aaaa")
    assert (limit.limit, limit.active_slots) == (1, 0)


def held_by_another(outside: contextvars.Context, wait_s: float = 1.0) -> bool:
    """Whether somebody who holds no slot, as before `outside` was copied, waits in vain for the GPU."""

    def take() -> None:
        with device_slots([GPU], wait_s=wait_s):
            pass

    with ThreadPoolExecutor(1) as executor:
        return isinstance(executor.submit(outside.run, take).exception(), TimeoutError)


def test_waiting_for_a_gpu_can_end() -> None:
    outer_context = contextvars.copy_context()
    with device_slots([GPU]):
        assert held_by_another(outer_context)
    assert not held_by_another(outer_context, PATIENCE_S)


def test_a_slot_is_taken_once_and_given_back_by_who_took_it() -> None:
    outer_context = contextvars.copy_context()
    with device_slots([GPU]):
        with device_slots([GPU], wait_s=1):
            pass
        assert held_by_another(outer_context)
    assert not held_by_another(outer_context, PATIENCE_S)


def test_cores_need_no_slot() -> None:
    core = Device(id="cpu-core-0", kind="cpu", name="a core", core=0)
    with device_slots([core]), device_slots([core]):
        pass


@flow
def gated(report_dir: Path, timeout_s: int) -> dict[str, Any]:
    """Asks, and returns the answer."""
    return wait_for_approval(report_dir, Approval, timeout_s=timeout_s, poll_s=1).model_dump()


def in_thread(report_dir: Path, timeout_s: int) -> tuple[threading.Thread, list[State[Any]]]:
    """Start `gated`; the list will hold its final state."""
    states: list[State[Any]] = []

    def run() -> None:
        states.append(gated(report_dir, timeout_s, return_state=True))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    return thread, states


def waiting_run() -> Any:
    def paused() -> Any:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs()
        return next((run for run in runs if run.state is not None and run.state.is_paused()), None)

    return wait_for(paused, "the run to pause")


def test_the_gate_keeps_who_decided_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, states = in_thread(tmp_path, timeout_s=600)
    run = waiting_run()
    words = ["--reviewer", "Ada", "--note", "raise the budget", "--tuning-could-help", "yes"]
    assert main(["approve", str(run.id), "--no", *words]) == 0
    assert "rejected by Ada" in capsys.readouterr().out
    thread.join(PATIENCE_S)
    answer = states[0].result()
    assert (answer["verdict"], answer["tuning_could_help"], answer["all_criteria_met"]) == (
        "rejected",
        "yes",
        "not answered",
    )
    approval = json.loads((tmp_path / "approval.json").read_text())
    assert (approval["reviewer"], approval["note"], approval["flow_run"]) == (
        "Ada",
        "raise the budget",
        str(run.id),
    )
    assert approval["when"].endswith("+00:00")
    assert main(["approve", str(run.id), "--yes"]) == 2
    assert "does not wait" in capsys.readouterr().err


def test_a_gate_nobody_answers_is_pending(tmp_path: Path) -> None:
    thread, states = in_thread(tmp_path, timeout_s=2)
    thread.join(PATIENCE_S)
    assert states[0].is_completed()
    assert json.loads((tmp_path / "approval.json").read_text())["verdict"] == "pending"


def test_an_empty_answer_is_refused(tmp_path: Path) -> None:
    thread, states = in_thread(tmp_path, timeout_s=600)
    run = waiting_run()
    with get_client(sync_client=True) as client:
        response = client.resume_flow_run(run.id, run_input={})
        assert response.status.value == "REJECT"
        client.resume_flow_run(run.id, run_input={"verdict": "pending", "reviewer": "Ada"})
    thread.join(PATIENCE_S)
    assert states[0].result()["verdict"] == "pending"


def test_to_approve_every_question_must_be_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The server refuses what the UI sends, and the command asks before it sends anything."""
    thread, states = in_thread(tmp_path / "report", timeout_s=600)
    run = waiting_run()
    wait_for(lambda: "virnuc approve" in caplog.text, "the ways to answer")
    assert f"flow run '{run.name}' waits for a reviewer" in caplog.text
    assert f"/runs/flow-run/{run.id}, button Resume" in caplog.text
    assert f"virnuc approve {run.id} --yes" in caplog.text

    assert main(["approve", str(run.id), "--yes", "--all-criteria-met", "yes"]) == 2
    assert "add --target-realistic, --tuning-could-help" in capsys.readouterr().err
    answers = dict.fromkeys(QUESTIONS, "yes")
    approved = {"verdict": "approved", "reviewer": "Ada"}
    with get_client(sync_client=True) as client:
        for incomplete in ({}, answers | {"target_realistic": "not answered"}):
            response = client.resume_flow_run(run.id, run_input=approved | incomplete)
            assert response.status.value == "REJECT"
        response = client.resume_flow_run(run.id, run_input=approved | answers)
        assert response.status.value == "ACCEPT"
        second = client.resume_flow_run(run.id, run_input=approved | {"reviewer": "Bea"})
        assert second.status.value != "ACCEPT", "the first answer counts"
    thread.join(PATIENCE_S)
    assert (states[0].result()["verdict"], states[0].result()["reviewer"]) == ("approved", "Ada")


class FormWithoutRule(Review, RunInput):
    """A form of which a server does not know that approving needs all answers."""

    verdict: str
    reviewer: str


@flow
def leniently_gated(report_dir: Path) -> dict[str, Any]:
    """Asks with the form that has no rule, and returns the answer."""
    return wait_for_approval(report_dir, FormWithoutRule, timeout_s=1, poll_s=1).model_dump()


def test_an_approval_with_open_questions_is_pending_where_the_server_lets_it_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "virnuc.flows.approval.TIME_OUT_ANSWER", {"verdict": "approved", "reviewer": "Ada"}
    )
    answer = leniently_gated(tmp_path / "report")
    assert answer["verdict"] == "pending"
    assert answer["note"].startswith("approved, but not answered: all_criteria_met")


def test_an_answer_to_a_run_whose_process_has_ended_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run is still paused at its server, so the answer would be accepted, and be lost."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(gated, parameters={"report_dir": ".", "timeout_s": 1})
        labels = {NAMESPACE_LABEL: process_namespace(), PROCESS_LABEL: ended.pid, START_LABEL: 1}
        client.update_flow_run_labels(run.id, labels)
        client.set_flow_run_state(run.id, Paused(timeout_seconds=600), force=True)
    assert main(["approve", str(run.id), "--no"]) == 2
    assert "its process has ended and cannot take an answer" in capsys.readouterr().err
    with get_client(sync_client=True) as client:
        client.delete_flow_run(run.id)


def test_approve_at_a_closed_port_is_one_line(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{port}/api"
    with temporary_settings(updates={PREFECT_API_URL: url}):
        assert main(["approve", "night", "--no"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"virnuc: nothing answers at {url}: start the Prefect server there")


def test_approving_what_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve", "nobody", "--yes"]) == 2
    assert capsys.readouterr().err == "virnuc: no flow run has the name 'nobody'\n"
    assert main(["approve", "00000000-0000-0000-0000-000000000000", "--yes"]) == 2
    assert "no flow run has the id" in capsys.readouterr().err
    assert set(Approval.model_json_schema()["required"]) == {"verdict", "reviewer"}
