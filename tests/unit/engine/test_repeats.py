"""Rows near the threshold in int8: fp16 decides them, and nothing else changes. On a CPU both run by plain torch."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from virnuc_core import pipeline
from virnuc_core.config import Devices, EngineSpec
from virnuc_core.encoders import precision
from virnuc_core.encoders.checkpoint import load_encoder, open_part, shape_of
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.model_config import Esm2Shape, HeadShape
from virnuc_core.encoders.models import Esm2
from virnuc_core.encoders.quantise import quantise
from virnuc_core.encoders.tokenize import ESM2_PAD, Esm2Tokenizer, PackedBatch
from virnuc_core.engine import repeats, shards
from virnuc_core.engine.devices import resolve
from virnuc_core.engine.loader import TokenRows, packed
from virnuc_core.engine.pool import Pool
from virnuc_core.engine.process import Closed, LocalWorkers, Message, WorkerSpec, worker_specs
from virnuc_core.engine.remote_node import on_our_clock
from virnuc_core.engine.repeats import NEAR_DISTANCE, RepeatedShard, Repeater
from virnuc_core.engine.shards import Computed, ShardPlan, ShardResult, ShardTask
from virnuc_core.engine.worker import Worker
from virnuc_core.errors import RunMismatchError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, StageSummary, stage
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Device, read_record

from .runs import SMALL, classify_store, result_bytes

pytestmark = pytest.mark.usefixtures("forked_workers")

CPU = torch.device("cpu")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="int8 needs compute capability 9.0"),
    pytest.mark.filterwarnings("default"),  # of torch and triton on whatever machine this is
]
EIGHT = SMALL.model_copy(update={"precision": "int8", "token_budget": 8192})
SLOTS = 2048  # a quarter of that
LONGEST = 102  # tokens of a row of a head for 300 bases
THRESHOLD, OTHER = 0.5, 0.7
PRINTS = {"reads": "r", "esm2": "e"}
# what a worker's process does where a CPU is let run int8 and fp16
ON_CPU = """
from virnuc_core.encoders import precision
from virnuc_core.engine import worker
precision.resolve_precision = lambda asked, device: asked
work = worker.work
"""
# the same, but that the first worker is killed as soon as a shard of it waits
STRUCK_ON_CPU = (
    ON_CPU
    + """
import os
from pathlib import Path
from virnuc_core.engine.process import Parent
from virnuc_core.engine.shards import Waiting
send = Parent.send
def send_and_die(parent, message):
    send(parent, message)
    struck = Path(__file__).with_suffix(".struck")
    if isinstance(message, Waiting) and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), 9)
Parent.send = send_and_die
"""
)

Staged = tuple[Path, StageSummary]
Compute = Callable[..., list[Computed]]


@pytest.fixture(scope="module")
def staged(reads_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Staged:
    """Reads of one length, and the mixed ones."""
    folder = tmp_path_factory.mktemp("store")
    simulate(SimulateSpec(reads=400, seed=3), folder / "reads.fasta")
    spec = StageSpec(reads=(str(folder / "reads.fasta"), str(reads_file)), model_length=300)
    return folder / "orfs.h5", stage(spec, folder / "orfs.h5")


@pytest.fixture(scope="module")
def models(tiny_models: Path, staged: Staged, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models, calibrated, with a head whose scores are spread out, and that says it was trained."""
    folder = tmp_path_factory.mktemp("int8") / "models"
    shutil.copytree(tiny_models, folder)
    quantise(folder, str(staged[0].with_name("reads.fasta")), CPU)
    tensors = load_file(folder / "head/model.safetensors")
    tensors["output_layer.weight"] *= 4
    tensors["output_layer.bias"][1] += 2.4
    save_file(tensors, folder / "head/model.safetensors")
    return _with_origin(folder, "trained on something")


