"""A row's numbers are the same bits whatever else is in its batch, and wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virnuc_core.encoders.checkpoint import load_encoder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.layers import Encoder
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, Tokenizer

from .encoder_batches import dnas, packed, proteins

CPU = torch.device("cpu")
SLOTS = 2048
ROW = 48


@pytest.fixture(scope="module", params=["esm2", "dnabert_s"])
def pair(request: pytest.FixtureRequest, models: Path) -> tuple[Encoder, Tokenizer, list[bytes]]:
    """An encoder, its tokenizer, and sequences for it."""
    lengths = [1 + i * i % 97 for i in range(60)]
    if request.param == "esm2":
        return load_encoder(Esm2, models, CPU), Esm2Tokenizer(), proteins(lengths, seed=1)
    return (
        load_encoder(DnabertS, models, CPU),
        DnabertTokenizer(models),
        dnas([2 * n for n in lengths], seed=1),
    )


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(threads_before)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 20),
    place=st.integers(0, 19),
    bound=st.sampled_from([128, 256]),
)
def test_a_row_is_the_same_bits_in_any_company(
    pair: tuple[Encoder, Tokenizer, list[bytes]], seed: int, count: int, place: int, bound: int
) -> None:
    encoder, tokenizer, rows = pair
    row_alone = encoder.embed(packed(tokenizer, [rows[0]], slots=SLOTS, capacity=64))[0]
    generator = torch.Generator().manual_seed(seed)
    company = [rows[int(i)] for i in torch.randint(1, len(rows), (count,), generator=generator)]
    place = min(place, count)
    batch = packed(
        tokenizer,
        [*company[:place], rows[0], *company[place:]],
        slots=SLOTS,
        capacity=64,
        max_seqlen=bound,
    )
    assert torch.equal(encoder.embed(batch)[place], row_alone)


@pytest.mark.usefixtures("_threads")
def test_every_row_of_a_shuffled_batch_is_the_same_bits(
    pair: tuple[Encoder, Tokenizer, list[bytes]],
) -> None:
    encoder, tokenizer, rows = pair
    all_rows = encoder.embed(packed(tokenizer, rows, slots=4 * SLOTS, capacity=64))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()
    shuffled_rows = encoder.embed(
        packed(tokenizer, [rows[i] for i in order], slots=4 * SLOTS, capacity=100)
    )
    assert torch.equal(shuffled_rows[: len(rows)], all_rows[order])


def test_what_the_dead_slots_hold_changes_nothing(
    pair: tuple[Encoder, Tokenizer, list[bytes]],
) -> None:
    encoder, tokenizer, rows = pair
    batch = packed(tokenizer, rows[:9], slots=SLOTS, capacity=16)
    tokens = batch.tokens.clone()
    tokens[batch.real_tokens :] = 7
    assert torch.equal(encoder.embed(replace(batch, tokens=tokens)), encoder.embed(batch))


def test_rows_past_the_last_are_zero(pair: tuple[Encoder, Tokenizer, list[bytes]]) -> None:
    encoder, tokenizer, rows = pair
    got = encoder.embed(packed(tokenizer, rows[:3], slots=SLOTS, capacity=50))
    assert got.shape == (50, encoder.width)
    assert torch.equal(got[3:], torch.zeros(47, encoder.width))
    assert (got[:3].abs().sum(1) > 0).all()


def test_scores_of_a_row_are_the_same_bits_in_any_company(models: Path) -> None:
    head: Head = Head(*open_part(models, HeadShape), CPU)
    features = torch.randn(700, head.shape.width, generator=torch.Generator().manual_seed(2))
    all_scores = head.scores(features)
    for row in (0, 1, 255, 256, 699):
        assert torch.equal(head.scores(features[row : row + 1])[0], all_scores[row])
    assert torch.equal(head.scores(features[100:400]), all_scores[100:400])
