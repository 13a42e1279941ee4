"""The registry's entries agree with the networks, the tokenizers and the tables that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from virnuc_core.config import EngineSpec
from virnuc_core.encoder_names import ENCODER_NAMES, EncoderName
from virnuc_core.encoders.checkpoint import load_models, shape_of
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.models import NETWORKS
from virnuc_core.encoders.registry import (
    DNABERT_S,
    ENCODERS,
    ESM2,
    PARTS,
    EncoderInfo,
    embedding_columns,
    encoder_named,
)
from virnuc_core.runfiles import ModelFlops
from virnuc_core.telemetry import tables
from virnuc_core.telemetry.statistics import record_table
from virnuc_core.telemetry.tables import ShardDone

from .encoder_batches import dnas, proteins

CPU = torch.device("cpu")
each_encoder = pytest.mark.parametrize("encoder", ENCODERS, ids=ENCODER_NAMES)


def test_the_names_are_those_of_the_entries_in_order() -> None:
    assert tuple(encoder.name for encoder in ENCODERS) == ENCODER_NAMES == tuple(tables.GPU_STAGES)
    assert get_args(EncoderName) == ENCODER_NAMES
    assert set(PARTS) == {*ENCODER_NAMES, "head"}
    assert [encoder_named(name) for name in ENCODER_NAMES] == list(ENCODERS)


@each_encoder
def test_an_entry_names_columns_and_settings_that_exist(encoder: EncoderInfo) -> None:
    names = encoder.names
    assert {names.tokens_column, names.seconds_column} <= set(record_table(ShardDone, []))
    assert {names.flops_field, names.ceiling_field} <= set(ModelFlops().model_dump())
    assert encoder.title in tables.STAGES
    assert encoder.shape_type.part() == encoder.name
    assert encoder.reference_size in encoder.sizes
    assert NETWORKS[encoder.name].INFO is encoder


def test_each_encoder_has_the_token_budget_of_its_own_setting() -> None:
    engine = EngineSpec(token_budget=128, dna_token_budget=256)
    assert ESM2.token_budget(engine) == 128
    assert DNABERT_S.token_budget(engine) == 256


def test_the_estimated_tokens_of_a_protein_are_those_of_its_tokenizer(models: Path) -> None:
    lengths = [1, 30, 167]
    _, offsets = ESM2.open_tokenizer(models).encode(proteins(lengths))
    assert ESM2.estimate_tokens(np.array(lengths)).tolist() == offsets.diff().tolist()


def test_the_estimated_tokens_of_dna_are_of_the_right_size(models: Path) -> None:
    residues = 167
    _, offsets = DNABERT_S.open_tokenizer(models).encode(dnas([3 * residues]))
    (num_tokens,) = DNABERT_S.estimate_tokens(np.array([residues])).tolist()
    assert num_tokens == 3 * residues // 4 + 2
    assert num_tokens == pytest.approx(int(offsets[-1]), rel=0.3)


def test_the_columns_of_the_joined_embeddings_are_dna_first() -> None:
    columns = embedding_columns({"esm2": 2560, "dnabert_s": 768})
    assert columns == {"dnabert_s": slice(0, 768), "esm2": slice(768, 3328)}
    assert list(columns) == ["dnabert_s", "esm2"]


def test_loaded_models_know_their_columns_and_fit_the_classifier(models: Path) -> None:
    models_ = load_models(models, CPU, EngineSpec())
    head = shape_of(models, HeadShape)
    assert tuple(models_.encoders) == ENCODER_NAMES
    for encoder in ENCODERS:
        columns = models_.columns()[encoder.name]
        assert columns.stop - columns.start == encoder.width_in(head)
        assert models_.encoders[encoder.name].INFO is encoder
