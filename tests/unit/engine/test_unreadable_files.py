"""A file that cannot be read at the moment is neither damaged nor absent: the run stops."""

from __future__ import annotations

import errno
import itertools
import json
import threading
import time
from pathlib import Path

import pytest

from tests.failing_files import OPEN, READ, STAT, failing_calls, words_of
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import LocalWorkers, worker_specs
from virnuc_core.engine.shards import ShardTask
from virnuc_core.errors import UnreadableError
from virnuc_core.pipeline import read_summary
from virnuc_core.rundir import RunDir

from .forked_programs import Ended, ForkedPrograms
from .runs import ONE_CORE, SMALL, copy_run

# Errors that say nothing about the content of a file.
PASSING_ERRORS = (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOLCK, errno.ETIMEDOUT)
# `make test` has each call with one error; the other pairs are in `make test-slow`.
QUICK_FAILURES = ((OPEN, errno.ESTALE), (READ, errno.EIO))
FAILURES = tuple(
    pytest.param(
        *failure,
        marks=() if failure in QUICK_FAILURES else pytest.mark.slow,
        id=f"{'open' if failure[0] == OPEN else 'read'}-{errno.errorcode[failure[1]]}",
    )
    for failure in itertools.product((OPEN, READ), PASSING_ERRORS)
)
# Every kind of file that a run reads again, and what fails: to open it, to read it, to look at it.
FILES_READ_AGAIN = {
    "shard": ("/shards/00001.h5", OPEN),
    "shard while reading": ("/shards/00001.h5", READ),
    "state of a shard": ("/shards/00001.h5", STAT),
    "plan": ("/shards/plan.json", OPEN),
    "store": ("/orfs.h5", OPEN),
    "store while reading": ("/orfs.h5", READ),
    "summary of staging": ("/orfs.made.json", OPEN),
    "record": ("/run/run.json", OPEN),
    "state of the record": ("/run/run.json", STAT),
    "marker": ("/run/.virnuc", OPEN),
    "state of the marker": ("/run/.virnuc", STAT),
    "journal": ("/telemetry/attempt.jsonl", OPEN),
    "shape of the classifier": ("/head/config.json", OPEN),
    "weights": ("/esm2/model.safetensors", OPEN),
    "reads": ("/small.fasta", OPEN),
}

# `make test` has one file of each stage of a run; the others are in `make test-slow`.
QUICK_FILES = ("shard", "plan", "store", "record", "weights", "reads")


def predict(
    programs: ForkedPrograms,
    root: Path,
    models: Path,
    reads: Path,
    variables: dict[str, str] | None = None,
) -> Ended:
    """Predict in a child process, and return how it ended."""
    arguments = (root, models, reads)
    return programs.run("predict_in_child", arguments=arguments, variables=variables)


