"""Names, settings, retries and progress: what surrounds a run."""

from __future__ import annotations

import gzip
import importlib
import logging
import random
import subprocess
import sys
import threading
import time
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.states import Completed

from virnuc.flows import exit_deadline, output_folder, preflight
from virnuc.flows.cli.options import OnTerminal
from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.flow_decorator import with_parameters
from virnuc.flows.flow_run import run_flow
from virnuc.flows.run_names import run_name
from virnuc.flows.settings.predict import PredictSettings
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.shared import RunSettings
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.flows.settings.validate import ValidateSettings
from virnuc.tasks.artifacts import progress_artifact
from virnuc.tasks.server_connection import connection
from virnuc.tasks.task import first_attempt, is_retryable
from virnuc_core.errors import (
    ConfigError,
    DeviceError,
    IncapableError,
    InputError,
    RunMismatchError,
    ShardError,
    StorageError,
    WeightsError,
    WorkerError,
)
from virnuc_core.reads.sources import sample_name
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.rundir import MARKER_FILE, run_lock


@pytest.mark.parametrize(
    ("reads", "name"),
    [
        (["/d/lung_R1.fastq.gz"], "lung_R1"),
        (["a.fa", "b.fa", "c.fa"], "a+2"),
        (["-"], "stdin"),
        (["run.2026.fq.zst"], "run.2026"),
        (["groups/lung.bam"], "lung"),
        ([".gz"], ".gz"),
        (["x" * 200 + ".fa"], "x" * 60),
        (["https://h/lung%20R1.fastq.gz?X-Amz-Signature=5ec4e7/a.fa"], "lung%20R1"),
        (["HTTP://h/lung.fq#query-0123456789ab", "https://h/b?5ec4e7"], "lung+1"),
        (["a\x1b[2J\nb.fa"], "a\\x1b[2J b"),
        ([], "no-reads"),
        (("in/lung_R1.fastq.gz", "in/lung_R2.fastq.gz"), "lung"),
        (("lung_S1_L001_R1_001.fastq.gz", "lung_S1_L001_R2_001.fastq.gz"), "lung_S1_L001"),
        (("a_1.fq", "b_2.fq"), "a_1+1"),
    ],
)
def test_samples_have_short_names(reads: list[str], name: str) -> None:
    assert sample_name(reads) == name


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
    reads, out = tmp_path / "a.fa", tmp_path / "out"
    reads.write_text(">r1\nACGT\n")

    @with_parameters(model)
    def probe(settings: RunSettings) -> State[bool]:
        with pytest.raises(ConfigError, match="is working here"):
            Context().run(run_lock(settings.out).__enter__)  # as another flow would
        with run_lock(settings.out):
            return Completed(data=(settings.out / MARKER_FILE).exists())

    truth = {"truth": reads} if model is TrainSettings else {}
    assert (
        probe(
            reads=(str(reads),), out=out, models=tmp_path / "models", devices="cpu:1", **truth
        ).data
        is True
    )
    assert not out.exists()
    with run_lock(out):
        state = probe(
            reads=(str(reads),), out=tmp_path, models=tmp_path / "models", devices="cpu:1", **truth
        )
    assert "holds the models directory" in (state.message or "")


def test_run_names_leave_out_what_is_not_known() -> None:
    parameters = {"reads": ["/d/lung.fq"], "profile": "/p/my.toml", "devices": "cpu:2"}
    assert run_name(parameters, "reads", "profile", "devices", "absent") == "lung · my · cpu:2"
    assert run_name({"inbox": "/srv/in"}, "inbox") == "in"


def test_settings_of_the_user_are_kept_and_ours_fill_the_gaps() -> None:
    environment = {"PREFECT_SERVER_ANALYTICS_ENABLED": "true"}
    prepare_prefect(environment)
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
    assert environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] == "90"


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (WorkerError("died"), True),
        (ShardError("damaged", shard=3), True),
        (DeviceError("taken"), True),
        (IncapableError("too old"), False),
        (OSError(121, "Remote I/O error"), True),
        (OSError(28, "No space left on device"), False),
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


