"""Rows that are not finite: a few are set aside by name; of more, or of weights, the run says whose fault it is."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from virnuc_core.config import Devices
from virnuc_core.encoders.tokenize import DnabertTokenizer
from virnuc_core.engine import shards
from virnuc_core.engine.worker import judge_not_finite
from virnuc_core.errors import NotFiniteError, WeightsError
from virnuc_core.reads.stage import StageSummary
from virnuc_core.reads.store import OrfStore
from virnuc_core.rundir import RunDir

from .runs import classify_store, no_workers_left

pytestmark = pytest.mark.usefixtures("forked_workers")

Staged = tuple[Path, StageSummary]
ONE = Devices.parse("cpu:1")
LARGE = 3e38  # finite, and its square is not


@pytest.fixture
def spoilt(tmp_path: Path, tiny_models: Path) -> Callable[[str, str, int, float], Path]:
    """The tiny models with one row of one tensor set to a number."""

    def spoil(part: str, tensor: str, row: int, number: float) -> Path:
        models = tmp_path / "models"
        shutil.copytree(tiny_models, models)
        path = models / part / "model.safetensors"
        tensors = load_file(path)
        tensors[tensor][row] = number
        save_file(tensors, path)
        return models

    return spoil


def uniques_by_token(staged: Staged, models: Path) -> dict[int, set[int]]:
    """Of each token of DNABERT-S the sequences that it is in."""
    store, uniques = OrfStore.open(staged[0]), dict[int, set[int]]()
    tokens, starts = DnabertTokenizer(models).encode(store.dna(0, store.n_uniques))
    for unique in range(store.n_uniques):
        for token in tokens[starts[unique] : starts[unique + 1]].tolist():
            uniques.setdefault(token, set()).add(unique)
    return uniques


def test_one_row_is_set_aside_by_name_and_the_rest_is_unchanged(
    tmp_path: Path, staged: Staged, tiny_models: Path, reference: Path, spoilt: Callable[..., Path]
) -> None:
    store, places = OrfStore.open(staged[0]), uniques_by_token(staged, tiny_models)
    token, (lost_unique,) = next(
        (token, uniques) for token, uniques in places.items() if len(uniques) == 1
    )
    summary = classify_store(
        tmp_path / "run", staged, spoilt("dnabert_s", "embed.weight", token, LARGE), ONE
    )
    names = [
        store.row_ids(row, row + 1)[0] for row in np.flatnonzero(store.row_unique[:] == lost_unique)
    ]
    assert (tmp_path / "run" / "failed.tsv").read_text().splitlines() == ["Sequence_ID", *names]
    assert (summary.rows_set_aside, summary.restarts) == (1, 0)
    assert summary.fates["failed"] == len({name.split("_chunk")[0] for name in names})
    lines = (reference / "prediction_results.txt").read_text().splitlines()
    kept_lines = [line for line in lines if line.split("\t")[0] not in names]
    assert (tmp_path / "run" / "prediction_results.txt").read_text().splitlines() == kept_lines
    second_summary = classify_store(tmp_path / "run", staged, tmp_path / "models", ONE)
    assert (second_summary.shards_computed, second_summary.rows_set_aside) == (
        summary.shards_computed,
        1,
    ), "nothing is computed anew"


@pytest.mark.parametrize(
    ("columns", "named"), [(slice(64), "dnabert_s"), (slice(64, 128), "esm2"), (slice(0), "head")]
)
def test_the_model_with_too_many_non_finite_rows_is_named_with_its_first_rows(
    staged: Staged, tiny_models: Path, columns: slice, named: str
) -> None:
    store = OrfStore.open(staged[0])
    task = shards.ShardTask(
        run="",
        store=str(staged[0]),
        reads_fingerprint=store.fingerprint,
        shard=1,
        lo=50,
        hi=150,
        skipped_rows=(50,),
    )
    result = shards.ShardResult(np.zeros((100, 128), np.float32), np.zeros((100, 2), np.float32))
    result.embeddings[0] = result.scores[[0, 7, 8]] = np.nan  # the first has been set aside before
    result.embeddings[7:9, columns] = np.inf
    judge_not_finite(result, task.model_copy(update={"max_not_finite": 2}), tiny_models)
    rows = [store.row_ids(row, row + 1)[0] for row in store.unique_row[57:59].tolist()]
    pattern = rf"{named}: of 100 rows .* NaN or infinity for 2 \({', '.join(rows)}\), though its weights are finite"
    with pytest.raises(NotFiniteError, match=pattern):
        judge_not_finite(result, task.model_copy(update={"max_not_finite": 1}), tiny_models)


@pytest.mark.slow
def test_more_than_one_percent_of_non_finite_rows_stop_the_run_and_name_the_model(
    tmp_path: Path, staged: Staged, tiny_models: Path, spoilt: Callable[..., Path]
) -> None:
    places = {
        token: len(uniques) for token, uniques in uniques_by_token(staged, tiny_models).items()
    }
    token, _ = Counter(places).most_common(6)[-1]  # below those that stand in all
    with pytest.raises(
        NotFiniteError, match=r"dnabert_s: of \d+ rows .* \(read.* though its weights are finite"
    ):
        classify_store(
            tmp_path / "run", staged, spoilt("dnabert_s", "embed.weight", token, LARGE), ONE
        )
    assert not list((tmp_path / "run" / "shards").glob("0*.h5"))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert no_workers_left()


@pytest.mark.slow
def test_rows_of_several_shards_are_counted_together_also_over_attempts(
    tmp_path: Path, staged: Staged, tiny_models: Path, spoilt: Callable[..., Path]
) -> None:
    store, places = OrfStore.open(staged[0]), uniques_by_token(staged, tiny_models)
    max_lost = store.n_uniques // 100
    spread = {
        token: uniques
        for token, uniques in places.items()
        if max_lost < len(uniques) <= 2 * max_lost
    }
    token = max(spread, key=lambda one: np.ptp(list(spread[one])))
    models, run = spoilt("dnabert_s", "embed.weight", token, LARGE), RunDir(tmp_path / "run")
    with pytest.raises(NotFiniteError, match="rows are not finite, more than 1 % of the run's"):
        classify_store(run.root, staged, models, ONE)
    last_shard = max(run.shards.glob("0*.h5"))
    last_shard.unlink()
    with pytest.raises(NotFiniteError, match=r"its weights are finite|are not finite"):
        classify_store(run.root, staged, models, ONE)
    assert max(run.shards.glob("0*.h5")) <= last_shard, "those of the attempt before count"


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("head", "output_layer.weight"),
        pytest.param("esm2", "embed.weight", marks=pytest.mark.slow),
        pytest.param("dnabert_s", "embed.weight", marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, staged: Staged, spoilt: Callable[..., Path], part: str, tensor: str
) -> None:
    models = spoilt(part, tensor, 1 if part == "head" else 5, torch.nan)
    with pytest.raises(WeightsError, match=f"{part}: tensor {tensor} holds NaN or infinity"):
        classify_store(tmp_path / "run", staged, models, ONE)
    assert not list((tmp_path / "run" / "shards").glob("0*.h5"))


@pytest.mark.slow
def test_a_head_of_finite_weights_that_gives_no_scores_is_named(
    tmp_path: Path, staged: Staged, spoilt: Callable[..., Path]
) -> None:
    with pytest.raises(
        NotFiniteError, match=r"head: of \d+ rows of a shard it gives NaN or infinity for \d+"
    ):
        classify_store(tmp_path / "run", staged, spoilt("head", "bn1.running_var", 3, -1.0), ONE)
