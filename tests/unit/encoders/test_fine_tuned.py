"""Fine-tuned checkpoints: nothing that takes part in an embedding is dropped without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from virnuc_core.encoders.checkpoint import open_part, shape_of
from virnuc_core.encoders.convert import convert_encoder, random_tensor
from virnuc_core.encoders.model_config import ESM2_SIZES, Esm2Shape
from virnuc_core.encoders.registry import ESM2
from virnuc_core.errors import WeightsError

SHAPE = ESM2_SIZES["tiny"]
QUERY = "esm.encoder.layer.0.attention.self.query"
HF_CONFIG = {
    "model_type": "esm",
    "num_hidden_layers": SHAPE.layers,
    "hidden_size": SHAPE.width,
    "num_attention_heads": SHAPE.heads,
    "intermediate_size": SHAPE.ffn_width,
    "vocab_size": SHAPE.vocab,
    "position_embedding_type": "rotary",
    "layer_norm_eps": 1e-5,
    "token_dropout": True,
}
PUBLIC_MODULES = {
    "out": "attention.output.dense",
    "attn_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "ffn_norm": "LayerNorm",
}


def public_tensors() -> dict[str, Tensor]:
    """A tiny ESM-2 under the names of transformers, each layer with its rotary frequencies."""
    tensors = {}
    for name in SHAPE.tensors():
        tensor = random_tensor(SHAPE, name)
        if name == "embed.weight":
            tensors["esm.embeddings.word_embeddings.weight"] = tensor
        elif name == "inv_freq":
            for layer in range(SHAPE.layers):
                tensors[frequencies_of(layer)] = tensor.clone()
        elif name.startswith("final_norm"):
            kind = name.partition(".")[2]
            tensors[f"esm.encoder.emb_layer_norm_after.{kind}"] = tensor
        else:
            _, layer_number, module, kind = name.split(".")
            prefix = f"esm.encoder.layer.{layer_number}"
            if module == "qkv":
                for word, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    tensors[f"{prefix}.attention.self.{word}.{kind}"] = part.clone()
            else:
                tensors[f"{prefix}.{PUBLIC_MODULES[module]}.{kind}"] = tensor
    return tensors


def frequencies_of(layer: int) -> str:
    return f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"


def write_source(folder: Path, tensors: dict[str, Tensor], form: str = "safetensors") -> Path:
    """Write a checkpoint as transformers does."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def with_lora(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {
        f"{QUERY}.lora_A.weight": torch.ones(4, 64),
        f"{QUERY}.lora_B.weight": torch.ones(64, 4),
    }


