"""The classifier beside torch's own modules, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from virnuc_core.encoders.checkpoint import load_head, open_part
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.errors import WeightsError

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 1000])
def test_scores_equal_torch_modules_in_eval(models: Path, rows: int) -> None:
    shape, read = open_part(models, HeadShape)
    state = {name: read(name) for name in shape.tensors()}
    twin = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 2))
    places = {"hidden_layer": "0", "bn1": "1", "output_layer": "4"}
    twin.load_state_dict(
        {f"{places[name.split('.')[0]]}.{name.split('.')[1]}": t for name, t in state.items()}
        | {"1.num_batches_tracked": torch.tensor(0)}
    )
    features = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = twin.eval()(features).softmax(1)
    got = load_head(models, CPU).scores(features)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.sum(1), torch.ones(rows), atol=1e-6, rtol=0)


def test_no_rows_give_no_scores(models: Path) -> None:
    assert load_head(models, CPU).scores(torch.empty(0, 128)).shape == (0, 2)


def test_its_widths_and_length_come_from_the_config(models: Path) -> None:
    head = load_head(models, CPU)
    assert (head.shape.model_length, head.shape.dna_width, head.shape.protein_width) == (500, 64, 64)
    with pytest.raises(WeightsError, match=r"features are \(3, 127\), it takes 128 columns"):
        head.scores(torch.zeros(3, 127))
