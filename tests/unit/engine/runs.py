"""Runs over a staged store, for the tests of the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.process_lookup import command_line
from virnuc_core import pipeline, system_errors
from virnuc_core.config import ClassifySpec, Devices, EngineSpec, RunSpec
from virnuc_core.engine import embedding, shards
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import classify, predict
from virnuc_core.reads import stage as stage_module
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.cosines import cosines
from virnuc_core.rundir import RunDir, is_ours
from virnuc_core.runfiles import RunSummary
from virnuc_core.telemetry.log import latest, read_telemetry

SMALL = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=4096, heartbeat_s=0.2)
N_CORES = min(2, len(os.sched_getaffinity(0)))
ALL_CORES = f"cpu:{N_CORES}"
ONE_CORE = Devices.parse("cpu:1")
PAUSE_S = 0.05  # for which a busy machine may stop a process between two stages
# Between attempts to read, in child processes: where a file server comes back as soon as a test has
# seen a call fail, where it stays away for long, and where every attempt fails.
MANY_PAUSES_S = (0.1,) * 600
SHORT_PAUSES_S = (0.05, 0.1, 0.2)
NO_PAUSES_S = (0.0, 0.0, 0.0)
RESULTS = ("prediction_results.txt", "prediction_results_highestscore.csv", "reads.tsv")

Staged = tuple[Path, StageSummary]


def classify_store(
    root: Path, staged: Staged, models: Path, devices: Devices, **options: Any
) -> RunSummary:
    """Classify a staged store into `root`.

    Args:
        root: The run directory.
        staged: The store, and what staging said of it.
        models: Models directory.
        devices: Devices of the run.
        options: Fields of `ClassifySpec`; `watch` and `pool` go to `classify`.
    """
    observers = {name: options.pop(name) for name in ("monitor", "pool") if name in options}
    settings = {"engine": SMALL, **options}
    spec = ClassifySpec(models=models, devices=devices, **settings)
    _, staging = staged
    return classify(RunDir(root), staging, spec, **observers)


def result_bytes(root: Path) -> dict[str, bytes]:
    """Return the bytes of result files and shards, by their path in the run directory."""
    paths = [root / name for name in RESULTS]
    paths += sorted((root / "shards").glob("*.h5"))
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def running_workers() -> list[psutil.Process]:
    """Return virnuc's workers among the child processes.

    Other tests leave a Prefect server, or the standard library's resource tracker.
    """
    workers = []
    for child in psutil.Process().children():
        if any(word.startswith("virnuc_core.") for word in command_line(child)):
            workers.append(child)
    return workers


def no_workers_left() -> bool:
    """Return whether no worker of virnuc runs."""
    return not running_workers()


def copy_run(reference: Path, root: Path) -> Path:
    """Copy a finished run, so that it may be tampered with; return the copy."""
    shutil.copytree(reference, root)
    return root


# --- programs of child processes: python -c "from tests.unit.engine.runs import NAME; NAME()" ---


def classify_in_child() -> None:
    """Classify; arguments: root, store, models, reads, devices, engine."""
    root, store, models, reads, devices, engine = sys.argv[1:]
    staging = stage(StageSpec(reads=(reads,), model_length=300), Path(store))
    spec = ClassifySpec(
        models=Path(models),
        devices=Devices.parse(devices),
        engine=EngineSpec.model_validate_json(engine),
    )
    classify(RunDir(Path(root)), staging, spec)


def predict_in_child() -> None:
    """Predict reads; arguments: root, models, reads. One of our errors is printed as one line.

    Reading is tried again after short pauses only; without any if calls fail for good.
    """
    root, models, reads = sys.argv[1:]
    if "FAIL_LOG" in os.environ:
        system_errors.RETRY_PAUSES_S = MANY_PAUSES_S
    elif "FAIL_WHILE" in os.environ:
        system_errors.RETRY_PAUSES_S = SHORT_PAUSES_S
    else:
        system_errors.RETRY_PAUSES_S = NO_PAUSES_S
    spec = RunSpec(
        out=Path(root), reads=(reads,), models=Path(models), devices=ONE_CORE, engine=SMALL
    )
    try:
        predict(spec)
    except VirnucError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def read_everything_in_child() -> None:
    """Read all HDF5 files of a run in the ways in which the product reads them. Argument: root."""
    root = Path(sys.argv[1])
    run = RunDir(root)
    plan = shards.read_plan(run)
    shards.read_shard(run, plan, 0)
    shards.read_scores(run)
    store = OrfStore.open(run.store)
    [joined] = cosines(root, root)
    telemetry = read_telemetry(latest(root))
    print(store.n_uniques, joined.n, len(telemetry.shards))


def read_all_kinds_in_child() -> None:
    """Read files of all kinds in a folder. Print, as JSON, how each attempt ends.

    Argument: the folder. Its files are named in `KINDS_OF_FILES`.
    """
    from virnuc_core.encoders.calibration import read_calibration
    from virnuc_core.encoders.checkpoint import open_safetensors, tensor_files
    from virnuc_core.encoders.digests import part_digest
    from virnuc_core.encoders.pickles import read_pickled
    from virnuc_core.encoders.tokenize import read_tokenizer
    from virnuc_core.reads.sources import find_alignment_format_of_file
    from virnuc_core.report.regression import read_history
    from virnuc_core.runfiles import digest
    from virnuc_core.validation import TuningFile, read_usable

    system_errors.RETRY_PAUSES_S = NO_PAUSES_S
    folder = Path(sys.argv[1])
    reads = folder / "reads.fasta"
    skip_broken = StageSpec(reads=(str(reads),), model_length=300, on_error="skip")
    attempts: dict[str, Callable[[], object]] = {
        "weights": lambda: open_safetensors([folder / "esm2" / "model.safetensors"], dict),
        "digest of weights": lambda: part_digest(folder / "esm2"),
        "calibration": lambda: read_calibration(folder),
        "index of weights": lambda: tensor_files(folder),
        "pickled weights": lambda: read_pickled(folder / "model.pth"),
        "tokenizer": lambda: read_tokenizer(folder / "tokenizer.json"),
        "history": lambda: read_history(folder / "history.jsonl"),
        "format of reads": lambda: find_alignment_format_of_file(str(folder / "reads.bam")),
        "reads": lambda: stage(skip_broken, folder.parent / "orfs.h5"),
        "digest": lambda: digest(reads),
        "usable file": lambda: read_usable(folder / "tuning.json", TuningFile),
        "telemetry": lambda: read_telemetry(folder / "telemetry_1.h5"),
        "embeddings": lambda: cosines(folder, folder),
        "marker": lambda: is_ours(folder),
    }
    results = {}
    for name, attempt in attempts.items():
        try:
            results[name] = f"returned {attempt()!r}"
        except Exception as error:  # noqa: BLE001 - every error is a result
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


def predict_in_lost_directory() -> None:
    """Predict reads, and lose the run directory meanwhile. Arguments: those of `predict_in_child`,
    then when and how the directory is lost.

    The time is "staging", "computing" or "writing results". The way is "renamed", "removed",
    "replaced" (by an empty directory) or "other run" (the directory `other` beside it). Two further
    ways leave the directory: "file server away" makes the calls fail that `failing_files` was told,
    "store cut off" truncates the file that the workers have mapped into memory.
    """
    time_of_loss, way = sys.argv.pop(4), sys.argv.pop(4)
    root = Path(sys.argv[1]).absolute()
    if time_of_loss == "staging":
        module, name = stage_module, "_build_store"
    elif time_of_loss == "computing":
        module, name = embedding, "require_lease"  # is called at the first shard
    else:
        module, name = pipeline, "write_results"
    function = getattr(module, name)

    def lose_and_go_on(*args: Any, **options: Any) -> Any:
        """Lose the directory at the first call, and then do what the function does."""
        setattr(module, name, function)
        if way == "file server away":
            Path(os.environ["FAIL_WHILE"]).touch()
            return function(*args, **options)
        if way == "store cut off":
            os.truncate(root / "orfs.h5", 0)
            return function(*args, **options)
        if way == "parent renamed":
            root.parent.rename(root.parent.with_name("lost"))
            return function(*args, **options)
        if way == "parent removed":
            shutil.rmtree(root.parent)
            return function(*args, **options)
        lost_root = root.with_name("lost")
        root.rename(lost_root)
        if way == "removed":
            shutil.rmtree(lost_root)
        elif way == "replaced":
            root.mkdir()
        elif way == "other run":
            root.with_name("other").rename(root)
        return function(*args, **options)

    setattr(module, name, lose_and_go_on)
    predict_in_child()


def change_threshold_and_die() -> None:
    """Classify a complete run at another threshold, and be killed before its last result file.

    Arguments: root, store, models, reads.
    """
    root, store, models, reads = map(Path, sys.argv[1:])
    staging = stage(StageSpec(reads=(str(reads),), model_length=300), store)
    shards.write_virtual_embeddings = lambda _run: os.kill(os.getpid(), signal.SIGKILL)
    classify_store(root, (store, staging), models, ONE_CORE, threshold=0.2)
