"""Retries, settings of Prefect, locked directories and the console: what surrounds a run."""

from __future__ import annotations

import logging
import resource
from contextvars import Context
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.exceptions import CancelledRun
from prefect.logging.handlers import PrefectConsoleHandler

from virnuc.flows.cancellation import CancelledError
from virnuc.flows.cli.options import OnTerminal
from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.console import shown_log_lines
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.flow_run import run_flow
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.shared import RunSettings
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.retries import first_attempt, is_retryable
from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    IncapableError,
    InputError,
    RunMismatchError,
    ShardError,
    VirnucError,
    WeightsError,
    WorkerError,
)
from virnuc_core.rundir import MARKER_FILE, run_lock


@pytest.mark.parametrize(
    "model",
    [
        PredictSettings,
        ValidateSettings,
        ScaleSettings,
        TuneSettings,
        ProfileSettings,
        TrainSettings,
    ],
)
def test_a_flow_holds_its_directory_from_its_first_line_to_its_last(
    model: type[RunSettings], tmp_path: Path
) -> None:
    reads, out_dir = tmp_path / "a.fa", tmp_path / "out"
    reads.write_text(">r1\nACGT\n")

    @with_parameters(model)
    def probe(settings: RunSettings) -> Outcome[bool]:
        with pytest.raises(ConfigError, match="is working here"):
            Context().run(run_lock(settings.out).__enter__)  # as another flow would
        with run_lock(settings.out):
            return completed((settings.out / MARKER_FILE).exists(), "")

    truth = {"truth": reads} if model is TrainSettings else {}
    assert (
        probe(
            reads=(str(reads),), out=out_dir, models=tmp_path / "models", devices="cpu:1", **truth
        ).result()
        is True
    )
    assert not out_dir.exists()
    with run_lock(out_dir):
        state = probe(
            reads=(str(reads),), out=tmp_path, models=tmp_path / "models", devices="cpu:1", **truth
        )
    assert "holds the models directory" in (state.message or "")


def test_settings_of_the_user_are_kept_and_ours_fill_the_gaps() -> None:
    environment = {"PREFECT_SERVER_ANALYTICS_ENABLED": "true"}
    prepare_prefect(environment)
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
    assert environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] == "90"


def test_loopback_needs_no_proxy_and_other_exceptions_stay() -> None:
    environment = {"http_proxy": "http://proxy:3128", "NO_PROXY": "data.example, 127.0.0.1"}
    prepare_prefect(environment)
    assert environment["no_proxy"] == "data.example,127.0.0.1,localhost,::1"
    assert environment["NO_PROXY"] == environment["no_proxy"]
    assert environment["http_proxy"] == "http://proxy:3128"


def test_a_socks_proxy_is_left_out_only_without_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "virnuc.flows.cli.prefect_settings"
    for package, remains in ((None, False), (object(), True)):
        monkeypatch.setattr(f"{module}.find_spec", lambda _, package=package: package)
        environment = {"ALL_PROXY": "socks5://proxy:1080"}
        prepare_prefect(environment)
        assert ("ALL_PROXY" in environment) is remains


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (WorkerError("died"), True),
        (ShardError("damaged", shard=3), True),
        (DeviceError("taken"), True),
        (IncapableError("too old"), False),
        (OSError(121, "Remote I/O error"), True),
        (OSError(28, "No space left on device"), False),
        (OSError(24, "Too many open files"), False),
        (OSError(23, "Too many open files in system"), True),
        (MemoryError(), True),
        (InputError("truncated", file="a.gz"), False),
        (ConfigError("unknown"), False),
        (RunMismatchError("another run"), False),
        (WeightsError("absent"), False),
        (FileNotFoundError("gone"), False),
        (PermissionError("no"), False),
        (TypeError("a bug"), False),
    ],
)
def test_only_what_a_retry_can_help_is_retried(error: Exception, helps: bool) -> None:
    assert is_retryable(error) is helps


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_a_lack_of_memory_is_not_retried_under_a_limit_of_this_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_retryable(error)  # other processes may give memory back
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    assert not is_retryable(error)


def test_outside_a_run_every_attempt_is_the_first() -> None:
    assert first_attempt()


@pytest.mark.parametrize("handler", [PrefectConsoleHandler(), None], ids=["Prefect", "without"])
def test_what_prefect_counts_of_its_queues_is_not_shown(
    handler: logging.Handler | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers = [] if handler is None else [handler]
    monkeypatch.setattr(root, "handlers", handlers)  # another test may have set Prefect's up
    with shown_log_lines(OnTerminal()):
        for name in ("EventsWorker", "another"):
            logging.getLogger(name).warning("of %s", name)
        logging.getLogger("virnuc_core").error("a name with \x1b[2J")
    assert root.handlers == ([] if handler is None else [handler])
    output = capsys.readouterr().err
    assert output.count("of another") == 1
    assert "EventsWorker" not in output
    assert "\x1b[2J" not in output
    assert "a name with" in output


@pytest.mark.parametrize("error", [CancelledError("by hand"), CancelledRun("by hand")])
def test_a_run_that_was_cancelled_before_it_began_does_not_go_on_alone(error: Exception) -> None:
    calls = []

    def fail() -> None:
        raise error

    def run_alone() -> Outcome[None]:
        calls.append("called")
        return completed(None, "done")

    with pytest.raises(type(error), match="by hand"):
        run_flow(cast(Any, None), {}, fail, run_alone)
    assert calls == []


def test_a_run_goes_on_alone_once_if_its_server_fails_before_it_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def fail() -> None:
        raise VirnucError("no room for its database")

    def run_alone() -> Outcome[None]:
        calls.append("called")
        return completed(None, "done")

    flow = cast(Any, None)
    assert run_flow(flow, {}, fail, run_alone).message == "done"
    assert calls == ["called"]
    assert "goes on without a Prefect server, and is not in the UI: no room for" in caplog.text
    with pytest.raises(VirnucError, match="no room"):
        run_flow(flow, {}, fail)
