"""A models directory: made with random weights, opened, fingerprinted, and what is said when a part is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from virnuc_core.encoders import checkpoint, digests
from virnuc_core.encoders.checkpoint import check_models, load_encoder, open_part, shape_of
from virnuc_core.encoders.classifier import Head
from virnuc_core.encoders.convert import init_random, random_tensor
from virnuc_core.encoders.digests import digest_of, fingerprint
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES, Esm2Shape, HeadShape
from virnuc_core.encoders.model_files import write_part, write_tensors
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.tensor_names import match_tensors
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer
from virnuc_core.errors import WeightsError

from .encoder_batches import dnas, packed, proteins

CPU = torch.device("cpu")


@pytest.fixture
def copied(models: Path, tmp_path: Path) -> Path:
    """A models directory to spoil."""
    shutil.copytree(models, tmp_path / "models")
    return tmp_path / "models"


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.usefixtures("tokenizers_trained_anew")
def test_equal_seeds_give_equal_bytes_and_others_do_not(models: Path, tmp_path: Path) -> None:
    init_random(tmp_path / "same", seed=7)
    init_random(tmp_path / "other", seed=8)
    assert files(tmp_path / "same") == files(models)
    assert fingerprint(tmp_path / "same") == fingerprint(models)
    ours, other_fingerprint = fingerprint(models), fingerprint(tmp_path / "other")
    assert len({*ours.values(), *other_fingerprint.values()}) == 6


def test_files_are_plain_safetensors_of_the_sizes_in_config_json(models: Path) -> None:
    assert set(files(models)) == {
        "esm2/config.json", "esm2/model.safetensors", "head/config.json", "head/model.safetensors",
        "dnabert_s/config.json", "dnabert_s/model.safetensors", "dnabert_s/tokenizer.json",
    }  # fmt: skip
    tensors = load_file(models / "esm2" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == ESM2_SIZES["tiny"].tensors()
    assert json.loads((models / "head" / "config.json").read_text())["model_length"] == 500


def test_stored_in_half_precision_all_but_angles_and_head(tmp_path: Path) -> None:
    init_random(tmp_path, dtype="fp16")
    esm2 = load_file(tmp_path / "esm2" / "model.safetensors")
    assert {t.dtype for name, t in esm2.items() if name != "inv_freq"} == {torch.float16}
    assert esm2["inv_freq"].dtype == torch.float32
    assert {t.dtype for t in load_file(tmp_path / "head" / "model.safetensors").values()} == {
        torch.float32
    }
    assert load_encoder(Esm2, tmp_path, CPU).layers[0].qkv.weight.dtype == torch.float32


def test_random_activations_stay_of_a_sensible_size(models: Path) -> None:
    deep = Esm2Shape(layers=36, width=64, heads=2, ffn_width=256)
    esm2 = Esm2(deep, partial(random_tensor, deep), CPU, precision="fp32", attention="reference")
    hidden = esm2.compute_hidden_states(packed(Esm2Tokenizer(), proteins([50] * 4)))
    assert 0.3 < hidden.std() < 3
    dna = load_encoder(DnabertS, models, CPU).compute_hidden_states(
        packed(DnabertTokenizer(models), dnas([150] * 4))
    )
    assert 0.3 < dna.std() < 3


def test_known_sizes_are_the_published_ones() -> None:
    three_billion = sum(
        torch.Size(shape).numel() for shape in ESM2_SIZES["t36_3B"].tensors().values()
    )
    assert three_billion == pytest.approx(2.84e9, rel=0.01)
    base = sum(torch.Size(shape).numel() for shape in DNABERT_SIZES["base"].tensors().values())
    assert base == pytest.approx(117e6, rel=0.01)
    assert HeadShape(model_length=500, dna_width=768, protein_width=2560).width == 3328


def test_a_taken_directory_is_refused(models: Path) -> None:
    with pytest.raises(WeightsError, match="already holds esm2/"):
        init_random(models)


def test_a_random_tensor_of_many_pieces_has_the_asked_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virnuc_core.encoders.convert.PIECE_NUMBERS", 1000)
    shape = Esm2Shape(layers=1, width=64, heads=2, ffn_width=256)
    write_part(tmp_path, shape, partial(random_tensor, shape, seed=1), "random", "fp32")
    _, read_tensor = open_part(tmp_path, Esm2Shape)
    qkv = read_tensor("layers.0.qkv.weight")
    assert qkv.std() == pytest.approx(64**-0.5, rel=0.05)
    assert not torch.equal(qkv.flatten()[:1000], qkv.flatten()[1000:2000])


def remove(part: str, name: str) -> Callable[[Path], None]:
    return lambda models: (models / part / name).unlink()


def edit(part: str, **changes: object) -> Callable[[Path], None]:
    def change(models: Path) -> None:
        path = models / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def reshape(part: str, name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(models: Path) -> None:
        path = models / part / "model.safetensors"
        tensors = load_file(path)
        tensors.pop(name, None)
        save_file(tensors if tensor is None else tensors | {name: tensor}, path)

    return change


def shrink_vocabulary(models: Path) -> None:
    reshape("dnabert_s", "embed.weight", torch.ones(300, 64))(models)
    edit("dnabert_s", vocab=300)(models)


def scramble(part: str, name: str) -> Callable[[Path], None]:
    return lambda models: (models / part / name).write_bytes(b"not at all") and None


SWELLING = {"type": "Replace", "pattern": {"String": "A"}, "content": "NNNNNNNN"}


def vocabulary(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def spoil(models: Path) -> None:
        path = models / "dnabert_s" / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def cut(part: str, share: float) -> Callable[[Path], None]:
    def change(models: Path) -> None:
        path = models / part / "model.safetensors"
        os.truncate(path, int(path.stat().st_size * share))

    return change


def load_all(models: Path) -> None:
    load_encoder(Esm2, models, CPU)
    load_encoder(DnabertS, models, CPU)
    Head(*open_part(models, HeadShape), CPU)


@pytest.mark.parametrize("use", [load_all, check_models])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            shutil.rmtree,
            r"no such directory; make one with virnuc models fetch \S+ --head 300_model",
        ),
        (lambda m: shutil.rmtree(m / "esm2"), r"no esm2/ in it; .* convert makes them"),
        (lambda m: shutil.rmtree(m / "dnabert_s"), r"no dnabert_s/ in it"),
        (lambda m: shutil.rmtree(m / "head"), r"no head/ in it"),
        (remove("esm2", "config.json"), r"esm2/config\.json: cannot be read"),
        (remove("head", "model.safetensors"), r"head/model\.safetensors: no such file"),
        (remove("dnabert_s", "tokenizer.json"), r"tokenizer\.json: no such file"),
        (scramble("esm2", "config.json"), r"esm2/config\.json: invalid JSON"),
        (
            scramble("esm2", "model.safetensors"),
            r"model\.safetensors: cannot be read as safetensors",
        ),
        (edit("esm2", width=63), r"width 63 does not split"),
        (edit("esm2", colour="red"), r"colour: extra inputs"),
        (edit("esm2", layers=3), r"no tensors layers\.2\.\S+, .* and \d+ more; not the model"),
        (edit("esm2", layers=1), r"unexpected tensors layers\.1\."),
        (
            edit("esm2", ffn_width=128),
            r"layers\.0\.fc1\.weight is \[256, 64\], config\.json makes it \[128, 64\]",
        ),
        (
            edit("dnabert_s", vocab=300),
            r"tensor embed\.weight is \[512, 64\], config\.json makes it \[300, 64\]",
        ),
        (shrink_vocabulary, r"the tokenizer has 512 tokens, the model only 300"),
        (
            edit("head", protein_width=2560),
            r"64 \(DNA\) \+ 2560 \(protein\), the encoders beside it give 64 \+ 64",
        ),
        (reshape("esm2", "layers.1.out.bias", None), r"no tensor layers\.1\.out\.bias"),
        (
            reshape("esm2", "inv_freq", torch.ones(5)),
            r"tensor inv_freq is \[5\], config\.json makes it \[16\]",
        ),
        (
            reshape("head", "bn1.running_var", torch.ones(512, dtype=torch.int64)),
            r"bn1\.running_var holds int64",
        ),
        (
            reshape("esm2", "layers.0.qkv.weight", torch.ones(64)),
            r"tensor layers\.0\.qkv\.weight is \[64\], config",
        ),
        (
            cut("esm2", 0.999),
            r"esm2/model\.safetensors: cannot be read as safetensors.*; is it whole\? copy",
        ),
        (
            cut("head", 0.5),
            r"head/model\.safetensors: cannot be read as safetensors.*; is it whole\? copy",
        ),
        (cut("dnabert_s", 0.0), r"dnabert_s/model\.safetensors: cannot be read as safetensors"),
        (scramble("dnabert_s", "tokenizer.json"), r"tokenizer\.json: not a tokenizer file"),
        (reshape("head", "surplus", torch.ones(2)), r"unexpected tensor surplus"),
        (edit("esm2", layers=10**6), r"esm2/config\.json: layers: input should be less"),
        (edit("dnabert_s", vocab=10**9), r"dnabert_s/config\.json: vocab: input should be less"),
        (
            edit("head", dna_width=1, protein_width=10**12),
            r"head/config\.json: protein_width: input should be less",
        ),
        (edit("esm2", origin=["x" * 9_000]), r"esm2/config\.json: origin: .{,300}$"),
        (
            edit("esm2", origin="x" * (1 << 24)),
            r"esm2/config\.json: cannot be read \(larger than 16,777,216 bytes\)",
        ),
        (
            lambda m: (m / "head/config.json").write_text("[" * 90_000) and None,
            r"head/config\.json: invalid JSON",
        ),
        (
            vocabulary(lambda t: t["model"].update(dropout=0.1)),
            r"tokenizer\.json: with a dropout of 0\.1",
        ),
        (
            vocabulary(lambda t: t["model"]["vocab"].update(ACGTACGT=4_000)),
            r"tokenizer has 4001 tokens, the model",
        ),
        (
            vocabulary(lambda t: t.update(normalizer=SWELLING)),
            r"tokenizer\.json: makes \d+ tokens of 40 letters",
        ),
        (
            vocabulary(lambda t: t.update(post_processor=None)),
            r"tokenizer\.json: .* between \[CLS\] and \[SEP\]",
        ),
        (
            lambda m: os.truncate(m / "dnabert_s/tokenizer.json", 1 << 25),
            r"tokenizer\.json: .*larger than 16,777,216",
        ),
    ],
)
def test_a_spoilt_models_directory_is_one_clear_line(
    copied: Path, spoil: Callable[[Path], None], says: str, use: Callable[[Path], None]
) -> None:
    spoil(copied)
    with pytest.raises(WeightsError, match=says) as error_info:
        use(copied)
    assert "\n" not in str(error_info.value)
    assert error_info.value.exit_code == 3


def test_a_sound_models_directory_passes_and_its_weights_are_not_read(models: Path) -> None:
    check_models(models)
    shape = ESM2_SIZES["tiny"]
    tensors = {name: torch.empty(size, device="meta") for name, size in shape.tensors().items()}
    match_tensors(Path("here"), tensors, shape)


@pytest.mark.parametrize("part", ["esm2", "dnabert_s", "head"])
def test_a_fingerprint_follows_the_content(copied: Path, models: Path, part: str) -> None:
    fingerprint_before = fingerprint(copied)
    assert fingerprint_before == fingerprint(models)
    path = copied / part / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    fingerprint_after = fingerprint(copied)
    changed_parts = [
        name
        for name in ("esm2", "dnabert_s", "head")
        if fingerprint_before[name] != fingerprint_after[name]
    ]
    assert changed_parts == [part]


def test_the_digest_of_a_large_file_is_remembered_until_the_file_changes(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    hashed_files: list[str] = []

    def counted(path: Path) -> str:
        hashed_files.append(path.name)
        return digest_of(path)

    def asked(*, recompute: bool = False) -> tuple[dict[str, str], int]:
        digests._cached_digest.cache_clear()  # as in another process
        hashed_files.clear()
        return fingerprint(copied, recompute=recompute), len(hashed_files)

    monkeypatch.setattr(digests, "digest_of", counted)
    digests_before, files = asked()
    assert files == 7
    assert asked() == (digests_before, 0)
    assert asked(recompute=True) == (digests_before, files)
    for cache_file in (tmp_path / "home/.cache/virnuc/digests").iterdir():
        cache_file.write_text("no digest")
    assert asked() == (digests_before, files)
    weights = copied / "head" / "model.safetensors"
    times, weights_bytes = weights.stat(), weights.read_bytes()
    weights.write_bytes(weights_bytes[:-1] + bytes([weights_bytes[-1] ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had been done
    digests_after, count = asked()
    assert (digests_after["head"] != digests_before["head"], count) == (True, 1)


def test_a_part_is_looked_at_once_while_its_files_stay_the_same(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(copied, HeadShape)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_open_tensors", None)
        assert shape_of(copied, HeadShape) == shape
    weights = copied / "head" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, weights)
    for _ in range(2):
        with pytest.raises(WeightsError, match="holds NaN"):
            shape_of(copied, HeadShape)


def test_every_stretch_of_a_file_is_in_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 8)
    path, content, found = tmp_path / "file", bytes(range(30)), set[str]()
    orders = (content, content[8:16] + content[:8] + content[16:])
    for chunks in (
        *orders,
        *(content[:offset] + b"!" + content[offset + 1 :] for offset in range(30)),
        content[:-1],
        b"",
    ):
        path.write_bytes(chunks)
        found.add(digest_of(path))
    assert len(found) == 34
    path.write_bytes(content)
    parts = (content[offset : offset + 8] for offset in range(0, 30, 8))
    assert (
        digest_of(path)
        == hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    )


def test_digests_need_no_home(copied: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    assert fingerprint(copied) == fingerprint(models)


def test_the_tokenizer_is_part_of_the_fingerprint(copied: Path) -> None:
    fingerprint_before = fingerprint(copied)
    path = copied / "dnabert_s" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert fingerprint(copied)["dnabert_s"] != fingerprint_before["dnabert_s"]
    path.unlink()
    with pytest.raises(WeightsError, match="tokenizer"):
        fingerprint(copied)


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    def make(name: str) -> torch.Tensor:
        return {"a": torch.ones(2)}[name]

    with pytest.raises(KeyError):
        write_tensors(tmp_path / "model.safetensors", {"a": (2,), "b": (2,)}, torch.float32, make)
    assert list(tmp_path.iterdir()) == []


def test_a_command_checks_weights_and_loads_its_flow_without_torch(models: Path) -> None:
    program = """
import sys
from pathlib import Path
import virnuc.flows.prefect_flows.predict
from virnuc_core.encoders.checkpoint import check_models
from virnuc_core.encoders.digests import fingerprint
fingerprint(models := Path(sys.argv[1])), check_models(models)
assert "torch" not in sys.modules, "the workers alone need it; importing it takes seconds"
"""
    subprocess.run([sys.executable, "-c", program, str(models)], check=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_heads_numbers_are_finite_in_any_kind(kind: torch.dtype, odd: str, copied: Path) -> None:
    weights = copied / "head" / "model.safetensors"
    tensors = {name: tensor.to(kind) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    check_models(copied)
    save_file(tensors | {"output_layer.bias": tensors["output_layer.bias"] + float(odd)}, weights)
    with pytest.raises(WeightsError, match=r"output_layer\.bias holds NaN"):
        check_models(copied)
