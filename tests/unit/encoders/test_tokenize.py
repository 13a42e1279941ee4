"""Tokens: ESM-2 against fair-esm's own alphabet, DNABERT-S against encodings of the real tokenizer."""

from __future__ import annotations

import json
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.encoders.convert import train_tokenizer
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.errors import WeightsError


@given(
    st.lists(
        st.text(alphabet="LAGVSERTIDPKQNFYMHWCXBUZO.-J*x", max_size=30).map(str.encode), max_size=8
    )
)
def test_esm2_tokens_equal_a_table_looked_up_one_by_one(rows: list[bytes]) -> None:
    ids = {letter: i for i, letter in enumerate("LAGVSERTIDPKQNFYMHWCXBUZO.-", start=4)}
    tokens, offsets = Esm2Tokenizer().encode(rows)
    expected = [[0, *(ids.get(chr(letter), 3) for letter in row), 2] for row in rows]
    assert tokens.dtype == offsets.dtype == torch.int64
    assert offsets.tolist() == [0, *torch.tensor([len(row) for row in expected]).cumsum(0).tolist()]
    assert tokens.tolist() == [token for row in expected for token in row]


def test_esm2_tokens_equal_fair_esm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from esm.data import Alphabet

    alphabet = Alphabet.from_architecture("ESM-1b")
    assert [alphabet.get_idx(name) for name in ("<cls>", "<pad>", "<eos>", "<unk>")] == [0, 1, 2, 3]
    text = "LAGVSERTIDPKQNFYMHWCXBUZO.-J"
    tokens, _ = Esm2Tokenizer().encode([text.encode()])
    assert tokens.tolist() == [0, *(alphabet.get_idx(letter) for letter in text), 2]


def test_no_rows_give_no_tokens(models: Path) -> None:
    for tokenizer in (Esm2Tokenizer(), DnabertTokenizer(models)):
        tokens, offsets = tokenizer.encode([])
        assert (len(tokens), offsets.tolist()) == (0, [0])


def test_golden_encodings_of_the_real_tokenizer(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "tokenizer" / "dnabert2"
    (tmp_path / "dnabert_s").mkdir()
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "dnabert_s" / "tokenizer.json")
    tokenizer = DnabertTokenizer(tmp_path)
    cases = json.loads((folder / "golden_encodings.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 15
    tokens, offsets = tokenizer.encode([case["text"].encode() for case in cases])
    for i, case in enumerate(cases):
        assert tokens[offsets[i] : offsets[i + 1]].tolist() == case["ids"], case["name"]
    assert (tokenizer.pad_id, tokenizer.vocab) == (3, 4096)


def test_trained_vocabulary_has_the_special_ids_of_dnabert_2(models: Path) -> None:
    tokenizer = DnabertTokenizer(models)
    tokens, offsets = tokenizer.encode([b"ACGT", b"", b"acgN", b"A" * 40])
    first_row, empty, unknown, run = (tokens[a:b].tolist() for a, b in pairwise(offsets))
    assert (first_row[0], first_row[-1]) == (1, 2)
    assert empty == [1, 2]
    assert unknown == [
        1,
        0,
        0,
        0,
        0,
        2,
    ]  # no normaliser: each letter that is no capital base is [UNK]
    assert len(run) < 30
    assert (tokenizer.pad_id, tokenizer.vocab) == (3, 512)


def test_training_a_vocabulary_gives_the_same_file_again() -> None:
    tokenizer = train_tokenizer(vocab=200, seed=4)
    assert tokenizer == train_tokenizer(vocab=200, seed=4) != train_tokenizer(vocab=200, seed=5)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no such file"):
        DnabertTokenizer(tmp_path)
    folder = tmp_path / "dnabert_s"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a tokenizer file"):
        DnabertTokenizer(tmp_path)


def test_padding_and_truncation_of_the_file_are_switched_off(models: Path, tmp_path: Path) -> None:
    (tmp_path / "dnabert_s").mkdir()
    content = json.loads((models / "dnabert_s" / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 3, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    (tmp_path / "dnabert_s" / "tokenizer.json").write_text(json.dumps(content))
    rows = [b"ACGTTGCAACGGATATCGAGAGCTTTAGC"]
    assert (
        DnabertTokenizer(tmp_path).encode(rows)[0].tolist()
        == DnabertTokenizer(models).encode(rows)[0].tolist()
    )