def contents(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files, by their path in the directory."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def require_untouched(root: Path, files_before: dict[str, bytes]) -> None:
    """Check that no file was moved, removed or changed, and that nothing was computed.

    Only the telemetry of the attempt that the journal describes may have been written.
    """
    files_after = contents(root)
    assert {name: files_after.get(name) for name in files_before} == files_before
    new_names = files_after.keys() - files_before.keys()
    assert {name.split("_")[0] for name in new_names} <= {"telemetry/telemetry"}


@pytest.fixture(scope="module")
def finished_run(
    programs: ForkedPrograms,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: Path,
    reads_file: Path,
) -> Path:
    """Predict the reads once, with the files of all stages in one directory."""
    root = tmp_path_factory.mktemp("finished") / "run"
    child = predict(programs, root, tiny_models, reads_file)
    assert child.returncode == 0, child.stderr
    return root


@pytest.fixture
def unfinished_run(tmp_path: Path, finished_run: Path) -> Path:
    """Copy a run, and take away its summary and one shard, as if it had been killed."""
    root = copy_run(finished_run, tmp_path / "run")
    (root / "summary.json").unlink()
    (root / "shards" / "00002.h5").unlink()
    journal = RunDir(root).journal
    journal.parent.mkdir(exist_ok=True)
    start = json.dumps([time.monotonic(), "2026-01-01T00:00:00+00:00", "cpu-core-0"])
    journal.write_text(json.dumps(start) + "\n")
    return root


@pytest.mark.parametrize(("calls", "number"), FAILURES)
def test_shards_that_cannot_be_read_stop_the_run_and_stay(
    programs: ForkedPrograms,
    unfinished_run: Path,
    tiny_models: Path,
    reads_file: Path,
    calls: str,
    number: int,
) -> None:
    files_before = contents(unfinished_run)

    failing = failing_calls("/shards/0", number, calls)
    child = predict(programs, unfinished_run, tiny_models, reads_file, failing)

    assert child.returncode != 0
    last_line = child.stderr.strip().splitlines()[-1]
    assert last_line.startswith("UnreadableError: ")
    assert words_of(number) in last_line
    require_untouched(unfinished_run, files_before)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_FILES else pytest.mark.slow)
        for name in FILES_READ_AGAIN
    ],
)
def test_no_file_that_cannot_be_read_is_taken_for_absent_or_damaged(
    programs: ForkedPrograms, name: str, unfinished_run: Path, tiny_models: Path, reads_file: Path
) -> None:
    path, calls = FILES_READ_AGAIN[name]
    files_before = contents(unfinished_run)

    failing = failing_calls(path, errno.ESTALE, calls)
    child = predict(programs, unfinished_run, tiny_models, reads_file, failing)

    assert child.returncode != 0, child.stderr
    last_line = child.stderr.strip().splitlines()[-1]
    assert words_of(errno.ESTALE) in last_line
    assert "Error: " in last_line
    require_untouched(unfinished_run, files_before)


@pytest.mark.parametrize(
    "name",
    [
        "shard",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FILES_READ_AGAIN
            if name != "shard"
        ),
    ],
)
def test_after_a_file_could_not_be_read_the_next_start_computes_only_what_is_missing(
    programs: ForkedPrograms, name: str, unfinished_run: Path, tiny_models: Path, reads_file: Path
) -> None:
    path, calls = FILES_READ_AGAIN[name]
    failing = failing_calls(path, errno.ESTALE, calls)
    child = predict(programs, unfinished_run, tiny_models, reads_file, failing)
    assert child.returncode != 0, child.stderr

    child = predict(programs, unfinished_run, tiny_models, reads_file)

    assert child.returncode == 0, child.stderr
    summary = read_summary(RunDir(unfinished_run))
    assert summary is not None
    assert summary.shards_computed == 1
    assert summary.damaged == ()


def test_a_handle_that_is_stale_for_a_moment_is_waited_for(
    programs: ForkedPrograms,
    tmp_path: Path,
    unfinished_run: Path,
    tiny_models: Path,
    reads_file: Path,
) -> None:
    server_is_away = tmp_path / "server is away"
    failed_calls = tmp_path / "failed calls"
    server_is_away.touch()
    failing = failing_calls("/shards/0", errno.ESTALE, OPEN, while_file=server_is_away)
    failing["FAIL_LOG"] = str(failed_calls)

    def bring_back() -> None:
        """Let calls succeed again after the first one has failed."""
        deadline_s = time.monotonic() + 60
        while not failed_calls.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        server_is_away.unlink()

    server = threading.Thread(target=bring_back)
    server.start()
    child = predict(programs, unfinished_run, tiny_models, reads_file, failing)
    server.join()

    assert child.returncode == 0, child.stderr
    assert failed_calls.stat().st_size > 0
    summary = read_summary(RunDir(unfinished_run))
    assert summary is not None
    assert (summary.shards_computed, summary.damaged) == (1, ())


@pytest.mark.parametrize(
    "number",
    [
        errno.ESTALE,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET)
        ),
    ],
    ids=errno.errorcode.get,
)
def test_a_worker_that_cannot_write_is_not_the_fault_of_a_row(
    programs: ForkedPrograms, tmp_path: Path, tiny_models: Path, reads_file: Path, number: int
) -> None:
    """The file server goes away after the first shard. No row is searched for, or left out."""
    server_is_away = tmp_path / "server is away"
    failing = failing_calls("/shards/.", number, OPEN, while_file=server_is_away)

    child = lose_while_computing(
        programs, "file server away", tmp_path, tiny_models, reads_file, failing
    )

    assert words_of(number) in child.stderr.strip().splitlines()[-1]
    assert "searching for the row" not in child.stderr
    server_is_away.unlink()
    require_complete_run(programs, tmp_path / "run", tiny_models, reads_file)