@pytest.fixture(scope="module")
def undecided(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but that the head says it is random: no row is repeated for it."""
    folder = tmp_path_factory.mktemp("int8") / "undecided"
    shutil.copytree(models, folder)
    return _with_origin(folder, "random, for a test")


def _with_origin(models: Path, origin: str) -> Path:
    config = models / "head/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"origin": origin}))
    return models


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        monkeypatch.setattr(precision, "resolve_precision", lambda asked, device: asked)
    return torch.device(request.param)


@pytest.fixture
def plan(staged: Staged) -> ShardPlan:
    return shards.plan_run(
        OrfStore.open(staged[0]).protein_offsets, EIGHT, PRINTS, "cpu", THRESHOLD
    )[1]


@pytest.fixture
def compute(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Compute:
    """What one worker, in this process, answers to tasks."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def answers(
        models: Path, tasks: Sequence[ShardTask], engine: EngineSpec = EIGHT
    ) -> list[Computed]:
        messages, answers = deque[Message]([*tasks, Closed()]), list[Message]()

        def give_up(error: Exception) -> None:
            raise error

        parent = SimpleNamespace(
            started_s=0.0,
            receive=lambda _: messages.popleft(),
            # A copy, because the loader's thread takes messages at the same time.
            peek=lambda: next(iter(tuple(messages)), None),
        )
        parent.send, parent.give_up = answers.append, give_up
        it = Device(id="one", kind=cast(Any, device.type), name="a device")
        Worker(cast(Any, parent), WorkerSpec(models=str(models), device=it, engine=engine)).run()
        return [message for message in answers if isinstance(message, Computed)]

    return answers


def task_of(run: RunDir, staged: Staged, plan: ShardPlan, shard: int, **more: Any) -> ShardTask:
    """A shard of a run, whose plan lies there."""
    shards.write_plan(run, plan)
    lo, hi = plan.range(shard)
    task_fields = {
        "run": str(run.root),
        "store": str(staged[0]),
        "reads_fingerprint": OrfStore.open(staged[0]).fingerprint,
    }
    return ShardTask(
        **{**task_fields, "shard": shard, "lo": lo, "hi": hi, "threshold": THRESHOLD, **more}
    )


def near(result: ShardResult, threshold: float) -> np.ndarray[Any, Any]:
    return np.abs(result.scores[:, 1] - threshold) < NEAR_DISTANCE


def alone(models: Path, staged: Staged, device: torch.device, unique: int) -> torch.Tensor:
    """ESM-2's embedding of one row in fp16, the only one in a batch."""
    encoder = load_encoder(Esm2, models, device, "fp16")
    tokens, starts = Esm2Tokenizer().encode(OrfStore.open(staged[0]).protein(unique, unique + 1))
    token_rows = TokenRows(tokens.numpy(), starts.numpy())
    ((_, batch),) = packed(token_rows, SLOTS, ESM2_PAD, divisors=(1,))
    return encoder.embed(batch.to(device))[0].cpu()


def test_rows_near_the_threshold_get_fp16_results_and_others_keep_int8(
    tmp_path: Path,
    models: Path,
    undecided: Path,
    staged: Staged,
    plan: ShardPlan,
    device: torch.device,
    compute: Compute,
) -> None:
    runs = [RunDir(tmp_path / name) for name in ("repeated", "plain", "fp16")]
    ways = (
        (models, EIGHT),
        (undecided, EIGHT),
        (models, EIGHT.model_copy(update={"precision": "fp16"})),
    )
    tasks = [
        compute(weights, [task_of(run, staged, plan, shard) for shard in (0, 1)], engine)
        for run, (weights, engine) in zip(runs, ways, strict=True)
    ]
    head, width = Head(*open_part(models, HeadShape), device), shape_of(models, Esm2Shape).width
    for shard in (0, 1):
        got, plain, exact = (shards.read_shard(run, plan, shard) for run in runs)
        doubtful, lo = near(plain, THRESHOLD), plan.range(shard)[0]
        assert 3 <= doubtful.sum() <= len(doubtful) // 2, "this shows nothing"
        assert [one[shard].n_repeated for one in tasks] == [doubtful.sum(), 0, 0]
        for array, plain_array in zip(got, plain, strict=True):
            assert np.array_equal(array[~doubtful], plain_array[~doubtful])
        assert np.array_equal(got.embeddings[:, :-width], plain.embeddings[:, :-width]), (
            "DNABERT-S has no int8"
        )
        assert (got.embeddings[doubtful] != plain.embeddings[doubtful]).any(axis=1).all()
        for place in np.flatnonzero(doubtful).tolist():
            expected = alone(models, staged, device, lo + place).numpy()
            assert np.array_equal(got.embeddings[place, -width:], expected), (
                "its numbers depend on its company"
            )
        features = torch.from_numpy(got.embeddings[doubtful]).to(device)
        assert np.array_equal(got.scores[doubtful], head.scores(features).cpu().numpy())
        # fp16's own run has other batches, which round otherwise in the last digits; int8 is farther off
        max_differences = [
            np.abs(one.scores - exact.scores)[doubtful].max() for one in (got, plain)
        ]
        assert 5 * max_differences[0] < max_differences[1]
        num_repeated = [
            (one[shard].done.protein_tokens, one[shard].done.rows)
            for one in tasks
            if one[shard].done
        ]
        assert num_repeated == [num_repeated[0]] * 3, "no row is counted twice"


