"""`virnuc serve`, runs that borrow its workers, and commands that its children run: real processes,
really killed.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process_lookup import family_of, running_with
from virnuc_core.encoders.convert import init_random
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import read_record

from .processes import PATIENCE_S, VIRNUC, background, committed, gone, wait_for
from .serving import (
    child_of_server,
    log_of,
    masked,
    n_handed_over,
    results,
    serve_environment,
    serving,
)

pytestmark = pytest.mark.slow

WORKER = "virnuc_core.engine.worker"
# So many shards that a run can be struck in the middle.
SMALL_SHARDS = ("--shard-tokens", "1000")


def environment(home: Path, **more: str) -> dict[str, str]:
    return serve_environment(home, {**os.environ, "VIRNUC_NO_PREFECT": "1", **more})


def words_of(reads: Path, models: Path, out: Path, *more: str) -> tuple[str, ...]:
    paths = ("predict", str(reads), "-o", str(out), "--models", str(models))
    return (*VIRNUC, *paths, "--devices", "cpu:1", *SMALL_SHARDS, *more)


def predict(home: Path, reads: Path, models: Path, out: Path, *more: str) -> str:
    """Make a prediction to its end, and return what it said on standard error."""
    finished = subprocess.run(
        words_of(reads, models, out, *more),
        env=environment(home),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


def worker_pids(out: Path) -> list[int]:
    summary = read_summary(RunDir(out))
    assert summary is not None
    return [worker["pid"] for worker in summary.workers]


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, some_reads: Path, models: Path
) -> dict[str, bytes]:
    """The files of a run with workers of its own."""
    home = tmp_path_factory.mktemp("alone")
    predict(home, some_reads, models, home / "run", "--serve", "off")
    return results(home / "run")


def test_borrowed_workers_give_the_same_bytes_and_a_replaced_model_is_loaded_anew(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    own_models = tmp_path / "models"
    shutil.copytree(models, own_models)
    with serving(tmp_path, environment(tmp_path)) as server:
        first, second, replaced = (tmp_path / name for name in ("first", "second", "replaced"))
        predict(tmp_path, some_reads, own_models, first, "--serve", "require")
        predict(tmp_path, some_reads, own_models, second)
        assert results(first) == alone
        assert results(second) == alone
        assert worker_pids(first) == worker_pids(second)
        # Another model under the same path. A worker that kept the old one would be caught by its
        # results, and by its process.
        shutil.rmtree(own_models)
        init_random(own_models, seed=2)
        predict(tmp_path, some_reads, own_models, replaced)
        assert worker_pids(replaced) != worker_pids(second)
        assert results(replaced) != alone
        workers = list(running_with(WORKER, family_of(server.pid)))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        wait_for(lambda: gone(workers), "the workers to end")
    assert "Traceback" not in log_of(tmp_path)


def in_folder(
    home: Path, folder: Path, *words: str, models: Path, **options: object
) -> subprocess.CompletedProcess[bytes]:
    """Run a prediction in a folder. Its models are named by the environment only."""
    folder.mkdir()
    command = (*VIRNUC, "predict", *words, "--devices", "cpu:1")
    return subprocess.run(
        command,
        env=environment(home, VIRNUC_MODELS=str(models)),
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
        **options,  # type: ignore[call-overload]
    )


def test_a_child_of_the_server_does_and_says_what_a_process_of_its_own_does(
    tmp_path: Path, some_reads: Path, models: Path
) -> None:
    text = some_reads.read_bytes()
    with serving(tmp_path, environment(tmp_path)):
        n_before = n_handed_over(tmp_path)
        runs = {}
        for name, serve in (("own", "auto"), ("alone", "off")):
            folder = tmp_path / name
            words = ("-", "-o", "run", "--serve", serve)
            runs[name] = in_folder(tmp_path, folder, *words, models=models, input=text)
            assert runs[name].returncode == 0, runs[name].stderr
            wrong = in_folder(tmp_path, folder / "wrong", "none.fa", "-o", "run", models=models)
            runs[f"{name} wrong"] = wrong
        # The second prediction was not handed over.
        assert n_handed_over(tmp_path) - n_before == 3
    own, alone = runs["own"], runs["alone"]
    assert results(tmp_path / "own" / "run") == results(tmp_path / "alone" / "run")
    for stream in ("stdout", "stderr"):
        own_text, text_alone = (masked(getattr(run, stream).decode()) for run in (own, alone))
        assert own_text == text_alone
    assert runs["own wrong"].returncode == runs["alone wrong"].returncode == 2
    assert runs["own wrong"].stderr == runs["alone wrong"].stderr
    records = [read_record(RunDir(tmp_path / name / "run")) for name in ("own", "alone")]
    for record, name in zip(records, ("own", "alone"), strict=True):
        assert record.attempts[-1].directory == str(tmp_path / name)
    own_words, words_alone = (record.attempts[-1].command for record in records)
    assert own_words == tuple("auto" if word == "off" else word for word in words_alone)
    summary = read_summary(RunDir(tmp_path / "own" / "run"))
    assert summary is not None
    assert f"Time: {summary.waited_s:.1f} s" in own.stdout.decode()


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (resource.RLIMIT_NOFILE, 11),  # too few to write the store of the reads
        (resource.RLIMIT_NOFILE, 12),  # too few to open a shard
        (resource.RLIMIT_FSIZE, 4096),
    ],
)
def test_a_limit_ends_a_child_as_it_ends_a_process_of_its_own(
    tmp_path: Path, some_reads: Path, models: Path, kind: int, limit: int
) -> None:
    def set_limit() -> None:
        resource.setrlimit(kind, (limit, limit))

    ends = []
    with serving(tmp_path, environment(tmp_path)):
        for serve in ("auto", "off"):
            words = (str(some_reads), "-o", "run", "--serve", serve)
            folder = tmp_path / serve
            run = in_folder(tmp_path, folder, *words, models=models, preexec_fn=set_limit)
            errors = run.stderr.decode()
            assert "tried again" not in errors  # after 10 s
            last_line = errors.splitlines()[-1].replace(str(folder), "")
            ends.append((run.returncode, without_free_space(last_line)))
    assert ends[0] == ends[1]
    assert ends[0][0] == 1


def without_free_space(line: str) -> str:
    """Return a message without the room on the disk, which others use, too."""
    return re.sub(r"[0-9.]+ GB free", "free", line)


def test_a_killed_command_ends_its_child_and_can_be_resumed(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path, environment(tmp_path)) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            child = child_of_server(server)
            run.kill()
            run.wait(PATIENCE_S)
            wait_for(lambda: gone([child]), "the end of the child")
        predict(tmp_path, some_reads, models, out)
        assert results(out) == alone


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_child_and_the_run_can_be_resumed(
    tmp_path: Path,
    some_reads: Path,
    models: Path,
    alone: dict[str, bytes],
    number: signal.Signals,
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path, environment(tmp_path)) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            child = child_of_server(server)
            run.send_signal(number)
            assert run.wait(PATIENCE_S) == 130
            assert gone([child])
        assert "interrupted; what was committed stays" in (tmp_path / "log").read_text()
        predict(tmp_path, some_reads, models, out)
        assert results(out) == alone


def test_a_killed_child_ends_its_command_as_if_that_was_killed(
    tmp_path: Path, some_reads: Path, models: Path
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path, environment(tmp_path)) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            child_of_server(server).kill()
            assert run.wait(PATIENCE_S) == -signal.SIGKILL


def test_two_commands_at_once_are_both_done(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    outs = [tmp_path / "first", tmp_path / "second"]
    with serving(tmp_path, environment(tmp_path)), ExitStack() as stack:
        n_before = n_handed_over(tmp_path)
        runs = []
        for out in outs:
            command = words_of(some_reads, models, out)
            log = tmp_path / f"{out.name}.log"
            runs.append(stack.enter_context(background(command, environment(tmp_path), log)))
        assert [run.wait(PATIENCE_S) for run in runs] == [0, 0]
        assert n_handed_over(tmp_path) - n_before == 2
    assert [results(out) for out in outs] == [alone, alone]


def test_a_changed_environment_lets_the_command_run_by_itself(
    tmp_path: Path, some_reads: Path, models: Path
) -> None:
    with serving(tmp_path, environment(tmp_path)):
        n_before = n_handed_over(tmp_path)
        finished = subprocess.run(
            words_of(some_reads, models, tmp_path / "run"),
            env=environment(tmp_path, OMP_NUM_THREADS="7"),
            capture_output=True,
            check=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert n_handed_over(tmp_path) == n_before
    assert "the run starts its own: it has another OMP_NUM_THREADS" in finished.stderr


def test_a_run_outlives_its_server(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path, environment(tmp_path)) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            workers = list(running_with(WORKER, family_of(server.pid)))
            assert workers
            # A stopped worker cannot finish the run before its server is killed.
            for worker in workers:
                worker.send_signal(signal.SIGSTOP)
            server.kill()
            assert run.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
            wait_for(lambda: gone(workers), "the workers to end")
    assert results(out) == alone
    said = (tmp_path / "log").read_text()
    # A server that is just dying may still be connected to, and then does not answer.
    assert re.search("the run starts its own: it (has ended|does not answer)", said)
    assert "Traceback" not in said


def test_a_killed_run_leaves_no_worker_in_its_folder_and_can_be_resumed(
    tmp_path: Path, some_reads: Path, models: Path, alone: dict[str, bytes]
) -> None:
    out = tmp_path / "run"
    with serving(tmp_path, environment(tmp_path)) as server:
        command = words_of(some_reads, models, out)
        with background(command, environment(tmp_path), tmp_path / "log") as run:
            wait_for(lambda: committed(out) >= 2, "two shards")
            (worker,) = running_with(WORKER, family_of(server.pid))
            # A stopped worker cannot finish. In this time its run has sent it the next task.
            worker.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            run.kill()
            run.wait(PATIENCE_S)
            wait_for(lambda: gone([worker]), "the worker to end")
        predict(tmp_path, some_reads, models, out, "--serve", "require")
        assert results(out) == alone


def test_a_required_server_that_does_not_run_is_one_line(
    tmp_path: Path, few_reads: Path, models: Path
) -> None:
    refused = subprocess.run(
        words_of(few_reads, models, tmp_path / "run", "--serve", "require"),
        env=environment(tmp_path),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S,
    )
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("virnuc: virnuc serve lends no worker")
    assert "start it with: virnuc serve" in refused.stderr
    assert "Traceback" not in refused.stderr
