"""The baselines as whole runs in their own processes, on a small store with random models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.process_lookup import running_with
from virnuc_core.baseline import run as baseline_run
from virnuc_core.baseline.networks import embed_rows, load_network
from virnuc_core.baseline.run import load_rows, run_baseline
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.process import end_all_children
from virnuc_core.errors import ConfigError, InputError, WeightsError, WorkerError
from virnuc_core.profiles import BaselineSpec
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir, run_lock
from virnuc_core.runfiles import RunRecord, read, read_record
from virnuc_core.telemetry.tables import STAGES
from virnuc_core.validation import BaselineSummary

pytestmark = pytest.mark.usefixtures("forked_workers")

CPU = torch.device("cpu")


def cores(count: int) -> Devices:
    if len(os.sched_getaffinity(0)) < count:
        pytest.skip(f"needs {count} cores")
    return Devices.parse(f"cpu:{count}")


def predictions(run: RunDir) -> dict[str, tuple[float, float]]:
    lines = [line.split("\t") for line in run.predictions.read_text().splitlines()[1:]]
    return {line[0]: (float(line[2]), float(line[3])) for line in lines}


def children() -> list[psutil.Process]:
    """Return the workers of baselines among the descendants of this process."""
    descendants = psutil.Process().children(recursive=True)
    return running_with("virnuc_core.baseline.worker", descendants)


@pytest.fixture(scope="module")
def vanilla(
    tmp_path_factory: pytest.TempPathFactory, store: OrfStore, models: Path
) -> tuple[RunDir, BaselineSummary]:
    run, progress = RunDir(tmp_path_factory.mktemp("vanilla")), list[float]()
    summary = run_baseline(
        run, store.path, models, cores(1), BaselineSpec(name="vanilla"), on_progress=progress.append
    )
    assert len(progress) > 2, "rows are told while a file is worked on, not only at its end"
    return run, summary


def test_vanilla_is_the_method_row_by_row(
    vanilla: tuple[RunDir, BaselineSummary], store: OrfStore, models: Path
) -> None:
    unique = store.row_unique[:]
    dna, protein = load_rows(store.dna, unique), load_rows(store.protein, unique)
    rows = {"dnabert_s": dna, "esm2": protein}
    each = [
        embed_rows(load_network(models, op, CPU, torch.float32), s, [[i] for i in range(len(s))])
        for op, s in rows.items()
    ]
    scores = Head(*open_part(models, HeadShape), CPU).scores(torch.cat(each, dim=1)).numpy()
    prediction_rows = predictions(vanilla[0])
    assert list(prediction_rows) == list(
        dict.fromkeys(store.row_ids(0, store.n_rows, original=True))
    )
    ours = np.array(
        [prediction_rows[name] for name in store.row_ids(0, store.n_rows, original=True)]
    )
    assert np.abs(ours - scores).max() < 1e-5  # float32, padded against one by one
    assert scores[:, 1].std() > 0.01, "the scores must differ for the comparison to mean anything"


def test_vanilla_says_what_it_did(vanilla: tuple[RunDir, BaselineSummary], store: OrfStore) -> None:
    run, summary = vanilla
    assert tuple(summary.stages) == STAGES[2:], "chunks and frames come from the store"
    assert summary.stages["DNABERT-S"] > 0
    assert summary.stages["ESM-2"] > 0
    assert sum(summary.stages.values()) <= summary.wall_s
    assert summary.wall_s == summary.measured_s
    assert summary.subset is None
    assert (summary.n_reads, summary.n_rows, summary.measured_rows) == (
        store.n_reads,
        store.n_rows,
        store.n_rows,
    )
    assert read(run.summary, BaselineSummary) == summary
    assert json.loads(run.summary.read_text())["schema_version"] == 1
    assert not children()
    assert not (run.root / "baseline_files").exists()
    chunks = {name[:-2] for name in store.row_ids(0, store.n_rows, original=True)}
    assert {line.split("\t")[0] for line in run.consensus.read_text().splitlines()[1:]} == chunks


def test_v1_gives_the_same_bytes_on_any_number_of_devices_and_vanillas_scores(
    tmp_path: Path,
    vanilla: tuple[RunDir, BaselineSummary],
    store: OrfStore,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(baseline_run.batches, "FILE_ROWS", 60)
    runs = []
    for count in (1, 2):
        runs.append(RunDir(tmp_path / str(count)))
        summary = run_baseline(runs[-1], store.path, models, cores(count), BaselineSpec(name="v1"))
        assert len(summary.devices) == count
    assert runs[0].predictions.read_bytes() == runs[1].predictions.read_bytes()
    assert runs[0].consensus.read_bytes() == runs[1].consensus.read_bytes()
    ours, theirs = predictions(runs[0]), predictions(vanilla[0])
    assert ours.keys() == theirs.keys()
    assert (
        max(abs(ours[name][1] - theirs[name][1]) for name in ours) < 1e-5
    )  # float32, other batches


def test_a_subset_is_a_part_of_the_whole_and_its_time_is_scaled(
    tmp_path: Path, vanilla: tuple[RunDir, BaselineSummary], store: OrfStore, models: Path
) -> None:
    run = RunDir(tmp_path)
    progress: list[float] = []
    spec = BaselineSpec(name="vanilla", reads=40)
    summary = run_baseline(run, store.path, models, cores(1), spec, on_progress=progress.append)
    all_predictions, part = predictions(vanilla[0]), predictions(run)
    assert 0 < len(part) < len(all_predictions) / 2
    assert all(abs(part[name][1] - all_predictions[name][1]) < 1e-5 for name in part)
    assert [name for name in all_predictions if name in part] == list(part)
    assert summary.subset is not None
    assert summary.subset.reads == 40
    residues = np.diff(store.protein_offsets) + 2
    assert summary.subset.total_tokens == int(residues[store.row_unique[:]].sum())
    assert summary.subset.tokens < summary.subset.total_tokens / 2
    assert summary.measured_s is not None
    assert summary.wall_s is not None
    ratio = summary.subset.total_tokens / summary.subset.tokens
    assert summary.wall_s < ratio * summary.measured_s, (
        "starting and loading happen once and must not be scaled"
    )
    assert summary.stages["ESM-2"] > summary.measured_stages["ESM-2"]
    assert progress[-1] == 1.0


def test_a_finished_baseline_is_reused_and_another_is_not(
    tmp_path: Path, vanilla: tuple[RunDir, BaselineSummary], store: OrfStore, models: Path
) -> None:
    run = RunDir(Path(shutil.copytree(vanilla[0].root, tmp_path / "run")))
    second_result = run_baseline(run, store.path, models, cores(1), BaselineSpec(name="vanilla"))
    assert second_result.reused
    assert second_result.model_copy(update={"reused": False}) == vanilla[1]
    other_result = run_baseline(
        run, store.path, models, cores(1), BaselineSpec(name="v1", reads=21)
    )
    assert not other_result.reused


def test_the_record_says_what_the_baseline_was_made_from(
    vanilla: tuple[RunDir, BaselineSummary], store: OrfStore, models: Path
) -> None:
    record = read_record(vanilla[0])
    assert record.fingerprints == {"reads": store.fingerprint, **fingerprint(models)}
    assert record.model_length == 500
    assert (vanilla[0].root / record.store).resolve() == store.path.resolve()


def test_a_recorded_baseline_writes_its_record_and_no_results(
    tmp_path: Path, store: OrfStore, models: Path
) -> None:
    spec = BaselineSpec(
        source="recorded", recorded_seconds=12_600, recorded_device="RTX 4090", recorded_devices=2
    )
    (tmp_path / "run.json").write_text("of an earlier, measured one")
    summary = run_baseline(RunDir(tmp_path), store.path, models, cores(1), spec)
    assert (summary.source, summary.wall_s, summary.measured_s) == ("recorded", 12_600, None)
    assert [device.name for device in summary.devices] == ["RTX 4090", "RTX 4090"]
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(ConfigError, match="recorded_seconds"):
        run_baseline(
            RunDir(tmp_path), store.path, models, cores(1), BaselineSpec(source="recorded")
        )


@pytest.mark.parametrize("text", ["", ">a\n" + "TAATTAATTAA" * 9 + "\n"])
def test_no_rows_give_header_only_files(tmp_path: Path, models: Path, text: str) -> None:
    (tmp_path / "reads.fa").write_text(text)
    stage(StageSpec(reads=(str(tmp_path / "reads.fa"),)), tmp_path / "orfs.h5")
    run = RunDir(tmp_path / "run")
    summary = run_baseline(run, tmp_path / "orfs.h5", models, cores(1), BaselineSpec(name="v1"))
    assert summary.n_rows == 0
    assert run.predictions.read_text() == "Sequence_ID\tPrediction\tscore1\tscore2\n"


def test_a_subset_without_open_frames_is_refused(tmp_path: Path, models: Path) -> None:
    sequence_without_frames = ">c%d\n" + "TAATTAATTAA" * 9 + "\n"
    text = (
        "".join(sequence_without_frames % i for i in range(50))
        + ">open\n"
        + "ATGAAACCC" * 12
        + "\n"
    )
    (tmp_path / "reads.fa").write_text(text)
    stage(StageSpec(reads=(str(tmp_path / "reads.fa"),)), tmp_path / "orfs.h5")
    with pytest.raises(InputError, match="draw more"):
        run_baseline(
            RunDir(tmp_path / "run"), tmp_path / "orfs.h5", models, cores(1), BaselineSpec(reads=1)
        )


def test_a_workers_own_error_arrives_by_its_type(
    tmp_path: Path, store: OrfStore, models: Path
) -> None:
    broken_models = tmp_path / "models"
    for part in ("esm2", "dnabert_s", "head"):
        (broken_models / part).mkdir(parents=True)
        for file in (models / part).iterdir():
            (broken_models / part / file.name).write_bytes(file.read_bytes())
    config = broken_models / "esm2" / "config.json"
    config.write_text(config.read_text().replace('"layers": 2', '"layers": 3'))
    with pytest.raises(WeightsError, match="layers"):
        run_baseline(
            RunDir(tmp_path / "run"), store.path, broken_models, cores(1), BaselineSpec(reads=20)
        )
    assert not children()
    assert not (tmp_path / "run" / "summary.json").exists()


# --- deaths ---


@pytest.mark.slow
def test_a_finished_baseline_is_held_against_what_it_left(
    tmp_path: Path, store: OrfStore, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, spec = RunDir(tmp_path), BaselineSpec(name="v1", reads=20)
    first_result = run_baseline(run, store.path, models, cores(1), spec)
    bytes_before = run.predictions.read_bytes()
    run.record.write_text("{")
    assert not run_baseline(run, store.path, models, cores(1), spec).reused, (
        "run.json names the machine of its times"
    )
    assert read(run.record, RunRecord).fingerprints["reads"] == store.fingerprint
    run.predictions.unlink()
    assert not run_baseline(run, store.path, models, cores(1), spec).reused
    run.predictions.write_bytes(bytes_before[:-1] + b"9")
    assert not run_baseline(run, store.path, models, cores(1), spec).reused
    assert run.predictions.read_bytes() == bytes_before
    run.summary.write_text("[")
    assert run_baseline(run, store.path, models, cores(1), spec).files == first_result.files
    messages = [record.message for record in caplog.records]
    assert [
        next(word for word in ("run.json", "prediction_results", "summary.json") if word in line)
        for line in messages
    ] == [
        "run.json",  # is damaged,
        "run.json",  # so the baseline is measured again
        "prediction_results",
        "prediction_results",
        "summary.json",
    ]


def kill_once(found: list[int]) -> Callable[[float], None]:
    """Ends the first worker seen, the hard way, at the first progress."""

    def kill(_: float) -> None:
        if not found:
            found.append(children()[0].pid)
            os.kill(found[0], signal.SIGKILL)

    return kill


def test_a_killed_worker_ends_the_baseline_and_leaves_nothing(
    tmp_path: Path, store: OrfStore, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline_run.batches, "FILE_ROWS", 30)
    killed_ids: list[int] = []
    run = RunDir(tmp_path)
    with pytest.raises(WorkerError, match=r"ended \(status -9\)"):
        run_baseline(
            run,
            store.path,
            models,
            cores(2),
            BaselineSpec(name="v1"),
            on_progress=kill_once(killed_ids),
        )
    assert killed_ids
    assert not children()
    assert not run.summary.exists()
    assert not run.predictions.exists()


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_it_loads_ends_the_baseline(
    tmp_path: Path, store: OrfStore, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        baseline_run, "EngineSpec", partial(EngineSpec, heartbeat_s=0.1, silence_s=1.5)
    )

    def stop() -> None:
        while not (process_ids := children()):
            time.sleep(0.01)
        process_ids[0].suspend()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(WorkerError, match=r"has not moved for \d+ s"):
        run_baseline(RunDir(tmp_path), store.path, models, cores(1), BaselineSpec())
    thread.join()
    assert not children()
    monkeypatch.undo()
    second_result = run_baseline(
        RunDir(tmp_path), store.path, models, cores(1), BaselineSpec(name="v1", reads=20)
    )
    assert second_result.measured_rows > 0, "another try does it all"


def test_an_interrupted_baseline_says_so_and_leaves_nothing(
    tmp_path: Path, store: OrfStore, models: Path
) -> None:
    """Another thread ends all children, as a flow does when it is cancelled."""

    def interrupt(_: float) -> None:
        thread = threading.Thread(target=end_all_children, args=(1.0,))
        thread.start()
        thread.join()

    with pytest.raises(WorkerError, match="was interrupted"):
        run_baseline(
            RunDir(tmp_path), store.path, models, cores(1), BaselineSpec(), on_progress=interrupt
        )
    assert not children()


def test_two_at_once_in_one_directory_are_refused(
    tmp_path: Path, store: OrfStore, models: Path
) -> None:
    with ExitStack() as second_holder:
        Context().run(second_holder.enter_context, run_lock(tmp_path))
        with pytest.raises(ConfigError, match="is working here"):
            run_baseline(RunDir(tmp_path), store.path, models, cores(1), BaselineSpec())
