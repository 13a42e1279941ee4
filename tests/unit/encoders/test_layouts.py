"""Public checkpoints, in every layout they come in, give one and the same model."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from virnuc_core.encoders.checkpoint import load_encoder, open_part
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import (
    convert_encoder,
    convert_head,
    guess_esm2_shape,
    open_public,
)
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape, HeadShape
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.registry import DNABERT_S, ESM2
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch
from virnuc_core.errors import ConfigError, WeightsError

from .encoder_batches import dnas, packed, proteins

CPU = torch.device("cpu")
HF_ESM2 = {
    "model_type": "esm", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256,
    "vocab_size": 33, "layer_norm_eps": 1e-5, "position_embedding_type": "rotary", "token_dropout": True,
    "emb_layer_norm_before": False,
}  # fmt: skip
HF_DNABERT = {
    "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
    "vocab_size": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip


def fair_names(ours: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Our tensors under the names of fair-esm."""
    tensors: dict[str, Tensor] = {
        "lm_head.weight": torch.zeros(33, 64),
        "contact_head.regression.bias": torch.zeros(1),
    }
    for name, tensor in ours.items():
        if name == "inv_freq":
            tensors |= {f"layers.{i}.self_attn.rot_emb.inv_freq": tensor.clone() for i in range(2)}
        elif ".qkv." in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace("qkv", f"self_attn.{letter}_proj")] = part.clone()
        else:
            for old, new in (
                ("embed.", "embed_tokens."), ("attn_norm", "self_attn_layer_norm"), (".out.", ".self_attn.out_proj."),
                ("ffn_norm", "final_layer_norm"), ("final_norm", "emb_layer_norm_after"),
            ):  # fmt: skip
                name = name.replace(old, new)  # noqa: PLW2901
            tensors[name] = tensor
    return {prefix + name: tensor for name, tensor in tensors.items()}


def hf_names(ours: dict[str, Tensor], prefix: str, *, frequencies: bool) -> dict[str, Tensor]:
    """Our tensors under the names of the port to transformers."""
    tensors: dict[str, Tensor] = {
        f"{prefix}embeddings.position_ids": torch.arange(1026)[None],
        f"{prefix}embeddings.position_embeddings.weight": torch.zeros(1026, 64),
        f"{prefix}contact_head.regression.weight": torch.zeros(1, 4),
        "lm_head.dense.weight": torch.zeros(64, 64),
    }
    for name, tensor in ours.items():
        layer = f"{prefix}encoder.layer.{name.split('.')[1]}." if name.startswith("layers.") else ""
        end = name.split(".")[-1]
        if name == "inv_freq":
            if frequencies:
                for i in range(2):
                    key = f"{prefix}encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq"
                    tensors[key] = tensor.clone()
        elif ".qkv." in name:
            for word, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                tensors[f"{layer}attention.self.{word}.{end}"] = part.clone()
        else:
            middle = {
                "out": "attention.output.dense", "attn_norm": "attention.LayerNorm", "fc1": "intermediate.dense",
                "fc2": "output.dense", "ffn_norm": "LayerNorm",
            }.get(name.split(".")[-2])  # fmt: skip
            if middle:
                tensors[f"{layer}{middle}.{end}"] = tensor
            elif name == "embed.weight":
                tensors[f"{prefix}embeddings.word_embeddings.weight"] = tensor
            else:
                tensors[f"{prefix}encoder.emb_layer_norm_after.{end}"] = tensor
    return tensors


