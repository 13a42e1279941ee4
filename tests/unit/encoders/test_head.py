"""The classifier beside torch's own modules, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from virnuc_core.encoders.checkpoint import open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.model_config import HeadShape, read_shape, write_shape
from virnuc_core.errors import WeightsError

from .head_cards import CARD

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 1000])
def test_scores_equal_torch_modules_in_eval(models: Path, rows: int) -> None:
    shape, read_tensor = open_part(models, HeadShape)
    state = {name: read_tensor(name) for name in shape.tensors()}
    twin = nn.Sequential(
        nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 2)
    )
    places = {"hidden_layer": "0", "bn1": "1", "output_layer": "4"}
    twin.load_state_dict(
        {f"{places[name.split('.')[0]]}.{name.split('.')[1]}": t for name, t in state.items()}
        | {"1.num_batches_tracked": torch.tensor(0)}
    )
    features = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = twin.eval()(features).softmax(1)
    got = Head(*open_part(models, HeadShape), CPU).scores(features)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.sum(1), torch.ones(rows), atol=1e-6, rtol=0)


def test_no_rows_give_no_scores(models: Path) -> None:
    assert Head(*open_part(models, HeadShape), CPU).scores(torch.empty(0, 128)).shape == (0, 2)


def test_its_widths_and_length_come_from_the_config(models: Path) -> None:
    head = Head(*open_part(models, HeadShape), CPU)
    assert (head.shape.model_length, head.shape.dna_width, head.shape.protein_width) == (
        500,
        64,
        64,
    )


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    shape = HeadShape(model_length=500, dna_width=64, protein_width=64, card=CARD)
    write_shape(shape, tmp_path / "config.json")
    assert read_shape(tmp_path / "config.json", HeadShape) == shape


def test_a_head_without_a_card_is_written_as_before(tmp_path: Path) -> None:
    write_shape(
        HeadShape(model_length=500, dna_width=64, protein_width=64), tmp_path / "config.json"
    )
    names = ["model", "origin", "model_length", "dna_width", "protein_width", "hidden", "norm_eps"]
    assert sorted(json.loads((tmp_path / "config.json").read_text())) == sorted(names)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"thresholds": {"0.01": 1.5}}, r"card\.thresholds\.0\.01"),
        ({"uncertain": [0.6, 0.4]}, r"uncertain 0\.6, 0\.4: not in ascending order"),
        ({"lengths": [60, 302, 151]}, "lengths 60, 302, 151: not in ascending order"),
        ({"auroc": {"value": "good"}}, r"card\.auroc\.value"),
    ],
)
def test_what_is_wrong_with_a_card_is_named(
    tmp_path: Path, wrong: dict[str, object], named: str
) -> None:
    path = tmp_path / "config.json"
    write_shape(HeadShape(model_length=500, dna_width=64, protein_width=64, card=CARD), path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"card": body["card"] | wrong}))
    with pytest.raises(WeightsError, match=named):
        read_shape(path, HeadShape)
