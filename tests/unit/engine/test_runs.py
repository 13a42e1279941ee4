"""Whole runs of the engine on tiny models: real workers, really killed; the bytes are the same every time."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from contextvars import Context
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from tests.process_lookup import family_of, has_ended, kill_all, running_with
from virnuc_core import pipeline
from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.engine import process, shards
from virnuc_core.engine.embedding import RunMonitor
from virnuc_core.errors import ConfigError, RunMismatchError, WorkerError
from virnuc_core.pipeline import prepare, read_summary, stage_reads
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify_runs import verify_run
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import RunSummary, read_record, write
from virnuc_core.telemetry.log import read_telemetry

from .runs import (
    ALL_CORES,
    N_CORES,
    PAUSE_S,
    SMALL,
    classify_store,
    copy_run,
    no_workers_left,
    result_bytes,
    running_workers,
)

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine lends one core")
def test_one_and_two_workers_agree_byte_for_byte(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    summary = classify_store(tmp_path / "run", staged, tiny_models, Devices.parse("cpu:2"))
    assert result_bytes(tmp_path / "run") == result_bytes(reference)
    assert summary.shards_computed == summary.shards > 4
    assert len(summary.workers) == 2
    assert no_workers_left()


def test_each_read_has_one_fate_and_each_row_a_score(
    reference: Path, staged: tuple[Path, StageSummary]
) -> None:
    store, summary = OrfStore.open(staged[0]), read_summary(RunDir(reference))
    assert summary is not None
    assert sum(summary.fates.values()) == store.n_reads == 600
    lines = (reference / "prediction_results.txt").read_text().splitlines()
    assert len(lines) == store.n_rows + 1
    assert [line.split("\t")[0] for line in lines[1:]] == store.row_ids(0, store.n_rows)


def test_each_embedding_equals_that_of_its_sequence_alone(
    reference: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    """The slow twin: each sequence alone, straight through the encoders."""
    import torch

    from virnuc_core.encoders.checkpoint import load_encoder
    from virnuc_core.encoders.models import DnabertS, Esm2
    from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
    from virnuc_core.engine.loader import TokenRows, packed

    store, cpu = OrfStore.open(staged[0]), torch.device("cpu")
    pairs = (
        (
            load_encoder(DnabertS, tiny_models, cpu, "fp32", "reference"),
            DnabertTokenizer(tiny_models),
            store.dna,
        ),
        (load_encoder(Esm2, tiny_models, cpu, "fp32", "reference"), Esm2Tokenizer(), store.protein),
    )
    with h5py.File(reference / "embeddings.h5") as file:
        for unique in np.random.default_rng(0).integers(0, store.n_uniques, 25).tolist():
            rows_alone = []
            for encoder, tokenizer, sequence in pairs:
                tokens, starts = tokenizer.encode(sequence(unique, unique + 1))
                token_rows = TokenRows(tokens.numpy(), starts.numpy())
                ((_, batch),) = packed(token_rows, 2048, tokenizer.pad_id)
                with torch.inference_mode():
                    rows_alone.append(encoder.embed(batch)[0])
            assert torch.allclose(
                torch.cat(rows_alone), torch.from_numpy(file["embeddings"][unique]), atol=2e-5
            )


def test_a_finished_run_is_not_computed_again(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    second_summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    assert second_summary == read_summary(RunDir(reference))
    assert len(list((tmp_path / "run" / "telemetry").glob("*.json"))) == 1


@pytest.mark.parametrize("asked", [0, 3])
def test_as_many_processes_as_stage_write_the_results(
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    reference: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: int,
) -> None:
    messages = []
    writing = pipeline.write_results
    n_processes = list(inspect.signature(writing).parameters).index("workers")
    monkeypatch.setattr(
        pipeline,
        "write_results",
        lambda *arguments: messages.append(arguments[n_processes]) or writing(*arguments),
    )
    root = copy_run(reference, tmp_path / "run")
    classify_store(
        root, staged, tiny_models, Devices.parse("cpu:1"), threshold=0.4, stage_workers=asked
    )
    assert messages == [asked or min(8, len(os.sched_getaffinity(0)))]


@pytest.mark.slow
def test_killed_workers_cost_nothing_but_time(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    """SIGKILL a worker after the second and the fourth commit: it is restarted and the bytes are the same."""
    root, stop = tmp_path / "run", threading.Event()

    def kill_now_and_then() -> None:
        for count in (2, 4):
            while len(list((root / "shards").glob("0*.h5"))) < count and not stop.is_set():
                time.sleep(0.005)
            victims = running_workers()[:1]
            kill_all(victims)
            while not all(map(has_ended, victims)):
                time.sleep(0.005)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    stop.set()
    killer.join()
    assert summary.restarts >= 1
    assert summary.rows_set_aside == 0
    assert result_bytes(root) == result_bytes(reference)
    assert no_workers_left()


@pytest.mark.slow
def test_a_run_killed_half_way_goes_on_with_fewer_devices_to_the_same_bytes(
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    reads_file: Path,
    tiny_models: Path,
    reference: Path,
) -> None:
    root = tmp_path / "run"
    program = "from tests.unit.engine.runs import classify_in_child; classify_in_child()"
    arguments = [
        str(root),
        str(staged[0]),
        str(tiny_models),
        str(reads_file),
        ALL_CORES,
        SMALL.model_dump_json(),
    ]
    run = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=Path(__file__).parents[3]
    )
    is_killed = False
    while (
        len(list((root / "shards").glob("0*.h5"))) < 4
        or b"ended (status" not in RunDir(root).journal.read_bytes()
    ):
        time.sleep(0.005)
        assert run.poll() is None, "the run ended before it could be killed"
        if not is_killed and list((root / "shards").glob("0*.h5")):
            workers = running_with("virnuc_core.engine.worker", family_of(run.pid))
            kill_all(workers[:1])
            is_killed = True
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive
    num_before = len(list((root / "shards").glob("0*.h5")))
    summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    assert summary.resumed
    assert 0 < summary.shards_computed <= summary.shards - num_before
    assert result_bytes(root) == result_bytes(reference)
    attempts_are_summed(root, summary, num_before)


def attempts_are_summed(root: Path, summary: RunSummary, before: int) -> None:
    """Wall times, deaths and telemetry of an attempt that was killed with `before` shards on disk, and of the rest."""
    first_attempt, second = summary.attempts
    assert len(first_attempt.deaths) >= 1
    assert (*first_attempt.deaths, *second.deaths) == summary.deaths
    assert summary.restarts == len(summary.deaths or ())
    assert first_attempt.wall_s
    assert second.wall_s
    assert first_attempt.worked_s is not None
    assert 0 < first_attempt.worked_s < first_attempt.wall_s
    assert (summary.wall_s, summary.sequences_per_hour) == (
        pytest.approx(first_attempt.wall_s + second.wall_s),
        None,
    )
    assert first_attempt.shards
    assert before - N_CORES <= first_attempt.shards <= before, (
        "a shard may have been committed and not been told of yet"
    )
    for attempt in (first_attempt, second):
        telemetry = read_telemetry(
            RunDir(root).telemetry / f"{Path(attempt.telemetry or '').stem}.h5"
        )
        assert len(telemetry.shards) == attempt.shards
        assert len(telemetry.batches) > 0
        assert len(telemetry.host) > 0
    assert summary.telemetry == second.telemetry
    stage_seconds = {
        name: seconds for name, seconds in summary.stages.items() if seconds is not None
    }
    assert sum(stage_seconds.values()) - 2 * stage_seconds["Overlapped"] == pytest.approx(
        summary.total_s, rel=0.01, abs=PAUSE_S
    )
    assert stage_seconds["Earlier attempts: committed"] == pytest.approx(first_attempt.worked_s)
    assert read_record(RunDir(root)).attempts == summary.attempts
    assert not RunDir(root).journal.exists()
    assert told_otherwise(root) == [], "all of it follows from the raw files"


def told_otherwise(root: Path) -> list[str]:
    """What a run tells of itself and its raw files do not give."""
    verification = Verification()
    verify_run(verification, RawFolder(root.parent), root.name)
    return verification.differences


def test_a_run_with_an_earlier_attempt_reports_no_rate(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    for path in (RunDir(root).summary, *(root / "shards").glob("0*.h5")):
        path.unlink()
    summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    first_attempt, second = summary.attempts
    assert summary.wall_s == pytest.approx((first_attempt.wall_s or 0.0) + (second.wall_s or 0.0))
    assert (summary.shards_reused, summary.resumed, summary.sequences_per_hour) == (0, True, None)
    assert told_otherwise(root) == []


def test_damaged_shards_are_computed_again(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    root = copy_run(reference, tmp_path / "run")
    victims = sorted((root / "shards").glob("0*.h5"))[:2]
    victims[0].write_bytes(victims[0].read_bytes()[:100])
    body = bytearray(victims[1].read_bytes())
    body[len(body) // 2] ^= 255
    victims[1].write_bytes(body)
    summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    assert summary.shards_computed == 2
    assert len(summary.damaged) == 2
    assert result_bytes(root) == result_bytes(reference)
    assert told_otherwise(root) == [], "the first attempt was whole, and said so"


def test_another_setting_weights_or_reads_are_refused_by_name(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    reference: Path,
) -> None:
    root = copy_run(reference, tmp_path / "run")
    other_settings = SMALL.model_copy(update={"token_budget": 2048})
    with pytest.raises(RunMismatchError, match="token_budget 1024 → 2048"):
        classify_store(root, staged, tiny_models, Devices.parse("cpu:1"), engine=other_settings)
    names = (
        "shards/notes.txt",
        "logs/app.log",
        "telemetry/mine.json",
        "telemetry/telemetry_of_mine.json",
        "letter.txt",
    )
    theirs = [root / name for name in names]
    for path in theirs:
        path.write_text("precious")
    old = (root / "shards" / "00000.h5").stat().st_ino
    summary = classify_store(
        root, staged, tiny_models, Devices.parse("cpu:1"), engine=other_settings, force=True
    )
    assert summary.shards_computed == summary.shards
    assert [path.read_text() for path in theirs] == ["precious"] * len(theirs)
    assert (root / "shards" / "00000.h5").stat().st_ino != old
    assert (
        "not made by virnuc and left as it is: logs/app.log, shards/notes.txt, telemetry/mine.json"
        in caplog.text
    )


def test_a_directory_in_use_is_refused(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    from virnuc_core.rundir import run_lock

    with ExitStack() as second_holder:
        Context().run(second_holder.enter_context, run_lock(tmp_path / "run"))
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is working here"):
            classify_store(tmp_path / "run", staged, tiny_models, Devices.parse("cpu:1"))


def test_ending_all_children_interrupts_the_run_and_it_can_go_on(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path, reference: Path
) -> None:
    root = tmp_path / "run"
    errors: list[BaseException] = []

    def run() -> None:
        try:
            classify_store(
                root, staged, tiny_models, Devices.parse("cpu:1"), monitor=RunMonitor(sample_s=0.1)
            )
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not list((root / "shards").glob("0*.h5")):
        time.sleep(0.01)
    process.end_all_children(3)
    thread.join(120)
    assert not thread.is_alive()
    assert "interrupted" in str(errors[0])
    assert no_workers_left()
    summary = classify_store(root, staged, tiny_models, Devices.parse("cpu:1"))
    assert result_bytes(root) == result_bytes(reference)
    assert [bool(attempt.wall_s and attempt.telemetry) for attempt in summary.attempts] == [
        True,
        True,
    ]


def test_the_plan_does_not_depend_on_the_devices(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    jobs = [
        prepare(
            RunDir(tmp_path / text),
            staged[0],
            ClassifySpec(models=tiny_models, devices=Devices.parse(text), engine=SMALL),
        )
        for text in ("cpu:1", "cpu:2")
    ]
    assert jobs[0].plan == jobs[1].plan
    assert shards.read_plan(RunDir(tmp_path / "cpu:1")) == jobs[0].plan


def test_a_start_says_that_it_continues_or_removes_the_run_in_its_directory(
    tmp_path: Path,
    staged: tuple[Path, StageSummary],
    tiny_models: Path,
    reference: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "virnuc_core.pipeline")
    run = RunDir(Path(shutil.copytree(reference, tmp_path / "run")))
    spec = ClassifySpec(models=tiny_models, devices=Devices.parse("cpu:1"), engine=SMALL)
    n_shards = len(shards.read_plan(run))
    run.summary.unlink()
    shards.shard_path(run, n_shards - 1).unlink()
    prepare(run, staged[0], spec)
    prepare(run, staged[0], spec.model_copy(update={"force": True}))
    there = f"{n_shards - 1} of {n_shards} shards are there"
    lines = [record.message for record in caplog.records]
    assert f"{run.root}: continues the run that was begun here; {there}" in lines
    assert lines[-1] == f"{run.root}: the earlier run in this directory is removed, as you asked"


def test_other_reads_never_replace_the_store_of_a_run(
    tmp_path: Path, staged: tuple[Path, StageSummary], reference: Path
) -> None:
    """The store is what a run's shards refer to: refused reads must leave it as it was."""

    run, other_reads = RunDir(tmp_path / "run"), tmp_path / "other.fasta"
    other_reads.write_text(">x\n" + "ACGGT" * 40 + "\n")
    shutil.copy(staged[0], copy_run(reference, run.root) / "orfs.h5")
    bytes_before = run.store.read_bytes()
    with pytest.raises(RunMismatchError, match="other reads"):
        stage_reads(StageSpec(reads=(str(other_reads),), model_length=300), run.store)
    assert run.store.read_bytes() == bytes_before
    assert (
        stage_reads(
            StageSpec(reads=(str(other_reads),), model_length=300), run.store, force=True
        ).counts.n_reads
        == 1
    )