def wrapped_by_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All names as the state dictionary of a `PeftModel` has them."""
    wrapped = {}
    for name, tensor in tensors.items():
        inner_name = name.replace(".query.", ".query.base_layer.")
        wrapped[f"base_model.model.{inner_name}"] = tensor
    lora = {f"{QUERY}.lora_A.default.weight": torch.ones(4, 64)}
    return wrapped | {f"base_model.model.{name}": tensor for name, tensor in lora.items()}


def with_tensor(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.ones(64)}


ADAPTERS = {
    "LoRA": with_lora,
    "a peft model": wrapped_by_peft,
    "DoRA": with_tensor(f"{QUERY}.lora_magnitude_vector.default.weight"),
    "LoRA of embeddings": with_tensor("esm.embeddings.word_embeddings.lora_embedding_A.default"),
    "AdaLoRA": with_tensor(f"{QUERY}.lora_E.default"),
    "IA3": with_tensor(f"{QUERY}.ia3_l.default"),
    "LoHa": with_tensor(f"{QUERY}.hada_w1_a.default"),
    "LoKr": with_tensor(f"{QUERY}.lokr_w1.default"),
    "OFT": with_tensor(f"{QUERY}.oft_r.default"),
    "bottleneck adapters": with_tensor(
        "esm.encoder.layer.0.output.adapters.task.adapter_down.0.weight"
    ),
    "prompt tuning": with_tensor("prompt_encoder.default.embedding.weight"),
}


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("drop_extra", [False, True], ids=["", "drop-extra"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_that_is_not_merged_is_refused_with_the_way_to_merge_it(
    kind: str, drop_extra: bool, form: str, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "tuned", ADAPTERS[kind](public_tensors()), form)
    with pytest.raises(WeightsError, match=r"adapter .*not merged.*merge_and_unload") as error_info:
        convert_encoder(ESM2, source, tmp_path / "out", drop_extra=drop_extra)
    assert "drop-extra" not in str(error_info.value)
    assert "\n" not in str(error_info.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_an_adapter_beside_the_weights_is_refused(name: str, as_file: bool, tmp_path: Path) -> None:
    source = write_source(tmp_path / "tuned", public_tensors())
    (source / name).write_bytes(b"{}")
    given = source / "model.safetensors" if as_file else source
    with pytest.raises(WeightsError, match=rf"{name}: an adapter .*merge_and_unload"):
        convert_encoder(ESM2, given, tmp_path / "out")


def test_an_adapter_in_a_models_directory_is_refused_before_a_run(
    models: Path, tmp_path: Path
) -> None:
    write_source(tmp_path / "esm2", with_lora(public_tensors()))
    with pytest.raises(WeightsError, match="not merged"):
        shape_of(tmp_path, Esm2Shape)
    write_source(tmp_path / "second" / "esm2", public_tensors())
    shape_of(tmp_path / "second", Esm2Shape)
    (tmp_path / "second" / "esm2" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="not merged"):
        shape_of(tmp_path / "second", Esm2Shape)


@pytest.mark.parametrize(
    "name",
    [
        "esm.encoder.layer.1.attention.self.key_norm.weight",
        "esm.encoder.layer.0.gate",
        "esm.embeddings.layer_norm.weight",
        "encoder.sentence_encoder.layers.0.self_attn.bias_k",
    ],
)
def test_another_part_of_the_network_is_never_left_out(name: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "other", public_tensors() | {name: torch.ones(64)})
    for drop_extra in (False, True):
        with pytest.raises(WeightsError, match=r"unexpected tensor .*results would change") as info:
            convert_encoder(ESM2, source, tmp_path / "out", drop_extra=drop_extra)
        assert name in str(info.value)
        assert "drop-extra" not in str(info.value)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_layers_with_other_rotary_frequencies_are_refused(form: str, tmp_path: Path) -> None:
    tensors = public_tensors()
    tensors[frequencies_of(1)] = tensors[frequencies_of(1)] * 0.5
    source = write_source(tmp_path / "other", tensors, form)
    with pytest.raises(WeightsError, match=r"layer\.0\..*inv_freq and .*layer\.1\..*differ"):
        convert_encoder(ESM2, source, tmp_path / "out")


def test_other_frequencies_are_found_by_the_check_before_a_run(tmp_path: Path) -> None:
    tensors = public_tensors()
    write_source(tmp_path / "same" / "esm2", tensors)
    shape_of(tmp_path / "same", Esm2Shape)
    _, read_tensor = open_part(tmp_path / "same", Esm2Shape)
    assert torch.equal(read_tensor("inv_freq"), tensors[frequencies_of(0)])
    tensors[frequencies_of(1)][-1] += 1e-3
    write_source(tmp_path / "other" / "esm2", tensors)
    with pytest.raises(WeightsError, match="differ"):
        shape_of(tmp_path / "other", Esm2Shape)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t * torch.nan])
def test_frequencies_of_another_number_or_no_numbers_are_refused(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    tensors = public_tensors()
    tensors[frequencies_of(1)] = change(tensors[frequencies_of(1)]).clone()
    source = write_source(tmp_path / "other", tensors)
    with pytest.raises(WeightsError, match="differ"):
        convert_encoder(ESM2, source, tmp_path / "out")


def test_a_tensor_under_two_names_must_be_the_same(tmp_path: Path) -> None:
    tensors = public_tensors()
    name = f"{QUERY}.weight"
    twice = tensors | {name.removeprefix("esm."): tensors[name].clone()}
    convert_encoder(ESM2, write_source(tmp_path / "twice", twice), tmp_path / "out")
    twice[name.removeprefix("esm.")][0, 0] += 1
    with pytest.raises(WeightsError, match=r"query\.weight differ"):
        convert_encoder(ESM2, write_source(tmp_path / "other", twice), tmp_path / "more")