def test_runs_with_different_thresholds_on_one_worker_do_not_mix(
    tmp_path: Path, models: Path, undecided: Path, staged: Staged, plan: ShardPlan, compute: Compute
) -> None:
    first_run, other_run, plain = (RunDir(tmp_path / name) for name in ("one", "other", "plain"))
    compute(undecided, [task_of(plain, staged, plan, 0)])
    messages = compute(
        models,
        [
            task_of(first_run, staged, plan, 0),
            task_of(other_run, staged, plan, 0, threshold=OTHER),
            task_of(first_run, staged, plan, 1),
            task_of(first_run, staged, plan, 0),
        ],
    )
    shard_before = shards.read_shard(plain, plan, 0)
    for run, threshold, answer in (
        (first_run, THRESHOLD, messages[0]),
        (other_run, OTHER, messages[1]),
        (first_run, THRESHOLD, messages[3]),
    ):
        result = shards.read_shard(run, plan, 0)
        is_changed = (result.embeddings != shard_before.embeddings).any(axis=1)
        assert np.array_equal(is_changed, near(shard_before, threshold)), threshold
        assert answer.n_repeated == is_changed.sum() > 0


@pytest.mark.parametrize(
    "device", ["cpu"], indirect=True
)  # elsewhere, rows left out may move others to other batches
def test_skipped_rows_stay_skipped_and_a_probe_commits_nothing(
    tmp_path: Path,
    models: Path,
    staged: Staged,
    plan: ShardPlan,
    compute: Compute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at, add = list[ShardTask](), Repeater.add

    def noted(it: Repeater, result: ShardResult, task: ShardTask) -> RepeatedShard:
        looked_at.append(task)
        return add(it, result, task)

    monkeypatch.setattr(Repeater, "add", noted)
    whole_run, parted_run = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parted")
    compute(models, [task_of(whole_run, staged, plan, 1)])
    full_shard, lo = shards.read_shard(whole_run, plan, 1), plan.range(1)[0]
    places = np.flatnonzero(near(full_shard, THRESHOLD))
    left_out = tuple(lo + place for place in places[:2].tolist())
    probe, messages = compute(
        models,
        [
            task_of(parted_run, staged, plan, 1, is_probe=True, lo=lo + 3, hi=lo + 40),
            task_of(parted_run, staged, plan, 1, skipped_rows=left_out),
        ],
    )
    assert probe == Computed(done=None)
    assert [task.is_probe for task in looked_at] == [False, True, False], (
        "a row may end workers only when it is repeated"
    )
    assert messages.done is not None
    assert messages.done.skipped == 2
    got = shards.read_shard(parted_run, plan, 1)
    for array, full_array in zip(got, full_shard, strict=True):
        assert np.isnan(array[places[:2]]).all()
        kept_rows = np.delete(np.arange(len(array)), places[:2])
        assert np.array_equal(array[kept_rows], full_array[kept_rows]), (
            "what else is near changes no bit of a row"
        )


def test_the_repeating_stream_waits_for_the_stream_that_loads_the_weights(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams do not wait for each other by themselves, and weights are copied in the background."""
    events: list[str] = []

    class RecordingStream:
        def __init__(self, device: torch.device, priority: int) -> None:
            events.append("made")

        def wait_stream(self, other: object) -> None:
            events.append(f"waits for {other}")

    monkeypatch.setattr(repeats, "load_encoder", lambda *_: events.append("loaded"))
    monkeypatch.setattr(torch.cuda, "Stream", RecordingStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the loading stream")
    Repeater(models, torch.device("cuda"), EIGHT, LONGEST)
    assert events == ["loaded", "made", "waits for the loading stream"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)], indirect=True)
def test_rows_are_right_although_the_weights_arrive_late(
    models: Path, staged: Staged, device: torch.device
) -> None:
    expected = alone(models, staged, device, 0)
    tokens, starts = Esm2Tokenizer().encode(OrfStore.open(staged[0]).protein(0, 1))
    token_rows = TokenRows(tokens.numpy(), starts.numpy())
    ((_, batch),) = packed(token_rows, SLOTS, ESM2_PAD, divisors=(1,))
    torch.cuda._sleep(4_000_000_000)  # cycles, about two seconds of the loading stream
    repeater = Repeater(models, device, EIGHT, LONGEST)
    with torch.cuda.stream(repeater.stream):
        row_embeddings = repeater.encoder.embed(batch.to(device))
        assert torch.equal(row_embeddings[0].cpu(), expected)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_every_batch_has_one_shape_however_many_rows_are_near(
    tmp_path: Path,
    models: Path,
    staged: Staged,
    plan: ShardPlan,
    compute: Compute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uniques, embed = dict[str, set[int]](), Esm2.embed

    def noted(it: Esm2, batch: PackedBatch) -> torch.Tensor:
        uniques.setdefault(it.precision, set()).add(batch.slots)
        return embed(it, batch)

    monkeypatch.setattr(Esm2, "embed", noted)
    tasks = [
        task_of(RunDir(tmp_path), staged, plan, shard, threshold=threshold)
        for shard in (0, 1)
        for threshold in (0.5, 0.7)
    ]
    tasks += [task.model_copy(update={"budget_divisor": 32}) for task in tasks]
    compute(models, tasks)
    assert uniques["fp16"] == {SLOTS, LONGEST}, (
        "of the whole budget and, for want of memory, of the least there can be"
    )
    assert len(uniques["int8"]) > 2


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_rows_of_several_shards_share_batches_and_the_files_are_those_of_shards_alone(
    tmp_path: Path,
    models: Path,
    staged: Staged,
    compute: Compute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches, embed = list[PackedBatch](), Esm2.embed

    def noted(it: Esm2, batch: PackedBatch) -> torch.Tensor:
        if it.precision == "fp16":
            batches.append(batch)
        return embed(it, batch)

    monkeypatch.setattr(Esm2, "embed", noted)
    engine = EIGHT.model_copy(update={"token_budget": 1024, "dna_token_budget": 1024})
    slots = 256
    small_shards = ShardPlan(bounds=tuple(range(0, 145, 16)), fingerprint="small shards")
    numbers = range(len(small_shards))
    # shards of different runs do not wait for each other
    runs = [RunDir(tmp_path / f"alone-{shard}") for shard in numbers]
    tasks = [task_of(runs[shard], staged, small_shards, shard) for shard in numbers]
    answers_alone = compute(models, tasks, engine)
    n_alone, tokens = len(batches), sum(batch.real_tokens for batch in batches)
    batches.clear()
    run = RunDir(tmp_path / "together")
    answers = compute(
        models, [task_of(run, staged, small_shards, shard) for shard in numbers], engine
    )
    for shard in numbers:
        expected = shards.shard_path(runs[shard], shard).read_bytes()
        assert shards.shard_path(run, shard).read_bytes() == expected, shard
    assert [answer.done.shard for answer in answers if answer.done] == [*numbers]
    assert [one.n_repeated for one in answers] == [one.n_repeated for one in answers_alone]
    assert {batch.slots for batch in batches} == {slots}
    assert sum(batch.real_tokens for batch in batches) == tokens, "each row once"
    n_groups = len({batch.max_seqlen for batch in batches})
    most_empty = 64  # tokens of the rows of one group, which did not fit any more
    assert len(batches) <= n_groups + tokens / (slots - most_empty)
    assert len(batches) < n_alone


def test_the_threshold_decides_results_of_int8_and_of_nothing_else() -> None:
    offsets = np.arange(10) * 30
    plain, at_half, at_more = (
        shards.plan_run(offsets, EIGHT, PRINTS, "cuda", threshold)[1].fingerprint
        for threshold in (None, 0.5, 0.7)
    )
    assert len({plain, at_half, at_more}) == 3
    assert shards.plan_run(offsets, EIGHT, PRINTS, "cuda")[1].fingerprint == plain
    assert shards.result_settings(EIGHT, 0.7) == shards.result_settings(EIGHT) | {"threshold": 0.7}


def test_gelu_by_tanh_is_a_run_of_its_own_and_the_exact_one_is_as_before() -> None:
    offsets = np.arange(10) * 30
    exact = EngineSpec(precision="fp16")
    by_tanh = exact.model_copy(update={"gelu": "tanh"})
    fingerprints = {
        shards.plan_run(offsets, engine, PRINTS, "cuda")[1].fingerprint
        for engine in (exact, by_tanh)
    }
    assert len(fingerprints) == 2
    assert shards.result_settings(by_tanh)["gelu"] == "tanh"
    # runs that began before the setting existed must go on
    assert "gelu" not in shards.result_settings(exact)


def test_tasks_carry_the_threshold_over_a_cluster(
    staged: Staged, plan: ShardPlan, tmp_path: Path
) -> None:
    task = task_of(RunDir(tmp_path), staged, plan, 0, threshold=OTHER)
    assert on_our_clock(task.line(), 5.0) == task


@pytest.mark.slow
def test_a_run_keeps_its_threshold_and_says_how_many_rows_were_repeated(
    tmp_path: Path, models: Path, undecided: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "int8_on_cpu.py").write_text(ON_CPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pipeline, "resolve_engine", lambda engine, kind: engine)
    one_core = Devices.parse("cpu:1")

    def run(name: str, weights: Path, threshold: float, program: str = "int8_on_cpu") -> Any:
        specs = worker_specs(weights, resolve(one_core), EIGHT)
        with Pool(specs, LocalWorkers(program)) as pool:
            options: dict[str, Any] = {"engine": EIGHT, "threshold": threshold, "pool": pool}
            return classify_store(tmp_path / name, staged, weights, one_core, **options)

    summary, plain = run("run", models, OTHER), run("plain", undecided, OTHER)
    scores = shards.read_scores(RunDir(tmp_path / "plain"))[0]
    counts = [
        (np.abs(scores[:, 1] - threshold) < NEAR_DISTANCE).sum() for threshold in (OTHER, THRESHOLD)
    ]
    assert summary.rows_repeated == counts[0] != counts[1]
    assert plain.rows_repeated == 0
    assert read_record(RunDir(tmp_path / "run")).resolved["threshold"] == OTHER
    assert "threshold" not in read_record(RunDir(tmp_path / "plain")).resolved
    bytes_before = result_bytes(tmp_path / "run")
    pattern = re.escape(
        "holds another run (threshold 0.7 → 0.5); choose another directory or --force"
    )
    with pytest.raises(RunMismatchError, match=pattern):
        run("run", models, THRESHOLD)
    assert run("run", models, OTHER).rows_repeated == summary.rows_repeated
    assert result_bytes(tmp_path / "run") == bytes_before
    # a shard that waits is lost with its worker, and computed again
    (tmp_path / "struck_on_cpu.py").write_text(STRUCK_ON_CPU)
    struck = run("struck", models, OTHER, "struck_on_cpu")
    assert struck.restarts == 1
    assert struck.rows_repeated == summary.rows_repeated
    assert result_bytes(tmp_path / "struck") == bytes_before
    assert run("plain", undecided, THRESHOLD).threshold == THRESHOLD, (
        "no score depends on it: it is judged anew"
    )