def test_a_store_that_was_replaced_after_staging_is_refused(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    """Another run's staging between the two steps of this one."""
    store, other_reads = tmp_path / "orfs.h5", tmp_path / "other.fasta"
    shutil.copy(staged[0], store)
    own = staged[1].model_copy(update={"store": store})
    other_reads.write_text(">x\n" + "ACGGT" * 40 + "\n")
    stage(StageSpec(reads=(str(other_reads),), model_length=300), store)
    with pytest.raises(RunMismatchError, match="no longer holds the reads"):
        classify_store(tmp_path / "run", (store, own), tiny_models, Devices.parse("cpu:1"))
    assert not RunDir(tmp_path / "run").record.exists()


def test_force_stages_again(tmp_path: Path, reads_file: Path) -> None:
    run, spec = RunDir(tmp_path / "run"), StageSpec(reads=(str(reads_file),), model_length=300)
    assert [stage_reads(spec, run.store, force=force).reused for force in (False, False, True)] == [
        False,
        True,
        False,
    ]


def test_nothing_is_staged_into_a_directory_in_use(tmp_path: Path, reads_file: Path) -> None:
    from virnuc_core.rundir import run_lock

    run = RunDir(tmp_path / "run")
    with ExitStack() as second_holder:
        Context().run(second_holder.enter_context, run_lock(run.root))
        with pytest.raises(ConfigError, match="is working here"):
            stage_reads(StageSpec(reads=(str(reads_file),), model_length=300), run.store)
    assert not run.store.exists()


def test_a_worker_refuses_a_store_that_is_not_the_plans(
    tmp_path: Path, staged: tuple[Path, StageSummary], tiny_models: Path
) -> None:
    from virnuc_core.engine.loader import Source, tokenise

    with pytest.raises(ConfigError, match="no longer the store"):
        tokenise(Source(staged[0], "another fingerprint", tiny_models), (0, 1))
    assert len(tokenise(Source(staged[0], staged[1].fingerprint, tiny_models), (0, 1))) == 2


def test_a_damaged_summary_counts_as_an_incomplete_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("{", "{}", '{"schema_version": 1, "devices": []}'):
        run.summary.write_text(text)
        assert read_summary(run) is None
    full_summary = RunSummary(total_s=3.0, n_reads=4, threshold=0.5, shards=1)
    write(run.summary, full_summary)
    assert read_summary(run) == full_summary
    write(run.summary, full_summary.model_copy(update={"stopped_at_limit": True}))
    assert read_summary(run) is None