def test_a_bus_error_is_not_the_fault_of_a_row(
    tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends a worker with SIGBUS if it cannot read a part of a mapped file."""
    # The module of the worker is in the folder of the tests, which is on no path by itself.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    specs = worker_specs(tiny_models, resolve(ONE_CORE), SMALL)
    workers = LocalWorkers("tests.unit.engine.bus_error_worker")
    task = ShardTask(
        run=str(tmp_path), store="run/orfs.h5", reads_fingerprint="", shard=0, lo=0, hi=100
    )

    with (
        Pool(specs, workers) as pool,
        pytest.raises(
            UnreadableError,
            match=r"run/orfs\.h5: cannot be read: the system ended 2 workers .* bus error",
        ),
    ):
        pool.compute([task], tmp_path, lambda event: None)


@pytest.mark.slow
def test_a_store_that_is_cut_off_is_not_the_fault_of_a_row(
    programs: ForkedPrograms, tmp_path: Path, tiny_models: Path, reads_file: Path
) -> None:
    child = lose_while_computing(programs, "store cut off", tmp_path, tiny_models, reads_file)

    last_line = child.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"InputError: {tmp_path}/run/orfs.h5: not a readable ORF store")
    assert "searching for the row" not in child.stderr
    require_complete_run(programs, tmp_path / "run", tiny_models, reads_file)


def lose_while_computing(
    programs: ForkedPrograms,
    way: str,
    folder: Path,
    models: Path,
    reads: Path,
    variables: dict[str, str] | None = None,
) -> Ended:
    """Predict in a child process that loses something after its first shard, and fails."""
    arguments = (folder / "run", models, reads, "computing", way)
    child = programs.run("predict_in_lost_directory", arguments=arguments, variables=variables)
    assert child.returncode != 0
    return child


def require_complete_run(programs: ForkedPrograms, root: Path, models: Path, reads: Path) -> None:
    """Start the run again, and check that it becomes complete without leaving out a sequence."""
    child = predict(programs, root, models, reads)
    assert child.returncode == 0, child.stderr
    summary = read_summary(RunDir(root))
    assert summary is not None
    assert summary.rows_set_aside == 0


KINDS_OF_FILES = (
    "esm2/model.safetensors",
    "esm2/config.json",
    "esm2/int8.safetensors",
    "model.safetensors.index.json",
    "model.pth",
    "tokenizer.json",
    "history.jsonl",
    "reads.bam",
    "reads.fasta",
    "tuning.json",
    "telemetry_1.h5",
    "embeddings.h5",
    ".virnuc",
)


@pytest.mark.parametrize("calls", [OPEN, READ], ids=["open", "read"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_no_function_that_reads_a_file_mistakes_an_error_for_an_answer(
    programs: ForkedPrograms, tmp_path: Path, number: int, calls: str
) -> None:
    folder = tmp_path / "unreadable"
    for name in KINDS_OF_FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content\n")

    child = programs.run(
        "read_all_kinds_in_child",
        arguments=(folder,),
        variables=failing_calls("/unreadable/", number, calls),
    )

    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    mistakes = {}
    for name, result in results.items():
        if not (result.startswith("UnreadableError: ") and words_of(number) in result):
            mistakes[name] = result
    assert mistakes == {}


def test_a_shard_with_other_bytes_is_still_called_damaged(
    programs: ForkedPrograms, unfinished_run: Path, tiny_models: Path, reads_file: Path
) -> None:
    shard = unfinished_run / "shards" / "00001.h5"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    child = predict(programs, unfinished_run, tiny_models, reads_file)

    assert child.returncode == 0, child.stderr
    summary = read_summary(RunDir(unfinished_run))
    assert summary is not None
    assert summary.shards_computed == 2
    assert "00001" in summary.damaged[0]
    assert (unfinished_run / "shards" / "damaged" / "00001.0.h5").read_bytes() == content