def bert_names(ours: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Our tensors under the names of the public DNABERT-S."""
    tensors: dict[str, Tensor] = {f"{prefix}pooler.dense.weight": torch.zeros(64, 64)}
    for name, tensor in ours.items():
        for old, new in (
            ("embed.weight", "embeddings.word_embeddings.weight"),
            ("token_type.weight", "embeddings.token_type_embeddings.weight"),
            ("embed_norm", "embeddings.LayerNorm"),
            ("layers.", "encoder.layer."),
            ("qkv", "attention.self.Wqkv"),
            (".out.", ".attention.output.dense."),
            ("attn_norm", "attention.output.LayerNorm"),
            ("gated", "mlp.gated_layers"),
            (".wo.", ".mlp.wo."),
            ("ffn_norm", "mlp.layernorm"),
        ):
            name = name.replace(old, new)  # noqa: PLW2901
        tensors[prefix + name] = tensor
    return tensors


def sharded(
    tensors: dict[str, Tensor],
    folder: Path,
    stem: str,
    save: Callable[[dict[str, Tensor], Path], None],
) -> None:
    """Two shards and their index, as transformers writes them."""
    ending = "safetensors" if stem == "model" else "bin"
    file_of_tensor = {}
    names = sorted(tensors)
    for i in range(2):
        file = f"{stem}-0000{i + 1}-of-00002.{ending}"
        save({name: tensors[name] for name in names[i::2]}, folder / file)
        file_of_tensor |= dict.fromkeys(names[i::2], file)
    (folder / f"{stem}.{ending}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of_tensor})
    )


@pytest.fixture
def esm2_tensors_of(models: Path) -> dict[str, Tensor]:
    shape, read_tensor = open_part(models, Esm2Shape)
    return {name: read_tensor(name) for name in shape.tensors()}


@pytest.fixture
def dnabert_tensors_of(models: Path) -> dict[str, Tensor]:
    shape, read_tensor = open_part(models, DnabertShape)
    return {name: read_tensor(name) for name in shape.tensors()}


def esm2_batch() -> PackedBatch:
    return packed(Esm2Tokenizer(), proteins([9, 50, 3]))


ESM2_LAYOUTS = [
    "hf", "hf without prefix", "hf without frequencies", "hf sharded", "hf bin", "hf bin sharded",
    "fair", "fair encoder.", "fair encoder.sentence_encoder.", "fair state only", "fair old format",
]  # fmt: skip


@pytest.mark.parametrize("layout", ESM2_LAYOUTS)
def test_every_esm2_layout_gives_the_same_embeddings(
    layout: str, models: Path, esm2_tensors_of: dict[str, Tensor], tmp_path: Path
) -> None:
    source = tmp_path / "public"
    source.mkdir()
    if layout.startswith("hf"):
        (source / "config.json").write_text(json.dumps(HF_ESM2))
        prefix = "" if "without prefix" in layout else "esm."
        tensors = hf_names(esm2_tensors_of, prefix, frequencies="frequencies" not in layout)
        if "bin sharded" in layout:
            sharded(tensors, source, "pytorch_model", torch.save)
        elif "sharded" in layout:
            sharded(tensors, source, "model", save_file)
        elif "bin" in layout:
            torch.save(tensors, source / "pytorch_model.bin")
        else:
            save_file(tensors, source / "model.safetensors")
    else:
        prefix = layout.removeprefix("fair").strip() if "encoder" in layout else ""
        state = fair_names(esm2_tensors_of, prefix)
        settings = argparse.Namespace(encoder_layers=2, encoder_embed_dim=64)
        source = source / "esm2_t2_tiny.pt"
        content: Any = (
            state
            if "state only" in layout
            else {"cfg": {"model": settings}, "args": settings, "model": state}
        )
        torch.save(content, source, _use_new_zipfile_serialization="old" not in layout)
    shape = convert_encoder(ESM2, source, tmp_path / "out")
    assert (shape.layers, shape.width, shape.heads, shape.ffn_width) == (2, 64, 2, 256)
    got = load_encoder(Esm2, tmp_path / "out", CPU)
    assert torch.equal(got.embed(esm2_batch()), load_encoder(Esm2, models, CPU).embed(esm2_batch()))
    assert got.shape.origin == source.name


def test_a_public_folder_put_in_place_needs_no_conversion(
    models: Path, esm2_tensors_of: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "esm2").mkdir()
    (tmp_path / "esm2" / "config.json").write_text(json.dumps(HF_ESM2))
    sharded(
        hf_names(esm2_tensors_of, "esm.", frequencies=True), tmp_path / "esm2", "model", save_file
    )
    ours, theirs = (
        load_encoder(Esm2, folder, CPU).embed(esm2_batch()) for folder in (models, tmp_path)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_every_dnabert_layout_gives_the_same_embeddings(
    prefix: str, form: str, models: Path, dnabert_tensors_of: dict[str, Tensor], tmp_path: Path
) -> None:
    source = tmp_path / "public"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(HF_DNABERT))
    tensors = bert_names(dnabert_tensors_of, prefix)
    if form == "bin":
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no such file"):
        convert_encoder(DNABERT_S, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.copy(models / "dnabert_s" / "tokenizer.json", source)
    convert_encoder(DNABERT_S, source, tmp_path / "out")
    batch = packed(DnabertTokenizer(models), dnas([150, 9]))
    got = load_encoder(DnabertS, tmp_path / "out", CPU)
    assert torch.equal(got.embed(batch), load_encoder(DnabertS, models, CPU).embed(batch))
    assert DnabertTokenizer(tmp_path / "out").pad_id == 3  # whatever pad_token_id the config names


def test_fair_esm_itself_saves_what_is_read_here(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from esm.model import esm2 as fair_esm

    model = fair_esm.ESM2(num_layers=1, embed_dim=32, attention_heads=2, alphabet="ESM-1b").eval()
    torch.save(
        {"model": model.state_dict(), "cfg": {"model": argparse.Namespace(a=1)}},
        tmp_path / "esm2.pt",
    )
    shape = guess_esm2_shape(source := tmp_path / "esm2.pt", open_public(source))
    assert (shape.layers, shape.width, shape.heads, shape.ffn_width, shape.vocab) == (
        1,
        32,
        2,
        128,
        33,
    )
    convert_encoder(ESM2, tmp_path / "esm2.pt", tmp_path / "out")
    tokens = esm2_batch()
    with torch.no_grad():
        expected = model(tokens.tokens[None, :11], repr_layers=[1])["representations"][1][
            0, 1:10
        ].mean(0)
    torch.testing.assert_close(
        load_encoder(Esm2, tmp_path / "out", CPU).embed(tokens)[0], expected, atol=1e-5, rtol=0
    )


def test_stored_narrower_on_request(models: Path, tmp_path: Path) -> None:
    convert_encoder(ESM2, models / "esm2", tmp_path, dtype="fp16")
    _, read_tensor = open_part(tmp_path, Esm2Shape)
    assert read_tensor("layers.0.fc1.weight").dtype == torch.float16
    assert read_tensor("inv_freq").dtype == torch.float32


def test_a_task_head_is_left_out_with_a_remark_and_more_only_when_asked(
    models: Path,
    esm2_tensors_of: dict[str, Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = hf_names(esm2_tensors_of, "esm.", frequencies=True) | {
        "classifier.dense.weight": torch.ones(64, 64)
    }
    (tmp_path / "config.json").write_text(json.dumps(HF_ESM2))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert_encoder(ESM2, tmp_path, tmp_path / "out")
    assert "left out classifier.dense.weight, which such a model does not have" in caplog.text
    want = load_encoder(Esm2, models, CPU).embed(esm2_batch())
    assert torch.equal(load_encoder(Esm2, tmp_path / "out", CPU).embed(esm2_batch()), want)
    torch.save(tensors | {"surprise": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"unexpected tensor surprise;.*--drop-extra"):
        convert_encoder(ESM2, tmp_path, tmp_path / "more")
    convert_encoder(ESM2, tmp_path, tmp_path / "more", drop_extra=True)
    assert "left out classifier.dense.weight, surprise" in caplog.text
    del tensors["esm.encoder.layer.1.attention.self.key.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"no tensor layers\.1\.qkv\.weight"):
        convert_encoder(ESM2, tmp_path, tmp_path / "none", drop_extra=True)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.pop("layers.1.self_attn.k_proj.weight"), r"no tensor layers\.1\.qkv\.weight"),
        (
            lambda t: t.update({"layers.1.self_attn.k_proj.weight": torch.ones(64, 65)}),
            r"layers\.1\.self_attn\.k_proj\.weight is \[64, 65\], config\.json makes it \[64, 64\]",
        ),
        (
            lambda t: t.update({"layers.1.qkv.bias": torch.ones(192)}),
            r"unexpected tensors layers\.1\.self_attn\.k_proj",
        ),
        (lambda t: t.update(surprise=torch.ones(1)), "unexpected tensor surprise"),
        (lambda t: t.update({"layers.7.fc1.weight": torch.ones(1)}), r"no tensors layers\.2"),
        (
            lambda t: t.update({"layers.1.fc1.bias": torch.ones(3)}),
            r"layers\.1\.fc1\.bias is \[3\], config\.json makes it \[256\]",
        ),
        (lambda t: t.clear(), "no dictionary of tensors"),
    ],
)
def test_what_does_not_fit_is_named(
    spoil: Callable[[dict[str, Tensor]], object],
    says: str,
    esm2_tensors_of: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    tensors = fair_names(esm2_tensors_of, "")
    spoil(tensors)
    torch.save({"model": tensors}, tmp_path / "esm2.pt")
    with pytest.raises(WeightsError, match=says):
        convert_encoder(ESM2, tmp_path / "esm2.pt", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
    assert not list((tmp_path / "out").glob(".*"))


def test_an_esm1_model_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(HF_ESM2 | {"position_embedding_type": "absolute"})
    )
    with pytest.raises(WeightsError, match="ESM-1 style"):
        convert_encoder(ESM2, tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps({"position_embedding_type": "rotary"}))
    with pytest.raises(WeightsError, match="no num_hidden_layers, hidden_size"):
        convert_encoder(ESM2, tmp_path, tmp_path / "out")


def test_sources_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file or directory"):
        convert_encoder(ESM2, tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(WeightsError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        convert_encoder(ESM2, tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../elsewhere.safetensors"}}'
    )
    with pytest.raises(WeightsError, match=r"names \.\./elsewhere\.safetensors, which is not in"):
        convert_encoder(ESM2, tmp_path, tmp_path / "out")
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    with pytest.raises(WeightsError, match=r"garbage\.pt: refused"):
        convert_encoder(ESM2, tmp_path / "garbage.pt", tmp_path / "out")


def test_a_checkpoint_with_code_in_it_is_refused_unexecuted(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    for i, old in enumerate((True, False)):
        path = tmp_path / f"{i}.bin"
        torch.save({"model": Payload()}, path, _use_new_zipfile_serialization=not old)
        with pytest.raises(WeightsError, match="refused"):
            convert_encoder(ESM2, path, tmp_path / "out")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.", "refused"),  # 2 GiB of zeros
        (b"ctorch.storage\nUntypedStorage\n(J\xff\xff\xff\x7ftR.", "refused"),
    ],
)
def test_what_a_checkpoint_claims_is_bounded_before_it_is_made(
    program: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "pytorch_model.bin"
    for old in (False, True):
        if old:
            path.write_bytes(
                pickle.dumps(0x1950A86A20F9469CFC6C, 2)
                + pickle.dumps(1001, 2)
                + pickle.dumps({}, 2)
                + program
            )
        else:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("a/data.pkl", program)
                file.writestr("a/version", b"3\n")
        with pytest.raises(WeightsError, match=says):
            convert_encoder(ESM2, path, tmp_path / "out")


def test_a_checkpoint_that_swells_is_refused(tmp_path: Path) -> None:
    scalar = torch.ones(1)
    path = tmp_path / "pytorch_model.bin"
    for old in (False, True):
        torch.save({"wide": scalar.expand(1 << 40)}, path, _use_new_zipfile_serialization=not old)
        with pytest.raises(
            WeightsError, match=r"claims 4,398,046,511,104 bytes of numbers, the file has"
        ):
            convert_encoder(ESM2, path, tmp_path / "out")
    torch.save({"hidden_layer.weight": scalar.expand(1 << 40)}, tmp_path / "300_model.pth")
    with pytest.raises(
        WeightsError, match="claims 4,398,046,511,104 bytes of numbers, the file has"
    ):
        convert_head(tmp_path / "300_model.pth", tmp_path / "out")
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as file,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in file.namelist():
            small.writestr(name, file.read(name))
    with pytest.raises(WeightsError, match="compressed"):
        convert_encoder(ESM2, path, tmp_path / "out")


@pytest.mark.parametrize(
    "tensors",
    [
        {"embed_tokens.weight": torch.ones(33, 8), "layers.99999999.fc1.weight": torch.ones(1)},
        {
            "layers.99999999.x": torch.ones(1),
            "layers.0.fc1.weight": torch.ones(9, 9),
            "rot.inv_freq": torch.ones(2),
        },
        {"layers.0.fc1.weight": torch.ones(9, 9), "rot.inv_freq": torch.ones(0)},
        {"layers.0.fc1.weight": torch.ones(9, 9), "rot.inv_freq": torch.tensor(1.0)},
        {"layers.0.fc1.weight": torch.tensor(1.0), "rot.inv_freq": torch.ones(2)},
    ],
)
def test_sizes_of_tensors_that_make_no_model(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save({"embed_tokens.weight": torch.ones(33, 8)} | tensors, tmp_path / "model.pt")
    with pytest.raises(WeightsError, match="not the layout of fair-esm's ESM-2"):
        convert_encoder(ESM2, tmp_path / "model.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("hidden", "name"), [((0, 99), "300_model"), ((9,), "300_model"), ((9, 99), "9999999999_model")]
)
def test_a_head_of_impossible_sizes(hidden: tuple[int, ...], name: str, tmp_path: Path) -> None:
    torch.save({"hidden_layer.weight": torch.ones(hidden)}, tmp_path / f"{name}.pth")
    with pytest.raises(WeightsError, match=r"_model\.pth: "):
        convert_head(tmp_path / f"{name}.pth", tmp_path / "out", dna_width=64)


def test_a_head_as_safetensors(models: Path, tmp_path: Path) -> None:
    source = models / "head" / "model.safetensors"
    with pytest.raises(ConfigError, match="does not say the model length"):
        convert_head(source, tmp_path, dna_width=64)
    shape = convert_head(source, tmp_path, model_length=300, dna_width=64)
    assert (shape.model_length, shape.dna_width, shape.protein_width, shape.hidden) == (
        300,
        64,
        64,
        512,
    )
    with pytest.raises(WeightsError, match="exists already"):
        convert_head(source, tmp_path, model_length=300, dna_width=64)
    for part in ("esm2", "dnabert_s"):
        (tmp_path / part).symlink_to(models / part)
    features = torch.randn(3, 128)
    assert torch.equal(
        Head(*open_part(tmp_path, HeadShape), CPU).scores(features),
        Head(*open_part(models, HeadShape), CPU).scores(features),
    )