def test_outside_a_run_every_attempt_is_the_first() -> None:
    assert first_attempt()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Percentages that reach Prefect, as if this were a run."""
    found: list[float] = []
    monkeypatch.setattr("virnuc.tasks.artifacts.inside_a_run", lambda: True)
    monkeypatch.setattr(
        "virnuc.tasks.artifacts.artifacts.create_progress_artifact",
        lambda percent, **_: found.append(percent) or "id",
    )
    monkeypatch.setattr(
        "virnuc.tasks.artifacts.artifacts.update_progress_artifact",
        lambda _, progress: found.append(progress),
    )
    return found


def test_progress_is_sent_seldom_and_at_the_end(sent: list[float]) -> None:
    with progress_artifact("p", "", every_s=0.05) as show:
        began = time.monotonic()
        for step in range(1000):
            show(step / 1000)
        while sent[-1:] != [99.9]:
            time.sleep(0.01)
        show(1.0)
    assert sent[-1] == 100.0
    assert len(sent) <= (time.monotonic() - began) / 0.05 + 2
    assert sent == sorted(set(sent))


@pytest.mark.usefixtures("sent")
def test_a_server_that_is_away_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: float, **_given: str) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr("virnuc.tasks.artifacts.artifacts.create_progress_artifact", refuse)
    with progress_artifact("p", "", every_s=0.01) as show:
        show(0.5)
    assert "progress p" in connection.unreported
    connection.unreported.clear()


@pytest.mark.usefixtures("sent")
def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    with progress_artifact("p", "", every_s=0.01):
        pass
    assert threading.active_count() == before


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    output_folder.require_writable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        output_folder.require_writable(tmp_path / "file" / "out")


@pytest.mark.parametrize("form", ["fasta", "fastq", "fastq.gz"])
def test_the_room_that_reads_surely_need_is_known_before_they_are_staged(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By less than they need: a run that could end well is never refused."""
    reads, rng = tmp_path / f"r.{form}", random.Random(1)
    bases = ["".join(rng.choices("ACGT", k=150)) for _ in range(4000)]
    text = "".join(
        f">r{i}\n{b}\n" if form == "fasta" else f"@r{i}\n{b}\n+\n{'F' * 150}\n"
        for i, b in enumerate(bases)
    )
    reads.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
    found = stage(
        StageSpec(reads=(str(reads),), model_length=300), tmp_path / "orfs.h5"
    ).counts.n_uniques
    rows = preflight.count_rows((str(reads),), "stop", 300)
    assert found / 20 < rows < found
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 * rows - 1))
    with pytest.raises(StorageError, match=r"the embeddings of these reads .* are free; make room"):
        output_folder.require_writable(
            tmp_path / "new", 100 * rows, "the embeddings of these reads"
        )
    assert preflight.count_rows(("/dev/stdin",), "stop", 300) == 0


STUCK = """
import threading, time
from prefect.utilities.engine import capture_sigterm
from virnuc.flows import exit_deadline
exit_deadline.ENDING_S = 0.5
with {}:
    try:
        print("here", flush=True)
        time.sleep(600)
    finally:
        threading.Event().wait()
"""


def test_what_prefect_counts_of_its_queues_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> State[None]:
        for name in ("EventsWorker", "another"):
            logging.getLogger(name).warning("of %s", name)
        return Completed()

    handler = PrefectConsoleHandler()
    logging.getLogger().addHandler(handler)
    try:
        run_flow(cast(Any, SimpleNamespace(fn=work)), {}, OnTerminal(), None)
    finally:
        logging.getLogger().removeHandler(handler)
    shown = capsys.readouterr().err
    assert "of another" in shown
    assert "EventsWorker" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "started",
    [
        "exit_deadline.exit_deadline(by_hand=True)",
        "capture_sigterm(), exit_deadline.exit_deadline(final=True)",
    ],
    ids=["hand", "worker"],
)
def test_a_run_that_cannot_come_to_an_end_is_ended_all_the_same(started: str) -> None:
    """A disk or a server that answers nothing holds the ending: it has its time, and no more."""
    program = STUCK.format(started)
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.terminate()
        try:
            assert (
                run.communicate(timeout=30)[1]
                == "virnuc: interrupted; what was committed stays, run again to go on\n"
            )
        finally:
            run.kill()
    assert run.returncode == 130


IMPORTS = """
import os, signal
for told in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), told)
whole = True
"""


def test_a_module_that_is_being_imported_is_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries written in C do not stand it otherwise: torch aborts the process, NumPy cannot be loaded again."""
    (tmp_path / "interrupted_module.py").write_text(IMPORTS)
    monkeypatch.syspath_prepend(tmp_path)

    def wants_it() -> None:
        with exit_deadline.exit_deadline(by_hand=True):
            importlib.import_module("interrupted_module")
            threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        wants_it()
    assert sys.modules["interrupted_module"].whole


@pytest.mark.slow
def test_what_a_run_does_after_its_last_words_is_ended_too() -> None:
    """Threads of libraries, servers that do not go: they had their time, and the message is there already."""
    program = STUCK.format("exit_deadline.exit_deadline(by_hand=True, final=True)").replace(
        "    finally:\n        ", "    except:\n        pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.terminate()
        try:
            assert run.communicate(timeout=30)[1] == ""
        finally:
            run.kill()
    assert run.returncode == 130
